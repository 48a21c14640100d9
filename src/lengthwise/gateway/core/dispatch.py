"""The dispatch pass: assign queued requests to workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from functools import cached_property
from operator import itemgetter

from lengthwise.gateway.core.preemption import Preemption
from lengthwise.gateway.core.queue import Queue
from lengthwise.gateway.core.ranking import Entry, TenantService
from lengthwise.gateway.core.worker import Worker, mean_tokens_per_s, without_avoided
from lengthwise.gateway.core.worker_pool import WorkerPool

_MAX_SESSIONS = 1 << 16
_MAX_BLOCKED = 64
"""A pass skips so many requests without a place (each reserves the workers that it could use)."""


class Sessions:
    """The last worker of each session; the least recently used sessions are forgotten."""

    def __init__(self) -> None:
        self._worker: dict[tuple[int, str], str] = {}  # in order of last use

    def worker_of(self, entry: Entry) -> str:
        """Return the worker that may have cached the request's prompt; "" none."""
        return entry.worker or self._worker.get((entry.request.tenant, entry.request.session), "")

    def dispatched(self, entry: Entry, worker: str) -> None:
        """Remember the worker of the request's session."""
        if entry.request.session:
            session = (entry.request.tenant, entry.request.session)
            self._worker.pop(session, None)
            self._worker[session] = worker
            if len(self._worker) > _MAX_SESSIONS:
                del self._worker[next(iter(self._worker))]

    def rename_worker(self, before: str, now: str) -> None:
        """Replace a worker's name."""
        self._worker.update(dict.fromkeys([one for one, name in self._worker.items() if name == before], now))


class DispatchPass:
    """One pass over the queue: a request without a free worker reserves each that it could use, before later ones."""

    def __init__(
        self, up: list[Worker], sessions: Sessions, affinity: float, now_s: float, waiting: Mapping[str, int]
    ) -> None:
        self._up, self._sessions, self._affinity = up, sessions, affinity
        self._waiting = dict(waiting)
        self._free = {worker.name: free for worker in up if (free := worker.free_slots(now_s)) > 0}
        self.open = [worker for worker in up if worker.name in self._free]
        self._serving: dict[str, list[Worker]] = {}

    def __contains__(self, model: object) -> bool:
        """Return whether no open worker serves the model: ``Queue.in_order`` skips such models."""
        return not any(model in worker.state.models for worker in self.open)

    @cached_property
    def _usual_tokens_per_s(self) -> float:
        return mean_tokens_per_s(self._up) or 1.0

    def usable(self, entry: Entry) -> list[Worker]:
        """Return the workers that may run the request, free or not."""
        model = entry.request.model
        if model not in self._serving:
            self._serving[model] = [worker for worker in self._up if model in worker.state.models]
        return without_avoided(entry, self._serving[model])

    def choose(self, entry: Entry, *, only: str = "", together: int = 1) -> Worker | None:
        """Return the worker with the least backlog in seconds less what its prefix cache saves; ``only`` "" is any."""
        usable = self.usable(entry)
        candidates = [worker for worker in usable if self._admits(worker, entry, only, together)]
        if not candidates:
            self._reserve(usable)
            return None
        if len(candidates) == 1:
            return candidates[0]
        rates = {one.name: one.throughput.tokens_per_s or self._usual_tokens_per_s for one in candidates}
        done_s = {one.name: (one.work + entry.work) / rates[one.name] for one in candidates}
        best = min(candidates, key=lambda one: (done_s[one.name], len(one.active), one.name))
        last, q = self._sessions.worker_of(entry), entry.request
        if not self._affinity or not (last or q.prefix.keys):
            return best

        def saved_s(worker: Worker) -> float:
            tokens = q.prompt_tokens if worker.name == last else worker.prefix_cache.cached_tokens(q.prefix)
            return self._affinity * tokens * worker.prefill_s(rates[worker.name]) if tokens else 0.0

        balanced = (done_s[best.name] - saved_s(best), -1, "", best)  # -1: balance wins ties
        costs = [(done_s[one.name] - saved_s(one), len(one.active), one.name, one) for one in candidates]
        return min([balanced, *(cost for cost in costs if cost[0] < done_s[cost[2]])], key=itemgetter(0, 1, 2))[3]

    def dispatched(self, worker: Worker, entry: Entry) -> None:
        """Count a dispatched request."""
        self._waiting[entry.request.model] -= 1
        self._free[worker.name] -= 1
        if self._free[worker.name] == 0:
            self._reserve([worker])

    def _admits(self, worker: Worker, entry: Entry, only: str, together: int) -> bool:
        free = self._free.get(worker.name, 0)
        if free == 0 or (only and worker.name != only) or not worker.fits(entry) or (free < together and worker.active):
            return False
        if worker.phases is None or entry.overdue:
            return True
        return worker.phases.admits(entry, sum(self._waiting.get(model, 0) for model in worker.state.models))

    def _reserve(self, workers: Iterable[Worker]) -> None:
        for worker in workers:
            self._free.pop(worker.name, None)
        self.open = [worker for worker in self.open if worker.name in self._free]


