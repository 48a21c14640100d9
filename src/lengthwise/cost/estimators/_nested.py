"""Interpolation over a ragged grid: along one coordinate after another."""

from __future__ import annotations

import numpy as np

from lengthwise.schema.cost_tables import Floats


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
