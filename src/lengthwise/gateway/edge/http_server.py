"""HTTP/1.1 for clients: a uvicorn server with limits that no app can enforce: headers, slow clients, connections."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, ClassVar

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from lengthwise.gateway.config import Limits, Tls
from lengthwise.gateway.edge.client_request import headers_too_large
from lengthwise.gateway.edge.errors import CONNECTION, Fault
from lengthwise.schema.errors import InputError


class CorkedTransport:
    """The writing side of a connection for one response: the head waits for data written in the same tick."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport, self._close = transport, close
        self._head, self._started = b"", False

    def write(self, data: bytes) -> None:
        """Write, together with a waiting head; nothing on a closing connection."""
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
        """Close when everything is written."""
        self._flush()
        self._close()

    def is_closing(self) -> bool:
        """Return whether the connection closes."""
        return self._transport.is_closing()

    def _flush(self) -> None:
        if self._head:
            self.write(b"")


_CHUNKED = b"transfer-encoding: chunked\r\n"


class UnframedTransport(CorkedTransport):
    """Removes chunked framing for an HTTP/1.0 client: the end of the connection ends the response."""

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
    """Abort a connection whose client reads no buffered data for ``timeout_s``, checked every ``timeout_s``."""

    def __init__(self, transport: asyncio.Transport, timeout_s: float) -> None:
        self._transport, self._timeout_s = transport, timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._buffered = 0

    def start(self) -> None:
        """Start unless started."""
        if self._timer is None:
            self._buffered = self._unsent_bytes()
            self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._on_timer)

    def stop(self) -> None:
        """Stop."""
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
_DISCARD_BYTES = 4 << 20
_DISCARDING_CONNECTIONS = 100
"""Connections beyond the limit whose input is discarded; further ones are closed at once."""
MAX_PIPELINED = 16  # requests that may wait on a connection; each takes some KiB, however short it is


