"""Distributions of service times (bin shares, quantiles, moments, expected maxima) and boundaries of bins."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError

Floats = npt.NDArray[np.float64]

_THRESHOLD = 1e-3  # where all of a batch is in a bin with a higher probability, the finite sum is precise


class ServiceTimes(Protocol):
    """Interface of a distribution of service times, in seconds, tokens or another unit that can be added.

    ``cuts_s`` are the k - 1 non-decreasing boundaries of k bins: bin i has the times above cut i - 1 and up to cut i.
    """

    @property
    def mean_s(self) -> float:
        """Return the expected service time."""

    @property
    def second_moment(self) -> float:
        """Return the expected square of the service time."""

    def quantile(self, level: npt.ArrayLike) -> Floats:
        """Return the quantiles of the service time at ``level``."""

    def masses(self, cuts_s: npt.ArrayLike) -> Floats:
        """Return [k] the share of requests in each bin."""

    def expected_max_s(self, cuts_s: npt.ArrayLike, shares: npt.ArrayLike, batch: int) -> float:
        """Return the expected longest time of ``batch`` requests, each in bin i with probability ``shares[i]``."""

    def cells(self, count: int) -> tuple[Floats, Floats]:
        """Return (times, probabilities) of at most ``count`` points that have the same mean as the distribution."""


@dataclass(frozen=True)
class UniformTimes:
    """Uniformly distributed service times: Assumption 3.2 of Multi-Bin Batching."""

    low_s: float
    high_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.low_s < self.high_s < math.inf:
            raise InputError(
                f"uniform service times need 0 <= low < high, both finite; they are {self.low_s:g} and {self.high_s:g}"
            )

    @property
    def mean_s(self) -> float:
        """Return (low + high) / 2."""
        return (self.low_s + self.high_s) / 2

    @property
    def second_moment(self) -> float:
        """Return (low^2 + low high + high^2) / 3."""
        return (self.low_s**2 + self.low_s * self.high_s + self.high_s**2) / 3

    def quantile(self, level: npt.ArrayLike) -> Floats:
        """Return low + level (high - low)."""
        return self.low_s + (self.high_s - self.low_s) * np.asarray(level, float)

    def masses(self, cuts_s: npt.ArrayLike) -> Floats:
        """Return [k] the share of requests in each bin."""
        return np.diff(self._ends(cuts_s)) / (self.high_s - self.low_s)

    def expected_max_s(self, cuts_s: npt.ArrayLike, shares: npt.ArrayLike, batch: int) -> float:
        """Return high minus the integral of F^batch, where F is the distribution function of one request."""
        ends = self._ends(cuts_s)
        above = np.cumsum(np.asarray(shares, float))
        below = np.concatenate(([0.0], above[:-1]))
        width = above - below
        with np.errstate(divide="ignore", invalid="ignore"):
            mean_power = (above ** (batch + 1) - below ** (batch + 1)) / ((batch + 1) * width)
        return float(ends[-1] - np.sum(np.diff(ends) * np.where(width > 1e-12, mean_power, above**batch)))

    def cells(self, count: int) -> tuple[Floats, Floats]:
        """Return the means and probabilities of ``count`` equal intervals."""
        return self.quantile((np.arange(count) + 0.5) / count), np.full(count, 1 / count)

    def _ends(self, cuts_s: npt.ArrayLike) -> Floats:
        inner = np.clip(check_cuts(cuts_s), self.low_s, self.high_s)
        return np.concatenate(([self.low_s], inner, [self.high_s]))


@dataclass(frozen=True)
class ExponentialTimes:
    """Exponential service times with mean 1 / ``rate_per_s``: Assumption A.1 of Multi-Bin Batching."""

    rate_per_s: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate_per_s) and self.rate_per_s > 0):
            raise InputError(f"exponential service times need a rate above 0, 1 / mean; it is {self.rate_per_s:g}")

    @property
    def mean_s(self) -> float:
        """Return 1 / rate."""
        return 1 / self.rate_per_s

    @property
    def second_moment(self) -> float:
        """Return 2 / rate^2."""
        return 2 / self.rate_per_s**2

    def quantile(self, level: npt.ArrayLike) -> Floats:
        """Return -ln(1 - level) / rate."""
        return np.asarray(-np.log1p(-np.asarray(level, float)) / self.rate_per_s)

    def masses(self, cuts_s: npt.ArrayLike) -> Floats:
        """Return [k] the share of requests in each bin."""
        return -np.diff(self._above(cuts_s))

    def expected_max_s(self, cuts_s: npt.ArrayLike, shares: npt.ArrayLike, batch: int) -> float:
        """Return the closed form if all requests are of one bin (Joshi 1978), otherwise the integral of 1 - F^batch."""
        above, mixture = self._above(cuts_s), np.asarray(shares, float)
        ends = np.concatenate(([0.0], np.maximum(check_cuts(cuts_s), 0.0), [np.inf]))
        (used,) = np.nonzero(mixture)
        if len(used) == 1:
            i = int(used[0])
            return float(ends[i]) + self._truncated_max_s(float(ends[i + 1] - ends[i]), batch)
        from scipy.integrate import quad

        total, cdf = 0.0, 0.0
        for i, share in enumerate(mixture):
            mass = above[i] - above[i + 1]
            weight = share / mass if mass > 0 else 0.0

            def tail(x: float, i: int = i, cdf: float = cdf, weight: float = weight) -> float:
                member = cdf + weight * (above[i] - math.exp(-self.rate_per_s * x))
                return float(1 - min(member, 1.0) ** batch)

            if ends[i] < ends[i + 1] and cdf < 1 - 1e-15:
                total += float(quad(tail, ends[i], ends[i + 1], limit=200)[0])
            cdf += share
        return total

    def cells(self, count: int) -> tuple[Floats, Floats]:
        """Return the means and probabilities of ``count`` intervals of equal probability."""
        above = 1 - np.arange(count + 1) / count
        with np.errstate(divide="ignore", invalid="ignore"):
            partial_mean = np.where(above > 0, above * (1 - np.log(above)), 0.0)
        return -np.diff(partial_mean) * count / self.rate_per_s, np.full(count, 1 / count)

    def _above(self, cuts_s: npt.ArrayLike) -> Floats:
        inner = np.exp(-self.rate_per_s * np.maximum(check_cuts(cuts_s), 0.0))
        return np.concatenate(([1.0], inner, [0.0]))

    def _truncated_max_s(self, width_s: float, batch: int) -> float:
        harmonic = np.cumsum(1 / np.arange(1, batch + 1))
        width, inside = self.rate_per_s * width_s, -math.expm1(-self.rate_per_s * width_s)
        if inside <= 0 or inside >= 1:  # an empty bin, or one without an upper end
            return float(harmonic[-1]) / self.rate_per_s if inside >= 1 else 0.0
        if inside**batch > _THRESHOLD:
            first = np.sum(inside ** np.arange(1, batch + 1) / np.arange(1, batch + 1))
            return float(width - (width - first) / inside**batch) / self.rate_per_s
        # Else the tail of the sum: its terms shrink by the factor ``inside``.
        terms = np.arange(1, math.ceil(-40 / math.log(inside)) + 1)
        tail = np.sum(inside**terms / (batch + terms))
        return float(width - tail) / self.rate_per_s


def check_cuts(cuts_s: npt.ArrayLike) -> Floats:
    """Return the cuts as an array. Raises InputError unless they are non-decreasing numbers."""
    cuts = np.asarray(cuts_s, float).ravel()
    if np.isnan(cuts).any() or (np.diff(cuts) < 0).any():
        raise InputError(f"boundaries of bins must be numbers that do not decrease; they are {cuts}")
    return cuts


def bin_of(values_s: npt.ArrayLike, cuts_s: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Return [n] the bin of each value. A value equal to a cut belongs to the lower bin."""
    return np.searchsorted(check_cuts(cuts_s), np.asarray(values_s, float), side="left").astype(np.int64)


