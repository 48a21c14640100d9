"""The largest rate that a deployment sustains.

The requests of a seed are fixed and a rate only stretches their times, so that how far a limit is strained
(the share of requests beyond its bound over the share that may be) rises smoothly with the rate. Strains are
pooled over independent seeds: the mean share is not biased by how rarely a burst falls into a short run, as a
quantile of each run would be. Where the pooled strain crosses 1 is bracketed and bisected. Its interval is the
seeds' spread there over the slope, a t interval, and how far the answer moved when the runs were made longer:
a run that starts from empty forgives an overload that a longer one does not. Runs grow until that is small.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from lengthwise.metrics import t_quantile
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.estimate import Estimate
from lengthwise.search.bounds import Ceiling, ceiling
from lengthwise.search.limits import Promises
from lengthwise.search.load import Load
from lengthwise.search.window import observe

Floats = npt.NDArray[np.float64]
Map = Callable[[Callable[[int], list[float]], Iterable[int]], Iterable[list[float]]]

LEAST_REQUESTS = 400
MOST_REQUESTS = 2**19
"""Of one run."""

WAIT_SPANS, STAY_SPANS, LEAST_S = 12.0, 4.0, 30.0
"""A scouting run lasts so many times the longest limited wait, so many times a request's stay, and so long."""

EXACT_LENGTHS = 2
"""The first runs of an exact search are so many times longer than a scouting one."""

FLOOR_SHARE = 1e-3
"""A deployment that breaks its limits at this share of its ceiling does not serve at all."""

SCOUT_TOLERANCE, SEED_TOLERANCE = 0.05, 0.03
"""Relative width of the last bracket: of a scouting run, of each seed of an exact one."""

ROOT_ERROR = 0.002
"""What reading a rate between the ends of a bracket of SEED_TOLERANCE adds, measured over seeds."""

_LEAST_STRAIN, _LEAST_SLOPE = 0.02, 1.0


@dataclass
class Effort:
    """What was spent: runs of the engine, and requests in them."""

    simulations: int = 0
    requests: int = 0


@dataclass(frozen=True)
class Capacity:
    """What was found; rates in requests a second.

    Attributes:
        rate_rps: Mean over seeds with an interval of spread and drift; 0 if the limits break at any rate.
        binds: The limit that breaks first.
        requests: Of the longest runs.
        ceiling: The bound that no schedule beats.
        effort: What it took.
    """

    rate_rps: Estimate
    binds: str
    requests: int
    ceiling: Ceiling
    effort: Effort


@dataclass
class Trials:
    """How far rates strain the limits, pooled over seeds; keeps every seed's strains by rate."""

    deployment: Deployment
    load: Load
    promises: Promises
    requests: int
    seeds: range
    effort: Effort
    each: Map = map
    strains: dict[float, Floats] = field(default_factory=dict)

    def strain(self, rate_rps: float) -> float:
        """The largest mean strain of any limit; above 1 one breaks."""
        if rate_rps not in self.strains:
            one = partial(self._one, rate_rps)
            self.strains[rate_rps] = np.array(list(self.each(one, self.seeds)))
            self.effort.simulations += len(self.seeds)
            self.effort.requests += len(self.seeds) * self.requests
        return float(self.strains[rate_rps].mean(axis=0).max())

    def _one(self, rate_rps: float, seed: int) -> list[float]:
        workload = self.load.at(seed, self.requests, rate_rps)
        window = observe(workload, self.deployment, seed, sums=self.promises.needs_sums)
        return list(self.promises.strains(window).values())

    @property
    def binds(self) -> str:
        """The metric that broke at the lowest rate that broke any."""
        means = {rate: s.mean(axis=0) for rate, s in self.strains.items() if s.mean(axis=0).max() > 1}
        if not means:
            return "throughput"
        return self.promises.limits[int(means[min(means)].argmax())].metric

    def spread(self, rate_rps: float, level: float) -> float:
        """Half-width of the crossing's interval: the seeds' spread of the strain there, over its slope."""
        n, rates = len(self.seeds), sorted(self.strains)
        if n < 2:
            return math.nan
        if len(rates) < 2:
            return 0.0  # the ceiling holds: no limit is crossed
        at = min(max(bisect(rates, rate_rps) - 1, 0), len(rates) - 2)
        low, high = rates[at], rates[at + 1]
        means = [max(float(self.strains[r].mean(axis=0).max()), _LEAST_STRAIN) for r in (low, high)]
        slope = max(math.log(means[1] / means[0]) / math.log(high / low), _LEAST_SLOPE)
        nearest = min((low, high), key=lambda r: abs(r - rate_rps))
        pooled = max(float(self.strains[nearest].mean(axis=0).max()), _LEAST_STRAIN)
        return self.doubt(nearest, level) / pooled / slope * rate_rps

    def doubt(self, rate_rps: float, level: float) -> float:
        """Half-width of the pooled strain at a rate that was tried; 0 for a single seed."""
        strains, n = self.strains[rate_rps], len(self.seeds)
        if n < 2:
            return 0.0
        worst = strains[:, int(strains.mean(axis=0).argmax())]
        return t_quantile(level, n - 1) * float(worst.std(ddof=1)) / math.sqrt(n)


def scout(deployment: Deployment, load: Load, promises: Promises) -> Capacity:
    """A quick look: one seed, a short run, no interval."""
    top, effort = ceiling(deployment, load.sample(), promises.limits), Effort()
    requests = run_length(top, promises)
    trials = Trials(deployment, load, promises, requests, range(1), effort)
    rate = largest(trials.strain, 0.75 * top.rate_rps, top.rate_rps, 1.25, SCOUT_TOLERANCE)
    return Capacity(Estimate(rate), trials.binds, requests, top, effort)


