"""The page and the JSON file of a search for deployments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

from lengthwise.report import search_text as text
from lengthwise.report.curves import json_number
from lengthwise.report.formatting import TIMES, UNKNOWN, amount, capitalized, counted
from lengthwise.report.html_page import Row, TableCell, write_page
from lengthwise.report.json_file import json_text, plain
from lengthwise.report.search_text import MONTH_H
from lengthwise.schema.estimate import UNKNOWN as NO_VALUE
from lengthwise.schema.files import write_atomic
from lengthwise.schema.metric_names import Metric, metric_of, scale
from lengthwise.schema.plan import Choice, Plan, Point, Status, Study, Trade, limit_text

BARS = 6  # configurations of the ranking that are drawn next to the answer
NAMED = 4  # tied configurations and reasons that are named
SHOWN = 500  # simulated configurations on the page, of all questions together
LISTED = 500  # rejected or pruned configurations that are listed; the table of reasons counts all
DOLLARS = "$\N{NARROW NO-BREAK SPACE}"
INFINITE = 1e300  # stands for infinity, which JSON does not have
LIVE = {"requests_per_dollar": "rate", "cost_at_rate": "price", "fewest_gpus": "gpus"}
"""The number from which an objective follows at any load. Other objectives are only known at the operating point."""


def write_search_html(path: Path | str, study: Study) -> None:
    """Write a self-contained HTML page of a search.

    Raises:
        InputError: There is no plan, or two plans or choices have the same name.
        MissingExtraError: jinja2 is not installed.
        OutputError: The file cannot be written.
    """
    text.check_study(study)
    plans = study.plans
    first, *others = (plan.metadata for plan in plans)
    shared = {key: value for key, value in first.items() if all(one.get(key) == value for one in others)}
    objectives = dict.fromkeys(plan.objective.label for plan in plans)
    questions = [f"{len(plans)} questions"] if len(plans) > 1 else []
    candidates = sum(plan.effort.candidates for plan in plans)
    shown = [_shown(plan, SHOWN // len(plans)) for plan in plans]
    write_page(
        path,
        "search",
        data={"plans": list(map(_plan_columns, plans, shown))},
        heading=study.name or plans[0].name,
        metadata=[*map(str, shared.values()), *objectives, *questions, counted(candidates, "candidate")],
        answers=[_answer(plan, shared) for plan in plans],
        listings=[_listing(plan, some, LISTED // len(plans)) for plan, some in zip(plans, shown, strict=True)],
        names=[plan.name for plan in plans],
        swaps=_swap_rows(study) if len(plans) > 1 and study.swaps else [],
        has_axes=any(len(plan.axes) > 1 for plan in plans),
        has_shifts=any(plan.shifts for plan in plans),
        level=f"{100 * plans[0].level:g} %",
    )


def search_columns(plan: Plan) -> dict[str, Any]:
    """Return a plan for an interactive page: its answer, the columns of its configurations, and why others lose."""
    shown = _shown(plan, SHOWN)
    listing = _listing(plan, shown, LISTED)
    answer = _answer(plan, {})
    best = answer.pop("best")
    return {
        "answer": answer | {"name": best.name if best else None},
        "columns": _plan_columns(plan, shown),
        "groups": listing["excluded_groups"],
        "others": listing["excluded"],
    }


def _simulated(plan: Plan) -> list[int]:
    ran = (Status.RANKED, Status.SCOUTED)
    return [i for i, choice in enumerate(plan.choices) if choice.at or choice.points or choice.status in ran]


def _shown(plan: Plan, limit: int) -> list[int]:
    """Return indices of at most ``limit`` choices: the best, those of fronts and of other limits, then others."""
    named = {trade.choice for trades in plan.frontiers.values() for trade in trades} | {s.choice for s in plan.shifts}
    is_other = {i: i > 0 and named.isdisjoint((plan.choices[i].name, plan.choices[i].key)) for i in _simulated(plan)}
    return sorted(sorted(is_other, key=lambda i: (is_other[i], i))[:limit])


def _answer(plan: Plan, shared: dict[str, str]) -> dict[str, Any]:
    own = [str(value) for key, value in plan.metadata.items() if key not in shared]
    question = [*own, *map(limit_text, plan.limits)]
    card: dict[str, Any] = {"name": plan.name, "question": question, "effort": text.effort_text(plan.effort)}
    best = card["best"] = plan.best
    if best is None:
        groups = sorted(plan.excluded_groups, key=lambda group: -group.count)[:NAMED]
        return card | {
            "no_answer": text.NO_ANSWER,
            "misses": [(miss.choice.name, text.miss_text(miss)) for miss in text.nearest_misses(plan)],
            "reasons": [(f"{group.count:,}", group.name, group.example) for group in groups],
        }
    value, half = text.value_texts(best.objective)
    key_values = {
        "GPUs": text.hardware_text(plan, best),
        "Per hour": f"{DOLLARS}{best.price_per_hour_usd:,.2f}",
        f"Per month of {MONTH_H} h": f"{DOLLARS}{best.price_per_hour_usd * MONTH_H:,.0f}",
    }
    if math.isfinite(best.capacity_rps.value):
        key_values["Capacity"] = f"{text.estimate_text(best.capacity_rps)} requests/s"
    if (cost := text.output_token_cost(best)).value > 0:
        at = "" if plan.objective.name == "makespan" else ", at the rate"
        at = ", at the capacity" if math.isfinite(best.capacity_rps.value) else at
        key_values[f"Per M output tokens{at}"] = f"{DOLLARS}{text.estimate_text(cost)}"
    if math.isfinite(best.capacity_rps.value) and best.at is not None:
        key_values["Metrics"] = f"at {amount(best.at.rate_rps)} requests/s, the lower end of the capacity"
    for name in text.prefix_cache_metrics([best.at]):
        assert best.at is not None
        key_values[metric_of(name).label] = text.metric_text(name, best.at.value(name))
    if best.bottleneck.binds:
        key_values["Bound by"] = text.binding_text(plan, best)
    tied = [choice.name for choice in plan.choices[1 : plan.tied]]
    more = f" and {len(tied) - NAMED:,} more" if len(tied) > NAMED else ""
    tied_text = (
        f"Tied with it, by sampling or by the cost model's error: {', '.join(tied[:NAMED])}{more}." if tied else ""
    )
    return card | {
        "value": value,
        "half": half,
        "unit": plan.objective.unit,
        "objective": capitalized(plan.objective.label),
        "hint": "higher is better" if plan.objective.higher_is_better else "lower is better",
        "key_values": key_values,
        "tied": tied_text or ("No other configuration is tied with it." if len(plan.choices) > 1 else ""),
        "reasons": [*plan.reasons, *([best.bottleneck.cause] if best.bottleneck.cause else []), *plan.notes],
        "bars": _bars(plan),
    }


def _bars(plan: Plan) -> list[dict[str, Any]]:
    first = [(i, c) for i, c in enumerate(plan.choices[:BARS]) if math.isfinite(c.objective.value)]
    highs = (end for _, c in first for end in (c.objective.value, c.objective.high, c.objective.model_high))
    largest = max(filter(math.isfinite, highs), default=1.0)

    def share(value: float) -> float:
        return 100 * max(0.0, value) / largest if largest > 0 else 0.0

    bars = []
    for i, choice in first:
        o, leads = choice.objective, i < max(plan.tied, 1)
        spans = [("model-span", o.model_low, min(o.model_high, largest))] if o.has_model_interval else []
        spans += [("whisker", o.low, o.high)] if o.half_width > 0 else []
        bars.append(
            {
                "rank": text.rank_text(plan, i),
                "name": choice.name,
                "value": text.value_texts(o)[0],
                "width": share(o.value),
                "colour": "var(--good)" if leads else "var(--faint)",
                "spans": [(css, share(low), share(high) - share(low)) for css, low, high in spans],
                "leads": leads,
            }
        )
    return bars


def _swap_rows(study: Study) -> list[tuple[str, list[tuple[str, str, float]]]]:
    """Return (name, cells) for each plan, with a cell (text, CSS class, heat in percent) for every plan."""

    def cell(ratio: float | None) -> tuple[str, str, float]:
        if ratio is None:
            return UNKNOWN, "", 0.0
        if math.isnan(ratio):
            return "breaks a limit", "worse", 0.0
        return f"{ratio:.2f} {TIMES}", "", min(60.0, max(0.0, 60 * math.log2(ratio))) if ratio > 0 else 0.0

    return [(p.name, list(map(cell, row))) for p, row in zip(study.plans, text.swap_ratios(study), strict=True)]


def _listing(plan: Plan, shown: Sequence[int], listed: int) -> dict[str, Any]:
    ran = [(i, choice) for i, choice in text.simulated(plan) if i in shown]
    has_capacity = any(math.isfinite(c.capacity_rps.value) for _, c in ran)
    limited = {limit.metric: limit for limit in plan.limits}
    metrics = [*limited, *text.prefix_cache_metrics(c.at for _, c in ran)]
    scales = [scale(metric_of(name), [c.at.value(name) for _, c in ran if c.at]) for name in metrics]
    metric_heads = [f"{metric_of(name).label} {unit}" for name, (_, unit) in zip(metrics, scales, strict=True)]
    heads = ["configuration", "rank", "GPUs", "$/h", "$/month", text.objective_head(plan.objective)]
    rows: list[tuple[bool, Row]] = []
    for index, choice in ran:
        estimates = [(choice.objective, ""), *([(choice.capacity_rps, "")] if has_capacity else [])]
        for name, (factor, _) in zip(metrics, scales, strict=True):
            e = choice.at.values.get(name, NO_VALUE) if choice.at else NO_VALUE
            css = "binds" if name in limited and text.is_bound_by(choice, limited[name]) else ""
            estimates.append((e.scaled(factor), css))
        at_rps = choice.at.rate_rps if choice.at else math.nan
        numbers = [_sortable(e.value, *text.value_texts(e), css=css) for e, css in estimates]
        numbers[1 + has_capacity : 1 + has_capacity] = [_sortable(at_rps, amount(at_rps))] * has_capacity
        cells: Row = [
            choice.name,
            _sortable(index, text.rank_text(plan, index)),
            _sortable(choice.gpus, f"{choice.gpus:,}"),
            _sortable(choice.price_per_hour_usd, f"{choice.price_per_hour_usd:,.2f}"),
            _sortable(choice.price_per_hour_usd, f"{choice.price_per_hour_usd * MONTH_H:,.0f}"),
            *numbers,
            text.metric_name(choice.bottleneck.binds) or UNKNOWN,
            _sortable(choice.simulations, f"{choice.simulations:,}"),
        ]
        rows.append((choice.status is Status.SCOUTED, cells))
    labels = text.axis_labels(plan.axes)
    groups = []
    for group in sorted(plan.excluded_groups, key=lambda r: -r.count):
        shared = "; ".join(
            f"{labels.get(key, key)}: {', '.join(map(text.setting_text, values))}"
            for key, values in group.settings.items()
        )
        groups.append([group.name, f"{group.count:,}", shared or UNKNOWN, group.example])
    excluded = [c for c in plan.choices if c.status in (Status.REJECTED, Status.PRUNED)]
    reasons = [[c.name, c.status.value, c.exclusion.reason or c.exclusion.group] for c in excluded[:listed]]
    return {
        "heads": [*heads, *(["req/s", "at req/s"] if has_capacity else []), *metric_heads, "bound by", "runs"],
        "rows": rows,
        "excluded_groups": groups,
        "excluded": reasons,
        "num_excluded": len(excluded),
        "num_others": len(_simulated(plan)) - len(shown),
    }


def _sortable(value: float, shown: str, interval: str = "", css: str = "") -> TableCell:
    return TableCell(shown, interval, css=css, sort=f"{value:.10g}" if math.isfinite(value) else "")


def finite_number(value: float, digits: int = 5) -> float | None:
    """Return ``value`` with ``digits`` significant digits, ``INFINITE`` for infinity, or None if it is unknown."""
    return math.copysign(INFINITE, value) if math.isinf(value) else json_number(value, digits)


def load_curve(choice: Choice) -> tuple[Point, ...]:
    """Return the points of a choice ordered by rate, including the operating point."""
    if choice.at is None or choice.at in choice.points:
        return choice.points
    return tuple(sorted((*choice.points, choice.at), key=lambda point: point.rate_rps))


def usd_per_thousand(choice: Choice, point: Point) -> float:
    """Return the cost of 1,000 requests at a point's rate, or at the served rate if all requests arrive at once."""
    rate_rps = point.rate_rps if 0 < point.rate_rps < math.inf else point.value("requests_per_s")
    return choice.price_per_hour_usd / (3600 * rate_rps) * 1000 if rate_rps > 0 else math.nan


