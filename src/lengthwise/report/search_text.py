"""The answer of a search: names and units of metrics, sentences, and the terminal table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lengthwise.report.fitted_table import SplitTable, boxed_table
from lengthwise.report.formatting import (
    PLUS_MINUS,
    TIMES,
    UNKNOWN,
    amount,
    capitalized,
    counted,
    model_text,
    rounded,
    two_digits,
)
from lengthwise.report.result_page import METADATA
from lengthwise.schema.errors import InputError
from lengthwise.schema.estimate import UNKNOWN as UNKNOWN_ESTIMATE
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.metric_names import LATENCIES, OTHERS, PREFIX_CACHE, QUANTILES, metric_of, scale, split
from lengthwise.schema.plan import (
    Bottleneck,
    Choice,
    Limit,
    Objective,
    Plan,
    Point,
    SearchEffort,
    Shift,
    Status,
    Study,
    limit_text,
)

LABELS = {  # of settings, by the last part of their keys
    **METADATA,
    "name": "Engine",
    "policy": "Scheduler",
    "enable_prefix_caching": "Prefix cache",
    "prefix_cache": "Prefix cache's rules",
    "size_gb": "CPU memory, GB",
}
STATISTICS = ("mean", *QUANTILES, "p99.9", "max")
MONTH_H = 730  # hours in a month, as clouds bill them
BINDING_SHARE = 0.8  # the limit that binds is in bold if its metric reaches this share of the bound
NO_ANSWER = "No tried configuration meets the limits."


def in_order(names: Iterable[str]) -> list[str]:
    """Sort metrics as tables show them: latencies by family and statistic, then the others."""
    families, others = list(LATENCIES), list(OTHERS)

    def place(name: str) -> tuple[int, int, int, str]:
        family, statistic = split(name)
        if family in families:
            known = STATISTICS.index(statistic) if statistic in STATISTICS else len(STATISTICS)
            return 0, families.index(family), known, name
        return 1, others.index(name) if name in others else len(others), 0, name

    return sorted(set(names), key=place)


def metric_text(metric: str, value: float) -> str:
    """Return a metric's value with its unit ("312 ms", "98.1 %")."""
    factor, unit = scale(metric_of(metric), [value])
    return f"{amount(value * factor)} {unit}".strip()


def metric_name(name: str) -> str:
    """Return the label of what limits a choice. Names that are neither metrics nor "throughput" do not change."""
    if name == "throughput":
        return "queue growth"
    return metric_of(name).label if "." in name or name in OTHERS else name


def value_texts(estimate: Estimate) -> tuple[str, str]:
    """Return a value and "± half-width (model interval)", without the parts that are unknown or 0."""
    value, half = rounded(estimate.value, estimate.half_width)
    if estimate.value.is_integer() and (estimate.half_width.is_integer() or not estimate.has_interval):  # GPUs
        value, half = f"{estimate.value:,.0f}", f"{estimate.half_width:,.0f}" if estimate.has_interval else ""
    sampling = f"{PLUS_MINUS} {half}" if estimate.half_width > 0 and half else ""
    return value, " ".join(filter(None, (sampling, model_text(estimate))))


def estimate_text(estimate: Estimate) -> str:
    """Return the value with its intervals ("4.56 ± 0.12 (3.9-5.2)"), or the value alone."""
    return " ".join(filter(None, value_texts(estimate)))


def objective_head(objective: Objective) -> str:
    """Return the head of the objective's column: the unit, or the label if another column has the same unit."""
    return objective.label if objective.unit in {"", "$/h", "GPUs"} else objective.unit


def axis_labels(keys: Iterable[str]) -> dict[str, str]:
    """Return a label for each setting that a search varies. It is the complete key if short labels would be equal."""
    parts = {key: key.rpartition(".")[2] for key in keys}
    made = {key: LABELS.get(last, last.replace("_", " ")) for key, last in parts.items()}
    made |= {key: f"Decode side: {label}" for key, label in made.items() if key.startswith("deployment.decode.")}
    labels = list(made.values())
    return {key: key if labels.count(label) > 1 else label for key, label in made.items()}


