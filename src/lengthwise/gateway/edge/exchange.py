"""One request's way over ASGI: its body in, its answer out, and whether the client is still there."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from lengthwise.gateway.edge.client_request import Answer, ChunkWriter
from lengthwise.gateway.edge.errors import Fault

_AGAIN_S = 1.0
_CLOSE_HEADERS = [(b"connection", b"close")]
SHARES = 4
"""One holder may have so much of the room: one in four."""


class Room:
    """The budget.

    Args:
        max_bytes: Of all requests together; may be changed at any time.

    Attributes:
        held_bytes: Of the requests that are in.
        held_by: The same by holder.
    """

    __slots__ = ("held_by", "max_bytes", "memory_bytes")

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.memory_bytes = max_bytes, 0
        self.held_by: Counter[Hashable] = Counter()


class Part:
    """What one request has of the room; given back at the end of its ``with``.

    Args:
        room: Of all.
        holder: Whose request: a key, or an address where there are none.
    """

    __slots__ = ("_held_bytes", "_holder", "_room")

    def __init__(self, room: Room, holder: Hashable = "") -> None:
        self._room, self._holder, self._held_bytes = room, holder, 0

    def __enter__(self) -> Self:
        """Nothing yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Gives all back."""
        room = self._room
        room.memory_bytes -= self._held_bytes
        room.held_by[self._holder] -= self._held_bytes
        if not room.held_by[self._holder]:
            del room.held_by[self._holder]
        self._held_bytes = 0

    def require(self, size_bytes: int) -> None:
        """Raises a Fault if so much more would not fit now; nothing is taken. A request that is alone fits always.

        Raises:
            Fault: 429, the holder has its share; 503, there is no room.
        """
        room = self._room
        others = room.held_by[self._holder] - self._held_bytes
        if others and others + self._held_bytes + size_bytes > room.max_bytes // SHARES:
            message = "Your requests under way hold as many bytes as one client may; send the request again."
            raise Fault(429, "bodies", message, code="body_share_exceeded", headers=_CLOSE_HEADERS)
        if room.memory_bytes > self._held_bytes and room.memory_bytes + size_bytes > room.max_bytes:
            message = "The gateway holds as many bodies as it may; send the request again."
            raise Fault(503, "bodies", message, code="overloaded", headers=_CLOSE_HEADERS, retry_after_s=_AGAIN_S)

    def take(self, size_bytes: int) -> None:
        """So much more is held; raises a Fault if it does not fit."""
        self.require(size_bytes)
        self._held_bytes += size_bytes
        self._room.memory_bytes += size_bytes
        self._room.held_by[self._holder] += size_bytes

    def release(self, size_bytes: int) -> None:
        """No more than so much is held from now on."""
        less = max(0, self._held_bytes - size_bytes)
        self._held_bytes -= less
        self._room.memory_bytes -= less
        self._room.held_by[self._holder] -= less

    def reserve(self, size_bytes: int) -> None:
        """So much is held in all from now on; raises a Fault if it does not fit."""
        self.take(size_bytes - self._held_bytes)


Scope = dict[str, Any]
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
GONE, SLOW, BLOCKED = "stopped", "slow", "blocked"
WIRE = "lengthwise.wire"
"""The extension of a scope under which our own server's connection stands: it watches more cheaply."""
_HOP = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"te", b"trailer", b"transfer-encoding", b"upgrade",
    b"server", b"date", b"x-request-id", b"set-cookie",
})  # fmt: skip
_CLOSE_HEADER = (b"connection", b"close")


class ClientGoneError(Exception):
    """Nobody is there to be answered."""


class Connection(ChunkWriter, Protocol):
    """What our own server offers beyond ASGI; who sends or takes nothing in time is refused or dropped by itself."""

    on_gone: Callable[[], None] | None
    """Called when the client has left."""

    def read_on(self) -> None:
        """Reads further: only who reads sees that the client has left."""
        ...

    def abort(self) -> None:
        """Drops it, whatever is still to be sent."""
        ...