def _plan_columns(plan: Plan, shown: Sequence[int]) -> dict[str, Any]:
    simulated = set(_simulated(plan))
    without_numbers = [choice for i, choice in enumerate(plan.choices) if i not in simulated]
    names = text.in_order(n for c in plan.choices for p in load_curve(c) for n in p.values)
    labels = text.axis_labels(plan.axes)
    values = {}
    for key, tried in plan.axes.items():
        used = (choice.settings[key] for choice in plan.choices if key in choice.settings)
        values[key] = list(dict.fromkeys(map(text.setting_text, (*tried, *used))))
    # Frontiers and shifts name a choice by its key or, as tables do, by its name.
    places = {plan.choices[i].name: k for k, i in enumerate(shown)} | {
        plan.choices[i].key: k for k, i in enumerate(shown)
    }
    shifts: dict[str, list[Any]] = {shift.metric: [] for shift in plan.shifts}
    for s in plan.shifts:
        shifts[s.metric].append([finite_number(s.bound), finite_number(s.objective), places.get(s.choice, -1)])
    reasons, excluded = _excluded_counts(without_numbers, values)

    def trade(t: Trade) -> list[Any]:
        latency_s, cost_usd, rate_rps = map(finite_number, (t.latency_s, t.cost_usd, t.rate_rps))
        ends = (t.latency.model_low, t.latency.model_high)
        model = [finite_number(end) if math.isfinite(end) else None for end in ends]
        return [latency_s, cost_usd, places.get(t.choice, -1), rate_rps, *model]

    return {
        "name": plan.name,
        "objective": {
            "label": capitalized(plan.objective.label),
            "unit": plan.objective.unit,
            "higher": plan.objective.higher_is_better,
        },
        "live": LIVE.get(plan.objective.name, "own"),
        "limits": [{"metric": li.metric, "bound": li.bound, "atLeast": li.at_least} for li in plan.limits],
        "axes": [{"key": k, "label": labels[k], "values": v} for k, v in values.items()],
        "metrics": [_metric(plan, metric_of(name)) for name in names],
        "choices": [_choice(plan, i, names, values) for i in shown],
        "reasons": reasons,
        "excluded": excluded,
        "frontiers": {name: list(map(trade, trades)) for name, trades in plan.frontiers.items()},
        "shifts": shifts,
        "best": 0 if plan.best else -1,
    }


