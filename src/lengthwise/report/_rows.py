"""Rows of the headline table: numbers in one unit a row, for terminal and page alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lengthwise.metrics import Estimate, difference
from lengthwise.report._metrics import METRICS, NEITHER, Metric
from lengthwise.report._numbers import rounded, span
from lengthwise.report.result import Result

WORTH_SHARE = 0.005
"""A smaller difference than this is nothing to choose by, however sure it is."""


@dataclass(frozen=True)
class Cell:
    """One variant's number: texts in the row's unit, the estimate in SI, and whether it leads.

    ``interval`` is "± half-width", or both sides where one would reach what cannot be: below 0,
    or a share above 100 %; it is empty where none is known. ``model`` is the interval by the cost
    model's own error, "(low - high)", or empty.

    A variant leads where it is better than every other one beyond doubt, and by enough to
    matter: where the paired differences (same seeds) have intervals without 0, or, without
    summaries a seed, where intervals do not overlap.
    """

    text: str
    interval: str
    model: str
    estimate: Estimate
    leads: bool


@dataclass(frozen=True)
class Row:
    """A metric over all variants, in one unit."""

    metric: Metric
    unit: str
    cells: tuple[Cell, ...]


_UNITS = {
    "1/s": (1.0, "/s"),
    "share": (100.0, "%"),
    "seqs": (1.0, "seqs"),
    "usd": (1.0, "$"),
    "J": (1.0, "J"),
}


def rows(results: Sequence[Result]) -> list[Row]:
    """All rows; one that no variant can tell is left out."""
    made = [_row(metric, results) for metric in METRICS]
    return [row for row in made if any(math.isfinite(c.estimate.value) for c in row.cells)]


def paired(results: Sequence[Result]) -> bool:
    """Whether all variants were run with the same seeds, at least two of them."""
    seeds = [{s.seeds for s in r.summaries} for r in results]
    return len(results) > 1 and len(seeds[0]) > 1 and all(s == seeds[0] for s in seeds)


def _row(metric: Metric, results: Sequence[Result]) -> Row:
    estimates = [metric.read(r.summary) or Estimate(math.nan) for r in results]
    scale, unit = _scale(metric, results)
    leader = _leader(metric, results, estimates)
    top = scale if metric.unit == "share" else math.inf
    cells = (
        Cell(*_texts(e.value * scale, e.half_width * scale, top), _model(e, scale), e, i == leader)
        for i, e in enumerate(estimates)
    )
    return Row(metric, unit, tuple(cells))


def _texts(value: float, half_width: float, top: float) -> tuple[str, str]:
    """Value and interval as text, the interval cut to what can be: from 0 to ``top``."""
    text, half = rounded(value, half_width)
    up, down = min(half_width, top - value), min(half_width, value)
    if not half or min(up, down) >= half_width or min(up, down) < 0:
        return text, f"\N{PLUS-MINUS SIGN} {half}" if half else ""
    decimals = len(half.partition(".")[2])
    return text, f"+{up:,.{decimals}f} \N{MINUS SIGN}{down:,.{decimals}f}"


def _model(estimate: Estimate, scale: float) -> str:
    low, high = estimate.model_low * scale, estimate.model_high * scale
    return f"({span(low, high)})" if estimate.has_model_interval else ""


def _scale(metric: Metric, results: Sequence[Result]) -> tuple[float, str]:
    return latency_unit(metric.key, results) if metric.unit == "s" else _UNITS[metric.unit]


def latency_unit(key: str, results: Sequence[Result]) -> tuple[float, str]:
    """Factor and unit for a latency in all its statistics, so that they compare at a glance."""
    family = key.partition(".")[0]
    reads = [m.read for m in METRICS if m.key.partition(".")[0] == family]
    values = [e.value for r in results for read in reads if (e := read(r.summary)) is not None]
    return (1.0, "s") if max((v for v in values if math.isfinite(v)), default=0.0) >= 1 else (1e3, "ms")


def _leader(metric: Metric, results: Sequence[Result], estimates: Sequence[Estimate]) -> int | None:
    values = [e.value for e in estimates]
    if metric.better == NEITHER or len(results) < 2 or not all(map(math.isfinite, values)):
        return None
    best = max(range(len(values)), key=lambda i: metric.better * values[i])
    others = [i for i in range(len(values)) if i != best]
    return best if all(_beats(metric, results, estimates, best, i) for i in others) else None


def _beats(
    metric: Metric, results: Sequence[Result], estimates: Sequence[Estimate], one: int, other: int
) -> bool:
    """Whether ``one`` is better than ``other`` beyond their intervals; never where one is unknown."""
    if abs(estimates[one].value - estimates[other].value) < WORTH_SHARE * abs(estimates[other].value):
        return False
    if paired(results):
        gap = metric.read(difference(results[one].summaries, results[other].summaries))
        return gap is not None and metric.better * gap.value > gap.half_width
    a, b = estimates[one], estimates[other]
    return metric.better * (a.value - b.value) > a.half_width + b.half_width
