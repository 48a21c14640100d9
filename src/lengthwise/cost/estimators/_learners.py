"""The estimators by name: from points to a function that tells the seconds at others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lengthwise.cost import _forest
from lengthwise.cost.estimators._linear import fit_linear
from lengthwise.cost.estimators._nested import nested
from lengthwise.cost.estimators._physics import Physics, fit_physics
from lengthwise.cost.estimators._points import Points
from lengthwise.schema.cost_tables import Floats

Fitted = Callable[[Points], Floats]
Learner = Callable[[Points], Fitted]

_LEAST_SECONDS = 1e-9


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


def fit_monotone(points: Points) -> Fitted:
    """Curves and surfaces that never fall (cost/_monotone.py); knows one shape, and one or two axes."""
    from lengthwise.cost import _monotone  # imports scipy

    axes = points.axes
    if axes.shape[1] == 1:
        curve = _monotone.fit_curve(axes[:, 0], points.seconds)
        return lambda at: np.maximum(curve(at.axes[:, 0]), _LEAST_SECONDS)
    quadratic = points.operator.startswith("prefill")
    surface = _monotone.fit_surface(axes[:, :2], points.seconds, quadratic=quadratic)
    return lambda at: np.maximum(surface(at.axes[:, 0], at.axes[:, 1]), _LEAST_SECONDS)


def fit_forest(points: Points) -> Fitted:
    """Vidur's random forest over shape and axes (cost/_forest.py); constant beyond its points."""
    forest = _forest.fit_forest(_columns(points), points.seconds)
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