def setting_text(value: Any) -> str:
    """Return a setting's value as short text."""
    match value:
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:g}"
        case dict():
            return ", ".join(f"{key} {setting_text(item)}" for key, item in value.items())
        case list() | tuple():
            return ", ".join(setting_text(item) for item in value)
        case _:
            return str(value)


def prefix_cache_metrics(points: Iterable[Point | None]) -> list[str]:
    """Return the metrics of the prefix cache that a point has."""
    known = {name for point in points if point is not None for name in point.values}
    return [name for name in PREFIX_CACHE if name in known]


def check_study(study: Study) -> None:
    """Raise InputError if there is no plan, or two plans or choices share a name."""
    if not study.plans:
        raise InputError("a report of a search needs at least one plan; the study has none")
    _require_unique([plan.name for plan in study.plans], "plans of a study must have unique names")
    for plan in study.plans:
        _require_unique([c.key for c in plan.choices], f"choices of plan {plan.name} must have unique keys")


def _require_unique(names: Sequence[str], rule: str) -> None:
    if len(set(names)) < len(names):
        repeated = sorted({name for name in names if names.count(name) > 1})
        raise InputError(f"{rule}; used twice: {', '.join(repeated[:5])}")


def simulated(plan: Plan) -> list[tuple[int, Choice]]:
    """Return (index, choice) of the ranked and scouted configurations."""
    return [(i, c) for i, c in enumerate(plan.choices) if c.status in (Status.RANKED, Status.SCOUTED)]


def hardware_text(plan: Plan, choice: Choice) -> str:
    """Return the number of GPUs, with their kind ("8 x H100") if a setting or the question names one for all."""
    gpu = setting_text(choice.settings.get("deployment.gpu", plan.metadata.get("gpu", "")))
    other = setting_text(choice.settings.get("deployment.decode.gpu", plan.metadata.get("decode side", gpu)))
    if not gpu or other != gpu or "deployment.groups" in choice.settings:
        return f"{choice.gpus:,}"
    return f"{choice.gpus:,} {TIMES} {Path(gpu).stem if gpu.endswith('.toml') else gpu}"


def output_token_cost(choice: Choice) -> Estimate:
    """Return the price of a million output tokens, at the capacity if there is one and otherwise at the rate."""
    capacity, at = choice.capacity_rps, choice.at
    if at is None or not (math.isfinite(capacity.value) and at.value("requests_per_s") > 0):
        return UNKNOWN_ESTIMATE if at is None else at.values.get("usd_per_million_output_tokens", UNKNOWN_ESTIMATE)
    tokens = at.value("output_tokens_per_s") / at.value("requests_per_s")
    usd = choice.price_per_hour_usd * 1e6 / 3600 / tokens  # times the seconds of a request
    value = usd / capacity.value
    ends = (capacity.model_high, capacity.model_low)
    return Estimate(value, value * capacity.half_width / capacity.value, *(usd / max(end, 1e-300) for end in ends))


def is_bound_by(choice: Choice, limit: Limit) -> bool:
    """Return whether a limit prevents a higher rate, and its metric is near the bound at the operating point."""
    if choice.at is None or choice.bottleneck.binds != limit.metric:
        return False
    return not choice.at.value(limit.metric) < BINDING_SHARE * limit.bound


def binding_text(plan: Plan, choice: Choice) -> str:
    """Return the name of the metric that binds, its value with the simulated rate, and why it binds if it is small."""
    name, at = metric_name(choice.bottleneck.binds), choice.at
    limit = next((one for one in plan.limits if one.metric == choice.bottleneck.binds), None)
    if at is None or limit is None:
        return name
    rate = f" at {amount(at.rate_rps)} requests/s" if math.isfinite(at.rate_rps) else ""
    beyond = "" if is_bound_by(choice, limit) else ", which jumps past its bound at a higher rate"
    value, bound = (metric_text(limit.metric, number) for number in (at.value(limit.metric), limit.bound))
    return f"{name} ({value}{rate}, limit {bound}){beyond}"


