"""How late the event loop is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

EVERY_S = 0.2


class Lag:
    """Asks to be called again and again, and tells by how much that was late.

    Args:
        told: Called with the seconds, on the loop.
        every_s: Between two looks.
    """

    def __init__(self, told: Callable[[float], None], every_s: float = EVERY_S) -> None:
        self._told, self._every_s = told, every_s
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """From now on."""
        loop = asyncio.get_running_loop()
        self._due_s = loop.time() + self._every_s
        self._timer = loop.call_at(self._due_s, self._called)

    def stop(self) -> None:
        """No more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _called(self) -> None:
        self._told(max(0.0, asyncio.get_running_loop().time() - self._due_s))
        self.start()
