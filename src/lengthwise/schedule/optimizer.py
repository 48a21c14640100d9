"""The best point under a latency bound, by branch and bound over monotone variables.

After ExeGPT (Oh et al., ASPLOS 2024), Algorithm 1, for any number of variables. Raising a variable is
meant to raise throughput T and latency L, or to leave them. A block is all points from a corner a up to a
corner b.

**What is certain.** Let e_T and e_L be the tolerances and g the accepted gap (e_T unless given). If for all
x <= y of which one meets the bound, T(x) <= T(y) (1 + e_T) and L(x) <= L(y) (1 + e_L), then the result has
at least 1 / (1 + g) >= 1 - g of the best throughput of any point that meets the bound. With e_T = e_L = 0,
on monotone functions, it is the best, and of equal ones the fastest. Of a variable whose direction is not
known nothing is assumed: x and y are then equal in it, and no block spans two of its values.

**Proof.** Every point is evaluated or lies in a block that was discarded, and a block is discarded for one
of two reasons. *Too slow*: L(a) > bound (1 + e_L). Each y of the block has L(y) >= L(a) / (1 + e_L) >
bound, so none meets the bound. *No better*: T(b) (1 + e_T) <= T* (1 + g), where T* is the best so far. Each
x of the block that meets the bound has T(x) <= T(b) (1 + e_T) <= T* (1 + g). T* only grows. A block keeps
the tightest of its ancestors' corners, as they bound it too. Where e_T = g the second reason is T(b) <= T*:
a corner b that meets the bound settles its block, at no cost for the tolerance. At T(b) = T* a block is
kept while its least latency is below that of the best, so that ties end at the fastest point.

A point that cannot run has infinite latency and so is too slow with all above it. Its throughput, unless
perf says what it would be, bounds nothing.

**Where the published algorithm differs, and why this is not it.** It updates T* only from the upper corners
of halves, though lower corners are evaluated too and are the first to meet a tight bound; here every point
that is evaluated counts. It starts with T* at the lowest corner whether or not that meets the bound, and may
return it; here nothing is returned that does not meet it. It compares queued blocks with T* only when T*
improves, so that worse blocks may enter later; here a block is judged when it is made and again when it is
taken. It keeps, and splits down to points, a block whose upper corner meets the bound if it is within the
tolerance of T*; here only a smaller accepted gap asks for that. It takes blocks by their lower corner; here
by the upper one, so that, one block a wave, none below the final T* is split. It splits by the better of the
single-axis corners, which costs d points a block: over random smooth instances of 3 and 4 variables it
evaluated 1.6 to 2.3 times the points, on average, that halving the side with the longest share of its range
needs, which is done here (11 times, where it measures sides by their number of values). Two neighbours and
single points are never split; a line is bisected with one point a step, not two.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
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
        self._values = [np.array(v.values[::-1] if v.rising is False else v.values, np.int64) for v in variables]
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


@dataclass(frozen=True)
class Reached:
    """A point, by the variables' values, and what it yields."""

    point: Place
    latency_s: float
    throughput_rps: float


@dataclass(frozen=True)
class Block:
    """All points from one corner to another, and what became of them.

    Attributes:
        lowest: The corner of the least latency and throughput.
        highest: The corner of the greatest.
        fate: "split"; "too slow": none of them meets the bound; "no better": none is better than what was
            found; "done": both corners are all there is.
    """

    lowest: Place
    highest: Place
    fate: str


