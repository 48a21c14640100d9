"""Resolves and checks the inputs of a run for kernel and reference: parameters, request columns and policies."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from lengthwise.engine import kernel_layout
from lengthwise.engine.prefix_nodes import PrefixNodes, nodes_of_run
from lengthwise.engine.step_time import CostReader, service_rate
from lengthwise.policy import CHUNKED, PREDICTION_ARGUMENTS, PREEMPTION_MODES, Policy, interpreted, known, resolve
from lengthwise.policy.compile import compiled as compile_policy
from lengthwise.policy.reservation import first_margins
from lengthwise.schema.cost_tables import MERGED, grid_value
from lengthwise.schema.deployment import (
    CAPACITY_POLICIES,
    CHUNKING_POLICIES,
    PREFIX_CACHES,
    RADIX_EVICTION_POLICIES,
    SCHEDULE_POLICIES,
    Deployment,
    EngineLimits,
    KvGroups,
    KVOffloading,
    KVStorage,
    KVTransfer,
    Scheduler,
    SglangSettings,
)
from lengthwise.schema.errors import InputError, InternalError, LengthwiseError, PolicyError, UnknownNameError
from lengthwise.schema.records import Status
from lengthwise.schema.specs import GB
from lengthwise.schema.speculation import Speculation
from lengthwise.schema.workload import UNCAPPED, After, Workload

Array = npt.NDArray[Any]
Function = Callable[..., Any]
T = TypeVar("T")

_SERIES_BINS = 2048
_FIRST_SERIES_BIN_S = 2.0**-6
INDEX_TOKENS = 2_000_000
"""Tokens in a router's index of the prompts sent to a replica: llm-d's 31,250 blocks of 64 tokens."""
UNLIMITED_BLOCKS = 2**62
_SPECULATION_STREAM = 7  # Distinguishes its random numbers from those of routers, which have the same seed.
_COMPUTE_BOUND_TOKENS = 2048
VLLM_VICTIMS = ("latest_admitted", "priority")
ASYNC_STEPS_IN_FLIGHT = 2
"""Steps in flight under asynchronous scheduling: the one that runs, and the next one (vLLM's batch queue)."""


class ByAxis(NamedTuple, Generic[T]):
    """One item for each axis, in the order in which the kernel takes the policies' functions."""

    rank: T
    victim: T
    batching: T
    memory: T
    router: T
    preemption: T
    binning: T


Policies = ByAxis[Policy]
Functions = ByAxis[Function]
"""The functions of the policies. Each takes all arguments of its axis."""


class PredictionRows(NamedTuple):
    """Predictions that are renewed while a request runs, as rows: those of request 0, then those of request 1, ...

    Row ``start[i] + w`` is the prediction for request i after ``w * window`` tokens (``schema.workload.Predictions``).
    With ``window`` 0 there are no rows, and ``Columns.predicted`` has one prediction for each request.
    """

    window: int
    start: Array
    total_tokens: Array
    gittins_rank: Array


class Dependents(NamedTuple):
    """The children of request i are ``child[start[i] : start[i + 1]]``.

    Request i has ``num_parents[i]`` parents and is sent ``delay_s[i]`` seconds after the last of them has finished.
    """

    start: Array
    child: Array
    num_parents: Array
    delay_s: Array


@dataclass(frozen=True)
class Columns:
    """The requests as columns [n]. ``draws`` [n, 2] are uniform random numbers for routers.

    ``previous_turn`` is the session's previous request, or -1; it is empty if no router takes it. ``max_tokens`` (cut
    to the KV cache) and ``ignore_eos`` are empty unless the rules of SGLang or TensorRT-LLM form the steps, or memory
    is reserved by predicted length. ``ends_at_limit`` is 1 if the output ends at its max_tokens or at max_model_len,
    and 0 if it ends by EOS; it is empty without asynchronous scheduling. With speculation, a step of a request accepts
    a token with the probability ``hit_rate``, and ``draw_key`` is the key of its random numbers; else both are empty.
    """

    arrival_s: Array
    prompt: Array
    output: Array
    predicted: Array
    prediction_rows: PredictionRows
    priority: Array
    tenant: Array
    draws: Array
    previous_turn: Array
    max_tokens: Array
    ignore_eos: Array
    ends_at_limit: Array
    hit_rate: Array
    draw_key: Array


class Params:
    """Parameters of one side (prefill or decode) or group of replicas, named as in ``kernel_layout.param_t``."""

    def __init__(
        self,
        deployment: Deployment,
        policies: Policies,
        workload: Workload,
        limit_s: float,
        all_replicas: int,
        seed: int | tuple[int, int],
    ) -> None:
        limits, scheduler, kv = deployment.limits, deployment.scheduler, deployment.kv
        # Number of schedulers with a KV cache of their own: one for each replica, or for each of its ``dp`` ranks. In
        # the first group of replicas, this is the number in all groups together.
        self.replicas, self.dp = deployment.schedulers, deployment.parallel.dp
        self.pp = len(deployment.cost.stage_layers)
        # A step is formed while the previous one runs, and with ``hide_host`` the host prepares it in that time.
        self.async_scheduling, self.hide_host = scheduler.async_scheduling, scheduler.hide_host
        # Maximum number of steps in the pipeline of a replica.
        self.max_in_flight = ASYNC_STEPS_IN_FLIGHT if self.async_scheduling else limits.max_in_flight or self.pp
        self.total_blocks = kv.num_blocks
        self._read_groups(deployment)
        self.watermark_blocks = int(deployment.watermark * kv.num_blocks)
        self.max_num_seqs = limits.max_num_seqs
        self.max_step_seqs = limits.max_step_seqs or limits.max_num_seqs
        self.token_budget = limits.max_num_batched_tokens
        self.max_model_len = deployment.max_model_len
        self.closed_loop = bool(workload.concurrency)
        self.has_dependents = workload.after is not None and len(workload.after.parent) > 0
        self.central_queue = policies.router == known("router")["central"]
        self.swap = scheduler.preemption_mode == "swap"
        self.swap_s_per_block = kv.swap_s_per_block
        # Rules of the prefix cache: 0 no cache, 1 vLLM's, 2 SGLang's.
        self.prefix_caching = (1 + PREFIX_CACHES.index(limits.prefix_cache)) * limits.enable_prefix_caching
        self.radix_policy = RADIX_EVICTION_POLICIES.index(limits.radix_eviction_policy)
        # CPU memory behind a replica's prefix cache (0 blocks: there is none); a block takes ``offload_block_s`` on the
        # replica's link to it, in one direction.
        offloading = limits.kv_offloading or KVOffloading(0.0)
        self.offload_blocks = deployment.offload_blocks
        self.offload_block_s = kv.kv_bytes_per_block / (offloading.gb_per_s * GB)
        self.offload_latency_s = offloading.latency_s
        # Storage behind that memory (0 blocks: there is none), one for each replica or one for all.
        storage, block_bytes = offloading.storage or KVStorage(0.0), deployment.offloaded_block_bytes
        self.storage_blocks = int(min(deployment.storage_blocks, UNLIMITED_BLOCKS))
        self.storage_shared = storage.shared
        self.storage_read_block_s = block_bytes / (storage.read_gb_per_s * GB)
        self.storage_write_block_s = block_bytes / (storage.write_gb_per_s * GB)
        self.storage_latency_s = storage.latency_s
        self.load_if_faster = offloading.load == "if_faster"
        self.offload_outputs = offloading.outputs
        self.router_sees_memory = policies.router.uses("free_blocks", "prefix_tokens")
        self.index_blocks = INDEX_TOKENS // kv.block_size  # in a router's index of the prompts that a replica received
        # Source of the router's ``prefix_tokens``: 0 none, 1 the replicas' caches, 2 its own index.
        self.router_prefix = ("", "cache", "index").index(policies.router.prefix)
        self.rank_every_step = policies.rank.every_step
        self.needs_peak = policies.memory.uses("peak_tokens")
        # Whether a preemption policy may preempt. A lack of blocks preempts in any case.
        self.preempts_by_policy = policies.preemption != known("preemption")["never"]
        self.preemption_interval_steps = scheduler.preemption_interval_steps
        self.tracks_service = any(policy.uses("service_tokens") for policy in (policies.rank, policies.victim))
        # vLLM's policy "priority": residents get blocks in the order of admission, and the request of the lowest
        # priority is preempted, even if it has its blocks already.
        by_priority = policies.victim == known("rank")["priority"] and limits.max_step_seqs is None
        self.vllm_priority = by_priority and policies.batching == known("batching")["unified"]
        # Whether the batching policy takes a count of steps, so that its plan can change at every step.
        self.counts_steps = policies.batching.uses(
            "steps_since_admit", "ended_since_admit", "phase_steps", "phase_rounds"
        )
        self._read_engine_rules(scheduler)
        self._read_order(scheduler, limits, seed)
        self._read_speculation(deployment)
        self.timeout_s, self.limit_s = limits.timeout_s, limit_s
        self.max_wait_s = scheduler.max_wait_s
        self.bins = 0 if scheduler.binning is None else policies.binning.bins  # of each queue; 0: none
        # Maximum wait of the first request of a bin.
        self.bin_wait_s = min(scheduler.batch_wait_s, scheduler.max_wait_s, limits.timeout_s)
        # Bins of a replica's time series: a power of two, fewer where there are many replicas.
        self.series_bins = max(64, _SERIES_BINS >> max(0, math.ceil(math.log2(all_replicas)) - 3))

    def _read_groups(self, deployment: Deployment) -> None:
        """Read the KV cache groups (``schema.deployment.KvGroups``); ``hybrid``: there are several groups of layers.

        Of the ``attention_groups``, ``local_groups`` free blocks before the window (``chunked_local``: chunk) of
        ``local_tokens`` and hold at most ``local_cap`` blocks; they have states if ``aligned``. A cached prefix needs
        its last ``window_blocks`` blocks in groups with windows.
        """
        kv = deployment.kv
        self.block_size, self.hybrid = kv.block_size, kv.groups is not None
        groups = kv.groups or KvGroups(kv.block_size, 1)
        self.attention_groups, self.local_groups = groups.full + groups.local, groups.local
        self.local_tokens, self.chunked_local, self.state_groups = groups.local_tokens, groups.chunked, groups.states
        self.local_cap, self.window_blocks = groups.local_cap(deployment.max_model_len), groups.window_blocks
        self.aligned = groups.aligned

    def _read_speculation(self, deployment: Deployment) -> None:
        speculation = deployment.speculation
        self.speculates = speculation is not None  # decodes verify proposed tokens; only then do the others matter
        self.counts_steps = self.counts_steps or self.speculates  # Every step has other tokens: none can be repeated.
        settings = speculation or Speculation("ngram", 1, 0.0)
        # Slots of KV memory after those of the step's tokens; the last block of a cached prefix is computed again.
        self.lookahead_tokens, self.drops_block = settings.lookahead_tokens, self.speculates and settings.drops_block
        # Tokens that vLLM adds to the last token of a prompt, to reach the size of a verification.
        pads = self.speculates and not settings.per_batch_size
        self.padding_tokens = settings.num_speculative_tokens if pads else 0
        self.burstiness, self.missed_draft_rate = settings.burstiness, settings.missed_draft_rate
        self.draft_layers, self.draft_head_share = settings.drafter.layers, settings.drafter.head_share
        # Layers of the drafter that all data-parallel ranks compute together, in part.
        self.draft_shared_layers = self.draft_layers if settings.drafter.tables is None else 0.0
        self.draft_pass_s = settings.pass_s
        # Least seconds of one layer's decode attention for each pair of a query and a key.
        self.verify_pair_s = _verify_pair_s(deployment) if self.speculates else 0.0

    def _read_engine_rules(self, scheduler: Scheduler) -> None:
        # Maximum prompt tokens of one request in a step, if it is not alone; 0: no limit.
        self.long_prefill_token_threshold = scheduler.long_prefill_token_threshold
        self.sglang, sglang = scheduler.sglang is not None, scheduler.sglang or SglangSettings()
        # Maximum prompt tokens of a step, a multiple of ``block_size``; 0: prompts are not divided.
        chunk_blocks = max(1, self.token_budget // self.block_size)
        self.chunked_prefill_size = chunk_blocks * self.block_size if sglang.chunked_prefill else 0
        self.max_prefill_tokens, self.enable_mixed_chunk = sglang.max_prefill_tokens, sglang.enable_mixed_chunk
        self.schedule_conservativeness = sglang.schedule_conservativeness
        self.reserve, self.max_recompute_share = scheduler.reserve, scheduler.max_recompute_share
        # Preemptions per request to which the least margin of ``reserve`` adapts.
        self.preemption_budget = scheduler.max_preemptions_per_request
        # Maximum output tokens for which SGLang's own admission reserves memory.
        self.clip_tokens = 0 if scheduler.reserve else kernel_layout.CLIP_TOKENS
        # TensorRT-LLM's policies of capacity and of chunking: 0 none, else 1 + the position in the list of policies.
        self.trtllm = self.trtllm_chunking = 0
        self.longest_prompt = self.max_model_len  # that the rules of SGLang or TensorRT-LLM can run
        if (settings := scheduler.trtllm) is not None:
            self.trtllm = 1 + CAPACITY_POLICIES.index(settings.capacity_scheduler_policy)
            if settings.enable_chunked_prefill:
                self.trtllm_chunking = 1 + CHUNKING_POLICIES.index(settings.context_chunking_policy)
            else:
                self.longest_prompt = self.token_budget

    def _read_order(self, scheduler: Scheduler, limits: EngineLimits, seed: int | tuple[int, int]) -> None:
        order = scheduler.sglang.schedule_policy if scheduler.sglang else "fcfs"
        self.schedule_policy = SCHEDULE_POLICIES.index(order)
        self.shuffle_seed = int(np.random.default_rng(seed).integers(2**31)) if scheduler.shuffles else 0
        has_tree = limits.enable_prefix_caching and limits.prefix_cache == "sglang"
        # Whether every 32nd pass over the queue counts the cached prefixes of its first requests as used.
        self.refreshes_prefixes = has_tree and limits.radix_eviction_policy == "lru"


@dataclass(frozen=True)
class Setup:
    """All inputs of a run.

    Only the reference calls the methods from ``tenant`` to ``outstanding``. Their ``q`` is a
    ``_reference_state.Request``.
    """

    deployment: Deployment  # for the decode side, this side as a deployment of its own
    policies: Policies
    functions: Functions  # of ``policies``, compiled or interpreted
    params: Params
    columns: Columns
    empty_replica_plan: tuple[int, int, int]  # (admissions, tokens, flags) for one request on an empty replica
    concurrency: int  # requests in the system in a closed loop; 0: the workload has arrival times
    dependents: Dependents | None  # requests that are sent when others have finished
    nodes: PrefixNodes  # identities of the contents of the requests' blocks; without prefix caching, of no blocks
    first_replica: int = 0  # number of the side's first replica
    decode_side: Setup | None = None  # of the same requests; None without disaggregation
    kv_transfer: KVTransfer = KVTransfer()  # cost of the transfer of a request's KV cache to this side
    groups: tuple[Setup, ...] = ()  # of the further groups of replicas, which share the router and the policies
    # [replicas] ``step_time.service_rate`` of each replica's group, or ones if the router ignores it.
    service_rate: Array = field(default_factory=lambda: np.ones(1))

    @property
    def sides(self) -> list[Setup]:
        """Return this side, and the decode side if there is one."""
        return [self, self.decode_side] if self.decode_side else [self]

    @property
    def rows(self) -> list[Setup]:
        """Return the setup of each row of the kernel's parameters: the sides and, from row 2 on, further groups."""
        # Row 1 is that of the decode side. Groups have none: this side fills the row, which is not used.
        return [self, self, *self.groups] if self.groups else self.sides

    @property
    def row_of_replica(self) -> list[int]:
        """Return for each replica its place in ``rows``."""
        if not self.groups:
            return [row for row, side in enumerate(self.sides) for _ in range(side.params.replicas)]
        first = [0] * self.deployment.parallel.replicas
        return first + [row for row, group in enumerate(self.groups, 2) for _ in range(group.params.replicas)]

    @property
    def all_replicas(self) -> int:
        """Return the number of replicas of both sides."""
        return sum(side.params.replicas for side in self.sides)

    @property
    def tenants(self) -> int:
        """Return the number of tenants whose service is counted, or 1 if no policy uses the service."""
        return int(self.columns.tenant.max()) + 1 if self.params.tracks_service else 1

    @property
    def released(self) -> int:
        """Return how many requests may be sent at the start: ``concurrency`` in a closed loop, otherwise all."""
        n = len(self.columns.prompt)
        return min(self.concurrency, n) if self.params.closed_loop else n

    def tenant(self, i: int) -> int:
        """Return the tenant whose service includes request ``i``, or 0 if no policy uses the service."""
        return int(self.columns.tenant[i]) if self.params.tracks_service else 0

    def blocks_for(self, tokens: int, skipped: int = 0) -> int:
        """Return the number of KV blocks for ``tokens`` tokens, of which local groups lack the first ``skipped``."""
        p = self.params
        blocks = -(-tokens // p.block_size)
        in_local = min(blocks - skipped, 2) if p.aligned else blocks - skipped
        return (p.attention_groups - p.local_groups) * blocks + p.local_groups * in_local + p.state_groups

    def skipped_blocks(self, computed: int) -> int:
        """Return how many leading blocks a request no longer needs in a local group after ``computed`` tokens."""
        groups = self.deployment.kv.groups
        return groups.skipped(computed) if groups else 0

    def predicted_at(self, i: int, generated: int) -> tuple[float, float]:
        """Return the predicted total tokens and the Gittins rank of request ``i`` after ``generated`` tokens."""
        rows = self.columns.prediction_rows
        if rows.window == 0:
            predicted = float(self.columns.predicted[i])
            return predicted, max(1.0, predicted - generated)
        row = min(int(rows.start[i]) + generated // rows.window, int(rows.start[i + 1]) - 1)
        return float(rows.total_tokens[row]), float(rows.gittins_rank[row])

    def remaining(self, q: Any) -> float:
        """Return the predicted remaining tokens of a request, at least 1."""
        return max(1.0, self.predicted_at(q.index, q.generated)[0] - int(q.generated))

    def needs(self, q: Any) -> tuple[float, int, int]:
        """Return (predicted remaining tokens, further tokens that its limit allows, tokens so far) of a request."""
        return self.remaining(q), int(self.columns.max_tokens[q.index]) - int(q.generated), q.context

    def remaining_integer(self, q: Any, more: int = 0) -> int:
        """Return the predicted remaining tokens after ``more`` further tokens, rounded up and at least 1."""
        generated = int(q.generated) + more
        return max(1, math.ceil(self.predicted_at(q.index, generated)[0]) - generated)

    def key(self, function: Function, now_s: float, q: Any, service: float) -> float:
        """Return the key that a rank or victim policy gives a request. Raises PolicyError if the key is NaN."""
        predicted, gittins_rank = self.predicted_at(q.index, q.generated)
        key: float = function(
            now_s, q.arrival_s, q.prompt, q.generated, predicted, max(1.0, predicted - q.generated), gittins_rank,
            q.wait.total_s(now_s), int(self.columns.priority[q.index]), q.admission.number, q.wait.last_preemption,
            service, q.wait.bin_batch,
        )  # fmt: skip
        if math.isnan(key):
            raise error_of(kernel_layout.BAD_RANK, self, q.index)
        return key

    def memory_blocks(
        self, context: int, chunk: int, predicted: float, free: int, num_running: int, peak: int,
        found: int = 0, skipped: int = 0,
    ) -> int:  # fmt: skip
        """Return the blocks that the memory policy gives a request, or -1 if the request must wait.

        With KV cache groups, ``found`` blocks of every group are cached, without the ``skipped`` first of local groups.
        """
        p = self.params
        if (groups := self.deployment.kv.groups) is not None:  # ``paged_by_chunk`` in groups
            own = self.blocks_for(chunk, skipped)
            left = free - max(own, groups.required(context, p.max_model_len, found, skipped))
            return -1 if left < 0 or (num_running > 0 and left < p.watermark_blocks) else own
        blocks: int = self.functions.memory(
            context, chunk, predicted, p.max_model_len, p.block_size, free, p.total_blocks, p.watermark_blocks,
            num_running, peak,
        )  # fmt: skip
        return blocks

    def outstanding(self, i: int) -> int:
        """Return the load of request ``i`` for routers: prompt tokens plus predicted output tokens, rounded up."""
        return int(self.columns.prompt[i]) + math.ceil(float(self.columns.predicted[i]))

    def blank_results(self) -> Array:
        """Return the results of all requests ([n]) before the run."""
        results = np.zeros(len(self.columns.prompt), dtype=kernel_layout.result_t)
        for name in ("scheduled_s", "first_token_s", "finished_s"):
            results[name] = np.nan
        results["status"] = Status.UNFINISHED
        results["replica"] = -1
        return results

    def blank_replicas(self) -> Array:
        """Return the totals of the replicas of both sides before the run."""
        rows = np.zeros(self.all_replicas, dtype=kernel_layout.replica_t)
        rows["series_bin_s"] = _FIRST_SERIES_BIN_S
        margins = first_margins(self.params.max_recompute_share, self.params.preemption_budget)
        rows["margin"], (rows["by_cost"], rows["by_budget"]) = max(margins), margins
        return rows


def prepare(workload: Workload, deployment: Deployment, *, seed: int, limit_s: float, compiled: bool) -> Setup:
    """Return the checked setup of a run. Raises InputError or PolicyError if its parts do not fit together."""
    _check_ranks(deployment)
    if deployment.parallel.dp == 1:
        deployment = replace(deployment, cost=deployment.cost.alone())
    if (side := deployment.decode) is not None and side.parallel.dp == 1:
        deployment = replace(deployment, decode=replace(side, cost=side.cost.alone()))
    decode, count = deployment.decode, deployment.schedulers
    if decode is None:
        check_groups(deployment)
        further = [replace(group, cost=group.cost.alone()) for group in deployment.groups]
        groups = tuple(_side(workload, group, seed, limit_s, count, compiled=compiled) for group in further)
        rates = _service_rates(deployment, workload)
        return _side(workload, deployment, seed, limit_s, count, compiled=compiled, groups=groups, service_rate=rates)
    all_replicas = count + decode.parallel.ranks
    _check_sides(deployment)
    decode_side = _side(
        workload, deployment.decoding(), (seed, 1), limit_s, all_replicas, compiled=compiled,
        first_replica=count, kv_transfer=decode.kv_transfer, service_rate=np.ones(decode.parallel.ranks),
    )  # fmt: skip
    rates = np.ones(count)
    return _side(
        workload, deployment, seed, limit_s, all_replicas, compiled=compiled, decode_side=decode_side,
        service_rate=rates,
    )  # fmt: skip


def check_groups(deployment: Deployment) -> None:
    """Raise InputError for routers, preemption and bins that need equal replicas, if there are several groups."""
    if not deployment.groups:
        return
    deployment.require_like_groups()
    policies = resolve_policies(deployment.scheduler)
    if policies.router.uses("total_blocks") or policies.router == known("router")["central"]:
        raise InputError(
            f"router {policies.router.name!r} takes all replicas to be alike, and there are several groups of them; "
            'take "shortest_expected_delay", "least_work_left", "least_outstanding", "cache_aware" or another router'
        )
    if policies.preemption != known("preemption")["never"] or deployment.scheduler.binning is not None:
        raise InputError(
            "several groups of replicas are not modelled with a preemption policy or with bins yet; take the scheduler "
            '"vllm_v1", or equal replicas'
        )


def _service_rates(deployment: Deployment, workload: Workload) -> Array:
    if not resolve("router", deployment.scheduler.router).uses("service_rate"):
        return np.ones(deployment.schedulers)
    output = np.minimum(workload.output_tokens, np.maximum(deployment.max_model_len - workload.prompt_tokens, 1))
    mean = float(workload.prompt_tokens.mean()), float(output.mean())
    groups = deployment.replica_groups
    return np.repeat([service_rate(group, *mean) for group in groups], [group.parallel.ranks for group in groups])


def _side(
    workload: Workload,
    deployment: Deployment,
    seed: int | tuple[int, int],
    limit_s: float,
    all_replicas: int,
    *,
    compiled: bool,
    **side_fields: Any,
) -> Setup:
    policies = resolve_policies(deployment.scheduler)
    deployment.require_known_rules(workload)
    _check_vllm_rules(deployment, policies)
    _check(workload, deployment, policies)
    if deployment.scheduler.trtllm is None:  # TensorRT-LLM ends the output at max_model_len.
        _check_max_tokens(workload, deployment.max_model_len)
    n = len(workload)
    rows = PredictionRows(0, np.zeros(1, np.int64), np.zeros(1), np.zeros(1))
    if (renewed := workload.predictions) is not None:
        arrays = (renewed.start, renewed.total_tokens, renewed.gittins_rank)
        rows = PredictionRows(renewed.window_tokens, *map(_column, arrays))
    arrival_s = np.array(workload.arrival_s)
    if workload.concurrency:  # In a closed loop a request arrives when another one ends.
        arrival_s[workload.concurrency :] = np.nan
    output = np.minimum(workload.output_tokens, np.maximum(deployment.max_model_len - workload.prompt_tokens, 1))
    max_tokens, ignore_eos = np.zeros(0, np.int64), np.zeros(0, np.bool_)
    if deployment.scheduler.engine_rules or deployment.scheduler.reserve:
        ignore_eos = np.zeros(n, np.bool_) if workload.ignore_eos is None else workload.ignore_eos
        max_tokens = _limits_in_cache(workload, deployment, ignore_eos)
        output = np.minimum(output, np.maximum(max_tokens, 1))
    draws, sees_sessions = policies.router.uses("draw_a", "draw_b"), policies.router.uses("previous_replica")
    columns = Columns(
        arrival_s=arrival_s,
        prompt=_column(workload.prompt_tokens),
        output=output,
        predicted=_column(workload.predicted_tokens, np.zeros(n)),
        prediction_rows=rows,
        priority=_column(workload.priority, np.zeros(n, np.int64)),
        tenant=_column(workload.tenant, np.zeros(n, np.int64)),
        draws=np.random.default_rng(seed).random((n, 2)) if draws else np.zeros((n, 2)),
        previous_turn=_column(workload.previous_turn if sees_sessions else np.zeros(0, np.int64)),
        max_tokens=_column(max_tokens),
        ignore_eos=_column(ignore_eos),
        ends_at_limit=_column(_ends_at_limit(workload, deployment, output)),
        **_speculation_columns(deployment, output, seed),
    )
    nodes = PrefixNodes(np.zeros(n + 1, np.int64), *(np.zeros(k, np.int64) for k in (0, 0, n)))
    if deployment.limits.enable_prefix_caching:
        nodes = nodes_of_run(columns.prompt, columns.output, workload.prefixes, deployment.kv.block_size)
    return Setup(
        deployment,
        policies,
        Functions(*map(compile_policy if compiled else interpreted, policies)),
        Params(deployment, policies, workload, limit_s, all_replicas, seed),
        columns,
        empty_replica_plan=_empty_replica_plan(policies.batching, deployment),
        concurrency=workload.concurrency or 0,
        dependents=_dependents(workload.after),
        nodes=nodes,
        **side_fields,
    )


def _speculation_columns(deployment: Deployment, output: Array, seed: int | tuple[int, int]) -> dict[str, Array]:
    if deployment.speculation is None:
        return {"hit_rate": np.zeros(0), "draw_key": np.zeros(0, np.int64)}
    rng = np.random.default_rng([*np.ravel(seed), _SPECULATION_STREAM])
    keys = rng.integers(2**32, size=len(output))
    return {"hit_rate": _column(deployment.speculation.hit_rates(output, rng)), "draw_key": _column(keys)}


def _verify_pair_s(deployment: Deployment) -> float:
    """Return the seconds of one layer for each (query, key) pair where attention is limited by computing.

    It is taken from the prefill of a prompt of up to ``_COMPUTE_BOUND_TOKENS``. With MLA, decodes compute more for a
    pair than a prefill, because they attend to latents.
    """
    attention, last = deployment.model.attention, len(deployment.cost.prefill_s) - 1
    merged = deployment.cost.rule.kind == MERGED
    chunk = min(_COMPUTE_BOUND_TOKENS, last if merged else int(grid_value(last)))
    factor = 1.0
    if attention.is_mla:
        width = attention.head_dim + attention.rope_head_dim + (attention.v_head_dim or attention.head_dim)
        factor = (2 * attention.kv_lora_rank + attention.rope_head_dim) / width
    seconds = CostReader(deployment.cost).prompt_attention_s(chunk)
    return factor * seconds / (chunk * (chunk + 1) / 2)


def _ends_at_limit(workload: Workload, deployment: Deployment, output: Array) -> Array:
    """Return [n] 1 for outputs that end at a limit, which a scheduler knows in advance, and 0 for the others (EOS)."""
    if not deployment.scheduler.async_scheduling:
        return np.zeros(0, np.int64)
    certain = workload.prompt_tokens + output >= deployment.max_model_len
    if workload.max_tokens is not None:
        certain |= output >= workload.max_tokens
    return certain.astype(np.int64)


def _check_ranks(deployment: Deployment) -> None:
    for side in deployment.sides if deployment.parallel.dp > 1 or deployment.decode else ():
        if side.parallel.dp == 1:
            continue
        policies = resolve_policies(side.scheduler)
        batching, in_flight = policies.batching, side.limits.max_in_flight or len(side.cost.stage_layers)
        parts = {
            "kv_offloading (take it out)": deployment.offload_blocks > 0,
            'router "central" (take "vllm_internal")': policies.router == known("router")["central"],
            f"batching {batching.name!r}, which counts rounds, and several steps in flight (set pp = 1)": in_flight > 1
            and batching.uses("phase_rounds"),
            "partial tensor parallelism": side.cost.other is not None,
        }
        if names := " or ".join(part for part, is_set in parts.items() if is_set):
            raise InputError(
                f"data-parallel ranks in lock-step (dp {side.parallel.dp}) are not modelled with {names} yet; change "
                "that, or set dp = 1 and take more replicas"
            )


def _check_vllm_rules(deployment: Deployment, policies: Policies) -> None:
    scheduler, victim = deployment.scheduler, policies.victim
    parts = {f"batching {policies.batching.name!r}": policies.batching != known("batching")["unified"]}
    others = {
        f"preemption {policies.preemption.name!r}": policies.preemption != known("preemption")["never"],
        f"memory {policies.memory.name!r}": policies.memory.uses("peak_tokens"),
        f"victim {victim.name!r}": victim == known("rank")["priority"],
    }
    victims = {f"victim {victim.name!r}": victim not in [known("rank")[name] for name in VLLM_VICTIMS]}
    if scheduler.async_scheduling and scheduler.sglang is None:
        _refuse("async_scheduling", "false", parts | others)
    if scheduler.long_prefill_token_threshold:
        _refuse("long_prefill_token_threshold", "0", parts | victims)


def async_refusal(deployment: Deployment) -> str:
    """Return why the simulator cannot run a deployment with ``async_scheduling``, or "" if it can."""
    if deployment.kv.groups is not None and deployment.kv.groups.aligned:
        return "async_scheduling is not modelled with a prefix cache of states yet; set enable_prefix_caching = false"
    try:
        ahead = replace(deployment, scheduler=replace(deployment.scheduler, async_scheduling=True))
        ahead.require_known_settings()
        _check_vllm_rules(ahead, resolve_policies(ahead.scheduler))
    except InputError as error:
        return str(error)
    return ""


def _refuse(name: str, off: str, parts: dict[str, bool]) -> None:
    if names := " or ".join(part for part, is_set in parts.items() if is_set):
        raise PolicyError(
            f"{name} is not modelled with {names} yet; take the policies of vllm_v1 there, or set {name} = {off}"
        )


def _limits_in_cache(workload: Workload, deployment: Deployment, ignore_eos: Array) -> Array:
    """Return [n] ``max_tokens``, cut so that an empty replica can admit the request. Values below 1 mean: refused."""
    prompt, size = workload.prompt_tokens, deployment.kv.block_size
    room = deployment.kv.num_blocks * size - prompt
    if deployment.scheduler.sglang is not None:
        # Its admission counts full pages for a prompt, and more than one page must stay free (two with ignore_eos).
        room -= -prompt % size + (size + 1) * (1 + ignore_eos)
    given = UNCAPPED if workload.max_tokens is None else workload.max_tokens
    limits: Array = np.minimum(given, np.minimum(room, deployment.max_model_len - prompt))
    return limits


def resolve_policies(scheduler: Scheduler) -> Policies:
    """Return the policies of a scheduler. Raises UnknownNameError or PolicyError for a name or object that is none."""
    if scheduler.preemption_mode not in PREEMPTION_MODES:
        raise UnknownNameError("preemption mode", scheduler.preemption_mode, PREEMPTION_MODES)
    binning = "one" if scheduler.binning is None else scheduler.binning
    axes = ("rank", "victim", "batching", "memory", "router", "preemption")
    found = {axis: resolve(axis, getattr(scheduler, axis)) for axis in axes}
    return Policies(**found, binning=resolve("binning", binning))


def group_obstacles(
    limits: EngineLimits, scheduler: Scheduler, pp: int, decode: Any = None, *, cached_states: bool = False,
    speculates: bool = False,
) -> list[str]:  # fmt: skip
    """Return the settings that prevent KV cache groups of layers, in which ``plan_memory`` then counts all tokens."""
    policies = resolve_policies(scheduler)
    parts = {
        "hybrid_kv_cache = false": not scheduler.hybrid_kv_cache,
        'prefix_cache = "sglang"': limits.enable_prefix_caching and limits.prefix_cache == "sglang",
        "kv_offloading": limits.kv_offloading is not None and limits.kv_offloading.size_gb > 0,
        "max_step_seqs and a prefix cache of states": cached_states and limits.max_step_seqs is not None,
        "disaggregation": decode is not None,
        "pipeline parallelism": pp > 1,
        "max_in_flight above 1": (limits.max_in_flight or 1) > 1,
        "async_scheduling and a prefix cache of states": scheduler.async_scheduling and cached_states,
        "long_prefill_token_threshold": scheduler.long_prefill_token_threshold > 0,
        "reserve": scheduler.reserve,
        f'scheduler "{scheduler.engine_rules}"': bool(scheduler.engine_rules),
        f"batching {policies.batching.name!r}": policies.batching != known("batching")["unified"],
        f"memory {policies.memory.name!r}": policies.memory != known("memory")["paged_by_chunk"],
        f"preemption {policies.preemption.name!r}": policies.preemption != known("preemption")["never"],
        f"preemption_mode {scheduler.preemption_mode!r}": scheduler.preemption_mode != "recompute",
        f"victim {policies.victim.name!r}": policies.victim == known("rank")["priority"],
        "speculation": speculates,
    }
    return [name for name, is_set in parts.items() if is_set]


def _dependents(after: After | None) -> Dependents | None:
    if after is None or len(after.parent) == 0:
        return None
    num_parents = np.diff(after.start)
    child = np.repeat(np.arange(len(after)), num_parents)
    order = np.argsort(after.parent, kind="stable")
    start = np.searchsorted(after.parent[order], np.arange(len(after) + 1))
    return Dependents(start.astype(np.int64), child[order], num_parents, _column(after.delay_s))


def _column(values: Array | None, default: Array | None = None) -> Array:
    return np.require(default if values is None else values, requirements=["C", "A", "W"])


def _check_offloading(deployment: Deployment) -> None:
    offloading = deployment.limits.kv_offloading
    if offloading is None or offloading.size_gb == 0:
        return
    tiers: dict[str, tuple[float, float]] = {"size_gb": (offloading.size_gb, deployment.offload_blocks)}
    if offloading.storage and offloading.storage.size_gb > 0:
        tiers["storage.size_gb"] = offloading.storage.size_gb, deployment.storage_blocks
    for name, (size_gb, blocks) in tiers.items():
        if blocks * deployment.kv.block_size < deployment.max_model_len:
            needed = -(-deployment.max_model_len // deployment.kv.block_size)
            more = f"Give at least {size_gb * needed / blocks:.3g} GB" if blocks else "Give more"
            raise InputError(
                f"kv_offloading.{name} must hold one sequence of max_model_len {deployment.max_model_len} tokens; "
                f"{size_gb:g} GB hold {blocks * deployment.kv.block_size:.0f}. {more}, lower max_model_len, or take "
                f"{'storage' if '.' in name else 'kv_offloading'} out"
            )


def _check(workload: Workload, deployment: Deployment, policies: Policies) -> None:
    limits, router = deployment.limits, policies.router
    check_router(
        router,
        has_prefixes=workload.prefixes is not None,
        has_sessions=workload.prefixes is not None or "session" in workload.extra,
    )
    if router.prefix and not limits.enable_prefix_caching:
        raise PolicyError(
            f"router {router.name!r} chooses by the prefixes that replicas have cached; set "
            "engine.enable_prefix_caching = true"
        )
    if limits.enable_prefix_caching and limits.radix_eviction_policy == "priority" and workload.priority is None:
        raise InputError(
            'radix_eviction_policy = "priority" needs priorities of requests, and this workload has none; give '
            'priority, or take radix_eviction_policy = "lru"'
        )
    for policy in policies:
        if policy.uses(*PREDICTION_ARGUMENTS) and workload.predicted_tokens is None:
            raise PolicyError(
                f"{policy.axis} policy {policy.name!r} needs predicted output lengths, and this workload has none; "
                'give predicted_tokens ([predictor] kind = "oracle" in a scenario predicts the true lengths)'
            )
    if deployment.scheduler.reserve and workload.predicted_tokens is None:
        raise PolicyError(
            "reserve = true needs predicted output lengths, and this workload has none; set [predictor] in a scenario "
            '(kind = "ecdf": lengths of past requests, "oracle": the true ones), or leave reserve out'
        )
    kv, memory = deployment.kv, policies.memory
    if kv.num_blocks < kv.longest_blocks(deployment.max_model_len):
        needed = f"{kv.longest_blocks(deployment.max_model_len)} are needed"
        size = kv.num_blocks * kv.block_size if kv.groups is None else f"{kv.num_blocks} blocks, and {needed}"
        raise InputError(
            f"the KV cache must hold one sequence of max_model_len {deployment.max_model_len} tokens; it holds "
            f"{size}. Lower max_model_len, or give more memory or GPUs"
        )
    pp = len(deployment.cost.stage_layers)
    groups = kv.groups or KvGroups(kv.block_size, 1)
    parts = group_obstacles(limits, deployment.scheduler, pp, deployment.decode, cached_states=groups.aligned)
    if kv.groups is not None and parts:
        raise InputError(
            f"KV cache groups of windows and states are not modelled with {' or '.join(parts)} yet; plan the memory "
            "with a Scheduler of hybrid_kv_cache=False"
        )
    _check_offloading(deployment)
    watermark = int(deployment.watermark * kv.num_blocks)
    sizes = (deployment.max_model_len, kv.block_size, kv.num_blocks, kv.num_blocks, watermark)
    try:
        blocks = interpreted(memory)(1, 1, 1.0, *sizes, 0, 2)
    except Exception as error:
        raise PolicyError(
            f"memory policy {memory.name!r} must return a whole number of blocks; for one token on an idle replica "
            f"it raised {type(error).__name__}: {error}"
        ) from error
    if blocks < 0:
        raise PolicyError(
            f"memory policy {memory.name!r} refuses a request of one token on an idle replica; no request would "
            "ever run"
        )


def check_router(router: Policy, *, has_prefixes: bool, has_sessions: bool) -> None:
    """Raise PolicyError if a router needs shared prefixes, or sessions, and the workload has none."""
    if router.uses("prefix_tokens") and not has_prefixes:
        raise PolicyError(
            f"router {router.name!r} chooses by prefixes that prompts share, and this workload has none; take a trace "
            "with hash_ids, or sessions"
        )
    if router.uses("previous_replica") and not has_sessions:
        raise PolicyError(
            f"router {router.name!r} chooses by the earlier turns of a session, and this workload has no session of "
            "several requests; take a trace that names sessions, [workload.sessions], or another router"
        )


def _check_max_tokens(workload: Workload, max_model_len: int) -> None:
    """Raise InputError if an engine would refuse a request's max_tokens. The run itself rejects too long prompts."""
    prompt, cap = workload.prompt_tokens, workload.max_tokens
    if cap is None:
        return
    refused = (prompt < max_model_len) & (cap < UNCAPPED) & (prompt + cap > max_model_len)
    if refused.any():
        i = int(np.argmax(refused))
        raise InputError(
            f"a prompt and max_tokens must fit in max_model_len {max_model_len}, or an engine refuses the request; "
            f"request {i} has {prompt[i]} + {cap[i]} tokens. Raise max_model_len, lower max_tokens, or leave it out "
            f"(in a scenario, workload.max_total_tokens = {max_model_len}, or sessions.max_context_tokens, lowers it, "
            'and workload.max_tokens = "none" leaves it out)'
        )


def _check_sides(deployment: Deployment) -> None:
    decode_side = deployment.decode
    assert decode_side is not None
    if (found := resolve("router", decode_side.router)).prefix:
        raise PolicyError(
            f"decode.router {found.name!r} chooses by the prefixes that replicas have cached, and decode replicas "
            'cache none: they receive the KV cache of every prompt. Take "session_affinity", "least_outstanding" or '
            '"least_tokens" there, and this router as scheduler.router'
        )
    if (offloading := deployment.limits.kv_offloading) is not None and offloading.outputs:
        raise InputError(
            "kv_offloading.outputs stores the blocks of outputs, which decode replicas compute, and the CPU memory is "
            "that of prefill replicas; leave outputs out, or take out decode"
        )
    for section, router in (("scheduler", deployment.scheduler.router), ("decode", decode_side.router)):
        if resolve("router", router) == resolve("router", "central"):
            raise InputError(
                f'{section}.router must choose a replica under disaggregation; "central" is one queue for all. '
                'Use "round_robin" or "least_outstanding"'
            )
    if deployment.kv.block_size != decode_side.kv.block_size:
        raise InputError(
            f"block_size must be the same on the prefill and the decode side; it is {deployment.kv.block_size} and "
            f"{decode_side.kv.block_size}"
        )


def _empty_replica_plan(batching: Policy, deployment: Deployment) -> tuple[int, int, int]:
    limits, own = deployment.limits, (len(deployment.cost.stage_layers), *batching.all_parameters)
    budget, seqs = limits.max_num_batched_tokens, limits.max_num_seqs
    try:
        plan = interpreted(batching)(0, 0, 1, 0, 0, budget, seqs, 0, 0, 0, 0, 0, 0, 0, *own)
        admit, tokens, flags = (int(x) for x in plan)
    except Exception as error:
        raise PolicyError(
            f"batching policy {batching.name!r} must return three whole numbers (admit, tokens, flags); "
            f"on an idle replica with one request waiting it failed: {error}"
        ) from error
    if admit < 1 or (flags & CHUNKED and tokens < 1):
        raise PolicyError(
            f"batching policy {batching.name!r} admits nothing on an idle replica with one request waiting "
            f"(admit {admit}, tokens {tokens}); no request would ever run"
        )
    return admit, tokens, flags


def error_of(code: int, setup: Setup, number: int) -> LengthwiseError:
    """Return the error of a status code. ``number`` is the wrong request, replica, bin or number of blocks."""
    policies, params = setup.policies, setup.params
    match code:
        case kernel_layout.BAD_RANK:
            message = (
                f"rank policy {policies.rank.name!r} or victim policy {policies.victim.name!r} returned NaN for "
                f"request {number}; a key must be a number"
            )
        case kernel_layout.BAD_MEMORY:
            message = (
                f"memory policy {policies.memory.name!r} admitted a request that needs {number} blocks when fewer "
                "are free; return -1 to make it wait"
            )
        case kernel_layout.BAD_ROUTE:
            message = f"router {policies.router.name!r} chose replica {number}; there are {params.replicas}, from 0"
        case kernel_layout.BAD_BIN:
            message = f"binning {policies.binning.name!r} chose bin {number}; there are {params.bins}, from 0"
        case kernel_layout.BAD_PREEMPTION:
            message = (
                f"preemption policy {policies.preemption.name!r} returned NaN for waiting request {number}; "
                "it must return a number"
            )
        case kernel_layout.STUCK:
            message = (
                f"request {number} waits forever: nothing runs, nothing will arrive, and batching policy "
                f"{policies.batching.name!r} with memory policy {policies.memory.name!r} does not let it continue "
                f"({int(setup.columns.prompt[number])} prompt tokens, {params.total_blocks} blocks of "
                f"{params.block_size})"
            )
        case kernel_layout.BAD_DECODE_MEMORY if setup.decode_side:
            return error_of(kernel_layout.BAD_MEMORY, setup.decode_side, number)
        case kernel_layout.BAD_DECODE_ROUTE if setup.decode_side:
            return error_of(kernel_layout.BAD_ROUTE, setup.decode_side, number)
        case _:
            return InternalError(f"the kernel returned the unknown status code {code}")
    return PolicyError(message)


def policy_error(setup: Setup, error: Exception) -> PolicyError:
    """Return the error of a run in which a policy raised. The message names policies with the user's code or values."""
    policies = [policy for side in setup.sides for policy in side.policies]
    own = [policy for policy in policies if not policy.builtin] or policies
    names = ", ".join(f"{policy.axis} policy {policy.name!r}" for policy in own)
    return PolicyError(f"{names} raised {type(error).__name__}: {error}")
