"""Optima of small instances, and how far from them the others are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from optimal_plans import best_staged, best_unpreempted, durations
from plan_world import FAST_DISK, cluster_of, draw_of, ensemble, served, tasks_of

from lengthwise.apps.plan.draws import load_of
from lengthwise.apps.plan.evaluate import simulate_plan
from lengthwise.apps.plan.methods import METHODS, Effort, beam, chosen_plan, improve
from lengthwise.apps.plan.planner import PlanOptions, Search
from lengthwise.apps.plan.space import Space
from lengthwise.apps.plan.stages import Runs, Stages
from lengthwise.schema.errors import InputError


def world(counts, seed=0, gpus=2, fast=False):
    tasks, draw = ensemble(counts, np.random.default_rng(seed))
    space = Space(served(len(counts)), cluster_of(gpus))
    return Stages(Runs(load_of(tasks, draw, space.specs), space, fast=fast))


def by_lists(stages):
    """The best schedule without preemption by trying every order under every plan: an active schedule is optimal."""
    pytest.importorskip("ortools")
    models, gpus, best = range(len(stages.load.models)), stages.space.cluster.gpus, float("inf")
    for order in itertools.permutations(models):
        for picked in itertools.product(*(durations(stages, m) for m in order)):
            running, clock, free, end = [], 0, gpus, 0
            for plan, ticks in picked:
                while plan.gpus > free:
                    clock, back = min(running)
                    running.remove((clock, back))
                    free += back
                running.append((clock + ticks, plan.gpus))
                free -= plan.gpus
                end = max(end, clock + ticks)
            best = min(best, end)
    return best / 1000


@pytest.mark.parametrize("counts", [[100, 60], [200, 50, 120], [300, 20, 20, 150]])
def test_the_constraint_programme_finds_what_trying_everything_finds(counts):
    pytest.importorskip("ortools")
    stages = world(counts)
    found = best_unpreempted(stages)
    assert found.proved
    assert found.makespan_s == pytest.approx(by_lists(stages))
    assert found.bound_s <= found.makespan_s
    ends = {p.model: s for p, s in found.starts_s.items()}
    assert set(ends) == set(range(len(counts)))


@pytest.mark.parametrize("seed", range(3))
def test_no_plan_beats_the_best_of_all_staged_ones_and_the_look_ahead_is_close(seed):
    counts = [150 + 90 * seed, 60, 100]
    stages = world(counts, seed)
    best = best_staged(stages)
    ends = {
        name: simulate_plan(stages, chosen_plan(stages, choose), (), places=False).end_s
        for name, choose in METHODS.items()
    }
    for name, choose in METHODS.items():
        del choose
        assert ends[name] >= best.makespan_s * 0.999, name
    quick = world(counts, seed, fast=True)
    own = improve(quick, beam(quick, Effort())[0], Effort())
    gap = simulate_plan(stages, own, (), places=False).end_s / best.makespan_s - 1
    assert gap < 0.05
    assert gap <= ends["samullm"] / best.makespan_s - 1 + 1e-9


def test_more_stages_than_may_be_looked_at_are_refused():
    with pytest.raises(InputError, match="at most 10 stages"):
        best_staged(world([20, 20, 20]), max_stages=10)


@pytest.mark.parametrize("seed", range(3))
def test_a_plan_is_no_slower_than_one_part_of_the_graph_after_the_other(seed):
    """Two models of a chain, and three that depend on none; jointly there are more local optima."""
    rng = np.random.default_rng(seed)
    chain, others = int(rng.integers(20, 60)), [2] * 60 + [3] * int(rng.integers(20, 200)) + [4] * 30
    models = [0] * chain + [1] * chain + others
    tasks = tasks_of(models, parents=[(chain + i, i) for i in range(chain)])
    draw = draw_of(tasks, rng, mean=200.0)
    space = Space(served(5, "llama-2-13b", "opt-6.7b"), cluster_of(4), FAST_DISK)
    load = load_of(tasks, draw, space.specs)
    assert load.parts == (frozenset({2, 3, 4}), frozenset({0, 1}))

    def planned_s(load):
        return Search([Stages(Runs(load, space))], space, PlanOptions()).run_default({}).planned_s

    assert planned_s(load) <= 1.001 * sum(planned_s(load.only(part)) for part in load.parts)
