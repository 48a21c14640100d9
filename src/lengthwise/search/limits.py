"""Defines the limits of a search, their usage by a run, and the question that a search answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from lengthwise.cost.model_error import DRAWS
from lengthwise.metrics import Slo
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.metric_names import QUANTILES, is_quantile, metric_of, quantile_level, quantity, split
from lengthwise.schema.plan import Limit, Objective, limit_text
from lengthwise.schema.records import TokenGaps
from lengthwise.search.measurement import SCALAR_METRICS, Window, window_metrics

WAITS = {"ttft": "ttft_s", "jct": "jct_s", "queueing_delay": "queueing_delay_s"}
"""Latencies that contain the wait in the queue, and their columns; infinite for a request that is not served."""

LIMITED = (*WAITS, "tpot", "tbt")

LONGEST_WAIT_S = 3600.0
"""A larger bound on a wait is not measured: a queue that breaks it grows, and the growth is a limit of its own."""

DEFAULT = Limit("queueing_delay.p99", 5.0)
"""Vidur's limit (section 6): a rate is sustained if 99 % of the requests are scheduled within 5 s."""


@dataclass(frozen=True)
class SloLimits:
    """Limits that must all hold. The metric "within_slo" is the share of requests that meet ``slo``."""

    limits: tuple[Limit, ...]
    slo: Slo | None = None

    def with_bound(self, metric: str, factor: float) -> SloLimits:
        """Return these limits, with the bound of the limit on ``metric`` multiplied by ``factor``."""
        limits = (replace(x, bound=x.bound * factor) if x.metric == metric else x for x in self.limits)
        return replace(self, limits=tuple(limits))

    @property
    def guard_s(self) -> float:
        """Return the largest measured bound on a wait: arrivals in this span before a run's end are not judged."""
        waits = [limit.bound for limit in self.limits if split(limit.metric)[0] in WAITS]
        slo = {} if self.slo is None else self.slo.limits
        slos = [bound for name, bound in slo.items() if name != "tpot_s"] or [DEFAULT.bound] * (self.slo is not None)
        measured = [bound for bound in (*waits, *slos) if bound <= LONGEST_WAIT_S]
        return max(measured, default=DEFAULT.bound if waits or slos else 0.0)

    @property
    def quantiles(self) -> dict[str, float]:
        """Return the levels of the quantiles to measure, by name: QUANTILES and the quantiles in the limits."""
        named = [split(limit.metric)[1] for limit in self.limits]
        return QUANTILES | {s: quantile_level(s) for s in named if s.startswith("p")}

    @property
    def needs_sums(self) -> bool:
        """Return whether a limit needs sums over the window, for which the warm-up is simulated a second time."""
        return any(split(limit.metric)[0] not in (*WAITS, "within_slo") for limit in self.limits)

    def usage(self, window: Window) -> dict[str, float]:
        """Return the usage of each limit by metric: at most 1 if the limit holds, 0 if there is nothing to measure.

        For a quantile, the usage is the share of requests (or tokens) beyond the bound, divided by the allowed share,
        which is exact even if there are too few values for an exact quantile. For other metrics, it is the value
        divided by the bound, or the reverse for a lower bound.
        """
        used = {limit.metric: self._usage_of(window, limit) for limit in self.limits}
        return {metric: 0.0 if math.isnan(share) else share for metric, share in used.items()}

    def _usage_of(self, window: Window, limit: Limit) -> float:
        metric, statistic = split(limit.metric)
        if limit.metric == "within_slo":
            return (1 - good_share(window, self.slo, self.guard_s)) / max(1 - limit.bound, 1e-12)
        if statistic == "mean" and metric in WAITS:
            waits = window.censored_waits_s(WAITS[metric], limit.bound)
            return float(waits.mean()) / limit.bound if len(waits) else 0.0
        if metric not in LIMITED or statistic == "mean":
            value = window_metrics(window, self.guard_s, self.quantiles)[limit.metric]
            return value / limit.bound if not limit.at_least else limit.bound / max(value, 1e-300)
        return _share_above(window, metric, limit.bound) / (1 - quantile_level(statistic))


def rule(metric: str, limits: tuple[Limit, ...]) -> str:
    """Return the limit on a metric as text; for "throughput", what a growing queue breaks."""
    limit = next((one for one in limits if one.metric == metric), None)
    return "the limit on a growing queue" if limit is None else limit_text(limit)


