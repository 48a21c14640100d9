"""What the gateway and its peers cost in front of a backend that answers at once, and the time of a complete reorder."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from _gateway_processes import MEASURED_CORE, OTHER_CORE, Process, Target, first_json, on_cores, running
from _harness import LOOP_ROUNDS, machine, python_loop, summary

BLOCKS, TOKENS, CONNECTIONS, PACED_CONNECTIONS, GAP_MS = 8, 32, 16, 64, 5
IO_ROUNDS, IO_BYTES = 5_000, 256
TEXT = "Tell me in a few words how a request goes through a gateway, and what it waits for on its way. " * 6
WAITING = 10_000


@dataclass(frozen=True)
class Counts:
    """Requests of each part."""

    single: int
    many: int
    streams: int
    paced: int
    memory: int


FULL, QUICK = Counts(2000, 6000, 1500, 1000, 100_000), Counts(400, 1500, 300, 256, 5_000)


# A client of little cost: raw connections, requests prepared as bytes, responses only delimited


def chat(*, stream: bool = False, tokens: int = TOKENS, gap_ms: int = 0) -> bytes:
    """Return the body of a chat of about 700 bytes."""
    content = (f"<gap:{gap_ms}> " if gap_ms else "") + TEXT
    fields = {"model": "toy", "messages": [{"role": "user", "content": content}], "max_tokens": tokens}
    return json.dumps(fields | {"temperature": 0} | ({"stream": True} if stream else {})).encode()


@dataclass
class Times:
    """Seconds of a load; ``first_s`` until the first byte of each body, ``sample`` one of the bodies."""

    wall_s: float = 0.0
    total_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    failures: int = 0
    sample: bytes = b""


class Connection(asyncio.Protocol):
    """Sends the request again as soon as its response is complete, until none is left."""

    def __init__(self, data: bytes, left: list[int], times: Times) -> None:
        self._data, self._left, self._times = data, left, times
        self.closed = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._send()

    def _send(self) -> None:
        import httptools

        if not self._left:
            self._transport.close()
            return
        self._left.pop()
        self._parser = httptools.HttpResponseParser(self)
        self._first, self._body = math.nan, []
        self._sent = time.perf_counter()
        self._transport.write(self._data)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        if not self._body:
            self._first = time.perf_counter()
        self._body.append(data)

    def on_message_complete(self) -> None:
        times, failed = self._times, self._parser.get_status_code() != 200
        times.total_s.append(time.perf_counter() - self._sent)
        times.first_s.append(self._first - self._sent)
        times.failures += failed
        if failed or not times.sample:
            times.sample = b"".join(self._body)
        self._send()

    def connection_lost(self, _: Exception | None) -> None:
        self.closed.set_result(None)


def closed_loop(process: Process, body: bytes, count: int, connections: int) -> Times:
    """Send ``count`` requests, one at a time on each connection; raise AssertionError if one fails."""
    import uvloop

    at, key = urlsplit(process.url), [f"Authorization: Bearer {process.key}"] if process.key else []
    lines = ["POST /v1/chat/completions HTTP/1.1", f"Host: {at.netloc}", "Content-Type: application/json", *key]
    data = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body

    async def run() -> Times:
        loop, times, left = asyncio.get_running_loop(), Times(), [1] * count
        start = time.perf_counter()
        made = [
            await loop.create_connection(lambda: Connection(data, left, times), at.hostname, at.port)
            for _ in range(connections)
        ]
        await asyncio.wait_for(asyncio.gather(*(protocol.closed for _, protocol in made)), 120.0)
        times.wall_s = time.perf_counter() - start
        return times

    times = uvloop.run(run())
    failures = times.failures + count - len(times.total_s)
    assert failures == 0, f"{failures} of {count} requests failed: {times.sample[:400]!r}"
    return times


# Overhead of the gateway and its peers


def overhead(target: Target, quick: bool) -> dict[str, Any]:
    """Return added latency, rate, CPU and memory of one target, with the machine's pace before and after."""
    counts = QUICK if quick else FULL
    try:
        with on_cores(OTHER_CORE):
            before = _pace()
            backend_command = [sys.executable, "-m", "lengthwise.testing.engine_server.lean"]
            with running(backend_command, OTHER_CORE) as (server, log):
                backend = Process(server.pid, first_json(server, log)["url"])
                with target.started([backend.url], chat()) as process:
                    rows = _measured(target, process, backend, counts)
            after = _pace()
    except LookupError as error:
        return {f"{target.name}.skipped": {"skipped": str(error)}}
    except (RuntimeError, TimeoutError, AssertionError) as error:
        if target.name == "gateway":
            raise
        return {f"{target.name}.skipped": {"skipped": f"the program does not work: {error!r}"}}
    for name, rounds in {"machine_pace": LOOP_ROUNDS, "machine_pace_io": IO_ROUNDS}.items():
        every = [*before[name], *after[name]]
        rows[name] = summary(every) | {"unit": "us", "rounds": rounds}
        rows[name] |= {"before_us": statistics.median(before[name]), "after_us": statistics.median(after[name])}
    better = {name: "higher" if name == "rps" else "lower" for name in rows}
    return {f"{target.name}.{name}": {"better": better[name]} | row for name, row in rows.items()}


