"""How busy the hardware was, with what, and what that cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from lengthwise.catalog import active_parameters, embedding_parameters, kv_bytes_per_token, parameters, weight_bytes
from lengthwise.schema.deployment import DecodeSide, Deployment
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
"""Where a stage's time goes, by the column of ReplicaTotals; what is left is "idle"."""

MFU_AT_FULL_POWER, POWER_EXPONENT = 0.45, 0.7
STREAMING_SHARE = 0.4


@dataclass(frozen=True)
class Cost:
    """The whole deployment's price over one kind of delivered tokens; each carries all of it."""

    usd_per_million_prompt_tokens: Estimate
    usd_per_million_output_tokens: Estimate
    usd_per_million_tokens: Estimate


@dataclass(frozen=True)
class Hardware:
    """The deployment over the whole run, warm-up and idle time included.

    Attributes:
        busy_share: Time with a step in flight, mean over replicas.
        replica_busy_share: The same, a replica each.
        batch_seqs: Sequences in a step, weighted by the step's time.
        mfu: Model FLOPs a second over the GPUs' peak (:func:`model_flops`).
        mbu: Bytes that must move a second over the GPUs' bandwidth (:func:`moved_bytes`).
        kv_utilization: KV blocks held over all there are.
        power_w: Estimated mean draw of all GPUs (:func:`gpu_power_w`); hosts and cooling left out.
        energy_j_per_output_token: That power over delivered output tokens.
        cost: Price of the GPUs a million tokens.
        time_shares: Stage-time by what it went to (keys of SHARES, and "idle"); they add up to 1.
    """

    busy_share: Estimate
    replica_busy_share: tuple[Estimate, ...]
    batch_seqs: Estimate
    mfu: Estimate
    mbu: Estimate
    kv_utilization: Estimate
    power_w: Estimate
    energy_j_per_output_token: Estimate
    cost: Cost
    time_shares: dict[str, Estimate]


def hardware_of(records: Records, deployment: Deployment) -> Hardware:
    """What the run asked of the deployment's hardware; one run has no intervals for it."""
    totals, span_s = records.totals, records.end_s
    gpus, gpu = deployment.gpus, deployment.gpu
    dtype = deployment.limits.weight_dtype or deployment.model.dtype
    idle = np.full(len(totals.busy_s), math.nan)
    busy = np.minimum(totals.busy_s / span_s, 1.0) if span_s > 0 else idle
    mfu = _ratio(model_flops(totals, deployment.model), gpus * gpu.flops(dtype) * span_s)
    mbu = _ratio(moved_bytes(totals, deployment), gpus * gpu.bandwidth_bytes_per_s * span_s)
    power_w = gpus * gpu_power_w(gpu, float(busy.mean()), mfu, mbu)
    prompt, output = _delivered(records)
    held = float(totals.kv_block_s.sum())
    return Hardware(
        busy_share=Estimate(float(busy.mean())),
        replica_busy_share=tuple(Estimate(float(b)) for b in busy),
        batch_seqs=Estimate(_ratio(records.series.seqs_s.sum(), records.series.step_s.sum())),
        mfu=Estimate(mfu),
        mbu=Estimate(mbu),
        kv_utilization=Estimate(_ratio(held, _over_replicas(deployment, lambda side: side.kv.num_blocks) * span_s)),
        power_w=Estimate(power_w),
        energy_j_per_output_token=Estimate(_ratio(power_w * span_s, output)),
        cost=_cost(deployment.price_per_hour_usd * span_s / 3600, prompt, output),
        time_shares=_time_shares(totals, _over_replicas(deployment, lambda side: side.parallel.pp) * span_s),
    )


def _over_replicas(deployment: Deployment, of: Callable[[Deployment | DecodeSide], int]) -> int:
    """A number of a replica, summed over all replicas of both sides."""
    sides = [side for side in (deployment, deployment.decode) if side is not None]
    return sum(of(side) * side.parallel.replicas for side in sides)


