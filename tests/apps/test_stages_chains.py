"""Tasks that come after others of their own model: chains inside a stage."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_world import cluster_of, draw_of, served, tasks_of

from lengthwise.apps.plan import Effort, PlanOptions, plan
from lengthwise.apps.plan.draws import load_of
from lengthwise.apps.plan.methods import METHODS, chosen_stages
from lengthwise.apps.plan.space import Space
from lengthwise.apps.plan.stages import Runs, Stages
from lengthwise.schema.app import ModelPlan

KIND = "A100-80GB"


def summary(chunks, evaluations=1, **kw):
    """Documents of so many chunks, one after another by model 0; each summary is evaluated by model 1."""
    models, parents = [], []
    for n in chunks:
        first = len(models)
        models += [0] * n
        parents += [(k, k - 1) for k in range(first + 1, first + n)]
        parents += [(first + n + e, first + n - 1) for e in range(evaluations)]
        models += [1] * evaluations
    tasks = tasks_of(models, prompt=400, parents=parents)
    return tasks, draw_of(tasks, np.random.default_rng(kw.pop("seed", 0)), **kw)


def world(chunks, gpus=4, fast=False, **kw):
    tasks, draw = summary(chunks, **kw)
    space = Space(served(2), cluster_of(gpus))
    load = load_of(tasks, draw, space.specs)
    return tasks, Stages(Runs(load, space, fast=fast))


@settings(max_examples=20)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.sampled_from(sorted(METHODS)), st.integers(0, 2))
def test_no_task_in_a_chain_starts_before_its_predecessor_has_finished(chunks, name, seed):
    tasks, stages = world(chunks, seed=seed)
    end_s, first_token_s = np.full(len(tasks), np.inf), np.full(len(tasks), np.inf)
    for staged in chosen_stages(stages, METHODS[name]):
        for m, live in staged.live.items():
            load, run = stages.load.models[m], live.run
            now = np.isfinite(run.finish_s) & (live.start_s + run.finish_s <= staged.end_s + 1e-6)
            now &= np.isinf(end_s[load.task])
            end_s[load.task[now]] = (live.start_s + run.finish_s)[now]
            first_token_s[load.task[now]] = (live.start_s + run.first_token_s)[now]
    assert np.isfinite(end_s).all()
    child = np.repeat(np.arange(len(tasks)), np.diff(tasks.parent_start))
    assert (first_token_s[child] >= end_s[tasks.parent] - 1e-6).all()


def test_a_single_chain_takes_what_its_links_take_one_after_another():
    _, stages = world([6])
    p = ModelPlan(0, KIND, 1)
    complete = stages.runs.run(p, stages.runs.fresh[0])
    assert (np.diff(complete.finish_s) > 0).all()
    assert complete.seconds == pytest.approx(float((complete.finish_s - np.r_[0.0, complete.finish_s[:-1]]).sum()))
    two = stages.runs.run(ModelPlan(0, KIND, 2), stages.runs.fresh[0])
    assert two.seconds == pytest.approx(complete.seconds)  # a second replica does not help a chain


def test_long_documents_leave_gpus_that_the_evaluator_takes():
    tasks, draw = summary([1] * 60 + [2] * 20 + [30], evaluations=4)
    requested = PlanOptions(effort=Effort(2, 2e5, 1e5), clock=lambda: 0.0)
    reported = plan(tasks, [draw], served(2), cluster_of(4), options=requested)
    ends = {one.name: one.planned_s for one in reported.methods}
    assert ends["lengthwise"] <= min(ends.values()) + 1e-9
    assert ends["lengthwise"] < ends["max"]
    assert any(len(stage.plans) == 2 for stage in reported.stages)  # beside one another
