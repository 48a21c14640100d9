"""The largest rate that a deployment sustains.

The requests of a seed are fixed and a rate only stretches their times, so that how far a limit is strained
(the share of requests beyond its bound over the share that may be) rises smoothly with the rate. Strains are
pooled over independent seeds: the mean share is not biased by how rarely a burst falls into a short run, as a
quantile of each run would be. Where the pooled strain crosses 1 is bracketed and bisected. Its interval is the
seeds' spread there over the slope, a t interval, and how far the answer moved when the runs were made longer:
a run that starts from empty forgives an overload that a longer one does not. Runs grow until that is small.

Beside the limits stands a queue that grows: in a steady state it does not, so that a rate is refused if over the
window, and beyond chance, half a percent of what arrived stayed in the queue. That shows an overload long before
waits reach a limit, and bounds what runs of any length could forgive.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.plan import Point
from lengthwise.search.bounds import Ceiling, ceiling
from lengthwise.search.limits import Promises, good_rate_rps, good_share
from lengthwise.search.load import Load
from lengthwise.search.measurement import Window, mean_point, observe, values_of
from lengthwise.statistics import t_half_width

FLOOR_SHARE = 1e-3
"""A deployment that breaks its limits at this share of its ceiling does not serve at all."""

LEAST_STRAIN = 0.02
"""Smaller strains count as this one: their logarithm tells nothing."""

_LEAST_SPAN = 1.008


def largest(
    strain: Callable[[float], float], guess: float, top: float, span: float, tolerance: float, slope: float = 0.0
) -> float:
    """The largest rate up to ``top`` that is not strained beyond 1; 0 if none from FLOOR_SHARE of it on.

    Steps from the guess, ever wider, until the answer is between two rates; then bisects, at the place
    where the logarithm of the strain would cross, until they are within ``tolerance``. Steps are of
    ``span`` or, where a strain is far from 1, as wide as its slope asks for.
    """
    low, high, at_low, at_high = 0.0, math.inf, 0.0, math.inf
    rate, wide = min(guess, top), _LEAST_SPAN if slope else span
    while not (low > 0 and high < math.inf):
        got = strain(rate)
        step = max(wide, min(_step(got, slope), 1.5))
        if got > 1:
            slope = _slope(rate, got, high, at_high) or slope
            high, at_high, rate = rate, got, rate / step
        elif rate >= top:
            return top
        else:
            low, at_low, rate = rate, got, min(rate * (step if slope else wide), top)
        if high < FLOOR_SHARE * top:
            return 0.0
        wide = min(wide**1.5, 4.0)
    while high > low * (1 + tolerance):
        rate = low * (high / low) ** min(max(_crossing(at_low, at_high), 0.15), 0.85)
        got = strain(rate)
        if got > 1:
            high, at_high = rate, got
        else:
            low, at_low = rate, got
    return float(low * (high / low) ** _crossing(at_low, at_high))


def _slope(rate: float, got: float, higher: float, at_higher: float) -> float:
    """The slope between a broken rate and a higher one; 0 where that was not tried, or is no steeper."""
    if math.isinf(higher) or at_higher <= got:
        return 0.0
    return math.log(at_higher / got) / math.log(higher / rate)


def _step(got: float, slope: float) -> float:
    """The ratio of rates that brings a strain to 1 and a little beyond, by its slope; 10 where none is known."""
    far = got if got > 1 else 1 / max(got, 0.3)  # the logarithm bends down where strains are small
    return math.exp(min(math.log(far) / (slope or 10.0), 1.0)) * 1.004


def _crossing(at_low: float, at_high: float) -> float:
    """Where between two rates the logarithm of the strain is 0, as a share of their distance."""
    below, above = math.log(max(at_low, LEAST_STRAIN)), math.log(max(at_high, LEAST_STRAIN))
    return -below / (above - below) if above > below else 0.5


Floats = npt.NDArray[np.float64]
Map = Callable[[Callable[[int], list[float]], Iterable[int]], Iterable[list[float]]]

GROWTH = 0.005
"""A queue that keeps this share of what arrives, beyond chance, grows for ever."""

_LEAST_SLOPE = 1.0


@dataclass
class Effort:
    """What was spent: runs of the engine, and requests in them."""

    simulations: int = 0
    requests: int = 0


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
        """The largest strain of any limit, and of the queue's growth; above 1 one breaks."""
        if rate_rps not in self.strains:
            one = partial(self._one, rate_rps)
            self.strains[rate_rps] = np.array(list(self.each(one, self.seeds)))
            self.effort.simulations += len(self.seeds)
            self.effort.requests += len(self.seeds) * self.requests
        return float(self._pooled(rate_rps).max())

    def ceiling_rps(self) -> float:
        """The rate that no schedule beats on any seed's requests, these very ones."""
        each = (self.load.at(seed, self.requests, 1.0) for seed in self.seeds)
        return max(ceiling(self.deployment, requests, self.promises.limits).rate_rps for requests in each)

    def _one(self, rate_rps: float, seed: int) -> list[float]:
        workload = self.load.at(seed, self.requests, rate_rps)
        window = observe(workload, self.deployment, seed, sums=self.promises.needs_sums)
        return [*self.promises.strains(window).values(), window.queue_growth()]

    def _pooled(self, rate_rps: float) -> Floats:
        """Strains of the limits, means over seeds; last that of the queue's growth."""
        means: Floats = self.strains[rate_rps].mean(axis=0)
        means[-1] /= GROWTH + self._noise(rate_rps)
        return means

    def _noise(self, rate_rps: float) -> float:
        """What the queue may grow by chance: two standard errors, from the seeds or, of one, as counts vary."""
        growth, n = self.strains[rate_rps][:, -1], len(self.seeds)
        if n > 1:
            return 2 * float(growth.std(ddof=1)) / math.sqrt(n)
        return 6 * math.sqrt(max(float(growth[0]), 0.0) * self.requests + 1) / self.requests

    @property
    def binds(self) -> str:
        """The metric that broke at the lowest rate that broke any; "throughput": the queue grows."""
        broken = [rate for rate in self.strains if self._pooled(rate).max() > 1]
        names = [*(limit.metric for limit in self.promises.limits), "throughput"]
        return names[int(self._pooled(min(broken)).argmax())] if broken else "throughput"

    def spread(self, rate_rps: float, level: float) -> float:
        """Half-width of the crossing's interval: the seeds' spread of the strain there, over its slope."""
        if len(self.seeds) < 2:
            return math.nan
        if len(self.strains) < 2:
            return 0.0  # the ceiling holds: no limit is crossed
        nearest = min(self._context(rate_rps), key=lambda r: abs(r - rate_rps))
        pooled = max(float(self._pooled(nearest).max()), LEAST_STRAIN)
        return self.warning(nearest, level) / pooled / self.slope(rate_rps) * rate_rps

    def forgiven(self, rate_rps: float) -> float:
        """Share of the rate by which a queue may grow unseen, where its growth is what binds."""
        if self.binds != "throughput" or len(self.strains) < 2:
            return 0.0
        return GROWTH + max(self._noise(rate) for rate in self._context(rate_rps))

    def slope(self, rate_rps: float) -> float:
        """How steeply the strain rises at a rate, logarithm by logarithm; 0 where only one was tried."""
        if len(self.strains) < 2:
            return 0.0
        low, high = self._context(rate_rps)
        means = [max(float(self._pooled(r).max()), LEAST_STRAIN) for r in (low, high)]
        return max(math.log(means[1] / means[0]) / math.log(high / low), _LEAST_SLOPE)

    def _context(self, rate_rps: float) -> tuple[float, float]:
        """The nearest rates below and above that were tried."""
        rates = sorted(self.strains)
        at = min(max(bisect(rates, rate_rps) - 1, 0), len(rates) - 2)
        return rates[at], rates[at + 1]

    def warning(self, rate_rps: float, level: float) -> float:
        """Half-width of the pooled strain at a rate that was tried; 0 for a single seed."""
        strains, n = self.strains[rate_rps], len(self.seeds)
        if n < 2:
            return 0.0
        worst = int(self._pooled(rate_rps).argmax())
        half = float(t_half_width(strains[:, worst], level))
        return half if worst < strains.shape[1] - 1 else half / (GROWTH + self._noise(rate_rps))


