"""Events that are no JSON, or hide what they add: no engine continues over a token that was lost in one."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from relay_world import idle, run, until, world
from scripted_engine import Fault, Scripted, answer, encode
from test_relay_failover import BODY

from lengthwise.gateway.config import ResilienceConfig
from lengthwise.gateway.relay.responses import AssembledResponse, BufferedResponse, TrackedStream, UntrackedStream
from lengthwise.gateway.relay.sse import ResponseOptions
from lengthwise.gateway.request import Outcome

WANTS = ResponseOptions("completions", stream=True, usage=True, usage_each=False, ids=True)
DONE = b"data: [DONE]\n\n"


def event(text, ids=None, *, first=False, finish=None, **more):
    choice = {"index": 0, "text": text, "finish_reason": finish, "token_ids": ids, **more}
    if first:
        choice["prompt_token_ids"] = [1, 2]
    reported = {"id": "x", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}
    return b"data: " + json.dumps(reported, separators=(",", ":")).encode() + b"\n\n"


def started(state: TrackedStream) -> TrackedStream:
    """Two tokens of it are out."""
    state.feed(event("a", [5], first=True) + event("b", [6]))
    assert state.last_ids(9) == [5, 6]
    return state


COMPLETE = event("c", [7])
BROKEN = [
    b'data: {"id":"x","choi\xff\n\n',
    b"data: {not json\xff\n\n",
    COMPLETE[: COMPLETE.index(b'"finish')] + b"\n\n",  # it has text
    COMPLETE[:-5] + b"\n\n",  # and token ids
    b"data: 7\n\n",
    b'data: {"choices":7}\n\n',
    b'data: {"te' + COMPLETE,  # the next one runs into it
    event("", finish="stop")[:-4] + b"\n\n",
    COMPLETE.replace(b'"c"', b'"\xff"'),
    b"<html>no</html>\n\n",
    b"dat: {}\n\n",
    b'data: {"choices":"x"}\n\n',
    b'data: {"choices":[{"index":0,"delta":"x"}]}\n\n',
]


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("at_once", [True, False])
def test_a_broken_event_is_an_error_and_nothing_of_it_or_after_it_is_sent(broken, at_once):
    state = started(TrackedStream(WANTS))
    before = event("é", [7])
    pieces = [before + broken + event("d", [8])] if at_once else [before, broken]
    assert b"".join(map(state.feed, pieces)) == before
    assert (state.error.reason, state.error.engine_fault) == ("malformed", True)
    assert (state.trackable, state.output_complete, state.flushed_tokens) == (True, False, 3)
    assert state.start_attempt(state.flushed_tokens) == b"5,6,7"


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_event_is_withheld_if_no_engine_can_continue(broken):
    state = started(TrackedStream(WANTS))
    state.feed(event("c"))
    assert not state.trackable
    assert state.feed(broken) == b""
    assert (state.error.reason, state.unrecoverable) == ("malformed", True)


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("learned", [True, False])
def test_it_does_not_pass_in_a_stream_that_is_passed_through(broken, at_once, learned):
    state = UntrackedStream()
    before = event("a") + event("b") if learned else b""
    pieces = [before + event("c") + broken + event("d")] if at_once else [before, event("c"), broken]
    assert b"".join(map(state.feed, filter(None, pieces))) == before + event("c")
    assert (state.error.reason, state.error.engine_fault, state.unrecoverable) == ("malformed", True, True)
    assert state.count == 3 if learned else 1
    assert state.missing_end() is None


def test_nothing_after_the_end_of_a_stream_passes():
    for after in (event("d"), b": a comment\n\n", event("d") + DONE):
        state = UntrackedStream()
        assert state.feed(event("c") + DONE + after) + state.feed(event("d")) == event("c") + DONE
        assert (state.finished, state.count) == (True, 1)


@pytest.mark.parametrize("size", [1, 1000, 65_536])
def test_behind_an_event_that_is_too_long_events_are_looked_into_again(size):
    state, out = UntrackedStream(), b""
    good = event("a") + event("x" * (1 << 21)) + event("b")
    data, tail = good + BROKEN[0] + event("d"), len(good) - 500
    for at, end in pairwise([*range(0, tail, 65_536), *range(tail, len(data), size), len(data)]):
        if state.error is None:
            out += state.feed(data[at:end])
    assert out == good
    assert (state.error.reason, state.count) == ("malformed", 3)


def test_text_without_an_end_of_line_is_no_event():
    state = UntrackedStream()
    assert b"".join(state.feed(b"<p>" * 20_000) for _ in range(30)) == b""
    assert (state.error.reason, state.sent) == ("malformed", False)


@pytest.mark.parametrize("streams", [True, False])
def test_a_number_of_tokens_that_is_too_large_is_an_error(streams):
    total = b'{"choices":[{"text":"c"}],"usage":{"completion_tokens":' + b"9" * 5000 + b"}}"
    state = UntrackedStream() if streams else BufferedResponse(100_000)
    assert state.feed(b"data: " + total + b"\n\n" if streams else total) == b""
    if not streams:
        assert state.end() == b""
    assert state.error.reason == "malformed"


def test_before_the_first_output_another_engine_may_serve_what_is_passed_through():
    state = UntrackedStream()
    assert state.feed(b"data: {\n\n") == b""
    assert (state.error.reason, state.sent) == ("malformed", False)


ERROR = b'data: {"error":{"message":"no","code":500}}\n\n'


@pytest.mark.parametrize("error", [ERROR, b"event: error\n" + ERROR])
@pytest.mark.parametrize("at_once", [True, False])
def test_the_events_before_an_error_reach_the_client_before_it(error, at_once):
    state, events = UntrackedStream(), [event("a"), event("b"), error, DONE]
    pieces = [b"".join(events)] if at_once else events[:3]
    assert b"".join(map(state.feed, pieces)).startswith(event("a") + event("b") + error)
    assert (state.error.reason, state.count, state.error_forwarded) == ("server error", 2, True)


def test_an_error_first_in_a_stream_or_behind_a_malformed_event_is_not_forwarded():
    state = UntrackedStream()
    assert state.feed(ERROR + event("a")) == b""
    assert (state.error.reason, state.sent) == ("server error", False)
    state = UntrackedStream()
    assert state.feed(event("a") + b"data: {\n\n" + ERROR) == event("a")
    assert (state.error.reason, state.error_forwarded) == ("malformed", False)
    assert UntrackedStream().feed(event("a", finish="stop") + DONE + ERROR) == event("a", finish="stop") + DONE


def test_an_error_that_ends_with_the_stream_is_complete_for_the_client():
    state = UntrackedStream()
    assert state.feed(event("a") + ERROR[:-2]) + state.end() == event("a") + ERROR
    assert (state.error.reason, state.error_forwarded) == ("server error", True)


def test_behind_the_end_of_a_stream_that_is_passed_through_nothing_is_missing():
    state = UntrackedStream()
    assert state.feed(event("c", finish="stop") + b"data: {\n\n" + DONE) == event("c", finish="stop") + DONE
    assert (state.error, state.finished) == (None, True)
    assert UntrackedStream().feed(event("c") + DONE + b"data: {\n\n") == event("c") + DONE


@pytest.mark.parametrize(
    "other",
    [
        b": still there\n\n",
        b'data: {"type":"ping"}\n\n',
        b"event: note\n\n",
        b"data:\n\n",
        event(""),
        event("", []),
        event("", None, logprobs={"tokens": []}),
        event("c", [7]).replace(b"\n\n", b"\nid: 3\n\n"),
        event("c", [7]).replace(b"\n", b"\r\n"),
        event('data: {"', [7]),
    ],
)
def test_what_is_not_broken_passes_and_can_go_on(other):
    state = started(TrackedStream(WANTS))
    assert state.feed(other) == other
    assert (state.error, state.trackable) == (None, True)
    assert state.count == state.flushed_tokens == 2 + (b"[7]" in other)


@pytest.mark.parametrize("ids_shown", [True, False])
def test_a_token_ahead_of_its_text_stays_so_however_its_event_ends(ids_shown):
    state = started(TrackedStream(replace(WANTS, ids=ids_shown)))
    state.feed(event("", [7]).replace(b"\n\n", b"\nid: 3\n\n"))
    assert (state.error, state.trackable, state.count, state.flushed_tokens) == (None, True, 3, 2)


SPACED = event("c", [7]).replace(b'":', b'" :').replace(b"data :", b"data:")


@pytest.mark.parametrize(
    "hiding",
    [
        event("c"),
        event("c", []),
        SPACED,
        SPACED.replace(b'"c"', b'""'),
        b'data: {"choices":[{"delta":{"refusal":"no"}}]}\n\n',
    ],
)
def test_output_without_a_token_id_ends_resumability(hiding):
    state = started(TrackedStream(WANTS))
    assert state.feed(hiding) == hiding
    assert (state.error, state.trackable) == (None, False)


def test_output_sent_with_an_abort_is_neither_forwarded_nor_counted():
    state = started(TrackedStream(WANTS))
    assert state.feed(event("c", [7], finish="abort")) == b""
    assert (state.error.reason, state.flushed_tokens, state.start_attempt(2)) == ("aborted", 2, b"5,6")
    assert state.feed(event("c", [7], finish="abort")) == b""
    assert (state.error.reason, state.flushed_tokens) == ("aborted", 2)


def test_half_an_event_at_the_end_is_a_stream_that_broke_off():
    for later in (False, True):
        state = started(TrackedStream(WANTS))
        if later:
            state.start_attempt(2)
        assert state.feed(b'data: {"choices":[{"te') == b""
        assert state.end() == b""
        assert (state.error.reason, state.trackable, state.flushed_tokens) == ("closed early", True, 2)


@pytest.mark.parametrize("broken", [b'data: {"choi', b'data: {"error":{"code":500}}'])
def test_behind_the_end_of_the_output_nothing_is_missing(broken):
    state = started(TrackedStream(WANTS))
    out = state.feed(event("c", [7], finish="stop") + broken) + state.end()
    assert state.error is None
    assert state.finished
    assert out.startswith(event("c", [7], finish="stop"))
    assert out.endswith(DONE)
    assert out.count(b'"completion_tokens":3') == 1
    assert b"choi\n" not in out


@pytest.mark.parametrize(
    "broken",
    [*BROKEN[:5], b'data: {"choices":7}\n\n', b'data: {"choices":[7]}\n\n', b'data: {"choices":[{"token_ids":7}]}\n\n'],
)
def test_a_broken_event_in_a_later_attempt_is_an_error(broken):
    state = started(TrackedStream(WANTS))
    state.start_attempt(2)
    out = state.feed(event("c", [7], first=True) + broken + event("d", [8]))
    assert [json.loads(one[6:])["choices"][0]["text"] for one in out.split(b"\n\n") if one] == ["c"]
    assert (state.error.reason, state.trackable) == ("malformed", True)
    assert state.start_attempt(state.flushed_tokens) == b"5,6,7"
    assert state.error is None
    assert b'"d"' in state.feed(event("d", [8], finish="stop"))
    assert state.feed(DONE).endswith(DONE)
    assert state.last_ids(9) == [5, 6, 7, 8]


def test_a_non_streamed_answer_continues_after_what_was_read_before_a_broken_event():
    state = started(
        AssembledResponse(ResponseOptions("completions", stream=False, usage=False, usage_each=False, ids=True), 10_000)
    )
    assert state.feed(BROKEN[0] + event("d", [8])) == b""
    assert (state.error.reason, state.trackable) == ("malformed", True)
    assert state.start_attempt(state.flushed_tokens) == b"5,6"
    reported = json.loads(state.feed(event("c", [7], finish="stop") + DONE))
    assert reported["choices"][0]["text"] == "abc"
    assert reported["choices"][0]["token_ids"] == [5, 6, 7]
    assert reported["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("broken", [BROKEN[0], b"data: 7\n\n", b'data: {"choices":[{"text":"c","delta":7}]}\n\n'])
def test_a_non_streamed_answer_that_cannot_continue_contains_no_broken_event(broken):
    state = started(
        AssembledResponse(ResponseOptions("completions", stream=False, usage=False, usage_each=False, ids=True), 10_000)
    )
    assert state.feed(event("c")) == b""
    assert (state.error, state.trackable) == (None, False)
    assert state.feed(broken) == b""
    assert (state.error.reason, state.sent) == ("malformed", False)


@pytest.mark.parametrize("after", [0, 1, 7, 59, 60])
@pytest.mark.parametrize("at_once", [False, True])
def test_the_stream_goes_on_from_another_engine_and_the_first_is_to_blame(after, at_once):
    async def work() -> None:
        engines = [Scripted(plan=[Fault("garbage", after)]), Scripted()]
        async with world(engines, resilience=ResilienceConfig(), takes=(lambda: True) if at_once else None) as w:
            reply = await w.submit(BODY)
            assert b"not json" not in reply.body
            assert reply.text == answer(encode("p 60"), 60)[1]
            assert (reply.finishes, reply.events[-1]) == (["length"], "[DONE]")
            assert [one["completion_tokens"] for one in reply.usages] == [60]
            assert w.fleet.faults == [("w0", "malformed")]
            assert w.ledger.outcomes == {Outcome.FINISHED: 1}
            await until(lambda: idle(w))

    run(work)
