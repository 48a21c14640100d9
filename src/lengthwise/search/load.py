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
    """Requests by seed; a rate only stretches their times.

    Every configuration meets the same requests in the same order (common random numbers), so that
    what differs between two of them is the configurations. Draws are kept; there are three sizes of them,
    so that what a run sees depends on nothing that was drawn before.

    Attributes:
        draw: From (seed, number of requests) to a workload; its own rate does not matter. It may
            return fewer requests (a trace that holds no more).
        name: For tables.
        seeds: How many seeds differ; None: as many as are asked for.
        most: Requests that a seed has at most.
    """

    draw: Draw
    name: str = ""
    seeds: int | None = None
    most: int = LARGEST_DRAW

    def __post_init__(self) -> None:
        object.__setattr__(self, "_drawn", {})
        object.__setattr__(self, "_lock", threading.Lock())

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("draw", "name", "seeds", "most")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)
        self.__post_init__()

    def at(self, seed: int, requests: int, rate_rps: float) -> Workload:
        """The first ``requests`` of a seed, arriving at this mean rate.

        Raises:
            InputError: The requests have no times to stretch.
        """
        whole = self._unit(seed, requests)
        n = min(requests, len(whole))
        return _first(whole, n, rate_rps)

    def batch(self, seed: int, requests: int) -> Workload:
        """The first ``requests`` of a seed, all there at time 0."""
        whole = self._unit(seed, requests)
        return _cut(whole, min(requests, len(whole)), np.zeros(min(requests, len(whole))))

    def sample(self) -> Workload:
        """Requests of the first seed, for estimates: about 4,096."""
        return self._unit(0, SMALLEST_DRAW)

    def _unit(self, seed: int, requests: int) -> Workload:
        size = SMALLEST_DRAW
        while size < min(requests, LARGEST_DRAW):
            size *= DRAW_GROWTH
        drawn: dict[tuple[int, int], Workload] = self._drawn  # type: ignore[attr-defined]
        with self._lock:  # type: ignore[attr-defined]
            if (seed, size) not in drawn:
                drawn[seed, size] = self.draw(seed, size)
            return drawn[seed, size]


def _first(complete: Workload, n: int, rate_rps: float) -> Workload:
    """The first requests, their times stretched so that these very ones come at the mean rate."""
    if not rate_rps > 0 or math.isinf(rate_rps):
        raise InputError(f"a rate must be above 0 and finite; it is {rate_rps}")
    if n < 2:
        raise InputError(f"a rate needs at least 2 requests to come one after the other; there is {n}")
    complete.require_nobody_after("a search for a rate")
    since_s = complete.arrival_s[:n] - complete.arrival_s[0]
    if complete.concurrency is not None or not since_s[-1] > 0:
        raise InputError(
            "a rate can only be searched for requests that arrive one after the other; these come all at once or "
            "in a closed loop. Give the workload a request_rate (its value does not matter here), or arrivals"
        )
    return _cut(complete, n, since_s * ((n - 1) / (since_s[-1] * rate_rps)))


def _cut(complete: Workload, n: int, arrival_s: Floats) -> Workload:
    cut = slice(0, n)
    return replace(
        complete,
        arrival_s=arrival_s,
        prompt_tokens=complete.prompt_tokens[cut],
        output_tokens=complete.output_tokens[cut],
        predicted_tokens=None if complete.predicted_tokens is None else complete.predicted_tokens[cut],
        predictions=None if complete.predictions is None else complete.predictions.take(np.arange(n)),
        priority=None if complete.priority is None else complete.priority[cut],
        tenant=None if complete.tenant is None else complete.tenant[cut],
        extra={key: column[cut] for key, column in complete.extra.items()},
        concurrency=None,
    )
