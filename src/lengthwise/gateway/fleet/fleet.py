"""The fleet of workers: discover and monitor them, and publish their states to the scheduler."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Self

from lengthwise.gateway.background import background
from lengthwise.gateway.config import GatewayConfig
from lengthwise.gateway.fleet.discovery import Endpoint, EndpointDiscovery
from lengthwise.gateway.fleet.health import OutlierDetector
from lengthwise.gateway.fleet.worker import EJECTED, EngineWorker, Monitor, MonitorContext
from lengthwise.gateway.protocols import Clock, Listener, monotonic
from lengthwise.gateway.relay import open_session
from lengthwise.gateway.request import Request
from lengthwise.gateway.scheduling import WorkerState

_POLL_INTERVAL_S = 0.5
_MAX_EPOCHS = 4096  # free names whose epochs are stored: every new pod has a new name


@dataclass
class _Member:
    worker: EngineWorker
    monitor: Monitor
    task: asyncio.Task[None]
    drain: asyncio.Task[None] | None = None


class WorkerRegistry:
    """Workers by name, which are added, drained and removed as endpoints appear and disappear.

    ``changed`` is called after every change, with True if it must be published at once. ``renamed`` is called after a
    draining worker has lost its name to another engine, before that engine gets requests. ``on_release`` is called with
    each name that becomes free.
    """

    def __init__(
        self,
        config: GatewayConfig,
        clock: Clock,
        changed: Callable[[bool], None],
        renamed: Callable[[], None],
        on_release: Callable[[str], None],
        *,
        num_in_flight: Callable[[str], int] | None,
        rng: random.Random,
    ) -> None:
        self._context = MonitorContext(config, clock, changed, rng)
        self._changed, self._renamed, self._on_release = changed, renamed, on_release
        self._num_in_flight = num_in_flight
        self._members: dict[str, _Member] = {}
        self._epochs: dict[str, int] = {}
        self._drained: set[str] = set()  # names of workers that an operator has drained
        self._closing: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[EngineWorker]:
        return (member.worker for member in self._members.values())

    def get(self, name: str) -> EngineWorker | None:
        """Return the worker of this name, or None if there is none."""
        member = self._members.get(name)
        return None if member is None else member.worker

    def update(self, endpoints: Sequence[Endpoint]) -> None:
        """Add a worker for each new endpoint, drain workers without an endpoint, and replace other engines' workers."""
        names = {endpoint.name for endpoint in endpoints}
        for name in [name for name in self._members if name not in names]:
            self._drain(self._members[name])
        for endpoint in endpoints:
            member = self._members.get(endpoint.name)
            if member is not None and member.monitor.reconfigure_engine(endpoint.engine):
                if member.drain is not None:
                    member.drain.cancel()
                    member.drain = None
                member.worker.draining = not endpoint.up
                continue
            if member is not None:
                self._replace(member)
            if endpoint.up:
                config, epoch = self._context.config, self._epochs.get(endpoint.name, 0)
                worker = EngineWorker(endpoint.engine, config.resilience, config.dispatch, epoch=epoch)
                worker.drained = endpoint.name in self._drained
                monitor = Monitor(worker, self._context)
                task = asyncio.create_task(monitor.run(), name=f"watch {endpoint.name}")
                self._members[endpoint.name] = _Member(worker, monitor, task)
        self._changed(True)

    def set_drained(self, name: str, drained: bool) -> None:
        """Stop new requests to a worker and to later workers of its name, or resume them. Raises KeyError."""
        self._members[name].worker.drained = drained
        (self._drained.add if drained else self._drained.discard)(name)
        self._changed(True)

    def configure(self, config: GatewayConfig) -> None:
        """Apply another configuration to the monitors."""
        self._context.config = config

    def check_soon(self, name: str) -> None:
        """Check the health of a worker as soon as possible."""
        if name in self._members:
            self._members[name].monitor.check_soon()

    async def wait_checked(self) -> None:
        """Wait until every current worker has been checked once."""
        for member in list(self._members.values()):
            await member.monitor.checked.wait()

    async def close(self) -> None:
        """Remove all workers at once."""
        for member in list(self._members.values()):
            self._remove(member)
        while self._closing:
            await asyncio.gather(*self._closing, return_exceptions=True)

    def _replace(self, member: _Member) -> None:
        worker = member.worker
        # A worker that fails its checks may still stream responses, unless its port is closed.
        num_in_flight = self._num_in_flight(worker.name) if self._num_in_flight is not None else 0
        may_stream = num_in_flight > 0 and not worker.health.was_refused
        if not worker.health.up and not may_stream:
            self._remove(member)
            return
        del self._members[worker.name]
        self._release_name(worker)
        worker.renamed_from, worker.name = worker.name, f"{worker.name} (leaving {worker.epoch})"
        worker.draining = True
        self._members[worker.name] = member
        self._renamed()
        self._drain(member)

    def _drain(self, member: _Member) -> None:
        if member.drain is None:
            member.worker.draining = True
            member.monitor.check_soon()
            member.drain = asyncio.create_task(self._remove_when_idle(member), name=f"drain {member.worker.name}")

    async def _remove_when_idle(self, member: _Member) -> None:
        worker, clock, resilience = member.worker, self._context.clock, self._context.config.resilience
        started_s, limit_s = clock(), resilience.drain_s if self._num_in_flight is None else resilience.leave_s
        while clock() - started_s < limit_s and not worker.health.was_refused:
            await asyncio.sleep(min(_POLL_INTERVAL_S, limit_s))
            if self._num_in_flight is not None and self._num_in_flight(worker.name) == 0:
                break
        member.drain = None  # otherwise _remove would cancel this task
        if self._members.get(worker.name) is member:
            self._remove(member)
            self._changed(True)

    def _remove(self, member: _Member) -> None:
        worker = member.worker
        del self._members[worker.name]
        if not worker.renamed_from:
            self._release_name(worker)
        tasks = [task for task in (member.task, member.drain) if task is not None]
        for task in tasks:
            task.cancel()

        async def close() -> None:
            await asyncio.gather(*tasks, return_exceptions=True)
            await worker.session.close()

        closing = asyncio.create_task(close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _release_name(self, worker: EngineWorker) -> None:
        """Free the name, so that its next worker has a later epoch and no recorded failures."""
        self._on_release(worker.name)
        self._epochs[worker.name] = worker.epoch + 1
        if len(self._epochs) > _MAX_EPOCHS:
            del self._epochs[next(iter(self._epochs))]


class FirstTokenListener(Listener):
    """Reports the worker of each request that gets its first token, and the seconds from its dispatch to this token."""

    def __init__(self, report: Callable[[str, float], None]) -> None:
        self._report = report

    def first_token(self, request: Request, now_s: float) -> None:
        """Report a first token, for the worker that generated it."""
        dispatch = request.dispatch
        if dispatch.worker and dispatch.dispatched_s <= now_s:
            self._report(dispatch.worker, now_s - dispatch.dispatched_s)


_COALESCE_S = 0.05  # signals of many workers are published together within this time; urgent changes are not delayed
_MIN_TIMER_S = 0.005


class Fleet:
    """The workers of a gateway, as an async context manager.

    A worker that discovery no longer reports gets no new requests. It is removed when its port is closed, when it has
    no request in flight, or after ``resilience.leave_s`` (without ``num_in_flight``: after ``drain_s``).

    Args:
        on_change: Called with all worker states after every change, at most once per tick of the event loop.
        num_in_flight: Returns the number of requests in flight at the worker with a name.

    Raises:
        InputError: Two engines have the same name, or a target of discovery is invalid.
    """

    def __init__(
        self,
        config: GatewayConfig,
        clock: Clock = monotonic,
        on_change: Callable[[Sequence[WorkerState]], None] = lambda _: None,
        *,
        num_in_flight: Callable[[str], int] | None = None,
    ) -> None:
        self._config, self._clock, self._on_change = config, clock, on_change
        self._outliers = OutlierDetector(config.resilience.open_s)
        rng = random.Random(0)  # noqa: S311 - jitter
        self._registry = WorkerRegistry(
            config, clock, self._changed, self._publish, self._outliers.discard, num_in_flight=num_in_flight, rng=rng
        )
        self._discovery = EndpointDiscovery(config, self._registry.update, rng=rng)
        self.listener = FirstTokenListener(self._outliers.first_token)
        self._states: tuple[WorkerState, ...] = ()
        self._pending: asyncio.Handle | None = None
        self._pending_is_urgent = False
        self._timer: asyncio.TimerHandle | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._stack.push_async_callback(self._registry.close)
        self._stack.push_async_callback(self._discovery.stop)
        try:
            await self._discovery.start()
        except BaseException:
            await self.__aexit__()
            raise
        await self._stack.enter_async_context(background(self._run_outlier_detection()))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._cancel_handles()
        self._on_change = lambda _: None
        await self._stack.aclose()
        self._cancel_handles()

    async def configure(self, config: GatewayConfig) -> None:
        """Apply another configuration, or raise InputError and change nothing. Circuit breakers keep their state."""
        endpoints, sources = self._discovery.plan(config)
        for endpoint in endpoints:
            await open_session(endpoint.engine, config.resilience).close()  # raises if certificates are unreadable
        self._config = config
        self._registry.configure(config)
        await self._discovery.apply(config, endpoints, sources)

    async def wait_checked(self, timeout_s: float = 30.0) -> bool:
        """Wait until every known worker has been checked once. Return False if that takes longer than ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._registry.wait_checked()
        except TimeoutError:
            return False
        self._publish()
        return True

    def worker(self, name: str) -> EngineWorker:
        """Return the worker of this name. Raises KeyError if the worker is gone."""
        if (worker := self._registry.get(name)) is None:
            raise KeyError(name)
        return worker

    def set_drained(self, name: str, drained: bool) -> None:
        """Stop new requests to a worker, also after a restart of its engine, or resume them. Raises KeyError."""
        self._registry.set_drained(name, drained)

    def workers(self) -> tuple[EngineWorker, ...]:
        """Return all workers, sorted by name."""
        return tuple(sorted(self._registry, key=lambda worker: worker.name))

    def states(self) -> tuple[WorkerState, ...]:
        """Return the states that were published last."""
        return self._states

    def models(self) -> tuple[str, ...]:
        """Return all models, including the models of unavailable workers."""
        return tuple(sorted({model for worker in self._registry for model in worker.capabilities.models}))

    def entries(self) -> dict[str, dict[str, Any]]:
        """Return each model's entry in /v1/models, from the first engine by name that lists the model."""
        return {name: entry for worker in self.workers()[::-1] for name, entry in worker.metadata.entries.items()}

    def ready(self) -> bool:
        """Return whether any worker may get requests."""
        return any(state.up for state in self._states)

    def record_broken_response(self, name: str, cause: str) -> None:
        """Record that a worker gave no response to a request, or a broken one, for ``cause``."""
        if (worker := self._registry.get(name)) is not None:
            self._record_failure(worker, self._clock())
            if cause in ("no connection", "closed early"):
                self._registry.check_soon(name)

    def record_error_response(self, name: str, owner: Hashable | None) -> None:
        """Record that the worker answered with an error, unless it is the last one that serves one of its models.

        The request may be at fault, so the errors of an owner count once per period. If ``owner`` is None, a peer has
        served the request, so the error counts every time, not once per period.
        """
        worker, now_s = self._registry.get(name), self._clock()
        if worker is None:
            return
        # An error never opens the circuit of a model's last worker.
        others = [one for one in self._registry if one is not worker and not one.unavailable_reason(now_s)]
        served = {model for one in others for model in one.capabilities.models}
        replaceable = bool(others) and served.issuperset(worker.capabilities.models)
        if replaceable and (owner is None or worker.breaker.count_owner(owner, now_s)):
            self._record_failure(worker, now_s)

    def record_rejection(self, name: str, model: str, session: str) -> None:
        """Record a request that the worker rejected with 4xx."""
        if self._registry.get(name) is not None:
            self._outliers.rejected(name, model, session)

    def is_suspect(self, name: str, model: str) -> bool:
        """Return whether the worker rejects far more requests than its peers, and a peer is available to check them."""
        has_peer = any(one.up and model in one.models and one.name != name for one in self._states)
        return has_peer and self._outliers.is_suspect(name, model)

    def record_rejection_check(self, name: str, model: str, *, wrong: bool) -> None:
        """Record whether a suspect was wrong to reject a request, because a peer served the request."""
        if self._registry.get(name) is not None:
            self._outliers.record_rejection_check(name, model, wrong=wrong)

    def record_first_output(self, name: str) -> None:
        """Record the first output of a request at the worker."""
        worker, now_s = self._registry.get(name), self._clock()
        if worker is not None:
            worker.health.answered_s = now_s
            if worker.breaker.started(now_s):
                self._changed(True)

    def succeeded(self, name: str, model: str = "") -> None:
        """Record a response that was complete, or that a preemption ended."""
        worker, now_s = self._registry.get(name), self._clock()
        if worker is not None:
            self._outliers.succeeded(name, model)
            worker.health.answered_s = now_s
            if worker.breaker.succeeded(now_s):
                self._changed(True)

    def _record_failure(self, worker: EngineWorker, now_s: float) -> None:
        self._outliers.failed(worker.name)
        if worker.breaker.failed(now_s):
            self._changed(True)

    def _changed(self, urgent: bool) -> None:
        if self._pending is not None:
            if self._pending_is_urgent or not urgent:
                return
            self._pending.cancel()
        loop = asyncio.get_running_loop()
        self._pending_is_urgent = urgent
        self._pending = loop.call_soon(self._publish) if urgent else loop.call_later(_COALESCE_S, self._publish)

    def _publish(self) -> None:
        self._cancel_handles()
        now_s, workers = self._clock(), self.workers()
        for worker in workers:
            worker.ejected = self._outliers.is_ejected(worker.name, now_s)
        states = tuple(worker.state(now_s) for worker in workers)
        next_s = min(self._outliers.next_s(now_s), *(worker.next_s(now_s) for worker in workers), math.inf)
        if next_s < math.inf:
            delay_s = max(next_s - now_s, _MIN_TIMER_S)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._publish)
        if states != self._states:
            self._states = states
            self._on_change(states)

    def _cancel_handles(self) -> None:
        for handle in (self._pending, self._timer):
            if handle is not None:
                handle.cancel()
        self._pending = self._timer = None

    async def _run_outlier_detection(self) -> None:
        while True:
            await asyncio.sleep(self._config.resilience.health_every_s)
            now_s = self._clock()
            names = [one.name for one in self.workers() if one.unavailable_reason(now_s) in ("", EJECTED)]
            if self._outliers.update(now_s, names):
                self._changed(True)
