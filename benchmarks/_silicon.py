"""Measured deployments of vLLM, SGLang and TensorRT-LLM on H100 to GB300.

Every point is predicted by the engine in a closed loop. ``shipped`` and ``shipped_tables`` are what a user gets:
``deploy`` with the roofline, or with imported kernels and ``fit_profile``, and a host by name. ``family_out`` and
``gpu_out`` show how far the method carries: the host's constants and small factors on the kernels' are fitted on points
of other families of models, or of other GPUs (``tables``: of other families). The form of that fit, its first values
and spreads were chosen with all points in view. Figures count all points; those whose client is recorded (InferenceMAX)
and the sweeps of unknown clients are in the details. No fit has points with P/D or with multi-token prediction (MTP).
Points with MTP have figures of their own (``_mtp``): their acceptance was not recorded, a published one is assumed.
"""

import contextlib
import csv
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from _harness import RECORDED, grouped
from _intervals import by, described, summary

from lengthwise import InputError, Records, Workload, catalog, policy
from lengthwise.cost import HostOverhead, roofline
from lengthwise.cost.estimators import Target, fit_profile
from lengthwise.cost.operator_work import CURVES, Curves, Operators, Work
from lengthwise.cost.profiles import import_aiconfigurator
from lengthwise.cost.roofline_tables import operators_of
from lengthwise.engine import deploy, disaggregate, simulate
from lengthwise.engine.deployment_builder import kv_transfer_over
from lengthwise.schema.cost_tables import CostTables
from lengthwise.schema.deployment import Deployment, EngineLimits, Parallelism
from lengthwise.schema.speculation import MTP_ACCEPTANCE, Speculation

Floats = np.ndarray[Any, np.dtype[np.float64]]
FILE, SOURCE = "data/profiles/aiconfigurator/silicon_sample.csv.gz", "silicon_data_source"
GPUS, MODELS, DTYPES = (RECORDED["silicon"][key] for key in ("gpus", "models", "dtypes"))
RACK = 72  # GPUs of GB200 and GB300 that NVLink joins: workers of P/D on others are joined by their network
NODE_GPUS, WIDE_EP = 8, 16
SAME, EQUAL = 0.02, 1e-3  # so close are TTFT and TPOT of one measurement, of one deployment and load or of a load
TWICE, UNKNOWN = "the same measurement, exported twice", "speculation"
PROMPTS_PER_CLIENT, SHORTEST, SHARE, PREFILLING = 10, 0.8, 32, 256
FEWEST_ROUNDS, TOKENS = 3, 10_000_000  # of large P/D loads: fewer prompts per client
REQUEST_S = 3e-3  # from client to scheduler, by which a request misses the step that begins as another one ends


@dataclass(frozen=True)
class Point:
    """A measured deployment (with P/D: a decode worker) and load; ``prefill`` is (workers, tp, dp, moe_tp, ep)."""

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
    drafts: int = 0  # tokens that MTP proposes for a step

    @property
    def inferencemax(self) -> bool:
        return self.source == "inferencemax"

    @property
    def tokens_per_step(self) -> float:
        return sum(MTP_ACCEPTANCE**accepted for accepted in range(self.drafts + 1))

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
        kind = f"{name}, {'P/D' if self.prefill else 'aggregated'}" + ("" if self.inferencemax else " (sweep)")
        return f"{kind}, MTP {self.drafts}" if self.drafts else kind

    @property
    def group(self) -> tuple[Any, ...]:
        """Return a key of points that share every operator."""
        cut = self.tp, self.dp, self.moe_tp, self.ep, self.prefill
        return self.model, self.gpu, self.backend, self.dtype, self.drafts, *cut

    @property
    def kv_dtype(self) -> str:
        """Return the data type of the KV cache: FP8 in InferenceMAX, but for Kimi, BF16 weights and GLM-5 on H200."""
        wide = self.model == "kimi-k2" or self.dtype == "bfloat16" or self.pair == ("glm-5", "H200")
        return "fp8" if self.inferencemax and not wide else "bfloat16"


def numbers(points: Sequence[Point], seconds: Any) -> Floats:
    """Return [3, n] TTFT, TPOT and throughput of [n, 2] ``seconds``: output tokens per second by Little's law."""
    (ttft_s, tpot_s), load = np.asarray(seconds).T, np.array([(p.concurrency * p.osl, p.osl - 1) for p in points]).T
    return np.array([ttft_s, tpot_s, load[0] / (ttft_s + load[1] * tpot_s)])


