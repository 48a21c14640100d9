"""Plans the memory of a replica: weights, activations and KV blocks."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np

from lengthwise import catalog
from lengthwise.cost.provenance import EXPERT_KEYS
from lengthwise.schema.cost_tables import Floats
from lengthwise.schema.deployment import ALL2ALL_BACKENDS, NULL_BLOCKS, EngineLimits, KvGroups, KvPlan, Parallelism
from lengthwise.schema.errors import DoesNotFitError, InputError, UnknownNameError
from lengthwise.schema.specs import GIB, MIB, GpuSpec, ModelSpec, dtype_bytes

DEGREES = (1, 2, 4, 8, 16)


def usable_degrees(model: ModelSpec) -> list[int]:
    """Return those of the tensor-parallel degrees 1, 2, 4, 8 and 16 that divide the attention heads."""
    return [tp for tp in DEGREES if model.attention.heads % tp == 0]


@dataclass(frozen=True)
class Shard:
    """The share of a model that one GPU holds, under tensor, pipeline, data and expert parallelism."""

    model: ModelSpec
    parallel: Parallelism
    weight_dtype: str
    kv_dtype: str | None

    @property
    def heads(self) -> float:
        """Return the number of query heads on one GPU."""
        return self.model.attention.heads / self.parallel.tp

    @property
    def kv_heads(self) -> int:
        """Return the number of KV heads on one GPU. With more GPUs than heads, each GPU has a copy of one head."""
        return max(1, -(-self.model.attention.kv_heads // self.parallel.tp))

    @property
    def v_dim(self) -> int:
        """Return the dimension of a head's values."""
        return self.model.attention.v_head_dim or self.model.attention.head_dim

    @property
    def kv_bytes(self) -> float:
        """Return the bytes of one token in the KV cache of one layer (that caches keys and values) on one GPU.

        With MLA every GPU holds the complete latents. Otherwise each GPU holds its own KV heads.
        """
        attention = self.model.attention
        layer = catalog.kv_bytes_per_token(self.model, self.kv_dtype) / self.model.caching_layers
        return layer if attention.is_mla else layer * self.kv_heads / attention.kv_heads

    @property
    def layers(self) -> list[int]:
        """Return [PP] the number of decoder layers of each stage."""
        return catalog.stage_layers(self.model, self.parallel.pp)

    def layer_weight_bytes(self, index: int) -> float:
        """Return the bytes of a decoder layer's weights on the GPUs of one rank, without what each GPU has complete."""
        model, parallel = self.model, self.parallel
        found = catalog.layer_weight_bytes(model, index, self.weight_dtype)
        if parallel.dp > 1 or parallel.redundant_experts:
            copies = 1 + (parallel.redundant_experts or 0) / model.ffn.experts  # of the routed experts
            found += catalog.routed_weight_bytes(model, index, self.weight_dtype) * (copies / parallel.dp - 1)
        return found

    def stage_weight_bytes(self) -> Floats:
        """Return [PP] the bytes of weights on one GPU of each stage."""
        model, tp = self.model, self.parallel.tp
        width = dtype_bytes(self.weight_dtype)
        bounds = np.concatenate([[0], np.cumsum(self.layers)])
        layer = [self.layer_weight_bytes(i) for i in range(model.layers)]
        stages = np.array([sum(layer[a:b]) / tp for a, b in pairwise(bounds)], dtype=np.float64)
        stages += np.array(self.layers) * self._replicated_parameters() * width * (1 - 1 / tp)
        if model.encoder_layers:
            encoder = np.array(catalog.stage_layers(model, self.parallel.pp, encoder=True), dtype=np.float64)
            stages += encoder * catalog.encoder_layer_parameters(model) * width / tp
        # With several stages a tied head is a copy on the last stage.
        table = model.vocab * model.hidden * max(2.0, width) / tp
        stages[0] += catalog.embedding_parameters(model) * max(2.0, width) / tp
        stages[-1] += 0.0 if model.tied_embeddings and self.parallel.pp == 1 else table
        return stages

    def _replicated_parameters(self) -> float:
        """Return how many weights of a layer every GPU holds. A partly replicated matrix counts in proportion."""
        model, attention, tp = self.model, self.model.attention, self.parallel.tp
        router = model.hidden * model.ffn.experts
        if attention.is_mla:
            query = model.hidden * attention.q_lora_rank
            return router + query + model.hidden * (attention.kv_lora_rank + attention.rope_head_dim)
        if tp == 1:
            return router
        surplus = self.kv_heads - attention.kv_heads / tp
        return router + model.hidden * surplus * (attention.head_dim + self.v_dim) / (1 - 1 / tp)


