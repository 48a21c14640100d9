"""Measured deployments of vLLM, SGLang and TensorRT-LLM on H100 to GB300, and Argonne's static batches.

Every point is predicted by the engine in a closed loop. ``shipped`` and ``shipped_tables`` are what a user gets:
``deploy`` with the roofline, or with imported kernels and ``fit_profile``, and a host by name. ``family_out`` and
``gpu_out`` show how far the method carries: the host's constants and small factors on the kernels' are fitted on points
of other families of models, or of other GPUs (``tables``: of other families). The form of that fit, its first values
and spreads were chosen with all points in view. Figures count all points; those whose client is recorded (InferenceMAX)
and the sweeps of unknown clients are in the details.
"""

import contextlib
import csv
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
from lengthwise.cost.operator_work import CURVES, Curves, Operators, Work, kernels_of
from lengthwise.cost.profiles import import_aiconfigurator
from lengthwise.engine import deploy, disaggregate, simulate
from lengthwise.engine.deployment_builder import kv_transfer_over
from lengthwise.schema.cost_tables import CostTables, grid_axis
from lengthwise.schema.deployment import Deployment, EngineLimits, Parallelism
from lengthwise.schema.errors import InputError
from lengthwise.schema.records import Records
from lengthwise.schema.specs import GpuSpec, NodeSpec
from lengthwise.schema.workload import Workload

Floats = np.ndarray[Any, np.dtype[np.float64]]
FILE = "data/profiles/aiconfigurator/silicon_sample.csv.gz"
GPUS = {"h100_sxm": "H100", "h200_sxm": "H200", "b200_sxm": "B200", "gb200": "GB200", "gb300": "GB300"}
RACK = 72
"""GPUs of GB200 and GB300 that NVLink joins. Their kernels count as those of B200; GB300 has 288 GB, and 1.5 times the
FLOP/s in FP4 (NVIDIA's data sheets of GB200 NVL72 and GB300 NVL72)."""
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
    "Qwen/Qwen3.5-397B-A17B": "qwen3.5-397b-a17b",
    "zhipuai/GLM-5": "glm-5",
}
DTYPES = {"fp8": "fp8", "fp8_block": "fp8", "nvfp4": "fp4", "int4_wo": "int4", "": "bfloat16"}
NODE_GPUS = 8
SAME, EQUAL = 0.02, 1e-3
"""Two rows of one deployment and load, or of one load alone, whose TTFT and TPOT are this close are one measurement."""
TWICE, UNKNOWN = "the same measurement, exported twice", "speculation"
PROMPTS_PER_CLIENT, SHORTEST, SHARE = 10, 0.8, 32
REQUEST_S = 3e-3
"""Seconds from the client to the scheduler, by which a new request misses the step that begins as another one ends."""


@dataclass(frozen=True)
class Point:
    """One measured deployment and load: ``dp`` ranks of attention, experts over ``ep`` groups of ``moe_tp`` GPUs.

    With P/D these are of each of ``workers`` decode workers, and ``prefill`` has (workers, tp, dp, moe_tp, ep).
    """

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
    workers: int = 1
    prefill: tuple[int, ...] = ()
    max_num_seqs: int = 0  # of a decode rank (0: not known)

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
    def chip(self) -> str:
        """Return the GPU whose kernels count: GB200 and GB300 are left out of a fit with B200."""
        return "B200" if self.gpu.startswith("GB") else self.gpu

    @property
    def kind(self) -> str:
        """Return the class of the point, by model and by whether prefill and decode are on separate workers."""
        model = catalog.model(self.model)
        name = "hybrid" if model.attention.linear else "MoE" if model.ffn.experts else "dense"
        return f"{name}, {'P/D' if self.prefill else 'aggregated'}" + ("" if self.inferencemax else " (sweep)")

    @property
    def waits(self) -> bool:
        """Return whether a first token takes longer than its prefill explains: InferenceMAX' models with experts."""
        return self.inferencemax and catalog.model(self.model).ffn.experts > 0

    @property
    def group(self) -> tuple[Any, ...]:
        """Return a key of points that share every operator."""
        return self.model, self.gpu, self.backend, self.dtype, self.tp, self.dp, self.moe_tp, self.ep, self.prefill

    @property
    def kv_dtype(self) -> str:
        """Return the data type of the KV cache: FP8 in InferenceMAX, but for Kimi, BF16 weights and GLM-5 on H200."""
        wide = self.model == "kimi-k2" or self.dtype == "bfloat16" or self.pair == ("glm-5", "H200")
        return "fp8" if self.inferencemax and not wide else "bfloat16"