def read(shared: Path) -> tuple[list[Point], dict[str, int]]:
    """Return (points, number of rows left out by reason)."""
    import polars as pl

    left: Counter[str] = Counter()
    unique: dict[tuple[Any, ...], list[Point]] = {}
    plain: dict[tuple[Any, ...], list[Point]] = {}  # points without MTP, by load
    rows = pl.read_csv(shared / FILE, infer_schema_length=None).to_dicts()
    reasons = [next((reason for reason, holds in REASONS.items() if holds(row)), "") for row in rows]
    # Of those that may have MTP, the export of the database, which has none with MTP, may hold a copy.
    uncertain = [r.startswith(UNKNOWN) if r else bool(_drafts(row)) for r, row in zip(reasons, rows, strict=True)]
    for reason, may_copy, row in sorted(zip(reasons, uncertain, rows, strict=True), key=lambda one: one[1]):
        if reason and not may_copy:
            left[reason] += 1
            continue
        same_load = plain.setdefault((GPUS[row["system"]], row["backend"], *_load(row)), [])
        if may_copy and any(np.allclose((p.ttft_s, p.tpot_s), _seconds(row), rtol=EQUAL, atol=0) for p in same_load):
            left[TWICE] += 1
        elif reason:
            left[reason] += 1
        else:
            point = _point(row)
            same = unique.setdefault((*point.group, point.isl, point.osl, point.concurrency), [])
            near = (abs(point.ttft_s / o.ttft_s - 1) <= SAME and abs(point.tpot_s / o.tpot_s - 1) <= SAME for o in same)
            left[TWICE] += (twice := any(near))
            same += [] if twice else [point]
            same_load += [] if twice or point.drafts else [point]
    points = [point for same in unique.values() for point in same]
    newest = [p for same in grouped(points, _load_key).values() for p in _newest(same)]
    left["measured again later with newer software"] = len(points) - len(newest)
    return newest, dict(left)


def _load_key(p: Point) -> tuple[Any, ...]:
    """Return a key of measurements of one load, for any split of the experts."""
    load = p.isl, p.osl, p.concurrency
    return p.model, p.gpu, p.backend, p.dtype, p.tp, p.dp, p.workers, p.prefill[:1], p.drafts, *load


def _newest(same: Sequence[Point]) -> list[Point]:
    """Return the last day's points, by split of the experts where each recipe names it: since 2025-12, without P/D."""
    last = max(p.measured for p in same)
    splits = {(p.moe_tp, p.ep): max(o.measured for o in same if (o.moe_tp, o.ep) == (p.moe_tp, p.ep)) for p in same}
    known = [p for p in same if not p.prefill and p.measured >= "2025-12"]
    return [p for p in same if p.measured == (splits[p.moe_tp, p.ep] if p in known else last)]


def _drafts(row: dict[str, Any]) -> int | None:
    """Return the tokens that MTP proposes by InferenceMAX' recipe; None: two recipes fit, one with MTP, one without.

    Which recipe ran on which day with which image is in its ``perf-changelog.yaml``, of which models and GPUs in its
    ``nvidia-master.yaml``; its scripts have the number of tokens.
    """
    source, fp8 = row[SOURCE], row["gemm_quant_mode"] == "fp8"
    if _is_pd(row):
        return 0
    if "Qwen3.5" in row["model_path"]:
        return 3 if fp8 and (row["tp_size"], row["moe_ep_size"]) == (4, 1) else 0
    export = source.startswith(("source_file=2026-03-25.csv", "source_file=2026-04-06.csv"))
    if "DeepSeek" not in row["model_path"] or not export or "measured=2026" not in source:
        return 0
    if row["backend"] == "sglang":
        return None if not fp8 or row["system"] != "b200_sxm" else 2 if row["tp_size"] == NODE_GPUS else 0
    if "1.2.0rc6.post3" in source or ("1.1.0rc2.post2" in source and "measured=2026-01-14" in source):
        return 1 if _cut(row)[1] > 1 else 3
    return 0 if "1.2.0rc6.post2" in source else None


def _is_consistent(row: dict[str, Any]) -> bool:
    if _is_pd(row):
        return all(tp * dp == moe_tp * ep for tp, dp, moe_tp, ep in (_side(row, "prefill"), _side(row, "decode")))
    tp, dp, moe_tp, ep = _cut(row)
    return tp * dp <= NODE_GPUS and ("Llama" in row["model_path"] or tp * dp == moe_tp * ep)


def _side(row: dict[str, Any], side: str) -> tuple[int, ...]:
    names = ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
    tp, dp, *experts = (row[f"{side}_{name}"] or 1 for name in names)
    if not row["decode_num_workers"]:  # of TensorRT-LLM on GB200, by GPUs alone; recipes prefill by ranks (DEP)
        return (1, tp, 1, tp) if side == "prefill" or tp > NODE_GPUS else (tp, 1, 1, tp)
    # InferenceMAX' recipes of vLLM prefill with data-parallel attention, and decode so on 16 GPUs; the sample lacks it.
    if row["backend"] == "vllm" and (side == "prefill" or tp == 16):
        return 1, tp, *experts
    # The list of SGLang's deployments on GB200, which the sample has, names DEP4 where scripts have TP, and ep moe_tp.
    if row["backend"] == "sglang" and dp == row["decode_attention_dp_size"] == row["decode_moe_tp_size"] == 4:
        return 4, 1, *experts
    return tp, dp, *(sorted(experts) if row["backend"] == "sglang" and dp > 1 else experts)


