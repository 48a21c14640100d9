"""Once a stream has started, nothing is kept of its request that only sending it again would need."""

from __future__ import annotations

import pytest
from relay_world import BARE, IDS, requested, run, world
from scripted_engine import Fault, Scripted, answer, encode

from lengthwise.gateway.config import ResilienceConfig
from lengthwise.gateway.request import InvalidBodyError

LONG = "x" * 20_000
BODY = {"model": "m", "prompt": f"{LONG} 60", "max_tokens": 60, "stream": True, "temperature": 0,
        "logit_bias": {"5": 0}, "min_tokens": 40}  # fmt: skip


async def first_piece(w, body):
    """What was asked, its answer, and the first piece of that."""
    request = requested(body)
    request.memory_bytes = 3 * len(request.body)
    reported = await w.relay.serve(request)
    return request, reported, await anext(reported)


@pytest.mark.parametrize("capabilities", [IDS, BARE])
def test_a_started_stream_retains_no_body_fields_or_text(capabilities):
    async def work() -> None:
        async with world([Scripted()], capabilities=capabilities) as w:
            request, reported, first = await first_piece(w, BODY)
            assert (request.body, request.text) == (b"", "")
            with pytest.raises(InvalidBodyError):  # fields are parsed from the body, so that none are left either
                request.fields()
            prompt_ids = 5 * len(LONG) if capabilities is IDS else 0
            assert request.memory_bytes < prompt_ids + 2000, "token ids are what another engine goes on from"
            rest = b"".join([part async for part in reported])
            assert (first + rest).endswith(b"data: [DONE]\n\n")
            assert w.engines[0].seen[0].body["prompt"] == BODY["prompt"]

    run(work)


def test_what_is_left_is_enough_to_go_on_elsewhere():
    async def work() -> None:
        async with world([Scripted(plan=[Fault("die", 7)]), Scripted(plan=[Fault("die", 7)])]) as w:
            reply = await w.submit(BODY)
            assert reply.text == answer(encode(BODY["prompt"]), 60)[1]
            again = [one.body for engine in w.engines for one in engine.seen][1]
            assert again["prompt"][: len(BODY["prompt"])] == encode(BODY["prompt"])
            assert (again["logit_bias"], again["min_tokens"]) == ({"5": 0}, 33)

    run(work)


def test_an_unstarted_request_is_sent_again_unchanged():
    async def work() -> None:
        engines = [Scripted(plan=[Fault("hang")]), Scripted(plan=[Fault("hang")])]
        async with world(engines, resilience=ResilienceConfig(first_byte_s=0.8)) as w:
            reply = await w.submit(BODY)
            assert reply.text == answer(encode(BODY["prompt"]), 60)[1]

    run(work)


def test_poison_after_the_body_was_let_go_counts_once_for_its_owner():
    async def work() -> None:
        async with world([Scripted(plan=[Fault("error", 9)] * 3)], capabilities=BARE) as w:
            blamed = []
            w.fleet.record_error_response = lambda name, owner: blamed.append((name, owner))
            for _ in range(3):
                await w.submit(BODY)
            assert {name for name, _ in blamed} == {"w0"}
            assert len(blamed) == 3
            assert len({owner for _, owner in blamed}) == 1, "the same request: one owner"
            assert w.fleet.faults == []

    run(work)
