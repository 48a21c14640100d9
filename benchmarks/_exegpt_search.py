"""How long a choice takes, and what share of the schedules it looks at; each bound is asked of a new planner."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from _exegpt_scenarios import BOUNDS, OPT, chosen, estimator, everything, faster_transformer, planner
from _harness import machine

OVERALL = ("search_s", "points_share")


def figures(_: Path, fast: bool) -> dict[str, Any]:
    """The slowest choice, the largest share, and every choice by its model and task."""
    some = [(OPT, "s"), (OPT, "t")] if fast else list(everything())
    first = estimator(OPT, "s")
    chosen(planner(first), faster_transformer(first).bounds_s()[0])  # compiled code is loaded once
    choices = [one for served, task in some for one in asked(served, task)]
    told = {"search_s": {"choices": choices, "machine": machine()}, "points_share": {"by_strategy": shares_of(choices)}}
    return {f"exegpt.{name}_max": worst(choices, name) | told[name] for name in OVERALL}


def asked(served, task: str) -> list[dict[str, Any]]:
    """The choice under each bound, and what it took in CPU seconds of its one thread."""
    bounds_s = faster_transformer(estimator(served, task)).bounds_s()
    return [choice(served, task, name, bound_s) for name, bound_s in zip(BOUNDS, bounds_s, strict=False)]


def choice(served, task: str, name: str, bound_s: float) -> dict[str, Any]:
    start = time.process_time()
    plan = planner(estimator(served, task))
    ranged_s = time.process_time() - start
    found = chosen(plan, bound_s)
    duration_s = time.process_time() - start
    assert found is None or found.evaluated <= found.points
    evaluated = sum(side.evaluated for side in plan.sides)
    apart = by_strategy(plan.sides)
    return {
        "model": served.name,
        "task": task,
        "bound": name,
        "search_s": duration_s,
        "ranges_s": ranged_s,
        "points": sum(side.size for side in plan.sides),
        "points_share": evaluated / sum(side.size for side in plan.sides),
        "evaluated": evaluated,
        "by_strategy": apart,
    }


def by_strategy(sides) -> dict[str, dict[str, int]]:
    """Of each strategy, over its degrees: schedules there are, and how many were estimated."""
    told: dict[str, dict[str, int]] = {}
    for side in sides:
        one = told.setdefault(side.strategy.value, {"points": 0, "evaluated": 0})
        one["points"] += side.size
        one["evaluated"] += side.evaluated
    return told


def shares_of(choices: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of each strategy, which some may have none of: the largest share of its own, whose, and the middle one."""
    names = dict.fromkeys(name for one in choices for name in one["by_strategy"])
    return {name: worst(_of_strategy(choices, name), "points_share") for name in names}


def _of_strategy(choices: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    parts = [(one, one["by_strategy"][name]) for one in choices]
    return [one | part | {"points_share": part["evaluated"] / part["points"]} for one, part in parts if part["points"]]


def worst(choices: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The largest of a figure, whose it is, and the middle one."""
    ordered = sorted(choices, key=lambda one: one[name])
    most, middle = ordered[-1], ordered[len(ordered) // 2]
    of = f"{most['model']}, {most['task']}, bound {most['bound']}"
    told = {"value": most[name], "of": of, "median": middle[name], "choices_made": len(choices)}
    return told | {"evaluated": most["evaluated"], "points": most["points"]}
