"""Questions about a plan that table and page both ask."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lengthwise.report.search._words import limit_text, objective_text
from lengthwise.schema.errors import InputError
from lengthwise.schema.plan import Choice, Limit, Plan, Point, Spent, Standing, Study

MONTH_H = 730
"""Hours in a month, as clouds bill them."""


def check_study(study: Study) -> None:
    """Raises InputError when there is nothing to show or a name stands for two things."""
    if not study.plans:
        raise InputError("a report of a search needs at least one plan; the study has none")
    _unique([plan.name for plan in study.plans], "plans of a study must have names of their own")
    for plan in study.plans:
        _unique([c.key for c in plan.choices], f"choices of plan {plan.name} must have keys of their own")


def _unique(names: Sequence[str], rule: str) -> None:
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise InputError(f"{rule}; used twice: {', '.join(twice[:5])}")


def standing(plan: Plan, *kinds: Standing) -> list[Choice]:
    """The choices that came so far, in the plan's order."""
    return [choice for choice in plan.choices if choice.standing in kinds]


def rank_text(plan: Plan, index: int) -> str:
    """The rank of the choice at ``index``: "=1" where it is tied with the best, "~" where it was scouted."""
    kind = plan.choices[index].standing
    if kind is Standing.RANKED:
        return "=1" if index < plan.tied and plan.tied > 1 else f"{index + 1}"
    return "~" if kind is Standing.SCOUTED else ""


def question(plan: Plan) -> list[str]:
    """What was asked, part by part: facts, limits, objective."""
    limits = ", ".join(limit_text(limit) for limit in plan.limits) or "no limits"
    return [*(str(fact) for fact in plan.facts.values()), limits, plan.objective.label]


def tied_with_best(plan: Plan) -> list[Choice]:
    """The others that cannot be told from the best."""
    return list(plan.choices[1 : plan.tied]) if plan.best is not None else []


def spent_text(spent: Spent) -> str:
    """What the search took, in a sentence: the first three counts add up; some of each were simulated."""
    share = spent.pruned / spent.candidates if spent.candidates else 0.0
    ranked = spent.candidates - spent.pruned - spent.rejected
    reused = f" {spent.reused:,} evaluations came from an earlier run." if spent.reused else ""
    return (
        f"{spent.candidates:,} candidates: {ranked:,} ranked, {spent.pruned:,} pruned ({100 * share:.0f} %), "
        f"{spent.rejected:,} rejected; {spent.simulated:,} of them simulated. {spent.simulations:,} simulations of "
        f"{spent.requests:,} requests in {_duration(spent.seconds)}.{reused}"
    )


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


@dataclass(frozen=True)
class Miss:
    """How near a choice came: the point, the limit it breaks worst, and how many times over."""

    choice: Choice
    point: Point
    limit: Limit
    times: float


def nearest_misses(plan: Plan, count: int = 3) -> list[Miss]:
    """Choices that were simulated and broke a limit, the nearest first."""
    misses = [miss for choice in plan.choices if (miss := _miss(plan, choice)) is not None]
    return sorted(misses, key=lambda miss: miss.times)[:count]


def _miss(plan: Plan, choice: Choice) -> Miss | None:
    tried = choice.points or ((choice.at,) if choice.at else ())
    worst = [_worst(plan, choice, point) for point in tried if not point.held]
    return min((m for m in worst if m is not None), key=lambda m: m.times, default=None)


def _worst(plan: Plan, choice: Choice, point: Point) -> Miss | None:
    broken = [limit for limit in plan.limits if not limit.holds(point.value(limit.metric))]
    misses = [Miss(choice, point, limit, _times(limit, point.value(limit.metric))) for limit in broken]
    return max(misses, key=lambda m: m.times, default=None)


def _times(limit: Limit, value: float) -> float:
    over, under = (limit.bound, value) if limit.at_least else (value, limit.bound)
    return over / under if under > 0 else math.inf


def verdict(plan: Plan) -> str:
    """The answer in one line."""
    best = plan.best
    if best is None:
        return "Nothing that was tried holds the limits."
    return f"{best.name}: {objective_text(plan.objective, best.objective)}"
