"""Two runs, simulated or measured, and how far one is off the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from lengthwise.metrics import _compare_bootstrap as bootstrap
from lengthwise.metrics._compare_blocks import Column, column_of
from lengthwise.metrics._compare_bootstrap import Bootstrap
from lengthwise.metrics._compare_distance import absolute_errors, distances
from lengthwise.metrics._compare_doubts import doubts_of
from lengthwise.metrics._compare_gaps import Gaps, gaps_of
from lengthwise.metrics._compare_nothing import without_nonsense
from lengthwise.metrics._compare_rates import rates
from lengthwise.metrics._compare_result import Comparison, MetricDistance, MetricError
from lengthwise.metrics._compare_sides import Run, are_same, gaps_as_columns, runs_of
from lengthwise.metrics._describe import weighted_quantiles
from lengthwise.metrics.slo import Slo
from lengthwise.schema.errors import InputError
from lengthwise.schema.measured import Measured

Floats = npt.NDArray[np.float64]

LATENCIES = ("ttft", "tpot", "tbt", "jct", "queueing_delay", "normalized_latency")
STATS = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
_Q = np.array(list(STATS.values()))


def compare(
    a: Measured,
    b: Measured,
    *,
    paired: bool | Literal["auto"] = "auto",
    warmup_s: float = 0.0,
    slo: Slo | None = None,
    level: float = 0.95,
    draws: int = 1000,
    seed: int = 0,
) -> Comparison:
    """How far ``a`` (the prediction) is off ``b`` (the truth) in every metric and quantile.

    Intervals come from a bootstrap over blocks of consecutive requests (for rates: over spans of time), longer ones
    where neighbours are alike over long spans, and wider where few blocks are left. They say how far the error moves
    with the requests that happened to come, not how far another machine or day would lie off. Runs of the same requests
    at the same times are compared request by request, which makes them much narrower. There is none below 20 requests,
    for an error over 0 or next to nothing, where a run drifts all along (doubts say so), and for the time between
    tokens of a run that keeps neither when tokens came nor its steps.

    Args:
        a: The prediction.
        b: The truth.
        paired: Whether both are of the same requests; "auto": where lengths and arrivals are equal.
        warmup_s: Requests that arrived before are left out (but for distances of the time between tokens, and for
            its errors where no interval is known).
        slo: Limits for goodput.
        level: Confidence level.
        draws: Of the bootstrap.
        seed: Of the bootstrap: equal inputs give equal bytes.

    Raises:
        InputError: Pairs are asked for and the runs are not of as many requests, the warm-up leaves nothing,
            or ``level`` or ``draws`` cannot be.
    """
    _check(a, b, paired, level, draws)
    pairs = are_same(a.workload, b.workload) if paired == "auto" else paired
    ours, theirs = runs_of(a, b, pairs, warmup_s)
    drawn = Bootstrap(pairs, draws, seed, level)
    drawn_errors = [*_latencies(ours, theirs, drawn), *rates(ours, theirs, slo, drawn)]
    errors, vague = without_nonsense(drawn_errors)
    return Comparison(
        a=ours.side("A"),
        b=theirs.side("B"),
        paired=pairs,
        errors=errors,
        distances=tuple(_distances(ours, theirs, paired=pairs)),
        doubts=(*doubts_of(ours, theirs, paired=pairs), *_too_alike(drawn_errors, ours, theirs), *vague),
        level=level,
        draws=draws,
        warmup_s=warmup_s,
        slo=slo,
    )


def _check(a: Measured, b: Measured, paired: bool | str, level: float, draws: int) -> None:
    if not 0 < level < 1 or draws < 1:
        raise InputError(f"level must be between 0 and 1 and draws at least 1; they are {level} and {draws}")
    if paired not in (True, False, "auto"):
        raise InputError(f'paired must be true, false or "auto"; it is {paired!r}')
    if paired is True and len(a.workload) != len(b.workload):
        raise InputError(
            f"runs that are compared request by request must have as many; they have {len(a.workload)} and "
            f'{len(b.workload)}: leave paired at "auto"'
        )


def _latencies(a: Run, b: Run, drawn: Bootstrap) -> Iterator[MetricError]:
    for metric in LATENCIES:
        if metric == "tbt":
            yield from _tbt(a, b, drawn)
            continue
        ours, theirs = column_of(a.column(metric)), column_of(b.column(metric))
        counts = len(ours.values), len(theirs.values)
        if not all(counts):
            continue
        low = high = np.full(1 + len(_Q), np.nan)
        if min(counts) >= bootstrap.LEAST:
            low, high = drawn.errors(ours, theirs, _Q)
        points = [np.array([v.mean(), *np.quantile(v, _Q)]) for v in (ours.values, theirs.values)]
        yield from _errors(metric, points, low, high)


def _too_alike(errors: Sequence[MetricError], a: Run, b: Run) -> Iterator[str]:
    """That intervals are not told of runs long enough to have some, if their stretches are not independent."""
    enough = [
        metric
        for metric in ("ttft", "tpot", "jct")
        if min(np.isfinite(run.column(metric)).sum() for run in (a, b)) >= bootstrap.LEAST
    ]
    untold = [one.metric.upper() for one in errors if one.stat == "mean" and not one.has_interval]
    if told := [name for name in untold if name.lower() in enough]:
        yield (
            f"{', '.join(told)} drift through the run, which holds too few independent stretches to tell intervals: "
            "measure longer, or several times."
        )


def _errors(metric: str, points: list[Floats], low: Floats, high: Floats) -> Iterator[MetricError]:
    for i, stat in enumerate(("mean", *STATS)):
        yield MetricError(
            metric, stat, float(points[0][i]), float(points[1][i]), float(low[i]), float(high[i])
        )


def _tbt(a: Run, b: Run, drawn: Bootstrap) -> Iterator[MetricError]:
    """Of pooled gaps; with an interval where both runs tell whose they are. Only then a warm-up is left out."""
    pooled = [run.records.gaps for run in (a, b)]
    if not all(one.total for one in pooled):
        return
    points = [
        np.array([one.sum_s / one.total, *weighted_quantiles(*gaps_as_columns(one), _Q)]) for one in pooled
    ]
    low = high = np.full(1 + len(_Q), np.nan)
    known = [gaps_of(run) for run in (a, b)]
    if known[0] is not None and known[1] is not None:
        whose = [len(np.unique(row)) for _, row in (known[0], known[1])]
        if a.warmed_up or b.warmed_up:
            points = [np.array([gap.mean(), *np.quantile(gap, _Q)]) for gap, _ in (known[0], known[1])]
        if min(whose) >= bootstrap.LEAST:
            low, high = drawn.errors(_gaps(known[0], a), _gaps(known[1], b), _Q)
    yield from _errors("tbt", points, low, high)


def _gaps(gaps: Gaps, run: Run) -> Column:
    """Requests are drawn as for the other metrics, each with all its gaps."""
    return Column(*gaps, len(run.requests.arrival_s))


def _distances(a: Run, b: Run, *, paired: bool) -> Iterator[MetricDistance]:
    for metric in LATENCIES:
        if metric == "tbt":
            sides = [gaps_as_columns(run.records.gaps) for run in (a, b)]
            counts = [run.records.gaps.total for run in (a, b)]
            mape = median = float("nan")
        else:
            columns = [run.column(metric) for run in (a, b)]
            sides = [np.unique(v[np.isfinite(v)], return_counts=True) for v in columns]
            counts = [int(count.sum()) for _, count in sides]
            mape, median = absolute_errors(*columns) if paired else (float("nan"), float("nan"))
        if all(counts):
            yield MetricDistance(metric, counts[0], counts[1], *distances(sides[0], sides[1]), mape, median)
