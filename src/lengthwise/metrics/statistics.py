"""t intervals: over independent seeds, and over consecutive batches of one long run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from lengthwise.schema.estimate import UNKNOWN, Estimate
from lengthwise.schema.records import TokenGaps
from lengthwise.statistics import batch_half_width, t_quantile

Floats = npt.NDArray[np.float64]

BATCHES = 10
"""Few and long: long batches are nearly independent, and see the tails."""

MIN_VALUES = 400
"""Below this many values a batch would hold fewer than 40, and its mean would say little."""

QUANTILES = {"p50": 0.50, "p75": 0.75, "p90": 0.90, "p95": 0.95, "p99": 0.99}
STATISTICS = ("mean", "sd", "min", *QUANTILES, "max")


@dataclass(frozen=True)
class Distribution:
    """A quantity over requests (or tokens): its statistics, in the quantity's unit.

    ``sd`` is that of the values themselves (divisor n); quantiles interpolate linearly
    between order statistics (Hyndman and Fan's type 7, as NumPy does). ``relative_error``
    bounds what reading them from a histogram adds: 0 where every value was kept.
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
    half = np.full(len(whole), np.nan) if batches is None else batch_half_width(np.array(batches), whole, level)
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


def _distribution(count: int, total: Floats, half: Floats, error: float = 0.0) -> Distribution:
    estimates = {name: Estimate(float(v), float(h)) for name, v, h in zip(STATISTICS, total, half, strict=True)}
    return Distribution(count=count, relative_error=error, **estimates)


MIN_COUNT = 8
MATCHING = 0.3
"""Blocks that resemble the one before more than this are joined with it."""
MOST, DRIFT = 0.8, 0.95
"""So alike blocks are taken to be; beyond the second a run drifts all along, which tells nothing of chance."""


@dataclass(frozen=True)
class Column:
    """What a run says in one metric: ``values`` [m], each of a request ``row`` [m] out of ``rows``."""

    values: Floats
    row: Ints
    rows: int

    def block(self, blocks: int) -> Ints:
        """[m] the block of each value's request."""
        return self.row * blocks // self.rows

    def pulls(self, blocks: int, q: Floats) -> Floats:
        """[blocks, 1 + quantiles] how each block moves the mean, relative, and the quantiles, as shares beyond them."""
        block, mean = self.block(blocks), self.values.mean()
        ends = np.quantile(self.values, q)
        pull = [(self.values - mean) / (mean or 1.0)]
        pull += [(self.values > end) - np.mean(self.values > end) for end in ends]
        return np.column_stack([np.bincount(block, one, blocks) for one in pull]) / len(self.values)


def column_of(values: Floats) -> Column:
    """The finite values of consecutive requests."""
    known = np.flatnonzero(np.isfinite(values))
    return Column(values[known], known, len(values))


@dataclass(frozen=True)
class Cut:
    """So many ``blocks``; intervals are to be ``wider`` [1 + quantiles] times as wide, NaN where they tell nothing."""

    blocks: int
    wider: Floats


def cuts_of(a: Column, b: Column, q: Floats, level: float, *, paired: bool) -> tuple[Cut, Cut]:
    """How each side is cut; of paired runs both alike, by their difference."""
    if paired:
        both = _cut(a.rows, lambda blocks: a.pulls(blocks, q) - b.pulls(blocks, q), level)
        return both, both
    first, second = (_cut(one.rows, partial(one.pulls, q=q), level) for one in (a, b))
    return first, second


def _cut(rows: int, pulls: Callable[[int], Floats], level: float) -> Cut:
    blocks = max(2, round(math.sqrt(rows)))
    alike = likeness(pulls(blocks))
    while alike[0] > MATCHING and blocks >= 2 * MIN_COUNT:
        blocks = max(MIN_COUNT, blocks // 2)
        alike = likeness(pulls(blocks))
    few = t_quantile(level, blocks - 1) / t_quantile(level, 10**6) * math.sqrt(blocks / (blocks - 1))
    alike = np.maximum(alike, alike[0])
    kept = np.minimum(alike, MOST)
    wider = few * np.sqrt((1 + kept) / (1 - kept))
    return Cut(blocks, np.where(alike > DRIFT, np.nan, wider))


def likeness(pulls: Floats) -> Floats:
    """[k] correlation of neighbouring rows of [n, k], from 0; what few rows hide of it is added (Kendall, 1954)."""
    n = len(pulls)
    off = pulls - pulls.mean(axis=0)
    scale = (off**2).sum(axis=0)
    lag = (off[1:] * off[:-1]).sum(axis=0)
    r = np.divide(lag, scale, out=np.zeros_like(lag), where=scale > 0)
    return np.asarray(np.clip(r + (1 + 4 * r) / n, 0.0, 1.0))


LEAST = 20
"""Below so many requests nothing is said of chance."""

SPANS = 24
"""Equal spans of time in which events are counted, for rates."""

GROUPS = 2048
"""Neighbouring values are drawn as one beyond so many: a quantile is then read to 1/2048 of the requests."""


@dataclass(frozen=True)
class Bootstrap:
    """How often blocks are drawn; of paired runs the same ones in both."""

    paired: bool
    draws: int
    seed: int
    level: float

    def weights(self, blocks: int, blocks_b: int) -> tuple[Ints, Ints]:
        """[draws, blocks] of either side."""
        rng = np.random.default_rng(self.seed)
        a = drawn(rng, blocks, self.draws)
        return a, a if self.paired else drawn(rng, blocks_b, self.draws)

    def errors(self, a: Column, b: Column, q: Floats) -> tuple[Floats, Floats]:
        """Ends [1 + quantiles] of the intervals of (a - b) / b; NaN where too little is known."""
        first, second = cuts_of(a, b, q, self.level, paired=self.paired)
        weights_a, weights_b = self.weights(first.blocks, second.blocks)
        off_a, off_b = resampled(a, weights_a, q), resampled(b, weights_b, q)
        at_a, at_b = (np.array([one.values.mean(), *np.quantile(one.values, q)]) for one in (a, b))
        if self.paired:
            return interval(off_a, off_b, self.level, (at_a, at_b), first.wider)
        wide_a, wide_b = _widened(off_a, at_a, first.wider), _widened(off_b, at_b, second.wider)
        return interval(wide_a, wide_b, self.level)


def drawn(rng: np.random.Generator, blocks: int, draws: int) -> Ints:
    """[draws, blocks] how often each block stands in a draw of as many blocks."""
    return rng.multinomial(blocks, np.full(blocks, 1 / blocks), size=draws)


def resampled(column: Column, weights: Ints, q: Floats) -> Floats:
    """[draws, 1 + quantiles] mean and quantiles (as np.quantile) of a column's values in each draw of its blocks."""
    values, blocks = column.values, weights.shape[1]
    order = np.argsort(values, kind="stable")
    ascending, block = values[order], column.block(blocks)[order]
    groups = min(GROUPS, len(order))
    group = np.arange(len(order)) * groups // len(order)
    held = np.bincount(block * groups + group, minlength=blocks * groups).reshape(blocks, groups)
    sums = np.bincount(block, ascending, blocks)
    middle = np.bincount(group, ascending) / np.bincount(group)
    times = weights.astype(np.float64)
    up_to = np.cumsum(np.rint(times @ held.astype(np.float64)).astype(np.int64), axis=1)
    total = up_to[:, -1]
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = (times @ sums) / total
    out = np.column_stack([mean, _quantiles(middle, up_to, q)])
    out[total == 0] = np.nan
    return out


def _quantiles(ascending: Floats, up_to: Ints, q: Floats) -> Floats:
    last = np.maximum(up_to[:, -1:] - 1, 0)
    position = q[None, :] * last
    below = np.floor(position).astype(np.int64)
    low = _ranked(ascending, up_to, below)
    high = _ranked(ascending, up_to, np.minimum(below + 1, last))
    between: Floats = low + (high - low) * (position - below)
    return between


def _ranked(ascending: Floats, up_to: Ints, rank: Ints) -> Floats:
    """[draws, ranks] the value that stands at a rank (from 0), all draws searched as one ascending array."""
    step = int(up_to.max(initial=0)) + 1
    row = np.arange(len(up_to))[:, None] * step
    found = np.searchsorted((up_to + row).ravel(), rank + row, side="right")
    index = found - np.arange(len(up_to))[:, None] * up_to.shape[1]
    picked: Floats = ascending[np.minimum(index, len(ascending) - 1)]
    return picked


def _widened(drawn: Floats, point: Floats, wider: Floats) -> Floats:
    """Draws [draws, k] so many times as far from the point estimate, in the log where they can be."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        far = point * (drawn / point) ** wider
    return np.where((point > 0) & (drawn > 0), far, point + wider * (drawn - point))


def interval(
    a: Floats, b: Floats, level: float, points: Sequence[Floats] = (), wider: Floats | None = None
) -> tuple[Floats, Floats]:
    """Ends [k] of the intervals of (a - b) / b over draws [draws, k]; NaN where a tenth of the draws tell nothing.

    ``wider`` [k] times as wide about ``points``, where they are given.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.where(b > 0, a / b, np.nan)
        if wider is not None:
            ratio = _widened(ratio, points[0] / points[1], wider)
    off = ratio - 1
    unknown = np.isnan(off).mean(axis=0) > 0.1
    off[:, unknown] = 0.0
    low, high = np.nanquantile(off, [0.5 - level / 2, 0.5 + level / 2], axis=0)
    return np.where(unknown, np.nan, low), np.where(unknown, np.nan, high)


def distances(a: tuple[Floats, Ints], b: tuple[Floats, Ints]) -> tuple[float, float]:
    """Kolmogorov-Smirnov's distance, and Wasserstein's over the mean of ``b``.

    Either side is ascending values and how often each was seen.
    """
    points = np.union1d(a[0], b[0])
    gap = np.abs(_share_up_to(a, points) - _share_up_to(b, points))
    mean = float(b[0] @ b[1] / b[1].sum())
    moved = float((gap[:-1] * np.diff(points)).sum())
    return float(gap.max()), moved / mean if mean > 0 else math.nan


def _share_up_to(side: tuple[Floats, Ints], points: Floats) -> Floats:
    values, count = side
    up_to = np.concatenate([[0], np.cumsum(count)])
    share: Floats = up_to[np.searchsorted(values, points, side="right")] / up_to[-1]
    return share


def absolute_errors(a: Floats, b: Floats) -> tuple[float, float]:
    """Mean and median of |a - b| / b over the pairs that both have; NaN without any."""
    with np.errstate(invalid="ignore"):
        both = np.isfinite(a) & np.isfinite(b) & (b > 0)
    if not both.any():
        return math.nan, math.nan
    off = np.abs(a[both] - b[both]) / b[both]
    return float(off.mean()), float(np.median(off))
