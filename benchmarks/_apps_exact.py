"""How far plans are from the optimum of small instances, of two classes of plans that an exact solver knows."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from _apps_study import GREEDY
from _apps_worlds import World, cluster, ensembling, nine, routing, tasks_of

from lengthwise import engine
from lengthwise.apps.plan import DEFAULT, RequestSpec, Space, best_staged, best_unpreempted, plan
from lengthwise.apps.plan.evaluate import stages_of
from lengthwise.schema.errors import InternalError

INSTANCES, GPUS = 12, 2
NAMES = (0, 6, 7)
"""Of the nine: one of 13B, one of 7B, one of 6B."""


def small(seed: int) -> World:
    """Three models, with their own shares of 200 to 3,000 requests, on two GPUs."""
    rng = np.random.default_rng((seed, 7))
    counts = rng.integers(200, 3000, len(NAMES))
    whole = ensembling(1, 256)
    served = tuple(nine()[i] for i in NAMES)
    model = np.repeat(np.arange(len(NAMES)), counts)
    tasks = tasks_of(served, model, np.full(len(model), 21), np.full(len(model), 256))
    return World(tasks, served, tuple(whole.lengths[i] for i in NAMES))


def staged(seed: int) -> dict[str, float]:
    """Gaps to the best of all staged plans (Definition 1), every one of them looked at."""
    world = small(seed)
    draws, where = world.draws(seed, 1), cluster(GPUS)
    best = best_staged(stages_of(world.tasks, draws, Space(world.models, where))[0])
    made = plan(world.tasks, draws, world.models, where, requested=RequestSpec(additional=(GREEDY, "max", "min")))
    gaps = {one.name: one.planned_s / best.makespan_s - 1 for one in made.methods}
    if min(gaps.values()) < -0.02:
        raise InternalError(f"a plan is {-min(gaps.values()):.1%} shorter than the best of all")
    return gaps


def unpreempted(world: World) -> dict[str, Any]:
    """Gaps to the best schedule without preemption, GPUs counted and not placed: a bound of that class alone."""
    draws, where = world.draws(1, 1), cluster()
    best = best_unpreempted(stages_of(world.tasks, draws, Space(world.models, where))[0])
    made = plan(world.tasks, draws, world.models, where, requested=RequestSpec(additional=(GREEDY, "max", "min")))
    gaps = {one.name: one.planned_s / best.makespan_s - 1 for one in made.methods}
    return {"gaps": gaps, "optimum_s": best.makespan_s, "bound_s": best.bound_s, "proved": best.proved}


def figures(_: Path, fast: bool) -> dict[str, Any]:
    """Mean gaps of ours and of the greedy."""
    engine.warm_up()
    gaps = [staged(seed) for seed in range(3 if fast else INSTANCES)]
    rows: dict[str, Any] = {}
    about = f"best of all staged plans, 3 models on {GPUS} GPUs, {len(gaps)} instances"
    for name, row in ((DEFAULT, "apps.gap_to_exact"), (GREEDY, "apps.gap_to_exact_greedy")):
        each = [one[name] for one in gaps]
        rows[row] = {
            "value": mean(each),
            "unit": "relative",
            "ci": (min(each), max(each)),
            "details": {"class": about, "each": each},
        }
    for name, world in (("routing", routing(known=False)), ("ensembling", ensembling(1000, 512))):
        found = unpreempted(world)
        rows[f"apps.gap_to_unpreempted_{name}"] = {
            "value": found["gaps"][DEFAULT],
            "unit": "relative",
            "details": found | {"class": "best schedule without preemption, GPUs counted, not placed"},
        }
    return rows
