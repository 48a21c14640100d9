"""Requests that left late, but by so little that nothing which is fitted moves: told, and no reason to refuse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from lengthwise.schema.measured import IDLE_SHARE, Measured
from lengthwise.schema.records import Status

MOVES = 0.02
"""A lateness that moves the mean or the 95th percentile of TTFT by less than this is within any run's noise."""


def harmless_lateness(measured: Measured) -> tuple[str, ...]:
    """The doubts of a late client that no fit can feel; none where its loop was busy or often woke late."""
    client = measured.facts.get("client")
    doubt = client.get("late_doubt") if isinstance(client, Mapping) else None
    if not isinstance(client, Mapping) or not isinstance(doubt, str) or doubt not in measured.doubts:
        return ()
    return (doubt,) if _idle(client) and lateness_moves(measured) < MOVES else ()


def lateness_moves(measured: Measured) -> float:
    """By how much the larger of TTFT's mean and 95th percentile would fall had all left on time, relative."""
    r, late_s = measured.records.requests, measured.client_s
    if late_s is None:
        return float("inf")
    known = (r.status == Status.FINISHED) & np.isfinite(late_s) & np.isfinite(r.first_token_s)
    if not known.any():
        return float("inf")
    ttft_s = (r.first_token_s - r.arrival_s)[known]
    on_time_s = ttft_s - np.maximum(late_s[known], 0.0)
    pairs = [(of(ttft_s), of(on_time_s)) for of in (np.mean, lambda x: np.quantile(x, 0.95))]
    return max(float(1 - on_time / told) if told > 0 else float("inf") for told, on_time in pairs)


def _idle(client: Mapping[str, Any]) -> bool:
    share, lag = client.get("cpu_share"), client.get("loop_lag")
    often = lag.get("surely_often") if isinstance(lag, Mapping) else None
    return isinstance(share, int | float) and share < IDLE_SHARE and often is False
