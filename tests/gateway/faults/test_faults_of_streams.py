"""Engines whose streams are odd: events that are no JSON, bytes that come one by one, usage reported twice."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import asynccontextmanager

import aiohttp
import pytest
from fault_world import Report, ask, body, config_of, engine
from relay_world import Ledger, run

from lengthwise.gateway.request import Outcome
from lengthwise.gateway.serve import Gateway
from lengthwise.testing.engine_server import LAST, Fault, FaultPlan

TOKENS = 40
USAGE = {"stream_options": {"include_usage": True}}


@asynccontextmanager
async def met(faults: Sequence[Fault]):
    """Sends requests to a gateway in front of three engines; the engine of the n-th request has the n-th fault."""
    ledger = Ledger()
    async with (
        engine() as one,
        engine() as two,
        engine() as three,
        Gateway(config_of(one, two, three), listeners=(ledger,)) as gateway,
        aiohttp.ClientSession() as session,
    ):
        await gateway.fleet.wait_checked(10.0)
        one.faults = two.faults = three.faults = FaultPlan(incoming=list(faults))

        async def requested(**fields: object) -> Report:
            return await ask(session, gateway.port, {**body(TOKENS), **fields})

        yield requested, ledger


def text_of(report: Report) -> str:
    """Of an answer that came in events, or whole."""
    return report.text if report.raw.startswith(b"data:") else json.loads(report.raw)["choices"][0]["text"]


def usages_of(report: Report) -> list[int]:
    """All usages that were reported."""
    if not report.raw.startswith(b"data:"):
        return [json.loads(report.raw)["usage"]["completion_tokens"]]
    events = [json.loads(one[6:]) for one in report.raw.decode().split("\n\n") if one.startswith("data: {")]
    return [event["usage"]["completion_tokens"] for event in events if event.get("usage")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults",
    [
        [Fault("malformed", 0)],
        [Fault("malformed", 5)],
        [Fault("malformed", LAST)],
        [Fault("close", 5), Fault("malformed", 4)],
        [Fault("malformed", 5), Fault("close", 4)],
        [Fault("malformed", 5), Fault("malformed", 4)],
    ],
    ids=lambda faults: ",".join(f"{one.kind}@{one.after_tokens}" for one in faults),
)
@pytest.mark.parametrize("stream", [True, False])
def test_behind_an_event_that_is_no_json_the_answer_goes_on_elsewhere(faults, stream):
    async def work() -> None:
        async with met(faults) as (requested, ledger):
            fields = {"stream": True, **USAGE} if stream else {"stream": False}
            reported, total = await requested(**fields), await requested(**fields)
        assert reported.complete if stream else reported.status == 200
        assert text_of(reported) == text_of(total)
        assert usages_of(reported) == [TOKENS]
        assert b'"text\n' not in reported.raw
        retried = sum(fault.after_tokens != LAST for fault in faults)
        assert len(ledger.cause) == retried
        assert ledger.outcomes == {Outcome.FINISHED: 2}
        assert ledger.tokens_of == {1: TOKENS, 2: TOKENS}

    run(work)


def test_a_stream_that_no_engine_can_continue_ends_with_an_error_before_the_bad_event():
    async def work() -> None:
        async with met([Fault("malformed", 5)]) as (requested, ledger):
            reported, total = await requested(presence_penalty=0.5), await requested(presence_penalty=0.5)
        *output, error, rest = reported.raw.split(b"\n\n")
        assert total.complete
        assert (len(output) > 0, rest) == (True, b"")
        assert json.loads(error[6:])["error"]["code"] == "engine_failed"
        assert ledger.outcomes == {Outcome.FAILED: 1, Outcome.FINISHED: 1}

    run(work)


@pytest.mark.parametrize("fields", [{}, {"presence_penalty": 0.5}, {"stream": False}])
def test_bytes_that_come_one_by_one_make_the_same_answer(fields):
    """Characters of several bytes, and events, are cut anywhere."""

    async def work() -> None:
        async with met([Fault("split")]) as (requested, ledger):
            reported, total = await requested(**fields), await requested(**fields)
        assert not text_of(reported).isascii()
        assert text_of(reported) == text_of(total)
        assert reported.status == 200
        assert ledger.cause == []
        assert ledger.tokens_of[1] == ledger.tokens_of[2] > 0

    run(work)


@pytest.mark.parametrize(
    ("first", "stream", "penalty"),
    [
        ([], True, 0.0),
        ([], True, 0.5),
        ([], False, 0.0),
        ([Fault("close", 5)], True, 0.0),
        ([Fault("close", 5)], False, 0.0),
    ],
)
def test_usage_that_an_engine_reports_twice_is_counted_once(first, stream, penalty):
    """Events that pass through are reported as often as the engine sends them; the gateway reports its own once."""

    async def work() -> None:
        async with met([*first, Fault("double_usage")]) as (requested, ledger):
            fields = {"stream": True, **USAGE} if stream else {"stream": False}
            reported = await requested(**fields, presence_penalty=penalty)
        assert reported.complete if stream else reported.status == 200
        assert usages_of(reported) == [TOKENS] * (2 if stream and not first else 1)
        assert ledger.tokens_of == {1: TOKENS}
        assert ledger.outcomes == {Outcome.FINISHED: 1}

    run(work)
