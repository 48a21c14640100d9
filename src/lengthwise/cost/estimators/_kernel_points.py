"""Points of kernels of no model: products of matrices, attention, experts and collectives by their sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from lengthwise.cost._efficiency import Kernels, Work
from lengthwise.cost._operators import DIRECT_HOP_S
from lengthwise.cost.estimators._points import Points, batched, points, prefill_padding
from lengthwise.schema.cost_tables import Floats
from lengthwise.schema.hardware import NodeSpec

Columns = Mapping[str, Floats]
Made = tuple[Work, Work, dict[str, Any]]


def kernel_points(
    operator: str, columns: Mapping[str, Any], kernels: Kernels, node: NodeSpec
) -> Points | None:
    """Points at columns named as a profile's; None: the roofline knows no such kernel of no model."""
    given = {name: np.asarray(column, dtype=np.float64) for name, column in _numbers(columns).items()}
    makers: dict[str, Callable[[Columns], Made]] = {
        "gemm": lambda c: _gemm(c, kernels),
        "fused moe": lambda c: _moe(c, kernels),
        "all-reduce": lambda c: _all_reduce(c, node, kernels.wide_bytes),
        "prefill attention": lambda c: _prefill(c, kernels),
        "prefill window attention": lambda c: _prefill(c, kernels),
        "decode attention": lambda c: _decode(c, kernels),
        "decode window attention": lambda c: _decode(c, kernels),
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


def _gemm(c: Columns, kernels: Kernels) -> Made:
    # Arrays where Kernels takes numbers: every line of it works on both.
    n, k = _any(c["n"]), _any(c["k"])
    work, empty = (kernels.gemm("gemm", m, n, k) for m in (c["tokens"], 0.0 * c["tokens"]))
    return work, empty, {"axes": [c["tokens"]], "shape": [n, k], **_by_tokens(c)}


def _moe(c: Columns, kernels: Kernels) -> Made:
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
    return (
        work(c["tokens"]),
        work(0.0 * c["tokens"]),
        {"axes": [c["tokens"]], "shape": shape, **_by_tokens(c)},
    )


def _all_reduce(c: Columns, node: NodeSpec, wide: float) -> Made:
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


def _prefill(c: Columns, kernels: Kernels) -> Made:
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
        moved=keys * c["kv_heads"] * per_head + c["heads"] * per_head * chunk,
    )
    empty = prefill_padding(work, chunk, kernels.curves.prefill.pad_tokens)
    told = {"axes": [seqs, chunk, context], "shape": _heads(c), "batch": seqs}
    sizes = {"padded": seqs * keys, "total": seqs * keys}
    return work, empty, {**told, **sizes}


def _decode(c: Columns, kernels: Kernels) -> Made:
    seqs, kv = c["seqs"], c["kv_tokens"]
    seen = np.where(c["window"] > 0, np.minimum(kv, seqs * c["window"]), kv)
    per_head = 2 * c["head_dim"] * kernels.wide_bytes
    group = _any(c["heads"] / np.maximum(c["kv_heads"], 1))

    def work(seqs: Floats, keys: Floats) -> Work:
        moved = keys * c["kv_heads"] * per_head + c["heads"] * per_head * seqs
        flops = _any(4.0 * c["heads"] * c["head_dim"])
        return kernels.decode("decode", seqs=seqs, keys=keys, head_flops=flops, moved=moved, group=group)

    axes = [seqs, kv / np.maximum(seqs, 1)]
    skew = np.maximum(c["skew"], 1.0) if "skew" in c else 1.0
    told = {"axes": axes, "shape": _heads(c), "batch": seqs, "padded": kv * skew, "total": kv}
    return work(seqs, seen), work(0 * seqs, 0 * seen), told


def _heads(c: Columns) -> list[Floats]:
    return [c["head_dim"], c["heads"], c["kv_heads"], c["window"]]


def _by_tokens(c: Columns) -> dict[str, Any]:
    return dict.fromkeys(("batch", "padded", "total"), c["tokens"])


def _any(values: Any) -> Any:
    return values
