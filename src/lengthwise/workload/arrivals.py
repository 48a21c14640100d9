"""Models arrival times: ``sample(n, rng)`` returns ``n`` non-decreasing times in seconds, at least 0.

In the renewal models (Poisson, Gamma, Weibull) the first request arrives after one gap. Gaps are drawn with mean 1 and
divided by the rate, so that with one seed two rates differ only in the scale of time (common random numbers).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import exp, lgamma, sqrt
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError
from lengthwise.workload.distributions import require, require_positive, root

Floats = npt.NDArray[np.float64]

ELIS_SHAPE = 0.73  # shape of the Gamma gaps measured by ELIS (FabriX trace)
ELIS_SCALE_S = 10.41  # scale of these gaps, in seconds


class Arrivals(Protocol):
    """The interface of models of arrival times."""

    def sample(self, n: int, rng: np.random.Generator) -> Floats:
        """Return arrival times [n] in seconds, non-decreasing, at least 0."""


@dataclass(frozen=True)
class AllAtOnce:
    """All requests arrive at time 0: the offline case."""

    def sample(self, n: int, rng: np.random.Generator) -> Floats:  # noqa: ARG002 - the contract
        """Return zeros [n]."""
        return np.zeros(n)


@dataclass(frozen=True)
class ClosedLoop(AllAtOnce):
    """A closed loop with ``concurrency`` requests in the system. When one ends, with any outcome, the next is sent."""

    concurrency: int

    def __post_init__(self) -> None:
        require(self.concurrency >= 1, f"a closed loop needs a concurrency of at least 1; it is {self.concurrency}")


@dataclass(frozen=True)
class Constant:
    """Requests arrive with equal gaps of ``1 / rate_rps``, the first one at time 0."""

    rate_rps: float

    def __post_init__(self) -> None:
        require_positive("rate_rps", self.rate_rps)

    def sample(self, n: int, rng: np.random.Generator) -> Floats:  # noqa: ARG002 - the contract
        """Return the times [n] in seconds: 0, 1 / rate, 2 / rate, ..."""
        return np.arange(n) / self.rate_rps


@dataclass(frozen=True)
class Poisson:
    """A Poisson process: exponential gaps with mean ``1 / rate_rps``, not truncated (Vidur truncates at 3 means)."""

    rate_rps: float

    def __post_init__(self) -> None:
        require_positive("rate_rps", self.rate_rps)

    def sample(self, n: int, rng: np.random.Generator) -> Floats:
        """Return arrival times [n] in seconds."""
        return _times(rng.standard_exponential(n), 1 / self.rate_rps)


@dataclass(frozen=True)
class Gamma:
    """Gamma gaps with mean ``1 / rate_rps`` and coefficient of variation ``cv`` (shape ``1 / cv**2``)."""

    rate_rps: float
    cv: float

    def __post_init__(self) -> None:
        require_positive("rate_rps", self.rate_rps)
        require_positive("cv", self.cv)

    def sample(self, n: int, rng: np.random.Generator) -> Floats:
        """Return arrival times [n] in seconds."""
        return _times(rng.standard_gamma(self.cv**-2, n), self.cv**2 / self.rate_rps)


@dataclass(frozen=True)
class Weibull:
    """Weibull gaps with mean ``1 / rate_rps`` and coefficient of variation ``cv``."""

    rate_rps: float
    cv: float

    def __post_init__(self) -> None:
        require_positive("rate_rps", self.rate_rps)
        require_positive("cv", self.cv)
        weibull_shape(self.cv)

    def sample(self, n: int, rng: np.random.Generator) -> Floats:
        """Return arrival times [n] in seconds."""
        shape = weibull_shape(self.cv)
        return _times(rng.weibull(shape, n), exp(-lgamma(1 + 1 / shape)) / self.rate_rps)


def elis_gamma(rate_rps: float = 1 / (ELIS_SHAPE * ELIS_SCALE_S)) -> Gamma:
    """Return Gamma arrivals with the cv that ELIS measured, 1.17, and by default its rate, 0.13 requests per second."""
    return Gamma(rate_rps, 1 / sqrt(ELIS_SHAPE))


@dataclass(frozen=True, eq=False)
class RateProfile:
    """Poisson arrivals whose rate changes over time.

    The rate is ``rates_rps[i]`` from ``times_s[i]`` to the next time; with ``linear``, it is interpolated between the
    times. The last rate continues until ``period_s`` (a day, a week), after which the profile repeats; None: forever.
    """

    times_s: Sequence[float]  # increasing times, the first 0
    rates_rps: Sequence[float]  # rates at these times, none negative, at least one positive
    linear: bool = False  # whether to interpolate linearly instead of in steps
    period_s: float | None = None  # length of the profile, at least the last of ``times_s``; None does not repeat

    def __post_init__(self) -> None:
        times, rates = np.asarray(self.times_s, float), np.asarray(self.rates_rps, float)
        if times.ndim != 1 or times.shape != rates.shape or len(times) == 0:
            raise InputError(f"each rate needs a time; got {times.size} times and {rates.size} rates")
        if times[0] != 0 or not (np.diff(times) > 0).all() or not np.isfinite(times).all():
            raise InputError(f"times_s must start at 0 and increase; they are {_shown(times)}")
        if not np.isfinite(rates).all() or (rates < 0).any():
            raise InputError(f"rates_rps must be finite and not negative; they are {_shown(rates)}")
        if self.period_s is not None and not times[-1] <= self.period_s < np.inf:
            raise InputError(f"period_s must be at least the last time, {times[-1]}; it is {self.period_s}")
        if (rates[-1] if self.period_s is None else self._cumulative_rate()[1][-1]) <= 0:
            raise InputError("the rate ends at 0 forever: give a last rate above 0, or a period_s")

    def sample(self, n: int, rng: np.random.Generator) -> Floats:
        """Return arrival times [n] in seconds: the inverse of the cumulative rate at Poisson times of rate 1."""
        target = np.cumsum(rng.standard_exponential(n))
        edges, expected, starts, ends = self._cumulative_rate()
        period_start_s = np.zeros(n)
        if self.period_s is not None:
            periods, target = np.divmod(target, expected[-1])
            period_start_s = periods * self.period_s
        segment = np.clip(np.searchsorted(expected, target, side="right") - 1, 0, len(starts) - 1)
        rest, slope = target - expected[segment], (ends - starts)[segment] / np.diff(edges)[segment]
        # This form of the root of start * t + slope / 2 * t**2 = rest is exact where the slope is 0.
        root = starts[segment] + np.sqrt(np.maximum(starts[segment] ** 2 + 2 * slope * rest, 0))
        inside = np.divide(2 * rest, root, out=np.zeros(n), where=root > 0)
        return np.asarray(np.maximum.accumulate(period_start_s + edges[segment] + inside))

    def _cumulative_rate(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Return the ends of k segments [k + 1], the arrivals expected up to them, and rates at starts and ends [k]."""
        times, rates = np.asarray(self.times_s, float), np.asarray(self.rates_rps, float)
        if self.period_s is None or self.period_s > times[-1]:
            # Without a period the last segment is open; one second of it represents its rate.
            times = np.append(times, times[-1] + 1 if self.period_s is None else self.period_s)
            rates = np.append(rates, rates[-1])
        starts, ends = rates[:-1], rates[1:] if self.linear else rates[:-1]
        expected = np.concatenate(([0.0], np.cumsum((starts + ends) / 2 * np.diff(times))))
        return times, expected, starts, ends


