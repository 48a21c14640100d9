"""The table of metrics: which metrics, in which order, with unit and direction, and its form on a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rich.console import Group
from rich.text import Text

from lengthwise.metrics import Counts, Hardware, Summary, difference
from lengthwise.report.binding import HardwareBottleneck, bottleneck_of, bound_by
from lengthwise.report.fitted_table import SplitTable, boxed_table
from lengthwise.report.formatting import MINUS, PLUS_MINUS, UNKNOWN, buckets, capitalized, model_text, rounded
from lengthwise.report.result import Result, check_results, scenario_of, shows_prefix_cache
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.metric_names import LATENCIES, LESS, MORE, NEITHER, scale
from lengthwise.schema.records import REJECTIONS, Rejection

Read = Callable[[Summary], Estimate | None]
Unit = Literal["s", "1/s", "share", "seqs", "tokens", "usd", "J", "replica_s", "ms"]


@dataclass(frozen=True)
class Metric:
    """One number of a summary. A terminal shows only ``headline`` metrics, but the page shows all."""

    key: str
    group: str
    label: str
    unit: Unit  # decides how the number is scaled
    better: int  # a direction
    read: Read
    headline: bool = True


def _latencies(key: str, headline: tuple[str, ...], more: tuple[str, ...] = ()) -> list[Metric]:
    field, label = f"{key}_s", LATENCIES[key].label

    def read(name: str) -> Read:
        return lambda s: getattr(getattr(s, field), name)

    order = sorted((*headline, *more), key=("mean", "p50", "p90", "p99").index)
    return [
        Metric(f"{field}.{n}", "Latency", f"{label} {n}", "s", LESS, read(n), headline=n in headline) for n in order
    ]


def _rate(key: str, label: str, read: Read) -> Metric:
    return Metric(f"rates.{key}", "Throughput", label, "1/s", MORE, read)


def _hardware(key: str, label: str, unit: Unit, read: Callable[[Hardware], Estimate]) -> Metric:
    return Metric(
        f"hardware.{key}", "Hardware", label, unit, NEITHER, lambda s: None if s.hardware is None else read(s.hardware)
    )


def _cost(key: str, label: str, unit: Unit, read: Callable[[Hardware], Estimate]) -> Metric:
    return replace(_hardware(key, label, unit, read), key=f"cost.{key}", group="Cost", better=LESS)


def _prefix(key: str, label: str, unit: Unit, *, headline: bool = True) -> Metric:
    def read(s: Summary) -> Estimate | None:
        return None if s.prefix_cache is None else getattr(s.prefix_cache, key)

    return Metric(f"prefix_cache.{key}", "Prefix cache", label, unit, MORE, read, headline)


METRICS: tuple[Metric, ...] = (
    *_latencies("ttft", ("mean", "p50", "p90", "p99")),
    *_latencies("tpot", ("p50", "p99")),
    *_latencies("tbt", ("p50", "p99")),
    *_latencies("jct", ("mean", "p50", "p99")),
    *_latencies("queueing_delay", ("mean",), ("p99",)),
    *_latencies("normalized_latency", (), ("mean",)),
    _rate("requests", "Requests", lambda s: s.rates.requests_per_s),
    _rate("output", "Output tokens", lambda s: s.rates.output_tokens_per_s),
    replace(_rate("prompt", "Prompt tokens", lambda s: s.rates.prompt_tokens_per_s), headline=False),
    replace(_rate("slo", "Within SLO", lambda s: s.goodput.share if s.goodput else None), unit="share"),
    _rate("goodput", "Goodput", lambda s: s.goodput.requests_per_s if s.goodput else None),
    _hardware("busy", "Busy", "share", lambda h: h.busy_share),
    _hardware("batch", "Batch", "seqs", lambda h: h.batch_seqs),
    _hardware("tokens_per_step", "Tokens per step", "tokens", lambda h: h.tokens_per_step),
    _hardware("mfu", "MFU", "share", lambda h: h.mfu),
    _hardware("mbu", "MBU", "share", lambda h: h.mbu),
    _hardware("kv", "KV cache in use", "share", lambda h: h.kv_utilization),
    _prefix("hit_rate", "Prompt tokens cached", "share"),
    _prefix("loaded_share", "Prompt tokens loaded", "share"),
    _prefix("storage_share", "Prompt tokens from storage", "share"),
    replace(_prefix("load_s", "Load, mean", "ms", headline=False), better=LESS),
    _prefix("saved_prefill_s", "Prefill saved", "replica_s"),
    _prefix("saved_share", "Prefill saved, share", "share", headline=False),
    _cost("output", "Per M output tokens", "usd", lambda h: h.cost.usd_per_million_output_tokens),
    replace(_cost("total", "Per M tokens, all", "usd", lambda h: h.cost.usd_per_million_tokens), headline=False),
    _cost("energy", "Energy/output token", "J", lambda h: h.energy_j_per_output_token),
)

MIN_SHARE = 0.005  # smaller relative differences do not matter for a choice, even if they are significant
_UNITS = {
    "1/s": (1.0, "/s"),
    "share": (100.0, "%"),
    "seqs": (1.0, "seqs"),
    "tokens": (1.0, ""),
    "usd": (1.0, "$"),
    "J": (1.0, "J"),
    "replica_s": (1.0, "s"),
    "ms": (1e3, "ms"),
}


@dataclass(frozen=True)
class Cell:
    """One variant's number in the row's unit.

    A variant leads if it is better than every other one by at least ``MIN_SHARE``, and significantly better. That means
    the intervals of paired differences (same seeds) exclude 0 or, without such pairs, the intervals do not overlap.
    """

    text: str
    interval: str  # "± half-width", or both sides where it would reach impossible values; empty where unknown
    model: str  # "(low-high)", the interval of the cost model's error, or empty
    estimate: Estimate  # in SI units
    leads: bool


@dataclass(frozen=True)
class Row:
    """A metric of all variants, in one unit."""

    metric: Metric
    unit: str
    cells: tuple[Cell, ...]


def rows(results: Sequence[Result]) -> list[Row]:
    """Return the rows of the table, one for each metric for which at least one variant has a value."""
    made = []
    has_prefix_cache = shows_prefix_cache(results)
    for metric in METRICS:
        if metric.group == "Prefix cache" and not has_prefix_cache:
            continue
        estimates = [metric.read(r.summary) or Estimate(math.nan) for r in results]
        if not any(math.isfinite(e.value) for e in estimates):
            continue
        scale, unit = latency_unit(metric.key, results) if metric.unit == "s" else _UNITS[metric.unit]
        leader = _leader(metric, results, estimates)
        largest = scale if metric.unit == "share" else math.inf
        cells = []
        for i, e in enumerate(estimates):
            texts = bounded_texts(e.value * scale, e.half_width * scale, largest)
            cells.append(Cell(*texts, model_text(e, scale), e, i == leader))
        by_rank = metric.key == "hardware.batch" and has_ranks(results)
        shown = replace(metric, label=f"{metric.label} of a rank (dp)") if by_rank else metric
        made.append(Row(shown, unit, tuple(cells)))
    return made


def has_ranks(results: Sequence[Result]) -> bool:
    """Return whether a variant has data-parallel ranks, whose batches and exchange of tokens labels then name."""
    return any(r.deployment is not None and any(side.parallel.dp > 1 for side in r.deployment.sides) for r in results)


def paired(results: Sequence[Result]) -> bool:
    """Return whether all variants ran with the same seeds, and with at least two."""
    seeds = [{s.seeds for s in r.summaries} for r in results]
    return len(results) > 1 and len(seeds[0]) > 1 and all(s == seeds[0] for s in seeds)


def bounded_texts(value: float, half_width: float, largest: float) -> tuple[str, str]:
    """Return value and interval as text. The interval is clipped to the possible range from 0 to ``largest``."""
    text, half = rounded(value, half_width)
    up, down = min(half_width, largest - value), min(half_width, value)
    if not half or min(up, down) >= half_width or min(up, down) < 0:
        return text, f"{PLUS_MINUS} {half}" if half else ""
    decimals = len(half.partition(".")[2])
    return text, f"+{up:,.{decimals}f} {MINUS}{down:,.{decimals}f}"


def latency_unit(key: str, results: Sequence[Result]) -> tuple[float, str]:
    """Return (factor, unit) for a latency in seconds. All statistics of a latency get the same unit."""
    family = key.partition(".")[0]
    reads = [m.read for m in METRICS if m.key.partition(".")[0] == family]
    values = [e.value for r in results for read in reads if (e := read(r.summary)) is not None]
    return (1.0, "s") if max((v for v in values if math.isfinite(v)), default=0.0) >= 1 else (1e3, "ms")


def _leader(metric: Metric, results: Sequence[Result], estimates: Sequence[Estimate]) -> int | None:
    """Return the index of the variant that is significantly better than all others, or None if no variant is."""
    values = [e.value for e in estimates]
    if metric.better == NEITHER or len(results) < 2 or not all(map(math.isfinite, values)):
        return None
    best = max(range(len(values)), key=lambda i: metric.better * values[i])
    for i, value in enumerate(values):
        if i == best:
            continue
        gap = Estimate(values[best] - value, estimates[best].half_width + estimates[i].half_width)
        if abs(gap.value) < MIN_SHARE * abs(value):
            return None
        if paired(results):
            gap = metric.read(difference(results[best].summaries, results[i].summaries)) or Estimate(math.nan)
        if not metric.better * gap.value > gap.half_width:
            return None
    return best


FEW_SEEDS = 3  # with two seeds, Student's t is 12.7 and intervals are very wide (three: 4.3)


def table(results: list[Result]) -> Group:
    """Return a terminal table of the variants side by side, with their bottlenecks below.

    Raises:
        InputError: There is no result, or two variants have the same name.
    """
    check_results(results)
    numbers = boxed_table()
    numbers.add_column("", no_wrap=True)
    for result in results:
        numbers.add_column(Text(result.name), justify="right")
    shown = [row for row in rows(results) if row.metric.headline]
    for row, following in zip(shown, [*shown[1:], None], strict=True):
        last = following is None or following.metric.group != row.metric.group
        label = Text.assemble(row.metric.label, (f" {row.unit}", "dim"))
        numbers.add_row(label, *(_cell(cell) for cell in row.cells), end_section=last)
    return Group(SplitTable(numbers), *_turn_table(results), _caption(results))


def turn_rows(results: Sequence[Result]) -> list[tuple[str, tuple[Estimate | None, ...], tuple[Estimate | None, ...]]]:
    """Return (turns, TTFT in seconds, hit rate) with an estimate for each variant, for turns that requests have."""
    if not shows_prefix_cache(results):
        return []
    turns = [{} if r.summary.prefix_cache is None else r.summary.prefix_cache.turns for r in results]
    names = dict.fromkeys(name for by_turn in turns for name, at in by_turn.items() if math.isfinite(at.ttft_s.value))
    found = [(name, [by_turn.get(name) for by_turn in turns]) for name in names]
    return [
        (
            name,
            tuple(None if at is None else at.ttft_s for at in each),
            tuple(None if at is None else at.hit_rate for at in each),
        )
        for name, each in found
    ]


def turn_texts(results: Sequence[Result]) -> list[list[tuple[str, str]]]:
    """Return for each row of ``turn_rows`` and each variant the TTFT with its unit and the hit rate in %, as text."""

    def text(estimate: Estimate | None, factor: float, largest: float, unit: str = "") -> str:
        if estimate is None or not math.isfinite(estimate.value):
            return UNKNOWN
        value, interval = bounded_texts(estimate.value * factor, estimate.half_width * factor, largest)
        return " ".join(filter(None, (value, interval, unit)))

    made = []
    for _, ttft_s, hit_rate in turn_rows(results):
        factor, unit = scale(LATENCIES["ttft"], [one.value for one in ttft_s if one is not None])
        cells = zip(ttft_s, hit_rate, strict=True)
        made.append([(text(a, factor, math.inf, unit), text(b, 100, 100)) for a, b in cells])
    return made


def _turn_table(results: Sequence[Result]) -> list[SplitTable]:
    texts = turn_texts(results)
    if not texts:
        return []
    numbers = boxed_table()
    numbers.add_column("at turn: mean TTFT;\nprompt tokens cached, %")
    for result in results:
        numbers.add_column(Text(result.name), justify="right")
    for (name, _, _), row in zip(turn_rows(results), texts, strict=True):
        numbers.add_row(name, *(ttft + (f"; {hit}" if hit != UNKNOWN else "") for ttft, hit in row))
    return [SplitTable(numbers)]


def _cell(cell: Cell) -> Text:
    text = Text(cell.text, style="bold green" if cell.leads else "")
    for interval in filter(None, (cell.interval, cell.model)):
        text.append(f" {interval}", style="dim")
    return text


def _caption(results: list[Result]) -> Text:
    lines = [Text(f"{capitalized(intervals_note(results))}.")]
    if note := model_note(results):
        lines.append(Text(f"{note}."))
    if any(r.summary.counts.finished < r.summary.counts.arrivals for r in results):
        lines += [Text.assemble((r.name, "bold"), f": {counts_note(r.summary.counts)}.") for r in results]
    else:
        lines[0].append(" All requests finished.")
    for names, note in notes_of(results):
        lines.append(Text.assemble((f"{names}: " if names else "", "bold"), (note, "bold yellow")))
    groups: dict[HardwareBottleneck, list[str]] = {}
    for result in results:
        if result.deployment is not None:
            groups.setdefault(bottleneck_of(result), []).append(result.name)
    for bottleneck, variants in groups.items():
        by = f" {capitalized(bound_by(bottleneck))} " if bottleneck.warning else f"{bound_by(bottleneck)} "
        lines.append(
            Text.assemble(
                (", ".join(variants), "bold"), ": ", (bottleneck.warning, "bold"), by, (bottleneck.resource, "bold"),
                f". {bottleneck.description}",
            )
        )  # fmt: skip
    return Text("\n").join(lines)


def intervals_note(results: Sequence[Result]) -> str:
    """Return where the intervals come from or, if there are none, how to get them."""
    summary = results[0].summary
    level = f"{100 * summary.intervals.level:g} % intervals"
    if summary.intervals.source == "seeds":
        few = ", few seeds: wide intervals" if len(summary.seeds) < FEW_SEEDS else ""
        return f"± half-widths of {level} over {len(summary.seeds)} seeds{few}"
    if not any(c.estimate.has_interval for row in rows(results) for c in row.cells):
        workload = scenario_of(results[0]).get("workload", {})
        replayed = "trace" in workload and not {"request_rate", "arrivals", "concurrency"} & set(workload)
        drawn = ("prompt", "output") if "concurrency" in workload else ("prompt", "output", "arrivals")
        is_same = replayed or not summary.counts.finished or all(_is_fixed(workload.get(key)) for key in drawn)
        return f"no intervals: too few requests{'' if is_same or not results[0].deployment else '; use --seeds'}"
    return f"± half-widths of {level} within one run (batch means)"


def _is_fixed(setting: Any) -> bool:
    kind = setting.get("kind") if isinstance(setting, dict) else setting
    return isinstance(kind, int) or kind in ("fixed", "constant", "all_at_once")


def model_note(results: Sequence[Result]) -> str:
    """Return a note on the numbers in parentheses, which show the cost model's error, or "" if there are none."""
    drawn = next((r for r in results if r.model_draws), None)
    if drawn is None:
        return ""
    detail = f"from {drawn.model_draws} more runs of the same requests; variants with one cost model share this error"
    return (
        f"In parentheses: {100 * drawn.summary.intervals.model_level:g} % intervals of the cost model's error, {detail}"
    )


def notes_of(results: Sequence[Result]) -> list[tuple[str, str]]:
    """Return (names of variants, note) for each distinct note. The names are "" if all variants have the note."""
    names: dict[str, list[str]] = {}
    for result in results:
        for note in result.notes:
            names.setdefault(note, []).append(result.name)
    return [("" if len(some) == len(results) else ", ".join(some), note) for note, some in names.items()]


def counts_note(counts: Counts) -> str:
    """Return the numbers of requests by outcome, the reasons of rejections, and the preemptions."""
    parts = buckets(counts, "requests")
    reasons = {
        Rejection.PROMPT_REACHES_MAX_MODEL_LEN: counts.rejected_too_long,
        Rejection.PROMPT_ABOVE_TOKEN_BUDGET: counts.rejected_over_token_budget,
        Rejection.REFUSED_BY_MEMORY_POLICY: counts.rejected_over_kv_memory,
    }
    if any(reasons.values()):
        parts.append(
            "rejected because " + ", ".join(f"{REJECTIONS[reason]}: {n:,}" for reason, n in reasons.items() if n)
        )
    if counts.preemptions:
        parts.append(f"{counts.preemptions:,} preemptions")
    return ", ".join(parts)