def rank_text(plan: Plan, index: int) -> str:
    """Return the rank of the choice at ``index`` as text, "=1" if tied with the best, or "~" if only scouted."""
    status = plan.choices[index].status
    if status is Status.RANKED:
        return "=1" if index < plan.tied and plan.tied > 1 else f"{index + 1}"
    return "~" if status is Status.SCOUTED else ""


def effort_text(effort: SearchEffort) -> str:
    """Return two sentences on the effort of a search: the candidates and the simulations."""
    share = effort.pruned / effort.candidates if effort.candidates else 0.0
    evaluated = effort.candidates - effort.pruned - effort.rejected
    reused = f" {counted(effort.reused, 'evaluation')} came from an earlier run." if effort.reused else ""
    duration = f"{effort.seconds:.1f} s" if effort.seconds < 120 else f"{effort.seconds / 60:.1f} min"
    return (
        f"{counted(effort.candidates, 'candidate')}: {evaluated:,} ranked or scouted, "
        f"{effort.pruned:,} pruned ({100 * share:.0f} %), "
        f"{effort.rejected:,} rejected; {effort.simulated:,} of them simulated. "
        f"{counted(effort.simulations, 'simulation')} of {counted(effort.requests, 'request')} in {duration}.{reused}"
    )


@dataclass(frozen=True)
class Miss:
    """A choice's point that is nearest to the limits, the limit that this point breaks most, and by which factor."""

    choice: Choice
    point: Point
    limit: Limit
    factor: float


def nearest_misses(plan: Plan, count: int = 3) -> list[Miss]:
    """Return the simulated choices that break a limit, the nearest first."""
    misses = []
    for choice in plan.choices:
        worst = []
        for point in choice.points or ((choice.at,) if choice.at else ()):
            values = [] if point.satisfied else [(limit, point.value(limit.metric)) for limit in plan.limits]
            missed = [(limit, value) for limit, value in values if not limit.is_satisfied(value)]
            broken = [Miss(choice, point, limit, _excess(limit, value)) for limit, value in missed]
            if broken:
                worst.append(max(broken, key=lambda miss: miss.factor))
        if worst:
            misses.append(min(worst, key=lambda miss: miss.factor))
    return sorted(misses, key=lambda miss: miss.factor)[:count]


def _excess(limit: Limit, value: float) -> float:
    over, under = (limit.bound, value) if limit.at_least else (value, limit.bound)
    return over / under if under > 0 else math.inf


def miss_text(miss: Miss) -> str:
    """Return how far a choice is from a limit ("TTFT p90 3 s at 4 requests/s, a factor of 1.5 from TTFT p90 ≤ 2 s")."""
    metric = miss.limit.metric
    factor = f"a factor of {miss.factor:.3g}" if math.isfinite(miss.factor) else "far"
    return (
        f"{metric_of(metric).label} {metric_text(metric, miss.point.value(metric))} at "
        f"{miss.point.rate_rps:.3g} requests/s, {factor} from {limit_text(miss.limit)}"
    )


LIMIT_COLUMNS = 3  # limits that have a column in a terminal
GROUPS = 8


def search_table(study: Study, *, top: int = 10) -> Group:
    """Return the answers of a search for a terminal, with the ``top`` best configurations of each plan."""
    check_study(study)
    parts: list[RenderableType] = []
    for plan in study.plans:
        limits = ", ".join(map(limit_text, plan.limits)) or "no limits"
        question = "; ".join([*map(str, plan.metadata.values()), limits, plan.objective.label])
        parts.append(Text.assemble((plan.name, "bold"), ": ", question))
        parts += [_no_answer(plan)] if plan.best is None else [_ranking(plan, top), _reasons(plan, plan.best, top)]
        parts += [_excluded(plan), Text()]
    if len(study.plans) > 1 and study.swaps:
        return Group(*parts, Text("Times worse than the best of each question:"), _swaps(study))
    return Group(*parts[:-1])


