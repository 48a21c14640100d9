"""The queue of waiting requests, and the bins of mode bins.

Requests that have waited ``max_wait_s`` in total are overdue. They precede all others, in order of arrival. All others
are ordered by priority class, then by the rank's key, then by arrival, then by id. With fairness, overdue requests
belong to the best priority class that waits. Within a class the tenant with the least service comes first, and within a
tenant its overdue requests come first.

This order bounds the wait, whatever lengths are predicted. Only overdue requests that arrived earlier precede an
overdue request, ``DispatchPass`` gives no later request a worker that the overdue request could use, and overdue
requests are never preempted. So a request waits at most ``max_wait_s`` plus the time in which the workers of its model
finish the earlier overdue requests and all requests in flight. With fairness, only its own tenant's earlier overdue
requests precede it, and requests of other tenants until their tenants have had as much service.
"""

from __future__ import annotations

import heapq
import math
import sys
from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from operator import itemgetter

import numpy as np

from lengthwise.gateway.core.ranking import Entry, Ranker, State, TenantService
from lengthwise.gateway.request import LengthPrediction

Item = tuple[float, float, int, int]  # a request in a lane: key, arrival, id, row in the columns of ``Ranker``
Lane = tuple[str, int, int]  # a sorted list of requests: model, priority class or _OVERDUE, tenant (0 without fairness)
Head = tuple[int, float, float, float, int, int, Lane]  # class, service, key, arrival, id, index in the lane, lane

_OVERDUE = -sys.maxsize
RERANK_INTERVAL_S = 0.1  # age from which keys that change with time are recomputed before a dispatch


class TimePerRequest:
    """Stores one time for each request. Setting or discarding a time, or reading the earliest, takes O(log n)."""

    def __init__(self) -> None:
        self._at_s: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._at_s)

    def set(self, request_id: int, at_s: float) -> None:
        """Set or change the time of a request, or discard the time if it is inf."""
        if at_s == math.inf:
            self._at_s.pop(request_id, None)
            return
        self._at_s[request_id] = at_s
        heapq.heappush(self._heap, (at_s, request_id))
        # Discarded items stay in the heap until they reach its top. Rebuild it once they exceed the live ones by 64.
        if len(self._heap) > 2 * len(self._at_s) + 64:
            self._heap = [(at_s, one) for one, at_s in self._at_s.items()]
            heapq.heapify(self._heap)

    def discard(self, request_id: int) -> None:
        """Discard the time of a request, if it has one."""
        self._at_s.pop(request_id, None)

    def next_s(self) -> float:
        """Return the earliest time, or inf if there is none."""
        heap = self._heap
        while heap and self._at_s.get(heap[0][1]) != heap[0][0]:
            heapq.heappop(heap)
        return heap[0][0] if heap else math.inf

    def pop_due(self, now_s: float) -> list[int]:
        """Remove the times up to ``now_s``. Return the ids of their requests, the earliest time first."""
        ids = []
        while self.next_s() <= now_s:
            _, request_id = heapq.heappop(self._heap)
            del self._at_s[request_id]
            ids.append(request_id)
        return ids


class Backlog:
    """Totals over queued requests: size of their bodies, counts, and predicted remaining output tokens.

    ``tokens`` are by model and priority class.
    """

    def __init__(self) -> None:
        self.body_bytes = 0
        self.count_by_tenant: Counter[int] = Counter()
        self.count_by_model: defaultdict[str, int] = defaultdict(int)
        self._count_by_class: Counter[tuple[str, int]] = Counter()
        self.tokens: defaultdict[tuple[str, int], float] = defaultdict(float)

    def set_prediction(self, entry: Entry, length_prediction: LengthPrediction) -> None:
        """Store a new prediction of a request, and update the totals."""
        self._count(entry, -1)
        entry.set_prediction(length_prediction)
        self._count(entry, 1)

    def _count(self, entry: Entry, sign: int) -> None:
        model, tenant = entry.request.model, entry.request.client.tenant
        self.body_bytes += sign * entry.request.body_bytes
        self.count_by_tenant[tenant] += sign
        if self.count_by_tenant[tenant] == 0:
            del self.count_by_tenant[tenant]
        self.count_by_model[model] += sign
        if self.count_by_model[model] == 0:
            del self.count_by_model[model]
        place = model, entry.request.client.priority
        self._count_by_class[place] += sign
        self.tokens[place] += sign * entry.remaining_tokens
        if self._count_by_class[place] == 0:
            del self._count_by_class[place], self.tokens[place]


