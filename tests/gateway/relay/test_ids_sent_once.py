"""A client that requests token ids gets each once, with the text that it completes, however often it is cut."""

from __future__ import annotations

import json

import pytest
from relay_world import run, world
from scripted_engine import Fault, Scripted, Words, answer, decode, encode
from test_relay_cut import EAGER, LONG, cut_often

from lengthwise.backend.openai_protocol import COMPLETIONS
from lengthwise.gateway.relay.responses import TrackedStream
from lengthwise.gateway.relay.sse import ResponseOptions


def event(text: str, ids: list[int] | None, finish: str | None = None, prompt: list[int] | None = None) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "token_ids": ids}
    if prompt is not None:
        choice["prompt_token_ids"] = prompt
    return (
        b"data: "
        + json.dumps({"id": "a", "object": "o", "created": 1, "model": "m", "choices": [choice]}).encode()
        + b"\n\n"
    )


def reported(data: bytes) -> tuple[str, list[int]]:
    """Text and ids that a client has read."""
    text, ids = "", []
    for one in data.split(b"\n\n"):
        if not one or b"[DONE]" in one:
            continue
        (choice,) = json.loads(one.removeprefix(b"data: "))["choices"]
        text += choice["text"]
        ids += choice["token_ids"] or []
    return text, ids


def stream() -> TrackedStream:
    return TrackedStream(ResponseOptions(COMPLETIONS, stream=True, usage=False, usage_each=False, ids=True))


@pytest.mark.parametrize("usual", [0, 4])
def test_ids_that_are_ahead_of_the_text_come_with_the_text_that_they_complete(usual):
    """After several usual events their layout is known, and events pass another way."""
    one = stream()
    out = one.feed(event("a", [1], prompt=[7]))
    for k in range(usual):
        out += one.feed(event("b", [10 + k]))
    before = reported(out)[1]
    pieces = one.feed(event("", [2])) + one.feed(event("", [3]))
    assert reported(pieces) == ("", [])
    assert one.flushed_tokens == len(before)
    assert reported(one.feed(event("\u00e9", [4]))) == ("\u00e9", [2, 3, 4])
    assert one.flushed_tokens == len(before) + 3


@pytest.mark.parametrize("last", [[5], [], None])
def test_ids_whose_text_never_comes_are_sent_at_the_end(last):
    one = stream()
    one.feed(event("a", [1], prompt=[7]))
    out = one.feed(event("", [2])) + one.feed(event("", last, finish="length")) + one.feed(b"data: [DONE]\n\n")
    assert reported(out) == ("", [2, *(last or [])])


def test_a_preemption_within_a_character_repeats_no_id():
    one = stream()
    out = one.feed(event("a", [1], prompt=[7])) + one.feed(event("", [2]))
    one.start_attempt(one.flushed_tokens)
    out += one.feed(event("", [2])) + one.feed(event("\u00e9", [3])) + one.feed(event("c", [4], finish="length"))
    assert reported(out) == ("a\u00e9c", [1, 2, 3, 4])


def test_an_output_at_its_limit_contains_all_its_ids():
    one = stream()
    out = one.feed(event("a", [1], prompt=[7])) + one.feed(event("", [2]))
    assert reported(out + one.end_at_limit()) == ("a", [1, 2])


def ids_of(reply) -> list[int]:
    chunks = [one for one in reply.events if one != "[DONE]" and "choices" in one]
    return [one for chunk in chunks for one in chunk["choices"][0]["token_ids"] or []]


COMPLETE = answer(encode("long 300"), 300)


@pytest.mark.parametrize("stream", [True, False])
def test_chunks_of_several_tokens_contain_each_id_once_however_often_preempted(stream: bool):
    async def work() -> None:
        engine = Scripted(step_s=0.001, per_chunk=2)
        body = {**LONG, "stream": stream, "return_token_ids": True}
        async with world([engine], cap=1, order=EAGER) as w:
            reply = await cut_often(w, body, shorts=6)
            choice = None if stream else json.loads(reply.body)["choices"][0]
            assert (ids_of(reply) if stream else choice["token_ids"]) == COMPLETE[0]
            assert (reply.text if stream else choice["text"]) == COMPLETE[1]
            assert stream or w.ledger.cause.count("preemption") >= 3

    run(work)


def breaks(per_chunk: int, *, half: bool) -> int:
    """Tokens after which a chunk ends in half a character, or does not, and had text before it."""
    ids, at = COMPLETE[0], per_chunk * 10
    while decode(ids[:at]).endswith("\ufffd") != half or not Words([]).step(ids[at - per_chunk]):
        at += per_chunk
    return at


@pytest.mark.parametrize("half", [True, False])
def test_an_engine_death_within_a_character_whose_ids_were_sent_ends_the_stream_with_an_error(half: bool):
    """A client that did not request ids, or received none of the half, goes on elsewhere."""

    async def work() -> None:
        at = breaks(2, half=half)
        for wanted in (True, False):
            engines = [Scripted(plan=[Fault("die", at)], per_chunk=2), Scripted(per_chunk=2)]
            async with world(engines) as w:
                reply = await w.submit({**LONG, "return_token_ids": wanted})
                if half and wanted:
                    assert reply.events[-1]["error"]["code"] == "ids_ahead"
                    assert ids_of(reply) == COMPLETE[0][:at]
                else:
                    assert reply.text == COMPLETE[1]
                    assert ids_of(reply) == (COMPLETE[0] if wanted else [])

    run(work)


def test_a_non_streamed_answer_of_an_engine_that_dies_mid_character_has_each_id_once():
    async def work() -> None:
        engines = [Scripted(plan=[Fault("die", breaks(2, half=True))], per_chunk=2), Scripted(per_chunk=2)]
        async with world(engines) as w:
            reply = await w.submit({**LONG, "stream": False, "return_token_ids": True})
            (choice,) = json.loads(reply.body)["choices"]
            assert (choice["text"], choice["token_ids"]) == (COMPLETE[1], COMPLETE[0])

    run(work)
