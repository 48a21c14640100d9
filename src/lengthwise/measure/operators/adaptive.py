"""Chooses points to measure: a coarse grid, then points where interpolation errors affect a step most."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lengthwise.measure.operators.points import DECODE, MESSAGE, PREFILL, ROWS, Operator, Point
from lengthwise.schema.cost_tables import Floats

Place = tuple[int, ...]
SKEWS = (4,)
_CONTEXT_OFFSET = 16  # places a context of 0 on the logarithmic axis


def coarse_grid(operator: Operator) -> tuple[Point, ...]:
    """Return a coarse grid of points, least work first. Neighbours differ by a factor of about 4 (attention: 8)."""
    ratios, enough = ((4, 2), 4) if len(operator.largest) == 1 else ((8, 4, 2), 8)
    grids = [_places(operator, ratio) for ratio in ratios]
    places = next((grid for grid in grids if len(grid) >= enough), grids[-1])
    points = [Point(operator, at) for at in places]
    if operator.kind == DECODE:
        long = [at for at in places if at[0] >= 8 and at[1] >= 64 * at[0]]
        points += [Point(operator, at, skew) for at in long[-2:] for skew in SKEWS]
    return tuple(sorted(points, key=lambda point: point.work))


def fine_grid(operator: Operator) -> tuple[Place, ...]:
    """Return the places (coordinates of a point) that may be measured: about four per octave in each coordinate."""
    return tuple(_places(operator, 2**0.25))


def log_coordinates(operator: Operator, places: Sequence[Place]) -> Floats:
    """Return the places on a log2 scale ([places, coordinates]), on which similar places are close to each other."""
    at = np.array(places, dtype=np.float64)
    if operator.kind == PREFILL:
        return np.asarray(np.log2(at + np.array([0, _CONTEXT_OFFSET])))
    if operator.kind == DECODE:
        return np.log2(np.column_stack([at[:, 0], at[:, 1] / at[:, 0]]))
    return np.log2(at)


def model_terms(operator: Operator, places: Sequence[Place]) -> Floats:
    """Return the terms of a local linear model of the seconds ([places, terms]), such as 1, chunk, pairs, context."""
    at = np.array(places, dtype=np.float64)
    one = np.ones(len(at))
    if operator.kind == PREFILL:
        chunk, context = at.T
        return np.column_stack([one, chunk, chunk * (context + chunk / 2), context])
    return np.column_stack([one, at])


def _places(operator: Operator, ratio: float) -> list[Place]:
    def powers(first: int, last: int) -> list[int]:
        if last < 1:
            return []
        steps = np.floor(np.log(max(last / first, 1)) / np.log(ratio) + 1e-9)
        values = first * ratio ** np.arange(steps + 1)
        if len(values) > 1 and last / values[-1] < np.sqrt(ratio):
            values = values[:-1]
        return sorted({min(last, round(v)) for v in values} | {last})

    largest = operator.largest
    if operator.kind == PREFILL:
        return [
            (chunk, context)
            for chunk in powers(1, largest[0])
            for context in (0, *powers(min(128, largest[1] + 1 - chunk), largest[1] + 1 - chunk))
        ]
    if operator.kind == DECODE:
        pairs = itertools.product(powers(1, largest[0]), powers(min(16, largest[2]), largest[2]))
        return sorted({(n, n * min(mean, largest[1] // n)) for n, mean in pairs})
    return [(n,) for n in powers(1, largest[0])]


_NEIGHBOURS = 8
_MIN_POINTS = 5  # of two coordinates, for a leave-one-out prediction: the terms of the model and the predicted point


def predict(operator: Operator, places: Sequence[Place], seconds: Floats, at: Place) -> float:
    """Predict the seconds at a place by interpolation (rows and messages) or by a linear model of near places."""
    if operator.kind in {ROWS, MESSAGE}:
        rows = np.array([place[0] for place in places], dtype=np.float64)
        order = np.argsort(rows, kind="stable")
        return float(np.interp(at[0], rows[order], seconds[order]))
    where = log_coordinates(operator, [*places, at])
    distance = np.sqrt(((where[:-1] - where[-1]) ** 2).sum(axis=1))[None, :]
    return float(_local_fits(operator, places, seconds, distance, [at])[0])


def leave_one_out(operator: Operator, places: Sequence[Place], seconds: Floats) -> Floats:
    """Return |log(predicted / measured)| of each point, predicted from the others. Ends, corners, few points: NaN."""
    predicted = np.full(len(places), np.nan)
    if operator.kind in {ROWS, MESSAGE}:
        rows = np.array([place[0] for place in places], dtype=np.float64)
        order = np.argsort(rows, kind="stable")
        x, y = rows[order], seconds[order]
        predicted[order[1:-1]] = y[:-2] + (y[2:] - y[:-2]) * (x[1:-1] - x[:-2]) / (x[2:] - x[:-2])
    elif len(places) >= _MIN_POINTS:
        where = log_coordinates(operator, places)
        distance = np.sqrt(((where[:, None, :] - where[None, :, :]) ** 2).sum(axis=2))
        np.fill_diagonal(distance, np.inf)
        corner = ((where == where.min(axis=0)) | (where == where.max(axis=0))).all(axis=1)
        predicted = np.where(corner, np.nan, _local_fits(operator, places, seconds, distance, places))
    return np.asarray(np.abs(np.log(predicted / np.where(seconds > 0, seconds, np.nan))))


def _local_fits(
    operator: Operator, places: Sequence[Place], seconds: Floats, distance: Floats, at: Sequence[Place]
) -> Floats:
    near = np.argsort(distance, axis=1, kind="stable")[:, : min(_NEIGHBOURS, len(places) - 1) or 1]
    gap = np.take_along_axis(distance, near, axis=1)
    around = np.maximum(seconds[near], 1e-12)
    weight = np.where(np.isfinite(gap), 1 / (gap**2 + 0.25) / around, 0.0)
    known = model_terms(operator, places)[near]
    scale = np.maximum(np.abs(known).max(axis=1, keepdims=True), 1e-12)
    solved = np.linalg.pinv(known / scale * weight[:, :, None], rcond=1e-6) @ (around * weight)[:, :, None]
    plane = (model_terms(operator, at) / scale[:, 0, :] * solved[:, :, 0]).sum(axis=1)
    return np.asarray(np.clip(plane, around.min(axis=1) / 4, around.max(axis=1) * 4))


_MIN_SHARE = 0.003
_NEAREST = 3
_CANDIDATES_PER_OPERATOR = 4


@dataclass(frozen=True)
class Measured:
    """One operator's measurements so far: [k] points without a skew, and their seconds and relative spreads."""

    operator: Operator
    places: tuple[Place, ...]
    seconds: Floats
    spread: Floats


