"""Whether lengths still miss their predictions as they did: a test of known false-alarm rate."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np

from lengthwise.gateway.forecast._survive import Bools
from lengthwise.gateway.request import Floats

REFERENCE, WINDOW, ALPHA = 512, 128, 0.001


class Drift:
    """Compares each window of misses with the first ones.

    A miss is the logarithm of the length over its prediction, before any correction. Every ``window`` of them
    is tested against the first ``reference``: by the statistic of Kolmogorov and Smirnov, or, where outputs
    were cut, by the log-rank test (Mantel 1966). While nothing changes a test alarms with probability
    ``alpha`` at most (asymptotically): one false alarm in window / alpha requests, 128,000 by default. After an
    alarm the window becomes the beginning of a new reference.

    Args:
        reference: Misses that are compared with.
        window: Misses of one test.
        alpha: Of one test.
    """

    def __init__(self, reference: int = REFERENCE, window: int = WINDOW, alpha: float = ALPHA) -> None:
        self.reference, self.window, self.alpha = reference, window, alpha
        self.tests = self.alarms = self.seen = 0
        self.last_at: int | None = None
        self._known: list[tuple[float, bool]] = []
        self._new: list[tuple[float, bool]] = []

    def add(self, miss: float, *, cut: bool) -> bool:
        """One more; whether it completes a window that has drifted."""
        self.seen += 1
        if len(self._known) < self.reference:
            self._known.append((miss, cut))
            return False
        self._new.append((miss, cut))
        if len(self._new) < self.window:
            return False
        new, self._new = self._new, []
        self.tests += 1
        if not differ(*_columns(self._known), *_columns(new), self.alpha):
            return False
        self.alarms += 1
        self.last_at, self._known = self.seen, new
        return True

    def state(self) -> dict[str, Any]:
        """For people."""
        return {
            "tests": self.tests,
            "alarms": self.alarms,
            "finished_since": None if self.last_at is None else self.seen - self.last_at,
            "false_alarms_a_test": self.alpha,
        }


def differ(x: Floats, x_cut: Bools, y: Floats, y_cut: Bools, alpha: float) -> bool:
    """Whether two samples are of different distributions, at a false-alarm rate of ``alpha``."""
    if x_cut.any() or y_cut.any():
        return abs(log_rank(x, x_cut, y, y_cut)) > NormalDist().inv_cdf(1 - alpha / 2)
    least = math.sqrt(-math.log(alpha / 2) / 2 * (len(x) + len(y)) / (len(x) * len(y)))
    return kolmogorov_smirnov(x, y) > least


def kolmogorov_smirnov(x: Floats, y: Floats) -> float:
    """The greatest distance of two empirical distributions."""
    both = np.concatenate([x, y])
    ranks = (np.searchsorted(np.sort(part), both, side="right") / len(part) for part in (x, y))
    first, second = ranks
    return float(np.abs(first - second).max())


def log_rank(x: Floats, x_cut: Bools, y: Floats, y_cut: Bools) -> float:
    """Ends of ``y`` seen over those expected if both were alike, in standard deviations; about normal then."""
    value, ends = np.concatenate([x, y]), ~np.concatenate([x_cut, y_cut])
    of_y = np.arange(len(value)) >= len(x)
    times = np.unique(value[ends])
    left = len(value) - np.searchsorted(np.sort(value), times)
    left_y = len(y) - np.searchsorted(np.sort(y), times)
    at = np.searchsorted(times, value[ends])
    dead = np.bincount(at, minlength=len(times))
    dead_y = np.bincount(at, of_y[ends], minlength=len(times))
    share = left_y / np.maximum(left, 1)
    spread = dead * share * (1 - share) * (left - dead) / np.maximum(left - 1, 1)
    return float((dead_y - dead * share).sum() / math.sqrt(max(float(spread.sum()), 1e-12)))


def _columns(pairs: list[tuple[float, bool]]) -> tuple[Floats, Bools]:
    return np.array([miss for miss, _ in pairs]), np.array([cut for _, cut in pairs], bool)