def numbers(points: Sequence[Point], seconds: Any) -> Floats:
    """Return [3, n] TTFT, TPOT and throughput of [n, 2] ``seconds``: output tokens per second by Little's law."""
    (ttft_s, tpot_s), load = np.asarray(seconds).T, np.array([(p.concurrency * p.osl, p.osl - 1) for p in points]).T
    return np.array([ttft_s, tpot_s, load[0] / (ttft_s + load[1] * tpot_s)])


def gpu_of(name: str) -> GpuSpec:
    """Return a GPU's spec; those of GB200 and GB300 follow from B200's (RACK)."""
    spec = catalog.gpu("B200" if name.startswith("GB") else name)
    if name != "GB300":
        return spec
    peak = spec.peak_flops | {"fp4": 1.5 * spec.peak_flops["fp4"]}
    return replace(spec, peak_flops=peak, memory_bytes=1.5 * spec.memory_bytes)


def node_of(name: str, gpus: int) -> NodeSpec:
    node = catalog.default_node(gpu_of(name), gpus)
    return replace(node, gpus=RACK, link_group=RACK) if name.startswith("GB") else node


def read(shared: Path) -> tuple[list[Point], dict[str, int]]:
    """Return (points that the roofline can express, number of rows left out by reason)."""
    import polars as pl

    if not (shared / FILE).exists():
        raise FileNotFoundError(f"{FILE} is not under {shared}")
    left: Counter[str] = Counter()
    unique: dict[tuple[Any, ...], list[Point]] = {}
    last: dict[tuple[Any, ...], str] = {}
    unknown = []
    for row in pl.read_csv(shared / FILE, infer_schema_length=None).to_dicts():
        if reason := next((reason for reason, holds in REASONS.items() if holds(row)), ""):
            unknown += [(reason, row)] if reason.startswith(UNKNOWN) else []
            left[reason] += 1
            continue
        point = _point(row)
        same = unique.setdefault((*point.group, point.isl, point.osl, point.concurrency), [])
        if any(abs(point.ttft_s / o.ttft_s - 1) <= SAME and abs(point.tpot_s / o.tpot_s - 1) <= SAME for o in same):
            left[TWICE] += 1
            continue
        same.append(point)
        last[_load_key(point)] = max(last.get(_load_key(point), ""), point.measured)
    points = [point for same in unique.values() for point in same]
    by_load = grouped(points, lambda p: (p.gpu, p.backend, p.isl, p.osl, p.concurrency))
    for reason, row in unknown:
        seconds, same = np.array(_seconds(row)), by_load.get((GPUS[row["system"]], row["backend"], *_load(row)), [])
        if any(np.allclose((point.ttft_s, point.tpot_s), seconds, rtol=EQUAL, atol=0) for point in same):
            left[reason] -= 1
            left[TWICE] += 1
    newest = [point for point in points if point.measured == last[_load_key(point)]]
    left["measured again later with newer software"] = len(points) - len(newest)
    return newest, dict(left)


def _load_key(p: Point) -> tuple[Any, ...]:
    """Return a key of measurements of which only the last day's count, for any split of the experts."""
    load = p.isl, p.osl, p.concurrency
    return p.model, p.gpu, p.backend, p.dtype, p.tp, p.dp, p.workers, p.prefill[:1], *load


