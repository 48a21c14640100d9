"""A client that costs little: raw connections, requests written as they are, answers only delimited."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools

SAID = "Tell me in a few words how a request goes through a gateway, and what it waits for on its way. " * 6
OLD_S = 120.0


def body(*, stream: bool = False, tokens: int = 32, gap_ms: int = 0, **more: Any) -> bytes:
    """A chat of about 700 bytes."""
    mark = f"<gap:{gap_ms}> " if gap_ms else ""
    messages = [{"role": "user", "content": mark + SAID}]
    fields = {"model": "toy", "messages": messages, "max_tokens": tokens, "temperature": 0}
    return json.dumps(fields | ({"stream": True} if stream else {}) | more).encode()


def request(url: str, data: bytes, key: str = "", path: str = "/v1/chat/completions") -> bytes:
    """The bytes of a POST."""
    lines = [f"POST {path} HTTP/1.1", f"Host: {urlsplit(url).netloc}", "Content-Type: application/json"]
    lines += [f"Authorization: Bearer {key}"] if key else []
    lines += [f"Content-Length: {len(data)}", "", ""]
    return "\r\n".join(lines).encode() + data


@dataclass
class Times:
    """What a load came to. ``first_s`` until the first byte of a body."""

    wall_s: float = 0.0
    whole_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    bad: int = 0
    sample: bytes = b""

    @property
    def p50_ms(self) -> float:
        return statistics.median(self.whole_s) * 1e3

    @property
    def first_p50_ms(self) -> float:
        return statistics.median(self.first_s) * 1e3


class _Line(asyncio.Protocol):
    """One connection that sends the request again as soon as it has its answer."""

    def __init__(self, load: _Load) -> None:
        self._load = load

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._parser = httptools.HttpResponseParser(self)
        self._send()

    def _send(self) -> None:
        if self._load.left == 0:
            self._transport.close()
            return
        self._load.left -= 1
        self._first = math.nan
        self._body: list[bytes] = []
        self._sent = time.perf_counter()
        self._transport.write(self._load.data)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        if not self._body:
            self._first = time.perf_counter()
        self._body.append(data)

    def on_message_complete(self) -> None:
        self._load.finished(self._sent, self._first, self._parser.get_status_code(), self._body)
        self._parser = httptools.HttpResponseParser(self)
        self._send()

    def connection_lost(self, _: Exception | None) -> None:
        self._load.closed()


class _Load:
    def __init__(self, data: bytes, count: int, lines: int) -> None:
        self.data, self.left, self._lines = data, count, lines
        self.times = Times()
        self.done = asyncio.get_running_loop().create_future()

    def finished(self, sent: float, first: float, status: int, parts: list[bytes]) -> None:
        now, times = time.perf_counter(), self.times
        times.whole_s.append(now - sent)
        times.first_s.append(first - sent)
        if status != 200:
            times.bad += 1
        if status != 200 or not times.sample:
            times.sample = b"".join(parts)

    def closed(self) -> None:
        self._lines -= 1
        if self._lines == 0 and not self.done.done():
            self.done.set_result(None)


async def _closed_loop(url: str, data: bytes, count: int, lines: int) -> Times:
    at, loop = urlsplit(url), asyncio.get_running_loop()
    load = _Load(data, count, lines)
    start = time.perf_counter()
    for _ in range(lines):
        await loop.create_connection(lambda: _Line(load), at.hostname, at.port)
    await asyncio.wait_for(load.done, OLD_S)
    load.times.wall_s = time.perf_counter() - start
    load.times.bad += count - len(load.times.whole_s)
    return load.times


def closed_loop(url: str, data: bytes, count: int, lines: int) -> Times:
    """``count`` requests over so many connections, each with one under way at a time."""
    import uvloop

    return uvloop.run(_closed_loop(url, data, count, lines))
