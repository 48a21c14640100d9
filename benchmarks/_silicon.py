"""Measured deployments of vLLM, SGLang and TensorRT-LLM on H100, H200 and B200, and Argonne's static batches.

Every point is predicted by the engine in a closed loop. ``shipped`` and ``shipped_tables`` are what a user gets:
``deploy`` with the roofline, or with imported kernels and ``fit_profile``, and a host by name. ``family_out`` and
``gpu_out`` show how far the method carries: the host's constants and small factors on the kernels' are fitted on points
of other families of models, or of other GPUs (``tables``: of other families). The form of that fit, its first values
and spreads were chosen with all points in view. Figures count all points; those whose client is recorded (InferenceMAX)
and the sweeps of unknown clients are in the details.
"""

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import _silicon_argonne
import numpy as np
from _harness import grouped
from _intervals import by, described, summary

from lengthwise import catalog, cost, policy
from lengthwise.cost import HostOverhead
from lengthwise.cost.estimators import Target, fit_profile
from lengthwise.cost.memory import shard_of
from lengthwise.cost.operator_work import CURVES, Curves, Kernels, Operators, Work, kernels_of
from lengthwise.cost.profiles import import_aiconfigurator
from lengthwise.engine import deploy, simulate
from lengthwise.schema.cost_tables import CostTables, grid_axis
from lengthwise.schema.deployment import Deployment, EngineLimits, Parallelism
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import Records
from lengthwise.schema.workload import Workload

FILE = "data/profiles/aiconfigurator/silicon_sample.csv.gz"
GPUS = {"h100_sxm": "H100", "h200_sxm": "H200", "b200_sxm": "B200"}
MODELS = {
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
    "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "deepseek-ai/DeepSeek-R1": "deepseek-v3",
    "nvidia/DeepSeek-R1-NVFP4": "deepseek-v3",
    "nvidia/DeepSeek-V3.1-NVFP4": "deepseek-v3",
    "moonshotai/Kimi-K2.5": "kimi-k2",  # the text part has the shapes of K2
}
DTYPES = {"fp8": "fp8", "fp8_block": "fp8", "nvfp4": "fp4", "int4_wo": "int4", "": "bfloat16"}
NODE_GPUS = 8
SAME = 0.02
"""Two rows of one deployment and load whose TTFT and TPOT are this close are one measurement, exported twice."""
PROMPTS_PER_CLIENT, SHORTEST = 10, 0.8
REQUEST_S, MLA = 3e-3, "deepseek"
"""Seconds from the client to the scheduler, by which a new request misses the step that begins as another one ends; and
the family of models with MLA, which wait longer for a first token (``cost.roofline_tables.MLA_REQUEST_S``)."""


@dataclass(frozen=True)
class Point:
    """One measured deployment and load: ``dp`` ranks of attention, experts over ``ep`` groups of ``moe_tp`` GPUs."""

    id: str
    model: str
    gpu: str
    backend: str
    dtype: str
    source: str
    isl: int
    osl: int
    concurrency: int
    tp: int
    dp: int
    moe_tp: int
    ep: int
    measured: str
    ttft_s: float
    tpot_s: float

    @property
    def inferencemax(self) -> bool:
        return self.source == "inferencemax"

    @property
    def pair(self) -> tuple[str, str]:
        return self.model, self.gpu

    @property
    def family(self) -> str:
        """Return the family of models: Kimi-K2 has the architecture of DeepSeek-V3."""
        return "deepseek" if self.model == "kimi-k2" else self.model.split("-", maxsplit=1)[0]

    @property
    def group(self) -> tuple[Any, ...]:
        """Return a key of points that share every operator."""
        return self.model, self.gpu, self.backend, self.dtype, self.tp, self.dp, self.moe_tp, self.ep

    @property
    def kv_dtype(self) -> str:
        """Return the data type of the KV cache: InferenceMAX sets FP8 for Llama and DeepSeek."""
        return "fp8" if self.inferencemax and self.model != "kimi-k2" else "bfloat16"