def allowed_share(limit: Limit) -> float:
    """Return the share of the requests (or tokens) that may be beyond a limit; 0 for a mean."""
    _, statistic = split(limit.metric)
    if limit.metric in ("within_slo", "served"):
        return 1 - limit.bound
    return 1 - quantile_level(statistic) if is_quantile(statistic) else 0.0


def excess(limit: Limit, usage: float) -> str:
    """Return how far a run with this ``usage`` breaks a limit: "37 % of the requests exceed TTFT 200 ms (10 % may)"."""
    metric, statistic = split(limit.metric)
    allowed = 100 * allowed_share(limit)
    over, may = distinct(usage * allowed, allowed, lambda value, digits: f"{value:.{digits}g} %")
    if limit.metric == "within_slo":
        return f"{over} of the requests break the SLO ({may} may)"
    if metric not in LIMITED or statistic == "mean":
        return value_text(limit, limit.bound / usage if limit.at_least else limit.bound * usage)
    what, bound = "times between tokens" if metric == "tbt" else "requests", quantity(limit.metric, limit.bound)
    beyond = f"are above {bound}" if metric == "tbt" else f"exceed a {metric_of(metric).label} of {bound}"
    return f"{over} of the {what} {beyond} ({may} may)"


def value_text(limit: Limit, value: float, spread: str = "") -> str:
    """Return the value of a limited metric that breaks its limit: "TTFT mean is 512 ms (limit 500 ms)"."""
    shown, _ = distinct(value, limit.bound, lambda number, digits: quantity(limit.metric, number, digits))
    bound = quantity(limit.metric, limit.bound)
    return f"{metric_of(limit.metric).label} is {shown}{spread} (limit {bound})"


def distinct(value: float, bound: float, write: Callable[[float, int], str]) -> tuple[str, str]:
    """Return two numbers as text with the fewest digits, at least three, in which they differ."""
    pairs = [(write(value, digits), write(bound, digits)) for digits in range(3, 13)]
    return next((pair for pair in pairs if pair[0] != pair[1]), pairs[-1])


def with_stability(limits: tuple[Limit, ...]) -> tuple[Limit, ...]:
    """Return the limits, and DEFAULT as well if none of them bounds a wait."""
    is_bounded = any(split(limit.metric)[0] in (*WAITS, "within_slo") for limit in limits)
    return limits if is_bounded else (*limits, DEFAULT)


def check_limit(limit: Limit) -> Limit:
    """Return the limit if it is valid.

    Raises UnknownNameError if there is no such metric, and InputError if its statistic or bound is not valid.
    """
    metric, statistic = split(limit.metric)
    if metric in LIMITED:
        if statistic != "mean" and not is_quantile(statistic):
            raise InputError(
                f"a limit on {metric} must name a statistic, such as {metric}.p99 or {metric}.mean; "
                f"it is {limit.metric!r}"
            )
    elif statistic or metric not in (*SCALAR_METRICS, "within_slo"):
        named = (statistic, metric.rpartition("_")[2])  # "ttft_p90" also names p90
        given = next((one for one in named if one == "mean" or is_quantile(one)), "p99")
        known = [*(f"{m}.{given}" for m in LIMITED), "within_slo", *SCALAR_METRICS]
        raise UnknownNameError("metric", limit.metric, known)
    if not limit.bound > 0 or math.isinf(limit.bound):
        raise InputError(f"the limit on {limit.metric} must be above 0 and finite; it is {limit.bound}")
    if metric == "within_slo" and not (limit.at_least and limit.bound < 1):
        raise InputError(f"a limit on within_slo must be a lower bound below 1; it is {limit.direction} {limit.bound}")
    if metric in LIMITED and limit.at_least:
        raise InputError(f"a limit on {limit.metric} must be an upper bound; it is {limit.direction} {limit.bound}")
    return limit


def good_share(window: Window, slo: Slo | None, guard_s: float) -> float:
    """Return the share of the requests before the window's last ``guard_s`` that met the SLO; NaN for no request."""
    if slo is None:
        raise InputError("within_slo needs limits for a single request: set [slo] ttft, tpot or jct")
    met = []
    for name, bound in slo.limits.items():
        waits_s = window.waits_s if bound <= LONGEST_WAIT_S else window.censored_waits_s
        met.append((window.tpot_s(guard_s) if name == "tpot_s" else waits_s(name, guard_s)) <= bound)
    return float(np.all(met, axis=0).mean()) if met and len(met[0]) else math.nan


