"""An engine that is slow is not one that has failed."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import aiohttp
from fault_world import CARE, ask, body, config_of, engine
from relay_world import Ledger, run

from lengthwise.gateway.serve import Gateway
from lengthwise.testing.engine_server import Fault


def test_an_engine_that_is_slow_but_never_still_keeps_its_requests():
    """Pieces come 0.15 s apart, for longer in all than an engine may be silent."""

    async def work() -> None:
        ledger, tokens, resilience = Ledger(), 14, replace(CARE, stall_s=1.0, failures=1)
        async with engine() as slow, engine() as quick:
            config = replace(config_of(slow, quick), resilience=resilience)
            async with Gateway(config, listeners=(ledger,)) as gateway, aiohttp.ClientSession() as session:
                slow.faults.always = Fault("slow", seconds=0.15)
                begun = time.monotonic()
                told = await asyncio.gather(*(ask(session, gateway.port, body(tokens, f"tell{k}")) for k in range(4)))
                duration_s = time.monotonic() - begun
                assert all(state.up for state in gateway.fleet.states())
            asked = [
                [e.finished for e in one.log.entries if e.body.get("max_tokens") == tokens] for one in (slow, quick)
            ]
        assert duration_s > 1.5 * resilience.stall_s
        assert all(answer.complete for answer in told)
        assert ledger.cause == [], "nobody is sent elsewhere"
        assert asked[0]
        assert asked[0] + asked[1] == ["finished"] * 4

    run(work)
