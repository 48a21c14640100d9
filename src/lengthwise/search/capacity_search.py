"""Searches for the largest rate that a deployment sustains.

The requests of a seed are fixed, and a rate only stretches their arrival times. The usage of a limit is the share of
requests beyond its bound, divided by the allowed share; it rises smoothly with the rate. Usage is averaged over
independent seeds: this mean is unbiased even if bursts are rare in a short run, unlike the quantile of one run. The
search brackets the rate at which the mean usage crosses 1, and interpolates. The half-width of this rate's interval
sums four parts: the spread over seeds divided by the slope (a t interval), the change since the previous, shorter runs,
the error of the interpolation, and the largest growth of the queue that goes unnoticed. Runs become longer until the
interval is small. A growing queue counts as a limit, too, long before waits reach their bounds: a rate is rejected if,
beyond chance, half a percent of the window's arrivals remained in the queue.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from lengthwise.cost.model_error import comparable_deployments
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.plan import Point
from lengthwise.schema.workload import Floats
from lengthwise.search.bounds import Ceiling, ceiling
from lengthwise.search.limits import SloLimits, excess, good_rate_rps, good_share
from lengthwise.search.load import Load
from lengthwise.search.measurement import Window, mean_values, simulated_window, window_metrics
from lengthwise.statistics import drawn_estimate, t_half_width

FLOOR_SHARE = 1e-3  # a deployment that breaks its limits at this share of its ceiling has the capacity 0
MIN_USAGE = 0.02  # smaller usages count as this one, because their logarithms have no information
MIN_STEP, MAX_STEP = 1.008, 1.5
MIN_SLOPE = 1.0

QUEUE_GROWTH = 0.005  # a queue grows without limit if this share of the arrivals, beyond chance, remains in it

MIN_REQUESTS = 400
MAX_REQUESTS = 2**19  # largest number of requests in one run
WAIT_SPANS, JCT_SPANS, MIN_S = 12.0, 1.5, 30.0
"""A scouting run lasts at least this many longest limited waits, this many JCTs, and this many seconds."""
EXACT_WAIT_SPANS, EXACT_JCT_SPANS = 40.0, 5.0
"""The same for the first runs of an exact answer. Then the length doubles until the answer is precise."""
RAMP_SPANS = 4.0  # every run lasts at least this many times ``Load.ramp_s``
SCOUT_TOLERANCE, SEED_TOLERANCE = 0.05, 0.03
"""Relative width of the last bracket in a scouting search, and in an exact one."""
ROOT_ERROR = 0.002  # measured relative error of the interpolation in a bracket of width SEED_TOLERANCE

OPERATING_STEPS, OPERATING_STEP = 5, 0.985
"""Number of attempts to find an operating point within the limits, each at this share of the previous rate."""

CURVE_FRACTIONS = (0.25, 0.5, 0.7, 0.85, 1.0, 1.1, 1.25)
"""Rates of a load curve, as shares of the operating rate; those above 1 show the latencies beyond it."""

Map = Callable[[Callable[[int], list[float]], Iterable[int]], Iterable[list[float]]]


def largest_rate(
    usage: Callable[[float], float], guess: float, max_rate: float, ratio: float, tolerance: float, slope: float = 0.0
) -> float:
    """Return the largest rate up to ``max_rate`` at which ``usage`` is at most 1.

    ``usage`` maps a rate to the usage of the limits, which are broken above 1. The result is 0 if the limits are broken
    down to FLOOR_SHARE of ``max_rate``. The search steps from ``guess`` by growing factors until two rates bracket the
    answer. The first factor is ``ratio`` or, if the ``slope`` of log usage over log rate is known (not 0), the factor
    at which usage would be 1. Then the search interpolates the rate at which log usage is 0, until the bracket's
    relative width is ``tolerance``.
    """
    low, high, at_low, at_high = 0.0, math.inf, 0.0, math.inf
    rate, width = min(guess, max_rate), MIN_STEP if slope else ratio
    while not (low > 0 and high < math.inf):
        found = usage(rate)
        # Log usage bends down where usage is small, and a step should end slightly beyond the crossing.
        distance = math.log(found if found > 1 else 1 / max(found, 0.3))
        step = max(width, min(math.exp(min(distance / (slope or 10.0), 1.0)) * 1.004, MAX_STEP))
        if found > 1:
            if math.isfinite(high) and at_high > found:
                slope = math.log(at_high / found) / math.log(high / rate)
            high, at_high, rate = rate, found, rate / step
        elif rate >= max_rate:
            return max_rate
        else:
            low, at_low, rate = rate, found, min(rate * (step if slope else width), max_rate)
        if high < FLOOR_SHARE * max_rate:
            return 0.0
        width = min(width**1.5, 4.0)
    while high > low * (1 + tolerance):
        rate = low * (high / low) ** min(max(_crossing(at_low, at_high), 0.15), 0.85)
        if (found := usage(rate)) > 1:
            high, at_high = rate, found
        else:
            low, at_low = rate, found
    return float(low * (high / low) ** _crossing(at_low, at_high))


def _crossing(at_low: float, at_high: float) -> float:
    """Return where log usage is 0 between two rates, as a share of the distance from the lower one."""
    below, above = math.log(max(at_low, MIN_USAGE)), math.log(max(at_high, MIN_USAGE))
    return -below / (above - below) if above > below else 0.5


@dataclass
class Effort:
    """The number of simulations so far, and of the requests in them. Functions that simulate add to it."""

    simulations: int = 0
    requests: int = 0


@dataclass
class Trials:
    """The usage of the limits at the rates tried so far, from runs with several seeds.

    The usage of a limit is the share of requests beyond its bound, divided by the allowed share; above 1, it is broken.
    ``by_rate`` caches, for each rate, the usage of each limit and the growth of the queue, [seeds, limits + 1].
    """

    deployment: Deployment
    load: Load
    slo_limits: SloLimits
    requests: int
    seeds: range
    effort: Effort
    each: Map = map
    by_rate: dict[float, Floats] = field(default_factory=dict)

    def usage(self, rate_rps: float) -> float:
        """Return the largest mean usage, of a limit or of the queue's growth; above 1, the rate is too high."""
        if rate_rps not in self.by_rate:
            self.by_rate[rate_rps] = np.array(list(self.each(partial(self._seed_usage, rate_rps), self.seeds)))
            self.effort.simulations += len(self.seeds)
            self.effort.requests += len(self.seeds) * self.requests
        return float(self._pooled(rate_rps).max())

    def _seed_usage(self, rate_rps: float, seed: int) -> list[float]:
        workload = self.load.at(seed, self.requests, rate_rps)
        window = simulated_window(workload, self.deployment, seed, sums=self.slo_limits.needs_sums)
        return [*self.slo_limits.usage(window).values(), window.queue_growth()]

    def ceiling_rps(self) -> float:
        """Return an upper bound on the sustained rate, for the requests of every seed."""
        each = (self.load.at(seed, self.requests, 1.0) for seed in self.seeds)
        return max(ceiling(self.deployment, requests, self.slo_limits.limits).rate_rps for requests in each)

    def _pooled(self, rate_rps: float) -> Floats:
        means: Floats = self.by_rate[rate_rps].mean(axis=0)
        means[-1] /= QUEUE_GROWTH + self._growth_noise(rate_rps)
        return means

    def _growth_noise(self, rate_rps: float) -> float:
        """Return the growth that may be chance: two standard errors over seeds, or an estimate for one seed."""
        growth, n = self.by_rate[rate_rps][:, -1], len(self.seeds)
        if n > 1:
            return 2 * float(growth.std(ddof=1)) / math.sqrt(n)
        return 6 * math.sqrt(max(float(growth[0]), 0.0) * self.requests + 1) / self.requests

    @property
    def binds(self) -> str:
        """Return the metric that breaks first as the rate grows; "throughput" if the queue grows or none breaks."""
        broken = [rate for rate in self.by_rate if self._pooled(rate).max() > 1]
        names = [*(limit.metric for limit in self.slo_limits.limits), "throughput"]
        return names[int(self._pooled(min(broken)).argmax())] if broken else "throughput"

    @property
    def excess(self) -> str:
        """Return how far the limit that ``binds`` is broken at the lowest rate that breaks it; "" if none breaks."""
        broken = [rate for rate in self.by_rate if self._pooled(rate).max() > 1]
        if not broken:
            return ""
        pooled = self._pooled(rate := min(broken))
        at = int(pooled.argmax())
        how = "the queue grows" if at == len(pooled) - 1 else excess(self.slo_limits.limits[at], float(pooled[at]))
        return f"{how} at {rate:.3g} requests/s"

    def spread(self, rate_rps: float, level: float) -> float:
        """Return the half-width of the sustained rate over seeds (NaN for one seed): that of the mean usage / slope."""
        if len(self.seeds) < 2:
            return math.nan
        if len(self.by_rate) < 2:
            return 0.0  # no limit breaks even at the ceiling
        nearest = min(self._bracket(rate_rps), key=lambda r: abs(r - rate_rps))
        pooled = max(float(self._pooled(nearest).max()), MIN_USAGE)
        return self.half_width(nearest, level) / pooled / self.slope(rate_rps) * rate_rps

    def half_width(self, rate_rps: float, level: float) -> float:
        """Return the half-width of the interval of the mean usage at a tried rate; 0 for a single seed."""
        usage = self.by_rate[rate_rps]
        if len(self.seeds) < 2:
            return 0.0
        worst = int(self._pooled(rate_rps).argmax())
        half = float(t_half_width(usage[:, worst], level))
        return half if worst < usage.shape[1] - 1 else half / (QUEUE_GROWTH + self._growth_noise(rate_rps))

    def undetected_growth(self, rate_rps: float) -> float:
        """Return the largest growth of the queue that is not detected, as a share of the rate; 0 if a limit binds."""
        if self.binds != "throughput" or len(self.by_rate) < 2:
            return 0.0
        return QUEUE_GROWTH + max(self._growth_noise(rate) for rate in self._bracket(rate_rps))

    def slope(self, rate_rps: float) -> float:
        """Return d log usage / d log rate at a rate; 0 if fewer than two rates were tried."""
        if len(self.by_rate) < 2:
            return 0.0
        low, high = self._bracket(rate_rps)
        means = [max(float(self._pooled(r).max()), MIN_USAGE) for r in (low, high)]
        return max(math.log(means[1] / means[0]) / math.log(high / low), MIN_SLOPE)

    def _bracket(self, rate_rps: float) -> tuple[float, float]:
        rates = sorted(self.by_rate)
        at = min(max(bisect(rates, rate_rps) - 1, 0), len(rates) - 2)
        return rates[at], rates[at + 1]


