"""How long a request's service takes, as theory needs it: masses, quantiles, moments, greatest of several."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError

Floats = npt.NDArray[np.float64]

_ENOUGH = 1e-3
"""Share of a whole batch inside a cut-off exponential above which its finite sum loses no digits."""


class ServiceTimes(Protocol):
    """A distribution of service times in seconds (or in tokens, or in any unit: theory only adds them).

    ``cuts`` are k - 1 not decreasing numbers; bin i holds what is above cut i - 1 and at most cut i.
    """

    @property
    def mean_s(self) -> float:
        """Expected service time."""
        ...

    @property
    def second_moment(self) -> float:
        """Expected square of the service time."""
        ...

    def quantile(self, level: npt.ArrayLike) -> Floats:
        """Service times that the shares ``level`` stay below or at."""
        ...

    def masses(self, cuts_s: npt.ArrayLike) -> Floats:
        """[k] the share of requests in each bin."""
        ...

    def expected_max_s(self, cuts_s: npt.ArrayLike, shares: npt.ArrayLike, batch: int) -> float:
        """Expected greatest of ``batch`` requests that come from bin i with probability ``shares[i]``."""
        ...

    def cells(self, count: int) -> tuple[Floats, Floats]:
        """Sizes and probabilities of at most ``count`` cells with the distribution's mean."""
        ...


@dataclass(frozen=True)
class UniformTimes:
    """Service times that are uniform between two ends: Assumption 3.2 of Multi-Bin Batching.

    Attributes:
        low_s: The shortest.
        high_s: The longest, above ``low_s``.
    """

    low_s: float
    high_s: float

    def __post_init__(self) -> None:
        ends = (self.low_s, self.high_s)
        if not all(map(math.isfinite, ends)) or not 0 <= self.low_s < self.high_s:
            raise InputError(
                f"uniform service times need 0 <= low < high, both finite; they are {self.low_s:g} and "
                f"{self.high_s:g}"
            )

    @property
    def mean_s(self) -> float:
        """(low + high) / 2."""
        return (self.low_s + self.high_s) / 2

    @property
    def second_moment(self) -> float:
        """(low^2 + low high + high^2) / 3."""
        return (self.low_s**2 + self.low_s * self.high_s + self.high_s**2) / 3

    def quantile(self, level: npt.ArrayLike) -> Floats:
        """Low + level (high - low)."""
        return self.low_s + (self.high_s - self.low_s) * np.asarray(level, float)

    def masses(self, cuts_s: npt.ArrayLike) -> Floats:
        """[k] the share of requests in each bin."""
        return np.diff(self._ends(cuts_s)) / (self.high_s - self.low_s)

    def expected_max_s(self, cuts_s: npt.ArrayLike, shares: npt.ArrayLike, batch: int) -> float:
        """High less the integral of F^batch, F the piecewise linear distribution of a member."""
        ends = self._ends(cuts_s)
        above = np.cumsum(np.asarray(shares, float))
        below = np.concatenate(([0.0], above[:-1]))
        return float(ends[-1] - np.sum(np.diff(ends) * _mean_power(below, above, batch)))

    def cells(self, count: int) -> tuple[Floats, Floats]:
        """``count`` equal cells, each at its mean."""
        return self.quantile((np.arange(count) + 0.5) / count), np.full(count, 1 / count)

    def _ends(self, cuts_s: npt.ArrayLike) -> Floats:
        inner = np.clip(checked_cuts(cuts_s), self.low_s, self.high_s)
        return np.concatenate(([self.low_s], inner, [self.high_s]))


