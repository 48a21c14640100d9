"""Cost tables of any model on any GPU, from their data sheets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lengthwise.cost._efficiency import Work, kernels_of
from lengthwise.cost._operators import Operators
from lengthwise.cost._roofline_errors import roofline_errors, with_front_error
from lengthwise.cost._shard import shard_of
from lengthwise.schema.cost_tables import CostTables, Floats, Front, Ints, grid_axis
from lengthwise.schema.deployment import EngineLimits, Parallelism
from lengthwise.schema.errors import InputError
from lengthwise.schema.hardware import GpuSpec, NodeSpec
from lengthwise.schema.model import ModelSpec

HOST_STEP_S, HOST_SEQUENCE_S = 126e-6, 4.4e-6
"""What vLLM v1's host adds to a step, and for each of its sequences.

BLIS' fit of 15 vLLM runs on H100s (trained-physics coefficients 7 and 6, Apache-2.0,
github.com/inference-sim/inference-sim). Most host work hides behind the GPU there; an engine that
schedules between steps, as vLLM v0 did, waits for milliseconds: say so with HostOverhead."""

LARGEST_KV_TOKENS = 2**24


@dataclass(frozen=True)
class HostOverhead:
    """Seconds that the GPU waits for the host: ``step_s`` a step, ``sequence_s`` a sequence in it.

    And those that a request waits for it before the engine has it (``schema.cost_tables.Front``): ``request_s`` on
    its own way, ``queue_s`` of the serial front, in which all others wait for it.
    """

    step_s: float = HOST_STEP_S
    sequence_s: float = HOST_SEQUENCE_S
    request_s: float = 0.0
    queue_s: float = 0.0

    @property
    def front(self) -> Front:
        """What stands before the engine."""
        return Front(self.request_s, self.queue_s)


ENGINE_HOSTS = {
    "vllm": HostOverhead(420e-6, 10.6e-6, 23.6e-3, 2.8e-3),
    "sglang": HostOverhead(338e-6, 8.9e-6, 21.8e-3, 2.8e-3),
    "trtllm": HostOverhead(312e-6, 8.6e-6, 18.0e-3, 2.8e-3),
}
"""Hosts fitted with the roofline to 659 end-to-end points of InferenceMAX (Apache-2.0) on H100, H200 and B200.

Larger than HostOverhead's default, which BLIS measured on other machines: whatever an engine adds to its kernels is
in them. So are waits before the engine, as Llama-3.1-70B's clients saw them (EXPERT_FRONTS adds what those of models
with experts saw). ``deploy(host="vllm")`` and ``deployment.host`` take them by name (benchmarks/_silicon.py holds
both against the measured deployments)."""

EXPERT_FRONTS = {"vllm": Front(99.9e-3), "sglang": Front(140.7e-3), "trtllm": Front(177e-3)}
"""What the fronts of ENGINE_HOSTS have more where the model has experts: from the same points (DeepSeek-V3, Kimi-K2).

