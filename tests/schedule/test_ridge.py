"""At each length of phases the largest batch of RRA that a bound allows; a choice is not below the best of them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lengthwise.schedule import Estimator, Planner, Strategy, TaskLengths
from lengthwise.schedule.planner import max_batches, phase_lengths
from lengthwise.schedule.search_space import SearchSpace


@pytest.fixture(scope="module")
def code(opt, four_a40, opt_tables):
    """Long outputs."""
    return Estimator(TaskLengths.from_preset("exegpt-g"), four_a40, opt, opt_tables)


@pytest.mark.parametrize("bound_s", [14.0, math.inf])
def test_one_request_more_does_not_meet_the_bound(code, bound_s):
    side = SearchSpace(code, Strategy.RRA, 2, worst_case=True)
    grid = np.array([(steps, groups) for steps in (3, 20, 200) for groups in (1, 2)])
    batch = max_batches(side, grid, bound_s)
    assert batch.max() > 1
    assert (side.perf(np.column_stack([batch, grid])[batch > 0]).latency_s <= bound_s).all()
    more = side.perf(np.column_stack([batch + 1, grid])).latency_s
    assert ((more > bound_s) | np.isinf(more)).all()


def test_where_nothing_meets_the_bound_there_is_no_batch(code):
    side = SearchSpace(code, Strategy.RRA, 1, worst_case=True)
    assert max_batches(side, np.array([(1, 0), (480, 0)]), 0.01).tolist() == [0, 0]


def test_tried_phase_lengths_are_within_range():
    tried = phase_lengths(50, 480)
    assert tried[0] == 1
    assert tried[-1] == 480
    assert {49, 50, 51} <= set(tried.tolist())
    assert set(range(1, 9)) <= set(tried.tolist())
    assert phase_lengths(1, 1).tolist() == [1]
    assert phase_lengths(3, 4).tolist() == [1, 2, 3, 4]


def test_a_choice_is_not_below_the_best_of_all_phases(code):
    """At the upper corner of all schedules, one iteration a phase, throughput is a third below the best."""
    best_rps = 0.0
    for tp, groups in ((1, 0), (2, 2), (4, 1)):
        side = SearchSpace(code, Strategy.RRA, tp, worst_case=True)
        grid = np.array([(steps, groups) for steps in range(1, 61)])
        batch = max_batches(side, grid, math.inf)
        rps = side.perf(np.column_stack([batch, grid])[batch > 0]).throughput_rps
        assert rps[0] < rps.max()
        best_rps = max(best_rps, rps.max())
    assert Planner(code, [1, 2, 4]).best().row.throughput_rps >= best_rps / 1.02
