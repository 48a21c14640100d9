"""How a connection ends: who takes nothing is dropped, and who still writes is heard out for a moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_LINGER_S = 2.0
_SPARE_BYTES = 4 << 20


class Stall:
    """Drops a connection whose client takes nothing of what is written.

    It looks every ``patience_s`` while it watches: what waits must have become less since it last looked.

    Args:
        transport: The connection.
        loop: Its event loop.
        patience_s: Longest time in which nothing is taken, up to twice that.
    """

    __slots__ = ("_left", "_loop", "_patience_s", "_timer", "_transport")

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, patience_s: float
    ) -> None:
        self._transport, self._loop, self._patience_s = transport, loop, patience_s
        self._timer: asyncio.TimerHandle | None = None
        self._left = 0

    def watch(self) -> None:
        """From now on; once is enough."""
        if self._timer is None:
            self._left = self._transport.get_write_buffer_size()
            self._timer = self._loop.call_later(self._patience_s, self._look)

    def rest(self) -> None:
        """No more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        left = self._transport.get_write_buffer_size()
        if left and left >= self._left:
            self._transport.abort()
        elif left:
            self.watch()


class Linger:
    """Reads and drops what still comes behind the last answer: a reset would take the answer from who still writes.

    Args:
        transport: The connection; its writing side ends here.
        loop: Its event loop.
        body_bytes: Longest body that is taken; what is dropped may be a little longer.
        close: Called after 2 s, or when more came.
    """

    __slots__ = ("_close", "_left", "_timer")

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        body_bytes: int,
        close: Callable[[], None],
    ) -> None:
        self._close, self._left = close, body_bytes + _SPARE_BYTES
        self._timer = loop.call_later(_LINGER_S, close)
        if transport.can_write_eof():
            transport.write_eof()

    def drop(self, size_bytes: int) -> None:
        """So much came."""
        self._left -= size_bytes
        if self._left < 0:
            self._close()

    def rest(self) -> None:
        """It has ended."""
        self._timer.cancel()