def _may_speculate(row: dict[str, Any]) -> bool:
    """Return whether a row may have used multi-token prediction: since 2026 two CSV exports of DeepSeek mix both."""
    source = row["silicon_data_source"]
    export = source.startswith(("source_file=2026-03-25.csv", "source_file=2026-04-06.csv"))
    return "DeepSeek" in row["model_path"] and export and "measured=2026" in source


def _is_agg(row: dict[str, Any]) -> bool:
    return bool(row["mode"] == "agg")


def _is_mtp(row: dict[str, Any]) -> bool:
    """Return whether InferenceMAX lists this deployment with multi-token prediction alone (its nvidia-master.yaml)."""
    fp8 = "Qwen3.5" in row["model_path"] and row["gemm_quant_mode"] == "fp8"
    return fp8 and _is_agg(row) and (row["tp_size"], row["moe_ep_size"]) == (4, 1)


def _is_consistent(row: dict[str, Any]) -> bool:
    if not _is_agg(row):
        return all(tp * dp == moe_tp * ep for tp, dp, moe_tp, ep in (_side(row, "prefill"), _side(row, "decode")))
    tp, dp, moe_tp, ep = _cut(row)
    return tp * dp <= NODE_GPUS and ("Llama" in row["model_path"] or tp * dp == moe_tp * ep)


def _side(row: dict[str, Any], side: str) -> tuple[int, ...]:
    names = ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
    tp, dp, *experts = (row[f"{side}_{name}"] or 1 for name in names)
    # InferenceMAX' recipes of vLLM prefill with data-parallel attention, and decode so on 16 GPUs; the sample lacks it.
    return (1, tp, *experts) if row["backend"] == "vllm" and (side == "prefill" or tp == 16) else (tp, dp, *experts)


def _cut(row: dict[str, Any]) -> tuple[int, int, int, int]:
    """Return (tp, dp, moe_tp, ep)."""
    # Two exports multiply InferenceMAX' ``tp`` (all GPUs) and ``ep``: 8 GPUs became 64 with experts split 8 by 8.
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
    "no concurrency recorded": lambda r: "silicon_concurrency" not in r["silicon_data_source"],
    "speculation not recorded, aggregated (DeepSeek since 2026)": lambda r: _is_agg(r) and _may_speculate(r),
    "speculation and workers not recorded, P/D (DeepSeek-R1)": lambda r: not _is_agg(r) and "-R1" in r["model_path"],
    "number of P/D workers not recorded (Kimi-K2.5, GLM-5)": lambda r: not (_is_agg(r) or r["decode_num_workers"]),
    "several nodes, GPUs of all workers in one number (GB200)": lambda r: _is_agg(r) and r["system"] == "gb200",
    "multi-token prediction (Qwen3.5 in FP8 on 4 GPUs)": _is_mtp,
    "a router of several workers in front (Dynamo)": lambda r: _is_agg(r) and "ai-dynamo" in r["silicon_data_source"],
    "GPUs of attention and of experts do not agree": lambda r: not _is_consistent(r),
}
"""Reasons to omit a row; the first that holds counts."""


def _point(row: dict[str, Any]) -> Point:
    text, dtype = row["silicon_data_source"], DTYPES[row["gemm_quant_mode"] or ""]
    source = "inferencemax" if _is_export(row) or "gap-analysis" in text else "sweep"
    deployed = (row["id"], MODELS[row["model_path"]], GPUS[row["system"]], row["backend"], dtype, source)
    measured = text.split("measured=")[1][:10] if "measured=" in text else ""
    if _is_agg(row):
        return Point(*deployed, *_load(row), *_cut(row), measured, *_seconds(row))
    workers, prefill = row["decode_num_workers"], (row["prefill_num_workers"], *_side(row, "prefill"))
    point = Point(*deployed, *_load(row), *_side(row, "decode"), measured, *_seconds(row), workers, prefill)
    recipe = point.model, point.gpu, dtype, point.isl, prefill[0], workers, point.tp, point.dp, point.concurrency
    most = _max_num_seqs().get(tuple(map(str, recipe)), 0) if point.backend == "trtllm" else 0
    return replace(point, max_num_seqs=most)


