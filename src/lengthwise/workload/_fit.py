"""Distributions solved from moments; this file needs scipy and is imported where it is used."""

from __future__ import annotations

from math import exp, isinf, pi, sqrt

import numpy as np
import numpy.typing as npt
from scipy.special import log_ndtr, ndtr, owens_t

from lengthwise.schema.errors import InputError
from lengthwise.workload._root import root

Floats = npt.NDArray[np.float64]


def truncated_normal(mean: float, sd: float, low: float, high: float) -> tuple[float, float]:
    """Mean and sd of the normal that has ``mean`` and ``sd`` once it is cut to ``low`` .. ``high``."""
    if not (low < mean < high and sd > 0):
        raise InputError(f"low < mean < high and sd > 0 must hold; they are {low}, {mean}, {high}, {sd}")

    def centre(spread: float) -> float:
        reach = 10 * spread + 20 * spread**2 / sd
        return root(lambda at: _cut_moments(at, spread, low, high)[0] - mean, mean - reach, mean + reach)

    def excess(spread: float) -> float:
        return _cut_moments(centre(spread), spread, low, high)[1] - sd

    widest = 30 * max(sd, (mean - low) if isinf(high) else high - low)
    if excess(widest) < 0:
        raise InputError(
            f"no normal cut to {low:g}..{high:g} has mean {mean:g} and sd {sd:g}: its sd would be at most "
            f"{excess(widest) + sd:.1f}; give a smaller sd, or mean and sd of the normal before the cut"
        )
    spread = root(excess, sd, widest)  # a cut only narrows, so the normal is at least as wide
    return centre(spread), spread


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
