"""The values that bring simulations closest to what was measured, and how sure they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lengthwise.measure.calibrate._cloud import (
    HUBER,
    Cloud,
    cloud,
    loss,
    points_for,
    radius_of,
    settle,
    spread,
)
from lengthwise.measure.calibrate._problem import FAMILIES, Problem
from lengthwise.measure.calibrate.answer import METRICS

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
FLOOR = 0.02
"""No engine repeats itself closer than this; agreement beyond it tells nothing."""
FIRST_SCALE = (0.2, 0.1, 0.15, 0.15)
SPREAD_Z, STARTS = 2.0, 2
WIDE, NARROW = (0.3, 0.2, 0.12), (0.08, 0.05, 0.05)
"""Radii of the clouds, in the log of a factor: from where a start may lie to where a line is straight."""
EFFECT_TOLD, COST_TOLD, TRIM = 0.01, 4.0, 0.95
"""A parameter that moves predictions by less than 1 % is not told, unless leaving it out costs two deviations."""


@dataclass(frozen=True)
class Solution:
    """Where the search ended.

    Attributes:
        z: [p] values in prior standard deviations from their centres.
        sd: [p] standard deviations of ``z``; 1 where nothing was told.
        told: [p] which parameters the runs could tell.
        effect: [p] by how much predictions move (rms, in log) with each parameter's prior deviation.
    """

    z: Floats
    sd: Floats
    told: Mask
    effect: Floats


def solve(problem: Problem, free: Sequence[str], seed: int) -> Solution:
    """The most probable values: Huber's loss on residuals in units of their own spread, and the prior.

    Parameters outside ``free`` stay at their centres. One that moves nothing is put back to its centre, one
    after the other, unless that makes the agreement worse.
    """
    names = [knob.name for knob in problem.knobs]
    told = np.array([name in free for name in names])
    z, scale = _search(problem, told, seed)
    z, cost, found = _narrow(problem, z, told, scale, seed)
    effect, kept = np.zeros(len(names)), np.zeros(len(names), dtype=np.bool_)
    while True:
        now = _effects(found.slopes, told)
        effect[told] = now[told]
        weak = np.flatnonzero(told & ~kept & (now < EFFECT_TOLD))
        if not len(weak):
            return Solution(z, _deviations(problem, z, found, scale), told, effect)
        least = weak[np.argmin(now[weak])]
        fewer, back = told.copy(), z.copy()
        fewer[least], back[least] = False, 0.0
        if not fewer.any():
            return Solution(back, np.ones(len(z)), fewer, effect)
        trial = _narrow(problem, back, fewer, scale, seed)
        if trial[1] > cost + COST_TOLD:
            kept[least] = True
        else:
            told, (z, cost, found) = fewer, trial


def _search(problem: Problem, free: Mask, seed: int) -> tuple[Floats, Floats]:
    """From draws over what is believed, downhill by wide clouds from the best of them; and the spread there."""
    scale = np.array(FIRST_SCALE)
    draws = spread(points_for(free), int(free.sum()), seed)
    points = np.zeros((len(draws) + 1, len(free)))
    points[1:, free] = (2 * draws - 1) * SPREAD_Z
    weight = _weight(problem, scale)
    order = np.argsort([loss(problem.residuals(z) * weight, z) for z in points], kind="stable")
    ends = []
    for z in (points[i] for i in order[:STARTS]):
        end, cost = z, 0.0
        for radius in WIDE:
            end, cost = settle(cloud(problem, end, free, radius_of(problem, radius), seed), weight)
        ends.append((cost, tuple(end)))
    best = np.array(min(ends)[1])
    return best, _scale(problem, best)


def _narrow(problem: Problem, z: Floats, free: Mask, scale: Floats, seed: int) -> tuple[Floats, float, Cloud]:
    """Downhill by narrowing clouds; the last one, its best point, and the loss there."""
    found: Cloud | None = None
    for turn, radius in enumerate(NARROW):
        found = cloud(problem, z, free, radius_of(problem, radius, found), seed + turn)
        z, cost = settle(found, _weight(problem, scale))
    assert found is not None  # there are turns
    return z, cost, found


def _scale(problem: Problem, z: Floats) -> Floats:
    """[groups] robust spread of residuals about zero."""
    residuals, rows = problem.residuals(z), problem.rows
    out = np.full(len(METRICS) + 1, FLOOR)
    for g in range(len(out)):
        own = np.abs(residuals[rows.group == g])
        out[g] = max(FLOOR, 1.4826 * float(np.median(own))) if len(own) else FLOOR
    return out


def _weight(problem: Problem, scale: Floats) -> Floats:
    return np.asarray(problem.rows.weight / scale[problem.rows.group])


def _effects(slopes: Floats, free: Mask) -> Floats:
    """[p] root mean square by which residuals move with one parameter's deviation, the others following.

    The others follow within their own prior deviations, for agreement to within EFFECT_TOLD; the rows that move
    most, which may be single requests' luck, are left out.
    """
    out = np.zeros(slopes.shape[1])
    rows = len(slopes)
    for k in np.flatnonzero(free):
        others = [j for j in np.flatnonzero(free) if j != k]
        a = np.vstack([slopes[:, others], EFFECT_TOLD * np.sqrt(rows) * np.eye(len(others))])
        b = np.concatenate([slopes[:, k], np.zeros(len(others))])
        follow = np.linalg.lstsq(a, b, rcond=None)[0] if others else np.zeros(0)
        rest = slopes[:, k] - slopes[:, others] @ follow
        out[k] = float(np.sqrt(np.mean(np.sort(rest**2)[: max(1, round(TRIM * rows))])))
    return out


def _deviations(problem: Problem, z: Floats, found: Cloud, scale: Floats) -> Floats:
    """[p] standard deviations of the values told: curvature's and that between blocks of time."""
    out = np.ones(len(z))
    rows, weight = problem.rows, _weight(problem, scale)
    slopes = found.slopes[:, found.free] * weight[:, None]
    residuals = found.residuals(z) * weight
    robust = np.minimum(1.0, HUBER / np.maximum(np.abs(residuals), 1e-12))
    prior = np.eye(slopes.shape[1])
    bend = np.linalg.inv((slopes * robust[:, None]).T @ slopes + prior)
    pull = slopes * (robust * residuals)[:, None]
    pull[rows.group < len(METRICS)] *= FAMILIES  # groups by length and quantiles move with their requests
    blocks = np.array([pull[rows.block == b].sum(axis=0) for b in np.unique(rows.block) if b >= 0])
    shared = np.array(
        [
            (slopes * (weight * EFFECT_TOLD)[:, None])[rows.group == g].sum(axis=0)
            for g in np.unique(rows.group)
        ]
    )  # what 1 % that all requests' seconds of a metric are off by would pull: a simulation is no closer
    between = bend @ (blocks.T @ blocks + shared.T @ shared + prior) @ bend
    out[found.free] = np.sqrt(np.diag(bend) + np.diag(between))
    return out
