"""One rank of a measured deployment in the engine: attention by tensor or data parallelism, experts over GPUs.

``lengthwise.cost`` cuts by tensor parallelism. Here a rank of attention data parallelism has its own requests and
complete attention weights, the experts of all ranks are on ``ep`` groups of ``moe_tp`` GPUs, and checkpoints that
keep attention at 16 bits (NVIDIA's NVFP4 of DeepSeek and Kimi, Moonshot's int4) are costed so. ``tabled`` corrects
dense kernels and attention by AIConfigurator's tables of vLLM: the roofline times measured over predicted time of the
nearest measured shapes. Of a GEMM the four nearest (n, k) of its dtype count, each with its curve over m; of attention
the eight nearest (sequences, tokens of one) among the measured heads. Distances are of logs, weights inverse squares.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from _silicon_rows import PROMPTS_PER_CLIENT, Loop, Point, loop_of, means

from lengthwise import catalog, cost, policy
from lengthwise.cost.memory import shard_of
from lengthwise.cost.operator_work import CURVES, Curves, Kernels, Operators, Work, kernels_of
from lengthwise.engine import simulate
from lengthwise.schema.cost_tables import CostTables, grid_axis
from lengthwise.schema.deployment import Deployment, EngineLimits, Parallelism

TABLES, VERSION = "data/profiles/aiconfigurator", "0.24.0"
DTYPES = {"fp8": "fp8", "fp4": "nvfp4", "bfloat16": "bfloat16"}
NEAREST_GEMMS, NEAREST_ATTENTION = 4, 8
BLOCK = 16


@dataclass(frozen=True)
class Host:
    """Seconds that an engine's host adds to a step, to a sequence in it, and to a request before its first token.

    ``launch_s`` is added to a layer of a step with a prompt where CUDA graphs hold decodes alone; ``queue_s`` is the
    delay that a request causes to those behind it on its way into the engine.
    """

    step_s: float = 126e-6
    sequence_s: float = 4.4e-6
    request_s: float = 0.0
    queue_s: float = 0.0
    launch_s: float = 0.0

    def front_s(self, point: Point) -> float:
        """Return the wait of a request before the engine: its own way, and in the opening wave that of others.

        All clients send at once, so that of ten requests each one waits for half of the others.
        """
        return self.request_s + self.queue_s * (1 + point.concurrency / 2 / PROMPTS_PER_CLIENT)


class RankOperators(Operators):
    """The operators of one rank of a measured deployment; ``tokens`` are the rank's own."""

    def __init__(self, point: Point, curves: Curves = CURVES) -> None:
        gpu = catalog.gpu(point.gpu)
        wide_attention = point.dtype in ("fp4", "int4") and point.model in ("deepseek-v3", "kimi-k2")
        dense = replace(kernels_of(gpu, "bfloat16" if wide_attention else point.dtype), curves=curves)
        limits = EngineLimits(weight_dtype=point.dtype, kv_dtype=point.kv_dtype)
        self.point, self.gpus = point, point.tp * point.dp
        self.experts = replace(kernels_of(gpu, point.dtype), curves=curves)
        shard = shard_of(catalog.model(point.model), Parallelism(point.tp), limits)
        super().__init__(shard, dense, catalog.default_node(gpu, self.gpus))

    def all_reduces(self, tokens: Any) -> list[Work]:
        """Return those after attention and MLP; with data parallelism one gather and scatter of all ranks' tokens."""
        if self.gpus == 1:
            return []
        times = 2 if self.tp > 1 else 1
        return [self._all_reduce("all-reduce", self.model.hidden * tokens * self.point.dp).times(times)]

    def _all_reduce(self, name: str, elements: Any) -> Work:
        return self._network(name, 2 * (self.gpus - 1) / self.gpus * elements * self.wide)

    def _network(self, name: str, sent_bytes: Any) -> Work:
        own_tp, self.tp = self.tp, self.gpus
        work = super()._network(name, sent_bytes)
        self.tp = own_tp
        return work

    def _moe(self, tokens: Any) -> list[Work]:
        """Return a GPU's share: the experts of its group that any rank's tokens hit, each ``1 / moe_tp`` wide."""
        ffn, hidden, point = self.model.ffn, self.model.hidden, self.point
        everyone = np.asarray(tokens) * point.dp
        hit, rows = self.experts_hit(everyone) / point.ep, everyone * ffn.experts_per_token / point.ep
        width = ffn.expert_intermediate / point.moe_tp
        works = [
            self.kernels.gemm("router", tokens, ffn.experts, hidden, wide=True),
            self.experts.grouped_gemm("experts up", rows, hit, 2 * width, hidden),
            self.kernels.stream("expert activation", 3 * width * self.wide * rows),
            self.experts.grouped_gemm("experts down", rows, hit, hidden, width),
        ]
        if ffn.shared_intermediate:
            works += [self._rename(work, "shared ") for work in self._mlp(tokens, ffn.shared_intermediate)]
        return works

    def step_s(self, host: Host, *, seqs: Any, kv: Any, chunk: Any = 0, prompts: Any = 0) -> Any:
        """Return the seconds of a step of ``seqs`` decodes over ``kv`` cached tokens and ``prompts`` chunks."""
        tokens = seqs + chunk * prompts
        layer = seconds(self.layer(tokens) + self.all_reduces(tokens))
        layer = layer + seconds(self.decode(seqs, kv)) * (np.asarray(seqs) > 0)
        layer = layer + prompts * (seconds(self.prefill(chunk, 0)) + host.launch_s) * (np.asarray(prompts) > 0)
        ends = seconds(self.first(tokens) + self.head(seqs + prompts))
        return self.model.layers * layer + ends + host.step_s + host.sequence_s * (seqs + prompts)

    def tables(self, host: Host, loop: Loop) -> CostTables:
        """Return the cost tables of the rank, laid out as those of ``lengthwise.cost.roofline_tables``."""
        seqs, length = loop.clients, loop.longest
        tokens, batch = np.arange(max(loop.budget, seqs) + 1.0), np.arange(seqs + 1.0)
        chunk, context = grid_axis(max(loop.budget, length)), grid_axis(length)
        some, cached = grid_axis(seqs), grid_axis(min(seqs * length, 2**24))

        def table(works: Any, *axes: Any) -> Any:
            shape = np.broadcast_shapes(*(axis.shape for axis in axes))
            made = np.zeros(shape) + seconds(works(*(axis.astype(float) for axis in axes)))
            made[0] = 0.0
            return made

        prompts = table(self.prefill, chunk[:, None], context[None, :])
        prompts[1:] += host.launch_s
        return CostTables(
            layer_s=table(self.layer, tokens),
            comm_s=table(self.all_reduces, tokens),
            first_s=table(self.first, tokens),
            send_s=np.zeros(len(tokens)),
            head_s=table(self.head, batch),
            host_s=host.step_s + host.sequence_s * batch,
            prefill_s=prompts,
            decode_s=table(self.decode, some[:, None], cached[None, :]),
            stage_layers=np.array([self.model.layers]),
        )


