"""Time left: the plan's clock at first, what was measured in the end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_world import World, fresh, plan, tasks_of

from lengthwise.apps.run.progress import Clock, time_left

SLACK = (0.8, 1.3)


def test_without_a_plan_the_time_left_is_unknown_before_anything_is_done():
    assert time_left(0.0, 10.0, None, SLACK) is None


def test_at_the_start_it_is_the_plan_and_at_the_end_nothing():
    assert time_left(0.0, 0.0, 100.0, (1.0, 1.0)) == (100.0, 100.0, 100.0)
    assert time_left(1.0, 50.0, 100.0, SLACK) == (0.0, 0.0, 0.0)


def test_without_a_plan_it_is_what_was_measured():
    assert time_left(0.25, 30.0, None, SLACK) == (90.0, 72.0, 117.0)


@given(st.floats(0.01, 0.99), st.floats(0.1, 1e5), st.floats(0.1, 1e5))
def test_it_is_between_the_plan_and_what_was_measured_and_within_its_interval(share, at_s, planned_s):
    left_s, low_s, high_s = time_left(share, at_s, planned_s, SLACK)
    measured_s = at_s * (1 - share) / share
    both = (measured_s, planned_s - at_s if planned_s > at_s else measured_s)
    assert min(both) * (1 - 1e-9) <= left_s <= max(both) * (1 + 1e-9)
    assert 0 <= low_s <= left_s <= high_s


def test_it_goes_on_falling_while_many_answers_are_under_way_and_none_ends():
    left = [time_left(0.75, at_s, 80.0, (1.0, 1.0), moved_s=40.0)[0] for at_s in (40.0, 45.0, 50.0)]
    assert left == pytest.approx([20.0, 15.0, 10.0])


def test_when_the_time_of_the_plan_is_over_what_was_measured_counts_and_nothing_is_promised_without_it():
    assert time_left(0.0, 100.0, 80.0, SLACK) is None
    assert time_left(0.5, 100.0, 80.0, (1.0, 1.0)) == (100.0, 100.0, 100.0)
    assert time_left(0.5, 190.0, 80.0, SLACK, moved_s=90.0) is None, "it should have ended by now"


def test_a_run_that_is_gone_on_with_measures_what_it_did_itself():
    assert time_left(0.6, 10.0, None, (1.0, 1.0), before=0.5)[0] == pytest.approx(40.0)
    assert time_left(0.5, 0.0, 100.0, (1.0, 1.0), before=0.5)[0] == pytest.approx(50.0)


def test_engines_that_start_late_are_not_taken_for_slow_ones():
    """Planned: ready after 10 s, over after 100 s. They are ready after 310 s, and then as quick as planned."""
    exactly = (1.0, 1.0)
    waiting = [time_left(0.0, at_s, 100.0, exactly, first_s=at_s, late_s=at_s - 10.0)[0] for at_s in (20.0, 300.0)]
    assert waiting == [90.0, 90.0], "the plan's time from an engine that is ready"
    for share in (0.01, 0.1, 0.5, 0.9):
        at_s = 310.0 + 90.0 * share
        left_s = time_left(share, at_s, 100.0, exactly, first_s=310.0, late_s=300.0)[0]
        assert 90.0 * (1 - share) <= left_s <= 100.0 * (1 - share)


def test_engines_that_start_late_without_a_plan_leave_it_open_until_something_was_measured():
    assert time_left(0.0, 300.0, None, SLACK, first_s=300.0, late_s=300.0) is None
    assert time_left(0.5, 330.0, None, (1.0, 1.0), first_s=300.0, late_s=300.0)[0] == pytest.approx(30.0)


def test_a_late_first_engine_extends_the_estimate_by_its_delay_only(tmp_path):
    """In virtual time, by the very snapshots that are shown."""
    tasks = tasks_of([0] * 2000)

    def shown(start_s, guide_s):
        world, seen = World(tasks, [(plan(0),)], mean=200.0, seconds=lambda _, how: start_s), []
        world.run_plan = replace(world.run_plan, ends_s=(guide_s,), ready_s=5.0)
        folder = tmp_path / str(start_s)
        folder.mkdir()
        with fresh(folder) as ledger:
            finished = world.run(ledger, monitor=seen.append, watch_s=0.25)
        return finished.seconds, seen

    planned_s, _ = shown(5.0, 1.0)
    seconds, seen = shown(500.0, planned_s)
    assert seconds == pytest.approx(planned_s + 495.0, rel=0.02)
    reported = [(one.left_s[0], seconds - one.at_s) for one in seen if one.left_s is not None and one.share < 1]
    assert len(reported) > 100
    waiting = [left_s for left_s, true_s in reported if true_s > planned_s]
    assert waiting
    assert all(left_s == pytest.approx(planned_s - 5.0, abs=5.0) for left_s in waiting)
    assert all(left_s <= planned_s + 1.0 for left_s, _ in reported), "no late start is taken for slowness"


def test_a_clock_knows_when_the_share_last_grew():
    clock = Clock(100.0)
    for now_s, share in ((101.0, 0.0), (102.0, 0.2), (105.0, 0.2), (106.0, 0.1)):
        clock.check(now_s, share)
    assert (clock.at_s, clock.moved_s, clock.share) == (6.0, 2.0, 0.2)
