"""An engine that leaves a name: when this is reported, how long it may stay, and what it shares with a successor."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from fleet_requests import ORDER, entries, world
from fleet_world import CARE, config_of, engines, run, until

from lengthwise.gateway.config import Engine
from lengthwise.testing.engine_server import EngineSpec

SLOW = EngineSpec(model="m", speed=0.5)
"""Streams last so long that what the gateway decides in a moment is decided while they run."""


def test_the_scheduler_learns_of_a_reused_name_before_any_request_can_be_sent_there():
    async def work():
        async with (
            engines(SLOW, SLOW) as (first, second),
            world(config_of(Engine(first.url, name="e"), order=ORDER)) as gateway,
        ):
            alone = await gateway.submit(60)
            stream = asyncio.create_task(gateway.submit(60))
            await until(lambda: gateway.driver.statistics().running == 1)
            await gateway.fleet.configure(config_of(Engine(second.url, name="e"), order=ORDER))
            # No tick of the loop since the name passed on.
            reported = {one.name for one in gateway.driver.statistics().workers}
            assert {"e (leaving 0)"} <= reported <= {one.name for one in gateway.fleet.workers()}
            assert gateway.driver.statistics().running == 1
            assert await stream == alone
            assert len(entries(second)) == 0

    run(work)


@pytest.mark.slow
@pytest.mark.parametrize("leave_s", [30.0, 0.05])
def test_a_stream_may_last_as_long_as_an_engine_may_leave_and_not_only_until_a_first_byte(leave_s):
    async def work():
        resilience = replace(CARE, first_byte_s=0.2, leave_s=leave_s)
        async with (
            engines(SLOW, SLOW) as (first, second),
            world(config_of(Engine(first.url, name="e"), order=ORDER, resilience=resilience)) as gateway,
        ):
            alone = await gateway.submit(120)
            stream = asyncio.create_task(gateway.submit(120))
            await until(lambda: gateway.driver.statistics().running == 1)
            await gateway.fleet.configure(config_of(Engine(second.url, name="e"), order=ORDER, resilience=resilience))
            assert await stream == alone
            moved = len(second.log.entries) - 1  # besides the tiny prompt
            assert moved == (0 if leave_s > 1 else 1), "moved once its engine was given up"

    run(work)


def test_an_engine_that_fails_its_checks_ends_its_streams_when_its_key_changes():
    async def work():
        async with engines(SLOW) as (server,):
            engine = Engine(server.url, name="e")
            async with world(config_of(engine, order=ORDER)) as gateway:
                alone = await gateway.submit(120)
                stream = asyncio.create_task(gateway.submit(120))
                await until(lambda: gateway.driver.statistics().running == 1)
                server.healthy = False
                await until(lambda: not gateway.fleet.ready())
                await gateway.fleet.configure(config_of(replace(engine, api_key="sk-1"), order=ORDER))
                assert {one.name for one in gateway.fleet.workers()} == {"e", "e (leaving 0)"}
                assert await stream == alone
                assert len(entries(server)) == 2, "it was not begun again"
                await until(lambda: len(gateway.fleet.workers()) == 1)

    run(work)


@pytest.mark.slow
def test_under_another_key_an_engine_has_no_more_slots_than_before():
    async def work():
        async with engines(SLOW) as (server,):
            engine = Engine(server.url, name="e", concurrency=1)
            async with world(config_of(engine, order=ORDER)) as gateway:
                alone = await gateway.submit(120)
                stream = asyncio.create_task(gateway.submit(120))
                await until(lambda: gateway.driver.statistics().running == 1)
                await gateway.fleet.configure(config_of(replace(engine, api_key="sk-1"), order=ORDER))
                await until(lambda: any(one.name == "e" and one.up for one in gateway.driver.statistics().workers))
                assert alone.startswith(await gateway.submit(5))
                assert stream.done(), "until then its seat was taken"
                assert await stream == alone
                assert [one.headers.get("authorization") for one in entries(server)] == [None, None, "Bearer sk-1"]

    run(work)
