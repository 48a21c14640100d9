"""The page's answers: a card a question, and what confusing the questions costs."""

from __future__ import annotations

import math
from html import escape

from lengthwise.report._document import section
from lengthwise.report._marks import scrolling
from lengthwise.report._numbers import UNKNOWN, rounded
from lengthwise.report.search._standings import (
    MONTH_H,
    nearest_misses,
    rank_text,
    spent_text,
    tied_with_best,
)
from lengthwise.report.search._words import (
    amount,
    estimate_text,
    limit_text,
    metric_name,
    quantity,
    sentence,
    shown,
)
from lengthwise.schema.plan import Choice, Plan, Study

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
    first, *others = (plan.facts for plan in study.plans)
    return {key: text for key, text in first.items() if all(facts.get(key) == text for facts in others)}


def _card(plan: Plan, study: Study) -> str:
    shared = shared_facts(study)
    own = [text for key, text in plan.facts.items() if key not in shared]
    asked = "".join(f"<li>{escape(str(part))}</li>" for part in (*own, *map(limit_text, plan.limits)))
    body = _nothing(plan) if plan.best is None else _winner(plan, plan.best)
    return (
        f'<article class="card answer"><h3 class="asked">{escape(plan.name)}</h3><ul class="facts">{asked}</ul>'
        f'{body}<p class="muted spent">{escape(spent_text(plan.spent))}</p></article>'
    )


def _winner(plan: Plan, best: Choice) -> str:
    value, half = shown(best.objective)
    half = f' <span class="half">± {half}</span>' if half else ""
    why = "".join(f"<p>{escape(sentence)}</p>" for sentence in plan.why)
    return (
        f'<div class="split"><div><p class="winner">{escape(best.name)}</p>'
        f'<p class="objective"><b>{value}</b>{half} <span class="unit">{escape(plan.objective.unit)}</span></p>'
        f'<p class="muted">{escape(sentence(plan.objective.label))}</p>{_key_facts(best)}{_tied(plan)}</div>'
        f'<div class="ranking">{_bars(plan)}</div></div>'
        f'<div class="why"><h4>Why</h4>{why}{_binding(best)}</div>'
    )


def _key_facts(best: Choice) -> str:
    month = f"{DOLLARS}{best.price_per_hour_usd * MONTH_H:,.0f}"
    facts = {
        "GPUs": f"{best.gpus:,}",
        "An hour": f"{DOLLARS}{best.price_per_hour_usd:,.2f}",
        f"A month of {MONTH_H} h": month,
    }
    if math.isfinite(best.capacity_rps.value):
        facts["Sustains"] = f"{estimate_text(best.capacity_rps)} requests/s"
    if best.binds:
        facts["Bound by"] = metric_name(best.binds)
    items = "".join(f"<div><dt>{name}</dt><dd>{escape(text)}</dd></div>" for name, text in facts.items())
    return f'<dl class="common">{items}</dl>'


def _tied(plan: Plan) -> str:
    others = tied_with_best(plan)
    if not others:
        return '<p class="muted">No other configuration is tied with it.</p>' if len(plan.choices) > 1 else ""
    names = ", ".join(choice.name for choice in others[:NAMED])
    more = f" and {len(others) - NAMED:,} more" if len(others) > NAMED else ""
    return f'<p class="tied">Tied with it, within the intervals: {escape(names)}{more}.</p>'


def _binding(best: Choice) -> str:
    return f"<p>{escape(best.why)}</p>" if best.why else ""


def _bars(plan: Plan) -> str:
    """The first of the ranking as bars with their intervals."""
    first = [(i, c) for i, c in enumerate(plan.choices[:BARS]) if math.isfinite(c.objective.value)]
    top = max((_high(c) for _, c in first), default=1.0)
    hint = "higher is better" if plan.objective.higher_is_better else "lower is better"
    lines = "".join(_bar(rank_text(plan, i), c, top, leads=i < max(plan.tied, 1)) for i, c in first)
    return f'<p class="hint">{escape(sentence(plan.objective.label))}, {hint}</p><ul>{lines}</ul>'


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


def _nothing(plan: Plan) -> str:
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
