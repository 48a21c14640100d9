"""The usage of a whole answer, reported once, also where the engine died after the last token."""

from __future__ import annotations

import json
import math

import pytest

from lengthwise.gateway.relay.responses import BufferedResponse, TrackedStream, UntrackedStream
from lengthwise.gateway.relay.sse import ResponseOptions

DONE = b"data: [DONE]\n\n"


def usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 2, "total_tokens": 2 + tokens, "completion_tokens": tokens}


def event(*choices, **more) -> bytes:
    reported = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices, **more}
    return b"data: " + json.dumps(reported, separators=(",", ":")).encode() + b"\n\n"


def choice(text, ids=None, finish=None):
    return {"index": 0, "delta": {"content": text}, "finish_reason": finish, "token_ids": ids}


def answer(*, each: bool, prompt_ids: bool = True) -> bytes:
    """As vLLM begins a chat: a chunk without tokens, then those of the answer, the last of which ends it."""

    def so_far(tokens: int) -> dict[str, object]:
        return {"usage": usage(tokens)} if each else {}

    prompt = {"prompt_token_ids": [1, 2]} if prompt_ids else {}
    begins = event(choice(""), **prompt, **so_far(0))
    return begins + event(choice("a", [5]), **so_far(1)) + event(choice("b", [6], "stop"), **so_far(2))


def sums(out: bytes) -> list[dict[str, int]]:
    """The usages of chunks that have no choices."""
    events = [json.loads(one[6:]) for one in out.decode().split("\n\n") if one.startswith("data: {")]
    return [one["usage"] for one in events if not one["choices"]]


def wants(*, each: bool) -> ResponseOptions:
    return ResponseOptions("chat", stream=True, usage=True, usage_each=each, ids=False)


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("behind", [b"", event(usage=usage(2)), event(usage=usage(2)) + DONE])
def test_usage_is_sent_once_wherever_after_the_last_token_the_engine_died(each, behind):
    state = TrackedStream(wants(each=each))
    out = state.feed(answer(each=each) + behind) + state.end()
    assert sums(out) == [usage(2)]
    assert out.endswith(DONE)
    assert out.count(DONE) == 1


def test_usage_that_came_with_the_last_token_is_not_repeated():
    state = TrackedStream(wants(each=False))
    last = event(choice("b", None, "stop"), usage=usage(2))
    out = state.feed(event(choice("a", [5]), prompt_token_ids=[1, 2]) + last) + state.end()
    assert (sums(out), out.count(b"completion_tokens")) == ([], 1)


def test_none_is_made_up_where_the_prompt_is_not_known():
    state = TrackedStream(wants(each=False))
    out = state.feed(answer(each=False, prompt_ids=False)) + state.end()
    assert sums(out) == []
    assert out.endswith(DONE)


@pytest.mark.parametrize("details", [{"prompt_tokens_details": {"cached_tokens": 128}}, {}], ids=["reported", "not"])
def test_the_cached_tokens_that_the_engine_reports_are_read(details):
    """From a stream that passes, a tracked one, and a complete body; a text that names them is none."""
    total = usage(2) | details
    named = 'the \\"cached_tokens\\": 7 of \\"usage\\"'
    streamed = [UntrackedStream(), TrackedStream(wants(each=False))]
    for state, ids in zip(streamed, (None, [5, 6]), strict=True):
        state.feed(event(choice("", None), prompt_token_ids=[1, 2]) + event(choice(named, ids, "stop")))
        state.feed(event(usage=total) + DONE)
    complete = BufferedResponse(10_000)
    complete.feed(json.dumps({"choices": [{"text": named, "finish_reason": "stop"}], "usage": total}).encode())
    complete.end()
    for state in (*streamed, complete):
        assert state.count == 2
        assert state.cached_tokens == 128 if details else math.isnan(state.cached_tokens)