@cache
def _max_num_seqs() -> dict[tuple[str, ...], int]:
    """Return that of a decode rank by deployment and concurrency, from the names of InferenceMAX' recipes."""
    rows = csv.DictReader(Path(__file__).with_name("decode_max_num_seqs.csv").read_text("utf-8").splitlines())
    keys = ("model", "gpu", "dtype", "isl", "prefill", "decode", "tp", "dp")
    return {(*(r[key] for key in keys), c): int(r["max_num_seqs"]) for r in rows for c in r["concurrency"].split()}


def _load(row: dict[str, Any]) -> tuple[int, int, int]:
    return row["isl"], row["osl"], int(row["silicon_data_source"].split("silicon_concurrency=")[1].split(";")[0])


def _seconds(row: dict[str, Any]) -> tuple[float, float]:
    return row["silicon_ttft_ms"] / 1e3, row["silicon_tpot_ms"] / 1e3


@dataclass(frozen=True)
class Loop:
    """The load and the engine of a point: a closed loop of one rank's share of the clients; tokens as (least, most)."""

    clients: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    budget: int
    mixed: bool
    wait_steps: float
    opening: int  # first requests that do not count: measurements of sweeps hold no wave of all clients at once

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
    if point.prefill:
        return 0.0
    if point.backend == "sglang" and point.gpu == "B200":  # looks for requests every so many steps
        if point.model == "glm-5":
            return 5.0 if point.dtype == "fp4" else 0.0
        return (10 if point.concurrency < 16 and (point.family, point.dtype) != ("qwen3.5", "fp4") else 30) / 2
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


TABLES, VERSION, BLOCK = "data/profiles/aiconfigurator", "0.24.0", 16


class RankOperators(Operators):
    """The operators of one rank of a measured deployment; ``tokens`` are the rank's own."""

    def __init__(self, point: Point, curves: Curves = CURVES) -> None:
        gpu, model = gpu_of(point.gpu), catalog.model(point.model)
        wide_attention = point.dtype in ("fp4", "int4") and model.ffn.experts > 0
        dense = replace(kernels_of(gpu, "bfloat16" if wide_attention else point.dtype), curves=curves)
        limits = EngineLimits(weight_dtype=point.dtype, kv_dtype=point.kv_dtype)
        self.point, self.gpus, self.busy = point, point.tp * point.dp, float(point.dp)
        self.experts = replace(kernels_of(gpu, point.dtype), curves=curves)
        super().__init__(shard_of(model, Parallelism(point.tp), limits), dense, node_of(point.gpu, self.gpus))

    def all_reduces(self, tokens: Any) -> list[Work]:
        """Return those after attention and MLP; with data parallelism one exchange of the tokens of ``busy`` ranks."""
        # A rank sends a token to the GPUs of its experts alone where there are fewer of them than ranks.
        if self.gpus == 1:
            return []
        times, copies = 2 if self.tp > 1 else 1, min(self.busy, self.model.ffn.experts_per_token or 1.0)
        return [self._all_reduce("all-reduce", self.model.hidden * tokens * copies).times(times)]

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
        everyone = np.asarray(tokens) * self.busy
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
    if point.prefill:
        return disaggregated(point, ops, host)
    loop = loop_of(point)
    ttft_s, tpot_s = means(simulate(loop.workload(), _ranks(ops, host, loop), max_log_steps=0), loop)
    return ttft_s + loop.wait_steps * tpot_s, tpot_s


