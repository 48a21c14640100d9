"""Points of an operator (measured, or to be predicted) with their roofline estimates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.cost import operator_work
from lengthwise.cost.memory import shard_of
from lengthwise.cost.operator_work import Kernels, Operators, Work, kernels_of, profile_work
from lengthwise.cost.roofline_tables import HostOverhead
from lengthwise.schema.cost_tables import Floats
from lengthwise.schema.deployment import EngineLimits, Parallelism
from lengthwise.schema.profile import OPERATOR_PARTS, Profile
from lengthwise.schema.specs import GpuSpec, ModelSpec, NodeSpec

PARTS = ("compute", "padding", "memory", "network", "launch", "sequences")
"""Columns of ``Points.parts``, in seconds: "padding" is compute for padding, "sequences" a cost for each sequence."""

COMPUTE, PADDING, MEMORY, NETWORK, LAUNCH, SEQUENCES = range(len(PARTS))


@dataclass(frozen=True)
class Points:
    """n points of one operator, as columns."""

    operator: str
    # [n, d] tokens, (tokens, activated experts), (chunk, context), (sequences, mean context), or (prompts, chunk,
    # context)
    axes: Floats
    shape: Floats  # [n, e] constants: TP, or the sizes of a model-independent kernel
    parts: Floats  # [n, 6] roofline seconds by PARTS
    flops: Floats  # [n] multiplications and additions
    batch: Floats  # [n] sequences (or tokens) processed at once; B in SamuLLM
    padded: Floats  # [n] tokens if every sequence were as long as the longest; B * s in SamuLLM
    total: Floats  # [n] tokens of all sequences; S in SamuLLM
    seconds: Floats  # [n] measured; NaN: to be predicted

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def roofline(self) -> Floats:
        """Return [n] the roofline's seconds."""
        return combined(self.parts)

    @property
    def features(self) -> Floats:
        """Return [n, e + d] the columns of shape and axes."""
        return np.concatenate([self.shape, self.axes], axis=1)

    def take(self, rows: npt.NDArray[Any]) -> Points:
        """Return the points at some rows (indices or a mask)."""
        taken: dict[str, Any] = {name: getattr(self, name)[rows] for name in _COLUMNS}
        return replace(self, **taken)

    def places(self) -> npt.NDArray[np.int64]:
        """Return for each point [n] the number of its place (shape and axes). Repeated measurements share a place."""
        return np.asarray(np.unique(self.features, axis=0, return_inverse=True)[1], dtype=np.int64).ravel()


_COLUMNS = tuple(field.name for field in fields(Points))[1:]


def concatenate(points: list[Points]) -> Points:
    """Return one record of points from several of the same operator."""
    columns: dict[str, Any] = {name: np.concatenate([getattr(p, name) for p in points]) for name in _COLUMNS}
    return replace(points[0], **columns)


def combined(parts: Floats, factors: Floats | None = None) -> Floats:
    """Return [n] seconds of ``parts`` times ``factors``. Compute and memory overlap, and other parts are added."""
    if factors is not None:
        parts = parts * factors
    overlapped = _overlap(parts[:, COMPUTE] + parts[:, PADDING], parts[:, MEMORY])
    return np.asarray(overlapped + parts[:, NETWORK] + parts[:, LAUNCH] + parts[:, SEQUENCES], dtype=np.float64)


def slopes(parts: Floats, factors: Floats) -> Floats:
    """Return [n, 6] derivatives of ``combined`` with respect to the logarithms of the factors."""
    scaled = parts * factors
    compute, memory = scaled[:, COMPUTE] + scaled[:, PADDING], scaled[:, MEMORY]
    overlapped = np.maximum(_overlap(compute, memory), 1e-300)
    scaled[:, [COMPUTE, PADDING]] *= ((compute / overlapped) ** (operator_work.OVERLAP_POWER - 1))[:, None]
    scaled[:, MEMORY] *= (memory / overlapped) ** (operator_work.OVERLAP_POWER - 1)
    return scaled


