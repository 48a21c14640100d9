"""Preemption: remove running requests from their workers, so that waiting requests with a better key can run."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from heapq import heapify, heapreplace
from itertools import accumulate, islice

import numpy as np

from lengthwise.gateway.config import Order
from lengthwise.gateway.core.queue import Queue
from lengthwise.gateway.core.ranking import Entry, PreemptionState, Ranker, State, TenantService
from lengthwise.gateway.core.worker import Worker, without_avoided
from lengthwise.policy.compile import interpreted
from lengthwise.policy.named_schedulers import resolve

LOOKAHEAD = 64  # waiting requests that a pass considers
POLL_INTERVAL_S = 0.02  # least time between two passes
_TOTAL_GAIN_DIVISOR = 3.0  # of the tokens that all waiting requests save: the best of many noisy estimates is too high


def expected_remaining(entry: Entry) -> float:
    """Return the expected remaining tokens of a request, also if it is longer than predicted.

    Until a request has generated half of the tokens that remained at its last prediction, these are the predicted
    remaining tokens. From then on they are the larger of these and the posterior mean, given the tokens at its first
    computation (once per prediction). If the prediction is a single number, a request that exceeds it is expected to
    generate half as many tokens again.
    """
    prediction, generated = entry.request.length_prediction, entry.request.generated_tokens
    if entry.remaining_tokens > (entry.predicted_tokens - prediction.at_tokens) / 2 or not generated:
        return entry.remaining_tokens
    allowed = float(max(1, entry.request.max_tokens - generated))
    if prediction.quantiles is None:
        return min(max(1.0, generated / 2) if entry.remaining_tokens <= 1 else entry.remaining_tokens, allowed)
    if math.isnan(entry.posterior_remaining):
        from lengthwise.predict import LEVELS, LengthDistribution

        posterior = LengthDistribution(np.asarray(prediction.quantiles)[None, :], LEVELS)
        entry.posterior_remaining = float(posterior.remaining(generated)[0])
    return min(max(entry.remaining_tokens, entry.posterior_remaining), allowed)


def slot_release_tokens(remaining: Iterable[float]) -> list[float]:
    """Return when each slot becomes free, in decode steps from now (a running request generates one token a step).

    ``remaining`` are the expected remaining tokens of the running requests, each assumed to be exponential.
    """
    rates = list(accumulate(1 / tokens for tokens in sorted(remaining, reverse=True)))
    return list(accumulate(1 / rate for rate in reversed(rates)))


def saved_tokens(
    remaining: Sequence[float], victim_tokens: float, waiting: Sequence[tuple[float, float]], victim_key: float
) -> float:
    """Return how much earlier the waiting requests start in total, in decode steps, if the victim is preempted.

    The victim's own wait for another slot is subtracted. ``remaining`` are the expected remaining tokens of the other
    running requests, ``victim_tokens`` those of the victim. ``waiting`` are pairs (key, expected remaining tokens) in
    the order of the queue, which the victim joins with ``victim_key``.
    """

    def sum_of_starts(free: list[float], lengths: Iterable[float]) -> float:
        heapify(free)
        total = 0.0
        for tokens in lengths:
            total += free[0]
            heapreplace(free, free[0] + tokens)
        return total

    lengths = [tokens for _, tokens in waiting]
    at = bisect_right([key for key, _ in waiting], victim_key)
    before = sum_of_starts(slot_release_tokens([*remaining, victim_tokens]), lengths)
    requeued = [*lengths[:at], victim_tokens, *lengths[at:]]
    return before - sum_of_starts([0.0, *slot_release_tokens(remaining)], requeued)


Candidates = list[tuple[float, Entry]]  # key and request, the greatest key first


class PreemptionPass:
    """A pass over the waiting requests that looks for a running request to preempt (the victim) for each of them.

    First, waiting requests take the slots that preemptions in progress free. A waiting request that gets neither such a
    slot nor a victim closes every worker that it could use, so that no later request takes a slot there.
    """

    def __init__(
        self, now_s: float, queue: Queue, workers: Collection[Worker], candidates: Candidates, preemption: Preemption
    ) -> None:
        self._now_s, self._queue, self._candidates, self._preemption = now_s, queue, candidates, preemption
        self._key = preemption.ranker.key
        self._up = [worker for worker in workers if worker.state.up]
        self._open = {worker.name: worker for worker in self._up}
        self._slots_being_freed = {worker.name: worker.num_preempting for worker in self._up if worker.num_preempting}
        self._placed: dict[int, tuple[Entry, Worker]] = {}

    def run(self, budget: int) -> list[Entry]:
        """Preempt at most ``budget`` requests, and return them."""
        preempted: list[Entry] = []
        for waiting in islice(self._queue.in_order(self.is_closed), LOOKAHEAD + sum(self._slots_being_freed.values())):
            serving = [worker for worker in self._up if waiting.request.model in worker.state.models]
            usable = [one for one in without_avoided(waiting, serving) if one.name in self._open]
            slot = next((one for one in usable if self._slots_being_freed.get(one.name)), None)
            if slot is not None:  # a preemption in progress frees it
                self._slots_being_freed[slot.name] -= 1
                self._placed[waiting.request.id] = waiting, slot
                continue
            if len(preempted) >= budget:
                break
            if (found := self._victim(waiting, usable)) is not None:
                victim, worker = found
                worker.preempt(self._now_s, victim)
                self._placed[waiting.request.id] = waiting, worker
                preempted.append(victim)
            else:
                for worker in usable:
                    self._open.pop(worker.name, None)
        return preempted

    def is_closed(self, model: str) -> bool:
        """Return whether no open worker serves the model."""
        return not any(model in worker.state.models for worker in self._open.values())

    def _victim(self, waiting: Entry, usable: list[Worker]) -> tuple[Entry, Worker] | None:
        """Return the worst running request that ``waiting`` may replace, and its worker, or None if none gains."""
        workers = {worker.name: worker for worker in usable}
        for at, (key, running) in enumerate(self._candidates):
            worker = workers.get(running.worker)
            if worker is None or not worker.fits_without(waiting, running):
                continue
            if self._preemption.precedes(waiting, running):
                if self._is_improvement(waiting, key, running, worker):
                    del self._candidates[at]
                    return running, worker
                break
        return None

    def _is_improvement(self, waiting: Entry, key: float, running: Entry, worker: Worker) -> bool:
        waiting_key = -math.inf if waiting.overdue else self._key(waiting)
        if not waiting_key < key:
            return False
        q, num_running = running.request, len(worker.active)
        queued = self._queue.count_by_model.get(waiting.request.model, 0)
        recompute = worker.cost.recompute_steps(q.prompt_tokens + q.generated_tokens, num_running)
        waited_s = waiting.request.dispatch.waited_s(self._now_s)
        lengths = (waiting.remaining_tokens, running.remaining_tokens, q.generated_tokens)
        load = (recompute, num_running, queued)
        if not self._preemption.gain(waiting_key, key, *lengths, *load, waited_s, q.dispatch.preemptions) > 0:
            return False
        saved = math.inf if waiting.overdue else self._saved_tokens(waiting.request.model, running, key)
        return saved > recompute * (num_running + queued)

    def _saved_tokens(self, model: str, victim: Entry, key: float) -> float:
        """Return the larger of the tokens that the model's first waiting request saves and a third of all savings."""
        remaining: list[float] = []
        waiting = [
            (-math.inf if one.overdue else self._key(one), expected_remaining(one))
            for one in islice(self._queue.in_order(lambda other: other != model), LOOKAHEAD + len(self._placed))
            if one.request.id not in self._placed
        ]
        serving = [worker for worker in self._up if model in worker.state.models]
        for worker in serving:  # requests in state PREEMPTING count as waiting
            for one in worker.active.values():
                if one.state is State.PREEMPTING:
                    waiting.append((self._key(one), expected_remaining(one)))
                elif one is not victim:
                    remaining.append(expected_remaining(one))
            remaining += [expected_remaining(entry) for entry, at in self._placed.values() if at is worker]
        waiting.sort(key=lambda one: one[0])
        leaving = expected_remaining(victim)
        first = saved_tokens(remaining, leaving, waiting[:1], key)
        return max(first, saved_tokens(remaining, leaving, waiting, key) / _TOTAL_GAIN_DIVISOR)


