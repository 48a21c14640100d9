"""HTTP/1.1 on a connection, by uvicorn and httptools, with limits on what comes before a body."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from lengthwise.gateway.config import Limits
from lengthwise.gateway.edge.client_request import headers_too_large
from lengthwise.gateway.edge.errors import Fault
from lengthwise.gateway.edge.exchange import WIRE

_INTERIM = b"HTTP/1.1 100"


class Cork:
    """A transport's writing side for one answer: the head waits for what is written in the same moment.

    Args:
        transport: The connection.
        loop: Its event loop.
        close: Ends the connection once all is written.
    """

    __slots__ = ("_close", "_head", "_loop", "_started", "_transport")

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, close: Callable[[], None]
    ) -> None:
        self._transport, self._loop, self._close = transport, loop, close
        self._head, self._started = b"", False

    def write(self, data: bytes) -> None:
        """Writes, with the head if that still waits; nothing where the connection is gone."""
        if self._transport.is_closing():
            self._head = b""
        elif self._head:
            head, self._head = self._head, b""
            self._transport.write(head + data)
        elif self._started or data.startswith(_INTERIM):
            self._transport.write(data)
        else:
            self._started, self._head = True, data
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


_LINGER_S = 2.0
_SPARE_BYTES = 4 << 20


class Stall:
    """Drops a connection whose client takes nothing of what is written.

    It looks every ``timeout_s`` while it watches: what waits must have become less since it last looked.

    Args:
        transport: The connection.
        loop: Its event loop.
        timeout_s: Longest time in which nothing is taken, up to twice that.
    """

    __slots__ = ("_left", "_loop", "_timeout_s", "_timer", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, timeout_s: float) -> None:
        self._transport, self._loop, self._timeout_s = transport, loop, timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._left = 0

    def monitor(self) -> None:
        """From now on; once is enough."""
        if self._timer is None:
            self._left = self._transport.get_write_buffer_size()
            self._timer = self._loop.call_later(self._timeout_s, self._poll)

    def rest(self) -> None:
        """No more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _poll(self) -> None:
        self._timer = None
        left = self._transport.get_write_buffer_size()
        if left and left >= self._left:
            self._transport.abort()
        elif left:
            self.monitor()


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
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, body_bytes: int, close: Callable[[], None]
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


_BODY = frozenset({b"content-length", b"transfer-encoding"})
_PHRASES = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}
_SPARE = 100
"""So many connections beyond the limit may linger; further ones are closed at once."""
PIPELINED = 16
"""Requests that may wait behind one another on a connection; each takes some KiB, however short it is."""


