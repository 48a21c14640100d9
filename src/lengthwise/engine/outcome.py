"""What both engines hand over, and the Records made of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.engine.kernel_layout import GAP_OCTAVES, GAP_SMALLEST_EXPONENT, GAP_SUBBINS, SERIES_COLUMNS
from lengthwise.schema.records import Records, ReplicaTotals, RequestRecords, Status, StepRecords, TimeSeries, TokenGaps
from lengthwise.schema.workload import Workload

Array = npt.NDArray[Any]

_TOTALS = {
    "steps": "steps",
    "tokens": "tokens",
    "attention_pairs": "pairs",
    "kv_read_tokens": "kv_read",
    "busy_s": "busy_s",
    "layer_s": "layer_s",
    "comm_s": "comm_s",
    "prefill_attention_s": "prefill_attention_s",
    "decode_attention_s": "decode_attention_s",
    "host_s": "host_s",
    "head_s": "head_s",
    "first_s": "first_s",
    "send_s": "send_s",
    "swap_s": "swap_s",
    "kv_block_s": "kv_block_s",
}


@dataclass(frozen=True)
class Outcome:
    """Arrays in the layouts of ``_layout``: results [n], replicas [R], series [R, bins, 6], logs or None."""

    arrival_s: Array
    results: Array
    replicas: Array
    series: Array
    histogram: Array
    steps: Array | None
    gaps: Array | None
    end_s: float


def ending_s(last_s: float, limit_s: float, results: Array, replicas: Array) -> float:
    """When a run ended: its last event; where the limit cut it, the limit or the end of the steps under way."""
    if not (results["status"] == Status.UNFINISHED).any():
        return last_s
    return float(max(limit_s, replicas["busy_until_s"].max()))


def to_records(workload: Workload, outcome: Outcome, seed: int, name: str) -> Records:
    """Records from an outcome; logs are put into one order, whatever the engine's own."""
    return Records(
        requests=_requests(workload, outcome),
        steps=None if outcome.steps is None else _steps(outcome.steps),
        gaps=_gaps(outcome),
        totals=ReplicaTotals(**{k: outcome.replicas[v].copy() for k, v in _TOTALS.items()}),
        series=_series(outcome),
        end_s=float(outcome.end_s),
        seed=seed,
        name=name,
    )


def _requests(workload: Workload, outcome: Outcome) -> RequestRecords:
    results = outcome.results
    return RequestRecords(
        arrival_s=outcome.arrival_s,
        prompt_tokens=workload.prompt_tokens,
        output_tokens=results["output_tokens"].copy(),
        status=results["status"].astype(np.int8),
        replica=results["replica"].copy(),
        scheduled_s=results["scheduled_s"].copy(),
        first_token_s=results["first_token_s"].copy(),
        finished_s=results["finished_s"].copy(),
        preemptions=results["preemptions"].copy(),
        queued_for_s=results["queued_for_s"].copy(),
        rejection=results["rejection"].astype(np.int8),
    )


def _steps(rows: Array) -> StepRecords:
    order = np.lexsort((np.arange(len(rows)), rows["replica"], rows["start_s"]))
    rows = rows[order]
    return StepRecords(**{field: rows[field].copy() for field in rows.dtype.names or ()})


def _gaps(outcome: Outcome) -> TokenGaps:
    gap_s = count = None
    if outcome.gaps is not None:
        gap_s, where = np.unique(outcome.gaps["gap_s"], return_inverse=True)
        count = np.bincount(where, weights=outcome.gaps["count"], minlength=len(gap_s)).astype(np.int64)
    sums, largest = 0.0, 0.0
    for replica in outcome.replicas:
        sums += float(replica["gap_sum_s"])
        largest = max(largest, float(replica["gap_max_s"]))
    return TokenGaps(
        histogram=outcome.histogram,
        edges_s=gap_edges(),
        total=int(outcome.replicas["gaps"].sum()),
        sum_s=sums,
        max_s=largest,
        gap_s=gap_s,
        count=count,
    )


def gap_edges() -> Array:
    """[bins + 1] edges of the gap histogram: each octave in equal parts, bin 0 from zero."""
    low = 2.0 ** (GAP_SMALLEST_EXPONENT + np.arange(GAP_OCTAVES))
    inside = low[:, None] * (1 + np.arange(GAP_SUBBINS) / GAP_SUBBINS)
    return np.concatenate([[0.0], inside.ravel(), [2.0 ** (GAP_SMALLEST_EXPONENT + GAP_OCTAVES)]])


def _series(outcome: Outcome) -> TimeSeries:
    """All replicas on the widest of their bins."""
    width = float(outcome.replicas["bin_s"].max())
    bins = outcome.series.shape[1]
    total = np.zeros((bins, len(SERIES_COLUMNS)))
    for replica, rows in zip(outcome.replicas, outcome.series, strict=True):
        fold = min(int(width / float(replica["bin_s"])), bins)  # all of a short replica may fall into one
        total[: bins // fold] += rows.reshape(bins // fold, fold, -1).sum(axis=1)
    used = min(bins, int(outcome.end_s / width) + 1)
    return TimeSeries(bin_s=width, **{c: total[:used, i].copy() for i, c in enumerate(SERIES_COLUMNS)})
