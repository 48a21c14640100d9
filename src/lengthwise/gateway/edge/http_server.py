"""HTTP/1.1 for clients: a uvicorn server that also limits headers, slow clients and connections."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import socket
import ssl
import sys
from collections import Counter
from collections.abc import Callable, Container
from http import HTTPStatus
from typing import Any, ClassVar

import uvicorn
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from lengthwise.gateway.background import stop_accepting
from lengthwise.gateway.config import Limits
from lengthwise.gateway.edge.auth import network
from lengthwise.gateway.edge.client_request import headers_too_large
from lengthwise.gateway.edge.errors import CONNECTION, Fault, invalid, quoted


class CorkedTransport:
    """Writes one response. Its head is sent together with data that follows in the same iteration of the event loop."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport, self._close = transport, close
        self._head, self._started = b"", False

    def write(self, data: bytes) -> None:
        """Write data, or delay it if it is the head. If the connection is closing, write nothing."""
        if self._transport.is_closing():
            self._head = b""
        elif self._head:
            head, self._head = self._head, b""
            self._transport.write(head + data)
        elif self._started or data.startswith(b"HTTP/1.1 100"):
            self._transport.write(data)
        else:
            self._started, self._head = True, data
            asyncio.get_running_loop().call_soon(self._flush)

    def close(self) -> None:
        """Write a delayed head, and close the connection."""
        self._flush()
        self._close()

    def is_closing(self) -> bool:
        """Return whether the connection is closing."""
        return self._transport.is_closing()

    def _flush(self) -> None:
        if self._head:
            self.write(b"")


_CHUNKED = b"transfer-encoding: chunked\r\n"


class UnframedTransport(CorkedTransport):
    """Removes the chunked framing for an HTTP/1.0 client, for which the end of the connection ends the response."""

    _framed = False

    def write(self, data: bytes) -> None:
        """Write the head without transfer-encoding, and chunks without their sizes."""
        if not self._started:
            self._framed = _CHUNKED in data
            data = data.replace(_CHUNKED, b"")
        elif self._framed and data:
            size, _, chunk = data.partition(b"\r\n")
            data = chunk[: int(size, 16)]
        super().write(data)


