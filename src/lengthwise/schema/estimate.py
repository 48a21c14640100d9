"""A number with its uncertainty."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True)
class Estimate:
    """A number with its uncertainty. Unknown numbers and unknown intervals are NaN."""

    value: float
    half_width: float = math.nan  # of the confidence interval of sampling: other random requests
    # Interval of the cost model's error, which is assumed to be as large as at the measured points.
    model_low: float = math.nan
    model_high: float = math.nan

    @property
    def low(self) -> float:
        """Return the lower end of the confidence interval."""
        return self.value - self.half_width

    @property
    def high(self) -> float:
        """Return the upper end of the confidence interval."""
        return self.value + self.half_width

    @property
    def has_interval(self) -> bool:
        """Return whether the confidence interval is known."""
        return not math.isnan(self.half_width)

    @property
    def has_model_interval(self) -> bool:
        """Return whether the interval of the cost model's error is known."""
        return not math.isnan(self.model_low) and not math.isnan(self.model_high)

    def scaled(self, factor: float) -> Self:
        """Return the estimate and its intervals, multiplied by ``factor``."""
        names = ("value", "half_width", "model_low", "model_high")
        return replace(self, **{name: getattr(self, name) * factor for name in names})


@dataclass(frozen=True)
class DrawnEstimate(Estimate):
    """An estimate with its value under each random draw of the cost model's error.

    Draw k has the same error in all estimates of one model on one GPU, so that they can be compared draw by draw.
    """

    draws: tuple[float, ...] = ()

    def scaled(self, factor: float) -> Self:
        """Return the estimate and its intervals, multiplied by ``factor``."""
        return replace(super().scaled(factor), draws=tuple(draw * factor for draw in self.draws))


UNKNOWN = Estimate(math.nan)
