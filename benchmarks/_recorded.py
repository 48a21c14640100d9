"""Recorded runs of vLLM on GPUs, 300 requests each (LLMServingSim's examples, MIT).

``figures`` simulates them from LLMServingSim's profile of kernels on the same GPUs (vLLM 0.19): requests, arrivals,
limits and KV blocks are the runs' own, no constant is fitted to them; for TP 2 the link is that of the run's config.
``calibrated`` calibrates the plain roofline to the first half of each run and scores it on the second.
"""

import gzip
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from _intervals import of_scores

from lengthwise import catalog, deploy, simulate
from lengthwise.cost.estimators import Target, fit_profile
from lengthwise.cost.profiles import import_llmservingsim
from lengthwise.measure import calibrate, read_external_results
from lengthwise.measure.calibration import Calibration
from lengthwise.metrics.bootstrap import draw_blocks, resample, sample_of
from lengthwise.metrics.columns import request_column
from lengthwise.schema.deployment import NULL_BLOCKS, Deployment, EngineLimits, Parallelism
from lengthwise.schema.records import RunResult
from lengthwise.schema.specs import LinkSpec, NodeSpec

ROOT = "data/profiles/llmservingsim"
STATISTICS = {"Mean": "mean", "Median": "p50", "P90": "p90", "P95": "p95", "P99": "p99"}
"""Of a latency, by LLMServingSim's name and by that of calibrations; a MAPE is over them."""
QUANTILES = (50, 90, 95, 99)
LATENCIES = {"ttft": "ttft", "tpot": "tpot", "latency": "jct"}
"""By LLMServingSim's name and by that of calibrations."""
MAX_TOKENS, DRAWS, SEED = 8192, 500, 0


@dataclass(frozen=True)
class Run:
    """A recorded run: its folder of measurements, and that of its GPU's kernels."""

    name: str
    folder: str
    kernels: str
    model: str
    gpu: str
    tp: int = 1


LLAMA, PRO = "Llama-3.1-8B", "RTXPRO6000"
RUNS = (
    Run("rtx4090.llama-8b", f"RTX4090/{LLAMA}", f"RTX4090/meta-llama/{LLAMA}", "llama-3.1-8b", "RTX-4090"),
    Run("rtxpro6000.llama-8b", f"{PRO}/{LLAMA}", f"{PRO}/meta-llama/{LLAMA}", "llama-3.1-8b", "RTX-PRO-6000"),
    Run("rtxpro6000.qwen3-32b", f"{PRO}/Qwen3-32B", f"{PRO}/Qwen/Qwen3-32B", "qwen3-32b", "RTX-PRO-6000", 2),
)


def figures(shared: Path, quick: bool) -> dict[str, Any]:
    """Return the mean over runs of each latency's MAPE over five statistics; a quick look omits the interval."""
    found = {run.name: of_run(shared, run, draws=0 if quick else DRAWS) for run in RUNS}
    rows = {}
    for name in LATENCIES:
        runs = {run: of[name] for run, of in found.items()}
        draws = np.mean([of.pop("draws") for of in runs.values()], axis=0)
        value, other = (float(np.mean([of[key] for of in runs.values()])) for key in ("mape", "llmservingsim_mape"))
        row = {"value": value, "ci": tuple(np.quantile(draws, [0.025, 0.975])) if len(draws) else None}
        rows[f"fidelity.recorded.{name}_mape"] = row | {"llmservingsim_mape": other, "runs": runs}
    return rows


def of_run(shared: Path, run: Run, *, draws: int) -> dict[str, dict[str, Any]]:
    measured, other = read_run(shared, run), summary(shared / ROOT / "measured_runs" / run.folder)
    done = simulate(measured.workload, deployment(shared, run), max_log_steps=0)
    found = {}
    for name, metric in LATENCIES.items():
        real, own = (request_column(of.requests, f"{metric}_s") for of in (measured.records, done))
        found[name] = compared(real, own, other[name], draws)
    return found


def read_run(shared: Path, run: Run) -> RunResult:
    return read_external_results(shared / ROOT / "measured_runs" / run.folder / "vllm" / "requests.jsonl.gz")


def compared(measured: np.ndarray, own: np.ndarray, other: list[float], draws: int) -> dict[str, Any]:
    """Return the errors of five statistics of a latency and their mean; draws are of blocks of neighbours in time."""
    errors = statistics(own) / statistics(measured) - 1
    mapes: list[float] = []
    if draws:
        weights = draw_blocks(np.random.default_rng(SEED), round(len(measured) ** 0.5), draws)
        simulated, real = (resample(sample_of(side), weights, np.array(QUANTILES) / 100) for side in (own, measured))
        mapes = np.abs(simulated / real - 1).mean(axis=1).tolist()
    found = {"mape": float(np.abs(errors).mean()), "llmservingsim_mape": float(np.abs(other).mean())}
    return found | {"errors": dict(zip(STATISTICS, errors.round(4).tolist(), strict=True)), "draws": mapes}


