"""Reads traces in which requests wait for others: Agentic Mooncake, conversations, OpenTelemetry spans, journals."""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from math import isfinite
from typing import Any

import numpy as np

from lengthwise.schema.errors import InputError
from lengthwise.schema.workload import MAX_TENANTS, UNCAPPED, After, SharedPrefixes, Workload, estimated_tokens
from lengthwise.workload.trace_rows import FORMATS, HASHED_TOKENS, Source, row_fault

_USERS = {"human", "user"}
_TOOLS = {"tool", "function", "observation"}
_ASSISTANTS = {"gpt", "assistant", "chatgpt", "bard", "bing", "model"}
RECORDED_TOKENS = 16
"""Block size, in tokens, of the shared prefixes of journals and of traces without block ids: vLLM's default."""


@dataclass
class Call:
    """One request of a trace. Other requests are given by their place in the file, from 0."""

    line: int | None  # in the file, from 1
    arrival_s: float | None  # None: the request has parents
    prompt_tokens: int
    output_tokens: int
    session: str | int
    parents: Sequence[int] = ()  # requests that it waits for
    delay_s: float = 0.0  # from the end of its last parent until it is sent
    block_ids: Sequence[int] = ()  # as in SharedPrefixes
    previous_turn: int = -1  # the request that its prompt continues


def workload_of(
    source: Source | None,
    calls: Sequence[Call],
    *,
    name: str,
    block_tokens: int = RECORDED_TOKENS,
    extra: dict[str, Any] | None = None,
    sort: bool = True,
) -> Workload:
    """Return the workload of these calls, in order of arrival; a child has the arrival of its latest parent.

    The turn of a call is one more than the largest turn of its parents in its session, or without such parents the next
    turn of the session. Without ``sort``, calls without parents must be in order of arrival. Raises TraceError, with
    the line of the call where it is known; without a ``source`` it raises InputError.
    """
    n, latest_s = len(calls), -np.inf
    arrival_s = np.zeros(n)
    for i, call in enumerate(calls):
        if call.parents:
            arrival_s[i] = arrival_s[list(call.parents)].max()
            continue
        arrival_s[i] = call.arrival_s or 0.0
        if arrival_s[i] < latest_s and not sort and source is not None:
            raise source.fault(call.line, "arrives before the row above it; order the rows, or pass sort=True")
        latest_s = arrival_s[i]
    order = np.argsort(arrival_s, kind="stable")
    own = dict.fromkeys(call.session for call in calls)
    numbered = all(isinstance(session, int) for session in own)
    number_of = {session: session if numbered else number for number, session in enumerate(own)}
    session = np.array([number_of[call.session] for call in calls])
    turn, turns = np.zeros(n, np.int64), dict.fromkeys(own, 0)
    for i in order:
        before = [turn[parent] for parent in calls[i].parents if calls[parent].session == calls[i].session]
        turn[i] = max(before) + 1 if before else turns[calls[i].session]
        turns[calls[i].session] = max(turns[calls[i].session], turn[i] + 1)
    after = After(
        _starts(call.parents for call in calls),
        np.array([parent for call in calls for parent in call.parents], np.int64),
        np.array([call.delay_s for call in calls]),
    )
    prefixes = SharedPrefixes(
        block_tokens,
        _starts(call.block_ids for call in calls),
        np.array([number for call in calls for number in call.block_ids], np.int64),
        np.array([call.previous_turn for call in calls]),
    )
    shares = len(prefixes.block_ids) > 0 or (prefixes.turns >= 0).any()
    columns = {"session": session, "turn": turn} | (extra or {})
    columns = {key: np.asarray(column)[order] for key, column in columns.items()}
    try:
        return Workload(
            arrival_s=arrival_s[order] - arrival_s.min(),
            prompt_tokens=np.array([call.prompt_tokens for call in calls])[order],
            output_tokens=np.array([call.output_tokens for call in calls])[order],
            after=after.take(order) if len(after.parent) else None,
            prefixes=prefixes.take(order) if shares else None,
            **columns_of(columns),
            name=name,
        )
    except InputError as error:
        raise error if source is None else source.fault(None, str(error)) from error


def columns_of(columns: dict[str, Any]) -> dict[str, Any]:
    """Return columns by name as arguments of ``Workload``: its optional columns, and the others in ``extra``."""
    names = ("priority", "tenant", "max_tokens", "ignore_eos")
    extra = {name: column for name, column in columns.items() if name not in names}
    return {name: columns.get(name) for name in names} | {"extra": extra}


