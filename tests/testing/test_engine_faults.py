"""Faults of an emulated engine happen when they are planned, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
import urllib.request

import aiohttp
import numpy as np
import pytest

from lengthwise.schema.errors import InputError
from lengthwise.testing.engine_server import (
    LAST,
    EngineServer,
    EngineSpec,
    Fault,
    FaultPlan,
    Limits,
    LinearSteps,
    in_thread,
)

SPEC = EngineSpec(steps=LinearSteps(0.001, 0.0, 0.0))
BODY = {"model": "toy", "prompt": "hello", "max_tokens": 12, "ignore_eos": True, "stream": True}


class Got:
    """What a client got: status, bytes in reads, and the error that ended it."""

    def __init__(self):
        self.status, self.reads, self.error = 0, [], None

    @property
    def data(self):
        return b"".join(self.reads)

    @property
    def tokens(self):
        return self.data.count(b'"choices":[{')


async def ask(session, server, **fields):
    got = Got()
    body = BODY | {"stream_options": {"include_usage": True}} | fields
    try:
        async with session.post(f"{server.url}/v1/completions", json=body) as answer:
            got.status = answer.status
            async for chunk in answer.content.iter_any():
                got.reads.append(chunk)
    except (aiohttp.ClientError, OSError) as error:
        got.error = error
    return got


def met(fault, check=None, **fields):
    """What came of a request with the fault; the next one must go well on the same or a restarted server."""

    async def run():
        plan = FaultPlan(incoming=[fault] if fault else [])
        async with EngineServer(SPEC, faults=plan) as server, aiohttp.ClientSession() as session:
            got = await ask(session, server, **fields)
            if check:
                await check(session, server)
            if not server.up or server.dying:
                await server.restart()
            well = await ask(session, server)
            assert (well.status, well.tokens, well.error) == (200, 12, None)
            await server.idle()
            assert server.slots_in_use == 0
            assert server.clocked.batch.free_blocks == SPEC.limits.num_blocks
            return got, server.log.entries[0]

    return asyncio.run(run())


@pytest.mark.parametrize("kind", ["close", "die"])
@pytest.mark.parametrize("stream", [True, False])
def test_before_the_first_byte(kind, stream):
    got, entry = met(Fault(kind), stream=stream, stream_options=None)
    assert got.status == 0
    assert got.error is not None
    assert entry.finished == {"close": "closed", "die": "died"}[kind]
    assert entry.fault == kind


@pytest.mark.parametrize("kind", ["close", "die"])
def test_in_the_middle_and_after_the_last_token(kind):
    got, entry = met(Fault(kind, after_tokens=5))
    assert got.error is not None
    assert 0 < got.tokens <= entry.sent_tokens == 5
    got, entry = met(Fault(kind, after_tokens=LAST))
    assert got.error is not None
    assert b"[DONE]" not in got.data
    assert entry.sent_tokens == 12


def test_a_dead_engine_listens_no_more():
    async def check(session, server):
        await server.dying
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get(f"{server.url}/health")

    met(Fault("die", after_tokens=3), check)


def test_silence():
    got, entry = met(Fault("stall", after_tokens=4, seconds=0.3))
    gaps = [b - a for (a, _), (b, _) in zip(entry.sent, entry.sent[1:], strict=False)]
    assert max(gaps) > 0.29
    assert gaps.index(max(gaps)) == 3
    assert got.tokens == 12
    assert b"[DONE]" in got.data

    async def leaves():
        async with EngineServer(SPEC, faults=FaultPlan({0: Fault("hang")})) as server, aiohttp.ClientSession() as s:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await ask(s, server)
            await server.idle()
            assert server.log.entries[0].finished == "aborted"
            assert server.log.entries[0].sent == []

    asyncio.run(leaves())


def test_http_errors_and_errors_in_the_stream():
    got, entry = met(Fault("status", status=500))
    assert (got.status, entry.finished) == (500, "refused")
    got, _ = met(Fault("full", retry_after_s=2))
    assert got.status == 503
    got, _ = met(Fault("error", after_tokens=3))
    assert b'data: {"error":' in got.data
    got, _ = met(Fault("malformed", after_tokens=0))
    assert b'data: {"choices": [{"text\n\n' in got.data
    got, _ = met(Fault("malformed"), stream=False)
    with pytest.raises(ValueError, match=r".+"):
        json.loads(got.data)


def test_streams_that_are_odd_and_right():
    plain, _ = met(None)
    split, _ = met(Fault("split"))
    assert no_time(split.data) == no_time(plain.data)
    assert len(split.reads) > 2 * len(plain.reads)
    got, _ = met(Fault("no_done"))
    assert got.tokens == 12
    assert b"[DONE]" not in got.data
    got, _ = met(Fault("double_usage"))
    assert got.data.count(b'"choices":[]') == 2
    got, entry = met(Fault("giant", after_tokens=4, size=300_000))
    assert len(got.data) > 300_000
    assert entry.sent_tokens == 12
    _, entry = met(Fault("slow", seconds=0.02))
    assert entry.sent[-1][0] - entry.sent[0][0] >= 0.02 * (len(entry.sent) - 1)


def no_time(data):
    """Without ids and times of creation."""
    events = [json.loads(line[6:]) for line in data.decode().split("\n\n") if line.startswith("data: {")]
    text = "".join(c["text"] for e in events for c in e["choices"])
    return text, events[-1]["usage"]


def test_health_can_fail_and_a_restart_clears_the_engine():
    async def run():
        async with EngineServer(SPEC) as server, aiohttp.ClientSession() as session:
            for healthy, status in ((True, 200), (False, 503)):
                server.healthy = healthy
                async with session.get(f"{server.url}/health") as answer:
                    assert answer.status == status
            port = server.port
            waiting = asyncio.create_task(ask(session, server, max_tokens=4000))
            while not server.log.entries:  # noqa: ASYNC110 - the engine is looked at
                await asyncio.sleep(0.005)
            await server.restart()
            assert (await waiting).error is not None
            assert (server.port, server.restarts, server.clocked.batch.tokens) == (port, 1, 0)
            assert (await ask(session, server)).tokens == 12
            assert [e.finished for e in server.log.entries] == ["died", "finished"]
            assert server.log.others == ["GET /health"] * 2

    asyncio.run(run())


@pytest.mark.parametrize("turns", range(5))
def test_a_client_that_connects_as_the_engine_dies_loses_its_connection(turns):
    """Whatever turn of the loop it is in: the socket may be accepted and not yet have a transport."""

    async def run():
        async with EngineServer(SPEC) as server:
            with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
                for _ in range(turns):
                    await asyncio.sleep(0)
                await server.die()
                with contextlib.suppress(ConnectionResetError):
                    assert client.recv(1) == b""

    asyncio.run(run())


def test_clients_that_leave_at_any_time_leave_nothing_behind():
    """Some before their turn, some in the middle, some at the end; slots for a few only."""
    rng = np.random.default_rng(0)
    stays_s = rng.exponential(0.02, 300)
    spec = dataclasses.replace(SPEC, limits=Limits(max_num_seqs=8, num_blocks=600))

    async def run():
        async with EngineServer(spec) as server, aiohttp.ClientSession() as session:

            async def one(stay_s):
                try:
                    async with asyncio.timeout(stay_s):
                        await ask(session, server)
                except TimeoutError:
                    return False
                return True

            stayed = []
            for begin in range(0, 300, 30):
                stayed += await asyncio.gather(*map(one, stays_s[begin : begin + 30].tolist()))
            await server.idle()
            ends = [entry.finished for entry in server.log.entries]
            assert 0 < stayed.count(True) <= ends.count("finished") < 300
            assert server.aborts == ends.count("aborted") == len(ends) - ends.count("finished") > 0
            assert server.slots_in_use == 0
            assert server.clocked.batch.free_blocks == 600

    asyncio.run(run())


def test_in_a_thread():
    with in_thread(EngineServer(SPEC), EngineServer(SPEC)) as running:
        texts = set()
        for server in running.servers:
            body = json.dumps(BODY | {"stream": False}).encode()
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{server.url}/v1/completions", body, headers)
            with urllib.request.urlopen(request, timeout=10) as answer:
                texts.add(json.loads(answer.read())["choices"][0]["text"])
        assert len(texts) == 1
        running.call(running.servers[0].die())
        assert not running.servers[0].up
        running.call(running.servers[0].restart())
        assert running.servers[0].up


def test_a_fault_that_is_none():
    with pytest.raises(InputError, match="no fault named 'dies'"):
        Fault("dies")
    with pytest.raises(InputError, match="after_tokens must be at least 0"):
        Fault("die", after_tokens=-2)
