"""Whether the seconds of a log are those of its steps.

vLLM starts the clock of ``--enable-logging-iteration-details`` when it has handed a step over to what executes it. An
executor that runs the model in the scheduler's own process has computed it by then: the log has the sampling alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lengthwise.measure.calibrate._runs import Run
from lengthwise.measure.calibrate.iterations import Iterations
from lengthwise.schema.records import Status

LEAST_SEEN = 0.2
"""Share of the time between a request's tokens that its steps' seconds must make: the rest is host, which it lacks.
Of a model of 4 layers on a CPU, with much host beside it, they make a half."""


def not_of_steps(log: Iterations, runs: Sequence[Run]) -> str:
    """In words why they are not; empty where they may be, as far as the fitted requests' tokens tell."""
    logged_s, between_s = _step_s(log), _between_tokens_s(runs)
    if not logged_s < LEAST_SEEN * between_s:
        return ""
    return (
        f"by its seconds a step that decodes takes {1e3 * logged_s:.3g} ms, where the requests' tokens came "
        f"{1e3 * between_s:.3g} ms apart. vLLM's clock starts when a step was handed over: where the model runs in the "
        "scheduler's own process it is computed by then. Start vLLM with --distributed-executor-backend mp for such "
        "runs, or keep its counters (`lengthwise bench --scrape`)"
    )


def _step_s(log: Iterations) -> float:
    """Mean seconds of a step, each counted by the tokens that it decodes; infinite where none does."""
    decodes = log.decode_seqs * log.steps
    return float((decodes * log.seconds).sum() / decodes.sum()) if decodes.sum() > 0 else np.inf


def _between_tokens_s(runs: Sequence[Run]) -> float:
    """Mean seconds between tokens of the fitted requests, each counted by its tokens; 0 where none has two."""
    took_s = tokens = 0.0
    for run in runs:
        r = run.measured.records.requests
        own = run.fit & (r.status == Status.FINISHED) & (r.output_tokens > 1)
        took_s += float((r.finished_s - r.first_token_s)[own].sum())
        tokens += float((r.output_tokens - 1)[own].sum())
    return took_s / tokens if tokens and np.isfinite(took_s) else 0.0


__all__ = ["LEAST_SEEN", "not_of_steps"]
