"""Headline cards: a few metrics, each with every variant as a bar, its value and its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from lengthwise.metrics import Estimate
from lengthwise.report._marks import SERIES, interval
from lengthwise.report._rows import Cell, Row, rows
from lengthwise.report.result import Result

HEADLINE = ("ttft_s.p99", "tbt_s.p99", "jct_s.p50", "rates.goodput", "rates.output", "cost.output")
TITLES = {
    "ttft_s.p99": "TTFT, 99th percentile",
    "tbt_s.p99": "Time between tokens, 99th percentile",
    "jct_s.p50": "JCT, median",
    "rates.goodput": "Goodput",
    "rates.output": "Output tokens",
    "cost.output": "Cost a million output tokens",
}


def cards(results: Sequence[Result]) -> str:
    """The cards' HTML."""
    shown = {row.metric.key: row for row in rows(results)}
    if "rates.goodput" not in shown and "rates.requests" in shown:
        shown = {**shown, "rates.goodput": shown["rates.requests"]}
    made = [_card(key, shown[key], results) for key in HEADLINE if key in shown]
    return f'<div class="cards">{"".join(made)}</div>'


def _card(key: str, row: Row, results: Sequence[Result]) -> str:
    title = "Requests" if row.metric.key == "rates.requests" else TITLES[key]
    hint = {1: "higher is better", -1: "lower is better", 0: ""}[row.metric.better]
    top = max(_top(c.estimate) for c in row.cells)
    lines = "".join(_line(i, r.name, c, top) for i, (r, c) in enumerate(zip(results, row.cells, strict=True)))
    unit = {"/s": "a second", "%": "%", "$": "$"}.get(row.unit, row.unit)
    return (
        f'<article class="card"><h3>{escape(title)} <span class="unit">{unit}</span></h3>'
        f'<p class="hint">{hint}</p><ul>{lines}</ul></article>'
    )


def _line(index: int, name: str, cell: Cell, top: float) -> str:
    shown = cell.estimate
    value = shown.value
    whisker = _span("whisker", shown.low, shown.high, top) if shown.has_interval else ""
    if shown.has_model_interval:
        whisker = _span("model-span", shown.model_low, shown.model_high, top) + whisker
    leads = " leads" if cell.leads else ""
    return (
        f'<li class="bar{leads}" style="--c:var(--series-{index % SERIES})">'
        f'<span class="name">{escape(name)}</span>'
        f'<span class="value">{cell.text}{interval(cell)}</span>'
        f'<span class="track"><i class="fill" style="width:{_share(value, top):.2f}%"></i>{whisker}</span>'
        "</li>"
    )


def _span(kind: str, low: float, high: float, top: float) -> str:
    left = _share(low, top)
    return f'<i class="{kind}" style="left:{left:.2f}%;width:{_share(high, top) - left:.2f}%"></i>'


def _top(estimate: Estimate) -> float:
    """The largest number that a bar must show."""
    ends = (estimate.value, estimate.high, estimate.model_high)
    return max(_finite(end) for end in ends)


def _share(value: float, top: float) -> float:
    return 100 * min(1.0, max(0.0, _finite(value) / top)) if top > 0 else 0.0


def _finite(value: float, otherwise: float = 0.0) -> float:
    return value if math.isfinite(value) else otherwise