def read(shared: Path) -> tuple[list[Point], dict[str, int]]:
    """Return (points that the roofline can express, number of rows left out by reason)."""
    import polars as pl

    if not (shared / FILE).exists():
        raise FileNotFoundError(f"{FILE} is not under {shared}")
    left: Counter[str] = Counter()
    unique: dict[tuple[Any, ...], list[Point]] = {}
    last: dict[tuple[Any, ...], str] = {}
    for row in pl.read_csv(shared / FILE, infer_schema_length=None).to_dicts():
        if reason := next((reason for reason, holds in REASONS.items() if holds(row)), ""):
            left[reason] += 1
            continue
        point = _point(row)
        same = unique.setdefault((*point.group, point.isl, point.osl, point.concurrency), [])
        if any(abs(point.ttft_s / o.ttft_s - 1) <= SAME and abs(point.tpot_s / o.tpot_s - 1) <= SAME for o in same):
            left["the same measurement, exported twice"] += 1
            continue
        same.append(point)
        last[_load_key(point)] = max(last.get(_load_key(point), ""), point.measured)
    points = [point for same in unique.values() for point in same]
    newest = [point for point in points if point.measured == last[_load_key(point)]]
    left["measured again later with newer software"] = len(points) - len(newest)
    return newest, dict(left)


def _load_key(p: Point) -> tuple[Any, ...]:
    """Return a key of measurements of which only the last day's count, for any split of the experts."""
    return p.model, p.gpu, p.backend, p.dtype, p.tp, p.dp, p.isl, p.osl, p.concurrency


def _may_speculate(row: dict[str, Any]) -> bool:
    """Return whether a row may have used multi-token prediction: since 2026 two CSV exports of DeepSeek mix both."""
    source = row["silicon_data_source"]
    export = source.startswith(("source_file=2026-03-25.csv", "source_file=2026-04-06.csv"))
    return "DeepSeek" in row["model_path"] and export and "measured=2026" in source


def _is_consistent(row: dict[str, Any]) -> bool:
    tp, dp, moe_tp, ep = _cut(row)
    return tp * dp <= NODE_GPUS and ("Llama" in row["model_path"] or tp * dp == moe_tp * ep)


def _cut(row: dict[str, Any]) -> tuple[int, int, int, int]:
    """Return (tp, dp, moe_tp, ep).

    Two exports multiply InferenceMAX' ``tp`` (all GPUs) and ``ep``: 8 GPUs became 64 with experts split 8 by 8.
    """
    tp, dp = row["tp_size"], row["attention_dp_size"] or 1
    moe_tp, ep = row["moe_tp_size"] or 1, row["moe_ep_size"] or 1
    gpus = moe_tp * ep
    if moe_tp == ep > 1 and (tp * dp == gpus > NODE_GPUS or (max(tp, dp) == gpus and _is_export(row))):
        return (1, moe_tp, 1, ep) if dp > 1 else (moe_tp, 1, 1, ep)
    if dp > 1 and tp == dp and gpus == tp * dp:
        return 1, dp, 1, tp
    return tp, dp, moe_tp, ep


def _is_export(row: dict[str, Any]) -> bool:
    return "config_id=" in row["silicon_data_source"] or "source_file=2026" in row["silicon_data_source"]


REASONS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "prefill and decode on separate workers": lambda row: row["mode"] != "agg",
    "hybrid linear attention (Qwen3.5)": lambda row: "Qwen3.5" in row["model_path"],
    "sparse attention with an indexer (GLM-5)": lambda row: "GLM-5" in row["model_path"],
    "several nodes, GPUs of all workers in one number (GB200)": lambda row: row["system"] not in GPUS,
    "no concurrency recorded": lambda row: "silicon_concurrency" not in row["silicon_data_source"],
    "speculative decoding not recorded (DeepSeek exports since 2026)": _may_speculate,
    "a router of several workers in front (Dynamo)": lambda row: "ai-dynamo" in row["silicon_data_source"],
    "GPUs of attention and of experts do not agree": lambda row: not _is_consistent(row),
}
"""Reasons to omit a row; the first that holds counts."""


