"""The pool of workers, routers, and the dispatch pass, which assigns queued requests to workers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any

import numpy as np

from lengthwise.gateway.config import OWN_ROUTER, Dispatch, router_policy
from lengthwise.gateway.core.preemption import Preemption
from lengthwise.gateway.core.queue import Bins, Queue
from lengthwise.gateway.core.ranking import Entry, State, TenantService
from lengthwise.gateway.core.worker import MAX_KEYS, Worker, mean_tokens_per_s, without_avoided
from lengthwise.gateway.scheduling import Phase, WorkerState
from lengthwise.policy.compile import interpreted
from lengthwise.policy.contracts import Policy

# Read with every token: Python looks up a module-level name faster than a member of an enumeration.
_RUNNING, _PREEMPTING = State.RUNNING, State.PREEMPTING


def waiting_tokens(queue: Queue, bins: Bins, priority: float = math.inf) -> dict[str, float]:
    """Return, for each model, the predicted remaining tokens of all requests that wait in the queue or in a bin.

    ``priority`` limits them to this priority class and to those that are served earlier.
    """
    found: dict[str, float] = {}
    for place in sorted(queue.tokens.keys() | bins.tokens.keys()):
        if place[1] <= priority:
            tokens = queue.tokens.get(place, 0.0) + bins.tokens.get(place, 0.0)
            found[place[0]] = found.get(place[0], 0.0) + tokens
    return found


def drain_times_s(
    tokens: Mapping[str, float], serving: Mapping[str, Sequence[int]], rates: Sequence[float]
) -> list[float]:
    """Return, for each worker, the seconds until the worker has generated its share of the waiting tokens.

    ``tokens`` are the waiting tokens of each model, ``serving`` the indices of the workers that serve it, and ``rates``
    the tokens/s of each worker. The tokens of a model are distributed so that its workers finish together; a worker
    that other models occupy for longer gets none. Models that few workers serve are distributed first.
    """
    times_s = [0.0] * len(rates)
    for model in sorted(tokens, key=lambda one: (len(serving[one]), one)):
        soonest = sorted(serving[model], key=times_s.__getitem__)
        rate, work = 0.0, tokens[model]
        for at, worker in enumerate(soonest):
            if rate and work / rate <= times_s[worker]:
                soonest = soonest[:at]
                break
            rate, work = rate + rates[worker], work + rates[worker] * times_s[worker]
        for worker in soonest:
            times_s[worker] = work / rate
    return times_s


class WorkerPool:
    """All workers. ``up`` are those that may get requests, in the fleet's order. If ``phased``, they report phases."""

    def __init__(self, dispatch: Dispatch, *, passthrough: bool, phased: bool = False) -> None:
        self._dispatch, self.passthrough, self._phased = dispatch, passthrough, phased
        self.finished_phases: list[Phase] = []
        self._workers: dict[str, Worker] = {}
        self._known_models: set[str] = set()
        self.served_models: set[str] = set()  # of workers that are up
        self.unserved_since_s: dict[str, float] = {}  # of models without a worker that is up, if there was one
        self._models_incomplete = True
        self.up: list[Worker] = []

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def __contains__(self, name: str) -> bool:
        return name in self._workers

    def named(self, name: str) -> Worker:
        """Return the worker of this name, which must exist."""
        return self._workers[name]

    def configure(self, dispatch: Dispatch) -> None:
        """Apply other settings of dispatch to all workers."""
        self._dispatch = dispatch
        for worker in self:
            worker.configure(dispatch)

    def of(self, entry: Entry) -> Worker | None:
        """Return the worker that runs the request, or None if no worker runs it."""
        if entry.state is not _RUNNING and entry.state is not _PREEMPTING:
            return None
        return self._workers[entry.worker]

    def update(self, now_s: float, states: Sequence[WorkerState]) -> tuple[list[Entry], list[tuple[str, str]]]:
        """Replace the workers. Return lost requests, and pairs (old, new) of names if a worker takes over sessions."""
        lost, new, renamed = list[Entry](), list[Worker](), list[tuple[str, str]]()
        before, self._workers = self._workers, {}
        for state in states:
            worker = before.get(state.renamed_from)
            if worker is not None and state.name not in before and worker.state.epoch == state.epoch:
                del before[state.renamed_from]
                before[state.name] = worker
                worker.rename(state.name)
                renamed.append((state.renamed_from, state.name))
        report = self.finished_phases.append if self._phased else None
        for state in states:
            worker = before.pop(state.name, None)
            if worker is None:
                worker = Worker(state, self._dispatch, passthrough=self.passthrough, report=report)
                new.append(worker)
            lost += worker.update(now_s, state)
            self._workers[state.name] = worker
        for worker in before.values():
            lost += worker.clear()
        leaving = [one for one in self if one.state.renamed_from and one.state.address]
        for worker in self:
            stays, address = not worker.state.renamed_from, worker.state.address
            worker.predecessors = tuple(one for one in leaving if stays and one.state.address == address)
        for worker in new:
            if worker.predecessors:
                last = max(worker.predecessors, key=lambda one: one.state.epoch)
                worker.inherit(last)
                renamed.append((last.name, worker.name))
        for worker in self:
            worker.prefix_cache.max_keys = MAX_KEYS // len(self._workers)
        self._update_models(now_s)
        return lost, renamed

    def may_serve(self, model: str) -> bool:
        """Return whether any worker serves or has served the model, or may do so because its models are unknown."""
        return model in self._known_models or self._models_incomplete

    def back_off(self, now_s: float, name: str, retry_after_s: float) -> float:
        """Let a worker back off, because it reported a full queue. Return the time until which it gets no requests."""
        if (worker := self._workers.get(name)) is None:
            return now_s
        worker.adaptive_limit.back_off(now_s, worker.slots_in_use, retry_after_s)
        return worker.adaptive_limit.backoff_until_s

    def backoff_until_s(self, now_s: float) -> float:
        """Return the earliest time at which a worker that backs off gets requests again, or inf if none backs off."""
        return min((worker.backoff_until_s(now_s) for worker in self.up), default=math.inf)

    def batch_size(self, model: str) -> int:
        """Return the size of a full bin: the largest limit of a worker that serves the model, or ``dispatch.start``."""
        limits = [worker.limit for worker in self.up if model in worker.state.models]
        return max(limits, default=self._dispatch.start)

    def wait_s(self, now_s: float, model: str, tokens: Mapping[str, float]) -> float:
        """Return the predicted seconds until a new request for ``model`` starts. An empty name means any model.

        ``tokens`` are the predicted output tokens, by model, of the requests that wait before it. The wait is 0 if a
        worker has a free slot that no waiting request can use, if no output rate is known, or if no worker is up.
        """
        serving = [worker for worker in self.up if not model or model in worker.state.models]
        mean_rate = mean_tokens_per_s(self.up)
        if not serving or not mean_rate:
            return 0.0
        if (model or not tokens) and any(
            worker.free_slots(now_s) > 0 and not any(one in tokens for one in worker.state.models) for worker in serving
        ):
            return 0.0
        rate = sum(worker.throughput.tokens_per_s or mean_rate for worker in serving)
        running = sum(len(worker.active) for worker in serving)
        first_slot_s = sum(worker.tokens for worker in serving) / max(1, running) / rate
        if not model:
            return sum(tokens.values()) / rate + first_slot_s
        indices = {
            one: [at for at, worker in enumerate(self.up) if one in worker.state.models] for one in (*tokens, model)
        }
        served = {one: tokens[one] for one in tokens if indices[one]}
        rates = [worker.throughput.tokens_per_s or mean_rate for worker in self.up]
        times_s = drain_times_s(served, indices, rates)
        return min(times_s[at] for at in indices[model]) + first_slot_s

    def decode_s(self, model: str, tokens: float) -> float:
        """Return the predicted seconds that a request for ``model`` generates ``tokens`` tokens, at today's batches."""
        serving = [worker for worker in self.up if model in worker.state.models]
        rate = sum(worker.throughput.tokens_per_s or 0.0 for worker in serving)
        return tokens * sum(len(worker.active) for worker in serving) / rate if rate else 0.0

    def _update_models(self, now_s: float) -> None:
        self.up = [worker for worker in self if worker.state.up]
        served = {model for worker in self.up for model in worker.state.models}
        self.unserved_since_s |= dict.fromkeys(self.served_models, now_s)
        for model in served:
            self.unserved_since_s.pop(model, None)
        self.served_models = served
        self._known_models |= {model for worker in self for model in worker.state.models}
        self._models_incomplete = not self._workers or any(not worker.state.models for worker in self)


