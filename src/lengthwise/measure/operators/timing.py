"""Seconds of points from repeats, round after round, so that what drifts drifts for all points alike."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from lengthwise.measure.operators.points import LostError, NoRoomError, Point, SkippedError

LEAST_REPEATS, ENOUGH_S = 3, 0.25


@dataclass(frozen=True)
class Sample:
    """One repeat: seconds of one call by the clock, and of the processor (None: not told)."""

    wall_s: float
    cpu_s: float | None = None


class Prepared(Protocol):
    """A point that is warm and ready to be measured."""

    backend: str

    def sample(self) -> Sample:
        """One repeat.

        Raises:
            SkippedError: It cannot be measured here; NoRoomError: for want of memory.
            LostError: The device answers no more.
        """
        ...


class Bench(Protocol):
    """What points are measured on."""

    def prepare(self, point: Point) -> Prepared:
        """Allocates, chooses kernels, warms up.

        Raises:
            SkippedError: It cannot be measured here; NoRoomError: for want of memory.
            LostError: The device answers no more.
        """
        ...

    def forget(self) -> None:
        """Gives back the memory of points that nobody holds any more."""
        ...


@dataclass(frozen=True)
class Outcome:
    """All repeats of a point, or why it has none."""

    point: Point
    wall_s: tuple[float, ...] = ()
    cpu_s: tuple[float, ...] = ()
    backend: str = ""
    skipped: str = ""

    @cached_property
    def seconds(self) -> float:
        """The median; of the processor's seconds where they are told and fewer: others took the rest."""
        wall_s = self.wall_median_s
        return min(wall_s, float(np.median(self.cpu_s))) if self.cpu_s else wall_s

    @cached_property
    def wall_median_s(self) -> float:
        """The median by the clock: what a point takes to measure."""
        return float(np.median(self.wall_s))

    @property
    def by_processor(self) -> bool:
        """Whether ``seconds`` are the processor's since the wall's are a twentieth more."""
        return bool(self.cpu_s) and self.wall_median_s > 1.05 * float(np.median(self.cpu_s))

    @cached_property
    def spread_s(self) -> float:
        """The distance between the quartiles of the repeats that ``seconds`` is the median of."""
        if len(self.wall_s) < 2:
            return float("nan")
        of = self.cpu_s if self.cpu_s and float(np.median(self.cpu_s)) < self.wall_median_s else self.wall_s
        low, high = np.percentile(of, [25, 75])
        return float(high - low)

    def with_more(self, other: Outcome) -> Outcome:
        """The repeats of both."""
        if other.skipped:
            return self
        cpu_s = (*self.cpu_s, *other.cpu_s)
        return Outcome(self.point, (*self.wall_s, *other.wall_s), cpu_s, other.backend or self.backend)


def measure(
    bench: Bench, points: Sequence[Point], repeats: int, late: Callable[[], bool] = lambda: False
) -> list[Outcome]:
    """An outcome a point: all are prepared, then every round repeats each once.

    Slow points, once ENOUGH_S were spent on them, have LEAST_REPEATS rather than ``repeats``. Once ``late``
    says so no point is prepared, and rounds end when every point has LEAST_REPEATS; points that were never
    prepared have no outcome. A point that finds no room beside others is tried alone before it is skipped.

    Raises:
        LostError: The device answers no more. Its ``outcomes`` are what was measured until then.
    """
    done: list[Outcome] = []
    left, alone = deque(points), deque[Point]()
    while left or alone:
        if done and late():
            break
        group = _Group(bench, late)
        try:
            group.prepare(left or deque([alone.popleft()]))
            group.repeat(repeats)
        except LostError as error:
            error.outcomes = [*done, *group.outcomes(lost=str(error))]
            raise
        done += group.outcomes()
        alone += group.crowded
        del group  # and what it holds on the device
        bench.forget()
    return done


class _Group:
    """Points that are on the device at the same time."""

    def __init__(self, bench: Bench, late: Callable[[], bool]) -> None:
        self._bench, self._late = bench, late
        self._points: list[Point] = []
        self._ready: dict[int, Prepared] = {}
        self._samples: dict[int, list[Sample]] = {}
        self._why: dict[int, str] = {}
        self._at = 0
        self.crowded: list[Point] = []

    def prepare(self, left: deque[Point]) -> None:
        """Takes points until one finds no room beside those before it, which waits until they are gone."""
        while left and not (self._ready and self._late()):
            self._at = len(self._points)
            self._points.append(left.popleft())
            try:
                self._ready[self._at] = self._bench.prepare(self._points[-1])
                self._samples[self._at] = []
            except NoRoomError as error:
                if self._ready:
                    left.appendleft(self._points.pop())
                    return
                self._why[self._at] = str(error) or "out of memory"
            except SkippedError as error:
                self._why[self._at] = str(error)
            if self._at in self._why:
                self._bench.forget()

    def repeat(self, repeats: int) -> None:
        """Round after round."""
        for turn in range(repeats):
            if turn >= LEAST_REPEATS and self._late():
                break
            for i in list(self._ready):
                samples = self._samples[i]
                if len(samples) < LEAST_REPEATS or sum(s.wall_s for s in samples) <= ENOUGH_S:
                    self._sample(i)

    def _sample(self, i: int) -> None:
        self._at = i
        try:
            self._samples[i].append(self._ready[i].sample())
        except SkippedError as error:
            crowded = isinstance(error, NoRoomError) and len(self._ready) > 1
            if crowded:
                self.crowded.append(self._points[i])
            else:
                self._why[i] = str(error) or "out of memory"
        if i in self._why or self._points[i] in self.crowded:
            del self._ready[i], self._samples[i]

    def outcomes(self, lost: str = "") -> list[Outcome]:
        """One a point that was measured or skipped; ``lost``: the point under way broke the device."""
        if lost:
            self._why[self._at] = f"the device failed: {lost}"
        measured = [i for i, samples in self._samples.items() if samples and i not in self._why]
        return [
            _outcome(self._points[i], self._samples.get(i, []), self._ready.get(i), self._why.get(i, ""))
            for i in sorted([*measured, *self._why])
        ]


def _outcome(point: Point, samples: list[Sample], prepared: Prepared | None, why: str) -> Outcome:
    if why or prepared is None:
        return Outcome(point, skipped=why or "out of memory")
    cpu_s = tuple(s.cpu_s for s in samples if s.cpu_s is not None)
    return Outcome(
        point,
        tuple(s.wall_s for s in samples),
        cpu_s if len(cpu_s) == len(samples) else (),
        prepared.backend,
    )
