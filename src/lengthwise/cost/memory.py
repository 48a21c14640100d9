"""What a replica's memory holds: weights, activations, and blocks of KV cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from lengthwise.cost._shard import Shard, shard_of, usable_degrees
from lengthwise.schema.deployment import EngineLimits, KvPlan, Parallelism
from lengthwise.schema.errors import DoesNotFitError, InputError, UnknownNameError
from lengthwise.schema.hardware import GpuSpec
from lengthwise.schema.model import ModelSpec
from lengthwise.schema.units import GIB, MIB

FRAMEWORK_BYTES = 0.6 * GIB
"""CUDA context, libraries, allocator: 551 MB in AIConfigurator's system files; with the activations below
vLLM 0.19 on an RTX 4090 (Llama-3.1-8B, 25.25 GB, 2,588 blocks) leaves 0.57 GiB unexplained."""

NCCL_BYTES = {1: 0, 2: 342 * MIB}
NCCL_BYTES_MORE = 392 * MIB
"""Buffers by GPUs that talk to each other: ``nccl_mem`` of AIConfigurator's system files."""

LOGIT_COPIES = 3
"""fp32 [sequences, vocab] arrays alive in vLLM's sampler: logits, probabilities, sorted."""

HOST_LINK_BYTES_PER_S = 25e9
"""What PCIe 4 x16 (32 GB/s on paper) moves between GPU and host memory."""

VIDUR_MARGIN = 0.1


def plan_memory(
    model: ModelSpec,
    gpu: GpuSpec,
    parallel: Parallelism,
    limits: EngineLimits,
    max_model_len: int,
    planner: str = "lengthwise",
    num_blocks: int | None = None,
) -> KvPlan:
    """What the fullest GPU of a replica holds, and so how many KV blocks the replica has.

    "lengthwise" budgets as vLLM does: ``gpu_memory_utilization`` of the memory, less weights
    (embedding, head, the stage's layers, replicated KV heads), less the peak of activations in a step of
    ``max_num_batched_tokens``, less context and communication buffers. Every layer counts with full
    context, sliding windows too. "vidur" follows its memory planner: no embedding or head, no
    activations, 10 % margin on the nominal GiB, whole requests of ``max_model_len`` only.

    Args:
        model: What is served.
        gpu: On what.
        parallel: How it is cut.
        limits: Utilisation, block size, dtypes, largest step.
        max_model_len: Tokens of the longest request; the cache must hold one.
        planner: "lengthwise" or "vidur".
        num_blocks: Blocks to use whatever the memory would hold (vLLM: num_gpu_blocks_override).

    Raises:
        DoesNotFitError: Weights, or one request, do not fit; says by how much and which tp would do.
        InputError: ``tp`` does not divide the heads, or ``num_blocks`` is below 1.
        UnknownNameError: There is no such planner.
    """
    plan = _planner(planner)
    if num_blocks is None:
        got = plan(model, gpu, parallel, limits, max_model_len)
        _require_fit(got, plan, (model, gpu, parallel, limits), max_model_len)
        return got
    if num_blocks < 1:
        raise InputError(f"num_blocks must be at least 1; it is {num_blocks}")
    return replace(plan(model, gpu, parallel, limits, max_model_len), num_blocks=num_blocks)


