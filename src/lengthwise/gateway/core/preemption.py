"""Who is brought back from a worker: for a better one who waits, or because a window is over."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from heapq import heapify, heapreplace
from itertools import accumulate, islice

import numpy as np

from lengthwise.gateway.config import Order
from lengthwise.gateway.core.queue import Queue
from lengthwise.gateway.core.ranking import Entry, Ranker, Service, State
from lengthwise.gateway.core.worker import Worker
from lengthwise.policy.compile import interpreted
from lengthwise.policy.named_schedulers import resolve


def believed(entry: Entry) -> float:
    """Predicted tokens still to come, also of one that has made more of them than had been thought.

    Within a window ``remaining`` is counted down from what was predicted at its beginning, to 1 where that is passed:
    a stream that goes on beyond it is not about to end. From half of it on the distribution is asked again, once a
    prediction, for what is left of those that have come so far; where only a number is known, what is passed is to
    last half as long again (as beyond all quantiles of a distribution).
    """
    length_prediction, generated = entry.request.length_prediction, entry.request.generated_tokens
    if entry.remaining > (entry.predicted - length_prediction.at_tokens) / 2 or not generated:
        return entry.remaining
    most = float(max(1, entry.request.max_tokens - generated))
    if length_prediction.quantiles is None:
        late = max(1.0, generated / 2) if entry.remaining <= 1 else entry.remaining
        return min(late, most)
    if entry.late_tokens != entry.late_tokens:
        from lengthwise.predict import LEVELS, LengthDistribution

        posterior = LengthDistribution(np.asarray(length_prediction.quantiles)[None, :], LEVELS)
        entry.late_tokens = float(posterior.remaining(generated)[0])
    return min(max(entry.remaining, entry.late_tokens), most)


def places(active: Iterable[float]) -> list[float]:
    """When seats come free by themselves, in tokens from now, of those who are to make so many more.

    As of independent exponential times with these means, the shortest gone first: of four that are to make 100 more
    the first is done after 25, the second after 58.
    """
    rates = list(accumulate(1 / tokens for tokens in sorted(active, reverse=True)))
    return list(accumulate(1 / rate for rate in reversed(rates)))


def starts(free: list[float], waiting: Iterable[float]) -> float:
    """The sum of the starts of those who wait, each in its turn at the seat that is free first."""
    heapify(free)
    total = 0.0
    for tokens in waiting:
        total += free[0]
        heapreplace(free, free[0] + tokens)
    return total


def saved(active: Sequence[float], stopping: float, waiting: Sequence[tuple[float, float]], key: float) -> float:
    """Tokens that those who wait start sooner by, less those that the one that leaves waits for its seat.

    Args:
        active: What the others that run have still to make.
        stopping: The same of the one that would leave.
        waiting: Keys, and what each is to make, in order.
        key: Of the one that would leave: it goes behind those whose keys are no greater.
    """
    lengths = [tokens for _, tokens in waiting]
    at = bisect_right([one for one, _ in waiting], key)
    before = starts(places([*active, stopping]), lengths)
    return before - starts([0.0, *places(active)], [*lengths[:at], stopping, *lengths[at:]])


LOOKAHEAD = 64
"""Of those who wait so many are looked at."""
_DOUBT = 3.0
"""What all who wait gain must be so many times the cost: it rests on a guess of each, and the best of many guesses
is a lucky one."""
Gain = Callable[..., float]


class PreemptionPass:
    """One pass over those who wait: each has a place coming, or takes somebody's, or goes on waiting.

    Who goes on waiting claims every worker that it could use, as in ``Placing``: a place that came free there would
    be its own, so none is made there for those whose turn comes later. Others, of another model perhaps, are looked
    at all the same.

    Args:
        now_s: The time.
        queue: Who waits.
        workers: Where they may go.
        ranked: Who may be cut, worst first, with their keys.
        ranker: Knows the keys of those who wait.
        gain: The takeover policy.
        before: Whether a waiting request's class and tenant let it take a running one's place.
    """

    def __init__(
        self,
        now_s: float,
        queue: Queue,
        workers: Collection[Worker],
        ranked: list[tuple[float, Entry]],
        ranker: Ranker,
        gain: Gain,
        before: Callable[[Entry, Entry], bool],
    ) -> None:
        self._now_s, self._queue, self._ranked = now_s, queue, ranked
        self._key, self._gain, self._before = ranker.columns.key, gain, before
        self._up = [worker for worker in workers if worker.state.up]
        self._open = {worker.name: worker for worker in self._up}
        self._coming = {worker.name: worker.cutting for worker in self._up if worker.cutting}
        self._placed: dict[int, tuple[Entry, Worker]] = {}

    def takes(self, budget: int, mark: Callable[[Entry, Worker], None]) -> list[Entry]:
        """Whom to bring back, at most so many; each is marked at once."""
        cut: list[Entry] = []
        for waiting in islice(self._queue.in_order(self), LOOKAHEAD + sum(self._coming.values())):
            usable = self._available(waiting)
            if self._has_place(waiting, usable):
                continue
            if len(cut) >= budget:
                break
            found = self._victim(waiting, usable)
            if found is None:
                for worker in usable:
                    self._open.pop(worker.name, None)
                continue
            running, worker = found
            mark(running, worker)
            self._placed[waiting.request.id] = waiting, worker
            cut.append(running)
        return cut

    def __contains__(self, model: object) -> bool:
        """Whether nobody of this model could take a place any more: the queue asks for it."""
        return not any(model in worker.state.models for worker in self._open.values())

    def _available(self, entry: Entry) -> list[Worker]:
        """Those that it may be sent to, as ``Placing`` has them."""
        q = entry.request
        serving = [worker for worker in self._up if q.model in worker.state.models]
        if entry.overdue or not q.avoid:
            return serving
        return [worker for worker in serving if worker.name not in q.avoid] or serving

    def _has_place(self, waiting: Entry, available: list[Worker]) -> bool:
        """Whether the place of one who is being cut already is its own."""
        for worker in available:
            if self._coming.get(worker.name) and worker.name in self._open:
                self._coming[worker.name] -= 1
                self._placed[waiting.request.id] = waiting, worker
                return True
        return False

    def _victim(self, waiting: Entry, available: list[Worker]) -> tuple[Entry, Worker] | None:
        """The worst of those whose place the waiting one could take, where that is worth it."""
        home = {worker.name: worker for worker in available if worker.name in self._open}
        for at, (key, running) in enumerate(self._ranked):
            worker = home.get(running.worker)
            if worker is None or not worker.room_without(waiting, running):
                continue
            if waiting.overdue or self._before(waiting, running):
                if not self._is_improvement(waiting, key, running, worker):
                    return None
                del self._ranked[at]
                return running, worker
        return None

    def _is_improvement(self, waiting: Entry, key: float, running: Entry, worker: Worker) -> bool:
        mine = -math.inf if waiting.overdue else self._key(waiting)
        if not mine < key:
            return False
        q, num_running = running.request, len(worker.active)
        queued = self._queue.waiting.get(waiting.request.model, 0)
        recompute = worker.price.recompute_steps(q.prompt_tokens + q.generated_tokens, num_running)
        gain: float = self._gain(
            mine,
            key,
            waiting.remaining,
            running.remaining,
            q.generated_tokens,
            recompute,
            num_running,
            queued,
            waiting.request.queued_for_s + self._now_s - waiting.request.queued_s,
            q.preemptions,
        )
        if not gain > 0 or waiting.overdue:
            return gain > 0
        return self._saved(waiting.request.model, running, key) > recompute * (num_running + queued)

    def _saved(self, model: str, running: Entry, key: float) -> float:
        """What the first who waits for the model saves, or all of them, of which there is more doubt."""
        serving = [worker for worker in self._up if model in worker.state.models]
        there = [believed(one) for worker in serving for one in self._running(worker) if one is not running]
        waiting = [
            (-math.inf if one.overdue else self._key(one), believed(one))
            for one in islice(self._queue.in_order(_Others(model)), LOOKAHEAD + len(self._placed))
            if one.request.id not in self._placed
        ]
        away = [one for worker in serving for one in worker.active.values() if one.state is State.CUT]
        waiting += [(self._key(one), believed(one)) for one in away]
        waiting.sort(key=lambda one: one[0])
        leaving = believed(running)
        first = saved(there, leaving, waiting[:1], key)
        return max(first, saved(there, leaving, waiting, key) / _DOUBT)

    def _running(self, worker: Worker) -> list[Entry]:
        """Who is there, as it will be when those who are being cut are gone."""
        there = [one for one in worker.active.values() if one.state is not State.CUT]
        return there + [entry for entry, at in self._placed.values() if at is worker]


class _Others:
    """All models but one."""

    def __init__(self, model: str) -> None:
        self._model = model

    def __contains__(self, model: object) -> bool:
        return model != self._model


POLL_INTERVAL_S = 0.02
"""Running and waiting requests are compared at most so often."""


class Bucket:
    """At most ``rate`` cuts a second in the long run, and one second's worth at once."""

    def __init__(self, rate: float) -> None:
        self._rate, self._most = rate, max(1.0, rate) if rate > 0 else 0.0
        self._tokens, self._at_s = self._most, math.nan

    def active(self, now_s: float) -> int:
        """How many cuts may be made now."""
        passed_s = max(0.0, now_s - self._at_s) if self._at_s == self._at_s else 0.0
        if passed_s and math.isfinite(self._rate):
            self._tokens = min(self._most, self._tokens + passed_s * self._rate)
        self._at_s = now_s
        return LOOKAHEAD if math.isinf(self._tokens) else int(self._tokens + 1e-9)

    def configure(self, now_s: float, rate: float) -> None:
        """Another rate from now on; what is left of the old one stays: a change makes no storm."""
        self.active(now_s)
        self._rate, self._most = rate, max(1.0, rate) if rate > 0 else 0.0
        self._tokens = min(self._tokens, self._most)

    def take(self, cuts: int) -> None:
        """So many were made."""
        self._tokens -= cuts

    def release(self) -> None:
        """One was asked for that cannot be made."""
        self._tokens = min(self._most, self._tokens + 1)

    def next_s(self, now_s: float) -> float:
        """When one may be made."""
        if self.active(now_s) >= 1:
            return now_s
        return now_s + (1 - self._tokens) / self._rate if self._rate > 0 else math.inf


