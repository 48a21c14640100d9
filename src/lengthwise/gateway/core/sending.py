"""One pass over those who wait: who is sent where."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from lengthwise.gateway.config import Dispatch
from lengthwise.gateway.core.crew import Crew
from lengthwise.gateway.core.cutting import Cutting
from lengthwise.gateway.core.entry import Entry
from lengthwise.gateway.core.placing import Placing, Sessions
from lengthwise.gateway.core.queue import Queue
from lengthwise.gateway.core.service import Service
from lengthwise.gateway.core.worker import Worker

_LOOKAHEAD = 64
"""A pass looks past so many who find no place (each keeps the workers it could use for itself)."""


class Sending:
    """Sends those who wait, in order, to the workers that have room."""

    def __init__(self, queue: Queue, service: Service, crew: Crew, cutting: Cutting, affinity: float) -> None:
        self._queue, self._service, self._crew, self._cutting = queue, service, crew, cutting
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
        if worker is not None and worker in placing.usable(entry):
            return placing.choose(entry, only=at)
        return placing.choose(entry, together=self._batch_left[entry.batch])

    def _send(self, now_s: float, entry: Entry, worker: Worker) -> None:
        q = entry.request
        q.waited_s += now_s - q.queued_s
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
