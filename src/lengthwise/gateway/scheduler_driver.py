"""The one place where the scheduler meets the event loop: requests wait here for their turn."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

from lengthwise.gateway.config import GatewayConfig
from lengthwise.gateway.protocols import Clock, Listener, Listeners, monotonic
from lengthwise.gateway.request import LengthPrediction, Outcome, Rejection, Request
from lengthwise.gateway.scheduling import Decisions, Scheduler, Statistics, WorkerState

CUT, GONE = "cut", "worker gone"


class RequestRefusedError(Exception):
    """A request is not served.

    Attributes:
        rejection: Status, reason, what to tell.
    """

    def __init__(self, rejection: Rejection) -> None:
        super().__init__(rejection.message)
        self.rejection = rejection


class RequestFinishedError(Exception):
    """The request ended while somebody waited for its turn."""


class Ticket:
    """A request that is in: it waits, or is at ``worker``, or is over.

    Attributes:
        request: Whose.
        worker: Where it may run; "" while it waits.
        cut: Set when the scheduler wants the worker's place back: abort, then ``retry``.
        on_interrupt: Called with CUT or GONE when the worker's place is to be given back at once.
        kept: Whether it was said that it cannot be cut where it is.
    """

    __slots__ = ("_future", "_hub", "_over", "nonpreemptible", "on_interrupt", "preempted", "request", "worker")

    def __init__(self, driver: SchedulerDriver, request: Request) -> None:
        self._hub, self.request, self.worker = driver, request, ""
        self.preempted = asyncio.Event()
        self.on_interrupt: Callable[[str], None] | None = None
        self._future: asyncio.Future[str] | None = None
        self._over = self.nonpreemptible = False

    async def placed(self) -> None:
        """Returns once a worker is assigned; raises Refused or Over."""
        self.worker = ""
        self.preempted.clear()
        self.nonpreemptible = False
        self._future = asyncio.get_running_loop().create_future()
        self._hub.wake()
        try:
            await self._future
        except asyncio.CancelledError:
            self.end(Outcome.CLIENT_GONE, "while it waited")
            raise
        finally:
            if self._future.done() and not self._future.cancelled():
                self._future.exception()  # seen, should the task have been cancelled meanwhile
            self._future = None

    def first_token(self) -> None:
        """The first token's bytes came; nobody knows when of an answer that comes at once."""
        self._hub.listeners.first_token(self.request, self._hub.clock())

    def tokens(self, total_generated: int) -> None:
        """So many tokens have come in all; fewer than before say nothing (a run that began again)."""
        if not self._over and total_generated > self.request.generated_tokens:
            self._hub.progressed(self.request, total_generated)

    def mark_nonpreemptible(self) -> None:
        """It cannot be cut where it is now; at another worker it may be."""
        if self.nonpreemptible or self._over:
            return
        self.nonpreemptible = True
        if self.request.resumable:
            self.preempted.clear()
            self._hub.mark_nonpreemptible(self.request)

    async def retry(self, cause: str, *, avoid: str = "", generated: int | None = None) -> Ticket:
        """This turn at another worker (or the same), once it has come again.

        Args:
            cause: "cut", "window", "failed_over" or "retried".
            avoid: A worker that failed it.
            generated: Tokens that it keeps; None: all that were told.

        Raises:
            Refused: It waited in vain.
            Over: It was ended meanwhile.
        """
        if self._over:
            raise RequestFinishedError
        kept = self.request.generated_tokens if generated is None else generated
        self._hub.returned(self.request, cause, kept, avoid)
        await self.placed()
        return self

    async def requeue(self, hold_s: float = 0.0) -> Ticket:
        """This turn again, after the engine said that its queue is full, for so long: no failure, nothing was lost."""
        if self._over:
            raise RequestFinishedError
        self._hub.full(self.request, self.current_worker, hold_s)
        await self.placed()
        return self

    def end(self, outcome: Outcome, detail: str = "") -> None:
        """It is over, in whatever state; the first call counts."""
        if self._over:
            return
        self._over = True
        self._hub.left(self.request, outcome, detail)
        if self._future is not None and not self._future.done():
            self._future.set_exception(RequestFinishedError())

    @property
    def current_worker(self) -> str:
        """Where it may run, by the name that the worker has now; "" while it waits."""
        return self.worker and (self.request.worker or self.worker)

    @property
    def finished(self) -> bool:
        """Whether it has ended."""
        return self._over

    # What the hub tells:

    def assigned(self, worker: str) -> None:
        """It may go there."""
        if self._future is not None and not self._future.done():
            self.worker = worker
            self._future.set_result(worker)

    def expired(self, rejection: Rejection) -> None:
        """It waited in vain."""
        if self._future is not None and not self._future.done():
            self._future.set_exception(RequestRefusedError(rejection))
        self.end(Outcome.EXPIRED, rejection.reason)

    def stopped(self, rejection: Rejection) -> None:
        """The gateway ends: who waits is told so."""
        if self._future is not None and not self._future.done():
            self._future.set_exception(RequestRefusedError(rejection))
        self.end(Outcome.FAILED, "the gateway stopped")

    def interrupt(self, cause: str) -> None:
        """Its place is wanted back, or its worker is gone."""
        if self.worker:
            self.preempted.set()
            if self.on_interrupt is not None:
                self.on_interrupt(cause)


