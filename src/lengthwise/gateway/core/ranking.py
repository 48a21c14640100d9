"""The keys that order requests. The rank computes them for one request after a change, or for many at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from lengthwise.gateway.request import LengthPrediction, Request
from lengthwise.policy.compile import interpreted, keys
from lengthwise.policy.contracts import SERVICE_OUTPUT_WEIGHT, Policy
from lengthwise.statistics import Floats, Ints

PREFILL_WEIGHT = 0.1  # cost of a prompt token in output tokens: a batch computes prompts about ten times as fast


class State(Enum):
    """The state of a live request: one that was admitted and has not been removed."""

    BINNED = "binned"  # in a bin
    WAITING = "waiting"  # in the queue
    RUNNING = "running"  # at a worker
    PREEMPTING = "preempting"  # still at its worker, to be aborted and requeued
    DEFERRED = "deferred"  # refused by engines, and queued again later
    LOST = "lost"  # its worker is gone; the caller requeues or removes the request


@dataclass(slots=True, eq=False)
class PreemptionState:
    """State of a request for preemptions at its current worker. Each dispatch starts with a new object."""

    window_end: int = 0  # generated tokens at which the current window ends
    protected_until: int = 0  # generated tokens below which the request is not preempted
    nonpreemptible: bool = False  # whether the request cannot be resumed elsewhere
    preempted_s: float = math.nan  # time of the decision to preempt it; NaN: none


@dataclass(slots=True, eq=False)
class Entry:
    """A live request and its scheduling state."""

    request: Request
    row: int = -1  # row in the columns of ``Ranker``; -1 none
    state: State = State.WAITING
    predicted_tokens: float = 0.0  # predicted length of the complete output, at most the requested maximum
    overdue: bool = False  # whether the request has waited ``max_wait_s``, so that it comes first
    remaining_tokens: float = 1.0  # predicted remaining tokens, at least 1
    worker: str = ""  # current or last worker; "" never dispatched
    work: float = 0.0  # remaining tokens plus the cost of computing its context, in output tokens
    peak_kv_tokens: float = 0.0  # predicted KV tokens of the request at its end
    charged_tokens: float = 0.0  # output tokens for which its tenant has been charged
    dispatches: int = 0  # number of its dispatches
    preemption: PreemptionState = field(default_factory=PreemptionState)
    batch: int = 0  # number of the batch with which it left its bin, counted over all bins; 0 none
    last_token_s: float = math.nan  # time of its last token since its dispatch; NaN none
    posterior_remaining: float = math.nan  # cached posterior mean of the remaining tokens; NaN not computed

    def set_prediction(self, length_prediction: LengthPrediction) -> None:
        """Store a prediction. Its length is limited to the request's ``max_tokens``; NaN counts as ``max_tokens``."""
        request = self.request
        request.length_prediction, self.posterior_remaining = length_prediction, math.nan
        max_tokens, total = float(max(1, request.max_tokens)), length_prediction.total_tokens
        self.predicted_tokens = max_tokens if math.isnan(total) else min(max(total, 0.0), max_tokens)
        self.update_remaining()

    def update_remaining(self) -> None:
        """Recompute remaining tokens, work and peak of KV tokens from the prediction and the tokens so far."""
        generated = self.request.generated_tokens
        context = self.request.prompt_tokens + generated
        self.remaining_tokens = remaining = max(1.0, self.predicted_tokens - generated)
        self.work, self.peak_kv_tokens = remaining + PREFILL_WEIGHT * context, context + remaining


_FLOATS = ("arrival_s", "predicted_tokens", "remaining_tokens", "gittins_rank", "queued_for_s", "enqueued_at_s", "key")
_INTEGERS = ("prompt_tokens", "generated_tokens", "priority", "admission", "last_preemption", "batch", "id", "tenant")
_COLUMNS = np.dtype([(name, np.float64) for name in _FLOATS] + [(name, np.int64) for name in _INTEGERS])
_MIN_ROWS = 64


class TenantService:
    """Counts the service that each tenant gets, in weighted tokens (virtual token counter, Sheng et al. 2024).

    A request's first dispatch charges its tenant for the prompt. Every dispatch charges twice the predicted output,
    which is later corrected to the generated tokens. When a tenant starts to wait, its counter is raised to the least
    counter of the waiting tenants, so that a tenant earns no credit while it sends no requests. A tenant of weight 2
    is charged half of its tokens, so that it gets twice as many as a tenant of weight 1 while both wait.
    """

    def __init__(self) -> None:
        self.weights: Mapping[int, float] = {}  # of tenants; all others have weight 1
        self.served: dict[int, float] = {}  # weighted tokens of each tenant
        self._waiting: dict[int, int] = {}
        self.level = 0.0  # smallest counter of the tenants that waited last

    def of(self, tenant: int) -> float:
        """Return the weighted tokens of service that the tenant has had."""
        return self.served.get(tenant, 0.0)

    def without(self, entry: Entry) -> float:
        """Return the service of the request's tenant, without the charge for this request."""
        q = entry.request
        tenant, output = q.client.tenant, SERVICE_OUTPUT_WEIGHT * entry.charged_tokens
        weight = self.weights.get(tenant, 1.0)
        return self.of(tenant) - q.prompt_tokens / weight - output / weight

    def start_waiting(self, tenant: int) -> None:
        """Count one more waiting request of the tenant."""
        if tenant not in self._waiting:
            level = min((self.of(one) for one in self._waiting), default=self.level)
            self.served[tenant] = max(self.of(tenant), level)
            self._waiting[tenant] = 0
        self._waiting[tenant] += 1

    def stop_waiting(self, tenant: int) -> None:
        """Count one waiting request less. If a tenant later starts to wait alone, this counter is its minimum."""
        self._waiting[tenant] -= 1
        if self._waiting[tenant] == 0:
            del self._waiting[tenant]
            self.level = self.of(tenant)

    def set_charge(self, entry: Entry, prompt_tokens: int, output_tokens: float) -> None:
        """Charge the tenant for prompt tokens, and replace its charge for the request's output by ``output_tokens``."""
        more = SERVICE_OUTPUT_WEIGHT * (output_tokens - entry.charged_tokens)
        tenant = entry.request.client.tenant
        weight = self.weights.get(tenant, 1.0)
        self.served[tenant] = self.of(tenant) + prompt_tokens / weight + more / weight
        entry.charged_tokens = output_tokens


