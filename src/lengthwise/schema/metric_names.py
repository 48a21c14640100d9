"""Defines the names of metrics: keys, aliases, labels, units, and whether less or more is better.

A name is a latency with a statistic ("ttft.p99", "jct.mean") or the key of another metric ("requests_per_s"). Fields of
records and summaries add the unit: "ttft_s".
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

LESS, MORE, NEITHER = -1, 1, 0  # what is better
QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}  # levels of the quantiles that every report has


@dataclass(frozen=True)
class Metric:
    """One metric. The unit "share" means a number from 0 to 1. ``better`` is LESS, MORE or NEITHER."""

    key: str
    label: str
    unit: str = "s"
    better: int = LESS
    title: str = ""
    aliases: tuple[str, ...] = ()


def _by_key(*metrics: Metric) -> dict[str, Metric]:
    return {metric.key: metric for metric in metrics}


LATENCIES = _by_key(
    Metric("ttft", "TTFT", title="Time to first token (TTFT)"),
    Metric("tpot", "TPOT", title="Time per output token (TPOT)"),
    Metric("tbt", "TBT", title="Time between tokens (TBT)", aliases=("itl",)),
    Metric("jct", "JCT", title="Job completion time (JCT)", aliases=("e2e", "e2el", "e2e_latency", "request_latency")),
    Metric("queueing_delay", "Queueing", title="Queueing delay", aliases=("delay", "queueing")),
    Metric("normalized_latency", "Latency/token", title="Latency per token"),
)
OTHERS = _by_key(
    Metric("within_slo", "Within SLO", "share", MORE),
    Metric("served", "Served", "share", MORE),
    Metric("requests_per_s", "Requests", "1/s", MORE),
    Metric("output_tokens_per_s", "Output tokens", "1/s", MORE),
    Metric("goodput", "Goodput", "1/s", MORE),
    Metric("usd_per_thousand_requests", "Per 1,000 requests", "usd"),
    Metric("usd_per_million_output_tokens", "Per M output tokens", "usd"),
    Metric("batch_seqs", "Batch", "seqs", NEITHER),
    Metric("energy_j_per_output_token", "Energy/output token", "J"),
    Metric("power_w", "Power", "W"),
    Metric("mfu", "MFU", "share", NEITHER),
    Metric("mbu", "MBU", "share", NEITHER),
    Metric("kv_utilization", "KV cache in use", "share", NEITHER),
    Metric("hit_rate", "Prompt tokens cached", "share", MORE),
    Metric("loaded_share", "Prompt tokens loaded", "share", NEITHER),
    Metric("busy_share", "Busy", "share", NEITHER),
    Metric("preemptions_per_request", "Preemptions/request", ""),
)
PREFIX_CACHE = {"hit_rate": "cached", "loaded_share": "loaded"}
"""Metrics that exist only where prompts share prefixes and a cache is on, with their short column labels."""
ALIASES = {alias: metric.key for metric in LATENCIES.values() for alias in metric.aliases}


def split(name: str) -> tuple[str, str]:
    """Split a name into its key, which replaces an alias, and its statistic ("" if the name has none)."""
    key, _, statistic = name.partition(".")
    return ALIASES.get(key, key), statistic


def metric_of(name: str) -> Metric:
    """Return how to show a metric ("ttft.p90"). The label has the statistic. An unknown name becomes the label."""
    key, statistic = split(name)
    if key in LATENCIES:
        return replace(LATENCIES[key], key=name, label=f"{LATENCIES[key].label} {statistic}".strip())
    return OTHERS.get(name, Metric(name, name.replace("_", " "), "", NEITHER))


def scale(metric: Metric, values: Iterable[float]) -> tuple[float, str]:
    """Return (factor, unit) such that these values, multiplied by the factor, are easy to read in the unit."""
    if metric.unit == "s":
        return (1.0, "s") if max((abs(v) for v in values if math.isfinite(v)), default=0.0) >= 1 else (1e3, "ms")
    return {"share": (100.0, "%"), "1/s": (1.0, "/s"), "usd": (1.0, "$")}.get(metric.unit, (1.0, metric.unit))


def quantity(name: str, value: float, digits: int = 6) -> str:
    """Return a metric's value with its unit and at most ``digits`` significant digits: "312 ms", "1234 s", "98 %"."""
    if math.isinf(value):
        return "infinite"
    factor, unit = scale(metric_of(name), [value])
    return f"{float(f'{value * factor:.{digits}g}'):.12g} {unit}".strip()


def is_quantile(statistic: str) -> bool:
    """Return whether a statistic is a quantile, such as "p99" or "p99.9"."""
    return bool(re.fullmatch(r"p\d+(\.\d+)?", statistic)) and 0 < float(statistic[1:]) < 100


def quantile_level(statistic: str) -> float:
    """Return the level of a quantile: 0.99 for "p99"."""
    return float(statistic[1:]) / 100