_MAX_SESSIONS = 1 << 16
_MAX_BLOCKED = 64  # requests that get no worker, after which a pass ends


class Sessions:
    """Stores the last worker of each of the 65,536 sessions that were used last."""

    def __init__(self) -> None:
        self._worker: dict[tuple[int, str], str] = {}  # in order of last use

    def worker_of(self, entry: Entry) -> str:
        """Return the name of the last worker of the request, or of its session, or "" if there is none."""
        client = entry.request.client
        return entry.worker or self._worker.get((client.tenant, client.session), "")

    def dispatched(self, entry: Entry, worker: str) -> None:
        """Record the worker to which the request was dispatched as the last worker of its session."""
        client = entry.request.client
        if client.session:
            session = (client.tenant, client.session)
            self._worker.pop(session, None)
            self._worker[session] = worker
            if len(self._worker) > _MAX_SESSIONS:
                del self._worker[next(iter(self._worker))]

    def rename_worker(self, before: str, now: str) -> None:
        """Replace a worker's name in all sessions."""
        self._worker.update(dict.fromkeys([one for one, name in self._worker.items() if name == before], now))


_BLOCK_TOKENS = 16  # size of a KV block as an argument of routers
_UNKNOWN_BLOCKS = 1 << 16  # assumed blocks of a KV cache if no engine reports its size


