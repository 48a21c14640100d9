"""Builds the cost tables of any model on any GPU from their data sheets."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from lengthwise import catalog
from lengthwise.cost.memory import shard_of
from lengthwise.cost.operator_work import Curves, Operators, Work, kernels_of, launched_kernels
from lengthwise.schema.cost_tables import CostEvidence, CostTables, Floats, Front, Ints, PartError, grid_axis
from lengthwise.schema.deployment import EngineLimits, Parallelism
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.specs import DTYPE_BYTES, GpuSpec, ModelSpec, NodeSpec, dtype_name

MEASURED = ("A100", "H100", "H200", "B200", "A40")  # GPU families whose kernels the roofline's constants are fitted to
TRANSFER_FACTOR = 2.3  # errors on another GPU over those of the fit, 75th percentile (TRANSFER_FACTORS)
UNKNOWN_STEP_LOG_SD = round(math.log(3) / 1.645, 3)  # steps of a GPU known only by its description: a third to 3 times


def _family(gpu: GpuSpec) -> str:
    return gpu.name.partition("-")[0]


def _is_only_described(gpu: GpuSpec) -> bool:
    return _family(gpu) not in MEASURED and gpu.name not in catalog.gpus()


def roofline_note(gpu: GpuSpec) -> str:
    """Return a caveat on the roofline's numbers for a GPU. It is empty if the GPU's kernels were measured."""
    if _family(gpu) in MEASURED:
        return ""
    remedy = "bench a server and calibrate, or profile its operators, to narrow the intervals."
    if not (gpu.is_nvidia or gpu.is_cpu):
        remedy += (
            " No constant was fitted to hardware of this vendor, and the predicted TTFT of MI300X was off by 89 %: do "
            "not use these numbers without a calibration."
        )
    if _is_only_described(gpu):
        allowed = "the intervals in parentheses assume that its steps take a third to three times the estimate"
        return f"Nothing was measured on {gpu.name}, which only its description defines: {allowed}; {remedy}"
    errors = f"its errors are assumed to be {TRANSFER_FACTOR:g} times those there"
    return f"No kernels were measured on {gpu.name}: the roofline is fitted to other GPUs, and {errors}; {remedy}"


ErrorQuantiles = dict[str, tuple[float, float]]

WIDE_GEMM: ErrorQuantiles = {"A100": (0.10, 0.28), "H100": (0.11, 0.27), "H200": (0.10, 0.28), "B200": (0.09, 0.41)}
WIDE_GEMM |= {"A40": (0.06, 0.23)}
NARROW_GEMM: ErrorQuantiles = {"H100": (0.11, 0.35), "H200": (0.14, 0.39), "B200": (0.15, 0.50)}
PREFILL: ErrorQuantiles = {"A100": (0.11, 0.32), "H100": (0.09, 0.37), "H200": (0.08, 0.35), "B200": (0.13, 0.37)}
DECODE: ErrorQuantiles = {"A100": (0.24, 0.48), "H100": (0.08, 0.33), "H200": (0.08, 0.31), "B200": (0.24, 0.76)}
MOE: ErrorQuantiles = {"A100": (0.22, 0.47), "H100": (0.18, 0.70)}
EP_MOE: ErrorQuantiles = {"H100": (0.25, 0.54), "H200": (0.29, 0.55)}
ALL_REDUCE: ErrorQuantiles = {"A100": (0.17, 0.46), "H100": (0.20, 0.50)}
EXCHANGE: ErrorQuantiles = {"A100": (0.14, 0.42), "H100": (0.11, 0.40), "H200": (0.12, 0.40), "B200": (0.10, 0.34)}
"""These dictionaries map a GPU family to (median, 95th percentile) of the roofline's relative error."""

STREAM_LOG_SD = math.log(0.9 / 0.6) / 1.96
HOST_LOG_SD, FRONT_LOG_SD, FRONT_SLOW_S = 0.5, 0.7, 0.37  # log standard deviations; see ``slow_front_log_sd``
_MEDIAN, _P90, _P95 = 0.6745, 1.645, 1.96  # quantiles of the absolute value of a standard normal


