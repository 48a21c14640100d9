"""What an engine did is no fault of the one that has its name next."""

from __future__ import annotations

from fleet_world import config_of, engines, fleet_of, run, until

from lengthwise.gateway.config import Engine, ResilienceConfig
from lengthwise.testing.engine_server import EngineSpec

SPEC = EngineSpec(model="m")
CARE = ResilienceConfig(health_every_s=0.15, failures=1000, open_s=60.0, drain_s=0.3)


def config(first, second):
    return config_of(Engine(first.url, name="good"), Engine(second.url, name="e"), resilience=CARE)


def test_who_takes_the_name_of_one_that_was_left_out_serves_at_once():
    async def work():
        async with engines(SPEC, SPEC, SPEC) as (good, bad, new), fleet_of(config(good, bad)) as (fleet, heard):
            for _ in range(20):
                fleet.failed("e", "stalled")
                fleet.succeeded("good")
            await until(lambda: not heard.last["e"].up)
            assert fleet.worker("e").unavailable_reason(0.0) == "worse than its peers"
            await fleet.configure(config(good, new))
            await until(lambda: "e" in heard.last and heard.last["e"].up)
            assert (fleet.worker("e").url, heard.last["e"].epoch) == (new.url, 1)

    run(work)


def test_what_was_counted_against_the_one_before_leaves_nobody_out():
    async def work():
        slow = ResilienceConfig(health_every_s=1.0, failures=1000, open_s=60.0, drain_s=0.3)
        async with engines(SPEC, SPEC, SPEC) as (good, bad, new):
            entries = [Engine(one.url, name=name) for one, name in ((good, "good"), (bad, "e"), (new, "e"))]
            async with fleet_of(config_of(*entries[:2], resilience=slow)) as (fleet, heard):
                for _ in range(20):
                    fleet.failed("e", "stalled")
                    fleet.succeeded("good")
                await fleet.configure(config_of(entries[0], entries[2], resilience=slow))
                await until(lambda: [s.up for s in heard.all[-1] if s.name == "e" and s.epoch == 1] == [True])
                assert not fleet._outliers.update(fleet._clock(), ["good", "e"])

    run(work)