No mechanism was measured apart: whatever a first token waits beyond the roofline's prefill is in these. It is a delay
and no queue, though those who sent many requests at once waited longer: a serial front that explains their waits
(36 ms a request) would hold any deployment to 27 requests a second, which nothing measured bears out."""


@dataclass(frozen=True)
class OperatorTime:
    """One operator's share of one step of a replica, summed over all stages; host overhead included.

    ``flops`` and ``bytes`` are of one GPU of each stage; ``bytes`` are read and written, or sent for a
    collective. ``bound`` is the largest part of the time: "compute", "memory", "network" or "latency".
    """

    name: str
    part: str
    seconds: float
    flops: float
    bytes: float
    bound: str


def roofline(
    model: ModelSpec,
    gpu: GpuSpec,
    node: NodeSpec,
    parallel: Parallelism,
    limits: EngineLimits,
    max_model_len: int,
    host: HostOverhead = HostOverhead(),
) -> CostTables:
    """Cost tables (rule PER_REQUEST) as the sum of every operator's roofline time.

    Token axes reach the largest step or prompt, contexts ``max_model_len``, sequences
    ``max_num_seqs``, and KV tokens all that these sequences could hold, at most 2**24.

    Args:
        model: What is served.
        gpu: On what.
        node: What joins the GPUs.
        parallel: How the model is cut.
        limits: Largest step and batch, dtypes of weights and cache.
        max_model_len: Tokens of the longest request.
        host: Overhead of the host by sequences in the step, and its front.

    Raises:
        InputError: ``tp`` does not divide the heads, or there are more stages than layers.
    """
    ops = _operators_of(model, gpu, node, parallel, limits)
    tokens = np.arange(max(limits.max_num_batched_tokens, limits.max_num_seqs) + 1)
    seqs = np.arange(limits.max_num_seqs + 1)
    chunk = grid_axis(max(limits.max_num_batched_tokens, max_model_len))
    context = grid_axis(max_model_len)
    batch = grid_axis(limits.max_num_seqs)
    cached = grid_axis(min(limits.max_num_seqs * max_model_len, LARGEST_KV_TOKENS))
    return CostTables(
        layer_s=_table(ops.layer, tokens),
        comm_s=_table(ops.all_reduces, tokens),
        first_s=_table(ops.first, tokens),
        send_s=_table(ops.send, tokens),
        head_s=_table(ops.head, seqs),
        host_s=np.asarray(host.step_s + host.sequence_s * seqs, dtype=np.float64),
        prefill_s=_table(ops.prefill, chunk[:, None], context[None, :]),
        decode_s=_table(ops.decode, batch[:, None], cached[None, :]),
        stage_layers=np.array(ops.shard.layers, dtype=np.int64),
        source=f"roofline of {model.name} on {gpu.name}",
        errors=with_front_error(roofline_errors(model, gpu, ops.shard.weight_dtype), host.front),
        front=host.front,
    )


def operators(
    model: ModelSpec,
    gpu: GpuSpec,
    node: NodeSpec,
    parallel: Parallelism,
    limits: EngineLimits,
    *,
    decode_seqs: int = 0,
    kv_tokens: int = 0,
    prefill: Sequence[tuple[int, int]] = (),
    host: HostOverhead = HostOverhead(),
) -> list[OperatorTime]:
    """What each operator of one step takes, in the order of the step.

    Args:
        model: What is served.
        gpu: On what.
        node: What joins the GPUs.
        parallel: How the model is cut.
        limits: Dtypes of weights and cache.
        decode_seqs: Sequences that decode one token each.
        kv_tokens: Tokens they have cached, in all.
        prefill: (chunk, context before it) of each prompt.
        host: Overhead of the host by sequences in the step.

    Raises:
        InputError: The step is empty or holds a negative count, or as for ``roofline``.
    """
    _require_step(decode_seqs, kv_tokens, prefill)
    ops = _operators_of(model, gpu, node, parallel, limits)
    tokens, seqs = decode_seqs + sum(chunk for chunk, _ in prefill), decode_seqs + len(prefill)
    layers, stages = model.layers, parallel.pp
    host_s = host.step_s + host.sequence_s * seqs
    rows = [_row(work, "first", 1) for work in ops.first(tokens)]
    rows += [_row(work, "layer", layers) for work in ops.layer(tokens)]
    for chunk, context in prefill:
        rows += [_row(work, "prefill", layers) for work in ops.prefill(chunk, context)]
    if decode_seqs:
        rows += [_row(work, "decode", layers) for work in ops.decode(decode_seqs, kv_tokens)]
    rows += [_row(work, "comm", layers) for work in ops.all_reduces(tokens)]
    rows += [_row(work, "send", stages - 1) for work in ops.send(tokens)] if stages > 1 else []
    rows += [_row(work, "head", 1) for work in ops.head(seqs)]
    rows.append(OperatorTime("host", "host", host_s, 0.0, 0.0, "latency"))
    return _merged(rows)


def _operators_of(
    model: ModelSpec, gpu: GpuSpec, node: NodeSpec, parallel: Parallelism, limits: EngineLimits
) -> Operators:
    shard = shard_of(model, parallel, limits)
    return Operators(shard, kernels_of(gpu, shard.weight_dtype), node)


def _table(works: Callable[..., list[Work]], *axes: Ints) -> Floats:
    """Seconds over the axes, 0 where the first of them is 0."""
    shape = np.broadcast_shapes(*(axis.shape for axis in axes))
    seconds = np.zeros(shape)
    for work in works(*(axis.astype(np.float64) for axis in axes)):
        seconds += work.seconds
    seconds[0] = 0.0
    return seconds


def _row(work: Work, part: str, times: int) -> OperatorTime:
    return OperatorTime(
        work.name,
        part,
        float(work.seconds) * times,
        float(work.flops) * times,
        float(work.bytes) * times,
        _bound(work),
    )


def _bound(work: Work) -> str:
    parts = {"compute": work.compute_s, "memory": work.memory_s}
    parts |= {"network": work.network_s, "latency": work.latency_s}
    return max(parts, key=lambda name: float(parts[name]))


def _merged(rows: list[OperatorTime]) -> list[OperatorTime]:
    """One row a name: several prompts add up, and the longest of them says what binds."""
    merged: dict[str, list[OperatorTime]] = {}
    for row in rows:
        merged.setdefault(row.name, []).append(row)
    return [
        OperatorTime(
            name,
            same[0].part,
            sum(r.seconds for r in same),
            sum(r.flops for r in same),
            sum(r.bytes for r in same),
            max(same, key=lambda r: r.seconds).bound,
        )
        for name, same in merged.items()
    ]


def _require_step(decode_seqs: int, kv_tokens: int, prefill: Sequence[tuple[Any, Any]]) -> None:
    counts = [decode_seqs, kv_tokens, *(count for pair in prefill for count in pair)]
    if min(counts) < 0 or any(chunk < 1 for chunk, _ in prefill) or not (decode_seqs or prefill):
        raise InputError(
            "a step must hold a sequence or a chunk of a prompt, and no negative counts; it is "
            f"decode_seqs={decode_seqs}, kv_tokens={kv_tokens}, prefill={list(prefill)}"
        )