class Queue(Backlog):
    """Waiting requests in order. Adding or removing a request takes O(log n) comparisons."""

    def __init__(
        self, ranker: Ranker, service: TenantService, *, max_wait_s: float = math.inf, fair: bool = False
    ) -> None:
        super().__init__()
        self._ranker, self._service = ranker, service
        self._entries: dict[int, Entry] = {}
        self._last_rerank_s = -math.inf
        self.configure(-math.inf, max_wait_s=max_wait_s, fair=fair)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def configure(self, now_s: float, *, max_wait_s: float, fair: bool) -> None:
        """Change ``max_wait_s`` and fairness, and rebuild the order of all waiting requests."""
        self._max_wait_s, self._fair = max_wait_s, fair
        self.overdue_times = TimePerRequest()  # when requests become overdue
        self._lanes: dict[Lane, list[Item]] = {}
        for entry in self:
            self._schedule_and_insert(now_s, entry)

    def add(self, now_s: float, entry: Entry, *, since_s: float | None = None) -> None:
        """Add a request. Its wait starts now, or started at ``since_s`` if the request was in a bin or deferred."""
        q = entry.request
        q.dispatch.enqueued_at_s = now_s if since_s is None else since_s
        entry.state, q.dispatch.worker = State.WAITING, ""
        self._entries[q.id] = entry
        self._count(entry, 1)
        self._service.start_waiting(q.client.tenant)
        self._ranker.update(now_s, entry)
        self._schedule_and_insert(now_s, entry)

    def remove(self, entry: Entry) -> None:
        """Remove a request that is dispatched or has ended."""
        self._delete(entry)
        self.overdue_times.discard(entry.request.id)
        del self._entries[entry.request.id]
        self._count(entry, -1)
        self._service.stop_waiting(entry.request.client.tenant)

    def update_prediction(self, now_s: float, entry: Entry, length_prediction: LengthPrediction) -> None:
        """Store a new prediction of a waiting request, and move the request to its new place."""
        self._delete(entry)
        self.set_prediction(entry, length_prediction)
        self._ranker.update(now_s, entry)
        self._insert(entry)

    def promote(self, now_s: float) -> None:
        """Mark the requests that have waited ``max_wait_s`` by now as overdue, and move them to their new places."""
        for request_id in self.overdue_times.pop_due(now_s):
            entry = self._entries[request_id]
            self._delete(entry)
            entry.overdue = True
            self._insert(entry)

    def refresh(self, now_s: float) -> None:
        """Recompute all keys if they change with time and RERANK_INTERVAL_S has passed since the last time."""
        if self._ranker.rank.every_step and now_s - self._last_rerank_s >= RERANK_INTERVAL_S:
            self.rerank(now_s)

    def rerank(self, now_s: float) -> None:
        """Recompute all keys, and sort the waiting requests by them."""
        self._last_rerank_s = now_s
        for lane, items in self._lanes.items():
            if lane[1] == _OVERDUE:
                continue
            rows = np.fromiter(map(itemgetter(3), items), np.int64, len(items))
            self._lanes[lane] = self._ranker.sort(rows, self._ranker.keys(now_s, rows, waiting=True))

    def is_first(self, entry: Entry) -> bool:
        """Return whether the request is overdue, or the first of its model and class (and tenant, with fairness)."""
        return entry.overdue or self._lanes[self._lane(entry)][0][3] == entry.row

    def in_order(self, is_closed: Callable[[str], bool] = lambda _: False) -> Iterator[Entry]:
        """Yield requests in order, but none of a model that ``is_closed``. The queue must not change meanwhile."""
        best = self._best_class()
        heads = [self._head(lane, 0, best) for lane in self._lanes if not is_closed(lane[0])]
        heapq.heapify(heads)
        while heads:
            *_, at, lane = heads[0]
            items = self._lanes[lane]
            if is_closed(lane[0]):
                heapq.heappop(heads)
            elif self._fair and self._service.of(lane[2]) != heads[0][1]:  # a dispatch has charged this tenant
                heapq.heapreplace(heads, self._head(lane, at, best))
            else:
                yield self._ranker.entry(items[at][3])
                if at + 1 < len(items):
                    heapq.heapreplace(heads, self._head(lane, at + 1, best))
                else:
                    heapq.heappop(heads)

    def position(self, entry: Entry) -> int:
        """Return the number of waiting requests that precede the request."""
        best, item = self._best_class(), self._item(entry)[:3]
        rank = self._class_rank(self._lane(entry), best)
        lanes = [(self._class_rank(lane, best), items) for lane, items in self._lanes.items()]
        before = sum(len(items) for other, items in lanes if other < rank)
        return before + sum(bisect_left(items, item) for other, items in lanes if other == rank)

    def _schedule_and_insert(self, now_s: float, entry: Entry) -> None:
        q = entry.request
        overdue_s = q.dispatch.enqueued_at_s + (self._max_wait_s - q.dispatch.queued_for_s)
        entry.overdue = overdue_s <= now_s
        if not entry.overdue:
            self.overdue_times.set(q.id, overdue_s)
        self._insert(entry)

    def _insert(self, entry: Entry) -> None:
        insort(self._lanes.setdefault(self._lane(entry), []), self._item(entry))

    def _delete(self, entry: Entry) -> None:
        """Remove a request from its lane. The stored key locates the request, so call this before the key changes."""
        lane = self._lane(entry)
        items = self._lanes[lane]
        del items[bisect_left(items, self._item(entry)[:3])]
        if not items:
            del self._lanes[lane]

    def _item(self, entry: Entry) -> Item:
        key = -math.inf if entry.overdue else self._ranker.key(entry)
        return key, entry.request.arrival_s, entry.request.id, entry.row

    def _lane(self, entry: Entry) -> Lane:
        client = entry.request.client
        priority = _OVERDUE if entry.overdue else client.priority
        return entry.request.model, priority, client.tenant if self._fair else 0

    def _best_class(self) -> int:
        classes = {lane[1] for lane in self._lanes} - {_OVERDUE} if self._fair else ()
        return min(classes, default=_OVERDUE)

    def _class_rank(self, lane: Lane, best: int) -> tuple[int, float]:
        """Return (class, service of the tenant). With fairness, overdue requests have the ``best`` class that waits."""
        return max(lane[1], best), self._service.of(lane[2]) if self._fair else 0.0

    def _head(self, lane: Lane, at: int, best: int) -> Head:
        key, arrival_s, request_id, _ = self._lanes[lane][at]
        return *self._class_rank(lane, best), key, arrival_s, request_id, at, lane