def _cut(row: dict[str, Any]) -> tuple[int, int, int, int]:
    """Return (tp, dp, moe_tp, ep)."""
    # Two exports multiply InferenceMAX' ``tp`` (all GPUs) and ``ep``: 8 GPUs became 64 with experts split 8 by 8.
    tp, dp = row["tp_size"], row["attention_dp_size"] or 1
    if "Kimi" in row["model_path"] and row["gemm_quant_mode"] == "nvfp4":
        return tp, 1, tp, 1  # the script passes tp alone, whatever the list of deployments names
    moe_tp, ep = row["moe_tp_size"] or 1, row["moe_ep_size"] or 1
    gpus = moe_tp * ep
    if moe_tp == ep > 1 and (tp * dp == gpus > NODE_GPUS or (max(tp, dp) == gpus and _is_export(row))):
        return (1, moe_tp, 1, ep) if dp > 1 else (moe_tp, 1, 1, ep)
    if dp > 1 and tp == dp and gpus == tp * dp:
        return 1, dp, 1, tp
    if row["backend"] == "vllm" and row["attention_dp_size"] is None and ep == 1 and gpus % tp == 0 and tp < gpus:
        return tp, gpus // tp, moe_tp, ep  # vLLM divides experts over all data-parallel ranks
    return tp, dp, moe_tp, ep


def _is_pd(row: dict[str, Any]) -> bool:
    return row["mode"] != "agg"


def _is_export(row: dict[str, Any]) -> bool:
    return "config_id=" in row[SOURCE] or "source_file=2026" in row[SOURCE]


REASONS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "no concurrency recorded": lambda r: "silicon_concurrency" not in r[SOURCE],
    "speculation not recorded, aggregated (DeepSeek since 2026)": lambda r: _drafts(r) is None,
    "speculation and workers not recorded, P/D (DeepSeek-R1)": lambda r: _is_pd(r) and "-R1" in r["model_path"],
    "number of P/D workers not recorded (Kimi-K2.5, GLM-5)": lambda r: _is_pd(r) and not all(_workers(r)),
    "several nodes, GPUs of all workers in one number (GB200)": lambda r: not _is_pd(r) and r["system"] == "gb200",
    "a router of several workers in front (Dynamo)": lambda r: not _is_pd(r) and "ai-dynamo" in r[SOURCE],
    "GPUs of attention and of experts do not agree": lambda r: not _is_consistent(r),
}
"""Reasons to omit a row; the first that holds counts."""


def _point(row: dict[str, Any]) -> Point:
    text, dtype = row[SOURCE], DTYPES[row["gemm_quant_mode"] or ""]
    source = "inferencemax" if _is_export(row) or "gap-analysis" in text else "sweep"
    deployed = (row["id"], MODELS[row["model_path"]], GPUS[row["system"]], row["backend"], dtype, source)
    measured = text.split("measured=")[1][:10] if "measured=" in text else ""
    if not _is_pd(row):
        return Point(*deployed, *_load(row), *_cut(row), measured, *_seconds(row), drafts=_drafts(row) or 0)
    count, workers = _workers(row)
    prefill = count, *_side(row, "prefill")
    point = Point(*deployed, *_load(row), *_side(row, "decode"), measured, *_seconds(row), workers, prefill)
    recipe = point.model, point.gpu, dtype, point.isl, count, workers, point.tp, point.dp, point.concurrency
    most = _recipes("decode_max_num_seqs", 1).get(tuple(map(str, recipe)), (0,)) if point.backend == "trtllm" else (0,)
    return replace(point, max_num_seqs=most[0])


def _workers(row: dict[str, Any]) -> tuple[int, ...]:
    """Return the number of prefill and of decode workers; (0, 0) if neither the sample nor a recipe names them."""
    if count := row["decode_num_workers"]:
        return row["prefill_num_workers"], count
    key = MODELS[row["model_path"]], GPUS[row["system"]], row["isl"], row["decode_tp_size"], _load(row)[2]
    return _recipes("pd_workers", 2).get(tuple(map(str, key)), (0, 0))


@cache
def _recipes(name: str, values: int) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Return the last ``values`` columns by those before them and by concurrency: names of InferenceMAX' recipes."""
    _, *rows = csv.reader(Path(__file__).with_name(f"{name}.csv").read_text("utf-8").splitlines())
    cells = [(row[: -1 - values], row[-1 - values : -1], row[-1].split()) for row in rows]
    return {(*key, load): tuple(map(int, found)) for key, found, loads in cells for load in loads}


