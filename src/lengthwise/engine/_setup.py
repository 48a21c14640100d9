"""What a run needs, resolved once for both engines: numbers, columns, policy functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy.typing as npt

from lengthwise.engine._checks import Policies
from lengthwise.engine._lists import Followers, Rows
from lengthwise.policy import known
from lengthwise.schema.deployment import Deployment, Handover
from lengthwise.schema.errors import PolicyError

Array = npt.NDArray[Any]
Function = Callable[..., Any]
_SERIES_BINS = 2048


@dataclass(frozen=True)
class Setup:
    """One run before it starts. The policy functions take their axis' full argument list.

    ``there`` is the side that decodes, where one is apart: a setup of its own over the same requests, whose replicas
    are numbered from ``first`` on and whose requests come by ``handover``. ``all_replicas`` are those of both sides.
    """

    deployment: Deployment
    policies: Policies
    rank: Function
    leave: Function
    batching: Function
    memory: Function
    router: Function
    takeover: Function
    binning: Function
    arrival_s: Array
    prompt: Array
    output: Array
    predicted: Array
    rows: Rows
    priority: Array
    tenant: Array
    draws: Array
    results: Array
    replica_rows: Array
    histogram: Array
    empty_plan: tuple[int, int, int]
    limit_s: float
    concurrency: int
    followers: Followers | None = None
    first: int = 0
    all_replicas: int = 1
    there: Setup | None = None
    handover: Handover = Handover()

    @property
    def functions(self) -> tuple[Function, ...]:
        """The policies in the order in which the kernel takes them."""
        return tuple(getattr(self, field.name) for field in fields(self.policies))

    @property
    def replicas(self) -> int:
        return self.deployment.parallel.replicas

    @property
    def pp(self) -> int:
        return len(self.deployment.cost.stage_layers)

    @property
    def flights(self) -> int:
        """Steps of a replica that may be in its pipeline at a time."""
        return self.deployment.limits.max_in_flight or self.pp

    @property
    def total_blocks(self) -> int:
        return self.deployment.kv.num_blocks

    @property
    def block_size(self) -> int:
        return self.deployment.kv.block_size

    @property
    def watermark_blocks(self) -> int:
        return int(self.deployment.limits.watermark * self.total_blocks)

    @property
    def max_num_seqs(self) -> int:
        return self.deployment.limits.max_num_seqs

    @property
    def max_step_seqs(self) -> int:
        return self.deployment.limits.max_step_seqs or self.max_num_seqs

    @property
    def token_budget(self) -> int:
        return self.deployment.limits.max_num_batched_tokens

    @property
    def max_model_len(self) -> int:
        return self.deployment.max_model_len

    @property
    def timeout_s(self) -> float:
        return self.deployment.limits.timeout_s

    @property
    def swap(self) -> bool:
        return self.deployment.scheduler.preempt == "swap"

    @property
    def finds_again(self) -> bool:
        return self.deployment.limits.enable_prefix_caching

    @property
    def swap_s_per_block(self) -> float:
        return self.deployment.kv.swap_s_per_block

    @property
    def closed(self) -> bool:
        return self.concurrency > 0

    @property
    def follows(self) -> bool:
        """Whether requests come after others."""
        return self.followers is not None

    @property
    def central(self) -> bool:
        return self.policies.router == known("router")["central"]

    @property
    def rekey(self) -> bool:
        return self.policies.rank.every_step

    @property
    def takes_over(self) -> bool:
        return self.policies.takeover != known("takeover")["never"]

    @property
    def bins(self) -> int:
        """Bins a queue; 0: arrivals join it at once."""
        return 0 if self.deployment.scheduler.binning is None else self.policies.binning.bins

    @property
    def window(self) -> int:
        """Steps after which a replica looks for takeovers again."""
        return self.deployment.scheduler.window_tokens

    @property
    def max_wait_s(self) -> float:
        return self.deployment.scheduler.max_wait_s

    @property
    def bin_wait_s(self) -> float:
        """How long the first of a bin waits there: no bin outlasts a bound on waiting."""
        return min(self.deployment.scheduler.batch_wait_s, self.max_wait_s, self.timeout_s)

    @property
    def charges(self) -> bool:
        """Whether tenants' service is counted."""
        return self.policies.rank.uses("service_tokens") or self.policies.leave.uses("service_tokens")

    @property
    def counts_steps(self) -> bool:
        return self.policies.batching.uses(
            "steps_since_admit", "ended_since_admit", "phase_steps", "phase_rounds"
        )

    @property
    def tenants(self) -> int:
        return int(self.tenant.max()) + 1 if self.charges else 1

    @property
    def needs_peak(self) -> bool:
        return self.policies.memory.uses("peak_tokens")

    @property
    def series_bins(self) -> int:
        """Bins of the time series a replica: a power of two, fewer where replicas are many."""
        return max(64, _SERIES_BINS >> max(0, math.ceil(math.log2(self.all_replicas)) - 3))

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)

    def request(self, kind: Callable[..., Any], i: int, arrival_s: float) -> Any:
        """Request ``i`` as an object of the reference."""
        return kind(
            i,
            arrival_s,
            int(self.prompt[i]),
            int(self.output[i]),
            int(self.priority[i]),
            int(self.tenant[i]) if self.charges else 0,
        )

    def predicted_at(self, i: int, generated: int) -> tuple[float, float]:
        """(total, index) tokens predicted of request ``i`` once it had produced so many."""
        rows = self.rows
        if rows.window == 0:
            predicted = float(self.predicted[i])
            return predicted, max(1.0, predicted - generated)
        row = min(int(rows.start[i]) + generated // rows.window, int(rows.start[i + 1]) - 1)
        return float(rows.total[row]), float(rows.index[row])

    def remaining(self, q: Any) -> float:
        """Predicted tokens still to come, at least 1."""
        return max(1.0, self.predicted_at(q.index, q.generated)[0] - int(q.generated))

    def whole_remaining(self, q: Any, more: int = 0) -> int:
        """As ``remaining``, the prediction rounded up to whole tokens; after ``more`` than were produced."""
        generated = int(q.generated) + more
        return max(1, math.ceil(self.predicted_at(q.index, generated)[0]) - generated)

    def key(self, function: Function, now_s: float, q: Any, service: float) -> float:
        """A rank or leave key; raises PolicyError when it is NaN."""
        predicted, index = self.predicted_at(q.index, q.generated)
        key: float = function(
            now_s,
            q.arrival_s,
            q.prompt,
            q.generated,
            predicted,
            max(1.0, predicted - q.generated),
            index,
            q.waited_s + (now_s - q.queued_s if q.waiting else 0.0),
            q.priority,
            q.admission,
            q.eviction,
            service,
            q.batch,
        )
        if math.isnan(key):
            raise self.bad_rank(q.index)
        return key

    def ask_memory(
        self, context: int, chunk: int, predicted: float, free: int, resident: int, peak: int
    ) -> int:
        """What the memory policy says to a request."""
        blocks: int = self.memory(
            context,
            chunk,
            predicted,
            self.max_model_len,
            self.block_size,
            free,
            self.total_blocks,
            self.watermark_blocks,
            resident,
            peak,
        )
        return blocks

    def bin_of(self, i: int) -> int:
        """The bin of request ``i``; raises PolicyError when there is none of this number."""
        number: int = self.binning(float(self.predicted[i]), int(self.prompt[i]))
        if not 0 <= number < self.bins:
            raise self.bad_bin(number)
        return number

    def outstanding(self, i: int) -> int:
        """Tokens that a router counts for request ``i``: its prompt and its predicted output."""
        return int(self.prompt[i]) + math.ceil(float(self.predicted[i]))

    def bad_rank(self, request: int) -> PolicyError:
        p = self.policies
        return PolicyError(
            f"rank policy {p.rank.name!r} or leave policy {p.leave.name!r} returned NaN for request {request}; "
            "a key must be a number"
        )

    def bad_memory(self, blocks: int) -> PolicyError:
        return PolicyError(
            f"memory policy {self.policies.memory.name!r} let a request in that needs {blocks} blocks when fewer "
            "are free; return -1 to make it wait"
        )

    def bad_route(self, replica: int) -> PolicyError:
        return PolicyError(
            f"router {self.policies.router.name!r} chose replica {replica}; there are {self.replicas}, from 0"
        )

    def bad_bin(self, number: int) -> PolicyError:
        return PolicyError(
            f"binning {self.policies.binning.name!r} chose bin {number}; there are {self.bins}, from 0"
        )

    def bad_takeover(self, request: int) -> PolicyError:
        return PolicyError(
            f"takeover policy {self.policies.takeover.name!r} returned NaN for waiting request {request}; "
            "it must return a number"
        )
