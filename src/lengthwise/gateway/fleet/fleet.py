"""All engines together: found, watched, and told to the scheduler as they are now."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Hashable, Sequence
from typing import Self

from lengthwise.gateway.clock import Clock, monotonic
from lengthwise.gateway.config import GatewayConfig
from lengthwise.gateway.decisions import WorkerState
from lengthwise.gateway.fleet.crew import Crew
from lengthwise.gateway.fleet.discovery import Discoveries
from lengthwise.gateway.fleet.latency import FirstTokens
from lengthwise.gateway.fleet.outliers import Outliers
from lengthwise.gateway.fleet.worker import Worker
from lengthwise.gateway.relay import open_session

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
        self._outliers = Outliers(config.care.open_s)
        self._dice = random.Random(seed)  # noqa: S311 - jitter
        self._crew = Crew(
            config, clock, self._changed, self._tell, self._outliers.forget, busy=busy, dice=self._dice
        )
        self._discoveries = Discoveries(config, self._crew.wanted, dice=self._dice)
        self.listener = FirstTokens(self._outliers.first_token)
        self._states: tuple[WorkerState, ...] = ()
        self._told: asyncio.Handle | None = None
        self._soon = False
        self._timer: asyncio.TimerHandle | None = None
        self._looking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Begins to watch and to discover; ``settled`` tells when all have been asked once."""
        try:
            await self._discoveries.start()
        except BaseException:
            await self.__aexit__()
            raise
        self._looking = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ends all watching and closes all connections; ``on_change`` is not called any more."""
        for handle in (self._told, self._timer):
            if handle is not None:
                handle.cancel()
        self._on_change = lambda _: None
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await self._discoveries.stop()
        await self._crew.close()
        for handle in (self._told, self._timer):
            if handle is not None:
                handle.cancel()

    async def configure(self, config: GatewayConfig) -> None:
        """Another configuration; engines that stay the same stay untouched.

        How a circuit breaks and how long connecting takes holds for engines that are new.

        Raises:
            InputError: It cannot be used; nothing has changed.
        """
        plan = self._discoveries.plan(config)
        for one in plan.listed:
            await open_session(one.engine, config.care).close()  # its certificates can be read
        self._config = config
        self._crew.configure(config)
        await self._discoveries.follow(plan)

    async def settled(self, within_s: float = 30.0) -> bool:
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
        found = {model for worker in self._crew.workers.values() for model in worker.abilities.models}
        return tuple(sorted(found))

    def ready(self) -> bool:
        """Whether an engine can be given requests."""
        return any(state.up for state in self._states)

    def failed(self, name: str, why: str) -> None:
        """A request failed at an engine: no connection, no answer, or a broken one."""
        worker = self._crew.workers.get(name)
        if worker is None:
            return
        self._outliers.failed(name)
        if worker.breaker.failed(self._clock()):
            self._changed(True)
        if why in ("no connection", "closed early"):
            self._crew.look(name)

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

    def judged(self, name: str, model: str, *, wrong: bool) -> None:
        """A peer was sent what a suspected engine had called wrong: it served it, or called it wrong as well."""
        if name in self._crew.workers:
            self._outliers.judged(name, model, wrong=wrong)

    def began(self, name: str) -> None:
        """The first of an engine's output came."""
        worker = self._crew.workers.get(name)
        if worker is None:
            return
        now_s = self._clock()
        worker.health.answered(now_s)
        if worker.breaker.began(now_s):
            self._changed(True)

    def answered(self, name: str, model: str = "") -> None:
        """A request was answered to its end by an engine, or to where it was cut."""
        worker = self._crew.workers.get(name)
        if worker is None:
            return
        now_s = self._clock()
        self._outliers.answered(name, model)
        worker.health.answered(now_s)
        if worker.breaker.answered(now_s):
            self._changed(True)

    def _is_last(self, worker: Worker, now_s: float) -> bool:
        """Whether a model would have no engine without it."""
        others = [one for one in self._crew.workers.values() if one is not worker and not one.trouble(now_s)]
        served = {model for one in others for model in one.abilities.models}
        return not served.issuperset(worker.abilities.models) or not others

    # -- telling ---------------------------------------------------------------------------

    def _changed(self, at_once: bool) -> None:
        """Something did; told in the next tick, or with what else changes in a moment."""
        if self._told is not None and (self._soon or not at_once):
            return
        if self._told is not None:
            self._told.cancel()
        loop = asyncio.get_running_loop()
        self._soon = at_once
        self._told = loop.call_soon(self._tell) if at_once else loop.call_later(_COALESCE_S, self._tell)

    def _tell(self) -> None:
        if self._told is not None:
            self._told.cancel()
            self._told = None
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

    async def _look(self) -> None:
        """Compares the engines with each other, now and then."""
        while True:
            await asyncio.sleep(self._config.care.health_every_s)
            now_s = self._clock()
            well = [
                worker.name
                for worker in self.workers()
                if worker.trouble(now_s) in ("", "worse than its peers")
            ]
            if self._outliers.look(now_s, well):
                self._changed(True)
