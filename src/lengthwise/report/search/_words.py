"""What the quantities of a plan are called, in which unit they are shown, and which way is good."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lengthwise.report._metrics import LESS, MORE, NEITHER
from lengthwise.report._numbers import rounded
from lengthwise.report._ran import FACTS
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.plan import Limit, Objective

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
LABELS = {**FACTS, "policy": "Scheduler"}
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


def sentence(text: str) -> str:
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
