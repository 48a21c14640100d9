"""Defines distributions of lengths by their quantile functions, and checks of arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import erfc, exp, isfinite, isinf, log, pi, sqrt
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError

Floats = npt.NDArray[np.float64]

Z90 = 1.2815515655446004  # the 90th percentile of the standard normal


def require(condition: bool | np.bool_, message: str) -> None:
    """Raise InputError with this message if the condition is false."""
    if not condition:
        raise InputError(message)


def require_positive(name: str, value: float) -> None:
    """Raise InputError unless the value is finite and above 0. The message calls it ``name``."""
    require(isfinite(value) and value > 0, f"{name} must be a finite number above 0; it is {value}")


def require_range(low: float, high: float) -> None:
    """Raise InputError unless 0 <= low <= high."""
    require(0 <= low <= high, f"lengths must lie in a range from 0 up; it is {low} to {high}")


def root(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the zero of a monotone function between ``low`` and ``high``, by bisection to the last bit."""
    increasing = function(high) > function(low)
    middle = (low + high) / 2
    while low < middle < high:
        if (function(middle) > 0) == increasing:
            high = middle
        else:
            low = middle
        middle = (low + high) / 2
    return middle


def truncated_normal(mean: float, sd: float, low: float, high: float) -> tuple[float, float]:
    """Return the mean and sd of the normal that has ``mean`` and ``sd`` after truncation to ``low`` .. ``high``."""
    if not (low < mean < high and sd > 0):
        raise InputError(f"low < mean < high and sd > 0 must hold; they are {low}, {mean}, {high}, {sd}")

    def center(spread: float) -> float:
        reach = 10 * spread + 20 * spread**2 / sd
        return root(lambda at: _truncated_moments(at, spread, low, high)[0] - mean, mean - reach, mean + reach)

    def excess(spread: float) -> float:
        return _truncated_moments(center(spread), spread, low, high)[1] - sd

    max_spread = 30 * max(sd, (mean - low) if isinf(high) else high - low)
    if excess(max_spread) < 0:
        raise InputError(
            f"no normal truncated to {low:g}..{high:g} has mean {mean:g} and sd {sd:g}: the sd is at most "
            f"{excess(max_spread) + sd:.1f}; give a smaller sd, or mean and sd before truncation"
        )
    spread = root(excess, sd, max_spread)  # truncation narrows, so the normal is at least as wide
    return center(spread), spread


def _truncated_moments(mean: float, sd: float, low: float, high: float) -> tuple[float, float]:
    """Return the mean and sd of a normal after truncation (Johnson, Kotz, Balakrishnan, 1994, section 10.1)."""
    from scipy.special import log_ndtr

    a, b = (low - mean) / sd, (high - mean) / sd
    if a > 0:
        # The mirror image has its mass at small probabilities, which have full precision.
        left, spread = _truncated_moments(-mean, sd, -high, -low)
        return -left, spread
    log_mass = log_ndtr(b) + np.log1p(-np.exp(log_ndtr(a) - log_ndtr(b)))
    at_a, at_b = (exp(-0.5 * x * x - log_mass) / sqrt(2 * pi) if np.isfinite(x) else 0.0 for x in (a, b))
    shift = at_a - at_b
    edges = (a * at_a if np.isfinite(a) else 0.0) - (b * at_b if np.isfinite(b) else 0.0)
    return mean + sd * shift, sd * sqrt(max(1 + edges - shift * shift, 1e-300))


def skew_normal_cdf(x: Floats, mean: float, sd: float, skewness: float) -> Floats:
    """Return the CDF at ``x`` [n] of Azzalini's skew normal (1985) with these moments, by Owen's T function."""
    from scipy.special import ndtr, owens_t

    ratio = abs(skewness) ** (2 / 3)
    delta = np.sign(skewness) * sqrt(pi / 2 * ratio / (ratio + ((4 - pi) / 2) ** (2 / 3)))
    alpha = delta / sqrt(1 - delta * delta)
    omega = sd / sqrt(1 - 2 * delta * delta / pi)
    z = (x - (mean - omega * delta * sqrt(2 / pi))) / omega
    cdf: Floats = np.clip(ndtr(z) - 2 * owens_t(z, alpha), 0.0, 1.0)
    return np.maximum.accumulate(cdf)


class Marginal(Protocol):
    """Interface of a distribution of lengths in tokens."""

    def quantile(self, u: Floats) -> Floats:
        """Return the quantiles [n] in tokens, float64, at levels ``u`` [n]."""


@dataclass(frozen=True)
class Fixed:
    """A constant length."""

    tokens: float

    def __post_init__(self) -> None:
        require(self.tokens >= 1, f"a length must be at least 1 token; it is {self.tokens}")

    def quantile(self, u: Floats) -> Floats:
        """Return the constant length for each level, [n]."""
        return np.full(len(u), float(self.tokens))


@dataclass(frozen=True)
class Uniform:
    """Integers from ``low`` to ``high``, both included, with equal probabilities."""

    low: int
    high: int

    def __post_init__(self) -> None:
        require_range(self.low, self.high)

    def quantile(self, u: Floats) -> Floats:
        """Return the quantiles [n], which are integers."""
        return self.low + np.floor(u * (self.high - self.low + 1))


