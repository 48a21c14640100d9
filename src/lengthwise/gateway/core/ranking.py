"""Rank keys of live requests: one at a time as requests change, all at once by the compiled loop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from lengthwise.gateway.request import Floats, LengthPrediction, Request
from lengthwise.policy.compile import key_of, keys
from lengthwise.policy.contracts import SERVICE_OUTPUT_WEIGHT, Policy

PREFILL_WEIGHT = 0.1
"""Cost of a prompt token in output tokens: a batch computes prompts about ten times as fast."""


class State(Enum):
    """The state of a request; a live request is in exactly one."""

    BINNED = "binned"  # in a bin that is not full
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTING = "preempting"  # still at its worker, to be aborted and requeued
    LOST = "lost"  # its worker is gone; the caller requeues the request or fails it


@dataclass(slots=True, eq=False)
class PreemptionState:
    """From when on a running request may be preempted at its worker, and when it was; each dispatch starts anew."""

    window_end: int = 0  # generated tokens at which the current window ends
    protected_until: int = 0  # generated tokens below which the request is not preempted again
    nonpreemptible: bool = False  # whether the engine could not resume the request elsewhere
    preempted_s: float = math.nan


@dataclass(slots=True, eq=False)
class Entry:
    """A live request with the scheduler's own state."""

    request: Request
    row: int = -1  # row in the columns of ``Ranker``; -1 none
    state: State = State.WAITING
    predicted: float = 0.0  # predicted length of the complete output, at most the requested maximum
    overdue: bool = False  # whether the request has waited ``max_wait_s`` and precedes all that have not
    remaining: float = 1.0  # predicted tokens still to come, at least 1
    worker: str = ""  # current or last worker; "" never dispatched
    work: float = 0.0  # share of the worker's backlog: remaining tokens and the cost of the prompt
    kv_tokens: float = 0.0  # KV tokens that the request will occupy at its end
    charged: float = 0.0
    dispatches: int = 0
    preemption: PreemptionState = field(default_factory=PreemptionState)
    batch: int = 0  # number of the completed bin that the request left in; 0 none
    last_token_s: float = math.nan
    posterior_remaining: float = math.nan  # cached posterior mean of the remaining tokens; NaN not computed

    def set_prediction(self, length_prediction: LengthPrediction) -> None:
        """Store a prediction, bounded by the requested maximum so that a wrong one can do no more harm than that."""
        request = self.request
        request.length_prediction, self.posterior_remaining = length_prediction, math.nan
        max_tokens, total = float(max(1, request.max_tokens)), length_prediction.total_tokens
        self.predicted = max_tokens if math.isnan(total) else min(max(total, 0.0), max_tokens)
        self.update_remaining()

    def update_remaining(self) -> None:
        """Recompute remaining tokens, work and KV tokens from the prediction and the tokens so far."""
        generated = self.request.generated_tokens
        context = self.request.prompt_tokens + generated
        self.remaining = remaining = max(1.0, self.predicted - generated)
        self.work, self.kv_tokens = remaining + PREFILL_WEIGHT * context, context + remaining


Integers = npt.NDArray[np.int64]
_FLOATS = ("arrival_s", "predicted_tokens", "remaining_tokens", "gittins_rank", "queued_for_s", "queued_s", "key")
_INTEGERS = ("prompt_tokens", "generated_tokens", "priority", "admission", "last_preemption", "batch", "id", "tenant")
_COLUMNS = np.dtype([(name, np.float64) for name in _FLOATS] + [(name, np.int64) for name in _INTEGERS])
_MIN_ROWS = 64


class TenantService:
    """Service of tenants in weighted tokens (virtual token counter, Sheng et al. 2024).

    A tenant is charged for the prompt and twice the predicted output at dispatch, corrected to the generated tokens
    later. A tenant that starts to wait is lifted to the least counter of the waiting ones: absence earns no credit.
    """

    def __init__(self) -> None:
        self._served: dict[int, float] = {}
        self._waiting: dict[int, int] = {}
        self._level = 0.0

    def of(self, tenant: int) -> float:
        """Return the service of a tenant so far."""
        return self._served.get(tenant, 0.0)

    def without(self, entry: Entry) -> float:
        """Return the service of the request's tenant without the request: what ranked it before its dispatch."""
        q = entry.request
        return self.of(q.client.tenant) - q.prompt_tokens - SERVICE_OUTPUT_WEIGHT * entry.charged

    def start_waiting(self, tenant: int) -> None:
        """Count one more waiting request of the tenant."""
        if tenant not in self._waiting:
            level = min((self.of(one) for one in self._waiting), default=self._level)
            self._served[tenant] = max(self.of(tenant), level)
            self._waiting[tenant] = 0
        self._waiting[tenant] += 1

    def stop_waiting(self, tenant: int) -> None:
        """Count one waiting request less; the last tenant to wait sets the level for the next."""
        self._waiting[tenant] -= 1
        if self._waiting[tenant] == 0:
            del self._waiting[tenant]
            self._level = self.of(tenant)

    def set_charge(self, entry: Entry, prompt_tokens: int, output_tokens: float) -> None:
        """Charge the tenant for the prompt, and for the output in place of the former charge for it."""
        more = SERVICE_OUTPUT_WEIGHT * (output_tokens - entry.charged)
        tenant = entry.request.client.tenant
        self._served[tenant] = self.of(tenant) + prompt_tokens + more
        entry.charged = output_tokens