_DRAINING = Rejection(503, "draining", "The gateway is shutting down; send the request again.", 1.0)
_LEAST_REST_S = 0.001
"""Between two timed looks: a scheduler that asks for "now" again and again does not spin the loop."""


class SchedulerDriver:
    """Owns the scheduler and is the only one to tell it anything; all on one event loop.

    Decisions are asked for once a tick of the loop in which something happened, and when the scheduler
    itself said so.

    Args:
        scheduler: Who goes first and where.
        clock: The gateway's.
        listeners: Told of what happens.
    """

    def __init__(self, scheduler: Scheduler, clock: Clock = monotonic, listeners: Sequence[Listener] = ()) -> None:
        self.clock = clock
        self.listeners = Listeners(listeners)
        self._scheduler = scheduler
        self._turns: dict[int, Ticket] = {}
        self._awake = False
        self._timer: asyncio.TimerHandle | None = None
        self._deadline_s = math.inf
        self._empty: asyncio.Event | None = None
        self._closed = False

    @property
    def num_requests(self) -> int:
        """Requests that are in: waiting or at a worker."""
        return len(self._turns)

    async def enter(self, request: Request) -> Ticket:
        """The request's turn, once it has come.

        Raises:
            Refused: Not let in, or it waited in vain.
        """
        rejection = _DRAINING if self._closed else self._scheduler.offer(self.clock(), request)
        if rejection is not None:
            self.listeners.refused(rejection.reason, rejection, request.tenant, request.model)
            raise RequestRefusedError(rejection)
        self.listeners.on_arrival(request)
        ticket = self._turns[request.id] = Ticket(self, request)
        await ticket.placed()
        return ticket

    def configure(self, config: GatewayConfig) -> None:
        """Another order, admission and dispatch; raises InputError where they cannot be taken, and all stays."""
        self._scheduler.configure(self.clock(), config.order, config.admission, config.dispatch)
        self.wake()

    def fleet_changed(self, states: Sequence[WorkerState]) -> None:
        """Tells the scheduler of all workers as they are now; who was at one that is gone comes back."""
        for one in self._scheduler.workers(self.clock(), states):
            ticket = self._turns.get(one)
            if ticket is not None:
                ticket.interrupt(GONE)
        self.wake()

    def reforecast(self, request: Request, length_prediction: LengthPrediction) -> None:
        """A new forecast of a request that is in."""
        if request.id in self._turns:
            now_s = self.clock()
            self._scheduler.reforecast(now_s, request.id, length_prediction)
            self._wake_when_due(now_s)

    def late(self, request_id: int, length_prediction: LengthPrediction) -> None:
        """A forecast that came after its deadline."""
        if request_id in self._turns:
            now_s = self.clock()
            self._scheduler.reforecast(now_s, request_id, length_prediction)
            self._wake_when_due(now_s)

    def statistics(self) -> Statistics:
        """The scheduler now."""
        return self._scheduler.statistics(self.clock())

    def position(self, request_id: int) -> int | None:
        """A request's place in the queue."""
        return self._scheduler.position(request_id)

    async def emptied(self) -> None:
        """Returns when no request is in."""
        while self._turns:
            if self._empty is None or self._empty.is_set():
                self._empty = asyncio.Event()
            await self._empty.wait()

    def close(self) -> None:
        """No more decisions; who still waits is refused (503: the gateway ends), and so is who comes."""
        self._closed = True
        for ticket in list(self._turns.values()):
            ticket.stopped(_DRAINING)
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._deadline_s = None, math.inf

    def wake(self) -> None:
        """Decisions are made in the next tick of the loop."""
        if not self._awake:
            self._awake = True
            asyncio.get_running_loop().call_soon(self._decide)

    def _wake_when_due(self, now_s: float) -> None:
        if self._awake:
            return
        when_s = self._scheduler.next_s(now_s)
        if when_s <= now_s:
            self.wake()
        elif when_s < self._deadline_s:
            self._sleep_until(when_s, now_s)

    def _decide(self) -> None:
        self._awake = False
        now_s = self.clock()
        decisions = self._scheduler.decide(now_s)
        if decisions:
            self._apply(decisions, now_s)
        self._sleep_until(self._scheduler.next_s(now_s), now_s)

    def _apply(self, decisions: Decisions, now_s: float) -> None:
        for phase in decisions.phases:
            self.listeners.phase(phase)
        for one, rejection in decisions.expire:
            ticket = self._turns.get(one)
            if ticket is not None:
                ticket.expired(rejection)
        for one in decisions.cut:
            ticket = self._turns.get(one)
            if ticket is not None:
                ticket.interrupt(CUT)
        for one, worker in decisions.assign:
            ticket = self._turns.get(one)
            if ticket is None:
                self._scheduler.left(now_s, one)
                continue
            self.listeners.dispatched(ticket.request, worker, now_s)
            ticket.assigned(worker)

    def _sleep_until(self, when_s: float, now_s: float) -> None:
        """A timer that rings before stays: it costs one look more, once, and not two timers a request."""
        if self._timer is not None:
            if self._deadline_s <= when_s:
                return
            self._timer.cancel()
            self._timer = None
        self._deadline_s = when_s
        if when_s < math.inf:
            rest_s = max(when_s - now_s, _LEAST_REST_S)
            self._timer = asyncio.get_running_loop().call_later(rest_s, self._timed)

    def _timed(self) -> None:
        self._timer = None
        self._decide()

    # What turns tell:

    def progressed(self, request: Request, total: int) -> None:
        """So many tokens have come in all."""
        before = request.generated_tokens
        now_s = self.clock()
        self._scheduler.progressed(now_s, request.id, total)
        self.listeners.tokens(request, total - before, now_s)
        self._wake_when_due(now_s)

    def mark_nonpreemptible(self, request: Request) -> None:
        """It cannot be cut where it is; what was to have its place looks for another one."""
        now_s = self.clock()
        self._scheduler.mark_nonpreemptible(now_s, request.id)
        self._wake_when_due(now_s)

    def returned(self, request: Request, cause: str, total: int, avoid: str) -> None:
        """It is back in the queue with the tokens that it keeps."""
        now_s = self.clock()
        self._scheduler.returned(now_s, request.id, total, avoid=avoid)
        self.listeners.returned(request, cause, now_s)

    def full(self, request: Request, worker: str, hold_s: float = 0.0) -> None:
        """Its worker's own queue was full: it is back, and the worker gets fewer, and none for so long."""
        now_s = self.clock()
        self._scheduler.queue_full(now_s, worker, request.id, hold_s)
        self.listeners.returned(request, "retried", now_s)

    def left(self, request: Request, outcome: Outcome, detail: str) -> None:
        """It is over."""
        if self._turns.pop(request.id, None) is None:
            return
        now_s = self.clock()
        self._scheduler.left(now_s, request.id)
        self.listeners.finished(request, outcome, now_s, detail)
        if not self._turns and self._empty is not None:
            self._empty.set()
        self.wake()
