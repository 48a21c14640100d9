"""Multi-Bin: arrivals gather by predicted length and leave as batches (Guldogan et al., 2024)."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterator

import numpy as np

from lengthwise.gateway.core.alarms import Alarms
from lengthwise.gateway.core.entry import Entry, State

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
