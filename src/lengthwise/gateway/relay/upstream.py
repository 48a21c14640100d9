"""One request to one engine: opened, read, and stopped at any moment."""

from __future__ import annotations

import asyncio
import base64
import errno
import ssl
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

import aiohttp
import httptools

from lengthwise.backend.openai_protocol import Server
from lengthwise.gateway.config import ResilienceConfig, Engine
from lengthwise.gateway.relay.failures import MALFORMED, STALLED, Full, Interrupted, Trouble
from lengthwise.schema.errors import InputError, MissingExtraError

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

    def __init__(self, cause: str, *, spoke: bool, garbage: bool = False) -> None:
        super().__init__(cause)
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
    def available(self) -> bool:
        """Whether another request can be sent."""
        return self._error is None and self._transport is not None and not self._transport.is_closing()

    @property
    def at_end(self) -> bool:
        """Whether all of the answer has been read, and the connection can serve again."""
        return self.complete and self._keep and not self._pieces and self.available

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

    async def succeeded(self) -> None:
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

    def wakeup(self) -> None:
        """Wakes who reads, although there is nothing for it."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)

    def abort(self, cause: str = "it was given up") -> None:
        """Ends it at once, whatever is under way."""
        self._fail(cause)

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

    def _fail(self, cause: str, *, garbage: bool = False) -> None:
        if self._error is None:
            self._error = BrokenError(cause, spoke=self._spoke, garbage=garbage)
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(False)


IDLE_S = 2.0
"""Shorter than servers keep an idle connection (uvicorn: 5 s), so that none is lost while it is being reused."""


class Lines:
    """Connections to an engine, with its key and its certificates.

    Args:
        engine: Where it is.
        resilience: How long a connection may take to be made.
        tls: How its certificate is checked and ours is shown; None: as everybody's.

    Attributes:
        busy: Those that are in use.
    """

    def __init__(self, engine: Engine, resilience: ResilienceConfig, tls: ssl.SSLContext | None) -> None:
        where = urlsplit(Server(engine.url).root)
        self._host, self._secure = where.hostname or "", where.scheme == "https"
        self._port = where.port or (443 if self._secure else 80)
        self._root = where.path.rstrip("/")
        self._tls, self._connect_s = tls, resilience.connect_s
        self._fixed = _fixed_head(where.netloc.rpartition("@")[2], _credentials(engine))
        self._idle: list[Line] = []
        self._heads: dict[str, bytes] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False
        self.busy: set[Line] = set()

    def retained(self) -> Line | None:
        """An open connection that nobody uses; None there is none."""
        now_s = asyncio.get_running_loop().time()
        while self._idle:
            line = self._idle.pop()
            if line.available and now_s - line.idle_since_s < IDLE_S:
                self.busy.add(line)
                return line
            line.abort()
        return None

    async def opened(self) -> Line:
        """A new connection; raises OSError (TimeoutError as well) where there is none."""
        if self._closed:
            raise ConnectionError("the engine is not used any more")
        loop, tls = asyncio.get_running_loop(), self._context()
        async with asyncio.timeout(self._connect_s):
            _, line = await loop.create_connection(
                Line, self._host, self._port, ssl=tls, server_hostname=self._host if tls else None
            )
        self.busy.add(line)
        return line

    def head(self, path: str, headers: Iterable[tuple[str, str]], length: int) -> bytes:
        """A POST's head; raises ValueError where a header would end it early."""
        start = self._heads.get(path)
        if start is None:
            start = self._heads[path] = f"POST {self._root}{path} HTTP/1.1\r\n".encode("ascii") + self._fixed
        told = "".join([_header(name, value) for name, value in headers])
        return b"%b%bContent-Length: %d\r\n\r\n" % (start, told.encode("latin-1"), length)

    def release(self, line: Line) -> None:
        """Nobody uses it any more; what is not at its end is closed, so that the engine gives it up."""
        self.busy.discard(line)
        if not line.at_end or self._closed:
            line.abort()
            return
        loop = asyncio.get_running_loop()
        line.idle_since_s = loop.time()
        self._idle.append(line)
        if self._sweeper is None:
            self._sweeper = loop.call_later(IDLE_S, self._sweep)

    def close(self) -> None:
        """Closes all of them."""
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for line in [*self._idle, *self.busy]:
            line.abort("the engine is not used any more")
        self._idle.clear()

    def _sweep(self) -> None:
        """Closes those that nobody used for long; the oldest stand first."""
        loop = asyncio.get_running_loop()
        oldest_s = loop.time() - IDLE_S + 0.01
        kept = [line for line in self._idle if line.idle_since_s > oldest_s and line.available]
        for line in set(self._idle) - set(kept):
            line.abort()
        self._idle = kept
        self._sweeper = loop.call_later(IDLE_S, self._sweep) if kept else None

    def _context(self) -> ssl.SSLContext | None:
        if self._secure and self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls if self._secure else None