def _point(row: dict[str, Any]) -> Point:
    text, dtype = row["silicon_data_source"], DTYPES[row["gemm_quant_mode"] or ""]
    source = "inferencemax" if _is_export(row) or "gap-analysis" in text else "sweep"
    deployed = (row["id"], MODELS[row["model_path"]], GPUS[row["system"]], row["backend"], dtype, source)
    load = (row["isl"], row["osl"], int(text.split("silicon_concurrency=")[1].split(";")[0]))
    measured = text.split("measured=")[1][:10] if "measured=" in text else ""
    return Point(*deployed, *load, *_cut(row), measured, row["silicon_ttft_ms"] / 1e3, row["silicon_tpot_ms"] / 1e3)


@dataclass(frozen=True)
class Loop:
    """The load and the engine of a point: a closed loop of one rank's share of the clients; tokens as (least, most).

    The first ``opening`` requests do not count: the measurements of sweeps hold no wave of all clients at once.
    """

    clients: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    budget: int
    mixed: bool
    wait_steps: float
    opening: int

    @property
    def longest(self) -> int:
        return self.prompt[1] + self.output[1] + 1

    def workload(self, seed: int = 0) -> Workload:
        rng, n = np.random.default_rng(seed), PROMPTS_PER_CLIENT * self.clients
        prompt, output = (rng.integers(*of, size=n, endpoint=True) for of in (self.prompt, self.output))
        return Workload(np.zeros(n), prompt, output, concurrency=self.clients)


def loop_of(point: Point) -> Loop:
    """Return the load of a point: InferenceMAX draws lengths, a sweep has fixed ones."""
    low = SHORTEST if point.inferencemax else 1.0
    clients, wait_steps = math.ceil(point.concurrency / point.dp), _wait_steps(point) if point.inferencemax else 0.0
    prompt, output = ((max(1, int(low * tokens)), tokens) for tokens in (point.isl, point.osl))
    budget = max(8192, point.isl + point.osl if point.backend == "trtllm" else 0)
    opening = 0 if point.inferencemax else clients
    return Loop(max(1, clients), prompt, output, budget, point.backend != "sglang", wait_steps, opening)


def _wait_steps(point: Point) -> float:
    """Return the steps for which a new request waits by the engine's settings, on average."""
    if point.backend == "sglang" and point.gpu == "B200":  # looks for requests every so many steps
        return (10 if point.concurrency < 16 else 30) / 2
    if point.backend == "trtllm" and (point.isl, point.osl) == (1024, 1024):  # gathers prompts for so many steps
        if point.model.startswith("llama"):
            return 20.0 if point.tp < 8 else 0.0
        return 40.0 if point.dtype == "fp8" and 64 <= point.concurrency < 256 else 0.0
    return 0.0


def means(records: Records, loop: Loop) -> tuple[float, float]:
    """Return (mean TTFT, mean TPOT) in seconds of the requests that count."""
    r, counts = records.requests, np.arange(len(records.requests.arrival_s)) >= loop.opening
    several = counts & (r.output_tokens > 1)
    tpot_s = (r.finished_s - r.first_token_s)[several] / (r.output_tokens[several] - 1)
    return float(np.mean((r.first_token_s - r.arrival_s)[counts])), float(np.mean(tpot_s))


TABLES, VERSION = "data/profiles/aiconfigurator", "0.24.0"
TABLE_DTYPES = {"fp8": "fp8", "fp4": "nvfp4", "bfloat16": "bfloat16"}
NEAREST_GEMMS, NEAREST_ATTENTION = 4, 8
BLOCK = 16


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
            works += [replace(w, name=f"shared {w.name}") for w in self._mlp(tokens, ffn.shared_intermediate)]
        return works

    def step_s(self, host: HostOverhead, *, seqs: Any, kv: Any, chunk: Any = 0, prompts: Any = 0) -> Any:
        """Return the seconds of a step of ``seqs`` decodes over ``kv`` cached tokens and ``prompts`` chunks."""
        tokens = seqs + chunk * prompts
        layer = seconds(self.layer(tokens) + self.all_reduces(tokens))
        layer = layer + seconds(self.decode(seqs, kv)) * (np.asarray(seqs) > 0)
        layer = layer + prompts * seconds(self.prefill(chunk, 0)) + host.launch_s * (np.asarray(prompts) > 0)
        ends = seconds(self.embedding(tokens) + self.head(seqs + prompts))
        return self.model.layers * layer + ends + host.step_s + host.sequence_s * (seqs + prompts)

    def tables(self, host: HostOverhead, loop: Loop) -> CostTables:
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

        works = {"layer_s": self.layer, "comm_s": self.all_reduces, "embedding_s": self.embedding}
        by_tokens = {name: table(work, tokens) for name, work in works.items()}
        by_tokens["layer_s"] = host.with_launches(by_tokens["layer_s"], seqs)
        return CostTables(
            **by_tokens,
            send_s=np.zeros(len(tokens)),
            head_s=table(self.head, batch),
            host_s=host.seconds(batch),
            prefill_s=table(self.prefill, chunk[:, None], context[None, :]),
            decode_s=table(self.decode, some[:, None], cached[None, :]),
            stage_layers=np.array([self.model.layers]),
            front=host.front,
        )


