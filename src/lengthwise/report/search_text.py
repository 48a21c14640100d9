"""The answer of a search for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from lengthwise.report.formatting import UNKNOWN, rounded
from lengthwise.report.headline import LESS, MORE, NEITHER
from lengthwise.report.result_page import METADATA
from lengthwise.schema.errors import InputError
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.plan import Choice, Limit, Objective, Plan, Point, Spent, Status, Study

LATENCIES = {
    "ttft": "TTFT",
    "tbt": "TBT",
    "tpot": "TPOT",
    "jct": "JCT",
    "queueing_delay": "Queueing",
    "normalized_latency": "Latency/token",
}
OTHERS = {
    "goodput": ("Within SLO", "share", MORE),
    "served": ("Served", "share", MORE),
    "requests_per_s": ("Requests", "1/s", MORE),
    "output_tokens_per_s": ("Output tokens", "1/s", MORE),
    "usd_per_thousand_requests": ("Per thousand requests", "usd", LESS),
    "usd_per_million_output_tokens": ("Per M output tokens", "usd", LESS),
    "batch_seqs": ("Batch", "seqs", NEITHER),
    "energy_j_per_output_token": ("Energy/output token", "J", LESS),
    "power_w": ("Power", "W", LESS),
    "mfu": ("MFU", "share", NEITHER),
    "mbu": ("MBU", "share", NEITHER),
    "kv_utilization": ("KV cache held", "share", NEITHER),
    "busy_share": ("Busy", "share", NEITHER),
    "preemptions_per_request": ("Preemptions/request", "", LESS),
}
LABELS = {**METADATA, "policy": "Scheduler"}
"""What settings are called, by the last part of their keys."""

STATISTICS = ("mean", "p50", "p90", "p95", "p99", "p999", "max")
SHOWN_UNITS = {"share": (100.0, "%"), "1/s": (1.0, "/s"), "usd": (1.0, "$")}


@dataclass(frozen=True)
class Quantity:
    """A metric of Point.values; ``unit`` is that of its numbers, "share" one of 0 to 1."""

    name: str
    label: str
    unit: str
    better: int


def quantity(name: str) -> Quantity:
    """What is known of a metric by its name; one that nobody named stands for itself."""
    family, _, statistic = name.partition(".")
    if family in LATENCIES:
        return Quantity(name, f"{LATENCIES[family]} {statistic}".strip(), "s", LESS)
    return Quantity(name, *OTHERS.get(name, (name.replace("_", " "), "", NEITHER)))


def in_order(names: Iterable[str]) -> list[str]:
    """Metrics as tables list them: latencies by family and statistic, then the others."""
    families, others = list(LATENCIES), list(OTHERS)

    def place(name: str) -> tuple[int, int, int, str]:
        family, _, statistic = name.partition(".")
        if family in families:
            known = STATISTICS.index(statistic) if statistic in STATISTICS else len(STATISTICS)
            return 0, families.index(family), known, name
        return 1, others.index(name) if name in others else len(others), 0, name

    return sorted(set(names), key=place)


def scale(seen: Quantity, values: Iterable[float]) -> tuple[float, str]:
    """Factor and unit in which all these values read well."""
    if seen.unit == "s":
        top = max((abs(v) for v in values if math.isfinite(v)), default=0.0)
        return (1.0, "s") if top >= 1 else (1e3, "ms")
    return SHOWN_UNITS.get(seen.unit, (1.0, seen.unit))


def amount(seen: Quantity, value: float) -> str:
    """A value with its unit ("312 ms", "98.1 %")."""
    factor, unit = scale(seen, [value])
    return f"{rounded(value * factor, math.nan)[0]} {unit}".strip()


def metric_text(metric: str, value: float) -> str:
    """A value of a metric by name, with its unit."""
    return amount(quantity(metric), value)


def metric_name(name: str) -> str:
    """What a choice's ``binds`` is called: a metric's label, or the word as it is."""
    return quantity(name).label if "." in name or name in OTHERS else name


def limit_text(limit: Limit) -> str:
    """A promise as people write it: "TTFT p90 ≤ 2 s"."""
    seen = quantity(limit.metric)
    factor, unit = scale(seen, [limit.bound])
    sign = "\N{GREATER-THAN OR EQUAL TO}" if limit.at_least else "\N{LESS-THAN OR EQUAL TO}"
    return f"{seen.label} {sign} {limit.bound * factor:.6g} {unit}".strip()


def shown(estimate: Estimate) -> tuple[str, str]:
    """A value and its half-width as texts; the latter is empty where it is not known or nothing."""
    value, half = rounded(estimate.value, estimate.half_width)
    return value, half if estimate.half_width > 0 else ""


def objective_head(objective: Objective) -> str:
    """A column's head: the unit, or the label where the unit would be taken for another column's."""
    return objective.label if objective.unit in {"", "$/h", "GPUs"} else objective.unit


def estimate_text(estimate: Estimate) -> str:
    """The value with its half-width ("4.56 ± 0.12"), or the value alone where its interval is not known."""
    value, half = shown(estimate)
    return f"{value} \N{PLUS-MINUS SIGN} {half}" if half else value


def objective_text(objective: Objective, estimate: Estimate) -> str:
    """An objective's value with interval and unit."""
    return f"{estimate_text(estimate)} {objective.unit}".strip()


