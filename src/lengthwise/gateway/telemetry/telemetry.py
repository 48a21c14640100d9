"""All that is told of requests, as one listener."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self

from lengthwise.gateway.clock import Clock, monotonic
from lengthwise.gateway.config import GatewayConfig
from lengthwise.gateway.decisions import Phase, Statistics
from lengthwise.gateway.listener import Listener
from lengthwise.gateway.request import Outcome, Refusal, Request
from lengthwise.gateway.telemetry.journal import Journal
from lengthwise.gateway.telemetry.lag import Lag
from lengthwise.gateway.telemetry.logs import EventLog
from lengthwise.gateway.telemetry.metrics import Metrics
from lengthwise.gateway.telemetry.regret import Regret
from lengthwise.gateway.telemetry.row import Row
from lengthwise.gateway.telemetry.tracing import Tracing
from lengthwise.gateway.telemetry.trips import Trips, named

SEATS_EVERY_S = 1.0
_PLENTY = 1 << 14
"""Seats of the shadow queue where an engine is given all that come: more than requests run at once."""


class Telemetry(Listener):
    """Metrics, log, journal, traces and the shadow queue of a gateway; an async context manager.

    Args:
        config: The gateway's; of it ``listen.journal``, ``listen.trace`` and ``order.mode``.
        clock: The gateway's.
        statistics: The scheduler now (``hub.statistics``).
        tenants: Their names by number.

    Attributes:
        trips: Requests that are in; ``trips.subscribe`` hears the rows of those that are over.
        metrics: For ``metrics.registry()``.
        regret: The order in use against FCFS.
        journal: Where it is kept.
        tracing: Where it is asked for.

    Raises:
        MissingExtraError: Traces are asked for, and the extra ``tracing`` is not installed.
    """

    def __init__(
        self,
        config: GatewayConfig,
        clock: Clock = monotonic,
        *,
        statistics: Callable[[], Statistics] | None = None,
        tenants: Sequence[str] = ("anonymous",),
    ) -> None:
        self._tenant = named(tenants)
        self._statistics, self._clock = statistics, clock
        self.regret = Regret()
        mode = config.order.mode
        phases = config.dispatch.phases if mode == "rra" else None
        self.metrics = Metrics(statistics, self.regret, mode=mode, phases=phases)
        self.trips = Trips(self._tenant, self.metrics.gaps)
        self.log = EventLog(clock)
        listen = config.listen
        self.journal = Journal(listen.journal, clock) if listen.journal else None
        self.tracing = Tracing(listen.trace, clock) if listen.trace else None
        self._detail = ""
        self._of_refusals: list[Callable[[str, Refusal, int, str], None]] = []
        self._stack = contextlib.AsyncExitStack()
        for told in (self.metrics.over, self.regret.ended, self._log_over):
            self.trips.subscribe(told)
        if self.journal is not None:
            journal = self.journal
            self.trips.subscribe(journal.over)
            self.metrics.journal = lambda: (journal.written, journal.lost)

    async def __aenter__(self) -> Self:
        """Begins; raises OutputError where the journal cannot be written."""
        if self.journal is not None:
            await self._stack.enter_async_context(self.journal)
        lag = Lag(self.metrics.lag_s.add)
        lag.start()
        self._stack.callback(lag.stop)
        seats = asyncio.ensure_future(self._keep_counting())
        self._stack.push_async_callback(_cancelled, seats)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends; rows and spans that are left are written."""
        await self._stack.aclose()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)

    def configure(self, config: GatewayConfig) -> None:
        """Another schedule that is told as planned."""
        if config.order.mode == "rra":
            self.metrics.phases.plan = config.dispatch.phases

    def exchange(self, inner: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
        """The relay's exchange, within spans where traces are asked for."""
        return inner if self.tracing is None else self.tracing.exchange(inner)

    def subscribe_refusals(self, told: Callable[[str, Refusal, int, str], None]) -> None:
        """Has it told of every refusal from now on (reason, refusal, tenant, model)."""
        self._of_refusals.append(told)

    # Of requests:

    def arrived(self, request: Request) -> None:  # noqa: D102 - as Listener
        self.trips.arrived(request)
        self.metrics.arrived(request)
        self.regret.arrived(request.id, request.arrival_s)
        if self.tracing is not None:
            self.tracing.arrived(request)

    def refused(self, reason: str, refusal: Refusal, tenant: int, model: str) -> None:  # noqa: D102
        self.metrics.refused_by(reason, self._tenant(tenant), model)
        self.log.refused(reason, refusal, tenant, model)
        for told in self._of_refusals:
            told(reason, refusal, tenant, model)

    def dispatched(self, request: Request, worker: str, now_s: float) -> None:  # noqa: D102
        self.trips.dispatched(request, worker, now_s)
        self.metrics.dispatched(request, worker, now_s)
        if self.tracing is not None:
            self.tracing.dispatched(request, worker, now_s)

    def first_token(self, request: Request, now_s: float) -> None:  # noqa: D102
        self.trips.first_token(request, now_s)
        self.metrics.first_token(request, now_s)
        if self.tracing is not None:
            self.tracing.first_token(request, now_s)

    def tokens(self, request: Request, new_tokens: int, now_s: float) -> None:  # noqa: D102
        self.trips.tokens(request, new_tokens, now_s)

    def returned(self, request: Request, why: str, now_s: float) -> None:  # noqa: D102
        self.trips.returned(request, why, now_s)
        self.metrics.returned(request, why, now_s)
        self.log.returned(request, why, now_s)
        if self.tracing is not None:
            self.tracing.returned(request, why, now_s)

    def ended(self, request: Request, outcome: Outcome, now_s: float, detail: str = "") -> None:  # noqa: D102
        self._detail = detail
        self.trips.ended(request, outcome, now_s, detail)
        if self.tracing is not None:
            self.tracing.ended(request, outcome, now_s, detail)

    def phase(self, phase: Phase) -> None:  # noqa: D102
        self.metrics.phases.phase(phase)
        self.log.phase(phase)

    def _log_over(self, row: Row) -> None:
        self.log.over(row, self._detail)

    def count_seats(self) -> None:
        """Gives the shadow queue as many seats as requests are at engines while others wait, else all places."""
        if self._statistics is None:
            return
        now = self._statistics()
        seats = now.running if now.waiting else max(_places(now), now.running)
        if seats:
            self.regret.noted(self._clock(), seats)

    async def _keep_counting(self) -> None:
        while True:
            self.count_seats()
            await asyncio.sleep(SEATS_EVERY_S)


def _places(now: Statistics) -> int:
    """Requests that the engines may be given at once."""
    caps = [one.cap for one in now.workers if one.up]
    return _PLENTY if None in caps else sum(cap for cap in caps if cap is not None)


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