def _pace() -> dict[str, list[float]]:
    """Return microseconds of fixed work on the measured core: plain Python, and small socket writes and reads.

    The speed of a shared machine drifts by half within hours; only runs with similar values can be compared.
    """

    def socket_io() -> None:
        one, other = socket.socketpair()
        with one, other:
            for _ in range(IO_ROUNDS):
                one.send(b"x" * IO_BYTES)
                other.recv(IO_BYTES)

    def timed(work: Callable[[], Any]) -> list[float]:
        times = [time.perf_counter()]
        for _ in range(7):
            work()
            times.append(time.perf_counter())
        return (np.diff(times) * 1e6).tolist()

    with on_cores(MEASURED_CORE):
        return {"machine_pace": timed(python_loop), "machine_pace_io": timed(socket_io)}


def _measured(target: Target, process: Process, backend: Process, full: Counts) -> dict[str, Any]:
    single, many, streams, paced = (
        max(BLOCKS, int(target.light * n)) for n in (full.single, full.many, full.streams, full.paced)
    )
    _check(process, backend)
    closed_loop(process, chat(), max(BLOCKS, many // 10), 4)  # warms up
    rows = _added_latency(process, backend, max(1, single // BLOCKS))
    before = process.cpu_s()
    times = closed_loop(process, chat(), many, CONNECTIONS)
    cpu_us = (process.cpu_s() - before) / many * 1e6
    rows["rps"] = {"value": many / times.wall_s, "unit": "requests/s"}
    rows["cpu_us_per_request"] = {"value": cpu_us, "unit": "us"}
    for name, count, connections, gap_ms in (
        ("cpu_us_per_token_back_to_back", streams, CONNECTIONS, 0),
        ("cpu_us_per_token", paced, PACED_CONNECTIONS, GAP_MS),  # paced, far from saturation
    ):
        before = process.cpu_s()
        closed_loop(process, chat(stream=True, gap_ms=gap_ms), count, min(connections, count))
        rows[name] = {"value": (process.cpu_s() - before) / (count * TOKENS) * 1e6, "unit": "us"}
    if target.name == "gateway":
        rows["rss_growth_mib"] = _memory_growth(process, full.memory)
    return rows


def _check(process: Process, backend: Process) -> None:
    """Check that responses are the backend's own: the text of a complete one, and all tokens of a stream."""
    bodies = [json.loads(closed_loop(of, chat(), 1, 1).sample) for of in (process, backend)]
    own, direct = (body["choices"][0]["message"]["content"] for body in bodies)
    assert own == direct
    stream = closed_loop(process, chat(stream=True), 1, 1).sample.decode()
    *events, last = [line[5:].strip() for line in stream.splitlines() if line.startswith("data:")]
    assert last == "[DONE]"
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == " word" * TOKENS, stream[:400]


def _added_latency(process: Process, backend: Process, block: int) -> dict[str, Any]:
    """Return median latency above the direct one, one request at a time, in blocks by turns."""
    added_ms, first_ms, direct_ms = [], [], []
    for _ in range(BLOCKS):
        direct, through = (closed_loop(of, chat(), block, 1) for of in (backend, process))
        direct_ms.append(1e3 * statistics.median(direct.total_s))
        added_ms.append(1e3 * statistics.median(through.total_s) - direct_ms[-1])
        stream = closed_loop(process, chat(stream=True, tokens=4), max(1, block // 4), 1)
        first_ms.append(1e3 * statistics.median(stream.first_s))
    details = {"direct_p50_ms": statistics.median(direct_ms), "machine": machine()}
    return {
        "added_p50_ms": summary(added_ms) | {"unit": "ms"} | details,
        "ttft_p50_ms": summary(first_ms) | {"unit": "ms"},
    }


def _memory_growth(process: Process, count: int) -> dict[str, Any]:
    """Return the growth of resident memory over requests of which every tenth is a stream."""
    stream = chat(stream=True, tokens=8)
    closed_loop(process, chat(), max(CONNECTIONS, count // 20), CONNECTIONS)
    closed_loop(process, stream, max(CONNECTIONS, count // 100), CONNECTIONS)
    rss_mib = [process.rss_mib()]
    for _ in range(10):
        closed_loop(process, chat(), int(0.9 * count) // 10, CONNECTIONS)
        closed_loop(process, stream, int(0.1 * count) // 10, CONNECTIONS)
        rss_mib.append(process.rss_mib())
    return {"value": rss_mib[-1] - rss_mib[0], "unit": "MiB", "requests": count, "rss_mib": rss_mib}


# Reordering


def rerank(_: Path, quick: bool) -> dict[str, Any]:
    """Return milliseconds to reorder 10,000 waiting requests, and to update the prediction of one of them."""
    from lengthwise.gateway.config import Admission, Dispatch, Order
    from lengthwise.gateway.core import Scheduler
    from lengthwise.gateway.request import LengthPrediction, Request
    from lengthwise.gateway.scheduling import WorkerState

    rng = np.random.default_rng(0)
    order = Order(mode="isrtf", rank="hrrn", max_wait_s=3600.0)  # a rank whose keys change with time
    scheduler = Scheduler(order, Admission(), Dispatch())
    scheduler.workers(0.0, [WorkerState("w", ("toy",), in_flight=1)])
    for i in range(WAITING + 1):
        prediction = LengthPrediction(float(rng.integers(1, 2000)))
        request = Request(i, i * 1e-3, "toy", int(rng.integers(1, 2000)), 4096, length_prediction=prediction)
        assert scheduler.offer(i * 1e-3, request) is None
    assert len(scheduler.schedule(15.0).assign) == 1
    waiting = [i for i in range(WAITING + 1) if scheduler.position(i) is not None]

    def timed_ms(run: Callable[[], Any]) -> float:
        start = time.thread_time()
        run()
        return (time.thread_time() - start) * 1e3

    def update(now_s: float, number: int) -> None:
        scheduler.reforecast(now_s, number, LengthPrediction(float(number % 1000) + 1.5))
        scheduler.schedule(now_s)

    repeats = 20 if quick else 200
    all_ms = [timed_ms(lambda s=20.0 + k: scheduler.rerank(s)) for k in range(repeats)]
    assert len({scheduler.position(i) for i in waiting}) == len(waiting) == WAITING
    chosen = rng.choice(waiting, repeats, replace=False).tolist()
    one_ms = [timed_ms(lambda k=k, i=i: update(300.0 + k, i)) for k, i in enumerate(chosen)]
    return {
        "gateway.rerank_10k_ms": summary(all_ms) | {"machine": machine()},
        "gateway.reforecast_in_10k_ms": {"value": statistics.median(one_ms), "unit": "ms", "better": "lower"},
    }
