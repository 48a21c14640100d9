"""Measures many operators within a time budget: a coarse grid, then the points that affect steps most."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.measure.operators.adaptive import Candidate, Measured, candidates, coarse_grid, leave_one_out, shares
from lengthwise.measure.operators.bench import ENOUGH_S, MIN_REPEATS, Bench, Outcome, measure
from lengthwise.measure.operators.points import DECODE, MESSAGE, PREFILL, LostError, Operator, Point
from lengthwise.schema.errors import InputError, OutputError, ProfileError
from lengthwise.schema.profile import Profile, ProfileFacts

_KIND = "lengthwise operators, unfinished"


class Journal:
    """File with one outcome per line, from which an interrupted measurement continues. None: no file is written."""

    def __init__(self, path: Path | None, requested: Mapping[str, Any], operators: Sequence[Operator]) -> None:
        # ``requested`` identifies the measurement: model, shapes, device, dtype, versions.
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
        """Append an outcome and the seconds that the measurement has taken so far."""
        point = outcome.point
        line = {"operator": point.operator.key, "at": point.at, "skew": point.skew}
        line |= {name: getattr(outcome, name) for name in ("wall_s", "cpu_s", "backend", "skipped")}
        self._append(line | {"elapsed_s": round(elapsed_s, 3)})

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
        complete, _, torn = text.rpartition(b"\n")
        try:
            lines = [json.loads(line) for line in complete.splitlines()]
            head = lines[0] if lines else {}
            fits = head.get("kind") == _KIND and head.get("version") == 1
        except (ValueError, AttributeError):
            fits = False
        if not fits:
            raise ProfileError(
                f"{path} must be a file of points of a measurement; it is not. Name another or delete it"
            )
        old, new = head["requested"], self._requested
        if other := sorted(k for k in {**old, **new} if old.get(k) != new.get(k)):
            entries = "; ".join(f"{k}: {old.get(k)} there, {new.get(k)} now" for k in other)
            raise ProfileError(
                f"{path} holds points of another measurement ({entries}). Give another file or delete it."
            )
        if torn:  # the process was killed within a line
            with path.open("rb+") as file:
                file.truncate(len(text) - len(torn))
        for line in lines[1:]:
            operator = self._operators.get(line["operator"])
            if operator is not None:
                point = Point(operator, tuple(line["at"]), line["skew"])
                wall_s, cpu_s = tuple(line["wall_s"]), tuple(line["cpu_s"])
                self.before.append(Outcome(point, wall_s, cpu_s, line["backend"], line["skipped"]))
                self.elapsed_s = max(self.elapsed_s, float(line["elapsed_s"]))


_NOISY = 0.10


@dataclass(frozen=True)
class OperatorLine:
    """Quality of the measurements of one operator."""

    operator: str
    tp: int  # degree; 0 for collectives
    points: int  # number of measured points without a skew
    spread: float  # median interquartile range of the repeats, relative
    error: float  # median relative error of points predicted from the others; NaN: too few
    share: float  # of a typical decode or prefill step, the larger; NaN for collectives


def as_profile(outcomes: Sequence[Outcome], metadata: ProfileFacts, dtype: str) -> Profile:
    """Return a profile with a row for each measured point and TP degree."""
    done = [(o, tp) for o in outcomes if not o.skipped for tp in o.point.operator.tps]
    rows = []
    for outcome, tp in done:
        operator, at = outcome.point.operator, outcome.point.at
        row: dict[str, float] = {"tp": tp, "repeats": len(outcome.wall_s), **operator.shape}
        if operator.kind == PREFILL:
            row |= {"seqs": 1, "chunk": at[0], "context": at[1], "tokens": at[0]}
        elif operator.kind == DECODE:
            row |= {"seqs": at[0], "kv_tokens": at[1], "skew": outcome.point.skew, "tokens": at[0]}
        else:
            row["bytes" if operator.kind == MESSAGE else "tokens"] = at[0]
        rows.append(row)
    columns = {name: np.array([row.get(name, 0) for row in rows]) for name in sorted({n for row in rows for n in row})}
    columns |= {name: np.array([getattr(o, name) for o, _ in done]) for name in ("seconds", "spread_s")}
    columns |= {name: np.full(len(rows), dtype) for name in ("dtype", "kv_dtype")}
    columns["operator"] = np.array([o.point.operator.name for o, _ in done], dtype=np.str_)
    return Profile(metadata, columns | {"backend": np.array([o.backend for o, _ in done], dtype=np.str_)})


def notes(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """Return notes on skipped points, on points measured by CPU time, and on noise."""
    found = []
    for key in sorted({o.point.operator.key for o in outcomes if o.skipped}):
        skipped = [o for o in outcomes if o.skipped and o.point.operator.key == key]
        places = ", ".join(str(o.point.at if len(o.point.at) > 1 else o.point.at[0]) for o in skipped[:4])
        more = f" and {len(skipped) - 4} more" if len(skipped) > 4 else ""
        found.append(f"{key}: skipped from {places}{more} on: {skipped[0].skipped}")
    measured = [o for o in outcomes if not o.skipped]
    if cpu_timed := sum(o.is_cpu_time for o in measured):
        more = "their wall-clock time was over 5 % longer, because other processes used the cores"
        found.append(f"the seconds of {cpu_timed} points are CPU time: {more}")
    relative = [o.spread_s / o.seconds for o in measured if o.seconds > 0]
    if relative and (spread := float(np.nanmedian(relative))) > _NOISY:
        found.append(f"the device was not idle: the median spread of repeats is {spread:.0%}")
    return tuple(found)


def data_by_operator(outcomes: Sequence[Outcome]) -> dict[str, Measured]:
    """Return the measurements of each operator, by the operator's key, without points that have a skew."""
    by_key: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if not outcome.skipped and outcome.point.skew == 1:
            by_key.setdefault(outcome.point.operator.key, []).append(outcome)
    found = {}
    for key, group in by_key.items():
        seconds = np.array([o.seconds for o in group])
        spread = np.nan_to_num(np.array([o.spread_s for o in group])) / np.maximum(seconds, 1e-12)
        found[key] = Measured(group[0].point.operator, tuple(o.point.at for o in group), seconds, spread)
    return found


