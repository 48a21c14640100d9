"""Estimators: each fits the measured points of one operator and returns a function that predicts seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lengthwise.cost.estimators.points import PARTS, Points, combined, slopes
from lengthwise.schema.cost_tables import Floats
from lengthwise.schema.profile import PRODUCTS

Predictor = Callable[[Points], Floats]  # returns [n] seconds at n points

Fitter = Callable[[Points], Predictor]

_MIN_POINTS = 3
_MIN_SECONDS = 1e-9


@dataclass(frozen=True)
class Linear:
    """SamuLLM's linear model of an operator's seconds, with coefficients for each batch size.

    Between two of ``batches`` the predictions are interpolated. Outside their range, the fit to all points applies.
    """

    batches: Floats  # [b], ascending
    coefficients: Floats  # [b + 1, 4] coefficients of ``_linear_features``; the last row is the pooled fit

    def __call__(self, at: Points) -> Floats:
        """Return [n] the predicted seconds at these points."""
        features = _linear_features(at)
        pooled = features @ self.coefficients[-1]
        if not len(self.batches):
            return np.asarray(np.maximum(pooled, _MIN_SECONDS), dtype=np.float64)
        inside = (at.batch >= self.batches[0]) & (at.batch <= self.batches[-1])
        low, high, share = _bracket(self.batches, at.batch)
        by_batch = (1 - share) * np.einsum("ij,ij->i", features, self.coefficients[low])
        by_batch += share * np.einsum("ij,ij->i", features, self.coefficients[high])
        return np.asarray(np.maximum(np.where(inside, by_batch, pooled), _MIN_SECONDS), dtype=np.float64)


def fit_linear(points: Points) -> Linear:
    """Fit non-negative coefficients by relative error: for batch sizes with three points or more, and for all."""
    points = points.take(points.seconds > 0)
    pooled = _nonnegative_fit(points)
    if points.axes.shape[1] == 1:  # the batch is the coordinate itself
        return Linear(np.zeros(0), pooled[None, :])
    batches, count = np.unique(points.batch, return_counts=True)
    batches = batches[count >= _MIN_POINTS]
    own = [_nonnegative_fit(points.take(points.batch == batch)) for batch in batches]
    return Linear(batches, np.stack([*own, pooled]))


def _nonnegative_fit(points: Points) -> Floats:
    from scipy.optimize import nnls

    features = _linear_features(points) / points.seconds[:, None]
    size = np.maximum(np.abs(features).max(axis=0, initial=0.0), 1e-300)
    return np.asarray(nnls(features / size, np.ones(len(points)))[0] / size, dtype=np.float64)


def _linear_features(points: Points) -> Floats:
    return np.stack([np.ones(len(points)), points.flops / 1e9, points.padded / 1e3, points.total / 1e3], axis=1)


def _bracket(axis: Floats, at: Floats) -> tuple[np.ndarray, np.ndarray, Floats]:
    """Return the neighbours of each value on an ascending axis: (lower index, upper index, weight of the upper)."""
    low = np.clip(np.searchsorted(axis, at, side="right") - 1, 0, len(axis) - 1)
    high = np.minimum(low + 1, len(axis) - 1)
    width = axis[high] - axis[low]
    return low, high, np.divide(at - axis[low], width, out=np.zeros(len(at)), where=width > 0)


def interpolate_nested(at: Floats, values: Floats, where: Floats) -> Floats:
    """Interpolate the ``values`` of points ``at`` [n, d] at ``where`` [q, d], coordinate by coordinate."""
    # The points need not form a grid: the first coordinate selects two groups of points, the second two within each.
    if at.shape[1] == 0:
        return np.full(len(where), values.mean())
    axis, group = np.unique(at[:, 0], return_inverse=True)
    low, high, share = _bracket(axis, np.clip(where[:, 0], axis[0], axis[-1]))
    if at.shape[1] == 1:
        mean = np.bincount(group.ravel(), values) / np.bincount(group.ravel())
        return np.asarray((1 - share) * mean[low] + share * mean[high], dtype=np.float64)
    found = np.zeros(len(where))
    for index, weight in ((low, 1 - share), (high, share)):
        for one in np.unique(index[weight > 0]):
            near = (index == one) & (weight > 0)
            own = group.ravel() == one
            found[near] += weight[near] * interpolate_nested(at[own, 1:], values[own], where[near, 1:])
    return found


_Function = Callable[[Floats], Floats]


def _minimize(residuals: _Function, jacobian: _Function, start: Floats, *, bound: float, scale: float) -> Floats:
    """Minimize the sum of 2 scale^2 (sqrt(1 + (r / scale)^2) - 1) over residuals r by Levenberg's damped steps."""

    # For few unknowns, normal equations take a tenth of the time of a decomposition of all rows, and no threads.
    def loss(scaled: Floats) -> float:
        return float(np.sum(np.sqrt(1 + scaled * scaled) - 1))

    at, scaled = start, residuals(start) / scale
    total, damping = loss(scaled), 1e-3
    for _ in range(200):
        slope, weight = jacobian(at) / scale, 1 / np.sqrt(1 + scaled * scaled)
        hessian, gradient = slope.T @ (slope * (weight**3)[:, None]), slope.T @ (weight * scaled)
        while damping < 1e9:
            damped = hessian + damping * np.diag(np.diag(hessian) + 1e-12)
            trial = np.clip(at - np.linalg.solve(damped, gradient), -bound, bound)
            new = residuals(trial) / scale
            if (lower := loss(new)) < total:
                break
            damping *= 4
        else:
            return at
        decrease, at, scaled = total - lower, trial, new
        total, damping = lower, max(damping / 4, 1e-9)
        if decrease <= 1e-10 * total:
            return at
    return at


