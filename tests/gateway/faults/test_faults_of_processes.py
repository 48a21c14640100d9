"""Gateways and engines that are killed, ended and restarted under load, as processes."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal

import aiohttp
import pytest
from fault_world import CARE, Report, ask, body, engine, engine_process, gateway_process
from relay_world import run, until

pytestmark = pytest.mark.slow


def test_killed_with_clients_waiting_the_engine_stops_and_the_next_gateway_serves():
    async def work() -> None:
        async with engine(seqs=1) as one, aiohttp.ClientSession() as session:
            async with gateway_process([one.url], concurrency=1) as gateway:
                asking = [asyncio.ensure_future(ask(session, gateway.port, body(400))) for _ in range(6)]
                await until(lambda: one.slots_in_use == 1, 20)
                gateway.signal(signal.SIGKILL)
                async with asyncio.timeout(30):  # no client is left hanging
                    reported = await asyncio.gather(*asking)
                assert [one.complete for one in reported] == [False] * 6
                await one.idle()
                port = gateway.port
            async with gateway_process([one.url], port=port) as again:
                assert (await ask(session, again.port, body(5))).complete

    run(work)


def test_no_admitted_request_fails_on_a_stop_under_load():
    async def work() -> None:
        got: list[Report] = []
        requested: dict[str, Report] = {}

        async def client(port: int, number: int) -> None:
            for count in itertools.count():
                name = f"client-{number}-{count}"
                async with aiohttp.ClientSession(headers={"X-Request-Id": name}) as session:
                    reported = requested[name] = await ask(session, port, body(40))
                got.append(reported)
                if reported.status in (0, 503):
                    return

        async with (
            engine(seqs=4) as one, engine(seqs=4) as two, gateway_process([one.url, two.url]) as gateway,
        ):  # fmt: skip
            clients = [asyncio.ensure_future(client(gateway.port, number)) for number in range(16)]
            await until(lambda: len(got) > 20, 30)
            gateway.signal(signal.SIGTERM)
            assert await gateway.finished(CARE.drain_s) == 0
            await asyncio.gather(*clients)
            entries = [*one.log.entries, *two.log.entries]
            sent = [entry.headers.get("x-request-id", "").split("-") for entry in entries]
            admitted = {"-".join(name[:3]) for name in sent if name[0] == "client"}  # without the leg's number
        assert {reported.status for reported in got} <= {200, 503, 0}, "an answer broke off"
        assert all(requested[name].complete for name in admitted)
        assert {name for name, reported in requested.items() if reported.status == 200} == admitted
        assert all("Retry-After" in reported.headers for reported in got if reported.status == 503)
        assert sum(reported.status == 200 for reported in got) > 20

    run(work)


def test_engines_and_gateway_restart_one_after_the_other_and_every_request_is_answered():
    async def work() -> None:
        got: list[Report] = []
        over = asyncio.Event()

        async def client(port: int) -> None:
            async with aiohttp.ClientSession() as session:
                while not over.is_set():
                    reported = await ask(session, port, body(30))
                    if reported.status in (0, 503):  # it is away: again, as the SDK does
                        await asyncio.sleep(0.1)
                        continue
                    got.append(reported)

        async def roll(urls: list[str], clients: list[asyncio.Task[None]]) -> None:
            async with gateway_process(urls) as gateway:
                clients += [asyncio.create_task(client(gateway.port)) for _ in range(4)]
                for at, url in enumerate(urls):
                    seen = len(got)
                    await until(lambda seen=seen: len(got) > seen + 8, 30)
                    running[at].kill()
                    await running[at].wait()
                    seen = len(got)
                    await until(lambda seen=seen: len(got) > seen + 4, 30)  # the other one serves
                    await stack[at].__aexit__(None, None, None)
                    stack[at] = engine_process(int(url.rpartition(":")[2]))
                    running[at], _ = await stack[at].__aenter__()
                port = gateway.port
                gateway.signal(signal.SIGTERM)
                assert await gateway.finished() == 0
            async with gateway_process(urls, port=port):
                seen = len(got)
                await until(lambda: len(got) > seen + 8, 30)
                over.set()
                await asyncio.gather(*clients)

        stack = [engine_process(), engine_process()]
        started = [await one.__aenter__() for one in stack]
        running = [one for one, _ in started]
        urls = [json.loads(first)["urls"][0] for _, first in started]
        clients: list[asyncio.Task[None]] = []
        try:
            await roll(urls, clients)
        finally:
            over.set()
            for one in stack:
                await one.__aexit__(None, None, None)
        assert all(reported.complete for reported in got), [
            reported.raw[-200:] for reported in got if not reported.complete
        ]
        assert len({reported.text for reported in got}) == 1, "the same words, wherever they were made"

    run(work)


def test_without_descriptors_the_gateway_survives_and_serves_again_with_some():
    async def work() -> None:
        async with (
            engine() as one, gateway_process([one.url], files=96) as gateway, aiohttp.ClientSession() as session,
        ):  # fmt: skip
            assert (await ask(session, gateway.port, body(3))).complete
            in_use = []
            for _ in range(150):
                try:
                    async with asyncio.timeout(1):
                        in_use.append(await asyncio.open_connection("127.0.0.1", gateway.port))
                except (OSError, TimeoutError):
                    break
            async with asyncio.timeout(60):
                await ask(session, gateway.port, body(3))  # whatever comes of it, something does
            for _, writer in in_use:
                writer.transport.abort()
            await until(lambda: gateway.process.returncode is None, 1)
            async with asyncio.timeout(60):
                while not (await ask(session, gateway.port, body(3))).complete:  # noqa: ASYNC110
                    await asyncio.sleep(0.2)

    run(work)