_RECENT = 1024  # last predictions from which the edges of bins are computed
_UPDATE_EVERY, _FIRST_UPDATE = 64, 16  # predictions between two computations of the edges, and before the first one
Bin = tuple[str, int, int]  # model, priority class, number in order of length


class Bins(Backlog):
    """Bins of requests of similar predicted length. A bin is emptied when it is full, or after ``batch_wait_s``."""

    def __init__(self, bins: int, batch_wait_s: float) -> None:
        super().__init__()
        self._bins, self._wait_s = bins, batch_wait_s
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._num_predictions, self._edges = 0, list[float]()
        self._contents: dict[Bin, dict[int, Entry]] = {}
        self._bin_of: dict[int, Bin] = {}
        self.leave_times = TimePerRequest()  # latest time at which each request's bin is emptied
        self.batches = 0

    def __len__(self) -> int:
        return len(self._bin_of)

    def __iter__(self) -> Iterator[Entry]:
        return (entry for contents in self._contents.values() for entry in contents.values())

    def add(self, now_s: float, entry: Entry, size: int) -> list[Entry]:
        """Add a request to a bin. If the bin then has ``size`` requests, empty it and return them, otherwise []."""
        q = entry.request
        entry.state, q.dispatch.enqueued_at_s = State.BINNED, now_s
        self._recent.append(entry.predicted_tokens)
        self._num_predictions += 1
        if self._num_predictions == _FIRST_UPDATE or self._num_predictions % _UPDATE_EVERY == 0:
            self._set_edges()
        place = (q.model, q.client.priority, bisect_right(self._edges, entry.predicted_tokens))
        contents = self._contents.setdefault(place, {})
        contents[q.id] = entry
        self._bin_of[q.id] = place
        self.leave_times.set(q.id, now_s + self._wait_s)
        self._count(entry, 1)
        return self._pop_batch(place) if len(contents) >= size else []

    def configure(self, bins: int, batch_wait_s: float) -> None:
        """Change the number of bins for later requests, and the longest wait of all. No request changes its bin."""
        changed, self._bins, self._wait_s = bins != self._bins, bins, batch_wait_s
        if changed and self._edges:
            self._set_edges()
        for entry in self:
            self.leave_times.set(entry.request.id, entry.request.dispatch.enqueued_at_s + batch_wait_s)

    def pop_due(self, now_s: float) -> list[Entry]:
        """Empty the bins of which a request has waited ``batch_wait_s``. Return their requests, bin after bin."""
        due = self.leave_times.pop_due(now_s)
        return [entry for one in due if one in self._bin_of for entry in self._pop_batch(self._bin_of[one])]

    def remove(self, entry: Entry) -> None:
        """Remove a request from its bin."""
        place = self._bin_of.pop(entry.request.id)
        del self._contents[place][entry.request.id]
        if not self._contents[place]:
            del self._contents[place]
        self.leave_times.discard(entry.request.id)
        self._count(entry, -1)

    def position(self, entry: Entry) -> int:
        """Return the number of earlier requests in the request's bin."""
        return list(self._contents[self._bin_of[entry.request.id]]).index(entry.request.id)

    def _pop_batch(self, place: Bin) -> list[Entry]:
        entries = list(self._contents[place].values())
        self.batches += 1
        for entry in entries:
            self.remove(entry)
            entry.batch = self.batches
        return entries

    def _set_edges(self) -> None:
        shares = np.arange(1, self._bins) / self._bins
        self._edges = np.quantile(np.asarray(self._recent), shares).tolist()
