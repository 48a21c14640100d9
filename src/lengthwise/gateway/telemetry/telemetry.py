"""All that is told of requests, as one listener."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from lengthwise.gateway.config import GatewayConfig
from lengthwise.gateway.protocols import Clock, Listener, monotonic
from lengthwise.gateway.request import LengthPrediction, Outcome, Rejection, Request
from lengthwise.gateway.scheduling import Phase, Statistics
from lengthwise.gateway.telemetry.events import EventLog, Tracing
from lengthwise.gateway.telemetry.journal import Again, Journal, Row
from lengthwise.gateway.telemetry.metrics import Histogram, Metrics, Regret

MOST_AGAIN = 64
"""So many later predictions of a request are kept: of longer ones every second, then every fourth..."""
FAILED_OVER = "failed_over"


class Trip:
    """A request that is in."""

    __slots__ = (
        "dispatched_s",
        "failovers",
        "first",
        "first_token_s",
        "gaps",
        "last_s",
        "length_prediction",
        "request",
        "resumed",
        "retry",
        "sent_s",
        "served_s",
        "worker",
    )  # fmt: skip

    def __init__(self, request: Request, gaps: Histogram | None) -> None:
        self.request, self.gaps = request, gaps
        self.first = self.length_prediction = request.length_prediction
        self.retry: list[Again] = []
        self.dispatched_s = self.first_token_s = self.last_s = self.sent_s = math.nan
        self.served_s, self.worker = 0.0, ""
        self.failovers = self.resumed = 0

    def believe(self, length_prediction: LengthPrediction) -> None:
        """Another forecast than before."""
        self.length_prediction = length_prediction
        if length_prediction.at_tokens == 0:
            self.first = length_prediction
            return
        if len(self.retry) >= MOST_AGAIN:
            del self.retry[1::2]
        self.retry.append((length_prediction.at_tokens, round(float(length_prediction.total_tokens), 1)))


class Trips(Listener):
    """All requests that are in, and a row for each that is over.

    Args:
        tenant: The name of a tenant's number.
        gaps: The histogram of times between tokens of a model; None counts none.
    """

    def __init__(self, tenant: Callable[[int], str] = str, gaps: Callable[[str], Histogram] | None = None) -> None:
        self._tenant, self._gaps = tenant, gaps
        self._live: dict[int, Trip] = {}
        self._report: list[Callable[[Row], None]] = []

    def subscribe(self, report: Callable[[Row], None]) -> None:
        """Has it told every row from now on; it must be quick and never raise."""
        self._report.append(report)

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Trip]:
        return iter(self._live.values())

    def get(self, request_id: int) -> Trip | None:
        """The trip of a request that is in."""
        return self._live.get(request_id)

    def on_arrival(self, request: Request) -> None:  # noqa: D102 - as Listener
        self._live[request.id] = Trip(request, self._gaps(request.model) if self._gaps else None)

    def dispatched(self, request: Request, worker: str, now_s: float) -> None:  # noqa: D102
        trip = self._live.get(request.id)
        if trip is None:
            return
        if request.length_prediction is not trip.length_prediction:
            trip.believe(request.length_prediction)
        if trip.dispatched_s != trip.dispatched_s:
            trip.dispatched_s = now_s
        trip.sent_s, trip.worker = now_s, worker

    def first_token(self, request: Request, now_s: float) -> None:  # noqa: D102
        trip = self._live.get(request.id)
        if trip is not None and math.isnan(trip.first_token_s):
            trip.first_token_s = trip.last_s = now_s

    def tokens(self, request: Request, new_tokens: int, now_s: float) -> None:  # noqa: D102
        trip = self._live.get(request.id)
        if trip is None:
            return
        last_s = trip.last_s
        trip.last_s = now_s
        if last_s == last_s:  # noqa: PLR0124 - not NaN
            if trip.gaps is not None and now_s > last_s:
                trip.gaps.add((now_s - last_s) / new_tokens, new_tokens)
        elif not request.single_chunk:
            trip.first_token_s = now_s
        if request.length_prediction is not trip.length_prediction:
            trip.believe(request.length_prediction)

    def returned(self, request: Request, cause: str, now_s: float) -> None:  # noqa: D102
        trip = self._live.get(request.id)
        if trip is None:
            return
        self._leave(trip, now_s)
        trip.resumed += request.generated_tokens
        trip.failovers += cause == FAILED_OVER

    def finished(self, request: Request, outcome: Outcome, now_s: float, detail: str = "") -> None:  # noqa: D102
        del detail
        trip = self._live.pop(request.id, None)
        if trip is None:
            return
        self._leave(trip, now_s)
        row = self._row(trip, outcome, now_s)
        for told in self._report:
            told(row)

    def _leave(self, trip: Trip, now_s: float) -> None:
        if not math.isnan(trip.sent_s):
            trip.served_s += now_s - trip.sent_s
            trip.sent_s = math.nan

    def _row(self, trip: Trip, outcome: Outcome, now_s: float) -> Row:
        q = trip.request
        queued_for_s = q.queued_for_s if trip.worker else now_s - q.arrival_s
        return Row(
            id=q.id,
            model=q.model,
            tenant=self._tenant(q.tenant),
            priority=q.priority,
            arrival_s=q.arrival_s,
            prompt_tokens=q.prompt_tokens,
            max_tokens=q.max_tokens,
            predicted_tokens=float(trip.first.total_tokens),
            source=trip.first.source,
            predicted_level=level_of(trip.first, q.generated_tokens),
            retry=tuple(trip.retry),
            output_tokens=q.generated_tokens,
            queued_for_s=queued_for_s,
            dispatched_s=trip.dispatched_s,
            first_token_s=trip.first_token_s,
            finished_s=now_s,
            served_s=trip.served_s,
            worker=trip.worker,
            preemptions=q.preemptions,
            resumed_tokens=trip.resumed,
            failovers=trip.failovers,
            outcome=outcome.value,
        )


def level_of(length_prediction: LengthPrediction, output_tokens: int) -> float:
    """The share of the predicted distribution below a length; NaN where only a number was predicted."""
    if length_prediction.quantiles is None or output_tokens < 1:
        return math.nan
    from lengthwise.predict import LEVELS

    return float(np.interp(output_tokens, length_prediction.quantiles, LEVELS, left=0.0, right=1.0))


def named(tenants: Sequence[str]) -> Callable[[int], str]:
    """The name of a tenant's number; "?" for one that nobody knows."""
    return lambda number: tenants[number] if 0 <= number < len(tenants) else "?"


