"""The values that bring simulations closest to what was measured, and how sure they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.measure.calibrate._problem import Problem
from lengthwise.measure.calibrate.answer import METRICS

Floats = npt.NDArray[np.float64]
FLOOR = 0.02
"""No engine repeats itself closer than this; agreement beyond it tells nothing."""
HUBER = 1.5
REACH_Z, SPREAD_Z, STARTS, DRAWS = 6.0, 2.0, 2, 32
STEP_LOG, STEP_SECONDS_Z = 0.04, 0.4
"""Slopes are taken over steps large enough that single requests that change their place do not matter much."""
EFFECT_TOLD = 0.01
COST_TOLD = 4.0
TRIM = 0.95


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
    told: npt.NDArray[np.bool_]
    effect: Floats


def solve(problem: Problem, free: Sequence[str], seed: int) -> Solution:
    """The most probable values: Huber's loss on residuals in units of their own spread, and the prior.

    Parameters outside ``free`` stay at their centres. One that moves nothing is put back to its centre, one
    after the other, unless that makes the agreement worse.
    """
    names = [knob.name for knob in problem.knobs]
    open_ = np.array([name in free for name in names])
    z, scale = _search(problem, open_, seed)
    effect, told = np.zeros(len(names)), open_.copy()
    kept = np.zeros(len(names), dtype=np.bool_)
    while told.any():
        slopes = _slopes(problem, z, told)
        now = _effects(slopes, told)
        effect[told] = now[told]
        weak = np.flatnonzero(told & ~kept & (now < EFFECT_TOLD))
        if not len(weak):
            break
        least = weak[np.argmin(now[weak])]
        fewer, back = told.copy(), z.copy()
        fewer[least], back[least] = False, 0.0
        back = _descend(problem, back, fewer, scale)
        if _cost(problem, back, scale) > _cost(problem, z, scale) + COST_TOLD:
            kept[least] = True
        else:
            told, z = fewer, back
    return Solution(z, _deviations(problem, z, told, scale), told, effect)


def _search(problem: Problem, free: npt.NDArray[np.bool_], seed: int) -> tuple[Floats, Floats]:
    """Descends from the centre and from the best of some draws; then again with the spread found there."""
    from scipy.stats import qmc

    scale = np.array([0.2, 0.1, 0.15, 0.15])
    draws = qmc.Sobol(int(free.sum()), rng=np.random.default_rng(seed)).random(DRAWS)
    points = np.zeros((DRAWS + 1, len(free)))
    points[1:, free] = (2 * draws - 1) * SPREAD_Z
    costs = [_cost(problem, point, scale) for point in points]
    starts = [points[0], *(points[i] for i in np.argsort(costs, kind="stable")[:STARTS])]
    ends = [_descend(problem, start, free, scale) for start in starts]
    z = min(ends, key=lambda end: _cost(problem, end, scale))
    for _ in range(2):
        scale = _scale(problem, z)
        z = _descend(problem, z, free, scale)
    return z, scale


def _scale(problem: Problem, z: Floats) -> Floats:
    """[groups] robust spread of single residuals about zero."""
    residuals, rows = problem.residuals(z), problem.rows
    out = np.full(4, FLOOR)
    for g in range(4):
        own = np.abs(residuals[(rows.group == g) & (rows.block >= 0)])
        out[g] = max(FLOOR, 1.4826 * float(np.median(own))) if len(own) else FLOOR
    return out


def _weighted(problem: Problem, z: Floats, scale: Floats) -> Floats:
    rows = problem.rows
    return problem.residuals(z) * rows.weight / scale[rows.group]


def _cost(problem: Problem, z: Floats, scale: Floats) -> float:
    """Huber's loss of the data and the prior's square; smaller is better."""
    size = np.abs(_weighted(problem, z, scale))
    data = np.where(size <= HUBER, size**2, 2 * HUBER * size - HUBER**2)
    return float(data.sum() + (z**2).sum())


def _descend(problem: Problem, start: Floats, free: npt.NDArray[np.bool_], scale: Floats) -> Floats:
    """Least squares from a start on over the free values; the others stay."""
    from scipy.optimize import least_squares

    if not free.any():
        return start
    count = len(problem.rows.group)

    def whole(x: Floats) -> Floats:
        z = start.copy()
        z[free] = x
        return z

    def residuals(x: Floats) -> Floats:
        return np.concatenate([_weighted(problem, whole(x), scale), x])

    def slopes(x: Floats) -> Floats:
        own = _slopes(problem, whole(x), free)[:, free]
        rows = problem.rows
        return np.vstack([own * (rows.weight / scale[rows.group])[:, None], np.eye(len(x))])

    def loss(squares: Floats, /) -> Any:
        size = np.sqrt(np.maximum(squares, 1e-30))
        inside = squares <= HUBER**2
        inside[count:] = True  # the prior is a square
        value = np.where(inside, squares, 2 * HUBER * size - HUBER**2)
        first = np.where(inside, 1.0, HUBER / size)
        second = np.where(inside, 0.0, -0.5 * HUBER / size**3)
        return np.stack([value, first, second])

    found = least_squares(
        residuals,
        np.clip(start[free], -REACH_Z + 1e-6, REACH_Z - 1e-6),
        jac=slopes,
        bounds=(-REACH_Z, REACH_Z),
        loss=loss,
        xtol=1e-4,
        ftol=1e-5,
        max_nfev=15,
    )
    return whole(found.x)


def _slopes(problem: Problem, z: Floats, free: npt.NDArray[np.bool_]) -> Floats:
    """[m, p] central differences of the residuals; a step is 4 % of a factor, or 2.2 times the seconds."""
    out = np.zeros((len(problem.rows.group), len(z)))
    for k in np.flatnonzero(free):
        knob = problem.knobs[k]
        step = STEP_LOG / knob.log_sd if knob.unit == "x" else STEP_SECONDS_Z
        up, down = z.copy(), z.copy()
        up[k] += step
        down[k] -= step
        out[:, k] = (problem.residuals(up) - problem.residuals(down)) / (2 * step)
    return out


def _effects(slopes: Floats, free: npt.NDArray[np.bool_]) -> Floats:
    """[p] root mean square by which residuals move with one parameter's deviation, the others following.

    The others follow within their own prior deviations, for agreement to within EFFECT_TOLD.
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


def _deviations(problem: Problem, z: Floats, told: npt.NDArray[np.bool_], scale: Floats) -> Floats:
    """[p] standard deviations of the values told: the larger of curvature's and of that between blocks of time."""
    out = np.ones(len(z))
    if not told.any():
        return out
    rows = problem.rows
    slopes = _slopes(problem, z, told)[:, told] * (rows.weight / scale[rows.group])[:, None]
    residuals = _weighted(problem, z, scale)
    robust = np.minimum(1.0, HUBER / np.maximum(np.abs(residuals), 1e-12))
    prior = np.eye(slopes.shape[1])
    bend = np.linalg.inv((slopes * robust[:, None]).T @ slopes + prior)
    pull = slopes * (robust * residuals)[:, None]
    pull[rows.group < len(METRICS)] *= 2  # the quantiles, which are of no block, move with their requests
    blocks = np.array([pull[rows.block == b].sum(axis=0) for b in np.unique(rows.block) if b >= 0])
    between = bend @ (blocks.T @ blocks + prior) @ bend
    out[told] = np.sqrt(np.maximum(np.diag(bend), np.diag(between)))
    return out
