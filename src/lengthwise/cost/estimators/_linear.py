"""SamuLLM's cost model: for each batch a linear function of FLOPs, of padded tokens and of total tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lengthwise.cost.estimators._points import Points
from lengthwise.schema.cost_tables import Floats

_LEAST_POINTS = 3
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
    pooled = _solved(points)
    if points.axes.shape[1] == 1:
        return Linear(np.zeros(0), pooled[None, :])
    batches, count = np.unique(points.batch, return_counts=True)
    batches = batches[count >= _LEAST_POINTS]
    own = [_solved(points.take(points.batch == batch)) for batch in batches]
    return Linear(batches, np.stack([*own, pooled]))


def _solved(points: Points) -> npt.NDArray[np.float64]:
    from scipy.optimize import nnls

    features = _features(points) / points.seconds[:, None]
    size = np.maximum(np.abs(features).max(axis=0, initial=0.0), 1e-300)
    return np.asarray(nnls(features / size, np.ones(len(points)))[0] / size, dtype=np.float64)


def _features(points: Points) -> Floats:
    columns = (points.flops, points.padded, points.total)
    scaled = [column / scale for column, scale in zip(columns, _SCALES, strict=True)]
    return np.stack([np.ones(len(points)), *scaled], axis=1)
