"""Cost tables of any model on any GPU, from their data sheets."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from lengthwise import catalog
from lengthwise.cost.memory import shard_of
from lengthwise.cost.operator_work import Operators, Work, kernels_of
from lengthwise.schema.cost_tables import CostTables, Floats, Front, Ints, PartError, grid_axis
from lengthwise.schema.deployment import EngineLimits, Parallelism
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.specs import DTYPE_BYTES, GpuSpec, ModelSpec, NodeSpec, dtype_name

MEASURED = ("A100", "H100", "H200", "B200", "A40")
"""Families with kernels in the roofline's fits."""

MAX_REACH = 2.3
"""Errors of physics on another GPU over those where it was learnt, 75th percentile (``estimators``' FAR_FACTORS)."""

UNKNOWN_STEP_LOG_SD = round(math.log(3) / 1.645, 3)


def gpu_family(gpu: GpuSpec) -> str:
    """The name under which the fits have it."""
    return gpu.name.partition("-")[0]


def is_described(gpu: GpuSpec) -> bool:
    """Whether the user describes it: it is not of the catalog, nor of a family that was measured."""
    return gpu_family(gpu) not in MEASURED and gpu.name not in catalog.gpus()


def factor(gpu: GpuSpec) -> float:
    """By what errors of parts are wider than those of measured GPUs."""
    return 1.0 if gpu_family(gpu) in MEASURED else MAX_REACH


def whole_steps(gpu: GpuSpec) -> tuple[PartError, ...]:
    """The error that all parts of a step share; none for hardware of the catalog."""
    return (PartError("step", UNKNOWN_STEP_LOG_SD),) if is_described(gpu) else ()


def roofline_note(gpu: GpuSpec) -> str:
    """What a reader of the roofline's numbers must know of the hardware; empty where its kernels were measured."""
    if gpu_family(gpu) in MEASURED:
        return ""
    ways = "bench a server and calibrate, or profile its operators, to narrow the intervals"
    if is_described(gpu):
        return (
            f"Nothing was measured on {gpu.name}, which its description alone tells: the intervals in brackets allow "
            f"for steps of a third to three times their time, an assumption; {ways}."
        )
    return (
        f"No kernels were measured on {gpu.name}: the roofline is carried over from other GPUs, and its errors are "
        f"taken for {MAX_REACH:g} times those there; {ways}."
    )


Fits = dict[str, tuple[float, float]]

WIDE_GEMM: Fits = {
    "A100": (0.10, 0.28),
    "H100": (0.11, 0.27),
    "H200": (0.10, 0.28),
    "B200": (0.09, 0.41),
    "A40": (0.06, 0.23),
}
NARROW_GEMM: Fits = {"H100": (0.11, 0.35), "H200": (0.14, 0.39), "B200": (0.15, 0.50)}
PREFILL: Fits = {"A100": (0.11, 0.32), "H100": (0.09, 0.37), "H200": (0.08, 0.35), "B200": (0.13, 0.37)}
DECODE: Fits = {"A100": (0.24, 0.48), "H100": (0.08, 0.33), "H200": (0.08, 0.31), "B200": (0.24, 0.76)}
MOE: Fits = {"A100": (0.22, 0.47), "H100": (0.18, 0.70)}
ALL_REDUCE: Fits = {"A100": (0.17, 0.46), "H100": (0.20, 0.50)}
"""(median, 95th percentile) of the relative error, by GPU."""

STREAM_LOG_SD = math.log(0.9 / 0.6) / 1.96
HOST_LOG_SD, FRONT_LOG_SD, FRONT_SLOW_LOG_SD = 0.5, 0.7, 1.6
_MEDIAN, _P95 = 0.6745, 1.96
"""Quantiles of the absolute value of a standard normal."""


