"""The HTML page of a calibration: distributions and errors before and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lengthwise.report.curves import Figure, json_numbers, needs_log_axis
from lengthwise.report.html_page import write_page
from lengthwise.schema.metric_names import LATENCIES

LINES = ("measured", "before", "after")

Rows = Sequence[Sequence[str]]


@dataclass(frozen=True)
class CdfPair:
    """Quantiles in seconds of a metric over held-out requests: measured, and simulated before and after calibration."""

    run: str
    metric: str
    levels: tuple[float, ...]
    measured: tuple[float, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]


@dataclass(frozen=True)
class CalibrationPage:
    """Contents of the page as text. The first row of a table has the column heads. Lists have one sentence per item."""

    heading: str
    metadata: Sequence[str]
    warnings: Sequence[str]
    errors: Rows
    factors: Rows
    trust: Sequence[str]
    cdfs: Sequence[CdfPair]


def write_calibration_html(path: Path | str, page: CalibrationPage) -> None:
    """Write a self-contained HTML page of a calibration."""
    figures = [_figure(i, pair) for i, pair in enumerate(page.cdfs)]
    cards = [
        (f"{metric} p50, {run}", after, f"{before} before; {interval}")
        for run, metric, statistic, _, before, after, interval in page.errors[1:]
        if statistic == "p50"
    ]
    context = {"heading": page.heading, "metadata": page.metadata, "cards": cards, "page": page, "lines": LINES}
    write_page(path, "calibrate", data=figures, ids=[figure["id"] for figure in figures], **context)


def _figure(index: int, pair: CdfPair) -> Figure:
    curves = np.array([pair.measured, pair.before, pair.after])
    finite = curves[np.isfinite(curves)]
    scale, unit = (1.0, "s") if max(finite, default=0.0) >= 1 else (1e3, "ms")
    return {
        "id": f"cdf-{index}-{pair.metric}",
        "title": f"{LATENCIES[pair.metric].title}, {pair.run}".replace("<", "&lt;"),
        "unit": unit,
        "log": needs_log_axis(finite),
        "y": [round(level, 5) for level in pair.levels],
        "names": LINES,
        "curves": [json_numbers(curve * scale) for curve in curves],
    }
