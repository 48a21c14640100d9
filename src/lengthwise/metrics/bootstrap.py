"""Bootstrap of the relative errors between two runs, by drawing blocks of consecutive requests (Künsch, 1989)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from lengthwise.statistics import Floats, Ints, lag_one_correlation, t_quantile

MIN_REQUESTS = 20  # runs with fewer requests have no intervals
SPANS = 24  # equal spans of time in which events are counted, for rates
GROUPS = 2048  # if there are more values, they are drawn in groups: quantiles are exact to 1/2048 of requests
MIN_BLOCKS = 8
JOIN_CORRELATION = 0.3  # if neighbouring blocks correlate more, each two are joined
MAX_CORRELATION = 0.8  # upper limit of the correlation by which intervals are widened
DRIFT_CORRELATION = 0.95  # above it a run drifts throughout, and has no interval


@dataclass(frozen=True)
class Sample:
    """Values of one metric in a run of ``rows`` requests. ``values[i]`` belongs to request number ``row[i]``."""

    values: Floats
    row: Ints
    rows: int

    def block(self, blocks: int) -> Ints:
        """Return [values] the block to which each value's request belongs."""
        return self.row * blocks // self.rows

    def influence(self, blocks: int, q: Floats) -> Floats:
        """Return [blocks, 1 + quantiles] by how much each block shifts the statistics.

        The statistics are the relative mean, and for each quantile the share of values above it.
        """
        block, mean = self.block(blocks), self.values.mean()
        shifts = [(self.values - mean) / (mean or 1.0)]
        shifts += [(self.values > end) - np.mean(self.values > end) for end in np.quantile(self.values, q)]
        return np.column_stack([np.bincount(block, shift, blocks) for shift in shifts]) / len(self.values)


def sample_of(values: Floats) -> Sample:
    """Return a sample of the finite ``values``, which have one entry per request in order."""
    known = np.flatnonzero(np.isfinite(values))
    return Sample(values[known], known, len(values))


@dataclass(frozen=True)
class Blocks:
    """A number of blocks, and factors [1 + quantiles] that widen the intervals. NaN means that there is no interval."""

    count: int
    widening: Floats


def blocks_of(a: Sample, b: Sample, q: Floats, level: float, *, paired: bool) -> tuple[Blocks, Blocks]:
    """Return the blocks of each run. Paired runs share blocks, chosen by the difference of the runs' influences."""
    if paired:
        shared = _choose_blocks(a.rows, lambda count: a.influence(count, q) - b.influence(count, q), level)
        return shared, shared
    first, second = (_choose_blocks(side.rows, partial(side.influence, q=q), level) for side in (a, b))
    return first, second