def _excluded_counts(
    choices: Sequence[Choice], values: dict[str, list[str]]
) -> tuple[list[tuple[str, str]], dict[str, list[list[int]]]]:
    """Count excluded choices by reason for each pair of settings, so that the page's size does not grow with them."""
    # The result is (group, example) of each reason, and for axes i < j under "i,j" rows [value i, value j, reason, n].
    reasons: dict[tuple[str, str], int] = {}
    pairs = list(combinations(range(len(values)), 2)) or ([(0, 0)] if values else [])
    counts: dict[str, dict[tuple[int, int, str], list[int]]] = {f"{a},{b}": {} for a, b in pairs}
    for choice in choices:
        settings, exclusion = _settings(choice, values), choice.exclusion
        group = exclusion.group or exclusion.reason
        for a, b in pairs:
            cell = counts[f"{a},{b}"]
            key = settings[a], settings[b], group
            if key not in cell:  # the first choice's reason is the example
                cell[key] = [reasons.setdefault((group, exclusion.reason), len(reasons)), 0]
            cell[key][1] += 1
    return list(reasons), {pair: [[a, b, *count] for (a, b, _), count in cell.items()] for pair, cell in counts.items()}


def _settings(choice: Choice, values: dict[str, list[str]]) -> list[int]:
    return [
        texts.index(text.setting_text(choice.settings[key])) if key in choice.settings else -1
        for key, texts in values.items()
    ]


