"""How long a request's service takes, as theory needs it: masses, quantiles, moments, greatest of several."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError

Floats = npt.NDArray[np.float64]

_THRESHOLD = 1e-3
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
                f"uniform service times need 0 <= low < high, both finite; they are {self.low_s:g} and {self.high_s:g}"
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
            raise InputError(f"exponential service times need a rate above 0, 1 / mean; it is {self.rate_per_s:g}")

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
        if inside**batch > _THRESHOLD:
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


@dataclass(frozen=True, eq=False)
class SampledTimes:
    """Service times that were seen (or cells of any distribution), each as likely as the others.

    Attributes:
        values_s: [n] positive seconds, in any order.
    """

    values_s: npt.ArrayLike

    def __post_init__(self) -> None:
        values = np.sort(np.asarray(self.values_s, float).ravel())
        if len(values) == 0 or not (np.isfinite(values).all() and values[0] > 0):
            shown = "none" if len(values) == 0 else f"{values[0]:g} to {values[-1]:g}"
            raise InputError(f"sampled service times must be finite and above 0, at least one; got {shown}")
        object.__setattr__(self, "values_s", values)

    @classmethod
    def from_quantiles(cls, levels: npt.ArrayLike, values_s: npt.ArrayLike, count: int = 2000) -> SampledTimes:
        """``count`` cells of a distribution that is linear between its quantiles."""
        at = (np.arange(count) + 0.5) / count
        return cls(np.interp(at, np.asarray(levels, float), np.asarray(values_s, float)))

    @property
    def mean_s(self) -> float:
        """Mean of the sample."""
        return float(self._sorted.mean())

    @property
    def second_moment(self) -> float:
        """Mean square of the sample."""
        return float(np.mean(self._sorted**2))

    def quantile(self, level: npt.ArrayLike) -> Floats:
        """The least values that at least the shares ``level`` of the sample stay at or below."""
        place = np.ceil(np.asarray(level, float) * len(self._sorted) - 1e-9).astype(int) - 1
        return np.asarray(self._sorted[np.clip(place, 0, len(self._sorted) - 1)])

    def masses(self, cuts_s: npt.ArrayLike) -> Floats:
        """[k] the share of the sample in each bin."""
        return np.diff(self._counts(cuts_s)) / len(self._sorted)

    def expected_max_s(self, cuts_s: npt.ArrayLike, shares: npt.ArrayLike, batch: int) -> float:
        """Sum of value x (F^batch - F before^batch), drawn with replacement."""
        counts = np.diff(self._counts(cuts_s))
        with np.errstate(divide="ignore", invalid="ignore"):
            each = np.where(counts > 0, np.asarray(shares, float) / counts, 0.0)
        reached = np.minimum(np.cumsum(np.repeat(each, counts)), 1.0)
        reached[-1] = 1.0
        return float(self._sorted @ np.diff(reached**batch, prepend=0.0))

    def cells(self, count: int) -> tuple[Floats, Floats]:
        """The distinct values, or, where they are more, ``count`` runs of the sample at their means."""
        values, counts = self._distinct
        if len(values) <= count:
            return values, counts / counts.sum()
        runs = np.array_split(self._sorted, count)
        return np.array([run.mean() for run in runs]), np.array([len(run) for run in runs]) / len(self._sorted)

    @cached_property
    def _distinct(self) -> tuple[Floats, npt.NDArray[np.int64]]:
        values, counts = np.unique(self._sorted, return_counts=True)
        return values, counts

    @property
    def _sorted(self) -> Floats:
        values: Floats = self.values_s  # type: ignore[assignment]  # made so by __post_init__
        return values

    def _counts(self, cuts_s: npt.ArrayLike) -> npt.NDArray[np.int64]:
        inner = np.searchsorted(self._sorted, checked_cuts(cuts_s), side="right")
        return np.concatenate(([0], inner, [len(self._sorted)])).astype(np.int64)


MOST_CELLS = 1500
"""Cuts are learned among so many cells of a distribution at most: the work grows with their square."""


def checked_counts(batch: int, bins: int = 1) -> None:
    """Raises InputError where a batch or a number of bins makes no sense."""
    checked_count("batch", batch)
    checked_count("bins", bins)


def checked_count(name: str, value: int) -> None:
    """Raises InputError where a number of things, by this name, makes no sense."""
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
        raise InputError(f"{name} must be a whole number of at least 1; it is {value}")


def equal_mass(times: ServiceTimes, bins: int) -> Floats:
    """[k - 1] cuts that leave the same share of requests in every bin (of a sample, as nearly as ties allow)."""
    checked_counts(1, bins)
    return times.quantile(np.arange(1, bins) / bins)


def uniform_optimal(times: UniformTimes, bins: int) -> Floats:
    """[k - 1] cuts l_i = low + (i / k)(high - low), the best of uniform times (Lemma 4.1)."""
    checked_counts(1, bins)
    return times.low_s + (times.high_s - times.low_s) * np.arange(1, bins) / bins


def exponential_steps(batch: int, bins: int) -> Floats:
    """[k - 1] x_1 .. x_{k-1}: x_{k-1} = ln H_B, and downwards x_i = ln(1 + x_{i+1}) (Lemma A.1)."""
    checked_counts(batch, bins)
    steps = np.zeros(bins - 1)
    following = np.sum(1 / np.arange(1, batch + 1)) - 1
    for i in range(bins - 2, -1, -1):
        steps[i] = following = np.log1p(following)
    return steps


def exponential_recursion(times: ExponentialTimes, batch: int, bins: int) -> Floats:
    """[k - 1] cuts (x_1 + .. + x_i) / rate, which minimise the bound of Appendix A.4 (Lemma A.1)."""
    return np.cumsum(exponential_steps(batch, bins)) / times.rate_per_s


def learned(times: ServiceTimes, batch: int, bins: int) -> Floats:
    """[k - 1] cuts with the least expected batch time, for any distribution.

    Minimises the sum over bins of P(bin) E[max of a batch in the bin] by dynamic programming over the
    distribution's cells (at most ``MOST_CELLS``); never worse than equal masses. Fewer distinct values
    than bins leave bins empty: their cuts repeat.
    """
    checked_counts(batch, bins)
    values, weights = times.cells(MOST_CELLS)
    picked = _best_ends(_segment_costs(values, weights, batch), bins)
    cuts = _between(values, picked, times)
    cuts = np.pad(cuts, (0, bins - 1 - len(cuts)), constant_values=float(values[-1]))
    even = equal_mass(times, bins)
    return min((cuts, even), key=lambda c: _batch_s(times, c, batch))


def _segment_costs(values: Floats, weights: Floats, batch: int) -> Floats:
    """[m + 1, m + 1] mass x E[max] of one bin of the cells a .. b - 1; infinite where a >= b.

    With F the distribution within the bin, E[max] = v_b - sum F_j^B (v_{j+1} - v_j). The sum follows
    the bin's growing end: R(b + 1) = (R(b) + gap) (mass(b) / mass(b + 1))^B, which never underflows.
    """
    m = len(values)
    costs = np.full((m + 1, m + 1), np.inf)
    mass, held = np.zeros(m), np.zeros(m)  # by first cell of the bin
    for b in range(1, m + 1):
        grown = mass[:b] + weights[b - 1]
        gap = values[b - 1] - values[b - 2] if b > 1 else 0.0
        held[:b] = (held[:b] + gap) * (mass[:b] / grown) ** batch
        mass[:b] = grown
        costs[:b, b] = grown * (values[b - 1] - held[:b])
    return costs


def _best_ends(costs: Floats, bins: int) -> list[int]:
    """Ends (exclusive cells) of the bins but the last, along the cheapest way of at most ``bins`` steps."""
    least = costs[0].copy()
    ways = []
    for _ in range(min(bins, len(costs) - 1) - 1):
        through = least[:, None] + costs
        back = np.argmin(through, axis=0)
        least = through[back, np.arange(len(costs))]
        ways.append(back)
    ends, at = [], len(costs) - 1
    for back in reversed(ways):
        at = int(back[at])
        ends.append(at)
    return ends[::-1]


def _between(values: Floats, ends: list[int], times: ServiceTimes) -> Floats:
    """Cuts after those cells: at the last value of a sample's cell, else between two cells."""
    if isinstance(times, SampledTimes) and len(values) < MOST_CELLS:
        return np.array([values[end - 1] for end in ends])
    return np.array([(values[end - 1] + values[end]) / 2 for end in ends])


def _batch_s(times: ServiceTimes, cuts_s: Floats, batch: int) -> float:
    masses = times.masses(cuts_s)
    one = np.eye(len(masses))
    return float(sum(p * times.expected_max_s(cuts_s, one[i], batch) for i, p in enumerate(masses) if p > 0))
