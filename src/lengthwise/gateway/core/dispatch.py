"""One pass over those who wait: who is sent where."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping

from lengthwise.gateway.config import Dispatch
from lengthwise.gateway.core.preemption import Cutting
from lengthwise.gateway.core.queue import Queue
from lengthwise.gateway.core.ranking import Entry, Service
from lengthwise.gateway.core.worker import Worker
from lengthwise.gateway.core.worker_pool import Crew

_SESSIONS = 1 << 16


class Sessions:
    """Where sessions were last served; the longest unused are forgotten."""

    def __init__(self, most: int = _SESSIONS) -> None:
        self._most = most
        self._worker: OrderedDict[tuple[int, str], str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._worker)

    def of(self, entry: Entry) -> str:
        """The worker that may hold its prefix; "" none."""
        return entry.worker or self._worker.get((entry.request.tenant, entry.request.session), "")

    def sent(self, entry: Entry, worker: str) -> None:
        """It is served there."""
        session = (entry.request.tenant, entry.request.session)
        if entry.request.session:
            self._worker[session] = worker
            self._worker.move_to_end(session)
            if len(self._worker) > self._most:
                self._worker.popitem(last=False)

    def renamed(self, before: str, now: str) -> None:
        """Their worker is called otherwise."""
        for session, worker in self._worker.items():
            if worker == before:
                self._worker[session] = now


class Placing:
    """One pass over those who wait: a place for each whose turn comes.

    Who finds none claims every worker that it could use: nobody whose turn comes later gets one of these.
    A worker that failed a request is not taken for it again while another one that serves its model is up,
    nor looked at for one that has waited too long: such a one takes whichever has room.
    """

    def __init__(
        self, up: list[Worker], sessions: Sessions, affinity: float, now_s: float, waiting: Mapping[str, int]
    ) -> None:
        self._up = up
        self._waiting = dict(waiting)
        self._room = {worker.name: room for worker in up if (room := worker.room(now_s)) > 0}
        self.open = [worker for worker in up if worker.name in self._room] if self._room else []
        self._sessions, self._affinity = sessions, affinity
        self._serving: dict[str, list[Worker]] = {}
        self._usual_speed = 0.0
        self.closed = _Closed(self)

    def speed(self, worker: Worker) -> float:
        """Its output tokens a second; the others' mean where it has shown none."""
        if worker.speed.tokens_per_s:
            return worker.speed.tokens_per_s
        if not self._usual_speed:
            known = [one.speed.tokens_per_s for one in self._up if one.speed.tokens_per_s]
            self._usual_speed = sum(known) / len(known) if known else 1.0
        return self._usual_speed

    def __bool__(self) -> bool:
        return bool(self.open)

    def available(self, entry: Entry) -> list[Worker]:
        """Those that it may be sent to, with room or without."""
        q = entry.request
        serving = self._serving.get(q.model)
        if serving is None:
            serving = [worker for worker in self._up if q.model in worker.state.models]
            self._serving[q.model] = serving
        if entry.overdue or not q.avoid:
            return serving
        return [worker for worker in serving if worker.name not in q.avoid] or serving

    def choose(self, entry: Entry, *, only: str = "", together: int = 1) -> Worker | None:
        """The worker with the least backlog in token-seconds with it, less what its cache saves of the prompt.

        Args:
            entry: Who is to be sent.
            only: The one worker that may be chosen; "" any.
            together: Requests that should find room there at once.
        """
        usable = self.available(entry)
        fitting = [worker for worker in usable if self._takes(worker, entry, only, together)]
        if not fitting:
            self._claim(usable)
            return None
        if len(fitting) == 1:
            return fitting[0]
        best = min(fitting, key=lambda one: (self._done_s(one, entry), len(one.active), one.name))
        return self._nearest(entry, fitting, best)

    def placed(self, worker: Worker, entry: Entry) -> None:
        """It is there."""
        self._waiting[entry.request.model] -= 1
        self._room[worker.name] -= 1
        if self._room[worker.name] == 0:
            self._claim([worker])

    def _nearest(self, entry: Entry, fitting: list[Worker], best: Worker) -> Worker:
        """The one whose cache saves more than its longer backlog takes; the one with the least where none does."""
        own = self._sessions.of(entry)
        if not self._affinity or not (own or entry.request.prefix.keys):
            return best
        near, least = best, (self._done_s(best, entry) - self._saved_s(best, entry, own), -1, "")
        for one in fitting:
            saved_s = self._saved_s(one, entry, own)
            if saved_s > 0:
                cost = (self._done_s(one, entry) - saved_s, len(one.active), one.name)
                near, least = (one, cost) if cost < least else (near, least)
        return near

    def _saved_s(self, worker: Worker, entry: Entry, own: str) -> float:
        """Seconds of the prompt that it need not compute: what its cache has, or the session's (or its own) share."""
        q = entry.request
        tokens = q.prompt_tokens if worker.name == own else worker.cached.tokens(q.prefix)
        return self._affinity * tokens * worker.prefill_s(self.speed(worker)) if tokens else 0.0

    def _takes(self, worker: Worker, entry: Entry, only: str, together: int) -> bool:
        room = self._room.get(worker.name, 0)
        if room == 0 or (only and worker.name != only):
            return False
        if not worker.fits(entry) or (room < together and worker.active):
            return False
        return worker.phasing is None or worker.admits(entry, self._waits_for(worker))

    def _waits_for(self, worker: Worker) -> int:
        """How many wait whom it could serve."""
        return sum(self._waiting.get(model, 0) for model in worker.state.models)

    def _done_s(self, worker: Worker, entry: Entry) -> float:
        """Token-seconds of its backlog, with the request."""
        return worker.drain_s(self.speed(worker), entry.work)

    def _claim(self, workers: Iterable[Worker]) -> None:
        for worker in workers:
            self._room.pop(worker.name, None)
        self.open = [worker for worker in self.open if worker.name in self._room]


