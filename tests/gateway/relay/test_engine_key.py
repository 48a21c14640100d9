"""An engine that refuses what others serve is at fault, not the client: another one is asked."""

import asyncio
from collections.abc import Callable

import pytest
from aiohttp import ClientSession, ClientTimeout

from lengthwise.gateway.config import Engine, GatewayConfig, Listen, Order, PredictionConfig, ResilienceConfig
from lengthwise.gateway.serve import Gateway
from lengthwise.testing.engine_server import EngineServer, EngineSpec, Fault

AT_ONCE, MAX_ROUNDS = 8, 50
"""More at once than one engine is given for sure, so that the refusing one is asked as well."""


async def statuses(changes: Callable[[EngineServer], None]) -> tuple[list[int], dict[str, bool]]:
    """What clients got until the engine that changes was left alone, and which engines are up then."""
    async with EngineServer(EngineSpec(api_key="secret")) as one, EngineServer(EngineSpec()) as other:
        engines = (
            Engine(one.url, name="refusing", probe=False, api_key="secret"),
            Engine(other.url, name="other", probe=False),
        )
        config = GatewayConfig(
            engines=engines,
            order=Order("fcfs"),
            resilience=ResilienceConfig(health_every_s=0.1, failures=3, open_s=60.0),
            prediction=PredictionConfig(predictor="none"),
            listen=Listen(port=0, admin_port=None),
        )
        async with Gateway(config) as gateway, ClientSession(timeout=ClientTimeout(total=60)) as client:
            await gateway.fleet.wait_checked(10)
            changes(one)
            url = f"http://127.0.0.1:{gateway.port}/v1/completions"
            body = {"model": "toy", "prompt": "hi", "max_tokens": 3}

            async def status() -> int:
                async with client.post(url, json=body) as answer:
                    return answer.status

            came = []
            for _ in range(MAX_ROUNDS):
                came += await asyncio.gather(*(status() for _ in range(AT_ONCE)))
                up = {state.name: state.up for state in gateway.fleet.states()}
                if not all(up.values()):
                    break
            return came, up


def another_key(engine: EngineServer) -> None:
    engine.spec = EngineSpec(api_key="another")


def another_model(engine: EngineServer) -> None:
    """Makes the engine refuse the model that it reported."""
    engine.spec = EngineSpec(model="another", api_key="secret")


@pytest.mark.parametrize("changes", [another_key, another_model])
def test_clients_are_served_elsewhere_and_its_circuit_opens(changes):
    came, up = asyncio.run(statuses(changes))
    assert set(came) == {200}
    assert up == {"refusing": False, "other": True}


@pytest.mark.parametrize("status", [404, 422])
def test_an_engine_that_rejects_requests_another_one_serves_is_ejected(status):
    """A 404 that is not about the model is passed on like any other 4xx."""

    def wrong(engine: EngineServer) -> None:
        engine.faults.always = Fault("status", status=status)

    came, up = asyncio.run(statuses(wrong))
    assert set(came) == {200, status}
    assert up == {"refusing": False, "other": True}