def model_flops(totals: ReplicaTotals, model: ModelSpec) -> float:
    """FLOPs that the computed tokens need: 2 a weight and token, and attention's.

    As in PaLM (Chowdhery et al., 2022, appendix B), for a forward pass. The weights are those
    a token is multiplied with: of experts the visited ones; a token table that is not also
    the head is only looked up. A (query, key) pair costs 2 FLOPs for each of the key's and of
    the value's dimensions, head and layer; pairs outside a sliding window count too.
    """
    attention = model.attention
    lookup = 0 if model.tied_embeddings else embedding_parameters(model)
    key_dim = attention.head_dim + (attention.rope_head_dim if attention.is_mla else 0)
    dims = key_dim + (attention.v_head_dim or attention.head_dim)
    pair = 2 * attention.heads * dims * model.layers
    tokens = float(totals.tokens.sum())
    pairs = float(totals.attention_pairs.sum())
    return 2.0 * (active_parameters(model) - lookup) * tokens + pair * pairs


def moved_bytes(totals: ReplicaTotals, deployment: Deployment) -> float:
    """Bytes that steps must read: all weights once a step, and the KV cache that decodes read.

    Activations and the cache's writes are left out, as in the usual MBU. Of experts, a step
    of T tokens reads a share 1 - (1 - visited / all)^T, as if tokens were routed evenly.
    """
    model, limits = deployment.model, deployment.limits
    steps, tokens = float(totals.steps.sum()), float(totals.tokens.sum())
    idle = _idle_expert_share(model, tokens / steps if steps else 0.0)
    weights = steps * weight_bytes(model, limits.weight_dtype) * (1 - idle)
    return weights + float(totals.kv_read_tokens.sum()) * kv_bytes_per_token(model, limits.kv_dtype)


def _idle_expert_share(model: ModelSpec, step_tokens: float) -> float:
    """Share of all weights that sit in experts which no token of a step visits."""
    ffn = model.ffn
    if ffn.experts <= ffn.experts_per_token:
        return 0.0
    visited = ffn.experts_per_token / ffn.experts
    in_experts = (1 - active_parameters(model) / parameters(model)) / (1 - visited)
    return float(in_experts * (1 - visited) ** step_tokens)


def gpu_power_w(gpu: GpuSpec, busy_share: float, mfu: float, mbu: float) -> float:
    """Estimated mean draw of one GPU, in watts; expect tens of percent of error.

    While a step is in flight, idle_w + (tdp_w - idle_w) * a, with the activity a the larger
    of (MFU / 0.45)^0.7 (Oezcan et al., "Quantifying the energy consumption and carbon
    emissions of LLM inference via simulations", 2025, fitted on A100) and 0.4 MBU (an H100
    that decodes one sequence, all bandwidth and no compute, draws about 300 of 700 W in the
    ML.ENERGY benchmark v3), at most 1; ``idle_w`` otherwise.

    Args:
        gpu: Its idle and full power.
        busy_share: Share of time with a step in flight.
        mfu: Over all the time, idle time included.
        mbu: Over all the time, idle time included.
    """
    if not busy_share > 0:
        return gpu.idle_w
    compute = (mfu / busy_share / MFU_AT_FULL_POWER) ** POWER_EXPONENT
    activity: float = min(1.0, max(compute, STREAMING_SHARE * mbu / busy_share))
    return gpu.idle_w + (gpu.tdp_w - gpu.idle_w) * activity * busy_share


def _delivered(records: Records) -> tuple[float, float]:
    """Prompt and output tokens of finished requests."""
    finished = records.requests.status == Status.FINISHED
    prompt = records.requests.prompt_tokens.sum(where=finished)
    return float(prompt), float(records.requests.output_tokens.sum(where=finished))


def _cost(usd: float, prompt: float, output: float) -> Cost:
    return Cost(*(Estimate(_ratio(1e6 * usd, tokens)) for tokens in (prompt, output, prompt + output)))


def _time_shares(totals: ReplicaTotals, stage_s: float) -> dict[str, Estimate]:
    """Shares of all stages' time; a step that a time limit cut counts whole, even beyond the end."""
    elapsed_s = {name: float(getattr(totals, column).sum()) for name, column in SHARES.items()}
    elapsed_s["idle"] = max(0.0, stage_s - sum(elapsed_s.values()))
    return {name: Estimate(_ratio(part, sum(elapsed_s.values()))) for name, part in elapsed_s.items()}


def _ratio(part: float, total: float) -> float:
    return float(part) / float(total) if total > 0 else math.nan
