"""How long one side of a request is: frozen distributions given by their quantile functions.

``quantile(u)`` takes levels in (0, 1), [n] float64, and gives tokens, [n] float64, not yet rounded. One
uniform draw a request is all the randomness there is: correlation, common random numbers and antithetic
runs follow. Rounding to whole tokens of at least 1 happens where pairs are drawn (``lengths``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import isfinite, log, sqrt
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lengthwise.workload._checks import require, require_range

Floats = npt.NDArray[np.float64]

Z90 = 1.2815515655446004
"""The 90th percentile of the standard normal."""


class Marginal(Protocol):
    """Anything with a quantile function in tokens."""

    def quantile(self, u: Floats) -> Floats:
        """Tokens below which a share ``u`` of the requests lies, [n] float64."""
        ...


@dataclass(frozen=True)
class Fixed:
    """Always the same length."""

    tokens: float

    def __post_init__(self) -> None:
        require(self.tokens >= 1, f"a length must be at least 1 token; it is {self.tokens}")

    def quantile(self, u: Floats) -> Floats:
        """[n] times ``tokens``."""
        return np.full(len(u), float(self.tokens))


@dataclass(frozen=True)
class Uniform:
    """Whole tokens from ``low`` to ``high``, both included, equally likely."""

    low: int
    high: int

    def __post_init__(self) -> None:
        require_range(self.low, self.high)

    def quantile(self, u: Floats) -> Floats:
        """[n] whole tokens."""
        return self.low + np.floor(u * (self.high - self.low + 1))


@dataclass(frozen=True)
class Zipf:
    """Whole tokens from ``low`` to ``high``; the k-th smallest has a probability like ``k**-theta``.

    Short requests are the frequent ones. (Vidur scatters the ranks over the range by a hash.)
    """

    low: int
    high: int
    theta: float = 0.6

    def __post_init__(self) -> None:
        require_range(self.low, self.high)
        require(isfinite(self.theta) and self.theta >= 0, f"theta must not be negative; it is {self.theta}")

    def quantile(self, u: Floats) -> Floats:
        """[n] whole tokens."""
        return self.low + np.searchsorted(self._cdf, u, side="left").astype(np.float64)

    @cached_property
    def _cdf(self) -> Floats:
        mass = np.arange(1, self.high - self.low + 2, dtype=np.float64) ** -self.theta
        cdf: Floats = np.cumsum(mass)
        cdf /= cdf[-1]
        return cdf


@dataclass(frozen=True)
class LogNormal:
    """A log-normal length; ``sigma`` is the standard deviation of its natural logarithm."""

    median: float
    sigma: float

    def __post_init__(self) -> None:
        require(self.median > 0 and isfinite(self.median), f"median must be above 0; it is {self.median}")
        require(self.sigma >= 0 and isfinite(self.sigma), f"sigma must not be negative; it is {self.sigma}")

    @classmethod
    def from_mean_cv(cls, mean: float, cv: float) -> LogNormal:
        """The one with this mean (tokens) and coefficient of variation."""
        require(cv >= 0 and mean > 0, f"mean must be above 0 and cv not negative; they are {mean} and {cv}")
        return cls(mean / sqrt(1 + cv * cv), sqrt(log(1 + cv * cv)))

    @classmethod
    def from_mean_sd(cls, mean: float, sd: float) -> LogNormal:
        """The one with this mean and standard deviation, tokens."""
        require(mean > 0, f"mean must be above 0; it is {mean}")
        return cls.from_mean_cv(mean, sd / mean)

    @classmethod
    def from_median_p90(cls, median: float, p90: float) -> LogNormal:
        """The one with this median and 90th percentile, tokens."""
        require(0 < median <= p90, f"p90 must not be below the median; they are {p90} and {median}")
        return cls(median, log(p90 / median) / Z90)

    def quantile(self, u: Floats) -> Floats:
        """[n] tokens."""
        from scipy.special import ndtri

        tokens: Floats = self.median * np.exp(self.sigma * ndtri(u))
        return tokens


@dataclass(frozen=True)
class TruncatedNormal:
    """A normal that is drawn again until it lies within ``low`` to ``high``.

    ``mean`` and ``sd`` are the normal's before the cut; ``from_moments`` takes what remains after it.
    """

    mean: float
    sd: float
    low: float = 1.0
    high: float = float("inf")

    def __post_init__(self) -> None:
        require_range(self.low, self.high)
        require(isfinite(self.mean), f"mean must be finite; it is {self.mean}")
        require(self.sd > 0 and isfinite(self.sd), f"sd must be above 0; it is {self.sd}")
        away = max(self.low - self.mean, self.mean - self.high) / self.sd
        require(away < 35, f"next to nothing of the normal lies in {self.low:g}..{self.high:g}")

    @classmethod
    def from_moments(
        cls, mean: float, sd: float, low: float = 1.0, high: float = float("inf")
    ) -> TruncatedNormal:
        """The one whose mean and standard deviation after the cut are these.

        Raises:
            InputError: No truncated normal has them; on a bounded range none is wider than the uniform.
        """
        from lengthwise.workload._fit import truncated_normal

        return cls(*truncated_normal(mean, sd, low, high), low=low, high=high)

    def quantile(self, u: Floats) -> Floats:
        """[n] tokens within the bounds."""
        from scipy.special import ndtr, ndtri

        # From the upper tail where the range lies in it: 1 - tiny has no digits left to tell lengths apart.
        side = -1.0 if self.mean < self.low else 1.0
        first, last = ndtr(side * (np.array([self.low, self.high]) - self.mean) / self.sd)
        tokens: Floats = self.mean + side * self.sd * ndtri(first + u * (last - first))
        return np.clip(tokens, self.low, self.high)


@dataclass(frozen=True)
class SkewNormal:
    """A skew normal by mean, standard deviation and skewness (Azzalini), cut to ``low`` .. ``high``.

    The moments are those before the cut, as in ExeGPT's study of changed distributions. The quantile
    function is a table of 4,097 points.
    """

    mean: float
    sd: float
    skewness: float = 0.0
    low: float = 1.0
    high: float = float("inf")

    def __post_init__(self) -> None:
        require_range(self.low, self.high)
        require(self.sd > 0, f"sd must be above 0; it is {self.sd}")
        require(
            abs(self.skewness) < 0.995, f"a skew normal's skewness is within 0.995; it is {self.skewness}"
        )
        require(len(self._table[0]) > 1, f"nothing of the distribution lies in {self.low}..{self.high}")

    def quantile(self, u: Floats) -> Floats:
        """[n] tokens within the bounds."""
        levels, tokens = self._table
        return np.interp(u, levels, tokens)

    @cached_property
    def _table(self) -> tuple[Floats, Floats]:
        from lengthwise.workload._fit import skew_normal_cdf

        grid = np.linspace(self.mean - 6 * self.sd, self.mean + 8 * self.sd, 4097)
        grid = np.unique(np.clip(grid, self.low, self.high))
        levels = skew_normal_cdf(grid, self.mean, self.sd, self.skewness)
        levels, first = np.unique(levels, return_index=True)
        span = levels[-1] - levels[0]
        return (levels - levels[0]) / span if span > 0 else levels[:1], grid[first]
