"""What a run of a schedule showed, beside what was planned."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lengthwise.gateway.decisions import Phase
from lengthwise.gateway.telemetry import Row
from lengthwise.report.schedule import tokens_said
from lengthwise.scenario.schedule_plans import PlannedRun
from lengthwise.schema.schedule_row import ScheduleRow

Floats = npt.NDArray[np.float64]
LEVEL = 0.95
"""Of the intervals."""
_WARM = 0.25
"""Share of the time in which batches fill, left out."""
_MOST_CORRELATION = 0.8
FEWEST_PHASES, FEWEST_REQUESTS = 3, 1000
"""Phases that an interval takes; requests of a run for which nothing else is said."""
_PHASES = 30
"""Of an engine that are to count: a mean's interval is then a third of a phase's deviation wide on each side."""


@dataclass(frozen=True)
class SeenNumber:
    """A number as it was observed, with its interval; NaN where too little was seen to say.

    Attributes:
        name: What it is.
        unit: In which unit; "" a count.
        planned: What was planned; NaN: nothing.
        value: What was observed.
        low: Lower end of its 95 % interval.
        high: Upper end.
    """

    name: str
    unit: str
    planned: float
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class ScheduleOutcome:
    """A schedule as it ran.

    Attributes:
        seen: Numbers beside the plan's.
        phases: Phases that were counted: with a full queue, after batches had filled.
        all_phases: All there were.
        ended: Why phases ended: how many of each.
        requests: Requests whose latency counts.
        bound_s: Latency that was to be held; infinite: none.
        held: Whether it was; None: too few requests to say.
        sure: Whether the whole interval says so.
    """

    seen: tuple[SeenNumber, ...]
    phases: int
    all_phases: int
    ended: dict[str, int]
    requests: int
    bound_s: float
    held: bool | None
    sure: bool


def schedule_outcome(
    planned: PlannedRun, phases: Sequence[Phase], rows: Sequence[Row], engines: int
) -> ScheduleOutcome:
    """What phases and requests were in the time in which the queue was full and batches had filled.

    Args:
        planned: The plan, of one engine. Its latency is held against the quantile of all latencies at the share of the
            outputs that are no longer: who has more tokens to come is served no sooner.
        phases: As the gateway told them.
        rows: Requests that are over.
        engines: That served.
    """
    row, (from_s, to_s) = planned.row, window(rows)
    steady = [one for one in phases if from_s <= one.begun_s <= to_s]
    served = [one for one in rows if one.outcome == "finished" and from_s <= one.dispatched_s <= to_s]
    latency = quantile([one.served_s for one in served], planned.share)
    seen = [
        SeenNumber("encode batch, B_E", "", row.encode_batch, *mean(_of(steady, "encode_batch"))),
        SeenNumber("decode iterations, N_D", "", row.decode_steps, *mean(_of(steady, "decode_steps"))),
        SeenNumber("decode batch, B_D", "", row.decode_batch, *mean(_of(steady, "decode_batch"))),
        SeenNumber("cycle", "s", row.cycle_s, *mean(np.array([one.ended_s - one.begun_s for one in steady]))),
        SeenNumber("throughput", "requests/s", engines * row.throughput_rps, *_rate(steady)),
        SeenNumber(f"latency of {tokens_said(planned.bound_tokens)}", "s", row.latency_s, *latency),
    ]
    held, sure = held_within(planned.bound_s, latency)
    ended: defaultdict[str, int] = defaultdict(int)
    for one in phases:
        ended[one.why] += 1
    return ScheduleOutcome(
        tuple(seen), len(steady), len(phases), dict(ended), len(served), planned.bound_s, held, sure
    )


def requests_to_count(row: ScheduleRow, engines: int = 1) -> int:
    """Requests that fill enough phases to count, behind those in which batches fill, at so many engines."""
    counted, filling = _PHASES * row.encode_batch / (1 - _WARM), (row.decode_batch + row.encode_batch) / _WARM
    return max(FEWEST_REQUESTS, engines * math.ceil(max(counted, filling)))


def mean(values: Floats) -> tuple[float, float, float]:
    """The mean of consecutive phases and its t interval, wider where neighbours are alike (Skart, 2011)."""
    n = len(values)
    if n == 0:
        return math.nan, math.nan, math.nan
    centre = float(values.mean())
    if n < FEWEST_PHASES:
        return centre, math.nan, math.nan
    half = _half_width(values - centre, n)
    return centre, centre - half, centre + half


def _half_width(off: Floats, n: int) -> float:
    """Of a mean from what values are off it."""
    from scipy.special import stdtrit

    square = float((off**2).sum())
    if square == 0:
        return 0.0
    r = min(max(float((off[1:] * off[:-1]).sum()) / square, 0.0), _MOST_CORRELATION)
    return float(stdtrit(n - 1, 0.5 + LEVEL / 2)) * math.sqrt(square / (n - 1) / n * (1 + r) / (1 - r))


def _rate(phases: Iterable[Phase]) -> tuple[float, float, float]:
    """Requests a second of all workers: of each what its phases encoded over the time that they took."""
    by_worker: defaultdict[str, list[Phase]] = defaultdict(list)
    for one in phases:
        by_worker[one.worker].append(one)
    rate, square = 0.0, 0.0
    for of in by_worker.values():
        new = _of(of, "encode_batch") + _of(of, "overdue")
        took_s = np.array([one.ended_s - one.begun_s for one in of])
        mine = float(new.sum() / took_s.sum())
        rate += mine
        square += (
            (_half_width(new - mine * took_s, len(of)) * len(of) / float(took_s.sum())) ** 2
            if len(of) >= FEWEST_PHASES
            else math.nan
        )
    half = math.sqrt(square) if by_worker else math.nan
    return (rate, rate - half, rate + half) if by_worker else (math.nan, math.nan, math.nan)


def quantile(values: Sequence[float], level: float) -> tuple[float, float, float]:
    """A quantile and the order statistics that hold it; infinite where none is high enough."""
    from scipy.stats import binom

    n, ascending = len(values), sorted(values)
    if n == 0:
        return math.nan, math.nan, math.nan
    rank = min(n, max(1, math.ceil(level * n)))
    low = int(binom.ppf((1 - LEVEL) / 2, n, level))
    high = int(binom.ppf((1 + LEVEL) / 2, n, level)) + 1
    return ascending[rank - 1], ascending[max(low, 1) - 1], ascending[high - 1] if high <= n else math.inf


def held_within(bound_s: float, latency: tuple[float, float, float]) -> tuple[bool | None, bool]:
    """Whether a latency with its interval is within a bound, None: unknown; and whether all of the interval says so."""
    value, low, high = latency
    if math.isinf(bound_s):
        return True, True
    if math.isnan(value):
        return None, False
    return value <= bound_s, high <= bound_s or low > bound_s


def window(rows: Sequence[Row]) -> tuple[float, float]:
    """From when batches had filled until the last request had come: behind it the queue runs empty."""
    if not rows:
        return math.inf, -math.inf
    first_s, last_s = min(one.arrival_s for one in rows), max(one.arrival_s for one in rows)
    return first_s + _WARM * (last_s - first_s), last_s


def _of(phases: Iterable[Phase], name: str) -> Floats:
    return np.array([getattr(one, name) for one in phases], np.float64)
