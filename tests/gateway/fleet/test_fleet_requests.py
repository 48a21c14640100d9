"""Requests over a fleet that changes under them: the real relay, hub, scheduler and emulated engines."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from fleet_requests import ORDER, SPEC, entries, world
from fleet_world import CARE, DISPATCH, config_of, engines, run, until
from kube_api import KubeApi, endpoint, endpoint_slice
from relay_world import pause

from lengthwise.gateway.config import Discovery, Engine, GatewayConfig
from lengthwise.gateway.protocols import monotonic


@pytest.mark.slow
def test_a_stream_outlives_its_endpoint_flapping_and_going():
    async def work():
        async with KubeApi() as api, engines(SPEC) as (server,):
            item = endpoint_slice("s", [endpoint("127.0.0.1", pod="e-0")], port=server.port)
            api.put(item)
            discovery = Discovery(endpoint_slices="default/engines:http", api_url=api.url)
            config = GatewayConfig(discovery=discovery, resilience=CARE, dispatch=DISPATCH, order=ORDER)
            async with world(config) as gateway:
                await until(gateway.fleet.ready)
                alone = await gateway.submit(220)
                stream = asyncio.create_task(gateway.submit(220))
                for _ in range(4):
                    await pause(0.1)
                    api.delete("s")
                    await pause(0.05)
                    api.put(item)
                await pause(0.1)
                api.delete("s")
                assert await stream == alone
                assert len(server.log.entries) == 3  # the tiny prompt, and each request once
                await until(lambda: not gateway.fleet.workers())  # nothing runs there any more

    run(work)


def test_an_engine_that_restarts_under_load_loses_no_request():
    async def work():
        async with engines(SPEC, SPEC) as servers:
            entries = [Engine(server.url, name=f"e{k}") for k, server in enumerate(servers)]
            async with world(config_of(*entries, order=ORDER)) as gateway:
                alone = await gateway.submit(150)
                tasks = [asyncio.create_task(gateway.submit(150)) for _ in range(12)]
                await until(lambda: gateway.driver.statistics().running >= 8)
                await servers[0].restart()
                assert await asyncio.gather(*tasks) == [alone] * 12
                await until(lambda: len([w for w in gateway.driver.statistics().workers if w.up]) == 2)
                assert gateway.driver.num_requests == 0

    run(work)


def test_requests_wait_while_there_is_no_engine_and_continue_when_one_arrives():
    async def work():
        async with engines(SPEC) as (server,), world(config_of(Engine(server.url), order=ORDER)) as gateway:
            alone = await gateway.submit(40)
            await server.die()
            await until(lambda: not gateway.fleet.ready())
            waiting = asyncio.create_task(gateway.submit(40))
            await pause(0.2)
            assert gateway.driver.statistics().waiting == 1
            await server.restart()
            assert await waiting == alone

    run(work)


def test_a_stream_outlives_other_settings_of_its_engine():
    async def work():
        async with engines(SPEC) as (server,):
            engine = Engine(server.url, name="e")
            async with world(config_of(engine, order=ORDER)) as gateway:
                alone, retained = await gateway.submit(150), gateway.fleet.worker("e")
                stream = asyncio.create_task(gateway.submit(150))
                await until(lambda: gateway.driver.statistics().running == 1)
                other = replace(engine, concurrency=2, probe=False, generation_defaults="none")
                await gateway.fleet.configure(config_of(other, order=ORDER))
                await until(lambda: gateway.fleet.states()[0].concurrency == 2)
                assert gateway.fleet.worker("e") is retained
                assert retained.capabilities.own_defaults is False
                assert await stream == alone
                assert len(server.log.entries) == 3  # the tiny prompt, and each request once

    run(work)


@pytest.mark.slow
def test_a_stream_ends_where_it_started_while_another_engine_takes_the_name():
    async def work():
        async with engines(SPEC, SPEC) as (first, second):
            old, new = Engine(first.url, name="e", concurrency=1), Engine(second.url, name="e", concurrency=1)
            async with world(config_of(old, order=ORDER)) as gateway:
                alone, retained = await gateway.submit(400), gateway.fleet.worker("e")
                stream = asyncio.create_task(gateway.submit(400))
                await until(lambda: gateway.driver.statistics().running == 1)
                await gateway.fleet.configure(config_of(new, order=ORDER))
                assert gateway.fleet.worker("e") is not retained
                assert alone.startswith(await gateway.submit(5))
                assert not stream.done(), "it has its own engine's only seat, and the new one has one of its own"
                leaving = {one.name: (one.up, one.in_flight) for one in gateway.driver.statistics().workers}
                assert leaving == {"e": (True, 0), "e (leaving 0)": (False, 1)}
                assert await stream == alone
                assert (len(entries(first)), len(entries(second))) == (2, 1), "it was not moved"
                await until(lambda: [one.name for one in gateway.fleet.workers()] == ["e"])
                await until(lambda: [one.name for one in gateway.driver.statistics().workers] == ["e"])

    run(work)


def test_a_stream_outlives_another_key_of_its_engine():
    async def work():
        async with engines(SPEC) as (server,):
            engine = Engine(server.url, name="e")
            async with world(config_of(engine, order=ORDER)) as gateway:
                alone = await gateway.submit(150)
                streams = [asyncio.create_task(gateway.submit(150)) for _ in range(3)]
                await until(lambda: gateway.driver.statistics().running == 3)
                for key in ("sk-1", "sk-2"):  # the second before the first was ever used
                    await gateway.fleet.configure(config_of(replace(engine, api_key=key), order=ORDER))
                assert len(gateway.fleet.workers()) == 2, "who was never up has nothing to end"
                assert await asyncio.gather(*streams) == [alone] * 3
                assert len(entries(server)) == 4
                await gateway.submit(5)
                assert entries(server)[-1].headers["authorization"] == "Bearer sk-2"
                await until(lambda: len(gateway.fleet.workers()) == 1)

    run(work)


def test_a_stream_goes_on_elsewhere_where_its_engine_dies_after_its_name_was_taken():
    async def work():
        async with (
            engines(SPEC, SPEC) as (first, second),
            world(config_of(Engine(first.url, name="e"), order=ORDER)) as gateway,
        ):
            alone = await gateway.submit(150)
            stream = asyncio.create_task(gateway.submit(150))
            await until(lambda: gateway.driver.statistics().running == 1)
            await gateway.fleet.configure(config_of(Engine(second.url, name="e"), order=ORDER))
            await first.die()
            assert await stream == alone
            assert len(second.log.entries) == 2  # the tiny prompt, and the rest
            assert gateway.fleet.worker("e").unavailable_reason(monotonic()) == "", (
                "what the old one did is not its fault"
            )

    run(work)


def test_an_engine_that_is_down_makes_way_at_once():
    async def work():
        async with (
            engines(SPEC, SPEC) as (first, second),
            world(config_of(Engine(first.url, name="e"), order=ORDER)) as gateway,
        ):
            await first.die()
            await until(lambda: not gateway.fleet.ready())
            await gateway.fleet.configure(config_of(Engine(second.url, name="e"), order=ORDER))
            assert [one.name for one in gateway.fleet.workers()] == ["e"]
            await until(gateway.fleet.ready)

    run(work)
