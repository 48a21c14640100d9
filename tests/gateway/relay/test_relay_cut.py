"""A preempted answer cannot be distinguished from an uninterrupted one."""

from __future__ import annotations

import asyncio
import json

import pytest
from relay_world import World, idle, run, until, world
from scripted_engine import Fault, Scripted, answer, encode

from lengthwise.gateway.config import Order
from lengthwise.gateway.request import Outcome
from lengthwise.gateway.scheduler_driver import PREEMPTED

LONG = {"model": "m", "prompt": "long 300", "max_tokens": 300, "stream": True, "temperature": 0}
EAGER = Order(
    mode="isrtf", window_tokens=10, preemption="worth(factor=1)", preemptions_per_s=1000.0, max_preemptions=50
)


def short(k: int) -> dict:
    return {"model": "m", "prompt": f"short {k} 5", "max_tokens": 5, "stream": True}


async def cut_often(w: World, body: dict, api: str = "completions", shorts: int = 4):
    """The long request's answer while short ones come and take its place."""
    long = asyncio.ensure_future(w.submit(body, api=api))
    for k in range(shorts):
        before = w.ledger.tokens_of[1]
        await until(lambda before=before: w.ledger.tokens_of[1] > before + 12 or long.done())
        await w.submit(short(k))
    return await long


@pytest.mark.slow
@pytest.mark.parametrize("per_chunk", [1, 3])
@pytest.mark.parametrize("api", ["completions", "chat"])
def test_greedy_output_is_identical_cut_and_uncut(api: str, per_chunk: int):
    body = dict(LONG)
    if api == "chat":
        del body["prompt"]
        body["messages"] = [{"role": "user", "content": "long 300"}]
    body["stream_options"] = {"include_usage": True}

    async def work() -> None:
        engine = Scripted(step_s=0.001, per_chunk=per_chunk)
        async with world([engine], cap=1, order=EAGER) as w:
            reply = await cut_often(w, body, api)
            prompt = engine.prompt_of(body)
            _, text = answer(prompt, 300)
            assert w.ledger.cause.count("preemption") >= 3
            assert reply.text == text
            assert reply.finishes == ["length"]
            assert reply.usages == [
                {"prompt_tokens": len(prompt), "total_tokens": len(prompt) + 300, "completion_tokens": 300}
            ]
            assert reply.events[-1] == "[DONE]"
            chunks = reply.events[:-1]
            assert len({(one["id"], one["created"], one["model"]) for one in chunks}) == 1
            assert all(one["choices"][0].get("token_ids") is None for one in chunks if one["choices"])
            if api == "chat":
                assert [one["choices"][0]["delta"].get("role") for one in chunks if one["choices"]].count(
                    "assistant"
                ) == 1
            assert w.ledger.tokens_of[1] == 300
            assert w.ledger.outcomes == {Outcome.FINISHED: 5}
            await until(lambda: idle(w))
            assert sum(one.how == "aborted" for one in engine.seen) == w.ledger.cause.count("preemption")

    run(work)


def test_each_token_is_generated_once_except_those_withheld_at_a_preemption():
    async def work() -> None:
        engine = Scripted(step_s=0.001)
        async with world([engine], cap=1, order=EAGER) as w:
            reply = await cut_often(w, {**LONG, "return_token_ids": True})
            ids = [one for event in reply.events[:-1] for one in event["choices"][0]["token_ids"]]
            again = [one.body["prompt"] for one in engine.seen if isinstance(one.body["prompt"], list)]
            assert again
            complete = encode("long 300") + answer(encode("long 300"), 300)[0]
            for prompt in again:
                assert prompt == complete[: len(prompt)]
            assert ids == complete[len(encode("long 300")) :]

    run(work)


def test_after_a_preemption_only_the_remaining_tokens_are_requested():
    body = {**LONG, "min_tokens": 200, "top_k": 5, "stop_token_ids": [1], "user": "u", "stop": None}

    async def work() -> None:
        engine = Scripted(step_s=0.001)
        async with world([engine], cap=1, order=EAGER) as w:
            await cut_often(w, body, shorts=1)
            sent = next(one.body for one in engine.seen if isinstance(one.body["prompt"], list))
            done = len(sent["prompt"]) - len(encode("long 300"))
            assert sent["max_tokens"] == 300 - done
            assert sent["min_tokens"] == 200 - done
            assert {key: sent[key] for key in ("temperature", "top_k", "stop_token_ids", "user", "model")} == {
                "temperature": 0, "top_k": 5, "stop_token_ids": [1], "user": "u", "model": "m",
            }  # fmt: skip
            assert "stop" not in sent

    run(work)