def _ranks(ops: RankOperators, host: HostOverhead, loop: Loop, count: int = 1) -> Deployment:
    """Return ranks as replicas; raise ValueError: the weights leave no room for two of the longest requests."""
    point, gpu = ops.point, ops.kernels.gpu
    limits = _limits(point, min(loop.clients, point.max_num_seqs or loop.clients), loop.longest, loop.budget)
    plan = cost.plan_memory(ops.model, gpu, Parallelism(ops.gpus), limits, loop.longest, num_blocks=None)
    if plan.num_blocks * BLOCK < 2 * loop.longest:
        raise ValueError(f"{point.id}: weights leave no room")
    router = "least_outstanding" if point.dp > 1 else "round_robin"  # engines balance ranks, Dynamo takes turns
    scheduler = replace(policy.scheduler("vllm_v1" if loop.mixed else "vllm_v0"), router=router)
    parts = {"model": ops.model, "gpu": gpu, "node": ops.node, "limits": limits, "kv": plan}
    parts |= {"parallel": Parallelism(replicas=count), "scheduler": scheduler, "max_model_len": loop.longest}
    return Deployment(**parts, cost=ops.tables(host, loop))


def disaggregated(point: Point, ops: RankOperators, host: HostOverhead) -> tuple[float, float]:
    """Return (mean TTFT, mean TPOT) in seconds of a closed loop through prefill ranks and decode ranks."""
    # A client gets its first token with the request's first decode step, after prefill and KV transfer. Equal shares of
    # ranks and clients stand for all. Prompts share a prefill step's experts with those of other ranks that are busy.
    count, *cut = point.prefill
    side = replace(point, max_num_seqs=0, **dict(zip(("tp", "dp", "moe_tp", "ep"), cut, strict=True)))
    first = RankOperators(side, ops.kernels.curves)
    ranks, clients = (count * side.dp, point.workers * point.dp), point.concurrency
    common = math.gcd(*ranks)
    shares = max(n for n in range(1, common + 1) if common % n == 0 and (n == 1 or clients >= SHARE * n))
    loop = replace(loop_of(point), clients=math.ceil(clients / shares), mixed=True)
    prompt, output = (sum(of) / 2 for of in (loop.prompt, loop.output))
    decoding_s = output * ops.step_s(host, seqs=clients / ranks[1], kv=clients / ranks[1] * (prompt + output / 2))
    for _ in range(ROUNDS):
        prompt_s = first.step_s(host, seqs=0.0, kv=0.0, chunk=prompt, prompts=1.0)
        first.busy = 1 + (side.dp - 1) * min(1.0, clients * float(prompt_s / (prompt_s + decoding_s)) / ranks[0])
    sides = [_ranks(one, host, loop, n // shares) for one, n in zip((first, ops), ranks, strict=True)]
    transfer = kv_transfer_over(node_of(point.gpu, RACK).link_for(RACK), *sides)
    done = simulate(loop.workload(), disaggregate(*sides, transfer), max_log_steps=10**7)
    steps, requests = done.steps, done.requests
    decodes = steps.replica >= ranks[0] // shares
    tpot_s = np.average((steps.end_s - steps.start_s)[decodes], weights=steps.decode_seqs[decodes])
    after_first_s = np.mean(np.maximum(requests.output_tokens - 2, 0)) * tpot_s
    return float(np.mean(requests.finished_s - requests.arrival_s) - after_first_s), float(tpot_s)


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
    **dict.fromkeys(("routing", "launch", "late_request", *HOST), COMMON_SPREAD),
    **{f"{name}.{backend}": OWN_SPREAD for name in HOST for backend in BACKENDS},
    **{f"speed.{backend}": KERNEL_SPREAD for backend in BACKENDS[1:]},
}
NAMES = tuple(SPREADS)
FIRST = {"step": 300e-6, "sequence": 6e-6, "routing": 0.05, "launch": 100e-6, "late_request": 1e-3}
"""Values that the factors of the host's constants multiply, in seconds; of ``1 - routing_power`` for routing."""
HUBER, ROUNDS, TTFT_WEIGHT = 0.08, 12, 0.5
DELAY_ALONE = ("qwen3.5", "glm")
"""Families to which the delay of a first token alone is fitted: the other constants had no such operators in view."""


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
    request_s = REQUEST_S + value("late_request") * point.waits
    return HostOverhead(value("step"), value("sequence"), request_s, launch_s=value("launch") if launches else 0.0)


def closed_forms(points: Sequence[Point], theta: Floats) -> Floats:
    """Return [2, n] TTFT and TPOT in seconds by closed forms of a steady closed loop."""
    # A token takes a decode step and its share of others' prompts, a first token a step with its prompt.
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
    """Return [2, n, factors] slopes of the closed forms' logs by every factor; 0 for ``late_request``, a delay."""
    zero, step = np.zeros(len(NAMES)), 0.1
    base, slope = closed_forms(points, zero), np.zeros((2, len(points), len(NAMES)))
    for i, name in enumerate(NAMES):
        if name != "late_request":
            moved = closed_forms(points, zero + step * (np.arange(len(NAMES)) == i))
            slope[:, :, i] = np.log(moved / base) / step
    return slope


def fit(points: Sequence[Point], seconds: Floats, slope: Floats) -> Floats:
    """Return the factors' logs; a deployment counts by the root of its points."""
    # ``seconds``: the engine's [2, n] TTFT and TPOT at ``theta`` = 0 and a front of ``REQUEST_S``.
    counts = Counter((point.pair, point.backend) for point in points)
    weight = np.array([counts[point.pair, point.backend] ** -0.5 for point in points])
    weight = np.concatenate([TTFT_WEIGHT * weight, weight])
    measured = np.log([[point.ttft_s for point in points], [point.tpot_s for point in points]])
    spread = np.array(list(SPREADS.values()))
    waits, at = np.array([point.waits for point in points]), NAMES.index("late_request")
    theta = np.zeros(len(NAMES))
    for _ in range(ROUNDS):
        steps_s = seconds * np.exp(slope @ theta)
        added = waits * FIRST["late_request"] * np.exp(theta[at])
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
    by_family, by_gpu = fits_without(points, "family", "chip")
    found = _figures("family_out", *_engine(points, lambda point: by_family[point.family]), left)
    hosts = {f"{p.backend} {p.family}": asdict(host_of(by_gpu[NOTHING], p)) for p in points}
    found["fidelity.silicon.family_out.ttft_median_ape"]["hosts_of_all"] = hosts
    found |= _figures("gpu_out", *_engine(points, lambda point: by_gpu[point.chip]), {})
    for part in ("ttft", "tpot"):
        fits = {name: found[f"fidelity.silicon.{name}.{part}_median_ape"] for name in ("family_out", "gpu_out")}
        worse = max(fits.values(), key=lambda row: row["value"])
        row = {key: worse[key] for key in ("value", "interval", "p90")}
        found[f"deploy.{part}_median_ape_left_out"] = row | {"fits": {name: of["value"] for name, of in fits.items()}}
    rows = {"rows": len(points) + left[TWICE], "of": len(points) + sum(left.values())}
    scored = {"value": found["fidelity.silicon.family_out.ttft_median_ape"]["points"]} | rows
    found |= {"deploy.silicon_scored": scored} | shipped(shared, points, by_family, quick=quick)
    return found | _silicon_argonne.figures(shared, quick)


def fits_without(points: Sequence[Point], *fields: str) -> list[Thetas]:
    """Return for each field, by its value, the factors fitted to points with another value; NOTHING: to all points."""
    together = [point for point in points if not point.prefill]
    fitting, predicted = _engine(together, lambda _: np.zeros(len(NAMES)), late=False)
    known = np.array([point.family not in DELAY_ALONE for point in fitting])
    slope, fits = slopes(fitting) * known[None, :, None], []
    for field in fields:
        values = [getattr(point, field) for point in fitting]
        train = {v: [i for i, other in enumerate(values) if other != v] for v in (*sorted(set(values)), NOTHING)}
        by_value = {v: ([fitting[i] for i in some], predicted[some].T, slope[:, some]) for v, some in train.items()}
        fits.append({value: fit(*columns) for value, columns in by_value.items()})
    return fits


def _engine(
    points: Iterable[Point], theta_of: Callable[[Point], Floats], *, late: bool = True
) -> tuple[list[Point], Floats]:
    """Return (points, [n, 2] TTFT and TPOT), without points that do not fit."""
    found, predicted = [], []
    for point in points:
        theta = theta_of(point)
        ops, host = RankOperators(point, curves_of(theta, point.backend)), host_of(theta, point)
        try:
            predicted.append(simulated(point, ops, host if late else replace(host, request_s=REQUEST_S)))
            found.append(point)
        except (InputError, ValueError):
            continue
    return found, np.array(predicted).reshape(-1, 2)


def _with_tables(points: Iterable[Point]) -> list[Point]:
    """Return the points with measured kernels: Llama-3.1-70B in vLLM."""
    return [p for p in points if p.backend == "vllm" and p.inferencemax and p.model == "llama-3.1-70b"]


def _figures(name: str, points: Sequence[Point], predicted: Floats, left: dict[str, int]) -> dict[str, Any]:
    """Return rows of TTFT, TPOT and throughput: the median error, and errors by what they are of."""
    out, known = {}, np.array([point.inferencemax for point in points])
    sweeps = ["" if point.inferencemax else " (sweep)" for point in points]
    errors = numbers(points, predicted) / numbers(points, [(point.ttft_s, point.tpot_s) for point in points]) - 1
    for part, error in zip(("ttft", "tpot", "throughput"), errors, strict=True):
        row = summary(error, [p.pair for p in points])
        row |= {"unit": "relative", "better": "lower", "left_out": left, "recorded_clients": described(error[known])}
        row["by_family"] = by([p.family + sweep for p, sweep in zip(points, sweeps, strict=True)], error)
        row["by_class"] = by([point.kind for point in points], error)
        row["by_backend"] = by([p.backend + sweep for p, sweep in zip(points, sweeps, strict=True)], error)
        lows = [4 ** (round(math.log2(point.concurrency)) // 2) for point in points if point.inferencemax]
        row["by_concurrency"] = by([f"{low} to {4 * low - 1}" for low in lows], error[known])
        row["by_pair"] = by([" on ".join(p.pair) + sweep for p, sweep in zip(points, sweeps, strict=True)], error)
        out[f"fidelity.silicon.{name}.{part}_median_ape"] = row
    return out


def shipped(shared: Path, points: Sequence[Point], by_family: Thetas, *, quick: bool) -> dict[str, Any]:
    """Return figures of ``deploy`` and the engine alone: by the roofline, and by profiles of imported kernels."""
    # ``tables`` has the host of other families of models, the others that of the engine's name.
    able = [point for point in points if is_expressible(point)]
    groups = list(grouped(_with_tables(able), lambda point: point.group).values())[: FEW_FITS if quick else None]
    tabled = [(point, tables) for group in groups for tables in [_fitted_tables(group, shared)] for point in group]
    costs = {"shipped": [(point, "roofline", point.backend) for point in able]}
    costs["shipped_tables"] = [(point, tables, point.backend) for point, tables in tabled]
    costs["tables"] = [(point, tables, host_of(by_family[point.family], point)) for point, tables in tabled]
    out = {}
    for name, priced in costs.items():
        found, predicted = [], []
        for point, prices, host in priced:
            with contextlib.suppress(InputError):  # it does not fit by the memory planner that ships
                deployment = deployed(point, prices, host)
                loop = loop_of(point)
                predicted.append(means(simulate(loop.workload(), deployment, max_log_steps=0), loop))
                found.append(point)
        out |= _figures(name, found, np.array(predicted).reshape(-1, 2), {})
    return out


def is_expressible(point: Point) -> bool:
    """Return whether ``deploy`` has settings for how the point's model is split."""
    cut_by_tp = point.model.startswith("llama") or (point.ep == 1 and point.moe_tp == point.tp)
    return point.dp == 1 and cut_by_tp and not point.prefill


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
