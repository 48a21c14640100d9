"""The estimators by name: from points to a function that tells the seconds at others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lengthwise.cost import regression
from lengthwise.cost.estimators.points import PARTS, Points, combined, slopes
from lengthwise.schema.cost_tables import Floats
from lengthwise.schema.profile import PRODUCTS

_MIN_POINTS = 3
_SCALES = (1e9, 1e3, 1e3)
_LEAST_SECONDS = 1e-9


@dataclass(frozen=True)
class Linear:
    """``a[B] x + b[B]`` between the batches that were measured, one function of all outside of them.

    ``batches`` [b] ascending; ``coefficients`` [b + 1, 4] of (1, FLOPs, B s, S), the last row for batches
    of which too little was seen.
    """

    batches: Floats
    coefficients: Floats

    def __call__(self, at: Points) -> Floats:
        """[n] seconds at these points, linear between two batches."""
        features = _features(at)
        pooled = features @ self.coefficients[-1]
        if not len(self.batches):
            return np.asarray(np.maximum(pooled, _LEAST_SECONDS), dtype=np.float64)
        inside = (at.batch >= self.batches[0]) & (at.batch <= self.batches[-1])
        low = np.clip(np.searchsorted(self.batches, at.batch, side="right") - 1, 0, len(self.batches) - 1)
        high = np.minimum(low + 1, len(self.batches) - 1)
        width = self.batches[high] - self.batches[low]
        share = np.divide(at.batch - self.batches[low], width, out=np.zeros(len(at)), where=width > 0)
        by_batch = (1 - share) * np.einsum("ij,ij->i", features, self.coefficients[low])
        by_batch += share * np.einsum("ij,ij->i", features, self.coefficients[high])
        return np.asarray(np.maximum(np.where(inside, by_batch, pooled), _LEAST_SECONDS), dtype=np.float64)


def fit_linear(points: Points) -> Linear:
    """The functions nearest to the measured seconds, relative to them; no coefficient is negative.

    An operator over one coordinate has one function: there the batch is the coordinate itself. One over
    several has a function for each batch of three points or more.
    """
    points = points.take(points.seconds > 0)
    pooled = _solution(points)
    if points.axes.shape[1] == 1:
        return Linear(np.zeros(0), pooled[None, :])
    batches, count = np.unique(points.batch, return_counts=True)
    batches = batches[count >= _MIN_POINTS]
    own = [_solution(points.take(points.batch == batch)) for batch in batches]
    return Linear(batches, np.stack([*own, pooled]))


def _solution(points: Points) -> npt.NDArray[np.float64]:
    from scipy.optimize import nnls

    features = _features(points) / points.seconds[:, None]
    size = np.maximum(np.abs(features).max(axis=0, initial=0.0), 1e-300)
    return np.asarray(nnls(features / size, np.ones(len(points)))[0] / size, dtype=np.float64)


def _features(points: Points) -> Floats:
    columns = (points.flops, points.padded, points.total)
    scaled = [column / scale for column, scale in zip(columns, _SCALES, strict=True)]
    return np.stack([np.ones(len(points)), *scaled], axis=1)


def nested(at: Floats, values: Floats, where: Floats) -> Floats:
    """[q] values at ``where`` [q, d], linear between the nearest of ``at`` [n, d] on each coordinate.

    The first coordinate picks the two groups of points around a place, the second two within each, and so
    on, so that points need not form a grid. Repeated points count by their mean; beyond the outermost
    point its value goes on.
    """
    if at.shape[1] == 0:
        return np.full(len(where), values.mean())
    axis, group = np.unique(at[:, 0], return_inverse=True)
    place = np.clip(where[:, 0], axis[0], axis[-1])
    low = np.clip(np.searchsorted(axis, place, side="right") - 1, 0, max(len(axis) - 2, 0))
    high = np.minimum(low + 1, len(axis) - 1)
    width = axis[high] - axis[low]
    share = np.divide(place - axis[low], width, out=np.zeros(len(where)), where=width > 0)
    if at.shape[1] == 1:
        mean = np.bincount(group.ravel(), values) / np.bincount(group.ravel())
        return np.asarray((1 - share) * mean[low] + share * mean[high], dtype=np.float64)
    found = np.zeros(len(where))
    for index, weight in ((low, 1 - share), (high, share)):
        for one in np.unique(index[weight > 0]):
            asked = (index == one) & (weight > 0)
            own = group.ravel() == one
            found[asked] += weight[asked] * nested(at[own, 1:], values[own], where[asked, 1:])
    return found


_MOST_STEPS = 200
_THRESHOLD = 1e-10
"""A step that lowers the sum by a smaller share ends the descent."""

_LEAST_DAMPING, _MOST_DAMPING = 1e-9, 1e9


def descend(
    residuals: Callable[[Floats], Floats],
    slopes: Callable[[Floats], Floats],
    start: Floats,
    *,
    bound: float,
    scale: float,
) -> Floats:
    """Where the sum of 2 scale^2 (sqrt(1 + (r / scale)^2) - 1) over the residuals is least, near ``start``.

    Levenberg's damped steps on normal equations: with a handful of unknowns that takes a tenth of the time of a
    decomposition of all rows, and no threads.

    Args:
        residuals: [n] at given unknowns.
        slopes: [n, p] of the residuals by the unknowns.
        start: [p] unknowns.
        bound: The unknowns stay within -bound and bound.
        scale: Residuals beyond it count by their size rather than their square.
    """
    at, off = start, residuals(start) / scale
    total, damping = _total(off), 1e-3
    for _ in range(_MOST_STEPS):
        slope = slopes(at) / scale
        curved, gradient = _normal(slope, off)
        while damping < _MOST_DAMPING:
            bent = curved + damping * np.diag(np.diag(curved) + 1e-12)
            trial = np.clip(at - np.linalg.solve(bent, gradient), -bound, bound)
            new = residuals(trial) / scale
            if (lower := _total(new)) < total:
                break
            damping *= 4
        else:
            return at
        gained, at, off = total - lower, trial, new
        total, damping = lower, max(damping / 4, _LEAST_DAMPING)
        if gained <= _THRESHOLD * total:
            return at
    return at


def _total(off: Floats) -> float:
    return float(np.sum(np.sqrt(1 + off * off) - 1))


def _normal(slope: Floats, off: Floats) -> tuple[Floats, Floats]:
    """(curvature, gradient) of the sum."""
    weight = 1 / np.sqrt(1 + off * off)
    return slope.T @ (slope * (weight**3)[:, None]), slope.T @ (weight * off)


PRIOR = 0.02
"""How much a factor is drawn to 1: leaving the roofline e-fold costs as much as a row that is 2 % off."""

_LARGEST_FACTOR = 100.0
_OUTLIER = 0.1
"""A log error beyond this counts by its size, no longer by its square."""

_MOST_ROWS = 3000


@dataclass(frozen=True)
class Physics:
    """Seconds as the roofline's parts (PARTS), each times one fitted factor."""

    factors: Floats

    def __call__(self, at: Points) -> Floats:
        """[n] seconds at these points."""
        return combined(at.parts, self.factors)

    def report(self) -> dict[str, float]:
        """The factors by part: below 1, the part is faster than the roofline has it."""
        return dict(zip(PARTS, self.factors.tolist(), strict=True))