class TokenBucket:
    """Limits preemptions to ``rate`` per second in the long run, and a burst to those of one second, but at least 1."""

    def __init__(self, rate: float) -> None:
        self._rate, self._tokens, self._at_s = rate, math.inf, math.nan
        self.configure(math.nan, rate)

    def available(self, now_s: float) -> int:
        """Return how many preemptions are allowed now."""
        passed_s = max(0.0, now_s - self._at_s)  # max(0, NaN) is 0
        if passed_s and math.isfinite(self._rate):
            self._tokens = min(self._burst, self._tokens + passed_s * self._rate)
        self._at_s = now_s
        return LOOKAHEAD if math.isinf(self._tokens) else int(self._tokens + 1e-9)

    def configure(self, now_s: float, rate: float) -> None:
        """Change the rate. Unused tokens stay, up to the new limit of a burst."""
        self.available(now_s)
        self._rate, self._burst = rate, max(1.0, rate) if rate > 0 else 0.0
        self._tokens = min(self._tokens, self._burst)

    def take(self, count: int) -> None:
        """Take tokens for ``count`` preemptions. A negative count returns tokens of preemptions that were undone."""
        self._tokens = min(self._burst, self._tokens - count)

    def next_s(self, now_s: float) -> float:
        """Return the time at which the next preemption is allowed, or inf if preemptions are never allowed."""
        if self.available(now_s) >= 1:
            return now_s
        return now_s + (1 - self._tokens) / self._rate if self._rate > 0 else math.inf


