"""A request over ASGI: its body, its response, and its cancellation when the client disconnects."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Self

from lengthwise.gateway.edge.errors import CONNECTION, Fault
from lengthwise.gateway.request import UNAUTHENTICATED

if TYPE_CHECKING:
    from lengthwise.gateway.edge.http_server import HttpProtocol
    from lengthwise.gateway.relay import Answer

CLOSE = (b"connection", b"close")
SHARES = 4  # one client may use a quarter of the budget


class BodyBudget:
    """Memory for all request bodies. ``max_bytes`` may change at any time."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.used_bytes = max_bytes, 0
        self.used_by: Counter[Hashable] = Counter()


class BodyReservation:
    """The part of the budget that a request of ``owner`` (a key or an address) uses within its ``with`` block."""

    def __init__(self, budget: BodyBudget, owner: Hashable = "") -> None:
        self._budget, self._owner, self._used_bytes = budget, owner, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._add(-self._used_bytes)
        if not self._budget.used_by[self._owner]:
            del self._budget.used_by[self._owner]

    def require(self, size_bytes: int) -> None:
        """Raise Fault if ``size_bytes`` more exceed the owner's share (429) or the budget (503).

        An owner's only request may exceed the share, and the only request of all may exceed the budget.
        """
        budget, owned = self._budget, self._budget.used_by[self._owner]
        if owned > self._used_bytes and owned + size_bytes > budget.max_bytes // SHARES:
            message = "Your requests in progress take as many bytes as one client may; send the request again."
            raise Fault(429, "bodies", message, code="body_share_exceeded", headers=[CLOSE])
        if budget.used_bytes > self._used_bytes and budget.used_bytes + size_bytes > budget.max_bytes:
            message = "The gateway has no memory left for bodies; send the request again."
            raise Fault(503, "bodies", message, code="overloaded", headers=[CLOSE])

    def take(self, size_bytes: int) -> None:
        """Reserve more bytes. Raises Fault if they do not fit."""
        self.require(size_bytes)
        self._add(size_bytes)

    def shrink_to(self, size_bytes: int) -> None:
        """Release all reserved bytes above ``size_bytes``."""
        self._add(min(0, size_bytes - self._used_bytes))

    def _add(self, size_bytes: int) -> None:
        self._used_bytes += size_bytes
        self._budget.used_bytes += size_bytes
        self._budget.used_by[self._owner] += size_bytes


Scope = dict[str, Any]
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
_DROPPED = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"te", b"trailer", b"transfer-encoding", b"upgrade",
    b"server", b"date", b"x-request-id", b"set-cookie",
})  # fmt: skip
"""Headers that an answer must not set: hop-by-hop headers, headers that the gateway itself sets, and cookies."""


class ClientGoneError(Exception):
    """The client has disconnected."""