def seconds(works: list[Work]) -> Any:
    return sum((work.seconds for work in works), 0.0)


def simulated(point: Point, ops: RankOperators, host: HostOverhead) -> tuple[float, float]:
    """Return (mean TTFT, mean TPOT) in s of the closed loop; raise ValueError if two of the longest do not fit."""
    loop = loop_of(point)
    limits = _limits(point, loop.clients, loop.longest, loop.budget)
    gpu, cut = ops.kernels.gpu, Parallelism(point.tp * point.dp)
    plan = cost.plan_memory(ops.model, gpu, cut, limits, loop.longest, num_blocks=None)
    if plan.num_blocks * BLOCK < 2 * loop.longest:
        raise ValueError(f"{point.id}: weights leave no room")
    scheduler = policy.scheduler("vllm_v1" if loop.mixed else "vllm_v0")
    parts = {"model": ops.model, "gpu": gpu, "node": ops.node, "parallel": Parallelism(), "limits": limits, "kv": plan}
    deployment = Deployment(**parts, scheduler=scheduler, cost=ops.tables(host, loop), max_model_len=loop.longest)
    ttft_s, tpot_s = means(simulate(loop.workload(), deployment, max_log_steps=0), loop)
    return ttft_s + loop.wait_steps * tpot_s, tpot_s


@dataclass(frozen=True)
class TabledKernels(Kernels):
    """Kernels whose times are corrected by the tables in the folder ``place``."""

    place: str = ""

    def _gemm(self, name: str, rows: Any, n: float, k: float, curve: Any, *, wide: bool) -> Work:
        work = super()._gemm(name, rows, n, k, curve, wide=wide)
        dtype = "bfloat16" if wide else self.weight_dtype
        if dtype not in TABLE_DTYPES or np.any(np.asarray(rows[1]) != 1.0):  # fused experts have their own table
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
    table = table.filter(pl.col("gemm_dtype") == TABLE_DTYPES[dtype])
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
        work = kernels.prefill("", pairs=pairs, mean_keys=(isl + 1) / 2, keys=isl, head_flops=flops, moved_bytes=moved)
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


BACKENDS = ("vllm", "sglang", "trtllm")
KERNEL_SPREAD, OWN_SPREAD, COMMON_SPREAD = 0.03, 0.3, 1.0
HOST = ("step", "sequence")
SPREADS: dict[str, float] = {
    **{
        f"{kernel}.{constant}": KERNEL_SPREAD
        for kernel in ("narrow", "wide", "grouped")
        for constant in ("efficiency", "memory_efficiency", "latency_s")
    },
    **dict.fromkeys(("prefill.efficiency", "decode.memory_efficiency"), KERNEL_SPREAD),
    **dict.fromkeys(("narrow.pad_m", "stream.latency_s", "prefill.latency_s", "decode.latency_s"), 2 * KERNEL_SPREAD),
    **dict.fromkeys(("routing", "launch", "mla_request", *HOST), COMMON_SPREAD),
    **{f"{name}.{backend}": OWN_SPREAD for name in HOST for backend in BACKENDS},
    **{f"speed.{backend}": KERNEL_SPREAD for backend in BACKENDS[1:]},
}
NAMES = tuple(SPREADS)
FIRST = {"step": 300e-6, "sequence": 6e-6, "routing": 0.05, "launch": 100e-6, "mla_request": 1e-3}
"""Values that the factors of the host's constants multiply, in seconds; of ``1 - routing_power`` for routing."""
HUBER, ROUNDS, TTFT_WEIGHT = 0.08, 12, 0.5

