"""Those who wait, in order: who has waited too long, then lanes merged by their heads."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Container, Iterator
from operator import itemgetter

import numpy as np

from lengthwise.gateway.core.entry import Entry
from lengthwise.gateway.core.ranker import Ranker
from lengthwise.gateway.core.service import Service

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
