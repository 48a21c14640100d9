"""Seconds of points from repeats, round after round, so that what drifts drifts for all points alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from lengthwise.measure.operators.points import Point, SkippedError

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
            SkippedError: It cannot be measured here, most often for want of memory.
        """
        ...


class Bench(Protocol):
    """What points are measured on."""

    def prepare(self, point: Point) -> Prepared:
        """Allocates, chooses kernels, warms up.

        Raises:
            SkippedError: It cannot be measured here, most often for want of memory.
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
    prepared have no outcome.
    """
    ready: dict[int, Prepared] = {}
    samples: dict[int, list[Sample]] = {}
    why: dict[int, str] = {}
    for i, point in enumerate(points):
        if late() and ready:
            break
        try:
            ready[i], samples[i] = bench.prepare(point), []
        except SkippedError as error:
            why[i] = str(error) or "out of memory"
            bench.forget()
    for turn in range(repeats):
        if turn >= LEAST_REPEATS and late():
            break
        _round(ready, samples, why)
    done = [_outcome(points[i], samples.get(i, []), ready.get(i), why.get(i, "")) for i in {**ready, **why}]
    ready.clear()
    bench.forget()
    return done


def _round(ready: dict[int, Prepared], samples: dict[int, list[Sample]], why: dict[int, str]) -> None:
    for i, one in ready.items():
        if i in why or (len(samples[i]) >= LEAST_REPEATS and sum(s.wall_s for s in samples[i]) > ENOUGH_S):
            continue
        try:
            samples[i].append(one.sample())
        except SkippedError as error:
            why[i] = str(error) or "out of memory"


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
