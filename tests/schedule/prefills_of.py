"""When prefills began in the event engine."""

from __future__ import annotations

import numpy as np

from lengthwise.engine.step_time import CostReader


def prefills_begin_s(requests, cost):
    """When each request's batch came into the first stage; it was formed before if others were in the pipeline."""
    formed_s, batch = np.unique(requests.scheduled_s, return_inverse=True)
    order = np.argsort(batch, kind="stable")
    batches = np.split(requests.prompt_tokens[order], np.cumsum(np.bincount(batch))[:-1])
    reader, free_s, begin_s = CostReader(cost), 0.0, np.empty(len(formed_s))
    for i, prompts in enumerate(batches):
        begin_s[i] = max(formed_s[i], free_s)
        free_s = begin_s[i] + reader.step(0, 0, [(int(tokens), 0) for tokens in prompts]).stages_s[0]
    return begin_s[batch]
