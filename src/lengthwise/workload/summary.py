"""Descriptions of workloads: counts, rates, quantiles and histograms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lengthwise.schema.workload import Workload

LEVELS = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)  # levels of the quantiles in a description
_LENGTH_BINS, _TIME_BINS, _MAX_RANKED = 24, 48, 200_000  # the last: requests of a rank correlation, evenly spaced


@dataclass(frozen=True)
class Histogram:
    """The ``counts`` [k] of values in bins with ``edges`` [k + 1]; the last bin includes its upper edge."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class LengthSummary:
    """Statistics of prompt or output lengths, in tokens; the keys of ``quantiles`` are "p1" to "p99"."""

    mean: float
    sd: float
    min: int
    max: int
    total: int
    quantiles: Mapping[str, float]
    histogram: Histogram


@dataclass(frozen=True)
class Description:
    """Statistics of a workload."""

    name: str
    requests: int
    concurrency: int | None  # None for an open loop
    duration_s: float  # time from the first arrival to the last
    rate_rps: float | None  # requests a second in that time; None where all arrive at once
    interarrival_cv: float | None  # sd of the gaps over their mean; None where all arrive at once
    prompt: LengthSummary
    output: LengthSummary
    pd_ratio: float  # all prompt tokens over all output tokens
    pd_ratio_median: float  # median of that ratio over requests
    rank_correlation: float | None  # Spearman's, of prompts and outputs; None where one of them is constant
    arrivals: Histogram  # arrivals over time, in bins of equal length

    @property
    def total_tokens(self) -> int:
        """Return the number of prompt and output tokens of all requests."""
        return self.prompt.total + self.output.total


def describe(workload: Workload) -> Description:
    """Return the description of a workload: counts, rates, quantiles and histograms, as plain numbers."""
    prompt, output = _length_summary(workload.prompt_tokens), _length_summary(workload.output_tokens)
    gaps = np.diff(workload.arrival_s)
    duration_s = float(workload.arrival_s[-1] - workload.arrival_s[0])
    counts, edges = np.histogram(workload.arrival_s, bins=_TIME_BINS)
    return Description(
        name=workload.name,
        requests=len(workload),
        concurrency=workload.concurrency,
        duration_s=duration_s,
        rate_rps=(len(workload) - 1) / duration_s if duration_s > 0 else None,
        interarrival_cv=float(gaps.std() / gaps.mean()) if duration_s > 0 else None,
        prompt=prompt,
        output=output,
        pd_ratio=prompt.total / output.total,
        pd_ratio_median=float(np.median(workload.prompt_tokens / workload.output_tokens)),
        rank_correlation=_rank_correlation(workload.prompt_tokens, workload.output_tokens),
        arrivals=Histogram(tuple(edges.tolist()), tuple(counts.tolist())),
    )


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
