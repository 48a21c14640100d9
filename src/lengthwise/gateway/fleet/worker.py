"""One engine: what is known of it now, and whether it may be given requests."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from lengthwise.backend.openai_protocol import Abilities, Server
from lengthwise.gateway.config import Dispatch, Engine, ResilienceConfig
from lengthwise.gateway.fleet.engine_probe import (
    MAX_BYTES,
    EngineMetadata,
    MissError,
    Reading,
    find_facts,
    find_models,
    get,
    greeted,
    read,
)
from lengthwise.gateway.fleet.health import CLOSED, HALF_OPEN, OPEN, REFUSED, UNWELL, Breaker, Health
from lengthwise.gateway.protocols import Clock
from lengthwise.gateway.relay import open_session
from lengthwise.gateway.scheduling import Signals, WorkerState
from lengthwise.schema.errors import InputError

STALE_TIMES = 3.0
"""Signals older than so many looks say nothing any more."""
RAMP_S = 1.0
"""An engine that came back is given 1, 2, 4, ... requests at once, twice as many after each of these."""
_LEAST_RATE_S = 0.05


class Worker:
    """An engine behind the gateway.

    Attributes:
        name: Unique.
        url: Its address without ``/v1``.
        engine: As it was configured.
        session: aiohttp's, with its key and certificates.
        metadata: What it is and can do.
        client_request: Whether ``metadata`` are of the engine that is there now.
        obstacle: Why it could not be asked, "" nothing.
        health: By its health checks.
        breaker: By the requests that it was given.
        epoch: Grows when it started anew.
        draining: No new requests: discovery says that it is going.
        ejected: No new requests: it fares far worse than its peers.
        was: How it was called before another one took its name; "" never otherwise.
    """

    def __init__(self, engine: Engine, resilience: ResilienceConfig, dispatch: Dispatch, *, epoch: int = 0) -> None:
        self.engine, self.url, self.name = engine, Server(engine.url).root, name_of(engine)
        self.session: Any = open_session(engine, resilience)
        self.metadata, self.client_request, self.obstacle = EngineMetadata(), False, ""
        self.health, self.breaker = Health(), Breaker(resilience.failures, resilience.open_s)
        self.epoch = epoch
        self.draining = self.ejected = False
        self.was = ""
        self.reading: Reading | None = None
        self.tokens_per_s: float | None = None
        self._dispatch = dispatch
        self._was_well = self._ever_well = False
        self._back_s = -math.inf

    @property
    def kind(self) -> str:
        """Whose engine it is: "vllm", "sglang", ..., "" not known yet."""
        return self.capabilities.engine or ("" if self.engine.kind == "auto" else self.engine.kind)

    @property
    def capabilities(self) -> Abilities:
        """What it was found to do."""
        return self.metadata.capabilities

    @property
    def priority_sign(self) -> int:
        """1: smaller priorities go first there, -1: larger, 0: it takes none (or nobody asked)."""
        return self.metadata.priority_sign

    def priorities(self) -> str:
        """What becomes of the priorities that it is told in mode engine-priority, in words; "" all is well."""
        metadata = self.metadata
        if not self.client_request or (metadata.priority_sign and metadata.orders):
            return ""
        if metadata.priority_sign:
            return "takes priorities; whether it orders by them cannot be seen"
        if metadata.orders is None and not metadata.received:
            return "has not said yet whether it takes priorities; it is sent none"
        if metadata.orders is None and not self.engine.probe and self.kind == "vllm":
            return "was not asked whether it takes priorities (probe = false); it is sent none"
        return "takes no priorities, so its order stays its own; it is sent none"

    def speaks(self, model: str) -> bool:
        """Whether it serves the model."""
        return model in self.capabilities.models

    def trouble(self, now_s: float) -> str:
        """Why it gets no requests, in a few words; "" where it does."""
        if not self.health.up:
            return f"down: {self.health.detail}"
        if not self.client_request:
            return f"starting: {self.obstacle or 'being asked what it can do'}"
        if self.reading is not None and self.reading.sleeping:
            return "sleeping"
        if self.breaker.state(now_s) == OPEN:
            return "circuit open"
        if self.ejected:
            return "worse than its peers"
        return "draining" if self.draining else ""

    def state(self, now_s: float) -> WorkerState:
        """It now, for the scheduler."""
        self._note_return(now_s)
        return WorkerState(
            self.name,
            self.capabilities.models,
            up=not self.trouble(now_s),
            in_flight=self._limit(now_s),
            slots=self.metadata.slots,
            kv_tokens=self.metadata.kv_tokens,
            tokens_per_s=self.tokens_per_s if self._fresh(now_s) else None,
            signals=self._signals(now_s),
            epoch=self.epoch,
            renamed_from=self.was,
            address=self.url,
        )

    def next_s(self, now_s: float) -> float:
        """When its state changes although nothing happens; inf never."""
        steps_s = math.inf
        if self._ramp(now_s) is not None:
            steps_s = self._back_s + RAMP_S * (math.floor((now_s - self._back_s) / RAMP_S) + 1)
        stale_s = self._stale_s()
        return min(self.breaker.next_s(now_s), steps_s, stale_s if stale_s > now_s else math.inf)

    def take(self, reading: Reading) -> bool:
        """Notes what it tells now; whether it started anew since the last time."""
        before, self.reading = self.reading, reading
        if before is None:
            return False
        if not reading.follows(before):
            self.restarted()
            self.reading = reading
            return True
        passed_s = reading.signals.at_s - before.signals.at_s
        if reading.tokens is not None and before.tokens is not None and passed_s > _LEAST_RATE_S:
            self.tokens_per_s = (reading.tokens - before.tokens) / passed_s
        return False

    def restarted(self) -> None:
        """Nothing of what it had is there any more."""
        self.epoch += 1
        self.reading = self.tokens_per_s = None
        self.breaker.reset()

    def make_way(self) -> None:
        """Another one takes its name: it ends what it has under a name of its own."""
        self.was, self.name = self.name, f"{self.name} (leaving {self.epoch})"
        self.draining = True

    async def close(self) -> None:
        """Closes its connections."""
        await self.session.close()

    def _note_return(self, now_s: float) -> None:
        """Its way back begins where it was well, was not, and is again; going and coming alone is none."""
        well = self.trouble(now_s) in ("", "draining")
        if well and not self._was_well and self._ever_well:
            self._back_s = now_s
        self._was_well = well
        self._ever_well |= well

    def _limit(self, now_s: float) -> int | None:
        if self.breaker.state(now_s) == HALF_OPEN:
            return 1
        ramp = self._ramp(now_s)
        return self.engine.in_flight if ramp is None else ramp

    def _ramp(self, now_s: float) -> int | None:
        """The cap on its way back; None where it has none."""
        full = self.engine.in_flight or self.metadata.slots or self._dispatch.start
        steps = (now_s - self._back_s) / RAMP_S
        if steps >= math.log2(full) or self.breaker.state(now_s) != CLOSED:
            return None
        return min(full, int(2 ** max(0, math.floor(steps))))

    def _stale_s(self) -> float:
        if self.reading is None:
            return -math.inf
        return self.reading.signals.at_s + STALE_TIMES * self._dispatch.adapt_every_s

    def _fresh(self, now_s: float) -> bool:
        return now_s < self._stale_s()

    def _signals(self, now_s: float) -> Signals:
        if self.reading is None:
            return Signals()
        signals = self.reading.signals
        return signals if self._fresh(now_s) else Signals(at_s=signals.at_s)


def name_of(engine: Engine) -> str:
    """How an engine is called: as configured, or host and port."""
    return engine.name or urlsplit(engine.url).netloc.rpartition("@")[2]


_log = logging.getLogger("lengthwise.gateway")
_JITTER = 0.2
_LEAST_S = 0.1
"""Between two checks, even where requests fail."""
_BODY_BYTES = 1 << 16
MODELS_EVERY_S = 30.0
WHERE = ("url", "name", "kind", "api_key", "tls")
"""Of an engine: where one of these changes, it is another one, or is spoken to otherwise."""
HELLO_FIRST_S, HELLO_MOST_S = 1.0, 60.0
"""An engine that did not answer the tiny prompt is asked again after the first, then after twice as long each time."""


class Monitor:
    """Keeps one worker's health, facts and signals fresh until it is cancelled.

    Args:
        worker: Whose.
        resilience: How often, how long.
        adapt_every_s: Between two looks at signals.
        clock: The gateway's.
        changed: Called after every change; with True where requests must know at once.
        priority: Whether it matters that the engine takes priorities.
        dice: Of the jitter.
    """

    def __init__(
        self,
        worker: Worker,
        resilience: ResilienceConfig,
        adapt_every_s: float,
        clock: Clock,
        changed: Callable[[bool], None],
        *,
        priority: bool,
        dice: random.Random,
    ) -> None:
        self.worker, self.checked = worker, asyncio.Event()
        self._care, self._every_s, self._clock = resilience, adapt_every_s, clock
        self._changed, self._priority, self._dice = changed, priority, dice
        self._wake = asyncio.Event()
        self._path = "/v1/models" if worker.engine.kind in ("openai", "transformers") else "/health"
        self._models_s = self._hello_s = float("-inf")
        self._hello_rest_s = HELLO_FIRST_S

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._look_after())
            group.create_task(self._scrape())

    def configure(self, resilience: ResilienceConfig, adapt_every_s: float) -> None:
        """From now on so often and so long."""
        self._care, self._every_s = resilience, adapt_every_s

    def follow(self, engine: Engine) -> bool:
        """Takes other settings for the engine that is there; False where it is another, or reached otherwise."""
        worker, before = self.worker, self.worker.engine
        if any(getattr(engine, name) != getattr(before, name) for name in WHERE):
            return False
        worker.engine = engine
        if engine.generation_defaults != before.generation_defaults:
            fills_in = False if engine.generation_defaults == "none" else None
            worker.metadata = replace(worker.metadata, capabilities=replace(worker.capabilities, own_defaults=fills_in))
        return True

    def poll(self) -> None:
        """Checks as soon as may be: a request could not even be sent."""
        self._wake.set()

    async def _look_after(self) -> None:
        while True:
            try:
                await self._check()
            except Exception:  # noqa: BLE001 - one engine's oddity must not end the watch
                _log.exception("engine %s: the check itself failed", self.worker.name)
            self.checked.set()
            await asyncio.sleep(_LEAST_S)
            rest_s = self._care.health_every_s * self._dice.uniform(1 - _JITTER, 1 + _JITTER) - _LEAST_S
            try:
                async with asyncio.timeout(max(0.0, rest_s)):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()

    async def _check(self) -> None:
        worker, refused = self.worker, self.worker.health.was_refused
        bad = await self._unwell()
        if bad is not None:
            if worker.health.bad(self._clock(), *bad):
                _log.warning("engine %s is down: %s", worker.name, bad[1])
                self._changed(True)
            return
        if refused and worker.client_request:
            await self._came_back()
        came = worker.health.good(self._clock())
        if not worker.client_request:
            await self._submit()
        elif self._clock() - self._models_s > MODELS_EVERY_S:
            await self._refresh()
        if (
            worker.client_request
            and not worker.metadata.received
            and self._clock() - self._hello_s >= self._hello_rest_s
        ):
            await self._greet()
        if came:
            if worker.client_request:
                _log.info("engine %s is up: %s %s", worker.name, worker.kind, worker.capabilities.version)
            self._changed(True)

    async def _unwell(self) -> tuple[str, str] | None:
        """What is wrong, None nothing."""
        try:
            status = await self._status()
            if status in (404, 405) and self._path == "/health":
                self._path = "/v1/models"
                status = await self._status()
        except MissError as miss:
            return miss.kind, str(miss)
        return None if 200 <= status < 300 else (UNWELL, f"http {status} at {self._path}")

    async def _status(self) -> int:
        url = self.worker.url + self._path
        status, _ = await get(self.worker.session, url, within_s=self._care.connect_s, max_bytes=_BODY_BYTES)
        return status

    async def _came_back(self) -> None:
        """It was gone and is here again: another process, unless it shows that it is the same."""
        worker, before = self.worker, self.worker.reading
        now = await self._read()
        known = before is not None and now is not None and before.started is not None
        if known and before is not None and now is not None and now.started == before.started:
            return
        worker.restarted()
        worker.reading, worker.client_request = now, False

    async def _submit(self) -> None:
        """Finds out what it can do; until that is known it gets no requests."""
        worker = self.worker
        try:
            worker.metadata = await find_facts(worker.engine, worker.session, priority=self._priority)
        except InputError as error:
            if worker.obstacle != str(error):
                _log.warning("engine %s cannot be used: %s", worker.name, error)
            worker.obstacle = str(error)
            return
        worker.client_request, worker.obstacle = True, ""
        self._models_s = self._hello_s = self._clock()
        self._hello_rest_s = HELLO_FIRST_S
        self._changed(True)

    async def _refresh(self) -> None:
        """What may change while it runs: its models (adapters)."""
        worker, self._models_s = self.worker, self._clock()
        models = await find_models(worker.engine, worker.session)
        if models and models != worker.capabilities.models:
            worker.metadata = replace(worker.metadata, capabilities=replace(worker.capabilities, models=models))
            self._changed(True)

    async def _greet(self) -> None:
        """Once more what it did not tell while it was busy."""
        worker = self.worker
        metadata = await greeted(worker.engine, worker.session, worker.metadata, priority=self._priority)
        self._hello_s, self._hello_rest_s = self._clock(), min(2 * self._hello_rest_s, HELLO_MOST_S)
        worker.metadata = replace(
            metadata, capabilities=replace(metadata.capabilities, models=worker.capabilities.models)
        )
        self._changed(True)

    async def _scrape(self) -> None:
        while True:
            await asyncio.sleep(self._every_s * self._dice.uniform(1 - _JITTER / 4, 1))
            worker = self.worker
            if not (worker.health.up and worker.client_request and worker.capabilities.metrics):
                continue
            try:
                reading = await self._read()
            except Exception:  # noqa: BLE001 - as above
                _log.exception("engine %s: its metrics could not be read", worker.name)
                continue
            if reading is not None:
                self._take(reading)

    def _take(self, reading: Reading) -> None:
        worker = self.worker
        slept = worker.reading is not None and worker.reading.sleeping
        again = worker.take(reading)
        if again:
            _log.warning("engine %s started anew", worker.name)
            worker.client_request = False
            self.poll()
        self._changed(again or slept != reading.sleeping)

    async def _read(self) -> Reading | None:
        worker = self.worker
        try:
            status, body = await get(
                worker.session, f"{worker.url}/metrics", within_s=self._care.connect_s, max_bytes=MAX_BYTES
            )
        except MissError as miss:
            if miss.kind == REFUSED:
                self.poll()
            return None
        return read(body, self._clock()) if status == 200 else None