Floats = np.ndarray[Any, np.dtype[np.float64]]


def curves_of(theta: Floats, backend: str) -> Curves:
    """Return the kernels of a backend: shipped constants times their factors, all of them ``speed`` times as fast."""
    of = dict(zip(NAMES, np.exp(theta), strict=True))
    speed = of.get(f"speed.{backend}", 1.0)
    made = {}
    for kind, part in vars(CURVES).items():
        if kind == "routing_power":
            continue
        values = {}
        for field, value in vars(part).items():
            faster = speed if "efficiency" in field else 1 / speed if field.endswith("_s") else 1.0
            values[field] = value * of.get(f"{kind}.{field}", 1.0) * faster
        made[kind] = replace(part, **values)
    return Curves(**made, routing_power=1 - FIRST["routing"] * of["routing"])


def host_of(theta: Floats, point: Point) -> HostOverhead:
    """Return the host of a point's engine; all but vLLM's own default run steps with prompts without CUDA graphs."""
    of = dict(zip(NAMES, np.exp(theta), strict=True))

    def value(name: str) -> float:
        return float(FIRST[name] * of[name] * of.get(f"{name}.{point.backend}", 1.0))

    # vLLM served Llama on B200 with cudagraph_mode FULL_DECODE_ONLY
    launches = point.backend != "vllm" or point.pair == ("llama-3.1-70b", "B200")
    request_s = REQUEST_S + value("mla_request") * (point.family == MLA)
    return HostOverhead(value("step"), value("sequence"), request_s, launch_s=value("launch") if launches else 0.0)


def closed_forms(points: Sequence[Point], theta: Floats) -> Floats:
    """Return [2, n] TTFT and TPOT in seconds by closed forms of a steady closed loop.

    A token takes a decode step and its share of others' prompts, a first token a step with its prompt.
    """
    found = np.zeros((2, len(points)))
    for members in grouped(range(len(points)), lambda i: points[i].group).values():
        one, loops = points[members[0]], [loop_of(points[i]) for i in members]
        ops, host = RankOperators(one, curves_of(theta, one.backend)), host_of(theta, one)
        clients = np.array([float(loop.clients) for loop in loops])
        prompt, output = (np.array([sum(getattr(loop, of)) / 2 for loop in loops]) for of in ("prompt", "output"))
        kv, ones = clients * (prompt + output / 2), np.ones(len(loops))
        decode = ops.step_s(host, seqs=clients, kv=kv)
        if loops[0].mixed:
            prefill = ops.step_s(host, seqs=clients - 1, kv=kv, chunk=prompt, prompts=ones)
            added = prefill - decode
        else:
            added = prefill = ops.step_s(host, seqs=0 * clients, kv=0 * kv, chunk=prompt, prompts=ones)
        found[:, members] = prefill, decode + (clients - 1) / output * added
    return found


def slopes(points: Sequence[Point]) -> Floats:
    """Return [2, n, factors] slopes of the closed forms' logs by every factor; 0 for ``mla_request``, a delay."""
    zero, step = np.zeros(len(NAMES)), 0.1
    base, slope = closed_forms(points, zero), np.zeros((2, len(points), len(NAMES)))
    for i, name in enumerate(NAMES):
        if name != "mla_request":
            moved = closed_forms(points, zero + step * (np.arange(len(NAMES)) == i))
            slope[:, :, i] = np.log(moved / base) / step
    return slope


