"""Settings laid over settings."""

from __future__ import annotations

from typing import Any

Table = dict[str, Any]

_RIVALS = {
    "workload": (
        (("preset",), ("trace", "format", "time_scale", "sort"), ("prompt", "output", "correlation")),
        (("concurrency",), ("request_rate", "arrivals")),
    ),
    "lab": ((("loads",), ("rates",)),),
}
_RATELESS = ("all_at_once", "rate_profile")


def merged(base: Table, over: Table) -> Table:
    """``base`` with what ``over`` says. Tables are merged key by key; the rest is replaced.

    A table with a ``kind`` replaces the other whole, and a workload's new source or load drops the
    old one: over ``preset = "chat-1m"``, ``trace = "x.csv"`` leaves the trace alone. A
    laboratory's ``rates`` and ``loads`` drop each other. None takes a key away.
    """
    out = {key: value for key, value in base.items() if key not in over}
    for key, value in over.items():
        old = base.get(key)
        if value is None:
            continue
        if isinstance(value, dict) and isinstance(old, dict) and "kind" not in value:
            out[key] = merged(_without_rivals(key, old, value) if key in _RIVALS else old, value)
        else:
            out[key] = value
    return out


def dropped(base: Table, over: Table) -> list[list[str]]:
    """By section, the keys of ``base`` ("workload.trace") that give way to rivals in ``over``."""
    found = []
    for section in _RIVALS:
        old, new = base.get(section), over.get(section)
        if isinstance(old, dict) and isinstance(new, dict):
            kept = _without_rivals(section, old, new)
            found.append([f"{section}.{key}" for key in old if key not in kept and key not in new])
    return [keys for keys in found if keys]


def _without_rivals(section: str, base: Table, over: Table) -> Table:
    over = {key: value for key, value in over.items() if value is not None}  # who leaves drops nobody
    gone: set[str] = set()
    for family in _RIVALS[section]:
        for group in family:
            if any(key in over for key in group):
                gone.update(key for rival in family if rival is not group for key in rival)
    if _kind(over) in _RATELESS:
        gone.add("request_rate")
    if "request_rate" in over and _kind(base) in _RATELESS:
        gone.add("arrivals")
    return {key: value for key, value in base.items() if key not in gone}


def _kind(table: Table) -> Any:
    arrivals = table.get("arrivals")
    return arrivals.get("kind") if isinstance(arrivals, dict) else None
