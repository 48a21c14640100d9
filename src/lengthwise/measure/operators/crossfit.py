"""How well measured points tell of one another: each is predicted from all others."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from lengthwise.measure.operators.grids import position, terms
from lengthwise.measure.operators.points import MESSAGE, ROWS, Operator
from lengthwise.schema.cost_tables import Floats

_NEIGHBOURS = 8


def predict(operator: Operator, places: list[tuple[int, ...]], seconds: Floats, at: tuple[int, ...]) -> float:
    """Seconds at a place from the points around it.

    Of rows: the line through both neighbours. Of two coordinates: a plane in the terms that the seconds
    of attention are a sum of, through the nearest points, the nearer the heavier.
    """
    if operator.kind in {ROWS, MESSAGE}:
        return _between(np.array([p[0] for p in places], dtype=np.float64), seconds, float(at[0]))
    here = position(operator, [*places, at])
    distance = np.sqrt(((here[:-1] - here[-1]) ** 2).sum(axis=1))
    near = np.argsort(distance, kind="stable")[:_NEIGHBOURS]
    return _plane(operator, [places[i] for i in near], seconds[near], distance[near], at)


def leave_one_out(operator: Operator, places: list[tuple[int, ...]], seconds: Floats) -> Floats:
    """[points] |log(predicted / measured)|, each point predicted from the others; NaN where others end.

    Of rows, the first and the last have no others on both sides; of two coordinates, the corners.
    """
    errors = np.full(len(places), np.nan)
    if len(places) < (3 if operator.kind in {ROWS, MESSAGE} else 5):
        return errors
    inner = ~_ends(operator, places)
    for i in np.flatnonzero(inner & (seconds > 0)):
        others = [p for j, p in enumerate(places) if j != i]
        told = predict(operator, others, np.delete(seconds, i), places[i])
        errors[i] = abs(np.log(told / seconds[i]))
    return errors


def _ends(operator: Operator, places: list[tuple[int, ...]]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """[points] whether a point stands at an end of every coordinate."""
    where = position(operator, places)
    return np.asarray(((where == where.min(axis=0)) | (where == where.max(axis=0))).all(axis=1))


def _between(x: Floats, seconds: Floats, at: float) -> float:
    order = np.argsort(x, kind="stable")
    x, seconds = x[order], seconds[order]
    for (a, ta), (b, tb) in pairwise(zip(x, seconds, strict=True)):
        if at <= b or b == x[-1]:
            line = ta + (tb - ta) * (at - a) / (b - a)
            return max(float(line), float(min(ta, tb)) / 4)
    return float(seconds[0])


def _plane(
    operator: Operator, places: list[tuple[int, ...]], seconds: Floats, distance: Floats, at: tuple[int, ...]
) -> float:
    seconds = np.maximum(seconds, 1e-12)
    heavy = 1 / (distance**2 + 0.25) / seconds
    told_by = terms(operator, places)
    scale = np.maximum(np.abs(told_by).max(axis=0), 1e-12)
    weights, *_ = np.linalg.lstsq(told_by / scale * heavy[:, None], seconds * heavy, rcond=1e-6)
    told = float((terms(operator, [at])[0] / scale) @ weights)
    return min(max(told, float(seconds.min()) / 4), float(seconds.max()) * 4)