class Ranker:
    """Computes the keys of live requests by the rank. A NaN, which a user's rank may return, becomes inf.

    Columns store the arguments of the rank, with one row for each live request.
    """

    def __init__(self, rank: Policy, service: TenantService) -> None:
        self.rank, self._service = rank, service
        self._entries: list[Entry | None] = [None] * _MIN_ROWS
        self._key_of = interpreted(rank)
        self._arguments = [name for name in rank.arguments if name not in ("now_s", "service_tokens")]
        self._uses_gittins, self._uses_service = rank.uses("gittins_rank"), rank.uses("service_tokens")
        self._columns = np.zeros(_MIN_ROWS, _COLUMNS)
        self._keys = self._columns["key"]
        self._free = list(range(_MIN_ROWS))[::-1]

    def add(self, entry: Entry) -> None:
        """Assign a row of the columns to the request."""
        if not self._free:
            rows = len(self._entries)
            self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)])
            self._keys = self._columns["key"]
            self._free = list(range(rows, 2 * rows))[::-1]
            self._entries += [None] * rows
        entry.row = self._free.pop()
        self._entries[entry.row] = entry

    def entry(self, row: int) -> Entry:
        """Return the live request that has this row."""
        entry = self._entries[row]
        assert entry is not None, "a row in use has a live request"
        return entry

    def remove(self, entry: Entry) -> None:
        """Free the row of the request."""
        self._free.append(entry.row)
        self._entries[entry.row] = None
        entry.row = -1

    def update(self, now_s: float, entry: Entry) -> float:
        """Compute a request's key, store it with the request's other columns, and return it."""
        q, gittins_rank = entry.request, entry.remaining_tokens  # without quantiles, the rank is the remaining tokens
        client, dispatch = q.client, q.dispatch
        if self._uses_gittins and q.length_prediction.quantiles is not None:
            from lengthwise.predict import LEVELS, LengthDistribution

            posterior = LengthDistribution(np.asarray(q.length_prediction.quantiles)[None, :], LEVELS)
            gittins_rank = float(posterior.gittins(q.generated_tokens)[0])
        waited_s = dispatch.waited_s(now_s) if entry.state is State.WAITING else dispatch.queued_for_s
        lengths = (q.prompt_tokens, q.generated_tokens, entry.predicted_tokens, entry.remaining_tokens, gittins_rank)
        past = (dispatch.dispatch_number, dispatch.last_preemption)
        service = self._service.of(client.tenant)
        key = self._key_of(now_s, q.arrival_s, *lengths, waited_s, client.priority, *past, service, entry.batch)
        key = math.inf if math.isnan(key) else key
        floats = (q.arrival_s, *lengths[2:], dispatch.queued_for_s, dispatch.enqueued_at_s, key)
        self._columns[entry.row] = (*floats, *lengths[:2], client.priority, *past, entry.batch, q.id, client.tenant)
        return key

    def key(self, entry: Entry) -> float:
        """Return the stored key of a request."""
        key: float = self._keys.item(entry.row)
        return key

    def running_keys(self, now_s: float, running: Sequence[Entry]) -> list[float]:
        """Return the keys of running requests, recomputed if they change with time or with the tenants' service."""
        if self.rank.every_step or self._uses_service:
            rows = np.fromiter((entry.row for entry in running), np.int64, len(running))
            return list(self.keys(now_s, rows, waiting=False).tolist())
        return [self.key(one) for one in running]

    def keys(self, now_s: float, rows: Ints, *, waiting: bool) -> Floats:
        """Compute the keys of the requests in these rows ([n]), which are either all waiting or all running."""
        columns = {name: self._columns[name][rows] for name in self._arguments}
        if waiting and "queued_for_s" in columns:
            columns["queued_for_s"] = columns["queued_for_s"] + (now_s - self._columns["enqueued_at_s"][rows])
        if self._uses_service:
            tenants, inverse = np.unique(self._columns["tenant"][rows], return_inverse=True)
            columns["service_tokens"] = np.array([self._service.of(one) for one in tenants.tolist()], float)[inverse]
        # A rank without arguments still needs a column, from which ``keys`` takes the number of requests.
        computed = keys(self.rank, columns or {"arrival_s": np.zeros(len(rows))}, now_s)
        computed[np.isnan(computed)] = math.inf
        return computed

    def sort(self, rows: Ints, keys: Floats) -> list[tuple[float, float, int, int]]:
        """Store new keys of some rows ([n]). Return (key, arrival, id, row) for each row, in sorted order."""
        self._keys[rows] = keys
        arrival_s, ids = self._columns["arrival_s"][rows], self._columns["id"][rows]
        order = np.argsort(keys)
        ranked = keys[order]
        if (ranked[1:] == ranked[:-1]).any():
            order = np.lexsort((ids, arrival_s, keys))
        columns = (keys[order], arrival_s[order], ids[order], rows[order])
        return list(zip(*(column.tolist() for column in columns), strict=True))
