"""Run the scheduler on the event loop, and let the tasks of requests wait for their workers."""

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

PREEMPTED, WORKER_GONE, STOPPED = "preemption", "worker gone", "stopped"  # causes of interruptions
_MIN_TIMER_S = 0.001
"""Least delay of the timer, so that a scheduler whose next decision is always due now does not block the loop."""


class NotServedError(Exception):
    """A request is refused, or can no longer be served. ``refusal`` is the answer to its client."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class RequestEndedError(Exception):
    """The request has ended, so its task must stop."""


class Ticket:
    """Handle of an admitted request, through which its task waits for a worker and reports progress and end.

    ``worker`` is the name that the worker had when it was assigned, "" while the request waits. ``is_interrupted`` is
    set when the scheduler preempts the request or its worker is lost. The task must then abort its attempt and call
    ``requeue``. ``on_interrupt`` is called at that moment with the cause (PREEMPTED, WORKER_GONE or STOPPED). It may
    abort the attempt at once, and must do so for STOPPED.
    """

    __slots__ = (
        "_driver", "_future", "has_ended", "is_interrupted", "nonpreemptible", "on_interrupt", "request", "worker",
    )  # fmt: skip

    def __init__(self, driver: SchedulerDriver, request: Request) -> None:
        self._driver, self.request, self.worker = driver, request, ""
        self.on_interrupt: Callable[[str], None] | None = None
        self._future: asyncio.Future[str] | None = None
        self.has_ended = self.is_interrupted = self.nonpreemptible = False

    async def wait(self) -> Ticket:
        """Return the ticket once a worker is assigned. Raises NotServedError or RequestEndedError."""
        self.worker = ""
        self.is_interrupted = self.nonpreemptible = False
        self._future = asyncio.get_running_loop().create_future()
        self._driver.wake()
        try:
            await self._future
        except asyncio.CancelledError:
            self.end(Outcome.CLIENT_GONE, "while it waited")
            raise
        finally:
            # Retrieve the exception: asyncio logs it otherwise if the task was cancelled and does not raise it.
            if self._future.done() and not self._future.cancelled():
                self._future.exception()
            self._future = None
        return self

    def on_first_token(self) -> None:
        """Report that the first token has arrived. Do not call it for a response in a single chunk."""
        self._driver.listeners.first_token(self.request, self._driver.clock())

    def on_progress(self, total_generated: int) -> None:
        """Report the number of tokens generated so far. It is ignored unless above ``request.generated_tokens``."""
        request, driver = self.request, self._driver
        before = request.generated_tokens
        # An engine that counts more tokens than the request allows is wrong, and no tenant pays for them.
        total_generated = min(total_generated, request.choices * request.max_tokens)
        if not self.has_ended and total_generated > before:
            now_s = driver.clock()
            driver.scheduler.on_progress(now_s, self.request.id, total_generated)
            driver.listeners.tokens(self.request, total_generated - before, now_s)
            driver.wake_when_due(now_s)

    def mark_nonpreemptible(self) -> None:
        """Report that the request cannot be resumed elsewhere from its current worker."""
        if not (self.nonpreemptible or self.has_ended):
            self.nonpreemptible, now_s = True, self._driver.clock()
            if self.request.preemptible:
                self.is_interrupted = False
                self._driver.scheduler.mark_nonpreemptible(now_s, self.request.id)
                self._driver.wake_when_due(now_s)

    async def requeue(self, cause: str, *, avoid: str = "", generated: int | None = None) -> Ticket:
        """Return the request to the queue, and wait for a worker, if possible for another one than ``avoid``.

        ``generated`` is the number of generated tokens that the request retains. None means all.
        """
        now_s = self._now_s()
        retained = self.request.generated_tokens if generated is None else generated
        self._driver.scheduler.requeue(now_s, self.request.id, retained, avoid=avoid)
        self._driver.listeners.requeued(self.request, cause, now_s)
        return await self.wait()

    async def on_queue_full(self, refusal: Refusal, retry_after_s: float = 0.0) -> Ticket:
        """Queue the request again and wait, because the engine reported a full queue, which is no failure.

        Raises NotServedError with ``refusal`` if ``Scheduler.on_queue_full`` decides that the request must end.
        """
        now_s = self._now_s()
        if not self._driver.scheduler.on_queue_full(now_s, self.current_worker, self.request.id, retry_after_s):
            raise NotServedError(refusal)
        self._driver.listeners.requeued(self.request, "retried", now_s)
        return await self.wait()

    def report_queue_full(self, retry_after_s: float) -> None:
        """Let the worker back off, because it reported a full queue. Call ``end`` next: the request cannot wait."""
        if not self.has_ended:
            scheduler, now_s = self._driver.scheduler, self._driver.clock()
            scheduler.on_queue_full(now_s, self.current_worker, self.request.id, retry_after_s)
            self.request.dispatch.dispatched_s = math.nan  # no engine has run it, so no quota pays for it

    def end(self, outcome: Outcome, detail: str = "") -> None:
        """End the request in any state. Later calls have no effect."""
        if not self.has_ended:
            self.has_ended = True
            self._driver.remove(self.request, outcome, detail)
            self._fail_waiting(RequestEndedError())

    @property
    def current_worker(self) -> str:
        """Current name of the assigned worker, which may have been renamed, or "" while the request waits."""
        return self.worker and (self.request.dispatch.worker or self.worker)

    # Called by the driver:

    def assign(self, worker: str) -> None:
        """Resume the waiting task, with this worker."""
        if self._future is not None and not self._future.done():
            self.worker = worker
            self._future.set_result(worker)

    def end_with_error(self, refusal: Refusal, outcome: Outcome, detail: str) -> None:
        """End the request. If its task waits, raise NotServedError there. Otherwise interrupt its attempt."""
        self._fail_waiting(NotServedError(refusal))
        self.end(outcome, detail)
        self.interrupt(STOPPED)

    def interrupt(self, cause: str) -> None:
        """Notify the request's task that the request is preempted, or that its worker is lost."""
        if self.worker:
            self.is_interrupted = True
            if self.on_interrupt is not None:
                self.on_interrupt(cause)

    def _now_s(self) -> float:
        if self.has_ended:
            raise RequestEndedError
        return self._driver.clock()

    def _fail_waiting(self, error: Exception) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_exception(error)


