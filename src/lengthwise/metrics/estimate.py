"""A quantity over requests, with the uncertainty of each of its statistics."""

from __future__ import annotations

from dataclasses import dataclass

from lengthwise.schema.estimate import UNKNOWN, Estimate

QUANTILES = {"p50": 0.50, "p75": 0.75, "p90": 0.90, "p95": 0.95, "p99": 0.99}
STATISTICS = ("mean", "sd", "min", *QUANTILES, "max")


@dataclass(frozen=True)
class Distribution:
    """A quantity over requests (or tokens): its statistics, in the quantity's unit.

    ``sd`` is that of the values themselves (divisor n); quantiles interpolate linearly
    between order statistics (Hyndman and Fan's type 7, as NumPy does). ``relative_error``
    bounds what reading them from a histogram adds: 0 where every value was kept.
    """

    count: int
    mean: Estimate = UNKNOWN
    sd: Estimate = UNKNOWN
    min: Estimate = UNKNOWN
    p50: Estimate = UNKNOWN
    p75: Estimate = UNKNOWN
    p90: Estimate = UNKNOWN
    p95: Estimate = UNKNOWN
    p99: Estimate = UNKNOWN
    max: Estimate = UNKNOWN
    relative_error: float = 0.0
