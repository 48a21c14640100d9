"""What each measured row multiplies and moves, as the roofline counts it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lengthwise import catalog
from lengthwise.cost._efficiency import Kernels, Work, kernels_of
from lengthwise.cost._operators import Operators
from lengthwise.cost._shard import shard_of, usable_degrees
from lengthwise.schema.cost_tables import Floats
from lengthwise.schema.deployment import EngineLimits, Parallelism
from lengthwise.schema.errors import UnknownNameError
from lengthwise.schema.hardware import GpuSpec
from lengthwise.schema.model import ModelSpec
from lengthwise.schema.profile import OPERATOR_PARTS, Profile
from lengthwise.schema.units import DTYPE_BYTES, dtype_name

_NARROW = {
    "fp8_block": "fp8",
    "fp8_static": "fp8",
    "int8_wo": "int8",
    "int4_wo": "int4",
    "w4a16_mxfp4": "int4",
}
_SHARES: dict[str, tuple[tuple[str, float], ...]] = {
    "input norm": (("norms", 0.5),),
    "post-attention norm": (("norms", 0.5),),
    "residual add": (("norms", 0.375),),
    "fused moe": (("experts up", 1.0), ("expert activation", 1.0), ("experts down", 1.0)),
}
"""A profile's operator in the roofline's, where the names differ: two norms move eight hidden sizes a token, a
residual three."""


@dataclass(frozen=True)
class RowWork:
    """[n] FLOPs and bytes of each row, NaN where they are not known, and the peaks of its device."""

    flops: Floats
    bytes: Floats
    peak_flops: Floats
    bandwidth: float

    def least_s(self) -> Floats:
        """[n] seconds that the data sheet allows at best."""
        return np.asarray(np.maximum(self.flops / self.peak_flops, self.bytes / self.bandwidth))


def known_gpu(name: str) -> GpuSpec | None:
    """The catalog's device of this name; None where it has none."""
    try:
        return catalog.gpu(name)
    except UnknownNameError:
        return None


def known_model(name: str) -> ModelSpec | None:
    """The catalog's model of this name; None where it has none."""
    try:
        return catalog.model(name) if name else None
    except UnknownNameError:
        return None


def row_work(profile: Profile, gpu: GpuSpec | None = None, model: ModelSpec | None = None) -> RowWork | None:
    """The work of a profile's rows; None where the device is not given and the catalog does not know it."""
    gpu, model = gpu or known_gpu(profile.facts.gpu), model or known_model(profile.facts.model)
    if gpu is None:
        return None
    n = len(profile)
    work = RowWork(np.full(n, np.nan), np.full(n, np.nan), np.full(n, np.nan), gpu.bandwidth_bytes_per_s)
    # "norms" beside single norms is something else, such as a norm of queries and keys
    single = bool({"input norm", "post-attention norm"} & set(profile.operators))
    for operator in profile.operators:
        for rows, tp, dtype in _groups(profile, operator):
            if operator == "norms" and single:
                continue
            columns = {name: profile[name][rows].astype(np.float64) for name in _NUMBERS}
            found = _of_kernel(operator, columns, gpu, dtype) if tp == 0 else None
            if tp > 0 and model is not None and tp in usable_degrees(model):
                found = _of_shard(operator, columns, _operators(model, gpu, tp, dtype))
            if found is not None:
                work.flops[rows], work.bytes[rows] = found.flops, found.bytes
                work.peak_flops[rows] = _peak(gpu, dtype, OPERATOR_PARTS[operator])
    return work


_NUMBERS = (
    "tokens", "seqs", "chunk", "context", "kv_tokens", "n", "k", "heads", "kv_heads", "head_dim", "window",
    "experts", "topk",
)  # fmt: skip


def _groups(profile: Profile, operator: str) -> list[tuple[Any, int, str]]:
    """Rows of an operator that share TP and dtype."""
    rows = np.flatnonzero(profile["operator"] == operator)
    _, tp = np.unique(profile["tp"][rows], return_inverse=True)
    _, dtype = np.unique(profile["dtype"][rows], return_inverse=True)
    code = tp * (dtype.max() + 1) + dtype
    found = []
    for one in np.unique(code):
        own = rows[code == one]
        found.append((own, int(profile["tp"][own[0]]), str(profile["dtype"][own[0]])))
    return found


def _known(dtype: str) -> str:
    try:
        return dtype_name(_NARROW.get(dtype, dtype)) if dtype else "bfloat16"
    except UnknownNameError:
        return ""


def _peak(gpu: GpuSpec, dtype: str, part: str) -> float:
    name = _known(dtype)
    wide = name in ("", "int4") or (part in ("prefill", "decode", "mixed", "head") and name != "float32")
    return gpu.flops("bfloat16" if wide else name)


def _operators(model: ModelSpec, gpu: GpuSpec, tp: int, dtype: str) -> Operators | None:
    name = _known(dtype) if dtype else model.dtype
    if not name:
        return None
    shard = shard_of(model, Parallelism(tp), EngineLimits(weight_dtype=name))
    return Operators(shard, kernels_of(gpu, name), catalog.default_node(gpu, tp))


