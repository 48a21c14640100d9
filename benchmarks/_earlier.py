"""Campaigns that newer ones took the place of: their rows are kept, so that no figure is replaced in silence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Rows = Mapping[str, Mapping[str, Any]]
"""By name."""


def replaced(retained: Rows, new: Rows, prefixes: tuple[str, ...]) -> list[Mapping[str, Any]]:
    """The kept rows of campaigns whose measured runs the new rows do not hold.

    A campaign is what a figure's name says before its last dot, where it begins with one of ``prefixes``. Rows that
    newer code makes of the very same runs are none of another campaign.
    """
    gone = {
        _campaign(name)
        for name, row in new.items()
        if name.startswith(prefixes) and name in retained and _measured_s(retained[name]) != _measured_s(row)
    }
    return [row for name, row in retained.items() if _campaign(name) in gone]


def _campaign(name: str) -> str:
    return name.rpartition(".")[0]


def _measured_s(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a figure's runs were measured to, by run; nothing where it has none."""
    runs = (row.get("details") or {}).get("signed_by_run") or {}
    return {run: of.get("measured_s") for run, of in runs.items()}
