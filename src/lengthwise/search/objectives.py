"""What a search optimises."""

from __future__ import annotations

from dataclasses import dataclass

from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.plan import Objective
from lengthwise.search.limits import Promises

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
            raise InputError(
                f"the objective {self.objective.name} needs a rate: set search.rate, in requests a second"
            )
        if not 0 < self.precision < 1:
            raise InputError(f"precision must be between 0 and 1; it is {self.precision}")
        if self.objective.name == "goodput" and self.promises.slo is None:
            raise InputError(
                "the objective goodput needs limits for a single request: set [slo] ttft, tpot or jct"
            )


def objective(name: str) -> Objective:
    """The objective of this name; raises UnknownNameError."""
    if name not in OBJECTIVES:
        raise UnknownNameError("objective", name, OBJECTIVES)
    return OBJECTIVES[name]
