"""An event loop whose time jumps: when nobody can go on, it is the time of the next timer."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from lengthwise.schema.errors import InternalError

Result = TypeVar("Result")
_RESOLUTION_S = 1e-9


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs what an ordinary loop runs, but waits for no clock; same input, same order.

    Whatever blocks must do so in the loop itself: of threads it does not know when they end.
    """

    def __init__(self) -> None:
        self._virtual_s = 0.0
        super().__init__(_Jumping(self))
        self._clock_resolution = _RESOLUTION_S

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._virtual_s

    def jump(self, seconds: float) -> None:
        """Lets time pass."""
        self._virtual_s += seconds


class _Jumping(selectors.BaseSelector):
    """Never waits: a wait becomes a jump."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._real, self._loop = selectors.DefaultSelector(), loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._real.select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise InternalError("nothing can go on, and no time is waited for")
        self._loop.jump(max(timeout, 0.0))
        return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


def run_virtually(work: Coroutine[Any, Any, Result]) -> Result:
    """What the work returns, run in virtual time from 0."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