class _Closed:
    """The models whose requests find no place in this pass any more: all but those of open workers."""

    def __init__(self, placing: Placing) -> None:
        self._placing = placing

    def __contains__(self, model: object) -> bool:
        return not any(model in worker.state.models for worker in self._placing.open)


_LOOKAHEAD = 64
"""A pass looks past so many who find no place (each keeps the workers it could use for itself)."""


class Sending:
    """Sends those who wait, in order, to the workers that have room."""

    def __init__(self, queue: Queue, service: Service, worker_pool: Crew, cutting: Cutting, affinity: float) -> None:
        self._queue, self._service, self._crew, self._cutting = queue, service, worker_pool, cutting
        self._affinity = affinity
        self._sessions = Sessions()
        self._batch_left: dict[int, int] = {}
        self._batch_at: dict[int, str] = {}

    def configure(self, dispatch: Dispatch) -> None:
        """Other caps, another worth of a session's own engine."""
        self._affinity = dispatch.affinity
        self._crew.configure(dispatch)

    def renamed(self, names: Iterable[tuple[str, str]], entries: Collection[Entry]) -> None:
        """(before, now): what is remembered of a worker stays with it, and is not its successor's."""
        for before, now in names:
            self._sessions.renamed(before, now)
            for batch, worker in self._batch_at.items():
                self._batch_at[batch] = now if worker == before else worker
            for entry in entries:
                entry.renamed(before, now)

    def batched(self, batch: list[Entry]) -> None:
        """These leave their bins; those of one bin should go to one worker."""
        for entry in batch:
            self._batch_left[entry.batch] = self._batch_left.get(entry.batch, 0) + 1

    def over(self, entry: Entry) -> None:
        """One of a batch that will not be sent any more."""
        if entry.batch and entry.admissions == 0:
            self._out_of_batch(entry)

    def decide(self, now_s: float) -> list[tuple[int, str]]:
        """(request, worker) in the order of the queue; they count as sent."""
        if not self._queue:
            return []
        placing = Placing(self._crew.up, self._sessions, self._affinity, now_s, self._queue.waiting)
        if not placing:
            return []
        self._queue.refresh(now_s)
        sent = self._pass(now_s, placing)
        for entry in sent:
            self._queue.remove(entry)
            self._cutting.sent(now_s, entry)
        return [(entry.request.id, entry.worker) for entry in sent]

    def _pass(self, now_s: float, placing: Placing) -> list[Entry]:
        sent, blocked = [], 0
        for entry in self._queue.in_order(placing.closed):
            worker = self._choose(placing, entry)
            if worker is None:
                blocked += 1
            else:
                self._send(now_s, entry, worker)
                placing.placed(worker, entry)
                sent.append(entry)
            if not placing or blocked >= _LOOKAHEAD:
                break
        return sent

    def _choose(self, placing: Placing, entry: Entry) -> Worker | None:
        if not entry.batch or entry.admissions or entry.overdue:
            return placing.choose(entry)
        at = self._batch_at.get(entry.batch, "")
        worker = self._crew.named(at) if at else None
        if worker is not None and worker in placing.available(entry):
            return placing.choose(entry, only=at)
        return placing.choose(entry, together=self._batch_left[entry.batch])

    def _send(self, now_s: float, entry: Entry, worker: Worker) -> None:
        q = entry.request
        q.queued_for_s += now_s - q.queued_s
        q.dispatched_s = now_s
        self._service.charge(entry)
        if entry.batch and entry.admissions == 0:
            self._batch_at[entry.batch] = worker.name
            self._out_of_batch(entry)
        entry.admissions += 1
        worker.put(entry)
        self._sessions.sent(entry, worker.name)

    def _out_of_batch(self, entry: Entry) -> None:
        """Its batch has one fewer to come; forgotten with the last."""
        self._batch_left[entry.batch] -= 1
        if self._batch_left[entry.batch] == 0:
            del self._batch_left[entry.batch]
            self._batch_at.pop(entry.batch, None)
