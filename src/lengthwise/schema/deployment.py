"""Defines deployments: a model on GPUs, with its parallelism, scheduler, costs and memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lengthwise.schema.cost_tables import CostTables
from lengthwise.schema.errors import InputError, PolicyError, UnknownNameError
from lengthwise.schema.specs import GB, GpuSpec, ModelSpec, NodeSpec
from lengthwise.schema.speculation import Speculation
from lengthwise.schema.workload import Workload

ALL2ALL_BACKENDS = ("allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency")


@dataclass(frozen=True)
class Parallelism:
    """Tensor-parallel degree, pipeline stages, data-parallel ranks, expert parallelism and independent replicas.

    A replica has ``dp`` data-parallel ranks of ``tp`` x ``pp`` GPUs. Each rank has a scheduler and a KV cache of its
    own, and all ranks of a replica step together. The experts of a layer are divided over ``ep`` GPUs (or groups of
    GPUs) of the ``tp`` x ``dp`` GPUs of a stage, and each expert's matrices over the ``tp`` x ``dp`` / ``ep`` GPUs of
    such a group.
    """

    tp: int = 1
    pp: int = 1
    replicas: int = 1
    single_stages: int = 0  # stages of one GPU each (partial tensor parallelism); the others have ``tp`` GPUs
    dp: int = 1
    ep: int = 1
    # With EPLB: copies of a layer's experts beyond the first of each (vLLM's num_redundant_experts); None: no EPLB.
    redundant_experts: int | None = None
    all2all_backend: str = "allgather_reducescatter"  # how ranks exchange tokens: one of ``ALL2ALL_BACKENDS``

    def __post_init__(self) -> None:
        if self.all2all_backend not in ALL2ALL_BACKENDS:
            raise UnknownNameError("all2all_backend", self.all2all_backend, ALL2ALL_BACKENDS)
        if (count := self.redundant_experts) is not None and (not isinstance(count, int | np.integer) or count < 0):
            raise InputError(f"redundant_experts must be a whole number of at least 0; it is {count!r}")
        if not 0 <= self.single_stages <= self.pp:
            raise InputError(f"single_stages must be from 0 to pp, {self.pp}; it is {self.single_stages!r}")

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of all replicas."""
        return self.gpus_per_replica * self.replicas

    @property
    def ranks(self) -> int:
        """Return the number of schedulers, each with a KV cache of its own: the data-parallel ranks of all replicas."""
        return self.replicas * self.dp

    @property
    def gpus_per_replica(self) -> int:
        """Return the number of GPUs of one replica."""
        return self.dp * (self.tp * (self.pp - self.single_stages) + self.single_stages)

    @property
    def gpus_per_expert(self) -> int:
        """Return the number of GPUs of a stage that hold parts of the same expert."""
        return self.tp * self.dp // self.ep


@dataclass(frozen=True)
class KVStorage:
    """Storage behind the CPU memory of the replicas: a disk, a file system, or memory of another machine."""

    size_gb: float = float("inf")  # of one replica, or of all if ``shared``; infinite, as vLLM's file system tier
    read_gb_per_s: float = 6.0  # of one replica's link to the storage: an NVMe SSD
    write_gb_per_s: float = 3.0
    latency_s: float = 0.0  # of each read and of each write
    shared: bool = False  # whether replicas find blocks that other replicas have written
    usd_per_gb_hour: float = 0.0  # price of a GB for an hour; 0: the price of the GPUs includes it

    def __post_init__(self) -> None:
        if not self.size_gb >= 0:
            raise InputError(f"kv_offloading.storage.size_gb must be at least 0; it is {self.size_gb}")
        for name in ("read_gb_per_s", "write_gb_per_s"):
            if not getattr(self, name) > 0:
                raise InputError(f"kv_offloading.storage.{name} must be above 0; it is {getattr(self, name)}")
        for name in ("latency_s", "usd_per_gb_hour"):
            if not 0 <= (value := getattr(self, name)) < float("inf"):
                raise InputError(f"kv_offloading.storage.{name} must be at least 0 and finite; it is {value}")
        if self.usd_per_gb_hour and self.size_gb == float("inf"):
            raise InputError(
                "kv_offloading.storage must have a finite size_gb where a GB has a price; it has usd_per_gb_hour "
                f"{self.usd_per_gb_hour:g} and no limit. Give size_gb, or leave the price out"
            )


@dataclass(frozen=True)
class KVOffloading:
    """CPU memory behind the prefix cache of each replica, as vLLM's offloading connector uses it."""

    size_gb: float  # of one replica, all of its GPUs together
    gb_per_s: float = 25.0  # bandwidth between one GPU and CPU memory in each direction: PCIe 4 x16, as measured
    latency_s: float = 0.0  # of each load and of each store
    load: str = "always"  # or "if_faster": only where loading the tokens takes less time than computing them
    outputs: bool = False  # whether the blocks of an output are stored, too, when the request ends
    storage: KVStorage | None = None  # behind the CPU memory
    usd_per_gb_hour: float = 0.0  # price of a GB of CPU memory for an hour; 0: the price of the GPUs includes it

    def __post_init__(self) -> None:
        for name in ("size_gb", "latency_s", "usd_per_gb_hour"):
            if not 0 <= (value := getattr(self, name)) < float("inf"):
                raise InputError(f"kv_offloading.{name} must be at least 0 and finite; it is {value}")
        if not self.gb_per_s > 0:
            raise InputError(f"kv_offloading.gb_per_s must be above 0; it is {self.gb_per_s}")
        if self.load not in LOAD_POLICIES:
            raise UnknownNameError("kv_offloading.load", self.load, LOAD_POLICIES)
        if self.storage and self.storage.size_gb > 0 and self.size_gb == 0:
            raise InputError(
                "kv_offloading.storage needs CPU memory, through which all of its blocks go; kv_offloading.size_gb is "
                "0. Give size_gb, or take storage out"
            )


LOAD_POLICIES = ("always", "if_faster")


