"""Clients whose library gives up on silence, and streams older than that."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import aiohttp
import pytest
from fault_world import ask, body, config_of, engine
from relay_world import run, until

from lengthwise.gateway.serve import Gateway

SDK = {"X-Stainless-Read-Timeout": "1"}
TOKENS = 90


@pytest.mark.slow
def test_a_stream_older_than_its_clients_read_timeout_outlives_its_engine():
    """As of the OpenAI SDK with a timeout of 1 s: its engine dies in the second second."""

    async def work() -> None:
        async with engine(step_s=0.03) as first, engine(step_s=0.03) as second:
            config = config_of(first, second)
            engines = [replace(one, name=name) for one, name in zip(config.engines, "ab", strict=True)]
            config = replace(config, engines=tuple(engines))
            async with Gateway(config) as gateway, aiohttp.ClientSession(headers=SDK) as session:
                await until(lambda: sum(state.up for state in gateway.fleet.states()) == 2, 10)
                alone = await ask(session, gateway.port, body(TOKENS))
                stream = asyncio.ensure_future(ask(session, gateway.port, body(TOKENS)))
                await asyncio.sleep(1.5)
                at = {one.name: one.in_flight for one in gateway.driver.statistics().workers}
                assert sorted(at.values()) == [0, 1]
                await (first if at["a"] else second).die()
                reported = await stream
        assert alone.complete
        assert reported.complete, reported.raw[-200:]
        assert reported.text == alone.text

    run(work)
