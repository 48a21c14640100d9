"""Stages of an application: nothing lost, nothing doubled, no task before its parents."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_world import FAST_DISK, cluster_of, ensemble, served

from lengthwise.apps.plan.draws import load_of
from lengthwise.apps.plan.space import Space
from lengthwise.apps.plan.stages import CURVE_POINTS, Delay, Runs, Stages
from lengthwise.schema.app import ModelPlan
from lengthwise.schema.errors import DoesNotFitError

KIND = "A100-80GB"


def world(counts, seed=0, gpus=4, fast=False, **kw):
    tasks, draw = ensemble(counts, np.random.default_rng(seed), **kw)
    space = Space(served(len(counts)), cluster_of(gpus), FAST_DISK)
    load = load_of(tasks, draw, space.specs)
    return Stages(Runs(load, space, fast=fast))


def some_plans(draw, stages, state):
    """Any valid stage."""
    left = sorted(set(range(len(stages.load.models))) - stages.finished(state))
    plans = ()
    for m in draw(st.permutations(left)):
        plan = draw(st.sampled_from(stages.space.plans(m)))
        if stages.space.fits((*plans, plan)) and (not plans or draw(st.booleans())):
            plans = (*plans, plan)
    return tuple(sorted(plans))


@settings(max_examples=40)
@given(st.data(), st.booleans())
def test_whatever_stages_are_chosen_all_tasks_end_once_and_tokens_and_time_only_grow(data, fast):
    counts = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=3))
    stages = world(counts, data.draw(st.integers(0, 3)), fast=fast)
    state, flops = stages.start(), 0.0
    produced = [work.produced for work in stages.runs.fresh]
    for _ in range(3 * len(counts)):
        if len(stages.finished(state)) == len(counts):
            break
        plans = some_plans(data.draw, stages, state)
        staged = stages.stage(state, plans)
        assert sum(p.gpus for p in plans) <= stages.space.cluster.gpus
        assert staged.end_s >= state.clock_s
        assert staged.ends_by in {p.model for p in plans}
        then, flops = stages.after(staged), flops + staged.flops
        assert stages.finished(then) >= stages.finished(state) | {staged.ends_by}
        for m, load in enumerate(stages.load.models):
            now = then.work(m)
            assert (now.produced >= produced[m]).all()  # preempted tasks keep their tokens
            assert (now.produced <= load.output).all()
            assert ((now.produced == load.output) == np.isfinite(now.completed_s)).all()
            assert (now.completed_s[np.isfinite(now.completed_s)] <= then.clock_s + 1e-6).all()
            produced[m] = now.produced
        state = then
    assert len(stages.finished(state)) == len(counts)
    complete = sum(float(load.work(load.output).sum()) for load in stages.load.models)
    # The curve that stages read their progress off has so many points; what is kept of cut tasks is whole tokens.
    assert flops == pytest.approx(complete, rel=0.05)


def test_a_continuing_run_is_not_simulated_again():
    stages = world([2000, 20])
    a, b = ModelPlan(0, KIND, 1), ModelPlan(1, KIND, 1)
    first = stages.stage(stages.start(), (a, b))
    requested = stages.runs.simulated_requests
    second = stages.stage(stages.after(first), (a,))
    assert stages.runs.simulated_requests == requested
    assert first.ends_by == 1
    assert second.end_s == first.live[0].end_s
    alone = stages.stage(stages.start(), (a,))
    assert second.end_s == alone.end_s


def test_an_interrupted_model_keeps_its_tokens_and_pays_for_loading_and_prompts_again():
    stages = world([300, 20])
    a, b, more = ModelPlan(0, KIND, 1), ModelPlan(1, KIND, 1), ModelPlan(0, KIND, 1, 2)
    state = stages.after(stages.stage(stages.start(), (a, b)))
    saved = state.work(0).produced
    assert 0 < saved.sum() < stages.load.models[0].output.sum()
    then = stages.stage(state, (more,))
    fresh = stages.stage(stages.start(), (more,))
    assert then.live[0].start_s == state.clock_s + stages.space.seconds(more, "start")
    assert then.live[0].run.seconds < fresh.live[0].run.seconds


def test_replicas_of_the_same_shape_continue_next_to_those_being_started():
    stages = world([300])
    one, three = ModelPlan(0, KIND, 1), ModelPlan(0, KIND, 3)
    state = stages.after(stages.stage(stages.start(), (one,)))
    load_s = stages.space.seconds(one, "start")
    assert stages.delay(stages.start(), three) == Delay(load_s)
    assert stages.delay(state, three) == Delay(load_s, retained=1)
    assert stages.delay(state, ModelPlan(0, KIND, 1, 2)).seconds > load_s / 2


def test_a_running_replica_continues_alone_until_others_join_and_share_the_rest():
    """As the runner does it: nothing stands still while replicas are loaded, and they do nothing before they are."""
    stages = world([40, 900], gpus=4)
    a, one, three = ModelPlan(0, KIND, 1), ModelPlan(1, KIND, 1), ModelPlan(1, KIND, 3)
    first = stages.stage(stages.start(), (a, one), {})
    state, load_s = stages.after(first), stages.space.seconds(three, "start")
    alone, joined = first.live[1], stages.stage(state, (three,)).live[1]
    joins_s = state.clock_s + load_s
    assert (joined.start_s, joined.joins_s, joined.run.plan) == (alone.start_s, joins_s, three)
    before = alone.completed_s() <= joins_s
    assert 0 < before.sum() < len(before)
    assert joined.completed_s()[before].tolist() == alone.completed_s()[before].tolist()
    made = [int(live.run.produced(live.at(joins_s)).sum()) for live in (joined, alone)]
    assert made[0] == pytest.approx(made[1], rel=0.05)
    left_s = alone.end_s - joins_s
    assert 0.3 * left_s < joined.end_s - joins_s < 0.7 * left_s
    assert stages.finished(stages.after(stages.stage(state, (three,)))) == {0, 1}


def test_a_running_replica_may_finish_before_others_are_ready():
    stages = world([40, 60], gpus=4)
    one, three = ModelPlan(1, KIND, 1), ModelPlan(1, KIND, 3)
    first = stages.stage(stages.start(), (ModelPlan(0, KIND, 1), one), {})
    alone, then = first.live[1], stages.stage(stages.after(first), (three,))
    assert then.end_s == alone.end_s < first.end_s + stages.space.seconds(three, "start")


def test_progress_read_off_the_curve_is_that_of_the_tasks():
    stages = world([400])
    run = stages.stage(stages.start(), (ModelPlan(0, KIND, 1),)).live[0].run
    complete = float(run.load.work(run.load.output).sum())
    assert run.flops(run.seconds) == pytest.approx(complete)
    for share in (0.1, 0.35, 0.8):
        at_s = share * run.seconds
        done = float(run.load.work(run.produced(at_s)).sum())
        assert run.flops(at_s) == pytest.approx(done, rel=0.02)
        assert run.time_at(run.flops(at_s)) == pytest.approx(at_s, abs=2 * run.seconds / CURVE_POINTS)


def test_one_of_many_equal_replicas_stands_for_all_within_a_few_percent(monkeypatch):
    plan = ModelPlan(0, KIND, 4)
    stages = world([2000])
    short = stages.runs.run(plan, stages.runs.fresh[0])
    assert stages.runs.simulated_requests == 500
    monkeypatch.setattr("lengthwise.apps.plan.stages.REPRESENTED_TASKS", 10**9)
    stages = world([2000])
    full = stages.runs.run(plan, stages.runs.fresh[0])
    assert stages.runs.simulated_requests == 2000
    assert short.seconds == pytest.approx(full.seconds, rel=0.05)


def test_a_rest_read_off_the_run_from_the_start_is_close_to_its_own_simulation():
    seconds = {}
    for quick in (False, True):
        stages = world([600, 150], fast=quick)
        a, b = ModelPlan(0, KIND, 1), ModelPlan(1, KIND, 1)
        state = stages.after(stages.stage(stages.start(), (a, b)))
        seconds[quick] = stages.stage(state, (ModelPlan(0, KIND, 4),)).live[0].run.seconds
    assert seconds[True] == pytest.approx(seconds[False], rel=0.1)


def test_what_has_nothing_behind_it_is_simulated_once_for_quick_looks_and_close_ones():
    close = world([600, 150])
    quick = Stages(Runs(close.load, close.space, fast=True, known=close.runs))
    plans = (ModelPlan(0, KIND, 2), ModelPlan(1, KIND, 1))
    looked = quick.stage(quick.start(), plans)
    once = 600 // 2 + 150  # one of two equal replicas stands for both
    assert (close.runs.simulated_requests, quick.runs.simulated_requests) == (once, 0)
    again = close.stage(close.start(), plans)
    assert close.runs.simulated_requests == once
    assert {m: one.end_s for m, one in looked.live.items()} == {m: one.end_s for m, one in again.live.items()}
    quick.stage(quick.after(looked), (ModelPlan(0, KIND, 4),))
    assert quick.runs.simulated_requests == 0


def test_plans_are_those_that_fit_the_memory_the_heads_and_the_islands():
    space = Space(served(1, "llama-2-70b"), cluster_of(8))
    shapes = {(p.dp, p.tp, p.pp) for p in space.plans(0)}
    two = {(dp, 2, 1) for dp in (1, 2, 3, 4)}  # 138 GB take two GPUs
    assert shapes == two | {(1, 4, 1), (2, 4, 1), (1, 8, 1)}
    small = Space(served(1, "opt-6.7b"), cluster_of(4))
    assert {(p.dp, p.tp) for p in small.plans(0)} == {(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2), (1, 4)}
    with pytest.raises(DoesNotFitError, match="must fit the GPUs"):
        Space(served(1, "llama-2-70b"), cluster_of(1)).plans(0)


def test_a_model_too_large_for_a_machine_is_piped_through_several():
    space = Space(served(1, "llama-2-70b"), cluster_of(1, 1, 1, 1))
    assert [(p.dp, p.tp, p.pp) for p in space.plans(0)] == [(1, 1, 2), (1, 1, 4), (2, 1, 2)]


def test_replicas_still_being_loaded_stay_idle_when_more_are_started_next_to_them():
    """Half of what is loaded when a stage ends is loaded half, however many replicas come to it."""
    stages = world([40, 400], gpus=4)
    a, two, three = ModelPlan(0, KIND, 1), ModelPlan(1, KIND, 2), ModelPlan(1, KIND, 3)
    start_s = stages.space.seconds(two, "start")
    first = stages.stage(stages.start(), (a, two), {1: Delay(start_s)})
    state = stages.after(first)
    assert 0 < first.end_s < start_s
    left_s = start_s - first.end_s
    assert stages.pending_s(state, three) == pytest.approx(left_s)
    second = stages.stage(state, (three,))
    assert second.live[1].start_s == start_s
    assert second.live[1].joins_s == first.end_s + start_s
    fewer = stages.stage(state, (ModelPlan(1, KIND, 1),))
    assert fewer.live[1].start_s == pytest.approx(start_s)
    assert stages.stage(state, (two,)).live[1].start_s == start_s
    cut = stages.stage(state, (ModelPlan(1, KIND, 1, 2),))
    assert cut.live[1].start_s - first.end_s == pytest.approx(stages.space.seconds(ModelPlan(1, KIND, 1, 2), "start"))
