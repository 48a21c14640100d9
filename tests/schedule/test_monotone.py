"""The shares of points that break monotony, counted by hand and against pairs one by one."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from monotonicity import non_monotone
from schedule_grids import Grid, min_tolerances, monotone


def row(rows, variable, tolerance):
    return next(r for r in rows if (r.variable, r.tolerance) == (variable, tolerance))


def test_dips_are_counted_by_their_depth():
    throughput = np.array([100.0, 97.0, 96.0, 92.0, 120.0])  # below 100 by 3, 4 and 8
    latency = np.array([1.0, 2.0, 3.0, 2.0, 4.0])
    grid = Grid(latency, throughput)
    rows = non_monotone(grid.perf, grid.variables)
    assert [r.throughput for r in rows] == [0.6, 0.2, 0.0]
    assert [r.latency for r in rows] == [0.2] * 3
    assert [r.points for r in rows] == [5] * 3


def test_tolerances_may_be_shares_of_a_bound():
    grid = Grid(np.array([1.0, 2.0, 3.0, 2.0]), np.array([10.0, 9.0, 11.0, 12.0]))
    rows = non_monotone(grid.perf, grid.variables, (0.1,), latency_scale_s=20.0, throughput_scale_rps=5.0)
    assert (rows[0].latency, rows[0].throughput) == (0.0, 0.25)


def test_each_variable_is_swept_with_all_combinations_of_the_others():
    throughput = np.array([[1.0, 2.0, 3.0], [0.5, 2.0, 4.0], [2.0, 1.0, 5.0]])
    grid = Grid(throughput.copy(), throughput)
    rows = non_monotone(grid.perf, grid.variables, (0.02,))
    assert row(rows, "x0", 0.02).throughput == pytest.approx(2 / 9)
    assert row(rows, "x1", 0.02).throughput == pytest.approx(1 / 9)


def test_points_that_cannot_run_are_left_out_and_gaps_are_counted():
    latency = np.array([1.0, math.inf, 3.0, math.inf])
    grid = Grid(latency, np.array([1.0, 99.0, 2.0, 0.0]))
    rows = non_monotone(grid.perf, grid.variables, (0.02,))
    assert (rows[0].latency, rows[0].throughput, rows[0].gaps, rows[0].points) == (0.0, 0.0, 0.5, 2)


def test_a_monotone_box_has_none_and_needs_no_tolerance():
    rng = np.random.default_rng(0)
    grid = Grid(monotone(rng, (5, 4, 3), "smooth"), monotone(rng, (5, 4, 3), "steps"))
    assert all(r.latency == r.throughput == 0.0 for r in non_monotone(grid.perf, grid.variables))
    least = min_tolerances(grid.perf, grid.variables)
    assert (least.throughput, least.latency) == (0.0, 0.0)


@pytest.mark.parametrize("seed", range(5))
def test_the_least_tolerances_are_those_of_the_worst_pair(seed):
    rng = np.random.default_rng(seed)
    latency, throughput = 1 + rng.random((4, 3, 3)), 1 + rng.random((4, 3, 3))
    latency[rng.random((4, 3, 3)) < 0.2] = math.inf
    grid = Grid(latency, throughput)
    least = min_tolerances(grid.perf, grid.variables)
    assert least.latency == pytest.approx(worst(latency, latency))
    assert least.throughput == pytest.approx(worst(throughput, latency))


def worst(values, latency):
    places = [p for p in np.ndindex(values.shape) if latency[p] < math.inf]
    pairs = [(x, y) for x, y in itertools.product(places, repeat=2) if all(a <= b for a, b in zip(x, y, strict=True))]
    return max(values[x] / values[y] - 1 for x, y in pairs)