@dataclass(frozen=True)
class Zipf:
    """Integers from ``low`` to ``high``. The k-th smallest has weight ``k**-theta`` (Vidur assigns k by a hash)."""

    low: int
    high: int
    theta: float = 0.6

    def __post_init__(self) -> None:
        require_range(self.low, self.high)
        require(isfinite(self.theta) and self.theta >= 0, f"theta must not be negative; it is {self.theta}")

    def quantile(self, u: Floats) -> Floats:
        """Return the quantiles [n], which are integers."""
        return self.low + np.searchsorted(self._cdf, u, side="left").astype(np.float64)

    @cached_property
    def _cdf(self) -> Floats:
        cdf = np.cumsum(np.arange(1, self.high - self.low + 2, dtype=np.float64) ** -self.theta)
        return np.asarray(cdf / cdf[-1])


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
        """Return the distribution with this mean, in tokens, and this coefficient of variation."""
        require(cv >= 0 and mean > 0, f"mean must be above 0 and cv not negative; they are {mean} and {cv}")
        return cls(mean / sqrt(1 + cv * cv), sqrt(log(1 + cv * cv)))

    @classmethod
    def from_mean_sd(cls, mean: float, sd: float) -> LogNormal:
        """Return the distribution with this mean and standard deviation, in tokens."""
        require(mean > 0, f"mean must be above 0; it is {mean}")
        return cls.from_mean_cv(mean, sd / mean)

    @classmethod
    def from_median_p90(cls, median: float, p90: float) -> LogNormal:
        """Return the distribution with this median and 90th percentile, in tokens."""
        require(0 < median <= p90, f"p90 must not be below the median; they are {p90} and {median}")
        return cls(median, log(p90 / median) / Z90)

    def quantile(self, u: Floats) -> Floats:
        """Return the quantiles [n] in tokens."""
        from scipy.special import ndtri

        return np.asarray(self.median * np.exp(self.sigma * ndtri(u)))


@dataclass(frozen=True)
class TruncatedNormal:
    """A normal truncated to ``low`` .. ``high``. ``mean`` and ``sd`` are its moments before the truncation."""

    mean: float
    sd: float
    low: float = 1.0
    high: float = float("inf")

    def __post_init__(self) -> None:
        require_range(self.low, self.high)
        require(isfinite(self.mean), f"mean must be finite; it is {self.mean}")
        require(self.sd > 0 and isfinite(self.sd), f"sd must be above 0; it is {self.sd}")
        distance = max(self.low - self.mean, self.mean - self.high) / self.sd
        require(distance < 35, f"almost nothing of the normal lies in {self.low:g}..{self.high:g}")

    @classmethod
    def from_moments(cls, mean: float, sd: float, low: float = 1.0, high: float = float("inf")) -> TruncatedNormal:
        """Return the distribution with these moments after truncation. Raises InputError if there is none."""
        return cls(*truncated_normal(mean, sd, low, high), low=low, high=high)

    def quantile(self, u: Floats) -> Floats:
        """Return the quantiles [n] in tokens, within the bounds."""
        from scipy.special import ndtr, ndtri

        # A range in the upper tail is mirrored to the lower one, because probabilities near 1 lack precision.
        side = -1.0 if self.mean < self.low else 1.0
        first, last = ndtr(side * (np.array([self.low, self.high]) - self.mean) / self.sd)
        tokens = self.mean + side * self.sd * ndtri(first + u * (last - first))
        return np.asarray(np.clip(tokens, self.low, self.high))


@dataclass(frozen=True)
class SkewNormal:
    """Azzalini's skew normal, truncated to ``low`` .. ``high``. Its moments are those before truncation."""

    mean: float
    sd: float
    skewness: float = 0.0
    low: float = 1.0
    high: float = float("inf")

    def __post_init__(self) -> None:
        require_range(self.low, self.high)
        require(self.sd > 0, f"sd must be above 0; it is {self.sd}")
        require(abs(self.skewness) < 0.995, f"a skew normal's skewness is within 0.995; it is {self.skewness}")
        require(len(self._table[0]) > 1, f"nothing of the distribution lies in {self.low}..{self.high}")

    def quantile(self, u: Floats) -> Floats:
        """Return the quantiles [n] in tokens, within the bounds."""
        return np.interp(u, *self._table)

    @cached_property
    def _table(self) -> tuple[Floats, Floats]:
        grid = np.linspace(self.mean - 6 * self.sd, self.mean + 8 * self.sd, 4097)
        grid = np.unique(np.clip(grid, self.low, self.high))
        levels = skew_normal_cdf(grid, self.mean, self.sd, self.skewness)
        levels, first = np.unique(levels, return_index=True)
        span = levels[-1] - levels[0]
        return (levels - levels[0]) / span if span > 0 else levels[:1], grid[first]