def fit(points: Sequence[Point], seconds: Floats, slope: Floats) -> Floats:
    """Return the factors' logs; a deployment counts by the root of its points.

    ``seconds``: the engine's [2, n] TTFT and TPOT at ``theta`` = 0 and a front of ``REQUEST_S``.
    """
    counts = Counter((point.pair, point.backend) for point in points)
    weight = np.array([counts[point.pair, point.backend] ** -0.5 for point in points])
    weight = np.concatenate([TTFT_WEIGHT * weight, weight])
    measured = np.log([[point.ttft_s for point in points], [point.tpot_s for point in points]])
    spread = np.array(list(SPREADS.values()))
    is_mla, at = np.array([point.family == MLA for point in points]), NAMES.index("mla_request")
    theta = np.zeros(len(NAMES))
    for _ in range(ROUNDS):
        steps_s = seconds * np.exp(slope @ theta)
        added = is_mla * FIRST["mla_request"] * np.exp(theta[at])
        first_slope = slope[0] * (steps_s[0] / (steps_s[0] + added))[:, None]
        first_slope[:, at] = added / (steps_s[0] + added)
        rows = np.concatenate([first_slope, slope[1]])
        miss = np.concatenate(measured - np.log([steps_s[0] + added, steps_s[1]]))
        w = weight * np.minimum(1.0, HUBER / np.maximum(np.abs(miss), 1e-9)) / HUBER**2
        normal = rows.T @ (rows * w[:, None]) + np.diag(spread**-2)
        theta = theta + np.clip(np.linalg.solve(normal, rows.T @ (w * miss) - theta / spread**2), -0.5, 0.5)
    return theta


Thetas = dict[str, Floats]
"""Logs of the fitted factors by what was left out of the fit."""
EVERY, FEW_FITS, NOTHING = 12, 3, ""


def figures(shared: Path, quick: bool) -> dict[str, Any]:
    points, left = read(shared)
    points = points[:: EVERY if quick else 1]
    by_family, by_gpu = fits_without(points, "family", "gpu")
    found = _figures("family_out", *_engine(points, lambda point: by_family[point.family]), left)
    hosts = {f"{p.backend} {p.family}": asdict(host_of(by_gpu[NOTHING], p)) for p in points}
    found["fidelity.silicon.family_out.ttft_median_ape"]["hosts_of_all"] = hosts
    found |= _figures("gpu_out", *_engine(points, lambda point: by_gpu[point.gpu]), {})
    found |= _figures("tables", *_engine(_with_tables(points), lambda point: by_family[point.family], shared), {})
    return found | shipped(shared, points, quick=quick) | _silicon_argonne.figures(shared, quick)


def fits_without(points: Sequence[Point], *fields: str) -> list[Thetas]:
    """Return for each field, by its value, the factors fitted to points with another value; NOTHING: to all points."""
    fitting, predicted = _engine(points, lambda _: np.zeros(len(NAMES)), mla=False)
    slope, fits = slopes(fitting), []
    for field in fields:
        values = [getattr(point, field) for point in fitting]
        train = {v: [i for i, other in enumerate(values) if other != v] for v in (*sorted(set(values)), NOTHING)}
        by_value = {v: ([fitting[i] for i in some], predicted[some].T, slope[:, some]) for v, some in train.items()}
        fits.append({value: fit(*columns) for value, columns in by_value.items()})
    return fits


def _engine(
    points: Iterable[Point], theta_of: Callable[[Point], Floats], shared: Path | None = None, *, mla: bool = True
) -> tuple[list[Point], Floats]:
    """Return (points, [n, 2] TTFT and TPOT), by tables where ``shared`` is given; without points that do not fit."""
    found, predicted = [], []
    for point in points:
        theta = theta_of(point)
        ops, host = RankOperators(point, curves_of(theta, point.backend)), host_of(theta, point)
        try:
            ops = tabled(shared, point, ops) if shared else ops
            predicted.append(simulated(point, ops, host if mla else replace(host, request_s=REQUEST_S)))
            found.append(point)
        except (InputError, ValueError):
            continue
    return found, np.array(predicted).reshape(-1, 2)


def _with_tables(points: Iterable[Point]) -> list[Point]:
    """Return the points with measured kernels: Llama-3.1-70B in vLLM."""
    return [p for p in points if p.backend == "vllm" and p.inferencemax and p.model == "llama-3.1-70b"]


