"""Pieces that go to the client in the moment in which they come: the same bytes, order and end as of read ones."""

from __future__ import annotations

import asyncio
import random
import re

import pytest
from relay_world import BARE, IDS, ChunkWriter, idle, requested, run, until, world
from scripted_engine import Fault, Scripted, answer, encode
from test_relay_cut import EAGER, LONG, cut_often

from lengthwise.gateway.config import ResilienceConfig
from lengthwise.gateway.request import Outcome

BODY = {"model": "m", "prompt": "p 60", "max_tokens": 60, "stream": True, "stream_options": {"include_usage": True}}
_ID = re.compile(rb"cmpl-[\d-]+")


def sometimes(share: float, seed: int = 1):
    draws = random.Random(seed)
    return lambda: draws.random() < share


@pytest.mark.parametrize("capabilities", [IDS, BARE])
@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0, 0), (0.5, 10, 50), (1.0, 50, 62)])
def test_the_bytes_are_those_that_are_read(capabilities, share, least, most):
    async def work() -> None:
        engine = Scripted(step_s=0.001)
        async with world([engine], capabilities=capabilities) as w:
            read = await w.submit(BODY)
            w.takes = sometimes(share)
            passed = await w.submit(BODY)
            assert _ID.sub(b"", passed.body) == _ID.sub(b"", read.body)
            assert least <= w.passed <= most
            assert w.ledger.tokens_of == {1: 60, 2: 60}
            assert [what for what, _ in w.ledger.events] == ["on_admission", "first_token", "finished"] * 2
            await until(lambda: idle(w))

    run(work)


@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("kind", ["die", "error", "stall"])
def test_a_stream_that_is_passed_on_at_once_goes_on_from_another_engine(stalls, kind, share):
    async def work() -> None:
        engines = [Scripted([Fault(kind, 23)], step_s=0.001), Scripted(step_s=0.001)]
        quick = ResilienceConfig(stall_s=1.0, first_byte_s=1.0, connect_s=2.0)
        limits = quick if kind == "stall" else ResilienceConfig()
        async with world(engines, resilience=limits, takes=sometimes(share)) as w:
            reply = await w.submit(BODY)
            assert reply.text == answer(encode("p 60"), 60)[1]
            assert (reply.finishes, reply.events[-1]) == (["length"], "[DONE]")
            assert [one["completion_tokens"] for one in reply.usages] == [60]
            assert [name for name, _ in w.fleet.faults] == ["w0"] or (kind == "stall" and stalls.lost_s > 0.5)
            assert w.passed > 15
            await until(lambda: idle(w))

    run(work)


def test_a_directly_forwarded_stream_is_preempted_without_a_visible_difference():
    async def work() -> None:
        async with world([Scripted(step_s=0.001)], cap=1, order=EAGER, takes=sometimes(0.9)) as w:
            reply = await cut_often(w, LONG)
            assert reply.text == answer(encode("long 300"), 300)[1]
            assert w.ledger.cause.count("preemption") >= 3
            assert w.passed > 100
            await until(lambda: idle(w))

    run(work)


def test_an_engine_that_keeps_its_stream_open_after_the_end_delays_no_client():
    """The end comes in a piece of its own; the reader of pieces is notified, and the engine is not to blame."""

    async def work() -> None:
        async with world([Scripted([Fault("stall", 60)], step_s=0.001)], takes=lambda: True) as w:
            task = asyncio.ensure_future(w.submit({**BODY, "stream_options": {}}))
            await until(lambda: w.ledger.tokens_of[1] == 60)
            await w.engines[0].kill()
            reply = await task
            assert (reply.finishes, reply.events[-1]) == (["length"], "[DONE]")
            assert w.ledger.outcomes == {Outcome.FINISHED: 1}

    run(work)


def test_an_engines_error_is_passed_on_once_and_ends_the_answer():
    async def work() -> None:
        engine = Scripted([Fault("error", 7)], step_s=0.001)
        async with world([engine], capabilities=BARE, takes=lambda: True) as w:
            reply = await w.submit(BODY)
            errors = [one for one in reply.events if one != "[DONE]" and "error" in one]
            assert [one["error"]["message"] for one in errors] == ["engine dead"]
            assert w.ledger.outcomes == {Outcome.FAILED: 1}

    run(work)


@pytest.mark.parametrize("capabilities", [IDS, BARE])
def test_a_client_that_takes_no_more_is_given_up_and_the_engine_aborts(capabilities):
    async def work() -> None:
        async with world(
            [Scripted(step_s=0.001)], resilience=ResilienceConfig(stall_s=0.2), capabilities=capabilities
        ) as w:
            reported = await w.relay.serve(requested({**BODY, "max_tokens": 4000}))
            parts: list[bytes] = []
            writer = ChunkWriter(parts, lambda: writer.passed < 30)
            parts.append(await anext(reported))
            reported.attach_writer(writer)
            parts.append(await anext(reported))  # what the full connection did not take
            assert writer.passed == 30
            await until(lambda: w.engines[0].seen[0].how == "aborted")
            rest = [part async for part in reported]
            await reported.aclose()
            assert b"[DONE]" not in b"".join(parts + rest)
            assert w.ledger.outcomes == {Outcome.CLIENT_GONE: 1}
            await until(lambda: idle(w))

    run(work)


def test_a_client_that_goes_in_the_midst_of_it_is_gone_for_the_engine_too():
    async def work() -> None:
        async with world([Scripted(step_s=0.001)], takes=lambda: True) as w:
            task = asyncio.ensure_future(w.submit({**BODY, "max_tokens": 4000}))
            await until(lambda: w.ledger.tokens_of[1] > 40)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await until(lambda: w.engines[0].seen[0].how == "aborted")
            await until(lambda: idle(w))
            assert w.ledger.outcomes == {Outcome.CLIENT_GONE: 1}

    run(work)
