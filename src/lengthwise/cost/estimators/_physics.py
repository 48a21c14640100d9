"""The roofline with its constants fitted: few numbers, so that it reaches beyond what was measured."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lengthwise.cost.estimators._descent import descend
from lengthwise.cost.estimators._points import PARTS, Points, combined, slopes
from lengthwise.schema.cost_tables import Floats

PRIOR = 0.02
"""How much a factor is drawn to 1: leaving the roofline e-fold costs as much as a row that is 2 % off."""

_LARGEST_FACTOR = 100.0
_OUTLIER = 0.1
"""A log error beyond this counts by its size, no longer by its square."""

_MOST_ROWS = 3000


@dataclass(frozen=True)
class Physics:
    """Seconds as the roofline's parts (PARTS), each times one fitted factor."""

    factors: Floats

    def __call__(self, at: Points) -> Floats:
        """[n] seconds at these points."""
        return combined(at.parts, self.factors)

    def told(self) -> dict[str, float]:
        """The factors by part: below 1, the part is faster than the roofline has it."""
        return dict(zip(PARTS, self.factors.tolist(), strict=True))


def fit_physics(points: Points) -> Physics:
    """The factors that come nearest to the measured seconds: least squares of log time.

    A part that no row shows keeps the roofline's own constant, since PRIOR draws each log factor to 0;
    that is what lets a fit on one TP degree, model or token range speak of another.
    """
    timed = np.flatnonzero(points.seconds > 0)
    some = timed[:: max(1, len(timed) // _MOST_ROWS)]
    parts, log_seconds = points.parts[some], np.log(points.seconds[some])
    pull = PRIOR * np.sqrt(max(len(some), 1))

    def residuals(log_factors: Floats) -> Floats:
        off = np.log(combined(parts, np.exp(log_factors)) + 1e-12) - log_seconds
        return np.concatenate([off, pull * log_factors])

    def jacobian(log_factors: Floats) -> Floats:
        factors = np.exp(log_factors)
        of_log = slopes(parts, factors) / (combined(parts, factors) + 1e-12)[:, None]
        return np.concatenate([of_log, pull * np.eye(len(PARTS))])

    used = parts.max(axis=0, initial=0.0) > 0
    bound = np.log(_LARGEST_FACTOR)
    found = descend(residuals, jacobian, np.zeros(len(PARTS)), bound=bound, scale=_OUTLIER)
    return Physics(np.where(used, np.exp(found), 1.0))
