"""Fits of profiles as a terminal table and as JSON: errors by operator, estimator and region."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from lengthwise.cost import FitReport
from lengthwise.report.fitted_table import FittedTable
from lengthwise.report.json_file import json_text
from lengthwise.schema.cost_tables import CostEvidence, CostTables

REGIONS = ("inside", "small", "medium", "large", "out_of_range")
_DECIMAL_BELOW = 0.02  # percentages of at least this share are printed without decimals


def fit_table(report: FitReport) -> FittedTable:
    """Return a table of errors on held-out points: "median (95th percentile)". A star marks the chosen estimators."""
    lines: list[tuple[str, ...]] = []
    picked, by_row = dict(report.picked), dict[tuple[str, str], dict[str, Any]]()
    for fit in report.compared:
        by_row.setdefault((fit.operator, fit.estimator), {})[fit.region] = fit
    for operator, rows in groupby(by_row.items(), key=lambda row: row[0][0]):
        label = operator
        for (_, estimator), fits in rows:
            mark = "*" if picked.get(operator) == estimator else " "
            points = max(fit.rows for fit in fits.values())
            cells = [_cell(fits[region]) if region in fits else "-" for region in REGIONS]
            lines.append((label, f"{mark} {estimator}", f"{points:,}", *cells))
            label = ""
    return FittedTable(("operator", "estimator", "points", *REGIONS), lines, wraps=())


def _cell(fit: Any) -> str:
    digits = 0 if fit.p95_error >= _DECIMAL_BELOW else 1
    return f"{fit.median_error:.1%} ({fit.p95_error:.{digits}%})"


def fits_json(fits: Mapping[int, tuple[CostTables, FitReport]], files: Mapping[int, Path]) -> str:
    """Return fits by TP degree as the text of a JSON file. ``files`` has the paths of the cost tables by TP degree."""
    fields = [_fit_fields(tp, tables.evidence, report, files.get(tp)) for tp, (tables, report) in fits.items()]
    return json_text("profile_fit", {"fits": fields})


def _fit_fields(tp: int, evidence: CostEvidence, report: FitReport, path: Path | None) -> dict[str, Any]:
    return {
        "tp": tp,
        "file": str(path) if path else None,
        "source": evidence.source,
        "estimator": report.estimator,
        "method": report.method,
        "picked": dict(report.picked),
        "compared": [asdict(fit) for fit in report.compared],
        "filled": list(report.filled),
        "notes": list(report.notes),
        "errors": {error.part: error.log_sd for error in evidence.errors},
        "reach": asdict(evidence.reach),
    }