class Router:
    """Chooses workers by one of the simulator's routers, whose function is interpreted.

    The router's replicas are the workers that may take the request now, in the order of the fleet. With
    ``passthrough``, a request at a worker counts as waiting until its first token. Otherwise it counts as running,
    because requests wait in the gateway's own queue.
    """

    def __init__(self, policy: Policy, *, passthrough: bool, seed: int = 0) -> None:
        self.policy, self._passthrough = policy, passthrough
        self._function, self._random, self._number = interpreted(policy), np.random.default_rng(seed), 0

    def choose(self, entry: Entry, workers: list[Worker], last: str) -> Worker:
        """Return one of the workers. ``last`` is the last worker of the request or of its session, or ""."""
        chosen = workers[self._function(*self.arguments(entry, workers, last))]
        self._number += 1
        return chosen

    def arguments(self, entry: Entry, workers: list[Worker], last: str) -> tuple[Any, ...]:
        """Return the arguments of the policy, in the order of ``policy.ROUTER_ARGUMENTS``."""
        q, uses = entry.request, self.policy.uses
        draws = (self._random.random(), self._random.random()) if uses("draw_a", "draw_b") else (0.0, 0.0)
        previous = next((number for number, worker in enumerate(workers) if worker.name == last), -1) if last else -1
        waiting = [worker.num_unstarted if self._passthrough else 0 for worker in workers]
        running = [worker.slots_in_use - count for worker, count in zip(workers, waiting, strict=True)]
        total_blocks, free, found, indexed = 0, [0], [0], [0]
        if uses("free_blocks", "total_blocks"):
            total_blocks = max(worker.state.kv_tokens or 0 for worker in workers) // _BLOCK_TOKENS or _UNKNOWN_BLOCKS
            free = [int(worker.free_kv_share * total_blocks) for worker in workers]
        if self.policy.prefix:
            found = [min(q.prompt_tokens, int(worker.prefix_cache.cached_tokens(q.prefix))) for worker in workers]
            indexed = [int(worker.prefix_cache.tokens) for worker in workers]
        tokens = [math.ceil(worker.kv_in_use) for worker in workers]
        arrays = (np.array(column, np.int64) for column in (waiting, running, tokens, free, found, indexed))
        return (self._number, *draws, max(1, q.prompt_tokens), previous, total_blocks, *arrays, np.ones(len(workers)))


