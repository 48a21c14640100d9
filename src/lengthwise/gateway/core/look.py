"""One look at who waits and who runs: whose place is taken for whom."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from itertools import islice

from lengthwise.gateway.core.entry import Entry, State
from lengthwise.gateway.core.prospect import believed, saved
from lengthwise.gateway.core.queue import Queue
from lengthwise.gateway.core.ranker import Ranker
from lengthwise.gateway.core.worker import Worker

LOOKAHEAD = 64
"""Of those who wait so many are looked at."""
_DOUBT = 3.0
"""What all who wait gain must be so many times the cost: it rests on a guess of each, and the best of many guesses
is a lucky one."""
Gain = Callable[..., float]


class Look:
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
            usable = self._usable(waiting)
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

    def _usable(self, entry: Entry) -> list[Worker]:
        """Those that it may be sent to, as ``Placing`` has them."""
        q = entry.request
        serving = [worker for worker in self._up if q.model in worker.state.models]
        if entry.overdue or not q.avoid:
            return serving
        return [worker for worker in serving if worker.name not in q.avoid] or serving

    def _has_place(self, waiting: Entry, usable: list[Worker]) -> bool:
        """Whether the place of one who is being cut already is its own."""
        for worker in usable:
            if self._coming.get(worker.name) and worker.name in self._open:
                self._coming[worker.name] -= 1
                self._placed[waiting.request.id] = waiting, worker
                return True
        return False

    def _victim(self, waiting: Entry, usable: list[Worker]) -> tuple[Entry, Worker] | None:
        """The worst of those whose place the waiting one could take, where that is worth it."""
        home = {worker.name: worker for worker in usable if worker.name in self._open}
        for at, (key, running) in enumerate(self._ranked):
            worker = home.get(running.worker)
            if worker is None or not worker.room_without(waiting, running):
                continue
            if waiting.overdue or self._before(waiting, running):
                if not self._worth(waiting, key, running, worker):
                    return None
                del self._ranked[at]
                return running, worker
        return None

    def _worth(self, waiting: Entry, key: float, running: Entry, worker: Worker) -> bool:
        mine = -math.inf if waiting.overdue else self._key(waiting)
        if not mine < key:
            return False
        q, resident = running.request, len(worker.there)
        queued = self._queue.waiting.get(waiting.request.model, 0)
        recompute = worker.price.recompute_steps(q.prompt_tokens + q.generated_tokens, resident)
        gain: float = self._gain(
            mine,
            key,
            waiting.remaining,
            running.remaining,
            q.generated_tokens,
            recompute,
            resident,
            queued,
            waiting.request.waited_s + self._now_s - waiting.request.queued_s,
            q.preemptions,
        )
        if not gain > 0 or waiting.overdue:
            return gain > 0
        return self._saved(waiting.request.model, running, key) > recompute * (resident + queued)

    def _saved(self, model: str, running: Entry, key: float) -> float:
        """What the first who waits for the model saves, or all of them, of which there is more doubt."""
        serving = [worker for worker in self._up if model in worker.state.models]
        there = [believed(one) for worker in serving for one in self._running(worker) if one is not running]
        waiting = [
            (-math.inf if one.overdue else self._key(one), believed(one))
            for one in islice(self._queue.in_order(_Others(model)), LOOKAHEAD + len(self._placed))
            if one.request.id not in self._placed
        ]
        away = [one for worker in serving for one in worker.there.values() if one.state is State.CUT]
        waiting += [(self._key(one), believed(one)) for one in away]
        waiting.sort(key=lambda one: one[0])
        leaving = believed(running)
        first = saved(there, leaving, waiting[:1], key)
        return max(first, saved(there, leaving, waiting, key) / _DOUBT)

    def _running(self, worker: Worker) -> list[Entry]:
        """Who is there, as it will be when those who are being cut are gone."""
        there = [one for one in worker.there.values() if one.state is not State.CUT]
        return there + [entry for entry, at in self._placed.values() if at is worker]


class _Others:
    """All models but one."""

    def __init__(self, model: str) -> None:
        self._model = model

    def __contains__(self, model: object) -> bool:
        return model != self._model
