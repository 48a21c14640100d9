"""Keys of live requests: one at a time as they move, all at once by the compiled loop."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lengthwise.gateway.core.columns import Columns, Ints
from lengthwise.gateway.core.entry import Entry, State
from lengthwise.gateway.core.service import Service
from lengthwise.policy.contracts import Policy
from lengthwise.policy.keys import key_of, keys

Floats = npt.NDArray[np.float64]


class Ranker:
    """A rank with what it is told; NaN from a rank of others counts as the last place."""

    def __init__(self, rank: Policy, service: Service) -> None:
        self.rank = rank
        self.columns = Columns(rank)
        self._service = service
        self._charged = rank.uses("service_tokens")
        self._key_of = key_of(rank)

    def warm(self) -> None:
        """Compiles now what would else be compiled while requests wait."""
        self.keys(0.0, np.zeros(0, np.int64), waiting=True)

    def key(self, now_s: float, entry: Entry) -> float:
        """The key of one request, in the queue or at a worker."""
        q = entry.request
        waits = entry.state is State.WAITING
        key = self._key_of(
            now_s,
            q.arrival_s,
            q.prompt_tokens,
            q.generated_tokens,
            entry.predicted,
            entry.remaining,
            self.columns.index_of(entry),
            q.waited_s + (now_s - q.queued_s) if waits else q.waited_s,
            q.priority,
            entry.admissions - 1,
            q.preemptions,
            self._service.of(q.tenant),
            entry.batch,
        )
        return key if key == key else math.inf  # noqa: PLR0124

    def write(self, now_s: float, entry: Entry) -> float:
        """Its key, noted with all else that ranks are told."""
        key = self.key(now_s, entry)
        self.columns.write(entry, key)
        return key

    def keys_there(self, now_s: float, running: Sequence[Entry]) -> list[float]:
        """The keys of requests at workers; those that do not change with time are as they were noted."""
        if self.rank.every_step or self._charged:
            found: list[float] = self.keys(now_s, rows_of(running), waiting=False).tolist()
            return found
        return [self.columns.key(one) for one in running]

    def keys(self, now_s: float, rows: Ints, *, waiting: bool) -> Floats:
        """[n] the keys of several rows, all waiting or all at workers."""
        there = self.columns.told(rows, now_s, waiting=waiting)
        if self._charged:
            there["service_tokens"] = self._service.of_rows(rows)
        found = keys(self.rank, there, now_s) if there else self._alike(now_s, len(rows))
        found[np.isnan(found)] = math.inf
        return found

    def _alike(self, now_s: float, n: int) -> Floats:
        """[n] the keys of a rank that is told nothing of a request."""
        return keys(self.rank, {"arrival_s": np.zeros(n)}, now_s)


def rows_of(entries: Sequence[Entry]) -> Ints:
    """[n] the rows of the columns."""
    return np.fromiter((entry.slot for entry in entries), np.int64, len(entries))
