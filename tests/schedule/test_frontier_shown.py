"""The frontier as it is shown, which is not all of it: near the least latency, at the bound of a plan, in between."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lengthwise.schedule import Estimator, Planner, Strategy, TaskLengths, build_plan, frontiers
from lengthwise.schedule.frontier import MAX_POINTS, evaluated_fronts, explore, growth_steps, non_dominated
from lengthwise.schema.errors import ScheduleError

DEGREES = (1, 2, 4)
ONE_SEARCH = 0.002
"""By what share a single search may do better than one of many: within its own tolerance."""


@pytest.fixture(scope="module", params=["exegpt-s", "exegpt-t"])
def estimator(request, opt, four_a40, opt_tables):
    return Estimator(TaskLengths.from_preset(request.param), four_a40, opt, opt_tables)


@pytest.fixture(scope="module")
def shown(estimator):
    return dict(frontiers(Planner(estimator, DEGREES)))


def had(points, bound_s):
    """What a curve shows at a bound: steps, each from its point on."""
    return max((p.row.throughput_rps for p in points if p.constrained_latency_s <= bound_s), default=0.0)


def min_s(planner):
    """The least latency there is, of all strategies, as an impossible bound finds it."""
    with pytest.raises(ScheduleError, match="least latency"):
        planner.best(1e-9)
    return min(side.evaluated_points()[1].min() for side in planner.spaces if side.variables)


@pytest.mark.parametrize("strategy", list(Strategy))
def test_near_the_least_latency_the_shown_curve_is_optimal(estimator, shown, strategy):
    alone = Planner(estimator, DEGREES, [strategy])
    points, from_s = shown[strategy.value], min_s(alone)
    assert points[0].constrained_latency_s == pytest.approx(from_s)
    for times in (1.0, 1.02, 1.05, 1.1):
        bound_s = from_s * times * (1 + 1e-9)
        assert had(points, bound_s) >= (1 - ONE_SEARCH) * alone.best(bound_s).row.throughput_rps, times


@pytest.mark.slow
@pytest.mark.parametrize("times", [1.001, 1.02, 1.05, 1.1, 1.3, 2.2, math.inf])
def test_at_the_bound_of_a_plan_the_shown_curves_have_what_the_plan_has(estimator, shown, times):
    bound_s = times * min(points[0].constrained_latency_s for points in shown.values())
    plan = build_plan(Planner(estimator, DEGREES), bound_s)
    max_rps = max(had(points, bound_s) for _, points in plan.front)
    assert max_rps == pytest.approx(plan.chosen.throughput_rps, rel=1e-8)


def test_what_a_look_at_all_chooses_is_on_the_shown_curve(estimator, shown):
    bound_s = 1.07 * shown["waa-m"][0].constrained_latency_s
    plan = build_plan(Planner(estimator, DEGREES, [Strategy.WAA_M]), bound_s, exhaustive=True)
    assert had(dict(plan.front)["waa-m"], bound_s) == pytest.approx(plan.chosen.throughput_rps, rel=1e-8)


def test_nothing_is_left_out_at_bounds_that_were_searched_and_little_between_them(estimator):
    planner = Planner(estimator, DEGREES, [Strategy.RRA])
    searched_s = explore(planner)[Strategy.RRA]
    ((_, shown),) = evaluated_fronts(planner, {Strategy.RRA: searched_s})
    complete = non_dominated(planner.spaces)
    assert len(complete) > MAX_POINTS >= len(shown)
    for bound_s in searched_s:
        assert had(shown, bound_s) == had(complete, bound_s)
    for point in complete:
        assert had(shown, point.constrained_latency_s) >= 0.97 * point.row.throughput_rps


def test_thinned_steps_lose_no_more_than_stated():
    """Throughputs by hand: from each one that is kept, the first beyond 1.5 times it, or the next to be kept."""
    assert growth_steps(np.array([1.0, 1.2, 1.5, 1.6, 2.0, 2.3, 2.6]), 1.5, {0, 1, 6}) == [0, 1, 4, 6]
