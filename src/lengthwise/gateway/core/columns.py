"""What ranks are told of the live requests: arrays with a stable row a request."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.gateway.core.entry import Entry
from lengthwise.policy.contracts import Policy

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_FLOATS = ("arrival_s", "predicted_tokens", "remaining_tokens", "index_tokens", "waited_s", "queued_s", "key")
_WHOLE = ("prompt_tokens", "generated_tokens", "priority", "admission", "eviction", "batch", "id")
_FLOAT = {name: row for row, name in enumerate(_FLOATS)}
_INT = {name: row for row, name in enumerate(_WHOLE)}
_SMALLEST = 64


class Columns:
    """A struct of arrays that grows; rows of who left are used again.

    Attributes:
        entries: The live request of each row.
    """

    def __init__(self, rank: Policy) -> None:
        self._told = [name for name in rank.arguments if name not in ("now_s", "service_tokens")]
        self._indexed = rank.uses("index_tokens")
        self._floats = np.zeros((len(_FLOATS), _SMALLEST))
        self._whole = np.zeros((len(_WHOLE), _SMALLEST), np.int64)
        self._free = list(range(_SMALLEST))[::-1]
        self.entries: list[Entry | None] = [None] * _SMALLEST

    def __len__(self) -> int:
        """Rows that are taken."""
        return len(self.entries) - len(self._free)

    def take(self, entry: Entry) -> None:
        """Gives the request a row."""
        if not self._free:
            self._grow()
        entry.slot = self._free.pop()
        self.entries[entry.slot] = entry

    def give_back(self, entry: Entry) -> None:
        """Its row is free for another."""
        self._free.append(entry.slot)
        self.entries[entry.slot] = None
        entry.slot = -1

    def write(self, entry: Entry, key: float) -> None:
        """All that ranks are told of it, as it is now, and the key it is filed by."""
        q = entry.request
        index = self.index_of(entry)
        self._floats[:, entry.slot] = (
            q.arrival_s,
            entry.predicted,
            entry.remaining,
            index,
            q.waited_s,
            q.queued_s,
            key,
        )
        self._whole[:, entry.slot] = (
            q.prompt_tokens,
            q.generated_tokens,
            q.priority,
            entry.admissions - 1,
            q.preemptions,
            entry.batch,
            q.id,
        )

    def key(self, entry: Entry) -> float:
        """The key it is filed by."""
        return self._floats.item(_FLOAT["key"], entry.slot)

    def index_of(self, entry: Entry) -> float:
        """The Gittins index of what is predicted; what remains where only a number is known or wanted."""
        quantiles = entry.request.forecast.quantiles
        if not self._indexed or quantiles is None:
            return entry.remaining
        from lengthwise.predict import LEVELS, LengthDistribution

        belief = LengthDistribution(np.asarray(quantiles)[None, :], LEVELS)
        return float(belief.gittins(entry.request.generated_tokens)[0])

    def told(self, rows: Ints, now_s: float, *, waiting: bool) -> dict[str, npt.NDArray[Any]]:
        """The columns of some rows that the rank takes, without the service."""
        there = {name: self._column(name, rows) for name in self._told}
        if waiting and "waited_s" in there:
            there["waited_s"] = there["waited_s"] + (now_s - self._column("queued_s", rows))
        return there

    def ordered(self, rows: Ints, keys: Floats) -> list[tuple[float, float, int, int]]:
        """(key, arrival, id, row) in this order, by keys that are noted for ``key``."""
        self._floats[_FLOAT["key"], rows] = keys
        arrival_s, ids = self._column("arrival_s", rows), self._column("id", rows)
        order = np.argsort(keys)
        ranked = keys[order]
        if (ranked[1:] == ranked[:-1]).any():
            order = np.lexsort((ids, arrival_s, keys))
            ranked = keys[order]
        columns = (ranked, arrival_s[order], ids[order], rows[order])
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def _column(self, name: str, rows: Ints) -> npt.NDArray[Any]:
        if name in _FLOAT:
            return np.take(self._floats[_FLOAT[name]], rows)
        return np.take(self._whole[_INT[name]], rows)

    def _grow(self) -> None:
        rows = len(self.entries)
        self._floats = np.concatenate([self._floats, np.zeros_like(self._floats)], axis=1)
        self._whole = np.concatenate([self._whole, np.zeros_like(self._whole)], axis=1)
        self._free = list(range(rows, 2 * rows))[::-1]
        self.entries += [None] * rows
