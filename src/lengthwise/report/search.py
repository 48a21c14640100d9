"""Plans to people: which deployment to buy, as a terminal table, a page and a file."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from lengthwise.report.formatting import UNKNOWN, rounded
from lengthwise.report.html_document import asset, document, header, plotly_js, scrolling, section
from lengthwise.report.json_file import plain
from lengthwise.report.search_text import (
    MONTH_H,
    Quantity,
    amount,
    axis_labels,
    check_study,
    description,
    estimate_text,
    in_order,
    limit_text,
    metric_name,
    nearest_misses,
    objective_head,
    objective_text,
    quantity,
    rank_text,
    scale,
    setting_text,
    shown,
    spent_text,
    standing,
    tied_with_best,
)
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.files import write_whole
from lengthwise.schema.plan import Choice, Limit, Objective, Plan, Point, Region, Status, Study

BARS = 6
"""So many of the ranking are drawn beside the answer."""
NAMED = 4
"""So many tied configurations and reasons are named."""
TIMES = "\N{MULTIPLICATION SIGN}"
DOLLARS = "$\N{NARROW NO-BREAK SPACE}"

SWAPS_NOTE = (
    "How many times worse the best configuration of one question (row) is when it has to answer another "
    "(column) than the best of that one."
)


def answers(study: Study) -> str:
    """A card for each plan."""
    title = "The answer" if len(study.plans) == 1 else "The answers"
    cards = "".join(_card(plan, study) for plan in study.plans)
    return section(title, f'<div class="answers">{cards}</div>')


def shared_facts(study: Study) -> dict[str, str]:
    """Facts that are the same for all plans."""
    first, *others = (plan.metadata for plan in study.plans)
    return {key: text for key, text in first.items() if all(metadata.get(key) == text for metadata in others)}


def _card(plan: Plan, study: Study) -> str:
    shared = shared_facts(study)
    own = [text for key, text in plan.metadata.items() if key not in shared]
    asked = "".join(f"<li>{escape(str(part))}</li>" for part in (*own, *map(limit_text, plan.limits)))
    body = _empty(plan) if plan.best is None else _winner(plan, plan.best)
    return (
        f'<article class="card answer"><h3 class="asked">{escape(plan.name)}</h3><ul class="facts">{asked}</ul>'
        f'{body}<p class="muted spent">{escape(spent_text(plan.effort))}</p></article>'
    )


def _winner(plan: Plan, best: Choice) -> str:
    value, half = shown(best.objective)
    half = f' <span class="half">± {half}</span>' if half else ""
    why = "".join(f"<p>{escape(description)}</p>" for description in plan.cause)
    return (
        f'<div class="split"><div><p class="winner">{escape(best.name)}</p>'
        f'<p class="objective"><b>{value}</b>{half} <span class="unit">{escape(plan.objective.unit)}</span></p>'
        f'<p class="muted">{escape(description(plan.objective.label))}</p>{_key_facts(best)}{_tied(plan)}</div>'
        f'<div class="ranking">{_bars(plan)}</div></div>'
        f'<div class="why"><h4>Why</h4>{why}{_binding(best)}</div>'
    )


def _key_facts(best: Choice) -> str:
    month = f"{DOLLARS}{best.price_per_hour_usd * MONTH_H:,.0f}"
    metadata = {
        "GPUs": f"{best.gpus:,}",
        "An hour": f"{DOLLARS}{best.price_per_hour_usd:,.2f}",
        f"A month of {MONTH_H} h": month,
    }
    if math.isfinite(best.capacity_rps.value):
        metadata["Sustains"] = f"{estimate_text(best.capacity_rps)} requests/s"
    if best.binds:
        metadata["Bound by"] = metric_name(best.binds)
    items = "".join(f"<div><dt>{name}</dt><dd>{escape(text)}</dd></div>" for name, text in metadata.items())
    return f'<dl class="common">{items}</dl>'


def _tied(plan: Plan) -> str:
    others = tied_with_best(plan)
    if not others:
        return '<p class="muted">No other configuration is tied with it.</p>' if len(plan.choices) > 1 else ""
    names = ", ".join(choice.name for choice in others[:NAMED])
    more = f" and {len(others) - NAMED:,} more" if len(others) > NAMED else ""
    return f'<p class="tied">Tied with it, within the intervals: {escape(names)}{more}.</p>'


def _binding(best: Choice) -> str:
    return f"<p>{escape(best.cause)}</p>" if best.cause else ""


def _bars(plan: Plan) -> str:
    """The first of the ranking as bars with their intervals."""
    first = [(i, c) for i, c in enumerate(plan.choices[:BARS]) if math.isfinite(c.objective.value)]
    top = max((_high(c) for _, c in first), default=1.0)
    hint = "higher is better" if plan.objective.higher_is_better else "lower is better"
    lines = "".join(_bar(rank_text(plan, i), c, top, leads=i < max(plan.tied, 1)) for i, c in first)
    return f'<p class="hint">{escape(description(plan.objective.label))}, {hint}</p><ul>{lines}</ul>'


def _high(choice: Choice) -> float:
    return choice.objective.high if choice.objective.has_interval else choice.objective.value


def _bar(rank: str, choice: Choice, top: float, *, leads: bool) -> str:
    whisker = ""
    if choice.objective.half_width > 0 and top > 0:
        left, right = (100 * max(0.0, end) / top for end in (choice.objective.low, choice.objective.high))
        whisker = f'<i class="whisker" style="left:{left:.2f}%;width:{right - left:.2f}%"></i>'
    width = 100 * max(0.0, choice.objective.value) / top if top > 0 else 0.0
    colour = "var(--good)" if leads else "var(--faint)"
    return (
        f'<li class="bar{" leads" if leads else ""}" style="--c:{colour}">'
        f'<span class="name"><span class="rank">{rank}</span>{escape(choice.name)}</span>'
        f'<span class="value">{rounded(choice.objective.value, choice.objective.half_width)[0]}</span>'
        f'<span class="track"><i class="fill" style="width:{width:.2f}%"></i>{whisker}</span></li>'
    )


def _empty(plan: Plan) -> str:
    misses = []
    for miss in nearest_misses(plan):
        seen = quantity(miss.limit.metric)
        off = f"{miss.times:.3g} {TIMES} off" if math.isfinite(miss.times) else "far off"
        reached = amount(seen, miss.point.value(miss.limit.metric))
        misses.append(
            f"<li><b>{escape(miss.choice.name)}</b>: {escape(seen.label)} {reached} at "
            f"{miss.point.rate_rps:.3g} requests/s, {off} ({escape(limit_text(miss.limit))})</li>"
        )
    regions = sorted(plan.regions, key=lambda region: -region.count)[:NAMED]
    reasons = [f"<li><b>{r.count:,}</b> {escape(r.name)}: {escape(r.example)}</li>" for r in regions]
    return '<p class="winner none">Nothing that was tried holds the limits.</p>' + "".join(
        f'<h4>{title}</h4><ul class="misses">{"".join(items)}</ul>'
        for title, items in (("Nearest misses", misses), ("What stood in the way", reasons))
        if items
    )


def swaps(study: Study) -> str:
    """The matrix of misplacement; nothing where there is one question."""
    if len(study.plans) < 2 or not study.swaps:
        return ""
    names = [plan.name for plan in study.plans]
    ratios = {(swap.optimum_of, swap.used_for): swap.ratio for swap in study.swaps}
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    lines = "".join(
        f'<tr><th scope="row">{escape(of)}</th>{"".join(_ratio(ratios, of, used) for used in names)}</tr>'
        for of in names
    )
    table = f"<thead><tr><td>best of … used for</td>{heads}</tr></thead><tbody>{lines}</tbody>"
    return section("What the wrong question costs", scrolling("Misplacement", table, "swaps"), SWAPS_NOTE)


def _ratio(ratios: dict[tuple[str, str], float], of: str, used: str) -> str:
    ratio = ratios.get((of, used), 1.0 if of == used else None)
    if ratio is None:
        return f"<td>{UNKNOWN}</td>"
    if math.isnan(ratio):
        return '<td class="worse">does not hold</td>'
    heat = min(60.0, max(0.0, 60 * math.log2(ratio))) if ratio > 0 else 0.0
    return f'<td style="--heat:{heat:.0f}%">{ratio:.2f} {TIMES}</td>'


LISTED = 1000
"""So many rejected or pruned configurations are listed; regions tell of all."""


def listing(plan: Plan) -> str:
    """All configurations that ran, in a table that sorts and filters, and the others folded away."""
    ran = [(i, c) for i, c in enumerate(plan.choices) if c.status in (Status.RANKED, Status.SCOUTED)]
    parts = [_ran(plan, ran)] if ran else ["<p>No configuration was ranked.</p>"]
    parts += [_regions(plan)] if plan.regions else []
    parts += [_excluded_listing(plan)] if len(ran) < len(plan.choices) else []
    return "".join(parts)


def _ran(plan: Plan, ran: list[tuple[int, Choice]]) -> str:
    capacity = any(math.isfinite(c.capacity_rps.value) for _, c in ran)
    scales = [scale(quantity(li.metric), [c.at.value(li.metric) for _, c in ran if c.at]) for li in plan.limits]
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
        f"{scrolling('All configurations', table, 'table')}"
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
    scouted = ' class="scouted"' if choice.status is Status.SCOUTED else ""
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
    heads = "".join(f'<th scope="col">{head}</th>' for head in ("cause", "how many", "what they share", "one of them"))
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


def _excluded_listing(plan: Plan) -> str:
    others = standing(plan, Status.REJECTED, Status.PRUNED)
    lines = "".join(_reason(plan, choice) for choice in others[:LISTED])
    more = f"<p>{len(others) - LISTED:,} more are not listed.</p>" if len(others) > LISTED else ""
    heads = "".join(f'<th scope="col">{head}</th>' for head in ("configuration", "status", "reason"))
    table = f"<thead><tr>{heads}</tr></thead><tbody>{lines}</tbody>"
    return (
        f"<details><summary>{len(others):,} rejected or pruned configurations</summary>"
        f"{scrolling('Rejected and pruned', table, 'prose')}{more}</details>"
    )


def _reason(plan: Plan, choice: Choice) -> str:
    known = math.isfinite(choice.bound)
    bound = f" (bound: {objective_text(plan.objective, Estimate(choice.bound))})" if known else ""
    return (
        f'<tr><th scope="row">{escape(choice.name)}</th><td>{choice.status.value}</td>'
        f"<td>{escape(choice.reason or choice.region)}{escape(bound)}</td></tr>"
    )


SCATTER_NOTE = (
    "One mark for each load that was simulated; the large ones are operating points. The line is the "
    "frontier: nothing that keeps the other limits is both cheaper and faster. Drag a limit, or change it "
    "beside the figure."
)
MEASURED_NOTE = (
    "Nothing is interpolated: under other limits the best is the best among the simulated loads, and a search "
    "with those limits may find a better one. Few loads lie above what the limits allow, so loosened limits "
    "show little here."
)
COMPARE_NOTE = "At their operating points. Coloured where the intervals do not overlap: the second one better or worse."
HEAT_NOTE = "The best objective over all other axes. A cell tells which configuration it is, or why there is none."
SHIFTS_NOTE = (
    "The best objective, and who has it, if one limit were another and the others stayed: roughly, from "
    "fewer simulations than the answer's."
)
LISTING_NOTE = "Click a heading to sort. Bold: the limit that binds. Pale: scouted, known roughly."

SCATTER = """<div class="tools"><div class="tabs" id="metrics" role="group" aria-label="Latency metric"></div>
<label>Colour <select id="colour"></select></label>
<label id="one-label" hidden>of <select id="one"></select></label></div>
<div class="explorer"><figure><div class="plot tall" id="scatter"></div></figure>
<aside class="card panel"><h3>Limits</h3><div id="limits"></div>
<button type="button" id="reset">Back to what was asked</button>
<h3 class="later">Best now</h3><div id="now" aria-live="polite"></div></aside></div>
<ul class="legend" id="colours"></ul>
<p class="muted after">{measured}</p>"""

COMPARE = """<div class="tools"><label><i class="swatch" style="--c:var(--series-0)"></i>
<select id="first" aria-label="First configuration"></select></label>
<label><i class="swatch" style="--c:var(--series-1)"></i>
<select id="second" aria-label="Second configuration"></select></label></div>
<div class="halves"><div class="scroll" tabindex="0" role="region" aria-label="Comparison">
<table id="compared"></table></div>
<div><div class="tools"><label>Load curve of <select id="curve"></select></label></div>
<figure><div class="plot" id="curves"></div></figure>
<p class="muted">Lines join simulated loads; the large marks are operating points.</p></div></div>"""

HEAT = """<div class="tools"><label>Across <select id="across"></select></label>
<label>Down <select id="down"></select></label></div>
<div class="scroll" tabindex="0" role="region" aria-label="Heat map"><table id="heat"></table></div>
<p class="muted" id="cell" aria-live="polite"></p>"""

SHIFTS = '<div class="grid" id="shifts"></div><ul class="legend" id="winners"></ul>'

NOTES = """<dl class="notes">
<dt>TTFT</dt><dd>arrival until first token</dd>
<dt>TPOT</dt><dd>time from first to last token over output tokens less one, a request each</dd>
<dt>TBT</dt><dd>time between two tokens (also ITL), tokens of all requests pooled</dd>
<dt>JCT</dt><dd>arrival until last token (also end-to-end latency)</dd>
<dt>Cost</dt><dd>the price of all GPUs for an hour over the requests that arrive in it; a month has 730 hours</dd>
<dt>req/s</dt><dd>the largest rate of requests at which all limits hold</dd>
<dt>Interval</dt><dd>± is the half-width of a {level} interval over seeds of the simulation; it says how well the
simulator's own answer is known, not how well the simulator knows the hardware</dd>
<dt>Tied</dt><dd>its interval overlaps that of the best: more seeds, not this ranking, would tell them apart</dd>
<dt>Scouted</dt><dd>simulated shortly and clearly worse than the best, so its objective is known only roughly</dd>
<dt>Pruned</dt><dd>a bound by closed forms says that it cannot be among the best; not simulated</dd>
<dt>Rejected</dt><dd>cannot run, or breaks a limit at any rate</dd>
<dt>MFU, MBU</dt><dd>FLOPs that the model needs, and bytes that steps must read, over the hardware's peak,
idle time included</dd>
</dl>"""


def page(study: Study, *, styles: str, scripts: Sequence[str], data: str) -> str:
    """The whole document; ``data`` is what its figures draw, as JSON."""
    plans, heading = study.plans, study.name or study.plans[0].name
    level = f"{100 * plans[0].level:g} %"
    axes = any(len(plan.axes) > 1 for plan in plans)
    shifts = any(plan.shifts for plan in plans)
    body = [
        header(heading, _metadata(study)),
        answers(study),
        swaps(study),
        _which(plans),
        section("Cost against latency", _interactive(SCATTER.format(measured=MEASURED_NOTE)), SCATTER_NOTE),
        section("Two side by side", _interactive(COMPARE), COMPARE_NOTE),
        section("Two axes at a time", _interactive(HEAT), HEAT_NOTE) if axes else "",
        section("If a limit were another", _interactive(SHIFTS), SHIFTS_NOTE) if shifts else "",
        section("All configurations", _by_plan(plans), LISTING_NOTE),
        section("How to read it", NOTES.format(level=level)),
    ]
    return document(heading, "".join(body), styles=styles, scripts=scripts, data=data)


def _metadata(study: Study) -> list[str]:
    """Facts that all plans share, what was optimised, how many questions and candidates there are."""
    shared = [str(text) for text in shared_facts(study).values()]
    objectives = list(dict.fromkeys(plan.objective.label for plan in study.plans))
    candidates = sum(plan.effort.candidates for plan in study.plans)
    questions = [f"{len(study.plans)} questions"] if len(study.plans) > 1 else []
    return [*shared, *objectives, *questions, f"{candidates:,} candidates"]


def _which(plans: Sequence[Plan]) -> str:
    """The choice of the plan that all sections below show; hidden where there is no choice."""
    options = "".join(f'<option value="{i}">{escape(plan.name)}</option>' for i, plan in enumerate(plans))
    hidden = "" if len(plans) > 1 else " hidden"
    return f'<p class="which interactive"{hidden}><label>Question <select id="plan">{options}</select></label></p>\n'


def _interactive(html: str) -> str:
    return f'<div class="interactive">{html}</div>'


def _by_plan(plans: Sequence[Plan]) -> str:
    """Every plan's list; the script shows one at a time."""
    return "".join(f'<div data-plan="{i}">{_named(plan, plans)}{listing(plan)}</div>' for i, plan in enumerate(plans))