def _choose_blocks(rows: int, influence: Callable[[int], Floats], level: float) -> Blocks:
    blocks = max(2, round(math.sqrt(rows)))
    correlation = lag_correlation(influence(blocks))
    while correlation[0] > JOIN_CORRELATION and blocks >= 2 * MIN_BLOCKS:
        blocks = max(MIN_BLOCKS, blocks // 2)
        correlation = lag_correlation(influence(blocks))
    small_sample = t_quantile(level, blocks - 1) / t_quantile(level, 10**6) * math.sqrt(blocks / (blocks - 1))
    correlation = np.maximum(correlation, correlation[0])
    r = np.minimum(correlation, MAX_CORRELATION)
    widening = small_sample * np.sqrt((1 + r) / (1 - r))
    return Blocks(blocks, np.where(correlation > DRIFT_CORRELATION, np.nan, widening))


def lag_correlation(rows: Floats) -> Floats:
    """Return [k] lag-one correlations of columns [n, k], at least 0 and corrected for small n (Kendall, 1954)."""
    r = lag_one_correlation(rows)
    return np.asarray(np.clip(r + (1 + 4 * r) / len(rows), 0.0, 1.0))


@dataclass(frozen=True)
class Bootstrap:
    """Settings of a bootstrap. Paired runs share the drawn blocks."""

    paired: bool
    draws: int
    seed: int
    level: float

    def weights(self, blocks_a: int, blocks_b: int) -> tuple[Ints, Ints]:
        """Return how often each draw has each block, by run (``draw_blocks``). Paired runs have the same draws."""
        rng = np.random.default_rng(self.seed)
        a = draw_blocks(rng, blocks_a, self.draws)
        return a, a if self.paired else draw_blocks(rng, blocks_b, self.draws)

    def error_interval(self, a: Sample, b: Sample, q: Floats) -> tuple[Floats, Floats]:
        """Return the low and high ends [1 + quantiles] of the intervals of (a - b) / b. Unknown ends are NaN."""
        blocks_a, blocks_b = blocks_of(a, b, q, self.level, paired=self.paired)
        weights_a, weights_b = self.weights(blocks_a.count, blocks_b.count)
        draws_a, draws_b = resample(a, weights_a, q), resample(b, weights_b, q)
        point_a, point_b = (np.array([side.values.mean(), *np.quantile(side.values, q)]) for side in (a, b))
        if self.paired:
            return ratio_interval(draws_a, draws_b, self.level, (point_a, point_b), blocks_a.widening)
        wide_a = _widen(draws_a, point_a, blocks_a.widening)
        return ratio_interval(wide_a, _widen(draws_b, point_b, blocks_b.widening), self.level)

    def rate_interval(self, a: Floats, b: Floats) -> tuple[float, float]:
        """Return the ends of the interval of (a - b) / b for two rates, each given in SPANS spans of time."""
        means = [(w @ s / SPANS)[:, None] for w, s in zip(self.weights(SPANS, SPANS), (a, b), strict=True)]
        low, high = ratio_interval(means[0], means[1], self.level)
        return float(low[0]), float(high[0])


def draw_blocks(rng: np.random.Generator, blocks: int, draws: int) -> Ints:
    """Return [draws, blocks] how often each block occurs if ``blocks`` of them are drawn with replacement."""
    return rng.multinomial(blocks, np.full(blocks, 1 / blocks), size=draws)


def resample(sample: Sample, weights: Ints, q: Floats) -> Floats:
    """Return [draws, 1 + quantiles] the mean and np.quantile of a sample whose blocks occur ``weights`` times."""
    values, blocks = sample.values, weights.shape[1]
    order = np.argsort(values, kind="stable")
    ascending, block = values[order], sample.block(blocks)[order]
    groups = min(GROUPS, len(order))
    group = np.arange(len(order)) * groups // len(order)
    count = np.bincount(block * groups + group, minlength=blocks * groups).reshape(blocks, groups)
    middle = np.bincount(group, ascending) / np.bincount(group)
    times = weights.astype(np.float64)
    cumulative = np.cumsum(np.rint(times @ count.astype(np.float64)).astype(np.int64), axis=1)
    total = cumulative[:, -1]
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = (times @ np.bincount(block, ascending, blocks)) / total
    last = np.maximum(cumulative[:, -1:] - 1, 0)
    position = q[None, :] * last
    below = np.floor(position).astype(np.int64)
    low = _at_rank(middle, cumulative, below)
    high = _at_rank(middle, cumulative, np.minimum(below + 1, last))
    out = np.column_stack([mean, low + (high - low) * (position - below)])
    out[total == 0] = np.nan
    return out


def _at_rank(ascending: Floats, cumulative: Ints, rank: Ints) -> Floats:
    """Return [draws, ranks] the values at ranks (from 0). All draws are searched at once, as one ascending array."""
    step = int(cumulative.max(initial=0)) + 1
    row = np.arange(len(cumulative))[:, None]
    found = np.searchsorted((cumulative + row * step).ravel(), rank + row * step, side="right")
    return np.asarray(ascending[np.minimum(found - row * cumulative.shape[1], len(ascending) - 1)])


def _widen(draws: Floats, point: Floats, widening: Floats) -> Floats:
    """Return draws [draws, k] scaled away from the point estimate, on a logarithmic scale if both are positive."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        scaled = point * (draws / point) ** widening
    return np.where((point > 0) & (draws > 0), scaled, point + widening * (draws - point))


def ratio_interval(
    a: Floats, b: Floats, level: float, points: Sequence[Floats] = (), widening: Floats | None = None
) -> tuple[Floats, Floats]:
    """Return the low and high ends [k] of the intervals of (a - b) / b over draws [draws, k].

    They are NaN if the ratio is undefined in over a tenth of the draws. ``widening`` [k] scales the interval about the
    ratio of ``points``.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.where(b > 0, a / b, np.nan)
        if widening is not None:
            ratio = _widen(ratio, points[0] / points[1], widening)
    errors = ratio - 1
    unknown = np.isnan(errors).mean(axis=0) > 0.1
    errors[:, unknown] = 0.0
    low, high = np.nanquantile(errors, [0.5 - level / 2, 0.5 + level / 2], axis=0)
    return np.where(unknown, np.nan, low), np.where(unknown, np.nan, high)
