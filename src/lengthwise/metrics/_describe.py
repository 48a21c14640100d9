"""The statistics of a column, of weighted values and of a histogram."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lengthwise.metrics._intervals import BATCHES, MIN_VALUES, over_batches
from lengthwise.metrics.estimate import QUANTILES, STATISTICS, Distribution
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.records import TokenGaps

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_Q = np.array(list(QUANTILES.values()))
_MIN_BEYOND = 5.0
"""A batch must expect so many values beyond a quantile, or it cannot see that quantile move."""


def of_column(values: Floats, level: float) -> Distribution:
    """Statistics of the finite values of a column in order of arrival, with batch intervals.

    One copy of the column is made and reordered in place, batch by batch, then as a whole.
    """
    values = values[np.isfinite(values)]
    n = len(values)
    if n == 0:
        return Distribution(0)
    batches = [_statistics(b) for b in np.array_split(values, BATCHES)] if n >= MIN_VALUES else None
    whole = _statistics(values)
    half = np.full(len(whole), np.nan) if batches is None else over_batches(np.array(batches), whole, level)
    known = _known(n / BATCHES)
    return _distribution(n, whole, np.where(known, half, np.nan))


def of_gaps(gaps: TokenGaps, mean_half_width: float) -> Distribution:
    """Statistics of the times between tokens: exact where they were kept, else from the histogram.

    Gaps of all requests are pooled, without an order in time; hence only the mean, whose
    half-width comes from the requests, has an interval within one run.
    """
    if gaps.total == 0:
        return Distribution(0)
    if gaps.gap_s is not None and gaps.count is not None:
        values, count, error = gaps.gap_s, gaps.count, 0.0
    else:
        values, count, error = _bin_middles(gaps), gaps.histogram, histogram_error(gaps.edges_s)
    used = count > 0
    values, count = values[used], count[used]
    mean = gaps.sum_s / gaps.total
    sd = float(np.sqrt(count @ (values - mean) ** 2 / gaps.total))
    whole = np.array([mean, sd, values[0], *weighted_quantiles(values, count, _Q), gaps.max_s])
    half = np.full(len(whole), np.nan)
    half[0] = mean_half_width
    return _distribution(gaps.total, whole, half, error)


def histogram_error(edges_s: Floats) -> float:
    """Largest relative error of a value read at the middle of its bin, but for the first bin."""
    low, high = edges_s[1:-1], edges_s[2:]
    return float(((high - low) / 2 / low).max())


def weighted_quantiles(values: Floats, count: Ints, q: Floats) -> Floats:
    """Quantiles of ascending ``values``, each there ``count`` times: as np.quantile of them spelt out."""
    up_to = np.cumsum(count)
    position = q * (up_to[-1] - 1)
    below = np.floor(position).astype(np.int64)
    above = np.minimum(below + 1, up_to[-1] - 1)
    low = values[np.searchsorted(up_to, below, side="right")]
    high = values[np.searchsorted(up_to, above, side="right")]
    return _between(low, high, position - below)


def _bin_middles(gaps: TokenGaps) -> Floats:
    """[bins] middles; none is beyond the largest gap."""
    middle: Floats = np.minimum((gaps.edges_s[:-1] + gaps.edges_s[1:]) / 2, gaps.max_s)
    return middle


def _statistics(values: Floats) -> Floats:
    """[STATISTICS] of values, which are partitioned in place."""
    mean, sd = values.mean(), values.std()
    position = _Q * (len(values) - 1)
    below = np.floor(position).astype(np.intp)
    above = np.minimum(below + 1, len(values) - 1)
    values.partition(np.unique(np.concatenate([[0], below, above, [len(values) - 1]])))
    inner = _between(values[below], values[above], position - below)
    return np.array([mean, sd, values[0], *inner, values[-1]])


def _between(low: Floats, high: Floats, fraction: Floats) -> Floats:
    return low + (high - low) * fraction


def _known(batch_size: float) -> npt.NDArray[np.bool_]:
    """[STATISTICS] for which of them batches of this size tell an interval: never for extremes."""
    beyond = batch_size * (1 - _Q)
    return np.array([True, True, False, *(beyond >= _MIN_BEYOND), False])


def _distribution(count: int, whole: Floats, half: Floats, error: float = 0.0) -> Distribution:
    estimates = {
        name: Estimate(float(v), float(h)) for name, v, h in zip(STATISTICS, whole, half, strict=True)
    }
    return Distribution(count=count, relative_error=error, **estimates)
