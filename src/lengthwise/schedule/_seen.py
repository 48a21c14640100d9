"""What was evaluated so far: no point twice, and always the best and the fastest of them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from lengthwise.schedule.found import Reached
from lengthwise.schedule.variables import Box, Performance, Place, performance_at

Key = tuple[float, float, Place]
NOTHING: Key = (math.inf, math.inf, ())


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
        self.best, self.fastest, self.calls = NOTHING, NOTHING, 0

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