class DispatchPass:
    """One pass over the queue, which chooses a worker for each request.

    A worker is open while it has a free slot. A request that gets no worker closes all workers that it could use, so
    that no later request gets a slot before it.
    """

    def __init__(
        self,
        up: list[Worker],
        sessions: Sessions,
        affinity: float,
        now_s: float,
        waiting: Mapping[str, int],
        router: Router | None = None,
    ) -> None:
        self._up, self._sessions, self._affinity, self._router = up, sessions, affinity, router
        self._waiting = dict(waiting)
        self._free = {worker.name: free for worker in up if (free := worker.free_slots(now_s)) > 0}
        self.open = [worker for worker in up if worker.name in self._free]
        self._serving: dict[str, list[Worker]] = {}

    def is_closed(self, model: str) -> bool:
        """Return whether no open worker serves the model."""
        return not any(model in worker.state.models for worker in self.open)

    @cached_property
    def _mean_tokens_per_s(self) -> float:
        return mean_tokens_per_s(self._up) or 1.0

    def usable(self, entry: Entry) -> list[Worker]:
        """Return the workers that may run the request, whether they have a free slot or not."""
        model = entry.request.model
        if model not in self._serving:
            self._serving[model] = [worker for worker in self._up if model in worker.state.models]
        return without_avoided(entry, self._serving[model])

    def choose(self, entry: Entry, *, only: str = "", together: int = 1) -> Worker | None:
        """Return the worker that the router chooses, or without a router the one expected to finish the request first.

        A worker that has probably cached a part of the prompt needs less time. If ``only`` is set, the request may run
        only at the worker of that name. A worker with other requests must have ``together`` free slots. If no worker
        qualifies, return None and close every worker that the request could use.
        """
        usable = self.usable(entry)
        candidates = [worker for worker in usable if self._admits(worker, entry, only, together)]
        if not candidates:
            self._close(usable)
            return None
        if len(candidates) == 1:
            return candidates[0]
        if self._router is not None:
            return self._router.choose(entry, candidates, self._sessions.worker_of(entry))
        rates = {one.name: one.throughput.tokens_per_s or self._mean_tokens_per_s for one in candidates}
        done_s = {one.name: (one.work + entry.work) / rates[one.name] for one in candidates}
        best = min(candidates, key=lambda one: (done_s[one.name], len(one.active), one.name))
        last, q = self._sessions.worker_of(entry), entry.request
        if not self._affinity or not (last or q.prefix.keys):
            return best

        def saved_s(worker: Worker) -> float:
            tokens = q.prompt_tokens if worker.name == last else worker.prefix_cache.cached_tokens(q.prefix)
            return self._affinity * tokens * worker.prompt_token_s(rates[worker.name]) if tokens else 0.0

        balanced = (done_s[best.name] - saved_s(best), -1, "", best)  # -1: of equal costs, this one is chosen
        costs = [(done_s[one.name] - saved_s(one), len(one.active), one.name, one) for one in candidates]
        return min([balanced, *(cost for cost in costs if cost[0] < done_s[cost[2]])], key=itemgetter(0, 1, 2))[3]

    def dispatched(self, worker: Worker, entry: Entry) -> None:
        """Count a dispatched request, and close its worker if that has no free slot left."""
        self._waiting[entry.request.model] -= 1
        self._free[worker.name] -= 1
        if self._free[worker.name] == 0:
            self._close([worker])

    def _admits(self, worker: Worker, entry: Entry, only: str, together: int) -> bool:
        free = self._free.get(worker.name, 0)
        if free == 0 or (only and worker.name != only) or not worker.fits(entry) or (free < together and worker.active):
            return False
        if worker.phase_tracker is None or entry.overdue:
            return True
        return worker.phase_tracker.admits(entry, sum(self._waiting.get(model, 0) for model in worker.state.models))

    def _close(self, workers: Iterable[Worker]) -> None:
        for worker in workers:
            self._free.pop(worker.name, None)
        self.open = [worker for worker in self.open if worker.name in self._free]