def breaks_at(rate_rps: float, deployment: Deployment, load: Load, promises: Promises) -> Capacity:
    """Whether a scouting run at one rate breaks a limit: ``binds`` names it, or is empty."""
    top, effort = ceiling(deployment, load.sample(), promises.limits), Effort()
    requests = run_length(replace(top, rate_rps=rate_rps), promises)
    trials = Trials(deployment, load, promises, requests, range(1), effort)
    broken = trials.strain(rate_rps) > 1
    return Capacity(Estimate(rate_rps), trials.binds if broken else "", requests, top, effort)


def capacity(
    deployment: Deployment,
    load: Load,
    promises: Promises,
    *,
    precision: float = 0.025,
    seeds: int = 8,
    level: float = 0.95,
    first: Capacity | None = None,
    each: Map = map,
) -> Capacity:
    """The largest rate that holds, to a relative half-width of ``precision`` where runs may grow so long.

    Args:
        deployment: What serves.
        load: The requests.
        promises: What must hold.
        precision: Half-width to reach, as a share of the rate.
        seeds: Independent repetitions (at most as many as the load has).
        level: Of the interval.
        first: What ``scout`` said.
        each: Runs the seeds; a thread pool's ``map`` runs them side by side.
    """
    found = first or scout(deployment, load, promises)
    used, before, growth = range(min(seeds, load.seeds or seeds)), math.nan, EXACT_LENGTHS
    most = min(MOST_REQUESTS, load.most)
    while found.rate_rps.value > 0:
        last = found.requests
        requests = min(last * growth, most // 2 if math.isnan(before) else most)
        trials = Trials(deployment, load, promises, requests, used, found.effort, each)
        rate = largest(trials.strain, found.rate_rps.value, found.ceiling.rate_rps, 1.025, SEED_TOLERANCE)
        spread = trials.spread(rate, level)
        drift = math.inf if math.isnan(before) else abs(rate - before) / (requests / last - 1)
        half = spread + drift + ROOT_ERROR * rate
        found = replace(found, rate_rps=Estimate(rate, half), binds=trials.binds, requests=requests)
        moved = drift if math.isnan(spread) else half  # one seed has no spread: more requests would give none
        if moved <= precision * rate or requests >= most or not rate > 0:
            break
        before, growth = rate, 4 if spread > 1.5 * precision * rate else 2
    return found


def lower_end(found: Capacity) -> float:
    """The lower end of a capacity's interval, in requests a second; the rate itself where no interval is known."""
    rate = found.rate_rps
    return max(rate.low, rate.value / 2) if math.isfinite(rate.half_width) else rate.value


def rough_capacity(
    deployment: Deployment, load: Load, promises: Promises, guess: float = math.nan, seeds: int = 4
) -> Capacity:
    """A capacity from a few short runs, for comparisons under the same requests; no interval."""
    top, effort = ceiling(deployment, load.sample(), promises.limits), Effort()
    requests = min(run_length(top, promises) * EXACT_LENGTHS, MOST_REQUESTS)
    trials = Trials(deployment, load, promises, requests, range(min(seeds, load.seeds or seeds)), effort)
    start = 0.75 * top.rate_rps if math.isnan(guess) else guess
    rate = largest(trials.strain, start, top.rate_rps, 1.05, SEED_TOLERANCE)
    return Capacity(Estimate(rate), trials.binds, requests, top, effort)


def run_length(top: Ceiling, promises: Promises) -> int:
    """Requests of the shortest useful run."""
    span_s = max(WAIT_SPANS * promises.guard_s, STAY_SPANS * top.jct_s, LEAST_S)
    return int(min(max(LEAST_REQUESTS, math.ceil(span_s * top.rate_rps)), MOST_REQUESTS))


def largest(
    strain: Callable[[float], float], guess: float, top: float, span: float, tolerance: float
) -> float:
    """The largest rate up to ``top`` that is not strained beyond 1; 0 if none from FLOOR_SHARE of it on.

    Steps from the guess by ``span``, ever wider, until the answer is between two rates; then bisects,
    at the place where the logarithm of the strain would cross, until they are within ``tolerance``.
    """
    low, high, at_low, at_high = 0.0, math.inf, 0.0, math.inf
    rate = min(guess, top)
    while not (low > 0 and high < math.inf):
        got = strain(rate)
        if got > 1:
            high, at_high, rate = rate, got, rate / max(span, min(got**0.1, 1.5))
        elif rate >= top:
            return top
        else:
            low, at_low, rate = rate, got, min(rate * span, top)
        if high < FLOOR_SHARE * top:
            return 0.0
        span *= span
    while high > low * (1 + tolerance):
        rate = low * (high / low) ** min(max(_crossing(at_low, at_high), 0.15), 0.85)
        got = strain(rate)
        if got > 1:
            high, at_high = rate, got
        else:
            low, at_low = rate, got
    return float(low * (high / low) ** _crossing(at_low, at_high))


def _crossing(at_low: float, at_high: float) -> float:
    """Where between two rates the logarithm of the strain is 0, as a share of their distance."""
    below, above = math.log(max(at_low, _LEAST_STRAIN)), math.log(max(at_high, _LEAST_STRAIN))
    return -below / (above - below) if above > below else 0.5
