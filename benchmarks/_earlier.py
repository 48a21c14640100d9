"""Campaigns that newer ones replaced: their rows are archived, so that no figure is replaced unnoticed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Rows = Mapping[str, Mapping[str, Any]]
"""By name."""


def replaced(saved: Rows, new: Rows, prefixes: tuple[str, ...]) -> list[Mapping[str, Any]]:
    """Return the saved rows of campaigns (names up to the last dot) whose measured runs differ from the new rows'."""

    def measured_s(row: Mapping[str, Any]) -> dict[str, Any]:
        runs = (row.get("details") or {}).get("signed_by_run") or {}
        return {run: of.get("measured_s") for run, of in runs.items()}

    gone = {
        name.rpartition(".")[0]
        for name, row in new.items()
        if name.startswith(prefixes) and name in saved and measured_s(saved[name]) != measured_s(row)
    }
    return [row for name, row in saved.items() if name.rpartition(".")[0] in gone]
