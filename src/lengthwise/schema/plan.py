"""What to do: configurations of a deployment, ranked, with the evidence."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from lengthwise.schema.estimate import UNKNOWN, Estimate


class Status(StrEnum):
    """How far a configuration came."""

    RANKED = "ranked"
    """Its objective is known to the precision that was asked for."""
    SCOUTED = "scouted"
    """Simulated, and clearly worse than the best: its objective is known roughly."""
    PRUNED = "pruned"
    """A bound says that it cannot be among the best; not simulated."""
    REJECTED = "rejected"
    """It cannot run, or breaks a limit at any rate."""


@dataclass(frozen=True)
class Limit:
    """A promise: ``metric`` stays at most (or, with ``at_least``, at least) at ``bound``.

    ``metric`` is a name of Point.values, such as "ttft.p90" (seconds), "goodput" (a share) or
    "kv_utilization".
    """

    metric: str
    bound: float
    at_least: bool = False

    @property
    def direction(self) -> str:
        """The sign between metric and bound."""
        return ">=" if self.at_least else "<="

    def is_satisfied(self, value: float) -> bool:
        """Whether a value keeps the promise; NaN (nothing to measure) does."""
        return not (value < self.bound if self.at_least else value > self.bound)


@dataclass(frozen=True)
class Objective:
    """What makes one configuration better than another.

    Attributes:
        name: "requests_per_dollar", "cost_at_rate", "fewest_gpus", "goodput", "makespan" or "energy".
    """

    name: str
    label: str
    unit: str
    higher_is_better: bool


@dataclass(frozen=True)
class Point:
    """One deployment under one load: what users and the bill see, means over seeds.

    ``values`` maps metrics to estimates: "ttft.p90", "tbt.p99", "jct.mean" and so on in seconds,
    "goodput" as a share of requests, "requests_per_s", "output_tokens_per_s",
    "usd_per_million_output_tokens", "usd_per_thousand_requests", "energy_j_per_output_token",
    "power_w", "mfu", "mbu", "kv_utilization", "busy_share", "preemptions_per_request",
    "served" (share of requests neither rejected nor given up). ``satisfied`` tells whether all limits hold.
    """

    rate_rps: float
    values: dict[str, Estimate]
    satisfied: bool

    def value(self, metric: str) -> float:
        """The middle of a metric; NaN where it was not measured."""
        return self.values.get(metric, UNKNOWN).value


@dataclass(frozen=True)
class Choice:
    """One configuration and what is known of it.

    Attributes:
        key: Identifies the configuration among those of its search.
        name: For tables; says what differs from the other configurations.
        settings: Scenario keys ("deployment.tp") and their values: the axes of the search only.
        gpus: Of all replicas.
        price_per_hour_usd: Of all GPUs.
        status: How far it came.
        reason: Why it was rejected or pruned, in a sentence; else empty.
        region: A short name of the reason, the same for all that failed alike; else empty.
        objective: In the objective's unit.
        bound: What the objective could be at best by closed forms; NaN where none was needed.
        capacity_rps: Largest rate that holds the limits, where the objective asks for it.
        bound_rps: Rate above which the queue must grow, by closed forms; NaN where none was needed.
        at: Its operating point, at which the objective was measured; None if it never ran.
        points: Its load curve, by rate; the operating point among them.
        binds: What keeps the rate from being higher: a limit's metric, or "throughput".
        cause: What binds the hardware at the operating point, in a sentence.
        simulations: Runs that were spent on it.
        requests: Requests simulated in them.
    """

    key: str
    name: str
    settings: dict[str, Any]
    gpus: int
    price_per_hour_usd: float
    status: Status
    reason: str = ""
    region: str = ""
    objective: Estimate = UNKNOWN
    bound: float = float("nan")
    capacity_rps: Estimate = UNKNOWN
    bound_rps: float = float("nan")
    at: Point | None = None
    points: tuple[Point, ...] = ()
    binds: str = ""
    cause: str = ""
    simulations: int = 0
    requests: int = 0


@dataclass(frozen=True)
class Trade:
    """A configuration on a frontier: nobody is both cheaper and faster.

    ``cost_usd`` is for a thousand requests; ``latency_s`` is the metric of the frontier.
    """

    choice: str
    rate_rps: float
    cost_usd: float
    latency_s: float


@dataclass(frozen=True)
class Shift:
    """What another bound of one limit would give: the best configuration then, and its objective.

    ``objective`` NaN: nothing that was measured holds it.
    """

    metric: str
    bound: float
    choice: str
    objective: float


@dataclass(frozen=True)
class Region:
    """Configurations that failed alike: how many, why (of one of them), and what they share."""

    name: str
    count: int
    example: str
    settings: dict[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Spent:
    """What a search took. ``reused`` evaluations came from an earlier run's store."""

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
    """The answer of one search.

    Attributes:
        tied: So many of the first choices cannot be told from the best: their intervals overlap.
        shifts: Sensitivity to each limit, by metric and rising bound; the asked one among them.
    """

    name: str
    metadata: dict[str, str]
    objective: Objective
    limits: tuple[Limit, ...]
    axes: dict[str, tuple[Any, ...]]
    choices: tuple[Choice, ...]
    tied: int
    cause: tuple[str, ...]
    frontiers: dict[str, tuple[Trade, ...]]
    shifts: tuple[Shift, ...]
    regions: tuple[Region, ...]
    effort: Spent
    level: float = 0.95

    @property
    def best(self) -> Choice | None:
        """The winner; None if nothing holds the limits."""
        first = self.choices[0] if self.choices else None
        return first if first is not None and first.status is Status.RANKED else None


@dataclass(frozen=True)
class Swap:
    """The best configuration of one plan used for the question of another.

    ``ratio`` is how many times worse it is there than the best of that question; NaN where it does
    not hold the limits or cannot run.
    """

    optimum_of: str
    used_for: str
    objective: Estimate
    ratio: float


@dataclass(frozen=True)
class Study:
    """Plans of several questions side by side, and what confusing them costs."""

    name: str
    plans: tuple[Plan, ...]
    swaps: tuple[Swap, ...] = field(default=())
