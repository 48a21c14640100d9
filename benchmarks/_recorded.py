"""Recorded runs of vLLM on GPUs, 300 requests each, simulated from kernels that were profiled on the same GPUs.

Requests, arrivals, limits and the count of KV blocks are the runs' own (LLMServingSim's examples, MIT); no constant is
fitted to them. Kernels come from LLMServingSim's profile (vLLM 0.19, tables estimator chosen on held-out points), the
host's time between steps is the roofline's default, and for TP 2 the link between the GPUs is the one that the
run's config.json names for their own simulator. Their simulator's errors stand beside ours.
"""

from __future__ import annotations

import gzip
import json
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise import catalog
from lengthwise.cost.estimators import fit_profile
from lengthwise.cost.profiles import import_llmservingsim
from lengthwise.engine import deploy, simulate
from lengthwise.metrics.statistics import column_of, drawn, resampled
from lengthwise.schema.cost_tables import CostTables
from lengthwise.schema.deployment import Deployment, EngineLimits, Parallelism
from lengthwise.schema.specs import LinkSpec, NodeSpec
from lengthwise.schema.workload import Workload

ROOT = "data/profiles/llmservingsim"
STATS = ("Mean", "Median", "P90", "P95", "P99")
QUANTILES = (50, 90, 95, 99)
LATENCIES = ("ttft", "tpot", "latency")
LONGEST_TOKENS = 8192
DRAWS = 500
SEED = 0


@dataclass(frozen=True)
class Run:
    """A recorded run: where it lies, of what, and where its kernels are."""

    name: str
    folder: str
    kernels: str
    model: str
    gpu: str
    tp: int = 1


RUNS = (
    Run("rtx4090.llama-8b", "RTX4090/Llama-3.1-8B", "RTX4090/meta-llama/Llama-3.1-8B", "llama-3.1-8b", "RTX-4090"),
    Run(
        "rtxpro6000.llama-8b",
        "RTXPRO6000/Llama-3.1-8B",
        "RTXPRO6000/meta-llama/Llama-3.1-8B",
        "llama-3.1-8b",
        "RTX-PRO-6000",
    ),
    Run("rtxpro6000.qwen3-32b", "RTXPRO6000/Qwen3-32B", "RTXPRO6000/Qwen/Qwen3-32B", "qwen3-32b", "RTX-PRO-6000", 2),
)


@dataclass(frozen=True)
class Requests:
    """Columns of requests.jsonl in order of arrival; seconds since the first arrival on one clock.

    The file has arrivals on the wall clock and the rest on a monotonic one; the shortest hand-over of a
    request to the engine is taken for none, which joins the two clocks.
    """

    arrival_s: np.ndarray
    queued_s: np.ndarray
    first_s: np.ndarray
    last_s: np.ndarray
    prompt: np.ndarray
    output: np.ndarray


def figures(shared: Path, fast: bool) -> dict:
    """MAPE over the five statistics and the runs, of each latency; a quick look leaves out the interval."""
    told = {run.name: of_run(shared, run, draws=0 if fast else DRAWS) for run in RUNS}
    return {f"fidelity.recorded.{name}_mape": over_runs(name, told) for name in LATENCIES}


def over_runs(name: str, report: dict[str, dict]) -> dict:
    """The mean over the runs, with what each run says."""
    runs = {run: of[name] for run, of in report.items()}
    value = float(np.mean([of["mape"] for of in runs.values()]))
    draws = np.mean([of.pop("draws") for of in runs.values()], axis=0)
    ci = tuple(np.quantile(draws, [0.025, 0.975])) if len(draws) else None
    theirs = float(np.mean([of["llmservingsim_mape"] for of in runs.values()]))
    return {"value": value, "ci": ci, "details": {"llmservingsim_mape": theirs, "runs": runs}}


def of_run(shared: Path, run: Run, *, draws: int) -> dict:
    """Errors of one run by latency."""
    folder = shared / ROOT / "measured_runs" / run.folder
    requests, theirs = read_requests(folder), summary(folder)
    measured = latencies(requests.arrival_s, requests.first_s, requests.last_s, requests.output)
    ours = simulated(shared, run, requests)
    return {name: compared(measured[name], ours[name], theirs[name], draws) for name in LATENCIES}


def compared(measured: np.ndarray, own: np.ndarray, other: list[float], draws: int) -> dict:
    """One latency, requests in order of arrival: errors of the five statistics, their mean, and per request."""
    errors = statistics(own) / statistics(measured) - 1
    each = np.abs(own / measured - 1)
    return {
        "mape": float(np.abs(errors).mean()),
        "errors": dict(zip(STATS, errors.round(4).tolist(), strict=True)),
        "measured_s": dict(zip(STATS, statistics(measured).round(4).tolist(), strict=True)),
        "per_request_mape": round(float(each.mean()), 4),
        "per_request_median": round(float(np.median(each)), 4),
        "llmservingsim_errors": dict(zip(STATS, other, strict=True)),
        "llmservingsim_mape": float(np.abs(other).mean()),
        "draws": redrawn(measured, own, draws),
    }


