"""The connections to one engine: kept for a while, and opened as they are needed."""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections.abc import Iterable
from urllib.parse import unquote, urlsplit

from lengthwise.backend.openai import Server
from lengthwise.gateway.config import Care, Engine
from lengthwise.gateway.relay._line import Line

IDLE_S = 2.0
"""Shorter than servers keep an idle connection (uvicorn: 5 s), so that none is lost while it is being reused."""


class Lines:
    """Connections to an engine, with its key and its certificates.

    Args:
        engine: Where it is.
        care: How long a connection may take to be made.
        tls: How its certificate is checked and ours is shown; None: as everybody's.

    Attributes:
        busy: Those that are in use.
    """

    def __init__(self, engine: Engine, care: Care, tls: ssl.SSLContext | None) -> None:
        where = urlsplit(Server(engine.url).root)
        self._host, self._secure = where.hostname or "", where.scheme == "https"
        self._port = where.port or (443 if self._secure else 80)
        self._root = where.path.rstrip("/")
        self._tls, self._connect_s = tls, care.connect_s
        self._fixed = _fixed_head(where.netloc.rpartition("@")[2], _credentials(engine))
        self._idle: list[Line] = []
        self._heads: dict[str, bytes] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False
        self.busy: set[Line] = set()

    def kept(self) -> Line | None:
        """An open connection that nobody uses; None there is none."""
        now_s = asyncio.get_running_loop().time()
        while self._idle:
            line = self._idle.pop()
            if line.usable and now_s - line.idle_since_s < IDLE_S:
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

    def give_back(self, line: Line) -> None:
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
        kept = [line for line in self._idle if line.idle_since_s > oldest_s and line.usable]
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
