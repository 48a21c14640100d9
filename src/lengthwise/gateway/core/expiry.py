"""Who has waited in vain: beyond its own deadline, or for an engine that does not come."""

from __future__ import annotations

import math
from collections.abc import Iterable

from lengthwise.gateway.core.admission import DEADLINE, no_engine
from lengthwise.gateway.core.alarms import Alarms
from lengthwise.gateway.core.bins import Bins
from lengthwise.gateway.core.crew import Crew
from lengthwise.gateway.core.entry import Entry, State
from lengthwise.gateway.core.queue import Queue
from lengthwise.gateway.request import Refusal

_LOOK_S = 0.1
"""Those who wait for an engine are looked through at most so often."""
_WAITS = (State.WAITING, State.GATHERING)


class Expiry:
    """Deadlines of clients, and patience with models that no worker serves."""

    def __init__(self, no_engine_s: float, crew: Crew) -> None:
        self._no_engine_s, self._crew = no_engine_s, crew
        self._deadlines = Alarms()
        self._look_s = math.inf

    def configure(self, no_engine_s: float) -> None:
        """Another patience, of those who wait already, too."""
        self._no_engine_s, self._look_s = no_engine_s, -math.inf

    def watch(self, entry: Entry) -> None:
        """It is about to wait; who has the beginning of its answer has no deadline any more."""
        q = entry.request
        self._deadlines.set(q.id, math.inf if q.generated_tokens and not q.whole else q.deadline_s)
        if not self._crew.serves(entry.request.model):
            self._look_s = -math.inf

    def forget(self, entry: Entry) -> None:
        """It is over."""
        self._deadlines.clear(entry.request.id)

    def workers_changed(self, now_s: float, queue: Queue, bins: Bins) -> None:
        """Models may have lost their last worker, or got one."""
        del now_s
        waits = len(queue) + len(bins) > 0
        self._look_s = -math.inf if waits else math.inf

    def next_s(self) -> float:
        """When the next may expire."""
        return min(self._deadlines.next_s(), self._look_s)

    def decide(
        self, now_s: float, entries: dict[int, Entry], queue: Queue, bins: Bins
    ) -> list[tuple[int, Refusal]]:
        """Those who expire now, and why; who is at a worker by its deadline is not among them."""
        late = [entries[one] for one in self._deadlines.rung(now_s)]
        expired = {entry.request.id: DEADLINE for entry in late if entry.state in _WAITS}
        if now_s >= self._look_s:
            self._look_s = math.inf
            served = all(self._crew.serves(model) for model in queue.waiting)
            for entry in (*(() if served else self._unserved(queue)), *self._unserved(bins)):
                at_s = self._patience_s(entry)
                if at_s <= now_s:
                    expired.setdefault(entry.request.id, no_engine(entry.request.model, self._no_engine_s))
                else:
                    self._look_s = min(self._look_s, max(at_s, now_s + _LOOK_S))
        return list(expired.items())

    def _unserved(self, waiting: Iterable[Entry]) -> list[Entry]:
        """Those whose model no worker serves."""
        return [entry for entry in waiting if not self._crew.serves(entry.request.model)]

    def _patience_s(self, entry: Entry) -> float:
        """Until when it waits for an engine."""
        return max(entry.request.queued_s, self._crew.gone_s(entry.request.model)) + self._no_engine_s
