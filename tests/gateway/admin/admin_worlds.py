"""Gateways in a state: the real scheduler and telemetry in virtual time, engines that are only reported."""

from __future__ import annotations

import asyncio
import socket
import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Self

import numpy as np

from lengthwise.gateway.admin import AdminApp
from lengthwise.gateway.config import OWN_ROUTER, Admission, Dispatch, Engine, GatewayConfig, Limits, Order
from lengthwise.gateway.core import Scheduler
from lengthwise.gateway.edge import server
from lengthwise.gateway.request import Client, LengthPrediction, Outcome, PrefixHasher, PromptPrefix, Refusal, Request
from lengthwise.gateway.scheduling import Signals, WorkerState
from lengthwise.gateway.telemetry import Telemetry
from lengthwise.predict import LEVELS, LengthDistribution

NAMES = ("vllm-0:8000", "vllm-1:8000", "vllm-2:8000")
MODEL = "meta-llama/Llama-3.1-8B-Instruct"
EVIL = "<img src=x onerror=alert(1)>"


@dataclass
class World:
    """A gateway's parts without a network; time is moved by hand."""

    mode: str = "isrtf"
    engines: int = 3
    down: tuple[str, ...] = ()
    now_s: float = 1000.0
    states: list[WorkerState] = field(default_factory=list)
    found: dict | None = None
    router: str = OWN_ROUTER

    def __post_init__(self) -> None:
        self.config = GatewayConfig(engines=(Engine("http://e:1"),), order=Order(mode=self.mode))
        self.dispatch = Dispatch(start=6, max_concurrency=6, router=self.router)
        self.scheduler = Scheduler(self.config.order, Admission(), self.dispatch)
        self.hasher = PrefixHasher(b"key")
        self.driver = SimpleNamespace(
            statistics=lambda: self.scheduler.statistics(self.now_s), position=self.scheduler.position
        )
        self.telemetry = Telemetry(self.config, lambda: self.now_s, statistics=self.driver.statistics)
        self.tell_engines()
        self.app = AdminApp(
            self.config,
            self.driver,
            SimpleNamespace(states=lambda: self.states, worker=self.worker),
            SimpleNamespace(state=lambda: {"predictor": "lexical", "where": "in line", "sources": {"predictor": 400}}),
            self.telemetry,
            monitor=SimpleNamespace(estimate=self.found) if self.found else None,
            clock=lambda: self.now_s,
        )

    def worker(self, name: str):
        opened = name in self.down
        return SimpleNamespace(
            kind="vllm",
            unavailable_reason=lambda _: "down: no connection" if opened else "",
            breaker=SimpleNamespace(state=lambda _: "open" if opened else "closed"),
        )

    def tell_engines(self) -> None:
        numbers = {s.name: s for s in self.scheduler.statistics(self.now_s).workers}
        self.states = []
        for i, name in enumerate(NAMES[: self.engines]):
            up = name not in self.down
            running = numbers[name].in_flight if name in numbers else 0
            signals = Signals(running, 0, 0.15 + 0.12 * running + 0.02 * i, 0, self.now_s) if up else Signals()
            speed = 60.0 + 22.0 * running if up and running else None
            self.states.append(WorkerState(name, (MODEL,), up, tokens_per_s=speed, signals=signals))
        self.scheduler.update_workers(self.now_s, self.states)

    def live(self, seconds: float, rate_rps: float, seed: int = 0) -> World:
        """Traffic for so long: engines make a token every 30 ms for each of their requests."""
        rng = np.random.default_rng(seed)
        running: dict[int, tuple[Request, int]] = {}
        queued: dict[int, tuple[Request, int]] = {}
        number, tick = 0, 0.25
        for step in range(int(seconds / tick)):
            self.now_s += tick
            for _ in range(rng.poisson(rate_rps * tick)):
                number += 1
                request, length = self.request(number, rng)
                if self.scheduler.offer(self.now_s, request) is None:
                    self.telemetry.on_admission(request)
                    queued[number] = (request, length)
            for one, (request, length) in list(running.items()):
                self.ran(request, length, tick)
                if request.generated_tokens >= length:
                    del running[one]
                    self.scheduler.remove(self.now_s, one)
                    self.telemetry.on_end(request, Outcome.FINISHED, self.now_s)
            self.schedule(queued, running)
            if step % 8 == 0:
                self.app.state.recent.sample()
                self.tell_engines()
        return self

    def request(self, number: int, rng) -> tuple[Request, int]:
        typical = float(np.exp(rng.normal(4.6, 0.8)))
        length = max(1, int(typical * np.exp(rng.normal(0, 0.5))))
        levels = LengthDistribution.of(np.exp(np.log(typical) + 0.5 * _normal(LEVELS))[None, :])
        length_prediction = LengthPrediction(float(levels.mean[0]), "predictor", levels.tokens[0])
        return Request(
            number, self.now_s, MODEL, int(rng.integers(20, 800)), 4096, Client(priority=int(number % 7 == 0)),
            preemptible=True, length_prediction=length_prediction, body_bytes=900, prefix=self.prefix(number),
        ), length  # fmt: skip

    def prefix(self, number: int) -> PromptPrefix:
        """One of five system prompts, if a router compares prompts."""
        text = f"You are assistant {number % 5}. " * 100 if self.router != OWN_ROUTER else ""
        return self.hasher.of_text(text, len(text) // 4, model=MODEL)

    def ran(self, request: Request, length: int, tick: float) -> None:
        more = min(int(tick / 0.03), length - request.generated_tokens)
        before = request.generated_tokens
        self.scheduler.on_progress(self.now_s, request.id, before + more)
        if before == 0:
            self.telemetry.first_token(request, self.now_s)
        self.telemetry.tokens(request, more, self.now_s)

    def schedule(self, queued, running) -> None:
        for _ in range(3):
            decisions = self.scheduler.schedule(self.now_s)
            for one in decisions.preempt:
                queued[one] = running.pop(one)
                self.scheduler.requeue(self.now_s, one, queued[one][0].generated_tokens)
                self.telemetry.requeued(queued[one][0], "preemption", self.now_s)
            for one, worker in decisions.assign:
                running[one] = queued.pop(one)
                self.telemetry.dispatched(running[one][0], worker, self.now_s)

    def troubled(self) -> World:
        for _ in range(40):
            self.telemetry.refused("queue_full", Refusal(429, "queue_full", ""), 0, MODEL)
        self.telemetry.refused("unknown_model", Refusal(404, "unknown_model", ""), 0, EVIL)
        request = Request(10**6, self.now_s - 3, MODEL, 50, 100)
        self.telemetry.on_admission(request)
        self.telemetry.dispatched(request, NAMES[2], self.now_s - 2)
        self.telemetry.on_end(request, Outcome.FAILED, self.now_s, "The engine failed: closed early: SECRET")
        return self


def _normal(levels):
    from scipy.special import ndtri

    return ndtri(np.clip(levels, 0.001, 0.999))


class Served:
    """An ASGI app on a port of this machine, on a thread of its own."""

    def __init__(self, app) -> None:
        self.app = app
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = server(app, Limits(), drain_s=1)
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        asyncio.run(self.server.serve(sockets=[self._socket]))

    def __enter__(self) -> Self:
        self._thread.start()
        while not self.server.started:
            assert self._thread.is_alive()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._socket.close()
