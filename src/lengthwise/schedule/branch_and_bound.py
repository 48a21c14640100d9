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
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lengthwise.schedule._seen import Seen
from lengthwise.schedule.found import Block, Found
from lengthwise.schedule.variables import Box, Performance, Place, Variable
from lengthwise.schema.errors import InputError

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
    wave: int = 16,
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
        wave: Blocks split at a time: more make fewer and larger calls, and some points in vain.
        most: Points evaluated at most; the search then ends with the gap that is left.
        trace: Blocks kept to be drawn, at most.

    Raises:
        InputError: A number is out of range, or perf's answer cannot be used.
    """
    _check(bound_s, wave)
    box = Box(variables)
    seen = Seen(perf, box, bound_s)
    if known_rps > 0:
        seen.best = -known_rps, -math.inf, ()
    search = _Search(seen, box, bound_s, tolerances or Tolerances(), trace)
    search.run(wave, math.inf if most is None else most)
    best, fastest = seen.reached()
    return Found(
        best, fastest, len(seen), box.size, seen.calls, search.gap(), tuple(_blocks(box, search.traced))
    )


class _Search:
    """The queue of blocks that may hold something better, and what the discarded ones could hold."""

    def __init__(self, seen: Seen, box: Box, bound_s: float, tolerances: Tolerances, trace: int) -> None:
        self._seen, self._trace = seen, trace
        self._scales = [1 / max(1, length - 1) for length in box.shape]
        self._first = list(box.blocks())
        self._limit_s = bound_s * (1 + tolerances.latency)
        self._slack = 1 + tolerances.throughput
        self._worth = self._slack / (1 + tolerances.accepted)
        self._queue: list[Entry] = []
        self._missed = 0.0
        self.traced: list[tuple[Place, Place, str]] = []

    def run(self, wave: int, most: float) -> None:
        """Until no block can hold anything better, or too few evaluations are left to split one."""
        if most < 2 * len(self._first):
            raise InputError(f"at least {2 * len(self._first)} points must be allowed here, not {most}")
        self._seen.evaluate(corner for block in self._first for corner in block)
        for block in self._first:
            self._judge(-math.inf, 0.0, *block)
        while blocks := self._taken(int(min(wave, (most - len(self._seen)) // 2))):
            halves = [half for block in blocks for half in self._halves(block)]
            self._seen.evaluate(corner for half in halves for corner in half[2:])
            for half in halves:
                self._judge(*half)

    def gap(self) -> float:
        """By what share the best of all may exceed the best so far."""
        could = max([self._missed, *(-entry[0] * self._slack for entry in self._queue)])
        best = -self._seen.best[0]
        if could <= max(best, 0.0):
            return 0.0
        return could / best - 1 if best > 0 else math.inf

    def _judge(self, loss: float, least_s: float, lowest: Place, highest: Place) -> None:
        """Keeps a block whose corners are evaluated if more than they may be in it."""
        latency_s, throughput = self._seen[lowest][0], self._seen[highest][1]
        entry = max(loss, -throughput), max(least_s, latency_s), lowest, highest
        if sum(highest) - sum(lowest) <= 1:
            self._note(entry, "done")
        elif entry[1] > self._limit_s or entry[1] == math.inf:
            self._note(entry, "too slow")
        elif self._hopeless(entry):
            self._drop(entry)
        else:
            heapq.heappush(self._queue, entry)

    def _hopeless(self, entry: Entry) -> bool:
        """Whether a block holds nothing better than the best so far."""
        loss, latency_s, place = self._seen.best
        mine = entry[0] * self._worth
        return mine > loss or (mine == loss and entry[1:3] >= (latency_s, place))

    def _drop(self, entry: Entry) -> None:
        self._missed = max(self._missed, -entry[0] * self._slack)
        self._note(entry, "no better")

    def _taken(self, count: int) -> list[Entry]:
        """The most promising blocks out of the queue."""
        taken: list[Entry] = []
        while self._queue and len(taken) < count:
            entry = heapq.heappop(self._queue)
            if self._hopeless(entry):
                self._drop(entry)
            else:
                self._note(entry, "split")
                taken.append(entry)
        return taken

    def _halves(self, entry: Entry) -> Iterator[Entry]:
        """A block cut across its longest side; the parts of a line share the point between them."""
        loss, least_s, lowest, highest = entry
        sides = zip(lowest, highest, self._scales, strict=True)
        shares = [(high - low) * scale for low, high, scale in sides]
        axis = shares.index(max(shares))
        middle = (lowest[axis] + highest[axis]) // 2
        beyond = middle + (sum(map(bool, shares)) > 1)
        yield loss, least_s, lowest, (*highest[:axis], middle, *highest[axis + 1 :])
        yield loss, least_s, (*lowest[:axis], beyond, *lowest[axis + 1 :]), highest

    def _note(self, entry: Entry, fate: str) -> None:
        if len(self.traced) < self._trace:
            self.traced.append((entry[2], entry[3], fate))


def _blocks(box: Box, traced: Sequence[tuple[Place, Place, str]]) -> Iterator[Block]:
    for lowest, highest, fate in traced:
        yield Block(box.point(lowest), box.point(highest), fate)


def _check(bound_s: float, wave: int) -> None:
    if not bound_s > 0:
        raise InputError(f"the latency bound must be above 0 s; it is {bound_s}")
    if wave < 1:
        raise InputError(f"a wave must be 1 block or more, not {wave}")


__all__ = ["Tolerances", "branch_and_bound"]
