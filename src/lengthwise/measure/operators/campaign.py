"""A measurement of many operators within a budget: the coarse grid, then points where they tell most."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lengthwise.measure.operators.adaptive import Wish, wishes
from lengthwise.measure.operators.grids import coarse
from lengthwise.measure.operators.journal import Journal
from lengthwise.measure.operators.points import LostError, Operator, Point
from lengthwise.measure.operators.result import known_of
from lengthwise.measure.operators.timing import ENOUGH_S, LEAST_REPEATS, Bench, Outcome, measure
from lengthwise.schema.errors import InputError

Progress = Callable[[float, float, str], None]
_BATCH = 8
_AGAIN_AT_MOST = 6
_GROWTH, _POINT_S = 8.0, 0.05
MARGIN = 1.5
"""How many times what the rest of the coarse grid takes at most, by what is known, a refusal allows for."""

_TELLING_S = 2e-3  # a point that takes less says little of larger ones: overhead


@dataclass(frozen=True)
class Plan:
    """What to measure and for how long.

    Attributes:
        operators: What to measure.
        budget_s: Seconds in all, with those of interrupted runs before.
        repeats: Of a point that does not take long.
        target: Relative error, of points told by others, at which to stop early.
    """

    operators: tuple[Operator, ...]
    budget_s: float
    repeats: int = 9
    target: float = 0.03


def _rounded_up(seconds: float) -> int:
    """To tens of seconds, below half a minute to whole ones: an estimate has no more digits."""
    return math.ceil(seconds) if seconds < 30 else 10 * math.ceil(seconds / 10)


class Campaign:
    """Measures a plan's points on a bench, and keeps each in the journal as it comes.

    Args:
        plan: What to measure.
        bench: On what.
        journal: Where points go, and those of a run before come from.
        clock: Seconds from any start.
        progress: Told seconds spent, the budget, and what is being measured.
    """

    def __init__(
        self, plan: Plan, bench: Bench, journal: Journal, clock: Callable[[], float], progress: Progress
    ) -> None:
        self._plan, self._bench, self._journal, self._progress = plan, bench, journal, progress
        self._clock, self._started = clock, clock() - journal.spent_s
        self.outcomes: dict[tuple[str, tuple[int, ...], int], Outcome] = {}
        self.lost = ""
        self._times_again: dict[tuple[str, tuple[int, ...], int], int] = {}
        for outcome in journal.before:
            self._keep(outcome)

    @property
    def spent_s(self) -> float:
        """Seconds so far, with those of interrupted runs before."""
        return self._clock() - self._started

    def run(self) -> list[Outcome]:
        """An outcome for every point that was tried; ``lost`` says why, if the device ended it.

        Raises:
            InputError: The budget does not suffice for the coarse grid; what was measured is kept.
        """
        try:
            self._coarse()
            while self.spent_s < self._plan.budget_s and (batch := self._next()):
                self._measure(batch)
        except LostError as error:
            self.lost = str(error)
        return list(self.outcomes.values())

    def adopt(self, outcomes: Sequence[Outcome]) -> None:
        """Takes points that others measured, and keeps them in the journal."""
        for outcome in outcomes:
            self._journal.add(outcome, self.spent_s)
            self._keep(outcome)

    def _coarse(self) -> None:
        grids = [coarse(operator) for operator in self._plan.operators]
        waves = [[grid[i] for grid in grids if i < len(grid)] for i in range(max(map(len, grids), default=0))]
        for turn, wave in enumerate(waves):
            later = [point for one in waves[turn + 1 :] for point in one]
            while left := [point for point in wave if not self._is_done(point)]:
                self._require_time([*left, *(point for point in later if not self._is_done(point))])
                self._measure(left[:_BATCH])

    def _is_done(self, point: Point) -> bool:
        return point.key in self.outcomes or self._is_beyond_memory(point)

    def _require_time(self, left: Sequence[Point]) -> None:
        """Nothing, if the rest of the coarse grid seems to fit the budget.

        The rest is told from the largest point of each operator so far, growing with the work where it
        takes longer than overheads do, eightfold at most: what is far is told when what is nearer is known.
        """
        rest_s = sum(self._cost_s(point) for point in left)
        if self.spent_s + rest_s <= self._plan.budget_s:
            return
        enough_s = _rounded_up(self.spent_s + MARGIN * sum(self._cost_s(point, math.inf) for point in left))
        before_s = self._journal.spent_s
        before = f", {before_s:.0f} s of them in earlier runs that this one goes on with" if before_s else ""
        raise InputError(
            f"a budget of {self._plan.budget_s:.0f} s does not suffice for the coarse grid of these operators: "
            f"{self.spent_s:.0f} s are spent{before}, and {len(left)} of its points are left. All need from "
            f"{math.ceil(self.spent_s + rest_s)} s, told from the points so far, to {enough_s} s, should all grow with "
            "their work; the larger the points that are known, the closer the two. Give a --budget between them, which "
            "counts earlier runs too; or begin anew, without these points, with fewer tokens, sequences or TP degrees, "
            "or shorter contexts."
        )

    def _cost_s(self, point: Point, growth: float = _GROWTH) -> float:
        """Seconds that measuring a point takes, as far as it can be told; up to ``growth`` times the largest so far."""
        told = [
            (o.point.work, o.wall_median_s)
            for o in self.outcomes.values()
            if o.point.operator.key == point.operator.key and not o.skipped
        ]
        if not told:
            return 0.0
        work, seconds = max(told)
        each = seconds * min(max(1.0, point.work / work), growth) if seconds > _TELLING_S else seconds
        return 2 * each + max(LEAST_REPEATS * each, min(self._plan.repeats * each, ENOUGH_S))

    def _next(self) -> list[Point]:
        """The next batch: the points that are wanted most for what they cost, and still fit the budget."""
        known = known_of(list(self.outcomes.values()))
        wanted = [wish for wish in wishes(known, self._plan.target) if self._may(wish)]
        priced = [(wish, self._cost_s(wish.point)) for wish in wanted]
        priced.sort(key=lambda pair: -pair[0].score / math.sqrt(pair[1] + _POINT_S))
        left_s, batch = self._plan.budget_s - self.spent_s, list[Point]()
        for wish, cost_s in priced:
            if cost_s <= left_s and len(batch) < _BATCH:
                batch.append(wish.point)
                left_s -= cost_s
        return batch

    def _may(self, wish: Wish) -> bool:
        if wish.again:
            return self._times_again.get(wish.point.key, 0) < _AGAIN_AT_MOST
        return wish.point.key not in self.outcomes and not self._is_beyond_memory(wish.point)

    def _is_beyond_memory(self, point: Point) -> bool:
        """Whether a point no larger than this one found no memory, or no kernel."""
        return any(
            o.skipped
            and o.point.operator.key == point.operator.key
            and all(a <= b for a, b in zip(o.point.at, point.at, strict=True))
            for o in self.outcomes.values()
        )

    def _measure(self, points: list[Point]) -> None:
        if not points:
            return
        self._progress(self.spent_s, self._plan.budget_s, points[0].operator.name)
        late = lambda: self.spent_s >= self._plan.budget_s  # noqa: E731 - a clock, read many times
        try:
            self._take(measure(self._bench, points, self._plan.repeats, late))
        except LostError as error:
            self._take(error.outcomes)
            raise
        self._progress(self.spent_s, self._plan.budget_s, points[-1].operator.name)

    def _take(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.point.key in self.outcomes:
                self._times_again[outcome.point.key] = self._times_again.get(outcome.point.key, 0) + 1
            self._journal.add(outcome, self.spent_s)
            self._keep(outcome)

    def _keep(self, outcome: Outcome) -> None:
        before = self.outcomes.get(outcome.point.key)
        self.outcomes[outcome.point.key] = outcome if before is None else before.with_more(outcome)
