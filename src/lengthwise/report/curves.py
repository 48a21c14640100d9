"""Columns thinned out for drawing: as many points as an eye can use, whatever the run's size."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.metrics import request_column
from lengthwise.report.result import Result
from lengthwise.schema.records import TokenGaps

Array = npt.NDArray[Any]

CDFS = {
    "ttft_s": "Time to first token (TTFT)",
    "tbt_s": "Time between tokens (TBT)",
    "tpot_s": "Time per output token (TPOT)",
    "jct_s": "Job completion time (JCT)",
}


def levels(points: int) -> Array:
    """Cumulative shares at which curves are read: evenly, and once more densely in the upper tail."""
    tail = 1 - 10.0 ** -np.linspace(1, 4, points // 4)
    return np.unique(np.round(np.concatenate([np.linspace(0, 1, points - len(tail)), tail]), 5))


def quantile_curve(result: Result, name: str, at: Array) -> Array | None:
    """[levels] values of a latency in seconds; None where no request has one."""
    if name == "tbt_s":
        return gap_curve(result.records.gaps, at)
    column = request_column(result.records.requests, name)
    column = column[np.isfinite(column)]
    return np.quantile(column, at, method="inverted_cdf") if len(column) else None


def gap_curve(gaps: TokenGaps, at: Array) -> Array | None:
    """[levels] times between tokens in seconds; None where there are none."""
    if gaps.total == 0:
        return None
    if gaps.gap_s is not None and gaps.count is not None:
        values, count = gaps.gap_s, gaps.count
    else:
        values, count = np.minimum((gaps.edges_s[:-1] + gaps.edges_s[1:]) / 2, gaps.max_s), gaps.histogram
    up_to = np.cumsum(count)
    curve: Array = values[np.searchsorted(up_to, np.maximum(1, np.ceil(at * up_to[-1])))]
    return curve


def over_time(result: Result, points: int) -> dict[str, Array]:
    """Batch, queue, KV share and output rate over time, at most ``points`` bins; NaN in idle bins."""
    series = result.records.series
    fold = -(-len(series.step_s) // points)
    width_s = fold * series.bin_s

    def folded(column: Array) -> Array:
        padded = np.concatenate([column, np.zeros(-len(column) % fold)])
        total: Array = padded.reshape(-1, fold).sum(axis=1)
        return total

    step_s = folded(series.step_s)

    def mean(column: Array) -> Array:
        out: Array = np.full(len(step_s), np.nan)
        return np.divide(folded(column), step_s, out=out, where=step_s > 0)

    blocks = np.nan if result.deployment is None else result.deployment.kv.num_blocks
    return {
        "time_s": (np.arange(len(step_s)) + 0.5) * width_s,
        "batch": mean(series.seqs_s),
        "waiting": mean(series.waiting_s),
        "kv": mean(series.kv_blocks_s) / blocks,
        "output": folded(series.output_tokens) / width_s,
    }