def roofline_errors(
    model: ModelSpec, gpu: GpuSpec, weight_dtype: str, *, is_shared: bool = False
) -> tuple[PartError, ...]:
    """Return the errors of the parts of a roofline's tables. GPUs that were not measured have larger errors.

    ``is_shared``: data-parallel ranks compute a part together (``CostTables.shared_s``).
    """
    family = _family(gpu)
    transfer = 1.0 if family in MEASURED else TRANSFER_FACTOR

    def log_sd(quantiles: ErrorQuantiles) -> float:
        known = [quantiles[family]] if family in quantiles else quantiles.values()
        sds = [max(math.log1p(median) / _MEDIAN, math.log1p(p95) / _P95) for median, p95 in known]
        # Without measurements of this family: the largest error of any, or a typical one times the transfer factor.
        return round(max(*sds, transfer * statistics.median(sds)) if len(sds) > 1 else sds[0], 3)

    is_narrow = DTYPE_BYTES[dtype_name(weight_dtype)] < DTYPE_BYTES["bfloat16"]
    gemm, comm = log_sd(NARROW_GEMM if is_narrow else WIDE_GEMM), log_sd(ALL_REDUCE)
    errors = {
        "layer": max(gemm, log_sd(MOE)) if model.ffn.experts else gemm,
        "comm": comm,
        "embedding": round(STREAM_LOG_SD * transfer, 3),
        "send": comm,
        "head": log_sd(WIDE_GEMM),
        "host": HOST_LOG_SD,
        "prefill": log_sd(PREFILL),
        "decode": log_sd(DECODE),
    }
    errors |= {"shared": max(gemm, *map(log_sd, (MOE, EP_MOE, EXCHANGE)))} if is_shared else {}
    errors |= {"step": UNKNOWN_STEP_LOG_SD} if _is_only_described(gpu) else {}
    return tuple(PartError(part, error) for part, error in errors.items())


def with_front_error(errors: tuple[PartError, ...], front: Front) -> tuple[PartError, ...]:
    """Return ``errors`` with the assumed error of the front end, unless the front end takes no time."""
    others = tuple(error for error in errors if error.part != "front")
    slow_log_sd = slow_front_log_sd(front, FRONT_SLOW_S)
    return others if front == Front() else (*others, PartError("front", FRONT_LOG_SD, slow_log_sd))


def slow_front_log_sd(front: Front, slow_s: float) -> float | None:
    """Return the log-normal spread with which one request in twenty waits ``slow_s`` longer; None without a delay."""
    one_in_twenty = _P90  # the 90th percentile of the absolute value is the 95th of the signed one
    return round(math.log1p(slow_s / front.request_s) / one_in_twenty, 3) if front.request_s else None


HOST_STEP_S, HOST_SEQUENCE_S = 126e-6, 4.4e-6
"""Host time that vLLM v1 adds to a step and to each sequence in it: BLIS' fit of 15 runs on H100s (trained-physics
coefficients 7 and 6, Apache-2.0, github.com/inference-sim/inference-sim), where most host work overlaps with the GPU.
An engine that schedules between steps, as vLLM v0 did, waits for milliseconds: set HostOverhead."""

LARGEST_KV_TOKENS = 2**24


@dataclass(frozen=True)
class HostOverhead:
    """Seconds that the GPU waits for the host in each step, and that a request waits in front of the engine."""

    step_s: float = HOST_STEP_S
    sequence_s: float = HOST_SEQUENCE_S  # for each sequence of a step
    request_s: float = 0.0  # delays a request before it enters the engine
    serial_s: float = 0.0  # occupies the serial front, in which requests queue (``Front``)
    launch_s: float = 0.0  # to launch a kernel, in a step of more than max_num_seqs tokens (no CUDA graph)

    @property
    def front(self) -> Front:
        """Return the delay and the serial queue in front of the engine."""
        return Front(self.request_s, self.serial_s)

    def seconds(self, seqs: Any) -> Floats:
        """Return the host's seconds in a step of ``seqs`` sequences."""
        return np.asarray(self.step_s + self.sequence_s * seqs, dtype=np.float64)

    def with_launches(self, layer_s: Floats, graph_tokens: int, kernels: float) -> Floats:
        """Return a layer's seconds by tokens, with ``kernels`` launches in steps above ``graph_tokens`` tokens."""
        return layer_s + self.launch_s * kernels * (np.arange(len(layer_s)) > graph_tokens)

    def work(self, seqs: Any) -> list[Work]:
        """Return the host's work in a step of ``seqs`` sequences."""
        return [Work("host", latency_s=self.seconds(seqs))]


ENGINE_HOSTS = {
    "vllm": HostOverhead(244e-6, 7.7e-6, 3e-3),
    "sglang": HostOverhead(198e-6, 8.6e-6, 3e-3, launch_s=37e-6),
    "trtllm": HostOverhead(182e-6, 6.9e-6, 3e-3, launch_s=22e-6),
}
"""Host overhead by engine, fitted to end-to-end measurements on H100, H200 and B200 with the roofline's kernels kept
(benchmarks/_silicon.py; InferenceMAX, Apache-2.0). vLLM's CUDA graphs are assumed to cover steps with prompts, so that
it has no ``launch_s``. The 3 ms of ``request_s`` are assumed: 1 and 10 ms predict the measurements equally well."""