@dataclass(frozen=True)
class Capacity:
    """The largest sustained rate; all rates are in requests per second.

    ``rate_rps`` is the rate at which the mean usage over seeds is 1, or 0 if the limits break at every rate. The module
    explains its interval. ``binds`` is the metric of the limit that breaks first, or "throughput". ``requests`` is the
    number of requests in the longest runs. ``ceiling`` is an upper bound for all schedules. ``slope`` is the slope of
    log usage over log rate, 0 if unknown. ``excess`` states how far that limit breaks at the lowest such rate.
    """

    rate_rps: Estimate
    binds: str
    requests: int
    ceiling: Ceiling
    effort: Effort
    slope: float = 0.0
    excess: str = ""

    @property
    def low_rps(self) -> float:
        """Return the lower end of the rate's interval, at least half the rate; the rate itself without an interval."""
        rate = self.rate_rps
        return max(rate.low, rate.value / 2) if math.isfinite(rate.half_width) else rate.value

    def lowered_to(self, rate_rps: float) -> Capacity:
        """Return the capacity with the lower end of its interval (or the rate itself) at most at ``rate_rps``."""
        if rate_rps >= self.low_rps:
            return self
        rate = self.rate_rps
        lowered = {"half_width": rate.value - rate_rps} if math.isfinite(rate.half_width) else {"value": rate_rps}
        return replace(self, rate_rps=replace(rate, **lowered))


