"""Changes of a gateway that runs take turns: none undoes another that came meanwhile."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from relay_world import run
from test_phases_served import config_of, engine

from lengthwise.gateway.config import Phases, Tls
from lengthwise.gateway.fleet import Fleet
from lengthwise.gateway.serve import Gateway
from lengthwise.schema.errors import InputError

FIRST, OTHER = Phases(2, 5), Phases(3, 7)


class Slow(Fleet):
    """A fleet that takes as long to change as the test specifies."""

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.client_request, self.go = asyncio.Event(), asyncio.Event()

    async def configure(self, config):
        self.client_request.set()
        await self.go.wait()
        await super().configure(config)


async def meanwhile(gateway, first, second):
    """What came of a change, and of another one that began before it was through."""
    one = asyncio.ensure_future(first)
    await gateway.fleet.client_request.wait()
    other = asyncio.ensure_future(second)
    for _ in range(5):
        await asyncio.sleep(0)
    gateway.fleet.go.set()
    return await asyncio.gather(one, other, return_exceptions=True)


def test_another_schedule_does_not_undo_what_was_changed_meanwhile():
    async def work():
        async with engine() as server:
            config = config_of(server.url, phases=FIRST)
            changed = replace(config, resilience=replace(config.resilience, drain_s=7.0))
            async with Gateway(config, make_fleet=Slow) as gateway:
                reported = await meanwhile(gateway, gateway.configure(changed), gateway.apply_phases(OTHER))
                assert reported == [None, None]
                assert gateway.config == replace(changed, dispatch=replace(config.dispatch, phases=OTHER))

    run(work)


@pytest.mark.parametrize("refused", ["first", "second"])
def test_a_refused_change_leaves_the_other_change_intact(refused):
    async def work():
        async with engine() as server:
            config = config_of(server.url, phases=FIRST)
            bad = replace(config, engines=(replace(config.engines[0], tls=Tls(ca="/no/such/file")),))
            async with Gateway(config, make_fleet=Slow) as gateway:
                works = [gateway.configure(bad), gateway.apply_phases(OTHER)]
                reported = await meanwhile(gateway, *(works if refused == "first" else works[::-1]))
                assert sorted(isinstance(one, InputError) for one in reported) == [False, True]
                assert gateway.config.dispatch.phases == OTHER
                assert gateway.config.engines == config.engines

    run(work)
