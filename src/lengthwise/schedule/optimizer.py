"""Branch and bound for the point with the highest throughput under a latency bound (ExeGPT, Algorithm 1).

A step up in a variable raises throughput T and latency L, or leaves them equal. A block is all points between corners a
and b.

**Guarantee.** Let e_T and e_L be the tolerances and g the accepted gap (e_T unless given). Assume that T(x) <= T(y) (1
+ e_T) and L(x) <= L(y) (1 + e_L) for all x <= y of which one meets the bound. Then the result has at least 1 / (1 + g)
of the best throughput of any point that meets the bound. Nothing is assumed about a variable of unknown direction: x
and y are equal in it, and no block spans two of its values.

**Proof.** Every point is evaluated or lies in a block that is discarded for one of two reasons. *Too slow*: L(a) >
bound (1 + e_L). Then each y of the block has L(y) >= L(a) / (1 + e_L) > bound. *No better*: T(b) (1 + e_T) <= T* (1 +
g), where T* is the best so far. Then each x of the block that meets the bound has T(x) <= T(b) (1 + e_T) <= T* (1 + g).
T* only grows. A block inherits the tightest corners of its ancestors, because they bound it as well. At T(b) = T* a
block remains while its minimum latency is below that of the best point, so that ties end at the fastest point.

An infeasible point has infinite latency, so it is too slow, as are all points above it. Its throughput bounds nothing,
unless the performance function returns the throughput that it would have.

**Differences from the published algorithm.** Every evaluated point, also a lower corner, may set T*, and every returned
point meets the bound. Blocks are compared with T* when they are created and again when they are taken from the queue,
which is ordered by their upper corners. A block is split across the side that is longest relative to its range.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lengthwise.schema.errors import InputError
from lengthwise.schema.workload import Floats, Ints

Place = tuple[int, ...]
"""A point: the values of its variables, or (in this module's private classes) the indices of these values."""
Key = tuple[float, float, Place]

CHUNK = 65_536
_NO_POINT: Key = (math.inf, math.inf, ())


@dataclass(frozen=True)
class Variable:
    """An integer variable with distinct values.

    If ``rising``, each later value raises throughput and latency. If not, each later value lowers both. If ``rising``
    is None, the direction is unknown: the search treats every value separately, which costs more.
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
    """Performance of points, one row each. The latency of an infeasible point is infinite.

    The throughput of an infeasible point is the one that it would have if it were feasible, which lets the search skip
    many points. If unknown, it is 0 or NaN.
    """

    latency_s: Floats
    throughput_rps: Floats


Performance = Callable[[Ints], Perf]
"""Function from points (a row per point, a column per variable) to their performance."""


class _Box:
    """All points of some variables. A place is a point as indices of values, in an order of rising throughput."""

    def __init__(self, perf: Performance, variables: Sequence[Variable]) -> None:
        if not variables:
            raise InputError("a search must have 1 variable or more; there are none")
        self._perf = perf
        self._values = [np.array(v.values[::-1] if v.rising is False else v.values, np.int64) for v in variables]
        self._unknown = [variable.rising is None for variable in variables]
        self.shape = tuple(len(values) for values in self._values)
        self.size = math.prod(self.shape)

    def blocks(self) -> Iterator[tuple[Place, Place]]:
        """Yield the (lowest, highest) corners of the blocks in which all variables that vary are monotone.

        There is one block for each combination of values of the variables whose direction is unknown.
        """
        ranges = [range(n) if unknown else (0,) for n, unknown in zip(self.shape, self._unknown, strict=True)]
        for lowest in itertools.product(*ranges):
            sides = zip(lowest, self.shape, self._unknown, strict=True)
            yield lowest, tuple(at if unknown else n - 1 for at, n, unknown in sides)

    def point(self, place: Place) -> Place:
        return tuple(int(values[at]) for values, at in zip(self._values, place, strict=True))

    def evaluated(self, key: Key) -> EvaluatedPoint:
        return EvaluatedPoint(self.point(key[2]), key[0], -key[1])

    def evaluate(self, places: Ints) -> Perf:
        got = self._perf(np.stack([values[places[:, axis]] for axis, values in enumerate(self._values)], axis=1))
        latency, throughput = np.asarray(got.latency_s, np.float64), np.asarray(got.throughput_rps, np.float64)
        shapes = latency.shape, throughput.shape
        if shapes != ((len(places),),) * 2:
            raise InputError(f"perf must give a row for each of {len(places)} points; it gave shapes {shapes}")
        feasible = np.isfinite(latency)
        valid = (latency >= 0) & (~feasible | (np.isfinite(throughput) & (throughput >= 0)))
        if not valid.all():
            at = int(np.argmin(valid))
            raise InputError(
                f"perf must give a latency and a throughput of 0 or more; at {self.point(tuple(places[at]))} "
                f"it gave {latency[at]} s and {throughput[at]} a second"
            )
        return Perf(latency, throughput)

    def chunks(self, points: int) -> Iterator[tuple[slice, Ints, Perf]]:
        for start in range(0, self.size, points):
            numbers = np.arange(start, min(start + points, self.size), dtype=np.int64)
            places = np.stack(np.unravel_index(numbers, self.shape), axis=1).astype(np.int64)
            yield slice(start, start + len(numbers)), places, self.evaluate(places)


@dataclass(frozen=True)
class EvaluatedPoint:
    """A point, given by the values of its variables, and the point's performance."""

    point: Place
    latency_s: float
    throughput_rps: float


@dataclass(frozen=True)
class SearchResult:
    """The feasible point with the highest throughput that a search found under the bound."""

    # None if no point meets the bound with more throughput than ``known_rps``. Of points of equal throughput, the one
    # of minimum latency, then the lowest.
    best: EvaluatedPoint | None
    # The evaluated point of minimum latency, even if it exceeds the bound. Its latency is infinite if no evaluated
    # point is feasible.
    fastest: EvaluatedPoint
    evaluated: int  # number of evaluated points; no point is evaluated twice
    total: int  # number of all points
    # If the tolerances hold, no point that meets the bound has more than (1 + ``gap``) times the throughput of ``best``
    # or, if larger, ``known_rps``. Infinite if the search found neither.
    gap: float


@dataclass(frozen=True)
class Tolerances:
    """Assumed deviations from monotonicity: by which share a lower point's value may exceed a higher point's.

    ``gap`` is the share of throughput that the search may miss. If None, it equals ``throughput``, at no cost. If 0,
    the search evaluates all points that may be within the tolerance of the best.
    """

    throughput: float = 0.02
    latency: float = 0.02
    gap: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not 0 <= value < math.inf:
                raise InputError(f"the tolerance {name!r} must be 0 or more; it is {value}")

    @property
    def accepted(self) -> float:
        """Return the share of throughput that the search may miss: ``gap``, or ``throughput`` if that is None."""
        return self.throughput if self.gap is None else self.gap


def branch_and_bound(
    perf: Performance,
    variables: Sequence[Variable],
    bound_s: float,
    tolerances: Tolerances | None = None,
    *,
    known_rps: float = 0.0,
    batch_size: int = 16,
    max_points: int | None = None,
) -> SearchResult:
    """Return the point of the highest throughput, within the accepted gap, whose latency meets a bound.

    Raises InputError if an argument is out of range or a performance value is invalid.

    Args:
        bound_s: Latency bound. Any feasible point meets an infinite bound.
        known_rps: Throughput of a point that another search found. The search ignores points with no more, and the gap
            refers to the larger of ``known_rps`` and the result.
        batch_size: Blocks that each round splits. A larger value means fewer, larger calls of ``perf`` and some
            unnecessary evaluations.
        max_points: Evaluations after which the search ends with the gap that remains.
    """
    if not bound_s > 0:
        raise InputError(f"the latency bound must be above 0 s; it is {bound_s}")
    if batch_size < 1:
        raise InputError(f"batch_size must be 1 block or more, not {batch_size}")
    search = _Search(_Box(perf, variables), bound_s, known_rps, tolerances or Tolerances())
    return search.run(batch_size, math.inf if max_points is None else max_points)


Entry = tuple[float, float, Place, Place]
"""An entry of the queue: -(upper throughput), minimum latency, lowest and highest corner of a block."""


class _Search:
    """One run of ``branch_and_bound``: evaluated points, and a queue of blocks that may contain a better point.

    ``_discarded_rps`` is the highest throughput that a discarded block can still contain.
    """

    def __init__(self, box: _Box, bound_s: float, known_rps: float, tolerances: Tolerances) -> None:
        self._box, self._bound_s = box, bound_s
        self._limit_s = bound_s * (1 + tolerances.latency)
        self._slack = 1 + tolerances.throughput
        self._improvement = self._slack / (1 + tolerances.accepted)
        self._known: dict[Place, tuple[float, float]] = {}
        """Latency and throughput of each evaluated place; infinite throughput: unknown."""
        # The best is the minimum (-throughput, latency, place), the fastest the minimum (latency, -throughput, place).
        self._best: Key = (-known_rps, -math.inf, ()) if known_rps > 0 else _NO_POINT
        self._fastest = _NO_POINT
        self._queue: list[Entry] = []
        self._discarded_rps = 0.0

    def run(self, batch_size: int, max_points: float) -> SearchResult:
        blocks = list(self._box.blocks())
        if max_points < 2 * len(blocks):
            raise InputError(f"at least {2 * len(blocks)} points must be allowed here, not {max_points}")
        halves: list[Entry] = [(-math.inf, 0.0, *block) for block in blocks]
        while halves:
            self._evaluate(corner for half in halves for corner in half[2:])
            for half in halves:
                self._enqueue(half)
            entries = self._take(int(min(batch_size, (max_points - len(self._known)) // 2)))
            halves = [half for entry in entries for half in self._halves(entry)]
        could_rps = max([self._discarded_rps, *(-entry[0] * self._slack for entry in self._queue)])
        best_rps = -self._best[0]
        gap = 0.0 if could_rps <= max(best_rps, 0.0) else could_rps / best_rps - 1 if best_rps > 0 else math.inf
        loss, latency_s, place = self._best
        best = self._box.evaluated((latency_s, loss, place)) if place else None
        return SearchResult(best, self._box.evaluated(self._fastest), len(self._known), self._box.size, gap)

    def _evaluate(self, places: Iterable[Place]) -> None:
        new = [place for place in dict.fromkeys(places) if place not in self._known]
        if not new:
            return
        got = self._box.evaluate(np.array(new, np.int64))
        for place, latency_s, rps in zip(new, got.latency_s.tolist(), got.throughput_rps.tolist(), strict=True):
            feasible = latency_s < math.inf
            self._known[place] = latency_s, rps if feasible or rps > 0 else math.inf
            if feasible and latency_s <= self._bound_s and -rps <= self._best[0]:
                self._best = min(self._best, (-rps, latency_s, place))
            if latency_s <= self._fastest[0]:
                self._fastest = min(self._fastest, (latency_s, -rps if feasible else 0.0, place))

    def _enqueue(self, half: Entry) -> None:
        """Add a block to the queue if a point between its evaluated corners may be better than the best point."""
        loss, min_s, lowest, highest = half
        latency_s, rps = self._known[lowest][0], self._known[highest][1]
        entry = max(loss, -rps), max(min_s, latency_s), lowest, highest
        has_more_points = sum(highest) - sum(lowest) > 1
        if has_more_points and entry[1] <= self._limit_s and entry[1] < math.inf and not self._discard(entry):
            heapq.heappush(self._queue, entry)

    def _discard(self, entry: Entry) -> bool:
        """Return whether no point of a block can beat the best point. If so, record the block's highest throughput."""
        loss, latency_s, place = self._best
        entry_loss = entry[0] * self._improvement
        if entry_loss > loss or (entry_loss == loss and entry[1:3] >= (latency_s, place)):
            self._discarded_rps = max(self._discarded_rps, -entry[0] * self._slack)
            return True
        return False

    def _take(self, count: int) -> list[Entry]:
        taken: list[Entry] = []
        while self._queue and len(taken) < count:
            entry = heapq.heappop(self._queue)
            if not self._discard(entry):
                taken.append(entry)
        return taken

    def _halves(self, entry: Entry) -> Iterator[Entry]:
        """Yield the two halves of a block, cut across its longest side. The halves of a line share the middle point."""
        loss, min_s, lowest, highest = entry
        sides = zip(lowest, highest, self._box.shape, strict=True)
        shares = [(high - low) * (1 / max(1, length - 1)) for low, high, length in sides]
        axis = shares.index(max(shares))
        middle = (lowest[axis] + highest[axis]) // 2
        above = middle + (sum(map(bool, shares)) > 1)
        yield loss, min_s, lowest, (*highest[:axis], middle, *highest[axis + 1 :])
        yield loss, min_s, (*lowest[:axis], above, *lowest[axis + 1 :]), highest


def exhaustive(perf: Performance, variables: Sequence[Variable], bound_s: float, *, chunk: int = CHUNK) -> SearchResult:
    """Evaluate all points, ``chunk`` at a time to limit the memory, and return the exact result (``gap`` 0)."""
    if not bound_s > 0:
        raise InputError(f"the latency bound must be above 0 s; it is {bound_s}")
    if chunk < 1:
        raise InputError(f"a chunk must be 1 point or more, not {chunk}")
    box = _Box(perf, variables)
    best = fastest = _NO_POINT
    for _, places, got in box.chunks(chunk):
        feasible = np.isfinite(got.latency_s)
        good = np.flatnonzero((got.latency_s <= bound_s) & feasible)
        if len(good):
            best = min(best, _min_key(-got.throughput_rps[good], got.latency_s[good], places[good]))
        loss = np.where(feasible, -np.nan_to_num(got.throughput_rps), 0.0)
        fastest = min(fastest, _min_key(got.latency_s, loss, places))
    found = box.evaluated((best[1], best[0], best[2])) if best[2] else None
    return SearchResult(found, box.evaluated(fastest), box.size, box.size, 0.0)


def _min_key(first: Floats, second: Floats, places: Ints) -> Key:
    same = np.flatnonzero(first == first.min())
    at = int(same[np.argmin(second[same])])
    return float(first[at]), float(second[at]), tuple(places[at].tolist())


def evaluate_grid(perf: Performance, variables: Sequence[Variable], chunk: int = CHUNK) -> Perf:
    """Return the performance of all points as arrays with one axis per variable.

    If ``rising`` is False, the axis has the values in reverse order. The throughput of an infeasible point is NaN.
    """
    box = _Box(perf, variables)
    latency_s, throughput_rps = np.empty(box.size), np.empty(box.size)
    for numbers, _, got in box.chunks(chunk):
        latency_s[numbers], throughput_rps[numbers] = got.latency_s, got.throughput_rps
    throughput_rps[latency_s == math.inf] = np.nan
    return Perf(latency_s.reshape(box.shape), throughput_rps.reshape(box.shape))
