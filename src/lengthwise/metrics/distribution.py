"""Distributions of latencies: statistics with batch-means intervals, and distances between distributions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lengthwise.schema.estimate import UNKNOWN, Estimate
from lengthwise.schema.records import TokenGaps
from lengthwise.statistics import Floats, Ints, batch_half_width

BATCHES = 10  # few and long: long batches are nearly independent and include values of the tails
MIN_VALUES = 400  # below this count a batch would have fewer than 40 values, too few for its mean
QUANTILES = {"p50": 0.50, "p75": 0.75, "p90": 0.90, "p95": 0.95, "p99": 0.99}
STATISTICS = ("mean", "sd", "min", *QUANTILES, "max")

_Q = np.array(list(QUANTILES.values()))
_MIN_ABOVE = 5.0  # values that a batch must expect above a quantile to show how it varies


@dataclass(frozen=True)
class Distribution:
    """Statistics of a quantity over requests (or tokens), in the quantity's unit.

    ``sd`` is the standard deviation (divisor n). Quantiles interpolate linearly between order statistics (Hyndman and
    Fan's type 7, as in NumPy). ``relative_error`` is the largest relative error of quantiles from a histogram, or 0 if
    they are exact.
    """

    count: int
    mean: Estimate = UNKNOWN
    sd: Estimate = UNKNOWN
    min: Estimate = UNKNOWN
    p50: Estimate = UNKNOWN
    p75: Estimate = UNKNOWN
    p90: Estimate = UNKNOWN
    p95: Estimate = UNKNOWN
    p99: Estimate = UNKNOWN
    max: Estimate = UNKNOWN
    relative_error: float = 0.0


def column_distribution(values: Floats, level: float) -> Distribution:
    """Return statistics of a column's finite values, with batch-means intervals. Rows are in order of arrival."""
    values = values[np.isfinite(values)]
    n = len(values)
    if n == 0:
        return Distribution(0)
    # ``values`` is partitioned in place to save memory. Batches come first, because that destroys the order.
    batches = [_partitioned_statistics(b) for b in np.array_split(values, BATCHES)] if n >= MIN_VALUES else None
    total = _partitioned_statistics(values)
    half = np.full(len(STATISTICS), np.nan)
    if batches is not None:
        # Batches give no interval for the minimum and the maximum.
        has_interval = [True, True, False, *(n / BATCHES * (1 - _Q) >= _MIN_ABOVE), False]
        half = np.where(has_interval, batch_half_width(np.array(batches), total, level), np.nan)
    return _distribution(n, total, half)


def ratio_estimate(part: Floats | Ints, total: Floats | Ints, level: float) -> Estimate:
    """Return sum(part) / sum(total) with a batch-means interval, for columns in order of arrival; NaN for 0 / 0."""
    if not total.sum() > 0:
        return UNKNOWN
    value = float(part.sum() / total.sum())
    if len(total) < MIN_VALUES or not part.any():
        return Estimate(value)
    split = (np.array_split(column, BATCHES) for column in (part, total))
    batches = np.array([[a.sum() / b.sum()] for a, b in zip(*split, strict=True)])
    return Estimate(value, float(batch_half_width(batches, np.array([value]), level)[0]))


def gap_distribution(gaps: TokenGaps, mean_half_width: float) -> Distribution:
    """Return statistics of the times between tokens, exact if all were recorded and otherwise from a histogram.

    The gaps of all requests are pooled without an order in time. Therefore only the mean of one run has an interval,
    ``mean_half_width``, which is computed from the requests.
    """
    if gaps.total == 0:
        return Distribution(0)
    values, count = gap_counts(gaps)
    mean = gaps.sum_s / gaps.total
    sd = float(np.sqrt(count @ (values - mean) ** 2 / gaps.total))
    total = np.array([mean, sd, values[0], *weighted_quantiles(values, count, _Q), gaps.max_s])
    half = np.full(len(total), np.nan)
    half[0] = mean_half_width
    is_exact = gaps.gap_s is not None and gaps.count is not None
    return _distribution(gaps.total, total, half, 0.0 if is_exact else histogram_error(gaps.edges_s))


def gap_counts(gaps: TokenGaps) -> tuple[Floats, Ints]:
    """Return the distinct times between tokens, ascending, and their counts. A histogram gives bin middles."""
    if gaps.gap_s is not None and gaps.count is not None:
        values, count = gaps.gap_s, gaps.count
    else:
        values = np.minimum((gaps.edges_s[:-1] + gaps.edges_s[1:]) / 2, gaps.max_s)
        count = gaps.histogram
    return values[count > 0], count[count > 0]


def histogram_error(edges_s: Floats) -> float:
    """Return the largest relative error if each value is replaced by its bin's middle, except in the first bin."""
    low, high = edges_s[1:-1], edges_s[2:]
    return float(((high - low) / 2 / low).max())


def weighted_quantiles(values: Floats, count: Ints, q: Floats) -> Floats:
    """Return the quantiles (as np.quantile) of ascending ``values``, each repeated ``count`` times."""
    cumulative = np.cumsum(count)
    position = q * (cumulative[-1] - 1)
    below = np.floor(position).astype(np.int64)
    above = np.minimum(below + 1, cumulative[-1] - 1)
    low, high = (values[np.searchsorted(cumulative, rank, side="right")] for rank in (below, above))
    return np.asarray(low + (high - low) * (position - below))


def _partitioned_statistics(values: Floats) -> Floats:
    mean, sd = values.mean(), values.std()
    position = _Q * (len(values) - 1)
    below = np.floor(position).astype(np.intp)
    above = np.minimum(below + 1, len(values) - 1)
    values.partition(np.unique(np.concatenate([[0], below, above, [len(values) - 1]])))
    quantiles = values[below] + (values[above] - values[below]) * (position - below)
    return np.array([mean, sd, values[0], *quantiles, values[-1]])


def _distribution(count: int, total: Floats, half: Floats, error: float = 0.0) -> Distribution:
    estimates = {name: Estimate(float(v), float(h)) for name, v, h in zip(STATISTICS, total, half, strict=True)}
    return Distribution(count=count, relative_error=error, **estimates)


def distances(a: tuple[Floats, Ints], b: tuple[Floats, Ints]) -> tuple[float, float]:
    """Return the Kolmogorov-Smirnov distance, and the Wasserstein distance over b's mean.

    Both sides are given as ascending values and their counts.
    """
    points = np.union1d(a[0], b[0])
    cdfs = [
        np.concatenate([[0], np.cumsum(count)])[np.searchsorted(values, points, side="right")] / count.sum()
        for values, count in (a, b)
    ]
    gap = np.abs(cdfs[0] - cdfs[1])
    mean = float(b[0] @ b[1] / b[1].sum())
    return float(gap.max()), float((gap[:-1] * np.diff(points)).sum()) / mean if mean > 0 else math.nan


def relative_errors(a: Floats, b: Floats) -> tuple[float, float]:
    """Return the mean and the median of |a - b| / b over pairs of finite values with b > 0. NaN: there are none."""
    both = np.isfinite(a) & np.isfinite(b) & (b > 0)
    if not both.any():
        return math.nan, math.nan
    errors = np.abs(a[both] - b[both]) / b[both]
    return float(errors.mean()), float(np.median(errors))