def _metric(plan: Plan, metric: Metric) -> dict[str, Any]:
    """Return a metric with a unit that suits the upper quartile of the values rather than the largest value."""
    values = (p.value(metric.key) for c in plan.choices for p in load_curve(c))
    known = sorted(v for v in values if math.isfinite(v))
    factor, unit = scale(metric, known[len(known) * 3 // 4 :][:1])
    label = f"{metric.label}, at the rate" if metric.unit == "usd" else metric.label
    return {"name": metric.key, "label": label, "factor": factor, "unit": unit, "better": metric.better}


def _choice(plan: Plan, index: int, names: Sequence[str], values: dict[str, list[str]]) -> dict[str, Any]:
    c = plan.choices[index]
    columns: dict[str, Any] = {
        "name": c.name,
        "gpus": c.gpus,
        "price": finite_number(c.price_per_hour_usd),
        "status": c.status.value,
        "rank": text.rank_text(plan, index),
        "settings": _settings(c, values),
        **{
            key: [finite_number(e.value, 9), finite_number(e.half_width, 9)]
            for key, e in (("objective", c.objective), ("capacity", c.capacity_rps))
        },
    }
    curve = load_curve(c)
    if curve:
        known = [c.at.values.get(name, NO_VALUE) if c.at else NO_VALUE for name in names]
        points = []
        for p in curve:
            rate, usd, *numbers = map(finite_number, (p.rate_rps, usd_per_thousand(c, p), *(p.value(n) for n in names)))
            points.append([rate, usd, int(p.satisfied), *numbers])
        columns |= {
            "binds": text.binding_text(plan, c),
            "at": curve.index(c.at) if c.at else -1,
            "halves": [finite_number(e.half_width) for e in known],
            "spans": [[finite_number(e.model_low), finite_number(e.model_high)] for e in known],
            "points": points,
        }
    return columns


def write_search_json(path: Path | str, study: Study) -> None:
    """Write ``search_json`` to a file."""
    write_atomic(path, search_json(study).encode())


def search_json(study: Study) -> str:
    """Return all results of a search as the text of a JSON file.

    Raises InputError if two plans or choices have the same name.
    """
    text.check_study(study)
    plans = []
    for plan in study.plans:
        best, choices = plan.best.key if plan.best else None, list(map(_choice_fields, plan.choices))
        plans.append({"name": plan.name, "best": best, **plain(replace(plan, choices=())), "choices": choices})
    return json_text("study", {"name": study.name, "plans": plans, "swaps": study.swaps})


def _choice_fields(choice: Choice) -> dict[str, Any]:
    fields = plain(choice)
    exclusion, bounds, bottleneck = (fields.pop(name) for name in ("exclusion", "bounds", "bottleneck"))
    return {**fields, **exclusion, "bound": bounds["objective"], "bound_rps": bounds["rate_rps"], **bottleneck}
