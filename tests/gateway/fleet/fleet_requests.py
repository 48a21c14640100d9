"""The real relay, hub and scheduler over a fleet of emulated engines."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace

from lengthwise.gateway.config import Order
from lengthwise.gateway.core import Scheduler
from lengthwise.gateway.fleet import Fleet
from lengthwise.gateway.protocols import monotonic
from lengthwise.gateway.relay import Relay
from lengthwise.gateway.request import ClientRequest, LengthPrediction
from lengthwise.gateway.scheduler_driver import SchedulerDriver
from lengthwise.testing.engine_server import EngineSpec

SPEC = EngineSpec(model="m")
ORDER = Order(mode="isrtf", window_tokens=10)


class Alike:
    """All lengths alike."""

    async def predict(self, request, text):
        return LengthPrediction(100.0)

    async def repredict(self, request, text, generated_text):
        return LengthPrediction(100.0)


@dataclass
class World:
    relay: Relay
    driver: SchedulerDriver
    fleet: Fleet

    async def submit(self, tokens):
        """Status and text of a streamed answer of so many tokens."""
        body = {"model": "m", "prompt": "one two", "max_tokens": tokens, "ignore_eos": True, "stream": True}
        requested = ClientRequest(
            api="completions",
            body=json.dumps(body).encode(),
            model="m",
            stream=True,
            text="one two",
            prompt_tokens=2,
            max_tokens=tokens,
            choices=1,
            arrival_s=self.driver.clock(),
            headers=[],
        )
        answer = await self.relay.serve(requested)
        lines = b"".join([part async for part in answer]).decode().split("\n\n")
        await answer.aclose()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert lines[-2] == "data: [DONE]", lines[-3:]
        return "".join(event["choices"][0]["text"] for event in events if event.get("choices"))


@asynccontextmanager
async def world(config):
    scheduler = Scheduler(config.order, config.admission, config.dispatch)
    driver = SchedulerDriver(scheduler, monotonic)
    busy = SimpleNamespace(of=lambda name: {w.name: w.in_flight for w in driver.statistics().workers}.get(name, 0))
    async with Fleet(config, monotonic, driver.fleet_changed, num_in_flight=busy.of) as fleet:
        driver.listeners.add(fleet.listener)
        relay = Relay(driver, fleet, Alike(), config)
        await fleet.wait_checked()
        try:
            yield World(relay, driver, fleet)
        finally:
            driver.close()
            await relay.aclose()


def entries(server):
    """Requests for completions that an engine was sent, besides the tiny prompt."""
    return [entry for entry in server.log.entries if "one two" in str(entry.body)]