@dataclass(frozen=True)
class ExponentialTimes:
    """Service times that are exponential: Assumption A.1 of Multi-Bin Batching.

    Attributes:
        rate_per_s: One over their mean.
    """

    rate_per_s: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate_per_s) and self.rate_per_s > 0):
            raise InputError(
                f"exponential service times need a rate above 0, 1 / mean; it is {self.rate_per_s:g}"
            )

    @property
    def mean_s(self) -> float:
        """1 / rate."""
        return 1 / self.rate_per_s

    @property
    def second_moment(self) -> float:
        """2 / rate^2."""
        return 2 / self.rate_per_s**2

    def quantile(self, level: npt.ArrayLike) -> Floats:
        """-ln(1 - level) / rate."""
        return np.asarray(-np.log1p(-np.asarray(level, float)) / self.rate_per_s)

    def masses(self, cuts_s: npt.ArrayLike) -> Floats:
        """[k] the share of requests in each bin."""
        return -np.diff(self._above(cuts_s))

    def expected_max_s(self, cuts_s: npt.ArrayLike, shares: npt.ArrayLike, batch: int) -> float:
        """Closed form where all come from one bin (Joshi 1978); else the integral of 1 - F^batch."""
        above, mixed = self._above(cuts_s), np.asarray(shares, float)
        ends = np.concatenate(([0.0], np.maximum(checked_cuts(cuts_s), 0.0), [np.inf]))
        (held,) = np.nonzero(mixed)
        if len(held) == 1:
            i = int(held[0])
            return float(ends[i]) + self._cut_off_max_s(float(ends[i + 1] - ends[i]), batch)
        return self._mixed_max_s(ends, above, mixed, batch)

    def cells(self, count: int) -> tuple[Floats, Floats]:
        """``count`` cells of equal probability, each at its mean."""
        above = 1 - np.arange(count + 1) / count
        with np.errstate(divide="ignore", invalid="ignore"):
            beyond = np.where(above > 0, above * (1 - np.log(above)), 0.0)
        return -np.diff(beyond) * count / self.rate_per_s, np.full(count, 1 / count)

    def _above(self, cuts_s: npt.ArrayLike) -> Floats:
        inner = np.exp(-self.rate_per_s * np.maximum(checked_cuts(cuts_s), 0.0))
        return np.concatenate(([1.0], inner, [0.0]))

    def _cut_off_max_s(self, width_s: float, batch: int) -> float:
        """E[max] of an exponential that is known to be at most ``width_s``."""
        harmonic = np.cumsum(1 / np.arange(1, batch + 1))
        width, inside = self.rate_per_s * width_s, -math.expm1(-self.rate_per_s * width_s)
        if inside <= 0 or inside >= 1:  # an empty bin, or one without an end
            return float(harmonic[-1]) / self.rate_per_s if inside >= 1 else 0.0
        if inside**batch > _ENOUGH:
            first = np.sum(inside ** np.arange(1, batch + 1) / np.arange(1, batch + 1))
            return float(width - (width - first) / inside**batch) / self.rate_per_s
        # Else the sum's own tail, which shrinks by ``inside`` a term: some five terms a member of the batch.
        terms = np.arange(1, math.ceil(-40 / math.log(inside)) + 1)
        tail = np.sum(inside**terms / (batch + terms))
        return float(width - tail) / self.rate_per_s

    def _mixed_max_s(self, ends: Floats, above: Floats, shares: Floats, batch: int) -> float:
        from scipy.integrate import quad

        total, reached = 0.0, 0.0
        for i, share in enumerate(shares):
            mass = above[i] - above[i + 1]
            per = share / mass if mass > 0 else 0.0

            def slower(x: float, i: int = i, reached: float = reached, per: float = per) -> float:
                member = reached + per * (above[i] - math.exp(-self.rate_per_s * x))
                return float(1 - min(member, 1.0) ** batch)

            if ends[i] < ends[i + 1] and reached < 1 - 1e-15:
                total += float(quad(slower, ends[i], ends[i + 1], limit=200)[0])
            reached += share
        return total


def checked_cuts(cuts_s: npt.ArrayLike) -> Floats:
    """The cuts as an array; raises InputError where they are no boundaries."""
    cuts = np.asarray(cuts_s, float).ravel()
    if np.isnan(cuts).any() or (np.diff(cuts) < 0).any():
        raise InputError(f"boundaries of bins must be numbers that do not decrease; they are {cuts}")
    return cuts


def bin_of(values_s: npt.ArrayLike, cuts_s: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """[n] the bin of each value: above the cut before it, at most the cut after it."""
    return np.searchsorted(checked_cuts(cuts_s), np.asarray(values_s, float), side="left").astype(np.int64)


def _mean_power(below: Floats, above: Floats, batch: int) -> Floats:
    """Means of F^batch where F goes linearly from ``below`` to ``above``."""
    width = above - below
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = (above ** (batch + 1) - below ** (batch + 1)) / ((batch + 1) * width)
    return np.where(width > 1e-12, mean, above**batch)
