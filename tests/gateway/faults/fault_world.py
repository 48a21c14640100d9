"""Gateways, in this process and in processes of their own, before emulated engines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from lengthwise.backend.process import free_port
from lengthwise.gateway.config import Engine, GatewayConfig, Listen, Order, PredictionConfig, ResilienceConfig
from lengthwise.testing.engine_server import EngineServer, EngineSpec, Limits, LinearSteps

CARE = ResilienceConfig(health_every_s=0.3, connect_s=2.0, open_s=0.2, drain_s=20.0)
_SERVE = """
import json, sys
told = json.loads(sys.argv[1])
if told["files"]:
    import resource
    resource.setrlimit(resource.RLIMIT_NOFILE, (told["files"], told["files"]))
from lengthwise.gateway.config import (
    Engine, PredictionConfig, GatewayConfig, Listen, ResilienceConfig, SharedQueueConfig, TenantsConfig,
)
from lengthwise.gateway.serve import serve
config = GatewayConfig(
    engines=tuple(Engine(url, concurrency=told["concurrency"]) for url in told["engines"]),
    prediction=PredictionConfig(predictor="none"),
    listen=Listen(port=told["port"], admin_port=0 if told["tenants"] or told["shared_queue"] else None),
    shared_queue=SharedQueueConfig(**told["shared_queue"]),
    resilience=ResilienceConfig(**told["resilience"]),
    tenants=TenantsConfig(**told["tenants"]),
)
serve(config, ready=lambda port, admin_port: print(port, admin_port, flush=True))
"""


def engine(*, seqs: int = 8, step_s: float = 0.004, port: int = 0) -> EngineServer:
    return EngineServer(EngineSpec(limits=Limits(seqs), steps=LinearSteps(fixed_s=step_s)), port=port)


def config_of(*engines: EngineServer, concurrency: int | None = 4, order: Order | None = None) -> GatewayConfig:
    return GatewayConfig(
        engines=tuple(Engine(one.url, concurrency=concurrency, generation_defaults="none") for one in engines),
        listen=Listen(port=0, admin_port=None),
        order=order or Order(window_tokens=10),
        prediction=PredictionConfig(predictor="none"),
        resilience=CARE,
    )


def body(tokens: int, word: str = "tell", *, stream: bool = True) -> dict[str, Any]:
    return {"model": "toy", "prompt": f"{word} {tokens}", "max_tokens": tokens, "stream": stream,
            "ignore_eos": True, "temperature": 0}  # fmt: skip


@dataclass
class Report:
    """The answer that a client received; status 0: no answer at all, -1: it broke off."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    raw: bytes = b""

    @property
    def complete(self) -> bool:
        return self.status == 200 and self.raw.endswith(b"data: [DONE]\n\n") and b'"error"' not in self.raw

    @property
    def text(self) -> str:
        events = [json.loads(one[6:]) for one in self.raw.decode().split("\n\n") if one.startswith("data: {")]
        return "".join(choice["text"] for event in events for choice in event["choices"])


async def ask(session: Any, port: int, what: dict[str, Any]) -> Report:
    import aiohttp

    reported = Report(0)
    try:
        async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=what) as answer:
            reported = Report(-1, dict(answer.headers))
            reported.raw = await answer.read()
            reported.status = answer.status
    except (aiohttp.ClientError, ConnectionError):
        pass
    return reported


@dataclass
class Gateway:
    """A process that serves."""

    port: int
    process: asyncio.subprocess.Process
    admin_port: int = 0

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    async def finished(self, within_s: float = 30.0) -> int:
        async with asyncio.timeout(within_s):
            return await self.process.wait()


@asynccontextmanager
async def gateway_process(
    urls: list[str],
    *,
    port: int = 0,
    concurrency: int | None = 4,
    files: int = 0,
    tenants: dict[str, Any] | None = None,
    shared_queue: dict[str, Any] | None = None,
) -> AsyncIterator[Gateway]:
    reported = {"engines": urls, "port": port or free_port(), "concurrency": concurrency, "files": files,
            "resilience": asdict(CARE), "tenants": tenants or {}, "shared_queue": shared_queue or {}}  # fmt: skip
    async with process("-c", _SERVE, json.dumps(reported)) as (running, first):
        ports = first.split()
        yield Gateway(int(ports[0]), running, int(ports[1]) if tenants or shared_queue else 0)


@asynccontextmanager
async def engine_process(port: int = 0) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    argv = ["-m", "lengthwise.testing.engine_server", "--port", str(port), "--fixed-s", "0.005"]
    async with process(*argv) as (running, first):
        yield running, first


@asynccontextmanager
async def process(*argv: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A Python process that has printed its first line; it is ended with the block."""
    running = await asyncio.create_subprocess_exec(
        sys.executable, *argv, stdout=asyncio.subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert running.stdout is not None
    try:
        async with asyncio.timeout(90):
            first = (await running.stdout.readline()).decode()
        assert first, "it ended before it said anything"
        yield running, first
    finally:
        with contextlib.suppress(ProcessLookupError):
            running.send_signal(signal.SIGKILL)
        await running.communicate()
