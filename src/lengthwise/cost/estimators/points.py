"""Points at which an operator was measured or is asked for, with what the roofline says of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.cost.memory import shard_of
from lengthwise.cost.operator_work import DIRECT_HOP_S, RIDGE, Kernels, Operators, Work, kernels_of
from lengthwise.cost.roofline_tables import HostOverhead
from lengthwise.schema.cost_tables import Floats
from lengthwise.schema.deployment import EngineLimits, Parallelism
from lengthwise.schema.profile import OPERATOR_PARTS, Profile
from lengthwise.schema.specs import GpuSpec, ModelSpec, NodeSpec

PARTS = ("compute", "padding", "memory", "network", "launch", "sequences")
"""Columns of ``Points.parts``: seconds of the multiplications asked for, of those that padding adds, of the
bytes, of the network, of a launch, and of what a launch takes longer with every sequence."""

COMPUTE, PADDING, MEMORY, NETWORK, LAUNCH, SEQUENCES = range(len(PARTS))


@dataclass(frozen=True)
class Points:
    """One operator at n places.

    Attributes:
        operator: Its name in a profile.
        axes: [n, d] the coordinates that grow with the step: tokens, or (chunk, context), or (sequences,
            mean context); a batch of prompts has a third one.
        shape: [n, e] what the shard or kernel is: TP, or the sizes of a kernel of no model.
        parts: [n, 6] seconds by PARTS, as the roofline has them.
        flops: [n] multiplications and additions asked for.
        batch: [n] sequences (or tokens) whose work is done at once: SamuLLM's B.
        padded: [n] SamuLLM's B * s: tokens, every sequence as long as the longest.
        total: [n] SamuLLM's S: tokens of all sequences.
        seconds: [n] measured; NaN where it is asked for.
    """

    operator: str
    axes: Floats
    shape: Floats
    parts: Floats
    flops: Floats
    batch: Floats
    padded: Floats
    total: Floats
    seconds: Floats

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def roofline(self) -> Floats:
        """[n] seconds by the roofline."""
        return combined(self.parts)

    def take(self, rows: npt.NDArray[Any]) -> Points:
        """The points of these rows (indices or a mask)."""
        names = ("axes", "shape", "parts", "flops", "batch", "padded", "total", "seconds")
        taken: dict[str, Any] = {name: getattr(self, name)[rows] for name in names}
        return replace(self, **taken)

    def places(self) -> npt.NDArray[np.int64]:
        """[n] the number of the place at which each row stands: rows of one place repeat each other."""
        where = np.concatenate([self.shape, self.axes], axis=1)
        return np.asarray(np.unique(where, axis=0, return_inverse=True)[1], dtype=np.int64).ravel()


def combined(parts: Floats, factors: Floats | None = None) -> Floats:
    """[n] seconds of parts, each times its factor: compute and memory overlap, the rest does not."""
    if factors is not None:
        parts = parts * factors
    ridge = _ridge(parts[:, COMPUTE] + parts[:, PADDING], parts[:, MEMORY])
    return np.asarray(ridge + parts[:, NETWORK] + parts[:, LAUNCH] + parts[:, SEQUENCES], dtype=np.float64)


def slopes(parts: Floats, factors: Floats) -> Floats:
    """[n, 6] how many seconds a factor's e-fold would add: the slopes of ``combined`` by the log factors."""
    grown = parts * factors
    compute, memory = grown[:, COMPUTE] + grown[:, PADDING], grown[:, MEMORY]
    ridge = np.maximum(_ridge(compute, memory), 1e-300)
    grown[:, [COMPUTE, PADDING]] *= ((compute / ridge) ** (RIDGE - 1))[:, None]
    grown[:, MEMORY] *= (memory / ridge) ** (RIDGE - 1)
    return grown


def _ridge(compute: Floats, memory: Floats) -> Floats:
    """(compute^4 + memory^4)^(1/4): squares and roots are ten times as fast as powers."""
    return np.asarray(np.sqrt(np.sqrt(np.square(np.square(compute)) + np.square(np.square(memory)))))