def _load(row: dict[str, Any]) -> tuple[int, int, int]:
    return row["isl"], row["osl"], int(row[SOURCE].split("silicon_concurrency=")[1].split(";")[0])


def _seconds(row: dict[str, Any]) -> tuple[float, float]:
    return row["silicon_ttft_ms"] / 1e3, row["silicon_tpot_ms"] / 1e3


@dataclass(frozen=True)
class Loop:
    """The load and the engine of a point: a closed loop of all clients; tokens as (least, most)."""

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

    def workload(self, seed: int = 0, rounds: int = PROMPTS_PER_CLIENT) -> Workload:
        rng, n = np.random.default_rng(seed), rounds * self.clients
        prompt, output = (rng.integers(*of, size=n, endpoint=True) for of in (self.prompt, self.output))
        return Workload(np.zeros(n), prompt, output, concurrency=self.clients)


def loop_of(point: Point) -> Loop:
    """Return the load of a point: InferenceMAX draws lengths, a sweep has fixed ones."""
    low = SHORTEST if point.inferencemax else 1.0
    clients, wait_steps = point.concurrency, _wait_steps(point) if point.inferencemax else 0.0
    prompt, output = ((max(1, int(low * tokens)), tokens) for tokens in (point.isl, point.osl))
    budget = max(8192, point.isl + point.osl if point.backend == "trtllm" else 0)
    if point.drafts and point.backend == "trtllm":
        budget = point.isl + 64 + (1 + point.drafts) * math.ceil(clients / point.dp)
    opening = 0 if point.inferencemax else clients
    mixed = point.backend != "sglang" or bool(point.prefill)
    return Loop(clients, prompt, output, budget, mixed, wait_steps, opening)


def _wait_steps(point: Point) -> float:
    """Return the steps for which a new request waits by the engine's settings, on average."""
    steps, fp8 = 0.0, point.dtype == "fp8"
    if point.backend == "sglang" and point.gpu == "B200":  # looks for requests every so many steps
        if point.model == "glm-5":
            return 0.0 if fp8 else 5.0
        steps = (10 if point.concurrency < 16 and (point.family, point.dtype) != ("qwen3.5", "fp4") else 30) / 2
    elif point.backend == "trtllm" and point.dp > 1:  # until each rank has a prompt, or so many (attention_dp_config)
        every = (1 + SHORTEST) / 2 * point.osl / point.tokens_per_step * point.dp / point.concurrency
        steps = min(60.0, every * sum(1 / i for i in range(1, point.dp + 1)))
    elif point.backend == "trtllm" and not point.drafts and (point.isl, point.osl) == (1024, 1024):
        # TensorRT-LLM gathers prompts for so many steps.
        few = point.tp < 8 if point.family == "llama" else fp8 and 64 <= point.concurrency < 256
        steps = (20.0 if point.family == "llama" else 40.0) * few
    return 0.0 if point.prefill else steps


def means(records: Records, loop: Loop) -> tuple[float, float]:
    """Return (mean TTFT, mean TPOT) in seconds of the requests that count."""
    r, counts = records.requests, np.arange(len(records.requests.arrival_s)) >= loop.opening
    several = counts & (r.output_tokens > 1)
    tpot_s = (r.finished_s - r.first_token_s)[several] / (r.output_tokens[several] - 1)
    return float(np.mean((r.first_token_s - r.arrival_s)[counts])), float(np.mean(tpot_s))


TABLES, VERSION = "data/profiles/aiconfigurator", "0.24.0"


def limits_of(point: Point, loop: Loop) -> EngineLimits:
    """Return the limits of a rank: as many sequences as its share of the clients, or as the recipe of P/D names."""
    seqs = min(loop.clients, point.max_num_seqs) if point.max_num_seqs else math.ceil(loop.clients / point.dp)
    kinds = {"weight_dtype": point.dtype, "kv_dtype": point.kv_dtype}
    share = 0.95 if point.prefill else EngineLimits.gpu_memory_utilization
    return EngineLimits(seqs, max(loop.budget, seqs), max_model_len=loop.longest, gpu_memory_utilization=share, **kinds)


def parallel_of(point: Point) -> Parallelism:
    """Return how the model is split; recipes with experts over WIDE_EP GPUs send tokens to their experts' GPUs."""
    if not catalog.model(point.model).ffn.experts:
        return Parallelism(point.tp)
    sends = point.dp > 1 and point.ep == point.tp * point.dp >= WIDE_EP
    backend = "deepep_high_throughput" if sends else Parallelism.all2all_backend
    return Parallelism(point.tp, dp=point.dp, ep=point.ep, all2all_backend=backend)


