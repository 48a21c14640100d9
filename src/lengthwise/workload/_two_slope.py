"""A distribution solved from mean, median and 90th percentile, as tables in papers print them."""

from __future__ import annotations

from dataclasses import dataclass
from math import erfc, log, sqrt

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError
from lengthwise.workload._root import root

Floats = npt.NDArray[np.float64]

_Z90 = 1.2815515655446004


def two_slope_table(mean: float, median: float, p90: float, low: float, high: float) -> tuple[Floats, Floats]:
    """Levels and tokens of the two-slope normal within ``low`` to ``high`` with these statistics."""
    if not 0 < low < median < p90 < high:
        raise InputError(
            f"0 < low < median < p90 < high must hold; they are {low:g}, {median:g}, {p90:g}, {high:g}"
        )
    z = np.sort(np.concatenate((np.linspace(-5, 5, 401), [_Z90])))
    levels = np.array([erfc(-x / sqrt(2)) / 2 for x in z])
    levels[[0, -1]] = 0.0, 1.0
    levels[np.searchsorted(z, _Z90)] = 0.9  # exact, so that the table holds the published p90
    reach = []
    for logarithmic in (True, False):
        shape = _TwoSlope(z, median, p90, low, high, logarithmic)
        reach += [float(np.trapezoid(shape.tokens(tail), levels)) for tail in (0.0, 1e6)]
        if reach[-2] < mean < reach[-1]:
            return levels, shape.tokens(_solve_tail(shape, levels, mean))
    raise InputError(
        f"with median {median:g}, p90 {p90:g} and bounds {low:g} to {high:g} the mean can be "
        f"{min(reach):.0f} to {max(reach):.0f} tokens; {mean:g} was asked for"
    )


def _solve_tail(shape: _TwoSlope, levels: Floats, mean: float) -> float:
    return root(lambda tail: float(np.trapezoid(shape.tokens(tail), levels)) - mean, 0.0, 1e6)


@dataclass(frozen=True, eq=False)
class _TwoSlope:
    """A normal through median and p90, of tokens or of their logarithm, with a tail of another slope."""

    z: Floats
    median: float
    p90: float
    low: float
    high: float
    logarithmic: bool

    def tokens(self, tail: float) -> Floats:
        """Tokens at ``z``; above p90 the slope is ``tail`` times that below."""
        at = log if self.logarithmic else float
        slope = (at(self.p90) - at(self.median)) / _Z90
        bent = at(self.median) + slope * (np.minimum(self.z, _Z90) + tail * np.maximum(self.z - _Z90, 0))
        bent = np.clip(bent, at(self.low), at(self.high))
        tokens: Floats = np.exp(bent) if self.logarithmic else bent
        tokens[np.searchsorted(self.z, [0.0, _Z90])] = self.median, self.p90
        return np.clip(tokens, self.low, self.high)
