"""Defines results of a search: ranked configurations of a deployment with their measurements."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from lengthwise.schema.estimate import UNKNOWN, Estimate
from lengthwise.schema.metric_names import metric_of, quantity


class Status(StrEnum):
    """The stage of the search that a configuration reached."""

    RANKED = "ranked"
    """Its objective is known to the requested precision, if the load has enough requests."""
    SCOUTED = "scouted"
    """Its objective is known roughly, from short runs: it is clearly worse, or enough tied ones are ranked."""
    PRUNED = "pruned"
    """It cannot be among the best, by a closed-form bound or by one short run that breaks a limit."""
    REJECTED = "rejected"
    """It cannot run, needs too many GPUs, or violates a limit at every rate or at the requested one."""


@dataclass(frozen=True)
class Limit:
    """A requirement on a metric of ``Point.values``: at most ``bound``, or at least ``bound`` if ``at_least``."""

    metric: str
    bound: float
    at_least: bool = False

    @property
    def direction(self) -> str:
        """Return the relation between the metric and its bound: ">=" or "<="."""
        return ">=" if self.at_least else "<="

    def is_satisfied(self, value: float) -> bool:
        """Return whether a value satisfies the limit. NaN (there was nothing to measure) satisfies it."""
        return not (value < self.bound if self.at_least else value > self.bound)


def limit_text(limit: Limit) -> str:
    """Return a limit ("TTFT p90 ≤ 2 s")."""
    sign = "\N{GREATER-THAN OR EQUAL TO}" if limit.at_least else "\N{LESS-THAN OR EQUAL TO}"
    return f"{metric_of(limit.metric).label} {sign} {quantity(limit.metric, limit.bound)}"


@dataclass(frozen=True)
class Objective:
    """The objective by which configurations are ranked."""

    name: str  # "requests_per_dollar", "cost_at_rate", "fewest_gpus", "goodput", "makespan" or "energy"
    label: str
    unit: str
    higher_is_better: bool


@dataclass(frozen=True)
class Point:
    """Metrics of one deployment under one load, each the mean over seeds.

    ``values`` maps metrics to estimates: latencies such as "ttft.p90" and "jct.mean" (s) and the metrics of
    ``metric_names.OTHERS`` except "goodput", where they apply; "served" is the share of requests that are neither
    rejected nor time out. With an SLO, "good_requests_per_s" is the goodput. ``satisfied`` is whether all limits hold.
    ``usage`` maps the metric of each limit to the used part of the limit: for a quantile, the share of requests beyond
    the bound divided by the allowed share. Above 1, the limit is broken.
    """

    rate_rps: float
    values: dict[str, Estimate]
    satisfied: bool
    usage: dict[str, float] = field(default_factory=dict)

    def value(self, metric: str) -> float:
        """Return the value of a metric, or NaN if it was not measured."""
        return self.values.get(metric, UNKNOWN).value


@dataclass(frozen=True)
class Exclusion:
    """The reason why a configuration was rejected or pruned. Both texts are empty for other configurations."""

    reason: str = ""  # in a sentence
    group: str = ""  # short name shared by configurations with the same reason


@dataclass(frozen=True)
class Bounds:
    """Bounds on a configuration's objective and rate, from formulas, without simulation. NaN: not computed."""

    objective: float = float("nan")  # no schedule reaches a better one
    rate_rps: float = float("nan")  # no schedule sustains a higher one


@dataclass(frozen=True)
class Bottleneck:
    """The limit and the resource that keep a configuration from serving a higher rate."""

    binds: str = ""  # metric of the limit that breaks first at a higher rate, or "throughput"; "": none is known
    cause: str = ""  # the bottleneck of the hardware at the operating point, in a sentence; "": unknown


@dataclass(frozen=True)
class Choice:
    """One configuration and its results."""

    key: str  # identifies the configuration within its search
    name: str  # the settings that differ between configurations, for tables
    settings: dict[str, Any]  # scenario keys on the axes of the search ("deployment.tp") and their values
    gpus: int  # of all replicas
    price_per_hour_usd: float  # of all GPUs, and of priced memory behind their prefix caches
    status: Status
    exclusion: Exclusion = Exclusion()
    objective: Estimate = UNKNOWN  # in the objective's unit
    capacity_rps: Estimate = UNKNOWN  # largest rate within the limits, if the objective needs it
    bounds: Bounds = Bounds()
    at: Point | None = None  # operating point, at which the objective was measured; None: not measured
    points: tuple[Point, ...] = ()  # load curve by rate, including the operating point
    bottleneck: Bottleneck = Bottleneck()
    simulations: int = 0
    requests: int = 0  # requests in all simulations


@dataclass(frozen=True)
class Trade:
    """A configuration on a Pareto frontier of ``cost_usd`` per thousand requests and ``latency_s``."""

    choice: str
    rate_rps: float
    cost_usd: float
    latency_s: float
    latency: Estimate = UNKNOWN  # ``latency_s`` with its intervals


@dataclass(frozen=True)
class Shift:
    """The best configuration if the limit on ``metric`` had another ``bound``; "" and NaN if none meets all limits."""

    metric: str
    bound: float
    choice: str
    objective: float
    model_low: float = math.nan  # the interval of the cost model's error, as wide in relation as that of the choice
    model_high: float = math.nan


@dataclass(frozen=True)
class ExcludedGroup:
    """The configurations rejected or pruned for one reason.

    ``example`` is the complete reason of one of them; ``settings`` are values that are typical of them.
    """

    name: str
    count: int
    example: str
    settings: dict[str, tuple[Any, ...]]


@dataclass(frozen=True)
class SearchEffort:
    """The effort of a search. ``reused`` counts evaluations that the store had from an earlier run."""

    candidates: int
    simulated: int
    pruned: int
    rejected: int
    reused: int
    simulations: int
    requests: int
    seconds: float


@dataclass(frozen=True)
class Plan:
    """The result of one search."""

    name: str
    metadata: dict[str, str]
    objective: Objective
    limits: tuple[Limit, ...]
    axes: dict[str, tuple[Any, ...]]
    choices: tuple[Choice, ...]
    tied: int  # choices at the top whose distance from the best may be due to sampling or model error
    reasons: tuple[str, ...]  # for each axis, a sentence that compares the best with the best that has another value
    frontiers: dict[str, tuple[Trade, ...]]  # by latency metric
    shifts: tuple[Shift, ...]  # sensitivity to each limit, by metric and rising bound, including the requested one
    excluded_groups: tuple[ExcludedGroup, ...]
    effort: SearchEffort
    level: float = 0.95
    notes: tuple[str, ...] = ()  # warnings about the cost tables and prices, a sentence each

    @property
    def best(self) -> Choice | None:
        """Return the best configuration, or None if no configuration satisfies the limits."""
        return next((first for first in self.choices[:1] if first.status is Status.RANKED), None)


@dataclass(frozen=True)
class Swap:
    """The loss if the configuration that is best by one objective is used for another objective."""

    optimum_of: str
    used_for: str
    objective: Estimate
    ratio: float  # how many times worse than the other plan's best; NaN if it violates the limits or cannot run


@dataclass(frozen=True)
class Study:
    """Plans for several objectives, and the loss if the optimum of one objective is used for another."""

    name: str
    plans: tuple[Plan, ...]
    swaps: tuple[Swap, ...] = ()