PREFIX_CACHES = ("vllm", "sglang")
RADIX_EVICTION_POLICIES = ("lru", "lfu", "slru", "priority", "fifo", "mru", "filo")


@dataclass(frozen=True)
class EngineLimits:
    """Limits and settings of an engine. Those that vLLM has, too, are named as in vLLM, except the dtypes."""

    max_num_seqs: int = 256  # sequences resident on a replica
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    max_model_len: int | None = None  # None: the model's own, cut to the size of the KV cache
    max_step_seqs: int | None = None  # sequences of one step; None: ``max_num_seqs``
    # Share of the KV blocks that admission leaves free; None: the default of the memory policy (0.01 or 0).
    watermark: float | None = None
    weight_dtype: str | None = None
    kv_dtype: str | None = None
    # Seconds after which a client gives up, from when it sends the request. A request that is still in the front end
    # then times out when it enters the engine's queue.
    timeout_s: float = float("inf")
    enable_prefix_caching: bool = False
    prefix_cache: str = "vllm"  # the engine whose rules the prefix cache follows: one of ``PREFIX_CACHES``
    radix_eviction_policy: str = "lru"  # of prefix_cache "sglang": one of ``RADIX_EVICTION_POLICIES``
    kv_offloading: KVOffloading | None = None
    max_in_flight: int | None = None  # running and waiting steps in a replica's pipeline; None: one per stage

    def __post_init__(self) -> None:
        required = {"max_num_seqs": 1, "max_num_batched_tokens": 1, "block_size": 1}
        optional = {"max_model_len": 2, "max_step_seqs": 1, "max_in_flight": 1}
        for name, minimum in (required | optional).items():
            value = getattr(self, name)
            if name in optional and value is None:
                continue
            if not isinstance(value, int | np.integer) or value < minimum:
                raise InputError(f"{name} must be a whole number of at least {minimum}; it is {value!r}")
        share = self.gpu_memory_utilization
        if not 0 < share <= 1:
            raise InputError(f"gpu_memory_utilization must be above 0 and at most 1; it is {share}")
        if self.watermark is not None and not 0 <= self.watermark < 1:
            raise InputError(f"watermark must be at least 0 and below 1; it is {self.watermark}")
        if not self.timeout_s > 0:
            raise InputError(f"timeout_s must be above 0; it is {self.timeout_s}")
        self._check_prefix_cache()

    def _check_prefix_cache(self) -> None:
        if self.prefix_cache not in PREFIX_CACHES:
            raise UnknownNameError("prefix_cache", self.prefix_cache, PREFIX_CACHES)
        if self.radix_eviction_policy not in RADIX_EVICTION_POLICIES:
            raise UnknownNameError("radix_eviction_policy", self.radix_eviction_policy, RADIX_EVICTION_POLICIES)
        if self.radix_eviction_policy != "lru" and self.prefix_cache != "sglang":
            raise InputError(
                f"radix_eviction_policy {self.radix_eviction_policy!r} needs SGLang's radix tree; prefix_cache is "
                f'{self.prefix_cache!r}. Set prefix_cache = "sglang", or leave radix_eviction_policy out'
            )
        if self.kv_offloading is None or self.kv_offloading.size_gb == 0:
            return
        if not self.enable_prefix_caching:
            raise InputError(
                "kv_offloading needs enable_prefix_caching = true, because CPU memory holds blocks of that cache; "
                "it is off. Turn it on, or take kv_offloading out"
            )
        if self.prefix_cache != "vllm":
            raise InputError(
                f'kv_offloading is vLLM\'s offloading connector and needs prefix_cache = "vllm"; it is '
                f"{self.prefix_cache!r}. Change it, or take kv_offloading out"
            )


_WATERMARKS = {"paged": 0.01, "paged_strict": 0.01}
"""Default watermarks by memory policy, as in vLLM v0 and Vidur; for other policies it is 0, as in vLLM v1."""


SCHEDULE_POLICIES = ("fcfs", "lpm", "dfs-weight", "lof", "random")
PREFIX_POLICIES = ("lpm", "dfs-weight")
"""SGLang's orders of its queue, and those of them that look prompts up in the prefix cache."""


@dataclass(frozen=True)
class SglangSettings:
    """SGLang's own settings of its scheduler, named as its flags. ``max_num_batched_tokens`` is its chunk size."""

    schedule_conservativeness: float = 1.0  # scales what admission reserves for outputs; 0 reserves nothing
    max_prefill_tokens: int = 16384  # prompt tokens of a step from which on the step admits no further request
    chunked_prefill: bool = True  # False: prompts are computed in one piece (SGLang's chunked_prefill_size -1)
    enable_mixed_chunk: bool = False  # True: running requests decode beside the chunks of prompts
    # Order of the queue, one of ``SCHEDULE_POLICIES``; only with "fcfs" a ``rank`` and ``max_wait_s`` apply.
    schedule_policy: str = "fcfs"

    def __post_init__(self) -> None:
        if self.schedule_policy not in SCHEDULE_POLICIES:
            raise UnknownNameError("schedule_policy", str(self.schedule_policy), SCHEDULE_POLICIES)
        if not 0 <= self.schedule_conservativeness < float("inf"):
            raise InputError(
                f"schedule_conservativeness must be at least 0 and finite; it is {self.schedule_conservativeness}"
            )
        tokens = self.max_prefill_tokens
        if not isinstance(tokens, int | np.integer) or tokens < 1:
            raise InputError(f"max_prefill_tokens must be a whole number of at least 1; it is {tokens!r}")
        if self.enable_mixed_chunk and not self.chunked_prefill:
            raise InputError(
                "enable_mixed_chunk needs chunked_prefill = true, as decodes join chunks; set it, or leave "
                "enable_mixed_chunk out"
            )


CAPACITY_POLICIES = ("GUARANTEED_NO_EVICT", "MAX_UTILIZATION")
CHUNKING_POLICIES = ("FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS")


