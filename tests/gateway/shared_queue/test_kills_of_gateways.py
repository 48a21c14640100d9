"""One queue over processes of gateways and a real PostgreSQL server, which are killed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
from dataclasses import replace

import aiohttp
import pytest
from fault_world import ask, body, config_of, engine, gateway_process
from postgres_world import Server, programs
from relay_world import run

from lengthwise.gateway.config import SharedQueueConfig
from lengthwise.gateway.serve import Gateway
from lengthwise.schema.errors import InputError

pytestmark = pytest.mark.slow
SLOTS = 4


async def numbers(session, gateway):
    """The numbers of the shared queue on the admin port: shared, leader, gateways."""
    async with session.get(f"http://127.0.0.1:{gateway.admin_port}/metrics") as answer:
        lines = (line.split() for line in (await answer.text()).splitlines() if line.startswith("lengthwise_shared"))
        return {line[0].removeprefix("lengthwise_shared_queue"): float(line[1]) for line in lines}


async def agree(session, gateways, *, shared=True):
    """Wait until all gateways share one queue (or none does), and return the one that leads."""
    for _ in range(600):
        found = [await numbers(session, one) for one in gateways]
        if all(one[""] == shared and one["_gateways"] == len(gateways) for one in found) or (
            not shared and not any(one[""] for one in found)
        ):
            return next((one for one, own in zip(gateways, found, strict=True) if own["_leader"]), None)
        await asyncio.sleep(0.05)
    raise AssertionError(found)


def max_at_once(entries):
    """The largest number of requests that the engine served at once."""
    changes = [(entry.arrival_s, 1) for entry in entries] + [(entry.finished_s, -1) for entry in entries]
    return max(itertools.accumulate(step for _, step in sorted(changes)))


def test_requests_survive_kills_of_leader_and_store(tmp_path):
    server = Server(programs(), tmp_path)
    shared = {"url": server.place("public").replace("&schema=public", ""), "lease_s": 0.8}

    async def work() -> None:
        async with engine(seqs=64) as one, aiohttp.ClientSession() as session, contextlib.AsyncExitStack() as stack:
            started = [gateway_process([one.url], concurrency=SLOTS, shared_queue=shared) for _ in range(3)]
            gateways = list(await asyncio.gather(*(stack.enter_async_context(each) for each in started)))
            leader = await agree(session, gateways)

            async def send(among, count):
                tokens = [10 + 7 * number % 50 for number in range(count)]
                ports = [one.port for one in itertools.islice(itertools.cycle(among), count)]
                return await asyncio.gather(
                    *(ask(session, port, body(each)) for port, each in zip(ports, tokens, strict=True))
                )

            probes = len(one.log.entries)
            assert all(each.complete for each in await send(gateways, 16))
            assert max_at_once(one.log.entries[probes:]) <= SLOTS, "the engine's limit holds over all gateways"

            others = [each for each in gateways if each is not leader]
            running = asyncio.ensure_future(send(others, 24))
            lost = asyncio.ensure_future(send([leader], 12))
            await asyncio.sleep(0.1)
            leader.signal(signal.SIGKILL)
            assert all(each.complete for each in await running), "requests of the others lose nothing"
            assert not all(each.complete for each in await lost), "the leader died with requests"
            assert await agree(session, others) in others

            running = asyncio.ensure_future(send(others, 24))
            await asyncio.sleep(0.05)
            server.crash()
            assert all(each.complete for each in await running), "without the store each gateway has a local queue"
            await agree(session, others, shared=False)
            server.start()
            await agree(session, others)
            assert all(each.complete for each in await send(others, 8))

    try:
        run(work)
    finally:
        server.stop()


def test_a_url_without_a_database_is_one_clear_error():
    async def work() -> None:
        async with engine() as one:
            queue = SharedQueueConfig("postgresql://127.0.0.1:1/none")
            with pytest.raises(InputError, match=r"shared_queue.url must be a PostgreSQL database that answers"):
                async with Gateway(replace(config_of(one), shared_queue=queue)):
                    raise AssertionError("it started")

    run(work)
