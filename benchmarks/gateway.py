"""Cost of the gateway and its peers on one core before a backend that answers at once, reorders, scaling, gain."""

import asyncio
import contextlib
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import uvloop
from _harness import ROOT, cpu_seconds, group_use, grouped, machine, posted, python_loop, summary, toml
from _sections import Sections

from lengthwise.backend.process import free_port
from lengthwise.gateway.config import Admission, Dispatch, Engine, Envoy, GatewayConfig, Listen, Order

ALL_CORES = sorted(os.sched_getaffinity(0))
MEASURED_CORE, OTHER_CORE = {ALL_CORES[0]}, {ALL_CORES[-1]}  # for all else; equal on a machine with one core
BLOCKS, TOKENS, CONNECTIONS, PACED_CONNECTIONS, GAP_MS = 8, 32, 16, 64, 5
IO_ROUNDS, IO_BYTES = 5_000, 256
TEXT = "Tell me in a few words how a request goes through a gateway, and what it waits for on its way. " * 6
WAITING = 10_000
FULL, QUICK = (2000, 6000, 1500, 1000, 100_000), (400, 1500, 300, 256, 5_000)
"""Requests one at a time, at once, back-to-back streams, paced streams, and for the growth of memory."""
LEAN_ENGINE, ENDURANCE = (ROOT / "tests" / one for one in ("testing/lean_engine.py", "gateway/faults/endurance.py"))
KEY = "sk-bench-0123456789"
GATEWAY = """
import json, sys
from lengthwise.gateway.config import Engine, Envoy, GatewayConfig, Key, Listen, Order
from lengthwise.gateway.serve import serve
engines, sha256, port, admin_port, *envoy = json.loads(sys.argv[1])
config = GatewayConfig(
    engines=tuple(Engine(url) for url in engines), order=Order(mode="isrtf"), envoy=Envoy(*envoy),
    keys=(Key("bench", sha256, rate_rps=float("inf")),), listen=Listen(port=port, admin_port=admin_port),
)
serve(config)
"""
PEERS = toml("peers")  # by name: command, file of configuration, share of requests of a slow program


# Processes
@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """Bind this thread, and the processes that it starts, to some cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclass(frozen=True)
class Process:
    """A running server with its group of processes, and the key that its clients send."""

    group: int
    url: str = ""
    key: str = ""


@contextmanager
def running(command: Sequence[str], cores: set[int]) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Run a process on some cores with its output in a file; end its group by SIGTERM, then SIGKILL."""
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        with log.open("w") as out, on_cores(cores):
            pipes = {"stdout": out, "stderr": subprocess.STDOUT, "text": True}
            process = subprocess.Popen(command, **pipes, process_group=0, cwd=scratch)
        try:
            yield process, log
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, number)
                    process.wait(timeout=10)
                    break