class Wire(HttpToolsProtocol):
    """A connection of a client.

    It is refused with 503 beyond ``limits.connections``; 431 ends it when a head is too long, 408 when a
    request takes longer than ``limits.body_s`` to come. It is dropped when what waits to be taken, of an answer
    under way, a whole one, or while it closes, has not become less in ``limits.body_s``.
    """

    limits: ClassVar[Limits] = Limits()

    @staticmethod
    def refused(fault: Fault) -> None:
        """Hears of what is refused here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = 0
        self._in_head = self._in_message = False
        self._fault: Fault | None = None
        self.on_gone: Callable[[], None] | None = None
        self._incoming: asyncio.TimerHandle | None = None
        self._linger: Linger | None = None
        self._served: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._stall = Stall(transport, self.loop, self.limits.body_s)
        if len(self.connections) > self.limits.connections:
            self._say(Fault(503, "connections", "Too many connections.", code="overloaded", retry_after_s=1.0))
        else:
            self._incoming = self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrivals()
        self._stall.rest()
        if self._linger is not None:
            self._linger.rest()
        self._disconnect()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # after a reset, too, or the timer holds all this for ``idle_s``
        if self.on_gone is not None:
            self.on_gone()

    def shutdown(self) -> None:
        """The server ends: a request whose head is still coming is told so once it is there."""
        if not (self._in_head and self._in_message):
            super().shutdown()
            self._watch_closing()

    def pause_writing(self) -> None:
        """The client takes less than is written: it is watched until it has taken that."""
        super().pause_writing()
        self._stall.monitor()

    def resume_writing(self) -> None:
        """It has taken almost all."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._stall.rest()

    def timeout_keep_alive_handler(self) -> None:
        """Nothing was asked for ``idle_s``."""
        super().timeout_keep_alive_handler()
        self._watch_closing()

    def on_response_complete(self) -> None:
        """Goes on to the next request, unless this was the last; no more are read while some wait."""
        if self._linger is not None:
            self.server_state.total_requests += 1
            return
        if self.pipeline:
            self._served = self.pipeline[-1][0]
        super().on_response_complete()
        if self.pipeline:
            self.flow.pause_reading()

    def can_write(self) -> bool:
        """Whether a further piece of a streamed answer may be written: nothing must wait, and it is the last answer."""
        cycle = self.cycle
        return not (
            self.flow.write_paused or cycle.disconnected or cycle.response_complete or not cycle.chunked_encoding
        )

    def write_chunk(self, piece: bytes) -> None:
        """Writes a further piece of a streamed answer that it takes now; past ASGI, and past the task that answers."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))

    def abort(self) -> None:
        """Drops it, whatever is still to be sent."""
        self.transport.abort()

    def read_on(self) -> None:
        """Reads further where the end of a long body made it pause: only who reads sees that the client has left."""
        if not self.pipeline:
            self.flow.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self._linger is not None:
            self._linger.drop(len(data))
        if self._ends():
            return
        super().data_received(data)
        if self._ends():
            return
        if self._in_message or self._between():
            self._incoming = self._incoming or self._expect()
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > self.limits.header_bytes:
                self._say(headers_too_large(f"A head may have {self.limits.header_bytes} bytes."))

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= PIPELINED:
            raise ValueError("too many requests wait behind one another")
        super().on_message_begin()
        self._in_head, self._in_message, self._head_bytes = True, True, 0
        self.scope["extensions"] = {WIRE: self}  # type: ignore[dict-item]

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if not self.url.startswith(b"/"):
            self._fault = Fault(400, "invalid", "The request target must be a path.", code="bad_target")
            raise self._fault

    def on_header(self, name: bytes, value: bytes) -> None:
        """One of the head; what comes behind a body is none, whoever sends it."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """An offered upgrade is not taken; httptools then reads neither a body nor a further request."""
        self._in_head = False
        offered = self.parser.should_upgrade()
        if offered and any(name in _BODY for name, _ in self.headers):
            message = "Upgrades are not offered; send the request by plain HTTP/1.1."
            self._fault = Fault(400, "invalid", message, code="upgrade_not_offered")
            raise self._fault
        super().on_headers_complete()
        if not self.pipeline:
            self._served = self.cycle
        self.cycle.transport = Cork(self.transport, self.loop, self._finish)  # type: ignore[assignment]
        if offered:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_message = False
        self._arrivals()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is told so in the same form as everything else."""
        self._say(self._fault or Fault(400, "invalid", msg, code="invalid_http"))

    def _between(self) -> bool:
        """Whether bytes came that begin no request: blank lines, sent to keep a connection."""
        answered = self.cycle is None or self.cycle.response_complete
        return answered and self.timeout_keep_alive_task is None

    def _expect(self) -> asyncio.TimerHandle:
        return self.loop.call_later(self.limits.body_s, self._late)

    def _arrivals(self) -> None:
        if self._incoming is not None:
            self._incoming.cancel()
            self._incoming = None

    def _late(self) -> None:
        self._incoming = None
        if self.flow.read_paused or self.pipeline:
            self._incoming = self._expect()
        elif not self._ends():
            self._say(Fault(408, "slow", "The request took too long to come.", code="request_timeout"))

    def _say(self, fault: Fault) -> None:
        """Writes an error and ends; nothing is written where an answer is under way, or is to come before it."""
        self._arrivals()
        self.refused(fault)
        served = self._in_progress
        if served is not None and (served.response_started or served is not self.cycle):
            self._close()
        else:
            self.transport.write(_raw(fault))
            if len(self.connections) > self.limits.connections + _SPARE:
                self._close()
                return
            self._hear_out()
        if served is not None:  # whoever waits for the rest of it waits no more
            self._disconnect()
            if self.on_gone is not None:
                self.on_gone()

    @property
    def _in_progress(self) -> RequestResponseCycle | None:
        """The request that is being answered; others may wait behind it."""
        served = self._served
        return None if served is None or served.response_complete else served

    def _disconnect(self) -> None:
        """Nobody hears any more what is under way."""
        if (cycle := self._in_progress) is not None:
            cycle.disconnected, cycle.waiting_for_100_continue = True, False
            cycle.message_event.set()

    def _finish(self) -> None:
        """Ends behind an answer; who still writes is heard out."""
        cycle = self.cycle
        if self._in_message and cycle is not None and cycle.response_complete:
            self._arrivals()
            self._hear_out()
        else:
            self._close()

    def _hear_out(self) -> None:
        if self._linger is None and not self.transport.is_closing():
            self.pipeline.clear()
            self.flow.resume_reading()
            self._linger = Linger(self.transport, self.loop, self.limits.body_bytes, self._close)

    def _close(self) -> None:
        self.transport.close()
        self._watch_closing()

    def _watch_closing(self) -> None:
        if self.transport.is_closing():
            self._stall.monitor()

    def _ends(self) -> bool:
        return self._linger is not None or self.transport.is_closing()


def _raw(fault: Fault) -> bytes:
    body = fault.body
    lines = [b"HTTP/1.1 %d %s" % (fault.status, _PHRASES[fault.status])]
    kept = [pair for pair in fault.all_headers() if pair[0] != b"connection"]
    lines += [b"%s: %s" % pair for pair in (*kept, (b"content-length", b"%d" % len(body)), (b"connection", b"close"))]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body