def _figures(name: str, points: Sequence[Point], predicted: Floats, left: dict[str, int]) -> dict[str, Any]:
    """Return a row for TTFT and one for TPOT: the median error, and errors by what they are of."""
    out, known = {}, np.array([point.inferencemax for point in points])
    sweeps = ["" if point.inferencemax else " (sweep)" for point in points]
    for at, part in enumerate(("ttft", "tpot")):
        error = predicted[:, at] / np.array([getattr(point, f"{part}_s") for point in points]) - 1
        row = summary(error, [p.pair for p in points])
        row |= {"unit": "relative", "better": "lower", "left_out": left, "recorded_clients": described(error[known])}
        row["by_family"] = by([p.family + sweep for p, sweep in zip(points, sweeps, strict=True)], error)
        row["by_backend"] = by([p.backend + sweep for p, sweep in zip(points, sweeps, strict=True)], error)
        lows = [4 ** (round(math.log2(point.concurrency)) // 2) for point in points if point.inferencemax]
        row["by_concurrency"] = by([f"{low} to {4 * low - 1}" for low in lows], error[known])
        row["by_pair"] = by([" on ".join(p.pair) + sweep for p, sweep in zip(points, sweeps, strict=True)], error)
        out[f"fidelity.silicon.{name}.{part}_median_ape"] = row
    return out


def shipped(shared: Path, points: Sequence[Point], *, quick: bool) -> dict[str, Any]:
    """Return figures of ``deploy`` and the engine alone: by the roofline, and by profiles of imported kernels."""
    able = [point for point in points if is_expressible(point)]
    groups = list(grouped(_with_tables(able), lambda point: point.group).values())[: FEW_FITS if quick else None]
    costs: dict[str, list[Any]] = {"shipped": [(point, "roofline") for point in able], "shipped_tables": []}
    for group in groups:
        costs["shipped_tables"] += itertools.product(group, [_fitted_tables(group, shared)])
    out = {}
    for name, priced in costs.items():
        found, predicted = [], []
        for point, prices in priced:
            with contextlib.suppress(InputError):  # it does not fit by the memory planner that ships
                deployment = deployed(point, prices, point.backend)
                loop = loop_of(point)
                predicted.append(means(simulate(loop.workload(), deployment, max_log_steps=0), loop))
                found.append(point)
        out |= _figures(name, found, np.array(predicted).reshape(-1, 2), {})
    return out


def is_expressible(point: Point) -> bool:
    """Return whether ``deploy`` has settings for how the point's model is split."""
    cut_by_tp = point.model.startswith("llama") or (point.ep == 1 and point.moe_tp == point.tp)
    return point.dp == 1 and cut_by_tp


def deployed(point: Point, cost: str | CostTables, host: str | HostOverhead) -> Deployment:
    """Return the point's deployment as a user would request it; raise InputError: it does not fit these GPUs."""
    loop = loop_of(point)
    limits = _limits(point, loop.clients, loop.longest, loop.budget)
    scheduler = "vllm_v1" if loop.mixed else "vllm_v0"
    return deploy(point.model, point.gpu, tp=point.tp, limits=limits, scheduler=scheduler, cost=cost, host=host)


def _limits(point: Point, seqs: int, longest: int, budget: int = 8192) -> EngineLimits:
    tokens, kinds = max(budget, seqs), {"weight_dtype": point.dtype, "kv_dtype": point.kv_dtype}
    return EngineLimits(seqs, tokens, max_model_len=longest, **kinds)


_profile = cache(import_aiconfigurator)


def _fitted_tables(group: Sequence[Point], shared: Path) -> CostTables:
    """Return tables of points that share every operator, wide enough for all of them."""
    one, loops = group[0], [loop_of(point) for point in group]
    longest = max(loop.longest for loop in loops)
    limits = _limits(one, max(loop.clients for loop in loops), longest)
    model, gpu = catalog.model(one.model), catalog.gpu(one.gpu)
    profile = _profile(shared / TABLES, f"{one.gpu.lower()}_sxm", one.backend, VERSION)
    target = Target(model, gpu, catalog.default_node(gpu, one.tp), Parallelism(one.tp), limits, longest)
    return fit_profile(profile, target)[0]
