"""What an engine may say on a connection besides a plain answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from relay_world import pause, run

from lengthwise.gateway.relay.upstream import BrokenConnectionError, UpstreamConnection

HEAD = b"POST / HTTP/1.1\r\nHost: e\r\nContent-Length: 0\r\n\r\n"
TRAILED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/plain\r\n\r\n"
    b"2\r\nhi\r\n0\r\nX-Sum: 5\r\nContent-Type: other\r\n\r\n"
)


async def said_by(engine: bytes, requests: int = 1) -> tuple[UpstreamConnection, list[bytes], list[dict[str, Any]]]:
    """A line after requests to who answers each with these bytes; the bodies, and what the loop complained of."""
    complaints: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, what: complaints.append(what))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(engine)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    bodies = []
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        _, line = await loop.create_connection(UpstreamConnection, "127.0.0.1", server.sockets[0].getsockname()[1])
        try:
            for _ in range(requests):
                line.send(HEAD, b"")
                await line.wait_for_head()
                parts = []
                while part := await line.read():
                    parts.append(part)
                bodies.append(b"".join(parts))
                assert line.at_end
        finally:
            line.abort()
            await pause(0.01)
    return line, bodies, complaints


@pytest.mark.parametrize("trailer", [b"X: " + b"a" * (1 << 20), b"X: a\r\n" * (1 << 18)], ids=["long", "many"])
def test_an_engine_with_endless_trailers_has_failed(trailer):
    with pytest.raises(BrokenConnectionError, match="trailers") as broken:
        run(lambda: said_by(TRAILED[:-2] + trailer))
    assert broken.value.malformed


@pytest.mark.parametrize("before", [b"", b"HTTP/1.1 100 Continue\r\n\r\n"])
def test_an_engine_that_changes_the_protocol_has_failed(before):
    change = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\nrest"

    async def work() -> None:
        complaints: list[Any] = []
        with pytest.raises(BrokenConnectionError) as broken:
            complaints = (await said_by(before + change))[2]
        assert broken.value.malformed
        assert "protocol" in str(broken.value)
        assert not complaints

    run(work)


def test_an_upgrade_that_is_only_offered_is_an_answer_like_any_other():
    async def work() -> None:
        offer = b"HTTP/1.1 200 OK\r\nUpgrade: h2c\r\nConnection: Upgrade\r\nContent-Length: 2\r\n\r\nhi"
        assert (await said_by(offer))[1] == [b"hi"]

    run(work)


def test_trailers_change_nothing_and_the_connection_serves_again():
    async def work() -> None:
        line, bodies, complaints = await said_by(TRAILED, requests=3)
        assert bodies == [b"hi"] * 3
        assert line.headers == {"transfer-encoding": "chunked", "content-type": "text/plain"}
        assert not complaints

    run(work)


@asynccontextmanager
async def streaming() -> AsyncIterator[tuple[UpstreamConnection, asyncio.Queue[bytes]]]:
    """A line on which a chunked answer comes, and what is put there is its next bytes; b"" closes it."""
    message: asyncio.Queue[bytes] = asyncio.Queue()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while piece := await message.get():
            writer.write(piece)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        _, line = await asyncio.get_running_loop().create_connection(UpstreamConnection, "127.0.0.1", port)
        try:
            line.send(HEAD, b"")
            await line.wait_for_head()
            yield line, message
        finally:
            line.abort()
            message.put_nowait(b"")
            await pause(0.01)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def test_a_tap_takes_what_comes_while_the_reader_sleeps_and_the_end_is_the_readers():
    async def work() -> None:
        async with streaming() as (line, message):
            taken: asyncio.Queue[bytes] = asyncio.Queue()
            line.on_chunk = lambda data: taken.put_nowait(data) is None
            reader = asyncio.ensure_future(line.read())
            for word in (b"one", b"two" * 100_000, b"three"):  # the second is more than is held back
                message.put_nowait(chunk(word))
                got = b""
                while len(got) < len(word):
                    got += await taken.get()
                assert got == word
                assert not reader.done()
            message.put_nowait(chunk(b"last") + b"0\r\n\r\n")
            assert (await reader, await line.read()) == (b"last", b"")
            assert taken.empty()
            assert line.at_end

    run(work)


def test_what_a_tap_does_not_take_is_read_and_comes_once():
    async def work() -> None:
        async with streaming() as (line, message):
            offered: list[bytes] = []
            line.on_chunk = lambda data: offered.append(data) is not None
            for word in (b"one", b"two"):
                message.put_nowait(chunk(word))
                assert await line.read() == word
            assert offered == [b"one", b"two"]

    run(work)


def test_an_error_of_a_tap_reaches_the_reader():
    async def work() -> None:
        async with streaming() as (line, message):

            def broken(data: bytes) -> bool:
                raise KeyError(data)

            line.on_chunk = broken
            message.put_nowait(chunk(b"one"))
            with pytest.raises(KeyError, match="one"):
                await line.read()
            line.on_chunk = None
            message.put_nowait(chunk(b"two"))
            assert await line.read() == b"two"

    run(work)


def test_a_woken_reader_leaves_the_next_chunk_to_the_next_reader():
    async def work() -> None:
        async with streaming() as (line, message):
            later: list[asyncio.Task[bytes | None]] = []

            def tap(data: bytes) -> bool:
                line.on_chunk = None
                later.append(asyncio.get_running_loop().create_task(line.read()))
                line.wake()
                return True

            line.on_chunk = tap
            message.put_nowait(chunk(b"one"))
            assert await line.read() is None
            message.put_nowait(chunk(b"two"))
            assert await asyncio.wait_for(later[0], 60) == b"two"

    run(work)
