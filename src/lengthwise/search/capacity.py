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
from dataclasses import dataclass, replace

from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError
from lengthwise.schema.estimate import Estimate
from lengthwise.search.bounds import Ceiling, ceiling
from lengthwise.search.crossing import largest
from lengthwise.search.limits import Promises
from lengthwise.search.load import Load
from lengthwise.search.trials import Effort, Map, Trials

LEAST_REQUESTS = 400
MOST_REQUESTS = 2**19
"""Of one run."""

WAIT_SPANS, STAY_SPANS, LEAST_S = 12.0, 1.5, 30.0
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
    most = min(MOST_REQUESTS, load.most)
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
    requests = min(2 * run_length(top, promises), load.most, MOST_REQUESTS)
    trials = Trials(deployment, load, promises, requests, range(min(seeds, load.seeds or seeds)), effort)
    start = 0.75 * top.rate_rps if math.isnan(guess) else guess
    rate = largest(trials.strain, start, top.rate_rps, 1.05, SEED_TOLERANCE)
    return Capacity(Estimate(rate), trials.binds, requests, top, effort)


def run_length(top: Ceiling, promises: Promises) -> int:
    """Requests of the shortest useful run."""
    span_s = max(WAIT_SPANS * promises.guard_s, STAY_SPANS * top.jct_s, LEAST_S)
    return int(min(max(LEAST_REQUESTS, math.ceil(span_s * top.rate_rps)), MOST_REQUESTS))


def exact_length(found: Capacity, promises: Promises) -> int:
    """Requests of the first runs of an exact answer, from what scouting found."""
    span_s = max(EXACT_WAIT_SPANS * promises.guard_s, EXACT_STAY_SPANS * found.ceiling.jct_s, LEAST_S)
    return int(min(max(2 * LEAST_REQUESTS, math.ceil(span_s * found.rate_rps.value)), MOST_REQUESTS))
