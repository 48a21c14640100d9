"""Where a strain crosses 1, in few evaluations."""

from __future__ import annotations

import math
from collections.abc import Callable

FLOOR_SHARE = 1e-3
"""A deployment that breaks its limits at this share of its ceiling does not serve at all."""

LEAST_STRAIN = 0.02
"""Smaller strains count as this one: their logarithm tells nothing."""

_LEAST_SPAN = 1.008


def largest(
    strain: Callable[[float], float],
    guess: float,
    top: float,
    span: float,
    tolerance: float,
    slope: float = 0.0,
) -> float:
    """The largest rate up to ``top`` that is not strained beyond 1; 0 if none from FLOOR_SHARE of it on.

    Steps from the guess, ever wider, until the answer is between two rates; then bisects, at the place
    where the logarithm of the strain would cross, until they are within ``tolerance``. Steps are of
    ``span`` or, where a strain is far from 1, as wide as its slope asks for.
    """
    low, high, at_low, at_high = 0.0, math.inf, 0.0, math.inf
    rate, wide = min(guess, top), _LEAST_SPAN if slope else span
    while not (low > 0 and high < math.inf):
        got = strain(rate)
        step = max(wide, min(_step(got, slope), 1.5))
        if got > 1:
            slope = _slope(rate, got, high, at_high) or slope
            high, at_high, rate = rate, got, rate / step
        elif rate >= top:
            return top
        else:
            low, at_low, rate = rate, got, min(rate * (step if slope else wide), top)
        if high < FLOOR_SHARE * top:
            return 0.0
        wide = min(wide**1.5, 4.0)
    while high > low * (1 + tolerance):
        rate = low * (high / low) ** min(max(_crossing(at_low, at_high), 0.15), 0.85)
        got = strain(rate)
        if got > 1:
            high, at_high = rate, got
        else:
            low, at_low = rate, got
    return float(low * (high / low) ** _crossing(at_low, at_high))


def _slope(rate: float, got: float, higher: float, at_higher: float) -> float:
    """The slope between a broken rate and a higher one; 0 where that was not tried, or is no steeper."""
    if math.isinf(higher) or at_higher <= got:
        return 0.0
    return math.log(at_higher / got) / math.log(higher / rate)


def _step(got: float, slope: float) -> float:
    """The ratio of rates that brings a strain to 1 and a little beyond, by its slope; 10 where none is known."""
    far = got if got > 1 else 1 / max(got, 0.3)  # the logarithm bends down where strains are small
    return math.exp(min(math.log(far) / (slope or 10.0), 1.0)) * 1.004


def _crossing(at_low: float, at_high: float) -> float:
    """Where between two rates the logarithm of the strain is 0, as a share of their distance."""
    below, above = math.log(max(at_low, LEAST_STRAIN)), math.log(max(at_high, LEAST_STRAIN))
    return -below / (above - below) if above > below else 0.5