class WriteTimeout:
    """Checks a connection every ``timeout_s`` seconds. Aborts it if its write buffer has not become smaller."""

    def __init__(self, transport: asyncio.Transport, timeout_s: float) -> None:
        self._transport, self._timeout_s = transport, timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._buffered = 0

    def start(self) -> None:
        """Start the timer unless it runs."""
        if self._timer is None:
            self._buffered = self._unsent_bytes()
            self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._on_timer)

    def stop(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _unsent_bytes(self) -> int:
        try:
            return self._transport.get_write_buffer_size()
        except AttributeError:  # a TLS transport that is closed twice drops its protocol, and with it the buffer
            return 0

    def _on_timer(self) -> None:
        self._timer = None
        buffered = self._unsent_bytes()
        if buffered and buffered >= self._buffered:
            self._transport.abort()
        elif buffered:
            self.start()


_DISCARD_S = 2.0
_DISCARD_BYTES = 4 << 20  # maximum number of bytes that are discarded, besides ``limits.body_bytes``
_DISCARDING_CONNECTIONS = 100  # connections beyond the limit whose input is discarded; further ones close at once
_HOST = re.compile(rb"[A-Za-z0-9._~%!$&'()*+,;=:\[\]\-]*")
_OTHER_VERSION = ("Send the request by HTTP/1.1.", "http_version", 505)
MAX_PIPELINED = 16  # requests that may wait on a connection; each takes some KiB, however short it is


class HttpProtocol(HttpToolsProtocol):
    """A client's connection.

    It gets 503 beyond ``limits.connections``, 429 beyond ``limits.connections_per_address``, 431 if a head, or what
    follows a chunked body, exceeds ``limits.header_bytes``, and 408 if a request does not arrive within
    ``limits.body_s``. These and other errors of HTTP follow the responses to earlier requests, and end the connection.
    The server aborts it if the client takes no data for ``limits.body_s``. Input after an error or the last response is
    discarded for up to 2 s, because an immediate close could lose the response.
    """

    limits: ClassVar[Limits] = Limits()
    trusted: ClassVar[Container[str]] = ()  # proxies, whose connections have many clients
    open_by_address: ClassVar[Counter[str]] = Counter()

    @staticmethod
    def refused(fault: Fault) -> None:
        """Report a Fault of the connection. The app's method ``refused`` replaces this one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = self._discard_left = 0
        self._in_head = self._in_message = self._has_body = False
        self._last_fault: Fault | None = None  # follows the responses to earlier requests
        self.on_disconnect: Callable[[], None] | None = None
        self._arrival_timer: asyncio.TimerHandle | None = None
        self._discard_timer: asyncio.TimerHandle | None = None
        self._answering: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # noqa: D102
        super().connection_made(transport)
        self._write_timeout = WriteTimeout(transport, self.limits.body_s)
        peer = transport.get_extra_info("peername")
        self._net = network(peer[0]) if isinstance(peer, tuple) and self._is_client(peer[0]) else ""
        self.open_by_address[self._net] += 1
        if len(self.connections) > self.limits.connections:
            self._fail(Fault(503, "connections", "Too many connections.", code="overloaded", retry_after_s=1.0))
        elif self._net and self.open_by_address[self._net] > (self.limits.connections_per_address or math.inf):
            message = "Too many connections from your address."
            self._fail(Fault(429, "connections", message, code="too_many_connections", retry_after_s=1.0))
        else:
            self._start_arrival_timer()

    def _is_client(self, address: str) -> bool:
        return self.limits.connections_per_address is not None and address not in self.trusted

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: D102
        self.open_by_address[self._net] -= 1
        if not self.open_by_address[self._net]:
            del self.open_by_address[self._net]
        self._stop_arrival_timer()
        self._write_timeout.stop()
        if self._discard_timer is not None:
            self._discard_timer.cancel()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # also after a reset: its timer would keep the connection in memory
        self._disconnect()

    def shutdown(self) -> None:
        """Close the connection after its response, unless a request's head is arriving: that request gets 503 first."""
        if not (self._in_head and self._in_message):
            super().shutdown()
            self._watch_closing()

    def pause_writing(self) -> None:
        """Start the write timeout, because the client reads more slowly than the gateway writes."""
        super().pause_writing()
        self._write_timeout.start()

    def resume_writing(self) -> None:
        """Stop the write timeout, because the write buffer is almost empty."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._write_timeout.stop()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection."""
        super().timeout_keep_alive_handler()
        self._watch_closing()

    def on_response_complete(self) -> None:
        """Start the next pipelined request. While others wait behind it, read no more from the connection."""
        if self._discard_timer is not None:
            self.server_state.total_requests += 1
            return
        if self.pipeline:
            self._answering = self.pipeline[-1][0]
        super().on_response_complete()
        if self.pipeline:
            self.flow.pause_reading()
        elif self._last_fault is not None and self._in_progress is None and not self.transport.is_closing():
            assert self._answering is not None, "its response is complete"
            self._answering.transport.write(b"")  # sends its head if it has no body
            self._send_fault(self._last_fault)

    def can_write(self) -> bool:
        """Return whether a chunk of a streamed response can be written now."""
        cycle = self.cycle
        open_ = not (cycle.disconnected or cycle.response_complete)
        return open_ and bool(cycle.chunked_encoding) and not self.flow.write_paused

    def write_chunk(self, chunk: bytes) -> None:
        """Write a chunk of a streamed response directly, without ASGI. Valid only while ``can_write`` returns True."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))

    def abort(self) -> None:
        """Abort the connection, with all unsent data."""
        self.transport.abort()

    def resume_reading(self) -> None:
        """Resume reading after a long body has paused it: without reading, a disconnect remains unnoticed."""
        if not self.pipeline:
            self.flow.resume_reading()

    def data_received(self, data: bytes) -> None:  # noqa: D102
        if self._discard_timer is not None:
            self._discard_left -= len(data)
            if self._discard_left < 0:
                self._close()
        if self._is_ending():
            return
        self._has_body = False
        super().data_received(data)
        if self._is_ending():
            return
        idle = (self.cycle is None or self.cycle.response_complete) and self.timeout_keep_alive_task is None
        # Blank lines from an idle client stop uvicorn's keep-alive timer, so that this one must end the connection.
        if (self._in_message or idle) and self._arrival_timer is None:
            self._start_arrival_timer()
        # Trailers have the same limit: httptools joins a long one piece by piece, which would block the event loop.
        self._head_bytes = self._head_bytes + len(data) if self._in_message and not self._has_body else 0
        if self._head_bytes > self.limits.header_bytes:
            part = "A head" if self._in_head else "Trailers after a body"
            self._fail(headers_too_large(f"{part} must have at most {self.limits.header_bytes} bytes."))

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: the request is answered over HTTP, and uvicorn's hint to install a library is wrong here."""

    def on_message_begin(self) -> None:  # noqa: D102
        if len(self.pipeline) >= MAX_PIPELINED:
            raise invalid(None, f"At most {MAX_PIPELINED} requests may wait on a connection.", "too_many_pipelined")
        super().on_message_begin()
        self._in_head, self._in_message, self._has_body, self._head_bytes = True, True, False, 0
        self.scope["extensions"] = {CONNECTION: self}  # type: ignore[dict-item]

    def on_url(self, url: bytes) -> None:  # noqa: D102
        super().on_url(url)
        if len(self.url) > self.limits.header_bytes:
            raise headers_too_large(f"A head must have at most {self.limits.header_bytes} bytes.")
        if not self.url.startswith(b"/"):
            raise invalid(None, "The request target must be a path.", "bad_target")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header. Trailers after the body are ignored."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start a request. Refuse an upgrade with a body: httptools would read neither the body nor later requests."""
        version, hosts = self.parser.get_http_version(), [value for name, value in self.headers if name == b"host"]
        if version not in ("1.0", "1.1"):
            raise invalid(None, *_OTHER_VERSION)
        if len(hosts) > 1 or (version == "1.1" and not hosts):
            raise invalid(None, f"There must be one Host header; there are {len(hosts)}.", "bad_host")
        if hosts and not _HOST.fullmatch(hosts[0]):
            message = f"The Host header must be a host; it is {quoted(hosts[0].decode('latin-1'))}."
            raise invalid(None, message, "bad_host")
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings not in ([], [b"chunked"]) or (codings and version == "1.0"):
            raise invalid(None, "Transfer-Encoding must be chunked, by HTTP/1.1.", "bad_transfer_encoding")
        upgrade = self.parser.should_upgrade()
        if upgrade and any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers):
            raise invalid(None, "Upgrades are not offered; send the request by plain HTTP/1.1.", "upgrade_not_offered")
        super().on_headers_complete()
        self._in_head = False
        if not self.pipeline:
            self._answering = self.cycle
        transport = CorkedTransport if version == "1.1" else UnframedTransport
        self.cycle.transport = transport(self.transport, self._finish)  # type: ignore[assignment]
        self.cycle.waiting_for_100_continue &= version == "1.1"
        if upgrade:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:  # noqa: D102
        self._has_body = True
        super().on_body(body)

    def on_message_complete(self) -> None:  # noqa: D102
        super().on_message_complete()
        self._in_message = False
        self._stop_arrival_timer()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that is not valid HTTP, and close the connection.

        The answer is the ``Fault`` that a callback of the parser raised, if one did. Otherwise it is 505 for an HTTP
        version other than 1.0 and 1.1, or 400 with the message ``msg``.
        """
        error = sys.exception()  # of httptools; an exception of a callback is its context
        if error is not None and isinstance(error.__context__, Fault):
            self._fail(error.__context__)
        else:
            is_version = str(error) == "Invalid HTTP version"
            self._fail(invalid(None, *(_OTHER_VERSION if is_version else (msg, "invalid_http"))))

    def _start_arrival_timer(self) -> None:
        self._arrival_timer = self.loop.call_later(self.limits.body_s, self._on_arrival_timeout)

    def _stop_arrival_timer(self) -> None:
        if self._arrival_timer is not None:
            self._arrival_timer.cancel()
            self._arrival_timer = None

    def _on_arrival_timeout(self) -> None:
        self._arrival_timer = None
        if self.flow.read_paused or self.pipeline:
            self._start_arrival_timer()
        elif not self._is_ending():
            self._fail(Fault(408, "slow", "The request took too long to arrive.", code="request_timeout"))

    def _fail(self, fault: Fault) -> None:
        """End the connection after the responses to earlier requests, with an error unless the last one has begun."""
        self._stop_arrival_timer()
        self.refused(fault)
        answering, in_body = self._in_progress, self._in_message and not self._in_head
        if answering is None or (in_body and answering is self.cycle):
            self._send_fault(fault)
        else:
            self._last_fault = fault
            if in_body:
                self.pipeline.popleft()  # the request at fault
                self.resume_reading()

    def _send_fault(self, fault: Fault) -> None:
        answering = self._in_progress
        if answering is not None and answering.response_started:
            self._close()
        else:
            lines = [b"HTTP/1.1 %d %s" % (fault.status, HTTPStatus(fault.status).phrase.encode())]
            lines += [b"%s: %s" % pair for pair in fault.all_headers() if pair[0] != b"connection"]
            lines += [b"content-length: %d" % len(fault.body), b"connection: close", b"", fault.body]
            self.transport.write(b"\r\n".join(lines))
            if len(self.connections) > self.limits.connections + _DISCARDING_CONNECTIONS:
                self._close()
                return
            self._discard()
        if answering is not None:  # its task would wait for the rest of the body
            self._disconnect()

    @property
    def _in_progress(self) -> RequestResponseCycle | None:
        """The request whose response is not complete, or None if there is none. Pipelined requests wait behind it."""
        answering = self._answering
        return None if answering is None or answering.response_complete else answering

    def _disconnect(self) -> None:
        if (cycle := self._in_progress) is not None:
            cycle.disconnected, cycle.waiting_for_100_continue = True, False
            cycle.message_event.set()
        if self.on_disconnect is not None:
            self.on_disconnect()

    def _finish(self) -> None:
        """Close the connection after a response. If the rest of a request still arrives, discard it first."""
        if self._in_message and self.cycle is not None and self.cycle.response_complete:
            self._stop_arrival_timer()
            self._discard()
        else:
            self._close()

    def _discard(self) -> None:
        if self._discard_timer is None and not self.transport.is_closing():
            self.pipeline.clear()
            self.flow.resume_reading()
            self._discard_left = self.limits.body_bytes + _DISCARD_BYTES
            self._discard_timer = self.loop.call_later(_DISCARD_S, self._close)
            if self.transport.can_write_eof():
                self.transport.write_eof()

    def _close(self) -> None:
        self.transport.close()
        self._watch_closing()

    def _watch_closing(self) -> None:
        if self.transport.is_closing():
            self._write_timeout.start()

    def _is_ending(self) -> bool:
        return self._last_fault is not None or self._discard_timer is not None or self.transport.is_closing()


_INTERVAL_S = 10.0


class RateLimitedWarnings(logging.Filter):
    """Logs each warning or error at most once in 10 s, so that invalid requests cannot fill the log."""

    def __init__(self) -> None:
        super().__init__()
        self._logged_s: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log the record."""
        message = f"{record.msg} {record.exc_info[0]}" if record.exc_info else str(record.msg)
        if record.levelno >= logging.WARNING:
            if record.created - self._logged_s.get(message, float("-inf")) < _INTERVAL_S:
                return False
            if len(self._logged_s) > 64:
                self._logged_s.clear()
            self._logged_s[message] = record.created
        return True


