"""Which points to measure next: where others tell a point worst and a step spends most."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lengthwise.measure.operators.points import DECODE, MESSAGE, PREFILL, ROWS, Operator, Point
from lengthwise.schema.cost_tables import Floats

Places = list[tuple[int, ...]]
SKEWS = (4,)
_NEAR_ZERO = 16  # a context of 0 stands an octave below this many tokens on the logarithmic axis


def coarse(operator: Operator) -> tuple[Point, ...]:
    """Both ends of the range and points four times apart, of attention eight times; the smallest first.

    Where the range is so short that few are left, they stand nearer.
    """
    ratios, least = ((4, 2), 4) if len(operator.largest) == 1 else ((8, 4, 2), 8)
    places: Places = []
    for ratio in ratios:
        if len(places) < least:
            places = _places(operator, ratio)
    points = [Point(operator, at) for at in places]
    return tuple(sorted(points + _skew(operator, points), key=lambda point: point.work))


def fine(operator: Operator) -> tuple[tuple[int, ...], ...]:
    """All places that points may be added at: about four an octave a coordinate."""
    return tuple(_places(operator, 2**0.25))


def position(operator: Operator, places: Places) -> Floats:
    """[places, coordinates] where places stand when near means alike: octaves."""
    at = np.array(places, dtype=np.float64)
    if operator.kind == PREFILL:
        return np.asarray(np.log2(at + np.array([0, _NEAR_ZERO])))
    if operator.kind == DECODE:
        return np.log2(np.column_stack([at[:, 0], at[:, 1] / at[:, 0]]))
    return np.log2(at)


def terms(operator: Operator, places: Places) -> Floats:
    """[places, terms] what seconds are a sum of, locally: a constant, rows, pairs, keys."""
    at = np.array(places, dtype=np.float64)
    one = np.ones(len(at))
    if operator.kind == PREFILL:
        chunk, context = at.T
        return np.column_stack([one, chunk, chunk * (context + chunk / 2), context])
    return np.column_stack([one, at])


def _places(operator: Operator, ratio: float) -> Places:
    """All places of the range by steps of ``ratio`` in each coordinate, its ends among them."""
    largest = operator.largest
    if operator.kind == PREFILL:
        longest = largest[1] + 1
        return [
            (chunk, context)
            for chunk in _powers(1, largest[0], ratio)
            for context in (0, *_powers(min(128, longest - chunk), longest - chunk, ratio))
        ]
    if operator.kind == DECODE:
        means = _powers(min(16, largest[2]), largest[2], ratio)
        pairs = itertools.product(_powers(1, largest[0], ratio), means)
        return sorted({(n, n * min(mean, largest[1] // n)) for n, mean in pairs})
    return [(n,) for n in _powers(1, largest[0], ratio)]


def _skew(operator: Operator, points: list[Point]) -> list[Point]:
    """A few points of unequal contexts beside equal ones, to tell what inequality costs."""
    if operator.kind != DECODE:
        return []
    able = [p for p in points if p.at[0] >= 8 and p.at[1] >= 64 * p.at[0]]
    return [Point(operator, p.at, skew) for p in able[-2:] for skew in SKEWS]


def _powers(first: int, last: int, ratio: float) -> list[int]:
    """Whole numbers from ``first`` by ``ratio`` up to ``last``, which ends the list."""
    if last < 1:
        return []
    steps = np.floor(np.log(max(last / first, 1)) / np.log(ratio) + 1e-9)
    values = first * ratio ** np.arange(steps + 1)
    if len(values) > 1 and last / values[-1] < np.sqrt(ratio):
        values = values[:-1]
    return sorted({min(last, round(v)) for v in values} | {last})


_NEIGHBOURS = 8
_MIN_POINTS = 5  # of two coordinates: as many as the terms of a plane, and the one that is told


def predict(operator: Operator, places: list[tuple[int, ...]], seconds: Floats, at: tuple[int, ...]) -> float:
    """Seconds at a place from the points around it.

    Of rows: the line through both neighbours. Of two coordinates: a plane in the terms that the seconds
    of attention are a sum of, through the nearest points, the nearer the heavier.
    """
    if operator.kind in {ROWS, MESSAGE}:
        rows = np.array([place[0] for place in places], dtype=np.float64)
        order = np.argsort(rows, kind="stable")
        return float(np.interp(at[0], rows[order], seconds[order]))
    where = position(operator, [*places, at])
    distance = np.sqrt(((where[:-1] - where[-1]) ** 2).sum(axis=1))[None, :]
    return float(_planes(operator, places, seconds, distance, [at])[0])


def leave_one_out(operator: Operator, places: list[tuple[int, ...]], seconds: Floats) -> Floats:
    """[points] |log(predicted / measured)|, each point predicted from the others; NaN where others end.

    Of rows, the first and the last have no others on both sides; of two coordinates, the corners.
    """
    if operator.kind in {ROWS, MESSAGE}:
        told = _between_neighbours(np.array([place[0] for place in places], dtype=np.float64), seconds)
    elif len(places) < _MIN_POINTS:
        told = np.full(len(places), np.nan)
    else:
        where = position(operator, places)
        distance = np.sqrt(((where[:, None, :] - where[None, :, :]) ** 2).sum(axis=2))
        np.fill_diagonal(distance, np.inf)
        told = np.where(_corners(where), np.nan, _planes(operator, places, seconds, distance, places))
    positive = np.where(seconds > 0, seconds, np.nan)
    return np.asarray(np.abs(np.log(told / positive)))


def _between_neighbours(rows: Floats, seconds: Floats) -> Floats:
    """[points] what the line between both neighbours says; NaN at the ends."""
    told = np.full(len(rows), np.nan)
    order = np.argsort(rows, kind="stable")
    x, y = rows[order], seconds[order]
    told[order[1:-1]] = y[:-2] + (y[2:] - y[:-2]) * (x[1:-1] - x[:-2]) / (x[2:] - x[:-2])
    return told


def _corners(where: Floats) -> npt.NDArray[np.bool_]:
    """[points] whether a point stands at an end of every coordinate."""
    return np.asarray(((where == where.min(axis=0)) | (where == where.max(axis=0))).all(axis=1))


def _planes(
    operator: Operator, places: list[tuple[int, ...]], seconds: Floats, distance: Floats, at: list[tuple[int, ...]]
) -> Floats:
    """[at] seconds by a plane through the points that are nearest by ``distance`` [at, points]."""
    near = np.argsort(distance, axis=1, kind="stable")[:, : min(_NEIGHBOURS, len(places) - 1) or 1]
    gap = np.take_along_axis(distance, near, axis=1)
    around = np.maximum(seconds[near], 1e-12)
    heavy = np.where(np.isfinite(gap), 1 / (gap**2 + 0.25) / around, 0.0)
    told_by = terms(operator, places)[near]
    scale = np.maximum(np.abs(told_by).max(axis=1, keepdims=True), 1e-12)
    solved = np.linalg.pinv(told_by / scale * heavy[:, :, None], rcond=1e-6) @ (around * heavy)[:, :, None]
    told = (terms(operator, at) / scale[:, 0, :] * solved[:, :, 0]).sum(axis=1)
    return np.asarray(np.clip(told, around.min(axis=1) / 4, around.max(axis=1) * 4))


_LEAST_SHARE = 0.003
_NEAREST = 3
_A_TIME = 4


@dataclass(frozen=True)
class Known:
    """What was measured of one operator so far, contexts of equal length alone."""

    operator: Operator
    places: tuple[tuple[int, ...], ...]
    seconds: Floats
    spread: Floats

    def at(self, place: tuple[int, ...]) -> float:
        """Seconds there, from the points around it."""
        return predict(self.operator, list(self.places), self.seconds, place)


@dataclass(frozen=True)
class Wish:
    """A point that should be measured, and how much that matters."""

    point: Point
    score: float
    repeat: bool = False


def shares(known: Mapping[str, Known]) -> dict[str, float]:
    """What part of a step each operator takes: of a typical decode or a typical prefill, the larger part."""
    steps = [_step(known, of_prompts=True), _step(known, of_prompts=False)]
    parts = [{key: s / max(sum(step.values()), 1e-30) for key, s in step.items()} for step in steps]
    return {key: max(part.get(key, 0.0) for part in parts) for key in known}


def _step(known: Mapping[str, Known], *, of_prompts: bool) -> dict[str, float]:
    """Seconds of each operator in one step: a quarter of the most tokens, or of the most sequences."""
    return {
        key: max(one.operator.times * one.at(place), 0.0)
        for key, one in known.items()
        if len(one.places) and (place := _typical(one.operator, of_prompts=of_prompts)) is not None
    }


def _typical(operator: Operator, *, of_prompts: bool) -> tuple[int, ...] | None:
    if operator.kind == MESSAGE:  # of no model: how often a step sends depends on how it is cut
        return None
    quarter = max(1, operator.largest[0] // 4)
    if operator.kind == PREFILL:
        return (quarter, min(quarter, operator.largest[1] + 1 - quarter)) if of_prompts else None
    if operator.kind == DECODE:
        return None if of_prompts else (quarter, min(operator.largest[1], quarter * 512))
    return (quarter,) if of_prompts else (min(operator.largest[0], 32),)


def wishes(known: Mapping[str, Known], target: float) -> list[Wish]:
    """New points and old ones to measure again, the most wanted first; none: the target is met.

    A new point is wanted by the error that the points around it were told with, beyond what repeats lie
    apart, by how far it is from them, and by the root of its operator's share, so that small ones are not
    left out. A point that was told worse than ``target`` while its repeats lay far apart is measured again.
    """
    share = shares(known)
    found = [
        wish
        for key, one in known.items()
        if one.operator.kind != MESSAGE  # measured by processes of their own, once
        for wish in _of_operator(one, math.sqrt(max(share.get(key, 0.0), _LEAST_SHARE)), target)
    ]
    return sorted(found, key=lambda wish: -wish.score)


def _of_operator(one: Known, weight: float, target: float) -> list[Wish]:
    errors = leave_one_out(one.operator, list(one.places), one.seconds)
    errors = np.where(np.isnan(errors), 0.0, errors)
    if not len(errors) or errors.max() <= target:
        return []
    shaky = np.flatnonzero((errors > target) & (one.spread > target))
    again = [Wish(Point(one.operator, one.places[i]), weight * errors[i] / 2, repeat=True) for i in shaky]
    taken = set(one.places)
    free = [place for place in fine(one.operator) if place not in taken]
    if not free:
        return again
    beyond = np.where(errors > target, np.maximum(errors - one.spread / 2, errors / 4), 0.0)
    return again + [Wish(Point(one.operator, p), weight * score) for p, score in _best(one, beyond, free)]


def _best(one: Known, errors: Floats, free: list[tuple[int, ...]]) -> list[tuple[tuple[int, ...], float]]:
    """The best few free places, each chosen as if those before it had been measured already."""
    there = position(one.operator, free)
    local, gap = _context(position(one.operator, list(one.places)), errors, there)
    chosen = []
    for _ in range(_A_TIME):
        scores = local * np.minimum(gap, 1.0)
        i = int(np.argmax(scores))
        if scores[i] <= 0:
            break
        chosen.append((free[i], float(scores[i])))
        gap = np.minimum(gap, np.sqrt(((there - there[i]) ** 2).sum(axis=1)))
    return chosen


def _context(current: Floats, errors: Floats, neighbor: Floats) -> tuple[Floats, Floats]:
    """[free] the errors of the nearest points, the nearer the heavier; and how far the nearest is."""
    distance = np.sqrt(((neighbor[:, None, :] - current[None, :, :]) ** 2).sum(axis=2))
    near = np.argsort(distance, axis=1, kind="stable")[:, : min(_NEAREST, len(errors))]
    gap = np.take_along_axis(distance, near, axis=1)
    near_by = 1 / (gap + 0.1)
    return (errors[near] * near_by).sum(axis=1) / near_by.sum(axis=1), gap[:, 0]
