"""Kernels by AIConfigurator's tables of vLLM: the roofline times the measured over said of the nearest measured shapes.

Of a GEMM the four nearest (n, k) of its dtype count, each with its curve over m; of attention the eight nearest
(sequences, tokens of one) among the measured heads. Distances are of logs, weights their inverse squares.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from _silicon_rows import Point
from _silicon_steps import RankOperators

from lengthwise import catalog
from lengthwise.cost.operator_work import Kernels, Work, kernels_of

ROOT = "data/profiles/aiconfigurator"
VERSION = "0.24.0"
NAMES = {"fp8": "fp8", "fp4": "nvfp4", "bfloat16": "bfloat16"}
NEAREST_GEMMS, NEAREST_ATTENTION = 4, 8


@dataclass(frozen=True)
class TabledKernels(Kernels):
    """Kernels whose times are corrected by tables; ``place`` is the folder of the GPU's."""

    place: str = ""

    def _gemm(self, name: str, rows: Any, n: float, k: float, curve: Any, *, wide: bool) -> Work:
        work = super()._gemm(name, rows, n, k, curve, wide=wide)
        dtype = "bfloat16" if wide else self.weight_dtype
        if dtype not in NAMES or np.any(np.asarray(rows[1]) != 1.0):  # fused experts have their own table
            return work
        return work.times(gemm_ratio(self.place, self.gpu.name, dtype, float(n), float(k))(rows[0]))

    def decode(self, name: str, *, seqs: Any, keys: Any, head_flops: float, moved_bytes: Any, group: float) -> Work:
        work = super().decode(name, seqs=seqs, keys=keys, head_flops=head_flops, moved_bytes=moved_bytes, group=group)
        heads = head_flops / 4 / 128
        ratio = attention_ratio(self.place, self.gpu.name, "generation", heads, heads / group)
        return work.times(ratio(np.maximum(seqs, 1), keys / np.maximum(seqs, 1)))

    def prefill(self, name: str, **of: Any) -> Work:
        work = super().prefill(name, **of)
        heads = of["head_flops"] / 4 / 128
        ratio = attention_ratio(self.place, self.gpu.name, "context", heads, max(1.0, heads / 8))
        return work.times(ratio(np.ones_like(of["keys"]), np.maximum(of["keys"], 1)))


def tabled(shared: Path, point: Point, ops: RankOperators) -> RankOperators:
    """The operators of a point, dense kernels and attention corrected by its GPU's tables."""
    place = str(shared / ROOT / f"{point.gpu.lower()}_sxm")
    gpu = catalog.gpu(point.gpu)
    ops.kernels = TabledKernels(gpu, ops.kernels.weight_dtype, ops.kernels.wide_bytes, place=place)
    return ops


def _near(rows: np.ndarray, at: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(indices, weights) of the rows nearest to each point."""
    from scipy.spatial import cKDTree

    distance, index = cKDTree(rows).query(at, k=min(count, len(rows)))
    weight = 1 / (distance**2 + 1e-4)
    return index, weight / weight.sum(axis=-1, keepdims=True)


@cache
def _gemms(place: str, gpu: str, dtype: str) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
    """([shapes, 2] logs of n and k, for each (logs of m, logs of measured over said))."""
    import polars as pl

    table = pl.read_parquet(f"{place}/gemm/vllm/{VERSION}/gemm_perf.parquet").filter(
        pl.col("gemm_dtype") == NAMES[dtype]
    )
    table = table.group_by("m", "n", "k").agg(pl.col("latency").median()).sort("n", "k", "m")
    m, n, k, ms = (table[name].to_numpy().astype(float) for name in ("m", "n", "k", "latency"))
    said = kernels_of(catalog.gpu(gpu), dtype)
    seconds = np.array(said.gemm("", m, n, k).seconds)
    ratio = np.log(ms / 1e3 / seconds)
    shapes, start = np.unique(np.stack([n, k], axis=1), axis=0, return_index=True)
    ends = np.append(start[1:], len(m))
    curves = [(np.log(m[a:b]), ratio[a:b]) for a, b in zip(start, ends, strict=True)]
    return np.log(shapes), curves


@cache
def gemm_ratio(place: str, gpu: str, dtype: str, n: float, k: float) -> Any:
    """Measured over said of a GEMM as a function of m."""
    shapes, curves = _gemms(place, gpu, dtype)
    index, weight = _near(shapes, np.log([n, k]), NEAREST_GEMMS)

    def ratio(m: Any) -> Any:
        logs = np.log(np.maximum(m, 1.0))
        parts = [w * np.interp(logs, *curves[i]) for i, w in zip(index, weight, strict=True)]
        return np.exp(sum(parts))

    return ratio


@cache
def attention_ratio(place: str, gpu: str, kind: str, heads: float, kv_heads: float) -> Any:
    """Measured over said of attention as a function of sequences and tokens of one."""
    seqs, tokens, said, ms = _attention(place, gpu, kind, heads, kv_heads)
    logs = np.log(ms / 1e3 / said)
    known = np.log(np.stack([seqs, tokens], axis=1))

    def ratio(batch: Any, length: Any) -> Any:
        batch, length = np.broadcast_arrays(np.asarray(batch, float), np.asarray(length, float))
        at = np.log(np.maximum(np.stack([batch.ravel(), length.ravel()], axis=1), 1.0))
        index, weight = _near(known, at, NEAREST_ATTENTION)
        return np.exp((logs[index] * weight).sum(axis=1)).reshape(batch.shape)

    return ratio


def _attention(place: str, gpu: str, kind: str, heads: float, kv_heads: float) -> tuple[Any, ...]:
    """(sequences, tokens of one, said seconds, measured ms) of the measured heads nearest to those asked for."""
    import polars as pl

    table = pl.read_parquet(f"{place}/attention/vllm/{VERSION}/{kind}_attention_perf.parquet").filter(
        pl.col("kv_cache_dtype") == "fp8", pl.col("head_dim") == 128, pl.col("window_size") == 0
    )
    table = table.with_columns(
        kv=pl.when(pl.col("num_key_value_heads") == 0).then("num_heads").otherwise("num_key_value_heads")
    )
    far = (pl.col("num_heads").log() - np.log(heads)).abs() + (pl.col("kv").log() - np.log(kv_heads)).abs()
    table = table.filter(far == table.select(far.min()).item())
    if kind == "context":
        table = table.filter(pl.col("batch_size") == 1)
    names = ("batch_size", "isl", "step", "num_heads", "kv", "latency")
    batch, isl, step, measured_heads, kv, ms = (table[name].to_numpy().astype(float) for name in names)
    said = kernels_of(catalog.gpu(gpu), "bfloat16")
    flops = 4 * float(measured_heads[0]) * 128
    if kind == "context":
        pairs, moved = isl * (isl + 1) / 2, 256 * kv * isl + 512 * measured_heads * isl
        work = said.prefill("", pairs=pairs, mean_keys=(isl + 1) / 2, keys=isl, head_flops=flops, changed=moved)
        return batch, isl, np.array(work.seconds), ms
    length = isl + step
    keys = batch * length
    moved = 256 * kv * keys + 512 * measured_heads * batch
    group = float(measured_heads[0] / kv[0])
    work = said.decode("", seqs=batch, keys=keys, head_flops=flops, changed=moved, group=group)
    return batch, length, np.array(work.seconds), ms