EVERY_S = 0.2


class Lag:
    """Asks to be called again and again, and tells by how much that was late.

    Args:
        report: Called with the seconds, on the loop.
        every_s: Between two looks.
    """

    def __init__(self, report: Callable[[float], None], every_s: float = EVERY_S) -> None:
        self._report, self._every_s = report, every_s
        self._deadline_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """From now on."""
        loop = asyncio.get_running_loop()
        self._deadline_s = loop.time() + self._every_s
        self._timer = loop.call_at(self._deadline_s, self._called)

    def stop(self) -> None:
        """No more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _called(self) -> None:
        self._report(max(0.0, asyncio.get_running_loop().time() - self._deadline_s))
        self.start()


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
        self._of_refusals: list[Callable[[str, Rejection, int, str], None]] = []
        self._stack = contextlib.AsyncExitStack()
        for told in (self.metrics.over, self.regret.finished, self._log_over):
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
        max_num_seqs = asyncio.ensure_future(self._keep_counting())
        self._stack.push_async_callback(_cancelled, max_num_seqs)
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

    def subscribe_refusals(self, report: Callable[[str, Rejection, int, str], None]) -> None:
        """Has it told of every refusal from now on (reason, refusal, tenant, model)."""
        self._of_refusals.append(report)

    # Of requests:

    def on_arrival(self, request: Request) -> None:  # noqa: D102 - as Listener
        self.trips.on_arrival(request)
        self.metrics.on_arrival(request)
        self.regret.on_arrival(request.id, request.arrival_s)
        if self.tracing is not None:
            self.tracing.on_arrival(request)

    def refused(self, reason: str, rejection: Rejection, tenant: int, model: str) -> None:  # noqa: D102
        self.metrics.refused_by(reason, self._tenant(tenant), model)
        self.log.refused(reason, rejection, tenant, model)
        for told in self._of_refusals:
            told(reason, rejection, tenant, model)

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

    def returned(self, request: Request, cause: str, now_s: float) -> None:  # noqa: D102
        self.trips.returned(request, cause, now_s)
        self.metrics.returned(request, cause, now_s)
        self.log.returned(request, cause, now_s)
        if self.tracing is not None:
            self.tracing.returned(request, cause, now_s)

    def finished(self, request: Request, outcome: Outcome, now_s: float, detail: str = "") -> None:  # noqa: D102
        self._detail = detail
        self.trips.finished(request, outcome, now_s, detail)
        if self.tracing is not None:
            self.tracing.finished(request, outcome, now_s, detail)

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
        max_num_seqs = now.running if now.waiting else max(_places(now), now.running)
        if max_num_seqs:
            self.regret.noted(self._clock(), max_num_seqs)

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
