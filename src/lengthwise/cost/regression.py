"""Regressions of measured times: curves and surfaces that never fall, and random forests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.optimize import isotonic_regression

from lengthwise.schema.cost_tables import Floats, Ints
from lengthwise.schema.errors import MissingExtraError

if TYPE_CHECKING:
    from sklearn.ensemble import RandomForestRegressor

_MIN_POINTS = 3
_ROUNDS = 5


@dataclass(frozen=True)
class Curve:
    """A non-decreasing piecewise linear curve. It is constant before its first point, with ``slope`` after its last."""

    x: Floats
    y: Floats
    slope: float

    def __call__(self, at: Floats) -> Floats:
        """Return the values of the curve at the places ``at`` [n]."""
        beyond = np.maximum(at - self.x[-1], 0.0)
        return np.asarray(np.interp(at, self.x, self.y) + self.slope * beyond, dtype=np.float64)


def fit_curve(x: Floats, y: Floats) -> Curve:
    """Fit the non-decreasing curve that is nearest (least squares) to the median of ``y`` [n] at each ``x`` [n]."""
    order = np.lexsort((y, x))
    places, first, count = np.unique(x[order], return_index=True, return_counts=True)
    ranked = y[order]
    medians = (ranked[first + (count - 1) // 2] + ranked[first + count // 2]) / 2
    fitted = np.asarray(isotonic_regression(medians).x, dtype=np.float64)
    slope, half = 0.0, len(places) // 2  # the mean slope of the last half continues the curve
    if len(places) >= _MIN_POINTS and places[-1] > places[half]:
        slope = float((fitted[-1] - fitted[half]) / (places[-1] - places[half]))
    return Curve(places, fitted, slope)


@dataclass(frozen=True)
class Surface:
    """A surface that does not fall in rows or columns, linear between its points and constant before the first.

    After the last column it continues linearly, after the last row in proportion to the row. If ``quadratic``, the
    values of the first column continue with the row's square, as prefill attention does: a chunk of c tokens (row)
    after k cached tokens (column) has c (k + c / 2) pairs of a query and a key.
    """

    rows: Floats
    columns: Floats
    values: Floats
    slopes: Floats
    quadratic: bool

    def __call__(self, row: Floats, column: Floats) -> Floats:
        """Return the values of the surface at these places, whose shapes broadcast."""
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
    """Fit a surface to measurements ``y`` at ``x`` [n, 2] (row, column). Rows may have different columns."""
    rows, columns = np.unique(x[:, 0]), np.unique(x[:, 1])
    if len(columns) == 1:
        columns = np.array([columns[0], columns[0] + 1.0])
    curves = [fit_curve(x[x[:, 0] == row, 1], y[x[:, 0] == row]) for row in rows]
    steep = [c.slope / row for c, row in zip(curves, rows, strict=True) if len(c.x) >= _MIN_POINTS]
    typical = float(np.median(steep)) if steep else 0.0
    for at, (curve, row) in enumerate(zip(curves, rows, strict=True)):
        curves[at] = curve if len(curve.x) >= _MIN_POINTS else Curve(curve.x, curve.y, typical * row)
    values = _non_decreasing(np.stack([curve(columns) for curve in curves]))
    slopes = np.maximum.accumulate([curve.slope for curve in curves])
    if len(rows) == 1:
        rows, values = np.array([rows[0], rows[0] + 1.0]), np.repeat(values, 2, axis=0)
        slopes = np.repeat(slopes, 2)
    return Surface(rows, columns, values, np.asarray(slopes, dtype=np.float64), quadratic)


def _non_decreasing(values: Floats) -> Floats:
    """Return the nearest surface (least squares) that never falls along either axis, by Dykstra's projections."""

    def isotonic_rows(table: Floats) -> Floats:
        return np.stack([isotonic_regression(row).x for row in table])

    surface, row_rest, column_rest = values, np.zeros_like(values), np.zeros_like(values)
    for _ in range(_ROUNDS):
        rows = isotonic_rows(surface + row_rest)
        row_rest += surface - rows
        surface = isotonic_rows((rows + column_rest).T).T
        column_rest += rows - surface
    # A few rounds are as exact as the measurements; the mean of both envelopes removes the remaining violations.
    above = np.maximum.accumulate(np.maximum.accumulate(surface, axis=0), axis=1)
    turned = surface[::-1, ::-1]
    below = np.minimum.accumulate(np.minimum.accumulate(turned, axis=0), axis=1)[::-1, ::-1]
    return np.asarray((above + below) / 2, dtype=np.float64)