def operators(point: Point, curves: Curves) -> Operators:
    """Return the operators of a GPU of the point's deployment, with the constants of ``curves``."""
    model, gpu, parallel = catalog.model(point.model), catalog.gpu(point.gpu), parallel_of(point)
    node = catalog.default_node(gpu, parallel.gpus)
    return operators_of(model, gpu, node, parallel, limits_of(point, loop_of(point)), curves)


def deployed(point: Point, cost: str | CostTables | Curves, host: str | HostOverhead) -> Deployment:
    """Return a point's (with P/D its decode workers') deployment; raise InputError: it does not fit these GPUs."""
    loop, parallel = loop_of(point), parallel_of(point)
    limits = limits_of(point, loop)
    if isinstance(cost, Curves):
        model, gpu = catalog.model(point.model), catalog.gpu(point.gpu)
        node = catalog.default_node(gpu, parallel.gpus)
        cost = roofline(model, gpu, node, parallel, limits, loop.longest, HostOverhead(0.0, 0.0), cost)
    speculation = Speculation("mtp", point.drafts, MTP_ACCEPTANCE) if point.drafts else None
    scheduler = policy.scheduler("vllm_v1" if loop.mixed or speculation else "vllm_v0")
    if point.dp > 1:  # engines balance ranks
        scheduler = replace(scheduler, router="least_outstanding")
    if point.prefill:  # groups of layers are not transferred
        scheduler = replace(scheduler, hybrid_kv_cache=False)
    cut = {key: getattr(parallel, key) for key in ("tp", "dp", "ep", "all2all_backend")} | {"limits": limits}
    return deploy(point.model, point.gpu, **cut, scheduler=scheduler, cost=cost, host=host, speculation=speculation)


def seconds(works: list[Work]) -> Any:
    return sum((work.seconds for work in works), 0.0)


def step_s(ops: Operators, host: HostOverhead, *, seqs: Any, kv: Any, chunk: Any = 0, prompts: Any = 0) -> Any:
    """Return a step's seconds: each rank decodes ``seqs`` sequences, one also prefills ``prompts`` chunks."""
    tokens = seqs + chunk * prompts
    works = ops.layer(tokens) + ops.all_reduces(tokens) + ops.shared(ops.dp * seqs + chunk * prompts)
    layer = seconds(works) + seconds(ops.decode(seqs, kv)) * (np.asarray(seqs) > 0)
    layer = layer + prompts * seconds(ops.prefill(chunk, 0)) + host.launch_s * ops.launched * (np.asarray(prompts) > 0)
    ends = seconds(ops.embedding(tokens) + ops.head(seqs + prompts))
    return ops.model.layers * layer + ends + host.step_s + host.sequence_s * (seqs + prompts)


def simulated(point: Point, curves: Curves, host: HostOverhead) -> tuple[float, float]:
    """Return (mean TTFT, mean TPOT) in seconds of the closed loop; raise InputError if it does not fit."""
    if point.prefill:
        return disaggregated(point, curves, host)
    loop = loop_of(point)
    ttft_s, tpot_s = means(simulate(loop.workload(), deployed(point, curves, host), max_log_steps=0), loop)
    return ttft_s + loop.wait_steps * tpot_s * point.tokens_per_step, tpot_s


