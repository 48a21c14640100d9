"""The scheduler: told what happens, it says what is to be done. It reads no clock and touches no network."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lengthwise.gateway.config import Admission, Dispatch, Order
from lengthwise.gateway.core import admission as letting_in
from lengthwise.gateway.core.backlog import tokens_by_model
from lengthwise.gateway.core.bins import Bins
from lengthwise.gateway.core.changing import check_change
from lengthwise.gateway.core.crew import Crew
from lengthwise.gateway.core.cutting import Cutting
from lengthwise.gateway.core.entry import Entry, State
from lengthwise.gateway.core.expiry import Expiry
from lengthwise.gateway.core.queue import Queue
from lengthwise.gateway.core.ranker import Ranker
from lengthwise.gateway.core.sending import Sending
from lengthwise.gateway.core.service import Service
from lengthwise.gateway.core.telling import statistics
from lengthwise.gateway.decisions import UNHELD, Decisions, Statistics, WorkerState
from lengthwise.gateway.request import Forecast, Refusal, Request
from lengthwise.policy.named import resolve

RANKS = {"srtf": "srtf", "isrtf": "srtf", "windowed": "srtf", "bins": "completed_batches"}
_NOTHING = Decisions()
_CLASSES, _LONGEST = 2047, 1 << 20


class Scheduler:
    """Who goes first, where, and who makes room.

    Every request that was let in is in exactly one state (``entry.State``) until it has ``left``. Each event
    takes O(log n) comparisons of those who wait; ``decide`` with nothing to do takes O(1). The same events
    at the same times give the same decisions.

    Args:
        order: Who goes first, and who makes room.
        admission: What may wait.
        dispatch: How many requests a worker is given.
        observe: As mode "observe": nothing is held back but beyond a cap that a worker has of its own.
    """

    def __init__(
        self, order: Order, admission: Admission, dispatch: Dispatch, *, observe: bool = False
    ) -> None:
        self._order, self._admission = order, admission
        self._service = Service()
        rank = resolve("rank", order.rank or RANKS.get(order.mode, "fcfs"))
        self._ranker = Ranker(rank, self._service)
        fair = order.fairness == "vtc"
        self._queue = Queue(self._ranker, self._service, max_wait_s=order.max_wait_s, fair=fair)
        self._cutting = Cutting(order, self._ranker, self._service)
        self._crew = Crew(dispatch, unheld=observe or order.mode in UNHELD, phased=order.mode == "rra")
        self._bins = Bins(order.bins, min(order.batch_wait_s, order.max_wait_s))
        self._binned = order.mode == "bins"
        self._sending = Sending(self._queue, self._service, self._crew, self._cutting, dispatch.affinity)
        self._expiry = Expiry(admission.no_engine_s, self._crew)
        self._entries: dict[int, Entry] = {}
        self._draining = False
        self._changed = False
        self._wake_s = math.inf
        if rank.every_step or order.mode in ("isrtf", "windowed"):
            self._ranker.warm()

    def configure(self, now_s: float, order: Order, admission: Admission, dispatch: Dispatch) -> None:
        """Takes other settings, for those who wait already, too; nobody is refused, moved or cut by that alone.

        Raises:
            InputError: The order is of another mode or rank, or cannot be used; nothing has changed.
        """
        check_change(self._order, order)
        self._order, self._admission = order, admission
        self._queue.configure(now_s, max_wait_s=order.max_wait_s, fair=order.fairness == "vtc")
        self._cutting.configure(now_s, order)
        self._bins.configure(order.bins, min(order.batch_wait_s, order.max_wait_s))
        self._sending.configure(dispatch)
        self._expiry.configure(admission.no_engine_s)
        self._changed = True

    # -- requests --------------------------------------------------------------------------

    def offer(self, now_s: float, request: Request) -> Refusal | None:
        """Lets a request wait; else says why not."""
        refused = self._refusal(now_s, request)
        if refused is not None:
            return refused
        entry = Entry(request)
        entry.believe(request.forecast)
        self._entries[request.id] = entry
        self._ranker.columns.take(entry)
        self._expiry.watch(entry)
        if self._binned:
            batch = self._bins.add(now_s, entry, self._crew.batch_size(request.model))
            self._leave_bin(now_s, batch)
        else:
            self._wait(now_s, entry)
        self._changed = True
        return None

    def reforecast(self, now_s: float, id: int, forecast: Forecast) -> None:  # noqa: A002
        """A new prediction for a live request."""
        entry = self._entries.get(id)
        if entry is None:
            return
        worker = self._crew.of(entry)
        if entry.state is State.WAITING:
            self._queue.believe(now_s, entry, forecast)
        elif entry.state is State.GATHERING:
            before = entry.remaining
            entry.believe(forecast)
            self._bins.recount(entry, before)
        elif worker is None:
            entry.believe(forecast)
        else:
            worker.believe(entry, forecast)
            self._ranker.write(now_s, entry)
        self._changed |= entry.state is State.WAITING
        if self._cutting.want():
            self._look(now_s)

    def progressed(self, now_s: float, id: int, generated_tokens: int) -> None:  # noqa: A002
        """So many tokens have come in all for a running request."""
        entry = self._entries.get(id)
        if entry is None or generated_tokens <= entry.request.generated_tokens:
            return
        worker = self._crew.of(entry)
        more = generated_tokens - entry.request.generated_tokens
        entry.request.generated_tokens = generated_tokens
        if worker is not None:
            self._changed |= worker.progressed(now_s, entry, more)
            if self._cutting.progressed(entry):
                self._ranker.write(now_s, entry)
                self._look(now_s)

    def _look(self, now_s: float) -> None:
        """Who runs and who waits is compared as soon as it may be; till then there is nothing to decide."""
        self._wake_s = min(self._wake_s, self._cutting.next_s(now_s))

    def uncuttable(self, now_s: float, id: int) -> None:  # noqa: A002
        """It cannot be cut where it is: a cut that was asked for is dropped, and none asked for there again."""
        del now_s
        entry = self._entries.get(id)
        worker = None if entry is None else self._crew.of(entry)
        if entry is not None and worker is not None and worker.keep(entry):
            self._changed |= self._cutting.dropped()

    def returned(self, now_s: float, id: int, generated_tokens: int, *, avoid: str = "") -> None:  # noqa: A002
        """Back to the queue with the tokens that it keeps: it was cut, failed over, or its worker is gone."""
        entry = self._entries.get(id)
        if entry is None or entry.state in (State.WAITING, State.GATHERING):
            return
        q, worker = entry.request, self._crew.of(entry)
        if entry.state is State.CUT and worker is not None:
            q.preemptions += 1
            worker.came_back(now_s, entry)
        self._release(entry)
        q.generated_tokens = generated_tokens
        entry.settle()
        self._service.settle(entry)
        if avoid:
            q.avoid |= {avoid}
        self._expiry.watch(entry)
        self._wait(now_s, entry)
        self._changed = True

    def queue_full(self, now_s: float, worker: str, id: int, hold_s: float = 0.0) -> None:  # noqa: A002
        """The worker's own queue is full: no failure; the request goes back, the worker gets fewer, none so long."""
        entry = self._entries.get(id)
        if entry is not None:
            self.returned(now_s, id, entry.request.generated_tokens)
        self._crew.refused(now_s, worker, hold_s)

    def left(self, now_s: float, id: int) -> None:  # noqa: A002
        """It is over, whatever its state."""
        del now_s
        entry = self._entries.pop(id, None)
        if entry is None:
            return
        if entry.state is State.WAITING:
            self._queue.remove(entry)
        elif entry.state is State.GATHERING:
            self._bins.remove(entry)
        else:
            self._release(entry)
            self._service.settle(entry)
        self._sending.over(entry)
        self._expiry.forget(entry)
        self._ranker.columns.give_back(entry)
        self._changed = True

    # -- workers ---------------------------------------------------------------------------

    def workers(self, now_s: float, states: Sequence[WorkerState]) -> tuple[int, ...]:
        """Takes the whole set of workers as it is now; returns who lost its worker (to be returned, or left)."""
        lost = self._crew.seen(now_s, states)
        self._sending.renamed(self._crew.renamed(), self._entries.values())
        self._expiry.workers_changed(now_s, self._queue, self._bins)
        self._cutting.want()
        self._changed = True
        return tuple(entry.request.id for entry in lost)

    def drain(self) -> None:
        """Lets nobody in any more."""
        self._draining = True

    # -- decisions -------------------------------------------------------------------------

    def decide(self, now_s: float) -> Decisions:
        """What is to be done now; it counts as done."""
        if not self._changed and now_s < self._wake_s:
            return _NOTHING
        expire = self._expire(now_s)
        self._changed = False
        if self._binned:
            self._leave_bin(now_s, self._bins.ripe(now_s))
        self._queue.promote(now_s)
        assign = self._sending.decide(now_s)
        cut = self._cutting.decide(now_s, self._queue, list(self._crew))
        self._wake_s = self._next_s(now_s)
        phases = self._crew.phases_over()
        if not (expire or cut or assign or phases):
            return _NOTHING
        return Decisions(tuple(expire), tuple(entry.request.id for entry in cut), tuple(assign), phases)

    def next_s(self, now_s: float) -> float:
        """When ``decide`` must be called at the latest although nothing happens; inf never."""
        return now_s if self._changed else self._wake_s

    def rerank(self, now_s: float) -> None:
        """Takes the keys of all who wait again and sorts them, as every epoch does where keys change with time."""
        self._queue.rerank(now_s)

    def _next_s(self, now_s: float) -> float:
        due_s = self._queue.due_s() if self._crew.up else math.inf
        times = (due_s, self._bins.next_s(), self._expiry.next_s(), self._cutting.next_s(now_s))
        held_s = self._crew.held_until_s(now_s) if self._queue else math.inf
        return min(*times, held_s)

    # -- for people ------------------------------------------------------------------------

    def statistics(self, now_s: float) -> Statistics:
        """The scheduler now."""
        return statistics(now_s, self._queue, self._bins, self._crew, self._cutting.cuts)

    def position(self, id: int) -> int | None:  # noqa: A002
        """How many go before it; None where it does not wait."""
        entry = self._entries.get(id)
        if entry is None or entry.state not in (State.WAITING, State.GATHERING):
            return None
        if entry.state is State.GATHERING:
            return len(self._queue) + self._bins.position(entry)
        return self._queue.position(entry)

    def engine_priority(self, request: Request) -> int:
        """Class and predicted length as one number, smaller = earlier, that a 32-bit field holds."""
        entry = self._entries.get(request.id)
        tokens = entry.predicted if entry is not None else request.forecast.total_tokens
        length = int(min(max(tokens, 0.0), _LONGEST - 1.0)) if tokens == tokens else _LONGEST - 1  # noqa: PLR0124
        return max(-_CLASSES, min(_CLASSES, request.priority)) * _LONGEST + length

    # -- within ----------------------------------------------------------------------------

    def _refusal(self, now_s: float, request: Request) -> Refusal | None:
        if self._draining:
            return letting_in.draining(1.0)
        model, admission = request.model, self._admission
        if not self._crew.may_serve(model):
            return letting_in.unknown_model(model)
        queued, held = len(self._queue) + len(self._bins), self._queue.bytes + self._bins.bytes
        full = queued >= admission.max_queued or held + request.body_bytes > admission.max_queued_bytes
        if not full and admission.max_predicted_wait_s == math.inf:
            return None
        wait_s = self._crew.wait_s(now_s, model, tokens_by_model(self._queue, self._bins))
        return letting_in.refusal(admission, request, queued, held, wait_s)

    def _wait(self, now_s: float, entry: Entry, since_s: float | None = None) -> None:
        self._queue.add(now_s, entry, since_s=since_s)
        if self._queue.is_first(entry):
            self._cutting.want()

    def _leave_bin(self, now_s: float, batch: list[Entry]) -> None:
        self._sending.batched(batch)
        for entry in batch:
            self._wait(now_s, entry, entry.request.queued_s)

    def _release(self, entry: Entry) -> None:
        worker = self._crew.of(entry)
        if worker is not None:
            worker.take(entry)

    def _expire(self, now_s: float) -> list[tuple[int, Refusal]]:
        expired = self._expiry.decide(now_s, self._entries, self._queue, self._bins)
        for request_id, _ in expired:
            self.left(now_s, request_id)
        return expired
