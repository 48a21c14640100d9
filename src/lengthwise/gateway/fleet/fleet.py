"""All engines together: found, watched, and told to the scheduler as they are now."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Self

from lengthwise.gateway.config import GatewayConfig
from lengthwise.gateway.fleet.discovery import Discoveries, Found
from lengthwise.gateway.fleet.health import Outliers
from lengthwise.gateway.fleet.worker import Monitor, Worker
from lengthwise.gateway.protocols import Clock, Listener, monotonic
from lengthwise.gateway.relay import open_session
from lengthwise.gateway.request import Request
from lengthwise.gateway.scheduling import WorkerState

_POLL_INTERVAL_S = 0.5
_NAMES = 4096
"""Names whose epochs are remembered: names of pods come and go."""


@dataclass
class _Kept:
    """A worker and who watches it."""

    worker: Worker
    monitor: Monitor
    task: asyncio.Task[None]
    active: asyncio.Task[None] | None = None


class Crew:
    """The workers by name.

    Args:
        config: The gateway's.
        clock: The gateway's.
        changed: Called after every change; with True where requests must know at once.
        renamed: Called when a name passes on: the scheduler must hear of it before anybody is sent there.
        on_release: Called with a name that its engine has no more: whoever has it next is another one.
        busy: Requests in flight at a worker; None: nobody knows.
        dice: Of the jitter.

    Attributes:
        workers: All that are kept.
    """

    def __init__(
        self,
        config: GatewayConfig,
        clock: Clock,
        changed: Callable[[bool], None],
        renamed: Callable[[], None],
        on_release: Callable[[str], None],
        *,
        busy: Callable[[str], int] | None,
        dice: random.Random,
    ) -> None:
        self.config = config
        self.workers: dict[str, Worker] = {}
        self._clock, self._busy, self._dice = clock, busy, dice
        self._changed, self._renamed, self._on_release = changed, renamed, on_release
        self._retained: dict[str, _Kept] = {}
        self._epochs: dict[str, int] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def desired(self, found: Sequence[Found]) -> None:
        """All engines that there are now; who is not among them any more is let go."""
        names = {one.name for one in found}
        for name in [name for name in self._retained if name not in names]:
            self._release(self._retained[name])
        for one in found:
            kept = self._retained.get(one.name)
            if kept is not None and not kept.monitor.follow(one.engine):
                self._replace(kept)
                kept = None
            if kept is not None:
                self._stay(kept, up=one.up)
            elif one.up:
                self._begin(one)
        self._changed(True)

    def configure(self, config: GatewayConfig) -> None:
        """Another configuration: how engines are watched from now on."""
        self.config = config
        for kept in self._retained.values():
            kept.monitor.configure(config.resilience, config.dispatch.adapt_every_s)

    def poll(self, name: str) -> None:
        """Checks a worker as soon as may be."""
        if name in self._retained:
            self._retained[name].monitor.poll()

    async def checked(self) -> None:
        """Returns when all that are there now have been checked once."""
        for kept in list(self._retained.values()):
            await kept.monitor.checked.wait()

    async def close(self) -> None:
        """Lets all go at once."""
        for kept in list(self._retained.values()):
            self._drop(kept)
        while self._closing:
            await asyncio.gather(*self._closing, return_exceptions=True)

    def _begin(self, found: Found) -> None:
        resilience, dispatch = self.config.resilience, self.config.dispatch
        worker = Worker(found.engine, resilience, dispatch, epoch=self._epochs.get(found.name, 0))
        watch = Monitor(
            worker,
            resilience,
            dispatch.adapt_every_s,
            self._clock,
            self._changed,
            priority=self.config.order.mode == "engine-priority",
            dice=self._dice,
        )
        task = asyncio.create_task(watch.run(), name=f"watch {found.name}")
        self._retained[found.name] = _Kept(worker, watch, task)
        self.workers[found.name] = worker

    def _stay(self, retained: _Kept, *, up: bool) -> None:
        if retained.active is not None:
            retained.active.cancel()
            retained.active = None
        retained.worker.draining = not up

    def _replace(self, retained: _Kept) -> None:
        """Another engine, or another way to it, takes the name; what runs there may end, where it can."""
        worker = retained.worker
        if not worker.health.up and not self._streams(worker):
            self._drop(retained)
            return
        del self._retained[worker.name], self.workers[worker.name]
        self._note_epoch(worker)
        worker.make_way()
        self._retained[worker.name], self.workers[worker.name] = retained, worker
        self._renamed()
        self._release(retained)

    def _streams(self, worker: Worker) -> bool:
        """Whether answers may be under way at one that is not well; who fails its checks may still stream."""
        return self._busy is not None and not worker.health.was_refused and self._busy(worker.name) > 0

    def _release(self, retained: _Kept) -> None:
        """No new requests; those that are there may end."""
        if retained.active is None:
            retained.worker.draining = True
            retained.monitor.poll()
            retained.active = asyncio.create_task(self._lost(retained), name=f"drain {retained.worker.name}")

    async def _lost(self, retained: _Kept) -> None:
        """Returns, and drops it, once nothing can be lost by it."""
        worker, started_s = retained.worker, self._clock()
        longest_s = self.config.resilience.drain_s if self._busy is None else self.config.resilience.leave_s
        while self._clock() - started_s < longest_s and not worker.health.was_refused:
            await asyncio.sleep(min(_POLL_INTERVAL_S, longest_s))
            if self._busy is not None and self._busy(worker.name) == 0:
                break
        retained.active = None
        if self._retained.get(worker.name) is retained:
            self._drop(retained)
            self._changed(True)

    def _drop(self, retained: _Kept) -> None:
        name = retained.worker.name
        del self._retained[name], self.workers[name]
        if not retained.worker.was:
            self._note_epoch(retained.worker)
        tasks = [task for task in (retained.task, retained.active) if task is not None]
        for task in tasks:
            task.cancel()
        closing = asyncio.create_task(self._closed(retained.worker, tasks))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def _note_epoch(self, worker: Worker) -> None:
        """Who has its name next is another one."""
        self._on_release(worker.name)
        self._epochs[worker.name] = worker.epoch + 1
        if len(self._epochs) > _NAMES:
            del self._epochs[next(iter(self._epochs))]

    async def _closed(self, worker: Worker, tasks: list[asyncio.Task[None]]) -> None:
        await asyncio.gather(*tasks, return_exceptions=True)
        await worker.close()


class FirstTokens(Listener):
    """Tells of every first token which engine it came from and how long after the request was sent there.

    Args:
        tell: Called with the engine's name and the seconds.
    """

    def __init__(self, tell: Callable[[str, float], None]) -> None:
        self._tell = tell

    def first_token(self, request: Request, now_s: float) -> None:
        """A request that moved on counts where it began to speak."""
        if request.worker and request.dispatched_s <= now_s:
            self._tell(request.worker, now_s - request.dispatched_s)


_COALESCE_S = 0.05
"""Fresh signals of many engines are told together; what requests must know at once is not kept back."""
_LEAST_REST_S = 0.005


class Fleet:
    """The engines of a gateway; an async context manager.

    An engine that discovery no longer knows gets no new requests; it stays until nobody listens there any
    more, nothing runs there, or ``care.leave_s`` (where nobody tells what runs ``care.drain_s``) have passed.

    Args:
        config: The gateway's.
        clock: The gateway's.
        on_change: Called with all workers whenever anything changed, at most once a tick of the loop.
        busy: Requests in flight at an engine, by its name (of ``Hub.statistics``); None: nobody knows.
        seed: Of the jitter.

    Attributes:
        listener: To be added to the gateway's: it hears how long first tokens take.

    Raises:
        InputError: Two engines of one name, or a place of discovery that is none.
    """

    def __init__(
        self,
        config: GatewayConfig,
        clock: Clock = monotonic,
        on_change: Callable[[Sequence[WorkerState]], None] = lambda _: None,
        *,
        busy: Callable[[str], int] | None = None,
        seed: int = 0,
    ) -> None:
        self._config, self._clock, self._on_change = config, clock, on_change
        self._outliers = Outliers(config.resilience.open_s)
        self._dice = random.Random(seed)  # noqa: S311 - jitter
        self._crew = Crew(config, clock, self._changed, self._tell, self._outliers.discard, busy=busy, dice=self._dice)
        self._discoveries = Discoveries(config, self._crew.desired, dice=self._dice)
        self.listener = FirstTokens(self._outliers.first_token)
        self._states: tuple[WorkerState, ...] = ()
        self._report: asyncio.Handle | None = None
        self._soon = False
        self._timer: asyncio.TimerHandle | None = None
        self._poll_task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Begins to watch and to discover; ``settled`` tells when all have been asked once."""
        try:
            await self._discoveries.start()
        except BaseException:
            await self.__aexit__()
            raise
        self._poll_task = asyncio.create_task(self._poll())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ends all watching and closes all connections; ``on_change`` is not called any more."""
        for handle in (self._report, self._timer):
            if handle is not None:
                handle.cancel()
        self._on_change = lambda _: None
        if self._poll_task is not None:
            self._poll_task.cancel()
            await asyncio.gather(self._poll_task, return_exceptions=True)
        await self._discoveries.stop()
        await self._crew.close()
        for handle in (self._report, self._timer):
            if handle is not None:
                handle.cancel()

    async def configure(self, config: GatewayConfig) -> None:
        """Another configuration; engines that stay the same stay untouched.

        How a circuit breaks and how long connecting takes holds for engines that are new.

        Raises:
            InputError: It cannot be used; nothing has changed.
        """
        plan = self._discoveries.plan(config)
        for one in plan.entries:
            await open_session(one.engine, config.resilience).close()  # its certificates can be read
        self._config = config
        self._crew.configure(config)
        await self._discoveries.follow(plan)

    async def stable(self, within_s: float = 30.0) -> bool:
        """Whether every engine that is known has been checked once within the time."""
        try:
            async with asyncio.timeout(within_s):
                await self._crew.checked()
        except TimeoutError:
            return False
        self._tell()
        return True

    def worker(self, name: str) -> Worker:
        """The engine of this name; KeyError where it is gone."""
        return self._crew.workers[name]

    def workers(self) -> tuple[Worker, ...]:
        """All engines, in order of their names."""
        return tuple(worker for _, worker in sorted(self._crew.workers.items()))

    def states(self) -> tuple[WorkerState, ...]:
        """All engines as they were last told."""
        return self._states

    def models(self) -> tuple[str, ...]:
        """All models, those of engines that are down included."""
        found = {model for worker in self._crew.workers.values() for model in worker.capabilities.models}
        return tuple(sorted(found))

    def ready(self) -> bool:
        """Whether an engine can be given requests."""
        return any(state.up for state in self._states)

    def failed(self, name: str, cause: str) -> None:
        """A request failed at an engine: no connection, no answer, or a broken one."""
        worker = self._crew.workers.get(name)
        if worker is None:
            return
        self._outliers.failed(name)
        if worker.breaker.failed(self._clock()):
            self._changed(True)
        if cause in ("no connection", "closed early"):
            self._crew.poll(name)

    def erred(self, name: str, caller: Hashable | None) -> None:
        """An engine answered a request with an error. It never opens the circuit of a model's last engine.

        Args:
            name: The engine's.
            caller: Who asked, counted once in a while; None where a peer served the same request.
        """
        worker, now_s = self._crew.workers.get(name), self._clock()
        if worker is None or self._is_last(worker, now_s):
            return
        if caller is not None and not worker.breaker.is_new(caller, now_s):
            return
        self._outliers.failed(name)
        if worker.breaker.failed(now_s):
            self._changed(True)

    def rejected(self, name: str, model: str, session: str) -> None:
        """An engine called a request wrong (4xx): the client's fault, unless a peer serves such ones."""
        if name in self._crew.workers:
            self._outliers.rejected(name, model, session)

    def suspects(self, name: str, model: str) -> bool:
        """Whether an engine calls so many requests wrong that a peer should be asked; one is there."""
        peer = any(one.up and model in one.models and one.name != name for one in self._states)
        return peer and self._outliers.suspects(name, model)

    def record_outcome(self, name: str, model: str, *, wrong: bool) -> None:
        """A peer was sent what a suspected engine had called wrong: it served it, or called it wrong as well."""
        if name in self._crew.workers:
            self._outliers.record_outcome(name, model, wrong=wrong)

    def started(self, name: str) -> None:
        """The first of an engine's output came."""
        worker = self._crew.workers.get(name)
        if worker is None:
            return
        now_s = self._clock()
        worker.health.succeeded(now_s)
        if worker.breaker.started(now_s):
            self._changed(True)

    def succeeded(self, name: str, model: str = "") -> None:
        """A request was answered to its end by an engine, or to where it was cut."""
        worker = self._crew.workers.get(name)
        if worker is None:
            return
        now_s = self._clock()
        self._outliers.succeeded(name, model)
        worker.health.succeeded(now_s)
        if worker.breaker.succeeded(now_s):
            self._changed(True)

    def _is_last(self, worker: Worker, now_s: float) -> bool:
        """Whether a model would have no engine without it."""
        others = [one for one in self._crew.workers.values() if one is not worker and not one.trouble(now_s)]
        served = {model for one in others for model in one.capabilities.models}
        return not served.issuperset(worker.capabilities.models) or not others

    # -- telling ---------------------------------------------------------------------------

    def _changed(self, at_once: bool) -> None:
        """Something did; told in the next tick, or with what else changes in a moment."""
        if self._report is not None and (self._soon or not at_once):
            return
        if self._report is not None:
            self._report.cancel()
        loop = asyncio.get_running_loop()
        self._soon = at_once
        self._report = loop.call_soon(self._tell) if at_once else loop.call_later(_COALESCE_S, self._tell)

    def _tell(self) -> None:
        if self._report is not None:
            self._report.cancel()
            self._report = None
        now_s = self._clock()
        workers = self.workers()
        for worker in workers:
            worker.ejected = self._outliers.out(worker.name, now_s)
        states = tuple(worker.state(now_s) for worker in workers)
        self._sleep_until(min([self._outliers.next_s(now_s), *(w.next_s(now_s) for w in workers)]), now_s)
        if states != self._states:
            self._states = states
            self._on_change(states)

    def _sleep_until(self, when_s: float, now_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if when_s < float("inf"):
            rest_s = max(when_s - now_s, _LEAST_REST_S)
            self._timer = asyncio.get_running_loop().call_later(rest_s, self._tell)

    async def _poll(self) -> None:
        """Compares the engines with each other, now and then."""
        while True:
            await asyncio.sleep(self._config.resilience.health_every_s)
            now_s = self._clock()
            well = [worker.name for worker in self.workers() if worker.trouble(now_s) in ("", "worse than its peers")]
            if self._outliers.poll(now_s, well):
                self._changed(True)