def _overlap(compute: Floats, memory: Floats) -> Floats:
    # (compute^4 + memory^4)^(1/4): squares and square roots are ten times as fast as powers.
    return np.asarray(np.sqrt(np.sqrt(np.square(np.square(compute)) + np.square(np.square(memory)))))


def make_points(operator: str, work: Work, empty: Work, axes: list[Floats], shape: list[Any], **columns: Any) -> Points:
    """Return the points of one operator, whose ``work`` the roofline has estimated at their sizes.

    ``empty`` is the operator with no tokens: the work that padding and the launch take. ``columns`` are batch, padded,
    total and, for measured points, seconds.
    """
    n = len(axes[0])

    def column(values: Any) -> Floats:
        return np.broadcast_to(np.asarray(values, dtype=np.float64), (n,)).copy()

    parts = np.zeros((n, len(PARTS)))
    parts[:, PADDING] = np.minimum(empty.compute_s, work.compute_s)
    parts[:, COMPUTE] = np.asarray(work.compute_s) - parts[:, PADDING]
    parts[:, MEMORY] = work.memory_s
    parts[:, NETWORK] = work.network_s
    parts[:, LAUNCH] = np.minimum(empty.latency_s, work.latency_s)
    parts[:, SEQUENCES] = np.asarray(work.latency_s) - parts[:, LAUNCH]
    return Points(
        operator,
        axes=np.stack([column(axis) for axis in axes], axis=1),
        shape=np.stack([column(size) for size in shape], axis=1),
        parts=parts,
        flops=column(work.flops),
        **{name: column(values) for name, values in ({"seconds": np.nan} | columns).items()},
    )


def _batched(points: Points, prompts: Floats) -> Points:
    """Return the points with ``prompts`` [n] prompts in each launch instead of one."""
    parts = points.parts.copy()
    parts[:, :LAUNCH] *= prompts.reshape(-1, 1)
    return replace(points, parts=parts, flops=points.flops * prompts)


def _prefill_padding(work: Work, chunk: Any, pad_tokens: float) -> Work:
    """Return padding and launch of a prefill. The ``pad_tokens`` padding queries see as many keys as real ones."""
    computed = np.asarray(chunk, np.float64) + pad_tokens
    # Without tiles, as on a CPU, nothing is padding, not even of a chunk of 0 tokens.
    share = np.divide(pad_tokens, computed, out=np.zeros_like(computed), where=computed > 0)
    return Work(work.name, compute_s=work.compute_s * share, latency_s=work.latency_s)


@dataclass(frozen=True)
class Target:
    """The deployment for which tables are fitted: a model on GPUs, and limits of its steps."""

    model: ModelSpec
    gpu: GpuSpec
    node: NodeSpec
    parallel: Parallelism
    limits: EngineLimits
    max_model_len: int

    @property
    def weight_dtype(self) -> str:
        """Return the dtype of the layers' weight matrices."""
        return self.limits.weight_dtype or self.model.dtype

    def operators(self) -> Operators:
        """Return the roofline's operators on one GPU."""
        shard = shard_of(self.model, self.parallel, self.limits)
        return Operators(shard, kernels_of(self.gpu, shard.weight_dtype), self.node)


