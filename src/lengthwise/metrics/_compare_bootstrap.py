"""Intervals of relative errors by a bootstrap over blocks of neighbours.

Requests that arrive one after another wait for each other, so that blocks of consecutive ones are drawn with
replacement, not single ones: disjoint blocks (the subseries of Carlstein, Annals of Statistics 14, 1986), long enough
to be nearly independent (``_compare_blocks``). Of paired runs the same blocks are drawn in both, so that what both
share falls out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lengthwise.metrics._compare_blocks import Column, cuts_of

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

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
