"""Describes workloads by counts, rates, quantiles and histograms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lengthwise.schema.workload import UNCAPPED, Workload

LEVELS = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)  # levels of the quantiles in a description
_LENGTH_BINS, _TIME_BINS = 24, 48
_MAX_RANKED = 200_000  # a rank correlation uses at most this many requests, evenly spaced


@dataclass(frozen=True)
class Histogram:
    """The ``counts`` [k] of values in bins with ``edges`` [k + 1]; the last bin includes its upper edge."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class LengthSummary:
    """Statistics of prompt or output lengths, in tokens; the keys of ``quantiles`` are "p1", "p5", ... (LEVELS)."""

    mean: float
    sd: float
    min: int
    max: int
    total: int
    quantiles: Mapping[str, float]
    histogram: Histogram


@dataclass(frozen=True)
class SessionSummary:
    """Statistics of the sessions of a workload, and of what their requests wait for."""

    count: int
    mean_requests: float  # of a session
    max_requests: int
    single_share: float  # share of the sessions that have one request
    starts_per_s: float | None  # None: all start at once, or no request waits for others
    # Median and 90th percentile of the time from the end of a request until a request that waits for it is sent. None:
    # no request waits for others.
    delay_s: float | None
    delay_p90_s: float | None


@dataclass(frozen=True)
class LimitSummary:
    """Limits of outputs that clients send (``max_tokens``)."""

    share: float  # share of the requests that have a limit
    reached_share: float  # share of the requests whose output has as many tokens as its limit
    tokens: LengthSummary  # of the limits


@dataclass(frozen=True)
class Description:
    """Statistics of a workload."""

    name: str
    requests: int
    concurrency: int | None  # None for an open loop
    duration_s: float  # from the first arrival to the last, as if requests that others wait for took no time
    # Requests per second in a steady state, in which as many sessions end as start; None: all start at once.
    rate_rps: float | None
    interarrival_cv: float | None  # sd of the gaps between arrivals, or between starts of sessions, over their mean
    prompt: LengthSummary
    output: LengthSummary
    pd_ratio: float  # all prompt tokens over all output tokens
    pd_ratio_median: float  # median of that ratio over requests
    rank_correlation: float | None  # Spearman's, of prompts and outputs; None where one of them is constant
    arrivals: Histogram  # arrivals over time, in bins of equal length
    sessions: SessionSummary | None = None  # None: no request belongs to a session, or waits for another
    limits: LimitSummary | None = None  # None: no request has a limit

    @property
    def total_tokens(self) -> int:
        """Return the number of prompt and output tokens of all requests."""
        return self.prompt.total + self.output.total


def describe(workload: Workload) -> Description:
    """Return the description of a workload, in plain numbers."""
    prompt, output = _length_summary(workload.prompt_tokens), _length_summary(workload.output_tokens)
    starts_s, arrival_s = workload.session_starts_s, workload.earliest_s()
    gaps, span_s = np.diff(starts_s), float(starts_s[-1] - starts_s[0])
    starts_per_s = (len(starts_s) - 1) / span_s if span_s > 0 else None
    counts, edges = np.histogram(arrival_s, bins=_TIME_BINS)
    return Description(
        name=workload.name,
        requests=len(workload),
        concurrency=workload.concurrency,
        duration_s=float(arrival_s.max() - arrival_s.min()),
        rate_rps=starts_per_s and starts_per_s * len(workload) / len(starts_s),
        interarrival_cv=float(gaps.std() / gaps.mean()) if span_s > 0 else None,
        prompt=prompt,
        output=output,
        pd_ratio=prompt.total / output.total,
        pd_ratio_median=float(np.median(workload.prompt_tokens / workload.output_tokens)),
        rank_correlation=_rank_correlation(workload.prompt_tokens, workload.output_tokens),
        arrivals=Histogram(tuple(edges.tolist()), tuple(counts.tolist())),
        sessions=_session_summary(workload, starts_per_s),
        limits=_limit_summary(workload),
    )


def _session_summary(workload: Workload, starts_per_s: float | None) -> SessionSummary | None:
    before, after, delays_s = workload.previous_turn, workload.after, np.zeros(0)
    if after is not None:
        assert after.delay_s is not None
        waits = np.diff(after.start) > 0
        delays_s = after.delay_s[waits]
        rows = np.flatnonzero(waits & (before < 0))
        before[rows] = after.parent[after.start[rows]]
    if (before < 0).all():
        return None
    session = np.arange(len(workload))
    for i in np.flatnonzero(before >= 0):
        session[i] = session[before[i]]
    sizes = np.bincount(session)
    sizes = sizes[sizes > 0]
    median_s, p90_s = map(float, np.quantile(delays_s, (0.5, 0.9))) if len(delays_s) else (None, None)
    return SessionSummary(
        count=len(sizes),
        mean_requests=len(workload) / len(sizes),
        max_requests=int(sizes.max()),
        single_share=float((sizes == 1).mean()),
        starts_per_s=None if after is None else starts_per_s,
        delay_s=median_s,
        delay_p90_s=p90_s,
    )


def _limit_summary(workload: Workload) -> LimitSummary | None:
    limited = np.zeros(0, bool) if workload.max_tokens is None else workload.max_tokens < UNCAPPED
    if workload.max_tokens is None or not limited.any():
        return None
    reached = workload.output_tokens == workload.max_tokens
    return LimitSummary(float(limited.mean()), float(reached.mean()), _length_summary(workload.max_tokens[limited]))


def _length_summary(tokens: npt.NDArray[np.int64]) -> LengthSummary:
    low, high = int(tokens.min()), int(tokens.max())
    edges = np.unique(np.geomspace(low, high + 1, _LENGTH_BINS + 1).round())
    counts, _ = np.histogram(tokens, bins=edges)
    values = np.quantile(tokens, LEVELS)
    return LengthSummary(
        mean=float(tokens.mean()),
        sd=float(tokens.std()),
        min=low,
        max=high,
        total=int(tokens.sum()),
        quantiles={f"p{level * 100:g}": float(v) for level, v in zip(LEVELS, values, strict=True)},
        histogram=Histogram(tuple(edges.tolist()), tuple(counts.tolist())),
    )


def _rank_correlation(prompt: npt.NDArray[np.int64], output: npt.NDArray[np.int64]) -> float | None:
    every = -(-len(prompt) // _MAX_RANKED)
    first, second = (_ranks(tokens[::every]) for tokens in (prompt, output))
    if len(first) < 2 or first.std() == 0 or second.std() == 0:
        return None
    return float(np.corrcoef(first, second)[0, 1])


def _ranks(values: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the ranks, counted from 0; equal values get their mean rank."""
    _, group, sizes = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(sizes) - (sizes + 1) / 2)[group])