def _ranking(plan: Plan, top: int) -> Table:
    rows, limits = simulated(plan)[:top], plan.limits[:LIMIT_COLUMNS]
    has_capacity = any(math.isfinite(c.capacity_rps.value) for _, c in rows)
    made = boxed_table()
    made.add_column("#", justify="right", no_wrap=True)
    made.add_column("configuration", overflow="fold", min_width=14)
    for head in ["GPUs", "$/h", objective_head(plan.objective), *(["req/s"] if has_capacity else [])]:
        made.add_column(Text(head), justify="right", overflow="fold")
    scales = []
    for limit in limits:
        metric = metric_of(limit.metric)
        scales.append(scale(metric, [c.at.value(limit.metric) if c.at else math.nan for _, c in rows] or [limit.bound]))
        made.add_column(Text(f"{metric.label}\n{scales[-1][1]}"), justify="right", overflow="fold")
    cached = prefix_cache_metrics(choice.at for _, choice in rows)
    for name in cached:
        made.add_column(Text(f"{PREFIX_CACHE[name]}\n%"), justify="right", overflow="fold")
    for i, choice in rows:
        texts = [estimate_text(e).replace(" ", "\N{NO-BREAK SPACE}") for e in (choice.objective, choice.capacity_rps)]
        texts[1] += "*" * (choice.bottleneck.binds == "throughput")
        cells = []
        for limit, (factor, _) in zip(limits, scales, strict=True):
            value = choice.at.values.get(limit.metric, UNKNOWN_ESTIMATE) if choice.at else UNKNOWN_ESTIMATE
            mark = "*" * (limit.metric == choice.bottleneck.binds)
            half = f"{PLUS_MINUS} {two_digits(value.half_width * factor)}" if 0 < value.half_width < math.inf else ""
            style = "bold" if is_bound_by(choice, limit) else ""
            cells.append(Text.assemble((f"{amount(value.value * factor)}{mark}", style)))
            if interval := model_text(value, factor) or half:
                cells[-1].append(f"\n{interval}")
        made.add_row(
            Text(rank_text(plan, i)),
            Text(choice.name, style="bold green" if i < max(plan.tied, 1) else ""),
            Text(f"{choice.gpus:,}"),
            Text(f"{choice.price_per_hour_usd:,.2f}"),
            *(Text(text.replace("\N{NO-BREAK SPACE}(", "\n(")) for text in texts[: 1 + has_capacity]),
            *cells,
            *(Text(amount(100 * choice.at.value(name)) if choice.at else UNKNOWN) for name in cached),
            style="dim" if choice.status is Status.SCOUTED else "",
        )
    return made