def table(outcomes: Sequence[Outcome]) -> tuple[OperatorLine, ...]:
    """Return a line for each operator. The largest shares of a step's time come first, collectives last."""
    known = data_by_operator(outcomes)
    share: dict[str, float] = {}
    for tp in {one.operator.tps[0] for one in known.values()}:
        share |= shares({key: one for key, one in known.items() if one.operator.tps[0] == tp})
    lines = []
    for key, one in known.items():
        errors, tp = leave_one_out(one.operator, one.places, one.seconds), one.operator.tps[0]
        error = float(np.nanmedian(errors)) if np.isfinite(errors).any() else float("nan")
        spread, part = float(np.median(one.spread)), share[key] if tp else float("nan")
        lines.append(OperatorLine(one.operator.name, tp, len(one.places), spread, error, part))
    return tuple(sorted(lines, key=lambda line: (line.tp == 0, line.tp, -np.nan_to_num(line.share))))


Progress = Callable[[float, float, str], None]
_BATCH = 8
_MAX_EXTRA_REPEATS = 6
_GROWTH, _POINT_S = 8.0, 0.05
MARGIN = 1.5  # factor on the estimated rest of the coarse grid, in the budget that an error recommends
_MIN_SCALING_S = 2e-3  # a faster point is mostly overhead, and says little about larger ones


@dataclass(frozen=True)
class Plan:
    """Operators to measure, the time budget, and when to stop early."""

    operators: tuple[Operator, ...]
    budget_s: float  # including the seconds of interrupted runs
    repeats: int = 9
    target: float = 0.03  # relative error, of points predicted from the others, at which to stop early