def shard_of(model: ModelSpec, parallel: Parallelism, limits: EngineLimits) -> Shard:
    """Return the share of one GPU. Raises InputError unless tp divides the heads and each stage has a layer."""
    if parallel.tp < 1 or model.attention.heads % parallel.tp:
        heads, usable = f"{model.attention.heads} attention heads of {model.name}", map(str, usable_degrees(model))
        raise InputError(f"tp must divide the {heads}; it is {parallel.tp}. Use one of {', '.join(usable)}.")
    catalog.stage_layers(model, parallel.pp)
    if any(getattr(parallel, key) != getattr(Parallelism, key) for key in EXPERT_KEYS):
        _require_experts(model, parallel)
    return Shard(model, parallel, limits.weight_dtype or model.dtype, limits.kv_dtype)


def _require_experts(model: ModelSpec, parallel: Parallelism) -> None:
    """Raise InputError unless the model has experts that can be divided like this."""
    experts, gpus, redundant = model.ffn.experts, parallel.tp * parallel.dp, parallel.redundant_experts
    if not experts:
        key = next(key for key in EXPERT_KEYS if getattr(parallel, key) != getattr(Parallelism, key))
        remedy = f"Leave {key} out"
        if key == "dp":
            replicas = parallel.replicas * parallel.dp
            remedy = f"Its data-parallel ranks would be independent, as in vLLM: set replicas = {replicas}"
        raise InputError(f"{key} is for models with experts, and {model.name} has none. {remedy}")
    if redundant is not None and parallel.ep == 1:
        raise InputError("redundant_experts needs expert parallelism, and ep is 1; set ep, or leave it out")
    slots = experts + (redundant or 0)
    usable = [ep for ep in range(1, gpus + 1) if gpus % ep == 0 and slots % ep == 0]
    if redundant is not None and gpus % parallel.ep == 0 and slots % parallel.ep:
        nearest = -experts % parallel.ep
        raise InputError(
            f"the {experts} experts of {model.name} and redundant_experts together must be a multiple of ep, "
            f"{parallel.ep}; redundant_experts is {redundant}. Use {nearest}, {nearest + parallel.ep}, ..."
        )
    if parallel.ep not in usable:
        raise InputError(
            f"ep must divide tp x dp, {gpus} GPUs, and the {experts} experts of {model.name}; it is {parallel.ep}. Use "
            f"one of {', '.join(map(str, usable))}"
        )
    if parallel.all2all_backend != ALL2ALL_BACKENDS[0] and not (parallel.dp > 1 and parallel.ep == gpus):
        raise InputError(
            f"all2all_backend {parallel.all2all_backend!r} sends tokens to the GPUs of their experts and needs dp "
            f"above 1 and ep = tp x dp; dp is {parallel.dp} and ep is {parallel.ep}. Change them, or leave "
            "all2all_backend out"
        )


