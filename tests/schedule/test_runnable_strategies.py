"""What engines can run instead of a choice: of the requested strategies, and of no other."""

from __future__ import annotations

import math

import pytest

from lengthwise.schedule import Planner, Strategy, runnable
from lengthwise.schema.errors import ScheduleError

BOUND_S = 1.4


def reported(estimator, strategies, bound_s):
    planner = Planner(estimator, [1, 2, 4], strategies)
    return runnable(planner, planner.best(bound_s).row, bound_s)


@pytest.mark.parametrize("strategy", [Strategy.WAA_C, Strategy.WAA_M])
@pytest.mark.parametrize("bound_s", [4.0, 8.0, math.inf])
def test_a_requested_split_gets_no_phases(opt_estimator, strategy, bound_s):
    got = reported(opt_estimator, [strategy], bound_s)
    assert got.row.strategy == strategy
    assert got.decode is not None


def test_where_only_phases_meet_the_bound_they_are_named_but_not_used(opt_estimator):
    chosen = Planner(opt_estimator, [1, 2, 4], [Strategy.WAA_C]).best().row
    both = Planner(opt_estimator, [1, 2, 4], [Strategy.RRA, Strategy.WAA_C])
    assert runnable(both, chosen, BOUND_S).row.strategy == Strategy.RRA
    split = Planner(opt_estimator, [1, 2, 4], [Strategy.WAA_C])
    with pytest.raises(ScheduleError, match=r"No schedule of waa-c .* let rra be among the strategies"):
        runnable(split, chosen, BOUND_S)
