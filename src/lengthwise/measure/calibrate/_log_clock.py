"""When steps of a log ended, by the clock of a run's records.

vLLM's lines tell month, day and second of the engine's local time; ``bench`` keeps when a run began in UTC. The zone is
that in which the tokens between a run's begin and end are the run's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import numpy as np
import numpy.typing as npt

from lengthwise.measure.calibrate._runs import Run
from lengthwise.measure.calibrate.iterations import YEAR_S, Iterations, of_year_s
from lengthwise.schema.measured import BENCH

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
ZONES_S = 900.0 * np.array(sorted(range(-56, 57), key=abs))
"""By which a clock may be ahead of UTC, the nearest first."""
SECOND_S = 1.0
"""What a line does not tell: a step is of some moment of the second that is written there."""
SLACK_S = 1.0
"""By which two machines' clocks may differ, or a line may be late."""
AGREE = 0.05
"""Share of a run's tokens by which those of the log may differ in its time."""


def utc_s(log: Iterations, runs: Sequence[Run]) -> Floats | None:
    """[m] when steps were logged: seconds of a leap year in UTC; None where no line tells or none agrees with a run."""
    if log.at_s is None:
        return None
    told = np.isfinite(log.at_s)
    at_s, second = np.unique(log.at_s[told], return_inverse=True)
    decodes: Floats = np.bincount(second.reshape(-1), weights=log.decode_seqs[told]).astype(np.float64)
    agreeing = [sum(_agrees(run, at_s - zone_s, decodes) for run in runs) for zone_s in ZONES_S]
    best = int(np.argmax(agreeing))
    return log.at_s - ZONES_S[best] if agreeing[best] else None


def since_s(run: Run, at_s: Floats) -> Floats | None:
    """[m] seconds of a year (UTC) by the clock of a run's records; None where the run does not tell when it began."""
    start = run.measured.facts.get("start")
    if run.measured.source != BENCH or not isinstance(start, str):
        return None
    try:
        began = datetime.fromisoformat(start)
    except ValueError:
        return None
    if began.tzinfo is None:
        return None
    ago_s = at_s - of_year_s(began.astimezone(UTC))
    return np.asarray((ago_s + YEAR_S / 2) % YEAR_S - YEAR_S / 2)


def span_s(run: Run) -> tuple[float, float]:
    """When the first request of a run was due, and when all was over."""
    return float(np.nanmin(run.measured.records.requests.arrival_s)), run.measured.records.end_s


def within(second_s: Floats, begin_s: float, end_s: float) -> Mask:
    """[m] whether steps that were logged in these seconds may have been logged between the two moments."""
    return np.asarray((second_s + SECOND_S > begin_s) & (second_s < end_s))


def _agrees(run: Run, at_s: Floats, decodes: Floats) -> bool:
    """Whether about as many tokens were logged in the run's time as the run has, most of them surely in it."""
    second_s = since_s(run, at_s)
    if second_s is None:
        return False
    begin_s, end_s = span_s(run)
    own = float((run.workload.output_tokens - 1).sum())
    surely = decodes[(second_s >= begin_s) & (second_s + SECOND_S <= end_s)].sum()
    perhaps = decodes[within(second_s, begin_s - SLACK_S, end_s + SLACK_S)].sum()
    return bool(own > 0 and own / 2 <= surely <= own * (1 + AGREE) and perhaps >= own * (1 - AGREE))
