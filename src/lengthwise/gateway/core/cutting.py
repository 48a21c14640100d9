"""Who is brought back from a worker: for a better one who waits, or because a window is over."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from functools import partial

from lengthwise.gateway.config import Order
from lengthwise.gateway.core.entry import Entry, State
from lengthwise.gateway.core.look import LOOKAHEAD, Look
from lengthwise.gateway.core.queue import Queue
from lengthwise.gateway.core.ranker import Ranker
from lengthwise.gateway.core.service import Service
from lengthwise.gateway.core.worker import Worker
from lengthwise.policy.compile import interpreted
from lengthwise.policy.named import resolve

LOOK_S = 0.02
"""Running and waiting requests are compared at most so often."""


class Bucket:
    """At most ``rate`` cuts a second in the long run, and one second's worth at once."""

    def __init__(self, rate: float) -> None:
        self._rate, self._most = rate, max(1.0, rate) if rate > 0 else 0.0
        self._tokens, self._at_s = self._most, math.nan

    def there(self, now_s: float) -> int:
        """How many cuts may be made now."""
        passed_s = max(0.0, now_s - self._at_s) if self._at_s == self._at_s else 0.0
        if passed_s and math.isfinite(self._rate):
            self._tokens = min(self._most, self._tokens + passed_s * self._rate)
        self._at_s = now_s
        return LOOKAHEAD if math.isinf(self._tokens) else int(self._tokens + 1e-9)

    def configure(self, now_s: float, rate: float) -> None:
        """Another rate from now on; what is left of the old one stays: a change makes no storm."""
        self.there(now_s)
        self._rate, self._most = rate, max(1.0, rate) if rate > 0 else 0.0
        self._tokens = min(self._tokens, self._most)

    def take(self, cuts: int) -> None:
        """So many were made."""
        self._tokens -= cuts

    def give_back(self) -> None:
        """One was asked for that cannot be made."""
        self._tokens = min(self._most, self._tokens + 1)

    def next_s(self, now_s: float) -> float:
        """When one may be made."""
        if self.there(now_s) >= 1:
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
        entry.settled = entry.boundary if entry.admissions > 1 else 0
        entry.kept = False

    def dropped(self) -> bool:
        """A cut was asked for in vain: it counts as none; returns whether there is another one to look for."""
        self._bucket.give_back()
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
        return max(self._looked_s + LOOK_S, self._bucket.next_s(now_s))

    def decide(self, now_s: float, queue: Queue, workers: Collection[Worker]) -> list[Entry]:
        """Whom to bring back now; they are marked as being cut."""
        if self._over:
            return self._ended_windows(now_s, queue, workers)
        if not self._wanted or now_s < self._looked_s + LOOK_S:
            return []
        if not queue:
            self._wanted = False
            return []
        budget = self._bucket.there(now_s)
        if budget < 1:
            return []
        self._wanted, self._looked_s = False, now_s
        cut = self._taken_over(now_s, queue, workers, budget)
        self._bucket.take(len(cut))
        return cut

    # -- on demand -------------------------------------------------------------------------

    def _taken_over(
        self, now_s: float, queue: Queue, workers: Collection[Worker], budget: int
    ) -> list[Entry]:
        running = [one for worker in workers for one in worker.there.values() if self._may_be_cut(one)]
        if not running:
            return []
        queue.refresh(now_s)
        ranked = self._worst_first(now_s, running)
        look = Look(now_s, queue, workers, ranked, self._ranker, self._gain, self._goes_before)
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
            for one in worker.there.values()
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
        return entry.state is State.RUNNING and q.resumable and not entry.kept and not entry.overdue

    def _may_be_cut(self, entry: Entry) -> bool:
        q = entry.request
        fresh = q.generated_tokens >= entry.settled
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
