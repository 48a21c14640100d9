"""An answer's head and its first piece in one packet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_INTERIM = b"HTTP/1.1 100"


class Cork:
    """A transport's writing side for one answer: the head waits for what is written in the same moment.

    Args:
        transport: The connection.
        loop: Its event loop.
        close: Ends the connection once all is written.
    """

    __slots__ = ("_begun", "_close", "_head", "_loop", "_transport")

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, close: Callable[[], None]
    ) -> None:
        self._transport, self._loop, self._close = transport, loop, close
        self._head, self._begun = b"", False

    def write(self, data: bytes) -> None:
        """Writes, with the head if that still waits; nothing where the connection is gone."""
        if self._transport.is_closing():
            self._head = b""
        elif self._head:
            head, self._head = self._head, b""
            self._transport.write(head + data)
        elif self._begun or data.startswith(_INTERIM):
            self._transport.write(data)
        else:
            self._begun, self._head = True, data
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Closes once all is written."""
        self._flush()
        self._close()

    def is_closing(self) -> bool:
        """Whether the connection ends."""
        return self._transport.is_closing()

    def _flush(self) -> None:
        if self._head:
            self.write(b"")
