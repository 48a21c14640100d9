"""Traces whose requests share prefixes or wait for others."""

from __future__ import annotations

import io
import json
from collections import OrderedDict
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lengthwise.predict import samples_of
from lengthwise.schema.errors import TraceError
from lengthwise.schema.workload import UNCAPPED
from lengthwise.workload import detect, read
from lengthwise.workload.session_rows import Recorded, recorded_calls, workload_of


def put(folder: Path, name: str, *rows: dict) -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def row(at_ms: float | None, prompt: int, output: int, **more) -> dict:
    times = {} if at_ms is None else {"timestamp": at_ms}
    return times | {"input_length": prompt, "output_length": output} | more


def parents(w) -> list[list[int]]:
    return [p.tolist() for p in np.split(w.after.parent, w.after.start[1:-1])]


def lru_hits(w, capacity: int) -> float:
    """Return the share of block references that a cache of ``capacity`` blocks serves to requests one by one.

    Only full blocks are found, the last token of a prompt is computed, and the tail of a prompt is evicted first.
    """
    start, ids, size = w.prefixes.start, w.prefixes.block_ids, w.prefixes.block_tokens
    free: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for i, prompt in enumerate(w.prompt_tokens.tolist()):
        blocks = ids[start[i] : start[i + 1]].tolist()
        full, k = blocks[: prompt // size], 0
        while k < min(len(full), (prompt - 1) // size) and full[k] in free:
            k += 1
        hits += k
        for block in full[:k]:
            free.pop(block)
        while free and len(free) + len(blocks) > capacity:
            free.popitem(last=False)
        for block in reversed(full):
            free.pop(block, None)
            free[block] = None
        while len(free) > capacity:
            free.popitem(last=False)
    return hits / len(ids)


def test_hit_rates_of_the_conversation_trace(shared):
    """The rates of a serial cache of this many blocks of 512 tokens, by Mooncake's published trace."""
    w = read(shared("data/traces/mooncake_conversation_trace.jsonl.gz"))
    expected = {500: 0.042, 1000: 0.045, 2000: 0.055, 5000: 0.119, 10_000: 0.215, 20_000: 0.294, 50_000: 0.356}
    found = {capacity: lru_hits(w, capacity) for capacity in (*expected, 10**9)}
    assert found == pytest.approx(expected | {10**9: 0.366}, abs=0.001)


def test_agentic_rows_wait_for_others(tmp_path):
    rows = (
        row(0, 600, 9, request_id="a", session_id="s", hash_ids=[1, 2]),
        row(500, 700, 9, request_id="b", session_id="t", hash_ids=[1, 3]),
        row(None, 900, 9, request_id="c", session_id="s", hash_ids=[1, 4], wait_for=["a"], delay=20, tool_wait_ms=5),
        row(900, 900, 9, request_id="d", session_id="s", hash_ids=[1, 4], wait_for=["a"], delay=1500.5),
        row(None, 950, 9, request_id="e", session_id="s", hash_ids=[1, 4], wait_for=["c", "d"]),
    )
    w = read(put(tmp_path, "a.jsonl", *rows))
    assert w.arrival_s.tolist() == [0, 0, 0, 0, 0.5]  # children have the arrival of their parents
    assert parents(w) == [[], [0], [0], [1, 2], []]
    assert w.after.delay_s.tolist() == [0, 0.025, 1.5005, 0, 0]
    assert w.extra["session"].tolist() == [0, 0, 0, 0, 1]
    assert w.extra["turn"].tolist() == [0, 1, 1, 2, 0]
    assert w.prefixes.block_ids.tolist() == [1, 2, 1, 4, 1, 4, 1, 4, 1, 3]
    assert (w.prefixes.turns == -1).all()


def test_agentic_rows_without_a_session_join_that_of_the_row_that_they_wait_for(tmp_path):
    rows = (
        row(0, 600, 9, request_id="a", hash_ids=[1, 2]),
        row(10, 700, 9, request_id="b", hash_ids=[1, 3]),
        row(None, 900, 8, request_id="c", hash_ids=[1, 2, 4][:2], wait_for=["a"], delay=20),
        row(None, 950, 7, request_id="d", hash_ids=[1, 4], wait_for=["b", "c"]),
    )
    w = read(put(tmp_path, "a.jsonl", *rows))
    session, turn = w.extra["session"], w.extra["turn"]
    a, c, b, d = (int(np.flatnonzero(w.prompt_tokens == one)[0]) for one in (600, 900, 700, 950))
    assert session[a] == session[c] == session[d] != session[b]
    assert turn[[a, c, d, b]].tolist() == [0, 1, 2, 0]
    assert (w.prefixes.turns == -1).all()  # hash_ids say what prompts share
    assert w.previous_turn[[a, c, d, b]].tolist() == [-1, a, c, -1]
    earlier = samples_of(w).prompts.earlier_tokens
    assert earlier[[c, d], -1].tolist() == [9, 8]
    assert earlier[d, -2] == 9


def test_rows_with_a_delay_follow_the_row_before_in_their_session(tmp_path):
    rows = (
        row(0, 100, 10, session_id=7, priority=3, tenant=1),
        row(None, 150, 10, session_id=7, delay=1000, priority=2, tenant=1),
        row(2000, 80, 10, session_id=9, priority=1, tenant=0),
        row(None, 155, 10, session_id=7, priority=0, tenant=1),
    )
    w = read(put(tmp_path, "a.jsonl", *rows), time_scale=2)
    assert w.extra["session"].tolist() == [7, 7, 7, 9]
    assert w.arrival_s.tolist() == [0, 0, 0, 4]
    assert parents(w) == [[], [0], [1], []]
    assert w.after.delay_s.tolist() == [0, 1, 0, 0]
    # The third prompt does not hold the second prompt and output: its context was shortened.
    assert w.prefixes.turns.tolist() == [-1, 0, -1, -1]
    assert (w.priority.tolist(), w.tenant.tolist()) == ([3, 2, 0, 1], [1, 1, 1, 0])


@pytest.mark.parametrize("more", [{}, {"session_id": "s", "delay": 0}], ids=["rows", "agentic"])
@pytest.mark.parametrize("line", [1, 2])
@pytest.mark.parametrize(
    "ids", [[1, "a"], ["1"], [1.0], [1.5], [None], [True], [[1]], [-1], [2**63], "12", 7, {"a": 1}]
)
def test_hash_ids_of_a_wrong_type_name_their_line(tmp_path, ids, line, more):
    rows = [row(0, 600, 5, hash_ids=[1, 2], **more), row(0, 600, 5, hash_ids=[1], **more)]
    rows[line - 1]["hash_ids"] = ids
    with pytest.raises(TraceError, match=f"a.jsonl, line {line}: hash_ids must be a list of whole numbers from 0"):
        read(put(tmp_path, "a.jsonl", *rows))


@pytest.mark.parametrize("first", [{}, {"hash_ids": None, "priority": None, "session_id": None}])
def test_columns_that_the_first_row_has_not_are_read(tmp_path, first):
    later = {"hash_ids": [1, 2], "priority": 3, "session_id": "s", "max_tokens": 9, "tenant": "t"}
    w = read(put(tmp_path, "a.jsonl", row(0, 600, 5, **first), row(1, 600, 5, **later)))
    assert w.prefixes.start.tolist() == [0, 0, 2]
    assert (w.priority.tolist(), w.extra["session"].tolist()) == ([0, 3], [-1, 0])
    assert w.max_tokens[1] == 9
    assert w.tenant[0] != w.tenant[1]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [row(0, 600, 5, hash_ids=[1, 2, 3])],
            "line 1: .* has at most 2 blocks of 512 tokens \\(block_size in each row\\); it has 3 hash_ids",
        ),
        ([row(0, 600, 5, hash_ids=[1]), row(1, 600, 5, hash_ids=[1, -2])], "line 2: hash_ids must be a list of whole"),
        (
            [{"timestamp": 0, "hash_ids": [1], "output_length": 4}, row(1, 5, 5)],
            "line 1: the format mooncake needs timestamp, .*; the file has timestamp, hash_ids",
        ),
        ([{"hash_ids": [1, 2]}], "line 1: the format mooncake needs .*; the file has hash_ids"),
        (
            [row(0, 9, 5, session_id="a"), row(4, 9, 5, session_id="b", delay=3)],
            "line 2: delay and tool_wait_ms follow an earlier request, and this one waits for none",
        ),
        ([row(0, 9, 5, request_id="a", wait_for=[], tool_wait_ms=3)], "line 1: delay and tool_wait_ms follow"),
        (
            [row(0, 600, 5, hash_ids=[1]), {"timestamp": 1, "hash_ids": [1], "output_length": 4}],
            "line 2: input_length must be a whole number of tokens from 1 up; it is missing",
        ),
        ([row(0, 64, 5, hash_ids=[1], block_size=0)], "line 1: block_size must be a number of tokens from 1 up"),
        ([row(0, 64, 5, hash_ids=[1], block_size=16), row(0, 64, 5, hash_ids=[1], block_size=8)], "must not vary"),
        ([row(0, 9, 5, delay=0), row(1, 600, 5, hash_ids=[1, 2, 3])], "line 2: .* at most 2 blocks"),
        (
            [row(0, 9, 5, priority=1), row(1, 9, 5, priority="high")],
            "line 2: priority must be a whole number; it is 'h",
        ),
        ([row(0, 9, 5, priority="high", delay=0)], "line 1: priority must be a whole number; it is 'high'"),
        ([row(0, 9, 5), row(1, 9, 5, block_size="16")], "line 2: block_size must be a number of tokens"),
        (
            [row(0, 9, 5, request_id="a"), row(0, 9, 5, request_id="b", wait_for=["x"])],
            "line 2: the request waits for 'x', which is no request_id of this file",
        ),
        (
            [row(0, 9, 5, request_id="a", wait_for=["b"]), row(0, 9, 5, request_id="b")],
            "line 1: the request waits for 'b', which must come before it in the file",
        ),
        (
            [row(0, 9, 5, request_id="a", wait_for=[]), row(0, 9, 5, request_id="a")],
            "line 2: request_id must differ from row to row; 'a' occurs twice",
        ),
        ([row(0, 9, 5, request_id="a", wait_for="b")], "line 1: wait_for must be a list of request_id; it is 'b'"),
        (
            [
                row(0, 90, 5, request_id="a", wait_for=[]),
                row(None, 95, 5, request_id="b", wait_for=["a"], previous_turn="a"),
            ],
            "line 2: input_length must exceed the 95 tokens of the prompt and output of the turn before it; it is 95",
        ),
        (
            [row(0, 9, 5, request_id="a", wait_for=[]), row(0, 99, 5, request_id="b", previous_turn="a")],
            r"a later turn must wait for the turn before it; Workload.after does not give request 1 the parent 0",
        ),
        ([row(0, 9, 5, delay=-3)], "line 1: delay must be milliseconds from 0 up; it is -3"),
        ([row(None, 9, 5, delay=3)], "no known format"),
        (
            [row(0, 9, 5, session_id="a", delay=0), row(None, 9, 5, session_id="b", delay=3)],
            "line 2: timestamp must be .* where a row follows no other by session_id or wait_for; it is missing",
        ),
        ([row(0, 9, 5, delay=0), row(-1, 9, 5)], "line 2: timestamp must be a time from 0 up .*; it is -1"),
        ([row(5, 9, 5, delay=0), row(1, 9, 5)], "line 2: arrives before the row above it; order the rows"),
    ],
)
def test_rows_that_contradict_themselves(tmp_path, rows, message):
    path = put(tmp_path, "m.jsonl", *rows)
    with pytest.raises(TraceError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_unordered_sessions_can_be_sorted(tmp_path):
    rows = (row(5000, 9, 5, session_id=0), row(None, 99, 5, session_id=0, delay=1), row(1000, 8, 5, session_id=1))
    w = read(put(tmp_path, "m.jsonl", *rows), sort=True)
    assert w.prompt_tokens.tolist() == [8, 9, 99]
    assert w.arrival_s.tolist() == [0, 4, 4]
    assert parents(w) == [[], [], [1]]


def conversation(*texts: str) -> list[dict]:
    return [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(texts)]


def test_conversations_become_turns(tmp_path):
    lmsys = (
        {
            "conversation_id": "x",
            "model": "m",
            "tstamp": 30.5,
            "conversation": conversation("a b", "c d e", "f", "g h"),
        },
        {"conversation_id": "y", "model": "m", "tstamp": 10.0, "conversation": conversation("a", "b")},
    )
    path = put(tmp_path, "l.jsonl", *lmsys)
    w = read(path, "sharegpt_turns", count_tokens=lambda text: len(text.split()))
    assert w.arrival_s.tolist() == [0, 20.5, 20.5]
    assert w.prompt_tokens.tolist() == [1, 2, 6]
    assert parents(w) == [[], [], [1]]
    assert w.prefixes.turns.tolist() == [-1, -1, 1]
    assert w.extra["session"].tolist() == [1, 0, 0]
    assert w.extra["turn"].tolist() == [0, 0, 1]
    assert w.extra["model"].tolist() == ["m", "m", "m"]
    single = read(path, count_tokens=lambda text: len(text.split()))
    assert (single.after, single.prefixes, single.arrival_s.tolist()) == (None, None, [0, 0, 0])


def span(start_s: float, end_s: float, prompt: int, output: int, trace: str = "t", **attributes) -> dict:
    given = {"gen_ai.usage.input_tokens": prompt, "gen_ai.usage.output_tokens": output} | attributes
    kinds = {int: lambda v: {"intValue": str(v)}, list: lambda v: {"arrayValue": {"values": v}}}
    values = [{"key": k, "value": kinds.get(type(v), lambda v: {"stringValue": v})(v)} for k, v in given.items()]
    times = {"startTimeUnixNano": str(int(start_s * 1e9)), "endTimeUnixNano": str(int(end_s * 1e9))}
    return {"traceId": trace, "spanId": "s", "name": "chat", "attributes": values} | times


def otlp(*spans: dict) -> dict:
    return {"resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {}, "spans": list(spans)}]}]}


def test_spans_of_a_trace_wait_for_those_that_ended_before(tmp_path):
    lines = (
        otlp(span(100, 102, 50, 10), span(101, 103, 9, 9, trace="other")),
        # Two parallel calls after the first, and one that joins them.
        otlp(span(103, 105, 70, 5), span(103.5, 104, 80, 5), span(106, 107, 75, 5)),
        otlp(span(102, 103, 500, 5, **{"gen_ai.operation.name": "execute_tool"}), span(108, 109, 20, 0)),
    )
    w = read(put(tmp_path, "spans.jsonl", *lines))
    assert w.prompt_tokens.tolist() == [50, 70, 80, 75, 9]
    assert w.arrival_s.tolist() == [0, 0, 0, 0, 1]
    assert parents(w) == [[], [0], [0], [0, 1, 2], []]
    assert w.after.delay_s.tolist() == [0, 1, 1.5, 1, 0]
    assert w.prefixes.turns.tolist() == [-1, 0, 0, 0, -1]


@pytest.mark.parametrize("as_text", [True, False])
def test_a_longer_prompt_of_other_messages_continues_nothing(tmp_path, as_text):
    def messages(*texts: str) -> dict:
        found = [{"role": "user", "parts": [{"type": "text", "content": text}]} for text in texts]
        return {"gen_ai.input.messages": json.dumps(found) if as_text else found}

    calls = (
        span(100, 101, 50, 10, **messages("plan")),
        span(102, 103, 70, 5, **messages("plan", "more")),
        span(104, 105, 90, 5, **messages("summarize")),
        span(106, 107, 110, 5),
        span(108, 109, 120, 5, **{"gen_ai.input.messages": '[{"role": "us'}),
    )
    w = read(put(tmp_path, "spans.jsonl", otlp(*calls)))
    assert parents(w) == [[], [0], [1], [2], [3]]
    assert w.prefixes.turns.tolist() == [-1, 0, -1, 2, 3]  # without complete messages the lengths decide


def test_single_spans_and_conversation_ids(tmp_path):
    def one(start: str, end: str, prompt: int, conversation: str, trace: str) -> dict:
        attributes = {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": "m",
            "gen_ai.conversation.id": conversation,
            "gen_ai.usage.prompt_tokens": prompt,
            "gen_ai.usage.completion_tokens": 4,
        }
        return {
            "name": "chat",
            "context": {"trace_id": trace, "span_id": "0x1"},
            "start_time": f"2026-01-01T00:00:{start}Z",
            "end_time": f"2026-01-01T00:00:{end}Z",
            "attributes": attributes,
        }

    rows = (one("00.000000", "01.500000", 10, "c", "t1"), one("04.000000", "05.000000", 30, "c", "t2"))
    w = read(put(tmp_path, "spans.jsonl", *rows))
    assert parents(w) == [[], [0]]
    assert w.after.delay_s[1] == pytest.approx(2.5)
    assert w.extra["model"].tolist() == ["m", "m"]


def as_python(one: dict) -> dict:
    """The span as the console exporter of Python's SDK writes it."""
    times = {name: date(one[f"{name}TimeUnixNano"]) for name in ("start", "end")}
    attributes = {a["key"]: int(v) if k == "intValue" else v for a in one["attributes"] for k, v in a["value"].items()}
    context = {"trace_id": one["traceId"], "span_id": "0x1", "trace_state": "[]"}
    return {"name": "chat", "context": context, "attributes": attributes} | {f"{n}_time": t for n, t in times.items()}


def as_go(one: dict) -> dict:
    """The span as Go's stdouttrace writes it, with nanoseconds."""
    times = {f"{name.title()}Time": date(one[f"{name}TimeUnixNano"]) for name in ("start", "end")}
    attributes = [
        {"Key": name, "Value": {"Type": "INT64" if type(value) is int else "STRING", "Value": value}}
        for name, value in as_python(one)["attributes"].items()
    ]
    return {"Name": "chat", "SpanContext": {"TraceID": one["traceId"], "SpanID": "1"}, "Attributes": attributes} | times


def date(nanoseconds: str) -> str:
    seconds, rest = divmod(int(nanoseconds), 10**9)
    return datetime.fromtimestamp(seconds, UTC).strftime(f"%Y-%m-%dT%H:%M:%S.{rest:09}Z")


CALLS = (
    span(100, 102, 50, 10, **{"gen_ai.request.model": "m", "gen_ai.request.max_tokens": 20}),
    span(103.25, 105, 70, 5, **{"gen_ai.operation.name": "chat"}),
    span(104, 104.5, 9, 9, trace="u"),
    span(104, 104.5, 9, 9, trace="u", **{"gen_ai.operation.name": "execute_tool"}),
)
FORMS = {
    "a span on each line": [json.dumps(one) for one in CALLS],
    "resources with metrics and logs between": [
        json.dumps(otlp(*CALLS[:2])), '{"resourceMetrics": []}', '{"resourceLogs": []}', "{}",
        json.dumps({"resourceSpans": [{}, {"scopeSpans": [{"scope": {}}, {"spans": CALLS[2:]}]}]}),
    ],
    "a resource on each line (Java)": [json.dumps(one) for one in otlp(*CALLS)["resourceSpans"]],
    "one object on several lines": [json.dumps(otlp(*CALLS), indent=2)],
    "a list of spans": [json.dumps(CALLS, indent=1)],
    "Python's console": [json.dumps(as_python(one), indent=4) for one in CALLS],
    "Go's stdout": [json.dumps(as_go(one)) for one in CALLS],
    "Go's stdout on several lines": [json.dumps(as_go(one), indent="\t") for one in CALLS],
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_spans_are_the_same_in_every_form(tmp_path, form):
    expected = read(put(tmp_path, "otlp.jsonl", otlp(*CALLS)))
    (tmp_path / "spans.json").write_text("\n".join(FORMS[form]) + "\n")
    assert detect(tmp_path / "spans.json") == "otel"
    found = read(tmp_path / "spans.json")
    assert found.prompt_tokens.tolist() == expected.prompt_tokens.tolist() == [50, 70, 9]
    assert found.max_tokens.tolist() == expected.max_tokens.tolist() == [20, UNCAPPED, UNCAPPED]
    assert found.after.delay_s.tolist() == expected.after.delay_s.tolist() == [0, 1.25, 0]
    assert found.extra["model"].tolist() == ["m", "", ""]
    for column in (lambda w: w.arrival_s, lambda w: w.prefixes.turns, lambda w: w.extra["session"]):
        assert column(found).tolist() == column(expected).tolist()


def test_the_exporters_of_the_python_sdk_write_the_same_requests(tmp_path):
    trace = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    encoder = pytest.importorskip("opentelemetry.exporter.otlp.proto.common.trace_encoder")
    from google.protobuf.json_format import MessageToJson
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    console, spans = io.StringIO(), InMemorySpanExporter()
    provider = trace.TracerProvider()
    for exporter in (export.ConsoleSpanExporter(out=console), spans):
        provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    for at_s, prompt in ((1_700_000_000, 50), (1_700_000_003, 90)):
        attributes = {"gen_ai.conversation.id": "c", "gen_ai.request.max_tokens": 32, "gen_ai.operation.name": "chat"}
        one = provider.get_tracer("test").start_span("chat m", attributes=attributes, start_time=at_s * 10**9)
        one.set_attributes({"gen_ai.usage.input_tokens": prompt, "gen_ai.usage.output_tokens": 8})
        one.end(at_s * 10**9 + 5 * 10**8)
    message = encoder.encode_spans(spans.get_finished_spans())
    (tmp_path / "console.txt").write_text(console.getvalue())
    (tmp_path / "otlp.json").write_text(MessageToJson(message))
    (tmp_path / "lines.jsonl").write_text(MessageToJson(message, indent=None) + "\n")
    for name in ("console.txt", "otlp.json", "lines.jsonl"):
        w = read(tmp_path / name)
        assert (w.prompt_tokens.tolist(), w.output_tokens.tolist(), w.max_tokens.tolist()) == (
            [50, 90],
            [8, 8],
            [32, 32],
        )
        assert parents(w) == [[], [0]]
        assert w.after.delay_s.tolist() == [0, 2.5]
        assert w.prefixes.turns.tolist() == [-1, 0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (otlp(), "no span in it has gen_ai.usage.input_tokens and gen_ai.usage.output_tokens of at least 1"),
        ({"resourceSpans": [{}]}, "no span in it has gen_ai.usage.input_tokens"),
        (otlp({"traceId": "t"}), "line 1: must hold spans as OpenTelemetry writes them .KeyError: 'startTimeUnixNano'"),
        (otlp(span(1, 2, 3, 4) | {"startTimeUnixNano": "x"}), "line 1: must hold spans .*ValueError"),
    ],
)
def test_files_without_spans(tmp_path, line, message):
    with pytest.raises(TraceError, match=message):
        read(put(tmp_path, "spans.jsonl", line))


HEAD = {"format": "lengthwise-journal", "version": 1, "clock_s": 100.0, "unix_s": 1_000_100.0}


def served(arrival_s: float, finished_s: float, prompt: int, output: int, **more) -> dict:
    times = {"arrival_s": arrival_s, "finished_s": finished_s}
    return times | {"prompt_tokens": prompt, "output_tokens": output, "model": "m", "tenant": "t", "priority": 0} | more


def test_a_gateways_journal_gives_sessions_and_shared_prefixes(tmp_path):
    """Rows come in order of finish; the third request continues the first, the fourth only begins like it."""
    one, two = [[64, 5], [128, 6]], [[66, 5], [132, 6], [198, 8]]
    path = put(
        tmp_path, "day.jsonl", HEAD,
        served(1.0, 2.0, 150, 20, session=7, prefix=one),
        served(0.5, 3.0, 70, 10, prefix=[[60, 5], [70, 9]]),
        served(4.5, 5.0, 400, 5, session=7, prefix=[*one, [192, 8], [400, 11]]),
        served(5.0, 6.0, 500, 5, prefix=two),
        served(6.0, 7.0, 500, 0, prefix=two),
        HEAD | {"unix_s": 1_001_100.0},
        served(1.0, 2.0, 150, 20, session=8),
    )  # fmt: skip
    path.write_text(path.read_text() + '{"arrival_s": 1')
    w = read(path)
    assert w.prompt_tokens.tolist() == [70, 150, 400, 500, 150]
    assert w.arrival_s.tolist() == [0.0, 0.5, 0.5, 4.5, 1000.5]
    assert parents(w) == [[], [], [1], [], []]
    assert w.after.delay_s[2] == pytest.approx(2.5)
    assert w.prefixes.turns.tolist() == [-1, -1, 1, -1, -1]
    blocks = [ids.tolist() for ids in np.split(w.prefixes.block_ids, w.prefixes.start[1:-1])]
    assert w.prefixes.block_tokens == 16
    assert [len(ids) for ids in blocks] == [3, 8, 0, 12, 0], "60 tokens of the first hash, as its first request says"
    assert blocks[3][:8] == blocks[1]
    assert blocks[1][:3] == blocks[0]
    assert w.extra["turn"].tolist() == [0, 0, 1, 0, 0]
    assert set(w.extra["model"]) == {"m"}
    assert w.name == "day"


def test_a_prompt_that_does_not_begin_like_the_turn_before_only_waits_for_it(tmp_path):
    rows = [
        served(0.0, 1.0, 100, 10, session=3, prefix=[[64, 5]]),
        served(2.0, 3.0, 200, 10, session=3, prefix=[[64, 6]]),
    ]
    w = read(put(tmp_path, "j.jsonl", HEAD, *rows))
    assert parents(w) == [[], [0]]
    assert w.prefixes is None


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12), st.floats(0.2, 1.5)), min_size=1, max_size=12))
def test_prompts_of_a_journal_share_what_their_texts_share(prompts):
    """Of prompts that repeat one of four texts, cut somewhere; estimates of tokens differ from prompt to prompt."""
    requests = [
        Recorded(float(i), float(i), int(64 * size * scale) + 1, 1, 0,
                 tuple((int(64 * at * scale), 1000 * text + at) for at in range(1, size + 1)))
        for i, (text, size, scale) in enumerate(prompts)
    ]  # fmt: skip
    calls = recorded_calls(requests)
    for i, (text, _, _) in enumerate(prompts):
        assert len(calls[i].block_ids) <= calls[i].prompt_tokens // 16
        for j in range(i):
            common = sum(a == b for a, b in zip(calls[i].block_ids, calls[j].block_ids, strict=False))
            if text != prompts[j][0]:
                assert common == 0
            else:
                assert common == min(len(calls[i].block_ids), len(calls[j].block_ids))
    workload = workload_of(None, calls, name="w", block_tokens=16)
    assert len(workload) == len(prompts)


def test_a_journal_without_output_is_refused(tmp_path):
    with pytest.raises(TraceError, match="no request in it has an output"):
        read(put(tmp_path, "j.jsonl", HEAD, served(0.0, 1.0, 10, 0)))
