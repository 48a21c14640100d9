"""How far the measured runs reached, by the steps of their simulations."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lengthwise.measure.calibrate._runs import Run
from lengthwise.schema.cost_tables import Reach
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.records import Records, StepRecords


def reach_of(runs: Sequence[Run], simulations: Sequence[Records], deployment: Deployment) -> Reach:
    """The largest step, sequence count, chunk, context and cache content of the runs fitted to."""
    each = [_of_run(run, records, deployment) for run, records in zip(runs, simulations, strict=True)]
    names = ("tokens", "seqs", "chunk", "context", "kv_tokens")
    return Reach(**{name: max(r[name] for r in each) for name in names})


def _of_run(run: Run, records: Records, deployment: Deployment) -> dict[str, int]:
    fitted = run.fit & np.isfinite(run.seconds["jct"])
    total = (run.workload.prompt_tokens + run.workload.output_tokens)[fitted]
    context = int(total.max(initial=1))
    steps = records.steps
    if steps is None:  # too many to be kept: what the limits allow is no more than what was there
        return {"tokens": context, "seqs": 1, "chunk": context, "context": context, "kv_tokens": context}
    seqs = steps.decode_seqs + steps.prefill_seqs
    return {
        "tokens": int((steps.prefill_tokens + steps.decode_seqs).max(initial=1)),
        "seqs": int(seqs.max(initial=1)),
        "chunk": _largest_chunk(steps),
        "context": context,
        "kv_tokens": int(steps.kv_blocks.max(initial=1)) * deployment.kv.block_size,
    }


def _largest_chunk(steps: StepRecords) -> int:
    """A step of several prompts has one of their mean or more."""
    some = steps.prefill_seqs > 0
    return int(np.ceil(steps.prefill_tokens[some] / steps.prefill_seqs[some]).max(initial=1))