PRIOR = 0.02  # weight of the prior that factors are 1: a factor of e costs as much as all rows being 2 % off
_MAX_FACTOR = 100.0
_MAX_ROWS = 3000
_OUTLIER = 0.1  # larger log errors count linearly, not by their square


@dataclass(frozen=True)
class Physics:
    """Predicts seconds by the roofline, with a fitted factor for each part of PARTS."""

    factors: Floats

    def __call__(self, at: Points) -> Floats:
        """Return [n] the predicted seconds at these points."""
        return combined(at.parts, self.factors)


def fit_physics(points: Points) -> Physics:
    """Fit the factors of PARTS by robust least squares on log seconds."""
    timed = np.flatnonzero(points.seconds > 0)
    sample = timed[:: max(1, len(timed) // _MAX_ROWS)]
    parts, log_seconds = points.parts[sample], np.log(points.seconds[sample])
    pull = PRIOR * np.sqrt(max(len(sample), 1))

    def residuals(log_factors: Floats) -> Floats:
        error = np.log(combined(parts, np.exp(log_factors)) + 1e-12) - log_seconds
        return np.concatenate([error, pull * log_factors])

    def jacobian(log_factors: Floats) -> Floats:
        factors = np.exp(log_factors)
        of_log = slopes(parts, factors) / (combined(parts, factors) + 1e-12)[:, None]
        return np.concatenate([of_log, pull * np.eye(len(PARTS))])

    # A part that no row contains retains factor 1, so that the fit also applies to other TP degrees and models.
    used = parts.max(axis=0, initial=0.0) > 0
    found = _minimize(residuals, jacobian, np.zeros(len(PARTS)), bound=np.log(_MAX_FACTOR), scale=_OUTLIER)
    return Physics(np.where(used, np.exp(found), 1.0))


@dataclass(frozen=True)
class Interpolated:
    """Predicts seconds as ``Physics`` times the interpolated ratio of measured seconds to ``Physics``."""

    physics: Physics
    at: Floats  # [n, e + d] logs of shape and axes
    log_ratio: Floats  # [n]

    def __call__(self, at: Points) -> Floats:
        """Return [n] the predicted seconds at these points."""
        ratio = np.exp(interpolate_nested(self.at, self.log_ratio, np.log1p(at.features)))
        return np.asarray(self.physics(at) * ratio)


def fit_tables(points: Points) -> Interpolated:
    """Fit ``Physics``, and interpolate the ratio of measured seconds to it over log coordinates."""
    points = points.take(points.seconds > 0)
    physics = fit_physics(points)
    return Interpolated(physics, np.log1p(points.features), np.log(points.seconds / physics(points)))


def fit_monotone(points: Points) -> Predictor:
    """Fit a non-decreasing curve or surface. The points must have one shape, and one or two axes."""
    from lengthwise.cost import regression  # imports scipy

    axes = points.axes
    if axes.shape[1] == 1:
        curve = regression.fit_curve(axes[:, 0], points.seconds)
        return lambda at: np.maximum(curve(at.axes[:, 0]), _MIN_SECONDS)
    surface = regression.fit_surface(axes[:, :2], points.seconds, quadratic=points.operator.startswith("prefill"))
    return lambda at: np.maximum(surface(at.axes[:, 0], at.axes[:, 1]), _MIN_SECONDS)


def fit_forest(points: Points) -> Predictor:
    """Fit Vidur's random forest over shape and axes. Its predictions are constant beyond the points."""
    from lengthwise.cost import regression  # imports scipy

    forest = regression.fit_forest(points.features, points.seconds)
    forest.set_params(n_jobs=1)  # threads would sum the trees in any order
    return lambda at: np.asarray(forest.predict(at.features.astype(np.float32)), dtype=np.float64)


FITTERS: dict[str, Fitter] = {"physics": fit_physics, "linear": fit_linear, "monotone": fit_monotone}
FITTERS |= {"tables": fit_tables, "forest": fit_forest}


def can_fit(name: str, points: Points) -> bool:
    """Return whether an estimator can fit these points."""
    if name == "monotone":
        one_shape = len(np.unique(points.shape, axis=0)) <= 1
        return one_shape and points.axes.shape[1] <= 2 and len(np.unique(points.axes, axis=0)) > 1
    return len(points) > 1


def split_single_token(points: Points) -> tuple[Points, Points] | None:
    """Split points into (one token, more tokens). Return None for another operator, or too few of a kind."""
    single = points.axes[:, 0] == 1
    more = points.take(~single)
    if points.operator not in PRODUCTS or not single.any() or more.places().max(initial=-1) < 1:
        return None
    return points.take(single), more


def with_single_token(single: Points, more: Points, predict: Predictor) -> Predictor:
    """Return ``predict`` with the measured median for one token, but at most the shortest time of more tokens."""
    single_s = min(float(np.median(single.seconds)), float(more.seconds.min()))
    return lambda at: np.where(at.axes[:, 0] == 1, single_s, predict(at))