def seconds(works: list[Work]) -> Any:
    """Return the sum of the works' seconds."""
    return sum((work.seconds for work in works), 0.0)


def simulated(point: Point, ops: RankOperators, host: Host) -> tuple[float, float]:
    """Return (mean TTFT, mean TPOT) in seconds of the closed loop on the rank's tables; waits by settings are added.

    Raises:
        ValueError: The weights leave no room for two of the longest requests.
    """
    loop = loop_of(point)
    limits = EngineLimits(
        max_num_seqs=loop.clients,
        max_num_batched_tokens=max(loop.budget, loop.clients),
        max_model_len=loop.longest,
        weight_dtype=point.dtype,
        kv_dtype=ops.shard.kv_dtype,
    )
    gpu, cut = ops.kernels.gpu, Parallelism(point.tp * point.dp)
    plan = cost.plan_memory(ops.model, gpu, cut, limits, loop.longest, num_blocks=None)
    if plan.num_blocks * BLOCK < 2 * loop.longest:
        raise ValueError(f"{point.id}: weights leave no room")
    deployment = Deployment(
        model=ops.model,
        gpu=gpu,
        node=ops.node,
        parallel=Parallelism(),
        limits=limits,
        scheduler=policy.scheduler("vllm_v1" if loop.mixed else "vllm_v0"),
        cost=ops.tables(host, loop),
        kv=plan,
        max_model_len=loop.longest,
    )
    ttft_s, tpot_s = means(simulate(loop.workload(), deployment, keep_steps=0))
    return ttft_s + loop.wait_steps * tpot_s + host.front_s(point), tpot_s


@dataclass(frozen=True)
class TabledKernels(Kernels):
    """Kernels whose times are corrected by the tables in the folder ``place``."""

    place: str = ""

    def _gemm(self, name: str, rows: Any, n: float, k: float, curve: Any, *, wide: bool) -> Work:
        work = super()._gemm(name, rows, n, k, curve, wide=wide)
        dtype = "bfloat16" if wide else self.weight_dtype
        if dtype not in DTYPES or np.any(np.asarray(rows[1]) != 1.0):  # fused experts have their own table
            return work
        return work.times(gemm_ratio(self.place, self.gpu.name, dtype, float(n), float(k))(rows[0]))

    def decode(self, name: str, **of: Any) -> Work:
        heads, seqs = of["head_flops"] / 4 / 128, np.maximum(of["seqs"], 1)
        ratio = attention_ratio(self.place, self.gpu.name, "generation", heads, heads / of["group"])
        return super().decode(name, **of).times(ratio(seqs, of["keys"] / seqs))

    def prefill(self, name: str, **of: Any) -> Work:
        heads = of["head_flops"] / 4 / 128
        ratio = attention_ratio(self.place, self.gpu.name, "context", heads, max(1.0, heads / 8))
        return super().prefill(name, **of).times(ratio(np.ones_like(of["keys"]), np.maximum(of["keys"], 1)))


