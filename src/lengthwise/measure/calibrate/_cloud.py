"""A straight line through many simulations: what residuals do when single requests' luck is averaged out.

Which step a request catches turns on microseconds, so that residuals jump where parameters move by little. Slopes of
a cloud of points see through that; slopes between two points do not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lengthwise.measure.calibrate._problem import Problem

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
HUBER = 1.5
REACH_Z = 6.0
POINTS_A_PARAMETER = 8
SECONDS_WIDER = 6.0
STEPS = 30


@dataclass(frozen=True)
class Cloud:
    """A linear model of residuals about ``centre``: ``at + slopes @ (z - centre)``.

    ``slopes`` [m, p] are 0 for parameters that did not move; ``radius`` [p] is how far the points lay.
    """

    centre: Floats
    at: Floats
    slopes: Floats
    radius: Floats
    free: Mask

    def residuals(self, z: Floats) -> Floats:
        """[m] what the line says."""
        return np.asarray(self.at + self.slopes @ (z - self.centre))


def radius_of(problem: Problem, log_radius: float, known: Cloud | None = None) -> Floats:
    """[p] how far a cloud goes: ``log_radius`` in the log of a factor, six times as far for seconds.

    Farther for parameters that a line is known of and that move little: as far as makes such a difference.
    """
    seconds = np.array([knob.unit == "s" for knob in problem.knobs])
    sd = np.array([knob.log_sd for knob in problem.knobs])
    least = log_radius * np.where(seconds, SECONDS_WIDER, 1.0) / sd
    if known is None:
        return np.asarray(least)
    moves = np.maximum(1e-9, np.sqrt(np.mean(known.slopes**2, axis=0)))
    return np.asarray(np.maximum(least, np.minimum(np.where(seconds, 0.5, 1.0), log_radius / moves)))


def cloud(problem: Problem, centre: Floats, free: Mask, radius: Floats, seed: int) -> Cloud:
    """The line through simulations of points drawn about a centre, up to ``radius`` [p] from it."""
    p = int(free.sum())
    count = points_for(free)
    draws = 2 * spread(count, p, seed) - 1
    points = np.repeat(centre[None], count, axis=0)
    points[:, free] += draws * radius[free]
    told = np.array([problem.residuals(point) for point in np.clip(points, -REACH_Z, REACH_Z)])
    line = np.linalg.lstsq(np.column_stack([np.ones(count), draws]), told, rcond=None)[0]
    slopes = np.zeros((told.shape[1], len(centre)))
    slopes[:, free] = line[1:].T / radius[free]
    return Cloud(centre, line[0], slopes, radius, free)


def points_for(free: Mask) -> int:
    """How many simulations a line over so many parameters takes."""
    return POINTS_A_PARAMETER * (int(free.sum()) + 1)


def spread(count: int, dimensions: int, seed: int) -> Floats:
    """[count, dimensions] points of a Latin hypercube: in each dimension one in each of ``count`` equal parts."""
    rng = np.random.default_rng(seed)
    parts = np.column_stack([rng.permutation(count) for _ in range(dimensions)])
    return np.asarray((parts + rng.random((count, dimensions))) / count)


def settle(found: Cloud, weight: Floats) -> tuple[Floats, float]:
    """Where Huber's loss of the line and the prior's square are least within two radii, and how much that is."""
    low = np.maximum(-REACH_Z, found.centre - 2 * found.radius)[found.free]
    high = np.minimum(REACH_Z, found.centre + 2 * found.radius)[found.free]
    slopes = found.slopes[:, found.free] * weight[:, None]
    z = found.centre.copy()
    for _ in range(STEPS):
        residuals = found.residuals(z) * weight
        robust = np.minimum(1.0, HUBER / np.maximum(np.abs(residuals), 1e-12))
        bend = (slopes * robust[:, None]).T @ slopes + np.eye(slopes.shape[1])
        pull = (slopes * robust[:, None]).T @ residuals + z[found.free]
        moved = np.clip(z[found.free] - np.linalg.solve(bend, pull), low, high)
        done = np.abs(moved - z[found.free]).max(initial=0.0) < 1e-6
        z[found.free] = moved
        if done:
            break
    return z, loss(found.residuals(z) * weight, z)


def loss(residuals: Floats, z: Floats) -> float:
    """Huber's loss of residuals in their own spread, and the prior's square; smaller is better."""
    size = np.abs(residuals)
    data = np.where(size <= HUBER, size**2, 2 * HUBER * size - HUBER**2)
    return float(data.sum() + (z**2).sum())
