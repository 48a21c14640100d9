"""What preemption and known lengths bring, and what lengths of another set than planned with cost (section 5.5)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from _apps_study import GREEDY, Case, found, told
from _apps_worlds import cluster, mixed

from lengthwise import engine
from lengthwise.apps.plan import Space
from lengthwise.apps.plan.evaluate import makespans_s, stages_of
from lengthwise.schema.app import AppPlan

RETAINED = (GREEDY, f"{GREEDY}_no_preemption", "min", "min_no_preemption")
OTHER_SETS = (0.7, 0.85, 1.15, 1.3)
"""Means of the outputs of another set, over those of the set planned with."""


def other_sets(case: Case, made: AppPlan) -> dict[str, float]:
    """The estimate's error where outputs are longer or shorter on average than planned with."""
    space = Space(case.world.models, cluster())
    planned_s = next(one.planned_s for one in made.methods if one.name == made.method)
    errors = {}
    for factor in OTHER_SETS:
        truth = stages_of(case.world.tasks, case.world.draws(5, 1, factor=factor), space)
        (end_s,) = makespans_s(truth, made.planned, made.reserve)
        errors[f"{factor:g}"] = planned_s / end_s - 1
    return errors


def figures(_: Path, fast: bool) -> dict[str, Any]:
    """At limits 256 and 512, as Figure 14 has it."""
    engine.warm_up()
    rows: dict[str, Any] = {}
    for limit in (256,) if fast else (256, 512):
        world = mixed(100, 500, limit) if fast else mixed(500, 5000, limit)
        unknown = Case(f"limit {limit}, unknown lengths", world)
        known = Case(f"limit {limit}, known lengths", world, knows=True)
        made = found(unknown, RETAINED)
        rows |= _preemption(limit, told(unknown, made))
        rows[f"apps.known_over_unknown_{limit}"] = _known(unknown, known, made)
        errors = other_sets(unknown, made)
        rows[f"apps.other_set_error_{limit}"] = {
            "value": max(map(abs, errors.values())),
            "unit": "relative",
            "details": {"by_factor": errors, "paper": "6.5 % to 38.7 %, mean 25.6 %"},
        }
    return rows


def _preemption(limit: int, case: dict[str, Any]) -> dict[str, Any]:
    """How many times as long it takes end to end without."""
    methods = case["methods"]

    def whole_s(name: str) -> float:
        return float(methods[name]["makespan_s"] + methods[name]["lead_s"])

    greedy, least = f"{GREEDY}_no_preemption", "min_no_preemption"
    pairs = {
        "over_ours": (methods[greedy]["gain"], "its greedy 1.0 to 1.2"),
        "of_greedy": (whole_s(greedy) / whole_s(GREEDY), "1.0 to 1.2"),
        "of_min": (whole_s(least) / whole_s("min"), "1.3 to 1.4"),
    }
    return {
        f"apps.no_preemption_{name}_{limit}": {
            "value": value,
            "unit": "times",
            "details": {"paper": paper, "case": case},
        }
        for name, (value, paper) in pairs.items()
    }


def _known(unknown: Case, known: Case, made: AppPlan) -> dict[str, Any]:
    """Seconds planned with unknown lengths over those planned with the true ones, on the same true lengths."""
    best = found(known, RETAINED)
    space = Space(unknown.world.models, cluster())
    (blind_s,) = makespans_s(stages_of(unknown.world.tasks, known.true, space), made.planned, made.reserve)
    return {
        "value": blind_s / best.makespan.value,
        "unit": "times",
        "details": {"unknown_s": blind_s, "known_s": best.makespan.value, "paper": "1.0 to 1.1"},
    }
