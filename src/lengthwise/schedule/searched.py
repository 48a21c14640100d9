"""What the searches of a choice came to, in numbers and in words."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lengthwise.schedule._nothing_fits import why_nothing_fits
from lengthwise.schedule._ridge import ridge
from lengthwise.schedule.controls import Strategy
from lengthwise.schedule.estimate import Estimator
from lengthwise.schedule.found import Found, Reached
from lengthwise.schedule.sides import Side
from lengthwise.schema.errors import ScheduleError
from lengthwise.schema.schedule import ScheduleSide
from lengthwise.schema.schedule_row import ScheduleRow

TIE = 1e-9
"""Throughputs that differ by less are equal; the lower latency is then taken."""

_MOST_CLIMBS = 8


@dataclass(frozen=True)
class Searched:
    """A side, what a search of it came to, and the most that could still be there."""

    side: Side
    found: Found
    at_most_rps: float

    @property
    def best(self) -> Reached:
        """What was found; there is something."""
        assert self.found.best is not None
        return self.found.best


def improved(searched: Sequence[Searched], bound_s: float) -> list[Searched]:
    """Searches with what they missed as estimates are not quite monotone; each way to a choice ends with it."""
    before = [one.side.evaluated for one in searched]
    if not any(one.found.best for one in searched):
        searched = [_looked_closer(one, bound_s) for one in searched]
    climbed = [_climbed(one, bound_s) for one in searched]
    return [_counted(one, one.side.evaluated - was) for one, was in zip(climbed, before, strict=True)]


def _counted(one: Searched, more: int) -> Searched:
    """The search with the schedules that were estimated after it."""
    return replace(one, found=replace(one.found, evaluated=one.found.evaluated + more))


def _looked_closer(one: Searched, bound_s: float) -> Searched:
    """The search with the least latency among the neighbours of its fastest, which need not be quite monotone."""
    if not math.isfinite(one.found.fastest.latency_s):
        return one
    points = one.side.beside(one.found.fastest.point)
    got = one.side.perf(points)
    at = int(np.argmin(got.latency_s))
    least = Reached(tuple(points[at].tolist()), float(got.latency_s[at]), float(got.throughput_rps[at]))
    if least.latency_s > bound_s:
        return replace(one, found=replace(one.found, fastest=least))
    return replace(one, found=replace(one.found, fastest=least, best=least), at_most_rps=math.inf)


def _climbed(one: Searched, bound_s: float) -> Searched:
    """The search with the best that is reached from its own over better and better neighbours.

    It goes on from the best that was ever seen, RRA's even where the search gave up: its bounds are not quite bounds.
    """
    best = _best_seen(one, bound_s)
    for _ in range(_MOST_CLIMBS if best else 0):
        assert best is not None
        points = one.side.around(best.point)
        if one.side.strategy is Strategy.RRA:
            points = np.unique(np.concatenate([points, ridge(one.side, best.point, bound_s)]), axis=0)
        got = one.side.perf(points)
        rps = np.where(got.latency_s <= bound_s, got.throughput_rps, 0.0)
        rps[np.isinf(got.latency_s)] = 0.0
        at = int(np.argmax(rps))
        if rps[at] <= best.throughput_rps * (1 + TIE):
            break
        best = Reached(tuple(points[at].tolist()), float(got.latency_s[at]), float(rps[at]))
    most_rps = max(one.at_most_rps, best.throughput_rps if best else 0.0)
    return replace(one, found=replace(one.found, best=best), at_most_rps=most_rps)


def _best_seen(one: Searched, bound_s: float) -> Reached | None:
    """What was found, or what was estimated before and is better; None: neither, or given up, and not RRA's."""
    found, side = one.found.best, one.side
    point = side.best_seen(bound_s) if found or side.strategy is Strategy.RRA else None
    if point is None:
        return found
    got = side.perf(np.array([point], dtype=np.int64))
    seen = Reached(point, float(got.latency_s[0]), float(got.throughput_rps[0]))
    if found and seen.throughput_rps <= found.throughput_rps * (1 + TIE):
        return found
    return seen


def told(
    side: Side, searched: Sequence[Searched], won: Searched, row: ScheduleRow, bound_s: float
) -> ScheduleSide:
    """A side as the answer lists it: its best, how much it could have at most, and why it lost."""
    one = next((s for s in searched if s.side is side), None)
    if one is None:
        return ScheduleSide(side.strategy.value, side.tp, None, 0.0, 0, 0, side.why_not)
    point = one.found.best.point if one.found.best else side.best_seen(bound_s)
    best = None if point is None else side.row(point)
    why = "" if one is won else _why(one, best, row, bound_s)
    return ScheduleSide(
        side.strategy.value, side.tp, best, one.at_most_rps, side.size, one.found.evaluated, why
    )


def _why(one: Searched, best: ScheduleRow | None, row: ScheduleRow, bound_s: float) -> str:
    least_s = one.found.fastest.latency_s
    if least_s > bound_s:
        return f"its least latency is {least_s:.3g} s"
    if best is None:
        return "what meets the bound has no more than the choice"
    if best.throughput_rps >= row.throughput_rps * (1 - TIE):
        return "as much, at a higher latency"
    return f"{100 * (1 - best.throughput_rps / row.throughput_rps):.1f} % less"


def nothing(
    estimator: Estimator,
    sides: Sequence[Side],
    searched: Sequence[Searched],
    bound_s: float,
    *,
    worst_case: bool,
) -> ScheduleError:
    """That nothing meets the bound: the least latency there is, and what makes it."""
    runs = [one for one in searched if math.isfinite(one.found.fastest.latency_s)]
    if not runs:
        return ScheduleError(why_nothing_fits(estimator.setting, sides))
    least = min(runs, key=lambda one: one.found.fastest.latency_s)
    setting, row = estimator.setting, least.side.row(least.found.fastest.point)
    fixed = setting.assumptions.output_tokens is not None
    named = "" if fixed else f" (p{100 * setting.assumptions.level:g})"
    held_s = row.latency_high_s if worst_case else row.latency_s
    return ScheduleError(
        f"no schedule meets {bound_s:g} s for an output of {_many(setting.bound_tokens, 'token')}{named}: "
        f"the least latency is {held_s:.3g} s ({row.words}). {_limit(row, setting.iterations, held_s)} "
        f"Allow at least {rounded_up(held_s)} s, or give faster GPUs or a lower quantile"
    )


def _limit(row: ScheduleRow, iterations: int, held_s: float) -> str:
    """What takes most of a latency."""
    share = 1 - row.encode_s / held_s
    if share >= 1 / 2:
        between = "" if row.decode_steps >= iterations else " and what is encoded between them"
        take = "takes" if iterations == 1 and not between else "take"
        return f"{_many(iterations, 'decode iteration')}{between} {take} {100 * share:.0f} % of it."
    return f"Encoding its prompt takes {row.encode_s:.3g} s of it."


def _many(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def rounded_up(seconds: float) -> str:
    """A number of three digits that is no less."""
    digits = 2 - math.floor(math.log10(seconds))
    return f"{math.ceil(seconds * 10**digits) / 10**digits:.{max(digits, 0)}f}"


def least_seen_s(sides: Iterable[Side]) -> float:
    """The least latency among what was estimated of some sides; infinite: nothing of them can run."""
    return min((float(side.seen()[1].min(initial=math.inf)) for side in sides), default=math.inf)


__all__ = ["TIE", "Searched", "improved", "least_seen_s", "nothing", "rounded_up", "told"]
