"""A measurement of many operators within a budget: the coarse grid, then points where they tell most."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.measure.operators.adaptive import Known, Wish, coarse, leave_one_out, shares, wishes
from lengthwise.measure.operators.bench import ENOUGH_S, LEAST_REPEATS, Bench, Outcome, measure
from lengthwise.measure.operators.points import DECODE, MESSAGE, PREFILL, LostError, Operator, Point
from lengthwise.schema.errors import InputError, OutputError, ProfileError
from lengthwise.schema.profile import Profile, ProfileFacts

_KIND = "lengthwise operators, unfinished"


class Journal:
    """Appends outcomes to a file, a line each, and reads those of before.

    Args:
        path: The file; None keeps nothing.
        requested: What the points belong to: model, shapes, device, dtype, versions. Another file's differ.
        operators: Those that its lines may name.

    Raises:
        ProfileError: The file belongs to another measurement, or is none of ours.
        OutputError: It cannot be written.
    """

    def __init__(self, path: Path | None, requested: Mapping[str, Any], operators: Sequence[Operator]) -> None:
        self.path, self._requested = path, json.loads(json.dumps(dict(requested)))
        self._operators = {one.key: one for one in operators}
        self.before: list[Outcome] = []
        self.elapsed_s = 0.0
        if path is None:
            return
        if path.exists() and path.stat().st_size:
            self._read(path)
        else:
            self._append({"kind": _KIND, "version": 1, "requested": self._requested})

    def add(self, outcome: Outcome, elapsed_s: float) -> None:
        """One more line: what came of a point, and the seconds spent so far."""
        self._append(
            {
                "operator": outcome.point.operator.key,
                "at": outcome.point.at,
                "skew": outcome.point.skew,
                "wall_s": outcome.wall_s,
                "cpu_s": outcome.cpu_s,
                "backend": outcome.backend,
                "skipped": outcome.skipped,
                "elapsed_s": round(elapsed_s, 3),
            }
        )

    def _append(self, line: Mapping[str, Any]) -> None:
        if self.path is None:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise OutputError(f"cannot write {self.path}: {error.strerror or error}") from error

    def _read(self, path: Path) -> None:
        text = path.read_bytes()
        whole, _, torn = text.rpartition(b"\n")
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
            head = lines[0] if lines else {}
            fits = head.get("kind") == _KIND and head.get("version") == 1
        except (ValueError, AttributeError):
            fits = False
        if not fits:
            raise ProfileError(f"{path} is not a file of points that a measurement left; name another or delete it")
        self._require_same(path, head["requested"])
        if torn:  # the process was killed within a line
            with path.open("rb+") as file:
                file.truncate(len(text) - len(torn))
        for line in lines[1:]:
            self._take(line)

    def _require_same(self, path: Path, requested: Mapping[str, Any]) -> None:
        if other := [k for k in {**requested, **self._requested} if requested.get(k) != self._requested.get(k)]:
            told = "; ".join(f"{k}: {requested.get(k)} there, {self._requested.get(k)} now" for k in sorted(other))
            raise ProfileError(f"{path} holds points of another measurement ({told}). Give another file or delete it.")

    def _take(self, line: Mapping[str, Any]) -> None:
        operator = self._operators.get(line["operator"])
        if operator is None:
            return
        point = Point(operator, tuple(line["at"]), line["skew"])
        wall_s, cpu_s = tuple(line["wall_s"]), tuple(line["cpu_s"])
        self.before.append(Outcome(point, wall_s, cpu_s, line["backend"], line["skipped"]))
        self.elapsed_s = max(self.elapsed_s, float(line["elapsed_s"]))


_NOISY = 0.10


@dataclass(frozen=True)
class OperatorLine:
    """What was measured of one operator.

    Attributes:
        operator: Its name.
        tp: The TP degree, 0 of no model.
        points: How many were measured.
        spread: Median distance between the quartiles of the repeats, relative.
        error: Median relative error of points that are told by the others (NaN: too few).
        share: Of a typical decode or prefill step, the larger (NaN for a kernel of no model).
    """

    operator: str
    tp: int
    points: int
    spread: float
    error: float
    share: float


def as_profile(outcomes: Sequence[Outcome], metadata: ProfileFacts, dtype: str) -> Profile:
    """A row an outcome and TP degree; what was skipped is told in the notes."""
    done = [(o, tp) for o in outcomes if not o.skipped for tp in o.point.operator.tps]
    rows = [_row(outcome, tp) for outcome, tp in done]
    names = sorted({name for row in rows for name in row})
    columns = {name: np.array([row.get(name, 0) for row in rows]) for name in names if name != "operator"}
    n = len(rows)
    texts = {"dtype": np.full(n, dtype), "kv_dtype": np.full(n, dtype)}
    texts["operator"] = np.array([o.point.operator.name for o, _ in done], dtype=np.str_)
    texts["backend"] = np.array([o.backend for o, _ in done], dtype=np.str_)
    columns |= {"seconds": np.array([o.seconds for o, _ in done])}
    columns |= {"spread_s": np.array([o.spread_s for o, _ in done])}
    return Profile(metadata, {**columns, **texts})


def notes(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """What a reader must know of these outcomes: points without memory, seconds of the processor, noise."""
    told = []
    for key in sorted({o.point.operator.key for o in outcomes if o.skipped}):
        skipped = [o for o in outcomes if o.skipped and o.point.operator.key == key]
        places = ", ".join(str(o.point.at if len(o.point.at) > 1 else o.point.at[0]) for o in skipped[:4])
        more = f" and {len(skipped) - 4} more" if len(skipped) > 4 else ""
        told.append(f"{key}: skipped from {places}{more} on: {skipped[0].skipped}")
    by_processor = sum(o.by_processor for o in outcomes if not o.skipped)
    if by_processor:
        told.append(
            f"{by_processor} points tell seconds of the processor: by the clock they took over 5 % more, since "
            "others used the cores"
        )
    relative = [o.spread_s / o.seconds for o in outcomes if not o.skipped and o.seconds > 0]
    if relative and (spread := float(np.nanmedian(relative))) > _NOISY:
        told.append(f"the device was not quiet: repeats lay {spread:.0%} apart in the median")
    return tuple(told)


def known_of(outcomes: Sequence[Outcome]) -> dict[str, Known]:
    """What is known of each operator, by its key."""
    by_key: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if not outcome.skipped and outcome.point.skew == 1:
            by_key.setdefault(outcome.point.operator.key, []).append(outcome)
    return {key: _known(group) for key, group in by_key.items()}


def table(outcomes: Sequence[Outcome]) -> tuple[OperatorLine, ...]:
    """A line an operator, the largest shares first; kernels of no model last."""
    known = known_of(outcomes)
    share: dict[str, float] = {}
    for tp in {one.operator.tps[0] for one in known.values()}:
        share |= shares({key: one for key, one in known.items() if one.operator.tps[0] == tp})
    lines = [_line(one, share[key]) for key, one in known.items()]
    return tuple(sorted(lines, key=lambda line: (line.tp == 0, line.tp, -np.nan_to_num(line.share))))


def _line(one: Known, share: float) -> OperatorLine:
    errors = leave_one_out(one.operator, list(one.places), one.seconds)
    error = float(np.nanmedian(errors)) if np.isfinite(errors).any() else float("nan")
    spread = float(np.median(one.spread))
    tp = one.operator.tps[0]
    return OperatorLine(one.operator.name, tp, len(one.places), spread, error, share if tp else float("nan"))


def _known(outcomes: list[Outcome]) -> Known:
    seconds = np.array([o.seconds for o in outcomes])
    spread = np.nan_to_num(np.array([o.spread_s for o in outcomes])) / np.maximum(seconds, 1e-12)
    return Known(outcomes[0].point.operator, tuple(o.point.at for o in outcomes), seconds, spread)


def _row(outcome: Outcome, tp: int) -> dict[str, float]:
    point = outcome.point
    row: dict[str, float] = {"tp": tp, "repeats": len(outcome.wall_s), **point.operator.shape}
    return row | _place(point.operator, point.at, point.skew)


def _place(operator: Operator, at: tuple[int, ...], skew: int) -> dict[str, float]:
    if operator.kind == PREFILL:
        return {"seqs": 1, "chunk": at[0], "context": at[1], "tokens": at[0]}
    if operator.kind == DECODE:
        return {"seqs": at[0], "kv_tokens": at[1], "skew": skew, "tokens": at[0]}
    return {"bytes" if operator.kind == MESSAGE else "tokens": at[0]}


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
        self._clock, self._started = clock, clock() - journal.elapsed_s
        self.outcomes: dict[tuple[str, tuple[int, ...], int], Outcome] = {}
        self.lost = ""
        self._times_again: dict[tuple[str, tuple[int, ...], int], int] = {}
        for outcome in journal.before:
            self._keep(outcome)

    @property
    def elapsed_s(self) -> float:
        """Seconds so far, with those of interrupted runs before."""
        return self._clock() - self._started

    def run(self) -> list[Outcome]:
        """An outcome for every point that was tried; ``lost`` says why, if the device ended it.

        Raises:
            InputError: The budget does not suffice for the coarse grid; what was measured is kept.
        """
        try:
            self._coarse()
            while self.elapsed_s < self._plan.budget_s and (batch := self._next()):
                self._measure(batch)
        except LostError as error:
            self.lost = str(error)
        return list(self.outcomes.values())

    def adopt(self, outcomes: Sequence[Outcome]) -> None:
        """Takes points that others measured, and keeps them in the journal."""
        for outcome in outcomes:
            self._journal.add(outcome, self.elapsed_s)
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
        if self.elapsed_s + rest_s <= self._plan.budget_s:
            return
        enough_s = _rounded_up(self.elapsed_s + MARGIN * sum(self._cost_s(point, math.inf) for point in left))
        before_s = self._journal.elapsed_s
        before = f", {before_s:.0f} s of them in earlier runs that this one goes on with" if before_s else ""
        raise InputError(
            f"a budget of {self._plan.budget_s:.0f} s does not suffice for the coarse grid of these operators: "
            f"{self.elapsed_s:.0f} s are spent{before}, and {len(left)} of its points are left. All need from "
            f"{math.ceil(self.elapsed_s + rest_s)} s, told from the points so far, to {enough_s} s, should all grow with "
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
        left_s, batch = self._plan.budget_s - self.elapsed_s, list[Point]()
        for wish, cost_s in priced:
            if cost_s <= left_s and len(batch) < _BATCH:
                batch.append(wish.point)
                left_s -= cost_s
        return batch

    def _may(self, wish: Wish) -> bool:
        if wish.repeat:
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
        self._progress(self.elapsed_s, self._plan.budget_s, points[0].operator.name)
        late = lambda: self.elapsed_s >= self._plan.budget_s  # noqa: E731 - a clock, read many times
        try:
            self._take(measure(self._bench, points, self._plan.repeats, late))
        except LostError as error:
            self._take(error.outcomes)
            raise
        self._progress(self.elapsed_s, self._plan.budget_s, points[-1].operator.name)

    def _take(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.point.key in self.outcomes:
                self._times_again[outcome.point.key] = self._times_again.get(outcome.point.key, 0) + 1
            self._journal.add(outcome, self.elapsed_s)
            self._keep(outcome)

    def _keep(self, outcome: Outcome) -> None:
        before = self.outcomes.get(outcome.point.key)
        self.outcomes[outcome.point.key] = outcome if before is None else before.with_more(outcome)
