"""How requests come to a schedule that is kept before engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

SPARE = 3
"""Encodings that wait beside those who are served, so that the queue is never short of one."""


@dataclass(frozen=True)
class ScheduleLoad:
    """How requests come to a schedule: in a closed loop that keeps its queue full, unless otherwise said.

    Attributes:
        concurrency: Requests that are in at a time; None: as many as keep the queue full.
        rate_rps: Requests a second instead, Poisson: the queue may run empty.
        seed: Of prompts and arrivals.
        told: Called with the requests that ended and the requests in all.
    """

    concurrency: int | None = None
    rate_rps: float | None = None
    seed: int = 0
    told: Callable[[int, int], None] = lambda *_: None

    def at_once(self, filling: int, requests: int) -> int | None:
        """Requests that are in at a time, where so many keep the queue full; None: they come at a rate."""
        if self.concurrency is None and self.rate_rps is None:
            return min(requests, filling)
        return self.concurrency
