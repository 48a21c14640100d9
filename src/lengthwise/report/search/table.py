"""The answer of a search for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from lengthwise.report._numbers import UNKNOWN, rounded
from lengthwise.report.search._standings import (
    check_study,
    nearest_misses,
    question,
    rank_text,
    spent_text,
    standing,
)
from lengthwise.report.search._words import (
    amount,
    estimate_text,
    limit_text,
    metric_name,
    objective_head,
    quantity,
    scale,
)
from lengthwise.schema.plan import Choice, Limit, Plan, Standing, Study

LIMIT_COLUMNS = 3
"""So many limits have a column; a terminal is not wider."""
WORST_REGIONS = 8
TIMES = "\N{MULTIPLICATION SIGN}"


def search_table(study: Study, *, top: int = 10) -> Group:
    """Each plan's question, its ranked configurations, why the winner wins, and what was left out.

    "=1" marks choices that cannot be told from the best, "~" scouted ones, "*" the limit that binds.

    Args:
        study: What was found.
        top: At most so many configurations a plan.

    Raises:
        InputError: There is no plan, or two share a name.
    """
    check_study(study)
    parts: list[RenderableType] = []
    for plan in study.plans:
        parts += [*_plan(plan, top), Text()]
    if len(study.plans) > 1 and study.swaps:
        parts += [Text("Times worse than the best of each question:"), _swaps(study)]
    return Group(*(parts if len(study.plans) > 1 and study.swaps else parts[:-1]))


def _plan(plan: Plan, top: int) -> Iterator[RenderableType]:
    yield Text.assemble((plan.name, "bold"), ": ", "; ".join(question(plan)))
    if plan.best is None:
        yield _nothing(plan)
    else:
        yield _ranking(plan, top)
        yield _why(plan, top)
    yield _left_out(plan)


def _ranking(plan: Plan, top: int) -> Table:
    rows = [(i, c) for i, c in enumerate(plan.choices) if c.standing in (Standing.RANKED, Standing.SCOUTED)]
    rows = rows[:top]
    limits = plan.limits[:LIMIT_COLUMNS]
    capacity = any(math.isfinite(c.capacity_rps.value) for _, c in rows)
    made = Table(header_style="bold", box=box.ROUNDED, border_style="dim")
    made.add_column("#", justify="right", no_wrap=True)
    made.add_column("configuration", overflow="fold", min_width=14)
    heads = ["GPUs", "$/h", objective_head(plan.objective)]
    for head in [*heads, *(["req/s"] if capacity else [])]:
        made.add_column(escape(head), justify="right", overflow="fold")
    scales = [scale(quantity(li.metric), [_at(c, li) for _, c in rows] or [li.bound]) for li in limits]
    for limit, (_, unit) in zip(limits, scales, strict=True):
        made.add_column(escape(f"{quantity(limit.metric).label}\n{unit}"), justify="right", overflow="fold")
    for i, choice in rows:
        cells = [_limit_cell(choice, li, s[0]) for li, s in zip(limits, scales, strict=True)]
        made.add_row(*_facts(plan, i, choice, capacity=capacity), *cells, style=_style(choice))
    return made


def _facts(plan: Plan, index: int, choice: Choice, *, capacity: bool) -> list[Text]:
    tied = index < max(plan.tied, 1)
    texts = [Text(rank_text(plan, index)), Text(choice.name, style="bold green" if tied else "")]
    texts += [Text(f"{choice.gpus:,}"), Text(f"{choice.price_per_hour_usd:,.2f}")]
    estimates = [choice.objective, *([choice.capacity_rps] if capacity else [])]
    return texts + [Text(estimate_text(e).replace(" ", "\N{NO-BREAK SPACE}")) for e in estimates]


def _style(choice: Choice) -> str:
    return "dim" if choice.standing is Standing.SCOUTED else ""


def _at(choice: Choice, limit: Limit) -> float:
    return choice.at.value(limit.metric) if choice.at else math.nan


def _limit_cell(choice: Choice, limit: Limit, factor: float) -> Text:
    binds = choice.binds == limit.metric
    text = rounded(_at(choice, limit) * factor, math.nan)[0]
    return Text(f"{text}*" if binds else text, style="bold" if binds else "")


def _why(plan: Plan, top: int) -> Text:
    """Below the table: what the marks say, why the winner wins, what binds it, who is not shown."""
    best = plan.choices[0]
    marks = [f"± half-widths of {100 * plan.level:g} % intervals."]
    marks += ["=1: cannot be told from the best."] if plan.tied > 1 else []
    shown = standing(plan, Standing.RANKED, Standing.SCOUTED)
    scouted = any(c.standing is Standing.SCOUTED for c in shown[:top])
    marks += ["~: scouted, known roughly."] if scouted else []
    marks += ["*: the limit that binds."] if any(c.binds and "." in c.binds for c in shown[:top]) else []
    lines = [Text(" ".join(marks), style="dim")]
    if more := len(shown) - top:
        lines += [Text(f"{more:,} more ranked or scouted.", style="dim")] if more > 0 else []
    if unseen := plan.limits[LIMIT_COLUMNS:]:
        lines.append(Text(f"Held as well: {', '.join(limit_text(limit) for limit in unseen)}.", style="dim"))
    lines.append(Text.assemble("Best: ", (best.name, "bold")))
    lines += [Text(f"  \N{MIDDLE DOT} {reason}") for reason in plan.why]
    if best.binds or best.why:
        binds = f"bound by {metric_name(best.binds)}. " if best.binds else ""
        lines.append(Text.assemble("What binds it: ", (binds[:1].upper() + binds[1:], "bold"), best.why))
    return Text("\n").join([*lines, *_shifts(plan)])


def _shifts(plan: Plan) -> Iterator[Text]:
    """A line a limit: the best objective by its bound, the asked one bold."""
    for limit in plan.limits:
        moved = [shift for shift in plan.shifts if shift.metric == limit.metric]
        if not moved:
            continue
        seen = quantity(limit.metric)
        yield Text(f"If {seen.label} might be another ({plan.objective.unit}, roughly):")
        line = Text("  ")
        for shift in moved:
            value = UNKNOWN if math.isnan(shift.objective) else rounded(shift.objective, math.nan)[0]
            style = "bold" if math.isclose(shift.bound, limit.bound) else ""
            line.append(f"{amount(seen, shift.bound)}: {value}", style=style).append("   ")
        yield line


def _nothing(plan: Plan) -> Text:
    lines = [Text("Nothing that was tried holds the limits.", style="bold red")]
    for miss in nearest_misses(plan):
        seen = quantity(miss.limit.metric)
        reached = amount(seen, miss.point.value(miss.limit.metric))
        times = f"{miss.times:.3g} {TIMES} off" if math.isfinite(miss.times) else "far off"
        lines.append(
            Text.assemble(
                "Nearest: ", (miss.choice.name, "bold"), f", {seen.label} {reached} at "
                f"{miss.point.rate_rps:.3g} requests/s ({limit_text(miss.limit)}: {times})."
            )
        )  # fmt: skip
    return Text("\n").join(lines)


def _left_out(plan: Plan) -> Text:
    lines = []
    regions = sorted(plan.regions, key=lambda region: -region.count)
    for region in regions[:WORST_REGIONS]:
        lines.append(
            Text.assemble(
                "Left out: ", (f"{region.count:,}", "bold"), f" \N{MULTIPLICATION SIGN} {region.name}: "
            )
        )
        lines[-1].append(region.example, style="dim")
    if others := regions[WORST_REGIONS:]:
        lines.append(Text(f"Left out: {sum(r.count for r in others):,} for {len(others)} other reasons."))
    return Text("\n").join([*lines, Text(spent_text(plan.spent))])


def _swaps(study: Study) -> Table:
    """How many times worse the best of one question (row) does on another's (column)."""
    names = [plan.name for plan in study.plans]
    ratios = {(swap.optimum_of, swap.used_for): swap.ratio for swap in study.swaps}
    made = Table(header_style="bold", box=box.ROUNDED, border_style="dim")
    made.add_column("best of \\ used for", overflow="fold")
    for name in names:
        made.add_column(escape(name), justify="right", overflow="fold")
    for of in names:
        cells = [_ratio(ratios.get((of, used), 1.0 if of == used else None)) for used in names]
        made.add_row(escape(of), *cells)
    return made


def _ratio(ratio: float | None) -> Text:
    if ratio is None:
        return Text(UNKNOWN)
    if math.isnan(ratio):
        return Text("fails", style="bold red")
    return Text(f"{ratio:.2f} {TIMES}", style="bold" if ratio > 1.1 else "")