def _reasons(plan: Plan, best: Choice, top: int) -> Text:
    shown = [choice for _, choice in simulated(plan)]
    cached = prefix_cache_metrics(choice.at for choice in shown[:top])
    legend = {
        f"± half-widths of {100 * plan.level:g} % intervals.": True,
        "(...): 90 % intervals of the cost model's error.": any(
            e.has_model_interval for c in shown[:top] for e in (c.objective, *(c.at.values.values() if c.at else ()))
        ),
        "=1: may be the best: its distance may be due to sampling or the cost model's error.": plan.tied > 1,
        "~: scouted, known roughly.": any(c.status is Status.SCOUTED for c in shown[:top]),
        "*: breaks first at a higher rate, near its bound or not (in the column of the rate: the queue grows).": any(
            c.bottleneck.binds for c in shown[:top]
        ),
        "cached: share of the prompt tokens in the prefix cache.": bool(cached),
        "loaded: from CPU memory behind it.": "loaded_share" in cached,
        "Columns of limits show the metrics at the lower end of the interval of req/s.": any(
            math.isfinite(c.capacity_rps.value) for c in shown[:top]
        ),
    }
    lines = [Text(" ".join(text for text, applies in legend.items() if applies), style="dim")]
    if len(shown) > top:
        lines.append(Text(f"{len(shown) - top:,} more ranked or scouted.", style="dim"))
    if plan.limits[LIMIT_COLUMNS:]:
        lines.append(Text(f"Also met: {', '.join(map(limit_text, plan.limits[LIMIT_COLUMNS:]))}.", style="dim"))
    lines += map(Text, plan.notes)
    on = hardware_text(plan, best) if TIMES in hardware_text(plan, best) else counted(best.gpus, "GPU")
    lines.append(Text.assemble("Best: ", (best.name, "bold"), f" ({on})"))
    lines += [Text(f"  \N{MIDDLE DOT} {reason}") for reason in plan.reasons]
    if (bottleneck := best.bottleneck) != Bottleneck():
        bound = capitalized(f"bound by {binding_text(plan, best)}. " if bottleneck.binds else "")
        lines.append(Text.assemble("Bottleneck: ", (bound, "bold"), bottleneck.cause))
    return Text("\n").join([*lines, *_shifts(plan)])


def _shifts(plan: Plan) -> Iterator[Text]:
    for limit in plan.limits:
        moved: list[Shift] = [shift for shift in plan.shifts if shift.metric == limit.metric]
        if moved:
            yield Text(f"For other bounds of {metric_of(limit.metric).label} ({plan.objective.unit}, roughly):")
            line = Text("  ")
            for shift in moved:
                style = "bold" if math.isclose(shift.bound, limit.bound) else ""
                value = Estimate(shift.objective, math.nan, shift.model_low, shift.model_high)
                text = " ".join(filter(None, (amount(value.value), model_text(value))))
                line.append(f"{metric_text(limit.metric, shift.bound)}: {text}   ", style=style)
            yield line


def _no_answer(plan: Plan) -> Text:
    misses = (
        Text.assemble("Nearest: ", (miss.choice.name, "bold"), f", {miss_text(miss)}.") for miss in nearest_misses(plan)
    )
    return Text("\n").join([Text(NO_ANSWER, style="bold red"), *misses])


def _excluded(plan: Plan) -> Text:
    groups = sorted(plan.excluded_groups, key=lambda group: -group.count)
    lines = [
        Text.assemble("Excluded: ", (f"{r.count:,}", "bold"), f" {TIMES} {r.name}: ", (r.example, "dim"))
        for r in groups[:GROUPS]
    ]
    if others := groups[GROUPS:]:
        lines.append(Text(f"Excluded: {sum(r.count for r in others):,} for {len(others)} other reasons."))
    return Text("\n").join([*lines, Text(effort_text(plan.effort))])


def _swaps(study: Study) -> SplitTable:
    made = boxed_table()
    made.add_column("best of \\ used for")
    for plan in study.plans:
        made.add_column(Text(plan.name), justify="right")
    for row in swap_ratios(study):
        cells = []
        for ratio in row:
            if ratio is None:
                cells.append(Text(UNKNOWN))
            elif math.isnan(ratio):
                cells.append(Text("fails", style="bold red"))
            else:
                cells.append(Text(f"{ratio:.2f} {TIMES}", style="bold" if ratio > 1.1 else ""))
        made.add_row(Text(study.plans[len(made.rows)].name), *cells)
    return SplitTable(made)


def swap_ratios(study: Study) -> list[list[float | None]]:
    """Return how many times worse one plan's best choice is for another plan, indexed [best of][used for].

    An entry is NaN if the choice breaks a limit of the other plan, and None if it is unknown.
    """
    ratios = {(swap.optimum_of, swap.used_for): swap.ratio for swap in study.swaps}
    names = [plan.name for plan in study.plans]
    return [[ratios.get((best, used), 1.0 if best == used else None) for used in names] for best in names]
