"""The box of points that a search for a schedule goes through, and what a point yields."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Place = tuple[int, ...]


@dataclass(frozen=True)
class Variable:
    """One integer variable and the values it may take.

    Attributes:
        name: What it is called.
        values: All of them, each once, in the order of their effect.
        rising: A later value raises throughput and latency; False: it lowers both; None: nothing is known of
            its effect, so that its values are searched side by side, which costs more.
    """

    name: str
    values: tuple[int, ...]
    rising: bool | None = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(self.values))
        if not self.values:
            raise InputError(f"a variable must have a value; {self.name!r} has none")
        if len(set(self.values)) < len(self.values):
            raise InputError(f"the values of a variable must differ; {self.name!r} has {self.values}")


@dataclass(frozen=True, eq=False)
class Perf:
    """A row a point.

    Attributes:
        latency_s: What is bounded; infinite where the point cannot run.
        throughput_rps: What is to be high. Where the point cannot run: what it would be if it could, which
            saves the search many points, or 0 or NaN: unknown.
    """

    latency_s: Floats
    throughput_rps: Floats


Performance = Callable[[Ints], Perf]
"""From points (a row a point, a column a variable) to what they yield."""


class Box:
    """All points of some variables; a place counts each variable's values from least to greatest effect."""

    def __init__(self, variables: Sequence[Variable]) -> None:
        if not variables:
            raise InputError("a search must have 1 variable or more; there are none")
        self._values = [
            np.array(v.values[::-1] if v.rising is False else v.values, np.int64) for v in variables
        ]
        self.shape = tuple(len(values) for values in self._values)
        self.size = math.prod(self.shape)
        self._unknown = [variable.rising is None for variable in variables]

    def blocks(self) -> Iterator[tuple[Place, Place]]:
        """The lowest and highest corners of the largest blocks: in each, every variable that differs rises."""
        ranges = [range(n) if unknown else (0,) for n, unknown in zip(self.shape, self._unknown, strict=True)]
        for lowest in itertools.product(*ranges):
            sides = zip(lowest, self.shape, self._unknown, strict=True)
            yield lowest, tuple(at if unknown else n - 1 for at, n, unknown in sides)

    def points(self, places: Ints) -> Ints:
        """The variables' values at places, a row each."""
        columns = [values[places[:, axis]] for axis, values in enumerate(self._values)]
        return np.stack(columns, axis=1)

    def point(self, place: Place) -> Place:
        """The variables' values at one place."""
        return tuple(int(values[at]) for values, at in zip(self._values, place, strict=True))

    def chunks(self, points: int) -> Iterator[tuple[int, Ints]]:
        """All places in order, so many at a time, each lot with the number of its first."""
        for start in range(0, self.size, points):
            numbers = np.arange(start, min(start + points, self.size), dtype=np.int64)
            yield start, np.stack(np.unravel_index(numbers, self.shape), axis=1).astype(np.int64)


def performance_at(perf: Performance, box: Box, places: Ints) -> Perf:
    """What places yield.

    Raises:
        InputError: The answer is not a number of 0 or more for each point.
    """
    given = perf(box.points(places))
    latency = np.asarray(given.latency_s, np.float64)
    throughput = np.asarray(given.throughput_rps, np.float64)
    shapes = latency.shape, throughput.shape
    if shapes != ((len(places),),) * 2:
        raise InputError(f"perf must give a row for each of {len(places)} points; it gave shapes {shapes}")
    runs = np.isfinite(latency)
    good = (latency >= 0) & (~runs | (np.isfinite(throughput) & (throughput >= 0)))
    if not good.all():
        at = int(np.argmin(good))
        raise InputError(
            f"perf must give a latency and a throughput of 0 or more; at {box.point(tuple(places[at]))} "
            f"it gave {latency[at]} s and {throughput[at]} a second"
        )
    return Perf(latency, throughput)


__all__ = ["Box", "Floats", "Ints", "Perf", "Performance", "Place", "Variable", "performance_at"]