@dataclass(frozen=True)
class Found:
    """The point of the highest throughput found that meets the bound, and how sure that is.

    Attributes:
        best: The point; of equal throughput the least latency, then the least effect, first variable first.
            None: nothing evaluated meets the bound.
        fastest: The point of the least latency that was evaluated, whether it meets the bound or not; its
            latency is infinite where none of them can run.
        evaluated: Points evaluated, each once.
        of: Points there are.
        calls: Calls of the performance function.
        gap: The best of all points has at most (1 + gap) times the throughput of ``best``, if the tolerances
            hold. Infinite where nothing is known.
        trace: The first blocks, as many as were asked for.
    """

    best: Reached | None
    fastest: Reached
    evaluated: int
    of: int
    calls: int
    gap: float
    trace: tuple[Block, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether nothing is better than ``best``, or nothing meets the bound, if the tolerances hold."""
        return self.gap == 0.0

    @property
    def share(self) -> float:
        """The share of the points that was evaluated."""
        return self.evaluated / self.of


Key = tuple[float, float, Place]
EMPTY: Key = (math.inf, math.inf, ())


class Seen:
    """The points evaluated under a bound.

    Attributes:
        best: The least (-throughput, latency, place) of those that meet the bound.
        fastest: The least (latency, -throughput, place) of all.
        calls: Calls of the performance function.
    """

    def __init__(self, perf: Performance, box: Box, bound_s: float) -> None:
        self._perf, self._box, self._bound_s = perf, box, bound_s
        self._known: dict[Place, tuple[float, float]] = {}
        self.best, self.fastest, self.calls = EMPTY, EMPTY, 0

    def __len__(self) -> int:
        return len(self._known)

    def __getitem__(self, place: Place) -> tuple[float, float]:
        """Latency and throughput of a place that was evaluated; infinite throughput: unknown."""
        return self._known[place]

    def evaluate(self, places: Iterable[Place]) -> None:
        """Evaluates those that are new, all in one call."""
        new = [place for place in dict.fromkeys(places) if place not in self._known]
        if not new:
            return
        got = performance_at(self._perf, self._box, np.array(new, np.int64))
        self.calls += 1
        rows = zip(new, got.latency_s.tolist(), got.throughput_rps.tolist(), strict=True)
        for place, latency_s, throughput_rps in rows:
            self._keep(place, latency_s, throughput_rps)

    def _keep(self, place: Place, latency_s: float, throughput_rps: float) -> None:
        runs = latency_s < math.inf
        known = throughput_rps if runs or throughput_rps > 0 else math.inf
        self._known[place] = latency_s, known
        if runs and latency_s <= self._bound_s and -throughput_rps <= self.best[0]:
            self.best = min(self.best, (-throughput_rps, latency_s, place))
        if latency_s <= self.fastest[0]:
            self.fastest = min(self.fastest, (latency_s, -throughput_rps if runs else 0.0, place))

    def reached(self) -> tuple[Reached | None, Reached]:
        """The best, if anything meets the bound, and the fastest."""
        return reached(self._box, self.best, self.fastest)


def reached(box: Box, best: Key, fastest: Key) -> tuple[Reached | None, Reached]:
    """The best, if there is one, and the fastest, by the variables' values."""
    latency_s, loss, place = fastest
    quick = Reached(box.point(place), latency_s, -loss)
    return (Reached(box.point(best[2]), best[1], -best[0]) if best[2] else None), quick


Entry = tuple[float, float, Place, Place]
"""Of the queue: -(upper throughput), least latency, lowest and highest corner."""


@dataclass(frozen=True)
class Tolerances:
    """How far from monotone a search takes its functions to be, each as a share.

    Attributes:
        throughput: A lower point's throughput may exceed a higher one's by this.
        latency: Likewise.
        gap: The share of throughput that may be missed. None: as ``throughput``, which costs nothing; 0 costs
            all points that are within the tolerance of the best.
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
        """The gap that is accepted."""
        return self.throughput if self.gap is None else self.gap


def branch_and_bound(
    perf: Performance,
    variables: Sequence[Variable],
    bound_s: float,
    tolerances: Tolerances | None = None,
    *,
    known_rps: float = 0.0,
    batch_size: int = 16,
    most: int | None = None,
    trace: int = 0,
) -> Found:
    """The point of the highest throughput, to the accepted gap, whose latency meets a bound.

    Args:
        perf: Evaluates points, many at a time.
        variables: What may be chosen.
        bound_s: The latency that is still good; infinite: any that can run.
        tolerances: How far perf may be from monotone.
        known_rps: A throughput that is had elsewhere: what has no more of it is not looked for, and the gap is
            that of the better of both.
        batch_size: Blocks split at a time: more make fewer and larger calls, and some points in vain.
        most: Points evaluated at most; the search then ends with the gap that is left.
        trace: Blocks kept to be drawn, at most.

    Raises:
        InputError: A number is out of range, or perf's answer cannot be used.
    """
    _check(bound_s, batch_size)
    box = Box(variables)
    seen = Seen(perf, box, bound_s)
    if known_rps > 0:
        seen.best = -known_rps, -math.inf, ()
    search = _Search(seen, box, bound_s, tolerances or Tolerances(), trace)
    search.run(batch_size, math.inf if most is None else most)
    best, fastest = seen.reached()
    return Found(best, fastest, len(seen), box.size, seen.calls, search.gap(), tuple(_blocks(box, search.traced)))


class _Search:
    """The queue of blocks that may hold something better, and what the discarded ones could hold."""

    def __init__(self, seen: Seen, box: Box, bound_s: float, tolerances: Tolerances, trace: int) -> None:
        self._seen, self._trace = seen, trace
        self._scales = [1 / max(1, length - 1) for length in box.shape]
        self._first = list(box.blocks())
        self._limit_s = bound_s * (1 + tolerances.latency)
        self._slack = 1 + tolerances.throughput
        self._is_improvement = self._slack / (1 + tolerances.accepted)
        self._queue: list[Entry] = []
        self._missed = 0.0
        self.traced: list[tuple[Place, Place, str]] = []

    def run(self, batch_size: int, most: float) -> None:
        """Until no block can hold anything better, or too few evaluations are left to split one."""
        if most < 2 * len(self._first):
            raise InputError(f"at least {2 * len(self._first)} points must be allowed here, not {most}")
        self._seen.evaluate(corner for block in self._first for corner in block)
        for block in self._first:
            self._evaluate(-math.inf, 0.0, *block)
        while blocks := self._taken(int(min(batch_size, (most - len(self._seen)) // 2))):
            halves = [half for block in blocks for half in self._halves(block)]
            self._seen.evaluate(corner for half in halves for corner in half[2:])
            for half in halves:
                self._evaluate(*half)

    def gap(self) -> float:
        """By what share the best of all may exceed the best so far."""
        could = max([self._missed, *(-entry[0] * self._slack for entry in self._queue)])
        best = -self._seen.best[0]
        if could <= max(best, 0.0):
            return 0.0
        return could / best - 1 if best > 0 else math.inf

    def _evaluate(self, loss: float, min_s: float, lowest: Place, highest: Place) -> None:
        """Keeps a block whose corners are evaluated if more than they may be in it."""
        latency_s, throughput = self._seen[lowest][0], self._seen[highest][1]
        entry = max(loss, -throughput), max(min_s, latency_s), lowest, highest
        if sum(highest) - sum(lowest) <= 1:
            self._note(entry, "done")
        elif entry[1] > self._limit_s or entry[1] == math.inf:
            self._note(entry, "too slow")
        elif self._infeasible(entry):
            self._drop(entry)
        else:
            heapq.heappush(self._queue, entry)

    def _infeasible(self, entry: Entry) -> bool:
        """Whether a block holds nothing better than the best so far."""
        loss, latency_s, place = self._seen.best
        mine = entry[0] * self._is_improvement
        return mine > loss or (mine == loss and entry[1:3] >= (latency_s, place))

    def _drop(self, entry: Entry) -> None:
        self._missed = max(self._missed, -entry[0] * self._slack)
        self._note(entry, "no better")

    def _taken(self, count: int) -> list[Entry]:
        """The most promising blocks out of the queue."""
        taken: list[Entry] = []
        while self._queue and len(taken) < count:
            entry = heapq.heappop(self._queue)
            if self._infeasible(entry):
                self._drop(entry)
            else:
                self._note(entry, "split")
                taken.append(entry)
        return taken

    def _halves(self, entry: Entry) -> Iterator[Entry]:
        """A block cut across its longest side; the parts of a line share the point between them."""
        loss, min_s, lowest, highest = entry
        sides = zip(lowest, highest, self._scales, strict=True)
        shares = [(high - low) * scale for low, high, scale in sides]
        axis = shares.index(max(shares))
        middle = (lowest[axis] + highest[axis]) // 2
        beyond = middle + (sum(map(bool, shares)) > 1)
        yield loss, min_s, lowest, (*highest[:axis], middle, *highest[axis + 1 :])
        yield loss, min_s, (*lowest[:axis], beyond, *lowest[axis + 1 :]), highest

    def _note(self, entry: Entry, fate: str) -> None:
        if len(self.traced) < self._trace:
            self.traced.append((entry[2], entry[3], fate))


def _blocks(box: Box, traced: Sequence[tuple[Place, Place, str]]) -> Iterator[Block]:
    for lowest, highest, fate in traced:
        yield Block(box.point(lowest), box.point(highest), fate)


def _check(bound_s: float, batch_size: int) -> None:
    if not bound_s > 0:
        raise InputError(f"the latency bound must be above 0 s; it is {bound_s}")
    if batch_size < 1:
        raise InputError(f"a wave must be 1 block or more, not {batch_size}")


CHUNK = 65_536


def exhaustive(perf: Performance, variables: Sequence[Variable], bound_s: float, *, chunk: int = CHUNK) -> Found:
    """The point of the highest throughput whose latency meets a bound, whatever perf is like.

    Args:
        perf: Evaluates points, many at a time.
        variables: What may be chosen.
        bound_s: The latency that is still good; infinite: any that can run.
        chunk: Points evaluated at a time, which bounds the memory.

    Raises:
        InputError: A number is out of range, or perf's answer cannot be used.
    """
    if not bound_s > 0:
        raise InputError(f"the latency bound must be above 0 s; it is {bound_s}")
    if chunk < 1:
        raise InputError(f"a chunk must be 1 point or more, not {chunk}")
    box = Box(variables)
    best, fastest, calls = EMPTY, EMPTY, 0
    for _, places in box.chunks(chunk):
        got = performance_at(perf, box, places)
        calls += 1
        best = min(best, _best(got, places, bound_s))
        fastest = min(fastest, _min_decode_s(got, places))
    return Found(*reached(box, best, fastest), box.size, box.size, calls, 0.0)


def _best(got: Perf, places: Ints, bound_s: float) -> Key:
    good = np.flatnonzero((got.latency_s <= bound_s) & np.isfinite(got.latency_s))
    if not len(good):
        return EMPTY
    return _least(-got.throughput_rps[good], got.latency_s[good], places[good])


def _min_decode_s(got: Perf, places: Ints) -> Key:
    loss = np.where(np.isfinite(got.latency_s), -np.nan_to_num(got.throughput_rps), 0.0)
    return _least(got.latency_s, loss, places)


def _least(first: Floats, second: Floats, places: Ints) -> Key:
    """The least of (first, second, place); places come in order."""
    same = np.flatnonzero(first == first.min())
    at = int(same[np.argmin(second[same])])
    return float(first[at]), float(second[at]), tuple(places[at].tolist())


def whole_box(perf: Performance, variables: Sequence[Variable], chunk: int = CHUNK) -> Perf:
    """Every point's latency and throughput, an axis a variable in the order of its effect.

    Throughput is NaN where a point cannot run.
    """
    box = Box(variables)
    latency_s, throughput_rps = np.empty(box.size), np.empty(box.size)
    for start, places in box.chunks(chunk):
        got = performance_at(perf, box, places)
        latency_s[start : start + len(places)] = got.latency_s
        throughput_rps[start : start + len(places)] = got.throughput_rps
    throughput_rps[latency_s == math.inf] = np.nan
    return Perf(latency_s.reshape(box.shape), throughput_rps.reshape(box.shape))


@dataclass(frozen=True)
class NonMonotone:
    """The shares of the points of a box that break monotony along one variable.

    A point breaks it if one before it on its line, all other variables being equal, has a value that is
    higher by more than the tolerance. Points that cannot run are left out.

    Attributes:
        variable: Its name.
        tolerance: Of the point's own value, or of the scale that was given.
        latency: The share by latency.
        throughput: The share by throughput.
        gaps: The share of points that can run though one before them on the line cannot.
        points: How many can run, of which the shares are.
    """

    variable: str
    tolerance: float
    latency: float
    throughput: float
    gaps: float
    points: int


def non_monotone(
    perf: Performance,
    variables: Sequence[Variable],
    tolerances: Sequence[float] = (0.02, 0.05, 0.10),
    *,
    latency_scale_s: float | None = None,
    throughput_scale_rps: float | None = None,
) -> tuple[NonMonotone, ...]:
    """A row for each variable that has a direction and each tolerance, over all combinations of the others.

    Args:
        perf: Evaluates points, many at a time.
        variables: All of them; every point is evaluated.
        tolerances: Shares.
        latency_scale_s: What tolerances of latency are shares of; the paper takes a latency bound. None: the
            point's own latency.
        throughput_scale_rps: Likewise; the paper takes the throughput that was achieved.
    """
    whole = whole_box(perf, variables)
    runs = np.isfinite(whole.latency_s)
    rows = []
    for axis, variable in enumerate(variables):
        if variable.rising is None:
            continue
        gaps = _share(_highest_before(np.where(runs, 0.0, 1.0), axis) > 0, runs)
        for tolerance in tolerances:
            latency = _broken(whole.latency_s, runs, axis, tolerance, latency_scale_s)
            throughput = _broken(whole.throughput_rps, runs, axis, tolerance, throughput_scale_rps)
            rows.append(NonMonotone(variable.name, tolerance, latency, throughput, gaps, int(runs.sum())))
    return tuple(rows)


def least_tolerances(perf: Performance, variables: Sequence[Variable]) -> Tolerances:
    """The least tolerances under which branch and bound is certain, over every pair of points.

    Points that cannot run are left out; every point is evaluated.
    """
    whole = whole_box(perf, variables)
    runs = np.isfinite(whole.latency_s)
    axes = [axis for axis, variable in enumerate(variables) if variable.rising is not None]
    return Tolerances(_excess(whole.throughput_rps, runs, axes), _excess(whole.latency_s, runs, axes))


def _broken(values: Floats, runs: npt.NDArray[np.bool_], axis: int, tolerance: float, scale: float | None) -> float:
    before = _highest_before(np.where(runs, values, -np.inf), axis)
    slack = tolerance * (np.where(runs, values, 0.0) if scale is None else scale)
    return _share(before > np.where(runs, values, np.inf) + slack, runs)


def _share(broken: npt.NDArray[np.bool_], runs: npt.NDArray[np.bool_]) -> float:
    return float((broken & runs).sum() / max(1, runs.sum()))


def _highest_before(values: Floats, axis: int) -> Floats:
    """The highest value before each point on its line; minus infinity where there is none."""
    before = np.full_like(values, -np.inf)
    later = [slice(None)] * values.ndim
    earlier = list(later)
    later[axis], earlier[axis] = slice(1, None), slice(None, -1)
    before[tuple(later)] = np.maximum.accumulate(values, axis=axis)[tuple(earlier)]
    return before


def _excess(values: Floats, runs: npt.NDArray[np.bool_], axes: Sequence[int]) -> float:
    """By what share some lower point's value exceeds a higher one's, at most."""
    highest = np.where(runs, values, 0.0)
    for axis in axes:
        highest = np.maximum.accumulate(highest, axis=axis)
    above = runs & (highest > values)
    if not above.any():
        return 0.0
    with np.errstate(divide="ignore"):
        return float((highest[above] / values[above] - 1).max())