_RATE_LIMITED = RateLimitedWarnings()


class _Server(uvicorn.Server):
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await stop_accepting(listener for server in self.servers for listener in server.sockets)
        await super().shutdown(sockets)


def server(
    app: Any,
    limits: Limits,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    tls: ssl.SSLContext | None = None,
    drain_s: float | None = None,
    proxies: str | None = None,
) -> uvicorn.Server:
    """Return a server for an app. ``await server.serve(sockets)`` runs it.

    If the app has a method ``refused``, it gets each Fault with which the server itself answers. ``port`` 0 picks a
    free port. With ``tls`` it serves HTTPS. ``drain_s`` limits the time for requests in progress during shutdown. The
    server trusts the header X-Forwarded-For of ``proxies``.
    """
    for name in ("uvicorn.error", "lengthwise.gateway.edge"):
        logging.getLogger(name).addFilter(_RATE_LIMITED)  # adds it once, however often this runs
    members: dict[str, Any] = {"limits": limits, "open_by_address": Counter()}
    if proxies is not None:
        members["trusted"] = ProxyHeadersMiddleware(app, proxies).trusted_hosts
    if (refused := getattr(app, "refused", None)) is not None:
        members["refused"] = staticmethod(refused)
    settings: dict[str, Any] = {"loop": "auto", "ws": "none", "lifespan": "off", "log_config": None}
    settings |= {"access_log": False, "server_header": False}
    settings |= {"host": host, "port": port, "http": type("LimitedHttpProtocol", (HttpProtocol,), members)}
    settings |= {"proxy_headers": proxies is not None, "forwarded_allow_ips": proxies}
    settings["timeout_keep_alive"] = limits.idle_s
    settings["timeout_graceful_shutdown"] = None if drain_s is None else max(1, round(drain_s))
    if tls is not None:
        settings["ssl_context_factory"] = lambda *_: tls
    return _Server(uvicorn.Config(app, **settings))
