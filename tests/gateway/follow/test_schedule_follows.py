"""A schedule of phases that follows the lengths served: the real watch and planner, engines in virtual time."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from follow_worlds import FollowWorld, follow_small, planned_small
from phase_worlds import Job

from lengthwise.schedule import Planner, Strategy
from lengthwise.schema.errors import InputError
from lengthwise.testing.engine_server import Limits
from lengthwise.usecases import schedule, schedule_plan
from lengthwise.usecases.schedule import question_of

BEFORE = 300


def jobs(*parts, seed=1):
    """Jobs in order; of each part (how many, shortest, longest output)."""
    dice = random.Random(seed)
    return [
        Job(dice.randint(low, high), prompt_tokens=dice.randint(100, 500))
        for count, low, high in parts
        for _ in range(count)
    ]


def world_of(follower, planned, some):
    return FollowWorld(follower, planned.phases, some, loop=100, limits=Limits(256, 1 << 16, num_blocks=1 << 16))


@pytest.fixture(scope="module")
def small():
    return planned_small()


@pytest.fixture(scope="module")
def jumped(small):
    """Outputs become three times as long after 300 requests."""
    requested, planned = small
    some = jobs((BEFORE, 2, 16), (650, 20, 34))
    return planned, world_of(follow_small(requested, planned), planned, some).run()


@pytest.mark.slow
def test_lengths_that_jump_change_the_schedule_once(jumped):
    planned, world = jumped
    assert len(world.news) == 1
    (_, before), (_, after) = world.schedules
    assert before == planned.phases
    assert (after.prefill_batch, after.decode_steps) != (before.prefill_batch, before.decode_steps)
    reported = world.news[0][1]
    assert "outputs" in reported.more.adaptation.sides
    assert abs(reported.more.adaptation.started - BEFORE) <= 30
    assert any("outputs changed" in one for one in reported.message)


def test_phases_follow_and_no_request_is_lost(jumped):
    _, world = jumped
    (_, before), (changed_s, after) = world.schedules
    was = [one.prefill_batch for one in world.between(0.0, changed_s)[1:-1]]
    now = world.between(changed_s, math.inf)
    settled = now[3:-6]
    assert max(set(was), key=was.count) == before.prefill_batch
    assert len(settled) >= 5
    assert {one.decode_steps for one in settled} == {after.decode_steps}
    assert {one.prefill_batch for one in settled} == {after.prefill_batch}
    assert not world.unserved
    assert world.most["w"] <= max(before.max_requests, after.max_requests)


def test_the_phase_under_way_is_not_cut_short(jumped):
    _, world = jumped
    (_, before), (changed_s, _) = world.schedules
    (across,) = [one for one in world.phases if one.started_s < changed_s <= one.finished_s]
    assert across.cause == "steps"
    assert across.decode_steps >= before.decode_steps, "a phase is longer if sequences must finish first"


def test_the_new_schedule_meets_the_bound_on_the_new_lengths(jumped):
    _, world = jumped
    more = world.news[0][1].more
    change = more.adaptation.change
    assert change.made
    assert change.load_s == 0
    assert more.planned.row.latency_high_s <= more.planned.bound.limit_s == 4.0
    assert (change.new.tp, change.new.tp_groups) == (2, 1) or change.new.tp_groups == 0
    assert more.planned.phases.prefill_batch == change.new.prefill_batch


def test_lengths_that_stay_leave_the_schedule_alone(small):
    requested, planned = small
    world = world_of(follow_small(requested, planned), planned, jobs((1200, 2, 16), seed=5)).run()
    assert world.news == []
    assert world.follower.evidence < 100
    assert len(world.schedules) == 1
    assert not world.unserved


def test_the_planned_batch_does_not_exceed_the_engine_slots(small, jumped):
    requested, planned = small
    max_num_seqs = math.ceil(planned.row.decode_batch)
    follower = follow_small(requested, planned, max_num_seqs=max_num_seqs)
    world = world_of(follower, planned, jobs((BEFORE, 2, 16), (250, 20, 34))).run()
    after, roomy = world.schedules[-1][1], jumped[1].schedules[-1][1]
    assert len(world.schedules) == 2
    assert after.max_requests <= max_num_seqs
    assert after.decode_batch <= max_num_seqs < roomy.decode_batch, "max_num_seqs is the limit that binds"


@pytest.mark.slow
def test_means_that_prefills_are_resized_to_follow_a_schedule_that_is_left():
    requested, planned = planned_small("schedule.latency_bound='20s'", "schedule.threshold=0.2")
    follower = follow_small(requested, planned, min_gain=1e6)
    some = jobs((BEFORE, 2, 16), (300, 2, 16))
    for job in some[BEFORE:]:
        job.prompt_tokens -= 60
    world = world_of(follower, planned, some).run()
    after = world.schedules[-1][1]
    assert not world.news[0][1].more.adaptation.change.made
    assert after.prefill_batch == planned.phases.prefill_batch
    assert after.mean_prompt_tokens == pytest.approx(planned.phases.mean_prompt_tokens - 60, rel=0.1)
    assert after.threshold == 0.2


def test_a_change_that_requires_loading_is_reported_but_not_made(small):
    """Two stages run where one of TP 2 is better: the layout stays, the better one is reported with its cost."""
    requested, best = small
    planner = Planner(question_of(requested).planner.estimator, [1], [Strategy.RRA])
    row = planner.best(best.bound.limit_s).row
    planned = replace(best, row=row, phases=schedule_plan.phases_of(row, schedule.task_of(requested)))
    world = world_of(follow_small(requested, planned), planned, jobs((BEFORE, 2, 16), (250, 20, 34))).run()
    reported = world.news[0][1]
    change, after = reported.more.adaptation.change, world.schedules[-1][1]
    runs = change.new if change.made else change.retained
    assert (runs.tp_groups, change.load_s) == (0, 0)
    assert (after.prefill_batch, after.decode_steps) == (runs.prefill_batch, runs.decode_steps)
    better = change.elsewhere
    assert (better.row.tp, better.row.tp_groups, better.storage) == (2, 1, "dram")
    assert better.row.throughput_rps > 1.02 * runs.throughput_rps
    assert better.load_s == pytest.approx(2 * 12.85e9 / 2 / 4.9e9, rel=0.05), "half of the weights to each GPU"
    assert better.repaid_s == pytest.approx(
        better.load_s * better.row.throughput_rps / (better.row.throughput_rps - runs.throughput_rps)
    )
    (stated,) = [one for one in reported.message if one.startswith("A better schedule needs other weights in memory: ")]
    assert better.row.words in stated
    assert "without service to load from host memory, repaid after" in stated


def test_a_schedule_that_does_not_fit_is_refused_before_anything_runs(small):
    requested, planned = small
    with pytest.raises(InputError, match="must fit the GPUs"):
        follow_small(requested, replace(planned, row=replace(planned.row, prefill_batch=1 << 20)))
