"""Two runs against each other to people: a terminal table, a page and a file."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.metrics import STATS, Comparison, MetricError, request_column
from lengthwise.report.compare_text import (
    LONG,
    NAMES,
    client_text,
    counts_text,
    distance_cells,
    distance_heads,
    error_text,
    how_paired,
    interval_text,
    is_significant,
    scale_of,
    value_text,
)
from lengthwise.report.curves import gap_curve, levels
from lengthwise.report.html_document import asset, document, header, plotly_js, scrolling, section, swatch
from lengthwise.report.json_file import plain
from lengthwise.schema.files import write_whole
from lengthwise.schema.records import Measured

Array = npt.NDArray[Any]
Figure = dict[str, Any]

POINTS, BINS = 300, 150


def figures(comparison: Comparison, a: Measured, b: Measured) -> dict[str, list[Figure]]:
    """Figures by section: "errors" by quantile, "cdf" of each metric, "time"."""
    told = [one.metric for one in comparison.distances]
    return {
        "errors": [_error_figure(comparison, metric) for metric in told],
        "cdf": [_cdf(comparison, metric, (a, b)) for metric in told],
        "time": _over_time((a, b)),
    }


def _error_figure(comparison: Comparison, metric: str) -> Figure:
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
        made.append({"id": f"time-{key}", "kind": "time", "title": title, "unit": unit, "x": middle, "curves": curves})
    return made


def _present(side: Measured, edges: Array) -> Array:
    """How many had arrived and not ended, at the middles; who never ended stays."""
    r, at = side.records.requests, (edges[:-1] + edges[1:]) / 2
    came = np.sort(r.arrival_s[np.isfinite(r.arrival_s)])
    gone = np.sort(r.finished_s[np.isfinite(r.finished_s)])
    refused = np.sort(r.arrival_s[np.isnan(r.finished_s) & np.isnan(r.scheduled_s) & (r.status > 0)])
    count: Array = (
        np.searchsorted(came, at, "right") - np.searchsorted(gone, at, "right") - np.searchsorted(refused, at, "right")
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


STAT_HEADS = ("mean", *STATS)
CELL_NOTE = "Below each error its interval in percent, then A : B."
ERRORS_NOTE = "Relative error of A against B at each statistic; bars are its interval, where one is known."
CDF_NOTE = "Share of requests (for TBT, of tokens) that were at least this fast, one over the other."
TIME_NOTE = "Requests that arrived and had not ended, and arrivals, warm-up included."
DISTANCE_NOTE = (
    "Moved by: the mean distance of equal quantiles, over the mean of B (Wasserstein). Largest gap: between the "
    "curves below (Kolmogorov-Smirnov)."
)
PAIRED_NOTE = " APE: |A - B| / B of each request, one by one."
NOTES = """<dl class="notes">
<dt>A, B</dt><dd>B is taken for the truth; an error of +10 % says that A has 10 % more</dd>
<dt>Interval</dt><dd>how far the error moves with the requests that happened to come: blocks of consecutive requests
are drawn again and again. It does not say how far another run of the same engine would lie off</dd>
<dt>Colour</dt><dd>the interval does not hold 0: there is an error beyond chance</dd>
<dt>TTFT, TPOT, TBT, JCT</dt><dd>arrival until first token; time between tokens of one request, its mean; between any
two tokens; arrival until last token</dd>
</dl>"""


def page(
    comparison: Comparison, *, sections: dict[str, list[str]], styles: str, scripts: Sequence[str], data: str
) -> str:
    """The whole document; ``sections`` names the figures of each, ``data`` is their JSON."""
    heading = f"{comparison.a.name} against {comparison.b.name}"
    note = DISTANCE_NOTE + (PAIRED_NOTE if comparison.paired else "")
    body = [
        header(heading, _metadata(comparison)),
        _warnings(comparison),
        section("How far A is off B", _errors_section(comparison), f"{how_paired(comparison)}. {CELL_NOTE}"),
        section("Error by quantile", _plots(sections["errors"]), ERRORS_NOTE),
        section("Distributions", _legend(comparison) + _plots(sections["cdf"]), CDF_NOTE),
        section("How far apart", _distances(comparison), note),
        section("Over time", _legend(comparison) + _plots(sections["time"]), TIME_NOTE),
        section("What was compared", _sides(comparison)),
        section("How to read it", NOTES),
    ]
    return document(heading, "".join(body), styles=styles, scripts=scripts, data=data)


def _metadata(comparison: Comparison) -> list[str]:
    metadata = [
        f"A: {comparison.a.source}",
        f"B: {comparison.b.source}, taken for the truth",
        "same requests" if comparison.paired else "different requests",
        f"{comparison.a.counts.arrivals:,} and {comparison.b.counts.arrivals:,} requests",
    ]
    if comparison.warmup_s:
        metadata.append(f"the first {comparison.warmup_s:g} s left out")
    return metadata


def _warnings(comparison: Comparison) -> str:
    if not comparison.warnings:
        return ""
    items = "".join(f"<li>{escape(doubt)}</li>" for doubt in comparison.warnings)
    return section("Doubts", f'<ul class="notice">{items}</ul>')


def _errors_section(comparison: Comparison) -> str:
    latencies = [metric for metric in LONG if any(e.metric == metric for e in comparison.errors)]
    heads = "".join(f'<th scope="col">{stat}</th>' for stat in STAT_HEADS)
    lines = [_line(comparison, metric) for metric in latencies]
    whole = f"<thead><tr><td></td>{heads}</tr></thead><tbody>{''.join(lines)}</tbody>"
    rates = [e for e in comparison.errors if not e.stat]
    rows = "".join(f'<tr><th scope="row">{NAMES[e.metric]}</th>{_cell(comparison, e)}</tr>' for e in rates)
    return scrolling("Errors of latencies", whole, "errors") + scrolling(
        "Errors of rates", f"<tbody>{rows}</tbody>", "errors"
    )


def _line(comparison: Comparison, metric: str) -> str:
    cells = "".join(_cell(comparison, comparison[f"{metric}.{stat}"]) for stat in STAT_HEADS)
    unit = f'<span class="unit">{scale_of(comparison, metric)[1]}</span>'
    return f'<tr><th scope="row">{NAMES[metric]} {unit}</th>{cells}</tr>'


def _cell(comparison: Comparison, one: MetricError) -> str:
    scale, _ = scale_of(comparison, one.metric)
    sure = ' class="worse"' if is_significant(one) else ""
    between = f'<span class="half">{interval_text(one)}</span>' if one.has_interval else ""
    values = f"{value_text(one.a * scale)} : {value_text(one.b * scale)}"
    return f'<td{sure}><b>{error_text(one)}</b>{between}<span class="both">{values}</span></td>'


def _distances(comparison: Comparison) -> str:
    rows = ""
    for one in comparison.distances:
        told = "".join(f"<td>{cell}</td>" for cell in distance_cells(comparison, one))
        rows += f'<tr><th scope="row">{NAMES[one.metric]}</th>{told}</tr>'
    shown = "".join(f'<th scope="col">{head}</th>' for head in distance_heads(comparison))
    return scrolling("Distances", f"<thead><tr><td></td>{shown}</tr></thead><tbody>{rows}</tbody>")


def _plots(ids: Sequence[str]) -> str:
    boxes = "".join(f'<figure><div class="plot" id="{figure_id}"></div></figure>' for figure_id in ids)
    return f'<div class="grid">{boxes}</div>'


def _legend(comparison: Comparison) -> str:
    names = ((0, f"A: {comparison.a.name}"), (1, f"B: {comparison.b.name}"))
    return f'<ul class="legend">{"".join(f"<li>{swatch(i)}{escape(name)}</li>" for i, name in names)}</ul>'


def _sides(comparison: Comparison) -> str:
    items = []
    for i, (letter, run) in enumerate((("A", comparison.a), ("B", comparison.b))):
        told = client_text(run)
        own = f" {told[0].upper()}{told[1:]}." if told else ""
        items.append(
            f"<li><h3>{swatch(i)}<span>{letter}: {escape(run.name)}</span></h3>"
            f"<p>{escape(run.source)}</p>"
            f'<p class="muted">{counts_text(run.counts)}, over {run.span_s:,.1f} s.{own}</p></li>'
        )
    return f'<ul class="verdicts">{"".join(items)}</ul>'


def write_compare_html(path: Path | str, comparison: Comparison, a: Measured, b: Measured) -> None:
    """A self-contained page: doubts, errors with intervals, distributions, both runs over time.

    Nothing is fetched when it is opened (a content security policy sees to that), and the same runs give
    the same bytes.

    Raises:
        MissingExtraError: plotly is not installed.
        OutputError: The file cannot be written.
    """
    plotly = plotly_js()
    drawn = figures(comparison, a, b)
    data = json.dumps([f for some in drawn.values() for f in some], separators=(",", ":"), allow_nan=False)
    text = page(
        comparison,
        sections={name: [f["id"] for f in some] for name, some in drawn.items()},
        styles=asset("page.css") + asset("compare/compare.css"),
        scripts=[plotly, asset("look.js"), asset("compare/compare.js")],
        data=data,
    )
    write_whole(path, text.encode())


VERSION = 1


def write_compare_json(path: Path | str, comparison: Comparison) -> None:
    """A JSON file with every number of a comparison, under stable keys (see the module).

    Raises:
        OutputError: The file cannot be written.
    """
    text = json.dumps(compare_dict(comparison), indent=2, ensure_ascii=False, allow_nan=False)
    write_whole(path, (text + "\n").encode())


def compare_dict(comparison: Comparison) -> dict[str, Any]:
    """A comparison as what JSON knows."""
    distances = {one.metric: dataclasses.asdict(one) for one in comparison.distances}
    for one in distances.values():
        del one["metric"]
    made: dict[str, Any] = plain(
        {
            "format": "lengthwise.comparison",
            "version": VERSION,
            "paired": comparison.paired,
            "level": comparison.level,
            "draws": comparison.draws,
            "warmup_s": comparison.warmup_s,
            "slo": comparison.slo.limits if comparison.slo else None,
            "warnings": list(comparison.warnings),
            "a": dataclasses.asdict(comparison.a),
            "b": dataclasses.asdict(comparison.b),
            "errors": {one.key: _error(one) for one in comparison.errors},
            "distances": distances,
        }
    )
    return made


def _error(one: MetricError) -> dict[str, float]:
    return {"a": one.a, "b": one.b, "error": one.error, "low": one.low, "high": one.high}
