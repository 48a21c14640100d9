"""The page's lists: every configuration, and why the others were left out."""

from __future__ import annotations

import math
from html import escape

from lengthwise.report._marks import scrolling
from lengthwise.report._numbers import UNKNOWN
from lengthwise.report.search._standings import MONTH_H, rank_text, standing
from lengthwise.report.search._words import (
    axis_labels,
    metric_name,
    objective_head,
    objective_text,
    quantity,
    scale,
    setting_text,
    shown,
)
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.plan import Choice, Limit, Plan, Region, Standing

LISTED = 1000
"""So many rejected or pruned configurations are listed; regions tell of all."""


def listing(plan: Plan) -> str:
    """All configurations that ran, in a table that sorts and filters, and the others folded away."""
    ran = [(i, c) for i, c in enumerate(plan.choices) if c.standing in (Standing.RANKED, Standing.SCOUTED)]
    parts = [_ran(plan, ran)] if ran else ["<p>No configuration was ranked.</p>"]
    parts += [_regions(plan)] if plan.regions else []
    parts += [_left_out(plan)] if len(ran) < len(plan.choices) else []
    return "".join(parts)


def _ran(plan: Plan, ran: list[tuple[int, Choice]]) -> str:
    capacity = any(math.isfinite(c.capacity_rps.value) for _, c in ran)
    scales = [
        scale(quantity(li.metric), [c.at.value(li.metric) for _, c in ran if c.at]) for li in plan.limits
    ]
    units = [f"{quantity(li.metric).label} {s[1]}" for li, s in zip(plan.limits, scales, strict=True)]
    heads = ["configuration", "rank", "GPUs", "$/h", "$/month", objective_head(plan.objective)]
    heads += [*(["req/s"] if capacity else []), *units, "binds", "runs"]
    factors = [s[0] for s in scales]
    lines = "".join(_line(plan, i, c, factors, capacity=capacity) for i, c in ran)
    cells = "".join(_head(head, pressed=i == 1) for i, head in enumerate(heads))
    table = f"<thead><tr>{cells}</tr></thead><tbody>{lines}</tbody>"
    return (
        '<p class="tools"><label>Show only <input type="search" class="filter" placeholder="text in a row">'
        f'</label> <output class="count muted">{len(ran):,} configurations</output></p>'
        f"{scrolling('All configurations', table, 'listing')}"
    )


def _head(head: str, *, pressed: bool) -> str:
    order = "ascending" if pressed else "none"
    return f'<th scope="col" aria-sort="{order}"><button type="button">{escape(head)}</button></th>'


def _line(plan: Plan, index: int, choice: Choice, factors: list[float], *, capacity: bool) -> str:
    numbers = [
        _cell(index, rank_text(plan, index)),
        _cell(choice.gpus, f"{choice.gpus:,}"),
        _cell(choice.price_per_hour_usd, f"{choice.price_per_hour_usd:,.2f}"),
        _cell(choice.price_per_hour_usd, f"{choice.price_per_hour_usd * MONTH_H:,.0f}"),
        _number(choice.objective),
        *([_number(choice.capacity_rps)] if capacity else []),
        *(_limit(choice, li, f) for li, f in zip(plan.limits, factors, strict=True)),
    ]
    scouted = ' class="scouted"' if choice.standing is Standing.SCOUTED else ""
    binds = escape(metric_name(choice.binds)) or UNKNOWN
    return (
        f'<tr{scouted}><th scope="row">{escape(choice.name)}</th>{"".join(numbers)}'
        f"<td>{binds}</td>{_cell(choice.simulations, f'{choice.simulations:,}')}</tr>"
    )


def _cell(value: float, text: str, kind: str = "") -> str:
    sorts = f' data-v="{value:.10g}"' if math.isfinite(value) else ' data-v=""'
    return f"<td{kind}{sorts}>{text}</td>"


def _number(estimate: Estimate, kind: str = "") -> str:
    value, half = shown(estimate)
    half = f' <span class="half">± {half}</span>' if half else ""
    return _cell(estimate.value, f"{value}{half}", kind)


def _limit(choice: Choice, limit: Limit, factor: float) -> str:
    e = choice.at.values.get(limit.metric) if choice.at else None
    shown = Estimate(math.nan) if e is None else Estimate(e.value * factor, e.half_width * factor)
    return _number(shown, ' class="binds"' if choice.binds == limit.metric else "")


def _regions(plan: Plan) -> str:
    lines = "".join(_region(region, plan) for region in sorted(plan.regions, key=lambda r: -r.count))
    heads = "".join(
        f'<th scope="col">{head}</th>' for head in ("why", "how many", "what they share", "one of them")
    )
    table = f"<thead><tr>{heads}</tr></thead><tbody>{lines}</tbody>"
    return f'<h3 class="later">What was left out</h3>{scrolling("Left out", table, "prose")}'


def _region(region: Region, plan: Plan) -> str:
    labels = axis_labels(plan.axes)
    shared = "; ".join(
        f"{labels.get(key, key)}: {', '.join(setting_text(v) for v in values)}"
        for key, values in region.settings.items()
    )
    return (
        f'<tr><th scope="row">{escape(region.name)}</th><td>{region.count:,}</td>'
        f"<td>{escape(shared) or UNKNOWN}</td><td>{escape(region.example)}</td></tr>"
    )


def _left_out(plan: Plan) -> str:
    others = standing(plan, Standing.REJECTED, Standing.PRUNED)
    lines = "".join(_reason(plan, choice) for choice in others[:LISTED])
    more = f"<p>{len(others) - LISTED:,} more are not listed.</p>" if len(others) > LISTED else ""
    heads = "".join(f'<th scope="col">{head}</th>' for head in ("configuration", "standing", "reason"))
    table = f"<thead><tr>{heads}</tr></thead><tbody>{lines}</tbody>"
    return (
        f"<details><summary>{len(others):,} rejected or pruned configurations</summary>"
        f"{scrolling('Rejected and pruned', table, 'prose')}{more}</details>"
    )


def _reason(plan: Plan, choice: Choice) -> str:
    known = math.isfinite(choice.bound)
    bound = f" (bound: {objective_text(plan.objective, Estimate(choice.bound))})" if known else ""
    return (
        f'<tr><th scope="row">{escape(choice.name)}</th><td>{choice.standing.value}</td>'
        f"<td>{escape(choice.reason or choice.region)}{escape(bound)}</td></tr>"
    )
