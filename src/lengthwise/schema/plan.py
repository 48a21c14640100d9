"""Results of a search: ranked configurations of a deployment with their measurements."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from lengthwise.schema.estimate import UNKNOWN, Estimate


class Status(StrEnum):
    """The stage of the search that a configuration reached."""

    RANKED = "ranked"
    """Its objective is known to the requested precision."""
    SCOUTED = "scouted"
    """Simulated, and significantly worse than the best; its objective is known roughly."""
    PRUNED = "pruned"
    """Not simulated: by a bound it cannot be among the best."""
    REJECTED = "rejected"
    """It cannot run, or violates a limit at every rate."""


@dataclass(frozen=True)
class Limit:
    """A requirement on a metric of ``Point.values``: at most ``bound``, or at least ``bound`` if ``at_least``."""

    metric: str
    bound: float
    at_least: bool = False

    @property
    def direction(self) -> str:
        """Return the sign between the metric and its bound: ">=" or "<="."""
        return ">=" if self.at_least else "<="

    def is_satisfied(self, value: float) -> bool:
        """Return whether a value satisfies the limit. NaN (there was nothing to measure) satisfies it."""
        return not (value < self.bound if self.at_least else value > self.bound)


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

    ``values`` maps metrics to estimates: "ttft.p90", "tbt.p99", "jct.mean" and so on (s), "within_slo" as a share
    of requests, "requests_per_s", "output_tokens_per_s", "usd_per_million_output_tokens", "usd_per_thousand_requests",
    "energy_j_per_output_token", "power_w", "mfu", "mbu", "kv_utilization", "busy_share", "preemptions_per_request",
    "served" (share of requests neither rejected nor timed out). ``satisfied`` is whether all limits hold.
    """

    rate_rps: float
    values: dict[str, Estimate]
    satisfied: bool

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

    objective: float = float("nan")
    rate_rps: float = float("nan")  # above it the queue grows


@dataclass(frozen=True)
class Bottleneck:
    """What prevents a configuration from serving a higher rate."""

    binds: str = ""  # the limit that bounds the rate (its metric), or "throughput"
    cause: str = ""  # the bottleneck of the hardware at the operating point, in a sentence


@dataclass(frozen=True)
class Choice:
    """One configuration and its results."""

    key: str  # identifies the configuration within its search
    name: str  # differences from the other configurations, for tables
    settings: dict[str, Any]  # scenario keys on the axes of the search ("deployment.tp") and their values
    gpus: int  # of all replicas
    price_per_hour_usd: float  # of all GPUs, and of priced memory behind their prefix caches
    status: Status
    exclusion: Exclusion = Exclusion()
    objective: Estimate = UNKNOWN  # in the objective's unit
    capacity_rps: Estimate = UNKNOWN  # largest rate within the limits, if the objective needs it
    bounds: Bounds = Bounds()
    at: Point | None = None  # operating point, at which the objective was measured; None: not simulated
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
    latency: Estimate = UNKNOWN  # the same with its intervals


@dataclass(frozen=True)
class Shift:
    """The best configuration if one limit had another ``bound``. ``objective`` is NaN if none meets all limits."""

    metric: str
    bound: float
    choice: str
    objective: float


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
class Spent:
    """The effort of a search. ``reused`` counts evaluations that an earlier run had saved."""

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
    tied: int  # number of choices at the top that neither sampling nor model error separates from the best one
    cause: tuple[str, ...]
    frontiers: dict[str, tuple[Trade, ...]]
    shifts: tuple[Shift, ...]  # sensitivity to each limit, by metric and rising bound, including the requested one
    excluded_groups: tuple[ExcludedGroup, ...]
    effort: Spent
    level: float = 0.95
    notes: tuple[str, ...] = ()  # what limits the trust in the cost tables, a sentence each

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