def tabled(shared: Path, point: Point, ops: RankOperators) -> RankOperators:
    """Correct dense kernels and attention of the operators by the tables of the point's GPU."""
    place = str(shared / TABLES / f"{point.gpu.lower()}_sxm")
    ops.kernels = TabledKernels(ops.kernels.gpu, ops.kernels.weight_dtype, ops.kernels.wide_bytes, place=place)
    return ops


def _near(rows: np.ndarray, at: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (indices, weights) of the rows nearest to each point."""
    from scipy.spatial import cKDTree

    distance, index = cKDTree(rows).query(at, k=min(count, len(rows)))
    weight = 1 / (np.asarray(distance) ** 2 + 1e-4)
    return np.asarray(index), weight / weight.sum(axis=-1, keepdims=True)


@cache
def _gemms(place: str, gpu: str, dtype: str) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
    """Return ([shapes, 2] logs of n and k, for each (logs of m, logs of measured over predicted))."""
    import polars as pl

    table = pl.read_parquet(f"{place}/gemm/vllm/{VERSION}/gemm_perf.parquet")
    table = table.filter(pl.col("gemm_dtype") == DTYPES[dtype])
    table = table.group_by("m", "n", "k").agg(pl.col("latency").median()).sort("n", "k", "m")
    m, n, k, ms = (table[name].to_numpy().astype(float) for name in ("m", "n", "k", "latency"))
    ratio = np.log(ms / 1e3 / np.array(kernels_of(catalog.gpu(gpu), dtype).gemm("", m, n, k).seconds))
    shapes, start = np.unique(np.stack([n, k], axis=1), axis=0, return_index=True)
    return np.log(shapes), list(zip(np.split(np.log(m), start[1:]), np.split(ratio, start[1:]), strict=True))


@cache
def gemm_ratio(place: str, gpu: str, dtype: str, n: float, k: float) -> Any:
    """Return measured over predicted time of a GEMM as a function of m."""
    shapes, curves = _gemms(place, gpu, dtype)
    index, weight = _near(shapes, np.log([n, k]), NEAREST_GEMMS)

    def ratio(m: Any) -> Any:
        logs = np.log(np.maximum(m, 1.0))
        return np.exp(sum(w * np.interp(logs, *curves[i]) for i, w in zip(index, weight, strict=True)))

    return ratio


@cache
def attention_ratio(place: str, gpu: str, kind: str, heads: float, kv_heads: float) -> Any:
    """Return measured over predicted time of attention as a function of sequences and tokens of one."""
    import polars as pl

    table = pl.read_parquet(f"{place}/attention/vllm/{VERSION}/{kind}_attention_perf.parquet")
    wanted = (pl.col("kv_cache_dtype") == "fp8", pl.col("head_dim") == 128, pl.col("window_size") == 0)
    own = pl.when(pl.col("num_key_value_heads") == 0).then("num_heads").otherwise("num_key_value_heads")
    table = table.filter(*wanted).with_columns(kv=own)
    far = (pl.col("num_heads").log() - np.log(heads)).abs() + (pl.col("kv").log() - np.log(kv_heads)).abs()
    table = table.filter(far == table.select(far.min()).item())
    if kind == "context":
        table = table.filter(pl.col("batch_size") == 1)
    names = ("batch_size", "isl", "step", "num_heads", "kv", "latency")
    batch, isl, step, measured_heads, kv, ms = (table[name].to_numpy().astype(float) for name in names)
    kernels, flops = kernels_of(catalog.gpu(gpu), "bfloat16"), 4 * float(measured_heads[0]) * 128
    if kind == "context":
        tokens, pairs = isl, isl * (isl + 1) / 2
        moved = 256 * kv * isl + 512 * measured_heads * isl
        work = kernels.prefill(
            "", pairs=pairs, mean_keys=(isl + 1) / 2, keys=isl, head_flops=flops, moved_bytes=moved
        )
    else:
        tokens = isl + step
        keys, group = batch * tokens, float(measured_heads[0] / kv[0])
        moved = 256 * kv * keys + 512 * measured_heads * batch
        work = kernels.decode("", seqs=batch, keys=keys, head_flops=flops, moved_bytes=moved, group=group)
    logs = np.log(ms / 1e3 / np.array(work.seconds))
    known = np.log(np.stack([batch, tokens], axis=1))

    def ratio(seqs: Any, length: Any) -> Any:
        seqs, length = np.broadcast_arrays(np.asarray(seqs, float), np.asarray(length, float))
        at = np.log(np.maximum(np.stack([seqs.ravel(), length.ravel()], axis=1), 1.0))
        index, weight = _near(known, at, NEAREST_ATTENTION)
        return np.exp((logs[index] * weight).sum(axis=1)).reshape(seqs.shape)

    return ratio
