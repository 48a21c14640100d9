"""A gateway in modes in which the engine orders: what arrives there."""

from __future__ import annotations

import hashlib
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from relay_world import IDS, FixedFleet, FixedWorker, Report, run
from scripted_engine import Fault, Scripted

from lengthwise.gateway.config import Engine, GatewayConfig, Key, Listen, Order
from lengthwise.gateway.protocols import Listener
from lengthwise.gateway.relay import open_session
from lengthwise.gateway.serve import Gateway


@dataclass
class Worker(FixedWorker):
    priority_sign: int = 1


class Oracle(Report, Listener):
    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        return None


@asynccontextmanager
async def fleet_of(config, clock, on_change, *, num_in_flight):
    sessions = [open_session(engine, config.resilience) for engine in config.engines]
    fleet = FixedFleet(
        [
            Worker(f"w{k}", engine.url, IDS, session, engine.kind, -1 if engine.kind == "sglang" else 1)
            for k, (engine, session) in enumerate(zip(config.engines, sessions, strict=True))
        ],
        4,
    )
    on_change(fleet.states())
    yield fleet
    for session in sessions:
        await session.close()


def gateway(mode: str, *engines: Scripted, kind: str = "vllm") -> Gateway:
    config = GatewayConfig(
        engines=tuple(Engine(engine.url, kind=kind) for engine in engines),
        listen=Listen(port=0, admin_port=None),
        order=Order(mode, window_tokens=10),
        keys=(Key("batch", hashlib.sha256(b"secret").hexdigest(), priority=2),),
    )
    return Gateway(config, make_fleet=fleet_of, make_predictor=lambda *_: Oracle())


async def ask(gateway: Gateway, **more) -> bytes:
    import aiohttp

    body = {"model": "m", "prompt": "p 50", "max_tokens": 50, "stream": True} | more
    url = f"http://127.0.0.1:{gateway.port}/v1/completions"
    headers = {"Authorization": "Bearer secret"}
    async with aiohttp.ClientSession(headers=headers) as session, session.post(url, json=body) as reported:
        assert reported.status == 200, await reported.text()
        return await reported.read()


@pytest.mark.parametrize(("kind", "sign"), [("vllm", 1), ("sglang", -1)])
def test_priorities_arrive_with_the_engines_polarity(kind, sign):
    async def work() -> None:
        async with Scripted() as engine, gateway("engine-priority", engine, kind=kind) as g:
            await ask(g)
            await ask(g, prompt="p 7", priority=0)
            assert [one.body["priority"] for one in engine.seen] == [sign * (2 * (1 << 20) + n) for n in (50, 7)]

    run(work)


def test_lengths_and_class_arrive_next_to_the_fields_of_the_client():
    async def work() -> None:
        async with Scripted() as engine, gateway("engine-plugin", engine) as g:
            await ask(g)
            await ask(g, vllm_xargs={"other": 3})
            own = {"lengthwise_predicted": 50.0, "lengthwise_class": 2}
            assert [one.body["vllm_xargs"] for one in engine.seen] == [own, own | {"other": 3}]

    run(work)


def test_a_request_that_continues_at_another_engine_has_its_remaining_length():
    async def work() -> None:
        fault = Fault("die", after=20)
        async with Scripted(plan=[fault]) as one, Scripted() as two:
            async with gateway("engine-plugin", one, two) as g:
                reported = await ask(g)
                if not one.seen:  # the first place was the other's
                    reported = await ask(g)
            assert reported.endswith(b"data: [DONE]\n\n")
            assert one.seen[0].body["vllm_xargs"]["lengthwise_predicted"] == 50.0
            rest = two.seen[-1].body
            assert 0 < rest["max_tokens"] < 50
            assert rest["vllm_xargs"] == {"lengthwise_predicted": rest["max_tokens"], "lengthwise_class": 2}

    run(work)


def test_in_other_modes_nothing_is_added():
    async def work() -> None:
        async with Scripted() as engine, gateway("isrtf", engine) as g:
            await ask(g)
            assert not {"priority", "vllm_xargs"} & set(engine.seen[0].body)

    run(work)