def test_a_finished_output_does_not_continue_if_preempted_before_its_stream_ends():
    async def work() -> None:
        engine = Scripted(plan=[Fault("stall", 30)])
        async with world([engine], cap=1, order=EAGER) as w:
            finished = asyncio.ensure_future(w.submit({**LONG, "max_tokens": 30}))
            await until(lambda: w.ledger.tokens_of[1] == 30)
            (ticket,) = w.driver.tickets.values()
            ticket.interrupt(PREEMPTED)  # the engine has sent the end, and keeps the stream open
            reply = await finished
            assert reply.finishes == ["length"]
            assert reply.text == answer(encode("long 300"), 30)[1]
            assert reply.events[-1] == "[DONE]"
            assert w.ledger.cause.count("preemption") == 0
            assert len(engine.seen) == 1

    run(work)


def test_what_a_cut_could_change_is_never_cut():
    async def work() -> None:
        engine = Scripted(step_s=0.001)
        async with world([engine], cap=1, order=EAGER) as w:
            reply = await cut_often(w, {**LONG, "presence_penalty": 0.5})
            assert "preemption" not in w.ledger.cause
            assert reply.text == answer(encode("long 300"), 300)[1]
            assert "return_token_ids" not in engine.seen[0].body

    run(work)


def test_a_non_streamed_answer_is_preempted_as_well():
    async def work() -> None:
        engine = Scripted(step_s=0.001)
        async with world([engine], cap=1, order=EAGER) as w:
            reply = await cut_often(w, {**LONG, "stream": False})
            reported = json.loads(reply.body)
            assert w.ledger.cause.count("preemption") >= 3
            assert reported["choices"][0]["text"] == answer(encode("long 300"), 300)[1]
            assert reported["usage"]["completion_tokens"] == 300
            assert reported["object"] == "text_completion"

    run(work)


def test_an_engine_that_returns_no_ids_after_all_is_not_preempted():
    async def work() -> None:
        engine = Scripted(step_s=0.001, sends_ids=False)
        async with world([engine], cap=1, order=EAGER) as w:
            reply = await cut_often(w, LONG)
            assert reply.text == answer(encode("long 300"), 300)[1]
            assert engine.seen[0].how == "finished"

    run(work)


def test_a_leg_that_turns_out_to_be_uncuttable_holds_up_no_other_cut():
    """Two long ones run, each worth a cut; the longer one's engine tells no ids, so that the other one is cut."""

    async def work() -> None:
        mute, able = Scripted(step_s=0.002, sends_ids=False), Scripted(step_s=0.002)
        async with world([mute, able], cap=1, order=EAGER) as w:
            long = [asyncio.ensure_future(w.submit({**LONG, "prompt": f"long {k}00"})) for k in (9, 4)]
            await until(lambda: len(w.ledger.tokens_of) == 2)
            for k in range(3):
                await w.submit(short(k))
            replies = await asyncio.gather(*long)
            assert [one.text for one in replies] == [answer(encode(f"long {k}00"), 300)[1] for k in (9, 4)]
            assert w.ledger.cause.count("preemption") >= 1
            assert all(one.how == "finished" for one in mute.seen)
            assert w.scheduler.statistics(0.0).preemptions == w.ledger.cause.count("preemption")

    run(work)


def test_a_request_that_could_not_be_cut_at_one_engine_is_cut_at_the_next():
    async def work() -> None:
        mute, able = Scripted(step_s=0.002, sends_ids=False), Scripted(step_s=0.002)
        body = {**LONG, "stream": False, "prompt": "long 900"}
        async with world([mute, able], cap=1, order=EAGER) as w:
            long = asyncio.ensure_future(w.submit(body))
            await until(lambda: len(w.ledger.tokens_of) == 1)
            assert mute.running == 1
            await mute.kill()
            for k in range(3):
                await w.submit(short(k))
            reported = json.loads((await long).body)
            assert reported["choices"][0]["text"] == answer(encode("long 900"), 300)[1]
            assert w.ledger.cause.count("preemption") >= 1

    run(work)
