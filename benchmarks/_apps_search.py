"""How long planning takes on one core: ten models over 10,000 requests, and the largest mixed application."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from _apps_study import BESIDE
from _apps_worlds import World, cluster, ensembling, mixed

from lengthwise import engine
from lengthwise.apps.plan import RequestSpec, Served, plan
from lengthwise.schema.app import AppPlan
from lengthwise.schema.errors import InternalError

REQUESTS, MODELS = 10_000, 10


def ten(requests: int) -> World:
    """The nine models and one of 70B, which share the requests evenly."""
    from dataclasses import replace

    import numpy as np

    world = ensembling(-(-requests // (MODELS - 1)), 512)
    kept = np.arange(len(world.tasks)) < requests
    model = np.arange(len(world.tasks)) % MODELS
    names = (*world.tasks.models, "llama-2-70b-chat")
    tasks = replace(world.tasks, calls=names, models=names, call=model, model=model)
    if not kept.all():
        tasks = _first(tasks, requests)
    served = (*world.models, Served("llama-2-70b-chat", "llama-2-70b"))
    return World(tasks, served, (*world.lengths, world.lengths[0]))


def _first(tasks: Any, count: int) -> Any:
    from dataclasses import replace

    columns = ("call", "model", "row", "round", "index", "prompt_tokens", "max_tokens", "known_tokens", "random_draw")
    return replace(
        tasks, **{name: getattr(tasks, name)[:count] for name in columns}, parent_start=tasks.parent_start[: count + 1]
    )


def seconds(world: World, repeats: int, clock: Callable[[], float] = time.process_time) -> dict[str, Any]:
    """Of planning anew, and that it comes out the same each time."""
    engine.warm_up()
    (draw,) = world.draws(1, 1)
    plans: list[AppPlan] = []
    spent: list[float] = []
    for _ in range(repeats):
        started_s = clock()
        plans.append(
            plan(world.tasks, [draw], world.models, cluster(), requested=RequestSpec(additional=BESIDE, clock=clock))
        )
        spent.append(clock() - started_s)
    if len({one.planned for one in plans}) != 1:
        raise InternalError("the same application was planned in two ways")
    methods = {one.name: one.search_s for one in plans[0].methods}
    return {
        "value": median(one.search_s for one in plans),
        "ci": (min(one.search_s for one in plans), max(one.search_s for one in plans)),
        "details": {"tasks": len(world.tasks), "whole_call_s": median(spent), "methods_s": methods},
    }


def figures(_: Path, fast: bool) -> dict[str, Any]:
    """CPU seconds of one core. In both the search is of all that "lengthwise" takes the best of."""
    repeats = 1 if fast else 3
    found = {"apps.search_s": seconds(ten(REQUESTS), repeats) | {"unit": "s"}}
    found["apps.search_s"]["details"]["paper_s"] = (22, 69)
    found["apps.search_nine_times_10k_s"] = seconds(ensembling(REQUESTS, 256), 1) | {"unit": "s"}
    if not fast:
        found["apps.search_mixed_s"] = seconds(mixed(500, 5000, 256), 1) | {"unit": "s"}
        found["apps.search_mixed_s"]["details"]["paper_s"] = 68
    return found
