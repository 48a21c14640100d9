"""Where a monotone function is zero; scipy's solvers take half a second to import."""

from __future__ import annotations

from collections.abc import Callable


def root(function: Callable[[float], float], low: float, high: float) -> float:
    """The zero of a monotone function between two arguments of opposite sign, to the last bit (bisection)."""
    rising = function(high) > function(low)
    middle = (low + high) / 2
    while low < middle < high:
        if (function(middle) > 0) == rising:
            high = middle
        else:
            low = middle
        middle = (low + high) / 2
    return middle
