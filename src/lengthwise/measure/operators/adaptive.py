"""Which points to measure next: where others tell a point worst and a step spends most."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lengthwise.measure.operators.crossfit import leave_one_out, predict
from lengthwise.measure.operators.grids import fine, position
from lengthwise.measure.operators.points import DECODE, MESSAGE, PREFILL, Operator, Point
from lengthwise.schema.cost_tables import Floats

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
    again: bool = False


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
    again = [Wish(Point(one.operator, one.places[i]), weight * errors[i] / 2, again=True) for i in shaky]
    taken = set(one.places)
    free = [place for place in fine(one.operator) if place not in taken]
    if not free:
        return again
    beyond = np.where(errors > target, np.maximum(errors - one.spread / 2, errors / 4), 0.0)
    return again + [Wish(Point(one.operator, p), weight * score) for p, score in _best(one, beyond, free)]


def _best(one: Known, errors: Floats, free: list[tuple[int, ...]]) -> list[tuple[tuple[int, ...], float]]:
    """The best few free places, each chosen as if those before it had been measured already."""
    there = position(one.operator, free)
    local, gap = _around(position(one.operator, list(one.places)), errors, there)
    chosen = []
    for _ in range(_A_TIME):
        scores = local * np.minimum(gap, 1.0)
        i = int(np.argmax(scores))
        if scores[i] <= 0:
            break
        chosen.append((free[i], float(scores[i])))
        gap = np.minimum(gap, np.sqrt(((there - there[i]) ** 2).sum(axis=1)))
    return chosen


def _around(here: Floats, errors: Floats, there: Floats) -> tuple[Floats, Floats]:
    """[free] the errors of the nearest points, the nearer the heavier; and how far the nearest is."""
    distance = np.sqrt(((there[:, None, :] - here[None, :, :]) ** 2).sum(axis=2))
    near = np.argsort(distance, axis=1, kind="stable")[:, : min(_NEAREST, len(errors))]
    gap = np.take_along_axis(distance, near, axis=1)
    near_by = 1 / (gap + 0.1)
    return (errors[near] * near_by).sum(axis=1) / near_by.sum(axis=1), gap[:, 0]