def _starts(lists: Iterable[Sequence[int]]) -> Any:
    return np.cumsum([0, *map(len, lists)])


def is_agentic(source: Source) -> bool:
    """Return whether rows of a Mooncake trace may wait for others: it has a key that only such traces have."""
    return any(key in source.data for key in (b'"delay"', b'"wait_for"', b'"tool_wait_ms"'))


def read_agentic(source: Source, *, sort: bool) -> Workload:
    """Return the requests of Dynamo's Agentic Mooncake, or of a Mooncake trace with sessions and delays.

    A row waits for the rows whose ``request_id`` is in ``wait_for``. Without ``wait_for``, a row with a ``delay``, or
    without a timestamp, waits for the last earlier row of its session. It is sent ``delay`` plus ``tool_wait_ms``
    milliseconds after the last of these rows has ended. ``input_length`` is the complete prompt. A row without a
    ``session_id`` belongs to the session of the last row that it waits for. Raises TraceError, with the line.
    """
    rows = list(source.json_rows())
    names = [str(row.get("request_id", f"row {number}")) for number, (_, row) in enumerate(rows)]
    place: dict[str, int] = {}
    for number, ((line, _), name) in enumerate(zip(rows, names, strict=True)):
        if place.setdefault(name, number) != number:
            raise source.fault(line, f"request_id must differ from row to row; {name!r} occurs twice")
    default = HASHED_TOKENS if any(row.get("hash_ids") for _, row in rows) else RECORDED_TOKENS
    block_tokens = rows[0][1].get("block_size", default)
    calls: list[Call] = []
    last: dict[str, int] = {}
    for number, (line, row) in enumerate(rows):
        fault = row_fault(FORMATS["mooncake"], [], row)
        at_ms: Any = row.get("timestamp")
        if not fault and row.get("block_size", default) != block_tokens:
            fault = "block_size must not vary"
        if fault:
            raise source.fault(line, fault)
        hashes, session = row.get("hash_ids") or [], row.get("session_id")
        waits = _parents(source, line, row, place, number, last)
        if not waits and (type(at_ms) not in (int, float) or not 0 <= at_ms < np.inf):
            need = "timestamp must be a time from 0 up where a row follows no other by session_id or wait_for"
            raise source.fault(line, f"{need}; it is {'missing' if at_ms is None else repr(at_ms):.60}")
        call = Call(
            line,
            None if waits else at_ms / 1e3,
            int(row["input_length"]),
            int(row["output_length"]),
            _session(session, calls[waits[-1]].session if waits else names[number]),
            waits,
            _delay_ms(source, line, row, waits) / 1e3,
            hashes,
        )
        if row.get("previous_turn") is not None:
            call.previous_turn = _earlier(source, line, "continues", str(row["previous_turn"]), place, number)
            _check_turn(source, call, calls[call.previous_turn])
        elif "previous_turn" not in row and len(waits) == 1 and not hashes and not calls[waits[0]].block_ids:
            call.previous_turn = _continued(calls, waits[0], call.prompt_tokens)
        calls.append(call)
        if session is not None:
            last[str(session)] = number
    extra = _scheduling_columns([row for _, row in rows])
    extra |= _limits([UNCAPPED if row.get("max_tokens") is None else row["max_tokens"] for _, row in rows])
    extra |= {"ignore_eos": [row.get("ignore_eos") is True for _, row in rows]} if "max_tokens" in extra else {}
    return workload_of(source, calls, name=source.name, block_tokens=block_tokens, extra=extra, sort=sort)


def _session(given: Any, default: str | int) -> str | int:
    return default if given is None else given if type(given) is int else str(given)


def _parents(
    source: Source, line: int, row: dict[str, Any], place: dict[str, int], number: int, last: dict[str, int]
) -> list[int]:
    """Return the places of the rows that row ``number`` waits for; ``last`` has the last row of each session so far."""
    names, session = row.get("wait_for"), str(row.get("session_id"))
    if names is None:
        is_later = session in last and (row.get("delay") is not None or row.get("timestamp") is None)
        return [last[session]] if is_later else []
    if not isinstance(names, list):
        raise source.fault(line, f"wait_for must be a list of request_id; it is {names!r:.60}")
    return [_earlier(source, line, "waits for", str(name), place, number) for name in names]


