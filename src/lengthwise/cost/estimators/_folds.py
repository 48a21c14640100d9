"""Errors on points that an estimator has not seen, between the others and beyond them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lengthwise.cost.estimators._learners import Learner
from lengthwise.cost.estimators._points import Points
from lengthwise.schema.cost_tables import Floats

FOLDS = 10
_MOST_ROWS = 4000
_LEAST_SHAPES = 4
_SLOW = ("forest",)
_SLOW_FOLDS = 4
REGIONS = ("small", "medium", "large", "beyond")


@dataclass(frozen=True)
class Held:
    """What an estimator said of points that were held out.

    ``log_ratio`` [n] is log(measured / said), ``region`` [n] the index into REGIONS: thirds of the points
    between the outermost by their size, and the points beyond those that were learnt from. ``half`` [n] is 0 or
    1, the same of a place for every estimator: they are chosen by one half and told on the other.
    """

    log_ratio: Floats
    region: npt.NDArray[np.int64]
    half: npt.NDArray[np.int64]

    @property
    def inside(self) -> Floats:
        """Of points that have measured neighbours on all sides."""
        return np.asarray(self.log_ratio[self.region < len(REGIONS) - 1], dtype=np.float64)

    @property
    def beyond(self) -> Floats:
        """Of the largest third, told by the others."""
        return np.asarray(self.log_ratio[self.region == len(REGIONS) - 1], dtype=np.float64)

    def of_half(self, half: int) -> Held:
        """The points of one half."""
        own = self.half == half
        return Held(self.log_ratio[own], self.region[own], self.half[own])


def joined_halves(first: Held, second: Held) -> Held:
    """The first half of one estimator with the second half of another."""
    parts = (first.of_half(0), second.of_half(1))
    columns = ([getattr(part, name) for part in parts] for name in ("log_ratio", "region", "half"))
    return Held(*(np.concatenate(column) for column in columns))


def held_out(name: str, learner: Learner, points: Points) -> Held:
    """What the learner says of every interior place without its rows, and of the largest third without all of it.

    Each place that is no extreme of an axis is told from the others: places are dealt out in turn along the
    axes to FOLDS folds, so that a place is held out while its neighbours stay, as if it were left out alone. The
    edges of every axis are never held out inside: what lies at them is only told as beyond.
    """
    points = thinned(points)
    places = points.places()
    size = points.roofline
    inner = interior(points)
    fold = _dealt(points, _SLOW_FOLDS if name in _SLOW else FOLDS)
    said = np.full(len(points), np.nan)
    for one in range(fold.max() + 1):
        hidden = inner & (fold == one)
        if hidden.any() and (~hidden).any():
            said[hidden] = learner(points.take(~hidden))(points.take(hidden))
    rows = np.flatnonzero(inner & np.isfinite(said))
    third = np.searchsorted(np.quantile(size[rows], [1 / 3, 2 / 3]), size[rows]) if len(rows) else rows
    outside, told = _beyond(learner, points, places, size)
    log_ratio = np.log(points.seconds[np.concatenate([rows, outside])] / np.concatenate([said[rows], told]))
    region = np.concatenate([third, np.full(len(outside), len(REGIONS) - 1)])
    half = _dealt(points, FOLDS)[np.concatenate([rows, outside])] % 2
    return Held(log_ratio, region.astype(np.int64), half)


def thinned(points: Points) -> Points:
    """The timed points; if they are many, every so many shapes whole, so that neighbours along the axes stay."""
    points = points.take(points.seconds > 0)
    if len(points) <= _MOST_ROWS:
        return points
    step = -(-len(points) // _MOST_ROWS)
    shapes, kind = np.unique(points.shape, axis=0, return_inverse=True)
    kept = kind.ravel() if len(shapes) >= _LEAST_SHAPES * step else points.places()
    return points.take(kept % step == 0)


def interior(points: Points) -> npt.NDArray[np.bool_]:
    """[n] whether a point lies between the first and the last of its shape on every axis that varies."""
    inner = np.ones(len(points), dtype=bool)
    _, kind = np.unique(points.shape, axis=0, return_inverse=True)
    for one in np.unique(kind.ravel()):
        rows = kind.ravel() == one
        for axis in points.axes[rows].T:
            if axis.min() < axis.max():
                inner[rows] &= (axis > axis.min()) & (axis < axis.max())
    return inner


def _dealt(points: Points, folds: int) -> npt.NDArray[np.int64]:
    """[n] a fold by rank on every axis: neighbours along an axis never share one."""
    turn = np.zeros(len(points), dtype=np.int64)
    columns = [*points.shape.T, *points.axes.T]
    for step, column in zip((1, 3, 7, 9, 11, 13, 17, 19), columns[::-1], strict=False):
        turn += step * np.unique(column, return_inverse=True)[1].ravel()
    return np.asarray(turn % folds, dtype=np.int64)


def _beyond(
    learner: Learner, points: Points, places: npt.NDArray[np.int64], size: Floats
) -> tuple[npt.NDArray[np.int64], Floats]:
    """(rows, said) of the largest third of the places, from the smaller ones."""
    by_place = np.zeros(places.max() + 1)
    by_place[places] = size
    if len(by_place) < 6:
        return np.zeros(0, dtype=np.int64), np.zeros(0)
    large = by_place[places] > np.quantile(by_place, 2 / 3)
    said = learner(points.take(~large))(points.take(large))
    return np.flatnonzero(large), said
