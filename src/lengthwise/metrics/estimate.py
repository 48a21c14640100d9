"""Numbers with their uncertainty."""

from __future__ import annotations

import math
from dataclasses import dataclass

QUANTILES = {"p50": 0.50, "p75": 0.75, "p90": 0.90, "p95": 0.95, "p99": 0.99}
STATISTICS = ("mean", "sd", "min", *QUANTILES, "max")


@dataclass(frozen=True)
class Estimate:
    """A number and the half-width of its confidence interval; NaN says that it is not known."""

    value: float
    half_width: float = math.nan

    @property
    def low(self) -> float:
        """Lower end of the interval."""
        return self.value - self.half_width

    @property
    def high(self) -> float:
        """Upper end of the interval."""
        return self.value + self.half_width

    @property
    def has_interval(self) -> bool:
        """Whether the half-width is known."""
        return not math.isnan(self.half_width)


UNKNOWN = Estimate(math.nan)


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