MLA_REQUEST_S = 0.11
"""Additional delay of a request with ENGINE_HOSTS if the model has MLA: DeepSeek-V3 and Kimi-K2 wait longer for a first
token than the roofline's prefill explains. Its cause is unknown. Qwen3, which has experts, too, needs none (median)."""


@dataclass(frozen=True)
class OperatorTime:
    """The time and work of one operator (or the host) in one step of a replica, summed over all stages."""

    name: str
    part: str
    seconds: float
    flops: float  # of one GPU of each stage
    bytes: float  # of one GPU of each stage: read and written, or sent for a collective
    bound: str  # largest component of the time: "compute", "memory", "network" or "latency"


def roofline(
    model: ModelSpec,
    gpu: GpuSpec,
    node: NodeSpec,
    parallel: Parallelism,
    limits: EngineLimits,
    max_model_len: int,
    host: HostOverhead = HostOverhead(),
    curves: Curves | None = None,
) -> CostTables:
    """Build cost tables (rule PER_REQUEST) as sums of the roofline times of all operators.

    The axes hold tokens up to the largest step or prompt, contexts up to ``max_model_len``, sequences up to
    ``max_num_seqs``, and the KV tokens of these, at most 2**24. ``curves`` replace the constants of the kernels. Raises
    InputError if the model cannot be split.
    """
    ops = operators_of(model, gpu, node, parallel, limits, curves)
    tokens = np.arange(max(limits.max_num_batched_tokens, limits.max_num_seqs) + 1)
    seqs = np.arange(limits.max_num_seqs + 1)
    chunk = grid_axis(max(limits.max_num_batched_tokens, max_model_len))
    context = grid_axis(max_model_len)
    batch = grid_axis(limits.max_num_seqs)
    cached = grid_axis(min(limits.max_num_seqs * max_model_len, LARGEST_KV_TOKENS))
    ranks = parallel.dp
    part_errors = roofline_errors(model, gpu, ops.shard.weight_dtype, is_shared=ranks > 1)
    errors = with_front_error(part_errors, host.front)
    return CostTables(
        layer_s=host.with_launches(_seconds_table(ops.layer, tokens), limits.max_num_seqs, ops.launched),
        comm_s=_seconds_table(ops.all_reduces, tokens),
        embedding_s=_seconds_table(ops.embedding, tokens),
        send_s=_seconds_table(ops.send, tokens),
        head_s=_seconds_table(ops.head, seqs),
        host_s=host.seconds(seqs),
        prefill_s=_seconds_table(ops.prefill, chunk[:, None], context[None, :]),
        decode_s=_seconds_table(ops.decode, batch[:, None], cached[None, :]),
        stage_layers=np.array(ops.shard.layers, dtype=np.int64),
        evidence=CostEvidence(f"roofline of {model.name} on {gpu.name}", errors=errors),
        front=host.front,
        shared_s=_seconds_table(ops.shared, np.arange(ranks * (len(tokens) - 1) + 1)) if ranks > 1 else None,
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
    """Return the time of each operator in a step of ``decode_seqs`` decodes and (chunk, context) prompts.

    The decodes have ``kv_tokens`` cached tokens in total. The prompts share one row for each operator, with the
    ``bound`` of the prompt with the longest time. Of several data-parallel ranks, each has such a step. Raises
    InputError if the step is empty or a count is negative.
    """
    counts = [decode_seqs, kv_tokens, *(count for pair in prefill for count in pair)]
    if min(counts) < 0 or any(chunk < 1 for chunk, _ in prefill) or not (decode_seqs or prefill):
        problem = f"it is decode_seqs={decode_seqs}, kv_tokens={kv_tokens}, prefill={list(prefill)}"
        raise InputError(f"a step must hold a sequence or a chunk of a prompt, and no negative counts; {problem}")
    ops = operators_of(model, gpu, node, parallel, limits)
    tokens, seqs = decode_seqs + sum(chunk for chunk, _ in prefill), decode_seqs + len(prefill)
    layers, stages = model.layers, parallel.pp
    works = [("embedding", 1, ops.embedding(tokens)), ("layer", layers, ops.layer(tokens))]
    works += [("prefill", layers, ops.prefill(chunk, context)) for chunk, context in prefill]
    works += [("decode", layers, ops.decode(decode_seqs, kv_tokens))] if decode_seqs else []
    works += [("comm", layers, ops.all_reduces(tokens)), ("shared", layers, ops.shared(parallel.dp * tokens))]
    works += [("send", stages - 1, ops.send(tokens))] if stages > 1 else []
    works += [("head", 1, ops.head(seqs)), ("host", 1, host.work(seqs))]
    if host.launch_s and tokens > limits.max_num_seqs:
        launches = Work("kernel launches", latency_s=np.asarray(host.launch_s * ops.launched))
        works.append(("layer", layers, [launches]))
    rows: dict[str, list[OperatorTime]] = {}
    for part, times, same_part in works:
        for work in same_part:
            seconds, flops, moved = (float(value) * times for value in (work.seconds, work.flops, work.bytes))
            sources = {"latency": work.latency_s, "compute": work.compute_s}
            sources |= {"memory": work.memory_s, "network": work.network_s}
            bound = max(sources, key=lambda name: float(sources[name]))
            rows.setdefault(work.name, []).append(OperatorTime(work.name, part, seconds, flops, moved, bound))
    merged = []
    for same in rows.values():
        sums = {name: sum(getattr(row, name) for row in same) for name in ("seconds", "flops", "bytes")}
        bound = max(same, key=lambda row: row.seconds).bound
        merged.append(replace(same[0], **sums, bound=bound))
    return merged


def operators_of(
    model: ModelSpec,
    gpu: GpuSpec,
    node: NodeSpec,
    parallel: Parallelism,
    limits: EngineLimits,
    curves: Curves | None = None,
) -> Operators:
    """Return the operators of one GPU, with the constants of ``curves``; None: those of the GPU."""
    shard = shard_of(model, parallel, limits)
    kernels = kernels_of(gpu, shard.weight_dtype)
    return Operators(shard, replace(kernels, curves=curves) if curves else kernels, node)


def _seconds_table(works: Callable[..., list[Work]], *axes: Ints) -> Floats:
    shape = np.broadcast_shapes(*(axis.shape for axis in axes))
    seconds = np.zeros(shape)
    for work in works(*(axis.astype(np.float64) for axis in axes)):
        seconds += work.seconds
    seconds[0] = 0.0
    return seconds


HOST_NAMES = ("default", *ENGINE_HOSTS)
"""With "default", a cost source has its own host: BLIS' measurement for the roofline, or the host of a profile."""


def host_overhead(host: str | HostOverhead, *, is_mla: bool = False) -> HostOverhead | None:
    """Return a host's overhead, or None for "default". Raises InputError for an unknown name or invalid seconds."""
    if isinstance(host, str):
        if host not in HOST_NAMES:
            raise UnknownNameError("host", host, HOST_NAMES)
        named = ENGINE_HOSTS.get(host)
        return replace(named, request_s=named.request_s + MLA_REQUEST_S) if named and is_mla else named
    if not all(0 <= value < float("inf") for value in asdict(host).values()):
        listed = ", ".join(f"{name} {value!r}" for name, value in asdict(host).items())
        raise InputError(f"a host must take finite seconds from 0; it has {listed}")
    return host


def with_host(
    tables: CostTables,
    host: str | HostOverhead,
    model: ModelSpec,
    parallel: Parallelism,
    limits: EngineLimits,
    proposed: int = 0,
) -> CostTables:
    """Return the tables with the overhead, front end and errors of ``host``. "default" changes nothing.

    CUDA graphs cover decodes of ``max_num_seqs`` sequences, each with ``proposed`` tokens of a drafter beside its own.
    """
    overhead = host_overhead(host, is_mla=model.attention.is_mla)
    if overhead is None:
        return tables
    kernels = launched_kernels(model, limits.weight_dtype, parallel.tp)
    layer_s = overhead.with_launches(tables.layer_s, (len(tables.host_s) - 1) * (1 + proposed), kernels)
    label = f"host of {host}" if isinstance(host, str) else f"host of {overhead.step_s:g} s a step"
    source = f"{tables.evidence.source}, {label}" if tables.evidence.source else label
    errors = tuple(PartError("host", HOST_LOG_SD) if e.part == "host" else e for e in tables.evidence.errors)
    errors = with_front_error(errors, overhead.front) if errors else ()
    return replace(
        tables,
        layer_s=layer_s,
        host_s=overhead.seconds(np.arange(len(tables.host_s))),
        evidence=replace(tables.evidence, source=source, errors=errors),
        front=overhead.front,
    )
