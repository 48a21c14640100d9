"""A number with its uncertainty."""

from __future__ import annotations

import math
from dataclasses import dataclass


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
