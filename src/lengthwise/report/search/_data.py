"""What the page's script works on: a study as short columns of numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from lengthwise.report.search._standings import rank_text
from lengthwise.report.search._words import (
    Quantity,
    axis_labels,
    in_order,
    metric_name,
    quantity,
    scale,
    sentence,
    setting_text,
)
from lengthwise.schema.plan import Choice, Objective, Plan, Point, Standing, Study

KNOWN = (Standing.RANKED, Standing.SCOUTED)

BEYOND = 1e300
"""Stands for infinity, which JSON does not know."""

LIVE = {"requests_per_dollar": "rate", "cost_at_rate": "price", "fewest_gpus": "gpus"}
"""What an objective follows from at any load; others are known only where they were measured."""


def study_data(study: Study) -> dict[str, Any]:
    """Everything that the figures draw, five digits a number."""
    return {"plans": [_plan(plan) for plan in study.plans]}


def figure_metrics(plan: Plan) -> list[Quantity]:
    """All metrics that a point of the plan was measured by."""
    names = {name for c in plan.choices for p in load_curve(c) for name in p.values}
    return [quantity(name) for name in in_order(names)]


def load_curve(choice: Choice) -> tuple[Point, ...]:
    """All points of a choice by rate; a lone operating point is one, too."""
    if choice.at is None or choice.at in choice.points:
        return choice.points
    return tuple(sorted((*choice.points, choice.at), key=lambda point: point.rate_rps))


def usd_per_thousand(choice: Choice, point: Point) -> float:
    """What a thousand requests cost at a point's rate; for all at once, at the rate they were served."""
    rate = point.rate_rps if 0 < point.rate_rps < math.inf else point.value("requests_per_s")
    return choice.price_per_hour_usd / (3600 * rate) * 1000 if rate > 0 else math.nan


def _plan(plan: Plan) -> dict[str, Any]:
    metrics, shown = figure_metrics(plan), _shown(plan)
    labels = axis_labels(plan.axes)
    values = {key: _axis_values(plan, key) for key in plan.axes}
    reasons, left = _left_out(plan, values)
    return {
        "name": plan.name,
        "objective": _objective(plan.objective),
        "live": LIVE.get(plan.objective.name, "own"),
        "limits": [{"metric": li.metric, "bound": li.bound, "atLeast": li.at_least} for li in plan.limits],
        "axes": [{"key": k, "label": labels[k], "values": v} for k, v in values.items()],
        "metrics": [_metric(plan, metric) for metric in metrics],
        "choices": [_choice(plan, i, metrics, values) for i in shown],
        "reasons": reasons,
        "left": left,
        **_lines(plan, [plan.choices[i] for i in shown]),
        "best": 0 if plan.best else -1,
    }


def _shown(plan: Plan) -> list[int]:
    """Places of the choices that there is a number of; the others may be very many."""
    return [i for i, c in enumerate(plan.choices) if c.at or c.points or c.standing in KNOWN]


def _left_out(plan: Plan, values: dict[str, list[str]]) -> tuple[list[list[str]], list[list[int]]]:
    """Reasons, and for every other choice the place of its reason and its settings."""
    shown, reasons = set(_shown(plan)), dict[tuple[str, str], int]()
    left = []
    for choice in (c for i, c in enumerate(plan.choices) if i not in shown):
        reason = (choice.region or choice.reason, choice.reason)
        left.append([reasons.setdefault(reason, len(reasons)), *_settings(choice, values)])
    return [list(reason) for reason in reasons], left


def _settings(choice: Choice, values: dict[str, list[str]]) -> list[int]:
    """For each axis the place of the choice's value; -1 where it has none."""
    return [
        texts.index(setting_text(choice.settings[key])) if key in choice.settings else -1
        for key, texts in values.items()
    ]


def _lines(plan: Plan, shown: Sequence[Choice]) -> dict[str, Any]:
    """Frontiers and shifts; they name a choice by its key or, as tables do, by its name."""
    places = {c.name: i for i, c in enumerate(shown)} | {c.key: i for i, c in enumerate(shown)}
    frontiers = {
        name: [
            [short(t.latency_s), short(t.cost_usd), places.get(t.choice, -1), short(t.rate_rps)] for t in ts
        ]
        for name, ts in plan.frontiers.items()
    }
    shifts: dict[str, list[Any]] = {shift.metric: [] for shift in plan.shifts}
    for s in plan.shifts:
        shifts[s.metric].append([short(s.bound), short(s.objective), places.get(s.choice, -1)])
    return {"frontiers": frontiers, "shifts": shifts}


def _objective(objective: Objective) -> dict[str, Any]:
    return {"label": sentence(objective.label), "unit": objective.unit, "higher": objective.higher_is_better}


def _axis_values(plan: Plan, key: str) -> list[str]:
    """The axis' values as texts, and those that only choices have."""
    told = [*plan.axes[key], *(c.settings[key] for c in plan.choices if key in c.settings)]
    return list(dict.fromkeys(setting_text(value) for value in told))


def _metric(plan: Plan, metric: Quantity) -> dict[str, Any]:
    values = [p.value(metric.name) for c in plan.choices for p in load_curve(c)]
    factor, unit = scale(metric, _middle(values))
    return {
        "name": metric.name,
        "label": metric.label,
        "factor": factor,
        "unit": unit,
        "better": metric.better,
    }


def _middle(values: Sequence[float]) -> list[float]:
    """The upper quartile: a unit that suits most values, not the queue of the most overloaded one."""
    known = sorted(v for v in values if math.isfinite(v))
    return [known[len(known) * 3 // 4]] if known else []


def _choice(
    plan: Plan, index: int, metrics: Sequence[Quantity], values: dict[str, list[str]]
) -> dict[str, Any]:
    c = plan.choices[index]
    made: dict[str, Any] = {
        "name": c.name,
        "gpus": c.gpus,
        "price": short(c.price_per_hour_usd),
        "standing": c.standing.value,
        "rank": rank_text(plan, index),
        "settings": _settings(c, values),
        "objective": [short(c.objective.value, 9), short(c.objective.half_width, 9)],
    }
    curve = load_curve(c)
    if not curve:
        return made
    at = curve.index(c.at) if c.at else -1
    halves = [
        short(c.at.values[m.name].half_width) if c.at and m.name in c.at.values else None for m in metrics
    ]
    return made | {
        "binds": metric_name(c.binds),
        "why": c.why,
        "at": at,
        "halves": halves,
        "points": [_point(c, p, metrics) for p in curve],
    }


def _point(choice: Choice, point: Point, metrics: Iterable[Quantity]) -> list[float | int | None]:
    """Rate, cost, whether it held, and every metric."""
    values = (short(point.value(metric.name)) for metric in metrics)
    return [short(point.rate_rps), short(usd_per_thousand(choice, point)), int(point.held), *values]


def short(value: float, digits: int = 5) -> float | None:
    """So many digits of a number; null where it is not known."""
    if math.isnan(value):
        return None
    return float(f"{value:.{digits}g}") if math.isfinite(value) else math.copysign(BEYOND, value)