def _of_shard(operator: str, columns: Mapping[str, Floats], ops: Operators | None) -> Work | None:
    part = OPERATOR_PARTS[operator]
    if ops is None or part in ("comm", "send", "host"):
        return None
    tokens, seqs = columns["tokens"], np.maximum(columns["seqs"], 1)
    if part == "mixed":
        decodes = _part(ops.decode(columns["seqs"], columns["kv_tokens"]), "decode attention", ops)
        prompts = _part(ops.prefill(columns["chunk"], columns["context"]), "prefill attention", ops)
        return _sum([w for w in (decodes, prompts) if w is not None]) if decodes and prompts else None
    if part == "prefill":
        work = _part(ops.prefill(columns["chunk"], columns["context"]), operator, ops)
        return work.times(seqs) if work else None
    if part == "decode":
        return _part(ops.decode(columns["seqs"], columns["kv_tokens"]), operator, ops)
    works = {"layer": ops.layer, "first": ops.first, "head": ops.head}[part](tokens)
    if operator == "logits gather":
        return None
    return _part(works, operator, ops)


def _part(works: list[Work], operator: str, ops: Operators) -> Work | None:
    """An operator's work in a layer that has it, where the roofline counts a mean layer's."""
    by_name = {work.name: work for work in works}
    wanted = _SHARES.get(operator, ((operator, 1.0),))
    found = [by_name[name].times(share) for name, share in wanted if name in by_name]
    share = _layers_with(operator, ops.shard.model)
    return _sum(found).times(1 / share) if len(found) == len(wanted) and share else None


def _sum(works: list[Work]) -> Work:
    return Work("", flops=sum(work.flops for work in works), bytes=sum(work.bytes for work in works))


def _layers_with(operator: str, model: ModelSpec) -> float:
    """The share of a model's layers that have the operator."""
    ffn, attention = model.ffn, model.attention
    dense = ffn.dense_layers / model.layers if ffn.experts else 1.0
    windowed = attention.windowed_layers / model.layers if attention.window_tokens else 0.0
    if operator in ("mlp up", "activation", "mlp down"):
        return dense
    if operator in ("router", "fused moe") or operator.startswith(("expert", "shared")):
        return 1 - dense
    if operator.endswith("window attention"):
        return windowed
    return 1 - windowed if operator in ("prefill attention", "decode attention") else 1.0


def _of_kernel(operator: str, c: Mapping[str, Floats], gpu: GpuSpec, dtype: str) -> Work | None:
    name = _known(dtype)
    if not name:
        return None
    kernels, width = kernels_of(gpu, name), max(2.0, DTYPE_BYTES[name])
    if operator == "gemm":
        return _gemm(kernels, c)
    if operator == "fused moe":
        return _experts(kernels, c)
    if OPERATOR_PARTS[operator] == "prefill":
        seen = np.where(c["window"] > 0, c["window"], np.inf)
        grown = np.clip(seen - c["context"], 0, c["chunk"])
        pairs = grown * (c["context"] + (grown + 1) / 2)
        pairs += np.where(c["chunk"] > grown, (c["chunk"] - grown) * np.minimum(seen, 2.0**40), 0)
        keys = c["chunk"] + np.minimum(c["context"], seen)
        return _attention(c, pairs * c["seqs"], keys * c["seqs"], c["chunk"] * c["seqs"], width)
    if OPERATOR_PARTS[operator] == "decode":
        seen = np.where(c["window"] > 0, c["window"] * c["seqs"], np.inf)
        keys = np.minimum(c["kv_tokens"], seen)
        return _attention(c, keys, keys, c["seqs"], width)
    return None


def _gemm(kernels: Kernels, c: Mapping[str, Floats]) -> Work:
    works = kernels.gemm("", c["tokens"], c["n"], c["k"])  # type: ignore[arg-type]
    return Work("", flops=works.flops, bytes=works.bytes)


def _experts(kernels: Kernels, c: Mapping[str, Floats]) -> Work:
    """Gated experts that tokens choose evenly."""
    rows = c["tokens"] * c["topk"]
    share = np.clip(c["topk"] / np.maximum(c["experts"], 1), 0, 1 - 1e-9)
    hit = c["experts"] * -np.expm1(c["tokens"] * np.log1p(-share))
    up = kernels.grouped_gemm("", rows, hit, 2 * c["n"], c["k"])  # type: ignore[arg-type]
    down = kernels.grouped_gemm("", rows, hit, c["k"], c["n"])  # type: ignore[arg-type]
    return _sum([up, down])


def _attention(c: Mapping[str, Floats], pairs: Floats, keys: Floats, queries: Floats, width: float) -> Work:
    heads = 2 * c["head_dim"] * width
    moved = keys * c["kv_heads"] * heads + queries * c["heads"] * heads
    return Work("", flops=4 * c["heads"] * c["head_dim"] * pairs, bytes=moved)