def parts_of(work: Work, empty: Work, n: int) -> Floats:
    """[n, 6] the parts of a work; ``empty`` is the same operator with nothing to do: padding and launch."""
    columns = np.zeros((n, len(PARTS)))
    columns[:, PADDING] = np.minimum(empty.compute_s, work.compute_s)
    columns[:, COMPUTE] = np.asarray(work.compute_s) - columns[:, PADDING]
    columns[:, MEMORY] = work.memory_s
    columns[:, NETWORK] = work.network_s
    columns[:, LAUNCH] = np.minimum(empty.latency_s, work.latency_s)
    columns[:, SEQUENCES] = np.asarray(work.latency_s) - columns[:, LAUNCH]
    return columns


def points(operator: str, work: tuple[Work, Work], given: Mapping[str, Any], n: int) -> Points:
    """Points from (work, work of nothing) and columns named as in Points; ``axes`` and ``shape`` are lists."""
    columns = {name: _column(given.get(name, 0.0), n) for name in ("batch", "padded", "total")}
    seconds = _column(given.get("seconds", np.nan), n)
    return Points(
        operator,
        axes=_matrix(given["axes"], n),
        shape=_matrix(given.get("shape", []), n),
        parts=parts_of(*work, n),
        flops=_column(work[0].flops, n),
        seconds=seconds,
        **columns,
    )


def _column(values: Any, n: int) -> Floats:
    return np.broadcast_to(np.asarray(values, dtype=np.float64), (n,)).copy()


def _matrix(columns: list[Any], n: int) -> Floats:
    return np.stack([_column(c, n) for c in columns], axis=1) if columns else np.zeros((n, 0))


def batched(found: Points, prompts: Any) -> Points:
    """The points of so many prompts in one launch each."""
    scaled = found.parts.copy()
    scaled[:, :LAUNCH] *= np.asarray(prompts, dtype=np.float64).reshape(-1, 1)
    return replace(found, parts=scaled, flops=found.flops * prompts)


def joined(many: list[Points]) -> Points:
    """The points of all of them, one after the other."""
    names = ("axes", "shape", "parts", "flops", "batch", "padded", "total", "seconds")
    columns: dict[str, Any] = {n: np.concatenate([getattr(p, n) for p in many]) for n in names}
    return replace(many[0], **columns)


def prefill_padding(work: Work, chunk: Any, pad_tokens: float) -> Work:
    """What of a prefill is padding and launch: ``pad_tokens`` more queries, which see as many keys as the others."""
    share = pad_tokens / (np.asarray(chunk) + pad_tokens)
    return Work(work.name, compute_s=work.compute_s * share, latency_s=work.latency_s)


NAMES: dict[str, tuple[tuple[str, float], ...]] = {
    "input norm": (("norms", 0.5),),
    "post-attention norm": (("norms", 0.5),),
    "residual add": (("norms", 0.375),),
    "fused moe": (("experts up", 1.0), ("expert activation", 1.0), ("experts down", 1.0)),
}
"""A profile's operator as shares of the roofline's, where the names differ. A residual is read twice and
written once, the roofline's two norms move eight of its sizes."""

_DENSE = ("mlp up", "activation", "mlp down")
_ROUTED = ("router", "experts up", "expert activation", "experts down", "fused moe")


