"""Draws the load of a search: every configuration serves the same requests, at any rate."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lengthwise.metrics import SENT_SHARE
from lengthwise.schema.errors import InputError
from lengthwise.schema.workload import Workload

SMALLEST_DRAW = 2**12
DRAW_GROWTH, SHARED_GROWTH = 2**4, 2**2
"""Factors between the sizes of draws; the second one is for prompts with shared prefixes, which take longer to draw."""
MAX_CACHED_PARTS = 8  # number of workloads of first requests that are cached
LARGEST_DRAW = 2**20

Draw = Callable[[int, int], Workload]


@dataclass(frozen=True, eq=False)
class Load:
    """Requests for each seed; their arrival times are stretched to any rate.

    Every configuration serves the same requests in the same order (common random numbers), so that two results differ
    by the configurations alone. With sessions, only the starts of sessions are stretched: the delays within a session
    remain, and the rate counts all requests. ``draw`` maps (seed, number of requests) to a workload, whose own rate
    does not matter; it may return fewer requests (a short trace). Draws are cached. Their sizes are rounded up to a few
    fixed ones, so that no run depends on earlier draws. There are ``seeds`` different seeds (None: unlimited) with at
    most ``max_requests`` requests each.
    """

    draw: Draw
    name: str = ""
    seeds: int | None = None
    max_requests: int = LARGEST_DRAW
    _draws: dict[tuple[int, int], Workload] = field(default_factory=dict, init=False)
    _parts: dict[tuple[int, int], Workload] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return Load, (self.draw, self.name, self.seeds, self.max_requests)

    def seeds_up_to(self, count: int) -> range:
        """Return the seeds from 0, ``count`` of them, or all seeds of the load if it has fewer."""
        return range(min(count, self.seeds or count))

    def at(self, seed: int, requests: int, rate_rps: float) -> Workload:
        """Return the first ``requests`` requests of a seed, which arrive at the mean rate ``rate_rps``.

        Raises InputError for an invalid rate, fewer than two requests, or requests that arrive all at once.
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
        return workload.with_arrivals(since_s * ((n - 1) / (since_s[-1] * rate_rps)))

    def ramp_s(self, jct_s: float) -> float:
        """Return the seconds at the start of a run until sessions send requests at their full rate.

        Before, few sessions have reached later turns. It is the time in which sessions send SENT_SHARE of their
        requests, if each request takes ``jct_s``; 0 if no request waits for others.
        """
        sample = self.sample()
        if sample.after is None:
            return 0.0
        return float(np.quantile(sample.with_arrivals(np.zeros(len(sample))).earliest_s(jct_s), SENT_SHARE))

    @property
    def requests_per_session(self) -> float:
        """Return the mean number of requests of a session; 1 if no request waits for others."""
        sample = self.sample()
        return len(sample) / len(sample.session_starts_s)

    def batch(self, seed: int, requests: int) -> Workload:
        """Return the first ``requests`` requests of a seed; all arrive at time 0."""
        workload = self._drawn_workload(seed, requests)
        n = min(requests, len(workload))
        return replace(workload, concurrency=None).take(np.arange(n), np.zeros(n))

    def sample(self) -> Workload:
        """Return 4,096 requests of the first seed (fewer of a short trace), from which means are estimated."""
        return self._drawn_workload(0, SMALLEST_DRAW)

    def _first_requests(self, seed: int, requests: int) -> Workload:
        """Return the first requests of a seed. With shared prefixes, the workload is cached for the next rate."""
        if (found := self._parts.get((seed, requests))) is not None:
            return found
        drawn = self._drawn_workload(seed, requests)
        found = drawn if requests >= len(drawn) else drawn.take(np.arange(requests))
        if drawn.prefixes is not None:
            with self._lock:
                self._parts[seed, requests] = found
                while len(self._parts) > MAX_CACHED_PARTS:
                    del self._parts[next(iter(self._parts))]
        return found

    def _drawn_workload(self, seed: int, requests: int) -> Workload:
        size, growth = SMALLEST_DRAW, DRAW_GROWTH
        if requests > size and self.sample().prefixes is not None:
            growth = SHARED_GROWTH
        while size < min(requests, LARGEST_DRAW):
            size *= growth
        with self._lock:
            if (seed, size) not in self._draws:
                self._draws[seed, size] = self.draw(seed, size)
            return self._draws[seed, size]