def shard_points(operator: str, columns: Mapping[str, Any], target: Target) -> Points | None:
    """Return the points of an operator of the target's model, at the sizes in the columns of a profile.

    Return None if the model lacks the operator. The points have measured seconds if the columns have them.
    """
    ops, share, part = target.operators(), operator_work.layer_share(target.model, operator), OPERATOR_PARTS[operator]
    shape, seconds = [target.parallel.tp], columns.get("seconds", np.nan)

    def array(name: str, default: Any = None) -> Floats:
        values = columns[name] if default is None else columns.get(name, default)
        return np.asarray(values, dtype=np.float64)

    if part == "prefill":
        chunk, context, prompts = array("chunk"), array("context"), np.maximum(array("seqs", 1.0), 1.0)
        work = profile_work(ops.prefill(chunk, context), operator)
        if work is None or not share:
            return None
        work = work.times(1 / share)
        empty = _prefill_padding(work, chunk, ops.kernels.curves.prefill.pad_tokens)
        axes = [chunk, context] if (prompts == 1).all() else [prompts, chunk, context]
        sizes = {"batch": prompts} | dict.fromkeys(("padded", "total"), prompts * (context + chunk))
        return _batched(make_points(operator, work, empty, axes, shape, **sizes, seconds=seconds), prompts)
    if operator == "moe block":
        return _moe_block_points(columns, target) if share else None
    if part == "decode":
        seqs, kv = array("seqs"), array("kv_tokens")
        works, empties = ops.decode(seqs, kv), ops.decode(np.zeros_like(seqs), np.zeros_like(kv))
        axes = [seqs, kv / np.maximum(seqs, 1)]
        sizes = {"batch": seqs, "padded": kv * np.maximum(array("skew", 1.0), 1.0), "total": kv}
    else:
        by_part = {"layer": ops.layer, "embedding": ops.embedding, "head": ops.head, "host": HostOverhead().work}
        if part not in by_part:
            return None
        tokens = array("tokens")
        works, empties = by_part[part](tokens), by_part[part](np.zeros_like(tokens))
        axes, sizes = [tokens], dict.fromkeys(("batch", "padded", "total"), tokens)
    found, nothing = profile_work(works, operator), profile_work(empties, operator)
    if found is None or nothing is None or not share:
        return None
    work, empty = found.times(1 / share), nothing.times(1 / share)
    return make_points(operator, work, empty, axes, shape, **sizes, seconds=seconds)


def _moe_block_points(columns: Mapping[str, Any], target: Target) -> Points:
    ops, tokens = target.operators(), np.asarray(columns["tokens"], dtype=np.float64)
    activated = np.asarray(columns.get("experts", ops.experts_hit(tokens)), dtype=np.float64)
    work, empty = (
        operator_work.total_work("moe block", ops.experts(share * tokens, share * activated)) for share in (1, 0)
    )
    sizes = dict.fromkeys(("batch", "padded", "total"), tokens)
    seconds, axes = columns.get("seconds", np.nan), [tokens, activated]
    return make_points("moe block", work, empty, axes, [target.parallel.tp], **sizes, seconds=seconds)


def rows_points(operator: str, rows: Profile, source: Target) -> Points | None:
    """Return the points of an operator's rows at all TP degrees that can split the model, or None without points."""
    found = []
    for tp in rows.tensor_parallel:
        if source.model.attention.heads % tp == 0:
            own = rows.where((rows["tp"] == tp) & (rows["skew"] <= 1))
            found.append(shard_points(operator, own.columns, replace(source, parallel=replace(source.parallel, tp=tp))))
    points = [one for one in found if one is not None and len(one)]
    return concatenate(points) if points else None


def kernel_points(operator: str, columns: Mapping[str, Any], kernels: Kernels, node: NodeSpec | None) -> Points | None:
    """Return the points of a model-independent kernel, at the sizes in the columns of a profile.

    Return None if the roofline has no such kernel.
    """
    arrays = {name: np.asarray(values) for name, values in columns.items()}
    numbers = {name: values.astype(np.float64) for name, values in arrays.items() if values.dtype.kind in "fiu"}
    n = max(len(np.atleast_1d(values)) for values in numbers.values())
    c = {name: np.broadcast_to(values, (n,)) for name, values in numbers.items()}
    works = kernel_work(operator, c, kernels, node)
    if works is None:
        return None
    work, empty = works
    seconds = c.get("seconds", np.nan)
    if operator in ("gemm", "fused moe"):
        tokens = c["tokens"]
        shape = [c[name] for name in (("n", "k") if operator == "gemm" else ("experts", "topk", "n", "k"))]
        sizes = dict.fromkeys(("batch", "padded", "total"), tokens)
        return make_points(operator, work, empty, [tokens], shape, **sizes, seconds=seconds)
    if operator == "all-reduce":
        sizes = {"batch": c["gpus"], "padded": c["bytes"], "total": c["bytes"]}
        return make_points(operator, work, empty, [c["bytes"]], [c["gpus"]], **sizes, seconds=seconds)
    seqs, shape = c["seqs"], [c["head_dim"], c["heads"], c["kv_heads"], c["window"]]
    if operator.startswith("prefill"):
        tokens = seqs * (c["chunk"] + np.minimum(c["context"], np.where(c["window"] > 0, c["window"], np.inf)))
        axes, sizes = [seqs, c["chunk"], c["context"]], {"batch": seqs, "padded": tokens, "total": tokens}
        return _batched(make_points(operator, work, empty, axes, shape, **sizes, seconds=seconds), seqs)
    kv = c["kv_tokens"]
    sizes = {"batch": seqs, "padded": kv * (np.maximum(c["skew"], 1.0) if "skew" in c else 1.0), "total": kv}
    return make_points(operator, work, empty, [seqs, kv / np.maximum(seqs, 1)], shape, **sizes, seconds=seconds)