@dataclass(frozen=True)
class Target:
    """A model on GPUs, and how large its steps may become."""

    model: ModelSpec
    gpu: GpuSpec
    node: NodeSpec
    parallel: Parallelism
    limits: EngineLimits
    max_model_len: int

    @property
    def weight_dtype(self) -> str:
        """Of the layers' matrices."""
        return self.limits.weight_dtype or self.model.dtype

    def with_tp(self, tp: int) -> Target:
        """The same on another number of GPUs."""
        return replace(self, parallel=Parallelism(tp, self.parallel.pp, self.parallel.replicas))

    def operators(self) -> Operators:
        """The roofline's operators of one GPU."""
        shard = shard_of(self.model, self.parallel, self.limits)
        return Operators(shard, kernels_of(self.gpu, shard.weight_dtype), self.node)

    def share(self, operator: str) -> float:
        """Of how many of the layers an operator is part: tables hold the mean layer, profiles one that has it."""
        ffn, attention, layers = self.model.ffn, self.model.attention, self.model.layers
        if ffn.experts and operator in _DENSE:
            return ffn.dense_layers / layers
        if ffn.experts and (operator in _ROUTED or operator.startswith("shared ")):
            return 1 - ffn.dense_layers / layers
        windowed = attention.windowed_layers / layers if attention.window_tokens else 0.0
        if operator.endswith("window attention"):
            return windowed
        return 1 - windowed if operator in ("prefill attention", "decode attention") else 1.0


def roofline_work(works: list[Work], operator: str) -> Work | None:
    """The roofline's work of a profile's operator, summed over its shares; None: it has none."""
    wanted = NAMES.get(operator, ((operator, 1.0),))
    by_name = {work.name: work for work in works}
    found = [by_name[name].times(share) for name, share in wanted if name in by_name]
    if len(found) < len(wanted):
        return None
    fields = ("flops", "bytes", "compute_s", "memory_s", "network_s", "latency_s")
    return Work(operator, **{field: sum(getattr(work, field) for work in found) for field in fields})


ShardColumns = Mapping[str, Any]


def shard_points(operator: str, columns: ShardColumns, target: Target) -> Points | None:
    """Points at columns named as a profile's, for the target's TP; None: the model has no such operator."""
    part = OPERATOR_PARTS[operator]
    if part == "prefill":
        return _shard_prefill(operator, columns, target)
    if part == "decode":
        return _shard_decode(operator, columns, target)
    tokens = np.asarray(columns["tokens"], dtype=np.float64)
    works = _works(part, target.operators())
    if works is None:
        return None
    work, empty = (roofline_work(works(at), operator) for at in (tokens, np.zeros_like(tokens)))
    share = target.share(operator)
    if work is None or empty is None or not share:
        return None
    given = {
        "axes": [tokens],
        "shape": [target.parallel.tp],
        "batch": tokens,
        "padded": tokens,
        "total": tokens,
        "seconds": columns.get("seconds", np.nan),
    }
    return points(operator, (work.times(1 / share), empty.times(1 / share)), given, len(tokens))


def rows_points(operator: str, rows: Profile, source: Target) -> Points | None:
    """The points of a profile's rows, of all TP degrees that they have and the model can be cut into."""
    found = []
    for tp in rows.tensor_parallel:
        if source.model.attention.heads % tp == 0:
            own = rows.where((rows["tp"] == tp) & (rows["skew"] <= 1))
            found.append(shard_points(operator, own.columns, source.with_tp(tp)))
    there = [one for one in found if one is not None and len(one)]
    return joined(there) if there else None


def _works(part: str, ops: Operators) -> Callable[[Any], list[Work]] | None:
    host = HostOverhead()
    known: dict[str, Callable[[Any], list[Work]]] = {
        "layer": ops.layer,
        "first": ops.first,
        "head": ops.head,
        "host": lambda seqs: [Work("host", latency_s=host.step_s + host.sequence_s * seqs)],
    }
    return known.get(part)


def _shard_prefill(operator: str, columns: ShardColumns, target: Target) -> Points | None:
    chunk, context = (np.asarray(columns[name], dtype=np.float64) for name in ("chunk", "context"))
    prompts = np.maximum(np.asarray(columns.get("seqs", 1.0), dtype=np.float64), 1.0)
    ops, share = target.operators(), target.share(operator)
    work = roofline_work(ops.prefill(chunk, context), operator)
    if work is None or not share:
        return None
    work = work.times(1 / share)
    found = points(
        operator,
        (work, prefill_padding(work, chunk, ops.kernels.curves.prefill.pad_tokens)),
        {
            "axes": [chunk, context] if (prompts == 1).all() else [prompts, chunk, context],
            "shape": [target.parallel.tp],
            "batch": prompts,
            "padded": prompts * (context + chunk),
            "total": prompts * (context + chunk),
            "seconds": columns.get("seconds", np.nan),
        },
        len(chunk),
    )
    return batched(found, prompts)