MIN_REQUESTS = 400
MAX_REQUESTS = 2**19
"""Of one run."""

WAIT_SPANS, STAY_SPANS, MIN_S = 12.0, 1.5, 30.0
"""A scouting run lasts so many times the longest limited wait, so many times a request's stay, and so long."""

EXACT_WAIT_SPANS, EXACT_STAY_SPANS = 40.0, 5.0
"""The first runs of an exact answer, likewise; from then on they double."""

SCOUT_TOLERANCE, SEED_TOLERANCE = 0.05, 0.03
"""Relative width of the last bracket: of a scouting run, of each seed of an exact one."""

ROOT_ERROR = 0.002
"""What reading a rate between the ends of a bracket of SEED_TOLERANCE adds, measured over seeds."""


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


def scout(deployment: Deployment, load: Load, promises: Promises) -> Capacity:
    """A quick look: one seed, a short run, no interval."""
    top, effort = ceiling(deployment, load.sample(), promises.limits), Effort()
    if math.isinf(top.rate_rps):
        raise InputError(
            f"no request fits: every prompt reaches max_model_len ({deployment.max_model_len} tokens) or is refused "
            "for another reason; raise the limits of [engine], or shorten the prompts"
        )
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
    seeds: int = 5,
    level: float = 0.95,
    least_rps: float = 0.0,
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
        least_rps: A rate of interest: below it a rough answer will do, whose half-width is not known.
        each: Runs the seeds; a thread pool's ``map`` runs them side by side.
    """
    found, slope = scout(deployment, load, promises), 0.0
    used, before = range(min(seeds, load.seeds or seeds)), math.nan
    most = min(MAX_REQUESTS, load.most)
    requests = min(exact_length(found, promises), most // 2)
    while found.rate_rps.value > 0:
        trials = Trials(deployment, load, promises, requests, used, found.effort, each)
        top = trials.ceiling_rps()
        found = replace(found, ceiling=replace(found.ceiling, rate_rps=top))
        rate = largest(trials.strain, found.rate_rps.value, top, 1.025, SEED_TOLERANCE, slope)
        spread, slope = trials.spread(rate, level), trials.slope(rate)
        drift = math.inf if math.isnan(before) else abs(rate - before)
        half = spread + drift + ROOT_ERROR * rate + trials.forgiven(rate) * rate
        found = replace(found, rate_rps=Estimate(rate, half), binds=trials.binds, requests=requests)
        if rate + (0.0 if math.isnan(spread) else spread) < least_rps:
            return replace(found, rate_rps=Estimate(rate))  # short runs forgive: longer ones say less still
        moved = drift if math.isnan(spread) else half  # one seed has no spread: more requests would give none
        if moved <= precision * rate or requests >= most or not rate > 0:
            break
        before, requests = rate, min(2 * requests, most)
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
    requests = min(2 * run_length(top, promises), load.most, MAX_REQUESTS)
    trials = Trials(deployment, load, promises, requests, range(min(seeds, load.seeds or seeds)), effort)
    start = 0.75 * top.rate_rps if math.isnan(guess) else guess
    rate = largest(trials.strain, start, top.rate_rps, 1.05, SEED_TOLERANCE)
    return Capacity(Estimate(rate), trials.binds, requests, top, effort)


def run_length(top: Ceiling, promises: Promises) -> int:
    """Requests of the shortest useful run."""
    span_s = max(WAIT_SPANS * promises.guard_s, STAY_SPANS * top.jct_s, MIN_S)
    return int(min(max(MIN_REQUESTS, math.ceil(span_s * top.rate_rps)), MAX_REQUESTS))


def exact_length(found: Capacity, promises: Promises) -> int:
    """Requests of the first runs of an exact answer, from what scouting found."""
    span_s = max(EXACT_WAIT_SPANS * promises.guard_s, EXACT_STAY_SPANS * found.ceiling.jct_s, MIN_S)
    return int(min(max(2 * MIN_REQUESTS, math.ceil(span_s * found.rate_rps.value)), MAX_REQUESTS))


FRACTIONS = (0.25, 0.5, 0.7, 0.85, 1.0, 1.1, 1.25)
"""Of the operating rate; those above it show what a looser limit would buy."""


def point_at(
    rate_rps: float,
    deployment: Deployment,
    load: Load,
    promises: Promises,
    requests: int,
    seeds: Iterable[int],
    level: float,
    effort: Effort,
) -> Point:
    """A deployment's numbers at one rate, means over seeds."""
    windows = []
    for seed in seeds:
        workload = load.at(seed, requests, rate_rps)
        windows.append(observe(workload, deployment, seed))
        effort.simulations += 1
        effort.requests += len(workload)
    return point_of(rate_rps, windows, promises, level)