@dataclass(frozen=True, eq=False)
class SampledTimes:
    """Equally likely service times ``values_s`` [n]: positive seconds in any order."""

    values_s: npt.ArrayLike

    def __post_init__(self) -> None:
        values = np.sort(np.asarray(self.values_s, float).ravel())
        if len(values) == 0 or not (np.isfinite(values).all() and values[0] > 0):
            shown = "none" if len(values) == 0 else f"{values[0]:g} to {values[-1]:g}"
            raise InputError(f"sampled service times must be finite and above 0, at least one; got {shown}")
        object.__setattr__(self, "values_s", values)

    @property
    def mean_s(self) -> float:
        """Return the mean of the sample."""
        return float(self._sorted.mean())

    @property
    def second_moment(self) -> float:
        """Return the mean square of the sample."""
        return float(np.mean(self._sorted**2))

    def quantile(self, level: npt.ArrayLike) -> Floats:
        """Return for each level the smallest sampled value that at least this share of the sample does not exceed."""
        place = np.ceil(np.asarray(level, float) * len(self._sorted) - 1e-9).astype(int) - 1
        return np.asarray(self._sorted[np.clip(place, 0, len(self._sorted) - 1)])

    def masses(self, cuts_s: npt.ArrayLike) -> Floats:
        """Return [k] the share of the sample in each bin."""
        return np.diff(self._counts(cuts_s)) / len(self._sorted)

    def expected_max_s(self, cuts_s: npt.ArrayLike, shares: npt.ArrayLike, batch: int) -> float:
        """Return the expected maximum of times drawn with replacement: the sum of value x increase of F^batch there."""
        counts = np.diff(self._counts(cuts_s))
        with np.errstate(divide="ignore", invalid="ignore"):
            weights = np.where(counts > 0, np.asarray(shares, float) / counts, 0.0)
        cdf = np.minimum(np.cumsum(np.repeat(weights, counts)), 1.0)
        cdf[-1] = 1.0
        return float(self._sorted @ np.diff(cdf**batch, prepend=0.0))

    def cells(self, count: int) -> tuple[Floats, Floats]:
        """Return the distinct values and their shares, or if there are more than ``count``, means of as many groups."""
        values, counts = self._distinct
        if len(values) <= count:
            return values, counts / counts.sum()
        groups = np.array_split(self._sorted, count)
        return np.array([group.mean() for group in groups]), np.array([len(g) for g in groups]) / len(self._sorted)

    @cached_property
    def _distinct(self) -> tuple[Floats, npt.NDArray[np.int64]]:
        return np.unique(self._sorted, return_counts=True)

    @property
    def _sorted(self) -> Floats:
        return self.values_s  # type: ignore[return-value]  # __post_init__ sorts them

    def _counts(self, cuts_s: npt.ArrayLike) -> npt.NDArray[np.int64]:
        inner = np.searchsorted(self._sorted, check_cuts(cuts_s), side="right")
        return np.concatenate(([0], inner, [len(self._sorted)])).astype(np.int64)