def _shard_decode(operator: str, columns: ShardColumns, target: Target) -> Points | None:
    seqs, kv = (np.asarray(columns[name], dtype=np.float64) for name in ("seqs", "kv_tokens"))
    ops, share = target.operators(), target.share(operator)
    work = roofline_work(ops.decode(seqs, kv), operator)
    empty = roofline_work(ops.decode(np.zeros_like(seqs), np.zeros_like(kv)), operator)
    if work is None or empty is None or not share:
        return None
    skew = np.maximum(np.asarray(columns.get("skew", 1.0), dtype=np.float64), 1.0)
    given = {
        "axes": [seqs, kv / np.maximum(seqs, 1)],
        "shape": [target.parallel.tp],
        "batch": seqs,
        "padded": kv * skew,
        "total": kv,
        "seconds": columns.get("seconds", np.nan),
    }
    return points(operator, (work.times(1 / share), empty.times(1 / share)), given, len(seqs))


KernelColumns = Mapping[str, Floats]
Made = tuple[Work, Work, dict[str, Any]]


def kernel_points(operator: str, columns: Mapping[str, Any], kernels: Kernels, node: NodeSpec) -> Points | None:
    """Points at columns named as a profile's; None: the roofline knows no such kernel of no model."""
    given = {name: np.asarray(column, dtype=np.float64) for name, column in _numbers(columns).items()}
    makers: dict[str, Callable[[KernelColumns], Made]] = {
        "gemm": lambda c: _gemm(c, kernels),
        "fused moe": lambda c: _moe(c, kernels),
        "all-reduce": lambda c: _all_reduce(c, node, kernels.wide_bytes),
        "prefill attention": lambda c: _kernel_prefill(c, kernels),
        "prefill window attention": lambda c: _kernel_prefill(c, kernels),
        "decode attention": lambda c: _kernel_decode(c, kernels),
        "decode window attention": lambda c: _kernel_decode(c, kernels),
    }
    if operator not in makers:
        return None
    n = max(len(np.atleast_1d(column)) for column in given.values())
    whole = {name: np.broadcast_to(column, (n,)) for name, column in given.items()}
    work, empty, told = makers[operator](whole)
    found = points(operator, (work, empty), {**told, "seconds": whole.get("seconds", np.nan)}, n)
    return batched(found, whole["seqs"]) if operator.startswith("prefill") else found


def _numbers(columns: Mapping[str, Any]) -> dict[str, Any]:
    return {name: column for name, column in columns.items() if np.asarray(column).dtype.kind in "fiu"}


def _gemm(c: KernelColumns, kernels: Kernels) -> Made:
    # Arrays where Kernels takes numbers: every line of it works on both.
    n, k = _any(c["n"]), _any(c["k"])
    work, empty = (kernels.gemm("gemm", m, n, k) for m in (c["tokens"], 0.0 * c["tokens"]))
    return work, empty, {"axes": [c["tokens"]], "shape": [n, k], **_by_tokens(c)}


def _moe(c: KernelColumns, kernels: Kernels) -> Made:
    """Gated experts of width n over hidden size k; tokens choose evenly."""

    def work(tokens: Floats) -> Work:
        rows, n, k = tokens * c["topk"], _any(c["n"]), _any(c["k"])
        hit = c["experts"] * (1 - (1 - np.minimum(c["topk"] / c["experts"], 1.0)) ** tokens)
        works = (
            kernels.grouped_gemm("up", rows, hit, 2 * n, k),
            kernels.stream("activation", 3 * n * kernels.wide_bytes * rows),
            kernels.grouped_gemm("down", rows, hit, k, n),
        )
        fields = ("flops", "bytes", "compute_s", "memory_s", "latency_s")
        return Work("fused moe", **{field: sum(getattr(w, field) for w in works) for field in fields})

    shape = [c["experts"], c["topk"], c["n"], c["k"]]
    return (work(c["tokens"]), work(0.0 * c["tokens"]), {"axes": [c["tokens"]], "shape": shape, **_by_tokens(c)})