class Dispatcher:
    """Dispatches waiting requests, in the order of the queue, to workers with free slots."""

    def __init__(
        self, queue: Queue, service: TenantService, worker_pool: WorkerPool, preemption: Preemption, dispatch: Dispatch
    ) -> None:
        self._queue, self._service, self._worker_pool, self._preemption = queue, service, worker_pool, preemption
        self._affinity, self._router = dispatch.affinity, self._router_of(dispatch)
        self._sessions = Sessions()
        self._batch_left: Counter[int] = Counter()  # requests of a batch that are not dispatched yet
        self._batch_worker: dict[int, str] = {}
        self._num_dispatched = 0

    def configure(self, dispatch: Dispatch) -> None:
        """Apply other settings of dispatch. Raises InputError, and changes nothing, if there is no such router."""
        router = self._router_of(dispatch)
        if router is None or self._router is None or router.policy != self._router.policy:
            self._router = router
        self._affinity = dispatch.affinity

    @property
    def router(self) -> str:
        """Return the name of the router."""
        return OWN_ROUTER if self._router is None else self._router.policy.name

    def _router_of(self, dispatch: Dispatch) -> Router | None:
        policy = router_policy(dispatch)
        return None if policy is None else Router(policy, passthrough=self._worker_pool.passthrough)

    def rename_workers(self, names: Iterable[tuple[str, str]], entries: Collection[Entry]) -> None:
        """Replace names of workers, given as pairs (old, new), in sessions, batches and requests."""
        for before, now in names:
            self._sessions.rename_worker(before, now)
            for batch, worker in self._batch_worker.items():
                self._batch_worker[batch] = now if worker == before else worker
            for entry in entries:
                if before in (avoid := entry.request.dispatch.avoid):
                    entry.request.dispatch.avoid = avoid - {before} | {now}
                if entry.worker == before and self._worker_pool.of(entry) is None:
                    entry.worker = now  # ``Worker.rename`` has already changed running requests

    def start_batch(self, batch: list[Entry]) -> None:
        """Count the requests of an emptied bin as a batch, all of which should run at one worker."""
        self._batch_left.update(entry.batch for entry in batch)

    def leave_batch(self, entry: Entry) -> None:
        """Count one request less of its batch, at its first dispatch or if it ends before."""
        if entry.batch and entry.dispatches == 0:
            self._batch_left[entry.batch] -= 1
            if self._batch_left[entry.batch] == 0:
                del self._batch_left[entry.batch]
                self._batch_worker.pop(entry.batch, None)

    def dispatch(self, now_s: float) -> list[tuple[int, str]]:
        """Dispatch waiting requests. Return pairs (request id, worker name) in the order of the queue."""
        if not self._queue:
            return []
        dispatch_pass = DispatchPass(
            self._worker_pool.up, self._sessions, self._affinity, now_s, self._queue.count_by_model, self._router
        )
        if not dispatch_pass.open:
            return []
        self._queue.refresh(now_s)
        dispatched, blocked = [], 0
        for entry in self._queue.in_order(dispatch_pass.is_closed):
            if (worker := self._choose(dispatch_pass, entry)) is None:
                blocked += 1
            else:
                self._dispatch(now_s, entry, worker)
                dispatch_pass.dispatched(worker, entry)
                dispatched.append(entry)
            if not dispatch_pass.open or blocked >= _MAX_BLOCKED:
                break
        for entry in dispatched:  # only now, because the queue must not change during the iteration
            self._queue.remove(entry)
            self._preemption.dispatched(now_s, entry)
        return [(entry.request.id, entry.worker) for entry in dispatched]

    def assign(self, now_s: float, entry: Entry, name: str) -> None:
        """Dispatch a queued request to the worker of this name, even if that has no free slot."""
        self._dispatch(now_s, entry, self._worker_pool.named(name))
        self._queue.remove(entry)
        self._preemption.dispatched(now_s, entry)

    def _choose(self, dispatch_pass: DispatchPass, entry: Entry) -> Worker | None:
        if not entry.batch or entry.dispatches or entry.overdue:
            return dispatch_pass.choose(entry)
        name = self._batch_worker.get(entry.batch)
        if any(worker.name == name for worker in dispatch_pass.usable(entry)):
            return dispatch_pass.choose(entry, only=name or "")
        return dispatch_pass.choose(entry, together=self._batch_left[entry.batch])

    def _dispatch(self, now_s: float, entry: Entry, worker: Worker) -> None:
        q = entry.request
        q.dispatch.queued_for_s += now_s - q.dispatch.enqueued_at_s
        q.dispatch.dispatched_s = now_s
        self._service.set_charge(entry, 0 if entry.dispatches else q.prompt_tokens, entry.predicted_tokens)
        if entry.batch and entry.dispatches == 0:
            self._batch_worker[entry.batch] = worker.name
            self.leave_batch(entry)
        self._num_dispatched += 1
        entry.dispatches, q.dispatch.dispatch_number = entry.dispatches + 1, self._num_dispatched
        worker.dispatch(entry)
        self._sessions.dispatched(entry, worker.name)
