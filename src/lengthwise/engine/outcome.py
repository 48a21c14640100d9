"""The result of a run of the kernel or of the reference, and its conversion into ``Records``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.engine.kernel_layout import GAP_OCTAVES, GAP_SMALLEST_EXPONENT, GAP_SUBBINS, SERIES_COLUMNS
from lengthwise.schema.records import (
    Records,
    ReplicaTotals,
    RequestRecords,
    SpeculationTotals,
    Status,
    StepRecords,
    TimeSeries,
    TokenGaps,
)
from lengthwise.schema.workload import Workload

Array = npt.NDArray[Any]

_TOTALS = (
    "steps", "tokens", "busy_s", "layer_s", "comm_s", "prefill_attention_s", "decode_attention_s", "host_s", "head_s",
    "embedding_s", "send_s", "swap_s", "kv_block_s",
)  # fmt: skip
_SPECULATED = ("decodes", "draft_tokens", "accepted_tokens", "draft_s")


@dataclass(frozen=True)
class EngineOutput:
    """The output of a run of the kernel or of the reference.

    The arrays are ``arrival_s`` and ``results`` [requests], ``replicas`` [replicas], ``series`` [replicas, bins,
    SERIES_COLUMNS] and ``histogram`` of gaps between tokens [GAP_BINS]. The logs ``steps`` and ``gaps`` are None if the
    run had more rows than fit.
    """

    arrival_s: Array
    results: Array
    replicas: Array
    series: Array
    histogram: Array
    steps: Array | None
    gaps: Array | None
    end_s: float

    def with_logs_of_at_most(self, rows: int) -> EngineOutput:
        """Return the output without logs if there are more than ``rows`` steps or twice as many gaps."""
        assert self.steps is not None
        assert self.gaps is not None
        fits = len(self.steps) <= rows and len(self.gaps) <= 2 * rows
        return self if fits else replace(self, steps=None, gaps=None)


def run_end_s(last_s: float, limit_s: float, results: Array, replicas: Array) -> float:
    """Return when a run ended. If every request has ended, this is the time of the last event.

    A run that the time limit interrupted ends at the limit, or when the steps in flight end, whichever is later.
    """
    if not (results["status"] == Status.UNFINISHED).any():
        return last_s
    return float(max(limit_s, replicas["busy_until_s"].max()))


def to_records(workload: Workload, outcome: EngineOutput, seed: int, name: str, *, speculates: bool = False) -> Records:
    """Return the records of a run. Steps are sorted by start, so that kernel and reference give the same records."""
    results, replicas, steps = outcome.results, outcome.replicas, outcome.steps
    if steps is not None:
        steps = steps[np.lexsort((np.arange(len(steps)), steps["replica"], steps["start_s"]))]
    columns = (
        "output_tokens", "replica", "scheduled_s", "first_token_s", "finished_s", "preemptions", "queued_for_s",
        "cached_tokens", "loaded_tokens", "load_s", "storage_tokens",
    )  # fmt: skip
    return Records(
        requests=RequestRecords(
            arrival_s=outcome.arrival_s,
            prompt_tokens=workload.prompt_tokens,
            status=results["status"].astype(np.int8),
            rejection=results["rejection"].astype(np.int8),
            **{column: results[column].copy() for column in columns},
        ),
        steps=None
        if steps is None
        else StepRecords(**{field: steps[field].copy() for field in steps.dtype.names or ()}),
        gaps=_gaps(outcome),
        totals=ReplicaTotals(
            attention_pairs=replicas["pairs"].copy(),
            kv_read_tokens=replicas["kv_read"].copy(),
            **{column: replicas[column].copy() for column in _TOTALS},
        ),
        series=_series(outcome),
        speculation=SpeculationTotals(**{name: replicas[name].copy() for name in _SPECULATED}) if speculates else None,
        end_s=float(outcome.end_s),
        seed=seed,
        name=name,
    )


def _gaps(outcome: EngineOutput) -> TokenGaps:
    gap_s = count = None
    if outcome.gaps is not None:
        gap_s, inverse = np.unique(outcome.gaps["gap_s"], return_inverse=True)
        count = np.bincount(inverse, weights=outcome.gaps["count"], minlength=len(gap_s)).astype(np.int64)
    return TokenGaps(
        histogram=outcome.histogram,
        edges_s=gap_edges(),
        total=int(outcome.replicas["gaps"].sum()),
        sum_s=float(np.cumsum(outcome.replicas["gap_sum_s"])[-1]),  # in order; np.sum and sum() round otherwise
        max_s=float(outcome.replicas["gap_max_s"].max()),
        gap_s=gap_s,
        count=count,
    )


def gap_edges() -> Array:
    """Return the edges of the gap histogram in seconds ([bins + 1]). Bin 0 starts at 0; an octave has equal bins."""
    low = 2.0 ** (GAP_SMALLEST_EXPONENT + np.arange(GAP_OCTAVES))
    inside = low[:, None] * (1 + np.arange(GAP_SUBBINS) / GAP_SUBBINS)
    return np.concatenate([[0.0], inside.ravel(), [2.0 ** (GAP_SMALLEST_EXPONENT + GAP_OCTAVES)]])


def _series(outcome: EngineOutput) -> TimeSeries:
    width = float(outcome.replicas["series_bin_s"].max())
    bins = outcome.series.shape[1]
    total = np.zeros((bins, len(SERIES_COLUMNS)))
    for replica, rows in zip(outcome.replicas, outcome.series, strict=True):
        # A replica whose last step ended earlier may have narrower bins.
        factor = min(int(width / float(replica["series_bin_s"])), bins)
        total[: bins // factor] += rows.reshape(bins // factor, factor, -1).sum(axis=1)
    used = min(bins, int(outcome.end_s / width) + 1)
    return TimeSeries(bin_s=width, **{c: total[:used, i].copy() for i, c in enumerate(SERIES_COLUMNS)})
