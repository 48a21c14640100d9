"""The gateway and its peers: how each is started for one model at one backend, as its manual says."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

import _gateway_wire as wire
from _gateway_procs import Process, answers, cores, found, free_port, running

KEY = "sk-bench-0123456789"
_OURS = """
import json, sys
from lengthwise.gateway.config import Engine, GatewayConfig, Key, Listen, Order
from lengthwise.gateway.serve import serve
told = json.loads(sys.argv[1])
config = GatewayConfig(
    engines=tuple(Engine(url) for url in told["engines"]),
    order=Order(mode=told["mode"]),
    keys=(Key("bench", told["sha256"], rate_rps=float("inf")),),
    listen=Listen(port=told["port"], admin_port=told["admin_port"]),
)
serve(config)
"""
LITELLM = """
model_list:
  - model_name: toy
    litellm_params: {{model: openai/toy, api_base: "{backend}/v1", api_key: none}}
litellm_settings: {{telemetry: false}}
"""


@dataclass(frozen=True)
class Target:
    """Something that stands before a backend.

    Attributes:
        name: In the names of figures: "gateway", or "peer.NAME".
        argv: From (backend, port, admin port) to its command; raises LookupError where it is not installed.
        light: Share of the usual number of requests, for slow ones.
        key: That clients show.
    """

    name: str
    argv: Callable[[list[str], int, int], list[str]]
    light: float = 1.0
    key: str = ""

    @contextmanager
    def up(self, backends: list[str], *, within_s: float = 90.0) -> Iterator[Process]:
        """It runs, pinned to one core, and answers."""
        port = free_port()
        argv = self.argv(backends, port, free_port())
        with running(argv, cores()[0]) as (process, log):
            url = f"http://127.0.0.1:{port}"
            answers(process, log, url, wire.body(), self.key, within_s)
            yield Process(process.pid, url, self.key)


def ours(mode: str = "isrtf") -> Target:
    """The gateway: queue, lexical prediction and keys on."""

    def argv(backends: list[str], port: int, admin_port: int) -> list[str]:
        if find_spec("lengthwise.gateway.serve") is None:
            raise LookupError("lengthwise.gateway.serve is not there")
        sha256 = hashlib.sha256(KEY.encode()).hexdigest()
        told = {"engines": backends, "mode": mode, "sha256": sha256, "port": port, "admin_port": admin_port}
        return [sys.executable, "-c", _OURS, json.dumps(told)]

    return Target("gateway", argv, key=KEY)


def _program(name: str) -> str:
    if (path := found(name)) is None:
        raise LookupError(f"{name} is not installed (beside this Python, on PATH, or in LENGTHWISE_PEERS)")
    return path


def _rust(program: str, *more: str) -> Callable[[list[str], int, int], list[str]]:
    def argv(backends: list[str], port: int, admin_port: int) -> list[str]:
        where = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(admin_port)]
        return [_program(program), *more, "--worker-urls", *backends, "--policy", "round_robin", *where]

    return argv


def _litellm(backends: list[str], port: int, _: int) -> list[str]:
    """One worker, its defaults, no database; it does not start without a key."""
    write = f'printf %s "$0" > config.yaml && LITELLM_MASTER_KEY={KEY} exec "$@"'
    where = ["--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port)]
    return ["bash", "-c", write, LITELLM.format(backend=backends[0]), _program("litellm"), *where]


PEERS = (
    Target("peer.vllm_router", _rust("vllm-router")),
    Target("peer.smg", _rust("smg", "launch")),
    Target("peer.sglang_router", _rust("sglang-router", "launch")),
    Target("peer.litellm", _litellm, light=0.05, key=KEY),
)
