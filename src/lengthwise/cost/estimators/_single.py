"""One token: a product of a vector and a matrix is another kernel than one of two matrices.

On CPUs it takes up to a third less than two tokens do, where later ones add a twentieth; a curve through all of them
tells neither. What was measured of one token is told as it was.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lengthwise.cost.estimators._learners import Fitted
from lengthwise.cost.estimators._points import Points
from lengthwise.schema.cost_tables import Floats
from lengthwise.schema.profile import PRODUCTS


@dataclass(frozen=True)
class Apart:
    """Seconds of one token as they were measured, of more as they were learnt."""

    single_s: float
    more: Fitted

    def __call__(self, at: Points) -> Floats:
        """[n] seconds at these points."""
        return np.where(at.axes[:, 0] == 1, self.single_s, self.more(at))


def apart(points: Points) -> tuple[Points, Points] | None:
    """(those of one token, the others) of a product's points; None: one of them is not there."""
    single = points.axes[:, 0] == 1
    others = points.take(~single)
    if points.operator not in PRODUCTS or not single.any() or others.places().max(initial=-1) < 1:
        return None
    return points.take(single), others


def joined(single: Points, others: Points, more: Fitted) -> Apart:
    """Of one token the median of what was measured, but never more than any of more tokens."""
    return Apart(min(float(np.median(single.seconds)), float(others.seconds.min())), more)
