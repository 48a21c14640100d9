"""Whatever engines do, and whenever answers are cut or moved, each is whole and right, or reports an error."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from relay_world import Reply, World, idle, run, until, world
from scripted_engine import Fault, Scripted, Words, answer, decode, encode
from test_relay_cut import EAGER

from lengthwise.gateway.config import Order, ResilienceConfig
from lengthwise.gateway.scheduler_driver import PREEMPTED, WORKER_GONE

REQUESTS, LENGTHS = 25, (3, 20, 60)
KINDS = ("die", "stall", "error", "garbage", "no_done", "busy", "503", "500")
PLACES = (-1, 0, 1, 2, 5, 11, 19, 20, 30)
ORDERS = (EAGER, Order(mode="windowed", window_tokens=7))
CARE = ResilienceConfig(stall_s=0.3, first_byte_s=1.0, retry_share=1.0)


def engine(dice: random.Random) -> Scripted:
    faults = [
        Fault(dice.choice(KINDS), dice.choice(PLACES)) if dice.random() < 0.25 else None for _ in range(3 * REQUESTS)
    ]
    return Scripted(plan=faults, step_s=0.001, per_chunk=dice.choice((1, 1, 2, 3)))


def requested(dice: random.Random, number: int) -> dict[str, Any]:
    tokens = dice.choice(LENGTHS)
    body: dict[str, Any] = {"model": "m", "max_tokens": tokens, "temperature": 0}
    body |= {"stream": dice.random() < 0.7, "return_token_ids": dice.random() < 0.5}
    if dice.random() < 0.5:
        return body | {"messages": [{"role": "user", "content": f"{number} {tokens}"}]}
    return body | {"prompt": f"{number} {tokens}"}


async def meddle(w: World, dice: random.Random) -> None:
    """Cuts and moves requests, whether anything asks for it or not."""
    while True:
        await asyncio.sleep(0.01)
        present = [ticket for ticket in w.driver.tickets.values() if ticket.worker and ticket.request.preemptible]
        if present:
            dice.choice(present).interrupt(dice.choice((PREEMPTED, WORKER_GONE)))


def check_stream(reply: Reply, ids: list[int], text: str, *, asked_ids: bool) -> None:
    chunks = [event for event in reply.events if event != "[DONE]"]
    reported = [one for chunk in chunks for c in chunk.get("choices", ()) for one in c.get("token_ids") or ()]
    if any("error" in chunk for chunk in chunks):
        assert text.startswith(reply.text)
        assert reported == ids[: len(reported)]
        return
    assert reply.text == text
    assert reply.events.count("[DONE]") == 1
    assert reply.events[-1] == "[DONE]"
    assert reply.finishes == ["length"]
    assert reported in ([], ids) if asked_ids else not reported


def check_whole(report: dict[str, Any], ids: list[int], text: str) -> None:
    if "error" in report:
        return
    (choice,) = report["choices"]
    assert (choice["message"]["content"] if "message" in choice else choice["text"]) == text
    assert choice.get("token_ids") in (None, ids)
    assert report["usage"]["completion_tokens"] == len(ids)


async def one(w: World, dice: random.Random, number: int) -> None:
    body = requested(dice, number)
    await asyncio.sleep(0.3 * dice.random())
    reply = await w.submit(body, api="chat" if "messages" in body else "completions")
    ids, text = answer(w.engines[0].prompt_of(body), body["max_tokens"])
    if body["stream"] and reply.status == 200:
        check_stream(reply, ids, text, asked_ids=body["return_token_ids"])
    else:
        check_whole(json.loads(reply.body), ids, text)


@pytest.mark.parametrize("seed", range(4))
def test_each_answer_is_correct_or_reports_an_error_and_nothing_is_left(seed: int):
    dice = random.Random(seed)

    async def work() -> None:
        engines = [engine(dice) for _ in range(3)]
        takes = dice.choice((None, lambda: dice.random() < 0.5))
        async with world(engines, cap=dice.choice((1, 4)), order=ORDERS[seed % 2], resilience=CARE, takes=takes) as w:
            meddler = asyncio.ensure_future(meddle(w, dice))
            await asyncio.gather(*(one(w, dice, number) for number in range(REQUESTS)))
            meddler.cancel()
            await until(lambda: idle(w))
            assert w.ledger.cause

    run(work)


def half(per_chunk: int) -> str:
    """A prompt whose answer has half a character at the end of a chunk with text, within its first few tokens."""
    for number in range(10_000):
        ids, _ = answer(encode(f"half {number}"), 3 * per_chunk)
        words = Words([])
        texts = [words.step(one) for one in ids]
        if decode(ids).endswith("\ufffd") and any(texts[-per_chunk:]):
            return f"half {number}"
    raise AssertionError("there is one")


@pytest.mark.parametrize("per_chunk", [2, 3])
def test_half_a_character_among_the_first_tokens_is_made_again(per_chunk: int):
    prompt = half(per_chunk)

    async def work() -> None:
        engines = [Scripted(plan=[Fault("die", 3 * per_chunk)], per_chunk=per_chunk), Scripted()]
        async with world(engines) as w:
            reply = await w.submit({"model": "m", "prompt": prompt, "max_tokens": 20, "stream": True})
            assert reply.text == answer(encode(prompt), 20)[1]

    run(work)
