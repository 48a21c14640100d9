"""Utilization, power and cost of the hardware."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lengthwise.catalog import active_parameters, embedding_parameters, kv_bytes_per_token, parameters, weight_bytes
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.records import Records, ReplicaTotals, Status
from lengthwise.schema.specs import GpuSpec, ModelSpec

SHARES = {
    "prefill_attention": "prefill_attention_s",
    "decode_attention": "decode_attention_s",
    "linear": "layer_s",
    "communication": "comm_s",
    "embedding": "first_s",
    "head": "head_s",
    "send": "send_s",
    "swap": "swap_s",
    "host": "host_s",
}
"""Uses of a stage's time and their columns of ReplicaTotals; the rest is "idle"."""

MFU_AT_FULL_POWER, POWER_EXPONENT = 0.45, 0.7
STREAMING_SHARE = 0.4


@dataclass(frozen=True)
class Cost:
    """Price of the complete deployment per million delivered tokens of one kind."""

    usd_per_million_prompt_tokens: Estimate
    usd_per_million_output_tokens: Estimate
    usd_per_million_tokens: Estimate


@dataclass(frozen=True)
class Hardware:
    """Use of the deployment's hardware over the complete run, warm-up and idle time included."""

    busy_share: Estimate  # share of time with a step in flight, mean over replicas
    replica_busy_share: tuple[Estimate, ...]  # the same for each replica
    batch_seqs: Estimate  # sequences in a step, weighted by the step's time
    mfu: Estimate  # model FLOPs a second over the GPUs' peak (:func:`model_flops`)
    mbu: Estimate  # bytes that must move a second over the GPUs' bandwidth (:func:`moved_bytes`)
    kv_utilization: Estimate  # KV blocks in use over all KV blocks
    power_w: Estimate  # estimated mean draw of all GPUs (:func:`gpu_power_w`), without hosts and cooling
    energy_j_per_output_token: Estimate  # GPU energy over delivered output tokens
    cost: Cost  # price of the GPUs per million tokens
    time_shares: dict[str, Estimate]  # of the stages, by use (keys of SHARES, and "idle"); sum 1


def hardware_of(records: Records, deployment: Deployment) -> Hardware:
    """Return the use of the deployment's hardware in one run, without intervals."""
    totals, span_s = records.totals, records.end_s
    gpus, gpu = deployment.gpus, deployment.gpu
    dtype = deployment.limits.weight_dtype or deployment.model.dtype
    idle = np.full(len(totals.busy_s), math.nan)
    busy = np.minimum(totals.busy_s / span_s, 1.0) if span_s > 0 else idle
    mfu = _ratio(model_flops(totals, deployment.model), gpus * gpu.flops(dtype) * span_s)
    mbu = _ratio(moved_bytes(totals, deployment), gpus * gpu.bandwidth_bytes_per_s * span_s)
    power_w = gpus * gpu_power_w(gpu, float(busy.mean()), mfu, mbu)
    finished = records.requests.status == Status.FINISHED
    prompt = float(records.requests.prompt_tokens.sum(where=finished))
    output = float(records.requests.output_tokens.sum(where=finished))
    usd = deployment.price_per_hour_usd * span_s / 3600
    sides = [side for side in (deployment, deployment.decode) if side is not None]
    kv_blocks = sum(side.kv.num_blocks * side.parallel.replicas for side in sides)
    stage_s = sum(side.parallel.pp * side.parallel.replicas for side in sides) * span_s
    used_s = {name: float(getattr(totals, column).sum()) for name, column in SHARES.items()}
    # A step that a time limit interrupts counts in full, even beyond the end of the run.
    used_s["idle"] = max(0.0, stage_s - sum(used_s.values()))
    return Hardware(
        busy_share=Estimate(float(busy.mean())),
        replica_busy_share=tuple(Estimate(float(b)) for b in busy),
        batch_seqs=Estimate(_ratio(records.series.seqs_s.sum(), records.series.step_s.sum())),
        mfu=Estimate(mfu),
        mbu=Estimate(mbu),
        kv_utilization=Estimate(_ratio(totals.kv_block_s.sum(), kv_blocks * span_s)),
        power_w=Estimate(power_w),
        energy_j_per_output_token=Estimate(_ratio(power_w * span_s, output)),
        cost=Cost(*(Estimate(_ratio(1e6 * usd, tokens)) for tokens in (prompt, output, prompt + output))),
        time_shares={name: Estimate(_ratio(seconds, sum(used_s.values()))) for name, seconds in used_s.items()},
    )


