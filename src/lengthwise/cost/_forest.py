"""Vidur's estimator: random forests, one an operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lengthwise.schema.cost_tables import Floats
from lengthwise.schema.errors import MissingExtraError

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
    places = np.meshgrid(
        *(axis[first] for axis, (_, first, _) in zip(axes, picked, strict=True)), indexing="ij"
    )
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
