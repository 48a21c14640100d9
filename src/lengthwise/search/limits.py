"""Whether a run keeps its promises, and by how much."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lengthwise.metrics import Slo
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.plan import Limit, Objective
from lengthwise.schema.records import TokenGaps
from lengthwise.search.measurement import SIMPLE, STATISTICS, Window, values_of

Floats = npt.NDArray[np.float64]

WAITS = {"ttft": "ttft_s", "jct": "jct_s", "queueing_delay": "queueing_delay_s"}
"""Latencies that a queue makes long; a request that is not served breaks any limit on them."""

LATENCIES = (*WAITS, "tpot", "tbt")

DEFAULT = Limit("queueing_delay.p99", 5.0)
"""Vidur's (section 6): a rate is sustained if 99 % of the requests are scheduled within 5 s."""

_STATISTIC = re.compile(r"mean|p(\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class Promises:
    """Limits that must hold together; ``slo`` is what "goodput" counts."""

    limits: tuple[Limit, ...]
    slo: Slo | None = None

    def with_bound(self, metric: str, factor: float) -> Promises:
        """The same promises with the bound of one limit multiplied."""
        limits = (replace(x, bound=x.bound * factor) if x.metric == metric else x for x in self.limits)
        return replace(self, limits=tuple(limits))

    @property
    def guard_s(self) -> float:
        """The longest wait that a limit speaks of; where a single request's are of no wait, the default's."""
        waits = [limit.bound for limit in self.limits if limit.metric.partition(".")[0] in WAITS]
        slos = [] if self.slo is None else [v for k, v in self.slo.limits.items() if k != "tpot_s"]
        if self.slo is not None and not slos:
            slos = [DEFAULT.bound]
        return max([*waits, *slos, 0.0])

    @property
    def quantiles(self) -> dict[str, float]:
        """The usual quantiles, and those that limits name beside them."""
        named = [limit.metric.partition(".")[2] for limit in self.limits]
        return STATISTICS | {s: quantile_of(s) for s in named if s.startswith("p")}

    @property
    def needs_sums(self) -> bool:
        """Whether the run's beginning must be known apart."""
        return any(limit.metric.partition(".")[0] not in (*WAITS, "goodput") for limit in self.limits)

    def strains(self, window: Window) -> dict[str, float]:
        """How far each limit is used, by metric: at most 1 where it holds, 0 where there is nothing to measure.

        For a quantile it is the share of requests (or tokens) beyond the bound over the share that
        may be, which is exact where a quantile of few values is not.
        """
        told = {limit.metric: self._strain(window, limit) for limit in self.limits}
        return {metric: 0.0 if math.isnan(strain) else strain for metric, strain in told.items()}

    def _strain(self, window: Window, limit: Limit) -> float:
        metric, _, statistic = limit.metric.partition(".")
        if limit.metric == "goodput":
            return (1 - good_share(window, self.slo, self.guard_s)) / max(1 - limit.bound, 1e-12)
        if metric not in LATENCIES:
            value = values_of(window, self.guard_s, self.quantiles)[limit.metric]
            return value / limit.bound if not limit.at_least else limit.bound / max(value, 1e-300)
        if statistic == "mean" and metric in WAITS:
            return _mean(window.num_waiting(WAITS[metric], limit.bound)) / limit.bound
        if statistic == "mean":
            return values_of(window, self.guard_s, self.quantiles)[limit.metric] / limit.bound
        beyond = _share_beyond(window, metric, limit.bound)
        return beyond / (1 - quantile_of(statistic))


def with_stability(limits: tuple[Limit, ...]) -> tuple[Limit, ...]:
    """The limits, and the default one where none of them would notice a queue that grows."""
    bounded = any(limit.metric.partition(".")[0] in (*WAITS, "goodput") for limit in limits)
    return limits if bounded else (*limits, DEFAULT)


def check_limit(limit: Limit) -> Limit:
    """The limit, if its metric is known and its bound makes sense.

    Raises:
        InputError: The statistic is no quantile, or the bound is out of range.
        UnknownNameError: There is no such metric.
    """
    metric, dot, statistic = limit.metric.partition(".")
    if metric in LATENCIES:
        found = _STATISTIC.fullmatch(statistic)
        if not found or (found[1] and not 0 < float(found[1]) < 100):
            raise InputError(
                f"a limit on {metric} must name a statistic, such as {metric}.p99 or {metric}.mean; "
                f"it is {limit.metric!r}"
            )
    elif dot or metric not in (*SIMPLE, "goodput"):
        known = [*(f"{m}.p99" for m in LATENCIES), "goodput", *SIMPLE]
        raise UnknownNameError("metric", limit.metric, known)
    if not limit.bound > 0 or math.isinf(limit.bound):
        raise InputError(f"the limit on {limit.metric} must be above 0 and finite; it is {limit.bound}")
    if metric == "goodput" and not (limit.at_least and limit.bound < 1):
        raise InputError(f"a limit on goodput is a least share below 1; it is {limit.direction} {limit.bound}")
    if metric in LATENCIES and limit.at_least:
        raise InputError(f"a limit on {limit.metric} is an upper one; it is {limit.direction} {limit.bound}")
    return limit


def quantile_of(statistic: str) -> float:
    """0.99 of "p99"."""
    return float(statistic[1:]) / 100


def good_share(window: Window, slo: Slo | None, guard_s: float) -> float:
    """Share of requests that kept every limit of ``slo``."""
    if slo is None:
        raise InputError("goodput needs limits for a single request: set [slo] ttft, tpot or jct")
    good: npt.NDArray[np.bool_] | None = None
    for name, bound in slo.limits.items():
        value = window.token_interval(guard_s) if name == "tpot_s" else window.waiting(name, guard_s)
        met = value <= bound
        good = met if good is None else good & met
    return float(good.mean()) if good is not None and len(good) else math.nan


def good_rate_rps(window: Window, slo: Slo) -> float:
    """Requests a second that finish in the window and kept every limit of ``slo``, whenever they arrived."""
    good = slo.met(window.records.requests)["all"] & window.finished()
    return float(good.sum()) / (window.end_s - window.start_s)


def _share_beyond(window: Window, metric: str, bound: float) -> float:
    if metric == "tbt":
        return gaps_beyond(window.gaps(), bound)
    if metric == "tpot":
        r, inside = window.records.requests, window.finished()
        many = inside & (r.output_tokens > 1)
        tpot = (r.finished_s[many] - r.first_token_s[many]) / (r.output_tokens[many] - 1)
        return float((tpot > bound).mean()) if len(tpot) else 0.0
    waits = window.waiting(WAITS[metric], bound)
    return float((waits > bound).mean()) if len(waits) else 0.0


def _mean(values: Floats) -> float:
    return float(values.mean()) if len(values) else 0.0


def gaps_beyond(gaps: TokenGaps, bound: float) -> float:
    """Share of times between tokens above ``bound``; within a bin as if they were spread evenly."""
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
"""Objectives that ask for the fewest replicas that hold a rate."""


@dataclass(frozen=True)
class Question:
    """What is asked of every configuration.

    Attributes:
        objective: One of OBJECTIVES.
        promises: What must hold.
        rate_rps: Offered load, where the objective needs one; "energy" without one is at capacity.
        max_gpus: Of a whole deployment.
        requests: Of an offline batch ("makespan").
        precision: Relative half-width to reach for ranked configurations.
        seeds: Independent repetitions behind it.
        level: Of every interval.
    """

    objective: Objective
    promises: Promises
    rate_rps: float | None = None
    max_gpus: int = UNLIMITED_GPUS
    requests: int = 1000
    precision: float = 0.025
    seeds: int = 5
    level: float = 0.95

    def __post_init__(self) -> None:
        needs = self.objective.name in (*AT_RATE, "goodput")
        if needs and self.rate_rps is None:
            raise InputError(f"the objective {self.objective.name} needs a rate: set search.rate, in requests a second")
        if not 0 < self.precision < 1:
            raise InputError(f"precision must be between 0 and 1; it is {self.precision}")
        if self.objective.name == "goodput" and self.promises.slo is None:
            raise InputError("the objective goodput needs limits for a single request: set [slo] ttft, tpot or jct")


def objective(name: str) -> Objective:
    """The objective of this name; raises UnknownNameError."""
    if name not in OBJECTIVES:
        raise UnknownNameError("objective", name, OBJECTIVES)
    return OBJECTIVES[name]
