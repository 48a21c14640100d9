"""What passes unchanged, and what each answer is counted as."""

from __future__ import annotations

import json
import re

import pytest
from relay_world import BARE, idle, requested, run, until, world
from scripted_engine import Fault, Scripted, answer, encode

from lengthwise.gateway.config import Order
from lengthwise.gateway.relay.engine_request import resume_conflict
from lengthwise.gateway.relay.responses import AssembledResponse, UntrackedStream
from lengthwise.gateway.relay.sse import ResponseOptions
from lengthwise.gateway.request import Outcome

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello 20"}], "max_tokens": 20, "stream": True}
PLAIN = {"model": "m", "prompt": "hello 20", "max_tokens": 20, "stream": True}


def test_a_stream_of_a_bare_engine_passes_unchanged_to_the_byte():
    async def work() -> None:
        async with world([Scripted(sends_ids=False)], capabilities=BARE) as w:
            reply = await w.submit(PLAIN)
            assert reply.status == 200
            assert reply.text == answer(encode("hello 20"), 20)[1]
            sent = w.engines[0].seen[0]
            assert sent.raw == json.dumps(PLAIN).encode()
            assert reply.events[-1] == "[DONE]"
            assert w.ledger.outcomes == {Outcome.FINISHED: 1}
            await until(lambda: idle(w))

    run(work)


def test_unrequested_token_ids_are_hidden_and_nothing_else_changes():
    async def work() -> None:
        async with world([Scripted()]) as w, world([Scripted()], capabilities=BARE) as bare:
            for body, api in ((PLAIN, "completions"), (CHAT, "chat")):
                tracked, untouched = await w.submit(body, api=api), await bare.submit(body, api=api)
                assert w.engines[0].seen[-1].body["return_token_ids"] is True
                own = tracked.body.replace(str(w.engines[0].port).encode(), b"P")
                assert own == untouched.body.replace(str(bare.engines[0].port).encode(), b"P")
            assert w.ledger.tokens_of == {1: 20, 2: 20}

    run(work)


def test_requested_token_ids_are_all_present():
    async def work() -> None:
        async with world([Scripted()]) as w:
            reply = await w.submit({**PLAIN, "return_token_ids": True})
            ids = [one for event in reply.events[:-1] for one in event["choices"][0]["token_ids"]]
            assert ids == answer(encode("hello 20"), 20)[0]

    run(work)


def test_a_non_streamed_answer_passes_unchanged_where_preemption_is_impossible():
    async def work() -> None:
        async with world([Scripted()], capabilities=BARE) as w:
            reply = await w.submit({**CHAT, "stream": False}, api="chat")
            reported = json.loads(reply.body)
            assert reported["choices"][0]["message"]["content"]
            assert int(reply.headers[b"content-length"]) == len(reply.body)
            assert w.ledger.tokens_of == {1: 20}
            assert w.ledger.outcomes == {Outcome.FINISHED: 1}

    run(work)


def test_a_preemptible_non_streamed_answer_is_built_from_a_stream_and_is_the_same():
    async def work() -> None:
        async with world([Scripted()]) as w, world([Scripted()], capabilities=BARE) as bare:
            for body, api in (({**PLAIN, "stream": False}, "completions"), ({**CHAT, "stream": False}, "chat")):
                made = json.loads((await w.submit(body, api=api)).body)
                reported = json.loads((await bare.submit(body, api=api)).body)
                assert w.engines[0].seen[-1].body["stream"] is True
                assert made["usage"] == reported["usage"]
                own, other = made["choices"][0], reported["choices"][0]
                assert own["finish_reason"] == other["finish_reason"] == "length"
                assert own == other
                assert {made["service_tier"], made["system_fingerprint"]} == {None}

    run(work)


def test_fields_only_in_the_last_chunk_are_in_the_assembled_answer():
    state = AssembledResponse(ResponseOptions("chat", stream=False, usage=False, usage_each=False, ids=True), 50_000)
    frame = {"id": "c-1", "created": 1, "model": "m"}
    parts = [
        ({"role": "assistant", "content": ""}, None, {"prompt_token_ids": [7]}),
        ({"content": "yes"}, [4, 5], {}),
        ({"content": ""}, [2], {"finish": "stop", "system_fingerprint": "vllm-0.32-tp1"}),
    ]
    out = b""
    for delta, ids, more in parts:
        choice = {"index": 0, "delta": delta, "finish_reason": more.pop("finish", None), "token_ids": ids}
        out += state.feed(b"data: " + json.dumps({**frame, "choices": [choice], **more}).encode() + b"\n\n")
    assert out == b""
    made = json.loads(state.feed(b"data: [DONE]\n\n"))
    assert made["system_fingerprint"] == "vllm-0.32-tp1"
    (choice,) = made["choices"]
    assert choice["message"]["content"] == "yes"
    assert choice["message"]["refusal"] is None
    assert choice["token_ids"] == [4, 5, 2]


