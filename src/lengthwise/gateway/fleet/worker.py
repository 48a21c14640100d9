"""A worker with its properties, health, circuit breaker and load, and the monitor that updates them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lengthwise.backend.openai_protocol import Capabilities, Server
from lengthwise.gateway.config import Dispatch, Engine, GatewayConfig, ResilienceConfig
from lengthwise.gateway.fleet import engine_probe
from lengthwise.gateway.fleet.discovery import engine_name
from lengthwise.gateway.fleet.health import CLOSED, HALF_OPEN, OPEN, REFUSED, UNHEALTHY, Breaker, Health
from lengthwise.gateway.protocols import Clock
from lengthwise.gateway.relay import open_session
from lengthwise.gateway.scheduling import Signals, WorkerState
from lengthwise.schema.errors import InputError

_log = logging.getLogger("lengthwise.gateway")

STALE_FACTOR = 3.0  # signals are valid for this many sampling intervals
RAMP_S = 1.0  # after a recovery, a worker's limit is 1, 2, 4, ... requests, doubled at this interval
EJECTED = "worse than its peers"
_MIN_RATE_PERIOD_S = 0.05


class EngineWorker:
    """An engine behind the gateway."""

    def __init__(self, engine: Engine, resilience: ResilienceConfig, dispatch: Dispatch, *, epoch: int = 0) -> None:
        self.engine, self.name = engine, engine_name(engine)
        self.url = Server(engine.url).root  # of the engine's URLs, without ``/v1``
        self.session: Any = open_session(engine, resilience)  # with the engine's key and certificates
        self.metadata, self.probe_error = engine_probe.EngineMetadata(), ""
        self.identified = False  # whether ``metadata`` describes the process that runs now
        self.health, self.breaker = Health(), Breaker(resilience.failures, resilience.open_s)
        self.epoch = epoch  # grows when the engine restarts or another engine takes the name
        self.renamed_from = ""  # former name if another engine has taken it, so that this engine drains
        self.draining = False  # whether it gets no new requests: it has vanished, is not ready, or was replaced
        self.drained = False  # whether an operator has stopped new requests to it
        self.ejected = False  # whether outlier detection excludes the engine
        self.sample: engine_probe.MetricsSample | None = None
        self.tokens_per_s: float | None = None
        self._dispatch = dispatch
        self._was_available = self._ever_available = False
        self._recovered_s = -math.inf

    @property
    def kind(self) -> str:
        """Return the kind of engine, such as "vllm" or "sglang", or "" if it is unknown."""
        return self.capabilities.engine or ("" if self.engine.kind == "auto" else self.engine.kind)

    @property
    def capabilities(self) -> Capabilities:
        """Return the capabilities that the probe found."""
        return self.metadata.capabilities

    @property
    def priority_sign(self) -> int:
        """Return 1 if smaller priorities run first, -1 if larger ones do, or 0 if the engine accepts none."""
        return self.metadata.priority_sign

    def priority_notice(self) -> str:
        """Return the reason for which mode engine-priority may have no effect at this worker, or ""."""
        metadata = self.metadata
        if not self.identified or (metadata.priority_sign and metadata.orders_by_priority):
            return ""
        if metadata.priority_sign:
            return "accepts priorities; whether it orders by them is unknown"
        if metadata.orders_by_priority is None and not metadata.prompted:
            return "has not answered yet whether it accepts priorities; it gets none"
        if metadata.orders_by_priority is None and not self.engine.probe and self.kind == "vllm":
            return "was not probed for priorities (probe = false); it gets none"
        return "accepts no priorities and keeps its own order; it gets none"

    def unavailable_reason(self, now_s: float) -> str:
        """Return the reason for which the worker gets no requests, or "" if it may get requests."""
        if not self.health.up:
            return f"down: {self.health.detail}"
        if not self.identified:
            return f"starting: {self.probe_error or 'being probed'}"
        if self.sample is not None and self.sample.sleeping:
            return "sleeping"
        if self.breaker.state(now_s) == OPEN:
            return "circuit open"
        if self.ejected:
            return EJECTED
        return "draining" if self.draining or self.drained else ""

    def state(self, now_s: float) -> WorkerState:
        """Return the current state for the scheduler."""
        reason = self.unavailable_reason(now_s)
        # Only a worker that was available, failed and recovered ramps up; draining and returning is no failure.
        available = reason in ("", "draining")
        if available and not self._was_available and self._ever_available:
            self._recovered_s = now_s
        self._was_available = available
        self._ever_available |= available
        half_open, ramp = self.breaker.state(now_s) == HALF_OPEN, self._ramp(now_s)
        signals = Signals() if self.sample is None else self.sample.signals
        fresh = now_s < self._stale_s()
        return WorkerState(
            self.name,
            self.capabilities.models,
            up=not reason,
            concurrency=1 if half_open else self.engine.concurrency if ramp is None else ramp,
            slots=self.metadata.slots,
            kv_tokens=self.metadata.kv_tokens,
            tokens_per_s=self.tokens_per_s if fresh else None,
            signals=signals if fresh else Signals(at_s=signals.at_s),
            epoch=self.epoch,
            renamed_from=self.renamed_from,
            address=self.url,
        )

    def next_s(self, now_s: float) -> float:
        """Return the time at which the state changes next without an event, or inf if it does not."""
        ramp_s = math.inf
        if self._ramp(now_s) is not None:
            ramp_s = self._recovered_s + RAMP_S * (math.floor((now_s - self._recovered_s) / RAMP_S) + 1)
        stale_s = self._stale_s()
        return min(self.breaker.next_s(now_s), ramp_s, stale_s if stale_s > now_s else math.inf)

    def update(self, sample: engine_probe.MetricsSample) -> bool:
        """Store new metrics. Return whether they show that the engine has restarted."""
        previous, self.sample = self.sample, sample
        if previous is None:
            return False
        if not sample.follows(previous):
            self.restarted()
            self.sample = sample
            return True
        elapsed_s = sample.signals.at_s - previous.signals.at_s
        if sample.tokens is not None and previous.tokens is not None and elapsed_s > _MIN_RATE_PERIOD_S:
            self.tokens_per_s = (sample.tokens - previous.tokens) / elapsed_s
        return False

    def restarted(self) -> None:
        """Start a new epoch after a restart of the engine. Discard the metrics and failures of the old process."""
        self.epoch += 1
        self.sample = self.tokens_per_s = None
        self.breaker.reset()

    def _ramp(self, now_s: float) -> int | None:
        limit = self.engine.concurrency or self.metadata.slots or self._dispatch.start
        steps = (now_s - self._recovered_s) / RAMP_S
        if steps >= math.log2(limit) or self.breaker.state(now_s) != CLOSED:
            return None
        return min(limit, int(2 ** max(0, math.floor(steps))))

    def _stale_s(self) -> float:
        at_s = -math.inf if self.sample is None else self.sample.signals.at_s
        return at_s + STALE_FACTOR * self._dispatch.adapt_every_s


_JITTER = 0.2
_MIN_CHECK_S = 0.1  # shortest time between two checks, even while requests fail
_MAX_BODY_BYTES = 1 << 16
MODELS_EVERY_S = 30.0
IDENTITY = ("url", "name", "kind", "api_key", "tls")  # settings whose change means another engine or session
MIN_PROMPT_WAIT_S, MAX_PROMPT_WAIT_S = 1.0, 60.0  # wait before the tiny prompt is sent again, doubled each time


@dataclass
class MonitorContext:
    """Settings and callbacks of all monitors. ``changed`` reports a change, by True if it must be published at once."""

    config: GatewayConfig
    clock: Clock
    changed: Callable[[bool], None]
    rng: random.Random


class Monitor:
    """Updates health, metadata and load of a worker until cancelled. ``checked`` is set after the first check."""

    def __init__(self, worker: EngineWorker, context: MonitorContext) -> None:
        self.worker, self.checked, self._wake = worker, asyncio.Event(), asyncio.Event()
        self._context, self._clock, self._changed = context, context.clock, context.changed
        self._priority = context.config.order.mode == "engine-priority"
        self._path = "/v1/models" if worker.engine.kind in ("openai", "transformers") else "/health"
        self._models_s = self._prompt_s = -math.inf
        self._prompt_wait_s = MIN_PROMPT_WAIT_S

    async def run(self) -> None:
        """Check the worker and read its metrics until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._run_checks())
            group.create_task(self._run_sampling())

    def reconfigure_engine(self, engine: Engine) -> bool:
        """Apply other settings of the engine. Return False if they describe another engine or session."""
        worker, previous = self.worker, self.worker.engine
        if any(getattr(engine, name) != getattr(previous, name) for name in IDENTITY):
            return False
        worker.engine = engine
        if engine.generation_defaults != previous.generation_defaults:
            self._set_capabilities(own_defaults=False if engine.generation_defaults == "none" else None)
        return True

    def check_soon(self) -> None:
        """Check the worker as soon as possible."""
        self._wake.set()

    async def _run_checks(self) -> None:
        while True:
            try:
                await self._check()
            except Exception:  # noqa: BLE001 - an unexpected response of one engine must not end its monitor
                _log.exception("engine %s: the health check raised", self.worker.name)
            self.checked.set()
            await asyncio.sleep(_MIN_CHECK_S)
            jitter = self._context.rng.uniform(1 - _JITTER, 1 + _JITTER)
            wait_s = self._context.config.resilience.health_every_s * jitter - _MIN_CHECK_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, wait_s)):
                    await self._wake.wait()
            self._wake.clear()

    async def _check(self) -> None:  # noqa: C901 - one pass in its order
        worker, refused = self.worker, self.worker.health.was_refused
        try:
            status, _ = await self._get(self._path, _MAX_BODY_BYTES)
            if status in (404, 405) and self._path == "/health":
                self._path = "/v1/models"
                status, _ = await self._get(self._path, _MAX_BODY_BYTES)
            kind, detail = UNHEALTHY, "" if 200 <= status < 300 else f"http {status} at {self._path}"
        except engine_probe.FetchError as error:
            kind, detail = error.kind, str(error)
        if detail:
            if worker.health.failed(self._clock(), kind, detail):
                _log.warning("engine %s is down: %s", worker.name, detail)
                self._changed(True)
            return
        if refused and worker.identified:
            # The port was closed meanwhile, so this is another process unless its start time is the same.
            previous, sample = worker.sample, await self._fetch_metrics()
            started = None if previous is None else previous.started_s
            if started is None or sample is None or sample.started_s != started:
                worker.restarted()
                worker.sample, worker.identified = sample, False
        came_up = worker.health.passed(self._clock())
        if not worker.identified:
            await self._identify()
        elif self._clock() - self._models_s > MODELS_EVERY_S:
            self._models_s = self._clock()
            entries = await engine_probe.list_models(worker.engine, worker.session)
            if entries and entries != worker.metadata.entries:  # adapters appear and disappear while the engine runs
                worker.metadata = replace(worker.metadata, entries=entries)
                self._set_capabilities(models=tuple(entries))
                self._changed(True)
        prompt_due = self._clock() - self._prompt_s >= self._prompt_wait_s
        if worker.identified and not worker.metadata.prompted and prompt_due:
            given, models = (worker.engine, worker.session, worker.metadata), worker.capabilities.models
            worker.metadata = await engine_probe.send_prompt(*given, priority=self._priority)
            self._prompt_s, self._prompt_wait_s = self._clock(), min(2 * self._prompt_wait_s, MAX_PROMPT_WAIT_S)
            self._set_capabilities(models=models)
            self._changed(True)
        if came_up:
            if worker.identified:
                _log.info("engine %s is up: %s %s", worker.name, worker.kind, worker.capabilities.version)
            self._changed(True)

    async def _get(self, path: str, max_bytes: int) -> tuple[int, bytes]:
        url, timeout_s = self.worker.url + path, self._context.config.resilience.connect_s
        return await engine_probe.get(self.worker.session, url, timeout_s=timeout_s, max_bytes=max_bytes)

    async def _identify(self) -> None:
        worker = self.worker
        try:
            worker.metadata = await engine_probe.probe_metadata(worker.engine, worker.session, priority=self._priority)
        except InputError as error:
            if worker.probe_error != str(error):
                _log.warning("engine %s cannot be used: %s", worker.name, error)
            worker.probe_error = str(error)
            return
        worker.identified, worker.probe_error = True, ""
        self._models_s = self._prompt_s = self._clock()
        self._prompt_wait_s = MIN_PROMPT_WAIT_S
        self._changed(True)

    def _set_capabilities(self, **changes: Any) -> None:
        worker = self.worker
        worker.metadata = replace(worker.metadata, capabilities=replace(worker.capabilities, **changes))

    async def _run_sampling(self) -> None:
        worker = self.worker
        while True:
            interval_s = self._context.config.dispatch.adapt_every_s
            await asyncio.sleep(interval_s * self._context.rng.uniform(1 - _JITTER / 4, 1))
            if not (worker.health.up and worker.identified and worker.capabilities.metrics):
                continue
            try:
                sample = await self._fetch_metrics()
            except Exception:  # noqa: BLE001 - an unexpected response of one engine must not end its monitor
                _log.exception("engine %s: its metrics could not be read", worker.name)
                continue
            if sample is None:
                continue
            slept = worker.sample is not None and worker.sample.sleeping
            restarted = worker.update(sample)
            if restarted:
                _log.warning("engine %s restarted", worker.name)
                worker.identified = False
                self.check_soon()
            self._changed(restarted or slept != sample.sleeping)

    async def _fetch_metrics(self) -> engine_probe.MetricsSample | None:
        try:
            status, body = await self._get("/metrics", engine_probe.MAX_BYTES)
        except engine_probe.FetchError as error:
            if error.kind == REFUSED:
                self.check_soon()
            return None
        return engine_probe.parse_metrics(body, self._clock()) if status == 200 else None
