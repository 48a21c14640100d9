"""A relay with real scripted engines, the real scheduler, and a fleet and length_predictor that never change."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from scripted_engine import Scripted

from lengthwise.backend.openai_protocol import Capabilities
from lengthwise.gateway.config import Admission, Dispatch, Engine, GatewayConfig, Order, ResilienceConfig
from lengthwise.gateway.core import Scheduler
from lengthwise.gateway.protocols import Listener
from lengthwise.gateway.relay import Relay, open_session
from lengthwise.gateway.request import Client, ClientRequest, LengthPrediction, Outcome, Request
from lengthwise.gateway.scheduler_driver import SchedulerDriver
from lengthwise.gateway.scheduling import WorkerState

IDS = Capabilities(models=("m",), max_model_len=100_000, token_id_prompts=True, token_ids_each=True, own_defaults=False)
BARE = Capabilities(models=("m",))


@dataclass
class FixedWorker:
    name: str
    url: str
    capabilities: Capabilities
    session: Any
    kind: str = "vllm"


class FixedFleet:
    def __init__(self, workers: list[FixedWorker], cap: int | None) -> None:
        self.by_name = {worker.name: worker for worker in workers}
        self.faults: list[tuple[str, str]] = []
        self.rejections: list[tuple[str, str, str]] = []
        self.cap = cap
        self.listener = Listener()

    async def wait_checked(self, within_s: float) -> bool:
        return True

    async def configure(self, config: GatewayConfig) -> None:
        pass

    def entries(self) -> dict:
        return {}

    def models(self) -> tuple[str, ...]:
        return ("m",)

    def ready(self) -> bool:
        return True

    def worker(self, name: str) -> FixedWorker:
        return self.by_name[name]

    def workers(self) -> tuple[FixedWorker, ...]:
        return tuple(self.by_name.values())

    def record_broken_response(self, name: str, cause: str) -> None:
        self.faults.append((name, cause))

    def record_error_response(self, name: str, owner: object) -> None:
        self.faults.append((name, "report"))

    def is_suspect(self, name: str, model: str) -> bool:
        return False

    def record_rejection_check(self, name: str, model: str, *, wrong: bool) -> None:
        pass

    def record_first_output(self, name: str) -> None:
        """Nothing is kept of it."""

    def succeeded(self, name: str, model: str) -> None:
        pass

    def record_rejection(self, name: str, model: str, session: str) -> None:
        self.rejections.append((name, model, session))

    def states(self) -> tuple[WorkerState, ...]:
        return tuple(WorkerState(name, ("m",), concurrency=self.cap) for name in self.by_name)


class Report:
    """Predicts the number that is the prompt's last word."""

    async def predict(self, request: Request, text: str | None) -> LengthPrediction:
        words = (text or "").split()
        return LengthPrediction(float(words[-1]) if words and words[-1].isdigit() else 100.0, "oracle")

    async def repredict(self, request: Request, text: str | None, generated_text: str | None) -> LengthPrediction:
        return request.length_prediction


class Ledger(Listener):
    """The events that listeners received."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.outcomes: Counter[Outcome] = Counter()
        self.cause: list[str] = []
        self.details: list[str] = []
        self.tokens_of: Counter[int] = Counter()

    def on_admission(self, request: Request) -> None:
        self.events.append(("on_admission", request.id))

    def first_token(self, request: Request, now_s: float) -> None:
        self.events.append(("first_token", request.id))

    def tokens(self, request: Request, new_tokens: int, now_s: float) -> None:
        self.tokens_of[request.id] += new_tokens

    def requeued(self, request: Request, cause: str, now_s: float) -> None:
        self.cause.append(cause)

    def on_end(self, request: Request, outcome: Outcome, now_s: float, detail: str = "") -> None:
        self.events.append(("finished", request.id))
        self.outcomes[outcome] += 1
        self.details.append(detail)


class ChunkWriter:
    """A client's connection: what it takes comes behind what was read."""

    def __init__(self, parts: list[bytes], takes: Callable[[], bool] = lambda: True) -> None:
        self.parts, self.can_write, self.passed = parts, takes, 0

    def write_chunk(self, chunk: bytes) -> None:
        self.parts.append(chunk)
        self.passed += 1