def group_layers(*layers: int) -> tuple[int, ...]:
    """Return (layers of each group, groups of each kind) for numbers of layers by kind, as vLLM groups them.

    A group has layers of one kind. Its size is the smallest number of layers of a kind, or the largest if that is below
    1.5 times the smallest; the last group of a kind may have fewer (vLLM 0.32, _get_kv_cache_groups_uniform_page_size).
    """
    found = [count for count in layers if count]
    size = max(found) if max(found) < min(found) * 1.5 else min(found)
    return size, *(-(-count // size) for count in layers)


_KERNEL_BLOCK = 16  # smallest block of FlashAttention and FlashInfer, in tokens


def hybrid_groups(shard: Shard, limits: EngineLimits, steps: int = 1) -> tuple[KvGroups, int] | None:
    """Return (the groups of vLLM's hybrid KV cache manager, layers of a group), or None if one group has all layers.

    Requests keep the blocks before the windows of up to ``steps`` steps in flight.
    With states (Mamba, linear attention) a block has as many tokens as make it at least as large as a state.
    """
    model, attention = shard.model, shard.model.attention
    local = attention.windowed_layers if attention.window_tokens else 0
    states = attention.linear.layers if attention.linear else 0
    caches = states > 0 and limits.enable_prefix_caching
    alone = local or limits.max_step_seqs or steps > 1  # what a prefix cache of states excludes
    if not local + states or attention.is_mla or shard.parallel.pp > 1 or (caches and alone):
        return None
    size, *groups = group_layers(model.layers - local - states, local, states)
    block_size = limits.block_size
    if states:
        state_bytes = catalog.state_bytes_per_sequence(model) / states / shard.parallel.tp
        unit = max(_KERNEL_BLOCK, block_size)
        block_size = max(block_size, unit * math.ceil(state_bytes / (unit * shard.kv_bytes)))
    tokens = steps * limits.max_num_batched_tokens
    if caches:
        return KvGroups(block_size, groups[0], groups[2], 2, in_flight_tokens=tokens, aligned=True), size
    window, chunked = attention.window_tokens or 0, model.metadata.chunked_attention
    return KvGroups(block_size, groups[0], groups[1], window, chunked, groups[2], tokens), size


FRAMEWORK_BYTES = 0.6 * GIB
"""CUDA context, libraries and allocator: 551 MB in AIConfigurator's system files. With the activations below, vLLM 0.19
on an RTX 4090 (Llama-3.1-8B, 25.25 GB, 2,588 blocks) leaves 0.57 GiB unexplained."""

NCCL_BYTES = {1: 0, 2: 342 * MIB}
DEEPEP_BUFFER_BYTES = 1.0 * GIB  # vLLM's VLLM_DEEPEP_BUFFER_SIZE_MB
NCCL_BYTES_MORE = 392 * MIB  # communication buffers by number of GPUs of a replica (``nccl_mem`` of AIConfigurator)
LOGIT_COPIES = 3  # fp32 [sequences, vocab] arrays in vLLM's sampler: logits, probabilities, sorted
HOST_LINK_BYTES_PER_S = 25e9  # measured bandwidth of PCIe 4 x16 (nominally 32 GB/s) between GPU and host memory
VIDUR_MARGIN = 0.1


def plan_memory(
    model: ModelSpec,
    gpu: GpuSpec,
    parallel: Parallelism,
    limits: EngineLimits,
    max_model_len: int,
    planner: str = "lengthwise",
    num_blocks: int | None = None,
    *,
    hybrid: int = 0,
) -> KvPlan:
    """Plan the memory of a replica's fullest GPU, and the replica's number of KV blocks.

    "lengthwise" budgets as vLLM does: ``gpu_memory_utilization`` of the memory, less weights (embedding, head, the
    stage's layers, replicated KV heads), the peak of activations in a step, CUDA context and communication buffers, and
    one null block. "vidur" follows Vidur: it counts neither embedding, head nor activations, takes a margin of 10 % off
    the nominal GiB, and counts the blocks of complete requests of ``max_model_len`` tokens. A given ``num_blocks``
    replaces the planned number, without a check that it fits. With ``hybrid``, the number of steps in flight, vLLM's
    hybrid KV cache manager divides the layers into groups (``hybrid_groups``); with 0 every layer that caches tokens
    caches all of them.

    Raises:
        DoesNotFitError: The model, with one request, does not fit. The message gives the missing memory and a remedy.
        InputError: The planner is unknown, the model cannot be split like this, or ``num_blocks`` is below 1.
    """
    planners: dict[str, _Planner] = {"lengthwise": partial(_plan_vllm, hybrid=hybrid), "vidur": _plan_vidur}
    if planner not in planners:
        raise UnknownNameError("memory planner", planner, planners)
    plan = planners[planner](model, gpu, parallel, limits, max_model_len)
    if num_blocks is None:
        _require_fit(plan, planners[planner], (model, gpu, parallel, limits), max_model_len)
        return plan
    if num_blocks < 1:
        raise InputError(f"num_blocks must be at least 1; it is {num_blocks}")
    return replace(plan, num_blocks=num_blocks)


def with_drafter(kv: KvPlan, weight_bytes: float, kv_bytes_per_block: float) -> KvPlan:
    """Return the plan of a replica whose GPUs also hold a drafter's weights, and its keys and values in every block.

    Raises DoesNotFitError if no block is left.
    """
    per_block = kv.kv_bytes_per_block + kv_bytes_per_block
    cache = kv.available_bytes - kv.weight_bytes - kv.activation_bytes - weight_bytes
    blocks = math.floor(cache / per_block) - NULL_BLOCKS
    if blocks < 1:
        raise DoesNotFitError(
            f"the drafter's weights ({weight_bytes / GIB:.2f} GiB on a GPU) must fit besides the model; "
            f"{(cache + weight_bytes) / GIB:.2f} GiB are left. Use a smaller drafter, a larger tp or another GPU"
        )
    return replace(kv, num_blocks=blocks, weight_bytes=kv.weight_bytes + weight_bytes, kv_bytes_per_block=per_block)


def largest_model_len(
    model: ModelSpec,
    gpu: GpuSpec,
    parallel: Parallelism,
    limits: EngineLimits,
    planner: str = "lengthwise",
    num_blocks: int | None = None,
    *,
    hybrid: int = 0,
) -> int:
    """Return the tokens of the longest request that model and KV cache allow. Raises as ``plan_memory`` does."""
    if num_blocks is None and planner == "vidur":
        shard = shard_of(model, parallel, limits)
        tokens = int((_vidur_budget_bytes(gpu) - _vidur_weight_bytes(shard)) // _vidur_kv_bytes(shard))
        if tokens < limits.block_size:
            plan_memory(model, gpu, parallel, limits, limits.block_size, planner)
    else:
        plan = plan_memory(model, gpu, parallel, limits, limits.block_size, planner, num_blocks, hybrid=hybrid)
        if (groups := plan.groups) is not None:
            if plan.num_blocks < (least := groups.longest(limits.max_model_len or 2)):
                raise InputError(
                    f"a replica must have the blocks of one request, which are {least} in the groups of "
                    f"{model.name}'s layers; it has {plan.num_blocks}. Give more num_blocks, or lower max_model_len"
                )
            return bisect_right(range(1, model.max_model_len + 1), plan.num_blocks, key=groups.longest)
        tokens = plan.num_blocks * plan.block_size
    return min(model.max_model_len, tokens)


_Planner = Callable[[ModelSpec, GpuSpec, Parallelism, EngineLimits, int], KvPlan]


def _plan_vllm(
    model: ModelSpec, gpu: GpuSpec, parallel: Parallelism, limits: EngineLimits, max_model_len: int, *, hybrid: int
) -> KvPlan:
    del max_model_len
    shard = shard_of(model, parallel, limits)
    weights = shard.stage_weight_bytes()
    # The peak of activations is an MLP's input, both halves and output of a full step, and logits: 1.20 GiB for
    # Llama-3-8B at 8,192 tokens and 256 sequences, where vLLM reports 1.26 GiB (vllm-project/vllm, PR 10511).
    ffn = model.ffn
    wide = max(ffn.intermediate, ffn.experts_per_token * ffn.expert_intermediate + ffn.shared_intermediate)
    activation = limits.max_num_batched_tokens * (3 * wide / parallel.tp + 3 * model.hidden) * 2.0
    activation += LOGIT_COPIES * 4.0 * limits.max_num_seqs * model.vocab
    exchange = _exchange_bytes(shard, limits)
    activation += exchange
    grouped = hybrid_groups(shard, limits, hybrid) if hybrid else None
    if grouped is None:
        states = catalog.state_bytes_per_sequence(model) * max(shard.layers) / model.layers / parallel.tp
        activation += limits.max_num_seqs * states  # states of linear attention
    reserve = FRAMEWORK_BYTES + NCCL_BYTES.get(parallel.gpus_per_replica, NCCL_BYTES_MORE)
    usable = gpu.memory_bytes * limits.gpu_memory_utilization - reserve
    caching = model.caching_layers / model.layers
    per_block = np.array(shard.layers) * caching * shard.kv_bytes * limits.block_size
    if grouped is not None:
        per_block = np.array([grouped[1] * shard.kv_bytes * grouped[0].block_size])
    blocks = np.floor((usable - weights - activation) / per_block)
    fullest = int(np.argmin(blocks))
    return KvPlan(
        num_blocks=int(blocks[fullest]) - NULL_BLOCKS,
        block_size=grouped[0].block_size if grouped else limits.block_size,
        weight_bytes=float(weights[fullest]),
        activation_bytes=activation,
        kv_bytes_per_block=float(per_block[fullest]),
        available_bytes=usable,
        swap_s_per_block=float(per_block[fullest]) / HOST_LINK_BYTES_PER_S,
        groups=grouped[0] if grouped else None,
        exchange_bytes=exchange,
    )


def _exchange_bytes(shard: Shard, limits: EngineLimits) -> float:
    """Return the bytes on one GPU in which data-parallel ranks exchange a step's tokens."""
    parallel, hidden = shard.parallel, shard.model.hidden
    if parallel.dp == 1:
        return 0.0
    if parallel.all2all_backend == "deepep_high_throughput":
        return DEEPEP_BUFFER_BYTES
    if parallel.all2all_backend == "deepep_low_latency":
        # Two sets of buffers to send and to receive, for all experts and each for the token budget of one rank: DeepEP
        # allocates 2,116 MB for 288 experts, 128 tokens and a hidden size of 7,168.
        slots = shard.model.ffn.experts + (parallel.redundant_experts or 0)
        return DEEPEP_BUFFER_BYTES + 4 * slots * limits.max_num_batched_tokens * hidden * 2.0
    # The tokens of all ranks before and after the experts, in 16 bits; those of the own rank are counted already.
    return (parallel.dp - 1) * limits.max_num_batched_tokens * hidden * 2 * 2.0


def _plan_vidur(
    model: ModelSpec, gpu: GpuSpec, parallel: Parallelism, limits: EngineLimits, max_model_len: int
) -> KvPlan:
    shard = shard_of(model, parallel, limits)
    budget, weights = _vidur_budget_bytes(gpu), _vidur_weight_bytes(shard)
    per_request = _vidur_kv_bytes(shard) * max_model_len
    max_requests = math.floor((budget - weights) / per_request)
    per_block = _vidur_kv_bytes(shard) * limits.block_size / parallel.pp
    blocks, swap_s = max_model_len // limits.block_size * max_requests * parallel.pp, per_block / HOST_LINK_BYTES_PER_S
    return KvPlan(blocks, limits.block_size, weights, 0.0, per_block, budget, swap_s, planner="vidur")


def _vidur_budget_bytes(gpu: GpuSpec) -> float:
    # Vidur knows a device by its nominal GiB; drivers offer a little less.
    return math.ceil(gpu.memory_bytes / GIB) * GIB * (1 - VIDUR_MARGIN)


def _vidur_weight_bytes(shard: Shard) -> float:
    model, attention = shard.model, shard.model.attention
    per_layer = model.hidden * attention.head_dim * (2 * shard.heads + 2 * shard.kv_heads)
    into = 3 if model.ffn.gated else 2
    per_layer += into * model.hidden * model.ffn.intermediate // shard.parallel.tp
    return 2.0 * per_layer * (model.layers // shard.parallel.pp)


def _vidur_kv_bytes(shard: Shard) -> float:
    """Return a token's bytes over all layers, which Vidur does not divide by the number of stages."""
    return 2.0 * 2 * shard.model.attention.head_dim * shard.kv_heads * shard.model.layers


_Deployment = tuple[ModelSpec, GpuSpec, Parallelism, EngineLimits]


def _require_fit(plan: KvPlan, planner: _Planner, deployment: _Deployment, max_model_len: int) -> None:
    missing, cache = _missing_bytes(plan, max_model_len)
    if missing <= 0:
        return
    model, gpu, parallel, limits = deployment
    split = f"tp={parallel.tp}, pp={parallel.pp}"
    advice = "No tp up to 16 fits; use more pipeline stages (pp) or a GPU with more memory."
    if parallel.dp > 1 or parallel.ep > 1:
        split += f", dp={parallel.dp}, ep={parallel.ep}"
        advice = "Divide the experts over more GPUs (tp x dp), or lower max_num_batched_tokens."
    if plan.num_blocks >= 1 and plan.planner == "lengthwise":
        fits = bisect_right(range(1, max_model_len + 1), plan.num_blocks, key=plan.longest_blocks)
        advice = f"Lower max_model_len to {fits}." if fits else advice
    smallest_tp = None
    degrees = usable_degrees(model) if parallel.dp == parallel.ep == 1 else ()
    for tp in (tp for tp in degrees if tp > parallel.tp):
        larger = planner(model, gpu, replace(parallel, tp=tp), limits, max_model_len)
        if _missing_bytes(larger, max_model_len)[0] <= 0:
            advice, smallest_tp = f"The smallest tp that fits is {tp}.", tp
            break
    parts = {
        "weights": plan.weight_bytes,
        "activations": plan.activation_bytes - plan.exchange_bytes,
        "buffers for exchanged tokens": plan.exchange_bytes,
        f"KV cache of one request of {max_model_len:,} tokens": cache,
    }
    needed = ", ".join(f"{name} {size / GIB:.2f}" for name, size in parts.items() if size)
    error = DoesNotFitError(
        f"{model.name} does not fit {gpu.name} with {split}: each GPU needs {sum(parts.values()) / GIB:.2f} GiB "
        f"({needed}) and has {plan.available_bytes / GIB:.2f} GiB, {missing / GIB:.2f} GiB too little. {advice}"
    )
    error.smallest_tp = smallest_tp
    raise error


def _missing_bytes(plan: KvPlan, max_model_len: int) -> tuple[float, float]:
    """Return (bytes that a GPU lacks, bytes of the cache of one request and of the null block)."""
    blocks = plan.longest_blocks(max_model_len) + (NULL_BLOCKS if plan.planner == "lengthwise" else 0)
    cache = blocks * plan.kv_bytes_per_block
    if plan.num_blocks >= 1 and plan.planner == "vidur":
        return 0.0, cache
    return plan.weight_bytes + plan.activation_bytes + cache - plan.available_bytes, cache
