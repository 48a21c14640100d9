"""Dotted names in [search]: of limits, and of the settings that a search varies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lengthwise.scenario.sections import DeploymentSection, EngineSection, SchedulerSection

Table = dict[str, Any]

VARIABLE = {
    f"{name}.{key}": section
    for name, section in (
        ("deployment", DeploymentSection),
        ("engine", EngineSection),
        ("scheduler", SchedulerSection),
    )
    for key in section.model_fields
}
"""Settings that may be an axis."""

_METRICS = {
    "itl": "tbt",
    "e2e": "jct",
    "e2el": "jct",
    "delay": "queueing_delay",
    "queueing": "queueing_delay",
}
_OWN = {
    "scheduler": "scheduler.policy",
    "batch": "engine.max_num_seqs",
    "chunk": "engine.max_num_batched_tokens",
}


def flat(table: Mapping[str, Any], here: str = "") -> Table:
    """Nested tables as one with dotted keys."""
    out: Table = {}
    for key, value in table.items():
        name = f"{here}{str(key).replace('-', '_')}"
        if isinstance(value, dict):
            out |= flat(value, f"{name}.")
        else:
            out[name] = value
    return out


def axis_name(text: str, aliases: Mapping[str, Mapping[str, str]]) -> str:
    """The dotted key of a setting by any of its names; an unknown one comes back as it is."""
    section, dot, key = text.rpartition(".")
    if dot:
        return f"{section}.{aliases.get(section, {}).get(key, key)}"
    if text in _OWN:
        return _OWN[text]
    for name in ("deployment", "engine", "scheduler"):
        whole = f"{name}.{aliases.get(name, {}).get(text, text)}"
        if whole in VARIABLE:
            return whole
    return text


def limit_names(table: Mapping[str, Any]) -> Table:
    """``ttft.p90 = "2s"`` and ``e2e = { p99 = "9s" }`` by the metric's one spelling."""
    out: Table = {}
    for text, value in flat(table).items():
        metric, dot, statistic = text.partition(".")
        out[f"{_METRICS.get(metric, metric)}{dot}{statistic}"] = value
    return out
