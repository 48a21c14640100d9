"""Who waits: the same rank as the simulator's, under classes, fairness and a hard bound on waiting.

The order of those who wait: who has waited ``max_wait_s`` in all, by arrival; then priority classes; then,
where asked for, the tenant that was served least; then the rank's key; then arrival; then id.

The bound. Let w have waited ``max_wait_s`` (all its stays in the queue together) at time t. Every decision
from t on begins with ``promote``, so that w stands among the overdue, which ``Lanes.in_order`` runs through
before all others, by arrival. A request v that has not waited so long has its turn after w; and ``Placing``
gives no worker that w could use to anybody whose turn comes after w's while w waits. So from t on v is sent
nowhere where w could go: w is passed by nobody but requests that have waited ``max_wait_s`` themselves and
arrived before it. Of these finitely many are there, since all arrived before w; whoever has waited so long
is not cut (``Cutting``), so each is sent once, unless its worker fails or says that it is full. Each end of
a request at a worker of w's model makes room, which goes to the first of them. Hence w waits at most
``max_wait_s`` and the time in which these workers end as many requests as stand before w among the overdue,
plus those in flight above their caps. This holds over priority classes and tenants, whatever is predicted: a
class outside the bound could starve behind a better one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Container, Iterator

from lengthwise.gateway.core.alarms import Alarms
from lengthwise.gateway.core.entry import Entry, State
from lengthwise.gateway.core.lanes import Lanes
from lengthwise.gateway.core.ranker import Ranker
from lengthwise.gateway.core.service import Service
from lengthwise.gateway.request import Forecast

EPOCH_S = 0.1
"""Keys that change with time are taken again when they are older than this and somebody may be sent."""


class Queue:
    """Requests that wait, in order.

    Joining and leaving take O(log n) comparisons; keys that change with time are taken again all at once by
    one compiled loop, never inside a comparison.

    Attributes:
        bytes: Bodies of those who wait.
        waiting: How many wait, by model.
        tokens: Predicted output tokens still to come of them, by model.
    """

    def __init__(
        self, ranker: Ranker, service: Service, *, max_wait_s: float = math.inf, fair: bool = False
    ) -> None:
        self._ranker, self._service = ranker, service
        self._max_wait_s = max_wait_s
        self._lanes = Lanes(ranker, service, fair=fair)
        self._due = Alarms()
        self._entries: dict[int, Entry] = {}
        self._keyed_s = -math.inf
        self.bytes = 0
        self.waiting: defaultdict[str, int] = defaultdict(int)
        self.tokens: defaultdict[str, float] = defaultdict(float)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def add(self, now_s: float, entry: Entry, *, since_s: float | None = None) -> None:
        """It waits from now on; or has since it came into a bin."""
        q = entry.request
        q.queued_s = now_s if since_s is None else since_s
        entry.state, q.worker = State.WAITING, ""
        self._entries[q.id] = entry
        self._count(entry, 1)
        self._service.joins(entry)
        self._ranker.write(now_s, entry)
        self._file(now_s, entry)

    def remove(self, entry: Entry) -> None:
        """It waits no more: it is sent, or over."""
        self._lanes.remove(entry)
        self._due.clear(entry.request.id)
        del self._entries[entry.request.id]
        self._count(entry, -1)
        self._service.leaves(entry)

    def configure(self, now_s: float, *, max_wait_s: float, fair: bool) -> None:
        """Another bound and fairness; all who wait take the places that they have by these."""
        self._max_wait_s = max_wait_s
        self._due, self._lanes = Alarms(), Lanes(self._ranker, self._service, fair=fair)
        for entry in self:
            self._file(now_s, entry)

    def believe(self, now_s: float, entry: Entry, forecast: Forecast) -> None:
        """A new forecast of one who waits: it takes its new place."""
        self._lanes.remove(entry)
        self._count(entry, -1)
        entry.believe(forecast)
        self._count(entry, 1)
        self._ranker.write(now_s, entry)
        self._lanes.add(entry)

    def promote(self, now_s: float) -> None:
        """Who has waited too long by now goes before all who have not."""
        if self._due.next_s() > now_s:
            return
        for request_id in self._due.rung(now_s):
            entry = self._entries[request_id]
            self._lanes.remove(entry)
            entry.overdue = True
            self._lanes.add(entry)

    def due_s(self) -> float:
        """When the next will have waited too long."""
        return self._due.next_s()

    def refresh(self, now_s: float) -> None:
        """Takes keys that change with time again, at most once an epoch."""
        if self._ranker.rank.every_step and now_s - self._keyed_s >= EPOCH_S:
            self.rerank(now_s)

    def rerank(self, now_s: float) -> None:
        """Takes the keys of all who wait again and sorts them."""
        self._keyed_s = now_s
        self._lanes.rerank(now_s)

    def in_order(self, closed: Container[str] = ()) -> Iterator[Entry]:
        """Who waits, in order; see ``Lanes.in_order``."""
        return self._lanes.in_order(closed)

    def is_first(self, entry: Entry) -> bool:
        """Whether nobody of its model and class (and tenant, if fair) goes before it."""
        return self._lanes.is_first(entry)

    def position(self, entry: Entry) -> int:
        """How many go before it."""
        return self._lanes.position(entry)

    def oldest_wait_s(self, now_s: float) -> float:
        """The longest that one of them has waited in all; 0 where nobody waits."""
        waits = (one.request.waited_s + now_s - one.request.queued_s for one in self._entries.values())
        return max(waits, default=0.0)

    def total_tokens(self) -> float:
        """Predicted output tokens still to come of all who wait."""
        return sum(self.tokens.values())

    def _file(self, now_s: float, entry: Entry) -> None:
        """Its place, and when it will have waited too long; its key is noted."""
        q = entry.request
        due_s = q.queued_s + (self._max_wait_s - q.waited_s)
        entry.overdue = due_s <= now_s
        if not entry.overdue:
            self._due.set(q.id, due_s)
        self._lanes.add(entry)

    def _count(self, entry: Entry, one: int) -> None:
        model = entry.request.model
        self.bytes += one * entry.request.body_bytes
        self.waiting[model] += one
        self.tokens[model] += one * entry.remaining
        if self.waiting[model] == 0:
            del self.waiting[model], self.tokens[model]
