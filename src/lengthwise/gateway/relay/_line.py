"""One connection to an engine: a request is written, its answer read as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httptools

HEAD_BYTES = 1 << 16
"""Of an answer's head."""
_PAUSE_BYTES = 1 << 17
_BODILESS = (204, 304)


class BrokenError(Exception):
    """The connection ended, or the engine does not speak HTTP.

    Attributes:
        spoke: Whether anything of the answer had come.
        garbage: Whether what came is no HTTP.
    """

    def __init__(self, why: str, *, spoke: bool, garbage: bool = False) -> None:
        super().__init__(why)
        self.spoke, self.garbage = spoke, garbage


class Line(asyncio.Protocol):
    """A connection, used for one request after another.

    Attributes:
        status: Of the answer.
        headers: Its headers, their names in lower case.
        complete: Whether all of the answer has come (it may not have been read).
        used: Requests that were sent before this one.
        tap: Offered a piece of the body within the moment in which it comes, while a reader waits for one; where it
            takes it (True) the reader sleeps on. It saves a streamed token a turn of the loop, and a task's wake-up.
        tapped_s: When it took one last, on the loop's clock.
        on_body: Takes a piece from httptools.
    """

    __slots__ = (
        "_buffered", "_error", "_head_bytes", "_in_head", "_keep", "_loop", "_parser", "_paused", "_pieces",
        "_spoke", "_transport", "_until_end", "_waiter", "complete", "headers", "idle_since_s", "on_body", "status",
        "tap", "tapped_s", "used",
    )  # fmt: skip

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[bool] | None = None
        self._error: BrokenError | None = None
        self._pieces: list[bytes] = []
        self.on_body = self._pieces.append
        self.idle_since_s, self.used = 0.0, -1
        self._begin()

    def _begin(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.status, self.headers = 0, dict[str, str]()
        self.complete = self._spoke = self._keep = self._until_end = self._paused = False
        self._in_head, self._head_bytes, self._buffered = True, 0, 0
        self.tap: Callable[[bytes], bool] | None = None
        self.tapped_s = 0.0
        self._pieces.clear()

    # -- who asks --------------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        """Whether another request can be sent."""
        return self._error is None and self._transport is not None and not self._transport.is_closing()

    @property
    def at_end(self) -> bool:
        """Whether all of the answer has been read, and the connection can serve again."""
        return self.complete and self._keep and not self._pieces and self.usable

    def send(self, head: bytes, body: bytes) -> None:
        """Writes a request."""
        self.used += 1
        if self.used:
            self._begin()
        if self._transport is None or self._error is not None:
            raise self._error or BrokenError("it is closed", spoke=False)
        if len(body) < _PAUSE_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.writelines([head, body])

    async def answered(self) -> None:
        """Returns once the head is there; raises BrokenError."""
        while self._in_head:
            if self._error is not None:
                raise self._error
            await self._more()

    async def read(self) -> bytes | None:
        """The next piece of the body, b"" at its end, None after ``stir``; raises BrokenError."""
        while not self._pieces:
            if self.complete:
                return b""
            if self._error is not None:
                raise self._error
            if await self._more():
                return None
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._buffered = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    def stir(self) -> None:
        """Wakes who reads, although there is nothing for it."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)

    def abort(self, why: str = "it was given up") -> None:
        """Ends it at once, whatever is under way."""
        self._fail(why)

    async def _more(self) -> bool:
        """Waits until something came; whether it was stirred instead."""
        waiter: asyncio.Future[bool] = self._loop.create_future()
        self._waiter = waiter
        try:
            return await waiter
        finally:
            if self._waiter is waiter:  # else somebody reads on already
                self._waiter = None

    # -- asyncio's -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """It is open."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        if self._error is not None or self.complete or self.used < 0:
            if self._error is None:
                self._fail("it spoke unasked")
            return
        if self._in_head:
            self._spoke = True
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"it does not speak HTTP: {error}", garbage=True)
        except httptools.HttpParserUpgrade:
            self._fail("it changes to another protocol, which nobody asked for", garbage=True)
        if self._in_head and self._head_bytes > HEAD_BYTES:
            self._fail(f"the head of its answer has more than {HEAD_BYTES} bytes", garbage=True)
        waiter = self._waiter
        if waiter is None or waiter.done():
            self._hold(len(data))
        elif self.tap is None or self.complete or not self._pieces or not self._tapped(self.tap, waiter):
            waiter.set_result(False)

    def connection_lost(self, error: Exception | None) -> None:
        """It is closed."""
        if self._until_end and error is None and not self._in_head:
            self.complete = True
        self._transport = None
        self._fail(str(error) if error else "the engine closed the connection")

    # -- httptools' ------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """An answer begins; there is only one."""
        if self.complete:
            raise ValueError("two answers to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        """One of the answer's; what comes behind a body is not looked at."""
        if not self._in_head:
            return
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """The head is there."""
        self.status = self._parser.get_status_code()
        if self.status < 200:
            self.headers.clear()
            return
        self._in_head = False
        told = "content-length" in self.headers or "chunked" in self.headers.get("transfer-encoding", "")
        self._until_end = not told and self.status not in _BODILESS

    def on_message_complete(self) -> None:
        """The answer is at its end."""
        if not self._in_head and not self._until_end:
            self.complete, self._keep = True, self._parser.should_keep_alive()

    # -- within ----------------------------------------------------------------------------

    def _tapped(self, tap: Callable[[bytes], bool], waiter: asyncio.Future[bool]) -> bool:
        """Whether the tap took all that is there, or it broke and the reader was told so."""
        pieces = self._pieces
        try:
            if not tap(pieces[0] if len(pieces) == 1 else b"".join(pieces)):
                return False
        except Exception as error:  # noqa: BLE001 - it is the reader's, who would have met it
            if not waiter.done():
                waiter.set_exception(error)
        pieces.clear()
        self.tapped_s = self._loop.time()
        return True

    def _hold(self, size_bytes: int) -> None:
        """So much more came than is read; nothing further is taken where that is a lot."""
        self._buffered += size_bytes
        if self._buffered > _PAUSE_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def _fail(self, why: str, *, garbage: bool = False) -> None:
        if self._error is None:
            self._error = BrokenError(why, spoke=self._spoke, garbage=garbage)
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(False)
