"""The values that bring simulations closest to what was measured, and how sure they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lengthwise.measure.calibrate._cloud import (
    Cloud,
    cloud,
    loss,
    points_for,
    radius_of,
    settle,
    spread,
)
from lengthwise.measure.calibrate._problem import Problem
from lengthwise.measure.calibrate._sureness import (
    EFFECT_TOLD,
    NARROW,
    deviations,
    scale_at,
    weights,
    with_untold,
)
from lengthwise.measure.calibrate.answer import METRICS

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
FIRST_SCALE = (0.2, 0.1, 0.15, 0.15)
SPREAD_Z, STARTS = 2.0, 3
LIFTED_Z = 1.2
"""Seconds that are next to nothing move nothing in the log: who went down there by mistake must be lifted to return."""
WIDE = (0.3, 0.2, 0.12)
"""Radii of the clouds, in the log of a factor: from where a start may lie to NARROW, where a line is straight."""
COST_TOLD, TRIM = 4.0, 0.95
"""Two deviations' worth of the loss; the share of rows that an effect is told over."""
SURE = 4.0
"""So many deviations from neutral nobody tries whether a parameter moved: it did."""

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


def solve(problem: Problem, free: Sequence[str], seed: int, start: Floats | None = None) -> Solution:
    """The most probable values: Huber's loss on residuals in units of their own spread, and the prior.

    Parameters outside ``free`` stay neutral. One that moves nothing is put back to neutral, one after the
    other, unless that makes the agreement worse; so is one that could be told, but whose move improves the
    agreement by no more than noise would. ``start``: a place known to be good, searched from beside those drawn.
    """
    names = [knob.name for knob in problem.knobs]
    told = asked = np.array([name in free for name in names])
    z, scale = _search(problem, told, seed, start)
    z, cost, found = narrow(problem, z, told, scale, seed)
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
        trial = narrow(problem, back, fewer, scale, seed)
        if trial[1] > cost + COST_TOLD:
            kept[least] = True
        else:
            told, (z, cost, found) = fewer, trial
    sd, noise = deviations(problem, z, found, scale)
    sd[told] = np.maximum(sd, with_untold(problem, z, found, asked, scale, seed))[told]
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
    weight = weights(problem, scale)
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
        trial = narrow(problem, back, fewer, scale, seed)
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
    sd, _ = deviations(problem, z, found, scale)
    away = [knob.from_neutral(float(at)) for knob, at in zip(problem.knobs, z, strict=True)]
    return np.array(away) / sd


def _search(problem: Problem, free: Mask, seed: int, start: Floats | None) -> tuple[Floats, Floats]:
    """From draws over what is believed, downhill by wide clouds from the best of them; and the spread there."""
    scale = np.array(FIRST_SCALE)
    draws = spread(points_for(free), int(free.sum()), seed)
    points = np.zeros((len(draws) + 1, len(free)))
    points[1:, free] = (2 * draws - 1) * SPREAD_Z
    weight = weights(problem, scale)
    order = np.argsort([loss(problem.residuals(z) * weight, z) for z in points], kind="stable")
    ends = [downhill(problem, points[i], free, WIDE, weight, seed) for i in order[:STARTS]]
    lifted = _lifted(problem, np.array(min(ends)[1]), free)
    known = [] if start is None else [start]
    ends += [downhill(problem, z, free, WIDE[1:], weight, seed) for z in [*lifted, *known]]
    best = np.array(min(ends)[1])
    return best, scale_at(problem, best)


def downhill(
    problem: Problem, z: Floats, free: Mask, radii: Sequence[float], weight: Floats, seed: int
) -> tuple[float, tuple[float, ...]]:
    """The loss where clouds of these radii lead, and the place."""
    cost = 0.0
    for radius in radii:
        z, cost = settle(cloud(problem, z, free, radius_of(problem, radius), seed), weight)
    return cost, tuple(z.tolist())


def _lifted(problem: Problem, z: Floats, free: Mask) -> list[Floats]:
    """``z`` with one of the free seconds each raised to where it is felt, where it is not there already."""
    seconds = [k for k in np.flatnonzero(free) if problem.knobs[k].unit == "s" and z[k] < LIFTED_Z / 2]
    starts = [z.copy() for _ in seconds]
    for start, k in zip(starts, seconds, strict=True):
        start[k] = LIFTED_Z
    return starts


def narrow(problem: Problem, z: Floats, free: Mask, scale: Floats, seed: int) -> tuple[Floats, float, Cloud]:
    """Downhill by narrowing clouds; the last one, its best point, and the loss there."""
    found: Cloud | None = None
    for turn, radius in enumerate(NARROW):
        found = cloud(problem, z, free, radius_of(problem, radius, found), seed + turn)
        z, cost = settle(found, weights(problem, scale))
    assert found is not None  # there are turns
    return z, cost, found


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