def _all_reduce(c: KernelColumns, node: NodeSpec, wide: float) -> Made:
    """The roofline's sum over GPUs (_operators.py), for columns of sizes and GPUs."""
    gpus, sizes = c["gpus"], c["bytes"]
    rate, launch = np.ones(len(gpus)), np.zeros(len(gpus))
    for count in np.unique(gpus):
        link, hops = node.link_for(int(count)), math.log2(max(count, 1))
        direct = count <= node.link_group
        rate[gpus == count] = link.bandwidth_bytes_per_s
        launch[gpus == count] = link.latency_s + DIRECT_HOP_S * hops if direct else 2 * hops * link.latency_s
    sent = 2 * (gpus - 1) / np.maximum(gpus, 1) * sizes
    work = Work("all-reduce", flops=sizes / wide, bytes=sent, network_s=sent / rate, latency_s=launch)
    told = {"axes": [sizes], "shape": [gpus], "batch": gpus, "padded": sizes, "total": sizes}
    return work, Work("all-reduce", latency_s=launch), told


def _kernel_prefill(c: KernelColumns, kernels: Kernels) -> Made:
    seqs, chunk, context = c["seqs"], c["chunk"], c["context"]
    window = np.where(c["window"] > 0, c["window"], np.inf)
    growing = np.clip(window - context, 0, chunk)
    beyond = np.where(np.isfinite(window), (chunk - growing) * np.minimum(window, 1e18), 0.0)
    pairs = growing * (context + (growing + 1) / 2) + beyond
    keys = chunk + np.minimum(context, window)
    per_head = 2 * c["head_dim"] * kernels.wide_bytes
    work = kernels.prefill(
        "prefill attention",
        pairs=pairs,
        mean_keys=pairs / np.maximum(chunk, 1),
        keys=keys,
        head_flops=_any(4.0 * c["heads"] * c["head_dim"]),
        changed=keys * c["kv_heads"] * per_head + c["heads"] * per_head * chunk,
    )
    empty = prefill_padding(work, chunk, kernels.curves.prefill.pad_tokens)
    told = {"axes": [seqs, chunk, context], "shape": _heads(c), "batch": seqs}
    sizes = {"padded": seqs * keys, "total": seqs * keys}
    return work, empty, {**told, **sizes}


def _kernel_decode(c: KernelColumns, kernels: Kernels) -> Made:
    seqs, kv = c["seqs"], c["kv_tokens"]
    seen = np.where(c["window"] > 0, np.minimum(kv, seqs * c["window"]), kv)
    per_head = 2 * c["head_dim"] * kernels.wide_bytes
    group = _any(c["heads"] / np.maximum(c["kv_heads"], 1))

    def work(seqs: Floats, keys: Floats) -> Work:
        moved = keys * c["kv_heads"] * per_head + c["heads"] * per_head * seqs
        flops = _any(4.0 * c["heads"] * c["head_dim"])
        return kernels.decode("decode", seqs=seqs, keys=keys, head_flops=flops, changed=moved, group=group)

    axes = [seqs, kv / np.maximum(seqs, 1)]
    skew = np.maximum(c["skew"], 1.0) if "skew" in c else 1.0
    told = {"axes": axes, "shape": _heads(c), "batch": seqs, "padded": kv * skew, "total": kv}
    return work(seqs, seen), work(0 * seqs, 0 * seen), told


def _heads(c: KernelColumns) -> list[Floats]:
    return [c["head_dim"], c["heads"], c["kv_heads"], c["window"]]


def _by_tokens(c: KernelColumns) -> dict[str, Any]:
    return dict.fromkeys(("batch", "padded", "total"), c["tokens"])


def _any(values: Any) -> Any:
    return values
