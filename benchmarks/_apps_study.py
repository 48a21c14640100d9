"""One study: the planner beside SamuLLM's greedy and the heuristics, on lengths that it was not planned with."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from _apps_worlds import World, cluster

from lengthwise import engine
from lengthwise.apps.plan import DEFAULT, RequestSpec, plan
from lengthwise.apps.plan.evaluate import mean_of
from lengthwise.apps.plan.planner import CHANGE_SHARE
from lengthwise.schema.app import AppMethod, AppPlan, TaskDraw
from lengthwise.schema.errors import InternalError

TRUE_DRAWS, SEED_PLANNED, SEED_TRUE = 6, 1, 2
LEAST_DRAWS = 2
GREEDY = "samullm"
HEURISTICS = ("max", "min")
BESIDE = (GREEDY, *HEURISTICS)


@dataclass(frozen=True)
class Case:
    """A world of a study by name.

    Attributes:
        name: Of the case.
        world: What is planned.
        knows: Whether planned lengths are the true ones.
    """

    name: str
    world: World
    knows: bool = False

    @property
    def true(self) -> list[TaskDraw]:
        """Draws that plans are judged by."""
        return self.world.draws(SEED_TRUE, 1 if self.knows else TRUE_DRAWS)

    @property
    def planned(self) -> list[TaskDraw]:
        """The draw that is planned with."""
        return self.true if self.knows else self.world.draws(SEED_PLANNED, 1)


def found(case: Case, additional: Sequence[str] = BESIDE) -> AppPlan:
    """The plan; seconds of search are of one core."""
    engine.warm_up()
    asked = RequestSpec(additional=tuple(additional), clock=time.process_time)
    made = plan(
        case.world.tasks, case.planned, case.world.models, cluster(), true_draws=case.true, requested=asked,
        begin=lambda _: None,  # as a run does, which starts these engines
    )  # fmt: skip
    check(case, made)
    return made


def check(case: Case, made: AppPlan) -> None:
    """The answer: all work is in the plan, GPUs are never asked for twice, and no method is better planned."""
    ran = {plan.model for stage in made.stages for plan in stage.plans}
    if ran != set(case.world.tasks.model.tolist()):
        raise InternalError(f"{case.name}: models {sorted(ran)} run, not all that have tasks")
    for stage in made.stages:
        used = [gpu for replicas in stage.placement.values() for one in replicas for gpu in one]
        if len(used) != len(set(used)):
            raise InternalError(f"{case.name}: a GPU runs two models at once")
    mine = next(one for one in made.methods if one.name == DEFAULT)
    mine_s = (mine.planned_s + mine.lead_s) / (1.0 + CHANGE_SHARE)
    if any(one.planned_s + one.lead_s < mine_s for one in made.methods):
        raise InternalError(f"{case.name}: another method plans a shorter makespan")


def paired(one: AppMethod, made: AppPlan) -> tuple[float, float] | None:
    """95 % interval of a method's gain over the same draws of lengths; None: one draw does not tell."""
    mine = next(each for each in made.methods if each.name == made.method)
    theirs_s, ours_s = (np.array(each.makespans_s) + each.lead_s for each in (one, mine))
    if len(ours_s) < LEAST_DRAWS or one is mine:
        return None
    gain = float(theirs_s.mean() / ours_s.mean())
    off = mean_of(((theirs_s - gain * ours_s) / ours_s.mean()).tolist()).half_width  # of a ratio of means
    return gain - off, gain + off


def told(case: Case, made: AppPlan) -> dict[str, Any]:
    """What is kept of a case: seconds end to end and of the search, by method, and the estimate's error."""
    methods = {
        one.name: {
            "makespan_s": one.makespan.value,
            "half_width_s": one.makespan.half_width if one.makespan.has_interval else None,
            "planned_s": one.planned_s,
            "search_s": one.search_s,
            "lead_s": one.lead_s,
            "stages": one.stages,
            "gain": one.gain,
            "gain_ci": paired(one, made),
        }
        for one in made.methods
    }
    mine = methods[DEFAULT]
    return {
        "case": case.name,
        "tasks": len(case.world.tasks),
        "methods": methods,
        "estimate_error": mine["planned_s"] / mine["makespan_s"] - 1,
        "idle_gpu_s": {name: round(seconds, 1) for name, seconds in made.idle_s.items()},
    }


def speedups(study: str, cases: Sequence[Mapping[str, Any]], paper: Mapping[str, Any]) -> dict[str, Any]:
    """The lowest and the highest gain over each heuristic and over the greedy, with all cases in the first row."""
    rows: dict[str, Any] = {}
    for other in (*HEURISTICS, GREEDY):
        gains = {case["case"]: case["methods"][other]["gain"] for case in cases}
        for end, pick in (("lowest", min), ("highest", max)):
            name = pick(gains, key=lambda one: gains[one])
            details: dict[str, Any] = {"case": name}
            ci = next(case["methods"][other]["gain_ci"] for case in cases if case["case"] == name)
            if other in paper:
                details["paper"] = paper[other][end == "highest"]
            rows[f"apps.{study}.speedup_over_{other}_{end}"] = {
                "value": gains[name],
                "unit": "times",
                "ci": ci,
                "details": details,
            }
    rows[f"apps.{study}.cases"] = {"value": len(cases), "unit": "cases", "details": {"cases": list(cases)}}
    errors = [abs(case["estimate_error"]) for case in cases]
    rows[f"apps.{study}.estimate_error_worst"] = {"value": max(errors), "unit": "relative"}
    return rows


def studied(study: str, cases: Sequence[Case], paper: Mapping[str, Any]) -> dict[str, Any]:
    """All rows of a study."""
    return speedups(study, [told(case, found(case)) for case in cases], paper)
