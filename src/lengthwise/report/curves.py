"""Data of figures: run records reduced to as many points as a figure can show, as numbers that JSON allows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.metrics import hit_rate_over_time, request_column
from lengthwise.report.result import Result
from lengthwise.schema.records import Records, TokenGaps

Array = npt.NDArray[Any]
Figure = dict[str, Any]  # a figure as JSON: ``id`` of its box, ``title``, and what the page's script needs to draw it


def json_number(value: float, digits: int = 5) -> float | None:
    """Return ``value`` with ``digits`` significant digits. If it is not finite, return None, which draws a gap."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def json_numbers(values: Iterable[float] | Array) -> list[float | None]:
    """Return each value with five significant digits, or None if it is not finite."""
    return [json_number(float(value)) for value in values]


def needs_log_axis(values: Array) -> bool:
    """Return whether the values differ by such large factors that a linear axis would hide most of them."""
    positive = values[values > 0]
    return len(positive) > 0 and float(positive.max()) > 20 * float(np.quantile(positive, 0.05))


def levels(points: int) -> Array:
    """Return the levels at which a CDF is drawn: evenly spaced, and denser in the upper tail."""
    tail = 1 - 10.0 ** -np.linspace(1, 4, points // 4)
    return np.unique(np.round(np.concatenate([np.linspace(0, 1, points - len(tail)), tail]), 5))


def quantile_curve(records: Records, metric: str, at: Array, from_s: float = -math.inf) -> Array | None:
    """Return the quantiles in seconds of a latency at the levels ``at``, over requests that arrive from ``from_s`` on.

    The time between tokens ("tbt") is over all requests. The result is None if there are no values.
    """
    if metric == "tbt":
        return gap_curve(records.gaps, at)
    column = request_column(records.requests, f"{metric}_s")[records.requests.arrival_s >= from_s]
    column = column[np.isfinite(column)]
    return np.quantile(column, at, method="inverted_cdf") if len(column) else None


def gap_curve(gaps: TokenGaps, at: Array) -> Array | None:
    """Return the quantiles in seconds of the time between tokens at the levels ``at``, or None if there are no gaps."""
    if gaps.total == 0:
        return None
    if gaps.gap_s is not None and gaps.count is not None:
        values, count = gaps.gap_s, gaps.count
    else:
        values, count = np.minimum((gaps.edges_s[:-1] + gaps.edges_s[1:]) / 2, gaps.max_s), gaps.histogram
    cumulative = np.cumsum(count)
    return np.asarray(values[np.searchsorted(cumulative, np.maximum(1, np.ceil(at * cumulative[-1])))])


def over_time(result: Result, points: int) -> dict[str, Array]:
    """Return batch, queue, used share of the KV cache, hit rate and output rate in at most ``points`` time bins.

    Batch, queue and share are NaN in bins without a step. The hit rate is NaN where no prompt is admitted.
    """
    series = result.records.series
    fold = -(-len(series.step_s) // points)

    def folded(column: Array) -> Array:
        padded = np.concatenate([column, np.zeros(-len(column) % fold)])
        return np.asarray(padded.reshape(-1, fold).sum(axis=1))

    step_s = folded(series.step_s)

    def mean(column: Array) -> Array:
        return np.asarray(np.divide(folded(column), step_s, out=np.full(len(step_s), np.nan), where=step_s > 0))

    width_s = fold * series.bin_s
    cached = np.full(len(step_s), np.nan)
    if result.summary.prefix_cache is not None and math.isfinite(result.summary.prefix_cache.hit_rate.value):
        cached = hit_rate_over_time(result.records.requests, np.arange(len(step_s) + 1) * width_s)
    blocks = np.nan if result.deployment is None else result.deployment.kv.num_blocks
    return {
        "time_s": (np.arange(len(step_s)) + 0.5) * width_s,
        "batch": mean(series.seqs_s),
        "waiting": mean(series.waiting_s),
        "kv": mean(series.kv_blocks_s) / blocks,
        "cached": cached,
        "output": folded(series.output_tokens) / width_s,
    }
