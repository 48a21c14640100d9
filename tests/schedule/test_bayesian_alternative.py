"""Bayesian search, ExeGPT's alternative, on the control variables of RRA: it needs more estimates for the same."""

from __future__ import annotations

import numpy as np
import pytest

from lengthwise.schedule import Planner, Strategy, branch_and_bound, exhaustive
from lengthwise.search import Bayesian

BOUND_S = 5.9
"""A bound of ExeGPT's Table 6."""


def found_rps(space, evaluations, seed):
    """Return the highest throughput under the bound that Bayesian search finds, after each of so many estimates."""
    proposals = Bayesian([{v.name: v.values for v in space.variables}], evaluations, seed, 8)
    found = []
    while settings := proposals.suggest():
        points = np.array([[one[v.name] for v in space.variables] for one in settings], np.int64)
        got = space.perf_uncached(points)
        good = (got.latency_s <= BOUND_S) & np.isfinite(got.latency_s)
        scores = [float(rps) if ok else None for rps, ok in zip(got.throughput_rps, good.tolist(), strict=True)]
        found += [score or 0.0 for score in scores]
        proposals.report(list(zip(settings, scores, strict=True)))
    return np.maximum.accumulate(found)


@pytest.mark.slow
def test_twice_as_many_estimates_come_close_to_the_best(opt_estimator, opt_tables):
    spaces = Planner(opt_estimator, tuple(opt_tables), tuple(Strategy)).spaces
    space = next(one for one in spaces if one.strategy is Strategy.RRA and one.tp == 4)
    best_rps = exhaustive(space.perf_uncached, space.variables, BOUND_S).best.throughput_rps
    own = branch_and_bound(space.perf_uncached, space.variables, BOUND_S)
    assert own.best.throughput_rps == pytest.approx(best_rps, rel=own.gap + 1e-9)
    runs = [found_rps(space, 2 * own.evaluated, seed) for seed in range(2)]
    equal, double = (np.mean([run[n * own.evaluated - 1] for run in runs]) for n in (1, 2))
    print(own.evaluated, best_rps, equal, double)
    assert equal < best_rps
    assert double >= 0.99 * best_rps