@dataclass(frozen=True, eq=False)
class Replay:
    """Replays given arrival times, such as the ``arrival_s`` of another workload."""

    arrival_s: Sequence[float] | Floats  # [m] seconds, non-decreasing; shifted so that the first is 0
    time_scale: float = 1.0  # factor on every time; 0.5 doubles the rate

    def __post_init__(self) -> None:
        times = np.asarray(self.arrival_s, float)
        require_positive("time_scale", self.time_scale)
        if times.ndim != 1 or not np.isfinite(times).all() or (np.diff(times) < 0).any():
            raise InputError("times to replay must be finite and must not decrease; sort them first")

    def sample(self, n: int, rng: np.random.Generator) -> Floats:  # noqa: ARG002 - the contract
        """Return the first ``n`` times in seconds; raises InputError if there are fewer."""
        times = np.asarray(self.arrival_s, float)
        if n > len(times):
            raise InputError(f"{n} requests need as many times to replay; there are {len(times)}")
        return np.asarray((times[:n] - times[:1]) * self.time_scale)


@lru_cache(maxsize=64)
def weibull_shape(cv: float) -> float:
    """Return the shape k of Weibull gaps: cv**2 + 1 = gamma(1 + 2/k) / gamma(1 + 1/k)**2."""

    def excess(log_shape: float) -> float:
        inverse = exp(-log_shape)
        return lgamma(1 + 2 * inverse) - 2 * lgamma(1 + inverse) - float(np.log1p(cv * cv))

    low, high = np.log(0.05), np.log(1000.0)
    if not excess(low) > 0 > excess(high):
        raise InputError(f"Weibull arrivals need a cv between 0.0013 and 1e5; it is {cv}")
    return exp(root(excess, low, high))


def _times(gaps: Floats, scale: float) -> Floats:
    """Return the cumulative sums of the gaps times ``scale``. They replace the gaps, to save memory."""
    np.cumsum(gaps, out=gaps)
    gaps *= scale
    return gaps


def _shown(values: Floats) -> str:
    return ", ".join(f"{value:g}" for value in values[:8]) + (", ..." if len(values) > 8 else "")
