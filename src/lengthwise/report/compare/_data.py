"""What the page's figures draw: plain data, thinned out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.metrics import Comparison, request_column
from lengthwise.report._curves import gap_curve, levels
from lengthwise.report.compare._words import LONG, scale_of
from lengthwise.schema.measured import Measured

Array = npt.NDArray[Any]
Figure = dict[str, Any]

POINTS, BINS = 300, 150


def figures(comparison: Comparison, a: Measured, b: Measured) -> dict[str, list[Figure]]:
    """Figures by section: "errors" by quantile, "cdf" of each metric, "time"."""
    told = [one.metric for one in comparison.distances]
    return {
        "errors": [_errors(comparison, metric) for metric in told],
        "cdf": [_cdf(comparison, metric, (a, b)) for metric in told],
        "time": _over_time((a, b)),
    }


def _errors(comparison: Comparison, metric: str) -> Figure:
    rows = [one for one in comparison.errors if one.metric == metric]
    return {
        "id": f"error-{metric}",
        "kind": "errors",
        "title": LONG[metric],
        "x": [one.stat for one in rows],
        "y": [_short(one.error) for one in rows],
        "low": [_short(one.low) for one in rows],
        "high": [_short(one.high) for one in rows],
    }


def _cdf(comparison: Comparison, metric: str, sides: tuple[Measured, Measured]) -> Figure:
    scale, unit = scale_of(comparison, metric)
    at = levels(POINTS)
    curves = [_quantiles(side, metric, at, comparison.warmup_s) * scale for side in sides]
    return {
        "id": f"cdf-{metric}",
        "kind": "cdf",
        "title": LONG[metric],
        "unit": unit,
        "log": _wide(np.concatenate(curves)),
        "y": _all(at),
        "curves": [_all(curve) for curve in curves],
    }


def _quantiles(side: Measured, metric: str, at: Array, warmup_s: float) -> Array:
    if metric == "tbt":
        found = gap_curve(side.records.gaps, at)
        assert found is not None  # a metric without values has no distance
        return found
    r = side.records.requests
    values = request_column(r, f"{metric}_s")[r.arrival_s >= warmup_s]
    curve: Array = np.quantile(values[np.isfinite(values)], at, method="inverted_cdf")
    return curve


def _wide(values: Array) -> bool:
    positive = values[values > 0]
    return len(positive) > 0 and float(positive.max()) > 20 * float(np.quantile(positive, 0.05))


def _over_time(sides: tuple[Measured, Measured]) -> list[Figure]:
    """Requests in the system, and arrivals a second, over both runs' time."""
    end_s = max(side.records.end_s for side in sides)
    edges = np.linspace(0.0, end_s if end_s > 0 else 1.0, BINS + 1)
    middle = _all((edges[:-1] + edges[1:]) / 2)
    made = []
    panels = (("running", "Requests in the system", _present), ("arrivals", "Arrivals", _arrivals))
    for key, title, read in panels:
        curves = [_all(read(side, edges)) for side in sides]
        unit = "" if key == "running" else "a second"
        made.append(
            {"id": f"time-{key}", "kind": "time", "title": title, "unit": unit, "x": middle, "curves": curves}
        )
    return made


def _present(side: Measured, edges: Array) -> Array:
    """How many had arrived and not ended, at the middles; who never ended stays."""
    r, at = side.records.requests, (edges[:-1] + edges[1:]) / 2
    came = np.sort(r.arrival_s[np.isfinite(r.arrival_s)])
    gone = np.sort(r.finished_s[np.isfinite(r.finished_s)])
    refused = np.sort(r.arrival_s[np.isnan(r.finished_s) & np.isnan(r.scheduled_s) & (r.status > 0)])
    count: Array = (
        np.searchsorted(came, at, "right")
        - np.searchsorted(gone, at, "right")
        - np.searchsorted(refused, at, "right")
    )
    return count.astype(np.float64)


def _arrivals(side: Measured, edges: Array) -> Array:
    arrival_s = side.records.requests.arrival_s
    rates: Array = np.histogram(arrival_s[np.isfinite(arrival_s)], edges)[0] / np.diff(edges)
    return rates


def _all(values: Array) -> list[float | None]:
    return [_short(float(v)) for v in values]


def _short(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None