def two_slope_table(mean: float, median: float, p90: float, low: float, high: float) -> tuple[Floats, Floats]:
    """Return the levels and the tokens of a quantile table with this mean, median and 90th percentile.

    The distribution is log-normal up to ``p90``, or normal if no tail gives the log-normal this mean. Above ``p90``,
    the tail is stretched to match the mean. Raises InputError if neither has this mean.
    """
    if not 0 < low < median < p90 < high:
        raise InputError(f"0 < low < median < p90 < high must hold; they are {low:g}, {median:g}, {p90:g}, {high:g}")
    z = np.sort(np.concatenate((np.linspace(-5, 5, 401), [Z90])))
    levels = np.array([erfc(-x / sqrt(2)) / 2 for x in z])
    levels[[0, -1]] = 0.0, 1.0
    levels[np.searchsorted(z, Z90)] = 0.9  # exact, so that the table has the published p90

    def tokens(tail: float, *, is_log: bool) -> Floats:
        """Return the tokens at ``z``; ``tail`` multiplies the slope above p90, ``is_log`` selects the log-normal."""
        scale = log if is_log else float
        slope = (scale(p90) - scale(median)) / Z90
        values = scale(median) + slope * (np.minimum(z, Z90) + tail * np.maximum(z - Z90, 0))
        values = np.clip(values, scale(low), scale(high))
        found = np.exp(values) if is_log else values
        found[np.searchsorted(z, [0.0, Z90])] = median, p90
        return np.asarray(np.clip(found, low, high))

    def excess(tail: float, is_log: bool) -> float:
        return float(np.trapezoid(tokens(tail, is_log=is_log), levels)) - mean

    ends = []
    for is_log in (True, False):
        ends += [excess(0.0, is_log), excess(1e6, is_log)]
        if ends[-2] < 0 < ends[-1]:
            return levels, tokens(root(partial(excess, is_log=is_log), 0.0, 1e6), is_log=is_log)
    raise InputError(
        f"with median {median:g}, p90 {p90:g} and bounds {low:g} to {high:g} the mean can be "
        f"{min(ends) + mean:.0f} to {max(ends) + mean:.0f} tokens; {mean:g} is requested"
    )


@dataclass(frozen=True, eq=False)
class Quantiles:
    """A table of non-decreasing lengths ``tokens`` at ``levels`` from 0 to 1, interpolated linearly."""

    levels: Sequence[float] | Floats
    tokens: Sequence[float] | Floats

    def __post_init__(self) -> None:
        levels, tokens = np.asarray(self.levels, float), np.asarray(self.tokens, float)
        require(levels.shape == tokens.shape and levels.ndim == 1, "a quantile table needs a length for each level")
        require(
            len(levels) > 1 and levels[0] == 0 and levels[-1] == 1 and (np.diff(levels) > 0).all(),
            f"levels must increase from 0 to 1; they are {list(self.levels)[:8]}",
        )
        require(
            np.isfinite(tokens).all() and (np.diff(tokens) >= 0).all() and tokens[0] >= 0,
            f"the lengths of a quantile table must not decrease; they are {list(self.tokens)[:8]}",
        )

    @classmethod
    def from_mean_median_p90(
        cls, mean: float, median: float, p90: float, *, low: float = 1.0, high: float
    ) -> Quantiles:
        """Return a smooth table with these statistics, in tokens. Raises InputError if no tail gives the mean."""
        return cls(*two_slope_table(mean, median, p90, low, high))

    def quantile(self, u: Floats) -> Floats:
        """Return the quantiles [n] in tokens."""
        return np.asarray(np.interp(u, np.asarray(self.levels, float), np.asarray(self.tokens, float)))


@dataclass(frozen=True, eq=False)
class Empirical:
    """The empirical distribution of lengths ``tokens`` [m] with ``weights`` [m]; None means equal weights."""

    tokens: Sequence[float] | Floats | npt.NDArray[np.int64]
    weights: Sequence[float] | Floats | None = None

    def __post_init__(self) -> None:
        tokens = np.asarray(self.tokens, float)
        require(tokens.ndim == 1 and tokens.size > 0, "an empirical distribution needs at least one length")
        require((tokens >= 0).all() and np.isfinite(tokens).all(), "lengths must not be negative")
        if self.weights is not None:
            weights = np.asarray(self.weights, float)
            require(weights.shape == tokens.shape, "each length must have one weight")
            require((weights >= 0).all() and 0 < weights.sum() < np.inf, "weights must sum above 0")

    def quantile(self, u: Floats) -> Floats:
        """Return the quantiles [n] in tokens; each is one of the observed lengths."""
        tokens, cdf = self._steps
        if cdf is None:
            return tokens[np.minimum((u * len(tokens)).astype(np.int64), len(tokens) - 1)]
        return tokens[np.minimum(np.searchsorted(cdf, u, side="right"), len(tokens) - 1)]

    @cached_property
    def _steps(self) -> tuple[Floats, Floats | None]:
        tokens = np.asarray(self.tokens, float)
        if self.weights is None:
            return np.sort(tokens), None
        order = np.argsort(tokens, kind="stable")
        order = order[np.asarray(self.weights, float)[order] > 0]
        cdf = np.cumsum(np.asarray(self.weights, float)[order])
        return tokens[order], cdf / cdf[-1]
