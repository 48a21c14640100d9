"""A circuit breaker: who fails again and again is left alone for a while."""

from __future__ import annotations

import math
from collections.abc import Hashable

CLOSED, OPEN, HALF_OPEN = "closed", "open", "half-open"
MOST_DOUBLINGS = 4
CALLER_S = 30.0
"""What fails a caller's requests again and again may be in them: in so long each caller counts once."""
_CALLERS = 1024
"""So many are remembered; of more the failures do not count."""


class Breaker:
    """Closed, open or half-open; told of every request that an engine answered or failed.

    Closed, so many failures in a row open it, with no answer to its end between them. It is open for
    ``open_s``, then half-open: one request is a trial. When its output begins, it closes; failed, it opens for
    twice as long, up to 16 times ``open_s``.

    Args:
        failures: In a row, that open it.
        open_s: How long it stays open the first time.
    """

    def __init__(self, failures: int, open_s: float) -> None:
        self._most, self._open_s = failures, open_s
        self._failures = self._times = 0
        self._until_s = -math.inf
        self._tripped = False
        self._callers: set[Hashable] = set()
        self._callers_s = -math.inf

    def state(self, now_s: float) -> str:
        """One of CLOSED, OPEN, HALF_OPEN."""
        if not self._tripped:
            return CLOSED
        return OPEN if now_s < self._until_s else HALF_OPEN

    def next_s(self, now_s: float) -> float:
        """When it becomes half-open; inf where it is not open."""
        return self._until_s if self.state(now_s) == OPEN else math.inf

    def failed(self, now_s: float) -> bool:
        """A request failed there; whether the state changed. What fails while it is open was sent before."""
        state = self.state(now_s)
        if state == OPEN:
            return False
        self._failures += 1
        if state == CLOSED and self._failures < self._most:
            return False
        self._tripped = True
        self._until_s = now_s + self._open_s * 2 ** min(self._times, MOST_DOUBLINGS)
        self._times += 1
        return True

    def is_new(self, caller: Hashable, now_s: float) -> bool:
        """Whether no failure of the caller's has been counted lately; it counts as one from now on."""
        if now_s - self._callers_s >= CALLER_S:
            self._callers.clear()
            self._callers_s = now_s
        if caller in self._callers or len(self._callers) >= _CALLERS:
            return False
        self._callers.add(caller)
        return True

    def began(self, now_s: float) -> bool:
        """The output of a request began there; whether the state changed. A trial need not come to its end."""
        if self.state(now_s) != HALF_OPEN:
            return False
        self._tripped = False
        self._failures = 0
        return True

    def answered(self, now_s: float) -> bool:
        """A request was answered to its end there; whether the state changed."""
        if self.state(now_s) == OPEN:
            return False
        changed = self._tripped
        self.reset()
        return changed

    def reset(self) -> None:
        """Closed, nothing remembered: it is another engine now."""
        self._failures = self._times = 0
        self._tripped = False