class Ranker:
    """A rank policy with the columns of all live requests; NaN from a user's policy counts as the last place."""

    def __init__(self, rank: Policy, service: TenantService) -> None:
        self.rank, self._service = rank, service
        self._entries: list[Entry | None] = [None] * _MIN_ROWS
        self._key_of = key_of(rank)
        self._arguments = [name for name in rank.arguments if name not in ("now_s", "service_tokens")]
        self._uses_index, self._uses_service = rank.uses("gittins_rank"), rank.uses("service_tokens")
        self._columns = np.zeros(_MIN_ROWS, _COLUMNS)
        self._keys = self._columns["key"]
        self._free = list(range(_MIN_ROWS))[::-1]

    def add(self, entry: Entry) -> None:
        """Give the request a row."""
        if not self._free:
            rows = len(self._entries)
            self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)])
            self._keys = self._columns["key"]
            self._free = list(range(rows, 2 * rows))[::-1]
            self._entries += [None] * rows
        entry.row = self._free.pop()
        self._entries[entry.row] = entry

    def entry(self, row: int) -> Entry:
        """Return the live request of a row."""
        entry = self._entries[row]
        assert entry is not None, "a row in use has a live request"
        return entry

    def remove(self, entry: Entry) -> None:
        """Free the request's row."""
        self._free.append(entry.row)
        self._entries[entry.row] = None
        entry.row = -1

    def update(self, now_s: float, entry: Entry) -> float:
        """Compute a request's key; store it with every column that ranks take."""
        q, index = entry.request, entry.remaining
        client, dispatch = q.client, q.dispatch
        if self._uses_index and q.length_prediction.quantiles is not None:
            from lengthwise.predict import LEVELS, LengthDistribution

            posterior = LengthDistribution(np.asarray(q.length_prediction.quantiles)[None, :], LEVELS)
            index = float(posterior.gittins(q.generated_tokens)[0])  # else the remaining tokens rank
        waited_s = dispatch.waited_s(now_s) if entry.state is State.WAITING else dispatch.queued_for_s
        lengths = (q.prompt_tokens, q.generated_tokens, entry.predicted, entry.remaining, index)
        past = (entry.dispatches - 1, dispatch.preemptions)
        service = self._service.of(client.tenant)
        key = self._key_of(now_s, q.arrival_s, *lengths, waited_s, client.priority, *past, service, entry.batch)
        key = math.inf if math.isnan(key) else key
        floats = (q.arrival_s, *lengths[2:], dispatch.queued_for_s, dispatch.queued_s, key)
        self._columns[entry.row] = (*floats, *lengths[:2], client.priority, *past, entry.batch, q.id, client.tenant)
        return key

    def key(self, entry: Entry) -> float:
        """Return the stored key."""
        key: float = self._keys.item(entry.row)
        return key

    def running_keys(self, now_s: float, running: Sequence[Entry]) -> list[float]:
        """Return the keys of requests at workers; keys that do not change with time come from the store."""
        if self.rank.every_step or self._uses_service:
            rows = np.fromiter((entry.row for entry in running), np.int64, len(running))
            return list(self.keys(now_s, rows, waiting=False).tolist())
        return [self.key(one) for one in running]

    def keys(self, now_s: float, rows: Integers, *, waiting: bool) -> Floats:
        """Return the keys [n] of rows that are all waiting or all at workers."""
        columns = {name: self._columns[name][rows] for name in self._arguments}
        if waiting and "queued_for_s" in columns:
            columns["queued_for_s"] = columns["queued_for_s"] + (now_s - self._columns["queued_s"][rows])
        if self._uses_service:
            tenants, inverse = np.unique(self._columns["tenant"][rows], return_inverse=True)
            columns["service_tokens"] = np.array([self._service.of(one) for one in tenants.tolist()], float)[inverse]
        # A rank without arguments still needs one column that says how many keys there are.
        computed = keys(self.rank, columns or {"arrival_s": np.zeros(len(rows))}, now_s)
        computed[np.isnan(computed)] = math.inf
        return computed

    def sort(self, rows: Integers, keys: Floats) -> list[tuple[float, float, int, int]]:
        """Store the keys; return (key, arrival, id, row) in this order."""
        self._keys[rows] = keys
        arrival_s, ids = self._columns["arrival_s"][rows], self._columns["id"][rows]
        order = np.argsort(keys)
        ranked = keys[order]
        if (ranked[1:] == ranked[:-1]).any():
            order = np.lexsort((ids, arrival_s, keys))
        columns = (keys[order], arrival_s[order], ids[order], rows[order])
        return list(zip(*(column.tolist() for column in columns), strict=True))