class Cutting:
    """Decides cuts; whoever may not be cut: the answer would change, it was cut too often, or waited too long.

    A cut must pay for itself: what the first who waits starts sooner by (or a third of what all who wait do), against
    the places that come free by themselves, less the way back of who leaves (``prospect.saved``), is more than
    bringing it back takes from all (``Price``), and the takeover agrees. For one that has waited too long the
    takeover alone is asked.

    A cut one that is sent again is left alone for a window, and only strictly better keys cut: requests
    with equal keys never take turns. One that turns out to be impossible to cut where it is (``dropped``) is
    asked no more until it is sent again, and holds up no other cut.
    """

    def __init__(self, order: Order, ranker: Ranker, service: Service) -> None:
        self._order, self._ranker, self._service = order, ranker, service
        self._gain = interpreted(resolve("takeover", order.takeover))
        self._on_demand, self._windows = order.mode == "isrtf", order.mode == "windowed"
        self._bucket = Bucket(order.cuts_per_s)
        self._over: dict[int, Entry] = {}
        self._wanted = False
        self._looked_s = -math.inf
        self.cuts = 0

    def configure(self, now_s: float, order: Order) -> None:
        """Another order of the same mode."""
        self._bucket.configure(now_s, order.cuts_per_s)
        self._order = order
        self._gain = interpreted(resolve("takeover", order.takeover))
        self.want()

    def sent(self, now_s: float, entry: Entry) -> None:
        """A new window begins."""
        if self._on_demand or self._windows:
            self._ranker.write(now_s, entry)
        generated = entry.request.generated_tokens
        entry.boundary = generated + self._order.window_tokens
        entry.stable = entry.boundary if entry.admissions > 1 else 0
        entry.retained = False

    def dropped(self) -> bool:
        """A cut was asked for in vain: it counts as none; returns whether there is another one to look for."""
        self._bucket.release()
        self.cuts -= 1
        return self.want()

    def progressed(self, entry: Entry) -> bool:
        """Whether a window is over, so that there is something to decide."""
        if entry.request.generated_tokens < entry.boundary:
            return False
        entry.boundary = entry.request.generated_tokens + self._order.window_tokens
        if self._windows:
            self._over[entry.request.id] = entry
        return self.want()

    def want(self) -> bool:
        """Somebody may have become better or worse than another; returns whether that matters."""
        self._wanted = self._on_demand or bool(self._over)
        return self._wanted

    def next_s(self, now_s: float) -> float:
        """When a wanted look may be made; inf where none is wanted."""
        if self._over:
            return now_s
        if not (self._on_demand and self._wanted):
            return math.inf
        return max(self._looked_s + POLL_INTERVAL_S, self._bucket.next_s(now_s))

    def decide(self, now_s: float, queue: Queue, workers: Collection[Worker]) -> list[Entry]:
        """Whom to bring back now; they are marked as being cut."""
        if self._over:
            return self._ended_windows(now_s, queue, workers)
        if not self._wanted or now_s < self._looked_s + POLL_INTERVAL_S:
            return []
        if not queue:
            self._wanted = False
            return []
        budget = self._bucket.active(now_s)
        if budget < 1:
            return []
        self._wanted, self._looked_s = False, now_s
        cut = self._taken_over(now_s, queue, workers, budget)
        self._bucket.take(len(cut))
        return cut

    # -- on demand -------------------------------------------------------------------------

    def _taken_over(self, now_s: float, queue: Queue, workers: Collection[Worker], budget: int) -> list[Entry]:
        running = [one for worker in workers for one in worker.active.values() if self._may_be_cut(one)]
        if not running:
            return []
        queue.refresh(now_s)
        ranked = self._worst_first(now_s, running)
        look = PreemptionPass(now_s, queue, workers, ranked, self._ranker, self._gain, self._goes_before)
        return look.takes(budget, partial(self._mark, now_s))

    def _goes_before(self, waiting: Entry, running: Entry) -> bool:
        """Whether the running one is of no better class or tenant."""
        w, r = waiting.request, running.request
        if w.priority != r.priority or self._order.fairness == "none" or w.tenant == r.tenant:
            return w.priority <= r.priority
        return self._service.of(w.tenant) <= self._service.of(r.tenant)

    # -- windows ---------------------------------------------------------------------------

    def _ended_windows(self, now_s: float, queue: Queue, workers: Collection[Worker]) -> list[Entry]:
        over, self._over, self._wanted = self._over, {}, False
        left = dict(queue.waiting)
        for worker in workers:
            for _ in range(worker.cutting):
                _one_less(left, worker.state.models)
        place = {
            one.request.id: worker
            for worker in workers
            for one in worker.active.values()
            if worker.state.up and one.request.id in over and self._may_leave(one)
        }
        cut: list[Entry] = []
        if place and left:
            for _, one in self._worst_first(now_s, [over[id_] for id_ in place]):
                worker = place[one.request.id]
                if _one_less(left, worker.state.models):
                    self._mark(now_s, one, worker)
                    cut.append(one)
        return cut

    # -- who -------------------------------------------------------------------------------

    def _worst_first(self, now_s: float, running: list[Entry]) -> list[tuple[float, Entry]]:
        """With their keys; of equal ones the latest arrival."""
        keyed = zip(self._ranker.keys_there(now_s, running), running, strict=True)
        return sorted(keyed, key=lambda one: (one[0], one[1].request.arrival_s, one[1].request.id))[::-1]

    def _may_leave(self, entry: Entry) -> bool:
        q = entry.request
        return entry.state is State.RUNNING and q.resumable and not entry.retained and not entry.overdue

    def _may_be_cut(self, entry: Entry) -> bool:
        q = entry.request
        fresh = q.generated_tokens >= entry.stable
        return self._may_leave(entry) and fresh and q.preemptions < self._order.max_preemptions

    def _mark(self, now_s: float, entry: Entry, worker: Worker) -> None:
        worker.cut(now_s, entry)
        self.cuts += 1


def _one_less(waiting: dict[str, int], models: Iterable[str]) -> bool:
    """Takes one of those who wait for one of the models; False: there is none."""
    for model in models:
        if waiting.get(model, 0) > 0:
            waiting[model] -= 1
            return True
    return False