def description(text: str) -> str:
    """The text with a large first letter."""
    return text[:1].upper() + text[1:]


def axis_labels(keys: Iterable[str]) -> dict[str, str]:
    """A short label for each axis; the whole key where two would be called the same."""
    made = {key: _axis_label(key) for key in keys}
    labels = list(made.values())
    return {key: key if labels.count(label) > 1 else label for key, label in made.items()}


def _axis_label(key: str) -> str:
    last = key.rpartition(".")[2]
    return LABELS.get(last, last.replace("_", " "))


def setting_text(value: Any) -> str:
    """A setting's value as a short text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {setting_text(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(setting_text(item) for item in value)
    return str(value)


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


def standing(plan: Plan, *kinds: Status) -> list[Choice]:
    """The choices that came so far, in the plan's order."""
    return [choice for choice in plan.choices if choice.status in kinds]


def rank_text(plan: Plan, index: int) -> str:
    """The rank of the choice at ``index``: "=1" where it is tied with the best, "~" where it was scouted."""
    kind = plan.choices[index].status
    if kind is Status.RANKED:
        return "=1" if index < plan.tied and plan.tied > 1 else f"{index + 1}"
    return "~" if kind is Status.SCOUTED else ""


def question(plan: Plan) -> list[str]:
    """What was asked, part by part: facts, limits, objective."""
    limits = ", ".join(limit_text(limit) for limit in plan.limits) or "no limits"
    return [*(str(fact) for fact in plan.metadata.values()), limits, plan.objective.label]


def tied_with_best(plan: Plan) -> list[Choice]:
    """The others that cannot be told from the best."""
    return list(plan.choices[1 : plan.tied]) if plan.best is not None else []


