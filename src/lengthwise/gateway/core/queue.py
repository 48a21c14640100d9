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

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Container, Iterator
from operator import itemgetter

import numpy as np

from lengthwise.gateway.core.ranking import Entry, Ranker, Service, State
from lengthwise.gateway.request import LengthPrediction

Filed = tuple[float, float, int, int]
"""Key, arrival, id, and the row of the columns."""
_ROW = itemgetter(3)
Place = tuple[str, int, int]
"""A lane holds those of one model, priority class and, where fairness is asked for, tenant."""
Head = tuple[int, float, float, float, int, int, Place]


class Lanes:
    """An order in which one is found, added or removed by O(log n) comparisons."""

    def __init__(self, ranker: Ranker, service: Service, *, fair: bool) -> None:
        self._ranker, self._service, self._fair = ranker, service, fair
        self._lanes: dict[Place, list[Filed]] = {}
        self._overdue: list[tuple[float, int, Entry]] = []

    def add(self, entry: Entry) -> None:
        """Files it by its key."""
        q = entry.request
        if entry.overdue:
            insort(self._overdue, (q.arrival_s, q.id, entry))
            return
        filed = (self._ranker.columns.key(entry), q.arrival_s, q.id, entry.slot)
        insort(self._lanes.setdefault(self._place(entry), []), filed)

    def remove(self, entry: Entry) -> None:
        """Takes it out; call it before its key is noted anew."""
        q = entry.request
        if entry.overdue:
            del self._overdue[bisect_left(self._overdue, (q.arrival_s, q.id))]
            return
        place = self._place(entry)
        lane = self._lanes[place]
        del lane[bisect_left(lane, (self._ranker.columns.key(entry), q.arrival_s, q.id))]
        if not lane:
            del self._lanes[place]

    def rerank(self, now_s: float) -> None:
        """Takes all keys again and sorts every lane by them."""
        for place, lane in self._lanes.items():
            rows = np.fromiter(map(_ROW, lane), np.int64, len(lane))
            keys = self._ranker.keys(now_s, rows, waiting=True)
            self._lanes[place] = self._ranker.columns.ordered(rows, keys)

    def is_first(self, entry: Entry) -> bool:
        """Whether nobody of its lane goes before it."""
        return entry.overdue or self._lanes[self._place(entry)][0][3] == entry.slot

    def in_order(self, closed: Container[str]) -> Iterator[Entry]:
        """All in order, without those whose model is in ``closed`` by the time of their turn.

        Meanwhile nobody may be added or removed; what tenants were served may grow.
        """
        for _, _, entry in self._overdue:
            if entry.request.model not in closed:
                yield entry
        heads = [self._head(place, 0) for place in self._lanes if place[0] not in closed]
        heapq.heapify(heads)
        while heads:
            *_, at, place = heads[0]
            lane = self._lanes[place]
            if place[0] in closed:
                heapq.heappop(heads)
            elif self._fair and self._service.of(place[2]) != heads[0][1]:
                heapq.heapreplace(heads, self._head(place, at))
            else:
                yield self._entry(lane[at])
                if at + 1 < len(lane):
                    heapq.heapreplace(heads, self._head(place, at + 1))
                else:
                    heapq.heappop(heads)

    def position(self, entry: Entry) -> int:
        """How many go before it."""
        q = entry.request
        if entry.overdue:
            return bisect_left(self._overdue, (q.arrival_s, q.id))
        place = self._place(entry)
        mine, filed = self._band(place), (self._ranker.columns.key(entry), q.arrival_s, q.id)
        before = len(self._overdue)
        for other, lane in self._lanes.items():
            if self._band(other) < mine:
                before += len(lane)
            elif self._band(other) == mine:
                before += bisect_left(lane, filed)
        return before

    def _entry(self, filed: Filed) -> Entry:
        entry = self._ranker.columns.entries[filed[3]]
        assert entry is not None, "who is filed is live"
        return entry

    def _place(self, entry: Entry) -> Place:
        q = entry.request
        return q.model, q.priority, q.tenant if self._fair else 0

    def _band(self, place: Place) -> tuple[int, float]:
        return place[1], self._service.of(place[2]) if self._fair else 0.0

    def _head(self, place: Place, at: int) -> Head:
        key, arrival_s, request_id, _ = self._lanes[place][at]
        return *self._band(place), key, arrival_s, request_id, at, place


