"""Looking at every point: in lots, with ties by latency and then by place."""

from __future__ import annotations

import math

import numpy as np
import pytest
from schedule_grids import Grid

from lengthwise.schedule.optimizer import Perf, Variable, evaluate_grid, exhaustive
from lengthwise.schema.errors import InputError


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_the_size_of_the_lots_changes_nothing(chunk):
    rng = np.random.default_rng(0)
    grid = Grid(rng.random((6, 5, 4)), rng.integers(1, 5, (6, 5, 4)).astype(float))
    found = exhaustive(grid.perf, grid.variables, 0.5, chunk=chunk)
    good = [(-t, s) for t, s in zip(grid.throughput_rps.ravel(), grid.latency_s.ravel(), strict=True) if s <= 0.5]
    assert (-found.best.throughput_rps, found.best.latency_s) == min(good)
    assert found.fastest.latency_s == grid.latency_s.min()
    assert len(grid.requested) == found.evaluated == found.total == 120


def test_equal_points_are_taken_in_the_order_of_their_effect():
    grid = Grid(np.ones((3, 3)), np.ones((3, 3)))
    found = exhaustive(grid.perf, grid.variables, 1.0, chunk=2)
    assert found.best.point == (3, 7)  # the second variable lowers both as it rises
    assert found.fastest == found.best


def test_what_cannot_run_meets_no_bound():
    grid = Grid(np.array([math.inf, math.inf]), np.array([9.0, math.nan]))
    found = exhaustive(grid.perf, grid.variables, math.inf)
    assert found.best is None
    assert found.fastest.latency_s == math.inf
    assert np.isnan(evaluate_grid(grid.perf, grid.variables).throughput_rps).all()


def test_points_come_as_values_in_the_order_given():
    sent = []

    def perf(points):
        sent.extend(points.tolist())
        return Perf(np.ones(len(points)), points[:, 0].astype(float))

    variables = [Variable("batch", (4, 8, 32)), Variable("steps", (1, 2), rising=False)]
    assert exhaustive(perf, variables, 2.0).best.point == (32, 2)
    assert sent == [[4, 2], [4, 1], [8, 2], [8, 1], [32, 2], [32, 1]]


def test_numbers_out_of_range_are_refused():
    grid = Grid(np.ones(2), np.ones(2))
    with pytest.raises(InputError, match="bound"):
        exhaustive(grid.perf, grid.variables, 0.0)
    with pytest.raises(InputError, match="chunk"):
        exhaustive(grid.perf, grid.variables, 1.0, chunk=0)
