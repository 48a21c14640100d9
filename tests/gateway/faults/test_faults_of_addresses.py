"""Several hosts: engines at addresses of their own with one port, found by DNS or EndpointSlices, that go and come."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import pytest
from fault_world import CARE, Report, ask, body
from kube_api import KubeApi, endpoint, endpoint_slice
from relay_world import run, until

from lengthwise.gateway.config import Discovery, Engine, GatewayConfig, Listen, Order, PredictionConfig
from lengthwise.gateway.fleet.discovery import Dns
from lengthwise.gateway.serve import Gateway
from lengthwise.testing.engine_server import EngineServer, EngineSpec, Limits, LinearSteps

pytestmark = pytest.mark.slow
HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
SPEC = EngineSpec(limits=Limits(8), steps=LinearSteps(fixed_s=0.004))
LIKE = Engine("http://found", concurrency=4, generation_defaults="none")
TOKENS = 60


class ByDns:
    """A name whose addresses are set by hand."""

    def __init__(self, port, monkeypatch):
        self.found = []
        self.discovery = Discovery(dns=f"engines.default.svc:{port}", every_s=0.05, engine=LIKE)
        monkeypatch.setattr("lengthwise.gateway.fleet.discovery.Dns", functools.partial(Dns, lookup=self._look_up))

    async def _look_up(self, host, port):
        assert host == "engines.default.svc"
        if not self.found:
            raise OSError("name or service not known")
        return self.found

    def tell(self, hosts):
        self.found = list(hosts)


class BySlices:
    """A Service of pods, at an API server that is a server."""

    def __init__(self, api, port):
        self._api, self._port = api, port
        self.discovery = Discovery(endpoint_slices="default/engines:http", api_url=api.url, engine=LIKE)

    def tell(self, hosts):
        pods = [endpoint(host, pod=f"engine-{host[-1]}") for host in hosts]
        self._api.put(endpoint_slice("engines-x", pods, port=self._port))


class Clients:
    """Clients that request streams again and again; all their answers are kept."""

    def __init__(self, port, count=6):
        self.report: list[Report] = []
        self._over, self._port = False, port
        self._tasks = [asyncio.ensure_future(self._submit()) for _ in range(count)]

    async def _submit(self):
        async with aiohttp.ClientSession() as session:
            while not self._over:
                self.report.append(await ask(session, self._port, body(TOKENS)))

    async def more(self, count):
        seen = len(self.report)
        await until(lambda: len(self.report) >= seen + count, 20)

    async def end(self):
        self._over = True
        await asyncio.gather(*self._tasks)


@asynccontextmanager
async def several_hosts(how, monkeypatch) -> AsyncIterator[tuple]:
    """Three engines with one port, the source that tells of them, the gateway, and clients that it serves."""
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        first = await enter(EngineServer(SPEC, host=HOSTS[0]))
        others = [await enter(EngineServer(SPEC, host=host, port=first.port)) for host in HOSTS[1:]]
        api = await enter(KubeApi())
        source = ByDns(first.port, monkeypatch) if how == "DNS" else BySlices(api, first.port)
        source.tell(HOSTS)
        config = GatewayConfig(
            discovery=source.discovery,
            listen=Listen(port=0, admin_port=None),
            order=Order(window_tokens=10),
            prediction=PredictionConfig(predictor="none"),
            resilience=CARE,
        )
        gateway = await enter(Gateway(config))
        await until(lambda: ups(gateway) == set(HOSTS), 10)
        clients = Clients(gateway.port)
        try:
            yield [first, *others], source, gateway, clients
        finally:
            await clients.end()
    assert all(reported.complete for reported in clients.report), [
        one.raw[-200:] for one in clients.report if not one.complete
    ]
    assert len({reported.text for reported in clients.report}) == 1, "the same words, wherever they were made"


def ups(gateway):
    """Addresses of the engines that may be given requests."""
    names = {state.name for state in gateway.fleet.states() if state.up}
    return {one.url.split("/")[2].rpartition(":")[0] for one in gateway.fleet.workers() if one.name in names}


def served(engine):
    return engine.log.count("finished")


async def all_serve(engines):
    before = [served(one) for one in engines]
    await until(lambda: all(served(one) >= n + 2 for one, n in zip(engines, before, strict=True)), 20)


@pytest.mark.parametrize("how", ["DNS", "EndpointSlices"])
def test_an_address_no_longer_listed_finishes_its_streams_and_serves_on_return(how, monkeypatch):
    async def work():
        async with several_hosts(how, monkeypatch) as (engines, source, gateway, clients):
            await all_serve(engines)
            gone = engines[1]
            source.tell([HOSTS[0], HOSTS[2]])
            await until(lambda: len(gateway.fleet.workers()) == 2, 20)
            requested = len(gone.log.entries)
            await clients.more(20)
            assert len(gone.log.entries) == requested, "nothing is sent there any more"
            assert gone.aborts == 0, "what was there has ended there"
            source.tell(HOSTS)
            await until(lambda: ups(gateway) == set(HOSTS), 10)
            await all_serve(engines)

    run(work)


@pytest.mark.parametrize("how", ["DNS", "EndpointSlices"])
def test_a_host_that_dies_with_its_streams_loses_none_and_serves_when_it_is_back(how, monkeypatch):
    async def work():
        async with several_hosts(how, monkeypatch) as (engines, source, gateway, clients):
            await all_serve(engines)
            dead = engines[2]
            await until(lambda: dead.slots_in_use > 0)
            await dead.die()
            await clients.more(12)
            source.tell(HOSTS[:2])  # discovery is later than the failure
            await until(lambda: ups(gateway) == set(HOSTS[:2]), 10)
            await clients.more(12)
            await dead.restart()
            source.tell(HOSTS)
            await until(lambda: ups(gateway) == set(HOSTS), 20)
            await all_serve(engines)
            assert {reported.status for reported in clients.report} == {200}

    run(work)
