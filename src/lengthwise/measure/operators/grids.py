"""Where to measure: a coarse grid of each operator, and the fine one that later points are chosen of."""

from __future__ import annotations

import itertools

import numpy as np

from lengthwise.measure.operators.points import DECODE, PREFILL, Operator, Point
from lengthwise.schema.cost_tables import Floats

Places = list[tuple[int, ...]]
SKEWS = (4,)
_NEAR_ZERO = 16  # a context of 0 stands an octave below this many tokens on the logarithmic axis


def coarse(operator: Operator) -> tuple[Point, ...]:
    """Both ends of the range and points four times apart, of attention eight times; the smallest first.

    Where the range is so short that few are left, they stand nearer.
    """
    ratios, least = ((4, 2), 4) if len(operator.largest) == 1 else ((8, 4, 2), 8)
    places: Places = []
    for ratio in ratios:
        if len(places) < least:
            places = _places(operator, ratio)
    points = [Point(operator, at) for at in places]
    return tuple(sorted(points + _skewed(operator, points), key=lambda point: point.work))


def fine(operator: Operator) -> tuple[tuple[int, ...], ...]:
    """All places that points may be added at: about four an octave a coordinate."""
    return tuple(_places(operator, 2**0.25))


def position(operator: Operator, places: Places) -> Floats:
    """[places, coordinates] where places stand when near means alike: octaves."""
    at = np.array(places, dtype=np.float64)
    if operator.kind == PREFILL:
        return np.asarray(np.log2(at + np.array([0, _NEAR_ZERO])))
    if operator.kind == DECODE:
        return np.log2(np.column_stack([at[:, 0], at[:, 1] / at[:, 0]]))
    return np.log2(at)


def terms(operator: Operator, places: Places) -> Floats:
    """[places, terms] what seconds are a sum of, locally: a constant, rows, pairs, keys."""
    at = np.array(places, dtype=np.float64)
    one = np.ones(len(at))
    if operator.kind == PREFILL:
        chunk, context = at.T
        return np.column_stack([one, chunk, chunk * (context + chunk / 2), context])
    return np.column_stack([one, at])


def _places(operator: Operator, ratio: float) -> Places:
    """All places of the range by steps of ``ratio`` in each coordinate, its ends among them."""
    largest = operator.largest
    if operator.kind == PREFILL:
        longest = largest[1] + 1
        return [
            (chunk, context)
            for chunk in _powers(1, largest[0], ratio)
            for context in (0, *_powers(min(128, longest - chunk), longest - chunk, ratio))
        ]
    if operator.kind == DECODE:
        means = _powers(min(16, largest[2]), largest[2], ratio)
        pairs = itertools.product(_powers(1, largest[0], ratio), means)
        return sorted({(n, n * min(mean, largest[1] // n)) for n, mean in pairs})
    return [(n,) for n in _powers(1, largest[0], ratio)]


def _skewed(operator: Operator, points: list[Point]) -> list[Point]:
    """A few points of unequal contexts beside equal ones, to tell what inequality costs."""
    if operator.kind != DECODE:
        return []
    able = [p for p in points if p.at[0] >= 8 and p.at[1] >= 64 * p.at[0]]
    return [Point(operator, p.at, skew) for p in able[-2:] for skew in SKEWS]


def _powers(first: int, last: int, ratio: float) -> list[int]:
    """Whole numbers from ``first`` by ``ratio`` up to ``last``, which ends the list."""
    if last < 1:
        return []
    steps = np.floor(np.log(max(last / first, 1)) / np.log(ratio) + 1e-9)
    values = first * ratio ** np.arange(steps + 1)
    if len(values) > 1 and last / values[-1] < np.sqrt(ratio):
        values = values[:-1]
    return sorted({min(last, round(v)) for v in values} | {last})
