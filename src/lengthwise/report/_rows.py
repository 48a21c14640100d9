"""The headline table: which numbers, in which order and unit, for terminal and page alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lengthwise.metrics import Estimate, Summary
from lengthwise.report._numbers import rounded

Read = Callable[[Summary], Estimate | None]

LESS, MORE, NEITHER = -1, 1, 0


@dataclass(frozen=True)
class Metric:
    """One number of a summary; ``unit`` decides how it is scaled, ``better`` which way is good."""

    key: str
    group: str
    label: str
    unit: str
    better: int
    read: Read


@dataclass(frozen=True)
class Cell:
    """One variant's number: texts in the row's unit, the estimate in SI, and whether it leads.

    A variant leads where its interval overlaps with no other one.
    """

    text: str
    half_width: str
    estimate: Estimate
    leads: bool


@dataclass(frozen=True)
class Row:
    """A metric over all variants, in one unit."""

    metric: Metric
    unit: str
    cells: tuple[Cell, ...]


def _quantile(field: str, name: str) -> Read:
    return lambda s: getattr(getattr(s, field), name)


def _hardware(name: str) -> Read:
    return lambda s: None if s.hardware is None else getattr(s.hardware, name)


def _latency(field: str, label: str, statistics: Sequence[str]) -> list[Metric]:
    return [
        Metric(f"{field}.{name}", "Latency", f"{label} {name}", "s", LESS, _quantile(field, name))
        for name in statistics
    ]


METRICS: tuple[Metric, ...] = (
    *_latency("ttft_s", "TTFT", ("mean", "p50", "p90", "p99")),
    *_latency("tpot_s", "TPOT", ("p50", "p99")),
    *_latency("tbt_s", "TBT", ("p50", "p99")),
    *_latency("jct_s", "JCT", ("mean", "p50", "p99")),
    *_latency("queueing_delay_s", "Queueing", ("mean", "p99")),
    *_latency("normalized_latency_s", "Latency/token", ("mean",)),
    Metric("rates.requests", "Throughput", "Requests", "1/s", MORE, lambda s: s.rates.requests_per_s),
    Metric("rates.output", "Throughput", "Output tokens", "1/s", MORE, lambda s: s.rates.output_tokens_per_s),
    Metric("rates.prompt", "Throughput", "Prompt tokens", "1/s", MORE, lambda s: s.rates.prompt_tokens_per_s),
    Metric(
        "goodput.share",
        "Throughput",
        "Within SLO",
        "share",
        MORE,
        lambda s: None if s.goodput is None else s.goodput.share,
    ),
    Metric(
        "goodput.rate",
        "Throughput",
        "Goodput",
        "1/s",
        MORE,
        lambda s: None if s.goodput is None else s.goodput.requests_per_s,
    ),
    Metric("hardware.busy", "Hardware", "Busy", "share", NEITHER, _hardware("busy_share")),
    Metric("hardware.batch", "Hardware", "Batch", "seqs", NEITHER, _hardware("batch_seqs")),
    Metric("hardware.mfu", "Hardware", "MFU", "share", NEITHER, _hardware("mfu")),
    Metric("hardware.mbu", "Hardware", "MBU", "share", NEITHER, _hardware("mbu")),
    Metric("hardware.kv", "Hardware", "KV cache held", "share", NEITHER, _hardware("kv_utilization")),
    Metric(
        "cost.output",
        "Cost",
        "Per M output tokens",
        "usd",
        LESS,
        lambda s: None if s.hardware is None else s.hardware.cost.usd_per_million_output_tokens,
    ),
    Metric(
        "cost.total",
        "Cost",
        "Per M tokens, all",
        "usd",
        LESS,
        lambda s: None if s.hardware is None else s.hardware.cost.usd_per_million_tokens,
    ),
    Metric("energy.output", "Cost", "Energy/output token", "J", LESS, _hardware("energy_j_per_output_token")),
)

_UNITS = {
    "1/s": (1.0, "/s"),
    "share": (100.0, "%"),
    "seqs": (1.0, "seqs"),
    "usd": (1.0, "$"),
    "J": (1.0, "J"),
}


def rows(summaries: Sequence[Summary]) -> list[Row]:
    """The headline rows; one that no variant can tell is left out."""
    made = [_row(metric, summaries) for metric in METRICS]
    return [row for row in made if any(math.isfinite(c.estimate.value) for c in row.cells)]


def _row(metric: Metric, summaries: Sequence[Summary]) -> Row:
    estimates = [metric.read(s) or Estimate(math.nan) for s in summaries]
    scale, unit = _scale(metric.unit, [e.value for e in estimates])
    leader = _leader(estimates, metric.better)
    cells = (
        Cell(*rounded(e.value * scale, e.half_width * scale), e, i == leader) for i, e in enumerate(estimates)
    )
    return Row(metric, unit, tuple(cells))


def _scale(unit: str, values: Sequence[float]) -> tuple[float, str]:
    """Factor and unit for a whole row, so that its numbers compare at a glance."""
    if unit != "s":
        return _UNITS[unit]
    largest = max((abs(v) for v in values if math.isfinite(v)), default=0.0)
    return (1.0, "s") if largest >= 1 else (1e3, "ms")


def _leader(estimates: Sequence[Estimate], better: int) -> int | None:
    """The variant that is better than all others beyond its and their intervals."""
    if better == NEITHER or len(estimates) < 2 or not all(e.has_interval for e in estimates):
        return None
    best = max(range(len(estimates)), key=lambda i: better * estimates[i].value)
    others = [e for i, e in enumerate(estimates) if i != best]
    gaps = [
        better * (estimates[best].value - e.value) - estimates[best].half_width - e.half_width for e in others
    ]
    return best if min(gaps) > 0 else None