@dataclass(frozen=True)
class Candidate:
    """A point that may be measured next, or again (``repeat``). A larger ``score`` is more important."""

    point: Point
    score: float
    repeat: bool = False


def shares(known: Mapping[str, Measured]) -> dict[str, float]:
    """Return each operator's share of the time of a typical decode or prefill step, whichever share is larger."""
    found = dict.fromkeys(known, 0.0)
    for of_prompts in (True, False):
        step = {}
        for key, one in known.items():
            place = _step_place(one.operator, of_prompts=of_prompts)
            if len(one.places) and place is not None:
                seconds = predict(one.operator, one.places, one.seconds, place)
                step[key] = max(one.operator.times * seconds, 0.0)
        for key, seconds in step.items():
            found[key] = max(found[key], seconds / max(sum(step.values()), 1e-30))
    return found


def _step_place(operator: Operator, *, of_prompts: bool) -> Place | None:
    if operator.kind == MESSAGE:  # how often a step sends depends on how the model is split
        return None
    quarter = max(1, operator.largest[0] // 4)
    if operator.kind == PREFILL:
        return (quarter, min(quarter, operator.largest[1] + 1 - quarter)) if of_prompts else None
    if operator.kind == DECODE:
        return None if of_prompts else (quarter, min(operator.largest[1], quarter * 512))
    return (quarter,) if of_prompts else (min(operator.largest[0], 32),)


def candidates(known: Mapping[str, Measured], target: float) -> list[Candidate]:
    """Return the points to measure or repeat next, most important first, or [] if all errors meet ``target``."""
    # The score of a new point is the prediction error around it beyond the spread of repeats, times its distance from
    # measured points, times the root of its operator's share, so that small operators are not neglected.
    share, found = shares(known), list[Candidate]()
    for key, one in known.items():
        if one.operator.kind == MESSAGE:  # measured once, by processes of their own
            continue
        weight = math.sqrt(max(share[key], _MIN_SHARE))
        errors = leave_one_out(one.operator, one.places, one.seconds)
        errors = np.where(np.isnan(errors), 0.0, errors)
        if not len(errors) or errors.max() <= target:
            continue
        noisy = np.flatnonzero((errors > target) & (one.spread > target))
        found += [Candidate(Point(one.operator, one.places[i]), weight * errors[i] / 2, repeat=True) for i in noisy]
        measured = set(one.places)
        if free := [place for place in fine_grid(one.operator) if place not in measured]:
            excess = np.where(errors > target, np.maximum(errors - one.spread / 2, errors / 4), 0.0)
            found += [Candidate(Point(one.operator, p), weight * score) for p, score in _best_places(one, excess, free)]
    return sorted(found, key=lambda candidate: -candidate.score)


def _best_places(one: Measured, errors: Floats, free: list[Place]) -> list[tuple[Place, float]]:
    where, measured = log_coordinates(one.operator, free), log_coordinates(one.operator, one.places)
    distance = np.sqrt(((where[:, None, :] - measured[None, :, :]) ** 2).sum(axis=2))
    near = np.argsort(distance, axis=1, kind="stable")[:, : min(_NEAREST, len(errors))]
    weight = 1 / (np.take_along_axis(distance, near, axis=1) + 0.1)
    local, gap = (errors[near] * weight).sum(axis=1) / weight.sum(axis=1), distance.min(axis=1)
    chosen = []
    for _ in range(_CANDIDATES_PER_OPERATOR):
        scores = local * np.minimum(gap, 1.0)
        i = int(np.argmax(scores))
        if scores[i] <= 0:
            break
        chosen.append((free[i], float(scores[i])))
        gap = np.minimum(gap, np.sqrt(((where - where[i]) ** 2).sum(axis=1)))
    return chosen
