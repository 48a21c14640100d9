"""Builds records of a run from the times that a client, or another program, measured."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.engine import gap_edges
from lengthwise.schema import records
from lengthwise.schema.records import Floats, Ints, Records, RequestRecords, Status, TokenTimes

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
    """Return the records of a run that a client observed. The engine's steps are unknown, so sums over steps are 0.

    Columns have one entry per request [n], in order of arrival. Unknown times are NaN.

    Args:
        arrival_s: When requests were due. NaN for a request that a closed loop never sent.
        status: ``Status`` values.
        end_s: End of the run.
        tokens: Arrival times of chunks, from which gaps between tokens and the series of outputs are computed.
        gap_s: Gaps between tokens, of all requests together, if ``tokens`` is None.
    """
    n, statuses = len(arrival_s), np.asarray(status, np.int8)
    started = np.isfinite(first_token_s) | (statuses == Status.FINISHED)
    scheduled_s = np.full(n, np.nan) if scheduled_s is None else scheduled_s
    together = 0  # tokens that arrived in a chunk with the one before, so with a gap of 0
    if tokens is not None:
        within = np.ones(len(tokens.at_s), bool)
        within[tokens.start[:-1][np.diff(tokens.start) > 0]] = False
        gap_s = np.diff(tokens.at_s, prepend=0.0)[within]
        together = int(np.maximum(tokens.tokens - 1, 0).sum())
    integers = {"steps", "tokens"}
    totals: dict[str, Any] = {
        f.name: np.zeros(1, np.int64 if f.name in integers else float) for f in fields(records.ReplicaTotals)
    }
    return Records(
        requests=RequestRecords(
            arrival_s=np.asarray(arrival_s, np.float64),
            prompt_tokens=np.asarray(prompt_tokens, np.int64),
            output_tokens=np.asarray(output_tokens, np.int64),
            status=statuses,
            replica=np.where(started, 0, -1).astype(np.int32),
            scheduled_s=scheduled_s,
            first_token_s=np.asarray(first_token_s, np.float64),
            finished_s=np.asarray(finished_s, np.float64),
            preemptions=np.zeros(n, np.int32),
            queued_for_s=scheduled_s - arrival_s,
            rejection=np.zeros(n, np.int8),
        ),
        steps=None,
        gaps=_gaps(np.zeros(0) if gap_s is None else np.asarray(gap_s, np.float64), together),
        totals=records.ReplicaTotals(**totals),
        series=_series(end_s, tokens),
        end_s=float(end_s),
        seed=seed,
        name=name,
    )


def _gaps(gap_s: Floats, together: int) -> records.TokenGaps:
    edges = gap_edges()
    values, count = np.unique(np.concatenate([np.zeros(min(together, 1)), gap_s]), return_counts=True)
    if together:
        count[0] += together - 1
    bins = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, len(edges) - 2)
    histogram = np.bincount(bins, weights=count, minlength=len(edges) - 1).astype(np.int64)
    longest_s = float(values[-1]) if len(values) else 0.0
    return records.TokenGaps(
        histogram, edges, int(count.sum()), float(values @ count), longest_s, values, count.astype(np.int64)
    )


def _series(end_s: float, tokens: TokenTimes | None) -> records.TimeSeries:
    bin_s = max(end_s / _BINS, 1e-6)
    bins = int(end_s / bin_s) + 1
    output = np.zeros(bins)
    if tokens is not None:
        at = np.clip((tokens.at_s / bin_s).astype(np.int64), 0, bins - 1)
        output = np.bincount(at, weights=np.maximum(tokens.tokens, 1), minlength=bins).astype(np.float64)
    step_s, seqs_s, waiting_s, kv_blocks_s, prefill = (np.zeros(bins) for _ in range(5))
    return records.TimeSeries(bin_s, step_s, seqs_s, waiting_s, kv_blocks_s, prefill, output)