def point_of(rate_rps: float, windows: list[Window], promises: Promises, level: float) -> Point:
    """The numbers of windows of several seeds; whether the limits hold is judged on all of them together."""
    runs = [_values(window, promises) for window in windows]
    strains = np.array([list(promises.strains(window).values()) for window in windows])
    held = not promises.limits or bool(strains.mean(axis=0).max() <= 1)
    return Point(rate_rps, mean_point(runs, level), held)


def curve(at: Point, measure: Callable[[float, float], Point]) -> tuple[Point, ...]:
    """Points at FRACTIONS of the operating point's rate, in that order, itself among them.

    ``measure`` is given a rate and a share of the operating point's requests: at a lower rate a run of as
    many seconds has fewer, and beside the operating point half as long a run will do.
    """
    return tuple(at if share == 1 else measure(at.rate_rps * share, share / 2) for share in FRACTIONS)


def _values(window: Window, promises: Promises) -> dict[str, float]:
    values = values_of(window, promises.guard_s, promises.quantiles)
    if promises.slo is not None:
        values["goodput"] = good_share(window, promises.slo, promises.guard_s)
        values["good_requests_per_s"] = good_rate_rps(window, promises.slo)
    return values


def scaled(estimate: Estimate, factor: float) -> Estimate:
    """The estimate in another unit."""
    return Estimate(estimate.value * factor, estimate.half_width * factor)


def point_at_capacity(
    deployment: Deployment, load: Load, promises: Promises, found: Capacity, seeds: int, level: float = 0.95
) -> Point | None:
    """All numbers at the lower end of a capacity's interval; None where nothing holds."""
    rate = lower_end(found)
    if not rate > 0:
        return None
    some = range(min(seeds, load.seeds or seeds))
    return point_at(rate, deployment, load, promises, found.requests, some, level, found.effort)
