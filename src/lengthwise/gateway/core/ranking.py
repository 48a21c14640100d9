"""Keys of live requests: one at a time as they move, all at once by the compiled loop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.gateway.request import LengthPrediction, Request
from lengthwise.policy.compile import key_of, keys
from lengthwise.policy.contracts import SERVICE_OUTPUT_WEIGHT, Policy

PREFILL_WEIGHT = 0.1
"""What a prompt token costs of an output token: a batch computes prompts about ten times as fast."""


class State(Enum):
    """Where a request is; it is in exactly one."""

    GATHERING = "gathering"
    """In a bin that is not full."""
    WAITING = "waiting"
    RUNNING = "running"
    CUT = "cut"
    """Still at its worker, to be aborted and brought back."""
    LOST = "lost"
    """Its worker is gone; the caller brings it back or fails it."""


@dataclass(slots=True, eq=False)
class Entry:
    """A live request with what the scheduler must remember of it.

    Attributes:
        request: The caller's; the fields below its line are changed here alone.
        slot: Its row of the columns.
        state: Where it is.
        predicted: Predicted length of the whole output, from 0 to what the client asked for at most.
        overdue: It has waited too long and goes before all who have not.
        remaining: Predicted tokens still to come, at least 1.
        worker: Where it is or was last; "" never sent.
        work: What it adds to its worker's backlog: tokens still to come and its prompt's cost.
        kv_tokens: What it will hold at its worker.
        charged: Output tokens that its tenant was charged for.
        admissions: How often it was sent.
        boundary: Generated tokens at which its window is over.
        stable: Generated tokens below which it is not cut again.
        batch: Number of the completed bin it left in; 0 none.
        retained: Whether it cannot be cut where it is: its engine could not go on with it elsewhere.
        received_s: When tokens of it came last, where it is; NaN none have.
        cut_s: When it was last to be brought back.
        late_tokens: What is to come of it if it has come far into its forecast; NaN nobody has asked.
    """

    request: Request
    slot: int = -1
    state: State = State.WAITING
    predicted: float = 0.0
    overdue: bool = False
    remaining: float = 1.0
    worker: str = ""
    work: float = 0.0
    kv_tokens: float = 0.0
    charged: float = 0.0
    admissions: int = 0
    boundary: int = 0
    stable: int = 0
    batch: int = 0
    retained: bool = False
    received_s: float = math.nan
    cut_s: float = math.nan
    late_tokens: float = math.nan

    def believe(self, length_prediction: LengthPrediction) -> None:
        """Takes a forecast, bounded by what was asked for: no prediction can do more harm than that."""
        request = self.request
        request.length_prediction, self.late_tokens = length_prediction, math.nan
        most = float(max(1, request.max_tokens))
        total = length_prediction.total_tokens
        self.predicted = min(max(total, 0.0), most) if total == total else most  # noqa: PLR0124  NaN
        self.finalize()

    def renamed(self, before: str, now: str) -> None:
        """A worker is called otherwise; of who is there it is told by the worker itself."""
        q = self.request
        if before in q.avoid:
            q.avoid = q.avoid - {before} | {now}
        if self.worker == before and self.state not in (State.RUNNING, State.CUT):
            self.worker = now

    def finalize(self) -> None:
        """What follows from the prediction and the tokens so far."""
        request = self.request
        self.remaining = max(1.0, self.predicted - request.generated_tokens)
        context = request.prompt_tokens + request.generated_tokens
        self.work = self.remaining + PREFILL_WEIGHT * context
        self.kv_tokens = context + self.remaining


FloatArray = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_FLOATS = ("arrival_s", "predicted_tokens", "remaining_tokens", "index_tokens", "queued_for_s", "queued_s", "key")
_INTEGERS = ("prompt_tokens", "generated_tokens", "priority", "admission", "eviction", "batch", "id")
_FLOAT = {name: row for row, name in enumerate(_FLOATS)}
_INT = {name: row for row, name in enumerate(_INTEGERS)}
_SMALLEST = 64


class Columns:
    """A struct of arrays that grows; rows of who left are used again.

    Attributes:
        entries: The live request of each row.
    """

    def __init__(self, rank: Policy) -> None:
        self._report = [name for name in rank.arguments if name not in ("now_s", "service_tokens")]
        self._indexed = rank.uses("index_tokens")
        self._floats = np.zeros((len(_FLOATS), _SMALLEST))
        self._complete = np.zeros((len(_INTEGERS), _SMALLEST), np.int64)
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

    def release(self, entry: Entry) -> None:
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
            q.queued_for_s,
            q.queued_s,
            key,
        )
        self._complete[:, entry.slot] = (
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
        quantiles = entry.request.length_prediction.quantiles
        if not self._indexed or quantiles is None:
            return entry.remaining
        from lengthwise.predict import LEVELS, LengthDistribution

        posterior = LengthDistribution(np.asarray(quantiles)[None, :], LEVELS)
        return float(posterior.gittins(entry.request.generated_tokens)[0])

    def report(self, rows: Ints, now_s: float, *, waiting: bool) -> dict[str, npt.NDArray[Any]]:
        """The columns of some rows that the rank takes, without the service."""
        there = {name: self._column(name, rows) for name in self._report}
        if waiting and "queued_for_s" in there:
            there["queued_for_s"] = there["queued_for_s"] + (now_s - self._column("queued_s", rows))
        return there

    def ordered(self, rows: Ints, keys: FloatArray) -> list[tuple[float, float, int, int]]:
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
        return np.take(self._complete[_INT[name]], rows)

    def _grow(self) -> None:
        rows = len(self.entries)
        self._floats = np.concatenate([self._floats, np.zeros_like(self._floats)], axis=1)
        self._complete = np.concatenate([self._complete, np.zeros_like(self._complete)], axis=1)
        self._free = list(range(rows, 2 * rows))[::-1]
        self.entries += [None] * rows


class Service:
    """A tenant's service: prompt tokens + 2 x output tokens, the output charged by prediction when it is sent.

    What came instead is charged when it comes back or ends. A tenant that comes to wait starts level with
    those who do, so that absence earns no credit.
    """

    def __init__(self) -> None:
        self._served: dict[int, float] = {}
        self._waiting: dict[int, int] = {}
        self._level = 0.0
        self._tenant_of_row = np.zeros(0, np.int64)

    def of(self, tenant: int) -> float:
        """What it was served so far."""
        return self._served.get(tenant, 0.0)

    def joins(self, entry: Entry) -> None:
        """A request of the tenant waits."""
        tenant = entry.request.tenant
        if tenant not in self._waiting:
            level = min((self.of(one) for one in self._waiting), default=self._level)
            self._served[tenant] = max(self.of(tenant), level)
            self._waiting[tenant] = 0
        self._waiting[tenant] += 1
        self._note(entry.slot, tenant)

    def leaves(self, entry: Entry) -> None:
        """One fewer of the tenant's requests waits; who is the last to wait sets the level."""
        tenant = entry.request.tenant
        self._waiting[tenant] -= 1
        if self._waiting[tenant] == 0:
            del self._waiting[tenant]
            self._level = self.of(tenant)

    def charge(self, entry: Entry) -> None:
        """It is sent: the tenant pays for the prompt (once) and the predicted output."""
        prompt = entry.request.prompt_tokens if entry.admissions == 0 else 0
        self._pay(entry, prompt, entry.predicted)

    def finalize(self, entry: Entry) -> None:
        """It is back or over: the tenant pays for what came."""
        self._pay(entry, 0, float(entry.request.generated_tokens))

    def of_rows(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """The service of the tenants of some rows."""
        tenants, which = np.unique(self._tenant_of_row[rows], return_inverse=True)
        return np.array([self.of(int(one)) for one in tenants])[which]

    def _pay(self, entry: Entry, prompt_tokens: int, output_tokens: float) -> None:
        tenant = entry.request.tenant
        more = SERVICE_OUTPUT_WEIGHT * (output_tokens - entry.charged)
        self._served[tenant] = self.of(tenant) + prompt_tokens + more
        entry.charged = output_tokens

    def _note(self, slot: int, tenant: int) -> None:
        if slot >= len(self._tenant_of_row):
            more = np.zeros(max(64, slot + 1), np.int64)
            self._tenant_of_row = np.concatenate([self._tenant_of_row, more])
        self._tenant_of_row[slot] = tenant


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
            q.queued_for_s + (now_s - q.queued_s) if waits else q.queued_for_s,
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
        there = self.columns.report(rows, now_s, waiting=waiting)
        if self._charged:
            there["service_tokens"] = self._service.of_rows(rows)
        found = keys(self.rank, there, now_s) if there else self._matching(now_s, len(rows))
        found[np.isnan(found)] = math.inf
        return found

    def _matching(self, now_s: float, n: int) -> Floats:
        """[n] the keys of a rank that is told nothing of a request."""
        return keys(self.rank, {"arrival_s": np.zeros(n)}, now_s)


def rows_of(entries: Sequence[Entry]) -> Ints:
    """[n] the rows of the columns."""
    return np.fromiter((entry.slot for entry in entries), np.int64, len(entries))
