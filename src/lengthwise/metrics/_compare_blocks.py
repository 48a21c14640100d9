"""Into how many blocks requests are cut for a bootstrap, and how much wider its intervals must be.

Requests wait for the same queue, so that neighbours are alike, over spans that grow with the load. Blocks are as many
as the root of the requests, and are joined two by two where neighbouring blocks are still alike, down to eight. What is
left of that widens the interval, as do few blocks: (1 + r) / (1 - r) and Student's t, as in the intervals of one run
(``_intervals``; decision 0007). Beyond a high quantile values may all be of one stretch, which hides that neighbours
are alike: quantiles are taken for no less alike than the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from lengthwise.metrics._intervals import t_quantile

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

FEWEST = 8
ALIKE = 0.3
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
    while alike[0] > ALIKE and blocks >= 2 * FEWEST:
        blocks = max(FEWEST, blocks // 2)
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