def test_an_engines_no_is_passed_on_as_it_is():
    async def work() -> None:
        async with world([Scripted(plan=[Fault("400")])]) as w:
            reply = await w.submit(PLAIN)
            assert reply.status == 400
            assert json.loads(reply.body)["error"]["message"] == "no"
            assert w.ledger.outcomes == {Outcome.REJECTED: 1}
            assert w.fleet.faults == []
            await until(lambda: idle(w))

    run(work)


@pytest.mark.parametrize("status", [401, 403, 407])
def test_an_engines_words_about_the_gateways_key_are_not_passed_on(status):
    async def work() -> None:
        async with world([Scripted(plan=[Fault(str(status))] * 9, refusal="key sk-1234 is wrong")]) as w:
            reply = await w.submit(PLAIN)
            assert reply.status == 502
            assert b"sk-1234" not in reply.body
            assert b"http %d" % status in reply.body

    run(work)


@pytest.mark.parametrize("messages", [5, True, 1.5, "x", {}])
def test_messages_of_a_completion_have_no_meaning(messages):
    assert resume_conflict({"model": "m", "prompt": "hi", "messages": messages}) is None


OPTIONS = [{}, {"stream_options": None}, {"stream_options": {"include_usage": True}}]
OPTIONS += [{"stream_options": {"include_usage": True, "continuous_usage_stats": True}}]
VTC = Order(mode="isrtf", window_tokens=10, fairness="vtc")


@pytest.mark.parametrize("options", OPTIONS, ids=["nothing", "null", "total", "each"])
@pytest.mark.parametrize("api", ["chat", "completions"])
def test_a_metered_stream_is_counted_by_its_usage_and_reaches_the_client_as_requested(options, api):
    """Ten tokens an event, of which no ids are known. The engine's clients see what they would without the gateway."""
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if api == "chat" else {"prompt": "hi"}
    body = {"model": "m", "max_tokens": 35, "stream": True, "stop": ["zzzz"], **prompt, **options}

    async def work() -> None:
        async with world([Scripted(per_chunk=10)], order=VTC) as w:
            reply = await w.submit(body, api=api)
            assert list(w.ledger.tokens_of.values()) == [35]
            assert w.engines[0].seen[0].body["stream_options"]["continuous_usage_stats"]
        async with world([Scripted(per_chunk=10)]) as w:
            plain = await w.submit(body, api=api)
            assert w.engines[0].seen[0].body == body
        same = [re.sub(rb'"id":"[^"]*"', b"", one.body) for one in (reply, plain)]
        assert same[0] == same[1]

    run(work)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_metered_stream_of_an_engine_without_usage_is_counted_by_its_interval(leaves):
    body = {"model": "m", "prompt": "hi", "max_tokens": 35, "stream": True, "stop": ["zzzz"], "stream_interval": 10}

    async def work() -> None:
        async with world([Scripted(per_chunk=10, reports_usage=False, step_s=0.002)], order=VTC) as w:
            answer = await w.relay.serve(requested(body, now_s=w.driver.clock()))
            async for _ in answer:
                if leaves:
                    break
            await answer.aclose()
            (tokens,) = w.ledger.tokens_of.values()
            assert 10 <= tokens <= 35 if leaves else tokens == 35

    run(work)


@pytest.mark.parametrize("choices", [1, 2])
def test_the_usage_of_each_choice_is_added(choices):
    """vLLM reports the tokens of a chunk's choice, and at the end those of all."""
    state = UntrackedStream(choices, hide_usage=True, hide_usage_each=True, event_tokens=1000)
    for so_far in (100, 200):
        for index in range(choices):
            data = {
                "choices": [{"index": index, "text": "x"}],
                "usage": {"prompt_tokens": 7, "completion_tokens": so_far},
            }
            out = state.feed(b"data: " + json.dumps(data).encode() + b"\n\n")
            assert out == b"data: " + json.dumps({"choices": data["choices"]}).encode() + b"\n\n"
        assert state.count == state.estimated_count == so_far * choices
    total = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 201 * choices}}
    assert state.feed(b"data: " + json.dumps(total).encode() + b"\n\ndata: [DONE]\n\n") == b"data: [DONE]\n\n"
    assert (state.count, state.prompt_tokens) == (201 * choices, 7)