def _scheduling_columns(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the columns priority and tenant, if rows have them; tenants with other names than codes get codes."""
    columns: dict[str, Any] = {}
    if any(type(row.get("priority")) is int for row in rows):
        columns["priority"] = [row.get("priority") or 0 for row in rows]
    if any("tenant" in row for row in rows):
        tenants = [row.get("tenant") for row in rows]
        codes = {tenant: code for code, tenant in enumerate(dict.fromkeys(map(str, tenants)))}
        are_codes = all(type(tenant) is int and 0 <= tenant < MAX_TENANTS for tenant in tenants)
        columns["tenant"] = tenants if are_codes else [codes[str(tenant)] for tenant in tenants]
    return columns


def _earlier(source: Source, line: int, verb: str, name: str, place: dict[str, int], number: int) -> int:
    at = place.get(name)
    if at is None:
        raise source.fault(line, f"the request {verb} {name!r}, which is no request_id of this file")
    if at >= number:
        raise source.fault(line, f"the request {verb} {name!r}, which must come before it in the file")
    return at


def _check_turn(source: Source, call: Call, before: Call) -> None:
    total = before.prompt_tokens + before.output_tokens
    if call.prompt_tokens <= total:
        raise source.fault(
            call.line,
            f"input_length must exceed the {total} tokens of the prompt and output of the turn before it; "
            f"it is {call.prompt_tokens}",
        )


def _delay_ms(source: Source, line: int, row: dict[str, Any], waits: Sequence[int]) -> float:
    delay_ms = sum(_milliseconds(source, line, row, key) for key in ("delay", "tool_wait_ms"))
    if delay_ms and not waits:
        raise source.fault(
            line,
            "delay and tool_wait_ms follow an earlier request, and this one waits for none: its session_id has no "
            "earlier row and wait_for names none. Leave them out, or name the request in wait_for",
        )
    return delay_ms


def _milliseconds(source: Source, line: int, row: dict[str, Any], key: str) -> float:
    value = row.get(key)
    if value is None:
        return 0.0
    if type(value) not in (int, float) or not (isfinite(value) and value >= 0):
        raise source.fault(line, f"{key} must be milliseconds from 0 up; it is {value!r:.60}")
    return float(value)


def _continued(calls: Sequence[Call], before: int, prompt_tokens: int) -> int:
    """Return ``before`` if a prompt can continue that request, being longer than its prompt and output, else -1."""
    return before if prompt_tokens > calls[before].prompt_tokens + calls[before].output_tokens else -1


def read_conversations(
    source: Source,
    entries: Iterable[tuple[int | None, dict[str, Any]]],
    count_tokens: Callable[[str], int] | None,
    *,
    multi_turn: bool,
) -> Workload:
    """Return a workload with a request for each answer; the messages before an answer are its prompt.

    With ``multi_turn`` each answer waits for the answer before it, and conversations start at their "tstamp" (seconds),
    if all have one. Otherwise, all requests arrive at time 0. ``extra`` has "session", "turn", the texts "prompt" and
    "output" and, if entries name it, "model". ``count_tokens`` None estimates the tokens of texts.
    """
    count = count_tokens or (lambda text: estimated_tokens(text) if text else 0)
    calls: list[Call] = []
    texts: list[tuple[str, str, str]] = []
    times: list[Any] = []
    for number, (line, entry) in enumerate(entries):
        turns = entry.get("conversations", entry.get("conversation", entry.get("messages")))
        if not isinstance(turns, list):
            raise source.fault(line, "each entry must hold a list named conversations")
        before: int | None = None
        for prompt_tokens, output_tokens, prompt, output in _answers(turns, count):
            if prompt_tokens < 1:
                continue
            call = Call(line, 0.0, prompt_tokens, output_tokens, str(number))
            if multi_turn and before is not None:
                call.parents, call.previous_turn = [before], _continued(calls, before, prompt_tokens)
            before = len(calls)
            calls.append(call)
            times.append(entry.get("tstamp"))
            texts.append((prompt, output, str(entry.get("model") or "")))
    if not calls:
        raise source.fault(None, "no conversation in it has an answered message")
    if multi_turn and all(type(at_s) in (int, float) and isfinite(at_s) for at_s in times):
        for call, at_s in zip(calls, times, strict=True):
            call.arrival_s = at_s
    columns = dict(zip(("prompt", "output", "model"), zip(*texts, strict=True), strict=True))
    extra = {key: np.array(column, object) for key, column in columns.items() if key != "model" or any(column)}
    name = source.name if count_tokens else f"{source.name} (tokens estimated)"
    return workload_of(source, calls, name=name, extra=extra)


def _answers(turns: list[Any], count: Callable[[str], int]) -> Iterator[tuple[int, int, str, str]]:
    prompt_tokens, prompt, is_question = 0, "", False
    for turn in turns:
        if not isinstance(turn, dict):
            continue
        role = str(turn.get("from", turn.get("role", ""))).lower()
        text = str(turn.get("value", turn.get("content")) or "")
        tokens = count(text)
        if role in _ASSISTANTS and is_question and tokens > 0:
            yield prompt_tokens, tokens, prompt, text
        is_question = role in _USERS | _TOOLS and bool(text)
        prompt_tokens += tokens
        prompt = f"{prompt}\n\n{text}" if prompt else text


_PROMPT_KEYS = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
_OUTPUT_KEYS = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
_MAX_TOKENS = "gen_ai.request.max_tokens"
_OPERATIONS = (None, "chat", "text_completion", "generate_content")


@dataclass(frozen=True)
class _Span:
    line: int
    start_ns: int
    end_ns: int
    session: str
    model: str
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    messages: tuple[str, ...] = ()  # instructions and input, where they are recorded


def _begins_with(messages: tuple[str, ...], earlier: tuple[str, ...]) -> bool:
    """Return whether messages begin with all earlier ones, or True if either are unknown."""
    return not messages or not earlier or messages[: len(earlier)] == earlier


def is_otel(first: dict[str, Any] | None) -> bool:
    """Return whether the first object of a file holds OpenTelemetry spans, in one of the forms of ``_flat``."""
    keys = (
        {"resourceSpans"}, {"scopeSpans"}, {"traceId", "startTimeUnixNano"}, {"context", "attributes", "start_time"},
        {"SpanContext", "StartTime"},
    )  # fmt: skip
    return first is not None and any(each <= set(first) for each in keys)


def read_otel(source: Source) -> Workload:
    """Return the workload of a file of OpenTelemetry GenAI spans, with a request for each call of a model.

    The file has OTLP's JSON (the collector's file exporter) or single spans (OTLP's, or those of the SDKs' console
    exporters), each on one line or several. Calls with one ``gen_ai.conversation.id``, or without it in one trace, are
    a session. A call waits for the last calls of its session that ended before it started, and is sent after the
    recorded delay. Its prompt continues the prompt and output of its parent (if it joins parallel calls, of the call
    before these) if it is longer than both, and if its ``gen_ai.input.messages`` begin with those of that call, where
    both are recorded. Without recorded messages, a longer prompt always counts as a continuation.
    """
    spans = [span for line, row in source.json_objects() for span in _spans(source, line, row)]
    if not spans:
        raise source.fault(None, f"no span in it has {_PROMPT_KEYS[0]} and {_OUTPUT_KEYS[0]} of at least 1")
    spans.sort(key=lambda span: (span.start_ns, span.end_ns))
    calls: list[Call] = []
    members: dict[str, list[int]] = {}
    for number, span in enumerate(spans):
        earlier = [i for i in members.get(span.session, ()) if spans[i].end_ns <= span.start_ns]
        # A call that ended before another ended call started is no parent.
        last_start_ns = max((spans[i].start_ns for i in earlier), default=0)
        parents = [i for i in earlier if spans[i].end_ns > last_start_ns or spans[i].start_ns == last_start_ns]
        fork = parents[0] if len(parents) == 1 else -1
        if len(parents) > 1 and len(calls[parents[0]].parents) == 1:
            (fork,) = calls[parents[0]].parents  # joins parallel calls and continues the call before them
        may_continue = fork >= 0 and _begins_with(span.messages, spans[fork].messages)
        previous = _continued(calls, fork, span.prompt_tokens) if may_continue else -1
        delay_s = (span.start_ns - max((spans[i].end_ns for i in parents), default=span.start_ns)) / 1e9
        if previous >= 0 and previous not in parents:
            parents = [previous, *parents]
        lengths = (span.prompt_tokens, span.output_tokens)
        arrival_s = (span.start_ns - spans[0].start_ns) / 1e9
        calls.append(Call(span.line, arrival_s, *lengths, span.session, parents, delay_s, (), previous))
        members.setdefault(span.session, []).append(number)
    models, caps = np.array([span.model for span in spans], object), [span.max_tokens for span in spans]
    extra: dict[str, Any] = {"model": models} if any(models) else {}
    return workload_of(source, calls, name=source.name, extra=extra | _limits(caps))


def _limits(caps: list[int]) -> dict[str, Any]:
    """Return the column max_tokens if a request has a limit."""
    return {"max_tokens": caps} if min(caps) < UNCAPPED else {}


def _spans(source: Source, line: int, row: dict[str, Any]) -> Iterator[_Span]:
    try:
        for attributes, trace_id, start, end in _flat(row):
            prompt, output = (_first(attributes, keys) for keys in (_PROMPT_KEYS, _OUTPUT_KEYS))
            if attributes.get("gen_ai.operation.name") not in _OPERATIONS or prompt < 1 or output < 1:
                continue
            session = str(attributes.get("gen_ai.conversation.id") or trace_id)
            model = str(attributes.get("gen_ai.request.model") or "")
            times = (_nanoseconds(start), _nanoseconds(end))
            cap = _first(attributes, (_MAX_TOKENS,)) or UNCAPPED
            if cap < output:
                raise ValueError(f"{_MAX_TOKENS} {cap} is below the {output} output tokens")  # noqa: TRY301
            yield _Span(line, *times, session, model, prompt, output, cap, _messages(attributes))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        shown = f"{type(error).__name__}: {error}"
        raise source.fault(line, f"must hold spans as OpenTelemetry writes them ({shown})") from error


def _flat(row: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, str | int, str | int]]:
    """Yield the attributes, trace, start and end of each span in an object of OTLP or of a console exporter."""
    if "resourceSpans" in row or "scopeSpans" in row:  # the latter alone: a line of Java's logging exporter
        for resource in row.get("resourceSpans", [row]):
            for scope in resource.get("scopeSpans", ()):
                for span in scope.get("spans", ()):
                    yield from _flat(span)
    elif "context" in row:  # Python's ConsoleSpanExporter
        yield row["attributes"] or {}, row["context"]["trace_id"], row["start_time"], row["end_time"]
    elif "SpanContext" in row:  # Go's stdouttrace
        attributes = {item["Key"]: item["Value"]["Value"] for item in row["Attributes"] or ()}
        yield attributes, row["SpanContext"]["TraceID"], row["StartTime"], row["EndTime"]
    elif row and not {"resourceMetrics", "resourceLogs"} & set(row):
        items = row.get("attributes", ())
        attributes = {item["key"]: next(iter(item["value"].values()), None) for item in items}
        yield attributes, row["traceId"], row["startTimeUnixNano"], row["endTimeUnixNano"]


def _messages(attributes: dict[str, Any]) -> tuple[str, ...]:
    """Return the instructions and messages of a call, each as text, or () if its messages are not recorded."""
    given = attributes.get("gen_ai.input.messages")
    if isinstance(given, str):
        with suppress(ValueError):  # cut at the limit of an attribute's length
            given = json.loads(given)
    if isinstance(given, dict):
        given = given.get("values")
    if not isinstance(given, list) or not given:
        return ()
    shown = (json.dumps(one, sort_keys=True) for one in given)
    return (json.dumps(attributes.get("gen_ai.system_instructions"), sort_keys=True), *shown)


def _first(attributes: dict[str, Any], keys: Sequence[str]) -> int:
    return int(next((attributes[key] for key in keys if attributes.get(key) is not None), 0))


def _nanoseconds(at: str | int) -> int:
    text = str(at)
    return int(text) if text.isdigit() else round(datetime.fromisoformat(text).timestamp() * 1e6) * 1000


JOURNAL = "lengthwise-journal"  # the ``format`` in the first line of a journal of `lengthwise serve`


@dataclass(frozen=True)
class Recorded:
    """A request that a gateway has served."""

    arrival_s: float
    finished_s: float
    prompt_tokens: int
    output_tokens: int
    session: int = 0  # hash of its session; 0: none
    prefix: tuple[tuple[int, int], ...] = ()  # (number of leading prompt tokens, their hash), the shortest first


def recorded_calls(requests: Sequence[Recorded]) -> list[Call]:
    """Return the calls of requests, in order of arrival, with what their prompts share.

    A request waits for the request of its session that ended last before its arrival. It continues that request if it
    has all hashes of that prompt and is longer than that prompt and output. Other prompts share blocks of
    RECORDED_TOKENS tokens where their hashes are equal. If requests give a hash different numbers of tokens, the first
    one counts.
    """
    uses = Counter(key for one in requests for _, key in one.prefix)
    spans: dict[int, tuple[range, int]] = {}  # numbers of the blocks that a hash adds, and its leading tokens
    calls: list[Call] = []
    num_blocks = 0
    in_flight: dict[int, list[tuple[float, int]]] = {}  # of each session, as a heap
    last_ended: dict[int, int] = {}
    for number, one in enumerate(requests):
        call = Call(None, one.arrival_s, one.prompt_tokens, one.output_tokens, one.session or -1 - number)
        if one.session:
            running = in_flight.setdefault(one.session, [])
            while running and running[0][0] <= one.arrival_s:
                last_ended[one.session] = heapq.heappop(running)[1]
            heapq.heappush(running, (one.finished_s, number))
        if (last := last_ended.get(one.session, -1)) >= 0:
            before = requests[last]
            call.parents, call.delay_s = [last], one.arrival_s - before.finished_s
            if before.prefix and _hashes(one)[: len(before.prefix)] == _hashes(before):
                call.previous_turn = _continued(calls, last, one.prompt_tokens)
        blocks: list[int] = []
        reached = 0
        for tokens, key in one.prefix if call.previous_turn < 0 else ():
            if uses[key] < 2:
                break  # no other prompt has this hash, and so none has a later one
            if key not in spans:
                end = max(tokens, reached)
                more = end // RECORDED_TOKENS - reached // RECORDED_TOKENS
                spans[key], num_blocks = (range(num_blocks, num_blocks + more), end), num_blocks + more
            added, reached = spans[key]
            blocks += added
        call.block_ids = blocks[: one.prompt_tokens // RECORDED_TOKENS]
        calls.append(call)
    return calls


def _hashes(one: Recorded) -> list[int]:
    return [key for _, key in one.prefix]


def read_journal(source: Source) -> Workload:
    """Return the requests of a gateway's journal that had an output, with their sessions and shared prefixes.

    Times of several runs of the gateway are converted to Unix time, and the first arrival becomes 0. ``extra`` has
    "session", "turn" and "model". Damaged lines, as at the end of a killed run, are left out. An output above its
    ``max_tokens`` is the total of several choices, so its limit is ``max_tokens`` times the fewest possible choices.
    """
    rows: list[tuple[Recorded, int, dict[str, Any]]] = []
    shift_s = 0.0
    for line in source.data.split(b"\n"):
        try:
            row = json.loads(line)
            if row.get("format") == JOURNAL:
                shift_s = float(row["unix_s"]) - float(row["clock_s"])
                continue
            prefix = tuple((int(tokens), int(key)) for tokens, key in row.get("prefix", ()))
            arrival_s, finished_s = float(row["arrival_s"]) + shift_s, float(row["finished_s"]) + shift_s
            prompt_tokens, output_tokens = max(1, int(row["prompt_tokens"])), int(row["output_tokens"])
            session = int(row.get("session", 0))
            one = Recorded(arrival_s, finished_s, prompt_tokens, output_tokens, session, prefix)
            cap = int(row.get("max_tokens", 0))
        except (ValueError, TypeError, KeyError, AttributeError):
            continue
        if isfinite(one.arrival_s) and one.arrival_s <= one.finished_s < np.inf and one.output_tokens >= 1:
            rows.append((one, cap * -(-output_tokens // cap) if cap >= 1 else UNCAPPED, row))
    if not rows:
        raise source.fault(None, "no request in it has an output")
    rows.sort(key=lambda triple: triple[0].arrival_s)
    extra = _scheduling_columns([row for *_, row in rows]) | _limits([cap for _, cap, _ in rows])
    extra["model"] = np.array([str(row.get("model", "")) for *_, row in rows], object)
    calls = recorded_calls([one for one, *_ in rows])
    return workload_of(source, calls, name=source.name, extra=extra)