def statistics(seconds: np.ndarray) -> np.ndarray:
    return np.array([seconds.mean(), *np.percentile(seconds, QUANTILES)])


def deployment(shared: Path, run: Run) -> Deployment:
    meta = json.loads(text(shared / ROOT / "measured_runs" / run.folder / "vllm" / "meta.json"))
    given, cache_facts = meta["engine_kwargs"], meta.get("kv_cache", {})
    sizes = {name: given[name] for name in ("max_num_seqs", "max_num_batched_tokens")}
    is_cached = cache_facts.get("enable_prefix_caching", True)  # v1's default
    limits = EngineLimits(**sizes, max_model_len=MAX_TOKENS, enable_prefix_caching=is_cached)
    node, blocks = node_of(shared, run), cache_facts.get("num_gpu_blocks")
    profile = import_llmservingsim(shared / ROOT / "v1" / run.kernels / "bf16")
    model, gpu = catalog.model(run.model), catalog.gpu(run.gpu)
    cost, _ = fit_profile(profile, Target(model, gpu, node, Parallelism(run.tp), limits, MAX_TOKENS))
    usable = None if blocks is None else blocks - NULL_BLOCKS
    return deploy(run.model, run.gpu, node=node, tp=run.tp, limits=limits, cost=cost, num_blocks=usable)


def node_of(shared: Path, run: Run) -> NodeSpec:
    """Return the catalog's node; between several GPUs with the link of the run's config.json."""
    node = catalog.default_node(catalog.gpu(run.gpu), run.tp)
    if run.tp == 1:
        return node
    config = json.loads(text(shared / ROOT / "measured_runs" / run.folder / "config.json"))
    link = LinkSpec("run", config["link_bw"] * 1e9, config["link_latency"] * 1e-9, "config.json of the run")
    return replace(node, link=link, fallback_link=link)


def summary(folder: Path) -> dict[str, list[float]]:
    """Read the relative errors of LLMServingSim's simulator by latency, in the order of STATISTICS."""
    line = re.compile(r"^(TTFT|TPOT|Latency) (\w+)\s+([\d.]+)\s+([\d.]+)", re.MULTILINE)
    found = line.finditer(text(folder / "validation" / "summary.txt"))
    values = {(m[1].lower(), m[2]): round(float(m[4]) / float(m[3]) - 1, 4) for m in found}
    return {name: [values[name, statistic] for statistic in STATISTICS] for name in LATENCIES}


def text(path: Path) -> str:
    packed = path.with_name(path.name + ".gz")
    return gzip.decompress(packed.read_bytes()).decode() if packed.exists() else path.read_text("utf-8")


def calibrated(shared: Path, quick: bool) -> dict[str, Any]:
    """Return errors on held-out requests over all runs, before and after a calibration; quick: of the first run."""
    found = {run.name: calibration(shared, run) for run in (RUNS[:1] if quick else RUNS)}
    rows: dict[str, Any] = {}
    for name, metric in LATENCIES.items():
        runs: dict[str, dict[str, list[float]]] = {}
        for run, of in found.items():
            scores = [score for score in of.scores if score.metric == metric]
            runs[run] = {s.statistic: [round(x, 4) for x in (s.before, s.after, s.low, s.high)] for s in scores}
        scores = [of[s][:2] for of in runs.values() for s in STATISTICS.values() if s in of]
        before, after = np.abs(scores).mean(axis=0).tolist()
        details = {"before": before, "runs": runs, "notes": {run: list(of.notes) for run, of in found.items()}}
        rows[f"fidelity.calibrated.{name}_mape"] = {"value": after, "ci": of_scores(runs), "details": details}
    return rows


def calibration(shared: Path, run: Run) -> Calibration:
    """Calibrate the roofline to the first half of a run; the one run that records its KV blocks has their number."""
    small = run.gpu == "RTX-4090"
    limits = EngineLimits(256 if small else 128, 2048, max_model_len=MAX_TOKENS)
    roofline = deploy(run.model, run.gpu, tp=run.tp, limits=limits, num_blocks=2588 if small else None)
    return calibrate([read_run(shared, run)], roofline, holdout=0.5, allow=("warnings",))