def _cell(axis: Floats, at: Floats) -> tuple[Ints, Floats]:
    index = np.clip(np.searchsorted(axis, at, side="right") - 1, 0, len(axis) - 2)
    return index, (at - axis[index]) / (axis[index + 1] - axis[index])


TREES, DEPTH, MIN_SPLIT = 250, 32, 2
GRID = {"n_estimators": (250, 500, 750), "max_depth": (8, 16, 32), "min_samples_split": (2, 5, 10)}  # Vidur's
GRID_FOLDS = 10  # Vidur's: contiguous ones, in the order of the rows
THREADS = -1  # one for each processor; scikit-learn's threads change the process's warning filters at the same time


def fit_forest(x: Floats, y: Floats, *, search_grid: bool = False) -> RandomForestRegressor:
    """Fit a forest with a fixed seed. Raises MissingExtraError without scikit-learn.

    ``search_grid`` takes the parameters of ``GRID`` with the least relative error over ``GRID_FOLDS`` folds, as Vidur
    does: 270 fits. Otherwise the forest has one point of that grid: ``TREES``, ``DEPTH`` and ``MIN_SPLIT``.
    """
    try:
        from sklearn.ensemble import RandomForestRegressor
        from sklearn.model_selection import GridSearchCV
    except ImportError as error:
        raise MissingExtraError("the estimator random_forest", "profiles") from error
    rows = np.asarray(x, dtype=np.float32).reshape(len(x), -1)
    chosen = {"n_estimators": TREES, "max_depth": DEPTH, "min_samples_split": MIN_SPLIT}
    if search_grid:
        folds = GRID_FOLDS if len(rows) >= GRID_FOLDS else 2
        one = RandomForestRegressor(n_jobs=1, random_state=0)  # threads would sum the trees in any order
        scoring = "neg_mean_absolute_percentage_error"
        search = GridSearchCV(one, GRID, scoring=scoring, cv=folds, refit=False, n_jobs=THREADS)
        chosen = search.fit(rows, y).best_params_
    return RandomForestRegressor(**chosen, oob_score=True, n_jobs=THREADS, random_state=0).fit(rows, y)


def predict(forest: RandomForestRegressor, *axes: Floats) -> Floats:
    """Return the forest's predictions over the grid of the axes. Points that no tree separates are computed once."""
    forest.set_params(n_jobs=1)  # threads would sum the trees in any order
    cells = []
    for feature, axis in enumerate(axes):
        trees = [tree.tree_ for tree in forest.estimators_]
        thresholds = np.unique(np.concatenate([tree.threshold[tree.feature == feature] for tree in trees]))
        cell = np.searchsorted(thresholds, axis.astype(np.float32))
        cells.append(np.unique(cell, return_index=True, return_inverse=True))
    places = np.meshgrid(*(axis[first] for axis, (_, first, _) in zip(axes, cells, strict=True)), indexing="ij")
    flat = np.stack([place.ravel() for place in places], axis=1)
    values = np.asarray(forest.predict(flat.astype(np.float32)), dtype=np.float64).reshape(places[0].shape)
    return np.asarray(values[np.ix_(*(inverse for _, _, inverse in cells))], dtype=np.float64)