class Talk:
    """Reads and writes for the task that made it, and cancels that task when it waits in vain.

    Then ``cause`` says so: GONE, the client has left; and, where another server than our own is in front, which
    sees to that by itself, SLOW, its body did not come in time; STUCK, it takes nothing of its answer.

    Args:
        scope: Of ASGI.
        receive: Of ASGI.
        send: Of ASGI.
        timeout_s: Longest time for the body, and for a piece of the answer to be taken.
    """

    __slots__ = (
        "_dispatch",
        "_monitor",
        "_over",
        "_reading",
        "_receive",
        "_send",
        "_sent",
        "_task",
        "_timeout_s",
        "_timer",
        "_wire",
        "cause",
        "handed_on",
        "headers",
        "started",
    )  # fmt: skip

    def __init__(self, scope: Scope, receive: Receive, send: Send, timeout_s: float) -> None:
        self._receive, self._send, self._timeout_s = receive, send, timeout_s
        extensions = scope.get("extensions")
        self._wire: Connection | None = extensions.get(WIRE) if extensions else None
        self._task = asyncio.current_task()
        self._timer: asyncio.TimerHandle | None = None
        self._monitor: asyncio.Future[Message] | None = None
        self._over = self._dispatch = self._reading = self.started = False
        self._sent, self.cause = 0, ""
        self.handed_on = False
        """Whether the exchange has it: what is refused from then on it has told already."""
        self.headers: list[tuple[bytes, bytes]] = []
        """Further ones of every answer."""

    async def body(self, limit: int, report: bytes | None, part: Part) -> bytes:
        """The whole body.

        Args:
            limit: Most bytes.
            report: Content-Length.
            part: Of the room for all bodies; takes what has come.

        Raises:
            Fault: 413, or 503 where there is no room now.
            ClientGoneError: It left before the end.
        """
        if report is not None:
            if not report.isdigit() or int(report[:20]) > limit:
                raise _too_large(limit)
            part.require(int(report[:20]))
        if self._wire is None:
            self._reading = True
            self._look_again()
        pieces, size, more = [], 0, True
        while more:
            message = await self._receive()
            if message["type"] != "http.request":
                raise ClientGoneError
            piece, more = message.get("body", b""), message.get("more_body", False)
            size += len(piece)
            if size > limit:
                raise _too_large(limit)
            part.take(len(piece))
            pieces.append(piece)
        self._reading = False
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def monitor(self) -> None:
        """From now on the task is cancelled when the client leaves. The body must have been read."""
        if self._wire is not None:
            self._wire.on_gone = self._lost
            self._wire.read_on()
        else:
            self._monitor = asyncio.ensure_future(self._receive())
            self._monitor.add_done_callback(self._left)

    async def answer(self, answer: Answer) -> None:
        """Sends an answer, a piece at a time, each as soon as the one before it is taken."""
        headers = [pair for pair in answer.headers if pair[0].lower() not in _HOP]
        left = next((int(value) for name, value in headers if name.lower() == b"content-length"), -1)
        wire = self._wire if left < 0 else None
        await self._start(answer.status, headers)
        try:
            async for piece in answer:
                if wire is not None and self._sent and piece and wire.can_write():
                    wire.write_chunk(piece)
                    continue
                left -= len(piece) if left > 0 else 0
                self._over, self._dispatch = left == 0, True
                if self._timer is None and left and self._wire is None:  # our own server watches by itself
                    self._look_again()
                await self._send({"type": "http.response.body", "body": piece, "more_body": left != 0})
                self._dispatch = False
                self._sent += 1
                if wire is not None and self._sent == 1:
                    answer.attach_writer(wire)
        except Exception:
            await self.abort()
            raise
        if left:
            await self._end(b"")

    async def say(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        """Sends a whole answer."""
        await self._start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self._end(body)

    async def fault(self, fault: Fault) -> None:
        """Sends an error; a body that is still to come is not waited for."""
        await self.say(fault.status, fault.all_headers(), fault.body)

    async def abort(self) -> None:
        """Drops the connection: half an answer must not look like a whole one."""
        if self._wire is not None:
            self._wire.abort()
            await asyncio.sleep(0)

    def close(self) -> None:
        """Ends all that was begun here."""
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
        if self._monitor is not None:
            self._monitor.cancel()
        if self._wire is not None:
            self._wire.on_gone = None

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers + self.headers})

    async def _end(self, body: bytes) -> None:
        self._over = self._dispatch = True
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def _left(self, monitor: asyncio.Future[Message]) -> None:
        if self._over or monitor.cancelled():
            return
        if monitor.exception() is None and monitor.result()["type"] != "http.disconnect":
            self.monitor()
        else:
            self._cancel(GONE)

    def _lost(self) -> None:
        if not self._over:
            self._cancel(GONE)

    def _look_again(self) -> None:
        seen = self._sent if self._dispatch else -1
        self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._poll, seen)

    def _poll(self, sent: int) -> None:
        """Every ``patience_s``: has anything moved?"""
        if self._reading:
            self._cancel(SLOW)
        elif self._dispatch and self._sent == sent:
            self._cancel(BLOCKED)
        else:
            self._look_again()

    def _cancel(self, cause: str) -> None:
        if not self.cause and self._task is not None:
            self.cause = cause
            self._task.cancel()


def _too_large(limit: int) -> Fault:
    return Fault(413, "limit", f"The body may have {limit} bytes.", code="body_too_large", headers=[_CLOSE_HEADER])
