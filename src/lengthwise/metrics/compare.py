"""Two runs, simulated or measured, and how far one is off the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
import numpy.typing as npt

from lengthwise.metrics import _compare_bootstrap as bootstrap
from lengthwise.metrics._compare_bootstrap import Bootstrap
from lengthwise.metrics._compare_distance import absolute_errors, distances
from lengthwise.metrics._compare_doubts import doubts_of
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

    Intervals come from a bootstrap over blocks of consecutive requests (for rates: over spans of time). They
    say how far the error moves with the requests that happened to come, not how far another run of the same
    engine would lie off. Runs of the same requests at the same times are compared request by request, which
    makes them much narrower. There is none below 20 requests, for quantiles of the time between tokens, whose
    gaps are pooled, and for an error over 0.

    Args:
        a: The prediction.
        b: The truth.
        paired: Whether both are of the same requests; "auto": where lengths and arrivals are equal.
        warmup_s: Requests that arrived before are left out (but for the time between tokens).
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
    rows = len(ours.requests.arrival_s), len(theirs.requests.arrival_s)
    drawn = Bootstrap(*rows, pairs, draws, seed)
    errors = [*_latencies(ours, theirs, drawn, level), *rates(ours, theirs, slo, drawn, level)]
    return Comparison(
        a=ours.side("A"),
        b=theirs.side("B"),
        paired=pairs,
        errors=tuple(errors),
        distances=tuple(_distances(ours, theirs, paired=pairs)),
        doubts=doubts_of(ours, theirs, paired=pairs),
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


def _latencies(a: Run, b: Run, drawn: Bootstrap, level: float) -> Iterator[MetricError]:
    weights_a, weights_b = drawn.weights()
    for metric in LATENCIES:
        if metric == "tbt":
            yield from _tbt(a, b)
            continue
        values = a.column(metric), b.column(metric)
        known = [v[np.isfinite(v)] for v in values]
        if not all(map(len, known)):
            continue
        low = high = np.full(1 + len(_Q), np.nan)
        if min(map(len, known)) >= bootstrap.LEAST:
            off_a = bootstrap.resampled(values[0], weights_a, _Q)
            off_b = bootstrap.resampled(values[1], weights_b, _Q)
            low, high = bootstrap.interval(off_a, off_b, level)
        points = [np.array([v.mean(), *np.quantile(v, _Q)]) for v in known]
        yield from _errors(metric, points, low, high)


def _errors(metric: str, points: list[Floats], low: Floats, high: Floats) -> Iterator[MetricError]:
    for i, stat in enumerate(("mean", *STATS)):
        yield MetricError(
            metric, stat, float(points[0][i]), float(points[1][i]), float(low[i]), float(high[i])
        )


def _tbt(a: Run, b: Run) -> Iterator[MetricError]:
    gaps = [run.records.gaps for run in (a, b)]
    if all(one.total for one in gaps):
        unknown = np.full(1 + len(_Q), np.nan)
        points = [
            np.array([one.sum_s / one.total, *weighted_quantiles(*gaps_as_columns(one), _Q)]) for one in gaps
        ]
        yield from _errors("tbt", points, unknown, unknown)


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