MAX_CELLS = 1500  # points of a distribution between which cuts are learned; the work grows with their square


def check_counts(batch: int, bins: int = 1) -> None:
    """Raise InputError unless the batch and the number of bins are positive integers."""
    check_count("batch", batch)
    check_count("bins", bins)


def check_count(name: str, value: int) -> None:
    """Raise InputError unless ``value`` is a positive integer."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
        raise InputError(f"{name} must be a whole number of at least 1; it is {value}")


def equal_mass(times: ServiceTimes, bins: int) -> Floats:
    """Return [k - 1] cuts that give every bin the same share of requests, as nearly as equal values allow."""
    check_counts(1, bins)
    return times.quantile(np.arange(1, bins) / bins)


def uniform_optimal(times: UniformTimes, bins: int) -> Floats:
    """Return [k - 1] cuts l_i = low + (i / k)(high - low), which are optimal for uniform times (Lemma 4.1)."""
    check_counts(1, bins)
    return times.low_s + (times.high_s - times.low_s) * np.arange(1, bins) / bins


def exponential_steps(batch: int, bins: int) -> Floats:
    """Return the [k - 1] numbers x_i of Lemma A.1. The last is ln H_B, and before it x_i is ln(1 + x_{i+1})."""
    check_counts(batch, bins)
    steps = np.zeros(bins - 1)
    step = np.sum(1 / np.arange(1, batch + 1)) - 1
    for i in range(bins - 2, -1, -1):
        steps[i] = step = np.log1p(step)
    return steps


def exponential_recursion(times: ExponentialTimes, batch: int, bins: int) -> Floats:
    """Return [k - 1] cuts (x_1 + .. + x_i) / rate, which minimize the upper bound of Appendix A.4 (Lemma A.1)."""
    return np.cumsum(exponential_steps(batch, bins)) / times.rate_per_s


def learned(times: ServiceTimes, batch: int, bins: int) -> Floats:
    """Return [k - 1] cuts with the smallest expected batch time, which is at most the time with ``equal_mass``."""
    # Dynamic programming over the cells minimizes the sum over bins of P(bin) E[max of a batch in the bin]. If there
    # are fewer distinct values than bins, the cuts of empty bins repeat.
    check_counts(batch, bins)
    values, weights = times.cells(MAX_CELLS)
    costs = _segment_costs(values, weights, batch)
    min_cost = costs[0].copy()
    previous = []
    for _ in range(min(bins, len(costs) - 1) - 1):
        total = min_cost[:, None] + costs
        best = np.argmin(total, axis=0)
        min_cost = total[best, np.arange(len(costs))]
        previous.append(best)
    ends: list[int] = []
    end = len(costs) - 1
    for best in reversed(previous):
        end = int(best[end])
        ends.insert(0, end)
    if isinstance(times, SampledTimes) and len(values) < MAX_CELLS:
        # The cells are the distinct values themselves, so that a cut may be one of them.
        cuts = np.array([values[end - 1] for end in ends])
    else:
        cuts = np.array([(values[end - 1] + values[end]) / 2 for end in ends])
    cuts = np.pad(cuts, (0, bins - 1 - len(cuts)), constant_values=float(values[-1]))

    def batch_s(cuts_s: Floats) -> float:
        masses = times.masses(cuts_s)
        unit = np.eye(len(masses))
        return float(sum(p * times.expected_max_s(cuts_s, unit[i], batch) for i, p in enumerate(masses) if p > 0))

    return min((cuts, equal_mass(times, bins)), key=batch_s)


def _segment_costs(values: Floats, weights: Floats, batch: int) -> Floats:
    """Return [m + 1, m + 1] mass x E[max] of a bin with cells a to b - 1 at (a, b), or infinity where a >= b."""
    # If F is the distribution within the bin, E[max] = v_b - sum F_j^B (v_{j+1} - v_j). The sum R is updated for each
    # upper end b: R(b + 1) = (R(b) + gap) (mass(b) / mass(b + 1))^B, which never underflows.
    m = len(values)
    costs = np.full((m + 1, m + 1), np.inf)
    mass, sums = np.zeros(m), np.zeros(m)  # by first cell of the bin
    for b in range(1, m + 1):
        new_mass = mass[:b] + weights[b - 1]
        gap = values[b - 1] - values[b - 2] if b > 1 else 0.0
        sums[:b] = (sums[:b] + gap) * (mass[:b] / new_mass) ** batch
        mass[:b] = new_mass
        costs[:b, b] = new_mass * (values[b - 1] - sums[:b])
    return costs
