"""Distributions solved from the statistics that papers print."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log, pi, sqrt

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq, least_squares
from scipy.special import log_ndtr, ndtr, owens_t

from lengthwise.schema.errors import InputError

Floats = npt.NDArray[np.float64]

_Z90 = 1.2815515655446004


def two_slope_table(mean: float, median: float, p90: float, low: float, high: float) -> tuple[Floats, Floats]:
    """Levels and tokens of the two-slope normal within ``low`` to ``high`` with these statistics."""
    if not low < median < p90 < high:
        raise InputError(
            f"low < median < p90 < high must hold; they are {low:g}, {median:g}, {p90:g}, {high:g}"
        )
    z = np.sort(np.concatenate((np.linspace(-5, 5, 401), [_Z90])))
    levels = ndtr(z)
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
    return float(brentq(lambda t: float(np.trapezoid(shape.tokens(t), levels)) - mean, 0.0, 1e6, xtol=1e-12))


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


def truncated_normal(mean: float, sd: float, low: float, high: float) -> tuple[float, float]:
    """Mean and sd of the normal that has ``mean`` and ``sd`` once it is cut to ``low`` .. ``high``."""
    if not (low < mean < high and sd > 0):
        raise InputError(f"low < mean < high and sd > 0 must hold; they are {low}, {mean}, {high}, {sd}")

    def miss(at: Floats) -> Floats:
        got = _cut_moments(float(at[0]), exp(float(at[1])), low, high)
        return np.array([(got[0] - mean) / sd, (got[1] - sd) / sd])

    found = least_squares(
        miss, np.array([mean, log(sd)]), x_scale=np.array([sd, 1.0]), xtol=1e-14, ftol=1e-14
    )
    if float(np.abs(miss(found.x)).max()) > 1e-6:
        raise InputError(
            f"no normal cut to {low}..{high} has mean {mean} and sd {sd}; "
            f"the uniform there has sd {(high - low) / sqrt(12):.1f}"
        )
    return float(found.x[0]), exp(float(found.x[1]))


def _cut_moments(mean: float, sd: float, low: float, high: float) -> tuple[float, float]:
    """Mean and sd after the cut (Johnson, Kotz, Balakrishnan, 1994, section 10.1)."""
    a, b = (low - mean) / sd, (high - mean) / sd
    if a > 0:  # the mirror image keeps the mass away from 1 - tiny
        left, spread = _cut_moments(-mean, sd, -high, -low)
        return -left, spread
    log_mass = log_ndtr(b) + np.log1p(-np.exp(log_ndtr(a) - log_ndtr(b)))
    at_a, at_b = (exp(-0.5 * x * x - log_mass) / sqrt(2 * pi) if np.isfinite(x) else 0.0 for x in (a, b))
    shift = at_a - at_b
    edges = (a * at_a if np.isfinite(a) else 0.0) - (b * at_b if np.isfinite(b) else 0.0)
    return mean + sd * shift, sd * sqrt(max(1 + edges - shift * shift, 1e-300))


def skew_normal_cdf(x: Floats, mean: float, sd: float, skewness: float) -> Floats:
    """Share below ``x`` of Azzalini's skew normal with these moments (1985; Owen's T function)."""
    ratio = abs(skewness) ** (2 / 3)
    delta = np.sign(skewness) * sqrt(pi / 2 * ratio / (ratio + ((4 - pi) / 2) ** (2 / 3)))
    alpha = delta / sqrt(1 - delta * delta)
    omega = sd / sqrt(1 - 2 * delta * delta / pi)
    z = (x - (mean - omega * delta * sqrt(2 / pi))) / omega
    cdf: Floats = np.clip(ndtr(z) - 2 * owens_t(z, alpha), 0.0, 1.0)
    return np.maximum.accumulate(cdf)
