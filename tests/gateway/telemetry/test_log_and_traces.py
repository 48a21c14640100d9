"""Log lines and spans: what they report, and what they never report."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from dataclasses import dataclass, field

import pytest
from relay_world import pause
from traced_requests import request, run

from lengthwise.gateway.config import Engine, GatewayConfig, Listen
from lengthwise.gateway.request import Outcome, Refusal
from lengthwise.gateway.telemetry import Telemetry, Tracing, json_lines
from lengthwise.gateway.telemetry.events import EventLog
from lengthwise.gateway.telemetry.journal import Row
from lengthwise.schema.errors import MissingExtraError

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


@pytest.fixture
def lines():
    stream = io.StringIO()
    handler = json_lines(stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    for name in ("lengthwise.gateway", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.removeHandler(handler)
        logger.propagate = True
        logger.setLevel(logging.NOTSET)


def telemetry(**listen) -> Telemetry:
    return Telemetry(GatewayConfig(engines=(Engine("http://e:1"),), listen=Listen(**listen)), lambda: 5.0)


def test_a_request_is_one_line_of_json(lines) -> None:
    t, q = telemetry(), request(3, 1.0)
    t.on_admission(q)
    run(t, q, 2.0, 4, 0.5)
    (reported,) = lines()
    assert reported["event"] == "request"
    assert reported["level"] == "info"
    assert (reported["id"], reported["outcome"], reported["output_tokens"], reported["jct_s"]) == (
        3,
        "finished",
        4,
        3.0,
    )
    assert reported["time"].endswith("Z")


@pytest.mark.parametrize(
    ("outcome", "detail", "cause"),
    [
        (Outcome.FAILED, "The engine failed: http 500: SECRET", "The engine failed: http 500"),
        (Outcome.FAILED, "the engine refused to go on: SECRET", "the engine refused to go on"),
        (Outcome.REJECTED, "SECRET", None),
        (Outcome.CLIENT_GONE, "while it waited", "while it waited"),
    ],
)
def test_engine_messages_are_not_logged(lines, outcome, detail, cause) -> None:
    t, q = telemetry(), request(1)
    t.on_admission(q)
    t.on_end(q, outcome, 1.0, detail)
    (reported,) = lines()
    assert reported.get("cause") == cause
    assert "SECRET" not in json.dumps(reported)


def test_the_servers_own_lines_are_json_too(lines) -> None:
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    (reported,) = lines()
    assert (reported["logger"], reported["event"]) == ("uvicorn.error", "Invalid HTTP request received.")


def test_a_flood_of_failures_is_counted_but_not_logged(lines) -> None:
    now_s = [5.0]
    log = EventLog(lambda: now_s[0])
    t, q = telemetry(), request(1)
    rows: list[Row] = []
    t.timelines.subscribe(rows.append)
    t.on_admission(q)
    t.on_end(q, Outcome.FAILED, 1.0, "The engine failed: http 500")
    for _ in range(999):
        log.log_row(rows[0])
    assert len(lines()) == 1 + 50
    now_s[0] = 6.0
    log.log_row(rows[0])
    more, last = lines()[-2:]
    assert (more["event"], more["level"], more["requests"]) == ("failed_more", "warning", 949)
    assert last["event"] == "request"


def test_a_flood_of_refusals_is_counted_but_not_logged(lines) -> None:
    t = telemetry()
    for _ in range(1000):
        t.refused("rate", Refusal(429, "rate", "slow down"), 0, "m")
    assert len(lines()) == 50
    assert t.metrics.refusals["rate"] == 1000


@dataclass
class ClientRequest:
    headers: list[tuple[str, str]] = field(default_factory=list)
    arrival_s: float = 1.0


@pytest.fixture
def spans():
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    tracing = Tracing("http://nobody:4318", lambda: 9.0, exporter=exporter, epoch=lambda: 1009.0)
    return tracing, lambda: (tracing.close(), exporter.get_finished_spans())[1]


def test_a_span_goes_on_with_the_clients_trace_and_into_the_engine(spans) -> None:
    tracing, finished = spans
    requested = ClientRequest([("traceparent", f"00-{TRACE}-{PARENT}-01"), ("Accept", "x"), ("tracestate", "a=b")])

    async def inner(client_request: ClientRequest) -> str:
        q = request(7, 1.0)
        tracing.on_admission(q)
        run(tracing, q, 2.0, 3, 0.5)
        return "succeeded"

    assert asyncio.run(tracing.traced(inner)(requested)) == "succeeded"
    (span,) = finished()
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    onward = dict(requested.headers)
    assert onward["traceparent"] == f"00-{TRACE}-{span.context.span_id:016x}-01"
    assert (onward["Accept"], onward["tracestate"]) == ("x", "a=b")
    assert (span.start_time, span.end_time) == (1001 * 10**9, 1003.5 * 10**9)
    assert [event.name for event in span.events] == ["dispatched", "first token"]
    assert span.attributes["gen_ai.usage.output_tokens"] == 3
    assert span.status.is_ok is True or span.status.status_code.name == "UNSET"


def test_a_refused_request_has_a_span_that_failed(spans) -> None:
    tracing, finished = spans

    async def inner(client_request: ClientRequest) -> None:
        raise ValueError("SECRET")

    with pytest.raises(ValueError, match="SECRET"):
        asyncio.run(tracing.traced(inner)(ClientRequest()))
    (span,) = finished()
    assert span.status.status_code.name == "ERROR"
    assert "SECRET" not in span.to_json()


def test_a_missing_extra_is_an_error_only_if_tracing_is_requested(monkeypatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    assert telemetry().tracing is None
    with pytest.raises(MissingExtraError, match="tracing"):
        telemetry(trace="http://collector:4318")


def test_it_begins_and_ends_without_a_trace_of_tasks(tmp_path) -> None:
    async def go() -> int:
        async with telemetry(journal=str(tmp_path / "j.jsonl")) as t:
            q = request(1)
            t.on_admission(q)
            run(t, q, 0.0, 2, 0.1)
            await pause(0.3)
            assert t.metrics.lag_s.total >= 1
        assert len(asyncio.all_tasks()) == 1
        return t.journal.written

    assert asyncio.run(go()) == 1