@dataclass
class World:
    relay: Relay
    driver: SchedulerDriver
    fleet: FixedFleet
    ledger: Ledger
    engines: list[Scripted]
    scheduler: Scheduler
    extra: dict[str, Any] = field(default_factory=dict)
    takes: Callable[[], bool] | None = None
    """Whether a client's connection takes a piece at once; None: all are read."""
    passed: int = 0

    async def submit(
        self, body: dict[str, Any], *, api: str = "completions", timeout_s: float = math.inf, **client: Any
    ) -> Reply:
        now_s = self.driver.clock()
        client["deadline_s"] = now_s + timeout_s
        answer = await self.relay.serve(requested(body, api=api, now_s=now_s, **client))
        parts: list[bytes] = []
        writer = None if self.takes is None else ChunkWriter(parts, self.takes)
        async for part in answer:
            parts.append(part)
            if writer is not None and len(parts) == 1:
                answer.attach_writer(writer)
        await answer.aclose()
        self.passed += writer.passed if writer is not None else 0
        return Reply(answer.status, dict(answer.headers), b"".join(parts), parts)


@dataclass
class Reply:
    status: int
    headers: dict[bytes, bytes]
    body: bytes
    parts: list[bytes]

    @property
    def events(self) -> list[Any]:
        found = [one[6:] for one in self.body.decode().split("\n\n") if one.startswith("data: ")]
        return [one if one == "[DONE]" else json.loads(one) for one in found]

    @property
    def text(self) -> str:
        out = ""
        for event in self.events:
            for choice in event["choices"] if event != "[DONE]" and "choices" in event else ():
                out += choice.get("text") or choice.get("delta", {}).get("content") or ""
        return out

    @property
    def finishes(self) -> list[str]:
        chunks = [one for one in self.events if one != "[DONE]" and one.get("choices")]
        return [one["choices"][0]["finish_reason"] for one in chunks if one["choices"][0]["finish_reason"]]

    @property
    def usages(self) -> list[dict[str, int]]:
        return [one["usage"] for one in self.events if one != "[DONE]" and one.get("usage")]


def requested(body: dict[str, Any], *, api: str = "completions", now_s: float = 0.0, **client: Any) -> ClientRequest:
    prompt = body.get("prompt")
    text = prompt if isinstance(prompt, str) else "\n".join(str(m["content"]) for m in body.get("messages", ()))
    return ClientRequest(
        api=api,
        body=json.dumps(body).encode(),
        model=body["model"],
        stream=bool(body.get("stream")),
        text=text,
        prompt_tokens=len(text),
        max_tokens=body.get("max_completion_tokens", body.get("max_tokens")),
        choices=body.get("n", 1),
        arrival_s=now_s,
        headers=[],
        client=Client(**client),
    )


@asynccontextmanager
async def world(
    engines: list[Scripted],
    *,
    capabilities: Capabilities = IDS,
    cap: int | None = 4,
    order: Order | None = None,
    resilience: ResilienceConfig | None = None,
    admission: Admission | None = None,
    takes: Callable[[], bool] | None = None,
) -> AsyncIterator[World]:
    config = GatewayConfig(
        engines=(Engine("http://x"),),
        order=order or Order(mode="isrtf", window_tokens=10),
        resilience=resilience or ResilienceConfig(),
        admission=admission or Admission(),
    )
    for engine in engines:
        await engine.__aenter__()
    workers = [
        FixedWorker(f"w{k}", engine.url, capabilities, open_session(Engine(engine.url), config.resilience))
        for k, engine in enumerate(engines)
    ]
    fleet, ledger = FixedFleet(workers, cap), Ledger()
    scheduler = Scheduler(config.order, config.admission, Dispatch())
    driver = SchedulerDriver(scheduler, listeners=[ledger])
    driver.fleet_changed(fleet.states())
    relay = Relay(driver, fleet, Report(), config)
    try:
        yield World(relay, driver, fleet, ledger, engines, scheduler, takes=takes)
    finally:
        driver.close()
        await relay.aclose()
        for worker in workers:
            await worker.session.close()
        for engine in engines:
            await engine.kill()


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs it on a loop that must have nothing left at its end."""

    async def watched() -> None:
        async with asyncio.timeout(60):
            await work()
        await asyncio.sleep(0)
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert not left, left

    asyncio.run(watched())


async def pause(seconds: float) -> None:
    """Waits in many turns of the event loop: after a stall, all that is due comes before the test goes on."""
    for _ in range(20):
        await asyncio.sleep(seconds / 20)


async def until(true: Callable[[], bool], max_s: float = 60.0) -> None:
    """Waits until something holds."""
    async with asyncio.timeout(max_s):
        while not true():  # noqa: ASYNC110 - the engines are not ours to ask for events
            await asyncio.sleep(0.005)


def idle(world: World) -> bool:
    """Whether nothing is left anywhere: no request in, no slot in use, the engines run none."""
    now = world.driver.statistics()
    return (
        world.driver.num_requests == 0
        and now.waiting == 0
        and now.running == 0
        and not any(engine.running for engine in world.engines)
    )
