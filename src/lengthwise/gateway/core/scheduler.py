"""The scheduler: told what happens, it says what is to be done. It reads no clock and touches no network."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from lengthwise.gateway.config import Admission, Dispatch, Order
from lengthwise.gateway.core.dispatch import Sending
from lengthwise.gateway.core.preemption import Cutting
from lengthwise.gateway.core.queue import Alarms, Bins, Queue
from lengthwise.gateway.core.ranking import Entry, Ranker, Service, State
from lengthwise.gateway.core.worker_pool import Crew, tokens_by_model
from lengthwise.gateway.request import LengthPrediction, Rejection, Request
from lengthwise.gateway.scheduling import PASSTHROUGH_MODES, Decisions, Statistics, WorkerState
from lengthwise.policy.named_schedulers import resolve
from lengthwise.schema.errors import InputError

DEADLINE = Rejection(504, "deadline", "The request waited until its own deadline had passed.")


def draining_refusal(drain_s: float) -> Rejection:
    """The gateway is about to end."""
    return Rejection(503, "draining", "The gateway is shutting down; ask again.", drain_s)


def unknown_model_refusal(model: str) -> Rejection:
    """No engine serves the model."""
    return Rejection(404, "model_not_found", f"No engine here serves the model {model!r}.")


def no_engine_refusal(model: str, queued_for_s: float) -> Rejection:
    """There was no engine for too long."""
    message = f"No engine for the model {model!r} was there for {queued_for_s:g} s."
    return Rejection(503, "no_engine", message, max(1.0, math.ceil(queued_for_s)))


def admission_refusal(
    admission: Admission, request: Request, queued: int, queued_bytes: int, wait_s: float
) -> Rejection | None:
    """Why the request may not wait, where so many wait and so long a wait is predicted; None it may."""
    again_s = float(max(1, math.ceil(min(wait_s, 3600.0))))
    if queued >= admission.max_queued:
        return Rejection(429, "queue_full", f"{queued} requests are waiting already.", again_s)
    if queued_bytes + request.body_bytes > admission.max_queued_bytes:
        return Rejection(429, "queue_bytes", f"{queued_bytes} bytes of requests are waiting already.", again_s)
    if wait_s > admission.max_predicted_wait_s:
        message = f"The predicted wait is {wait_s:.1f} s; at most {admission.max_predicted_wait_s:g} s are let in."
        return Rejection(429, "predicted_wait", message, again_s)
    return None


_POLL_INTERVAL_S = 0.1
"""Those who wait for an engine are looked through at most so often."""
_WAITS = (State.WAITING, State.GATHERING)


class Expiry:
    """Deadlines of clients, and patience with models that no worker serves."""

    def __init__(self, no_engine_s: float, worker_pool: Crew) -> None:
        self._no_engine_s, self._crew = no_engine_s, worker_pool
        self._deadlines = Alarms()
        self._look_s = math.inf

    def configure(self, no_engine_s: float) -> None:
        """Another patience, of those who wait already, too."""
        self._no_engine_s, self._look_s = no_engine_s, -math.inf

    def monitor(self, entry: Entry) -> None:
        """It is about to wait; who has the beginning of its answer has no deadline any more."""
        q = entry.request
        self._deadlines.set(q.id, math.inf if q.generated_tokens and not q.buffered else q.deadline_s)
        if not self._crew.serves(entry.request.model):
            self._look_s = -math.inf

    def discard(self, entry: Entry) -> None:
        """It is over."""
        self._deadlines.clear(entry.request.id)

    def workers_changed(self, now_s: float, queue: Queue, bins: Bins) -> None:
        """Models may have lost their last worker, or got one."""
        del now_s
        waits = len(queue) + len(bins) > 0
        self._look_s = -math.inf if waits else math.inf

    def next_s(self) -> float:
        """When the next may expire."""
        return min(self._deadlines.next_s(), self._look_s)

    def decide(self, now_s: float, entries: dict[int, Entry], queue: Queue, bins: Bins) -> list[tuple[int, Rejection]]:
        """Those who expire now, and why; who is at a worker by its deadline is not among them."""
        late = [entries[one] for one in self._deadlines.rung(now_s)]
        expired = {entry.request.id: DEADLINE for entry in late if entry.state in _WAITS}
        if now_s >= self._look_s:
            self._look_s = math.inf
            served = all(self._crew.serves(model) for model in queue.waiting)
            for entry in (*(() if served else self._unserved(queue)), *self._unserved(bins)):
                at_s = self._timeout_s(entry)
                if at_s <= now_s:
                    expired.setdefault(entry.request.id, no_engine_refusal(entry.request.model, self._no_engine_s))
                else:
                    self._look_s = min(self._look_s, max(at_s, now_s + _POLL_INTERVAL_S))
        return list(expired.items())

    def _unserved(self, waiting: Iterable[Entry]) -> list[Entry]:
        """Those whose model no worker serves."""
        return [entry for entry in waiting if not self._crew.serves(entry.request.model)]

    def _timeout_s(self, entry: Entry) -> float:
        """Until when it waits for an engine."""
        return max(entry.request.queued_s, self._crew.gone_s(entry.request.model)) + self._no_engine_s


def check_change(before: Order, after: Order) -> None:
    """Raises InputError where a running scheduler cannot take the order.

    Mode and rank decide what is kept of every request and what engines were told of it. Engines with the plug-in
    were told how many tokens their windows have.
    """
    fixed = ["mode", "rank"] + (["window_tokens"] if after.mode == "engine-plugin" else [])
    for name in fixed:
        if getattr(before, name) != getattr(after, name):
            raise InputError(f"order.{name} cannot change while the gateway runs; start it anew with the new file")
    resolve("takeover", after.takeover)


def statistics(now_s: float, queue: Queue, bins: Bins, worker_pool: Crew, cuts: int) -> Statistics:
    """Who waits and runs now, and what is still to come of them."""
    queued = len(queue) + len(bins)
    queued_tokens = queue.total_tokens() + bins.tokens
    tokens = queued_tokens + sum(worker.tokens for worker in worker_pool)
    usual = worker_pool.usual_speed()
    rate = sum(worker.speed.tokens_per_s or usual for worker in worker_pool.up)
    numbers = (worker.numbers(worker.speed.tokens_per_s or usual or 1.0) for worker in worker_pool)
    return Statistics(
        waiting=queued,
        waiting_bytes=queue.bytes + bins.bytes,
        running=sum(len(worker.active) for worker in worker_pool),
        oldest_wait_s=max(queue.oldest_wait_s(now_s), bins.oldest_wait_s(now_s)),
        backlog_tokens=tokens,
        backlog_s=tokens / rate if rate else 0.0,
        predicted_wait_s=worker_pool.wait_s(now_s, "", tokens_by_model(queue, bins)),
        ordering=queued > 0,
        preemptions=cuts,
        workers=tuple(numbers),
    )


RANKS = {"srtf": "srtf", "isrtf": "srtf", "windowed": "srtf", "bins": "completed_batches"}
_EMPTY = Decisions()
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

    def __init__(self, order: Order, admission: Admission, dispatch: Dispatch, *, observe: bool = False) -> None:
        self._order, self._admission = order, admission
        self._service = Service()
        rank = resolve("rank", order.rank or RANKS.get(order.mode, "fcfs"))
        self._ranker = Ranker(rank, self._service)
        fair = order.fairness == "vtc"
        self._queue = Queue(self._ranker, self._service, max_wait_s=order.max_wait_s, fair=fair)
        self._cutting = Cutting(order, self._ranker, self._service)
        self._crew = Crew(dispatch, unheld=observe or order.mode in PASSTHROUGH_MODES, phased=order.mode == "rra")
        self._bins = Bins(order.bins, min(order.batch_wait_s, order.max_wait_s))
        self._binned = order.mode == "bins"
        self._dispatch = Sending(self._queue, self._service, self._crew, self._cutting, dispatch.affinity)
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
        self._dispatch.configure(dispatch)
        self._expiry.configure(admission.no_engine_s)
        self._changed = True

    # -- requests --------------------------------------------------------------------------

    def offer(self, now_s: float, request: Request) -> Rejection | None:
        """Lets a request wait; else says why not."""
        refused = self._rejection(now_s, request)
        if refused is not None:
            return refused
        entry = Entry(request)
        entry.believe(request.length_prediction)
        self._entries[request.id] = entry
        self._ranker.columns.take(entry)
        self._expiry.monitor(entry)
        if self._binned:
            batch = self._bins.add(now_s, entry, self._crew.batch_size(request.model))
            self._leave_bin(now_s, batch)
        else:
            self._wait(now_s, entry)
        self._changed = True
        return None

    def reforecast(self, now_s: float, id: int, length_prediction: LengthPrediction) -> None:  # noqa: A002
        """A new prediction for a live request."""
        entry = self._entries.get(id)
        if entry is None:
            return
        worker = self._crew.of(entry)
        if entry.state is State.WAITING:
            self._queue.believe(now_s, entry, length_prediction)
        elif entry.state is State.GATHERING:
            before = entry.remaining
            entry.believe(length_prediction)
            self._bins.recount(entry, before)
        elif worker is None:
            entry.believe(length_prediction)
        else:
            worker.believe(entry, length_prediction)
            self._ranker.write(now_s, entry)
        self._changed |= entry.state is State.WAITING
        if self._cutting.want():
            self._poll(now_s)

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
                self._poll(now_s)

    def _poll(self, now_s: float) -> None:
        """Who runs and who waits is compared as soon as it may be; till then there is nothing to decide."""
        self._wake_s = min(self._wake_s, self._cutting.next_s(now_s))

    def mark_nonpreemptible(self, now_s: float, id: int) -> None:  # noqa: A002
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
        entry.finalize()
        self._service.finalize(entry)
        if avoid:
            q.avoid |= {avoid}
        self._expiry.monitor(entry)
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
            self._service.finalize(entry)
        self._dispatch.over(entry)
        self._expiry.discard(entry)
        self._ranker.columns.release(entry)
        self._changed = True

    # -- workers ---------------------------------------------------------------------------

    def workers(self, now_s: float, states: Sequence[WorkerState]) -> tuple[int, ...]:
        """Takes the whole set of workers as it is now; returns who lost its worker (to be returned, or left)."""
        lost = self._crew.seen(now_s, states)
        self._dispatch.renamed(self._crew.renamed(), self._entries.values())
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
            return _EMPTY
        expire = self._expire(now_s)
        self._changed = False
        if self._binned:
            self._leave_bin(now_s, self._bins.ripe(now_s))
        self._queue.promote(now_s)
        assign = self._dispatch.decide(now_s)
        cut = self._cutting.decide(now_s, self._queue, list(self._crew))
        self._wake_s = self._next_s(now_s)
        phases = self._crew.phases_over()
        if not (expire or cut or assign or phases):
            return _EMPTY
        return Decisions(tuple(expire), tuple(entry.request.id for entry in cut), tuple(assign), phases)

    def next_s(self, now_s: float) -> float:
        """When ``decide`` must be called at the latest although nothing happens; inf never."""
        return now_s if self._changed else self._wake_s

    def rerank(self, now_s: float) -> None:
        """Takes the keys of all who wait again and sorts them, as every epoch does where keys change with time."""
        self._queue.rerank(now_s)

    def _next_s(self, now_s: float) -> float:
        deadline_s = self._queue.deadline_s() if self._crew.up else math.inf
        times = (deadline_s, self._bins.next_s(), self._expiry.next_s(), self._cutting.next_s(now_s))
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
        tokens = entry.predicted if entry is not None else request.length_prediction.total_tokens
        length = int(min(max(tokens, 0.0), _LONGEST - 1.0)) if tokens == tokens else _LONGEST - 1  # noqa: PLR0124
        return max(-_CLASSES, min(_CLASSES, request.priority)) * _LONGEST + length

    # -- within ----------------------------------------------------------------------------

    def _rejection(self, now_s: float, request: Request) -> Rejection | None:
        if self._draining:
            return draining_refusal(1.0)
        model, admission = request.model, self._admission
        if not self._crew.may_serve(model):
            return unknown_model_refusal(model)
        queued, held = len(self._queue) + len(self._bins), self._queue.bytes + self._bins.bytes
        full = queued >= admission.max_queued or held + request.body_bytes > admission.max_queued_bytes
        if not full and admission.max_predicted_wait_s == math.inf:
            return None
        wait_s = self._crew.wait_s(now_s, model, tokens_by_model(self._queue, self._bins))
        return admission_refusal(admission, request, queued, held, wait_s)

    def _wait(self, now_s: float, entry: Entry, since_s: float | None = None) -> None:
        self._queue.add(now_s, entry, since_s=since_s)
        if self._queue.is_first(entry):
            self._cutting.want()

    def _leave_bin(self, now_s: float, batch: list[Entry]) -> None:
        self._dispatch.batched(batch)
        for entry in batch:
            self._wait(now_s, entry, entry.request.queued_s)

    def _release(self, entry: Entry) -> None:
        worker = self._crew.of(entry)
        if worker is not None:
            worker.take(entry)

    def _expire(self, now_s: float) -> list[tuple[int, Rejection]]:
        expired = self._expiry.decide(now_s, self._entries, self._queue, self._bins)
        for request_id, _ in expired:
            self.left(now_s, request_id)
        return expired
