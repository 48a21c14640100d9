"""Pieces that go to a client in the moment in which they come, over its real connection, before a real engine."""

from __future__ import annotations

import asyncio
import contextlib
import ssl

import pytest
import trustme
import uvloop
from streamed_world import (
    HELD_BYTES,
    LETTERS,
    Reporting,
    Watched,
    at_rest,
    bodies,
    connected,
    gateway_of,
    run,
    stream_of,
    until,
)

from lengthwise.gateway.config import Tls

LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


@pytest.fixture
def safe(tmp_path):
    """What a server and its clients need for TLS."""
    authority, context = trustme.CA(), ssl.create_default_context()
    cert = authority.issue_cert("localhost")
    cert.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    cert.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    authority.configure_trust(context)
    return Tls(str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")), context


@pytest.mark.slow
@pytest.mark.parametrize(("loop", "secured"), [(LOOPS[0], False), (LOOPS[1], False), (LOOPS[1], True)])
def test_a_slow_reader_gets_every_byte_in_order_and_little_is_buffered(loop, secured, safe, monkeypatch):
    """Sixteen MiB, of which nothing is read at first: then the engine is not read either."""
    seen, engine, events = Watched(monkeypatch), Reporting(), 2000
    tls, context = safe if secured else (None, None)

    async def work() -> None:
        async with gateway_of(engine, tls) as gateway, connected(gateway.port, context) as client:
            client.submit("a", events)
            await client.read(1)
            await at_rest(engine)
            assert engine.sent < 0.8 * events, "the engine is not read on"
            (wire,) = seen.wires
            (upstream,) = gateway.fleet.workers()[0].session.connector.pool.busy
            assert wire.transport.get_write_buffer_size() + upstream.buffered_bytes < HELD_BYTES
            assert await client.answers(1, pause_s=0.02) == [stream_of("a", events)]
            await until(lambda: gateway.driver.num_requests == 0)

    run(work(), loop)
    assert engine.finished == ["report"]
    assert len(seen.passed) > 5, "as they came"
    assert seen.stops >= 2, "and again and again the connection was full"
    assert seen.max_bytes < HELD_BYTES


@pytest.mark.parametrize("loop", LOOPS)
def test_a_second_request_sent_in_the_midst_of_a_stream_is_answered_behind_it(loop, monkeypatch):
    seen, engine, events = Watched(monkeypatch), Reporting(pause_s=0.003), 100

    async def work() -> None:
        async with gateway_of(engine) as gateway, connected(gateway.port) as client:
            client.submit("a", events)
            while seen.of("a") < 10:
                await client.read()
            client.submit("b", events)
            while len(client.raw) < 30 * LETTERS:
                await client.read()
            assert engine.client_request == ["a"], "one after the other"
            assert await client.answers(2) == [stream_of("a", events), stream_of("b", events)]
            await until(lambda: gateway.driver.num_requests == 0)

    run(work(), loop)
    assert engine.finished == ["report", "report"]
    assert seen.of("b") > 10, "its pieces go at once, too"


@pytest.mark.parametrize("loop", LOOPS)
def test_garbage_sent_in_the_midst_of_a_stream_is_answered_after_it_and_nothing_is_left(loop, monkeypatch):
    seen, engine = Watched(monkeypatch), Reporting(pause_s=0.003)

    async def work() -> None:
        async with gateway_of(engine) as gateway, connected(gateway.port) as client:
            client.submit("a", 400)
            while seen.of("a") < 10:
                await client.read()
            client.writer.write(b"\x00\x01 no request at all\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                while await client.read():
                    pass
            stream, error = bytes(client.raw).split(b"HTTP/1.1 400 ")
            assert bodies(stream) == [stream_of("a", 400)]
            assert b"invalid_http" in error
            await until(lambda: gateway.driver.num_requests == 0)
            await until(lambda: engine.finished == ["report"])

    run(work(), loop)