@dataclass(frozen=True)
class TrtllmSettings:
    """TensorRT-LLM's own settings of its scheduler, named as its options.

    Its max_num_tokens is ``max_num_batched_tokens``, its max_batch_size is ``max_num_seqs``. ``GUARANTEED_NO_EVICT``
    reserves memory for every request's ``max_tokens``; ``MAX_UTILIZATION`` reserves it for one step, and pauses the
    requests that started last when memory runs out.
    """

    capacity_scheduler_policy: str = "GUARANTEED_NO_EVICT"  # one of ``CAPACITY_POLICIES``
    enable_chunked_prefill: bool = False  # False: prompts are computed in one piece
    context_chunking_policy: str = "FIRST_COME_FIRST_SERVED"  # of chunks: one of ``CHUNKING_POLICIES``

    def __post_init__(self) -> None:
        for name, known in (
            ("capacity_scheduler_policy", CAPACITY_POLICIES),
            ("context_chunking_policy", CHUNKING_POLICIES),
        ):
            if getattr(self, name) not in known:
                raise UnknownNameError(name, str(getattr(self, name)), known)
        if self.context_chunking_policy != CHUNKING_POLICIES[0] and not self.enable_chunked_prefill:
            raise InputError(
                f"context_chunking_policy {self.context_chunking_policy!r} needs enable_chunked_prefill = true; set "
                "it, or leave context_chunking_policy out"
            )


@dataclass(frozen=True)
class PolicyAxes:
    """One policy for each kind of decision, given by its name or as a policy object."""

    rank: Any = "fcfs"  # orders the waiting requests (smallest first)
    victim: Any = "latest_admitted"  # orders the running requests if memory runs out (largest is preempted first)
    batching: Any = "unified"  # forms a step
    memory: Any = "paged"  # admits requests to KV memory
    preemption_mode: str = "recompute"  # or "swap": how a preempted request gets its KV cache back
    router: Any = "round_robin"  # chooses a replica
    preemption: Any = "never"  # whether a waiting request may preempt a running one
    binning: Any = None  # groups arrivals into bins of similar length, and full bins wait as batches; None: no bins


@dataclass(frozen=True)
class Scheduler(PolicyAxes):
    """A scheduler: its policies, its bounds on waiting, and those rules of an engine that no policy expresses."""

    # Starvation bound. A request whose total wait (in the front end, bins and queues) reaches this bound precedes all
    # others, in order of arrival, and no policy preempts it for another; lack of memory may.
    max_wait_s: float = float("inf")
    batch_wait_s: float = float("inf")  # longest wait of a bin's first request, from its arrival, for a full bin
    # Preemptions are considered when an arrival ranks before all waiting requests, and again after this many steps.
    preemption_interval_steps: int = 50
    # SGLang forms the steps, admits by max_tokens and retracts. Of the policies, only ``rank`` and ``router`` apply.
    sglang: SglangSettings | None = None
    # TensorRT-LLM forms the steps, admits and pauses. Of the policies, only ``rank`` and ``router`` apply.
    trtllm: TrtllmSettings | None = None
    # vLLM's, and SGLang's overlap schedule: a step is formed before the outputs of the step before it are known
    async_scheduling: bool = False
    hide_host: bool = False  # with async_scheduling: the host prepares a step while the GPU runs the step before it
    # vLLM's: maximum prompt tokens of one request in a step, unless it is the only request of the replica; 0: no limit
    long_prefill_token_threshold: int = 0
    # vLLM's hybrid KV cache manager plans the memory (``KvGroups``) where the simulator models it; False: layers with
    # windows or chunks cache all tokens (--disable-hybrid-kv-cache-manager), states are set aside for max_num_seqs.
    hybrid_kv_cache: bool = True
    # A request is admitted only while the predicted peak of KV tokens fits (``policy.reservation``). A margin adapts
    # until recomputation takes the share ``max_recompute_share`` of the decoding time of idle memory. Replaces SGLang's
    # own test of memory. ``max_preemptions_per_request`` is a budget of them, to which it adapts, too.
    reserve: bool = False
    max_recompute_share: float = 0.2
    max_preemptions_per_request: float = math.inf

    def __post_init__(self) -> None:
        for name in ("max_wait_s", "batch_wait_s", "max_recompute_share", "max_preemptions_per_request"):
            if not getattr(self, name) >= 0:
                raise InputError(f"{name} must be at least 0; it is {getattr(self, name)}")
        if self.reserve:
            self._check_reserve()
        steps = self.preemption_interval_steps
        if not isinstance(steps, int | np.integer) or steps < 1:
            raise InputError(f"preemption_interval_steps must be a whole number of at least 1; it is {steps!r}")
        tokens = self.long_prefill_token_threshold
        if not isinstance(tokens, int | np.integer) or tokens < 0:
            raise InputError(
                f"long_prefill_token_threshold must be a whole number of tokens, or 0 for no limit; it is {tokens!r}"
            )
        if self.hide_host and not self.async_scheduling:
            raise InputError("hide_host needs async_scheduling = true; set it, or leave hide_host out")
        if self.engine_rules:
            self._check_engine_rules()

    @property
    def engine_rules(self) -> str:
        """Return the engine whose rules form the steps: "sglang", "trtllm", or "" if policies form them."""
        return "sglang" if self.sglang is not None else "trtllm" if self.trtllm is not None else ""

    @property
    def shuffles(self) -> bool:
        """Return whether the order of the queue is drawn at random."""
        return self.sglang is not None and self.sglang.schedule_policy == "random"

    @property
    def reserves_max_tokens(self) -> bool:
        """Return whether every running request has KV memory for all of its ``max_tokens``."""
        return self.trtllm is not None and self.trtllm.capacity_scheduler_policy == "GUARANTEED_NO_EVICT"

    @property
    def reserves_ahead(self) -> bool:
        """Return whether admission keeps KV memory free for tokens that requests have still to compute."""
        by_peak = getattr(self.memory, "name", self.memory) == "predicted_peak"
        return self.reserve or self.reserves_max_tokens or self.sglang is not None or by_peak

    def _check_reserve(self) -> None:
        if self.reserves_max_tokens:
            raise InputError(
                'reserve = true takes the place of GUARANTEED_NO_EVICT, the default of scheduler "trtllm", which '
                "reserves memory for every max_tokens; set scheduler.trtllm = { capacity_scheduler_policy = "
                '"MAX_UTILIZATION" } with it, or leave reserve out'
            )
        if self.async_scheduling:
            raise InputError("reserve = true is not modelled with async_scheduling yet; leave one of them out")
        rules = [getattr(one, "name", one) for one in (self.batching, self.memory)]
        if not self.engine_rules and rules != ["unified", "paged_by_chunk"]:
            raise InputError(
                'reserve = true needs the rules of "vllm_v1" (batching "unified", memory "paged_by_chunk"), "sglang" '
                f'or "trtllm"; the batching is {rules[0]!r} and the memory policy {rules[1]!r}. Take one of these, or '
                "leave reserve out"
            )

    def _check_engine_rules(self) -> None:
        if self.sglang is not None and self.trtllm is not None:
            raise InputError("a scheduler has the rules of one engine; give sglang or trtllm, not both")
        for name in ("victim", "batching", "memory", "preemption_mode", "preemption", "binning"):
            value, default = getattr(self, name), getattr(type(self), name)
            if value != default:
                raise InputError(
                    f'scheduler "{self.engine_rules}" has its own rules instead of a {name}; it is {value!r}. '
                    f"Leave {name} out, or take another scheduler"
                )
        if self.sglang is None or self.sglang.schedule_policy == "fcfs":
            return
        rank = getattr(self.rank, "name", self.rank)
        if rank not in ("fcfs", "queue_order") or self.max_wait_s < float("inf"):
            other = f"max_wait_s {self.max_wait_s:g}" if rank in ("fcfs", "queue_order") else f"rank {rank!r}"
            raise InputError(
                f'schedule_policy "{self.sglang.schedule_policy}" orders the queue by itself, and {other} would change '
                'its order; leave one of them out, or set schedule_policy = "fcfs"'
            )


