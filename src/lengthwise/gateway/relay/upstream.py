# ruff: noqa: D102 - asyncio and httptools document their callbacks
"""HTTP to engines: connections, their pools, and attempts that can be interrupted at any time."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import ssl
from collections.abc import Awaitable, Callable, Iterable
from typing import Any
from urllib.parse import unquote, urlsplit

import aiohttp
import httptools

from lengthwise.backend.openai_protocol import Server
from lengthwise.gateway.certificates import RenewableContext
from lengthwise.gateway.config import Engine, ResilienceConfig
from lengthwise.gateway.relay.failures import MALFORMED, STALLED, AttemptInterruptedError, UpstreamError

MAX_HEAD_BYTES = 1 << 16
_PAUSE_BYTES, _JOIN_BYTES = 1 << 17, 1 << 17
_STATUS_WITHOUT_BODY = (204, 304)


class BrokenConnectionError(Exception):
    """The connection ended or was aborted. ``malformed`` states that the engine sent no valid HTTP."""

    def __init__(self, cause: str, *, response_started: bool, malformed: bool = False) -> None:
        super().__init__(cause)
        self.response_started, self.malformed = response_started, malformed


class UpstreamConnection(asyncio.Protocol):
    """A connection to an engine that serves one request after another.

    ``complete`` states whether the complete response has arrived, even if it has not been read. While a task waits in
    ``read``, ``on_chunk`` gets each chunk but the last. If it returns True, the task is not woken, which saves time.
    ``buffered_bytes`` is the size of the chunks that wait for ``read``.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[bool] | None = None
        self._error: BrokenConnectionError | None = None
        self._chunks: list[bytes] = []
        self.on_body = self._chunks.append
        self.idle_since_s, self._num_requests = 0.0, 0
        self._reset()

    def _reset(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.status, self.headers = 0, dict[str, str]()
        self.complete = self._started = self._keep_alive = self._until_close = self._paused = False
        self._in_head, self._head_bytes, self.buffered_bytes = True, 0, 0
        self.on_chunk: Callable[[bytes], bool] | None = None
        self.consumed_s = 0.0
        self._chunks.clear()

    @property
    def available(self) -> bool:
        """Whether another request can be sent."""
        return self._error is None and self._transport is not None and not self._transport.is_closing()

    @property
    def at_end(self) -> bool:
        """Whether the complete response has been read and the connection can be reused."""
        return self.complete and self._keep_alive and not self._chunks and self.available

    def send(self, head: bytes, body: bytes) -> None:
        """Write a request. Raises BrokenConnectionError if the connection is closed."""
        self._num_requests += 1
        if self._num_requests > 1:
            self._reset()
        if self._transport is None or self._error is not None:
            raise self._error or BrokenConnectionError("the connection is closed", response_started=False)
        if len(body) < _JOIN_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.writelines([head, body])

    async def wait_for_head(self) -> None:
        """Wait for status and headers. Raises BrokenConnectionError if the connection ends before."""
        while self._in_head:
            await self._wait()

    async def read(self) -> bytes | None:
        """Return the next chunk of the body, b"" at its end, or None after ``wake``. Raises BrokenConnectionError."""
        while not self._chunks:
            if self.complete:
                return b""
            if await self._wait():
                return None
        data = b"".join(self._chunks)
        self._chunks.clear()
        self.buffered_bytes = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    def wake(self) -> None:
        """Wake the task that waits in ``read``, which then returns None."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)

    def abort(self, cause: str = "the request was given up", *, malformed: bool = False) -> None:
        """Close the connection at once. A task in ``read`` gets BrokenConnectionError with the first cause."""
        if self._error is None:
            self._error = BrokenConnectionError(cause, response_started=self._started, malformed=malformed)
        if self._transport is not None:
            self._transport.abort()
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(False)

    async def _wait(self) -> bool:
        """Wait for data. Return True if ``wake`` was called instead. Raises BrokenConnectionError."""
        if self._error is not None:
            raise self._error
        waiter: asyncio.Future[bool] = self._loop.create_future()
        self._waiter = waiter
        try:
            return await waiter
        finally:
            if self._waiter is waiter:  # otherwise another task has started to read
                self._waiter = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._error is not None or self.complete or not self._num_requests:
            self.abort("the engine sent data without a request")
            return
        num_chunks = len(self._chunks)
        self._started = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.abort(f"the engine does not speak HTTP: {error}", malformed=True)
        except httptools.HttpParserUpgrade:
            self.abort("the engine switches to another protocol without a request to do so", malformed=True)
        self._head_bytes = self._head_bytes + len(data) if len(self._chunks) == num_chunks else 0
        if self._head_bytes > MAX_HEAD_BYTES:  # of the head, or of what follows the last chunk of the body
            self.abort(f"the headers or trailers have more than {MAX_HEAD_BYTES} bytes", malformed=True)
        waiter = self._waiter
        if waiter is None or waiter.done():
            self.buffered_bytes += len(data)
            if self.buffered_bytes > _PAUSE_BYTES and not self._paused and self._transport is not None:
                self._paused = True
                self._transport.pause_reading()
        elif self.on_chunk is None or self.complete or not self._chunks or not self._consume(self.on_chunk, waiter):
            waiter.set_result(False)

    def connection_lost(self, error: Exception | None) -> None:
        """Complete a response whose end is the end of the connection, and fail any other one."""
        if self._until_close and error is None and not self._in_head:
            self.complete = True
        self._transport = None
        self.abort(str(error) if error else "the engine closed the connection")

    def on_message_begin(self) -> None:
        if self.complete:
            raise ValueError("two responses to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header. Trailers after the body are ignored."""
        if self._in_head:
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Process the end of the headers. Headers of an interim response (1xx) are dropped."""
        self.status = self._parser.get_status_code()
        if self.status < 200:
            self.headers.clear()
            return
        self._in_head = False
        framed = "content-length" in self.headers or "chunked" in self.headers.get("transfer-encoding", "")
        self._until_close = not framed and self.status not in _STATUS_WITHOUT_BODY

    def on_message_complete(self) -> None:
        if not self._in_head and not self._until_close:
            self.complete, self._keep_alive = True, self._parser.should_keep_alive()

    def _consume(self, on_chunk: Callable[[bytes], bool], waiter: asyncio.Future[bool]) -> bool:
        try:
            if not on_chunk(b"".join(self._chunks)):
                return False
        except Exception as error:  # noqa: BLE001 - the task in ``read`` raises it
            if not waiter.done():
                waiter.set_exception(error)
        self._chunks.clear()
        self.consumed_s = self._loop.time()
        return True


IDLE_S = 2.0  # below the keep-alive of servers (uvicorn: 5 s), so that a reused connection is rarely closed


class ConnectionPool:
    """Connections to an engine, with its key and certificates. ``busy`` are the connections in use."""

    def __init__(self, engine: Engine, resilience: ResilienceConfig, tls: ssl.SSLContext | None) -> None:
        root, user = urlsplit(Server(engine.url).root), urlsplit(engine.url)
        self._host, self._path = root.hostname or "", root.path.rstrip("/")
        self._secure, self.tls = root.scheme == "https", tls
        self._port = root.port or (443 if self._secure else 80)
        self._connect_s = resilience.connect_s
        headers = {"Host": root.netloc.rpartition("@")[2], "Accept-Encoding": "identity", "User-Agent": "lengthwise"}
        if engine.api_key:
            headers["Authorization"] = f"Bearer {engine.api_key}"
        elif user.username is not None:
            pair = f"{unquote(user.username)}:{unquote(user.password or '')}"
            headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        self._fixed_headers = _encode_headers(headers.items())
        self._idle: list[UpstreamConnection] = []
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self.busy: set[UpstreamConnection] = set()

    def take_idle(self) -> UpstreamConnection | None:
        """Return an open connection that has been idle for less than IDLE_S, or None if there is none."""
        now_s = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if connection.available and now_s - connection.idle_since_s < IDLE_S:
                self.busy.add(connection)
                return connection
            connection.abort()
        return None

    async def connect(self) -> UpstreamConnection:
        """Open a connection. Raises OSError if that fails, or its subclass TimeoutError after ``connect_s``."""
        if self._closed:
            raise ConnectionError("the engine is not in use any more")
        if self._secure and self.tls is None:
            self.tls = ssl.create_default_context()
        tls, name = (self.tls, self._host) if self._secure else (None, None)
        address = (self._host, self._port)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._connect_s):
            _, connection = await loop.create_connection(UpstreamConnection, *address, ssl=tls, server_hostname=name)
        self.busy.add(connection)
        return connection

    def request_head(self, path: str, headers: Iterable[tuple[str, str]], length: int) -> bytes:
        """Return the head of a POST. Raises ValueError if a header contains a line break."""
        start = f"POST {self._path}{path} HTTP/1.1\r\n".encode("ascii")
        return b"%b%b%bContent-Length: %d\r\n\r\n" % (start, self._fixed_headers, _encode_headers(headers), length)

    def release(self, connection: UpstreamConnection) -> None:
        """Make a connection idle, or close it if the response is incomplete, so that the engine aborts the request."""
        self.busy.discard(connection)
        if not connection.at_end or self._closed:
            connection.abort()
            return
        loop = asyncio.get_running_loop()
        connection.idle_since_s = loop.time()
        self._idle.append(connection)
        if self._timer is None:
            self._timer = loop.call_later(IDLE_S, self._evict_idle)

    def close(self) -> None:
        """Close all connections."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for connection in [*self._idle, *self.busy]:
            connection.abort("the engine is not in use any more")
        self._idle.clear()

    def _evict_idle(self) -> None:
        loop = asyncio.get_running_loop()
        oldest_s = loop.time() - IDLE_S + 0.01
        idle, self._idle = self._idle, [one for one in self._idle if one.idle_since_s > oldest_s and one.available]
        for connection in set(idle).difference(self._idle):
            connection.abort()
        self._timer = loop.call_later(IDLE_S, self._evict_idle) if self._idle else None


def _encode_headers(headers: Iterable[tuple[str, str]]) -> bytes:
    headers = list(headers)
    if broken := [name for name, value in headers if "\r" in value or "\n" in value]:
        raise ValueError(f"the header {broken[0]} contains a line break")
    return "".join([f"{name}: {value}\r\n" for name, value in headers]).encode("latin-1")


DRAIN_S = 0.25
REQUEST_ENDED, SLOW_READER = "request ended", "slow reader"


class Attempt:
    """One try of a request.

    It ends if the engine sends nothing for ``first_byte_s`` before the first bytes of the body or for ``stall_s`` after
    them, or if the client reads nothing for ``stall_s``.
    """

    def __init__(self, resilience: ResilienceConfig) -> None:
        self._resilience = resilience
        self._loop = asyncio.get_running_loop()
        self._pool: ConnectionPool | None = None
        self._connection: UpstreamConnection | None = None
        self._connecting: asyncio.Timeout | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._interrupt_cause = ""
        self._closed = self._reading = False
        self._since_s, self._limit_s = 0.0, resilience.first_byte_s

    async def open(
        self, session: Any, path: str, body: bytes, headers: Iterable[tuple[str, str]]
    ) -> UpstreamConnection:
        """Return the connection once the head has arrived. Raises UpstreamError or AttemptInterruptedError."""
        if session.connector is None or session.closed:
            raise UpstreamError("no connection", "the engine is not in use any more", engine_fault=False)
        pool: ConnectionPool = session.connector.pool
        self._pool, head = pool, pool.request_head(path, headers, len(body))
        self._since_s, self._reading = self._loop.time(), True
        self._timer = self._loop.call_later(min(self._limit_s, self._resilience.stall_s), self._check_silence)
        idle = pool.take_idle()
        while True:
            self._connection = connection = idle or await self._connect(pool)
            try:
                connection.send(head, body)
                await connection.wait_for_head()
            except BrokenConnectionError as error:
                if idle is None or error.response_started or self._interrupt_cause:
                    reason = MALFORMED if error.malformed else "closed early"
                    raise self._interruption_error("no answer") or UpstreamError(reason, str(error)) from None
                # The engine closed an idle connection before it got the request, which a new connection sends again.
                pool.release(idle)
                idle = None
            else:
                self._reading, self._since_s = False, self._loop.time()
                return connection

    async def _connect(self, pool: ConnectionPool) -> UpstreamConnection:
        try:
            async with asyncio.timeout(None) as self._connecting:
                return await pool.connect()
        except TimeoutError:
            silence = UpstreamError("no connection", f"within {self._resilience.connect_s:g} s")
            raise self._interruption_error("no answer") or silence from None
        except OSError as error:
            # If no file descriptor is free, the gateway is at fault, not the engine.
            engine_fault = error.errno not in (errno.EMFILE, errno.ENFILE)
            raise UpstreamError("no connection", str(error), engine_fault=engine_fault) from None
        finally:
            self._connecting = None

    @property
    def at_end(self) -> bool:
        """Whether the complete response has been read and its connection can be reused."""
        return self._connection is not None and self._connection.at_end

    async def read(self, on_chunk: Callable[[bytes], bool] | None = None) -> bytes | None:
        """Return the next chunk that ``on_chunk`` does not consume, b"" at the end, or None after ``wake``.

        Raises UpstreamError if the connection breaks or is silent for too long, and AttemptInterruptedError after
        ``interrupt``.
        """
        connection = self._connection
        assert connection is not None
        data, closed = None, None
        if not self._interrupt_cause:
            self._since_s, self._reading, connection.on_chunk = self._loop.time(), True, on_chunk
            try:
                data = await connection.read()
            except BrokenConnectionError as error:
                closed = UpstreamError("closed early", str(error))
            finally:
                self._reading = False
        if (failure := self._interruption_error() or closed) is not None:
            raise failure
        self._since_s, self._limit_s = self._loop.time(), self._resilience.stall_s
        return data

    def wake(self) -> None:
        """Wake the task that waits in ``read``, which then returns None."""
        if self._connection is not None:
            self._connection.wake()

    async def drain(self) -> None:
        """Read the end of a complete response, so that its connection can be reused."""
        self._limit_s = DRAIN_S
        try:
            with contextlib.suppress(TimeoutError, BrokenConnectionError):  # the response was complete
                async with asyncio.timeout(DRAIN_S):
                    while self._connection is not None and await self._connection.read():
                        pass
        finally:
            self.close()

    def interrupt(self, cause: str) -> None:
        """Stop reading. The reader gets AttemptInterruptedError, or UpstreamError if the engine stalled."""
        if self._closed or self._interrupt_cause:
            return
        self._interrupt_cause = cause
        if self._connecting is not None:
            self._connecting.reschedule(self._loop.time())
        elif self._connection is not None:
            self._connection.abort(cause)

    def close(self) -> None:
        """Release the connection. If the response is incomplete, the engine aborts the request."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._connection is not None and self._pool is not None:
            self._pool.release(self._connection)

    def _check_silence(self) -> None:
        now_s, stall_s = self._loop.time(), self._resilience.stall_s
        if self._connection is not None and self._connection.consumed_s > self._since_s:
            self._since_s, self._limit_s = self._connection.consumed_s, stall_s
        rest_s = self._since_s + (self._limit_s if self._reading else stall_s) - now_s
        if rest_s > 0.001:
            self._timer = self._loop.call_later(min(rest_s, stall_s), self._check_silence)
            return
        self._timer = None
        self.interrupt(STALLED if self._reading else SLOW_READER)

    def _interruption_error(self, stall_reason: str = STALLED) -> Exception | None:
        if self._interrupt_cause == STALLED:
            return UpstreamError(stall_reason, f"no data for {self._limit_s:g} s")
        return AttemptInterruptedError(self._interrupt_cause) if self._interrupt_cause else None


async def read_up_to(max_bytes: int, read: Callable[[], Awaitable[bytes | None]]) -> bytes:
    """Call ``read`` until it returns nothing or ``max_bytes`` have been read. Return at most ``max_bytes`` of them."""
    parts, size = [], 0
    while size < max_bytes and (part := await read()):
        parts.append(part)
        size += len(part)
    return b"".join(parts)[:max_bytes]


async def read_bounded(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Return at most ``max_bytes`` of a body. Close the response if there is more."""
    body = await read_up_to(max_bytes, response.content.readany)
    if not response.content.at_eof():
        response.close()
    return body


def open_session(engine: Engine, resilience: ResilienceConfig) -> aiohttp.ClientSession:
    """Open a session for health checks, with a pool for clients' requests. Raises InputError for bad certificates."""
    tls = None
    if engine.tls is not None:
        tls = RenewableContext(engine.tls, is_server=False, purpose=f"engine {engine.display_url}")
    headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
    if engine.api_key:
        headers["Authorization"] = f"Bearer {engine.api_key}"
    pool = ConnectionPool(engine, resilience, tls)
    connector = PooledConnector(pool, limit=0, keepalive_timeout=IDLE_S, ssl=tls or True)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=resilience.connect_s)
    options: dict[str, Any] = {"auto_decompress": False, "read_bufsize": 1 << 16}
    return aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers, **options)


class PooledConnector(aiohttp.TCPConnector):
    """Connector of aiohttp to one engine. ``pool`` has the connections for clients' requests."""

    def __init__(self, pool: ConnectionPool, **options: Any) -> None:
        super().__init__(**options)
        self.pool = pool

    def close(self, **options: Any) -> Any:
        """Close all connections."""
        self.pool.close()
        return super().close(**options)
