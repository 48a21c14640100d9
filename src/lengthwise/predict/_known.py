"""What is known of lengths of which some were cut, so that a predictor that is right is scored as right."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lengthwise.predict._survival import kaplan_meier
from lengthwise.predict.contract import Ints
from lengthwise.predict.distribution import Floats, LengthDistribution

_LEAST_UNCUT = 0.1


@dataclass(frozen=True)
class Known:
    """Lengths up to a horizon, and how many of those that were cut before it each stands for.

    Attributes:
        tokens: [n] lengths, what is beyond the horizon counted as the horizon.
        weight: [n] one over the chance of not having been cut before (Kaplan and Meier on the cuts).
        horizon: Tokens beyond which too few outputs were seen; infinite where none was cut.
    """

    tokens: Floats
    weight: Floats
    horizon: float

    def take(self, rows: Ints) -> Known:
        """Those of some of the requests."""
        return replace(self, tokens=self.tokens[rows], weight=self.weight[rows])

    def mean(self, said: LengthDistribution) -> Floats:
        """[n] the predicted mean of lengths up to the horizon."""
        if np.isinf(self.horizon):
            return said.mean
        a, b = said.tokens[:, :-1], said.tokens[:, 1:]
        low, high = np.minimum(a, self.horizon), np.minimum(b, self.horizon)
        within = np.divide(high - low, b - a, out=(b <= self.horizon).astype(float), where=b > a)
        means = within * (low + high) / 2 + (1 - within) * self.horizon
        return np.asarray((means * np.diff(said.levels)).sum(axis=1))

    def below(self, said: LengthDistribution, quantile: Floats, level: float) -> Floats:
        """[n] whether a length is at most a quantile; beyond the horizon, how likely it is said to be."""
        seen = (self.tokens <= quantile).astype(float)
        if np.isinf(self.horizon):
            return seen
        before = said.cdf(self.horizon - 0.5)  # a length is a whole number: this one is not before it
        share = np.divide(level - before, 1 - before, out=np.ones(len(seen)), where=before < 1)
        taken = np.where(quantile >= self.horizon, np.clip(share, 0, 1), 0.0)
        return np.where(self.tokens >= self.horizon, taken, seen)

    def quantiles(self, levels: npt.NDArray[np.float64]) -> Floats:
        """[q] quantiles of the lengths."""
        if np.ptp(self.weight) == 0:
            return np.asarray(np.quantile(self.tokens, levels))
        order = np.argsort(self.tokens, kind="stable")
        reached = np.cumsum(self.weight[order]) / self.weight.sum()
        return self.tokens[order][np.minimum(np.searchsorted(reached, levels), len(order) - 1)]


def known_of(tokens: Ints, censored: npt.NDArray[np.bool_]) -> tuple[Ints, Known]:
    """Rows that can be scored, and what is known of them.

    The horizon is the greatest length before which at least a tenth would not have been cut. Who was cut
    before it cannot be scored; those like it that were not stand for it.
    """
    y = np.asarray(tokens, float)
    if not censored.any():
        return np.arange(len(y)), Known(y, np.ones(len(y)), float("inf"))
    # A cut at a length comes after the ends at that length, so these are out of its risk.
    at, lost = kaplan_meier(y + np.where(censored, 0.5, 0.0), ~censored)
    uncut = np.concatenate([[1.0], 1 - lost])
    left = uncut[np.searchsorted(at, y, side="left")]
    horizon = float(y[left >= _LEAST_UNCUT].max())
    if horizon == y.max() and not censored[y == horizon].any():
        horizon = float("inf")
    rows = np.flatnonzero(~censored | (y >= horizon))
    kept = np.minimum(y[rows], horizon)
    return rows, Known(kept, 1 / uncut[np.searchsorted(at, kept, side="left")], horizon)
