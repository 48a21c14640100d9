"""What the lengths of one model's outputs have taught so far; bounded, and the same from the same events."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from lengthwise.gateway.forecast._drift import Drift
from lengthwise.gateway.forecast._survive import Bools, quantiles, reached, recent_weights
from lengthwise.gateway.request import MOST_TOKENS, Floats
from lengthwise.predict.distribution import LEVELS, TAIL_SHAPE

WINDOW, HALF_LIFE = 512, 256.0
"""Finished requests that are remembered, and after how many more one counts half."""
_LOW, _MEDIAN, _HIGH = (int(np.searchsorted(LEVELS, p)) for p in (0.1, 0.5, 0.9))
_LEAST_SPREAD = 0.05
_LEAST, _SHRINK = 8, 8.0
"""From so many on a model's scale is corrected; with so many the correction is trusted by half."""
_SHAPE_FROM, _SHAPE_WHOLLY = 32, 96
"""Between so many its quantiles are moved more and more as conformal prediction says."""
_COVERED = (0.1, 0.5, 0.8, 0.9)


class Ring:
    """The last rows of numbers, oldest first.

    Args:
        columns: Of a row.
        most: Rows that are kept.
    """

    def __init__(self, columns: int, most: int = WINDOW) -> None:
        self._rows, self._at, self.count = np.empty((2 * most, columns)), 0, 0
        self._most = most

    def add(self, row: Any) -> None:
        """One more; the oldest goes where there are too many."""
        if self._at == len(self._rows):
            kept = self.rows.copy()
            self._rows[: len(kept)], self._at = kept, len(kept)
        self._rows[self._at] = row
        self._at += 1
        self.count = min(self.count + 1, self._most)

    def keep(self, last: int) -> None:
        """Forgets all but the last."""
        self.count = min(self.count, last)

    @property
    def rows(self) -> Floats:
        """[count, columns] as they came."""
        return self._rows[self._at - self.count : self._at]


class Learned:
    """Corrects one model's predictions by how they missed.

    A quantile q_p becomes q_p exp(m) first: m is the median of log(length / predicted median), drawn to 0
    while there are few. With more, q_p exp(s z_p): s = log(q_0.9 / q_0.1) is the predictor's own doubt, z_p
    the p-quantile of log(length / q_p) / s over the last outputs, so that each quantile is exceeded as often
    as it says (split conformal prediction, Romano, Patterson and Candes 2019; with weights that forget,
    Barber, Candes, Ramdas and Tibshirani 2023). Cut outputs count as longer than seen.

    Args:
        every: Finished requests between two corrections, once there are many.
    """

    def __init__(self, every: int) -> None:
        self.every, self.finished, self.corrections = every, 0, 0
        self.scale, self.shape_share = 0.0, 0.0
        self.drift = Drift()
        self._shift: Floats | None = None
        self._misses = Ring(len(LEVELS) + 2)
        """log length / each quantile; the predictor's doubt; whether it was cut."""
        self._places = Ring(2)
        """Where in what was believed the length fell; whether it was cut."""
        self._new = 0

    def corrected(self, raw: Floats) -> Floats:
        """[25] the predictor's quantiles as this model's outputs have them."""
        if self._shift is None:
            return raw
        moved = (1 - self.shape_share) * self.scale + self.shape_share * _doubt(raw) * self._shift
        row = np.maximum.accumulate(raw * np.exp(np.minimum(np.maximum(moved, -8.0), 8.0)))
        return np.minimum(np.maximum(row, 1.0), MOST_TOKENS)

    def finished_with(self, raw: Floats, whole: Floats, tokens: int, *, cut: bool) -> bool:
        """Learns from an output; whether its lengths have drifted with it."""
        row = np.empty(len(LEVELS) + 2)
        misses = np.log(tokens / raw, out=row[:-2])
        row[-2], row[-1] = _doubt(raw), cut
        self._misses.add(row)
        self._places.add((np.interp(tokens, whole, LEVELS), cut))
        self.finished += 1
        self._new += 1
        drifted = self.drift.add(float(misses[_MEDIAN]), cut=cut)
        if drifted:
            self._misses.keep(self.drift.window)
            self._places.keep(0)
        if drifted or self._new >= min(self.every, max(_LEAST, self._misses.count // 2)):
            self._correct()
        return drifted

    def coverage(self) -> dict[str, float]:
        """Share of lengths at most each quantile that was told; nothing before there is some."""
        if not self._places.count:
            return {}
        place, cut = self._places.rows.T
        shares = reached(place, cut > 0, np.array(_COVERED))
        return {f"{level:g}": float(share) for level, share in zip(_COVERED, shares, strict=True)}

    def state(self) -> dict[str, Any]:
        """For people."""
        return {
            "finished": self.finished,
            "scale": float(np.exp(self.scale)),
            "calibrated_share": self.shape_share,
            "coverage": self.coverage(),
            "coverage_of": self._places.count,
            "drift": self.drift.state(),
        }

    def _correct(self) -> None:
        self._new = 0
        n = self._misses.count
        if n < _LEAST:
            return
        rows = self._misses.rows
        misses, doubt, cut = rows[:, :-2], rows[:, -2:-1], rows[:, -1] > 0
        weight = recent_weights(n, HALF_LIFE)
        each = float(weight.sum() ** 2 / (weight**2).sum())
        self.scale = float(
            quantiles(misses[:, [_MEDIAN]], cut, weight, np.array([0.5]), 1 / TAIL_SHAPE)[0]
        ) * (n / (n + _SHRINK))
        self.shape_share = min(max((n - _SHAPE_FROM) / (_SHAPE_WHOLLY - _SHAPE_FROM), 0.0), 1.0)
        self._shift = _conformal(misses / doubt, cut, weight, each, float(np.median(doubt)))
        self.corrections += 1


def _conformal(scores: Floats, cut: Bools, weight: Floats, n: float, doubt: float) -> Floats:
    """[25] of each level the score that so many do not exceed, on the safe side by one sample."""
    safe = np.where(
        LEVELS >= 0.5, np.minimum(1, LEVELS * (n + 1) / n), np.maximum(0, LEVELS - (1 - LEVELS) / n)
    )
    return quantiles(scores, cut, weight, safe, 1 / (TAIL_SHAPE * doubt))


def _doubt(raw: Floats) -> float:
    return max(math.log(raw.item(_HIGH) / raw.item(_LOW)), _LEAST_SPREAD)
