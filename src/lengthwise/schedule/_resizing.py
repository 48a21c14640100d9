"""What dynamic adjustment makes of encodings (ExeGPT, section 5.2): batches of whole prompts near a threshold.

A batch of few prompts cannot be brought as near its mean as one likes, and one that ends where the next prompt would
be too much has more or fewer prompts than B_E. How near and how many is drawn: prompts one after another, batches cut
from them by the very rule that the engine and what runs a schedule keep (``policy.phases.encode_steady``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from lengthwise.schedule.lengths import TaskLengths

Floats = npt.NDArray[np.float64]

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Prompts of a batch for which it is drawn; between them it is interpolated, beyond them batches are as of the last."""
_STREAMS, _BATCHES, _LEAD = 400, 30, 3


@dataclass(frozen=True, eq=False)
class Resized:
    """By ``SIZES``.

    Attributes:
        prompts: Mean prompts of a batch, over the size.
        ranges: How far above its mean a batch's tokens are at the level, relative to the mean.
    """

    prompts: Floats
    ranges: Floats

    def times(self, seqs: Floats) -> Floats:
        """[n] how many times as many prompts batches have in the mean as the ``seqs`` they should have."""
        return np.asarray(np.interp(seqs, SIZES, self.prompts))

    def ranges_of(self, seqs: Floats) -> Floats:
        """[n] relative ranges of their tokens."""
        return np.asarray(np.interp(seqs, SIZES, self.ranges))


UNCHANGED = Resized(np.ones(len(SIZES)), np.full(len(SIZES), np.inf))
"""Without a threshold; that a range is infinite says that nothing bounds it."""


def resized(task: TaskLengths, threshold: float, level: float) -> Resized:
    """What a threshold makes of a task's batches; the same for the same task."""
    if task.prompt_variance == 0:
        return UNCHANGED
    return _resized(task.prompt_pmf.tobytes(), threshold, level)


@lru_cache(maxsize=64)
def _resized(pmf: bytes, threshold: float, level: float) -> Resized:
    cdf = np.cumsum(np.frombuffer(pmf))
    mean = float((np.frombuffer(pmf) * np.arange(len(cdf))).sum())
    rows = [_drawn(cdf, mean, size, threshold, level) for size in SIZES]
    prompts, ranges = np.array(rows).T
    return Resized(prompts / np.array(SIZES), ranges)


def _drawn(cdf: Floats, mean: float, size: int, threshold: float, level: float) -> tuple[float, float]:
    """(mean prompts, relative range) of batches cut from streams of prompts."""
    rng, batch = np.random.default_rng([size, 1]), size * mean
    low, high = (1 - threshold) * batch, (1 + threshold) * batch
    tokens, prompts = np.zeros(_STREAMS), np.zeros(_STREAMS)
    ended: list[tuple[Floats, Floats]] = []
    for _ in range(math.ceil((_BATCHES + _LEAD) * size)):
        following = np.searchsorted(cdf, rng.random(_STREAMS) * cdf[-1], side="right").astype(np.float64)
        after, short = tokens + following, tokens < low
        more = (after <= high) & ((prompts < size) | short)
        over = (prompts > 0) & ~(more | (short & (tokens + after < 2 * batch)))
        if over.any():
            ended.append((prompts[over], tokens[over]))
        tokens, prompts = np.where(over, following, after), np.where(over, 1.0, prompts + 1)
    counts, sums = (np.concatenate(column[_LEAD:]) for column in zip(*ended, strict=True))
    return float(counts.mean()), max(float(np.quantile(sums, level) / sums.mean()) - 1.0, 0.0)


__all__ = ["SIZES", "UNCHANGED", "Resized", "resized"]
