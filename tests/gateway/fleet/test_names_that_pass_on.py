"""What an engine did is no fault of the one that has its name next."""

from __future__ import annotations

from fleet_world import config_of, engines, fleet_of, run, until

from lengthwise.gateway.config import Engine, ResilienceConfig
from lengthwise.testing.engine_server import EngineSpec

SPEC = EngineSpec(model="m")
CARE = ResilienceConfig(health_every_s=0.15, failures=1000, open_s=60.0, drain_s=0.3)


def config(first, second):
    return config_of(Engine(first.url, name="good"), Engine(second.url, name="e"), resilience=CARE)


def test_the_successor_of_an_ejected_engine_serves_immediately():
    async def work():
        async with engines(SPEC, SPEC, SPEC) as (good, bad, new), fleet_of(config(good, bad)) as (fleet, received):
            for _ in range(20):
                fleet.record_broken_response("e", "stalled")
                fleet.succeeded("good")
            await until(lambda: not received.last["e"].up)
            assert fleet.worker("e").unavailable_reason(0.0) == "worse than its peers"
            await fleet.configure(config(good, new))
            await until(lambda: "e" in received.last and received.last["e"].up)
            assert (fleet.worker("e").url, received.last["e"].epoch) == (new.url, 1)

    run(work)


def test_failures_of_the_predecessor_eject_no_engine():
    async def work():
        slow = ResilienceConfig(health_every_s=1.0, failures=1000, open_s=60.0, drain_s=0.3)
        async with engines(SPEC, SPEC, SPEC) as (good, bad, new):
            entries = [Engine(one.url, name=name) for one, name in ((good, "good"), (bad, "e"), (new, "e"))]
            async with fleet_of(config_of(*entries[:2], resilience=slow)) as (fleet, received):
                for _ in range(20):
                    fleet.record_broken_response("e", "stalled")
                    fleet.succeeded("good")
                await fleet.configure(config_of(entries[0], entries[2], resilience=slow))
                await until(lambda: [s.up for s in received.all[-1] if s.name == "e" and s.epoch == 1] == [True])
                assert not fleet._outliers.update(fleet._clock(), ["good", "e"])

    run(work)
