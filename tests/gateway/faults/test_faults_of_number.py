"""Forty thousand requests over the network, clients vanishing in every state: nothing is left of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fault_world import process

CHILD = Path(__file__).with_name("counting_gateway.py")
LEAN_ENGINE = Path(__file__).parents[2] / "testing" / "lean_engine.py"
COUNT, FIRST, CLIENTS = 20_000, 10_000, 32
MAX_MIB = 2.0
"""By so much may the memory grow over the last 30,000 (about 70 bytes a request; seen: 0.2)."""
SLACK = {"timers": 3}
"""Timers of looks at the engine come and go."""
LEAVES = ("in the body", "at once", "while it waits", "at the first byte", "mid-stream", "after the answer")


def requested(number: int) -> tuple[bytes, bool]:
    """A chat; every tenth is a stream of 8 tokens, 2 ms apart."""
    stream = number % 10 == 0
    message = f"{'<gap:2> ' if stream else ''}Tell me what {number} is, in a few words."
    body = json.dumps(
        {"model": "toy", "messages": [{"role": "user", "content": message}], "max_tokens": 8, "stream": stream}
    ).encode()
    head = ("POST /v1/chat/completions HTTP/1.1", "Host: gateway", "Content-Type: application/json")
    return "\r\n".join((*head, f"Content-Length: {len(body)}", "", "")).encode() + body, stream


async def answered(reader: asyncio.StreamReader) -> bytes:
    """A whole answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 "), head
    length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
    return await (reader.readexactly(int(length)) if length else reader.readuntil(b"\r\n0\r\n\r\n"))


async def left(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, raw: bytes, how: str) -> None:
    """Sends a request, or half of one, and vanishes."""
    writer.write(raw[: -len(raw) // 4] if how == "in the body" else raw)
    if how == "while it waits":
        await asyncio.sleep(0.002)
    elif how == "at the first byte":
        await reader.read(1)
    elif how == "mid-stream":
        await reader.readuntil(b"\r\n\r\n")
        await reader.read(1)
    elif how == "after the answer":
        await answered(reader)
    writer.transport.abort()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def load(port: int, numbers: range) -> Counter[str]:
    """How many ended how; every fifth client vanishes."""
    present, finished = iter(numbers), Counter[str]()

    async def client() -> None:
        reader = writer = None
        for number in present:
            if writer is None:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
            raw, stream = requested(number)
            if number % 5 == 0:
                how = LEAVES[number // 10 % len(LEAVES)]
                await left(reader, writer, raw, how)
                finished[f"{how}, {'streamed' if stream else 'complete'}"] += 1
                writer = None
                continue
            writer.write(raw)
            body = await answered(reader)
            assert (b"data: [DONE]" in body) is stream
            finished["succeeded"] += 1
        if writer is not None:
            writer.close()

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return finished


@asynccontextmanager
async def gateway() -> AsyncIterator[tuple[int, Any]]:
    """Its port, and a question for what it holds."""
    async with process(str(LEAN_ENGINE)) as (_, first):
        url = json.loads(first)["url"]
        child = await asyncio.create_subprocess_exec(
            sys.executable, str(CHILD), url, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        assert child.stdin is not None
        assert child.stdout is not None
        out = child.stdout

        async def in_use() -> dict[str, float]:
            child.stdin.write(b"\n")
            return json.loads(await out.readline())

        try:
            yield int(await out.readline()), in_use
        finally:
            child.stdin.close()
            assert await asyncio.wait_for(child.wait(), 30) == 0


async def at_rest(reserved: Any, before: dict[str, float]) -> dict[str, float]:
    """What it holds once that is no more than before; the last word where it never is."""
    names = [name for name in before if name != "rss_mib"]
    for _ in range(100):
        now = await reserved()
        if all(now[name] <= before[name] + SLACK.get(name, 0) for name in names):
            break
        await asyncio.sleep(0.1)
    return now


@pytest.mark.slow
def test_after_twenty_thousand_requests_nothing_is_left_of_them() -> None:
    async def work() -> None:
        async with gateway() as (port, in_use):
            await load(port, range(200))
            await asyncio.sleep(1.0)
            before = await at_rest(in_use, await in_use())
            finished = await load(port, range(FIRST))
            middle = await at_rest(in_use, before)
            finished += await load(port, range(FIRST, COUNT))
            after = await at_rest(in_use, before)
        assert finished.total() == COUNT
        assert finished["succeeded"] == COUNT * 4 // 5
        assert len(finished) == 1 + 2 * len(LEAVES)
        for name in ("turns", "traces", "waiting", "waiting_bytes", "slots", "answers", "lines"):
            assert after[name] == 0, name
        for name in ("tasks", "timers", "files"):
            assert after[name] <= before[name] + SLACK.get(name, 0), name
        assert after["rss_mib"] - middle["rss_mib"] < MAX_MIB

    asyncio.run(work())
