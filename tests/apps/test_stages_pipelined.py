"""Stages in which models take one another's outputs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_world import FAST_DISK, cluster_of, draw_of, served, tasks_of

from lengthwise.apps.plan.draws import load_of
from lengthwise.apps.plan.evaluate import simulate_plan, spare_plans
from lengthwise.apps.plan.methods import METHODS, Effort, beam, chosen_plan, chosen_stages, greedy
from lengthwise.apps.plan.space import Space
from lengthwise.apps.plan.stages import Runs, Stages
from lengthwise.schema.app import ModelPlan

KIND = "A100-80GB"


def world(tasks, seed=0, gpus=4, fast=False):
    draw = draw_of(tasks, np.random.default_rng(seed))
    space = Space(served(len(tasks.models)), cluster_of(gpus), FAST_DISK)
    load = load_of(tasks, draw, space.specs)
    return tasks, Stages(Runs(load, space, fast=fast))


def pairs(n, **kw):
    """Each task of model 0 has a child of model 1."""
    return world(tasks_of([0] * n + [1] * n, parents=[(n + i, i) for i in range(n)]), **kw)


def back_and_forth(rows, rounds, **kw):
    """Model 0, then model 1, then model 0 again, and so on."""
    models = [m % 2 for m in range(2 * rounds) for _ in range(rows)]
    return world(tasks_of(models, parents=[(i, i - rows) for i in range(rows, len(models))]), **kw)


def ends_and_starts(tasks, stages, made):
    """(when each task ended, when its first token came in its last run), on the clock."""
    end_s, first_token_s = np.full(len(tasks), np.inf), np.full(len(tasks), np.inf)
    for staged in made:
        for m, live in staged.live.items():
            load = stages.load.models[m]
            now = (live.start_s + live.run.finish_s <= staged.end_s + 1e-6) & np.isfinite(live.run.finish_s)
            own = load.task[now]
            fresh = np.isinf(end_s[own])
            end_s[own[fresh]] = (live.start_s + live.run.finish_s)[now][fresh]
            first_token_s[own[fresh]] = (live.start_s + live.run.first_token_s)[now][fresh]
    return end_s, first_token_s


@pytest.mark.slow
@settings(max_examples=25)
@given(st.integers(1, 80), st.integers(0, 3), st.sampled_from(sorted(METHODS)), st.booleans())
def test_no_task_starts_before_its_parents_have_finished(n, seed, name, cyclic):
    tasks, stages = back_and_forth(n, 2, seed=seed) if cyclic else pairs(n, seed=seed)
    made = chosen_stages(stages, METHODS[name])
    end_s, first_token_s = ends_and_starts(tasks, stages, made)
    assert np.isfinite(end_s).all()
    assert (first_token_s <= end_s).all()
    child = np.repeat(np.arange(len(tasks)), np.diff(tasks.parent_start))
    assert (first_token_s[child] >= end_s[tasks.parent] - 1e-6).all()


def test_a_pipeline_of_two_models_is_sooner_than_one_after_the_other_and_not_sooner_than_its_parts():
    _, stages = pairs(600)
    a, b = ModelPlan(0, KIND, 1), ModelPlan(1, KIND, 1)
    both = stages.stage(stages.start(), (a, b))
    then = stages.stage(stages.after(both), (b,))
    alone = [stages.runs.run(p, stages.runs.fresh[p.model]).seconds for p in (a, b)]
    assert both.ends_by == 0
    assert then.end_s < sum(alone) + 2 * stages.space.seconds(b, "start")
    assert then.end_s > max(alone)
    assert then.end_s == both.live[1].end_s  # nothing new came: the run goes on as it was seen


def test_a_child_model_is_simulated_again_if_its_parents_change_and_finished_tasks_stay():
    _, stages = pairs(600)
    a, b, more = ModelPlan(0, KIND, 1), ModelPlan(1, KIND, 1), ModelPlan(0, KIND, 2)
    state = stages.start()
    cut = stages.stage(state, (a, b))
    half = stages.after(cut)
    half = type(half)(cut.end_s / 2, half.rest, half.live)  # the parents' plan changes in the middle
    before = half.work(1)
    then = stages.stage(half, (more, b))
    after = then.live[1].run.work_at(then.live[1].at(half.clock_s), then.live[1].start_s)
    assert then.live[1].run.key != cut.live[1].run.key
    assert (before.produced == after.produced).mean() > 0.99


def test_only_models_whose_inputs_are_available_may_run():
    _, stages = pairs(10)
    assert stages.ready(frozenset(), ()) == [0]
    assert stages.ready(frozenset(), (0,)) == [0, 1]
    assert stages.ready(frozenset({0}), ()) == [1]
    _, stages = back_and_forth(10, 2)
    assert stages.load.is_cyclic
    assert stages.ready(frozenset(), ()) == [0, 1]  # they wait for one another: either may begin


def test_models_that_wait_for_one_another_settle_and_alone_starve():
    tasks, stages = back_and_forth(30, 3)
    a, b = ModelPlan(0, KIND, 1), ModelPlan(1, KIND, 1)
    alone = stages.stage(stages.start(), (a,))
    assert alone.ends_by == -1
    assert (alone.live[0].run.produced(alone.end_s) > 0).sum() == 30  # the first round is all it can do
    both = stages.stage(stages.start(), (a, b))
    assert all(live.run.is_complete for live in both.live.values())
    end_s, _ = ends_and_starts(tasks, stages, chosen_stages(stages, greedy))
    assert np.isfinite(end_s).all()


@pytest.mark.parametrize("make", [lambda: pairs(200), lambda: back_and_forth(60, 2)])
def test_whatever_the_plan_all_is_done_when_it_is_played(make):
    tasks, stages = make()
    plans = [chosen_plan(stages, choose) for choose in METHODS.values()] + beam(stages, Effort(2, 3e4, 1e4))
    # A plan that knows nothing of the second model, one that has the child first, and none at all.
    first, second = (stages.space.plans(m)[0] for m in (0, 1))
    for planned in [*plans, ((first,),), ((second,), (first,)), ()]:
        played = simulate_plan(stages, planned, spare_plans(stages.space, planned))
        end_s, _ = ends_and_starts(tasks, stages, played.staged)
        assert np.isfinite(end_s).all()
        assert played.end_s == pytest.approx(end_s.max())