def kernel_work(
    operator: str, c: Mapping[str, Floats], kernels: Kernels, node: NodeSpec | None
) -> tuple[Work, Work] | None:
    """Return (work, work without tokens) of a model-independent kernel at sizes [n], or None without a roofline."""
    if operator == "gemm":
        work, empty = (kernels.gemm("gemm", tokens, c["n"], c["k"]) for tokens in (c["tokens"], 0.0 * c["tokens"]))
        return work, empty
    if operator == "fused moe":
        return _moe(c["tokens"], c, kernels), _moe(0.0 * c["tokens"], c, kernels)
    if operator == "all-reduce" and node is not None:
        gpus, sizes = c["gpus"], c["bytes"]
        rate, launch = np.ones(len(gpus)), np.zeros(len(gpus))
        for count in np.unique(gpus):
            link, launch_s = operator_work.small_message(node, int(count))
            rate[gpus == count], launch[gpus == count] = link.bandwidth_bytes_per_s, launch_s
        sent = 2 * (gpus - 1) / np.maximum(gpus, 1) * sizes
        flops = sizes / kernels.wide_bytes
        work = Work("all-reduce", flops=flops, bytes=sent, network_s=sent / rate, latency_s=launch)
        return work, Work("all-reduce", latency_s=launch)
    if not operator.endswith("attention") or operator.startswith("mixed"):
        return None
    seqs, window = c["seqs"], np.where(c["window"] > 0, c["window"], np.inf)
    per_head, head_flops = 2 * c["head_dim"] * kernels.wide_bytes, 4.0 * c["heads"] * c["head_dim"]
    if operator.startswith("prefill"):
        chunk = c["chunk"]
        pairs, keys = operator_work.causal_pairs(chunk, c["context"], window)
        work = kernels.prefill(
            "prefill attention",
            pairs=pairs,
            mean_keys=pairs / np.maximum(chunk, 1),
            keys=keys,
            head_flops=head_flops,
            moved_bytes=keys * c["kv_heads"] * per_head + c["heads"] * per_head * chunk,
        )
        return work, _prefill_padding(work, chunk, kernels.curves.prefill.pad_tokens)

    def decode(seqs: Floats, keys: Floats) -> Work:
        moved = keys * c["kv_heads"] * per_head + c["heads"] * per_head * seqs
        group = c["heads"] / np.maximum(c["kv_heads"], 1)
        return kernels.decode("decode", seqs=seqs, keys=keys, head_flops=head_flops, moved_bytes=moved, group=group)

    keys = np.where(c["window"] > 0, np.minimum(c["kv_tokens"], seqs * c["window"]), c["kv_tokens"])
    return decode(seqs, keys), decode(0 * seqs, 0 * keys)


def _moe(tokens: Floats, c: Mapping[str, Floats], kernels: Kernels) -> Work:
    rows, n, k = tokens * c["topk"], c["n"], c["k"]
    hit = c["experts"] * (1 - (1 - np.minimum(c["topk"] / c["experts"], 1.0)) ** tokens)
    works = (
        kernels.grouped_gemm("up", rows, hit, 2 * n, k),
        kernels.stream("activation", 3 * n * kernels.wide_bytes * rows),
        kernels.grouped_gemm("down", rows, hit, k, n),
    )
    return operator_work.total_work("fused moe", works)
