"""How sure a schedule's numbers are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """How far a schedule, left as it is, may be from what is said of it.

    Attributes:
        source: "lengths": requests drawn again from those that lengths were counted over; "costs": tables that are off.
        draws: How many there were.
        level: Share of them that lies within each interval.
        requests: That lengths were counted over; 0 for costs.
        throughput_rps: Ends of the interval.
        latency_s: Likewise.
        latency_high_s: Likewise.
        held_share: Share of the draws in which the bound was held; without a bound, in which memory held it.
    """

    source: str
    draws: int
    level: float
    requests: int
    throughput_rps: tuple[float, float]
    latency_s: tuple[float, float]
    latency_high_s: tuple[float, float]
    held_share: float