class Campaign:
    """Measures the points of a plan within its budget, and stores each outcome in the journal immediately."""

    def __init__(
        self, plan: Plan, bench: Bench, journal: Journal, clock: Callable[[], float], progress: Progress
    ) -> None:
        self._plan, self._bench, self._journal, self._progress = plan, bench, journal, progress
        self._clock, self._started = clock, clock() - journal.elapsed_s
        self.outcomes: dict[tuple[str, tuple[int, ...], int], Outcome] = {}
        self.lost = ""
        self._extra_repeats: dict[tuple[str, tuple[int, ...], int], int] = {}
        for outcome in journal.before:
            self._merge(outcome)

    @property
    def elapsed_s(self) -> float:
        """Seconds that the measurement has taken so far, including interrupted runs."""
        return self._clock() - self._started

    def run(self) -> list[Outcome]:
        """Measure the plan and return an outcome for every point tried. If the device fails, ``lost`` has the error."""
        try:
            self.measure_coarse_grid()
            while self.elapsed_s < self._plan.budget_s and (batch := self._next_batch()):
                self._measure(batch)
        except LostError as error:
            self.lost = str(error)
        return list(self.outcomes.values())

    def measure_coarse_grid(self) -> None:
        """Measure the coarse grids, small points first. Raises LostError, or InputError if the budget is too small."""
        grids = [coarse_grid(operator) for operator in self._plan.operators]
        waves = [[grid[i] for grid in grids if i < len(grid)] for i in range(max(map(len, grids), default=0))]
        for turn, wave in enumerate(waves):
            later = [point for one in waves[turn + 1 :] for point in one]
            while left := [point for point in wave if not self._is_done(point)]:
                self._require_time([*left, *(point for point in later if not self._is_done(point))])
                self._measure(left[:_BATCH])

    def add_outcomes(self, outcomes: Sequence[Outcome]) -> None:
        """Add outcomes of new points and store them in the journal."""
        for outcome in outcomes:
            self._journal.add(outcome, self.elapsed_s)
            self._merge(outcome)

    def _merge(self, outcome: Outcome) -> None:
        before = self.outcomes.get(outcome.point.key)
        self.outcomes[outcome.point.key] = outcome if before is None else before.merged(outcome)

    def _is_done(self, point: Point) -> bool:
        skipped = (o.point for o in self.outcomes.values() if o.skipped and o.point.operator.key == point.operator.key)
        is_above = (all(a <= b for a, b in zip(smaller.at, point.at, strict=True)) for smaller in skipped)
        return point.key in self.outcomes or any(is_above)

    def _require_time(self, left: Sequence[Point]) -> None:
        rest_s = sum(self._cost_s(point) for point in left)
        if self.elapsed_s + rest_s <= self._plan.budget_s:
            return
        enough_s = self.elapsed_s + MARGIN * sum(self._cost_s(point, math.inf) for point in left)
        rounded_s = math.ceil(enough_s) if enough_s < 30 else 10 * math.ceil(enough_s / 10)
        before_s = self._journal.elapsed_s
        before = f", {before_s:.0f} s of them in earlier runs that this one continues" if before_s else ""
        raise InputError(
            f"a budget of {self._plan.budget_s:.0f} s does not suffice for the coarse grid of these operators: "
            f"{self.elapsed_s:.0f} s are spent{before}, and {len(left)} of its points are left. The grid needs from "
            f"{math.ceil(self.elapsed_s + rest_s)} s, by the points so far, to {rounded_s} s, if the time of every "
            "point grows with its work. Give a --budget in this range, which includes earlier runs; or start again, "
            "without these points, with fewer tokens, sequences or TP degrees, or shorter contexts."
        )

    def _cost_s(self, point: Point, growth: float = _GROWTH) -> float:
        """Estimate the seconds to measure a point, scaled from the operator's largest one by at most ``growth``."""
        own = [o for o in self.outcomes.values() if o.point.operator.key == point.operator.key and not o.skipped]
        known = [(o.point.work, o.wall_median_s) for o in own]
        if not known:
            return 0.0
        work, each_s = max(known)
        if each_s > _MIN_SCALING_S:
            each_s *= min(max(1.0, point.work / work), growth)
        return 2 * each_s + max(MIN_REPEATS * each_s, min(self._plan.repeats * each_s, ENOUGH_S))

    def _next_batch(self) -> list[Point]:
        def is_open(one: Candidate) -> bool:
            repeats = self._extra_repeats.get(one.point.key, 0)
            return repeats < _MAX_EXTRA_REPEATS if one.repeat else not self._is_done(one.point)

        found = candidates(data_by_operator(list(self.outcomes.values())), self._plan.target)
        costs = [(one, self._cost_s(one.point)) for one in found if is_open(one)]
        costs.sort(key=lambda pair: -pair[0].score / math.sqrt(pair[1] + _POINT_S))
        left_s, batch = self._plan.budget_s - self.elapsed_s, list[Point]()
        for one, cost_s in costs:
            if cost_s <= left_s and len(batch) < _BATCH:
                batch.append(one.point)
                left_s -= cost_s
        return batch

    def _measure(self, points: list[Point]) -> None:
        budget_s = self._plan.budget_s
        self._progress(self.elapsed_s, budget_s, points[0].operator.name)
        lost = None
        try:
            outcomes = measure(self._bench, points, self._plan.repeats, lambda: self.elapsed_s >= budget_s)
        except LostError as error:
            lost, outcomes = error, error.outcomes
        for outcome in outcomes:
            if outcome.point.key in self.outcomes:
                self._extra_repeats[outcome.point.key] = self._extra_repeats.get(outcome.point.key, 0) + 1
        self.add_outcomes(outcomes)
        if lost is not None:
            raise lost
        self._progress(self.elapsed_s, budget_s, points[-1].operator.name)
