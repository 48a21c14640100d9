"""What a request leaves out an engine may fill in: who leaves open what a cut would change is then not cut."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
from relay_world import IDS, FixedWorker, requested, run, until, world
from scripted_engine import Fault, Scripted, answer, encode
from test_relay_cut import EAGER, LONG, cut_often

from lengthwise.gateway.config import Engine
from lengthwise.gateway.fleet.engine_probe import EngineMetadata
from lengthwise.gateway.notices import engine_notices
from lengthwise.gateway.relay.engine_request import fields_left_to_defaults, resume_plan

UNKNOWN = replace(IDS, own_defaults=None)
STATED = {"presence_penalty": 0, "frequency_penalty": 0}


def planned(fields, *, api="completions"):
    body = {"model": "m", "prompt": "p", "stream": True, **fields}
    return resume_plan(requested(body, api=api), can_resume=True, window_tokens=10, preempts=True)


def at(capabilities, kind="vllm"):
    return FixedWorker("w", "http://w", capabilities, None, kind)


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        ({}, {"presence_penalty", "frequency_penalty", "repetition_penalty", "max_tokens"}),
        ({**STATED, "max_tokens": 5}, {"repetition_penalty"}),
        ({**STATED, "max_completion_tokens": 5, "repetition_penalty": 1.0}, set()),
        ({**STATED, "presence_penalty": None, "max_tokens": 5}, {"presence_penalty", "repetition_penalty"}),
    ],
)
def test_what_a_request_leaves_open(fields, left):
    assert fields_left_to_defaults(fields) == left


@pytest.mark.parametrize(
    ("fields", "kind", "cut"),
    [
        ({"max_tokens": 5}, "vllm", False),
        ({**STATED}, "vllm", False),
        ({**STATED, "max_tokens": 5}, "vllm", True),  # it counts a repetition of the prompt as one of the output
        ({**STATED, "max_tokens": 5}, "openai", False),
        ({**STATED, "max_tokens": 5, "repetition_penalty": 1.0}, "openai", True),
    ],
)
def test_with_unknown_defaults_only_fully_specified_requests_are_preempted(fields, kind, cut):
    what = planned(fields)
    assert what.can_preempt_at(at(UNKNOWN, kind)) is cut
    assert what.can_resume_at(at(UNKNOWN, kind)), "it may still fail over"
    assert what.can_preempt_at(at(IDS, kind)), "the engine has none"


def test_a_non_streamed_request_is_read_as_a_stream_only_where_it_may_be_preempted():
    what = planned({"stream": False, "max_tokens": 500})
    assert not what.is_tracked_at(at(UNKNOWN))
    assert what.is_tracked_at(at(IDS))


@pytest.mark.parametrize("stated", [False, True])
def test_through_the_relay_it_is_cut_or_left_alone(stated):
    async def work() -> None:
        engine = Scripted(step_s=0.001)
        async with world([engine], cap=1, order=EAGER, capabilities=UNKNOWN) as w:
            reply = await cut_often(w, LONG | STATED if stated else LONG)
            assert reply.text == answer(encode("long 300"), 300)[1]
            assert (w.ledger.cause.count("preemption") >= 3) is stated
            assert w.scheduler.statistics(0.0).preemptions == w.ledger.cause.count("preemption")

    run(work)


def test_a_stream_fails_over_all_the_same():
    async def work() -> None:
        dies, other = Scripted(plan=[Fault("die", 20)], step_s=0.001), Scripted(step_s=0.001)
        async with world([dies, other], order=EAGER, capabilities=UNKNOWN) as w:
            reply = await asyncio.create_task(w.submit(LONG))
            assert reply.text == answer(encode("long 300"), 300)[1]
            assert w.ledger.cause == ["failed_over"]
            await until(lambda: not other.running)

    run(work)


def test_limited_preemption_is_reported_with_the_reason_and_a_remedy():
    def minded(mode, *, prompted=True, probe=True, **capabilities):
        metadata = EngineMetadata(replace(UNKNOWN, **capabilities), prompted=prompted)
        engine = Engine("http://e", probe=probe)
        worker = SimpleNamespace(
            name="e",
            kind="openai",
            identified=True,
            engine=engine,
            metadata=metadata,
            capabilities=metadata.capabilities,
        )
        return asyncio.run(engine_notices([worker], mode))

    (text,) = minded("isrtf")
    assert 'generation_defaults = "none"' in text
    assert not minded("srtf")
    assert not minded("isrtf", own_defaults=False)
    for lacks in ("token_ids_each", "token_id_prompts"):
        for mode in ("isrtf", "windowed"):
            (text,) = minded(mode, **{lacks: False})
            assert text.startswith("e takes no token ids, or does not return them with each chunk")
            assert text.endswith(f"no request is preempted there, and mode {mode} only orders waiting requests")
    (text,) = minded("isrtf", token_ids_each=False, prompted=False)
    assert "has not reported yet" in text
    (text,) = minded("isrtf", token_ids_each=False, probe=False)
    assert "probe = false" in text
    assert not minded("srtf", token_ids_each=False)
