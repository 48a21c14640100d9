"""Figure data: run records thinned out to as many points as a figure can show, in numbers that JSON can hold."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.metrics import request_column
from lengthwise.report.result import Result
from lengthwise.schema.records import Records, TokenGaps

Array = npt.NDArray[Any]
Figure = dict[str, Any]  # a figure as JSON: ``id`` of its box, ``title``, and what the page's script needs to draw it


def json_number(value: float, digits: int = 5) -> float | None:
    """Return ``value`` with so many significant digits; None, which draws a gap, where it is not finite."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def json_numbers(values: Iterable[float] | Array) -> list[float | None]:
    """Return each value with five significant digits, or None where it is not finite."""
    return [json_number(float(value)) for value in values]


def needs_log_axis(values: Array) -> bool:
    """Return whether the values span so much that a linear axis would hide most of them."""
    positive = values[values > 0]
    return len(positive) > 0 and float(positive.max()) > 20 * float(np.quantile(positive, 0.05))


def levels(points: int) -> Array:
    """Return the cumulative shares at which a CDF is read: evenly spaced, and denser in the upper tail."""
    tail = 1 - 10.0 ** -np.linspace(1, 4, points // 4)
    return np.unique(np.round(np.concatenate([np.linspace(0, 1, points - len(tail)), tail]), 5))


def quantile_curve(records: Records, metric: str, at: Array, from_s: float = -math.inf) -> Array | None:
    """Return [levels] quantiles in seconds of a latency of requests from ``from_s`` on; None where none has one."""
    if metric == "tbt":
        return gap_curve(records.gaps, at)
    column = request_column(records.requests, f"{metric}_s")[records.requests.arrival_s >= from_s]
    column = column[np.isfinite(column)]
    return np.quantile(column, at, method="inverted_cdf") if len(column) else None


def gap_curve(gaps: TokenGaps, at: Array) -> Array | None:
    """Return [levels] quantiles of the time between tokens in seconds; None where there are no gaps."""
    if gaps.total == 0:
        return None
    if gaps.gap_s is not None and gaps.count is not None:
        values, count = gaps.gap_s, gaps.count
    else:
        values, count = np.minimum((gaps.edges_s[:-1] + gaps.edges_s[1:]) / 2, gaps.max_s), gaps.histogram
    cumulative = np.cumsum(count)
    return np.asarray(values[np.searchsorted(cumulative, np.maximum(1, np.ceil(at * cumulative[-1])))])


def over_time(result: Result, points: int) -> dict[str, Array]:
    """Return batch, queue, KV share and output rate over time in at most ``points`` bins; NaN in idle bins."""
    series = result.records.series
    fold = -(-len(series.step_s) // points)

    def folded(column: Array) -> Array:
        padded = np.concatenate([column, np.zeros(-len(column) % fold)])
        return np.asarray(padded.reshape(-1, fold).sum(axis=1))

    step_s = folded(series.step_s)

    def mean(column: Array) -> Array:
        return np.asarray(np.divide(folded(column), step_s, out=np.full(len(step_s), np.nan), where=step_s > 0))

    width_s = fold * series.bin_s
    blocks = np.nan if result.deployment is None else result.deployment.kv.num_blocks
    return {
        "time_s": (np.arange(len(step_s)) + 0.5) * width_s,
        "batch": mean(series.seqs_s),
        "waiting": mean(series.waiting_s),
        "kv": mean(series.kv_blocks_s) / blocks,
        "output": folded(series.output_tokens) / width_s,
    }