def largest_model_len(
    model: ModelSpec,
    gpu: GpuSpec,
    parallel: Parallelism,
    limits: EngineLimits,
    planner: str = "lengthwise",
    num_blocks: int | None = None,
) -> int:
    """Tokens of the longest request that model and KV cache take.

    Raises:
        DoesNotFitError: Not even one block fits.
        InputError: As for ``plan_memory``.
    """
    if num_blocks is None and planner == "vidur":
        shard = shard_of(model, parallel, limits)
        left = _vidur_budget_bytes(gpu) - _vidur_weight_bytes(shard)
        tokens = int(left // _vidur_kv_bytes(shard))
        if tokens < limits.block_size:
            plan_memory(model, gpu, parallel, limits, limits.block_size, planner)
    else:
        plan = plan_memory(model, gpu, parallel, limits, limits.block_size, planner, num_blocks)
        tokens = plan.num_blocks * plan.block_size
    return min(model.max_model_len, tokens)


_Plan = Callable[[ModelSpec, GpuSpec, Parallelism, EngineLimits, int], KvPlan]


def _planner(name: str) -> _Plan:
    planners: dict[str, _Plan] = {"lengthwise": _ours, "vidur": _vidur}
    if name not in planners:
        raise UnknownNameError("memory planner", name, planners)
    return planners[name]


def _ours(
    model: ModelSpec, gpu: GpuSpec, parallel: Parallelism, limits: EngineLimits, max_model_len: int
) -> KvPlan:
    del max_model_len
    shard = shard_of(model, parallel, limits)
    weights = shard.stage_weight_bytes()
    activation = _activation_bytes(shard, limits)
    talking = parallel.tp * parallel.pp
    reserve = FRAMEWORK_BYTES + NCCL_BYTES.get(talking, NCCL_BYTES_MORE)
    usable = gpu.memory_bytes * limits.gpu_memory_utilization - reserve
    per_block = np.array(shard.layers) * shard.kv_bytes * limits.block_size
    blocks = np.floor((usable - weights - activation) / per_block)
    fullest = int(np.argmin(blocks))
    return KvPlan(
        num_blocks=int(blocks[fullest]),
        block_size=limits.block_size,
        weight_bytes=float(weights[fullest]),
        activation_bytes=activation,
        kv_bytes_per_block=float(per_block[fullest]),
        usable_bytes=usable,
        swap_s_per_block=float(per_block[fullest]) / HOST_LINK_BYTES_PER_S,
    )


def _activation_bytes(shard: Shard, limits: EngineLimits) -> float:
    """Peak beside weights and cache: an MLP's input, both halves and output of a full step, and logits.

    1.20 GiB for Llama-3-8B at 8,192 tokens and 256 sequences, where vLLM reports 1.26 GiB
    (github.com/vllm-project/vllm/pull/10511).
    """
    model, ffn = shard.model, shard.model.ffn
    wide = max(ffn.intermediate, ffn.experts_per_token * ffn.expert_intermediate + ffn.shared_intermediate)
    step = limits.max_num_batched_tokens * (3 * wide / shard.parallel.tp + 3 * model.hidden) * 2.0
    return step + LOGIT_COPIES * 4.0 * limits.max_num_seqs * model.vocab


def _vidur(
    model: ModelSpec, gpu: GpuSpec, parallel: Parallelism, limits: EngineLimits, max_model_len: int
) -> KvPlan:
    shard = shard_of(model, parallel, limits)
    budget, weights = _vidur_budget_bytes(gpu), _vidur_weight_bytes(shard)
    per_request = _vidur_kv_bytes(shard) * max_model_len
    slots = math.floor((budget - weights) / per_request)
    blocks_a_request = max_model_len // limits.block_size
    per_block = _vidur_kv_bytes(shard) * limits.block_size / parallel.pp
    return KvPlan(
        num_blocks=blocks_a_request * slots * parallel.pp,
        block_size=limits.block_size,
        weight_bytes=weights,
        activation_bytes=0.0,
        kv_bytes_per_block=per_block,
        usable_bytes=budget,
        swap_s_per_block=per_block / HOST_LINK_BYTES_PER_S,
        planner="vidur",
    )


def _vidur_budget_bytes(gpu: GpuSpec) -> float:
    """Vidur knows a device by its nominal GiB; drivers offer a little less."""
    return math.ceil(gpu.memory_bytes / GIB) * GIB * (1 - VIDUR_MARGIN)


def _vidur_weight_bytes(shard: Shard) -> float:
    model, attention = shard.model, shard.model.attention
    per_layer = model.hidden * attention.head_dim * (2 * shard.heads + 2 * shard.kv_heads)
    into = 3 if model.ffn.gated else 2
    per_layer += into * model.hidden * model.ffn.intermediate // shard.parallel.tp
    return 2.0 * per_layer * (model.layers // shard.parallel.pp)


def _vidur_kv_bytes(shard: Shard) -> float:
    """Bytes a token over all layers: Vidur does not divide them by the stages."""
    return 2.0 * 2 * shard.model.attention.head_dim * shard.kv_heads * shard.model.layers


def _require_fit(
    got: KvPlan, plan: _Plan, what: tuple[ModelSpec, GpuSpec, Parallelism, EngineLimits], max_model_len: int
) -> None:
    missing = _missing_bytes(got, max_model_len)
    if missing <= 0:
        return
    model, gpu, parallel, _ = what
    cache = _blocks_needed(got, max_model_len) * got.kv_bytes_per_block
    raise DoesNotFitError(
        f"{model.name} with tp={parallel.tp}, pp={parallel.pp} must fit {gpu.name}: a GPU offers "
        f"{got.usable_bytes / GIB:.2f} GiB for weights ({got.weight_bytes / GIB:.2f}), activations "
        f"({got.activation_bytes / GIB:.2f}) and the KV cache of one request of {max_model_len} tokens "
        f"({cache / GIB:.2f}), which is {missing / GIB:.2f} GiB too little. "
        + _advice(got, plan, what, max_model_len)
    )


def _advice(
    got: KvPlan, plan: _Plan, what: tuple[ModelSpec, GpuSpec, Parallelism, EngineLimits], max_model_len: int
) -> str:
    model, gpu, parallel, limits = what
    for tp in usable_degrees(model):
        if tp > parallel.tp:
            more = plan(model, gpu, replace(parallel, tp=tp), limits, max_model_len)
            if _missing_bytes(more, max_model_len) <= 0:
                return f"The smallest tp that fits is {tp}."
    if got.num_blocks >= 1 and got.planner == "lengthwise":
        return f"Lower max_model_len to {got.num_blocks * got.block_size}."
    return "No tp up to 16 fits; use more pipeline stages (pp) or a GPU with more memory."


def _blocks_needed(plan: KvPlan, max_model_len: int) -> int:
    return -(-max_model_len // plan.block_size)


def _missing_bytes(plan: KvPlan, max_model_len: int) -> float:
    held = plan.weight_bytes + plan.activation_bytes
    if plan.num_blocks >= 1 and plan.planner == "vidur":
        return 0.0
    return held + _blocks_needed(plan, max_model_len) * plan.kv_bytes_per_block - plan.usable_bytes