def model_flops(totals: ReplicaTotals, model: ModelSpec) -> float:
    """Return the FLOPs that the computed tokens need: 2 for each weight and token, and those of attention.

    As in PaLM (Chowdhery et al., 2022, appendix B), for a forward pass. Weights are those that multiply a token: of
    experts the visited ones; an embedding table that is not also the head is only looked up. A (query, key) pair costs
    2 FLOPs for each dimension of key and value, head and layer; pairs outside a sliding window count too.
    """
    attention = model.attention
    lookup = 0 if model.tied_embeddings else embedding_parameters(model)
    key_dim = attention.head_dim + (attention.rope_head_dim if attention.is_mla else 0)
    dims = key_dim + (attention.v_head_dim or attention.head_dim)
    pair_flops = 2 * attention.heads * dims * model.caching_layers
    weight_flops = 2.0 * (active_parameters(model) - lookup)
    return weight_flops * float(totals.tokens.sum()) + pair_flops * float(totals.attention_pairs.sum())


def moved_bytes(totals: ReplicaTotals, deployment: Deployment) -> float:
    """Return the bytes that steps must read: all weights once a step, and the KV cache that decodes read.

    Activations and writes to the cache are left out, as in the usual MBU. Of experts, a step of T evenly routed tokens
    reads a share 1 - (1 - visited / all)^T.
    """
    model, limits = deployment.model, deployment.limits
    steps, tokens = float(totals.steps.sum()), float(totals.tokens.sum())
    unread = 0.0  # share of all weights, in experts that no token of a step visits
    if model.ffn.experts > model.ffn.experts_per_token:
        visited = model.ffn.experts_per_token / model.ffn.experts
        in_experts = (1 - active_parameters(model) / parameters(model)) / (1 - visited)
        unread = float(in_experts * (1 - visited) ** (tokens / steps if steps else 0.0))
    weights = steps * weight_bytes(model, limits.weight_dtype) * (1 - unread)
    return weights + float(totals.kv_read_tokens.sum()) * kv_bytes_per_token(model, limits.kv_dtype)


def gpu_power_w(gpu: GpuSpec, busy_share: float, mfu: float, mbu: float) -> float:
    """Return the estimated mean draw of one GPU, in watts; expect tens of percent of error.

    ``busy_share`` is the share of time with a step in flight; ``mfu`` and ``mbu`` include idle time. While a step is in
    flight the GPU draws idle_w + (tdp_w - idle_w) * a, with the activity a the larger of (MFU / 0.45)^0.7 (Oezcan et
    al., "Quantifying the energy consumption and carbon emissions of LLM inference via simulations", 2025, fitted on
    A100) and 0.4 MBU (an H100 that decodes one sequence, all bandwidth and no compute, draws about 300 of 700 W in the
    ML.ENERGY benchmark v3), at most 1; ``idle_w`` otherwise.
    """
    if not busy_share > 0:
        return gpu.idle_w
    compute = (mfu / busy_share / MFU_AT_FULL_POWER) ** POWER_EXPONENT
    activity: float = min(1.0, max(compute, STREAMING_SHARE * mbu / busy_share))
    return gpu.idle_w + (gpu.tdp_w - gpu.idle_w) * activity * busy_share


def _ratio(part: float, total: float) -> float:
    return float(part) / float(total) if total > 0 else math.nan
