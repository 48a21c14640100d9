"""Intervals of relative errors by a bootstrap over blocks of neighbours.

Requests that arrive one after another wait for each other, so that blocks of consecutive ones are drawn with
replacement, not single ones: disjoint blocks (the subseries of Carlstein, Annals of Statistics 14, 1986), as many
as long, the square root of the requests. Of paired runs the same blocks are drawn in both, so that what both share
falls out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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

    rows: int
    rows_b: int
    paired: bool
    draws: int
    seed: int

    def weights(self) -> tuple[Ints, Ints]:
        """[draws, blocks] of either side."""
        rng = np.random.default_rng(self.seed)
        a = drawn(rng, blocks_of(self.rows), self.draws)
        return a, a if self.paired else drawn(rng, blocks_of(self.rows_b), self.draws)


def blocks_of(rows: int) -> int:
    """How many blocks so many requests make."""
    return max(1, round(math.sqrt(rows)))


def drawn(rng: np.random.Generator, blocks: int, draws: int) -> Ints:
    """[draws, blocks] how often each block stands in a draw of as many blocks."""
    return rng.multinomial(blocks, np.full(blocks, 1 / blocks), size=draws)


def block_of(rows: int, blocks: int) -> Ints:
    """[rows] the block of each of the consecutive requests."""
    return np.arange(rows) * blocks // rows


def resampled(values: Floats, weights: Ints, q: Floats) -> Floats:
    """[draws, 1 + quantiles] mean and quantiles (as np.quantile) of the finite values in each draw."""
    known = np.flatnonzero(np.isfinite(values))
    order = known[np.argsort(values[known], kind="stable")]
    ascending, blocks = values[order], weights.shape[1]
    block = block_of(len(values), blocks)[order]
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


def interval(a: Floats, b: Floats, level: float) -> tuple[Floats, Floats]:
    """Ends [k] of the intervals of (a - b) / b over draws [draws, k]; NaN where a tenth of the draws tell nothing."""
    with np.errstate(invalid="ignore", divide="ignore"):
        off = np.where(b > 0, (a - b) / b, np.nan)
    unknown = np.isnan(off).mean(axis=0) > 0.1
    off[:, unknown] = 0.0
    low, high = np.nanquantile(off, [0.5 - level / 2, 0.5 + level / 2], axis=0)
    return np.where(unknown, np.nan, low), np.where(unknown, np.nan, high)