def redrawn(measured: np.ndarray, own: np.ndarray, draws: int) -> list[float]:
    """The mean error of the five statistics in draws of blocks of neighbours, which wait for each other."""
    if not draws:
        return []
    weights = drawn(np.random.default_rng(SEED), round(len(measured) ** 0.5), draws)
    q = np.array(QUANTILES) / 100
    told, real = (resampled(column_of(seconds), weights, q) for seconds in (own, measured))
    mapes: list[float] = np.abs(told / real - 1).mean(axis=1).tolist()
    return mapes


def statistics(seconds: np.ndarray) -> np.ndarray:
    """Mean, median, P90, P95, P99."""
    return np.array([seconds.mean(), *np.percentile(seconds, QUANTILES)])


def latencies(arrival_s: Any, first_s: Any, last_s: Any, output: Any) -> dict[str, np.ndarray]:
    """TTFT, TPOT and latency of each request."""
    tpot = (last_s - first_s) / np.maximum(output - 1, 1)
    return {"ttft": first_s - arrival_s, "tpot": tpot, "latency": last_s - arrival_s}


def simulated(shared: Path, run: Run, requests: Requests) -> dict[str, np.ndarray]:
    """Latencies of vLLM v1 on the same requests."""
    workload = Workload(arrival_s=requests.arrival_s, prompt_tokens=requests.prompt, output_tokens=requests.output)
    done = simulate(workload, deployment(shared, run)).requests
    return latencies(done.arrival_s, done.first_token_s, done.finished_s, requests.output)


def deployment(shared: Path, run: Run) -> Deployment:
    """What ran, with costs from the kernels of its GPU."""
    meta = json.loads(text(shared / ROOT / "measured_runs" / run.folder / "vllm" / "meta.json"))
    given, blocks = meta["engine_kwargs"], meta.get("kv_cache", {}).get("num_gpu_blocks")
    limits = EngineLimits(
        max_num_seqs=given["max_num_seqs"],
        max_num_batched_tokens=given["max_num_batched_tokens"],
        max_model_len=LONGEST_TOKENS,
        watermark=0.0,  # vLLM v1 keeps none
        enable_prefix_caching=meta.get("kv_cache", {}).get("enable_prefix_caching", True),  # v1's default
    )
    cost = tables(shared, run, limits)
    node = node_of(shared, run)
    return deploy(run.model, run.gpu, node=node, tp=run.tp, limits=limits, cost=cost, num_blocks=blocks)


@cache
def tables(shared: Path, run: Run, limits: EngineLimits) -> CostTables:
    """Cost tables from the kernels of the run's GPU."""
    profile = import_llmservingsim(shared / ROOT / "v1" / run.kernels / "bf16")
    model, gpu = catalog.model(run.model), catalog.gpu(run.gpu)
    return fit_profile(profile, model, gpu, node_of(shared, run), Parallelism(run.tp), limits, LONGEST_TOKENS)[0]


def node_of(shared: Path, run: Run) -> NodeSpec:
    """The catalog's node; between several GPUs the link of the run's config.json."""
    node = catalog.default_node(catalog.gpu(run.gpu), run.tp)
    if run.tp == 1:
        return node
    config = json.loads(text(shared / ROOT / "measured_runs" / run.folder / "config.json"))
    link = LinkSpec("run", config["link_bw"] * 1e9, config["link_latency"] * 1e-9, "config.json of the run")
    return replace(node, link=link, fallback_link=link)


def read_requests(folder: Path) -> Requests:
    """The recorded requests."""
    rows = [json.loads(line) for line in text(folder / "vllm" / "requests.jsonl").splitlines()]
    rows.sort(key=lambda row: row["arrival_time"])
    column = {name: np.array([row[name] for row in rows]) for name in rows[0] if name != "request_id"}
    arrival = column["arrival_time"] - column["arrival_time"][0]
    offset = (column["queued_ts"] - arrival).min()
    clocks = [column[name] - offset for name in ("queued_ts", "first_token_ts", "last_token_ts")]
    return Requests(arrival, *clocks, column["input_toks"], column["output_toks"])


def summary(folder: Path) -> dict[str, list[float]]:
    """Relative errors of LLMServingSim's simulator by latency, in the order of STATS, from its own table."""
    told = text(folder / "validation" / "summary.txt")
    line = re.compile(r"^(TTFT|TPOT|Latency) (\w+)\s+([\d.]+)\s+([\d.]+)", re.MULTILINE)
    values = {(m[1].lower(), m[2]): float(m[4]) / float(m[3]) - 1 for m in line.finditer(told)}
    return {name: [round(values[name, stat], 4) for stat in STATS] for name in LATENCIES}


def text(path: Path) -> str:
    """A file, packed or not."""
    packed = path.with_name(path.name + ".gz")
    if packed.exists():
        return gzip.decompress(packed.read_bytes()).decode()
    return path.read_text("utf-8")
