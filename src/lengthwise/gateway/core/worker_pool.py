"""All workers: their states, the models that they serve, and since when a model is not served."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from lengthwise.gateway.config import Dispatch
from lengthwise.gateway.core.queue import Bins, Queue
from lengthwise.gateway.core.ranking import Entry, State
from lengthwise.gateway.core.worker import MAX_BLOCKS, Worker, mean_tokens_per_s
from lengthwise.gateway.scheduling import Phase, WorkerState

# Read with every token: a module's name is found faster than a member of an enumeration.
_RUNNING, _PREEMPTING = State.RUNNING, State.PREEMPTING


def waiting_tokens(queue: Queue, bins: Bins) -> dict[str, float]:
    """Return the predicted output tokens of waiting and binned requests by model, for models that have any."""
    models = sorted(queue.tokens.keys() | bins.tokens.keys())
    return {model: queue.tokens.get(model, 0.0) + bins.tokens.get(model, 0.0) for model in models}


def drain_times_s(
    tokens: Mapping[str, float], serving: Mapping[str, Sequence[int]], rates: Sequence[float]
) -> list[float]:
    """Return the seconds until each worker's share of the waiting tokens is done, for workers of ``rates`` tokens/s.

    Each model's tokens go to the workers (indices in ``serving``) that are done soonest, the models with few workers
    first.
    """
    times_s = [0.0] * len(rates)
    for model in sorted(tokens, key=lambda one: (len(serving[one]), one)):
        fastest = sorted(serving[model], key=times_s.__getitem__)
        rate, work = 0.0, tokens[model]
        for at, worker in enumerate(fastest):
            if rate and work / rate <= times_s[worker]:
                fastest = fastest[:at]
                break
            rate, work = rate + rates[worker], work + rates[worker] * times_s[worker]
        for worker in fastest:
            times_s[worker] = work / rate
    return times_s


class WorkerPool:
    """The workers by name; ``up`` lists those that may be given requests, in the reported order."""

    def __init__(self, dispatch: Dispatch, *, no_limit: bool, phased: bool = False) -> None:
        self._dispatch, self._no_limit, self._phased = dispatch, no_limit, phased
        self.finished_phases: list[Phase] = []
        self._workers: dict[str, Worker] = {}
        self._known_models: set[str] = set()
        self.served_models: set[str] = set()  # of workers that are up
        self.unserved_since_s: dict[str, float] = {}  # of models without a worker that is up, if there was one
        self._models_incomplete = True
        self._backoff_until_s = -math.inf
        self.up: list[Worker] = []

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def configure(self, dispatch: Dispatch) -> None:
        """Change the bounds of all limits."""
        self._dispatch = dispatch
        for worker in self:
            worker.configure(dispatch)

    def of(self, entry: Entry) -> Worker | None:
        """Return the worker at which the request is; None where it is at none."""
        if entry.state is not _RUNNING and entry.state is not _PREEMPTING:
            return None
        return self._workers[entry.worker]

    def update(self, now_s: float, states: Sequence[WorkerState]) -> tuple[list[Entry], list[tuple[str, str]]]:
        """Replace the set of workers; return requests that lost theirs, and (before, now) names, also of one engine."""
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
                worker = Worker(state, self._dispatch, no_limit=self._no_limit, report=report)
                new.append(worker)
            lost += worker.update(now_s, state)
            self._workers[state.name] = worker
        for worker in before.values():
            lost += worker.clear()
        leaving = [one for one in self if one.state.renamed_from and one.state.address]
        for worker in self:
            stays, address = not worker.state.renamed_from, worker.state.address
            worker.leaving = tuple(one for one in leaving if stays and one.state.address == address)
        for worker in new:
            if worker.leaving:
                last = max(worker.leaving, key=lambda one: one.state.epoch)
                worker.inherit(last)
                renamed.append((last.name, worker.name))
        for worker in self:
            worker.prefix_cache.max_blocks = MAX_BLOCKS // len(self._workers)
        self._update_models(now_s)
        return lost, renamed

    def may_serve(self, model: str) -> bool:
        """Return whether a worker serves or served the model, or has not reported its models yet."""
        return model in self._known_models or self._models_incomplete

    def refused(self, now_s: float, name: str, retry_after_s: float) -> None:
        """Back off from a worker that reported a full queue."""
        if (worker := self._workers.get(name)) is not None:
            worker.refused(now_s, retry_after_s)
            if (until_s := worker.backoff_until_s(now_s)) < math.inf:
                self._backoff_until_s = max(self._backoff_until_s, until_s)

    def backoff_until_s(self, now_s: float) -> float:
        """Return when the first worker's backoff ends; inf none backs off."""
        if now_s >= self._backoff_until_s:
            return math.inf
        return min((worker.backoff_until_s(now_s) for worker in self.up), default=math.inf)

    def batch_size(self, model: str) -> int:
        """Return the largest limit of a worker that serves the model."""
        limits = [worker.limit for worker in self.up if model in worker.state.models]
        return max(limits, default=self._dispatch.start)

    def wait_s(self, now_s: float, model: str, tokens: Mapping[str, float]) -> float:
        """Return the predicted wait of a request that arrives now, behind waiting ``tokens``; ``model`` "" is any."""
        serving = [worker for worker in self.up if not model or model in worker.state.models]
        usual = mean_tokens_per_s(self.up)
        if not serving or not usual:
            return 0.0
        if (model or not tokens) and any(
            worker.free_slots(now_s) > 0 and not any(one in tokens for one in worker.state.models) for worker in serving
        ):
            return 0.0
        rate = sum(worker.throughput.tokens_per_s or usual for worker in serving)
        running = sum(len(worker.active) for worker in serving)
        first_slot_s = sum(worker.tokens for worker in serving) / max(1, running) / rate
        if not model:
            return sum(tokens.values()) / rate + first_slot_s
        indices = {
            one: [at for at, worker in enumerate(self.up) if one in worker.state.models] for one in (*tokens, model)
        }
        served = {one: tokens[one] for one in tokens if indices[one]}
        rates = [worker.throughput.tokens_per_s or usual for worker in self.up]
        times_s = drain_times_s(served, indices, rates)
        return min(times_s[at] for at in indices[model]) + first_slot_s

    def _update_models(self, now_s: float) -> None:
        self.up = [worker for worker in self if worker.state.up]
        served = {model for worker in self.up for model in worker.state.models}
        self.unserved_since_s |= dict.fromkeys(self.served_models, now_s)
        for model in served:
            self.unserved_since_s.pop(model, None)
        self.served_models = served
        self._known_models |= {model for worker in self for model in worker.state.models}
        self._models_incomplete = not self._workers or any(not worker.state.models for worker in self)