def roofline_errors(model: ModelSpec, gpu: GpuSpec, weight_dtype: str) -> tuple[PartError, ...]:
    """The errors of the parts of a roofline's tables."""
    narrow = DTYPE_BYTES[dtype_name(weight_dtype)] < DTYPE_BYTES["bfloat16"]
    gemm = log_sd(NARROW_GEMM if narrow else WIDE_GEMM, gpu)
    comm = log_sd(ALL_REDUCE, gpu)
    return (
        PartError("layer", max(gemm, log_sd(MOE, gpu)) if model.ffn.experts else gemm),
        PartError("comm", comm),
        PartError("first", round(STREAM_LOG_SD * factor(gpu), 3)),
        PartError("send", comm),
        PartError("head", log_sd(WIDE_GEMM, gpu)),
        PartError("host", HOST_LOG_SD),
        PartError("prefill", log_sd(PREFILL, gpu)),
        PartError("decode", log_sd(DECODE, gpu)),
        *whole_steps(gpu),
    )


def with_front_error(errors: tuple[PartError, ...], front: Front) -> tuple[PartError, ...]:
    """The errors with that of a front that is taken from elsewhere; without one where nothing waits there."""
    others = tuple(error for error in errors if error.part != "front")
    return others if front == Front() else (*others, PartError("front", FRONT_LOG_SD, FRONT_SLOW_LOG_SD))


def log_sd(fits: Fits, gpu: GpuSpec) -> float:
    """Of a fit for this GPU; the widest of all where there is none, or a typical one carried to another GPU."""
    family = gpu_family(gpu)
    known = [fits[family]] if family in fits else fits.values()
    sds = [max(math.log1p(median) / _MEDIAN, math.log1p(p95) / _P95) for median, p95 in known]
    return round(max(*sds, factor(gpu) * statistics.median(sds)) if len(sds) > 1 else sds[0], 3)


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
        work.name, part, float(work.seconds) * times, float(work.flops) * times, float(work.bytes) * times, _bound(work)
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


HOST_NAMES = ("default", *ENGINE_HOSTS)
"""``default`` keeps what the cost source says: BLIS' measurement for the roofline, a profile's own where it has one."""


def host_overhead(host: str | HostOverhead, *, experts: bool = False) -> HostOverhead | None:
    """The seconds of a host; None for "default", which leaves the cost source its own.

    Args:
        host: A name of HOST_NAMES, or seconds.
        experts: Whether it serves a model with experts, before which a named engine's requests wait longer.

    Raises:
        UnknownNameError: No engine has this name.
        InputError: The seconds are negative or not finite.
    """
    if isinstance(host, str):
        if host not in HOST_NAMES:
            raise UnknownNameError("host", host, HOST_NAMES)
        named = ENGINE_HOSTS.get(host)
        return _before_experts(host, named) if experts and named is not None else named
    values = asdict(host)
    if not all(0 <= value < float("inf") for value in values.values()):
        told = ", ".join(f"{name} {value!r}" for name, value in values.items())
        raise InputError(f"a host must take finite seconds from 0; it has {told}")
    return host


def _before_experts(name: str, host: HostOverhead) -> HostOverhead:
    more = EXPERT_FRONTS[name]
    return replace(host, request_s=host.request_s + more.request_s, queue_s=host.queue_s + more.queue_s)


def with_host(tables: CostTables, host: str | HostOverhead, *, experts: bool = False) -> CostTables:
    """The tables with ``host`` and its front in place of their own; as they are for "default".

    ``experts`` as for ``host_overhead``.

    Where the tables know their errors, those of the host and its front become the roofline's assumptions: whatever
    was known of the old ones says nothing of the new.

    Raises:
        UnknownNameError: No engine has this name.
        InputError: The seconds are negative or not finite.
    """
    overhead = host_overhead(host, experts=experts)
    if overhead is None:
        return tables
    seqs = np.arange(len(tables.host_s))
    told = f"host of {host}" if isinstance(host, str) else f"host of {overhead.step_s:g} s a step"
    errors = tuple(PartError("host", HOST_LOG_SD) if e.part == "host" else e for e in tables.errors)
    return replace(
        tables,
        host_s=np.asarray(overhead.step_s + overhead.sequence_s * seqs, dtype=np.float64),
        source=f"{tables.source}, {told}" if tables.source else told,
        errors=with_front_error(errors, overhead.front) if errors else (),
        front=overhead.front,
    )