class Alarms:
    """One time a request; setting, clearing and asking for the next take O(log n), memory is O(set)."""

    def __init__(self) -> None:
        self._at: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._at)

    def set(self, request_id: int, at_s: float) -> None:
        """Rings at this time; inf never."""
        if at_s == float("inf"):
            self._at.pop(request_id, None)
            return
        self._at[request_id] = at_s
        heapq.heappush(self._heap, (at_s, request_id))
        if len(self._heap) > 2 * len(self._at) + 64:
            self._heap = [(at, one) for one, at in self._at.items()]
            heapq.heapify(self._heap)

    def clear(self, request_id: int) -> None:
        """Does not ring."""
        self._at.pop(request_id, None)

    def next_s(self) -> float:
        """When the first rings; inf none is set."""
        heap = self._heap
        while heap and self._at.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else float("inf")

    def rung(self, now_s: float) -> list[int]:
        """Those whose time has come, in its order; they are cleared."""
        ids = []
        while self.next_s() <= now_s:
            _, request_id = heapq.heappop(self._heap)
            del self._at[request_id]
            ids.append(request_id)
        return ids


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

    def __init__(self, ranker: Ranker, service: Service, *, max_wait_s: float = math.inf, fair: bool = False) -> None:
        self._ranker, self._service = ranker, service
        self._max_wait_s = max_wait_s
        self._lanes = Lanes(ranker, service, fair=fair)
        self._deadline = Alarms()
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
        self._deadline.clear(entry.request.id)
        del self._entries[entry.request.id]
        self._count(entry, -1)
        self._service.leaves(entry)

    def configure(self, now_s: float, *, max_wait_s: float, fair: bool) -> None:
        """Another bound and fairness; all who wait take the places that they have by these."""
        self._max_wait_s = max_wait_s
        self._deadline, self._lanes = Alarms(), Lanes(self._ranker, self._service, fair=fair)
        for entry in self:
            self._file(now_s, entry)

    def believe(self, now_s: float, entry: Entry, length_prediction: LengthPrediction) -> None:
        """A new forecast of one who waits: it takes its new place."""
        self._lanes.remove(entry)
        self._count(entry, -1)
        entry.believe(length_prediction)
        self._count(entry, 1)
        self._ranker.write(now_s, entry)
        self._lanes.add(entry)

    def promote(self, now_s: float) -> None:
        """Who has waited too long by now goes before all who have not."""
        if self._deadline.next_s() > now_s:
            return
        for request_id in self._deadline.rung(now_s):
            entry = self._entries[request_id]
            self._lanes.remove(entry)
            entry.overdue = True
            self._lanes.add(entry)

    def deadline_s(self) -> float:
        """When the next will have waited too long."""
        return self._deadline.next_s()

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
        waits = (one.request.queued_for_s + now_s - one.request.queued_s for one in self._entries.values())
        return max(waits, default=0.0)

    def total_tokens(self) -> float:
        """Predicted output tokens still to come of all who wait."""
        return sum(self.tokens.values())

    def _file(self, now_s: float, entry: Entry) -> None:
        """Its place, and when it will have waited too long; its key is noted."""
        q = entry.request
        deadline_s = q.queued_s + (self._max_wait_s - q.queued_for_s)
        entry.overdue = deadline_s <= now_s
        if not entry.overdue:
            self._deadline.set(q.id, deadline_s)
        self._lanes.add(entry)

    def _count(self, entry: Entry, one: int) -> None:
        model = entry.request.model
        self.bytes += one * entry.request.body_bytes
        self.waiting[model] += one
        self.tokens[model] += one * entry.remaining
        if self.waiting[model] == 0:
            del self.waiting[model], self.tokens[model]


_RECENT = 1024
_EVERY = 64
_FIRST = 16

Bin = tuple[str, int, int]
"""Model, priority class, number."""