def scout(deployment: Deployment, load: Load, slo_limits: SloLimits) -> Capacity:
    """Return a rough capacity without an interval, from short runs of one seed.

    Raises InputError if the deployment rejects every request of the load.
    """
    top = ceiling(deployment, load.sample(), slo_limits.limits)
    if math.isinf(top.rate_rps):
        raise InputError(
            f"no request fits: every prompt reaches max_model_len ({deployment.max_model_len} tokens) or is rejected "
            "for another reason; raise the limits of [engine], or shorten the prompts"
        )
    trials = Trials(deployment, load, slo_limits, run_length(top, load, slo_limits), range(1), Effort())
    rate = largest_rate(trials.usage, 0.75 * top.rate_rps, top.rate_rps, 1.25, SCOUT_TOLERANCE)
    return Capacity(Estimate(rate), trials.binds, trials.requests, top, trials.effort, excess=trials.excess)


def check_rate(rate_rps: float, deployment: Deployment, load: Load, slo_limits: SloLimits) -> Capacity:
    """Return this rate as a capacity, after one short run. ``binds`` is the limit that breaks there, "" if all hold."""
    top = ceiling(deployment, load.sample(), slo_limits.limits)
    requests = run_length(replace(top, rate_rps=rate_rps), load, slo_limits)
    trials = Trials(deployment, load, slo_limits, requests, range(1), Effort())
    binds = trials.binds if trials.usage(rate_rps) > 1 else ""
    return Capacity(Estimate(rate_rps), binds, requests, top, trials.effort, excess=trials.excess)


