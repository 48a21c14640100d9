"""What runs: a model on GPUs, cut, scheduled and priced."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from lengthwise.schema.cost_tables import CostTables
from lengthwise.schema.errors import InputError
from lengthwise.schema.specs import GpuSpec, ModelSpec, NodeSpec


@dataclass(frozen=True)
class Parallelism:
    """Tensor-parallel degree, pipeline stages, and independent replicas.

    ``single_stages`` of the stages are one GPU each (partial tensor parallelism), the others ``tp`` GPUs.
    """

    tp: int = 1
    pp: int = 1
    replicas: int = 1
    single_stages: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.single_stages <= self.pp:
            raise InputError(f"single_stages must be from 0 to pp, {self.pp}; it is {self.single_stages!r}")

    @property
    def gpus(self) -> int:
        """GPUs of the whole deployment."""
        return (self.tp * (self.pp - self.single_stages) + self.single_stages) * self.replicas


@dataclass(frozen=True)
class EngineLimits:
    """The engine's knobs under their vLLM names.

    ``max_num_seqs`` bounds the sequences resident on a replica, ``max_step_seqs`` those of
    one step (None: the same). ``max_model_len`` None takes the model's own, cut to what the
    KV cache holds. ``timeout_s`` is when a client gives up, counted from its send (noticed once
    the request has entered). ``enable_prefix_caching``: a
    request that was evicted computes again only what others have taken of its blocks (prompts
    share none here). ``max_in_flight`` bounds the steps of a replica that are in its pipeline at a time, waiting
    between stages included; None: as many as it has stages.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None
    max_step_seqs: int | None = None
    watermark: float = 0.01
    weight_dtype: str | None = None
    kv_dtype: str | None = None
    timeout_s: float = float("inf")
    enable_prefix_caching: bool = False
    max_in_flight: int | None = None

    def __post_init__(self) -> None:
        counts = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "block_size": 1}
        optional = {"max_model_len": 2, "max_step_seqs": 1, "max_in_flight": 1}
        given = {name: least for name, least in optional.items() if getattr(self, name) is not None}
        for name, least in (counts | given).items():
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or value < least:
                raise InputError(f"{name} must be a whole number of at least {least}; it is {value!r}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise InputError(
                f"gpu_memory_utilization must be above 0 and at most 1; it is {self.gpu_memory_utilization}"
            )
        if not 0 <= self.watermark < 1:
            raise InputError(f"watermark must be at least 0 and below 1; it is {self.watermark}")
        if not self.timeout_s > 0:
            raise InputError(f"timeout_s must be above 0; it is {self.timeout_s}")


@dataclass(frozen=True)
class Scheduler:
    """A point on the axes of a scheduler; policies are names or policy objects.

    Attributes:
        rank: Orders the waiting requests (smallest first).
        leave: Orders the running ones when memory runs out (largest leaves first).
        batching: Forms a step.
        memory: Admits to KV memory.
        preempt: How one leaves: "recompute" or "swap".
        router: Picks a replica.
        takeover: Whether a waiting request may take the place of a running one.
        binning: Gathers arrivals into bins of like length; full bins wait as batches (None: no bins).
        max_wait_s: Starvation bound. Who has waited so long in all (from the client's send on) goes before
            everybody who has not, in order of arrival, and is not made to leave for another.
        batch_wait_s: How long after its client's send the first of a bin waits at most for the bin to fill.
        window_tokens: A replica looks for takeovers after an arrival that goes before all who wait,
            and again after so many steps, in which each running request has produced as many tokens.
    """

    rank: Any = "fcfs"
    leave: Any = "latest_admitted"
    batching: Any = "unified"
    memory: Any = "paged"
    preempt: str = "recompute"
    router: Any = "round_robin"
    takeover: Any = "never"
    binning: Any = None
    max_wait_s: float = float("inf")
    batch_wait_s: float = float("inf")
    window_tokens: int = 50

    def __post_init__(self) -> None:
        for name in ("max_wait_s", "batch_wait_s"):
            if not getattr(self, name) >= 0:
                raise InputError(f"{name} must be at least 0; it is {getattr(self, name)}")
        if not isinstance(self.window_tokens, int | np.integer) or self.window_tokens < 1:
            raise InputError(f"window_tokens must be a whole number of at least 1; it is {self.window_tokens!r}")


