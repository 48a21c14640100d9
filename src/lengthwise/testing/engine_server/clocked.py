"""A batch in real time: what is due happens when the event loop's clock says so."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from lengthwise.testing.engine_server.batch import Batch, Sequence
from lengthwise.testing.engine_server.spec import EngineSpec


class ClockedBatch:
    """Lets a batch's time pass with the running loop's, ``spec.speed`` times as fast.

    Steps follow each other on the engine's own time, from one's end to the next: a loop that wakes late hands
    tokens out late, but the engine does not get slower, and what it did can be simulated from its arrivals.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.batch = Batch(spec.limits, spec.steps)
        self._speed = spec.speed
        self._loop = asyncio.get_running_loop()
        self._begun_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = math.inf
        self._entered = 0

    def now_s(self) -> float:
        """Engine seconds since it started."""
        return (self._loop.time() - self._begun_s) * self._speed

    def enter(self, prompt_tokens: int, on_token: Callable[[float], bool], priority: int = 0) -> Sequence:
        """A request that comes now."""
        q = Sequence(self._entered, self.now_s(), prompt_tokens, on_token, priority)
        self._entered += 1
        self.batch.enter(q)
        self._wake()
        return q

    def abort(self, q: Sequence) -> bool:
        """Takes a request out now; False where it was over."""
        self.batch.advance(self.now_s())
        gone = self.batch.abort(q)
        self._wake()
        return gone

    def stop(self) -> None:
        """Time stands still for good."""
        if self._timer is not None:
            self._timer.cancel()
        self._due_s = -math.inf

    def _wake(self) -> None:
        if self._due_s == -math.inf:
            return
        self.batch.advance(self.now_s())
        due_s = self.batch.next_s()
        if due_s == self._due_s and self._timer is not None and not self._timer.cancelled():
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due_s, self._timer = due_s, None
        if due_s < math.inf:
            self._timer = self._loop.call_at(self._begun_s + due_s / self._speed, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        self._wake()