class SchedulerDriver:
    """Owns the scheduler, passes events to it, and carries out its decisions once per iteration of the event loop.

    ``tickets`` are those of all admitted requests, by request id.
    """

    def __init__(self, scheduler: Scheduler, clock: Clock = monotonic, listeners: Sequence[Listener] = ()) -> None:
        self.scheduler, self.clock, self.listeners = scheduler, clock, Listeners(listeners)
        self.tickets: dict[int, Ticket] = {}
        self._is_woken = self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s, self._empty = math.inf, asyncio.Event()

    @property
    def num_requests(self) -> int:
        """Number of admitted requests, waiting or at a worker."""
        return len(self.tickets)

    async def enter(self, request: Request) -> Ticket:
        """Return a ticket once a worker is assigned. Raises NotServedError if the request is refused or expires."""
        refusal = DRAINING if self._closed else self.scheduler.offer(self.clock(), request)
        if refusal is not None:
            self.listeners.refused(refusal.reason, refusal, request.client.tenant, request.model)
            raise NotServedError(refusal)
        self.listeners.on_admission(request)
        ticket = self.tickets[request.id] = Ticket(self, request)
        return await ticket.wait()

    def configure(self, config: GatewayConfig) -> None:
        """Apply order, admission and dispatch. Raises InputError, and changes none of them, if one cannot change."""
        self.scheduler.configure(self.clock(), config.order, config.admission, config.dispatch)
        self.wake()

    def fleet_changed(self, states: Sequence[WorkerState]) -> None:
        """Replace the set of workers. Requests whose worker is lost are interrupted."""
        self._interrupt(self.scheduler.update_workers(self.clock(), states), WORKER_GONE)
        self.wake()

    def repredict(self, request_id: int, length_prediction: LengthPrediction) -> None:
        """Apply a new prediction of an admitted request, unless it has ended."""
        if request_id in self.tickets:
            now_s = self.clock()
            self.scheduler.repredict(now_s, request_id, length_prediction)
            self.wake_when_due(now_s)

    def statistics(self) -> Statistics:
        """Return the scheduler's current numbers."""
        return self.scheduler.statistics(self.clock())

    def position(self, request_id: int) -> int | None:
        """Return the number of requests that precede a waiting request, or None if it does not wait."""
        return self.scheduler.position(request_id)

    async def wait_empty(self) -> None:
        """Wait until there is no admitted request."""
        while self.tickets:
            self._empty.clear()
            await self._empty.wait()

    def close(self) -> None:
        """End all admitted requests as failed (waiting ones get 503), stop the timer, and refuse later requests."""
        self._closed = True
        for ticket in list(self.tickets.values()):
            ticket.end_with_error(DRAINING, Outcome.FAILED, "the gateway stopped")
        self._stop_timer()

    def wake(self) -> None:
        """Let the scheduler decide in the next iteration of the event loop."""
        if not self._is_woken:
            self._is_woken = True
            asyncio.get_running_loop().call_soon(self.schedule)

    def schedule(self) -> None:
        """Carry out the scheduler's decisions, and set the timer for the next ones."""
        self._is_woken = False
        now_s = self.clock()
        if decisions := self.scheduler.schedule(now_s):
            self._apply(decisions, now_s)
        self._set_timer(self.scheduler.next_s(now_s), now_s)

    def _apply(self, decisions: Decisions, now_s: float) -> None:
        for phase in decisions.phases:
            self.listeners.phase(phase)
        for one, refusal in decisions.expire:
            if (ticket := self.tickets.get(one)) is not None:
                ticket.end_with_error(refusal, Outcome.EXPIRED, refusal.reason)
        self._interrupt(decisions.preempt, PREEMPTED)
        for one, worker in decisions.assign:
            if (ticket := self.tickets.get(one)) is None:
                self.scheduler.remove(now_s, one)
            else:
                self.listeners.dispatched(ticket.request, worker, now_s)
                ticket.assign(worker)

    def _interrupt(self, request_ids: Sequence[int], cause: str) -> None:
        for one in request_ids:
            if (ticket := self.tickets.get(one)) is not None:
                ticket.interrupt(cause)

    def wake_when_due(self, now_s: float) -> None:
        """Let the scheduler decide when its next decision is due: by ``wake`` if that is now, else by the timer."""
        if self._is_woken:
            return
        if (when_s := self.scheduler.next_s(now_s)) <= now_s:
            self.wake()
        elif when_s < self._timer_s:
            self._set_timer(when_s, now_s)

    def _set_timer(self, when_s: float, now_s: float) -> None:
        # An earlier timer stays: one more call of the scheduler costs less than a new timer for each request.
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
        """Remove a request that has ended."""
        if self.tickets.pop(request.id, None) is not None:
            now_s = self.clock()
            self.scheduler.remove(now_s, request.id, client_gone=outcome is Outcome.CLIENT_GONE)
            self.listeners.on_end(request, outcome, now_s, detail)
            if not self.tickets:
                self._empty.set()
            self.wake()