def _header(name: str, value: str) -> str:
    if "\r" in value or "\n" in value:
        raise ValueError(f"the header {name} holds a line break")
    return f"{name}: {value}\r\n"


def _fixed_head(host: str, credentials: str) -> bytes:
    fixed = [("Host", host), ("Accept-Encoding", "identity"), ("User-Agent", "lengthwise")]
    if credentials:
        fixed.append(("Authorization", credentials))
    return "".join(_header(*one) for one in fixed).encode("latin-1")


def _credentials(engine: Engine) -> str:
    if engine.api_key:
        return f"Bearer {engine.api_key}"
    where = urlsplit(engine.url)
    if where.username is None:
        return ""
    pair = f"{unquote(where.username)}:{unquote(where.password or '')}"
    return "Basic " + base64.b64encode(pair.encode()).decode()


DRAIN_S = 0.25
CLIENT, SLOW = "client gone", "slow reader"
_ERROR_BYTES = 1 << 16


class Call:
    """A POST to an engine.

    Its limits are on silence: ``first_byte_s`` until anything comes, then ``stall_s`` between two pieces;
    a client that takes nothing for ``stall_s`` is given up likewise. One timer serves a whole answer.

    Args:
        resilience: The limits.
    """

    __slots__ = (
        "_care",
        "_closed",
        "_connecting",
        "_limit",
        "_line",
        "_lines",
        "_loop",
        "_reading",
        "_reason",
        "_since_s",
        "_timer",
    )  # fmt: skip

    def __init__(self, resilience: ResilienceConfig) -> None:
        self._care = resilience
        self._loop = asyncio.get_running_loop()
        self._lines: Lines | None = None
        self._line: Line | None = None
        self._connecting: asyncio.Timeout | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._reason = ""
        self._closed = self._reading = False
        self._since_s, self._limit = 0.0, resilience.first_byte_s

    async def open(self, session: Any, path: str, body: bytes, headers: Iterable[tuple[str, str]]) -> None:
        """Sends it and returns once status and headers are there.

        Raises:
            Trouble: No connection, or no answer.
            Interrupted: ``interrupt`` was called.
        """
        self._lines = lines = lines_of(session)
        head = lines.head(path, headers, len(body))
        self._since_s, self._reading = self._loop.time(), True
        self._timer = self._loop.call_later(min(self._limit, self._care.stall_s), self._poll)
        self._line = lines.retained() or await self._connected()
        try:
            if not await self._sent(head, body):  # an idle connection that was closed meanwhile
                lines.release(self._line)
                self._line = await self._connected()
                await self._sent(head, body)
        except BrokenError as error:
            if self._reason:
                raise self._stopped("no answer", self._care.first_byte_s) from None
            raise Trouble(MALFORMED if error.garbage else "closed early", str(error)) from None
        self._reading = False
        self._since_s = self._loop.time()

    async def _connected(self) -> Line:
        assert self._lines is not None
        try:
            async with asyncio.timeout(None) as self._connecting:
                return await self._lines.opened()
        except TimeoutError:
            if self._reason:
                raise self._stopped("no answer", self._care.first_byte_s) from None
            raise Trouble("no connection", f"within {self._care.connect_s:g} s") from None
        except OSError as error:
            ours = error.errno in (errno.EMFILE, errno.ENFILE)
            raise Trouble("no connection", str(error), engine=not ours) from None
        finally:
            self._connecting = None

    async def _sent(self, head: bytes, body: bytes) -> bool:
        """Whether an answer comes; False where a connection that was used before turned out to be closed."""
        line = self._line
        assert line is not None
        try:
            line.send(head, body)
            await line.succeeded()
        except BrokenError as error:
            if line.used and not error.spoke and not self._reason:
                return False
            raise
        return True

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self._line.status if self._line is not None else 0

    @property
    def headers(self) -> Mapping[str, str]:
        """The answer's headers, their names in lower case."""
        return self._line.headers if self._line is not None else {}

    async def read(self, tap: Callable[[bytes], bool] | None = None) -> bytes | None:
        """The next piece, b"" at the end, None after ``stir``.

        Args:
            tap: Offered each piece as it comes; while it takes them this waits on.

        Raises:
            Trouble: The connection broke, or nothing came for too long.
            Interrupted: ``interrupt`` was called.
        """
        if self._reason:
            raise self._stopped()
        line = self._line
        assert line is not None
        self._since_s, self._reading = self._loop.time(), True
        line.tap = tap
        try:
            data = await line.read()
        except BrokenError as error:
            if self._reason:
                raise self._stopped() from None
            raise Trouble("closed early", str(error)) from None
        finally:
            self._reading = False
        if self._reason:
            raise self._stopped()
        self._since_s, self._limit = self._loop.time(), self._care.stall_s
        return data

    def wakeup(self) -> None:
        """Wakes who reads, although there is nothing for it."""
        if self._line is not None:
            self._line.wakeup()

    async def rest(self, max_bytes: int = _ERROR_BYTES) -> bytes:
        """What is left of the answer, up to a bound; raises as ``read``."""
        parts, size = [], 0
        while size < max_bytes and (data := await self.read()):
            parts.append(data)
            size += len(data)
        return b"".join(parts)[:max_bytes]

    @property
    def at_end(self) -> bool:
        """Whether all of the answer has been read."""
        return self._line is not None and self._line.at_end

    async def drain(self) -> None:
        """Lets an answer that is complete end, so that its connection can be used again."""
        self._limit = DRAIN_S
        line = self._line
        try:
            async with asyncio.timeout(DRAIN_S):
                while line is not None and await line.read():
                    pass
        except (TimeoutError, BrokenError):  # the answer was complete
            pass
        finally:
            self.close()

    def interrupt(self, cause: str) -> None:
        """Stops reading: what waits for the engine raises Interrupted (or Trouble, when it stalled)."""
        if self._closed or self._reason:
            return
        self._reason = cause
        if self._connecting is not None:
            self._connecting.reschedule(self._loop.time())
        elif self._line is not None:
            self._line.abort(cause)

    def close(self) -> None:
        """Gives the connection back, or closes it where the answer is not at its end: engines abort then."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._line is not None and self._lines is not None:
            self._lines.release(self._line)

    def _poll(self) -> None:
        """Looks, now and then, how long it has been silent."""
        now_s = self._loop.time()
        if self._line is not None and self._line.tapped_s > self._since_s:
            self._since_s, self._limit = self._line.tapped_s, self._care.stall_s
        limit_s = self._limit if self._reading else self._care.stall_s
        rest_s = self._since_s + limit_s - now_s
        if rest_s > 0.001:
            self._timer = self._loop.call_later(min(rest_s, self._care.stall_s), self._poll)
            return
        self._timer = None
        self.interrupt(STALLED if self._reading else SLOW)

    def _stopped(self, silent: str = STALLED, limit_s: float | None = None) -> Exception:
        if self._reason == STALLED:
            return Trouble(silent, f"nothing came for {limit_s or self._limit:g} s")
        return Interrupted(self._reason)


def lines_of(session: Any) -> Lines:
    """The lines of a session that ``open_session`` made; raises Trouble where it is closed."""
    connector = session.connector
    if connector is None or session.closed:
        raise Trouble("no connection", "the engine is not used any more", engine=False)
    lines: Lines = connector.lines
    return lines


def full(headers: Mapping[str, str]) -> Full:
    """What a 503 or 429 of an engine says."""
    try:
        return Full(min(60.0, max(0.0, float(headers.get("retry-after", "")))))
    except ValueError:
        return Full(None)


_CHUNK_BYTES = 1 << 16


def open_session(engine: Engine, resilience: ResilienceConfig) -> Any:
    """An aiohttp session for one engine: its own connections, key and certificates; to be closed.

    Its connector holds the lines on which requests go (``lines_of``).

    Raises:
        MissingExtraError: aiohttp is not there.
        InputError: A certificate cannot be read.
    """
    try:
        import aiohttp

    except ImportError as error:
        raise MissingExtraError("lengthwise serve", "gateway") from error
    tls = tls_context(engine)
    headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
    if engine.api_key:
        headers["Authorization"] = f"Bearer {engine.api_key}"
    return aiohttp.ClientSession(
        connector=Connector(Lines(engine, resilience, tls), limit=0, keepalive_timeout=IDLE_S, ssl=tls or True),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=resilience.connect_s),
        headers=headers,
        auto_decompress=False,
        read_bufsize=_CHUNK_BYTES,
    )


def tls_context(engine: Engine) -> ssl.SSLContext | None:
    """How the engine's certificate is checked and ours is shown; None: as everybody's."""
    tls = engine.tls
    if tls is None:
        return None
    try:
        context = ssl.create_default_context(cafile=tls.ca)
        if tls.cert:
            context.load_cert_chain(tls.cert, tls.key)
    except (OSError, ssl.SSLError) as error:
        raise InputError(f"the certificates of engine {engine.display_url} must be readable: {error}") from error
    return context


class Connector(aiohttp.TCPConnector):
    """For one engine.

    Attributes:
        lines: Connections for the requests of clients.
    """

    def __init__(self, lines: Lines, **named: Any) -> None:
        super().__init__(**named)
        self.lines = lines

    def close(self, **named: Any) -> Any:
        """Closes all connections."""
        self.lines.close()
        return super().close(**named)