class Bins:
    """Bins of equal mass of the predictions of late; a full one leaves, or one whose first has waited enough.

    Attributes:
        batches: Those that have left.
        bytes: Bodies of those who gather.
        waiting: How many gather, by model.
        tokens_of: Predicted output tokens still to come of them, by model.
    """

    def __init__(self, bins: int, batch_wait_s: float) -> None:
        self._bins, self._wait_s = bins, batch_wait_s
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._seen = 0
        self._edges: list[float] = []
        self._gathering: dict[Bin, dict[int, Entry]] = {}
        self._bin_of: dict[int, Bin] = {}
        self._leave = Alarms()
        self.batches = 0
        self.bytes = 0
        self.waiting: defaultdict[str, int] = defaultdict(int)
        self.tokens_of: defaultdict[str, float] = defaultdict(float)

    def __len__(self) -> int:
        return len(self._bin_of)

    def __iter__(self) -> Iterator[Entry]:
        for gathering in self._gathering.values():
            yield from gathering.values()

    @property
    def tokens(self) -> float:
        """Predicted output tokens still to come of all who gather."""
        return sum(self.tokens_of.values())

    def add(self, now_s: float, entry: Entry, size: int) -> list[Entry]:
        """It gathers; returns the batch that it made full, or none."""
        q = entry.request
        entry.state, q.queued_s = State.GATHERING, now_s
        place = (q.model, q.priority, self._number(entry.predicted))
        gathering = self._gathering.setdefault(place, {})
        gathering[q.id] = entry
        self._bin_of[q.id] = place
        self._leave.set(q.id, now_s + self._wait_s)
        self._count(entry, 1)
        return self._batch(place) if len(gathering) >= size else []

    def configure(self, bins: int, batch_wait_s: float) -> None:
        """Other bins for those who come, another time to wait for all; who gathers stays where it is."""
        if bins != self._bins and self._edges:
            self._bins = bins
            self._set_edges()
        self._bins, self._wait_s = bins, batch_wait_s
        for entry in self:
            self._leave.set(entry.request.id, entry.request.queued_s + batch_wait_s)

    def ripe(self, now_s: float) -> list[Entry]:
        """Those whose bins have waited long enough, bin after bin; each bin is a batch."""
        entries: list[Entry] = []
        while self._leave.next_s() <= now_s:
            for request_id in self._leave.rung(now_s):
                if request_id in self._bin_of:
                    entries += self._batch(self._bin_of[request_id])
        return entries

    def next_s(self) -> float:
        """When the next bin leaves."""
        return self._leave.next_s()

    def remove(self, entry: Entry) -> None:
        """It gathers no more."""
        request_id = entry.request.id
        place = self._bin_of.pop(request_id)
        del self._gathering[place][request_id]
        if not self._gathering[place]:
            del self._gathering[place]
        self._leave.clear(request_id)
        self._count(entry, -1)

    def recount(self, entry: Entry, remaining: float) -> None:
        """Its prediction changed from what remained; it stays where it is."""
        self.tokens_of[entry.request.model] += entry.remaining - remaining

    def position(self, entry: Entry) -> int:
        """How many came before it into its bin."""
        return list(self._gathering[self._bin_of[entry.request.id]]).index(entry.request.id)

    def oldest_wait_s(self, now_s: float) -> float:
        """The longest that one of them has waited; 0 where nobody gathers."""
        return max((now_s - entry.request.queued_s for entry in self), default=0.0)

    def _batch(self, place: Bin) -> list[Entry]:
        entries = list(self._gathering[place].values())
        self.batches += 1
        for entry in entries:
            self.remove(entry)
            entry.batch = self.batches
        return entries

    def _number(self, predicted: float) -> int:
        self._recent.append(predicted)
        self._seen += 1
        if self._seen == _FIRST or self._seen % _EVERY == 0:
            self._set_edges()
        return bisect_right(self._edges, predicted)

    def _set_edges(self) -> None:
        shares = np.arange(1, self._bins) / self._bins
        self._edges = np.quantile(np.asarray(self._recent), shares).tolist()

    def _count(self, entry: Entry, one: int) -> None:
        model = entry.request.model
        self.bytes += one * entry.request.body_bytes
        self.waiting[model] += one
        self.tokens_of[model] += one * entry.remaining
        if self.waiting[model] == 0:
            del self.waiting[model], self.tokens_of[model]
