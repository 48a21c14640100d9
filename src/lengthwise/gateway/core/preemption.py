"""Preemption: which running requests leave their workers, for a better waiting one or at the end of a window."""

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
POLL_INTERVAL_S = 0.02  # least time between two comparisons of running and waiting requests
_TOTAL_GAIN_DIVISOR = 3.0
"""Divisor of the gain of all waiting requests: it sums many guesses, and the best of many guesses is a lucky one."""


def expected_remaining(entry: Entry) -> float:
    """Return the predicted tokens still to come, also of a request that has passed its prediction.

    From half of the prediction on it is the posterior mean given the tokens so far, computed once per prediction; where
    only a number is known, a request that has passed it is expected to grow by half.
    """
    prediction, generated = entry.request.length_prediction, entry.request.generated_tokens
    if entry.remaining > (entry.predicted - prediction.at_tokens) / 2 or not generated:
        return entry.remaining
    allowed = float(max(1, entry.request.max_tokens - generated))
    if prediction.quantiles is None:
        return min(max(1.0, generated / 2) if entry.remaining <= 1 else entry.remaining, allowed)
    if math.isnan(entry.posterior_remaining):
        from lengthwise.predict import LEVELS, LengthDistribution

        posterior = LengthDistribution(np.asarray(prediction.quantiles)[None, :], LEVELS)
        entry.posterior_remaining = float(posterior.remaining(generated)[0])
    return min(max(entry.remaining, entry.posterior_remaining), allowed)


def slot_release_tokens(remaining: Iterable[float]) -> list[float]:
    """Return when slots become free, in tokens, if remaining lengths are independent exponentials with these means."""
    rates = list(accumulate(1 / tokens for tokens in sorted(remaining, reverse=True)))
    return list(accumulate(1 / rate for rate in reversed(rates)))


def saved_tokens(
    remaining: Sequence[float], victim: float, waiting: Sequence[tuple[float, float]], key: float
) -> float:
    """Return the tokens by which waiting requests start sooner, less the wait of the victim for another slot.

    ``waiting`` are keys and expected remaining tokens in order, ``remaining`` those of the other running requests.
    """

    def sum_of_starts(free: list[float], lengths: Iterable[float]) -> float:
        heapify(free)
        total = 0.0
        for tokens in lengths:
            total += free[0]
            heapreplace(free, free[0] + tokens)
        return total

    lengths = [tokens for _, tokens in waiting]
    at = bisect_right([one for one, _ in waiting], key)
    before = sum_of_starts(slot_release_tokens([*remaining, victim]), lengths)
    return before - sum_of_starts([0.0, *slot_release_tokens(remaining)], [*lengths[:at], victim, *lengths[at:]])


Candidates = list[tuple[float, Entry]]  # key and request, the greatest key first


class PreemptionPass:
    """One pass over waiting requests: one without a slot or a victim reserves every worker that it could use."""

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
        """Preempt and return at most ``budget`` requests."""
        preempted: list[Entry] = []
        for waiting in islice(self._queue.in_order(self.is_closed), LOOKAHEAD + sum(self._slots_being_freed.values())):
            serving = [worker for worker in self._up if waiting.request.model in worker.state.models]
            usable = [one for one in without_avoided(waiting, serving) if one.name in self._open]
            slot = next((one for one in usable if self._slots_being_freed.get(one.name)), None)
            if slot is not None:  # a slot that a preemption under way frees
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
        """Return the worst running request that the waiting one may replace, if that pays."""
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
        lengths = (waiting.remaining, running.remaining, q.generated_tokens)
        load = (recompute, num_running, queued)
        if not self._preemption.gain(waiting_key, key, *lengths, *load, waited_s, q.dispatch.preemptions) > 0:
            return False
        saved = math.inf if waiting.overdue else self._saved_tokens(waiting.request.model, running, key)
        return saved > recompute * (num_running + queued)

    def _saved_tokens(self, model: str, victim: Entry, key: float) -> float:
        """Return what the first waiting request of the model saves, or a third of what all of them save."""
        remaining: list[float] = []
        waiting = [
            (-math.inf if one.overdue else self._key(one), expected_remaining(one))
            for one in islice(self._queue.in_order(lambda other: other != model), LOOKAHEAD + len(self._placed))
            if one.request.id not in self._placed
        ]
        serving = [worker for worker in self._up if model in worker.state.models]
        for worker in serving:  # as it will be when the preempting requests are gone
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
    """At most ``rate`` preemptions a second in the long run, and one second's worth at once."""

    def __init__(self, rate: float) -> None:
        self._rate, self._tokens, self._at_s = rate, math.inf, math.nan
        self.configure(math.nan, rate)

    def available(self, now_s: float) -> int:
        """Return how many preemptions may be made now."""
        passed_s = max(0.0, now_s - self._at_s)  # max(0, NaN) is 0
        if passed_s and math.isfinite(self._rate):
            self._tokens = min(self._burst, self._tokens + passed_s * self._rate)
        self._at_s = now_s
        return LOOKAHEAD if math.isinf(self._tokens) else int(self._tokens + 1e-9)

    def configure(self, now_s: float, rate: float) -> None:
        """Change the rate; tokens that are left stay, so that a change causes no burst."""
        self.available(now_s)
        self._rate, self._burst = rate, max(1.0, rate) if rate > 0 else 0.0
        self._tokens = min(self._tokens, self._burst)

    def take(self, count: int) -> None:
        """Use tokens; a negative count returns those of preemptions that cannot be made."""
        self._tokens = min(self._burst, self._tokens - count)

    def next_s(self, now_s: float) -> float:
        """Return when the next preemption may be made; inf never."""
        if self.available(now_s) >= 1:
            return now_s
        return now_s + (1 - self._tokens) / self._rate if self._rate > 0 else math.inf


