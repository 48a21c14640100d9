"""The one place where the scheduler meets the event loop: requests wait here for their turn."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from lengthwise.gateway.clock import Clock, monotonic
from lengthwise.gateway.config import GatewayConfig
from lengthwise.gateway.decisions import Decisions, Statistics, WorkerState
from lengthwise.gateway.listener import Listener, Listeners
from lengthwise.gateway.request import Forecast, Outcome, Refusal, Request
from lengthwise.gateway.scheduling import Scheduler
from lengthwise.gateway.turn import CUT, GONE, Over, Refused, Turn

__all__ = ["CUT", "GONE", "Hub", "Over", "Refused", "Turn"]

_DRAINING = Refusal(503, "draining", "The gateway is shutting down; send the request again.", 1.0)
_LEAST_REST_S = 0.001
"""Between two timed looks: a scheduler that asks for "now" again and again does not spin the loop."""


class Hub:
    """Owns the scheduler and is the only one to tell it anything; all on one event loop.

    Decisions are asked for once a tick of the loop in which something happened, and when the scheduler
    itself said so.

    Args:
        scheduler: Who goes first and where.
        clock: The gateway's.
        listeners: Told of what happens.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        clock: Clock = monotonic,
        listeners: Sequence[Listener] = (),
    ) -> None:
        self.clock = clock
        self.listeners = Listeners(listeners)
        self._scheduler = scheduler
        self._turns: dict[int, Turn] = {}
        self._awake = False
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = math.inf
        self._empty: asyncio.Event | None = None
        self._closed = False

    @property
    def held(self) -> int:
        """Requests that are in: waiting or at a worker."""
        return len(self._turns)

    async def enter(self, request: Request) -> Turn:
        """The request's turn, once it has come.

        Raises:
            Refused: Not let in, or it waited in vain.
        """
        refusal = _DRAINING if self._closed else self._scheduler.offer(self.clock(), request)
        if refusal is not None:
            self.listeners.refused(refusal.reason, refusal, request.tenant, request.model)
            raise Refused(refusal)
        self.listeners.arrived(request)
        turn = self._turns[request.id] = Turn(self, request)
        await turn.placed()
        return turn

    def configure(self, config: GatewayConfig) -> None:
        """Another order, admission and dispatch; raises InputError where they cannot be taken, and all stays."""
        self._scheduler.configure(self.clock(), config.order, config.admission, config.dispatch)
        self.wake()

    def fleet_changed(self, states: Sequence[WorkerState]) -> None:
        """Tells the scheduler of all workers as they are now; who was at one that is gone comes back."""
        for one in self._scheduler.workers(self.clock(), states):
            turn = self._turns.get(one)
            if turn is not None:
                turn.interrupt(GONE)
        self.wake()

    def reforecast(self, request: Request, forecast: Forecast) -> None:
        """A new forecast of a request that is in."""
        if request.id in self._turns:
            now_s = self.clock()
            self._scheduler.reforecast(now_s, request.id, forecast)
            self._wake_when_due(now_s)

    def late(self, request_id: int, forecast: Forecast) -> None:
        """A forecast that came after its deadline."""
        if request_id in self._turns:
            now_s = self.clock()
            self._scheduler.reforecast(now_s, request_id, forecast)
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
        for turn in list(self._turns.values()):
            turn.stopped(_DRAINING)
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self._due_s = None, math.inf

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
        elif when_s < self._due_s:
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
        for one, refusal in decisions.expire:
            turn = self._turns.get(one)
            if turn is not None:
                turn.expired(refusal)
        for one in decisions.cut:
            turn = self._turns.get(one)
            if turn is not None:
                turn.interrupt(CUT)
        for one, worker in decisions.assign:
            turn = self._turns.get(one)
            if turn is None:
                self._scheduler.left(now_s, one)
                continue
            self.listeners.dispatched(turn.request, worker, now_s)
            turn.assigned(worker)

    def _sleep_until(self, when_s: float, now_s: float) -> None:
        """A timer that rings before stays: it costs one look more, once, and not two timers a request."""
        if self._timer is not None:
            if self._due_s <= when_s:
                return
            self._timer.cancel()
            self._timer = None
        self._due_s = when_s
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

    def uncuttable(self, request: Request) -> None:
        """It cannot be cut where it is; what was to have its place looks for another one."""
        now_s = self.clock()
        self._scheduler.uncuttable(now_s, request.id)
        self._wake_when_due(now_s)

    def returned(self, request: Request, why: str, total: int, avoid: str) -> None:
        """It is back in the queue with the tokens that it keeps."""
        now_s = self.clock()
        self._scheduler.returned(now_s, request.id, total, avoid=avoid)
        self.listeners.returned(request, why, now_s)

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
        self.listeners.ended(request, outcome, now_s, detail)
        if not self._turns and self._empty is not None:
            self._empty.set()
        self.wake()
