"""What a gateway costs in front of a backend that costs nothing, and its peers in the same run."""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _gateway_wire as wire
from _gateway_pace import figures as pace_figures
from _gateway_pace import pace
from _gateway_peers import PEERS, Target, ours
from _gateway_procs import Process, cores, running, told
from _harness import machine

BLOCKS, TOKENS, LINES, PACED_LINES, GAP_MS = 8, 32, 16, 64, 5


@dataclass(frozen=True)
class Counts:
    """Requests of each part."""

    single: int
    many: int
    streams: int
    paced: int
    memory: int

    def times(self, share: float) -> Counts:
        return Counts(*(max(BLOCKS, int(share * n)) for n in (self.single, self.many, self.streams, self.paced, 0)))


FULL, QUICK = Counts(2000, 6000, 1500, 1000, 100_000), Counts(400, 1500, 300, 256, 5_000)


TARGETS = (ours(), *PEERS)


def figures(target: Target, *, fast: bool) -> dict[str, Any]:
    """Added latency, rate, CPU and memory of one target, with the direct line and the machine's pace beside it."""
    counts, mine = QUICK if fast else FULL, os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores()[1])
    before = pace(cores()[0])
    try:
        with _backend() as backend, target.up([backend.url]) as process:
            rows = _measured(target, process, backend, counts)
        return _named(target, rows | pace_figures(before, pace(cores()[0])))
    except LookupError as error:
        return {f"{target.name}.skipped": {"skipped": str(error)}}
    except (RuntimeError, TimeoutError, AssertionError) as error:
        if target.name == "gateway":
            raise
        return {f"{target.name}.skipped": {"skipped": f"it does not work here: {error!r}"}}
    finally:
        os.sched_setaffinity(0, mine)


@contextmanager
def _backend() -> Iterator[Process]:
    argv = [sys.executable, str(Path(__file__).with_name("_lean_engine.py"))]
    with running(argv, cores()[1]) as (process, log):
        yield Process(process.pid, told(process, log)["url"])


def _load(process: Process, body: bytes, count: int, lines: int) -> wire.Times:
    """A closed loop whose answers are all well."""
    times = wire.closed_loop(process.url, wire.request(process.url, body, process.key), count, lines)
    assert times.bad == 0, f"{times.bad} of {count} went wrong: {times.sample[:400]!r}"
    return times


def _measured(target: Target, process: Process, backend: Process, all_counts: Counts) -> dict[str, Any]:
    counts = all_counts.times(target.light)
    _checks(process, backend)
    _load(process, wire.body(), max(BLOCKS, counts.many // 10), 4)  # warm
    rows = _added(process, backend, counts) | _rate(process, counts)
    rows |= _streams(process, counts.streams, LINES, 0) | _streams(process, counts.paced, PACED_LINES, GAP_MS)
    if target.name == "gateway":
        rows |= _memory(process, all_counts.memory)
    return rows


def _named(target: Target, rows: dict[str, Any]) -> dict[str, Any]:
    lower = {"better": "lower"}
    return {f"{target.name}.{name}": value if name == "rps" else value | lower for name, value in rows.items()}


def _checks(process: Process, backend: Process) -> None:
    """The answers are the backend's own: the text of a whole one, and all tokens of a stream."""

    def content(of: Process) -> str:
        body = json.loads(_load(of, wire.body(), 1, 1).sample)
        return str(body["choices"][0]["message"]["content"])

    assert content(process) == content(backend)
    stream = _load(process, wire.body(stream=True, tokens=TOKENS), 1, 1).sample
    assert _words(stream) == " word" * TOKENS, stream[:400]


def _words(stream: bytes) -> str:
    events = [line[5:].strip() for line in stream.decode().splitlines() if line.startswith("data:")]
    assert events[-1] == "[DONE]"
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def _added(process: Process, backend: Process, counts: Counts) -> dict[str, Any]:
    """Median latency over the direct one's, one request at a time, in blocks by turns."""
    added, first, via, bare = [], [], [], []
    for _ in range(BLOCKS):
        block = max(1, counts.single // BLOCKS)
        direct, through = (_load(one, wire.body(), block, 1) for one in (backend, process))
        added.append(through.p50_ms - direct.p50_ms)
        via += through.whole_s
        bare.append(direct.p50_ms)
        body = wire.body(stream=True, tokens=4)
        first.append(_load(process, body, max(1, block // 4), 1).first_p50_ms)
    details = {"direct_p50_ms": statistics.median(bare), "p99_ms": _quantile(via, 0.99) * 1e3, "machine": machine()}
    return {
        "added_p50_ms": {"value": statistics.median(added), "ci": (min(added), max(added)), "unit": "ms"} | details,
        "ttft_p50_ms": {"value": statistics.median(first), "ci": (min(first), max(first)), "unit": "ms"},
    }


def _rate(process: Process, counts: Counts) -> dict[str, Any]:
    before = process.cpu_s()
    times = _load(process, wire.body(), counts.many, LINES)
    cpu_us = (process.cpu_s() - before) / counts.many * 1e6
    return {
        "rps": {"value": counts.many / times.wall_s, "unit": "requests/s", "p50_ms": times.p50_ms}
        | {"rps_of_a_quiet_core": 1e6 / cpu_us if cpu_us else None},
        "cpu_us_per_request": {"value": cpu_us, "unit": "us"},
    }


def _streams(process: Process, count: int, lines: int, gap_ms: int) -> dict[str, Any]:
    """CPU of a token, its share of the request's included: back to back, or paced far from saturation."""
    body = wire.body(stream=True, tokens=TOKENS, gap_ms=gap_ms)
    before = process.cpu_s()
    times = _load(process, body, count, min(lines, count))
    cpu_us = (process.cpu_s() - before) / (count * TOKENS) * 1e6
    name = "cpu_us_per_token" if gap_ms else "cpu_us_per_token_back_to_back"
    details = {"streams_per_s": count / times.wall_s, "tokens": TOKENS, "lines": lines, "gap_ms": gap_ms}
    return {name: {"value": cpu_us, "unit": "us"} | details}


def _memory(process: Process, count: int) -> dict[str, Any]:
    """Resident memory before and after so many requests; every tenth is a stream."""
    for body, share in ((wire.body(), 0.05), (wire.body(stream=True, tokens=8), 0.01)):
        _load(process, body, max(LINES, int(share * count)), LINES)
    before, rounds, seen = process.rss_mib(), 10, []
    for _ in range(rounds):
        _load(process, wire.body(), int(0.9 * count) // rounds, LINES)
        _load(process, wire.body(stream=True, tokens=8), int(0.1 * count) // rounds, LINES)
        seen.append(process.rss_mib())
    return {
        "rss_growth_mib": {"value": seen[-1] - before, "unit": "MiB", "requests": count, "seen_mib": [before, *seen]}
    }


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