def good_rate_rps(window: Window, slo: Slo) -> float:
    """Return the number per second of requests that finished in the window and met all limits of ``slo``."""
    good = slo.met(window.records.requests)["all"] & window.finished()
    return float(good.sum()) / (window.end_s - window.start_s)


def _share_above(window: Window, metric: str, bound: float) -> float:
    if metric == "tbt":
        return gaps_above(window.gaps(), bound)
    if metric == "tpot":
        r = window.records.requests
        rows = window.finished() & (r.output_tokens > 1)
        values = (r.finished_s[rows] - r.first_token_s[rows]) / (r.output_tokens[rows] - 1)
    else:
        values = window.waits_s(WAITS[metric], bound)
    return float((values > bound).mean()) if len(values) else 0.0


def gaps_above(gaps: TokenGaps, bound: float) -> float:
    """Return the share of times between tokens above ``bound`` (s), as if they were uniform within each bin."""
    if gaps.total == 0:
        return 0.0
    at = int(np.searchsorted(gaps.edges_s, bound, side="right")) - 1
    above = float(gaps.histogram[at + 1 :].sum())
    if at < len(gaps.histogram):
        low, high = gaps.edges_s[at], gaps.edges_s[at + 1]
        above += float(gaps.histogram[at]) * (high - bound) / (high - low)
    return above / gaps.total


OBJECTIVES = {
    o.name: o
    for o in (
        Objective("requests_per_dollar", "requests per dollar", "req/$", higher_is_better=True),
        Objective("cost_at_rate", "cost at the rate", "$/h", higher_is_better=False),
        Objective("fewest_gpus", "GPUs at the rate", "GPUs", higher_is_better=False),
        Objective("goodput", "good requests a second", "req/s", higher_is_better=True),
        Objective("energy", "energy per output token", "J", higher_is_better=False),
        Objective("makespan", "makespan", "s", higher_is_better=False),
    )
}

UNLIMITED_GPUS = 2**31

AT_RATE = ("cost_at_rate", "fewest_gpus")
"""Objectives for which the search finds the smallest number of replicas that sustains a rate."""


@dataclass(frozen=True)
class Question:
    """The question that a search answers for each configuration; ``objective`` is one of ``OBJECTIVES``.

    ``rate_rps`` is the offered load, for objectives that need one; without it, "energy" is measured at capacity.
    ``max_gpus`` and ``max_usd_per_hour`` limit the GPUs and the price of all replicas together. ``requests`` is the
    number of requests in an offline batch ("makespan"). Capacities of ranked configurations reach the relative
    half-width ``precision`` at the confidence ``level``, over ``seeds`` independent repetitions, if the load has enough
    requests. The interval of the cost model's error comes from short runs with ``model_draws`` perturbed cost tables;
    0: there is no such interval.
    """

    objective: Objective
    slo_limits: SloLimits
    rate_rps: float | None = None
    max_gpus: int = UNLIMITED_GPUS
    max_usd_per_hour: float = math.inf
    requests: int = 1000
    precision: float = 0.025
    seeds: int = 5
    level: float = 0.95
    model_draws: int = DRAWS

    def is_within_budget(self, deployment: Deployment) -> bool:
        """Return whether the deployment takes at most ``max_gpus``, at a price of at most ``max_usd_per_hour``."""
        return deployment.gpus <= self.max_gpus and deployment.price_per_hour_usd <= self.max_usd_per_hour

    def __post_init__(self) -> None:
        needs_rate = self.objective.name in (*AT_RATE, "goodput")
        if needs_rate and self.rate_rps is None:
            raise InputError(f"the objective {self.objective.name} needs a rate: set search.rate, in requests a second")
        if not 0 < self.precision < 1:
            raise InputError(f"precision must be between 0 and 1; it is {self.precision}")
        if self.objective.name == "goodput" and self.slo_limits.slo is None:
            raise InputError("the objective goodput needs limits for a single request: set [slo] ttft, tpot or jct")


def objective(name: str) -> Objective:
    """Return the objective with this name; raises UnknownNameError if there is none."""
    if name not in OBJECTIVES:
        raise UnknownNameError("objective", name, OBJECTIVES)
    return OBJECTIVES[name]
