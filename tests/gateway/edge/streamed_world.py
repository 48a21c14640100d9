"""A whole gateway before an engine that streams, a client with little room, and what passes between its sockets."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from lengthwise.gateway.config import Engine, GatewayConfig, Listen, Order, PredictionConfig, Tls
from lengthwise.gateway.edge.http_server import HttpProtocol
from lengthwise.gateway.serve import Gateway
from lengthwise.testing.engine_server.server import close_runner

LETTERS, ROOM_BYTES, HELD_BYTES = 8192, 1 << 16, 2 << 20
END = b'data: {"id":"c","choices":[{"index":0,"text":"","finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
LAST = b"\r\n0\r\n\r\n"


def event(name: str, number: int) -> bytes:
    text = f"{name}{number:06d}".ljust(LETTERS, "x").encode()
    return b'data: {"id":"c","choices":[{"index":0,"text":"%b","finish_reason":null}]}\n\n' % text


def stream_of(name: str, events: int) -> bytes:
    return b"".join(event(name, number) for number in range(events)) + END


def little_room(transport: Any) -> None:
    """The kernel keeps little of what is sent there."""
    line = transport.get_extra_info("socket")
    with socket.fromfd(line.fileno(), socket.AF_INET, socket.SOCK_STREAM) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ROOM_BYTES)


@dataclass
class Reporting:
    """An engine that tells its numbered events as fast as they are taken, or a pause apart."""

    pause_s: float = 0.0
    sent: int = 0
    client_request: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def tell(self, request: web.Request) -> web.StreamResponse:
        requested = await request.json()
        self.client_request.append(requested["prompt"])
        little_room(request.transport)
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        try:
            await answer.prepare(request)
            for number in range(requested["max_tokens"]):
                await answer.write(event(requested["prompt"], number))
                self.sent += 1
                await asyncio.sleep(self.pause_s)
            await answer.write(END)
            await answer.write_eof()
            self.finished.append("report")
        except ConnectionError:
            self.finished.append("stopped")
        return answer

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/health", self.health)
        app.router.add_post("/v1/completions", self.tell)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield str(site.name)
        finally:
            await close_runner(runner)


class Watched:
    """The clients' connections, and what was passed on there at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.wires: list[HttpProtocol] = []
        self.passed: list[bytes] = []
        self.took: list[bool] = []
        self.max_bytes = 0
        made, pass_on, takes = HttpProtocol.connection_made, HttpProtocol.write_chunk, HttpProtocol.can_write

        def connection_made(wire: HttpProtocol, transport: Any) -> None:
            made(wire, transport)
            self.wires.append(wire)
            little_room(transport)

        def passes(wire: HttpProtocol, piece: bytes) -> None:
            pass_on(wire, piece)
            self.passed.append(piece[:120])
            self.max_bytes = max(self.max_bytes, wire.transport.get_write_buffer_size())

        def requested(wire: HttpProtocol) -> bool:
            self.took.append(takes(wire))
            return self.took[-1]

        monkeypatch.setattr(HttpProtocol, "connection_made", connection_made)
        monkeypatch.setattr(HttpProtocol, "write_chunk", passes)
        monkeypatch.setattr(HttpProtocol, "can_write", requested)

    @property
    def stops(self) -> int:
        """How often a connection that had taken pieces took no more."""
        return sum(before and not after for before, after in itertools.pairwise(self.took))

    def of(self, name: str) -> int:
        return sum(b'"text":"%b' % name.encode() in piece for piece in self.passed)


@dataclass
class Client:
    """A client with a small buffer that reads on request."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    raw: bytearray = field(default_factory=bytearray)

    def submit(self, name: str, events: int) -> None:
        body = b'{"model":"m","prompt":"%b","max_tokens":%d,"stream":true}' % (name.encode(), events)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        self.writer.write(head % len(body) + body)

    async def read(self, max_bytes: int = ROOM_BYTES) -> int:
        """How much came; 0 at the end."""
        piece = await self.reader.read(max_bytes)
        self.raw += piece
        return len(piece)

    async def answers(self, count: int, pause_s: float = 0.0) -> list[bytes]:
        """The bodies of so many answers, once they have come; it rests behind every half MiB."""
        read = 0
        while not (self.raw.endswith(LAST) and self.raw.count(LAST) == count):
            more = await self.read()
            assert more, "it broke off"
            read += more
            if pause_s and read > 1 << 19:
                read = 0
                await asyncio.sleep(pause_s)
        return bodies(bytes(self.raw))


def bodies(raw: bytes) -> list[bytes]:
    """Of answers in chunks, one behind the other; what is not whole stands as far as it goes."""
    found, at = [], 0
    while at < len(raw):
        head, at = raw.index(b"\r\n\r\n", at), raw.index(b"\r\n\r\n", at) + 4
        assert raw[:head].rpartition(b"HTTP/1.1 ")[2].startswith(b"200 ")
        pieces = []
        while at < len(raw):
            line = raw.find(b"\r\n", at)
            if line < 0:
                return [*found, b"".join(pieces)]
            size = int(raw[at:line], 16)
            pieces.append(raw[line + 2 : line + 2 + size])
            at = line + 4 + size
            if not size:
                break
        found.append(b"".join(pieces))
    return found


@asynccontextmanager
async def connected(port: int, context: ssl.SSLContext | None = None) -> AsyncIterator[Client]:
    line = socket.socket()
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, ROOM_BYTES)
    line.setblocking(False)
    await asyncio.get_running_loop().sock_connect(line, ("127.0.0.1", port))
    safe: dict[str, Any] = {"ssl": context, "server_hostname": "localhost"} if context else {}
    reader, writer = await asyncio.open_connection(sock=line, limit=ROOM_BYTES, **safe)
    try:
        yield Client(reader, writer)
    finally:
        writer.transport.abort()
        with contextlib.suppress(Exception):
            await writer.wait_closed()


@asynccontextmanager
async def gateway_of(engine: Reporting, tls: Tls | None = None) -> AsyncIterator[Gateway]:
    async with engine.serving() as url:
        config = GatewayConfig(
            engines=(Engine(url, probe=False, concurrency=4),),
            order=Order("fcfs"),
            prediction=PredictionConfig(predictor="none"),
            listen=Listen(port=0, admin_port=None, tls=tls),
        )
        async with Gateway(config) as gateway:
            await gateway.fleet.wait_checked(10)
            yield gateway


def run(work: Coroutine[Any, Any, None], loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def watched() -> None:
        async with asyncio.timeout(60):
            await work

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(watched())


async def until(true: Callable[[], bool], max_s: float = 60.0) -> None:
    async with asyncio.timeout(max_s):
        while not true():  # noqa: ASYNC110 - what is awaited has no event
            await asyncio.sleep(0.005)


async def at_rest(engine: Reporting) -> None:
    """Returns once the engine has got rid of nothing for a while."""
    before, still = -1, 0
    while still < 5:
        still = still + 1 if engine.sent == before else 0
        before = engine.sent
        await asyncio.sleep(0.1)
