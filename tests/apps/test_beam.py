"""The look ahead, and the bettering of plans."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_world import cluster_of, ensemble, served

from lengthwise.apps.plan.draws import load_of
from lengthwise.apps.plan.evaluate import simulate_plan
from lengthwise.apps.plan.methods import METHODS, STEPS, Effort, beam, chosen_plan, improve
from lengthwise.apps.plan.space import Space
from lengthwise.apps.plan.stages import Runs, Stages


def world(counts, seed=0):
    tasks, draw = ensemble(counts, np.random.default_rng(seed))
    space = Space(served(len(counts)), cluster_of(4))
    load = load_of(tasks, draw, space.specs)
    return Stages(Runs(load, space, fast=True))


def end_s(stages, planned):
    return simulate_plan(stages, planned, (), places=False).end_s


@settings(max_examples=15)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=4), st.sampled_from(sorted(METHODS)))
def test_a_plan_that_is_bettered_ends_no_later_and_all_of_its_stages_have_room(counts, name):
    stages = world(counts)
    plan = chosen_plan(stages, METHODS[name])
    better = improve(stages, plan, Effort(improve_tasks=2e4))
    assert end_s(stages, better) <= end_s(stages, plan) + 1e-9
    assert all(stages.space.fits(plans) for plans in better)


@settings(max_examples=15)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=4))
def test_a_wide_beam_ends_no_later_than_following_one_of_its_steps_throughout(counts):
    stages = world(counts)
    found = beam(stages, Effort(width=10**6, beam_tasks=1e9)) if len(counts) < 3 else beam(stages, Effort())
    ends = [end_s(stages, plan) for plan in found]
    if len(counts) < 3:  # wide enough to hold every path
        assert min(ends) <= min(end_s(stages, chosen_plan(stages, step)) for step in STEPS) + 1e-9
    assert ends


def test_without_effort_nothing_is_found_and_nothing_is_changed():
    stages = world([50, 80])
    plan = chosen_plan(stages, METHODS["max"])
    assert beam(stages, Effort(beam_tasks=0)) == []
    assert improve(stages, plan, Effort(improve_tasks=0)) == plan