class Exchange:
    """A request and its response, as the app uses them. ``answer`` takes what the app's handler returns."""

    def __init__(self) -> None:
        self.has_started = self.is_client_gone = False
        self.tenant = UNAUTHENTICATED
        self.is_anthropic = False  # whether errors have Anthropic's form
        self.scheduler_reports_refusals = False  # whether the scheduler, not the app, reports a refusal to listeners
        self.headers: list[tuple[bytes, bytes]] = []  # added to every response
        self.connection: HttpProtocol | None = None

    async def body(self, limit: int, content_length: bytes | None, reservation: BodyReservation) -> bytes:
        """Return the complete body, reserving memory as it arrives. Raises Fault (413, 429, 503) or ClientGoneError."""
        if content_length is not None:
            if not content_length.isdigit() or int(content_length[:20]) > limit:
                raise _too_large(limit)
            reservation.require(int(content_length[:20]))
        chunks, size, more = [], 0, True
        while more:
            chunk, more = await self._next_chunk()
            chunks.append(chunk)
            size += len(chunk)
            if size > limit:
                raise _too_large(limit)
            reservation.take(len(chunk))
        return b"".join(chunks)

    async def _next_chunk(self) -> tuple[bytes, bool]:
        """Return the next bytes of the body, and whether more follow. Raises ClientGoneError."""
        raise NotImplementedError

    def monitor(self) -> None:
        """From now on, cancel the task when the client disconnects. Call this after ``body``."""

    async def answer(self, answer: Any) -> None:
        """Send the response."""
        raise NotImplementedError

    async def send(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        """Send a complete response."""
        raise NotImplementedError

    async def send_fault(self, fault: Fault) -> None:
        """Send an error as a complete response, without reading the rest of the body."""
        await self.send(fault.status, fault.all_headers(), fault.encode(is_anthropic=self.is_anthropic))

    async def abort(self) -> None:
        """Abort the connection, so that an incomplete response does not look complete."""

    def close(self) -> None:
        """Stop watching for a disconnect."""


class AsgiExchange(Exchange):
    """Reads a request and writes its response in one task, which is cancelled on a disconnect after ``monitor``."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__()
        self._receive, self._send = receive, send
        self.connection = (scope.get("extensions") or {}).get(CONNECTION)
        self._is_framed = scope.get("http_version") != "1.0"
        self._task = asyncio.current_task()
        self._monitor: asyncio.Future[Message] | None = None
        self._finished = False
        self._sent = 0

    async def _next_chunk(self) -> tuple[bytes, bool]:
        message = await self._receive()
        if message["type"] != "http.request":
            raise ClientGoneError
        return message.get("body", b""), message.get("more_body", False)

    def monitor(self) -> None:  # noqa: D102 - as Exchange
        if self.connection is not None:
            self.connection.on_disconnect = self._cancel
            self.connection.resume_reading()
        else:
            self._monitor = asyncio.ensure_future(self._receive())
            self._monitor.add_done_callback(self._received)

    async def answer(self, answer: Answer) -> None:
        """Send a response in chunks. Wait while the connection's write buffer is full."""
        headers = [pair for pair in answer.headers if pair[0].lower() not in _DROPPED]
        left = next((int(value) for name, value in headers if name.lower() == b"content-length"), -1)
        direct = self.connection if left < 0 and self._is_framed else None  # left is -1 for a stream
        await self._start(answer.status, headers)
        try:
            async for chunk in answer:
                if direct is not None and self._sent and chunk and direct.can_write():
                    direct.write_chunk(chunk)
                    continue
                left -= len(chunk) if left > 0 else 0
                self._finished = left == 0
                await self._send({"type": "http.response.body", "body": chunk, "more_body": left != 0})
                self._sent += 1
                if direct is not None and self._sent == 1:
                    answer.attach_writer(direct)
        except Exception:
            await self.abort()
            raise
        if left:
            await self._finish(b"")

    async def send(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:  # noqa: D102
        await self._start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self._finish(body)

    async def abort(self) -> None:  # noqa: D102
        self._finished = True
        if self.connection is not None:
            self.connection.abort()
            await asyncio.sleep(0)

    def close(self) -> None:  # noqa: D102
        self._finished = True
        if self._monitor is not None:
            self._monitor.cancel()
        if self.connection is not None:
            self.connection.on_disconnect = None

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.has_started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers + self.headers})

    async def _finish(self, body: bytes) -> None:
        self._finished = True
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def _received(self, monitor: asyncio.Future[Message]) -> None:
        if self._finished or monitor.cancelled():
            return
        if monitor.exception() is None and monitor.result()["type"] != "http.disconnect":
            self.monitor()
        else:
            self._cancel()

    def _cancel(self) -> None:
        # A response may still be in the write buffer after the task has finished it: then nothing is left to cancel.
        if not (self.is_client_gone or self._finished) and self._task is not None:
            self.is_client_gone = True
            self._task.cancel()


def _too_large(limit: int) -> Fault:
    return Fault(413, "limit", f"The body must have at most {limit} bytes.", code="body_too_large", headers=[CLOSE])
