"""Throughput against the latency bound: what each strategy has to offer, and where another one takes over.

A few bounds between the least latency and that of the highest throughput are searched, all with the same estimates;
whatever of those no other beats in both is the frontier. At the bounds themselves it is the best there is, between
them at least that.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from lengthwise.schedule.choose import Planner
from lengthwise.schedule.sides import Side, row_of
from lengthwise.schedule.variables import Place
from lengthwise.schema.schedule import FrontPoint, Kink

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

BOUNDS = 14
"""Bounds that are searched for each strategy."""
MOST_POINTS = 60
"""Points of a frontier that are kept."""
NEAR_BOUND = 1.1
"""How much looser a bound may be at which another kind of schedule would not yet be told apart."""

_NEAR = (0.55, 0.7, 0.8, 0.9, 1.1, 1.2, 1.35, 1.55, 1.8)


def frontiers(planner: Planner, bounds: int = BOUNDS) -> tuple[tuple[str, tuple[FrontPoint, ...]], ...]:
    """By strategy, its schedules from the least latency to the highest throughput; strategies that cannot run are out.

    Args:
        planner: Whose schedules.
        bounds: How many bounds are searched, no bound at all among them.
    """
    made = []
    for strategy in dict.fromkeys(side.strategy for side in planner.sides):
        sides = [side for side in planner.sides if side.strategy is strategy and side.variables]
        _search_between(planner, sides, bounds)
        for side in sides:
            side.perf(_near(side))
        points = non_dominated(sides)
        if points:
            made.append((strategy.value, _thinned(points)))
    return tuple(made)


def _search_between(planner: Planner, sides: Sequence[Side], bounds: int) -> None:
    """Searches bounds from the least latency on, always where most may be missed: steep or wide stretches."""
    searched = planner.search(math.inf, sides)
    ends = [one.best for one in searched if one.found.best]
    if not ends:
        return
    top = max(ends, key=lambda end: end.throughput_rps)
    low_s = min(one.found.fastest.latency_s for one in searched)
    stretches = [(-1.0, low_s, 0.0, top.latency_s, top.throughput_rps)]
    for _ in range(bounds - 1):
        _, low_s, low_rps, high_s, high_rps = heapq.heappop(stretches)
        middle_s = math.sqrt(low_s * high_s)
        planner.search(middle_s, sides, known_rps=low_rps)
        rps = max([low_rps, *(_seen_within(side, middle_s) for side in sides)])
        for stretch in ((low_s, low_rps, middle_s, rps), (middle_s, rps, high_s, high_rps)):
            heapq.heappush(stretches, (-_may_miss(*stretch), *stretch))


def _near(side: Side) -> Ints:
    """[n, variables] a side's best points so far with other batches: what a step between two bounds passes over."""
    points, latency_s, rps = side.seen()
    best = points[_best_so_far(latency_s, rps)]
    batches = side.variables[0].values
    near = [best]
    for times in _NEAR:
        other = best.copy()
        other[:, 0] = np.clip(np.rint(best[:, 0] * times), batches[0], batches[-1])
        near.append(other)
    return np.unique(np.concatenate(near), axis=0)


def _may_miss(low_s: float, low_rps: float, high_s: float, high_rps: float) -> float:
    return (high_rps - low_rps) / high_rps * math.log(high_s / low_s) if high_rps > 0 else 0.0


def _seen_within(side: Side, bound_s: float) -> float:
    _, latency_s, rps = side.seen()
    return float(rps[latency_s <= bound_s].max(initial=0.0))


def non_dominated(sides: Iterable[Side], within_s: tuple[float, float] = (0.0, math.inf)) -> list[FrontPoint]:
    """The schedules seen so far that none of the sides' beats in both, by latency; of those in a range of it."""
    rows: list[tuple[float, float, int, Place]] = []
    known = list(sides)
    for number, side in enumerate(known):
        points, latency_s, rps = side.seen()
        keep = _best_so_far(latency_s, rps)
        rows += [(float(latency_s[i]), -float(rps[i]), number, tuple(points[i].tolist())) for i in keep]
    rows.sort()
    best, found = 0.0, []
    for held_s, loss, number, point in rows:
        if -loss > best:
            best = -loss
            found.append((held_s, number, point))
    low_s, high_s = within_s
    return _rows(known, [one for one in found if low_s <= one[0] <= high_s])


def kinks(fronts: Sequence[tuple[str, tuple[FrontPoint, ...]]]) -> tuple[Kink, ...]:
    """From which bound on which strategy at which degree is the best of all.

    One takes over where the last one would not have as much within a bound ``NEAR_BOUND`` times as loose: kinds that
    overtake each other at every step of a batch are as good as one.
    """
    points = sorted(
        (p for _, front in fronts for p in front), key=lambda p: (p.held_s, -p.row.throughput_rps)
    )
    best, last, found = 0.0, ("", 0), []
    for point in points:
        if point.row.throughput_rps <= best:
            continue
        best, kind = point.row.throughput_rps, point.row.family[:2]
        if kind != last and _most_rps(points, last, NEAR_BOUND * point.held_s) < best:
            found.append(Kink(point.held_s, f"{_kind_words(*kind)}: {point.row.words}"))
            last = kind
    return tuple(found)


def _most_rps(points: Sequence[FrontPoint], kind: tuple[str, int], bound_s: float) -> float:
    """The most that schedules of a kind have within a bound."""
    own = (p.row.throughput_rps for p in points if p.held_s <= bound_s and p.row.family[:2] == kind)
    return max(own, default=0.0)


def _kind_words(strategy: str, tp: int) -> str:
    return f"{strategy.upper()} with TP {tp}" if tp > 1 else f"{strategy.upper()} without tensor parallelism"


def _best_so_far(latency_s: Floats, rps: Floats) -> list[int]:
    order = np.lexsort((-rps, latency_s))
    before = np.concatenate([[0.0], np.maximum.accumulate(rps[order])[:-1]]) if len(order) else rps
    return [int(i) for i in order[rps[order] > before]]


def _rows(sides: Sequence[Side], found: Sequence[tuple[float, int, Place]]) -> list[FrontPoint]:
    """The points with all that is estimated of them, a call a side."""
    made: dict[int, FrontPoint] = {}
    for number in {number for _, number, _ in found}:
        side = sides[number]
        at = [i for i, one in enumerate(found) if one[1] == number]
        points = np.array([found[i][2] for i in at], dtype=np.int64)
        got, controls = side.estimates(points), side.columns(points)
        for row, i in enumerate(at):
            made[i] = FrontPoint(found[i][0], row_of(controls.row(row), got, row))
    return [made[i] for i in range(len(found))]


def _thinned(points: Sequence[FrontPoint]) -> tuple[FrontPoint, ...]:
    """At most so many, the last of each step of latency; the first one is kept."""
    if len(points) <= MOST_POINTS:
        return tuple(points)
    edges = np.geomspace(points[0].held_s, points[-1].held_s, MOST_POINTS)
    steps = np.searchsorted(edges, [p.held_s for p in points], side="left")
    last = [p for p, here, after in zip(points, steps, [*steps[1:], -1], strict=True) if here != after]
    return tuple(last if last[0] is points[0] else [points[0], *last])


__all__ = ["BOUNDS", "frontiers", "kinks", "non_dominated"]
