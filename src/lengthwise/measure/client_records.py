"""Records out of what a client, or another program, saw of a run."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.engine import gap_edges
from lengthwise.schema.records import Records, ReplicaTotals, RequestRecords, Status, TimeSeries, TokenGaps, TokenTimes

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_BINS = 400


def records_of(
    *,
    arrival_s: Floats,
    prompt_tokens: Ints,
    output_tokens: Ints,
    status: npt.ArrayLike,
    first_token_s: Floats,
    finished_s: Floats,
    end_s: float,
    scheduled_s: Floats | None = None,
    tokens: TokenTimes | None = None,
    gap_s: Floats | None = None,
    seed: int = 0,
    name: str = "",
) -> Records:
    """Records of a run that nobody saw the steps of: sums over steps are 0, times not told NaN.

    Args:
        arrival_s: [n] when each was due, ascending; NaN for what never came.
        prompt_tokens: [n].
        output_tokens: [n] produced.
        status: [n] of ``Status``.
        first_token_s: [n].
        finished_s: [n].
        end_s: Time of the last event.
        scheduled_s: [n], where it was told.
        tokens: When the pieces came; gaps and the series of outputs are made of it.
        gap_s: Times between tokens, where there is no ``tokens``.
        seed: Of the workload.
        name: For tables and reports.
    """
    n = len(arrival_s)
    unknown = np.full(n, np.nan)
    bucket = np.asarray(status, np.int8)
    started = np.isfinite(first_token_s) | (bucket == Status.FINISHED)
    scheduled = unknown if scheduled_s is None else scheduled_s
    return Records(
        requests=RequestRecords(
            arrival_s=np.asarray(arrival_s, np.float64),
            prompt_tokens=np.asarray(prompt_tokens, np.int64),
            output_tokens=np.asarray(output_tokens, np.int64),
            status=bucket,
            replica=np.where(started, 0, -1).astype(np.int32),
            scheduled_s=scheduled,
            first_token_s=np.asarray(first_token_s, np.float64),
            finished_s=np.asarray(finished_s, np.float64),
            preemptions=np.zeros(n, np.int32),
            queued_for_s=scheduled - arrival_s,
            rejection=np.zeros(n, np.int8),
        ),
        steps=None,
        gaps=_gaps(*_all_gaps(tokens, gap_s)),
        totals=_no_totals(),
        series=_series(end_s, tokens),
        end_s=float(end_s),
        seed=seed,
        name=name,
    )


def _all_gaps(tokens: TokenTimes | None, gap_s: Floats | None) -> tuple[Floats, int]:
    """Gaps, and how many tokens came together with the one before: at once, so with a gap of 0."""
    if tokens is None:
        return (np.zeros(0) if gap_s is None else np.asarray(gap_s, np.float64)), 0
    inside = np.ones(len(tokens.at_s), bool)
    inside[tokens.start[:-1][np.diff(tokens.start) > 0]] = False
    gaps = np.diff(tokens.at_s, prepend=0.0)[inside]
    return gaps, int(np.maximum(tokens.tokens - 1, 0).sum())


def _gaps(gap_s: Floats, at_once: int) -> TokenGaps:
    edges = gap_edges()
    values, count = np.unique(np.concatenate([np.zeros(min(at_once, 1)), gap_s]), return_counts=True)
    if at_once:
        count[0] += at_once - 1
    bins = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, len(edges) - 2)
    histogram = np.bincount(bins, weights=count, minlength=len(edges) - 1).astype(np.int64)
    total, longest = int(count.sum()), float(values[-1]) if len(values) else 0.0
    return TokenGaps(histogram, edges, total, float(values @ count), longest, values, count.astype(np.int64))


def _no_totals() -> ReplicaTotals:
    zero, none = np.zeros(1), np.zeros(1, np.int64)
    floats: dict[str, Any] = {
        name: zero.copy() for name in ReplicaTotals.__dataclass_fields__ if name not in {"steps", "tokens"}
    }
    return ReplicaTotals(steps=none.copy(), tokens=none.copy(), **floats)


def _series(end_s: float, tokens: TokenTimes | None) -> TimeSeries:
    bin_s = max(end_s / _BINS, 1e-6)
    bins = int(end_s / bin_s) + 1
    output = np.zeros(bins)
    if tokens is not None:
        at = np.clip((tokens.at_s / bin_s).astype(np.int64), 0, bins - 1)
        output = np.bincount(at, weights=np.maximum(tokens.tokens, 1), minlength=bins).astype(np.float64)
    step_s, seqs_s, waiting_s, kv_blocks_s, prefill = (np.zeros(bins) for _ in range(5))
    return TimeSeries(bin_s, step_s, seqs_s, waiting_s, kv_blocks_s, prefill, output)