def fit_physics(points: Points) -> Physics:
    """The factors that come nearest to the measured seconds: least squares of log time.

    A part that no row shows keeps the roofline's own constant, since PRIOR draws each log factor to 0;
    that is what lets a fit on one TP degree, model or token range speak of another.
    """
    timed = np.flatnonzero(points.seconds > 0)
    some = timed[:: max(1, len(timed) // _MOST_ROWS)]
    parts, log_seconds = points.parts[some], np.log(points.seconds[some])
    pull = PRIOR * np.sqrt(max(len(some), 1))

    def residuals(log_factors: Floats) -> Floats:
        off = np.log(combined(parts, np.exp(log_factors)) + 1e-12) - log_seconds
        return np.concatenate([off, pull * log_factors])

    def jacobian(log_factors: Floats) -> Floats:
        factors = np.exp(log_factors)
        of_log = slopes(parts, factors) / (combined(parts, factors) + 1e-12)[:, None]
        return np.concatenate([of_log, pull * np.eye(len(PARTS))])

    used = parts.max(axis=0, initial=0.0) > 0
    bound = np.log(_LARGEST_FACTOR)
    found = descend(residuals, jacobian, np.zeros(len(PARTS)), bound=bound, scale=_OUTLIER)
    return Physics(np.where(used, np.exp(found), 1.0))


FitResult = Callable[[Points], Floats]
Learner = Callable[[Points], FitResult]


@dataclass(frozen=True)
class Interpolated:
    """What was measured over what the physics say, between the points; the physics lead elsewhere.

    ``at`` [n, e + d] logs of shape and axes; ``log_ratio`` [n].
    """

    physics: Physics
    at: Floats
    log_ratio: Floats

    def __call__(self, at: Points) -> Floats:
        """[n] seconds at these points."""
        return np.asarray(self.physics(at) * np.exp(nested(self.at, self.log_ratio, _logs(at))))


def fit_tables(points: Points) -> Interpolated:
    """Measured seconds between their points, by their ratio to a physics curve over log coordinates."""
    points = points.take(points.seconds > 0)
    physics = fit_physics(points)
    return Interpolated(physics, _logs(points), np.log(points.seconds / physics(points)))


def _logs(points: Points) -> Floats:
    return np.asarray(np.log1p(np.concatenate([points.shape, points.axes], axis=1)), dtype=np.float64)


def fit_monotone(points: Points) -> FitResult:
    """Curves and surfaces that never fall (cost/_monotone.py); knows one shape, and one or two axes."""
    from lengthwise.cost import regression as _monotone  # imports scipy

    axes = points.axes
    if axes.shape[1] == 1:
        curve = _monotone.fit_curve(axes[:, 0], points.seconds)
        return lambda at: np.maximum(curve(at.axes[:, 0]), _LEAST_SECONDS)
    quadratic = points.operator.startswith("prefill")
    surface = _monotone.fit_surface(axes[:, :2], points.seconds, quadratic=quadratic)
    return lambda at: np.maximum(surface(at.axes[:, 0], at.axes[:, 1]), _LEAST_SECONDS)


def fit_forest(points: Points) -> FitResult:
    """Vidur's random forest over shape and axes (cost/_forest.py); constant beyond its points."""
    forest = regression.fit_forest(_columns(points), points.seconds)
    forest.set_params(n_jobs=1)  # threads would add up the trees in any order
    return lambda at: np.asarray(forest.predict(_columns(at).astype(np.float32)), dtype=np.float64)


def _columns(points: Points) -> Floats:
    return np.concatenate([points.shape, points.axes], axis=1)


LEARNERS: dict[str, Learner] = {
    "physics": fit_physics,
    "linear": fit_linear,
    "monotone": fit_monotone,
    "tables": fit_tables,
    "forest": fit_forest,
}


def usable(name: str, points: Points) -> bool:
    """Whether an estimator can learn from these points and speak of others of their kind."""
    if name == "monotone":
        one_shape = len(np.unique(points.shape, axis=0)) <= 1
        return one_shape and points.axes.shape[1] <= 2 and len(np.unique(points.axes, axis=0)) > 1
    return len(points) > 1


@dataclass(frozen=True)
class Disaggregated:
    """Seconds of one token as they were measured, of more as they were learnt."""

    single_s: float
    more: FitResult

    def __call__(self, at: Points) -> Floats:
        """[n] seconds at these points."""
        return np.where(at.axes[:, 0] == 1, self.single_s, self.more(at))


def apart(points: Points) -> tuple[Points, Points] | None:
    """(those of one token, the others) of a product's points; None: one of them is not there."""
    single = points.axes[:, 0] == 1
    others = points.take(~single)
    if points.operator not in PRODUCTS or not single.any() or others.places().max(initial=-1) < 1:
        return None
    return points.take(single), others


def joined(single: Points, others: Points, more: FitResult) -> Disaggregated:
    """Of one token the median of what was measured, but never more than any of more tokens."""
    return Disaggregated(min(float(np.median(single.seconds)), float(others.seconds.min())), more)
