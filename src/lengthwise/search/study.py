"""Several questions side by side: what the best answer to one costs on another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from lengthwise.schema.estimate import UNKNOWN, Estimate
from lengthwise.schema.plan import Choice, Plan, Standing, Study, Swap
from lengthwise.search._run import Run


def study(name: str, plans: Sequence[Plan], runs: Sequence[Run]) -> Study:
    """The plans, and each one's winner used for the questions of the others (Vidur's Figure 1b).

    Only questions with the same objective are compared. ``runs`` are the searches that made the plans.
    """
    swaps = [
        _swap(one, plan, run)
        for one in plans
        for plan, run in zip(plans, runs, strict=True)
        if one.objective == plan.objective
        and one.best is not None
        and plan.best is not None
        and len(plans) > 1
    ]
    return Study(name, tuple(plans), tuple(swaps))


def _swap(one: Plan, other: Plan, run: Run) -> Swap:
    """The best of one plan, ranked for the question of another."""
    assert one.best is not None  # the caller has seen to it
    assert other.best is not None
    there = next((c for c in other.choices if c.key == one.best.key), None)
    if there is None:
        return Swap(one.name, other.name, UNKNOWN, math.nan)
    if there.standing in (Standing.SCOUTED, Standing.PRUNED):
        run.expect("rank", run.done.get("rank", 0) + 1)
        there = run.each("rank", [_sized(there)])[0]
    value = there.objective if there.standing is Standing.RANKED else UNKNOWN
    return Swap(one.name, other.name, value, _ratio(value, other))


def _sized(choice: Choice) -> Choice:
    """As it was before it was pruned."""
    return replace(choice, reason="", region="")


def _ratio(value: Estimate, plan: Plan) -> float:
    assert plan.best is not None
    best = plan.best.objective.value
    if plan.objective.higher_is_better:
        return best / value.value if value.value else math.nan
    return value.value / best if best else math.nan