@contextmanager
def printed_json(command: Sequence[str], cores: set[int]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Run a process; yield its group and the first line of JSON that it prints."""
    with running([sys.executable, *command], cores) as (process, log):
        until = time.monotonic() + 60.0
        while not (lines := [line for line in log.read_text().splitlines() if re.fullmatch(r"\{.*\}", line)]):
            if time.monotonic() > until or process.poll() is not None:
                raise RuntimeError(f"the process was not ready after 60 s: {log.read_text()[-2000:]}")
            time.sleep(0.05)
        yield process.pid, json.loads(lines[0])


@contextmanager
def started(name: str, backends: list[str], within_s: float = 90.0) -> Iterator[Process]:
    """Run the gateway or a peer in front of backends once it answers a chat; raise LookupError if not installed."""
    port, until = free_port(), time.monotonic() + within_s
    key, url = KEY if name in ("gateway", "gateway.envoy", "peer.litellm") else "", f"http://127.0.0.1:{port}"
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(f"{url}/v1/chat/completions", chat(), headers)
    with running(_command(name, backends, port, free_port()), MEASURED_CORE) as (process, log):
        while True:
            try:
                with urllib.request.urlopen(request, timeout=20):
                    break
            except OSError as error:
                if time.monotonic() > until or process.poll() is not None:
                    raise RuntimeError(f"{name} answers no chat ({error}): {log.read_text()[-1500:]}") from error
            time.sleep(0.2)
        yield Process(process.pid, url, key)


def _command(name: str, backends: list[str], port: int, admin_port: int) -> list[str]:
    gateway, sha256 = [sys.executable, "-c", GATEWAY], hashlib.sha256(KEY.encode()).hexdigest()
    if name == "gateway":  # with queue, default prediction and keys
        return [*gateway, json.dumps([backends, sha256, port, admin_port])]
    if name == "gateway.envoy":  # the picker alone on the measured core
        carrier = envoy_command(backends, envoy := Envoy(free_port(), port=port))
        gateway.append(json.dumps([backends, sha256, free_port(), admin_port, envoy.ext_proc_port]))
        return ["bash", "-c", '"${@:1:4}" & exec taskset -c $0 "${@:5}"', str(min(OTHER_CORE)), *gateway, *carrier]
    if name == "peer.envoy":
        return envoy_command(backends, Envoy(1, port=port, failure="open"), plain=True)
    where = ["--host", "127.0.0.1", "--port", str(port)]
    program, *words = PEERS[name]["command"]
    if name == "peer.litellm":
        write = f'printf %s "$0" > config.yaml && LITELLM_MASTER_KEY={KEY} exec "$@"'
        config = PEERS[name]["config"].format(backend=backends[0])
        return ["bash", "-c", write, config, _program(program), *words, *where]
    where += ["--prometheus-port", str(admin_port)]
    return [_program(program), *words, "--worker-urls", *backends, "--policy", "round_robin", *where]


def envoy_command(engines: list[str], settings: Envoy, *, plain: bool = False) -> list[str]:
    """Return the command of an Envoy in front of engines, without its picker if ``plain``."""
    from lengthwise.gateway.envoy import bootstrap

    made = bootstrap(GatewayConfig(tuple(map(Engine, engines)), envoy=settings))
    if plain:
        (manager,) = made["static_resources"]["listeners"][0]["filter_chains"][0]["filters"]
        del manager["typed_config"]["http_filters"][0]
    return [_program("envoy"), "--config-yaml", json.dumps(made), "--concurrency", "1", "--disable-hot-restart"]


def _program(name: str) -> str:
    folders = [str(Path(sys.executable).parent), os.environ.get("LENGTHWISE_PEERS", ""), os.environ.get("PATH", "")]
    if (path := shutil.which(name, path=os.pathsep.join(folders))) is None:
        raise LookupError(f"{name} is not installed (next to this Python, on PATH, or in LENGTHWISE_PEERS)")
    return path


# A client of little cost: raw connections, requests prepared as bytes, responses only delimited
def chat(*, stream: bool = False, tokens: int = TOKENS, gap_ms: int = 0) -> bytes:
    """Return the body of a chat of about 700 bytes."""
    messages = [{"role": "user", "content": (f"<gap:{gap_ms}> " if gap_ms else "") + TEXT}]
    fields = {"model": "toy", "messages": messages, "max_tokens": tokens, "temperature": 0}
    return json.dumps(fields | ({"stream": True} if stream else {})).encode()


@dataclass
class Times:
    """Seconds of a load; ``first_s`` until the first byte of each body, ``sample`` the first or a failed one."""

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
    at, key = urlsplit(process.url), [f"Authorization: Bearer {process.key}"] if process.key else []
    lines = ["POST /v1/chat/completions HTTP/1.1", f"Host: {at.netloc}", "Content-Type: application/json", *key]
    data = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body

    async def run() -> Times:
        loop, times, left = asyncio.get_running_loop(), Times(), [1] * count
        connect = partial(loop.create_connection, lambda: Connection(data, left, times), at.hostname, at.port)
        start = time.perf_counter()
        closed = [(await connect())[1].closed for _ in range(connections)]
        await asyncio.wait_for(asyncio.gather(*closed), 120.0)
        times.wall_s = time.perf_counter() - start
        return times

    times = uvloop.run(run())
    failures = times.failures + count - len(times.total_s)
    assert failures == 0, f"{failures} of {count} requests failed: {times.sample[:400]!r}"
    return times


# Overhead of the gateway and its peers
def overhead(_: Path, quick: bool, name: str) -> dict[str, Any]:
    """Return added latency, rate, CPU and memory of one program, with the machine's pace before and after."""
    try:
        with on_cores(OTHER_CORE):
            before = _pace()
            with printed_json([str(LEAN_ENGINE)], OTHER_CORE) as (group, printed):
                backend = Process(group, printed["url"])
                with started(name, [backend.url]) as process:
                    rows = _measured(name, process, backend, QUICK if quick else FULL)
            after = _pace()
    except LookupError as error:
        return {f"{name}.skipped": {"skipped": str(error)}}
    except (RuntimeError, TimeoutError, AssertionError) as error:
        if name.startswith("gateway"):
            raise
        return {f"{name}.skipped": {"skipped": f"the program does not work: {error!r}"}}
    rows |= {pace: summary([*before[pace], *after[pace]]) | {"unit": "us"} for pace in before}
    return {f"{name}.{n}": {"better": "higher" if n == "rps" else "lower"} | row for n, row in rows.items()}


def _pace() -> dict[str, list[float]]:
    """Return microseconds of fixed work on the measured core: only runs with similar values can be compared."""

    def socket_io() -> None:
        one, other = socket.socketpair()
        with one, other:
            for _ in range(IO_ROUNDS):
                one.send(b"x" * IO_BYTES)
                other.recv(IO_BYTES)

    with on_cores(MEASURED_CORE):
        work = {"machine_pace": python_loop, "machine_pace_io": socket_io}
        return {name: [1e6 * s for s in cpu_seconds(run, 7)] for name, run in work.items()}


def _measured(name: str, process: Process, backend: Process, counts: tuple[int, ...]) -> dict[str, Any]:
    single, many, streams, paced, memory = (max(BLOCKS, int(PEERS.get(name, {}).get("share", 1.0) * n)) for n in counts)
    _check(process, backend)
    closed_loop(process, chat(), max(BLOCKS, many // 10), 4)  # warms up
    rows = _added_latency(process, backend, max(1, single // BLOCKS))
    for figure, count, units, connections, options in (
        ("cpu_us_per_request", many, many, CONNECTIONS, {}),
        ("cpu_us_per_token_back_to_back", streams, streams * TOKENS, CONNECTIONS, {"stream": True}),
        ("cpu_us_per_token", paced, paced * TOKENS, PACED_CONNECTIONS, {"stream": True, "gap_ms": GAP_MS}),
    ):
        before = group_use(process.group)[0]
        times = closed_loop(process, chat(**options), count, min(connections, count))
        rows[figure] = {"value": (group_use(process.group)[0] - before) / units * 1e6, "unit": "us"}
        if not options:
            rows["rps"] = {"value": many / times.wall_s, "unit": "requests/s"}
    if name == "gateway":
        rows["rss_growth_mib"] = _memory_growth(process, memory)
    return rows


def _check(process: Process, backend: Process) -> None:
    """Check that responses are the backend's own: the text of a complete one, and all tokens of a stream."""
    bodies = [json.loads(closed_loop(of, chat(), 1, 1).sample) for of in (process, backend)]
    assert len({body["choices"][0]["message"]["content"] for body in bodies}) == 1
    stream = closed_loop(process, chat(stream=True), 1, 1).sample.decode()
    *events, last = [line[5:].strip() for line in stream.splitlines() if line.startswith("data:")]
    assert last == "[DONE]"
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices) == " word" * TOKENS, stream[:400]


def _added_latency(process: Process, backend: Process, block: int) -> dict[str, Any]:
    """Return median latency above the direct one, one request at a time, in blocks by turns."""
    added_ms, first_ms = [], []
    for _ in range(BLOCKS):
        direct, through = (statistics.median(closed_loop(of, chat(), block, 1).total_s) for of in (backend, process))
        added_ms.append(1e3 * (through - direct))
        stream = closed_loop(process, chat(stream=True, tokens=4), max(1, block // 4), 1)
        first_ms.append(1e3 * statistics.median(stream.first_s))
    added = summary(added_ms) | {"unit": "ms", "machine": machine()}
    return {"added_p50_ms": added, "ttft_p50_ms": summary(first_ms) | {"unit": "ms"}}


def _memory_growth(process: Process, count: int) -> dict[str, Any]:
    """Return the growth of resident memory over requests of which every tenth is a stream."""
    rss_mib = []
    for requests in (max(10 * CONNECTIONS, count // 20), count):
        closed_loop(process, chat(), int(0.9 * requests), CONNECTIONS)
        closed_loop(process, chat(stream=True, tokens=8), max(CONNECTIONS, requests // 10), CONNECTIONS)
        rss_mib.append(group_use(process.group)[1])
    return {"value": rss_mib[1] - rss_mib[0], "unit": "MiB", "requests": count}


def picker(_: Path, quick: bool) -> dict[str, Any]:
    """Return CPU microseconds from the messages of a request to its engine and its end, without gRPC's transport."""
    from lengthwise import predict
    from lengthwise.gateway.envoy import messages
    from lengthwise.gateway.length_prediction.prediction import measure_latency_s
    from lengthwise.gateway.serve import Gateway

    count, left, last = 100 if quick else 1000, list[bytes](), list[bytes]()
    named = {":method": "POST", ":path": "/v1/chat/completions", "x-forwarded-for": "10.0.0.1"}
    headers = [{"key": name, "raw_value": value.encode()} for name, value in named.items()]
    head = messages.ProcessingRequest(request_headers={"headers": {"headers": headers}})
    content = messages.ProcessingRequest(request_body={"body": chat(), "end_of_stream": True})
    stream = SimpleNamespace(read=lambda: asyncio.sleep(0, left.pop()), write=last.append)
    stream.each = lambda _: asyncio.sleep(0)  # the client is gone once its request has an engine

    async def run(url: str) -> dict[str, Any]:
        config = GatewayConfig((Engine(url),), envoy=Envoy(0), listen=Listen(port=0, admin_port=0))
        async with Gateway(config) as gateway:
            times_s = [time.thread_time()]
            for number in range((BLOCKS + 1) * count):
                left.extend((content.SerializeToString(), head.SerializeToString()))
                await gateway.picker.process(stream)
                times_s += [time.thread_time()] if number % count == count - 1 else []
            of_prediction = {"prediction_us": 1e6 * measure_latency_s(predict.default())}
        assert urlsplit(url).netloc.encode() in last[-1]
        return summary((np.diff(times_s[1:]) / count * 1e6).tolist()) | of_prediction

    with on_cores(MEASURED_CORE), printed_json([str(LEAN_ENGINE)], OTHER_CORE) as (_, printed):
        return {"gateway.picker_decision_us": uvloop.run(run(printed["url"])) | {"machine": machine()}}


def rerank(_: Path, quick: bool) -> dict[str, Any]:
    """Return CPU milliseconds to reorder 10,000 waiting requests."""
    from lengthwise.gateway.core import Scheduler
    from lengthwise.gateway.request import LengthPrediction, Request
    from lengthwise.gateway.scheduling import WorkerState

    rng, order = np.random.default_rng(0), Order(mode="isrtf", rank="hrrn", max_wait_s=3600.0)  # keys change with time
    scheduler = Scheduler(order, Admission(), Dispatch())
    scheduler.update_workers(0.0, [WorkerState("w", ("toy",), concurrency=1)])
    for i in range(WAITING + 1):
        prediction = LengthPrediction(float(rng.integers(1, 2000)))
        request = Request(i, i * 1e-3, "toy", int(rng.integers(1, 2000)), 4096, length_prediction=prediction)
        assert scheduler.offer(i * 1e-3, request) is None
    assert len(scheduler.schedule(15.0).assign) == 1
    waiting = [i for i in range(WAITING + 1) if scheduler.position(i) is not None]

    now_s = itertools.count(20.0)
    times_s = cpu_seconds(lambda: scheduler.queue.rerank(next(now_s)), 20 if quick else 200)
    assert len({scheduler.position(i) for i in waiting}) == len(waiting) == WAITING
    return {"gateway.rerank_10k_ms": summary([1e3 * s for s in times_s]) | {"machine": machine()}}


def shared_queue(_: Path, quick: bool) -> dict[str, Any]:
    """Return mean JCT at 4 gateways with a shared queue over that at one at the worse of two loads, and all runs."""
    command = [sys.executable, str(ROOT / "tests/gateway/shared_queue/paired_queues.py"), "4", "10" if quick else "60"]
    runs = [json.loads(line) for line in subprocess.check_output([*command, "0.9", "0.97"]).splitlines()]
    by_load = grouped(runs, lambda one: one["load"]).values()
    worst = max((summary([one["ratio"] for one in of]) for of in by_load), key=lambda row: row["value"])
    return {"gateway.shared_queue_jct_ratio": worst | {"runs": runs, "machine": machine()}}


# Scale: the peak rate by the number of engines behind one gateway, emulated in real time
STEP_S, MAX_NUM_SEQS, SHORTEST, LONGEST = 0.05, 4, 10, 30
ENGINE_RPS = MAX_NUM_SEQS / ((SHORTEST + LONGEST) / 2 * STEP_S)  # rate of an engine whose slots are all busy
MAX_DELAY_S, PER_PROCESS = 0.5, 25


def scale(_: Path, quick: bool) -> dict[str, Any]:
    """Return peak rates at a mean delay of at most MAX_DELAY_S with 10 and 50 engines, and their ratio."""
    with on_cores(OTHER_CORE):
        peaks = {engines: _peak(engines, quick=quick) for engines in (10, 50)}
    rows = {f"gateway.peak_rps_{n}": {"value": of[0], "unit": "requests/s", "probes": of[1]} for n, of in peaks.items()}
    return rows | {"gateway.scale_50_over_10": {"value": peaks[50][0] / peaks[10][0], "machine": machine()}}


def _peak(engines: int, *, quick: bool) -> tuple[float, list[dict[str, float]]]:
    """Return the largest rate with an acceptable delay, by bisection, and all probes."""
    span_s, halvings = (10.0, 3) if quick else (40.0, 5)
    low, high, probes = 0.5, 1.0, []
    with contextlib.ExitStack() as stack:
        urls: list[str] = []
        for first in range(0, engines, PER_PROCESS):
            sizes = f"--count {min(PER_PROCESS, engines - first)} --max-num-seqs {MAX_NUM_SEQS} --fixed-s {STEP_S}"
            command = f"-m lengthwise.testing.engine_server {sizes} --decode-s 0 --prompt-token-s 0".split()
            urls += stack.enter_context(printed_json(command, OTHER_CORE))[1]["urls"]
        gateway = stack.enter_context(started("gateway", urls, within_s=120.0))
        _probe(gateway, 0.5 * engines * ENGINE_RPS, 3.0 if quick else 8.0, seed=0)  # concurrency limits adapt
        for number in range(halvings + 1):
            share = low if number == 0 else (low + high) / 2
            probe = _probe(gateway, share * engines * ENGINE_RPS, span_s, seed=1)
            probes.append({"share": share} | probe)
            if probe["delay_s"] <= MAX_DELAY_S:
                low = share
            elif number == 0:
                raise AssertionError(f"the gateway does not sustain half of the load: {probe}")
            else:
                high = share
    return low * engines * ENGINE_RPS, probes


def _probe(gateway: Process, rate_rps: float, span_s: float, seed: int) -> dict[str, float]:
    """Send requests in an open loop; return seconds above the steps that a request needs, and the CPU share."""
    rng = np.random.default_rng(seed)
    due_s = np.cumsum(rng.exponential(1 / rate_rps, int(rate_rps * span_s))).tolist()
    lengths = rng.integers(SHORTEST, LONGEST + 1, len(due_s)).tolist()
    fixed = {"model": "toy", "prompt": "a fixed length", "ignore_eos": True}
    before, start = group_use(gateway.group)[0], time.perf_counter()
    found = uvloop.run(posted(gateway.url, [fixed | {"max_tokens": n} for n in lengths], due_s, key=gateway.key))
    cpu_share = (group_use(gateway.group)[0] - before) / (time.perf_counter() - start)
    assert [json.loads(content)["usage"]["completion_tokens"] for *_, content in found] == lengths
    delays_s = [end_s - sent_s - n * STEP_S for n, (_, sent_s, end_s, _) in zip(lengths, found, strict=True)]
    assert min(delays_s) > -STEP_S, f"faster than its own steps: {min(delays_s)}"
    return {"rate_rps": rate_rps, "delay_s": statistics.fmean(delays_s), "gateway_cpu_share": cpu_share}


def endurance(_: Path, quick: bool) -> dict[str, Any]:
    """Return requests that a gateway lost, and problems, in an hour with a fault every minute; and its memory."""
    options = ["--minutes", "0.7", "--period-s", "2.5"] if quick else []
    done = subprocess.run([sys.executable, ENDURANCE, *options], stdout=subprocess.PIPE, text=True, check=False)
    rss = (found := json.loads(done.stdout))["growth"]["rss_mib"]
    found |= {"value": found["lost"] + len(found["problems"]), "machine": machine()}
    return {"gateway.endurance.lost": found, "gateway.endurance.rss_mib_per_hour": rss | {"value": rss["per_hour"]}}


SECTIONS = Sections("gateway", __doc__)

if __name__ == "__main__":
    SECTIONS.main()
