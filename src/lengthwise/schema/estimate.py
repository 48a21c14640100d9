"""A number with its uncertainty."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """A number and how far off it may be; NaN says that it is not known.

    Attributes:
        value: The number.
        half_width: Of its confidence interval: what chance does, in the requests that happened to come.
        model_low: Lower end of the interval by the cost model's own error: what it is if the model is wrong
            by as much as it was wrong where it was measured.
        model_high: Upper end of it.
    """

    value: float
    half_width: float = math.nan
    model_low: float = math.nan
    model_high: float = math.nan

    @property
    def low(self) -> float:
        """Lower end of the confidence interval."""
        return self.value - self.half_width

    @property
    def high(self) -> float:
        """Upper end of the confidence interval."""
        return self.value + self.half_width

    @property
    def has_interval(self) -> bool:
        """Whether the half-width is known."""
        return not math.isnan(self.half_width)

    @property
    def has_model_interval(self) -> bool:
        """Whether the cost model's error is known."""
        return not math.isnan(self.model_low) and not math.isnan(self.model_high)


UNKNOWN = Estimate(math.nan)
