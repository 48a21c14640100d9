"""An engine fails: the client's answer goes on elsewhere, or ends in an error; nothing leaks."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from relay_world import BARE, idle, run, until, world
from scripted_engine import Fault, Scripted, answer, encode

from lengthwise.gateway.config import Admission, ResilienceConfig
from lengthwise.gateway.request import Outcome

BODY = {"model": "m", "prompt": "p 60", "max_tokens": 60, "stream": True, "temperature": 0,
        "stream_options": {"include_usage": True}}  # fmt: skip
CHAT = {key: value for key, value in BODY.items() if key != "prompt"} | {
    "messages": [{"role": "user", "content": "p 60"}]
}
QUICK = ResilienceConfig(stall_s=0.3, first_byte_s=0.3, connect_s=1.0)
PATIENT = ResilienceConfig()


def limits_of(kind: str) -> ResilienceConfig:
    """Short limits only where they find the fault: on a machine that stalls they find healthy engines, too."""
    return QUICK if kind in ("hang", "stall") else PATIENT


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 7, 23, 59])
@pytest.mark.parametrize("per_chunk", [1, 4])
@pytest.mark.parametrize("kind", ["die", "error", "stall"])
def test_the_stream_goes_on_from_another_engine_without_a_gap_or_a_repeat(kind: str, per_chunk: int, after: int):
    async def work() -> None:
        engines = [Scripted(per_chunk=per_chunk), Scripted(per_chunk=per_chunk)]
        async with world(engines, resilience=limits_of(kind)) as w:
            for body, api in ((BODY, "completions"), (CHAT, "chat")):
                engines[0].plan = [Fault(kind, after)]
                engines[1].plan = [Fault(kind, after)] if not engines[0].seen else []
                reply = await w.submit(body, api=api)
                prompt = engines[0].prompt_of(body)
                assert reply.text == answer(prompt, 60)[1]
                assert reply.finishes == ["length"]
                assert [one["completion_tokens"] for one in reply.usages] == [60]
                assert reply.events[-1] == "[DONE]"
            assert w.ledger.outcomes == {Outcome.FINISHED: 2}
            assert len(w.fleet.faults) >= 1
            await until(lambda: idle(w))

    run(work)


def test_an_engine_killed_between_the_last_token_and_done_leaves_a_complete_answer():
    async def work() -> None:
        async with world([Scripted(plan=[Fault("die", 60), Fault("die", 60)])]) as w:
            for body, api in ((BODY, "completions"), (CHAT, "chat")):
                reply = await w.submit(body, api=api)
                assert reply.text == answer(w.engines[0].prompt_of(body), 60)[1]
                assert reply.finishes == ["length"]
                assert [one["completion_tokens"] for one in reply.usages] == [60]
                assert reply.events[-1] == "[DONE]"
            assert len(w.engines[0].seen) == 2
            await until(lambda: idle(w))

    run(work)


def test_a_missing_done_is_no_failure():
    async def work() -> None:
        async with world([Scripted(plan=[Fault("no_done", 99), Fault("no_done", 99)])]) as w:
            assert (await w.submit(BODY)).events[-1] == "[DONE]"
            assert w.ledger.outcomes == {Outcome.FINISHED: 1}
            assert w.fleet.faults == []

    run(work)


@pytest.mark.parametrize("kind", ["die", "hang", "500"])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("capabilities", [None, BARE])
def test_before_the_first_byte_it_is_tried_elsewhere(stalls, kind: str, stream: bool, capabilities):
    from relay_world import IDS

    async def work() -> None:
        engines = [Scripted(plan=[Fault(kind, -1)]), Scripted()]
        async with world(engines, resilience=limits_of(kind), capabilities=capabilities or IDS) as w:
            body = {**BODY, "stream": stream}
            del body["stream_options"]
            replies = [await w.submit(body) for _ in range(2)]
            for reply in replies:
                assert reply.status == 200
                text = reply.text if stream else json.loads(reply.body)["choices"][0]["text"]
                assert text == answer(encode("p 60"), 60)[1]
            assert w.fleet.faults[0][0] == "w0"
            assert w.ledger.cause == ["retried"] or (kind == "hang" and stalls.lost_s > 0.1)
            await until(lambda: idle(w))

    run(work)


def test_an_unreachable_engine_is_avoided():
    async def work() -> None:
        engines = [Scripted(), Scripted()]
        async with world(engines) as w:
            await engines[0].kill()
            for _ in range(4):
                assert (await w.submit(BODY)).text == answer(encode("p 60"), 60)[1]
            assert ("w0", "no connection") in w.fleet.faults

    run(work)


def test_what_cannot_go_on_ends_in_an_error_the_client_can_read():
    async def work() -> None:
        engines = [Scripted(plan=[Fault("die", 7)]), Scripted(plan=[Fault("die", 7)])]
        async with world(engines) as w:
            reply = await w.submit({**BODY, "presence_penalty": 0.5})
            assert reply.status == 200
            assert reply.events[-1]["error"]["code"] == "engine_failed"
            assert answer(encode("p 60"), 60)[1].startswith(reply.text)
            assert w.ledger.outcomes == {Outcome.FAILED: 1}
            await until(lambda: idle(w))

    run(work)


def test_an_error_inside_an_untouched_stream_is_passed_on_once():
    async def work() -> None:
        async with world([Scripted(plan=[Fault("error", 7)])], capabilities=BARE) as w:
            reply = await w.submit(BODY)
            errors = [one for one in reply.events if one != "[DONE]" and "error" in one]
            assert [one["error"]["message"] for one in errors] == ["engine dead"]
            assert w.ledger.outcomes == {Outcome.FAILED: 1}

    run(work)


def test_garbage_does_not_reach_the_client_of_a_stream_that_cannot_go_on():
    async def work() -> None:
        async with world([Scripted(plan=[Fault("garbage", 7)])], capabilities=BARE) as w:
            reply = b"".join(await _raw(w, BODY))
            *_, last, rest = reply.split(b"\n\n")
            assert json.loads(last[6:])["error"]["code"] == "engine_failed"
            assert (rest, reply.count(b'"text":'), b"[DONE]" in reply) == (b"", 7, False)
            assert w.ledger.outcomes == {Outcome.FAILED: 1}

    run(work)


async def _raw(w, body):
    from relay_world import requested

    answer_ = await w.relay.serve(requested(body))
    return [part async for part in answer_]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["503", "busy"])
@pytest.mark.parametrize("sends_ids", [True, False])
def test_a_full_engine_is_no_failure_and_the_request_keeps_its_place(how, sends_ids):
    """An engine reports that it is full by its status, or with 200 and an error in the stream, as vLLM does."""

    async def work() -> None:
        async with world([Scripted(plan=[Fault(how)] * 3, sends_ids=sends_ids)]) as w:
            reply = await w.submit(BODY)
            assert reply.text == answer(encode("p 60"), 60)[1]
            assert w.fleet.faults == []
            assert len(w.engines[0].seen) == 4
            assert w.relay.retry_budget.used == 0

    run(work)


@pytest.mark.parametrize("how", ["503", "429", "busy"])
def test_an_engine_full_for_too_long_is_reported(how):
    from lengthwise.gateway.config import Order

    async def work() -> None:
        order, admission = Order(max_wait_s=0.1), Admission(no_engine_s=0.1)
        async with world([Scripted(plan=[Fault(how)] * 100)], order=order, admission=admission) as w:
            reply = await w.submit(BODY)
            assert reply.status == (429 if how == "429" else 503)
            assert json.loads(reply.body)["error"]["code"] == "overloaded"
            assert reply.headers[b"retry-after"] == b"1"
            await until(lambda: idle(w))

    run(work)


def test_a_request_that_kills_engines_is_not_handed_to_all_of_them():
    async def work() -> None:
        engines = [Scripted(plan=[Fault("die", 12)] * 9) for _ in range(6)]
        async with world(engines) as w:
            reply = await w.submit(BODY)
            assert reply.events[-1]["error"]["code"] == "engine_failed"
            assert sum(len(engine.seen) for engine in engines) == 3

    run(work)


def test_retries_are_bounded_by_their_budget():
    async def work() -> None:
        engines = [Scripted(plan=[Fault("500")] * 500) for _ in range(2)]
        async with world(engines, resilience=ResilienceConfig(retry_share=0.1), cap=100) as w:
            replies = await asyncio.gather(*(w.submit(BODY) for _ in range(100)))
            assert all(reply.status == 502 for reply in replies)
            assert all(reply.headers[b"retry-after"] == b"1" for reply in replies)
            tried = sum(len(engine.seen) for engine in engines)
            assert 100 < tried <= 100 + 10 + 0.1 * 100
            await until(lambda: idle(w))

    run(work)


def test_a_reload_changes_the_budget_of_retries():
    async def work() -> None:
        engines = [Scripted(plan=[Fault("500")] * 500) for _ in range(2)]
        async with world(engines, resilience=ResilienceConfig(retry_share=1.0), cap=100) as w:
            w.relay.configure(replace(w.relay.config, resilience=ResilienceConfig(retry_share=0.0)))
            await asyncio.gather(*(w.submit(BODY) for _ in range(100)))
            assert 100 < sum(len(engine.seen) for engine in engines) <= 100 + 10, "only what was saved before"

    run(work)


class WithoutJson(Scripted):
    """Answers 200 with a body that is no JSON object."""

    def _complete(self, writer, status, data) -> None:
        body = self.end.encode()
        writer.write(b"HTTP/1.1 200 X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body))
        writer.write(body)


@pytest.mark.parametrize("body", ["", "{", "[1]", "<html></html>", '{"a":' + "[" * 100_000])
def test_a_whole_answer_that_is_no_json_is_an_error_of_the_engine(body):
    async def work() -> None:
        async with world([WithoutJson(end=body), Scripted()], capabilities=BARE) as w:
            reply = await w.submit(BODY | {"stream": False})
            assert (reply.status, json.loads(reply.body)["choices"][0]["text"]) == (200, answer(encode("p 60"), 60)[1])
            assert w.fleet.faults == [("w0", "report")], "its peer has served the request"
        async with world([WithoutJson(end=body)], capabilities=BARE) as w:
            reply = await w.submit(BODY | {"stream": False})
            reported = json.loads(reply.body)["error"]
            assert (reply.status, reported["code"], reply.headers[b"retry-after"]) == (502, "engine_failed", b"1")
            assert "must be a JSON object" in reported["message"]
            assert w.ledger.outcomes == {Outcome.FAILED: 1}
            assert not w.ledger.tokens_of, "nothing is charged"

    run(work)
