"""The numbers of the headline table: which, in which order, unit and direction."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lengthwise.metrics import Hardware, Summary, difference
from lengthwise.report.formatting import rounded, span
from lengthwise.report.result import Result
from lengthwise.schema.estimate import Estimate

Read = Callable[[Summary], Estimate | None]
Unit = Literal["s", "1/s", "share", "seqs", "usd", "J"]

LESS, MORE, NEITHER = -1, 1, 0


@dataclass(frozen=True)
class Metric:
    """One number of a summary; ``unit`` decides how it is scaled, ``better`` which way is good.

    A terminal shows the ``headline`` ones, the page all.
    """

    key: str
    group: str
    label: str
    unit: Unit
    better: int
    read: Read
    headline: bool = True


def _latencies(field: str, label: str, headline: tuple[str, ...], more: tuple[str, ...] = ()) -> list[Metric]:
    def read(name: str) -> Read:
        return lambda s: getattr(getattr(s, field), name)

    order = sorted((*headline, *more), key=("mean", "p50", "p90", "p99").index)
    return [
        Metric(f"{field}.{n}", "Latency", f"{label} {n}", "s", LESS, read(n), headline=n in headline) for n in order
    ]


def _rate(key: str, label: str, read: Read) -> Metric:
    return Metric(f"rates.{key}", "Throughput", label, "1/s", MORE, read)


def _hardware(key: str, label: str, unit: Unit, read: Callable[[Hardware], Estimate]) -> Metric:
    def known(s: Summary) -> Estimate | None:
        return None if s.hardware is None else read(s.hardware)

    return Metric(f"hardware.{key}", "Hardware", label, unit, NEITHER, known)


def _cost(key: str, label: str, unit: Unit, read: Callable[[Hardware], Estimate]) -> Metric:
    return replace(_hardware(key, label, unit, read), key=f"cost.{key}", group="Cost", better=LESS)


METRICS: tuple[Metric, ...] = (
    *_latencies("ttft_s", "TTFT", ("mean", "p50", "p99"), ("p90",)),
    *_latencies("tpot_s", "TPOT", ("p50", "p99")),
    *_latencies("tbt_s", "TBT", ("p50", "p99")),
    *_latencies("jct_s", "JCT", ("mean", "p50", "p99")),
    *_latencies("queueing_delay_s", "Queueing", ("mean",), ("p99",)),
    *_latencies("normalized_latency_s", "Latency/token", (), ("mean",)),
    _rate("requests", "Requests", lambda s: s.rates.requests_per_s),
    _rate("output", "Output tokens", lambda s: s.rates.output_tokens_per_s),
    replace(_rate("prompt", "Prompt tokens", lambda s: s.rates.prompt_tokens_per_s), headline=False),
    replace(_rate("slo", "Within SLO", lambda s: s.goodput.share if s.goodput else None), unit="share"),
    _rate("goodput", "Goodput", lambda s: s.goodput.requests_per_s if s.goodput else None),
    _hardware("busy", "Busy", "share", lambda h: h.busy_share),
    _hardware("batch", "Batch", "seqs", lambda h: h.batch_seqs),
    _hardware("mfu", "MFU", "share", lambda h: h.mfu),
    _hardware("mbu", "MBU", "share", lambda h: h.mbu),
    _hardware("kv", "KV cache held", "share", lambda h: h.kv_utilization),
    _cost("output", "Per M output tokens", "usd", lambda h: h.cost.usd_per_million_output_tokens),
    replace(_cost("total", "Per M tokens, all", "usd", lambda h: h.cost.usd_per_million_tokens), headline=False),
    _cost("energy", "Energy/output token", "J", lambda h: h.energy_j_per_output_token),
)


MIN_SHARE = 0.005
"""A smaller difference than this is nothing to choose by, however sure it is."""


@dataclass(frozen=True)
class Cell:
    """One variant's number: texts in the row's unit, the estimate in SI, and whether it leads.

    ``interval`` is "± half-width", or both sides where one would reach what cannot be: below 0,
    or a share above 100 %; it is empty where none is known. ``model`` is the interval by the cost
    model's own error, "(low - high)", or empty.

    A variant leads where it is better than every other one beyond doubt, and by enough to
    matter: where the paired differences (same seeds) have intervals without 0, or, without
    summaries a seed, where intervals do not overlap.
    """

    text: str
    interval: str
    model: str
    estimate: Estimate
    leads: bool


@dataclass(frozen=True)
class Row:
    """A metric over all variants, in one unit."""

    metric: Metric
    unit: str
    cells: tuple[Cell, ...]


_UNITS = {"1/s": (1.0, "/s"), "share": (100.0, "%"), "seqs": (1.0, "seqs"), "usd": (1.0, "$"), "J": (1.0, "J")}


def rows(results: Sequence[Result]) -> list[Row]:
    """All rows; one that no variant can tell is left out."""
    made = [_row(metric, results) for metric in METRICS]
    return [row for row in made if any(math.isfinite(c.estimate.value) for c in row.cells)]


def paired(results: Sequence[Result]) -> bool:
    """Whether all variants were run with the same seeds, at least two of them."""
    seeds = [{s.seeds for s in r.summaries} for r in results]
    return len(results) > 1 and len(seeds[0]) > 1 and all(s == seeds[0] for s in seeds)


def _row(metric: Metric, results: Sequence[Result]) -> Row:
    estimates = [metric.read(r.summary) or Estimate(math.nan) for r in results]
    scale, unit = _scale(metric, results)
    leader = _leader(metric, results, estimates)
    top = scale if metric.unit == "share" else math.inf
    cells = (
        Cell(*_texts(e.value * scale, e.half_width * scale, top), _model(e, scale), e, i == leader)
        for i, e in enumerate(estimates)
    )
    return Row(metric, unit, tuple(cells))


def _texts(value: float, half_width: float, top: float) -> tuple[str, str]:
    """Value and interval as text, the interval cut to what can be: from 0 to ``top``."""
    text, half = rounded(value, half_width)
    up, down = min(half_width, top - value), min(half_width, value)
    if not half or min(up, down) >= half_width or min(up, down) < 0:
        return text, f"\N{PLUS-MINUS SIGN} {half}" if half else ""
    decimals = len(half.partition(".")[2])
    return text, f"+{up:,.{decimals}f} \N{MINUS SIGN}{down:,.{decimals}f}"


def _model(estimate: Estimate, scale: float) -> str:
    low, high = estimate.model_low * scale, estimate.model_high * scale
    return f"({span(low, high)})" if estimate.has_model_interval else ""


def _scale(metric: Metric, results: Sequence[Result]) -> tuple[float, str]:
    return latency_unit(metric.key, results) if metric.unit == "s" else _UNITS[metric.unit]


def latency_unit(key: str, results: Sequence[Result]) -> tuple[float, str]:
    """Factor and unit for a latency in all its statistics, so that they compare at a glance."""
    family = key.partition(".")[0]
    reads = [m.read for m in METRICS if m.key.partition(".")[0] == family]
    values = [e.value for r in results for read in reads if (e := read(r.summary)) is not None]
    return (1.0, "s") if max((v for v in values if math.isfinite(v)), default=0.0) >= 1 else (1e3, "ms")


def _leader(metric: Metric, results: Sequence[Result], estimates: Sequence[Estimate]) -> int | None:
    values = [e.value for e in estimates]
    if metric.better == NEITHER or len(results) < 2 or not all(map(math.isfinite, values)):
        return None
    best = max(range(len(values)), key=lambda i: metric.better * values[i])
    others = [i for i in range(len(values)) if i != best]
    return best if all(_improvement(metric, results, estimates, best, i) for i in others) else None


def _improvement(
    metric: Metric, results: Sequence[Result], estimates: Sequence[Estimate], one: int, other: int
) -> bool:
    """Whether ``one`` is better than ``other`` beyond their intervals; never where one is unknown."""
    if abs(estimates[one].value - estimates[other].value) < MIN_SHARE * abs(estimates[other].value):
        return False
    if paired(results):
        gap = metric.read(difference(results[one].summaries, results[other].summaries))
        return gap is not None and metric.better * gap.value > gap.half_width
    a, b = estimates[one], estimates[other]
    return metric.better * (a.value - b.value) > a.half_width + b.half_width