def spent_text(effort: Spent) -> str:
    """What the search took, in a sentence: the first three counts add up; some of each were simulated."""
    share = effort.pruned / effort.candidates if effort.candidates else 0.0
    ranked = effort.candidates - effort.pruned - effort.rejected
    reused = f" {effort.reused:,} evaluations came from an earlier run." if effort.reused else ""
    return (
        f"{effort.candidates:,} candidates: {ranked:,} ranked, {effort.pruned:,} pruned ({100 * share:.0f} %), "
        f"{effort.rejected:,} rejected; {effort.simulated:,} of them simulated. {effort.simulations:,} simulations of "
        f"{effort.requests:,} requests in {_duration(effort.seconds)}.{reused}"
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
    worst = [_worst(plan, choice, point) for point in tried if not point.satisfied]
    return min((m for m in worst if m is not None), key=lambda m: m.times, default=None)


def _worst(plan: Plan, choice: Choice, point: Point) -> Miss | None:
    broken = [limit for limit in plan.limits if not limit.is_satisfied(point.value(limit.metric))]
    misses = [Miss(choice, point, limit, _times(limit, point.value(limit.metric))) for limit in broken]
    return max(misses, key=lambda m: m.times, default=None)


def _times(limit: Limit, value: float) -> float:
    over, under = (limit.bound, value) if limit.at_least else (value, limit.bound)
    return over / under if under > 0 else math.inf


def decision(plan: Plan) -> str:
    """The answer in one line."""
    best = plan.best
    if best is None:
        return "Nothing that was tried holds the limits."
    return f"{best.name}: {objective_text(plan.objective, best.objective)}"


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
        yield _empty(plan)
    else:
        yield _ranking(plan, top)
        yield _reason(plan, top)
    yield _left_out(plan)


def _ranking(plan: Plan, top: int) -> Table:
    rows = [(i, c) for i, c in enumerate(plan.choices) if c.status in (Status.RANKED, Status.SCOUTED)]
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
        made.add_row(*_metadata(plan, i, choice, capacity=capacity), *cells, style=_style(choice))
    return made


def _metadata(plan: Plan, index: int, choice: Choice, *, capacity: bool) -> list[Text]:
    tied = index < max(plan.tied, 1)
    texts = [Text(rank_text(plan, index)), Text(choice.name, style="bold green" if tied else "")]
    texts += [Text(f"{choice.gpus:,}"), Text(f"{choice.price_per_hour_usd:,.2f}")]
    estimates = [choice.objective, *([choice.capacity_rps] if capacity else [])]
    return texts + [Text(estimate_text(e).replace(" ", "\N{NO-BREAK SPACE}")) for e in estimates]


def _style(choice: Choice) -> str:
    return "dim" if choice.status is Status.SCOUTED else ""


def _at(choice: Choice, limit: Limit) -> float:
    return choice.at.value(limit.metric) if choice.at else math.nan


def _limit_cell(choice: Choice, limit: Limit, factor: float) -> Text:
    binds = choice.binds == limit.metric
    text = rounded(_at(choice, limit) * factor, math.nan)[0]
    return Text(f"{text}*" if binds else text, style="bold" if binds else "")


def _reason(plan: Plan, top: int) -> Text:
    """Below the table: what the marks say, why the winner wins, what binds it, who is not shown."""
    best = plan.choices[0]
    marks = [f"± half-widths of {100 * plan.level:g} % intervals."]
    marks += ["=1: cannot be told from the best."] if plan.tied > 1 else []
    shown = standing(plan, Status.RANKED, Status.SCOUTED)
    scouted = any(c.status is Status.SCOUTED for c in shown[:top])
    marks += ["~: scouted, known roughly."] if scouted else []
    marks += ["*: the limit that binds."] if any(c.binds and "." in c.binds for c in shown[:top]) else []
    lines = [Text(" ".join(marks), style="dim")]
    if more := len(shown) - top:
        lines += [Text(f"{more:,} more ranked or scouted.", style="dim")] if more > 0 else []
    if unseen := plan.limits[LIMIT_COLUMNS:]:
        lines.append(Text(f"Held as well: {', '.join(limit_text(limit) for limit in unseen)}.", style="dim"))
    lines.append(Text.assemble("Best: ", (best.name, "bold")))
    lines += [Text(f"  \N{MIDDLE DOT} {reason}") for reason in plan.cause]
    if best.binds or best.cause:
        binds = f"bound by {metric_name(best.binds)}. " if best.binds else ""
        lines.append(Text.assemble("What binds it: ", (binds[:1].upper() + binds[1:], "bold"), best.cause))
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


def _empty(plan: Plan) -> Text:
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
            Text.assemble("Left out: ", (f"{region.count:,}", "bold"), f" \N{MULTIPLICATION SIGN} {region.name}: ")
        )
        lines[-1].append(region.example, style="dim")
    if others := regions[WORST_REGIONS:]:
        lines.append(Text(f"Left out: {sum(r.count for r in others):,} for {len(others)} other reasons."))
    return Text("\n").join([*lines, Text(spent_text(plan.effort))])


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
