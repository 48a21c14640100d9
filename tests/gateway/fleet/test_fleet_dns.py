from __future__ import annotations

import asyncio

import pytest
from fleet_world import run, until

from lengthwise.gateway.config import Engine
from lengthwise.gateway.fleet.discovery import Dns, resolve
from lengthwise.schema.errors import InputError

LIKE = Engine("http://found")


class Resolver:
    """A name whose addresses are set by hand; None: it cannot be looked up."""

    def __init__(self, *found):
        self.found, self.polls = list(found), 0

    async def __call__(self, host, port):
        self.polls += 1
        if self.found is None:
            raise OSError("name or service not known")
        return self.found


def test_the_system_resolver_finds_loopback():
    async def work():
        assert "127.0.0.1" in await resolve("localhost", 80)

    run(work)


def test_every_address_is_an_engine_and_a_failing_look_up_changes_nothing(caplog):
    async def work():
        resolver, reported = Resolver("10.0.0.2", "10.0.0.1", "10.0.0.1", "fd00::1"), []
        source = Dns("engines.default.svc:8000", 0.01, LIKE, lookup=resolver)
        task = asyncio.create_task(source.run(lambda found: reported.append([one.engine.url for one in found])))
        await until(lambda: len(reported) > 1)
        assert reported[-1] == ["http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://[fd00::1]:8000"]
        resolver.found = None
        before, looks = len(reported), resolver.polls
        await until(lambda: resolver.polls > looks + 5)
        assert len(reported) <= before + 1
        resolver.found = ["10.0.0.9"]
        await until(lambda: reported[-1] == ["http://10.0.0.9:8000"])
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(work)
    assert caplog.text.count("cannot be looked up") == 1  # reported once, not at every lookup


@pytest.mark.parametrize("place", ["engines", "engines:http", ":80", "engines:", "engines:70000"])
def test_a_place_that_is_none_is_refused(place):
    with pytest.raises(InputError, match="host:port"):
        Dns(place, 1.0, LIKE)
