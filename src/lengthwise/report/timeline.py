"""A run as a timeline for Perfetto (ui.perfetto.dev) or chrome://tracing, in Chrome's trace-event JSON.

Each replica is a process, and requests without a replica share one more. A request is an asynchronous span with the
nested spans queued, prefill and decode. An unfinished request lasts to the end of the run; a rejected one is a point.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lengthwise.schema.errors import InputError
from lengthwise.schema.files import write_atomic
from lengthwise.schema.records import Records, RequestRecords, Status, StepRecords

Event = dict[str, Any]

_CHUNK_ROWS = 8192


def write_timeline(path: Path | str, records: Records) -> None:
    """Write every step and request to a trace-event file. Raises InputError if the steps were not recorded."""
    steps = records.steps
    if steps is None:
        raise InputError("a timeline needs every step, and large runs record none; simulate fewer requests")

    def write(target: Path) -> None:
        encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
        with target.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit":"ms","traceEvents":[')
            for i, event in enumerate(_events(records, steps)):
                file.write((",\n" if i else "\n") + encode(event))
            file.write("\n]}\n")

    write_atomic(path, write)


def _events(records: Records, steps: StepRecords) -> Iterator[Event]:
    replicas = len(records.totals.steps)
    for r in range(replicas):
        yield _metadata("process_name", r, name=f"replica {r}")
        yield _metadata("process_sort_index", r, sort_index=r)
    yield _metadata("process_name", replicas, name="no replica")
    yield from _steps(steps, replicas)
    yield from _requests(records.requests, replicas, records.end_s)


def _metadata(kind: str, pid: int, tid: int = 0, **args: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _us(time_s: float) -> float:
    return round(time_s * 1e6, 3)


def _rows(columns: Any, names: tuple[str, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield rows as Python numbers. Columns are converted in chunks to limit the memory."""
    for start in range(0, len(getattr(columns, names[0])), _CHUNK_ROWS):
        yield from zip(*(getattr(columns, n)[start : start + _CHUNK_ROWS].tolist() for n in names), strict=True)


_STEP_COLUMNS = ("start_s", "end_s", "replica", "decode_seqs", "prefill_seqs", "prefill_tokens", "kv_blocks", "waiting")


def _steps(steps: StepRecords, replicas: int) -> Iterator[Event]:
    """Yield each step as an event on the first free track of its replica, so that overlapping steps share none."""
    track_ends: list[list[float]] = [[] for _ in range(replicas)]
    for start_s, end_s, replica, decodes, prefills, tokens, blocks, waiting in _rows(steps, _STEP_COLUMNS):
        ends = track_ends[replica]
        if ends and max(ends) < start_s:
            yield _counter("batch", replica, max(ends), decode=0, prefill=0)
        track = next((k for k, free_s in enumerate(ends) if free_s <= start_s), len(ends))
        if track == len(ends):
            ends.append(end_s)
            yield _metadata("thread_name", replica, track, name=f"steps in flight {track + 1}" if track else "steps")
        ends[track] = end_s
        yield {
            "ph": "X",
            "name": "mixed" if decodes and prefills else "prefill" if prefills else "decode",
            "cat": "step",
            "pid": replica,
            "tid": track,
            "ts": _us(start_s),
            "dur": round(_us(end_s) - _us(start_s), 3),
            "args": dict(zip(_STEP_COLUMNS[3:], (decodes, prefills, tokens, blocks, waiting), strict=True)),
        }
        yield _counter("batch", replica, start_s, decode=decodes, prefill=prefills)
        yield _counter("waiting", replica, start_s, requests=waiting)
        yield _counter("kv_blocks", replica, start_s, in_use=blocks)
    for replica, ends in enumerate(track_ends):
        if ends:
            yield _counter("batch", replica, max(ends), decode=0, prefill=0)


def _counter(name: str, pid: int, time_s: float, **values: int) -> Event:
    return {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": _us(time_s), "args": values}


_REQUEST_COLUMNS = (
    "arrival_s", "prompt_tokens", "output_tokens", "status", "replica", "scheduled_s", "first_token_s", "finished_s",
    "preemptions",
)  # fmt: skip


def _requests(requests: RequestRecords, replicas: int, end_s: float) -> Iterator[Event]:
    for i, row in enumerate(_rows(requests, _REQUEST_COLUMNS)):
        arrival_s, prompt, output, status, replica, scheduled_s, first_token_s, finished_s, preemptions = row
        if arrival_s > end_s:
            continue
        pid = replica if replica >= 0 else replicas
        args = {
            "status": Status(status).name.lower(),
            "prompt_tokens": prompt,
            "output_tokens": output,
            "preemptions": preemptions,
        }
        if status == Status.REJECTED:
            yield {"ph": "n", **_span(i, pid, "rejected", arrival_s), "args": args}
            continue
        stop_s = end_s if math.isnan(finished_s) else finished_s
        times_s = [stop_s if math.isnan(t) else t for t in (arrival_s, scheduled_s, first_token_s, stop_s)]
        yield {"ph": "b", **_span(i, pid, f"request {i}", times_s[0]), "args": args}
        for name, start_s, until_s in zip(("queued", "prefill", "decode"), times_s, times_s[1:], strict=False):
            if until_s > start_s:
                yield {"ph": "b", **_span(i, pid, name, start_s)}
                yield {"ph": "e", **_span(i, pid, name, until_s)}
        yield {"ph": "e", **_span(i, pid, f"request {i}", times_s[3])}


def _span(request: int, pid: int, name: str, time_s: float) -> Event:
    return {"name": name, "cat": "request", "id": request, "pid": pid, "tid": 0, "ts": _us(time_s)}
