"""Measured times as curves and surfaces that never fall when there is more to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import isotonic_regression

from lengthwise.schema.cost_tables import Floats, Ints
from lengthwise.schema.errors import MissingExtraError

_MIN_POINTS = 3
_ROUNDS = 5


@dataclass(frozen=True)
class Curve:
    """A non-decreasing piecewise linear curve; constant before its first point, straight after the last.

    ``slope`` is that of the straight line after the last point.
    """

    x: Floats
    y: Floats
    slope: float

    def __call__(self, at: Floats) -> Floats:
        """The curve at these places."""
        beyond = np.maximum(at - self.x[-1], 0.0)
        return np.asarray(np.interp(at, self.x, self.y) + self.slope * beyond, dtype=np.float64)


def fit_curve(x: Floats, y: Floats) -> Curve:
    """The non-decreasing curve nearest to the medians of ``y`` at each ``x`` (least squares)."""
    places, medians = _medians(x, y)
    fitted = np.asarray(isotonic_regression(medians).x, dtype=np.float64)
    return Curve(places, fitted, _tail_slope(places, fitted))


@dataclass(frozen=True)
class Surface:
    """A surface over (rows, columns), non-decreasing in both, linear between its points.

    Before the first row or column it is constant. After the last column it goes on straight; after
    the last row it grows with the row, and its first column with the row's square if ``quadratic``:
    a chunk of c tokens after k is c (k + c / 2) pairs.
    """

    rows: Floats
    columns: Floats
    values: Floats
    slopes: Floats
    quadratic: bool

    def __call__(self, row: Floats, column: Floats) -> Floats:
        """The surface at these places, whose shapes broadcast."""
        row, column = np.broadcast_arrays(row, column)
        inside = np.clip(row, self.rows[0], self.rows[-1])
        i, u = _cell(self.rows, inside)
        value = (1 - u) * self._along(i, column) + u * self._along(i + 1, column)
        longer = np.maximum(row / self.rows[-1], 1.0)
        if self.quadratic:
            value = value + self.values[-1, 0] * (longer - 1)
        return np.asarray(value * longer, dtype=np.float64)

    def _along(self, i: Ints, column: Floats) -> Floats:
        j, v = _cell(self.columns, np.clip(column, self.columns[0], self.columns[-1]))
        beyond = np.maximum(column - self.columns[-1], 0.0)
        inside = (1 - v) * self.values[i, j] + v * self.values[i, j + 1]
        return np.asarray(inside + self.slopes[i] * beyond, dtype=np.float64)


def fit_surface(x: Floats, y: Floats, *, quadratic: bool) -> Surface:
    """The surface through measurements at ``x`` [n, 2], scattered over some columns in each row.

    Each row is a curve of its own; a row with few columns takes its slope from the others, in
    proportion to the row. Then the surface is made non-decreasing in both directions.
    """
    rows, columns = np.unique(x[:, 0]), np.unique(x[:, 1])
    if len(columns) == 1:
        columns = np.array([columns[0], columns[0] + 1.0])
    curves = [fit_curve(x[x[:, 0] == row, 1], y[x[:, 0] == row]) for row in rows]
    steep = [c.slope / row for c, row in zip(curves, rows, strict=True) if len(c.x) >= _MIN_POINTS]
    typical = float(np.median(steep)) if steep else 0.0
    curves = [
        c if len(c.x) >= _MIN_POINTS else Curve(c.x, c.y, typical * row) for c, row in zip(curves, rows, strict=True)
    ]
    values = _non_decreasing(np.stack([curve(columns) for curve in curves]))
    slopes = np.maximum.accumulate([curve.slope for curve in curves])
    if len(rows) == 1:
        rows, values = np.array([rows[0], rows[0] + 1.0]), np.repeat(values, 2, axis=0)
        slopes = np.repeat(slopes, 2)
    return Surface(rows, columns, values, np.asarray(slopes, dtype=np.float64), quadratic)


def _medians(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    order = np.lexsort((y, x))
    places, first, count = np.unique(x[order], return_index=True, return_counts=True)
    ranked = y[order]
    middle = (ranked[first + (count - 1) // 2] + ranked[first + count // 2]) / 2
    return places, middle


def _tail_slope(x: Floats, y: Floats) -> float:
    """Mean slope of the last half of the points."""
    if len(x) < _MIN_POINTS:
        return 0.0
    half = len(x) // 2
    return float((y[-1] - y[half]) / (x[-1] - x[half])) if x[-1] > x[half] else 0.0


def _non_decreasing(values: Floats) -> Floats:
    """The nearest surface that falls along neither axis (least squares).

    Dykstra's alternating projections onto "no row falls" and "no column falls"; a few rounds come as
    near as the measurements are good, and the middle of the envelopes takes away what is left.
    """
    surface, row_rest, column_rest = values, np.zeros_like(values), np.zeros_like(values)
    for _ in range(_ROUNDS):
        rows = _isotonic_rows(surface + row_rest)
        row_rest += surface - rows
        surface = _isotonic_rows((rows + column_rest).T).T
        column_rest += rows - surface
    above = np.maximum.accumulate(np.maximum.accumulate(surface, axis=0), axis=1)
    turned = surface[::-1, ::-1]
    below = np.minimum.accumulate(np.minimum.accumulate(turned, axis=0), axis=1)[::-1, ::-1]
    return np.asarray((above + below) / 2, dtype=np.float64)


def _isotonic_rows(values: Floats) -> Floats:
    return np.stack([isotonic_regression(row).x for row in values])


def _cell(axis: Floats, at: Floats) -> tuple[Ints, Floats]:
    """(index, fraction) of places inside the axis."""
    index = np.clip(np.searchsorted(axis, at, side="right") - 1, 0, len(axis) - 2)
    return index, (at - axis[index]) / (axis[index + 1] - axis[index])


if TYPE_CHECKING:
    from sklearn.ensemble import RandomForestRegressor

TREES, DEPTH, LEAST_SPLIT = 250, 32, 2
SEED = 0
_JOBS = -1


def fit_forest(x: Floats, y: Floats) -> RandomForestRegressor:
    """A forest at Vidur's grid point (250 trees, depth 32, split 2); its draws are fixed.

    Its ``oob_prediction_`` [n] are the means over the trees that did not see a row.

    Raises:
        MissingExtraError: scikit-learn is not installed.
    """
    try:
        from sklearn.ensemble import RandomForestRegressor
    except ImportError as error:
        raise MissingExtraError("the estimator random_forest", "profiles") from error
    forest = RandomForestRegressor(
        n_estimators=TREES,
        max_depth=DEPTH,
        min_samples_split=LEAST_SPLIT,
        oob_score=True,
        n_jobs=_JOBS,
        random_state=SEED,
    )
    return forest.fit(_columns(x), y)


def predict(forest: RandomForestRegressor, *axes: Floats) -> Floats:
    """The forest over the grid of its axes, read once for each of its cells.

    A forest is constant between two neighbouring thresholds of its trees, so that one place between
    each two of them stands for all.
    """
    forest.set_params(n_jobs=1)  # threads would add up the trees in any order
    thresholds = _thresholds(forest, len(axes))
    cells = [np.searchsorted(t, axis.astype(np.float32)) for t, axis in zip(thresholds, axes, strict=True)]
    picked = [np.unique(cell, return_index=True, return_inverse=True) for cell in cells]
    places = np.meshgrid(*(axis[first] for axis, (_, first, _) in zip(axes, picked, strict=True)), indexing="ij")
    flat = np.stack([place.ravel() for place in places], axis=1)
    values = np.asarray(forest.predict(flat.astype(np.float32)), dtype=np.float64).reshape(places[0].shape)
    return np.asarray(values[np.ix_(*(inverse for _, _, inverse in picked))], dtype=np.float64)


def _thresholds(forest: RandomForestRegressor, features: int) -> list[Floats]:
    found: list[list[Any]] = [[] for _ in range(features)]
    for tree in forest.estimators_:
        for feature in range(features):
            found[feature].append(tree.tree_.threshold[tree.tree_.feature == feature])
    return [np.unique(np.concatenate(parts)) for parts in found]


def _columns(x: Floats) -> npt.NDArray[np.float32]:
    return np.asarray(x, dtype=np.float32).reshape(len(x), -1)
