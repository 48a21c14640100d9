"""An engine that returns 200 and then fails in the body, again and again, is left alone."""

import asyncio

from aiohttp import ClientSession, ClientTimeout

from lengthwise.gateway.config import Engine, GatewayConfig, Listen, Order, PredictionConfig, ResilienceConfig
from lengthwise.gateway.protocols import monotonic
from lengthwise.gateway.serve import Gateway
from lengthwise.testing.engine_server import EngineServer, EngineSpec, Fault, FaultPlan

AT_ONCE, MAX_ROUNDS = 2, 50
"""One for each engine, so that what begins there is over before the next begins."""


async def troubles() -> dict[str, str]:
    """Why engines get no requests, as soon as one gets none."""
    broken = FaultPlan(always=Fault("close", after_tokens=2))
    async with EngineServer(EngineSpec(), faults=broken) as one, EngineServer(EngineSpec()) as other:
        config = GatewayConfig(
            engines=(Engine(one.url, name="broken", probe=False), Engine(other.url, name="other", probe=False)),
            order=Order("fcfs"),
            resilience=ResilienceConfig(failures=3, open_s=60.0),
            prediction=PredictionConfig(predictor="none"),
            listen=Listen(port=0, admin_port=None),
        )
        async with Gateway(config) as gateway, ClientSession(timeout=ClientTimeout(total=60)) as client:
            await gateway.fleet.wait_checked(10)
            url = f"http://127.0.0.1:{gateway.port}/v1/completions"
            body = {"model": "toy", "prompt": "hi", "max_tokens": 6, "stream": True}

            async def ask() -> None:
                async with client.post(url, json=body) as answer:
                    await answer.read()

            for _ in range(MAX_ROUNDS):
                await asyncio.gather(*(ask() for _ in range(AT_ONCE)))
                reported = {
                    name: gateway.fleet.worker(name).unavailable_reason(monotonic()) for name in ("broken", "other")
                }
                if any(reported.values()):
                    break
            return reported


def test_the_circuit_opens_although_each_answer_started():
    assert asyncio.run(troubles()) == {"broken": "circuit open", "other": ""}
