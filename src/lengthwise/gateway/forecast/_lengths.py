"""What stands in where no predictor speaks: how long outputs were lately."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from lengthwise.gateway.forecast._learned import HALF_LIFE, Ring
from lengthwise.gateway.forecast._survive import quantiles, recent_weights
from lengthwise.gateway.request import Floats
from lengthwise.predict.distribution import LEVELS, TAIL_SHAPE

_MEDIAN_TOKENS, _SPREAD = 200.0, 1.1
"""Before anything has finished: a log-normal about as wide as lengths of chats are."""
_LEAST = 8


def _unknown() -> Floats:
    z = np.array([NormalDist().inv_cdf(min(max(float(p), 0.002), 0.998)) for p in LEVELS])
    return np.asarray(_MEDIAN_TOKENS * np.exp(_SPREAD * z))


UNKNOWN: Floats = _unknown()
"""[25] quantiles of a length of which nothing at all is known."""


class Lengths:
    """Lengths of outputs, cut ones counted as longer than seen.

    Args:
        every: Finished requests between two looks, once there are many.
    """

    def __init__(self, every: int) -> None:
        self._every, self._new = every, 0
        self._seen = Ring(2)
        self.row: Floats | None = None
        """[25] their quantiles; None before there are some."""

    def add(self, tokens: int, *, cut: bool) -> None:
        """One more."""
        self._seen.add((math.log(tokens), cut))
        self._new += 1
        if self._seen.count >= _LEAST and self._new >= min(self._every, max(_LEAST, self._seen.count // 2)):
            self._new = 0
            log, is_cut = self._seen.rows.T
            weight = recent_weights(len(log), HALF_LIFE)
            row = np.exp(quantiles(log[:, None], is_cut > 0, weight, LEVELS, 1 / TAIL_SHAPE))
            self.row = np.maximum.accumulate(np.maximum(row, 1.0))