NULL_BLOCKS = 1  # vLLM's block pool keeps the first of its num_gpu_blocks as a placeholder that no request gets


@dataclass(frozen=True)
class KvGroups:
    """The groups of layers of vLLM's hybrid KV cache manager (vLLM 0.32, v1/core/kv_cache_utils.py).

    All groups take their blocks from one pool. In a group of ``full`` attention a request has blocks for all its
    tokens. A ``local`` group frees the blocks before the sliding window of ``local_tokens`` tokens, or with ``chunked``
    those before the current chunk of that size; models with such groups begin with one of their layers, so that vLLM
    numbers them first. A group of ``states`` (Mamba, linear attention) has one block for each request. A request frees
    blocks when it gets its next ones, so that beyond the window it holds blocks of up to ``in_flight_tokens`` tokens,
    those of a step, or of two under asynchronous scheduling.

    With a prefix cache (``aligned``, vLLM's mamba_cache_mode "align") groups of states are the local ones, with a
    window of two tokens: the state after a token is needed for the next one. A step writes only its last state, so that
    a request holds at most two blocks, and ``aligned_chunk`` ends steps where states are to be cached.
    """

    block_size: int
    full: int
    local: int = 0
    local_tokens: int = 0
    chunked: bool = False
    states: int = 0
    in_flight_tokens: int = 0
    aligned: bool = False

    def skipped(self, computed: int) -> int:
        """Return how many leading blocks a request no longer needs in a local group after ``computed`` tokens."""
        if self.chunked:
            return computed // self.local_tokens * self.local_tokens // self.block_size
        return max(0, computed - self.local_tokens + 1) // self.block_size if self.local else 0

    def blocks(self, tokens: int, computed: int) -> int:
        """Return a request's blocks for ``tokens`` tokens, of which ``computed`` were computed before the step."""
        blocks, skipped = -(-tokens // self.block_size), self.skipped(computed)
        if self.aligned and not computed:
            skipped = blocks - 1
        return self.full * blocks + self.local * self.local_blocks(blocks, skipped) + self.states

    def local_blocks(self, blocks: int, skipped: int) -> int:
        """Return a request's blocks in a local group: of ``blocks``, without the ``skipped`` first ones."""
        return min(blocks - skipped, 2) if self.aligned else blocks - skipped

    def local_cap(self, max_model_len: int) -> int:
        """Return the maximum number of blocks of a request in a local group."""
        if not self.local or self.aligned:
            return 2 * self.aligned
        if self.chunked:
            return -(-min(self.local_tokens + self.in_flight_tokens, max_model_len) // self.block_size)
        return -(-min(self.local_tokens - 1 + self.in_flight_tokens, max_model_len) // self.block_size) + 1

    @property
    def window_blocks(self) -> int:
        """Return the blocks before a token that a window must have to continue a cached prefix there."""
        return 0 if self.chunked or not self.local else -(-(self.local_tokens - 1) // self.block_size)

    def required(self, tokens: int, max_model_len: int, found: int = 0, skipped: int = 0) -> int:
        """Return the blocks that must be free to admit a request of ``tokens`` tokens.

        They include those of its ``found`` blocks in every group, of which local groups lack the first ``skipped``.
        """
        blocks = -(-tokens // self.block_size)
        local = max(min(blocks, self.local_cap(max_model_len)), found) - skipped
        if self.aligned:
            local = 1 + (found > 0)
        return self.full * blocks + self.local * local + self.states

    def longest(self, max_model_len: int) -> int:
        """Return the blocks that the pool must have for one request of ``max_model_len`` tokens."""
        blocks = -(-max_model_len // self.block_size)
        return self.full * blocks + self.local * self.local_cap(max_model_len) + self.states


def aligned_chunk(
    start: int, tokens: int, prompt: int, context: int, junction: int, block_size: int, token_budget: int
) -> int:
    """Return how many of the next ``tokens`` tokens of a context a step computes, so that states can be cached.

    A step ends at the end of a block, at the latest where a request of the same prompt could continue, and at
    ``junction``, where full attention had a longer cached prefix than the states (vLLM's _mamba_block_aligned_split).
    After these ends, and within a block that is larger than a step (``token_budget``), a step may end anywhere. After a
    preemption the ``context`` is longer than the ``prompt``.
    """
    if start >= max(prompt, context - 1):
        return tokens
    end = start + tokens
    if end < max(prompt, context - 1):
        last_full = end // block_size * block_size
        if last_full > start or block_size <= token_budget:
            end = last_full
    if start % block_size > 0:
        end = min(end, (start // block_size + 1) * block_size)
    last = (context - 1) // block_size * block_size
    if start < last:
        end = min(end, last)
    if start < junction:
        end = min(end, junction)
    return max(0, end - start)


@dataclass(frozen=True)
class KvPlan:
    """The memory of one replica. Bytes are those on its fullest GPU.

    Without ``groups`` a request has ``kv_bytes_per_block`` for every ``block_size`` tokens. With them a block is that
    of one group's layers, and a request has blocks in each group.
    """

    num_blocks: int  # blocks that requests can use: vLLM's num_gpu_blocks less NULL_BLOCKS
    block_size: int
    weight_bytes: float
    activation_bytes: float
    kv_bytes_per_block: float
    available_bytes: float
    swap_s_per_block: float = 0.0
    planner: str = "lengthwise"
    groups: KvGroups | None = None
    exchange_bytes: float = 0.0  # in ``activation_bytes``: buffers in which data-parallel ranks exchange tokens

    def longest_blocks(self, max_model_len: int) -> int:
        """Return the blocks that the pool must have for one request of ``max_model_len`` tokens."""
        return self.groups.longest(max_model_len) if self.groups else -(-max_model_len // self.block_size)

    def kv_tokens(self, max_model_len: int) -> int:
        """Return the pool's size in tokens: with groups, those of requests of ``max_model_len``, as vLLM reports it."""
        if self.groups is None:
            return self.num_blocks * self.block_size
        return int(self.num_blocks / self.groups.longest(max_model_len) * max_model_len)

    @property
    def tokens_per_block(self) -> float:
        """Return a request's tokens for each of its blocks, of all groups, before windows free any."""
        return self.block_size / (self.groups.full + self.groups.local if self.groups else 1)


LINK_SHARINGS = ("fcfs", "fair", "none")
KV_LOAD_FAILURE_POLICIES = ("fail", "recompute")


@dataclass(frozen=True)
class KVTransfer:
    """Transfer of a request's KV cache from the prefill replica to the decode replica.

    A transfer takes ``fixed_s`` plus ``bytes_per_token / bytes_per_s`` for each cached token, while both sides continue
    their steps. ``sharing`` is what simultaneous transfers of a replica do. With "fcfs" a replica sends one at a time
    and receives one at a time, in the order in which they were admitted. With "fair" they share the bandwidth of the
    sender and that of the receiver, max-min fair, and ``fixed_s`` follows; a switch between all replicas, which carries
    ``links_at_once`` transfers at full speed, limits their sum. With "none" each has the complete bandwidth.

    With ``layers`` above 0, those of a stage that cache keys and values, a transfer begins with the step that completes
    the prompt, and each layer's part of the cache is sent when the step has computed it: the transfer ends at the
    earliest ``fixed_s`` and the time of one layer's part after the step. The decode replica has the memory from the
    step's start on; where it has none then, or other requests wait for it, the transfer begins after the prefill.

    A prefill replica frees the blocks of a request whose transfer has not started ``timeout_s`` after the prefill. The
    request then fails, or its decode replica recomputes it.
    """

    fixed_s: float = 0.0
    bytes_per_token: float = 0.0
    bytes_per_s: float = float("inf")
    sharing: str = "fcfs"  # one of ``LINK_SHARINGS``
    links_at_once: float = float("inf")  # bandwidth of the switch, in links of a replica; finite with "fair" only
    link: str = ""  # its name, if known
    timeout_s: float = float("inf")
    kv_load_failure_policy: str = "fail"  # one of ``KV_LOAD_FAILURE_POLICIES``
    layers: int = 0  # of a transfer layer by layer; 0: all transfers begin after the prefill

    def __post_init__(self) -> None:
        if self.kv_load_failure_policy not in KV_LOAD_FAILURE_POLICIES:
            raise UnknownNameError("kv_load_failure_policy", self.kv_load_failure_policy, KV_LOAD_FAILURE_POLICIES)
        if not isinstance(self.layers, int | np.integer) or self.layers < 0:
            raise InputError(f"layers of a KV transfer must be a whole number of at least 0; it is {self.layers!r}")
        if not self.timeout_s > 0:
            raise InputError(f"kv_transfer_timeout must be above 0; it is {self.timeout_s}")
        if self.sharing not in LINK_SHARINGS:
            raise UnknownNameError("link_sharing", self.sharing, LINK_SHARINGS)
        if not self.links_at_once > 0:
            raise InputError(f"links_at_once of a KV transfer must be above 0; it is {self.links_at_once}")
        if self.sharing != "fair" and self.links_at_once < float("inf"):
            raise InputError(
                "all KV transfers share the bandwidth decode.switch_gb_per_s, which needs decode.link_sharing = "
                f'"fair"; it is "{self.sharing}". Set it to "fair", or leave switch_gb_per_s out'
            )
        for name in ("fixed_s", "bytes_per_token"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InputError(f"{name} must be at least 0 and finite; it is {getattr(self, name)}")
        if not self.bytes_per_s > 0:
            raise InputError(f"bytes_per_s must be above 0; it is {self.bytes_per_s}")

    @property
    def token_s(self) -> float:
        """Return the seconds that the transfer of one cached token takes."""
        return self.bytes_per_token / self.bytes_per_s


@dataclass(frozen=True)
class DecodeSide:
    """Replicas that decode. The deployment's other replicas prefill the requests.

    Decode replicas are numbered after the prefill replicas. Rank, victim policy, bounds on waiting, block size,
    ``max_model_len`` and timeout of the deployment apply to both sides. The decode side has no prefix cache. Without
    ``gpu`` and ``node`` its replicas have those of the prefill side.

    Conditional disaggregation: decode replicas also prefill prompts of up to ``max_local_prefill_length`` tokens, and
    all prompts that arrive while ``max_prefill_queue_size`` requests or more wait on the prefill side (None: no limit).
    """

    parallel: Parallelism
    limits: EngineLimits
    cost: CostTables
    kv: KvPlan
    kv_transfer: KVTransfer = KVTransfer()
    max_local_prefill_length: int = 0
    max_prefill_queue_size: int | None = None
    batching: Any = "unified"
    # Admission policy of the KV memory; it admits a complete request before the transfer of its cache starts.
    memory: Any = "paged"
    # "recompute": a preempted request returns to the replica that prefilled it; "swap": it stays on its decode replica.
    preemption_mode: str = "recompute"
    router: Any = "round_robin"
    gpu: GpuSpec | None = None
    node: NodeSpec | None = None
    # That of the deployment, whose prefill replicas run the drafter over the prompts; with the costs of this side.
    speculation: Speculation | None = None

    def __post_init__(self) -> None:
        least = {"max_local_prefill_length": 0, "max_prefill_queue_size": 1}
        for name, minimum in least.items():
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int | np.integer) or value < minimum):
                raise InputError(f"decode.{name} must be a whole number of at least {minimum}; it is {value!r}")

    @property
    def prefills(self) -> bool:
        """Return whether the decode replicas also prefill prompts (conditional disaggregation)."""
        return self.max_local_prefill_length > 0 or self.max_prefill_queue_size is not None


_UNIFIED = {
    "batching": ("unified",), "memory": ("paged_by_chunk", "paged"), "victim": ("latest_admitted",),
    "preemption_mode": ("recompute",), "preemption": ("never",),
}  # fmt: skip
"""The policies of vllm_v1 that speculation needs. Rank, router and bins are free."""


@dataclass(frozen=True)
class Deployment:
    """All inputs of the engine, resolved. The engine reads no file, and looks up only names of policies."""

    model: ModelSpec
    gpu: GpuSpec
    node: NodeSpec
    parallel: Parallelism
    limits: EngineLimits
    scheduler: Scheduler
    cost: CostTables
    kv: KvPlan
    max_model_len: int
    name: str = ""
    decode: DecodeSide | None = None  # with a decode side, the replicas of ``parallel`` only prefill
    speculation: Speculation | None = None
    # Further groups of replicas behind the same router; the replicas of ``parallel`` are the first group.
    groups: tuple[Deployment, ...] = ()

    @property
    def replica_groups(self) -> list[Deployment]:
        """Return each group of replicas as a deployment of its own; without ``groups``, this deployment alone."""
        return [replace(self, groups=()), *self.groups] if self.groups else [self]

    @property
    def schedulers(self) -> int:
        """Return the number of schedulers with a KV cache of their own: the ranks of all groups, without decode."""
        return self.parallel.ranks + sum(group.parallel.ranks for group in self.groups)

    @property
    def price_per_hour_usd(self) -> float:
        """Return the price of all GPUs for an hour, plus that of CPU memory and storage behind the prefix caches."""
        usd = self.gpu_price_per_hour_usd
        if (offloading := self.limits.kv_offloading) is not None:
            usd += self.parallel.replicas * offloading.size_gb * offloading.usd_per_gb_hour
            if (storage := offloading.storage) is not None and storage.usd_per_gb_hour:
                usd += (1 if storage.shared else self.parallel.replicas) * storage.size_gb * storage.usd_per_gb_hour
        return usd

    @property
    def gpu_price_per_hour_usd(self) -> float:
        """Return the price of all GPUs for an hour."""
        return sum(side.parallel.gpus * side.gpu.price_per_hour_usd for side in self.sides)

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of all replicas, of all groups, prefill and decode side together."""
        others = sum(group.gpus for group in self.groups)
        return self.parallel.gpus + (self.decode.parallel.gpus if self.decode else 0) + others

    @property
    def gpus_by_name(self) -> dict[str, int]:
        """Return the number of GPUs of each kind."""
        found: dict[str, int] = {}
        for side in self.sides:
            found[side.gpu.name] = found.get(side.gpu.name, 0) + side.parallel.gpus
        return found

    @property
    def hardware(self) -> str:
        """Return the number and the kind of the GPUs as text, such as "8 x H100 + 4 x H200"."""
        return " + ".join(f"{count} x {name}" for name, count in self.gpus_by_name.items())

    @property
    def sides(self) -> tuple[Deployment, ...]:
        """Return the prefill and the decode side as separate deployments, or else each group of replicas."""
        return tuple(self.replica_groups) if self.decode is None else (replace(self, decode=None), self.decoding())

    @property
    def watermark(self) -> float:
        """Return the share of the KV blocks that admission keeps free."""
        memory = self.scheduler.memory
        name = memory if isinstance(memory, str) else memory.name
        default = 0.0 if self.scheduler.engine_rules else _WATERMARKS.get(name, 0.0)
        return default if self.limits.watermark is None else self.limits.watermark

    @property
    def offload_blocks(self) -> int:
        """Return the number of blocks in the CPU memory behind a replica's prefix cache, 0 without such memory."""
        offloading = self.limits.kv_offloading
        return 0 if offloading is None else int(offloading.size_gb * GB / self.offloaded_block_bytes)

    @property
    def storage_blocks(self) -> float:
        """Return the number of blocks in the storage behind the CPU memory, 0 without storage; it may be infinite."""
        if (offloading := self.limits.kv_offloading) is None or (storage := offloading.storage) is None:
            return 0
        return storage.size_gb * GB // self.offloaded_block_bytes if storage.size_gb < math.inf else math.inf

    @property
    def offloaded_block_bytes(self) -> float:
        """Return the bytes of a block in CPU memory and in storage, which hold the parts of all GPUs of a replica."""
        # Every GPU of a stage has MLA's complete cache. With one stage, vLLM offloads one copy of it.
        copies = 1 if self.model.attention.is_mla and self.parallel.pp == 1 else self.parallel.gpus_per_replica
        return self.kv.kv_bytes_per_block * copies

    def decoding(self) -> Deployment:
        """Return the decode side as a separate deployment, which takes from this one what ``DecodeSide`` lacks.

        It has no prefix cache, binning, reservation or preemption by rank. Raises InputError without a decode side.
        """
        side = self.decode
        if side is None:
            raise InputError("there is no decode side; give the deployment one")
        axes = {name: getattr(side, name) for name in ("batching", "memory", "router", "preemption_mode")}
        return replace(
            self,
            gpu=side.gpu or self.gpu,
            node=side.node or self.node,
            parallel=side.parallel,
            limits=replace(
                side.limits, timeout_s=self.limits.timeout_s, enable_prefix_caching=False, kv_offloading=None
            ),
            scheduler=replace(self.scheduler, **axes, preemption="never", binning=None, reserve=False),
            cost=side.cost,
            kv=side.kv,
            decode=None,
            speculation=side.speculation,
        )

    def require_known_rules(self, workload: Workload) -> None:
        """Raise InputError if the simulator does not model this scheduler with these settings and this workload.

        It is a PolicyError if the scheduler admits by ``max_tokens`` and the workload has none.
        """
        self.require_known_settings()
        rules = self.scheduler.engine_rules
        if workload.max_tokens is None and (self.scheduler.reserves_max_tokens or rules == "sglang"):
            policy, other = '"sglang"', "another scheduler"
            if rules == "trtllm":
                policy, other = '"trtllm" with GUARANTEED_NO_EVICT', 'capacity_scheduler_policy = "MAX_UTILIZATION"'
            raise PolicyError(
                f"scheduler {policy} admits requests by their max_tokens, and this workload has none; give max_tokens "
                f'([workload] max_tokens = 512, or {{ kind = "multiple", times = 2.0 }}), or take {other}'
            )

    def require_known_settings(self) -> None:
        """Raise InputError if the simulator does not model this scheduler with these settings."""
        self._require_vllm_rules()
        self._require_rules_of_speculation()
        self.require_like_groups()
        if self.scheduler.reserve and (self.decode is not None or self.limits.kv_offloading is not None):
            part = "disaggregation" if self.decode is not None else "kv_offloading"
            raise InputError(f"reserve = true is not modelled with {part} yet; leave one of them out")
        if not (rules := self.scheduler.engine_rules):
            return
        parts = {
            "disaggregation": self.decode is not None,
            "pipeline parallelism": len(self.cost.stage_layers) > 1,
            "max_in_flight above 1": (self.limits.max_in_flight or 1) > 1,
            "max_step_seqs": self.limits.max_step_seqs is not None,
            "a prefix cache": self.limits.enable_prefix_caching and rules == "trtllm",
            "a watermark": bool(self.limits.watermark),
        }
        if names := " or ".join(name for name, is_set in parts.items() if is_set):
            raise InputError(
                f'scheduler "{rules}" is not modelled with {names} yet; leave that out, or take another scheduler'
            )
        if rules == "sglang" and self.limits.enable_prefix_caching and self.limits.prefix_cache != "sglang":
            raise InputError(
                f'scheduler "sglang" has SGLang\'s own prefix cache; prefix_cache is {self.limits.prefix_cache!r}. Set '
                'engine.prefix_cache = "sglang", or enable_prefix_caching = false'
            )
        order = self.scheduler.sglang.schedule_policy if self.scheduler.sglang else ""
        if order in PREFIX_POLICIES and not self.limits.enable_prefix_caching:
            raise InputError(
                f'schedule_policy "{order}" orders requests by their prefixes in the cache, and there is none: SGLang '
                'then takes "fcfs". Set enable_prefix_caching = true, or schedule_policy = "fcfs"'
            )
        if (settings := self.scheduler.trtllm) is not None:
            least = max(self.limits.max_num_seqs, self.kv.block_size if settings.enable_chunked_prefill else 1)
            if self.limits.max_num_batched_tokens < least:
                raise InputError(
                    'scheduler "trtllm" needs a max_num_batched_tokens (max_num_tokens) of at least max_num_seqs '
                    f"(max_batch_size), and with chunks of at least a block: {least}; it is "
                    f"{self.limits.max_num_batched_tokens}. Raise it, or lower max_num_seqs"
                )

    def require_like_groups(self) -> None:
        """Raise InputError if the groups of replicas differ in what one router and one scheduler must share."""
        if not self.groups:
            return
        parts = {
            "disaggregation": any(one.decode is not None for one in self.replica_groups),
            "data-parallel ranks (dp)": any(one.parallel.dp > 1 for one in self.replica_groups),
            "speculation": any(one.speculation is not None for one in self.replica_groups),
            "kv_offloading": any(one.limits.kv_offloading is not None for one in self.replica_groups),
            "partial tensor parallelism": any(one.cost.other is not None for one in self.replica_groups),
            f'scheduler "{self.scheduler.engine_rules}"': bool(self.scheduler.engine_rules),
            "reserve": self.scheduler.reserve,
        }
        if names := " or ".join(part for part, is_set in parts.items() if is_set):
            raise InputError(f"several groups of replicas are not modelled with {names} yet; leave one of them out")
        common: dict[str, Any] = {
            "model": [one.model.name for one in self.replica_groups],
            "scheduler": [one.scheduler for one in self.replica_groups],
            "max_model_len": [one.max_model_len for one in self.replica_groups],
            "engine.block_size": [one.kv.block_size for one in self.replica_groups],
            "KV cache groups of layers": [one.kv.groups for one in self.replica_groups],
            "front end (host)": [one.cost.front for one in self.replica_groups],
            **{
                f"engine.{name}": [getattr(one.limits, name) for one in self.replica_groups]
                for name in ("timeout_s", "enable_prefix_caching", "prefix_cache", "radix_eviction_policy")
            },
        }
        for name, values in common.items():
            if any(value != values[0] for value in values):
                shown = " and ".join(dict.fromkeys(map(str, values)))
                raise InputError(f"all groups of replicas must have the same {name}; they have {shown}")

    def _rarely_modelled(self) -> dict[str, bool]:
        """Return by name the settings with which few rules of vLLM are modelled; True: this deployment has it."""
        return {
            f'scheduler "{self.scheduler.engine_rules}"': bool(self.scheduler.engine_rules),
            "disaggregation": self.decode is not None,
            "pipeline parallelism": len(self.cost.stage_layers) > 1 or self.cost.other is not None,
            "max_in_flight": self.limits.max_in_flight is not None,
            "max_step_seqs": self.limits.max_step_seqs is not None,
        }

    def _require_vllm_rules(self) -> None:
        """Raise InputError for settings that ``async_scheduling`` or ``long_prefill_token_threshold`` do not cover."""
        scheduler, limits = self.scheduler, self.limits
        parts = {
            **self._rarely_modelled(),
            'prefix_cache "sglang"': limits.enable_prefix_caching
            and limits.prefix_cache != "vllm"
            and not scheduler.engine_rules,
            f"preemption_mode {scheduler.preemption_mode!r}": scheduler.preemption_mode != "recompute",
        }
        others = {
            "timeout_s": math.isfinite(limits.timeout_s),
            "kv_offloading": limits.kv_offloading is not None and limits.kv_offloading.size_gb > 0,
        }
        tokens, most = scheduler.long_prefill_token_threshold, self.max_model_len
        ahead = parts | others | ({'scheduler "sglang"': False} if scheduler.sglang is not None else {})
        rules = {"async_scheduling": (ahead, "false"), "long_prefill_token_threshold": (parts, "0")}
        for name, (refused, off) in rules.items():
            names = " or ".join(part for part, is_set in refused.items() if is_set)
            if getattr(scheduler, name) and names:
                raise InputError(f"{name} is not modelled with {names} yet; leave that out, or set {name} = {off}")
        if tokens > most:
            raise InputError(
                f"long_prefill_token_threshold must be at most max_model_len, {most} tokens; it is {tokens}. Lower it, "
                "or set it to 0 for no limit"
            )
        if tokens and limits.max_num_batched_tokens < limits.max_num_seqs:
            raise InputError(
                "long_prefill_token_threshold needs a max_num_batched_tokens of at least max_num_seqs, "
                f"{limits.max_num_seqs}, as vLLM does; it is {limits.max_num_batched_tokens}. Raise it, or lower "
                "max_num_seqs"
            )

    def _require_rules_of_speculation(self) -> None:
        """Raise InputError if the simulator does not model ``speculation`` with the other settings."""
        speculation, scheduler, limits = self.speculation, self.scheduler, self.limits
        if self.decode is not None and not Speculation.are_alike(speculation, self.decode.speculation):
            raise InputError(
                "both sides must have the same speculation, as the prefill side computes the drafter's KV cache of the "
                f"prompts; the prefill side has {speculation}, the decode side {self.decode.speculation}"
            )
        if speculation is None:
            return
        others = {} if scheduler.engine_rules else _UNIFIED  # an engine's rules set these themselves
        rules = {name: getattr(getattr(scheduler, name), "name", getattr(scheduler, name)) for name in others}
        parts = {
            **self._rarely_modelled(),
            "disaggregation": False,
            'prefix_cache "sglang"': limits.enable_prefix_caching and limits.prefix_cache == "sglang",
            "kv_offloading": limits.kv_offloading is not None and limits.kv_offloading.size_gb > 0,
            "async_scheduling": scheduler.async_scheduling,
            "long_prefill_token_threshold": scheduler.long_prefill_token_threshold > 0,
            "reserve": scheduler.reserve,
            "KV cache groups (hybrid_kv_cache)": self.kv.groups is not None,
            "dense attention masks": self.cost.masked_s > 0,
            **{f"{name} {rules[name]!r}": rules[name] not in values for name, values in others.items()},
        }
        if names := " or ".join(part for part, is_set in parts.items() if is_set):
            raise InputError(
                f"speculation is not modelled with {names} yet; leave that out (it follows the scheduler vllm_v1), or "
                "leave speculation out"
            )
        tokens = limits.max_num_seqs * (1 + speculation.num_speculative_tokens)
        if self.decode is None and limits.max_num_batched_tokens < tokens:
            raise InputError(
                "with speculation, max_num_batched_tokens must be at least max_num_seqs x (1 + "
                f"num_speculative_tokens), {tokens} tokens, so that every sequence can verify its tokens in each step; "
                f"it is {limits.max_num_batched_tokens}. Raise it, or lower max_num_seqs"
            )

    def require_no_speculation(self, owner: str) -> None:
        """Raise InputError if the deployment speculates. ``owner`` names the feature that does not model this."""
        if self.speculation is not None:
            raise InputError(
                f"{owner} does not model speculative decoding yet; take speculation out of the deployment "
                "([deployment.speculation] in a scenario)"
            )

    def require_one_side(self, owner: str) -> None:
        """Raise InputError unless all replicas are alike, and prefill and decode. ``owner`` names what requires it."""
        if self.groups:
            raise InputError(
                f"{owner} takes no groups of replicas yet: all replicas must be alike. Give each group of "
                "[[deployment.groups]] a scenario of its own"
            )
        if self.decode is not None:
            raise InputError(
                f"{owner} takes no decode side yet: every replica must prefill and decode. Take decode out of the "
                "deployment ([deployment.decode] in a scenario)"
            )
