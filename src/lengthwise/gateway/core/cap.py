"""How many requests a worker is given at once, so that its own queue stays near empty."""

from __future__ import annotations

import math

from lengthwise.gateway.config import Dispatch
from lengthwise.gateway.decisions import Signals

_SHRINK = 0.75
_HOLD_S = 0.1
_LONGEST_HOLD_S = 2.0


class Cap:
    """A cap that finds itself: doubled while nothing is in the way, then up by a sixteenth and down by what waits.

    Signs of too many: requests in the engine's own queue, a cache fuller than ``kv_high``, preemptions, a
    refusal because its queue is full. It grows only after a look at a fully used worker that shows none of
    them: an engine that tells nothing keeps the cap it starts with.
    """

    def __init__(self, dispatch: Dispatch) -> None:
        self.dispatch = dispatch
        self.held_until_s = -math.inf
        self._cap = float(dispatch.start)
        self._doubling = True
        self._most_used = 0
        self._looked_s = -math.inf
        self._signals = Signals()
        self._hold_s = _HOLD_S
        self._refused_s = -math.inf

    def configure(self, dispatch: Dispatch) -> None:
        """Other bounds; what it has found is kept within them."""
        new = self._doubling and self._cap == self.dispatch.start
        cap = float(dispatch.start) if new else self._cap
        self.dispatch = dispatch
        self._cap = min(max(cap, float(dispatch.least)), float(dispatch.most))

    def limit(self, slots: int | None) -> int:
        """The cap, never above the worker's slots."""
        cap = int(self._cap)
        return cap if slots is None else max(1, min(cap, slots))

    def used(self, in_flight: int) -> None:
        """So many are there now."""
        self._most_used = max(self._most_used, in_flight)

    def look(self, now_s: float, signals: Signals, in_flight: int) -> None:
        """Adapts to fresh signals, not more often than ``adapt_every_s``."""
        if signals.at_s <= self._signals.at_s or now_s - self._looked_s < self.dispatch.adapt_every_s:
            return
        before, self._signals, self._looked_s = self._signals, signals, now_s
        self._hold_s = _HOLD_S
        waiting = signals.waiting or 0.0
        if _evicted(before, signals) or (signals.kv_used or 0.0) > self.dispatch.kv_high:
            self._shrink(max(in_flight, 1) * _SHRINK)
        elif waiting > 0:
            self._shrink(max(in_flight - waiting, self._cap * _SHRINK))
        elif signals.waiting is not None and self._most_used >= int(self._cap):
            self._grow()
        self._most_used = in_flight

    def refused(self, now_s: float, in_flight: int, hold_s: float = 0.0) -> None:
        """The worker said that its queue is full: it gets no more for a moment, longer each time in a row.

        Args:
            now_s: Now.
            in_flight: Requests that are there.
            hold_s: How long it wants nothing; obeyed up to 2 s.
        """
        self._shrink(float(in_flight))
        if now_s - self.held_until_s > 2 * _LONGEST_HOLD_S:
            self._hold_s = _HOLD_S
        held_s = max(self._hold_s, min(hold_s, _LONGEST_HOLD_S))
        self.held_until_s, self._refused_s = now_s + held_s, now_s
        self._hold_s = min(2 * self._hold_s, _LONGEST_HOLD_S)

    def accepted(self, sent_s: float) -> None:
        """It makes tokens for a request that was sent at this time: after a refusal it takes some again."""
        if sent_s > self._refused_s:
            self._hold_s = _HOLD_S

    def _shrink(self, to: float) -> None:
        self._doubling = False
        self._cap = max(float(self.dispatch.least), min(self._cap, to))

    def _grow(self) -> None:
        more = self._cap if self._doubling else max(1.0, self._cap / 16)
        self._cap = min(float(self.dispatch.most), self._cap + more)


def _evicted(before: Signals, now: Signals) -> bool:
    return before.preemptions is not None and (now.preemptions or 0.0) > before.preemptions