def disaggregated(point: Point, curves: Curves, host: HostOverhead) -> tuple[float, float]:
    """Return (mean TTFT, mean TPOT) in seconds of a closed loop through equal shares of both sides and of clients."""
    count, *cut = point.prefill
    side = replace(point, max_num_seqs=PREFILLING, **dict(zip(("tp", "dp", "moe_tp", "ep"), cut, strict=True)))
    both, clients = ((side, count, 1), (point, point.workers, min(4, point.dp))), point.concurrency
    shares = max(n for n in range(1, clients // SHARE + 2) if n == 1 or all(parts(*one, n) for one in both))
    own = math.ceil(clients / shares)
    router = "least_outstanding" if side.dp > 1 or point.dp > 1 else "round_robin"  # Dynamo takes turns
    sides = []
    for one, all_workers, fewest in both:
        workers, ranks = parts(one, all_workers, fewest, shares)
        fair = math.ceil(own / (workers * ranks))
        alone = deployed(replace(one, concurrency=2 * fair * one.dp), curves, host)
        alone = replace(alone, scheduler=replace(alone.scheduler, router=router))
        parallel, cost = Parallelism(one.tp, dp=ranks, replicas=workers), of_ranks(alone.cost, one.dp, ranks)
        sides.append(replace(alone, parallel=parallel, cost=cost))
    transfer = kv_transfer_over(sides[0].node.link_for(RACK), *sides)
    loop = replace(loop_of(point), clients=own)
    rounds = min(PROMPTS_PER_CLIENT, max(FEWEST_ROUNDS, TOKENS // (own * point.osl)))
    done = simulate(loop.workload(rounds=rounds), disaggregate(*sides, transfer), max_log_steps=10**7)
    requests, wave = done.requests, np.repeat(np.arange(rounds), own)
    first_s, later = first_decodes(done), np.maximum(requests.output_tokens - 2, 1)
    weight = np.where(wave == 0, 1 / PROMPTS_PER_CLIENT, (1 - 1 / PROMPTS_PER_CLIENT) / (rounds - 1)) / own
    return float(weight @ (first_s - requests.arrival_s)), float(weight @ ((requests.finished_s - first_s) / later))


def parts(one: Point, workers: int, fewest: int, shares: int) -> tuple[int, ...]:
    """Return (workers, ranks of each) of one of equal shares of a side, () if it has none with ``fewest`` ranks."""
    ranks, rest = divmod(one.dp, shares // (of_workers := math.gcd(workers, shares)))
    return () if rest or ranks < fewest else (workers // of_workers, ranks)


def of_ranks(tables: CostTables, dp: int, ranks: int) -> CostTables:
    """Return the tables of ``ranks`` of ``dp`` ranks in lock-step, the others of which have as many tokens."""
    if tables.shared_s is None:
        return tables
    shared_s = tables.shared_s[:: dp // ranks]
    if ranks > 1:
        return replace(tables, shared_s=shared_s)
    return replace(tables, layer_s=tables.layer_s + shared_s[: len(tables.layer_s)], shared_s=None)


def first_decodes(done: Records) -> Floats:
    """Return when each request's first decode step ended: a decode step of its rank computes one of its tokens."""
    steps, requests = done.steps, done.requests
    first_s = np.array(requests.finished_s)
    for rank in np.unique(requests.replica):
        ends_s = np.sort(steps.end_s[(steps.replica == rank) & (steps.decode_seqs > 0)])
        own = requests.replica == rank
        last = np.searchsorted(ends_s, requests.finished_s[own])
        first_s[own] = ends_s[np.maximum(last - np.maximum(requests.output_tokens[own] - 2, 0), 0)]
    return first_s


BACKENDS = ("vllm", "sglang", "trtllm")
KERNEL_SPREAD, OWN_SPREAD, COMMON_SPREAD = 0.03, 0.3, 1.0
HOST = ("step", "sequence", "launch")
GEMMS = map(".".join, product(("narrow", "wide", "grouped"), ("efficiency", "memory_efficiency", "latency_s")))
SPREADS: dict[str, float] = dict.fromkeys((*GEMMS, "prefill.efficiency", "decode.memory_efficiency"), KERNEL_SPREAD)
LESS_KNOWN = ("narrow.pad_m", "stream.latency_s", "prefill.latency_s", "decode.latency_s")
SPREADS |= dict.fromkeys(LESS_KNOWN, 2 * KERNEL_SPREAD)
SPREADS |= dict.fromkeys(("late_request", *HOST), COMMON_SPREAD)
SPREADS |= {f"{name}.{backend}": OWN_SPREAD for name in HOST for backend in BACKENDS}
SPREADS |= {f"speed.{backend}": KERNEL_SPREAD for backend in BACKENDS[1:]}
NAMES = tuple(SPREADS)
FIRST = {"step": 300e-6, "sequence": 6e-6, "launch": 30e-6, "late_request": 100e-3}  # seconds
HUBER, ROUNDS, TTFT_WEIGHT = 0.08, 12, 0.5
LAUNCHES_ALONE = ("qwen3.5", "glm")  # families to which delay and launches of a first token alone are fitted


def curves_of(theta: Floats, backend: str) -> Curves:
    """Return the kernels of a backend: shipped constants times their factors, all of them ``speed`` times as fast."""
    of = dict(zip(NAMES, np.exp(theta), strict=True))
    speed = of.get(f"speed.{backend}", 1.0)
    made: dict[str, Any] = {}
    for kind, part in vars(CURVES).items():
        if kind != "routing_power":
            faster = {f: speed if "efficiency" in f else 1 / speed if f.endswith("_s") else 1.0 for f in vars(part)}
            values = {f: value * of.get(f"{kind}.{f}", 1.0) * faster[f] for f, value in vars(part).items()}
            made[kind] = replace(part, **values)
    return Curves(**made)


def waits(point: Point) -> bool:
    return point.inferencemax and catalog.model(point.model).ffn.experts > 0


def host_of(theta: Floats, point: Point) -> HostOverhead:
    """Return the host of a point's engine; all but vLLM's own default run steps with prompts without CUDA graphs."""
    of = dict(zip(NAMES, np.exp(theta), strict=True))

    def value(name: str) -> float:
        return float(FIRST[name] * of[name] * of.get(f"{name}.{point.backend}", 1.0))

    launches = point.backend != "vllm" or point.pair == ("llama-3.1-70b", "B200")
    request_s = REQUEST_S + value("late_request") * waits(point)
    return HostOverhead(value("step"), value("sequence"), request_s, launch_s=value("launch") if launches else 0.0)


def closed_forms(points: Sequence[Point], theta: Floats) -> Floats:
    """Return [2, n] TTFT and TPOT in seconds by closed forms of a steady closed loop."""
    found = np.zeros((2, len(points)))
    for members in grouped(range(len(points)), lambda i: points[i].group).values():
        one, loops = points[members[0]], [loop_of(points[i]) for i in members]
        ops, host = operators(one, curves_of(theta, one.backend)), host_of(theta, one)
        clients = np.array([float(loop.clients) for loop in loops])
        seqs = clients / one.dp
        prompt, output = (np.array([sum(getattr(loop, of)) / 2 for loop in loops]) for of in ("prompt", "output"))
        kv, ones = seqs * (prompt + output / 2), np.ones(len(loops))
        decode = step_s(ops, host, seqs=seqs, kv=kv)
        if loops[0].mixed:
            prefill = step_s(ops, host, seqs=seqs - 1 / one.dp, kv=kv, chunk=prompt, prompts=ones)
            added = prefill - decode
        else:
            added = prefill = step_s(ops, host, seqs=0 * seqs, kv=0 * kv, chunk=prompt, prompts=ones)
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
    counts = Counter((point.pair, point.backend) for point in points)
    weight = np.array([counts[point.pair, point.backend] ** -0.5 for point in points])
    weight = np.concatenate([TTFT_WEIGHT * weight, weight])
    measured = np.log([[point.ttft_s for point in points], [point.tpot_s for point in points]])
    spread = np.array(list(SPREADS.values()))
    late, at = (np.array([waits(point) for point in points]), NAMES.index("late_request"))
    theta = np.zeros(len(NAMES))
    for _ in range(ROUNDS):
        steps_s = seconds * np.exp(slope @ theta)
        added = late * FIRST["late_request"] * np.exp(theta[at])
        first_slope = slope[0] * (steps_s[0] / (steps_s[0] + added))[:, None]
        first_slope[:, at] = added / (steps_s[0] + added)
        rows = np.concatenate([first_slope, slope[1]])
        miss = np.concatenate(measured - np.log([steps_s[0] + added, steps_s[1]]))
        w = weight * np.minimum(1.0, HUBER / np.maximum(np.abs(miss), 1e-9)) / HUBER**2
        normal = rows.T @ (rows * w[:, None]) + np.diag(spread**-2)
        theta = theta + np.clip(np.linalg.solve(normal, rows.T @ (w * miss) - theta / spread**2), -0.5, 0.5)
    return theta


Thetas, ThetaOf = dict[str, Floats], Callable[[Point], Floats]  # logs of the fitted factors by what the fit left out
EVERY, FEW_FITS, NOTHING = 12, 3, ""


def figures(shared: Path, quick: bool) -> dict[str, Any]:
    points, left = read(shared)
    points = points[:: EVERY if quick else 1]
    by_family, by_gpu = fits_without(points, "family", "chip")
    found: dict[str, Any] = {}
    left_out = {"family_out": lambda point: by_family[point.family], "gpu_out": lambda point: by_gpu[point.chip]}
    for name, theta_of in left_out.items():
        scored, predicted = _engine(points, theta_of)
        drafts = np.array([point.drafts > 0 for point in scored])
        for suffix, some in (("", ~drafts), ("_mtp", drafts), ("_all", drafts | ~drafts)):
            own = [point for point, one in zip(scored, some, strict=True) if one]
            found |= _figures(name + suffix, own, predicted[some], {} if suffix else left)
        found |= compared(scored, predicted) if name == "family_out" else {}
    hosts = {f"{p.backend} {p.family}": asdict(host_of(by_gpu[NOTHING], p)) for p in points}
    found["fidelity.silicon.family_out.ttft_median_ape"]["hosts_of_all"] = hosts
    for part in ("ttft", "tpot"):
        fits = {name: found[f"fidelity.silicon.{name}.{part}_median_ape"] for name in ("family_out", "gpu_out")}
        worse = max(fits.values(), key=lambda row: row["value"])
        row = {key: worse[key] for key in ("value", "interval", "p90")}
        found[f"deploy.{part}_median_ape_left_out"] = row | {
            "fits": {name: of["value"] for name, of in fits.items()},
            "with_mtp": {name: found[f"fidelity.silicon.{name}_all.{part}_median_ape"]["value"] for name in fits},
        }
    row = {"value": found["fidelity.silicon.family_out_all.ttft_median_ape"]["points"]}
    row |= {"without_mtp": found["fidelity.silicon.family_out.ttft_median_ape"]["points"]}
    row |= {"rows": len(points) + left[TWICE], "of": len(points) + sum(left.values())}
    found |= {"deploy.silicon_scored": row} | shipped(shared, points, by_family, quick=quick)
    return found


def fits_without(points: Sequence[Point], *fields: str) -> list[Thetas]:
    """Return for each field, by its value, the factors fitted to points with another value; NOTHING: to all points."""
    together = [point for point in points if not (point.prefill or point.drafts)]
    fitting, predicted = _engine(together, lambda _: np.zeros(len(NAMES)), late=False)
    known = np.array([point.family not in LAUNCHES_ALONE for point in fitting])
    slope, fits = slopes(fitting) * (known[:, None] | np.array([name.startswith("launch") for name in NAMES])), []
    for field in fields:
        values = [getattr(point, field) for point in fitting]
        train = {v: [i for i, other in enumerate(values) if other != v] for v in (*sorted(set(values)), NOTHING)}
        by_value = {v: ([fitting[i] for i in some], predicted[some].T, slope[:, some]) for v, some in train.items()}
        fits.append({value: fit(*columns) for value, columns in by_value.items()})
    return fits


def _engine(points: Iterable[Point], theta_of: ThetaOf, *, late: bool = True) -> tuple[list[Point], Floats]:
    """Return (points, [n, 2] TTFT and TPOT), without points that do not fit."""
    found, predicted = [], []
    for point in points:
        theta = theta_of(point)
        host = host_of(theta, point)
        with contextlib.suppress(InputError):  # it does not fit
            host = host if late else replace(host, request_s=REQUEST_S)
            predicted.append(simulated(point, curves_of(theta, point.backend), host))
            found.append(point)
    return found, np.array(predicted).reshape(-1, 2)


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


ANSWERS = Path(__file__).with_name("aiconfigurator_answers.csv")  # of ``cli_estimate``, AIConfigurator 0.12, Apache-2.0


def compared(points: Sequence[Point], predicted: Floats) -> dict[str, Any]:
    """Return figures of AIConfigurator's answers, and of ours, for the points for which it has one."""
    rows = csv.DictReader(ANSWERS.read_text("utf-8").splitlines())
    answers = {row["id"]: (float(row["ttft_s"]), float(row["tpot_s"])) for row in rows}
    some = [i for i, point in enumerate(points) if point.id in answers]
    same = [points[i] for i in some]
    other = _figures("aiconfigurator", same, np.array([answers[point.id] for point in same]), {})
    return other | _figures("ours_on_these", same, predicted[some], {})


def shipped(shared: Path, points: Sequence[Point], by_family: Thetas, *, quick: bool) -> dict[str, Any]:
    """Return figures of ``deploy`` and the engine alone: by the roofline, and by profiles of imported kernels."""
    able = [point for point in points if not (point.prefill or point.drafts)]
    # Those with measured kernels: Llama-3.1-70B in vLLM.
    measured = [p for p in able if p.backend == "vllm" and p.inferencemax and p.model == "llama-3.1-70b"]
    groups = list(grouped(measured, lambda point: point.group).values())[: FEW_FITS if quick else None]
    tabled = [(point, tables) for group in groups for tables in [_fitted_tables(group, shared)] for point in group]
    costs = {"shipped": [(point, "roofline", point.backend) for point in able]}
    costs["shipped_tables"] = [(point, tables, point.backend) for point, tables in tabled]
    costs["tables"] = [(point, tables, host_of(by_family[point.family], point)) for point, tables in tabled]
    out = {}
    for name, priced in costs.items():
        found, predicted = [], []
        for point, prices, host in priced:
            with contextlib.suppress(InputError):  # it does not fit by the memory planner that ships
                deployment, loop = deployed(point, prices, host), loop_of(point)
                predicted.append(means(simulate(loop.workload(), deployment, max_log_steps=0), loop))
                found.append(point)
        out |= _figures(name, found, np.array(predicted).reshape(-1, 2), {})
    return out


_profile = cache(import_aiconfigurator)


def _fitted_tables(group: Sequence[Point], shared: Path) -> CostTables:
    """Return tables of points that share every operator, wide enough for all of them."""
    one, loops = group[0], [loop_of(point) for point in group]
    longest = max(loop.longest for loop in loops)
    largest = max(group, key=lambda point: point.concurrency)
    limits = replace(limits_of(largest, loop_of(largest)), max_model_len=longest)
    model, gpu = catalog.model(one.model), catalog.gpu(one.gpu)
    profile = _profile(shared / TABLES, f"{one.gpu.lower()}_sxm", one.backend, VERSION)
    target = Target(model, gpu, catalog.default_node(gpu, one.tp), Parallelism(one.tp), limits, longest)
    return fit_profile(profile, target)[0]
