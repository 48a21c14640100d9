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
from lengthwise.measure.calibrate._problem import BLOCKS, FAMILIES, Problem
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
SURE = 4.0
"""So many deviations from neutral nobody tries whether a parameter moved: it did."""
"""A parameter that moves predictions by less than 1 % is not told, unless leaving it out costs two deviations."""


NUISANCE = "log_step"
"""Of the log's clock, not of the tables: nobody asks whether it moved."""


@dataclass(frozen=True)
class Solution:
    """Where the search ended.

    Attributes:
        z: [p] values in prior standard deviations from their centres; exactly 0 where neutral.
        best: [p] the same with all free that were told, about which ``sd`` is where ``z`` is neutral.
        sd: [p] standard deviations of ``best``; 1 where nothing was told.
        told: [p] which parameters the runs could tell.
        effect: [p] by how much predictions move (rms, in log) with each parameter's prior deviation.
        share: [p] by how much times between tokens grow (mean, in log) with the log of each parameter.
    """

    z: Floats
    best: Floats
    sd: Floats
    told: Mask
    effect: Floats
    share: Floats


def solve(problem: Problem, free: Sequence[str], seed: int) -> Solution:
    """The most probable values: Huber's loss on residuals in units of their own spread, and the prior.

    Parameters outside ``free`` stay neutral. One that moves nothing is put back to neutral, one after the
    other, unless that makes the agreement worse; so is one that could be told, but whose move improves the
    agreement by no more than noise would.
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
            break
        least = weak[np.argmin(now[weak])]
        fewer, back = told.copy(), z.copy()
        fewer[least], back[least] = False, 0.0
        if not fewer.any():
            return Solution(back, back, np.ones(len(z)), fewer, effect, 0 * z)
        trial = _narrow(problem, back, fewer, scale, seed)
        if trial[1] > cost + COST_TOLD:
            kept[least] = True
        else:
            told, (z, cost, found) = fewer, trial
    sd, noise = _deviations(problem, z, found, scale)
    moved = _moved(problem, (z, cost, found), scale, noise, seed)
    return Solution(moved, z, sd, told, effect, _shares(problem, found))


def _moved(
    problem: Problem, at: tuple[Floats, float, Cloud], scale: Floats, noise: Floats, seed: int
) -> Floats:
    """[p] the values with all back at neutral whose move improves the agreement by no more than noise does.

    Two deviations' worth of the loss (COST_TOLD) is what chance brings about if residuals are independent, and
    ``noise`` times as much where they are alike within blocks of time. First all at once are tried, then one after
    the other, the least sure first; each trial finds the others anew.
    """
    z, cost, found = at
    moving, kept = found.free.copy(), np.array([knob.name == NUISANCE for knob in problem.knobs])
    weight = _weight(problem, scale)
    if loss(problem.residuals(np.zeros(len(z))) * weight, 0 * z) <= cost + COST_TOLD * noise[moving].max():
        return 0 * z
    while True:
        sure = _sureness(problem, z, found, scale)
        open_ = np.flatnonzero(moving & ~kept & (sure < SURE))
        if not len(open_):
            return z
        least = open_[np.argmin(sure[open_])]
        fewer, back = moving.copy(), z.copy()
        fewer[least], back[least] = False, 0.0
        if not fewer.any():
            return z
        trial = _narrow(problem, back, fewer, scale, seed)
        if trial[1] > cost + COST_TOLD * noise[least]:
            kept[least] = True
        else:
            moving, (z, cost, found) = fewer, trial


def _shares(problem: Problem, found: Cloud) -> Floats:
    """[p] mean slopes of times between tokens, a unit of log."""
    own = problem.rows.group == METRICS.index("tpot")
    log_sd = np.array([knob.log_sd for knob in problem.knobs])
    return np.asarray(found.slopes[own].mean(axis=0) / log_sd if own.any() else 0 * log_sd)


def _sureness(problem: Problem, z: Floats, found: Cloud, scale: Floats) -> Floats:
    """[p] how many standard deviations each value lies from neutral."""
    sd, _ = _deviations(problem, z, found, scale)
    away = [knob.from_neutral(float(at)) for knob, at in zip(problem.knobs, z, strict=True)]
    return np.array(away) / sd


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


def _deviations(problem: Problem, z: Floats, found: Cloud, scale: Floats) -> tuple[Floats, Floats]:
    """[p] standard deviations of the values told: curvature's and that between blocks of time.

    And how many times as large their squares are as the curvature's alone: the noise that likeness brings.
    """
    out, noise = np.ones(len(z)), np.ones(len(z))
    rows, weight = problem.rows, _weight(problem, scale)
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


def _sums(pull: Floats, key: npt.NDArray[np.int64], block: npt.NDArray[np.int64]) -> Floats:
    """[keys, p] what the rows of blocks of time pull, by key."""
    return np.array([pull[(key == k) & (block >= 0)].sum(axis=0) for k in np.unique(key[block >= 0])])