class HttpProtocol(HttpToolsProtocol):
    """A connection of a client: 503 beyond ``limits.connections``, 431 for too long a head, 408 for a slow request.

    A client that takes no data in ``limits.body_s`` is cut off. After the last response of a
    connection, input is discarded for 2 s: to close at once would reset a client that sends, and lose the response.
    """

    limits: ClassVar[Limits] = Limits()

    @staticmethod
    def refused(fault: Fault) -> None:
        """Report a fault of the connection; replaced by the app's method."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_bytes = self._discard_left = 0
        self._in_head = self._in_message = False
        self._fault: Fault | None = None
        self.on_disconnect: Callable[[], None] | None = None
        self._arrival_timer: asyncio.TimerHandle | None = None
        self._discard_timer: asyncio.TimerHandle | None = None
        self._answering: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # noqa: D102
        super().connection_made(transport)
        self._write_timeout = WriteTimeout(transport, self.limits.body_s)
        if len(self.connections) > self.limits.connections:
            self._fail(Fault(503, "connections", "Too many connections.", code="overloaded", retry_after_s=1.0))
        else:
            self._start_arrival_timer()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: D102
        self._stop_arrival_timer()
        self._write_timeout.stop()
        if self._discard_timer is not None:
            self._discard_timer.cancel()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # after a reset, too, or the timer keeps all of this alive for ``idle_s``
        self._disconnect()

    def shutdown(self) -> None:
        """Shut down; a connection on which a request's head is arriving stays open for a 503."""
        if not (self._in_head and self._in_message):
            super().shutdown()
            self._watch_closing()

    def pause_writing(self) -> None:
        """Start the write timeout: the client reads slower than the gateway writes."""
        super().pause_writing()
        self._write_timeout.start()

    def resume_writing(self) -> None:
        """Stop the write timeout: the client took almost everything."""
        super().resume_writing()
        if not self.transport.is_closing():
            self._write_timeout.stop()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection."""
        super().timeout_keep_alive_handler()
        self._watch_closing()

    def on_response_complete(self) -> None:
        """Start the next pipelined request; read no more from the connection while further ones wait."""
        if self._discard_timer is not None:
            self.server_state.total_requests += 1
            return
        if self.pipeline:
            self._answering = self.pipeline[-1][0]
        super().on_response_complete()
        if self.pipeline:
            self.flow.pause_reading()

    def can_write(self) -> bool:
        """Return whether a chunk of a streamed response can be written now."""
        cycle = self.cycle
        open_ = not (cycle.disconnected or cycle.response_complete)
        return open_ and bool(cycle.chunked_encoding) and not self.flow.write_paused

    def write_chunk(self, chunk: bytes) -> None:
        """Write a chunk of a streamed response, bypassing ASGI; valid only while ``can_write``."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))

    def abort(self) -> None:
        """Drop the connection with all unsent data."""
        self.transport.abort()

    def resume_reading(self) -> None:
        """Read on after a long body paused reading: only a reading connection notices a disconnect."""
        if not self.pipeline:
            self.flow.resume_reading()

    def data_received(self, data: bytes) -> None:  # noqa: D102
        if self._discard_timer is not None:
            self._discard_left -= len(data)
            if self._discard_left < 0:
                self._close()
        if self._is_ending():
            return
        super().data_received(data)
        if self._is_ending():
            return
        idle = (self.cycle is None or self.cycle.response_complete) and self.timeout_keep_alive_task is None
        # While idle, a client may send blank lines to keep the connection: uvicorn then stops its own timer.
        if (self._in_message or idle) and self._arrival_timer is None:
            self._start_arrival_timer()
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > self.limits.header_bytes:
                self._fail(headers_too_large(f"A head must have at most {self.limits.header_bytes} bytes."))

    def on_message_begin(self) -> None:  # noqa: D102
        if len(self.pipeline) >= MAX_PIPELINED:
            raise ValueError("too many requests wait behind one another")
        super().on_message_begin()
        self._in_head, self._in_message, self._head_bytes = True, True, 0
        self.scope["extensions"] = {CONNECTION: self}  # type: ignore[dict-item]

    def on_url(self, url: bytes) -> None:  # noqa: D102
        super().on_url(url)
        if not self.url.startswith(b"/"):
            self._fault = Fault(400, "invalid", "The request target must be a path.", code="bad_target")
            raise self._fault

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; trailers behind a body are ignored."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start a request; an upgrade is refused, because httptools then reads neither a body nor another request."""
        self._in_head = False
        version, hosts = self.parser.get_http_version(), [name for name, _ in self.headers].count(b"host")
        if version not in ("1.0", "1.1"):
            self._fault = Fault(505, "invalid", "Send the request by HTTP/1.1.", code="http_version")
            raise self._fault
        if hosts > 1 or (version == "1.1" and not hosts):
            self._fault = Fault(400, "invalid", f"There must be one Host header; there are {hosts}.", code="bad_host")
            raise self._fault
        upgrade = self.parser.should_upgrade()
        if upgrade and any(name in (b"content-length", b"transfer-encoding") for name, _ in self.headers):
            message = "Upgrades are not offered; send the request by plain HTTP/1.1."
            self._fault = Fault(400, "invalid", message, code="upgrade_not_offered")
            raise self._fault
        super().on_headers_complete()
        if not self.pipeline:
            self._answering = self.cycle
        transport = CorkedTransport if version == "1.1" else UnframedTransport
        self.cycle.transport = transport(self.transport, self._finish)  # type: ignore[assignment]
        self.cycle.waiting_for_100_continue &= version == "1.1"
        if upgrade:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:  # noqa: D102
        super().on_message_complete()
        self._in_message = False
        self._stop_arrival_timer()

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP in the form of all errors."""
        self._fail(self._fault or Fault(400, "invalid", msg, code="invalid_http"))

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
        """End the connection, after an error response unless another response has started or is due first."""
        self._stop_arrival_timer()
        self.refused(fault)
        answering = self._in_progress
        if answering is not None and (answering.response_started or answering is not self.cycle):
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
        """Return the request that is being answered; others may wait behind it."""
        answering = self._answering
        return None if answering is None or answering.response_complete else answering

    def _disconnect(self) -> None:
        """Tell the app that the client of the request in progress is gone."""
        if (cycle := self._in_progress) is not None:
            cycle.disconnected, cycle.waiting_for_100_continue = True, False
            cycle.message_event.set()
        if self.on_disconnect is not None:
            self.on_disconnect()

    def _finish(self) -> None:
        """Close after a response, discarding a request that still arrives."""
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
        return self._discard_timer is not None or self.transport.is_closing()


_INTERVAL_S = 10.0


class RateLimitedWarnings(logging.Filter):
    """Pass each warning or error at most every 10 s, so that clients that send garbage cannot fill the log."""

    def __init__(self) -> None:
        super().__init__()
        self._logged_s: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record is logged."""
        message = f"{record.msg} {record.exc_info[0]}" if record.exc_info else str(record.msg)
        if record.levelno >= logging.WARNING:
            if record.created - self._logged_s.get(message, float("-inf")) < _INTERVAL_S:
                return False
            if len(self._logged_s) > 64:
                self._logged_s.clear()
            self._logged_s[message] = record.created
        return True


