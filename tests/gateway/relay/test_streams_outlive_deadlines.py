"""How long a client waits for its answer to begin is no limit on how long a stream may take."""

from __future__ import annotations

import asyncio

import pytest
from relay_world import idle, run, until, world
from scripted_engine import Fault, Scripted, answer, encode
from test_relay_cut import EAGER, LONG, short

from lengthwise.gateway.request import Outcome

TIMEOUT_S = 0.1


@pytest.mark.parametrize("takes", [None, lambda: True])
def test_a_stream_that_is_cut_late_goes_on(takes):
    async def work() -> None:
        async with world([Scripted(step_s=0.005)], cap=1, order=EAGER, takes=takes) as w:
            started_s = w.driver.clock()
            long = asyncio.ensure_future(w.submit({**LONG, "max_tokens": 80}, timeout_s=TIMEOUT_S))
            await until(lambda: w.ledger.tokens_of[1] > 30 and w.driver.clock() > started_s + 2 * TIMEOUT_S)
            await w.submit(short(1))
            reply = await long
            assert w.ledger.cause == ["preemption"]
            assert reply.text == answer(encode(LONG["prompt"]), 80)[1]
            assert (reply.finishes, reply.events[-1]) == (["length"], "[DONE]")
            assert w.ledger.outcomes == {Outcome.FINISHED: 2}
            await until(lambda: idle(w))

    run(work)


@pytest.mark.parametrize("takes", [None, lambda: True])
def test_a_stream_whose_engine_dies_late_continues(takes):
    async def work() -> None:
        engines = [Scripted([Fault("die", 40)], step_s=0.005) for _ in range(2)]
        async with world(engines, takes=takes) as w:
            task = asyncio.ensure_future(w.submit({**LONG, "max_tokens": 80}, timeout_s=TIMEOUT_S))
            await until(lambda: engines[0].seen or engines[1].seen)
            engines[1 if engines[0].seen else 0].plan = []
            reply = await task
            assert w.ledger.cause == ["failed_over"]
            assert reply.text == answer(encode(LONG["prompt"]), 80)[1]
            assert reply.events[-1] == "[DONE]"

    run(work)


def test_a_non_streamed_answer_that_is_late_has_expired():
    async def work() -> None:
        async with world([Scripted([Fault("die", 40)], step_s=0.005)]) as w:
            reply = await w.submit({**LONG, "stream": False, "max_tokens": 80}, timeout_s=TIMEOUT_S)
            assert (reply.status, reply.headers.get(b"retry-after")) == (504, None)
            assert w.ledger.outcomes == {Outcome.EXPIRED: 1}

    run(work)
