"""Requests that engines answer with errors: whose fault it is shows when a peer is sent the same."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from time import monotonic

import aiohttp
from fault_world import CARE, ask, body, config_of, engine
from relay_world import run, until

from lengthwise.gateway.serve import Gateway
from lengthwise.testing.engine_server import EngineServer, Fault, FaultPlan

POISON = {"X-Request-Id": "poison"}


class Poisoned(FaultPlan):
    """Fails each request of one client."""

    def __init__(self, server: EngineServer, fault: Fault) -> None:
        super().__init__()
        self._server, self._fault = server, fault

    def take(self, number: int) -> Fault | None:
        name = self._server.log.entries[number].headers.get("x-request-id", "")
        return self._fault if name.startswith("poison") else super().take(number)


async def poisoned(port: int, over: asyncio.Event, got: Counter[int]) -> None:
    """One client that sends its request again and again."""
    async with aiohttp.ClientSession(headers=POISON) as session:
        while not over.is_set():
            got[(await ask(session, port, body(30, "bad"))).status] += 1


async def troubles_while(fault: Fault, served: Callable[[int], bool]) -> tuple[set[str], Counter[int], bool]:
    """What was wrong with engines, how the client's requests ended, whether all others were served."""
    async with engine(seqs=4) as one, engine(seqs=4) as two:
        config = replace(config_of(one, two), resilience=replace(CARE, failures=3, open_s=30.0, health_every_s=0.1))
        async with Gateway(config) as gateway, aiohttp.ClientSession() as session:
            await gateway.fleet.wait_checked(10.0)
            for server in (one, two):
                server.faults = Poisoned(server, fault)
            troubles, got, over = set[str](), Counter[int](), asyncio.Event()
            others = [asyncio.ensure_future(ask(session, gateway.port, body(150, f"w{k}"))) for k in range(4)]
            bad = asyncio.ensure_future(poisoned(gateway.port, over, got))
            async with asyncio.timeout(60):
                while not served(got.total()) or not all(other.done() for other in others):
                    troubles |= {w.unavailable_reason(monotonic()) for w in gateway.fleet.workers()}
                    await asyncio.sleep(0.01)
            over.set()
            await bad
            return troubles, got, all(other.result().complete for other in others)


def test_one_clients_poison_opens_no_circuit():
    async def work() -> None:
        troubles, got, entire = await troubles_while(Fault("status", status=500), lambda count: count > 60)
        assert set(got) == {502}
        assert troubles == {""}
        assert entire

    run(work)


def test_one_clients_poison_within_streams_opens_no_circuit():
    """Each engine sends status 200, then some tokens, then an error; the others' streams go on."""

    async def work() -> None:
        troubles, got, entire = await troubles_while(Fault("error", after_tokens=6), lambda count: count > 30)
        assert set(got) == {200}
        assert troubles == {""}
        assert entire

    run(work)


def test_one_clients_wrong_requests_put_no_engine_out():
    async def work() -> None:
        troubles, got, entire = await troubles_while(Fault("status", status=400), lambda count: count > 60)
        assert set(got) == {400}
        assert troubles == {""}
        assert entire

    run(work)


async def trouble_of_broken(fault: Fault) -> tuple[dict[str, str], Counter[int]]:
    """Why engines get no requests once the first gets none: it refuses all that its peer serves."""
    async with engine() as broken, engine() as other:
        config = replace(config_of(broken, other), resilience=replace(CARE, open_s=30.0, health_every_s=0.1))
        config = replace(
            config, engines=tuple(replace(e, name=n) for e, n in zip(config.engines, ("broken", "other"), strict=True))
        )
        async with Gateway(config) as gateway, aiohttp.ClientSession() as session:
            await gateway.fleet.wait_checked(10.0)
            broken.faults.always = fault
            got = Counter[int]()

            def troubles() -> dict[str, str]:
                return {w.name: w.unavailable_reason(monotonic()) for w in gateway.fleet.workers()}

            async with asyncio.timeout(60):
                while not any(troubles().values()):
                    reported = await asyncio.gather(*(ask(session, gateway.port, body(3)) for _ in range(4)))
                    got.update(one.status for one in reported)
            return troubles(), got


def test_an_engine_that_answers_errors_where_its_peer_serves_is_left_alone():
    async def work() -> None:
        troubles, got = await trouble_of_broken(Fault("status", status=500))
        assert troubles == {"broken": "circuit open", "other": ""}
        assert set(got) == {200}

    run(work)


def test_an_engine_whose_streams_end_in_errors_unlike_its_peers_is_avoided():
    async def work() -> None:
        troubles, got = await trouble_of_broken(Fault("error", after_tokens=1))
        assert troubles == {"broken": "circuit open", "other": ""}
        assert set(got) == {200}

    run(work)


def test_an_engine_that_calls_wrong_what_its_peer_serves_is_put_out():
    async def work() -> None:
        troubles, got = await trouble_of_broken(Fault("status", status=400))
        assert troubles == {"broken": "worse than its peers", "other": ""}
        assert got[200] > got[400] > 0

    run(work)


def test_the_last_engine_of_a_model_stays_whatever_it_answers():
    async def work() -> None:
        async with engine() as one:
            config = replace(config_of(one), resilience=replace(CARE, failures=1, open_s=30.0))
            async with Gateway(config) as gateway, aiohttp.ClientSession() as session:
                await gateway.fleet.wait_checked(10.0)
                one.faults.always = Fault("status", status=500)
                reported = [await ask(session, gateway.port, body(3, f"w{k}")) for k in range(5)]
                assert {answer.status for answer in reported} == {502}
                one.faults.always = None
                assert (await ask(session, gateway.port, body(3))).complete
                await until(gateway.fleet.ready)

    run(work)
