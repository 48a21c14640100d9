"""The load of a search: the same requests for every configuration, at any rate."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lengthwise.schema.errors import InputError
from lengthwise.schema.workload import Floats, Workload

SMALLEST_DRAW = 2**12
DRAW_GROWTH = 2**4
LARGEST_DRAW = 2**20

Draw = Callable[[int, int], Workload]


@dataclass(frozen=True, eq=False)
class Load:
    """Requests by seed, whose arrival times a rate stretches.

    Every configuration serves the same requests in the same order (common random numbers), so that two results differ
    by the configurations alone. Draws are cached. They have one of three sizes, so that a run does not depend on
    earlier draws. ``draw`` maps (seed, number of requests) to a workload, whose own rate does not matter; it may return
    fewer requests (a short trace). There are ``seeds`` different seeds (None: unlimited) of ``most`` requests at most.
    """

    draw: Draw
    name: str = ""
    seeds: int | None = None
    most: int = LARGEST_DRAW

    def __post_init__(self) -> None:
        object.__setattr__(self, "_drawn", {})
        object.__setattr__(self, "_lock", threading.Lock())

    def __reduce__(self) -> tuple[Any, ...]:
        return Load, (self.draw, self.name, self.seeds, self.most)

    def seeds_up_to(self, count: int) -> range:
        """Return ``count`` seeds, or fewer if the load has fewer."""
        return range(min(count, self.seeds or count))

    def at(self, seed: int, requests: int, rate_rps: float) -> Workload:
        """Return the first ``requests`` of a seed, with arrivals at this mean rate.

        It raises InputError if the rate is not positive and finite, or the requests have no arrival times to stretch.
        """
        if not rate_rps > 0 or math.isinf(rate_rps):
            raise InputError(f"a rate must be above 0 and finite; it is {rate_rps}")
        workload = self._drawn_workload(seed, requests)
        n = min(requests, len(workload))
        if n < 2:
            raise InputError(f"a rate needs at least two requests; the workload has {n}")
        workload.require_independent("a search for a rate")
        since_s = workload.arrival_s[:n] - workload.arrival_s[0]
        if workload.concurrency is not None or not since_s[-1] > 0:
            raise InputError(
                "a rate can only be searched for requests that arrive one after the other; these come all at once or "
                "in a closed loop. Give the workload a request_rate (its value does not matter here), or arrivals"
            )
        return _first(workload, since_s * ((n - 1) / (since_s[-1] * rate_rps)))

    def batch(self, seed: int, requests: int) -> Workload:
        """Return the first ``requests`` of a seed, which all arrive at time 0."""
        workload = self._drawn_workload(seed, requests)
        return _first(workload, np.zeros(min(requests, len(workload))))

    def sample(self) -> Workload:
        """Return about 4,096 requests of the first seed, for estimates."""
        return self._drawn_workload(0, SMALLEST_DRAW)

    def _drawn_workload(self, seed: int, requests: int) -> Workload:
        size = SMALLEST_DRAW
        while size < min(requests, LARGEST_DRAW):
            size *= DRAW_GROWTH
        drawn: dict[tuple[int, int], Workload] = self._drawn  # type: ignore[attr-defined]
        with self._lock:  # type: ignore[attr-defined]
            if (seed, size) not in drawn:
                drawn[seed, size] = self.draw(seed, size)
            return drawn[seed, size]


def _first(workload: Workload, arrival_s: Floats) -> Workload:
    first = slice(0, len(arrival_s))
    names = ("prompt_tokens", "output_tokens", "predicted_tokens", "priority", "tenant")
    columns = {name: column[first] for name in names if (column := getattr(workload, name)) is not None}
    if workload.predictions is not None:
        columns["predictions"] = workload.predictions.take(np.arange(len(arrival_s)))
    extra = {key: column[first] for key, column in workload.extra.items()}
    return replace(workload, arrival_s=arrival_s, extra=extra, concurrency=None, **columns)
