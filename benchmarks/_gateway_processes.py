"""Processes under measurement: the gateway and its peers, each started on one core as its manual says."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lengthwise.backend.process import free_port

ALL_CORES = sorted(os.sched_getaffinity(0))
MEASURED_CORE, OTHER_CORE = {ALL_CORES[0]}, {ALL_CORES[-1]}
"""For what is measured and for all else; equal on a machine with one core."""
KEY = "sk-bench-0123456789"
GATEWAY = """
import json, sys
from lengthwise.gateway.config import Engine, GatewayConfig, Key, Listen, Order
from lengthwise.gateway.serve import serve
options = json.loads(sys.argv[1])
serve(GatewayConfig(
    engines=tuple(Engine(url) for url in options["engines"]),
    order=Order(mode="isrtf"),
    keys=(Key("bench", options["sha256"], rate_rps=float("inf")),),
    listen=Listen(port=options["port"], admin_port=options["admin_port"]),
))
"""
LITELLM = """
model_list:
  - model_name: toy
    litellm_params: {{model: openai/toy, api_base: "{backend}/v1", api_key: none}}
litellm_settings: {{telemetry: false}}
"""


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """Bind this thread, and the processes that it starts, to some cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def running(command: Sequence[str], cores: set[int]) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Run a process on some cores with its output in a file; end its group by SIGTERM, then SIGKILL."""
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        with log.open("w") as out, on_cores(cores):
            process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, text=True, process_group=0, cwd=scratch
            )
        try:
            yield process, log
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, number)
                    process.wait(timeout=10)
                    break


def first_json(process: subprocess.Popen[str], log: Path, within_s: float = 60.0) -> dict[str, Any]:
    """Wait for the first line of JSON that a process prints."""
    until = time.monotonic() + within_s
    while time.monotonic() < until and process.poll() is None:
        for line in log.read_text().splitlines():
            if line.startswith("{") and line.endswith("}"):
                return dict(json.loads(line))
        time.sleep(0.05)
    raise RuntimeError(f"the process was not ready after {within_s:g} s: {log.read_text()[-2000:]}")


@dataclass(frozen=True)
class Process:
    """A running server with all its child processes, and the key that its clients send."""

    pid: int
    url: str = ""
    key: str = ""

    def _tree(self) -> list[int]:
        found = [self.pid]
        for pid in found:
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    found += map(int, children.read_text().split())
        return found

    def cpu_s(self) -> float:
        """Return user and system seconds so far."""
        ticks = 0
        for pid in self._tree():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def rss_mib(self) -> float:
        """Return resident memory."""
        pages = 0
        for pid in self._tree():
            with contextlib.suppress(OSError):
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


@dataclass(frozen=True)
class Target:
    """A program in front of a backend.

    Attributes:
        name: Prefix of its figures: "gateway", or "peer.NAME".
        command: From (backends, port, admin port) to its command; raises LookupError where it is not installed.
        light: Share of the usual number of requests, for slow programs.
        key: API key that clients send.
    """

    name: str
    command: Callable[[list[str], int, int], list[str]]
    light: float = 1.0
    key: str = ""

    @contextmanager
    def started(self, backends: list[str], data: bytes, within_s: float = 90.0) -> Iterator[Process]:
        """Run it on one core once it answers ``data``, a chat, with 200."""
        port = free_port()
        url, failure, until = f"http://127.0.0.1:{port}", "", time.monotonic() + within_s
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        with running(self.command(backends, port, free_port()), MEASURED_CORE) as (process, log):
            while True:
                try:
                    request = urllib.request.Request(f"{url}/v1/chat/completions", data, headers)
                    with urllib.request.urlopen(request, timeout=20):
                        break
                except urllib.error.HTTPError as error:
                    failure = f"{error.code} {error.read()[:300]!r}"
                except OSError as error:
                    failure = str(error)
                if time.monotonic() > until or process.poll() is not None:
                    raise RuntimeError(f"{self.name} answers no chat ({failure}): {log.read_text()[-1500:]}")
                time.sleep(0.2)
            yield Process(process.pid, url, self.key)


def _gateway(backends: list[str], port: int, admin_port: int) -> list[str]:
    sha256 = hashlib.sha256(KEY.encode()).hexdigest()
    options = {"engines": backends, "sha256": sha256, "port": port, "admin_port": admin_port}
    return [sys.executable, "-c", GATEWAY, json.dumps(options)]


def _program(name: str) -> str:
    """Find a program next to this Python, in the folders of LENGTHWISE_PEERS, or on PATH."""
    folders = [str(Path(sys.executable).parent), os.environ.get("LENGTHWISE_PEERS", ""), os.environ.get("PATH", "")]
    if (path := shutil.which(name, path=os.pathsep.join(folders))) is None:
        raise LookupError(f"{name} is not installed (next to this Python, on PATH, or in LENGTHWISE_PEERS)")
    return path


def _rust(program: str, *words: str) -> Callable[[list[str], int, int], list[str]]:
    def command(backends: list[str], port: int, admin_port: int) -> list[str]:
        where = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(admin_port)]
        return [_program(program), *words, "--worker-urls", *backends, "--policy", "round_robin", *where]

    return command


def _litellm(backends: list[str], port: int, _: int) -> list[str]:
    """Return the command with one worker, default options and no database; LiteLLM does not start without a key."""
    write = f'printf %s "$0" > config.yaml && LITELLM_MASTER_KEY={KEY} exec "$@"'
    where = ["--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port)]
    return ["bash", "-c", write, LITELLM.format(backend=backends[0]), _program("litellm"), *where]


OWN = Target("gateway", _gateway, key=KEY)
"""The gateway with queue, default prediction and keys."""
TARGETS = (
    OWN,
    Target("peer.vllm_router", _rust("vllm-router")),
    Target("peer.smg", _rust("smg", "launch")),
    Target("peer.sglang_router", _rust("sglang-router", "launch")),
    Target("peer.litellm", _litellm, light=0.05, key=KEY),
)
