"""Calibrations to people: a page."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from lengthwise.report.html_document import asset, document, header, plotly_js, scrolling, section, swatch
from lengthwise.schema.files import write_whole

NAMES = {
    "ttft": "Time to first token (TTFT)",
    "tpot": "Time per output token (TPOT)",
    "jct": "Job completion time (JCT)",
}
LINES = ("measured", "before", "after")
CDF_NOTE = (
    "Share of held-out requests that were at least this fast: as measured, and as simulated with the tables given "
    "(before) and with the calibrated ones (after). The closer a line is to the measured one, the better."
)
ERRORS_NOTE = "(simulated - measured) / measured; the interval is of the error after, over requests in blocks of time."
FACTORS_NOTE = (
    "What the tables given are multiplied by, and the host's seconds. Told: no, where the runs leave it open; agrees, "
    "where what they tell is what the tables hold already."
)

Rows = Sequence[Sequence[str]]


@dataclass(frozen=True)
class CdfPair:
    """Quantiles in seconds of a metric on the held-out requests of a run, measured, before and after."""

    run: str
    metric: str
    levels: tuple[float, ...]
    measured: tuple[float, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]


@dataclass(frozen=True)
class CalibrationPage:
    """What the page says, as text: tables with their heads as first rows, and a sentence each in the lists."""

    heading: str
    metadata: Sequence[str]
    warnings: Sequence[str]
    errors: Rows
    factors: Rows
    trust: Sequence[str]
    cdfs: Sequence[CdfPair]


def write_calibration_html(path: Path | str, page: CalibrationPage) -> None:
    """A self-contained page: warnings, distributions before and after, errors, factors, how far to trust.

    Nothing is fetched when it is opened (a content security policy sees to that), and the same calibration gives
    the same bytes.

    Raises:
        MissingExtraError: plotly is not installed.
        OutputError: The file cannot be written.
    """
    plotly = plotly_js()
    figures = [_figure(i, pair) for i, pair in enumerate(page.cdfs)]
    text = document(
        page.heading,
        _body(page, [figure["id"] for figure in figures]),
        styles=asset("page.css"),
        scripts=[plotly, asset("look.js"), asset("calibrate/calibrate.js")],
        data=json.dumps(figures, separators=(",", ":"), allow_nan=False),
    )
    write_whole(path, text.encode())


def _body(page: CalibrationPage, ids: Sequence[str]) -> str:
    plots = "".join(f'<figure><div class="plot" id="{i}"></div></figure>' for i in ids)
    legend = "".join(f"<li>{swatch(i)}{name}</li>" for i, name in enumerate(LINES))
    warned = f'<ul class="notice">{_items(page.warnings)}</ul>'
    return "".join(
        [
            header(page.heading, page.metadata),
            section("Warnings", warned) if page.warnings else "",
            section("Held-out requests", f'<ul class="legend">{legend}</ul><div class="grid">{plots}</div>', CDF_NOTE),
            section("Errors on held-out requests", _table("Errors", page.errors), ERRORS_NOTE),
            section("What was moved", _table("Parameters", page.factors), FACTORS_NOTE),
            section("How far it may be trusted", f"<ul>{_items(page.trust)}</ul>"),
        ]
    )  # fmt: skip


def _items(lines: Sequence[str]) -> str:
    return "".join(f"<li>{escape(line)}</li>" for line in lines)


def _table(label: str, rows: Rows) -> str:
    heads = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in rows[0])
    lines = "".join(_line(row) for row in rows[1:])
    return scrolling(label, f"<thead><tr>{heads}</tr></thead><tbody>{lines}</tbody>")


def _line(row: Sequence[str]) -> str:
    cells = "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
    return f'<tr><th scope="row">{escape(row[0])}</th>{cells}</tr>'


def _figure(index: int, pair: CdfPair) -> dict[str, Any]:
    lines = [getattr(pair, name) for name in LINES]
    shown = [x for line in lines for x in line if math.isfinite(x)]
    scale, unit = (1.0, "s") if max(shown, default=0.0) >= 1 else (1e3, "ms")
    positive = sorted(x for x in shown if x > 0)
    return {
        "id": f"cdf-{index}-{pair.metric}",
        "title": f"{NAMES[pair.metric]}, {pair.run}".replace("<", "&lt;"),
        "unit": unit,
        "log": bool(positive) and positive[-1] > 20 * positive[len(positive) // 20],
        "y": [round(level, 5) for level in pair.levels],
        "names": list(LINES),
        "curves": [_plain(line, scale) for line in lines],
    }


def _plain(line: Sequence[float], scale: float) -> list[float | None]:
    return [float(f"{scale * x:.5g}") if math.isfinite(x) else None for x in line]