_RATE_LIMITED = RateLimitedWarnings()


def server(
    app: Any,
    limits: Limits,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    tls: Tls | None = None,
    drain_s: float | None = None,
    proxies: str | None = None,
) -> uvicorn.Server:
    """Return a server for an app; ``await server.serve(sockets)`` runs it.

    The app's method ``refused``, if it has one, gets each Fault that the server answers itself.

    ``port`` 0 picks a free one; with a ``tls.ca`` clients must present a certificate. ``drain_s`` bounds requests in
    progress during shutdown; the X-Forwarded-For of ``proxies`` is trusted.
    """
    for name in ("uvicorn.error", "lengthwise.gateway.edge"):
        logging.getLogger(name).addFilter(_RATE_LIMITED)  # adds it once, however often this runs
    members: dict[str, Any] = {"limits": limits}
    if (refused := getattr(app, "refused", None)) is not None:
        members["refused"] = staticmethod(refused)
    settings: dict[str, Any] = {"loop": "auto", "ws": "none", "lifespan": "off", "log_config": None}
    settings |= {"access_log": False, "server_header": False}
    settings |= {"host": host, "port": port, "http": type("LimitedHttpProtocol", (HttpProtocol,), members)}
    settings |= {"proxy_headers": proxies is not None, "forwarded_allow_ips": proxies}
    settings["timeout_keep_alive"] = limits.idle_s
    settings["timeout_graceful_shutdown"] = None if drain_s is None else max(1, round(drain_s))
    if tls:
        required = int(ssl.CERT_REQUIRED if tls.ca else ssl.CERT_NONE)
        settings |= {"ssl_certfile": tls.cert, "ssl_keyfile": tls.key}
        settings |= {"ssl_ca_certs": tls.ca, "ssl_cert_reqs": required}
    return uvicorn.Server(uvicorn.Config(app, **settings))


def check_certificate(tls: Tls) -> None:
    """Raise InputError if the certificate and its key cannot be loaded together."""
    try:
        if tls.cert is not None:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(tls.cert, tls.key)
    except (OSError, ssl.SSLError) as error:
        message = f"[listen] tls: the certificate {tls.cert} and its key {tls.key} cannot be used: {error}"
        raise InputError(message) from error


def renew_certificate(server: uvicorn.Server, tls: Tls) -> None:
    """Reload the certificate and key of a running server, for new connections."""
    context = server.config.ssl
    if context is not None and tls.cert is not None:
        context.load_cert_chain(tls.cert, tls.key)
