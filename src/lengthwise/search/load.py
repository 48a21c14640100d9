"""The load of a search: every configuration serves the same requests, at any rate."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lengthwise.metrics import SENT_SHARE
from lengthwise.schema.errors import InputError
from lengthwise.schema.workload import Floats, Workload

SMALLEST_DRAW = 2**12
DRAW_GROWTH, SHARED_GROWTH = 2**4, 2**2
"""Growth of the draws, and of those whose prompts share prefixes, which take longer to draw."""
MAX_TAKEN = 8  # first requests of draws that are cached
LARGEST_DRAW = 2**20

Draw = Callable[[int, int], Workload]


@dataclass(frozen=True, eq=False)
class Load:
    """Requests for each seed; their arrival times are stretched to any rate.

    Every configuration serves the same requests in the same order (common random numbers), so that two results differ
    by the configurations alone. Of requests that wait for others, only the starts of their sessions are stretched: the
    delays within a session remain, and the rate counts all requests. ``draw`` maps (seed, number of requests) to a
    workload, whose own rate does not matter; it may return fewer requests (a short trace). Draws are cached; their
    sizes are rounded up to one of few, so that no run depends on earlier draws. There are ``seeds`` different seeds
    (None: unlimited) with at most ``most`` requests each.
    """

    draw: Draw
    name: str = ""
    seeds: int | None = None
    most: int = LARGEST_DRAW

    def __post_init__(self) -> None:
        object.__setattr__(self, "_drawn", {})
        object.__setattr__(self, "_taken", {})
        object.__setattr__(self, "_lock", threading.Lock())

    def __reduce__(self) -> tuple[Any, ...]:
        return Load, (self.draw, self.name, self.seeds, self.most)

    def seeds_up_to(self, count: int) -> range:
        """Return ``count`` seeds, or all seeds of the load if it has fewer."""
        return range(min(count, self.seeds or count))

    def at(self, seed: int, requests: int, rate_rps: float) -> Workload:
        """Return the first ``requests`` requests of a seed, which arrive at the mean rate ``rate_rps``.

        Raises InputError if the rate is not positive and finite, or the requests have no arrival times to stretch.
        """
        if not rate_rps > 0 or math.isinf(rate_rps):
            raise InputError(f"a rate must be above 0 and finite; it is {rate_rps}")
        workload = self._first_requests(seed, requests)
        n = len(workload)
        if n < 2:
            raise InputError(f"a rate needs at least two requests; the workload has {n}")
        since_s = workload.arrival_s - workload.arrival_s[0]
        if workload.concurrency is not None or not since_s[-1] > 0:
            raise InputError(
                "a rate can only be searched for requests that arrive one after the other; these come all at once or "
                "in a closed loop. Give the workload a request_rate (its value does not matter here), or arrivals"
            )
        return workload.sent_at(since_s * ((n - 1) / (since_s[-1] * rate_rps)))

    def ramp_s(self, jct_s: float) -> float:
        """Return the seconds at the start of a run in which the rate is too low, because few sessions have later turns.

        It is the time in which sessions send SENT_SHARE of their requests, if each takes ``jct_s``; 0 if no request
        waits for others.
        """
        sample = self.sample()
        if sample.after is None:
            return 0.0
        return float(np.quantile(sample.sent_at(np.zeros(len(sample))).earliest_s(jct_s), SENT_SHARE))

    @property
    def requests_per_session(self) -> float:
        """Return the mean number of requests that one start of a session leads to; 1 if no request waits for others."""
        sample = self.sample()
        return len(sample) / len(sample.session_starts_s)

    def batch(self, seed: int, requests: int) -> Workload:
        """Return the first ``requests`` requests of a seed; all arrive at time 0."""
        workload = self._drawn_workload(seed, requests)
        return _first(workload, np.zeros(min(requests, len(workload))))

    def sample(self) -> Workload:
        """Return about 4,096 requests of the first seed, from which means are estimated."""
        return self._drawn_workload(0, SMALLEST_DRAW)

    def _first_requests(self, seed: int, requests: int) -> Workload:
        """Return the first requests of a seed. The last ones are cached, so that rates share all but their times."""
        taken: dict[tuple[int, int], Workload] = self._taken  # type: ignore[attr-defined]
        if (found := taken.get((seed, requests))) is not None:
            return found
        drawn = self._drawn_workload(seed, requests)
        found = drawn if requests >= len(drawn) else drawn.take(np.arange(requests))
        if drawn.prefixes is not None:
            with self._lock:  # type: ignore[attr-defined]
                taken[seed, requests] = found
                while len(taken) > MAX_TAKEN:
                    del taken[next(iter(taken))]
        return found

    def _drawn_workload(self, seed: int, requests: int) -> Workload:
        size, growth = SMALLEST_DRAW, DRAW_GROWTH
        if requests > size and self.sample().prefixes is not None:
            growth = SHARED_GROWTH
        while size < min(requests, LARGEST_DRAW):
            size *= growth
        drawn: dict[tuple[int, int], Workload] = self._drawn  # type: ignore[attr-defined]
        with self._lock:  # type: ignore[attr-defined]
            if (seed, size) not in drawn:
                drawn[seed, size] = self.draw(seed, size)
            return drawn[seed, size]


def _first(workload: Workload, arrival_s: Floats) -> Workload:
    return replace(workload, concurrency=None).take(np.arange(len(arrival_s)), arrival_s)
