"""How well measured points tell of one another: each is predicted from all others."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lengthwise.measure.operators.grids import position, terms
from lengthwise.measure.operators.points import MESSAGE, ROWS, Operator
from lengthwise.schema.cost_tables import Floats

_NEIGHBOURS = 8
_LEAST_POINTS = 5  # of two coordinates: as many as the terms of a plane, and the one that is told


def predict(operator: Operator, places: list[tuple[int, ...]], seconds: Floats, at: tuple[int, ...]) -> float:
    """Seconds at a place from the points around it.

    Of rows: the line through both neighbours. Of two coordinates: a plane in the terms that the seconds
    of attention are a sum of, through the nearest points, the nearer the heavier.
    """
    if operator.kind in {ROWS, MESSAGE}:
        rows = np.array([place[0] for place in places], dtype=np.float64)
        order = np.argsort(rows, kind="stable")
        return float(np.interp(at[0], rows[order], seconds[order]))
    where = position(operator, [*places, at])
    distance = np.sqrt(((where[:-1] - where[-1]) ** 2).sum(axis=1))[None, :]
    return float(_planes(operator, places, seconds, distance, [at])[0])


def leave_one_out(operator: Operator, places: list[tuple[int, ...]], seconds: Floats) -> Floats:
    """[points] |log(predicted / measured)|, each point predicted from the others; NaN where others end.

    Of rows, the first and the last have no others on both sides; of two coordinates, the corners.
    """
    if operator.kind in {ROWS, MESSAGE}:
        told = _between_neighbours(np.array([place[0] for place in places], dtype=np.float64), seconds)
    elif len(places) < _LEAST_POINTS:
        told = np.full(len(places), np.nan)
    else:
        where = position(operator, places)
        distance = np.sqrt(((where[:, None, :] - where[None, :, :]) ** 2).sum(axis=2))
        np.fill_diagonal(distance, np.inf)
        told = np.where(_corners(where), np.nan, _planes(operator, places, seconds, distance, places))
    positive = np.where(seconds > 0, seconds, np.nan)
    return np.asarray(np.abs(np.log(told / positive)))


def _between_neighbours(rows: Floats, seconds: Floats) -> Floats:
    """[points] what the line between both neighbours says; NaN at the ends."""
    told = np.full(len(rows), np.nan)
    order = np.argsort(rows, kind="stable")
    x, y = rows[order], seconds[order]
    told[order[1:-1]] = y[:-2] + (y[2:] - y[:-2]) * (x[1:-1] - x[:-2]) / (x[2:] - x[:-2])
    return told


def _corners(where: Floats) -> npt.NDArray[np.bool_]:
    """[points] whether a point stands at an end of every coordinate."""
    return np.asarray(((where == where.min(axis=0)) | (where == where.max(axis=0))).all(axis=1))


def _planes(
    operator: Operator,
    places: list[tuple[int, ...]],
    seconds: Floats,
    distance: Floats,
    at: list[tuple[int, ...]],
) -> Floats:
    """[at] seconds by a plane through the points that are nearest by ``distance`` [at, points]."""
    near = np.argsort(distance, axis=1, kind="stable")[:, : min(_NEIGHBOURS, len(places) - 1) or 1]
    gap = np.take_along_axis(distance, near, axis=1)
    around = np.maximum(seconds[near], 1e-12)
    heavy = np.where(np.isfinite(gap), 1 / (gap**2 + 0.25) / around, 0.0)
    told_by = terms(operator, places)[near]
    scale = np.maximum(np.abs(told_by).max(axis=1, keepdims=True), 1e-12)
    solved = np.linalg.pinv(told_by / scale * heavy[:, :, None], rcond=1e-6) @ (around * heavy)[:, :, None]
    told = (terms(operator, at) / scale[:, 0, :] * solved[:, :, 0]).sum(axis=1)
    return np.asarray(np.clip(told, around.min(axis=1) / 4, around.max(axis=1) * 4))