@dataclass(frozen=True)
class KvPlan:
    """What one replica's memory holds. Bytes are of the fullest GPU of the replica."""

    num_blocks: int
    block_size: int
    weight_bytes: float
    activation_bytes: float
    kv_bytes_per_block: float
    available_bytes: float
    swap_s_per_block: float = 0.0
    planner: str = "lengthwise"


@dataclass(frozen=True)
class Handover:
    """How a request's KV cache gets from the replica that computed its prompt to the one that decodes it.

    A transfer takes ``fixed_s`` and the time in which ``bytes_per_s`` moves ``bytes_per_token`` for each cached
    token; steps of both sides go on beside it. ``one_at_a_time``: a replica sends one request at a time, and
    receives one at a time; the others wait in line, in the order in which their transfers were let in.
    """

    fixed_s: float = 0.0
    bytes_per_token: float = 0.0
    bytes_per_s: float = float("inf")
    one_at_a_time: bool = True

    def __post_init__(self) -> None:
        for name in ("fixed_s", "bytes_per_token"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InputError(f"{name} must be at least 0 and finite; it is {getattr(self, name)}")
        if not self.bytes_per_s > 0:
            raise InputError(f"bytes_per_s must be above 0; it is {self.bytes_per_s}")

    @property
    def token_s(self) -> float:
        """Seconds of one cached token."""
        return self.bytes_per_token / self.bytes_per_s


@dataclass(frozen=True)
class DecodeSide:
    """Replicas that only decode what those of the deployment have prefilled.

    Their numbers follow those of the prefilling ones. Rank, leave, bounds on waiting, block size, ``max_model_len`` and
    a client's patience are those of the deployment, for both sides.

    Attributes:
        parallel: How a decoding replica is cut, and how many there are.
        limits: Its engine's knobs.
        cost: What its steps take.
        kv: What its memory holds.
        kv_transfer: What it takes to get there.
        batching: Forms a step.
        memory: Admits to KV memory; asked for a whole request when its transfer is to start.
        preempt: How one leaves: "recompute" goes back to the replica that prefilled it, "swap" stays.
        router: Picks a decoding replica when a prompt is through.
    """

    parallel: Parallelism
    limits: EngineLimits
    cost: CostTables
    kv: KvPlan
    kv_transfer: Handover = Handover()
    batching: Any = "unified"
    memory: Any = "paged"
    preempt: str = "recompute"
    router: Any = "round_robin"


@dataclass(frozen=True)
class Deployment:
    """Everything the engine needs, resolved: no names to look up, no files to read.

    ``decode``: replicas apart that decode; the others then only prefill. None: every replica does both.
    """

    model: ModelSpec
    gpu: GpuSpec
    node: NodeSpec
    parallel: Parallelism
    limits: EngineLimits
    scheduler: Scheduler
    cost: CostTables
    kv: KvPlan
    max_model_len: int
    name: str = field(default="")
    decode: DecodeSide | None = None

    @property
    def price_per_hour_usd(self) -> float:
        """What all GPUs cost for an hour."""
        return self.gpus * self.gpu.price_per_hour_usd

    @property
    def gpus(self) -> int:
        """GPUs of both sides."""
        return self.parallel.gpus + (self.decode.parallel.gpus if self.decode else 0)

    def decoding(self) -> Deployment:
        """The decode side as a deployment of its own, under the rank, the waits and the clients of the whole.

        Raises:
            InputError: There is no decode side.
        """
        there = self.decode
        if there is None:
            raise InputError("there is no decode side; give the deployment one")
        axes = {"batching": there.batching, "memory": there.memory, "router": there.router}
        scheduler = replace(self.scheduler, **axes, preempt=there.preempt, takeover="never", binning=None)
        return replace(
            self,
            parallel=there.parallel,
            limits=replace(there.limits, timeout_s=self.limits.timeout_s, enable_prefix_caching=False),
            scheduler=scheduler,
            cost=there.cost,
            kv=there.kv,
            decode=None,
        )

    def require_one_side(self, owner: str) -> None:
        """Nothing, where every replica does both.

        Raises:
            InputError: There is a decode side, and ``owner`` does not know what to make of it.
        """
        if self.decode is not None:
            raise InputError(
                f"{owner} takes no decode side yet: every replica must prefill and decode. Take decode out of the "
                "deployment ([deployment.decode] in a scenario)"
            )