def _named(plan: Plan, plans: Sequence[Plan]) -> str:
    return f'<h3 class="later">{escape(plan.name)}</h3>' if len(plans) > 1 else ""


KNOWN = (Status.RANKED, Status.SCOUTED)

BEYOND = 1e300
"""Stands for infinity, which JSON does not know."""

LIVE = {"requests_per_dollar": "rate", "cost_at_rate": "price", "fewest_gpus": "gpus"}
"""What an objective follows from at any load; others are known only where they were measured."""


def study_data(study: Study) -> dict[str, Any]:
    """Everything that the figures draw, five digits a number."""
    return {"plans": [_plan_columns(plan) for plan in study.plans]}


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


def _plan_columns(plan: Plan) -> dict[str, Any]:
    metrics, shown = figure_metrics(plan), _shown(plan)
    labels = axis_labels(plan.axes)
    values = {key: _axis_values(plan, key) for key in plan.axes}
    reasons, left = _excluded_choices(plan, values)
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
    return [i for i, c in enumerate(plan.choices) if c.at or c.points or c.status in KNOWN]


def _excluded_choices(plan: Plan, values: dict[str, list[str]]) -> tuple[list[list[str]], list[list[int]]]:
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
        name: [[short(t.latency_s), short(t.cost_usd), places.get(t.choice, -1), short(t.rate_rps)] for t in ts]
        for name, ts in plan.frontiers.items()
    }
    shifts: dict[str, list[Any]] = {shift.metric: [] for shift in plan.shifts}
    for s in plan.shifts:
        shifts[s.metric].append([short(s.bound), short(s.objective), places.get(s.choice, -1)])
    return {"frontiers": frontiers, "shifts": shifts}


