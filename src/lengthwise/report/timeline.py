"""A run as a timeline for Perfetto (ui.perfetto.dev) or chrome://tracing.

The format is Chrome's trace-event JSON. A process stands for a replica (one more for requests
that no replica took): its steps on as many tracks as ran at a time, its requests as
asynchronous spans that nest queued, prefill and decode, its batch, queue and KV blocks as
counters. Times are in microseconds, rounded to nanoseconds. A request that did not finish is
drawn to the end of the run: the records do not tell when it gave up.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lengthwise.schema.errors import InputError
from lengthwise.schema.files import write_whole
from lengthwise.schema.records import Records, RequestRecords, Status, StepRecords

Event = dict[str, Any]

_CHUNK = 8192
_NOWHERE = "no replica"


def write_timeline(path: Path | str, records: Records) -> None:
    """A trace-event JSON file of every step and every request, written as it is made.

    Raises:
        InputError: The run did not keep its steps.
        OutputError: The file cannot be written.
    """
    if records.steps is None:
        raise InputError(
            "a timeline needs every step, and this run kept none (large runs do not); simulate fewer requests"
        )
    write_whole(path, lambda whole: _write(whole, _events(records, records.steps)))


def _write(path: Path, events: Iterator[Event]) -> None:
    encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[')
        for i, event in enumerate(events):
            file.write((",\n" if i else "\n") + encode(event))
        file.write("\n]}\n")


def _events(records: Records, steps: StepRecords | None) -> Iterator[Event]:
    assert steps is not None
    replicas = len(records.totals.steps)
    for r in range(replicas):
        yield _meta("process_name", r, name=f"replica {r}")
        yield _meta("process_sort_index", r, sort_index=r)
    yield _meta("process_name", replicas, name=_NOWHERE)
    yield from _steps(steps, replicas)
    yield from _requests(records.requests, replicas, records.end_s)


def _meta(what: str, pid: int, tid: int = 0, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _us(time_s: float) -> float:
    return round(time_s * 1e6, 3)


def _rows(columns: Any, names: tuple[str, ...]) -> Iterator[tuple[Any, ...]]:
    """Rows as Python numbers, a chunk of the columns at a time."""
    for start in range(0, len(getattr(columns, names[0])), _CHUNK):
        yield from zip(*(getattr(columns, n)[start : start + _CHUNK].tolist() for n in names), strict=True)


class _Lanes:
    """Tracks of a replica, so that steps in flight at a time never share one."""

    def __init__(self) -> None:
        self._free_s: list[float] = []

    def idle_since_s(self, now_s: float) -> float | None:
        """When the last step ended, if one ever ran and none is in flight."""
        last_s = max(self._free_s, default=math.inf)
        return last_s if last_s < now_s else None

    def take(self, start_s: float, end_s: float) -> tuple[int, bool]:
        """The first free track, and whether it is a new one."""
        for lane, free in enumerate(self._free_s):
            if free <= start_s:
                self._free_s[lane] = end_s
                return lane, False
        self._free_s.append(end_s)
        return len(self._free_s) - 1, True


_STEP_COLUMNS = ("start_s", "end_s", "replica", "decode_seqs", "prefill_seqs", "prefill_tokens", "kv_blocks", "waiting")


def _steps(steps: StepRecords, replicas: int) -> Iterator[Event]:
    lanes = [_Lanes() for _ in range(replicas)]
    for row in _rows(steps, _STEP_COLUMNS):
        start_s, end_s, replica, decodes, prefills, tokens, blocks, waiting = row
        mine = lanes[replica]
        if (idle_s := mine.idle_since_s(start_s)) is not None:
            yield _counter("batch", replica, idle_s, decode=0, prefill=0)
        lane, new = mine.take(start_s, end_s)
        if new:
            yield _meta("thread_name", replica, lane, name="steps" if lane == 0 else f"steps in flight {lane + 1}")
        yield {
            "ph": "X",
            "name": _step_name(decodes, prefills),
            "cat": "step",
            "pid": replica,
            "tid": lane,
            "ts": _us(start_s),
            "dur": round(_us(end_s) - _us(start_s), 3),
            "args": {
                "decode_seqs": decodes,
                "prefill_seqs": prefills,
                "prefill_tokens": tokens,
                "kv_blocks": blocks,
                "waiting": waiting,
            },
        }
        yield _counter("batch", replica, start_s, decode=decodes, prefill=prefills)
        yield _counter("waiting", replica, start_s, requests=waiting)
        yield _counter("kv_blocks", replica, start_s, satisfied=blocks)
    for replica, mine in enumerate(lanes):
        if (idle_s := mine.idle_since_s(math.inf)) is not None:
            yield _counter("batch", replica, idle_s, decode=0, prefill=0)


def _step_name(decodes: int, prefills: int) -> str:
    if decodes and prefills:
        return "mixed"
    return "prefill" if prefills else "decode"


def _counter(name: str, pid: int, time_s: float, **values: int) -> Event:
    return {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": _us(time_s), "args": values}


_REQUEST_COLUMNS = (
    "arrival_s",
    "prompt_tokens",
    "output_tokens",
    "status",
    "replica",
    "scheduled_s",
    "first_token_s",
    "finished_s",
    "preemptions",
)


def _requests(requests: RequestRecords, replicas: int, end_s: float) -> Iterator[Event]:
    for i, row in enumerate(_rows(requests, _REQUEST_COLUMNS)):
        arrival_s, prompt, output, status, replica, scheduled_s, first_s, finished_s, preempted = row
        if arrival_s > end_s:
            continue
        pid = replica if replica >= 0 else replicas
        stop_s = end_s if math.isnan(finished_s) else finished_s
        args = {
            "status": Status(status).name.lower(),
            "prompt_tokens": prompt,
            "output_tokens": output,
            "preemptions": preempted,
        }
        if status == Status.REJECTED:
            yield {"ph": "n", **_span(i, pid, "rejected", arrival_s), "args": args}
            continue
        marks = [stop_s if math.isnan(t) else t for t in (arrival_s, scheduled_s, first_s, stop_s)]
        yield {"ph": "b", **_span(i, pid, f"request {i}", marks[0]), "args": args}
        for name, begin_s, until_s in zip(("queued", "prefill", "decode"), marks, marks[1:], strict=False):
            if until_s > begin_s:
                yield {"ph": "b", **_span(i, pid, name, begin_s)}
                yield {"ph": "e", **_span(i, pid, name, until_s)}
        yield {"ph": "e", **_span(i, pid, f"request {i}", marks[3])}


def _span(request: int, pid: int, name: str, time_s: float) -> Event:
    return {"name": name, "cat": "request", "id": request, "pid": pid, "tid": 0, "ts": _us(time_s)}
