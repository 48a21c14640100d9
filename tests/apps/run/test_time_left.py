"""Time left: the plan's clock at first, what was measured in the end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_world import World, fresh, plan, tasks_of

from lengthwise.apps.run.progress import Clock, time_left

SLACK = (0.8, 1.3)


EXACTLY = (1.0, 1.0)


def test_without_a_plan_the_time_left_is_unknown_before_anything_is_done():
    assert time_left(0.0, 10.0, 0.0, SLACK) is None


def test_at_the_start_it_is_the_plan_and_at_the_end_nothing():
    assert time_left(0.0, 0.0, 100.0, EXACTLY) == (100.0, 100.0, 100.0)
    assert time_left(1.0, 50.0, 50.0, SLACK) == (0.0, 0.0, 0.0)


def test_without_a_plan_it_is_what_was_measured():
    assert time_left(0.25, 30.0, 0.0, SLACK) == (90.0, 72.0, 117.0)


@given(st.floats(0.01, 0.99), st.floats(0.1, 1e5), st.floats(-1e5, 1e5))
def test_it_is_between_the_plan_and_what_was_measured_and_within_its_interval(share, work_s, planned_s):
    left_s, low_s, high_s = time_left(share, work_s, planned_s, SLACK)
    measured_s = work_s * (1 - share) / share
    both = (measured_s, planned_s if planned_s > 0 else measured_s)
    assert min(both) * (1 - 1e-9) <= left_s <= max(both) * (1 + 1e-9)
    assert 0 <= low_s <= left_s <= high_s


def test_it_goes_on_falling_while_many_answers_are_under_way_and_none_ends():
    left = [time_left(0.75, 40.0, 40.0 - s, EXACTLY, still_s=s)[0] for s in (0.0, 5.0, 10.0)]
    assert left == pytest.approx([25.0, 20.0, 15.0])


def test_when_the_time_of_the_plan_is_over_what_was_measured_counts_and_nothing_is_promised_without_it():
    assert time_left(0.0, 100.0, -20.0, SLACK) is None
    assert time_left(0.5, 100.0, -20.0, EXACTLY) == (100.0, 100.0, 100.0)
    assert time_left(0.5, 90.0, -110.0, SLACK, still_s=100.0) is None, "it should have ended by now"


def test_a_run_that_is_gone_on_with_measures_what_it_did_itself():
    assert time_left(0.6, 10.0, 0.0, EXACTLY, before=0.5)[0] == pytest.approx(40.0)
    assert time_left(0.5, 0.0, 50.0, EXACTLY, before=0.5)[0] == pytest.approx(50.0)


def test_loading_that_is_still_to_come_is_added_to_what_was_measured():
    assert time_left(0.5, 100.0, 0.0, EXACTLY, later_s=60.0)[0] == pytest.approx(160.0)
    assert time_left(0.5, 100.0, 0.0, EXACTLY, later_s=60.0, still_s=60.0)[0] == pytest.approx(100.0)


def loading(start_s):
    """The seconds of each kind of switch, of which only starts take time."""
    return lambda _, how: start_s if how == "start" else 0.0


def shown(tmp_path, stages, counts, start_s, *, planned_start_s=None, **run_plan):
    """The seconds of a run whose engines load in ``start_s``, and (at, true time left, time left) of each snapshot."""
    world, seen = World(tasks_of(counts), stages, mean=200.0, seconds=loading(start_s), gpus=1), []
    if planned_start_s is not None:
        world.planned_seconds = loading(planned_start_s)
    world.run_plan = replace(world.run_plan, **run_plan)
    folder = tmp_path / f"{start_s:g} {bool(run_plan)}"
    folder.mkdir()
    with fresh(folder) as ledger:
        finished = world.run(ledger, monitor=seen.append, watch_s=0.25)
    left = [(one.at_s, finished.seconds - one.at_s, one.left_s[0]) for one in seen if one.left_s and one.share < 1]
    return finished.seconds, left


def test_a_late_first_engine_extends_the_estimate_by_its_delay_only(tmp_path):
    """In virtual time, by the very snapshots that are shown."""
    stages, counts = [(plan(0),)], [0] * 2000
    planned_s, _ = shown(tmp_path, stages, counts, 5.0)
    timed = {"planned_start_s": 5.0, "ends_s": (planned_s,), "loads_s": (5.0,)}
    seconds, reported = shown(tmp_path, stages, counts, 500.0, **timed)
    assert seconds == pytest.approx(planned_s + 495.0, rel=0.02)
    assert len(reported) > 100
    waiting = [left_s for _, true_s, left_s in reported if true_s > planned_s]
    assert waiting
    assert all(left_s == pytest.approx(planned_s - 5.0, abs=5.0) for left_s in waiting)
    assert all(left_s <= planned_s + 1.0 for _, _, left_s in reported), "no late start is taken for slowness"


@pytest.mark.slow
@pytest.mark.parametrize("late_s", [0.0, 300.0])
def test_the_loading_of_later_stages_is_part_of_the_time_left(tmp_path, late_s):
    """Two models of equal work share a GPU, one after the other; each takes longer to load than to do its work."""
    stages, counts, load_s = [(plan(0),), (plan(1),)], [0] * 2000 + [1] * 2000, 100.0
    planned_s, _ = shown(tmp_path, stages, counts, load_s)
    half_s = planned_s / 2
    assert half_s < 2 * load_s
    timed = {"planned_start_s": load_s, "ends_s": (half_s, planned_s), "loads_s": (load_s, load_s)}
    seconds, reported = shown(tmp_path, stages, counts, load_s + late_s, **timed)
    assert seconds == pytest.approx(planned_s + 2 * late_s, rel=0.05)
    in_stage = [(at_s, true_s - late_s, left_s) for at_s, true_s, left_s in reported if at_s < half_s + late_s - 2]
    working = [(true_s, left_s) for at_s, true_s, left_s in in_stage if at_s > load_s + late_s + 2]
    assert len(working) > 20
    assert all(left_s == pytest.approx(true_s, rel=0.2) for true_s, left_s in working)
    second = [
        (true_s, left_s) for at_s, true_s, left_s in reported if half_s + late_s + 2 < at_s < half_s + late_s + 99
    ]
    assert len(second) > 100
    assert all(left_s == pytest.approx(true_s - late_s, rel=0.2) for true_s, left_s in second)


def test_a_clock_knows_when_the_share_last_grew_and_how_long_engines_loaded():
    clock = Clock(100.0)
    for now_s, share, loading in ((101.0, 0.0, 1.0), (102.0, 0.2, 0.5), (105.0, 0.2, 0.0), (106.0, 0.1, 0.25)):
        clock.check(now_s, share, loading=loading, late_s=0.5)
    assert (clock.at_s, clock.moved, clock.share) == (6.0, (2.0, 1.5, 0.5), 0.2)
    assert clock.idle_s == 1.75
