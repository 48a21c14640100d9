"""A stream that cannot go on reports it, whichever way it ends: never a half answer that looks whole."""

from __future__ import annotations

import asyncio

import pytest
from relay_world import BARE, idle, pause, requested, run, until, world
from scripted_engine import Fault, Scripted, answer, encode
from test_relay_cut import EAGER, LONG, short

from lengthwise.gateway.config import Admission, ResilienceConfig
from lengthwise.gateway.request import Outcome
from lengthwise.gateway.scheduling import WorkerState

BODY = {"model": "m", "prompt": "p 60", "max_tokens": 60, "stream": True, "temperature": 0}
TAKES = [None, lambda: True]


def is_half_and_says_so(reply, code: str) -> None:
    """A part of the answer, and then that it ends here."""
    assert reply.status == 200
    assert answer(encode("p 60"), 60)[1].startswith(reply.text)
    assert reply.text
    assert reply.finishes == []
    assert reply.events[-1]["error"]["code"] == code


@pytest.mark.parametrize("takes", TAKES)
def test_the_last_engine_dies_and_none_comes(takes):
    async def work() -> None:
        engine = Scripted([Fault("die", 23)], step_s=0.002)
        async with world([engine], admission=Admission(no_engine_s=0.1), takes=takes) as w:
            task = asyncio.ensure_future(w.submit(BODY))
            await until(lambda: w.ledger.tokens_of[1] > 5)
            w.driver.fleet_changed([WorkerState("w0", ("m",), up=False)])
            is_half_and_says_so(await task, "no_engine")
            assert w.ledger.outcomes == {Outcome.EXPIRED: 1}
            await until(lambda: idle(w))

    run(work)


@pytest.mark.parametrize("takes", TAKES)
def test_the_gateway_ends_while_a_cut_stream_waits(takes):
    async def work() -> None:
        async with world([Scripted(step_s=0.004)], cap=1, order=EAGER, takes=takes) as w:
            long = asyncio.ensure_future(w.submit(LONG))
            await until(lambda: w.ledger.tokens_of[1] > 12)
            other = asyncio.ensure_future(w.submit({**short(1), "max_tokens": 40}))
            await until(lambda: w.ledger.cause == ["preemption"] and len(w.engines[0].seen) == 2)
            w.driver.close()
            reply = await long
            assert reply.events[-1]["error"]["code"] == "draining"
            assert answer(encode(LONG["prompt"]), 300)[1].startswith(reply.text)
            assert reply.finishes == []
            assert b'"code":"stopped"' in (await other).body, "and one at its engine ends as well"
            assert w.ledger.outcomes == {Outcome.FAILED: 2}

    run(work)


@pytest.mark.parametrize("takes", TAKES)
def test_an_engine_death_after_the_gateway_stopped_is_reported(takes):
    async def work() -> None:
        engines = [Scripted([Fault("die", 23)], step_s=0.002) for _ in range(2)]
        async with world(engines, takes=takes) as w:
            task = asyncio.ensure_future(w.submit(BODY))
            await until(lambda: w.ledger.tokens_of[1] > 5)
            w.driver.close()
            is_half_and_says_so(await task, "stopped")

    run(work)


@pytest.mark.parametrize("capabilities", [None, BARE])
def test_a_slow_client_that_reads_on_gets_an_error(capabilities):
    async def work() -> None:
        more = {} if capabilities is None else {"capabilities": capabilities}
        async with world([Scripted(step_s=0.002)], resilience=ResilienceConfig(stall_s=0.2), **more) as w:
            reported = await w.relay.serve(requested({**BODY, "max_tokens": 4000}))
            parts = [await anext(reported)]
            await until(lambda: w.engines[0].seen[0].how == "aborted")
            parts += [part async for part in reported]
            assert w.ledger.outcomes == {Outcome.CLIENT_GONE: 1}
            await reported.aclose()
            assert b'"code":"slow_reader"' in parts[-1]
            assert b"[DONE]" not in b"".join(parts)
            await until(lambda: idle(w))

    run(work)


def test_a_disconnected_client_is_sent_nothing_more():
    async def work() -> None:
        async with world([Scripted(step_s=0.002)]) as w:
            reported = await w.relay.serve(requested({**BODY, "max_tokens": 4000}))
            await anext(reported)
            rest = asyncio.ensure_future(_all(reported))
            await pause(0.02)
            await reported.aclose()
            assert b"error" not in b"".join(await rest)
            await until(lambda: idle(w))

    run(work)


async def _all(report) -> list[bytes]:
    return [part async for part in report]