class Preemption:
    """Decides preemptions in modes isrtf and windowed.

    A request is never preempted if a preemption could change its answer, or if it is overdue. Mode windowed preempts
    the worst requests whose windows have ended, at most one for each waiting request.

    In mode isrtf a waiting request preempts only a request with a strictly worse key. The preemption policy must agree,
    and the tokens that waiting requests save must exceed the decode steps of the victim's recomputation, multiplied by
    the number of running and waiting requests. For an overdue waiting request the policy alone decides.
    ``max_preemptions`` limits the preemptions of one request, ``preemptions_per_s`` those of all requests. A request
    that was dispatched again is protected for one window of tokens.
    """

    def __init__(self, order: Order, ranker: Ranker, service: TenantService) -> None:
        self.ranker, self._service = ranker, service
        self._on_demand, self._windows = order.mode == "isrtf", order.mode == "windowed"
        self._bucket = TokenBucket(order.preemptions_per_s)
        self._closed_windows: dict[int, Entry] = {}
        self._last_pass_s, self.count = -math.inf, 0
        self.configure(math.nan, order)
        self._requested = False

    def configure(self, now_s: float, order: Order) -> None:
        """Apply other settings of order. The mode cannot change."""
        self._bucket.configure(now_s, order.preemptions_per_s)
        self._order = order
        self.gain = interpreted(resolve("preemption", order.preemption))
        self.request_pass()

    def dispatched(self, now_s: float, entry: Entry) -> None:
        """Start a new window of tokens for a dispatched request."""
        if self._on_demand or self._windows:
            self.ranker.update(now_s, entry)
        window_end = entry.request.generated_tokens + self._order.window_tokens
        entry.preemption = PreemptionState(window_end, protected_until=window_end if entry.dispatches > 1 else 0)

    def undo(self) -> bool:
        """Undo the count of a preemption that is impossible. Return whether a pass should look for another victim."""
        self._bucket.take(-1)
        self.count -= 1
        return self.request_pass()

    def on_progress(self, entry: Entry) -> bool:
        """Start a new window if the request has reached the end of its window. Return whether a pass is due then."""
        if entry.request.generated_tokens < entry.preemption.window_end:
            return False
        entry.preemption.window_end = entry.request.generated_tokens + self._order.window_tokens
        if self._windows:
            self._closed_windows[entry.request.id] = entry
        return self.request_pass()

    def request_pass(self) -> bool:
        """Request a pass, because keys may have changed. Return False if the mode needs no pass now."""
        self._requested = self._on_demand or bool(self._closed_windows)
        return self._requested

    def next_s(self, now_s: float) -> float:
        """Return the time from which the requested pass may run, or inf if none is requested or none is allowed."""
        if self._closed_windows:
            return now_s
        if not (self._on_demand and self._requested):
            return math.inf
        return max(self._last_pass_s + POLL_INTERVAL_S, self._bucket.next_s(now_s))

    def run(self, now_s: float, queue: Queue, workers: Collection[Worker]) -> list[Entry]:
        """Run a pass over the waiting requests if one is due. Return the requests that the pass preempts."""
        preempted: list[Entry] = []
        if self._closed_windows:
            preempted = self._preempt_closed_windows(now_s, queue, workers)
        elif self._requested and now_s >= self._last_pass_s + POLL_INTERVAL_S:
            if not queue:
                self._requested = False
            elif (budget := self._bucket.available(now_s)) >= 1:
                self._requested, self._last_pass_s = False, now_s
                active = [one for worker in workers for one in worker.active.values() if self._is_preemptible(one)]
                unprotected = [one for one in active if one.request.generated_tokens >= one.preemption.protected_until]
                running = [one for one in unprotected if one.request.dispatch.preemptions < self._order.max_preemptions]
                if running:
                    queue.refresh(now_s)
                    candidates = self._worst_first(now_s, running)
                    preempted = PreemptionPass(now_s, queue, workers, candidates, self).run(budget)
                    self._bucket.take(len(preempted))
        self.count += len(preempted)
        return preempted

    def precedes(self, waiting: Entry, running: Entry) -> bool:
        """Return whether priority classes and tenants allow the waiting request to replace the running one.

        An overdue request belongs to the best class. With fairness, a request that is overdue or of the same class
        replaces a request of another tenant only if its own tenant has not had more service.
        """
        w, r = waiting.request.client, running.request.client
        if self._order.fairness == "none" or w.tenant == r.tenant or not (waiting.overdue or w.priority == r.priority):
            return waiting.overdue or w.priority <= r.priority
        return self._service.of(w.tenant) <= self._service.without(running)

    def _preempt_closed_windows(self, now_s: float, queue: Queue, workers: Collection[Worker]) -> list[Entry]:
        closed, self._closed_windows, self._requested = self._closed_windows, {}, False
        waiting = dict(queue.count_by_model)

        def take_waiting(models: Iterable[str]) -> bool:
            model = next((one for one in models if waiting.get(one, 0) > 0), None)
            if model is not None:
                waiting[model] -= 1
            return model is not None

        for worker in workers:
            for _ in range(worker.num_preempting):
                take_waiting(worker.state.models)
        worker_of = {
            one.request.id: worker
            for worker in workers
            for one in worker.active.values()
            if worker.state.up and one.request.id in closed and self._is_preemptible(one)
        }
        if not (worker_of and waiting):
            return []
        ranked = self._worst_first(now_s, [closed[id_] for id_ in worker_of])
        preempted = [one for _, one in ranked if take_waiting(worker_of[one.request.id].state.models)]
        for one in preempted:
            worker_of[one.request.id].preempt(now_s, one)
        return preempted

    def _worst_first(self, now_s: float, running: list[Entry]) -> Candidates:
        keyed = zip(self.ranker.running_keys(now_s, running), running, strict=True)
        return sorted(keyed, key=lambda one: (one[0], one[1].request.arrival_s, one[1].request.id))[::-1]

    @staticmethod
    def _is_preemptible(entry: Entry) -> bool:
        preemptible = entry.request.preemptible and not entry.preemption.nonpreemptible
        return preemptible and entry.state is State.RUNNING and not entry.overdue
