"""Bayesian search over the box that branch and bound goes through, for comparison."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lengthwise.schedule import EvaluatedPoint, Perf, Performance, SearchResult, Variable
from lengthwise.search import Bayesian


def bayesian(
    perf: Performance, variables: Sequence[Variable], bound_s: float, evaluations: int, seed: int, batch_size: int = 8
) -> SearchResult:
    """The best of so many points that the tree-structured Parzen estimator proposes; it proves nothing."""
    strategy = Bayesian([{v.name: v.values for v in variables}], evaluations, seed, batch_size)
    points, calls = [np.empty((0, len(variables)), np.int64)], 0
    latency, throughput = [np.empty(0)], [np.empty(0)]
    while asked := strategy.request():
        rows = np.array([[settings[v.name] for v in variables] for settings in asked], np.int64)
        got = perf(rows)
        calls += 1
        points.append(rows)
        latency.append(got.latency_s)
        throughput.append(got.throughput_rps)
        good = meets(got, bound_s).tolist()
        scores = [float(t) if ok else None for t, ok in zip(got.throughput_rps, good, strict=True)]
        strategy.report(list(zip(asked, scores, strict=True)))
    all_points, all_perf = np.concatenate(points), Perf(np.concatenate(latency), np.concatenate(throughput))
    of = int(np.prod([len(v.values) for v in variables]))
    best, fastest = chosen(all_points, all_perf, bound_s)
    return SearchResult(best, fastest, len(all_points), of, calls, float("inf"))


def chosen(points: np.ndarray, got: Perf, bound_s: float) -> tuple[EvaluatedPoint | None, EvaluatedPoint]:
    """The best of those that meet the bound, and the fastest of all."""
    good = np.flatnonzero(meets(got, bound_s))
    order = good[np.lexsort((got.latency_s[good], -got.throughput_rps[good]))]
    best = reached(points, got, order[0]) if len(order) else None
    return best, reached(points, got, np.argmin(got.latency_s))


def meets(got: Perf, bound_s: float) -> np.ndarray:
    return (got.latency_s <= bound_s) & np.isfinite(got.latency_s)


def reached(points: np.ndarray, got: Perf, at: int) -> EvaluatedPoint:
    values = tuple(int(value) for value in points[at])
    return EvaluatedPoint(values, float(got.latency_s[at]), float(got.throughput_rps[at]))