def rough_capacity(
    deployment: Deployment, load: Load, slo_limits: SloLimits, guess: float = math.nan, seeds: int = 4, slope: float = 0
) -> Capacity:
    """Return a rough capacity without an interval, for comparisons, from short runs that start at rate ``guess``."""
    top = ceiling(deployment, load.sample(), slo_limits.limits)
    start = 0.75 * top.rate_rps if math.isnan(guess) else guess
    if load.sample().after is not None:  # runs with sessions are long already; their ramp's bias cancels in comparisons
        requests = run_length(replace(top, rate_rps=start), load, slo_limits)
    else:
        requests = 2 * run_length(top, load, slo_limits)
    requests = min(requests, load.max_requests, MAX_REQUESTS)
    trials = Trials(deployment, load, slo_limits, requests, load.seeds_up_to(seeds), Effort())
    rate = largest_rate(trials.usage, start, top.rate_rps, 1.05, SEED_TOLERANCE, slope)
    return Capacity(Estimate(rate), trials.binds, requests, top, trials.effort, trials.slope(rate), trials.excess)


def capacity(
    deployment: Deployment,
    load: Load,
    slo_limits: SloLimits,
    *,
    precision: float = 0.025,
    seeds: int = 5,
    level: float = 0.95,
    min_rps: float = 0.0,
    each: Map = map,
) -> Capacity:
    """Return the largest sustained rate with its interval.

    The interval's relative half-width is ``precision``, if the load has enough requests. There are ``seeds``
    independent repetitions, or fewer if the load has fewer seeds. ``level`` is the confidence level of the interval.
    For a rate below ``min_rps``, a rough answer without an interval suffices. ``each`` maps a function over the seeds;
    the ``map`` of a thread pool runs them in parallel.
    """
    found, slope, previous, shorter = scout(deployment, load, slo_limits), 0.0, math.nan, 0.0
    used, most = load.seeds_up_to(seeds), min(MAX_REQUESTS, load.max_requests)
    ramp_s = load.ramp_s(found.ceiling.jct_s)
    span_s = max(
        EXACT_WAIT_SPANS * slo_limits.guard_s, EXACT_JCT_SPANS * found.ceiling.jct_s, RAMP_SPANS * ramp_s, MIN_S
    )
    requests = min(max(2 * MIN_REQUESTS, math.ceil(span_s * found.rate_rps.value)), MAX_REQUESTS, most // 2)
    while found.rate_rps.value > 0:
        trials = Trials(deployment, load, slo_limits, requests, used, found.effort, each)
        top = trials.ceiling_rps()
        found = replace(found, ceiling=replace(found.ceiling, rate_rps=top))
        rate = largest_rate(trials.usage, found.rate_rps.value, top, 1.025, SEED_TOLERANCE, slope)
        # The spread of few seeds may be small by chance, so it is at least what the shorter runs predict.
        own, slope = trials.spread(rate, level), trials.slope(rate)
        spread, shorter = max(own, shorter / math.sqrt(2)), own
        drift = math.inf if math.isnan(previous) else abs(rate - previous)
        half = spread + drift + ROOT_ERROR * rate + trials.undetected_growth(rate) * rate
        found = replace(found, rate_rps=Estimate(rate, half), binds=trials.binds, requests=requests)
        found = replace(found, excess=trials.excess)
        if rate + (0.0 if math.isnan(spread) else spread) < min_rps:
            return replace(found, rate_rps=Estimate(rate))  # longer runs would give an even lower rate
        error = drift if math.isnan(spread) else half  # a single seed has no spread, however many requests
        if error <= precision * rate or requests >= most or not rate > 0:
            break
        previous, requests = rate, min(2 * requests, most)
    return found


def with_model_error(
    found: Capacity, deployment: Deployment, load: Load, slo_limits: SloLimits, draws: int, each: Map = map
) -> Capacity:
    """Return the capacity with the interval of the cost model's error, if that is known, from ``draws`` draws of it."""
    tried = comparable_deployments(deployment, draws)
    if len(tried) == 1 or not found.rate_rps.value > 0:
        return found

    first = rough_capacity(deployment, load, slo_limits, found.rate_rps.value, seeds=1)
    share = first.rate_rps.value / first.ceiling.rate_rps  # with perturbed tables, about the same

    def rough(number: int) -> list[float]:
        guess = share * ceiling(tried[number], load.sample(), slo_limits.limits).rate_rps
        one = rough_capacity(tried[number], load, slo_limits, guess, 1, first.slope) if number else first
        return [one.rate_rps.value, one.effort.simulations, one.effort.requests]

    rates, simulations, requests = zip(*each(rough, range(len(tried))), strict=True)
    found.effort.simulations += int(sum(simulations))
    found.effort.requests += int(sum(requests))
    return replace(found, rate_rps=drawn_estimate(found.rate_rps, rates))


def run_length(top: Ceiling, load: Load, slo_limits: SloLimits) -> int:
    """Return the number of requests of the shortest run that shows whether the rate ``top.rate_rps`` is sustained."""
    span_s = max(WAIT_SPANS * slo_limits.guard_s, JCT_SPANS * top.jct_s, RAMP_SPANS * load.ramp_s(top.jct_s), MIN_S)
    return int(min(max(MIN_REQUESTS, math.ceil(span_s * top.rate_rps)), MAX_REQUESTS))


def point_at(
    rate_rps: float,
    deployment: Deployment,
    load: Load,
    slo_limits: SloLimits,
    requests: int,
    seeds: Iterable[int],
    level: float,
    effort: Effort,
) -> Point:
    """Return a deployment's metrics at one rate, as means over seeds, and add the runs to ``effort``."""
    windows = []
    for seed in seeds:
        workload = load.at(seed, requests, rate_rps)
        windows.append(simulated_window(workload, deployment, seed))
        effort.simulations += 1
        effort.requests += len(workload)
    return point_of(rate_rps, windows, slo_limits, level)


def point_of(rate_rps: float, windows: list[Window], slo_limits: SloLimits, level: float) -> Point:
    """Return the mean metrics of the windows, one per seed, and whether the limits hold on average."""
    runs = []
    for window in windows:
        values = window_metrics(window, slo_limits.guard_s, slo_limits.quantiles)
        if slo_limits.slo is not None:
            values["within_slo"] = good_share(window, slo_limits.slo, slo_limits.guard_s)
            values["good_requests_per_s"] = good_rate_rps(window, slo_limits.slo)
        runs.append(values)
    usages = [slo_limits.usage(window) for window in windows]
    usage = {metric: float(np.mean([one[metric] for one in usages])) for metric in usages[0]}
    return Point(rate_rps, mean_values(runs, level), max(usage.values(), default=0.0) <= 1, usage)


def curve(at: Point, measure: Callable[[float, float], Point]) -> tuple[Point, ...]:
    """Return the load curve: points at CURVE_FRACTIONS of the rate of the operating point ``at``, which is one of them.

    ``measure`` takes a rate and a share of the operating point's requests. A run of the same duration has fewer
    requests at a lower rate, and half the duration suffices here.
    """
    return tuple(at if share == 1 else measure(at.rate_rps * share, share / 2) for share in CURVE_FRACTIONS)


def point_at_capacity(
    deployment: Deployment, load: Load, slo_limits: SloLimits, found: Capacity, seeds: int, level: float = 0.95
) -> Point | None:
    """Return all metrics at the lower end of the capacity's interval, or slightly below if the limits break there.

    The result is None if the limits hold at no rate.
    """
    used = load.seeds_up_to(seeds)

    def measure(rate_rps: float) -> Point:
        return point_at(rate_rps, deployment, load, slo_limits, found.requests, used, level, found.effort)

    return operating_point(found.low_rps, slo_limits, measure) if found.low_rps > 0 else None


def operating_point(rate_rps: float, slo_limits: SloLimits, measure: Callable[[float], Point]) -> Point:
    """Return the metrics at a rate or, if chance or rounding breaks a limit there, at a slightly lower rate."""
    at = measure(rate_rps)
    for _ in range(OPERATING_STEPS):
        if at.satisfied and all(limit.is_satisfied(at.value(limit.metric)) for limit in slo_limits.limits):
            break
        at = measure(at.rate_rps * OPERATING_STEP)
    return at
