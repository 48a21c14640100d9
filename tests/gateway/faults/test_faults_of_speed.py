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


def test_a_slow_engine_that_never_stalls_keeps_its_requests(stalls):
    """Pieces come 0.15 s apart, for longer in all than an engine may be silent."""

    async def work() -> None:
        ledger, tokens, resilience = Ledger(), 14, replace(CARE, stall_s=1.0, failures=1)
        async with engine() as slow, engine() as quick:
            config = replace(config_of(slow, quick), resilience=resilience)
            async with Gateway(config, listeners=(ledger,)) as gateway, aiohttp.ClientSession() as session:
                slow.faults.always = Fault("slow", seconds=0.15)
                started = time.monotonic()
                reported = await asyncio.gather(
                    *(ask(session, gateway.port, body(tokens, f"tell{k}")) for k in range(4))
                )
                duration_s = time.monotonic() - started
                assert all(state.up for state in gateway.fleet.states())
            requested = [
                [e.finished for e in one.log.entries if e.body.get("max_tokens") == tokens] for one in (slow, quick)
            ]
        assert duration_s > 1.5 * resilience.stall_s
        assert all(answer.complete for answer in reported)
        if stalls.lost_s < 0.5:  # of a machine that stalls, an engine does
            assert ledger.cause == [], "no request is sent elsewhere"
            assert requested[0] + requested[1] == ["finished"] * 4
        assert requested[0]

    run(work)