class Preemption:
    """Decides preemptions. A request is not preempted where its answer would change, too often, or once overdue.

    A preemption must pay for itself: the first waiting request's gain (or a third of the gain of all) exceeds the
    recomputation times all running and waiting requests, and the preemption policy agrees. For an overdue one that
    policy alone decides. A request dispatched again is protected for a window, and only strictly better keys preempt.
    """

    def __init__(self, order: Order, ranker: Ranker, service: TenantService) -> None:
        self.ranker, self._service = ranker, service
        self._on_demand, self._windows = order.mode == "isrtf", order.mode == "windowed"
        self._bucket = TokenBucket(order.preemptions_per_s)
        self._closed_windows: dict[int, Entry] = {}
        self._compared_s, self.count = -math.inf, 0
        self.configure(math.nan, order)
        self._requested = False

    def configure(self, now_s: float, order: Order) -> None:
        """Apply another order of the same mode."""
        self._bucket.configure(now_s, order.preemptions_per_s)
        self._order = order
        self.gain = interpreted(resolve("preemption", order.preemption))
        self.on_order_changed()

    def dispatched(self, now_s: float, entry: Entry) -> None:
        """Start a new window for a dispatched request."""
        if self._on_demand or self._windows:
            self.ranker.update(now_s, entry)
        window_end = entry.request.generated_tokens + self._order.window_tokens
        entry.preemption = PreemptionState(window_end, protected_until=window_end if entry.dispatches > 1 else 0)

    def uncount(self) -> bool:
        """Uncount a preemption that cannot be made; return whether a pass should look for another one."""
        self._bucket.take(-1)
        self.count -= 1
        return self.on_order_changed()

    def on_progress(self, entry: Entry) -> bool:
        """Return whether the request's window has ended, so that a pass is due."""
        if entry.request.generated_tokens < entry.preemption.window_end:
            return False
        entry.preemption.window_end = entry.request.generated_tokens + self._order.window_tokens
        if self._windows:
            self._closed_windows[entry.request.id] = entry
        return self.on_order_changed()

    def on_order_changed(self) -> bool:
        """Note that ranks may have changed; return whether that matters in this mode."""
        self._requested = self._on_demand or bool(self._closed_windows)
        return self._requested

    def next_s(self, now_s: float) -> float:
        """Return when a requested pass may run; inf none is requested."""
        if self._closed_windows:
            return now_s
        if not (self._on_demand and self._requested):
            return math.inf
        return max(self._compared_s + POLL_INTERVAL_S, self._bucket.next_s(now_s))

    def run(self, now_s: float, queue: Queue, workers: Collection[Worker]) -> list[Entry]:
        """Preempt requests where due; return them."""
        preempted: list[Entry] = []
        if self._closed_windows:
            preempted = self._preempt_closed_windows(now_s, queue, workers)
        elif self._requested and now_s >= self._compared_s + POLL_INTERVAL_S:
            if not queue:
                self._requested = False
            elif (budget := self._bucket.available(now_s)) >= 1:
                self._requested, self._compared_s = False, now_s
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
        """Return whether class and tenant let the waiting request precede; an overdue one counts as the best class."""
        w, r = waiting.request.client, running.request.client
        if self._order.fairness == "none" or w.tenant == r.tenant or not (waiting.overdue or w.priority == r.priority):
            return waiting.overdue or w.priority <= r.priority
        return self._service.of(w.tenant) <= self._service.without(running)

    def _preempt_closed_windows(self, now_s: float, queue: Queue, workers: Collection[Worker]) -> list[Entry]:
        """Preempt the worst requests whose windows ended: one for each waiting request of their models."""
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
        """Return (key, request), the greatest key first; among equal keys the latest arrival."""
        keyed = zip(self.ranker.running_keys(now_s, running), running, strict=True)
        return sorted(keyed, key=lambda one: (one[0], one[1].request.arrival_s, one[1].request.id))[::-1]

    @staticmethod
    def _is_preemptible(entry: Entry) -> bool:
        preemptible = entry.request.preemptible and not entry.preemption.nonpreemptible
        return preemptible and entry.state is State.RUNNING and not entry.overdue
