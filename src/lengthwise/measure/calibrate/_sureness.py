"""How sure a calibration is of its values: the spread of residuals, and what it makes of the values."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lengthwise.measure.calibrate._cloud import HUBER, Cloud, cloud, radius_of
from lengthwise.measure.calibrate._problem import FAMILIES, Problem
from lengthwise.measure.calibrate._runs import BLOCKS
from lengthwise.measure.calibrate.answer import METRICS

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
FLOOR = 0.02
"""No engine repeats itself closer than this; agreement beyond it tells nothing."""
NARROW = (0.08, 0.05, 0.05)
"""Radii of clouds, in the log of a factor, within which a line is straight."""
EFFECT_TOLD = 0.01
"""A parameter that moves predictions by less than 1 % is not told, unless leaving it out costs two deviations."""


def scale_at(problem: Problem, z: Floats) -> Floats:
    """[groups] robust spread of residuals about zero."""
    residuals, rows = problem.residuals(z), problem.rows
    out = np.full(len(METRICS) + 1, FLOOR)
    for g in range(len(out)):
        own = np.abs(residuals[rows.group == g])
        out[g] = max(FLOOR, 1.4826 * float(np.median(own))) if len(own) else FLOOR
    return out


def weights(problem: Problem, scale: Floats) -> Floats:
    return np.asarray(problem.rows.weight / scale[problem.rows.group])


def deviations(problem: Problem, z: Floats, found: Cloud, scale: Floats) -> tuple[Floats, Floats]:
    """[p] standard deviations of the values told: curvature's and that between blocks of time.

    And how many times as large their squares are as the curvature's alone: the noise that likeness brings.
    """
    out, noise = np.ones(len(z)), np.ones(len(z))
    rows, weight = problem.rows, weights(problem, scale)
    slopes = found.slopes[:, found.free] * weight[:, None]
    residuals = found.residuals(z) * weight
    robust = np.minimum(1.0, HUBER / np.maximum(np.abs(residuals), 1e-12))
    prior = np.eye(slopes.shape[1])
    bend = np.linalg.inv((slopes * robust[:, None]).T @ slopes + prior)
    pull = slopes * (robust * residuals)[:, None]
    pull[rows.group < len(METRICS)] *= FAMILIES  # groups by length and quantiles move with their requests
    blocks = _sums(pull, rows.block, rows.block)
    shared = np.array(
        [
            (slopes * (weight * EFFECT_TOLD)[:, None])[rows.group == g].sum(axis=0)
            for g in np.unique(rows.group)
        ]
    )  # what 1 % that all requests' seconds of a metric are off by would pull: a simulation is no closer
    known = shared.T @ shared + prior
    by_run = _sums(pull, rows.block // BLOCKS, rows.block)
    by_run = (by_run - by_run.mean(axis=0)) * np.sqrt(len(by_run) / max(1, len(by_run) - 1))
    spreads = (blocks.T @ blocks, by_run.T @ by_run)  # a machine drifts from run to run as well
    between = np.max([np.diag(bend @ (own + known) @ bend) for own in spreads], axis=0)
    variance = np.diag(bend) + between
    out[found.free], noise[found.free] = np.sqrt(variance), variance / np.diag(bend)
    return out, noise


def with_untold(problem: Problem, z: Floats, found: Cloud, asked: Mask, scale: Floats, seed: int) -> Floats:
    """[p] standard deviations of what was told if what was asked for and not told is not where it was left.

    Two parts of a step that runs do not tell apart stand in for each other: what one may be by what is believed of
    it, the other may be less or more.
    """
    if (found.free == asked).all():
        return np.zeros(len(z))
    radius = np.where(found.free, radius_of(problem, NARROW[-1], found), 1.0)
    return deviations(problem, z, cloud(problem, z, asked, radius, seed), scale)[0]


def _sums(pull: Floats, key: npt.NDArray[np.int64], block: npt.NDArray[np.int64]) -> Floats:
    """[keys, p] what the rows of blocks of time pull, by key."""
    return np.array([pull[(key == k) & (block >= 0)].sum(axis=0) for k in np.unique(key[block >= 0])])