def _objective(objective: Objective) -> dict[str, Any]:
    return {"label": description(objective.label), "unit": objective.unit, "higher": objective.higher_is_better}


def _axis_values(plan: Plan, key: str) -> list[str]:
    """The axis' values as texts, and those that only choices have."""
    told = [*plan.axes[key], *(c.settings[key] for c in plan.choices if key in c.settings)]
    return list(dict.fromkeys(setting_text(value) for value in told))


def _metric(plan: Plan, metric: Quantity) -> dict[str, Any]:
    values = [p.value(metric.name) for c in plan.choices for p in load_curve(c)]
    factor, unit = scale(metric, _middle(values))
    return {"name": metric.name, "label": metric.label, "factor": factor, "unit": unit, "better": metric.better}


def _middle(values: Sequence[float]) -> list[float]:
    """The upper quartile: a unit that suits most values, not the queue of the most overloaded one."""
    known = sorted(v for v in values if math.isfinite(v))
    return [known[len(known) * 3 // 4]] if known else []


def _choice(plan: Plan, index: int, metrics: Sequence[Quantity], values: dict[str, list[str]]) -> dict[str, Any]:
    c = plan.choices[index]
    made: dict[str, Any] = {
        "name": c.name,
        "gpus": c.gpus,
        "price": short(c.price_per_hour_usd),
        "status": c.status.value,
        "rank": rank_text(plan, index),
        "settings": _settings(c, values),
        "objective": [short(c.objective.value, 9), short(c.objective.half_width, 9)],
    }
    curve = load_curve(c)
    if not curve:
        return made
    at = curve.index(c.at) if c.at else -1
    halves = [short(c.at.values[m.name].half_width) if c.at and m.name in c.at.values else None for m in metrics]
    return made | {
        "binds": metric_name(c.binds),
        "cause": c.cause,
        "at": at,
        "halves": halves,
        "points": [_point(c, p, metrics) for p in curve],
    }


def _point(choice: Choice, point: Point, metrics: Iterable[Quantity]) -> list[float | int | None]:
    """Rate, cost, whether it held, and every metric."""
    values = (short(point.value(metric.name)) for metric in metrics)
    return [short(point.rate_rps), short(usd_per_thousand(choice, point)), int(point.satisfied), *values]


def short(value: float, digits: int = 5) -> float | None:
    """So many digits of a number; null where it is not known."""
    if math.isnan(value):
        return None
    return float(f"{value:.{digits}g}") if math.isfinite(value) else math.copysign(BEYOND, value)


SCRIPTS = ("study.js", "scatter.js", "compare.js", "heat.js", "shifts.js", "listing.js")


def write_search_html(path: Path | str, study: Study) -> None:
    """A self-contained page: the answer and why, cost against latency, and every configuration.

    Limits can be moved on it: the best configuration is then found again among the loads that were
    simulated. Nothing is fetched when it is opened (a content security policy sees to that), and the
    same study gives the same bytes.

    Raises:
        InputError: There is no plan, or two share a name.
        MissingExtraError: plotly is not installed.
        OutputError: The file cannot be written.
    """
    check_study(study)
    plotly = plotly_js()
    data = json.dumps(study_data(study), separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    ours = [asset(f"search/{name}") for name in SCRIPTS]
    text = page(
        study,
        styles=asset("page.css") + asset("search/search.css"),
        scripts=[plotly, asset("look.js"), *ours],
        data=data,
    )
    write_whole(path, text.encode())


VERSION = 1


def write_search_json(path: Path | str, study: Study) -> None:
    """A JSON file with everything that a search found, under stable keys (see the module).

    Raises:
        InputError: There is no plan, or two share a name.
        OutputError: The file cannot be written.
    """
    check_study(study)
    made = {
        "format": "lengthwise.study",
        "version": VERSION,
        "name": study.name,
        "plans": [_plan_dict(plan) for plan in study.plans],
        "swaps": plain([dataclasses.asdict(swap) for swap in study.swaps]),
    }
    text = json.dumps(made, indent=2, ensure_ascii=False, allow_nan=False, default=str)
    write_whole(path, (text + "\n").encode())


def _plan_dict(plan: Plan) -> dict[str, Any]:
    best = plan.best
    fields: dict[str, Any] = plain(dataclasses.asdict(plan))
    return {"name": plan.name, "best": best.key if best else None, **fields}
