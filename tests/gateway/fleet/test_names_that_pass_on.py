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
        async with engines(*[SPEC] * 5) as (bad, new, *others):
            names = ("good", "better", "as bad")
            entries = [Engine(one.url, name=name) for one, name in zip(others, names, strict=True)]
            first, second = (config_of(Engine(one.url, name="e"), *entries, resilience=slow) for one in (bad, new))
            async with fleet_of(first) as (fleet, received):
                for _ in range(20):
                    for name in ("e", "as bad"):
                        fleet.record_broken_response(name, "stalled")
                    for name in ("good", "better"):
                        fleet.succeeded(name)
                await fleet.configure(second)
                await until(lambda: [s.up for s in received.all[-1] if s.name == "e" and s.epoch == 1] == [True])
                await until(lambda: not received.last["as bad"].up)  # outliers are found now
                assert received.last["e"].up

    run(work)
