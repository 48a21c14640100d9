"""Engines that serve the same models, with their requests: each pool has a queue of its own."""

from __future__ import annotations

import numpy as np

from lengthwise.gateway.observe.trace import Trace

LEAST = 50
"""Smaller pools say nothing and are left out."""


def pools_of(trace: Trace) -> list[Trace]:
    """The parts of a trace, joined where an engine serves several models or a model runs on several engines.

    All of it where no part is large enough.
    """
    lead = list(range(len(trace.workers)))

    def leader(worker: int) -> int:
        while lead[worker] != worker:
            worker = lead[worker]
        return worker

    for model in np.unique(trace.model):
        workers = np.unique(trace.worker[trace.model == model]).tolist()
        for other in workers[1:]:
            lead[leader(other)] = leader(workers[0])
    pool = np.array([leader(worker) for worker in trace.worker.tolist()])
    parts = [trace.take(np.flatnonzero(pool == one)) for one in np.unique(pool)]
    return [part for part in parts if len(part) >= LEAST] or [trace]
