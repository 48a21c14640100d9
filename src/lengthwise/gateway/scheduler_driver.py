"""Runs the scheduler on the event loop: requests await their workers here."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from lengthwise.gateway.config import GatewayConfig
from lengthwise.gateway.protocols import Clock, Listener, Listeners, monotonic
from lengthwise.gateway.request import DRAINING, LengthPrediction, Outcome, Refusal, Request
from lengthwise.gateway.scheduling import Decisions, Statistics, WorkerState

if TYPE_CHECKING:
    from lengthwise.gateway.core import Scheduler

PREEMPTED, WORKER_GONE = "preemption", "worker gone"  # causes of interruptions: a preemption, and a lost worker
_MIN_TIMER_S = 0.001
"""Least delay of the timer: a scheduler that returns "now" again and again does not spin the loop."""


class NotServedError(Exception):
    """A request cannot be served, before or after its admission, for the reason in ``refusal``."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class RequestFinishedError(Exception):
    """A request finished while its task waited for a worker."""


class Ticket:
    """An admitted request: it waits, or is at a worker (``worker``, its name at assignment), or is finished.

    ``interrupted`` is set when the scheduler preempts the request or its worker is lost: abort there, then ``requeue``.
    ``on_interrupt`` gets PREEMPTED or WORKER_GONE, and may abort the attempt at once.
    """

    __slots__ = ("_driver", "_future", "finished", "interrupted", "nonpreemptible", "on_interrupt", "request", "worker")

    def __init__(self, driver: SchedulerDriver, request: Request) -> None:
        self._driver, self.request, self.worker = driver, request, ""
        self.interrupted = asyncio.Event()
        self.on_interrupt: Callable[[str], None] | None = None
        self._future: asyncio.Future[str] | None = None
        self.finished = self.nonpreemptible = False

    async def wait(self) -> Ticket:
        """Return the ticket once a worker is assigned; raise NotServedError or RequestFinishedError."""
        self.worker = ""
        self.interrupted.clear()
        self.nonpreemptible = False
        self._future = asyncio.get_running_loop().create_future()
        self._driver.wake()
        try:
            await self._future
        except asyncio.CancelledError:
            self.end(Outcome.CLIENT_GONE, "while it waited")
            raise
        finally:
            # Retrieve an exception that a cancelled task never sees, or asyncio logs it.
            if self._future.done() and not self._future.cancelled():
                self._future.exception()
            self._future = None
        return self

    def on_first_token(self) -> None:
        """Report the first bytes of the first token; not called for a response in a single chunk."""
        self._driver.listeners.first_token(self.request, self._driver.clock())

    def on_progress(self, total_generated: int) -> None:
        """Report the total of generated tokens; fewer than before are ignored (a run that started again)."""
        before, driver = self.request.generated_tokens, self._driver
        if not self.finished and total_generated > before:
            now_s = driver.clock()
            driver.scheduler.on_progress(now_s, self.request.id, total_generated)
            driver.listeners.tokens(self.request, total_generated - before, now_s)
            driver.wake_when_due(now_s)

    def mark_nonpreemptible(self) -> None:
        """Report that the request cannot be resumed elsewhere from its current worker."""
        if not (self.nonpreemptible or self.finished):
            self.nonpreemptible, now_s = True, self._driver.clock()
            if self.request.preemptible:
                self.interrupted.clear()
                self._driver.scheduler.mark_nonpreemptible(now_s, self.request.id)
                self._driver.wake_when_due(now_s)

    async def requeue(self, cause: str, *, avoid: str = "", generated: int | None = None) -> Ticket:
        """Wait again with ``generated`` tokens (None: all), if possible for another worker than ``avoid``."""
        now_s = self._now_s()
        retained = self.request.generated_tokens if generated is None else generated
        self._driver.scheduler.requeue(now_s, self.request.id, retained, avoid=avoid)
        self._driver.listeners.requeued(self.request, cause, now_s)
        return await self.wait()

    async def on_queue_full(self, retry_after_s: float = 0.0) -> Ticket:
        """Wait for a worker again after the engine reported a full queue: no failure, and nothing was lost."""
        now_s = self._now_s()
        self._driver.scheduler.on_queue_full(now_s, self.current_worker, self.request.id, retry_after_s)
        self._driver.listeners.requeued(self.request, "retried", now_s)
        return await self.wait()

    def end(self, outcome: Outcome, detail: str = "") -> None:
        """End the request in any state; only the first call counts."""
        if not self.finished:
            self.finished = True
            self._driver.remove(self.request, outcome, detail)
            self._fail_waiting(RequestFinishedError())

    @property
    def current_worker(self) -> str:
        """Current name of the assigned worker, which may have been renamed; "" while the request waits."""
        return self.worker and (self.request.dispatch.worker or self.worker)

    # Called by the driver:

    def assign(self, worker: str) -> None:
        """Resume the waiting task with its worker."""
        if self._future is not None and not self._future.done():
            self.worker = worker
            self._future.set_result(worker)

    def refuse(self, refusal: Refusal, outcome: Outcome, detail: str) -> None:
        """Refuse the waiting task and end the request."""
        self._fail_waiting(NotServedError(refusal))
        self.end(outcome, detail)

    def interrupt(self, cause: str) -> None:
        """Request the slot back, or report the loss of the worker."""
        if self.worker:
            self.interrupted.set()
            if self.on_interrupt is not None:
                self.on_interrupt(cause)

    def _now_s(self) -> float:
        if self.finished:
            raise RequestFinishedError
        return self._driver.clock()

    def _fail_waiting(self, error: Exception) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_exception(error)