class Dispatcher:
    """Dispatches waiting requests, in order, to workers with free slots."""

    def __init__(
        self, queue: Queue, service: TenantService, worker_pool: WorkerPool, preemption: Preemption, affinity: float
    ) -> None:
        self._queue, self._service, self._worker_pool, self._preemption = queue, service, worker_pool, preemption
        self.affinity = affinity
        self._sessions = Sessions()
        self._batch_left: Counter[int] = Counter()  # requests of a batch that are not dispatched yet
        self._batch_worker: dict[int, str] = {}

    def rename_workers(self, names: Iterable[tuple[str, str]], entries: Collection[Entry]) -> None:
        """Replace names of workers, (before, now), in everything that is remembered of them."""
        for before, now in names:
            self._sessions.rename_worker(before, now)
            for batch, worker in self._batch_worker.items():
                self._batch_worker[batch] = now if worker == before else worker
            for entry in entries:
                entry.rename_worker(before, now)

    def add_batch(self, batch: list[Entry]) -> None:
        """Add requests that leave their bins; the requests of a bin should run at one worker."""
        self._batch_left.update(entry.batch for entry in batch)

    def leave_batch(self, entry: Entry) -> None:
        """Note that a request of a batch is dispatched or finished, so that the batch does not wait for it."""
        if entry.batch and entry.admissions == 0:
            self._batch_left[entry.batch] -= 1
            if self._batch_left[entry.batch] == 0:
                del self._batch_left[entry.batch]
                self._batch_worker.pop(entry.batch, None)

    def dispatch(self, now_s: float) -> list[tuple[int, str]]:
        """Dispatch requests; return (request, worker) in the order of the queue."""
        if not self._queue:
            return []
        dispatch_pass = DispatchPass(self._worker_pool.up, self._sessions, self.affinity, now_s, self._queue.waiting)
        if not dispatch_pass.open:
            return []
        self._queue.refresh(now_s)
        dispatched, blocked = [], 0
        for entry in self._queue.in_order(dispatch_pass):
            if (worker := self._choose(dispatch_pass, entry)) is None:
                blocked += 1
            else:
                self._dispatch(now_s, entry, worker)
                dispatch_pass.dispatched(worker, entry)
                dispatched.append(entry)
            if not dispatch_pass.open or blocked >= _MAX_BLOCKED:
                break
        for entry in dispatched:  # not before: the queue must not change while it is iterated over
            self._queue.remove(entry)
            self._preemption.dispatched(now_s, entry)
        return [(entry.request.id, entry.worker) for entry in dispatched]

    def _choose(self, dispatch_pass: DispatchPass, entry: Entry) -> Worker | None:
        if not entry.batch or entry.admissions or entry.overdue:
            return dispatch_pass.choose(entry)
        name = self._batch_worker.get(entry.batch)
        if any(worker.name == name for worker in dispatch_pass.usable(entry)):
            return dispatch_pass.choose(entry, only=name or "")
        return dispatch_pass.choose(entry, together=self._batch_left[entry.batch])

    def _dispatch(self, now_s: float, entry: Entry, worker: Worker) -> None:
        q = entry.request
        q.queued_for_s += now_s - q.queued_s
        q.dispatched_s = now_s
        self._service.charge(entry, 0 if entry.admissions else q.prompt_tokens, entry.predicted)
        if entry.batch and entry.admissions == 0:
            self._batch_worker[entry.batch] = worker.name
            self.leave_batch(entry)
        entry.admissions += 1
        worker.dispatch(entry)
        self._sessions.dispatched(entry, worker.name)
