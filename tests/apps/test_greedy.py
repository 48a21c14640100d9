"""Algorithm 1, reimplemented naively, and the two heuristics of section 5."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_world import cluster_of, ensemble, served

from lengthwise.apps.plan.draws import load_of
from lengthwise.apps.plan.evaluate import simulate_plan
from lengthwise.apps.plan.methods import (
    METHODS,
    chosen_plan,
    chosen_stages,
    even_shares,
    greedy,
    max_heuristic,
    min_heuristic,
)
from lengthwise.apps.plan.space import Space
from lengthwise.apps.plan.stages import Runs, Stages


def world(counts, seed=0, gpus=4):
    tasks, draw = ensemble(counts, np.random.default_rng(seed))
    space = Space(served(len(counts)), cluster_of(gpus))
    return Stages(Runs(load_of(tasks, draw, space.specs), space))


def algorithm_1(stages, state):
    """The pseudocode, line by line."""
    n = stages.space.cluster.gpus
    best = []
    while True:
        ready = stages.ready(stages.finished(state), {p.model for p in best})
        possible = [p for m in ready for p in stages.space.plans(m)]
        groups = []
        for p in possible:
            same = [q for q in best if q.model == p.model]
            group = [q for q in best if q.model != p.model] + [p]
            gpus = sum(q.gpus for q in group)
            larger = not same or gpus > sum(q.gpus for q in best)
            if larger and gpus <= n and stages.space.fits(group):
                groups.append(tuple(sorted(group)))
        if not groups:
            break
        now = stages.stage(state, tuple(best)).throughput if best else 0.0
        gains = [stages.stage(state, g).throughput - now for g in groups]
        each = [
            gain / (sum(q.gpus for q in g) - sum(q.gpus for q in best)) for gain, g in zip(gains, groups, strict=True)
        ]
        if max(gains) < 0:
            break
        best = list(groups[int(np.argmax(each))])
    return tuple(best)


@settings(max_examples=25)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=4), st.integers(0, 3))
def test_stages_are_those_of_the_pseudocode(counts, seed):
    stages = world(counts, seed)
    state = stages.start()
    while len(stages.finished(state)) < len(counts):
        plans = greedy(stages, state)
        assert plans == algorithm_1(stages, state)
        state = stages.after(stages.stage(state, plans))


@settings(max_examples=20)
@given(st.lists(st.integers(1, 150), min_size=1, max_size=4), st.sampled_from(sorted(METHODS)))
def test_every_method_ends_and_is_played_as_it_was_built(counts, name):
    stages = world(counts)
    made = chosen_stages(stages, METHODS[name])
    assert len(made) <= len(counts)
    assert {staged.ends_by for staged in made} <= set(range(len(counts)))
    if name.endswith("no_preemption"):
        of = {}
        for staged in made:
            for plan in staged.plans:
                assert of.setdefault(plan.model, plan) == plan
    played = simulate_plan(stages, [staged.plans for staged in made], ())
    assert len({m for one in played.stages for m in [one.ends_by]} & set(range(len(counts)))) >= 1
    # Played, models may move for others, and go on where there is room; never is anything lost.
    assert played.end_s > 0
    assert sum(s.flops for s in played.staged) == pytest.approx(sum(s.flops for s in made), rel=0.03)


def test_the_max_heuristic_gives_all_gpus_to_one_model_after_another():
    made = chosen_stages(world([100, 50, 80]), max_heuristic)
    assert [len(staged.plans) for staged in made] == [1, 1, 1]
    assert all(staged.plans[0].gpus == 4 for staged in made)


def test_the_min_heuristic_runs_as_many_as_fit_and_splits_evenly():
    made = chosen_stages(world([100, 100, 100, 100, 100]), min_heuristic)
    assert [sorted(p.gpus for p in staged.plans) for staged in made] == [
        [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 2], [2, 2], [4],
    ]  # fmt: skip


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 12))
def test_shares_are_even_and_give_away_all(least, free):
    for shares in even_shares(least, free):
        assert sum(shares) == free
        assert all(share >= n for share, n in zip(shares, least, strict=True))
        given_more = [share for share, n in zip(shares, least, strict=True) if share > n]
        assert not given_more or max(given_more) - min(shares) <= 1
    assert (sum(least) > free) == (not list(even_shares(least, free)))


def test_the_same_input_gives_the_same_plan():
    assert chosen_plan(world([90, 40, 200]), greedy) == chosen_plan(world([90, 40, 200]), greedy)
