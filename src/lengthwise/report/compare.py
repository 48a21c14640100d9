"""Comparison of two runs: a terminal table, a page and a JSON file."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
from rich.console import Group
from rich.text import Text

from lengthwise.metrics import Comparison, MetricDistance, MetricError, Side
from lengthwise.report import curves
from lengthwise.report.curves import Figure, json_numbers
from lengthwise.report.fitted_table import FittedTable, boxed_table
from lengthwise.report.formatting import UNKNOWN, amount, buckets, capitalized, signed
from lengthwise.report.html_page import Row, TableCell, write_page
from lengthwise.report.json_file import json_text
from lengthwise.schema.files import write_atomic
from lengthwise.schema.metric_names import LATENCIES, OTHERS, QUANTILES
from lengthwise.schema.records import RunResult

NAMES = {key: metric.label + ("/s" if metric.unit == "1/s" else "") for key, metric in (LATENCIES | OTHERS).items()}
POINTS, BINS = 300, 150
ERROR_COLUMNS = {"y": "error", "low": "low", "high": "high"}  # of a figure, by attribute of ``MetricError``


def _scale(comparison: Comparison, metric: str) -> tuple[float, str]:
    if metric in ("within_slo", "hit_rate"):
        return 100.0, "%"
    if metric not in LATENCIES:
        return 1.0, ""
    largest_s = max((max(e.a, e.b) for e in comparison.errors if e.metric == metric), default=0.0)
    return (1.0, "s") if largest_s >= 1 else (1e3, "ms")


def _signed(share: float) -> str:
    return signed(100 * share, 1 if abs(share) < 0.1 else 0)


def _percent(share: float) -> str:
    return f"{_signed(share)} %" if math.isfinite(share) else UNKNOWN


def _interval(error: MetricError) -> str:
    return f"{_signed(error.low)} to {_signed(error.high)}" if error.has_interval else ""


def _is_significant(error: MetricError) -> bool:
    return error.has_interval and (error.low > 0 or error.high < 0)


def _distance_cells(comparison: Comparison, one: MetricDistance) -> list[str]:
    pairs = (one.mape, one.median_ape) if comparison.paired else ()
    distance, *apes = (_percent(share).lstrip("+") for share in (one.wasserstein, *pairs))
    return [distance, f"{one.kolmogorov_smirnov:.3f}", *apes]


def _distance_heads(comparison: Comparison) -> list[str]:
    return ["mean distance", "largest gap", *(("mean APE", "median APE") if comparison.paired else ())]


def _client(side: Side) -> str:
    if side.client is None:
        return ""
    mean, median, largest = (f"{1e3 * s:.3g} ms" for s in dataclasses.astuple(side.client))
    lateness = f"{mean} late on average (median {median}, at most {largest})"
    return f"the client sent requests {lateness}, which TTFT and JCT include"


def _method(comparison: Comparison) -> str:
    requests = "the same requests, paired" if comparison.paired else "different requests"
    return f"{100 * comparison.level:g} % intervals of (A - B) / B by a bootstrap over blocks of requests; {requests}"


def exceeded_bounds(found: Comparison, bounds: dict[str, float]) -> list[str]:
    """Return a sentence for each error that is unknown, or significantly above its bound.

    ``bounds`` has the largest allowed relative errors by name, such as "ttft.p95". Raises UnknownNameError if a name in
    ``bounds`` is not one of the comparison's errors.
    """
    exceeded = []
    for key, bound in bounds.items():
        one = found[key]
        if math.isnan(one.error) or one.least > bound:
            interval = f" [{100 * one.low:+.1f}, {100 * one.high:+.1f}]" if one.has_interval else ""
            exceeded.append(f"{key} is {100 * one.error:+.1f} %{interval} off; {100 * bound:g} % is allowed")
    return exceeded


def compare_table(comparison: Comparison) -> Group:
    """Return a comparison for the terminal: warnings, errors with intervals (yellow if significant), and distances."""
    warnings = [Text.assemble(("warning: ", "bold yellow"), warning) for warning in comparison.warnings]
    numbers = boxed_table()
    numbers.add_column("", no_wrap=True)
    for letter, side in (("A", comparison.a), ("B", comparison.b)):
        numbers.add_column(Text(f"{letter}: {side.name}"), justify="right", overflow="fold")
    numbers.add_column("error", justify="right")
    numbers.add_column("interval", justify="right")
    for one, following in zip(comparison.errors, [*comparison.errors[1:], None], strict=True):
        scale, unit = _scale(comparison, one.metric)
        numbers.add_row(
            Text.assemble(f"{NAMES[one.metric]} {one.stat}".strip(), (f" {unit}" if unit else "", "dim")),
            amount(one.a * scale),
            amount(one.b * scale),
            Text(_percent(one.error), style="yellow" if _is_significant(one) else ""),
            Text(_interval(one), style="dim"),
            end_section=following is None or (one.stat != "" and following.metric != one.metric),
        )
    rows = [(NAMES[one.metric], *_distance_cells(comparison, one)) for one in comparison.distances]
    distances = FittedTable(("distributions", *_distance_heads(comparison)), rows)
    lines = [f"{_method(comparison)}."]
    for letter, side in (("A", comparison.a), ("B", comparison.b)):
        client = f"; {_client(side)}" if side.client else ""
        lines.append(f"{letter} ({side.source}): {', '.join(buckets(side.counts))}{client}.")
    no_warnings = Text("No warnings.", style="dim")
    return Group(*(warnings or [no_warnings]), numbers, distances, Text("\n".join(lines), style="dim"))


def write_compare_html(path: Path | str, comparison: Comparison, a: RunResult, b: RunResult) -> None:
    """Write a self-contained HTML page of a comparison."""
    drawn = _figures(comparison, a, b)
    latencies = dict.fromkeys(e.metric for e in comparison.errors if e.metric in LATENCIES)
    errors: list[Row] = []
    for metric in latencies:
        cells = (_error_cell(comparison, comparison[f"{metric}.{stat}"]) for stat in ("mean", *QUANTILES))
        errors.append([TableCell(NAMES[metric], unit=_scale(comparison, metric)[1]), *cells])
    metadata = [
        f"A: {comparison.a.source}",
        f"B: {comparison.b.source}, the reference",
        "same requests" if comparison.paired else "different requests",
        f"{comparison.a.counts.arrivals:,} and {comparison.b.counts.arrivals:,} requests",
    ]
    sides = []
    for letter, side in (("A", comparison.a), ("B", comparison.b)):
        counts = f"{', '.join(buckets(side.counts))}, over {side.span_s:,.1f} s."
        sides.append((f"{letter}: {side.name}", side, counts, _client(side)))
    write_page(
        path,
        "compare",
        data=[figure for group in drawn.values() for figure in group],
        heading=f"{comparison.a.name} against {comparison.b.name}",
        metadata=metadata + ([f"without the first {comparison.warmup_s:g} s"] if comparison.warmup_s else []),
        cards=[
            (
                f"{NAMES[metric]} p50",
                _percent(comparison[f"{metric}.p50"].error),
                _interval(comparison[f"{metric}.p50"]),
            )
            for metric in latencies
        ],
        comparison=comparison,
        method=_method(comparison),
        ids={name: [figure["id"] for figure in group] for name, group in drawn.items()},
        stats=("mean", *QUANTILES),
        errors=errors,
        rates=[[NAMES[e.metric], _error_cell(comparison, e)] for e in comparison.errors if not e.stat],
        distance_heads=["", *_distance_heads(comparison)],
        distances=[[NAMES[one.metric], *_distance_cells(comparison, one)] for one in comparison.distances],
        sides=sides,
        capitalized=capitalized,
    )


def _error_cell(comparison: Comparison, error: MetricError) -> TableCell:
    scale, _ = _scale(comparison, error.metric)
    values = f"{amount(error.a * scale)} : {amount(error.b * scale)}"
    css = "worse" if _is_significant(error) else ""
    return TableCell(_percent(error.error), _interval(error), unit=values, css=css)


def _figures(comparison: Comparison, a: RunResult, b: RunResult) -> dict[str, list[Figure]]:
    metrics = [one.metric for one in comparison.distances]
    return {
        "errors": [_error_figure(comparison, metric) for metric in metrics],
        "cdf": [_cdf(comparison, metric, (a, b)) for metric in metrics],
        "time": _over_time((a, b)),
    }


def _error_figure(comparison: Comparison, metric: str) -> Figure:
    rows = [one for one in comparison.errors if one.metric == metric]
    columns = {key: json_numbers(getattr(one, name) for one in rows) for key, name in ERROR_COLUMNS.items()}
    stats = [one.stat for one in rows]
    return {"id": f"error-{metric}", "kind": "errors", "title": LATENCIES[metric].title, "x": stats, **columns}


def _cdf(comparison: Comparison, metric: str, sides: tuple[RunResult, RunResult]) -> Figure:
    scale, unit = _scale(comparison, metric)
    at = curves.levels(POINTS)
    found = []
    for side in sides:
        curve = curves.quantile_curve(side.records, metric, at, comparison.warmup_s)
        assert curve is not None  # a metric without values has no distance
        found.append(curve * scale)
    drawn = {"y": json_numbers(at), "curves": [json_numbers(curve) for curve in found]}
    axis = {"unit": unit, "log": curves.needs_log_axis(np.concatenate(found))}
    return {"id": f"cdf-{metric}", "kind": "cdf", "title": LATENCIES[metric].title, **axis, **drawn}


def _over_time(sides: tuple[RunResult, RunResult]) -> list[Figure]:
    end_s = max(side.records.end_s for side in sides)
    edges = np.linspace(0.0, end_s if end_s > 0 else 1.0, BINS + 1)
    middles = (edges[:-1] + edges[1:]) / 2
    running, arrivals = [], []
    for side in sides:
        r = side.records.requests
        arrival_s = r.arrival_s[np.isfinite(r.arrival_s)]
        rejected_s = r.arrival_s[np.isnan(r.finished_s) & np.isnan(r.scheduled_s) & (r.status > 0)]
        events_s = (arrival_s, r.finished_s[np.isfinite(r.finished_s)], rejected_s)
        arrived, finished, rejected = (np.searchsorted(np.sort(at_s), middles, "right") for at_s in events_s)
        running.append(json_numbers(arrived - finished - rejected))
        arrivals.append(json_numbers(np.histogram(arrival_s, edges)[0] / np.diff(edges)))
    shared = {"kind": "time", "x": json_numbers(middles)}
    return [
        {"id": "time-running", "title": "Requests in the system", "unit": "", "curves": running, **shared},
        {"id": "time-arrivals", "title": "Arrivals", "unit": "per second", "curves": arrivals, **shared},
    ]


def write_compare_json(path: Path | str, comparison: Comparison) -> None:
    """Write every number of a comparison to a JSON file. Raises OutputError if the file cannot be written."""
    fields = {
        **{name: getattr(comparison, name) for name in ("paired", "level", "draws", "warmup_s")},
        "slo": comparison.slo.limits if comparison.slo else None,
        **{name: getattr(comparison, name) for name in ("warnings", "a", "b")},
        "errors": {e.key: {n: getattr(e, n) for n in ("a", "b", "error", "low", "high")} for e in comparison.errors},
        "distances": {d.metric: {k: v for k, v in vars(d).items() if k != "metric"} for d in comparison.distances},
    }
    write_atomic(path, json_text("comparison", fields).encode())