class SchedulerDriver:
    """Owns the scheduler: passes events to it and carries out its decisions, once per iteration of the event loop."""

    def __init__(self, scheduler: Scheduler, clock: Clock = monotonic, listeners: Sequence[Listener] = ()) -> None:
        self.scheduler, self.clock, self.listeners = scheduler, clock, Listeners(listeners)
        self._tickets: dict[int, Ticket] = {}
        self._is_woken = self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s, self._empty = math.inf, asyncio.Event()

    @property
    def num_requests(self) -> int:
        """Admitted requests, waiting or at a worker."""
        return len(self._tickets)

    async def enter(self, request: Request) -> Ticket:
        """Return the request's ticket once a worker is assigned; raise NotServedError if refused or expired."""
        refusal = DRAINING if self._closed else self.scheduler.offer(self.clock(), request)
        if refusal is not None:
            self.listeners.refused(refusal.reason, refusal, request.client.tenant, request.model)
            raise NotServedError(refusal)
        self.listeners.on_arrival(request)
        ticket = self._tickets[request.id] = Ticket(self, request)
        return await ticket.wait()

    def configure(self, config: GatewayConfig) -> None:
        """Apply order, admission and dispatch; raise InputError, with nothing changed, where they cannot change."""
        self.scheduler.configure(self.clock(), config.order, config.admission, config.dispatch)
        self.wake()

    def fleet_changed(self, states: Sequence[WorkerState]) -> None:
        """Replace the set of workers; requests at lost ones are interrupted."""
        self._interrupt(self.scheduler.update_workers(self.clock(), states), WORKER_GONE)
        self.wake()

    def repredict(self, request_id: int, length_prediction: LengthPrediction) -> None:
        """Apply a new prediction of an admitted request; ignore one for a finished request."""
        if request_id in self._tickets:
            now_s = self.clock()
            self.scheduler.repredict(now_s, request_id, length_prediction)
            self.wake_when_due(now_s)

    def statistics(self) -> Statistics:
        """Return the scheduler's current numbers."""
        return self.scheduler.statistics(self.clock())

    def position(self, request_id: int) -> int | None:
        """Return how many requests precede a request; None where it does not wait."""
        return self.scheduler.position(request_id)

    async def emptied(self) -> None:
        """Return when there is no admitted request."""
        while self._tickets:
            self._empty.clear()
            await self._empty.wait()

    def close(self) -> None:
        """Stop deciding; waiting and later requests are refused with 503."""
        self._closed = True
        for ticket in list(self._tickets.values()):
            ticket.refuse(DRAINING, Outcome.FAILED, "the gateway stopped")
        self._stop_timer()

    def wake(self) -> None:
        """Decide in the next iteration of the loop."""
        if not self._is_woken:
            self._is_woken = True
            asyncio.get_running_loop().call_soon(self.schedule)

    def schedule(self) -> None:
        """Carry out the scheduler's decisions now, and set the timer for the next."""
        self._is_woken = False
        now_s = self.clock()
        if decisions := self.scheduler.schedule(now_s):
            self._apply(decisions, now_s)
        self._set_timer(self.scheduler.next_s(now_s), now_s)

    def _apply(self, decisions: Decisions, now_s: float) -> None:
        for phase in decisions.phases:
            self.listeners.phase(phase)
        for one, refusal in decisions.expire:
            if (ticket := self._tickets.get(one)) is not None:
                ticket.refuse(refusal, Outcome.EXPIRED, refusal.reason)
        self._interrupt(decisions.preempt, PREEMPTED)
        for one, worker in decisions.assign:
            if (ticket := self._tickets.get(one)) is None:
                self.scheduler.remove(now_s, one)
            else:
                self.listeners.dispatched(ticket.request, worker, now_s)
                ticket.assign(worker)

    def _interrupt(self, request_ids: Sequence[int], cause: str) -> None:
        for one in request_ids:
            if (ticket := self._tickets.get(one)) is not None:
                ticket.interrupt(cause)

    def wake_when_due(self, now_s: float) -> None:
        """Decide in the next iteration of the loop, or at the time that the scheduler names."""
        if self._is_woken:
            return
        if (when_s := self.scheduler.next_s(now_s)) <= now_s:
            self.wake()
        elif when_s < self._timer_s:
            self._set_timer(when_s, now_s)

    def _set_timer(self, when_s: float, now_s: float) -> None:
        # An earlier timer stays: one more decision then is cheaper than two timers per request.
        if self._timer is not None and self._timer_s <= when_s:
            return
        self._stop_timer()
        self._timer_s = when_s
        if when_s < math.inf:
            delay_s = max(when_s - now_s, _MIN_TIMER_S)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_s = None, math.inf

    def _on_timer(self) -> None:
        self._timer = None
        self.schedule()

    def remove(self, request: Request, outcome: Outcome, detail: str) -> None:
        """Remove a finished request."""
        if self._tickets.pop(request.id, None) is not None:
            now_s = self.clock()
            self.scheduler.remove(now_s, request.id)
            self.listeners.finished(request, outcome, now_s, detail)
            if not self._tickets:
                self._empty.set()
            self.wake()
