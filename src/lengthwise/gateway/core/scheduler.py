"""The scheduler, which receives events and returns decisions. It reads no clock and uses no network."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from lengthwise.gateway.config import Admission, Dispatch, Order
from lengthwise.gateway.core.dispatch import Dispatcher, WorkerPool, waiting_tokens
from lengthwise.gateway.core.preemption import Preemption
from lengthwise.gateway.core.queue import Bins, Queue, TimePerRequest
from lengthwise.gateway.core.ranking import Entry, Ranker, State, TenantService
from lengthwise.gateway.core.worker import MAX_BACKOFF_S, mean_tokens_per_s
from lengthwise.gateway.request import LengthPrediction, Refusal, Request
from lengthwise.gateway.scheduling import PASSTHROUGH_MODES, Decisions, Statistics, WorkerState
from lengthwise.policy.named_schedulers import resolve
from lengthwise.schema.errors import InputError

_DEADLINE = Refusal(504, "deadline", "The request waited until its own deadline had passed.")
_RANKS = {"srtf": "srtf", "isrtf": "srtf", "windowed": "srtf", "bins": "completed_batches"}
_EXPIRY_INTERVAL_S = 0.1  # least time to the next timed search for requests of models without a worker
_QUEUED = (State.WAITING, State.BINNED, State.DEFERRED)
_MAX_BACKOFFS = 4  # refusals of a request in a row for which engines back off
# Refusals by engines that accept other requests: the last one ends the request.
_MAX_REFUSALS_WHILE_ACCEPTING, _MAX_REFUSALS_QUEUED_ALONE = 10, 3
_NO_DECISIONS = Decisions()
_MAX_CLASS, _MAX_LENGTH = 2047, 1 << 20  # bounds of priority class and predicted length in an engine's 32-bit priority


def check_change(before: Order, after: Order) -> None:
    """Check that a running scheduler can change to other settings of order.

    Raises:
        InputError: Mode or rank (in mode engine-plugin also ``window_tokens``) differ, or ``preemption`` is unknown.
    """
    for name in ["mode", "rank"] + (["window_tokens"] if after.mode == "engine-plugin" else []):
        if getattr(before, name) != getattr(after, name):
            raise InputError(f"order.{name} cannot change while the gateway runs; restart it with the new file")
    resolve("preemption", after.preemption)


class Scheduler:
    """Orders, dispatches and preempts requests. The same events at the same times give the same decisions.

    Every admitted request is in exactly one ``ranking.State`` until it is removed. An event of one request takes
    O(log n) comparisons of waiting requests.
    """

    def __init__(self, order: Order, admission: Admission, dispatch: Dispatch) -> None:
        self.order, self.admission = order, admission
        rank = resolve("rank", order.rank or _RANKS.get(order.mode, "fcfs"))
        self.service = TenantService()
        self._ranker = Ranker(rank, self.service)
        self.queue = Queue(self._ranker, self.service, max_wait_s=order.max_wait_s, fair=order.fairness == "vtc")
        self.preemption = Preemption(order, self._ranker, self.service)
        passthrough = order.mode in PASSTHROUGH_MODES
        self.worker_pool = WorkerPool(dispatch, passthrough=passthrough, phased=order.mode == "rra")
        self.bins = Bins(order.bins, min(order.batch_wait_s, order.max_wait_s))
        self._binned = order.mode == "bins"
        self.dispatcher = Dispatcher(self.queue, self.service, self.worker_pool, self.preemption, dispatch)
        self._deadlines = TimePerRequest()  # when waiting requests expire: the deadlines of their clients
        self._deferred = TimePerRequest()  # when requests that engines have refused return to the queue
        self._next_unserved_check_s = math.inf  # time of the next search for requests without an engine
        self.entries: dict[int, Entry] = {}
        self._changed, self._num_preempted = False, 0
        self._wake_s = math.inf
        if rank.every_step or order.mode in ("isrtf", "windowed"):
            self._ranker.keys(0.0, np.zeros(0, np.int64), waiting=True)  # compile now, not while requests wait

    def configure(self, now_s: float, order: Order, admission: Admission, dispatch: Dispatch) -> None:
        """Apply other settings, also to queued requests. If that is impossible, raise InputError and change nothing."""
        check_change(self.order, order)
        self.dispatcher.configure(dispatch)
        self.order, self.admission = order, admission
        self.queue.configure(now_s, max_wait_s=order.max_wait_s, fair=order.fairness == "vtc")
        self.preemption.configure(now_s, order)
        self.bins.configure(order.bins, min(order.batch_wait_s, order.max_wait_s))
        self.worker_pool.configure(dispatch)
        self._next_unserved_check_s = -math.inf
        self._changed = True

    def offer(self, now_s: float, request: Request) -> Refusal | None:
        """Queue a request and return None, or return the answer to its client if it is refused."""
        if (refusal := self._refusal(now_s, request)) is None:
            self.admit(now_s, request)
        return refusal

    def admit(self, now_s: float, request: Request, since_s: float | None = None) -> Entry:
        """Queue a request without a check of the limits of admission. It has waited since ``since_s`` (None: now)."""
        entry = self.entries[request.id] = Entry(request)
        entry.set_prediction(request.length_prediction)
        self._ranker.add(entry)
        self._set_deadline(request)
        if self._binned and since_s is None:
            self._enqueue_batch(now_s, self.bins.add(now_s, entry, self.worker_pool.batch_size(request.model)))
        else:
            self._enqueue(now_s, entry, since_s)
        self._changed = True
        return entry

    def is_queued(self, id: int) -> bool:  # noqa: A002
        """Return whether a request is live and waits for a worker."""
        return id in self.entries and self.entries[id].state in _QUEUED

    def assign(self, now_s: float, id: int, worker: str) -> None:  # noqa: A002
        """Dispatch a queued request to a worker that another scheduler has chosen."""
        entry = self.entries[id]
        if entry.state is State.DEFERRED:
            self._deferred.discard(id)
            self.queue.add(now_s, entry, since_s=entry.request.dispatch.enqueued_at_s)
        elif entry.state is State.BINNED:
            self.bins.remove(entry)
            self.queue.add(now_s, entry, since_s=entry.request.dispatch.enqueued_at_s)
        self.dispatcher.assign(now_s, entry, worker)
        self._changed = True

    def preempt(self, now_s: float, id: int) -> bool:  # noqa: A002
        """Preempt a request as another scheduler has decided. Return False if that is no longer possible."""
        entry = self.entries.get(id)
        worker = None if entry is None else self.worker_pool.of(entry)
        if entry is None or worker is None or entry.state is State.PREEMPTING or entry.preemption.nonpreemptible:
            return False
        worker.preempt(now_s, entry)
        self.preemption.count += 1
        return True

    def repredict(self, now_s: float, id: int, length_prediction: LengthPrediction) -> None:  # noqa: A002
        """Apply a new prediction of a live request."""
        entry = self.entries.get(id)
        if entry is None:
            return
        worker = self.worker_pool.of(entry)
        if entry.state is State.WAITING:
            self.queue.update_prediction(now_s, entry, length_prediction)
            self._changed = True
        elif entry.state is State.BINNED:
            self.bins.set_prediction(entry, length_prediction)
        elif worker is None:
            entry.set_prediction(length_prediction)
        else:
            worker.set_prediction(entry, length_prediction)
            self._ranker.update(now_s, entry)
        if self.preemption.request_pass():
            self._wake_s = min(self._wake_s, self.preemption.next_s(now_s))

    def on_progress(self, now_s: float, id: int, generated_tokens: int) -> None:  # noqa: A002
        """Record how many tokens a running request has generated in total."""
        entry = self.entries.get(id)
        if entry is None or generated_tokens <= entry.request.generated_tokens:
            return
        worker = self.worker_pool.of(entry)
        more = generated_tokens - entry.request.generated_tokens
        entry.request.generated_tokens = generated_tokens
        if worker is not None:
            self._changed |= worker.on_progress(now_s, entry, more)
            if self.preemption.on_progress(entry):
                self._ranker.update(now_s, entry)
                self._wake_s = min(self._wake_s, self.preemption.next_s(now_s))

    def mark_nonpreemptible(self, now_s: float, id: int) -> None:  # noqa: A002, ARG002
        """Mark a running request that no other worker can resume. A decision to preempt it is undone."""
        entry = self.entries.get(id)
        worker = None if entry is None else self.worker_pool.of(entry)
        if entry is not None and worker is not None and worker.mark_nonpreemptible(entry):
            self._changed |= self.preemption.undo()

    def requeue(self, now_s: float, id: int, generated_tokens: int, *, avoid: str = "") -> None:  # noqa: A002
        """Queue a request again, after a preemption, a failure or the loss of its worker.

        Its next worker continues after ``generated_tokens`` tokens. The worker ``avoid`` gets it again only if no other
        worker can run it, or if it is overdue.
        """
        entry = self.entries.get(id)
        if entry is None or entry.state in _QUEUED:
            return
        q, worker = entry.request, self.worker_pool.of(entry)
        if worker is not None:
            if entry.state is State.PREEMPTING:
                self._num_preempted += 1
                q.dispatch.preemptions, q.dispatch.last_preemption = q.dispatch.preemptions + 1, self._num_preempted
                # The slot was idle since the decision, or since a later token of the request. max(a, NaN) is a.
                worker.cost.add_idle_slot(now_s - max(entry.preemption.preempted_s, entry.last_token_s))
            worker.remove(entry)
        q.generated_tokens = generated_tokens
        entry.update_remaining()
        self.service.set_charge(entry, 0, float(generated_tokens))
        if avoid:
            q.dispatch.avoid |= {avoid}
        self._set_deadline(q)
        self._enqueue(now_s, entry)
        self._changed = True

    def on_queue_full(self, now_s: float, worker: str, id: int, retry_after_s: float = 0.0) -> bool:  # noqa: A002
        """Queue a request again, because its worker reported a full queue.

        The worker backs off, and its limit falls. From the second refusal in a row on, the request waits twice as long
        as its worker backs off, if other requests wait. If a worker has accepted another request since it last refused
        this one, its refusal is *suspect*: the cause may be the request. After a suspect refusal, and from the fifth
        refusal in a row on, no worker backs off: the request is deferred for 2 s. Return False if the request must end:
        after ten suspect refusals, or three by engines in whose queue no other request waited. (One does not suffice:
        requests that reach an engine in one step compete for its queue.)
        """
        if (entry := self.entries.get(id)) is None:
            return True
        full, running = entry.request.dispatch.full_queues, self.worker_pool.of(entry)
        full.count += 1
        if running is not None and running.refuses_only_this(entry):
            full.count_while_accepting += 1
            full.count_queued_alone += running.is_queued_alone(entry)
        full.last_s = until_s = now_s
        self.requeue(now_s, id, entry.request.generated_tokens, avoid=worker if full.count_while_accepting else "")
        if full.count_while_accepting or full.count > _MAX_BACKOFFS:
            until_s = now_s + MAX_BACKOFF_S
        else:
            backoff_end_s = self.worker_pool.back_off(now_s, worker, retry_after_s)
            if full.count > 1 and len(self.queue) > 1:
                until_s = 2 * backoff_end_s - now_s
        if until_s > now_s:
            self.queue.remove(entry)
            entry.state = State.DEFERRED
            self._deferred.set(id, until_s)
        return (
            full.count_queued_alone < _MAX_REFUSALS_QUEUED_ALONE
            and full.count_while_accepting < _MAX_REFUSALS_WHILE_ACCEPTING
        )

    def remove(self, now_s: float, id: int, *, client_gone: bool = False) -> None:  # noqa: A002
        """Remove a request that has ended, in any state. Charge its tenant for the output so far, or an estimate."""
        entry = self.entries.pop(id, None)
        if entry is None:
            return
        if entry.state is State.WAITING:
            self.queue.remove(entry)
        elif entry.state is State.BINNED:
            self.bins.remove(entry)
        else:
            self._deferred.discard(id)
            q, worker = entry.request, self.worker_pool.of(entry)
            if worker is not None:
                if client_gone and not q.generated_tokens:
                    q.dispatch.unseen_tokens = worker.unseen_tokens(now_s, entry)
                worker.remove(entry)
            self.service.set_charge(entry, 0, q.generated_tokens + q.dispatch.unseen_tokens)
        self.dispatcher.leave_batch(entry)
        self._deadlines.discard(id)
        self._ranker.remove(entry)
        self._changed = True

    def update_workers(self, now_s: float, states: Sequence[WorkerState]) -> tuple[int, ...]:
        """Replace the workers. Return the ids of requests that lost their worker, to be requeued or removed."""
        lost, renamed = self.worker_pool.update(now_s, states)
        self.dispatcher.rename_workers(renamed, self.entries.values())
        self._next_unserved_check_s = -math.inf  # models may have lost their last worker, or got one
        self.preemption.request_pass()
        self._changed = True
        return tuple(entry.request.id for entry in lost)

    def schedule(self, now_s: float) -> Decisions:
        """Return the decisions that are due now. The caller must carry them out."""
        if not self._changed and now_s < self._wake_s:
            return _NO_DECISIONS
        expired = self._pop_expired(now_s)
        for request_id, _ in expired:
            self.remove(now_s, request_id)
        self._changed = False
        for entry in [self.entries[one] for one in self._deferred.pop_due(now_s)]:
            self._set_deadline(entry.request)
            self._enqueue(now_s, entry, entry.request.dispatch.enqueued_at_s)
        if self._binned:
            self._enqueue_batch(now_s, self.bins.pop_due(now_s))
        self.queue.promote(now_s)
        assign = self.dispatcher.dispatch(now_s)
        preempted = self.preemption.run(now_s, self.queue, list(self.worker_pool))
        overdue_s = self.queue.overdue_times.next_s() if self.worker_pool.up else math.inf
        backoff_s = self.worker_pool.backoff_until_s(now_s) if self.queue else math.inf
        expiry_s = min(self._deadlines.next_s(), self._next_unserved_check_s)
        bins_s, preemption_s = self.bins.leave_times.next_s(), self.preemption.next_s(now_s)
        self._wake_s = min(overdue_s, backoff_s, bins_s, expiry_s, preemption_s, self._deferred.next_s())
        phases = tuple(self.worker_pool.finished_phases)
        self.worker_pool.finished_phases.clear()
        return Decisions(tuple(expired), tuple(entry.request.id for entry in preempted), tuple(assign), phases)

    def next_s(self, now_s: float) -> float:
        """Return when ``schedule`` must be called if no event comes before, or inf if no call is needed."""
        return now_s if self._changed else self._wake_s

    def statistics(self, now_s: float) -> Statistics:
        """Return the current numbers of queue, requests and workers."""
        pool, queue, bins = self.worker_pool, self.queue, self.bins
        queued, queued_tokens = [entry.request for entry in (*queue, *bins)], waiting_tokens(queue, bins)
        tokens = sum(queued_tokens.values()) + sum(worker.tokens for worker in pool)
        mean_rate = mean_tokens_per_s(pool.up)
        rate = sum(worker.throughput.tokens_per_s or mean_rate for worker in pool.up)
        return Statistics(
            waiting=self._num_queued,
            waiting_bytes=queue.body_bytes + bins.body_bytes,
            running=sum(len(worker.active) for worker in pool),
            oldest_wait_s=max((q.dispatch.waited_s(now_s) for q in queued), default=0.0),
            backlog_tokens=tokens,
            backlog_s=tokens / rate if rate else 0.0,
            predicted_wait_s=pool.wait_s(now_s, "", queued_tokens),
            ordering=self._num_queued > 0,
            preemptions=self.preemption.count,
            workers=tuple(worker.statistics(worker.throughput.tokens_per_s or mean_rate or 1.0) for worker in pool),
            router=self.dispatcher.router,
        )

    def position(self, id: int) -> int | None:  # noqa: A002
        """Return the number of requests that precede one in the queue or in a bin, or None if it is in neither."""
        entry = self.entries.get(id)
        if entry is not None and entry.state is State.BINNED:
            return len(self.queue) + self.bins.position(entry)
        return self.queue.position(entry) if entry is not None and entry.state is State.WAITING else None

    def engine_priority(self, request: Request) -> int:
        """Return a 32-bit priority for engines, from class and predicted length. Smaller numbers come first."""
        entry = self.entries.get(request.id)
        tokens = entry.predicted_tokens if entry is not None else request.length_prediction.total_tokens
        length = _MAX_LENGTH - 1 if math.isnan(tokens) else int(min(max(tokens, 0.0), _MAX_LENGTH - 1.0))
        return max(-_MAX_CLASS, min(_MAX_CLASS, request.client.priority)) * _MAX_LENGTH + length

    def _set_deadline(self, request: Request) -> None:
        """Let a queued request expire at its deadline, or never if its client has received a part of a stream."""
        streaming = request.generated_tokens and request.streamed
        self._deadlines.set(request.id, math.inf if streaming else request.client.deadline_s)
        if request.model not in self.worker_pool.served_models:
            self._next_unserved_check_s = -math.inf  # The search finds the request now, and when it expires.

    def _pop_expired(self, now_s: float) -> list[tuple[int, Refusal]]:
        late = [self.entries[one] for one in self._deadlines.pop_due(now_s)]
        expired = {entry.request.id: _DEADLINE for entry in late if entry.state in _QUEUED}
        if now_s >= self._next_unserved_check_s:
            self._next_unserved_check_s = math.inf
            pool, limit_s = self.worker_pool, self.admission.no_engine_s
            queued = (*(() if self.queue.count_by_model.keys() <= pool.served_models else self.queue), *self.bins)
            for request in (one.request for one in queued if one.request.model not in pool.served_models):
                since_s = max(request.dispatch.enqueued_at_s, pool.unserved_since_s.get(request.model, -math.inf))
                if since_s + limit_s <= now_s:
                    message = f"No engine has served the model {request.model!r} for {limit_s:g} s."
                    refusal = Refusal(503, "no_engine", message, max(1.0, math.ceil(limit_s)))
                    expired.setdefault(request.id, refusal)
                else:
                    check_s = max(since_s + limit_s, now_s + _EXPIRY_INTERVAL_S)
                    self._next_unserved_check_s = min(self._next_unserved_check_s, check_s)
        return list(expired.items())

    @property
    def _num_queued(self) -> int:
        return len(self.queue) + len(self.bins)

    def _refusal(self, now_s: float, request: Request) -> Refusal | None:
        model, admission, limit_s = request.model, self.admission, self.admission.max_predicted_wait_s
        if not self.worker_pool.may_serve(model):
            return Refusal(404, "model_not_found", f"No engine serves the model {model!r}.")
        queued_bytes, tenant, reason = self.queue.body_bytes + self.bins.body_bytes, request.client.tenant, ""
        of_tenant = self.queue.count_by_tenant[tenant] + self.bins.count_by_tenant[tenant]
        if self._num_queued >= admission.max_queued:
            reason, message = "queue_full", f"{self._num_queued} requests are waiting already."
        elif tenant and of_tenant >= (admission.max_queued_per_tenant or max(1, admission.max_queued // 4)):
            reason, message = "tenant_queue_full", f"{of_tenant} requests of this tenant are waiting already."
        elif queued_bytes + request.body_bytes > admission.max_queued_bytes:
            reason, message = "queue_bytes", f"{queued_bytes} bytes of requests are waiting already."
        elif limit_s == math.inf:
            return self._slo_refusal(now_s, request)
        wait_s = self.worker_pool.wait_s(now_s, model, waiting_tokens(self.queue, self.bins))
        if not reason and wait_s > limit_s:
            reason = "predicted_wait"
            message = f"The predicted wait is {wait_s:.1f} s; at most {limit_s:g} s are admitted."
        if not reason:
            return self._slo_refusal(now_s, request)
        return Refusal(429, reason, message, float(max(1, math.ceil(min(wait_s, 3600.0)))))

    def _slo_refusal(self, now_s: float, request: Request) -> Refusal | None:
        """Return the refusal of a request that must wait and is predicted to exceed a limit of its class, or None.

        The predicted wait is behind the requests of its priority class and of those before it.
        """
        if (slo := request.client.slo) is None:
            return None
        pool, priority, model = self.worker_pool, request.client.priority, request.model
        wait_s = pool.wait_s(now_s, model, waiting_tokens(self.queue, self.bins, priority))
        if wait_s <= 0:
            return None
        tokens = min(request.length_prediction.total_tokens, float(request.max_tokens))
        late_s = {"ttft": (wait_s, slo.ttft_s), "jct": (wait_s + pool.decode_s(model, tokens), slo.jct_s)}
        for name, (predicted_s, limit_s) in late_s.items():
            if predicted_s > limit_s:
                message = (
                    f"The predicted {name.upper()} is {predicted_s:.1f} s with a wait of {wait_s:.1f} s; the class "
                    f"{slo.name} has the limit {name}_s = {limit_s:g}."
                )
                return Refusal(429, "slo", message, float(max(1, math.ceil(min(predicted_s - limit_s, 3600.0)))))
        return None

    def _enqueue(self, now_s: float, entry: Entry, since_s: float | None = None) -> None:
        self.queue.add(now_s, entry, since_s=since_s)
        if self.queue.is_first(entry):
            self.preemption.request_pass()

    def _enqueue_batch(self, now_s: float, batch: list[Entry]) -> None:
        self.dispatcher.start_batch(batch)
        for entry in batch:
            self._enqueue(now_s, entry, entry.request.dispatch.enqueued_at_s)
