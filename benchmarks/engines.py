"""Schedulers of real engines: steps that differ from their own, simulated requests per second, memory by lengths.

``vllm`` and ``sglang`` need ``make engine``, or SGLang's sources in LENGTHWISE_SGLANG; ``trtllm`` needs a clone of
TensorRT-LLM in LENGTHWISE_TRTLLM.
"""

import importlib
import itertools
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import _vllm
import numpy as np
from _harness import ROOT, cpu_seconds, machine, summary
from _sections import Sections
from simulate import LIMITS, LOAD, chat, check

from lengthwise import EngineLimits, Workload, deploy, policy, preset, simulate
from lengthwise.predict import Ecdf, Prompts, Samples, attach
from lengthwise.schema.deployment import Scheduler, TrtllmSettings

sys.path += [str(ROOT / "tests" / name) for name in ("live", "oracle")]  # what runs engines, and what was measured
STEPS, WORLDS, RATE_RPS = 100_000, 200, 4.5 * LOAD
SCHEDULERS = {name: policy.scheduler(name) for name in ("vllm_v1", "sglang")}
SCHEDULERS |= {f"{name}_async": replace(one, async_scheduling=True) for name, one in SCHEDULERS.items()}
SCHEDULERS["trtllm"] = Scheduler(trtllm=TrtllmSettings(enable_chunked_prefill=True))


def steps(_shared: Path, quick: bool, engine: str) -> dict[str, Any]:
    """Return how many steps differ from those of the engine's own functions in the same random worlds."""
    own, in_groups = engine.replace("hybrid", "vllm"), engine == "hybrid"
    test, counts, different, worlds = importlib.import_module(f"test_live_{own}_steps"), Counter[str](), 0, 0
    if not test.SOURCES.exists():
        raise FileNotFoundError(f"no {test.SOURCES}: set LENGTHWISE_{own.upper()}")
    kind = {"world": test.grouped_world} if in_groups else {}
    new, python = 3 if quick else WORLDS, _vllm.require() if engine == "sglang" else sys.executable
    while counts["steps"] < (1 if quick else STEPS):
        found, wrong = test.compared(range(worlds, worlds + new), python, **kind)
        counts, different, worlds = counts + found, different + len(wrong), worlds + new
    name = "deploy.hybrid_blocks_equal" if in_groups else f"engines.{engine}_steps_different"
    return {name: {"value": different, "worlds": worlds, **counts}}


def live(_shared: Path, quick: bool) -> dict[str, Any]:
    """Return a real vLLM's tokens/s in little memory reserved by the class of requests, over those by its own rule."""
    gains, runs = importlib.import_module("plugin_engines").in_little_memory(_vllm.require(), 1 if quick else 5)
    return {"engines.live_gain": summary(gains) | {"runs": runs}}


def speed(_shared: Path, quick: bool) -> dict[str, Any]:
    """Return simulated requests per CPU second by scheduler, where clients limit outputs to twice their lengths."""
    workload, rows = chat(100_000 if quick else 1_000_000, RATE_RPS), {}
    workload = replace(workload, max_tokens=np.minimum(2 * workload.output_tokens, 4096 - workload.prompt_tokens))
    for name, scheduler in SCHEDULERS.items():
        made = deploy("llama-2-70b", "A100-80GB", tp=4, limits=LIMITS, scheduler=scheduler)
        run = partial(simulate, workload, made, max_log_steps=0)
        check(run(), workload)
        rates = [len(workload) / cpu_s for cpu_s in cpu_seconds(run, 3 if quick else 5)]
        rows[f"engines.requests_per_s.{name}"] = summary(rates) | {"machine": machine()}
    return rows


SWEEP = {0.0: (1065, 11582), 0.02: (400, 12134), 0.05: (187, 12167), 0.1: (168, 11835), 0.15: (168, 11635)}
"""Preemptions and tokens/s of vLLM by watermark: Qwen2.5-7B on a GB200 (vllm-project/vllm pull request 44594)."""


def sweep(shared: Path, quick: bool) -> dict[str, Any]:
    """Return the errors, not calibrated, of preemptions by watermark, and of TensorRT-LLM's capacity schedulers."""
    runs = np.empty((3 if quick else 20, len(SWEEP), 2))
    for seed, column in np.ndindex(runs.shape[:2]):
        rng = np.random.default_rng(seed)
        prompt, output = rng.integers(800, 1201, 450), rng.integers(4000, 6001, 450)
        limits = EngineLimits(max_num_batched_tokens=8192, max_model_len=8192, watermark=list(SWEEP)[column])
        made = deploy("qwen2.5-7b", "GB200", limits=limits, scheduler=SCHEDULERS["vllm_v1"], num_blocks=18_724)
        r = simulate(Workload(np.zeros(450), prompt, output, concurrency=128), made, max_log_steps=0).requests
        runs[seed, column] = r.preemptions.sum(), output.sum() / r.finished_s.max()
    error = np.median(np.abs(runs / list(SWEEP.values()) - 1), axis=1)
    own = {"measured": SWEEP.values(), "simulated": runs.mean(axis=0).tolist()}
    own = {name: dict(zip(map(str, SWEEP), of, strict=True)) for name, of in own.items()}
    own["tokens_per_s_error"] = float(np.median(error[:, 1]))
    errors, found = importlib.import_module("test_trtllm_measured").errors(shared)
    rows = {"engines.trtllm_pair_error": summary(errors) | {"by_scheduler": found}}
    return rows | {"engines.preemption_sweep_error": summary(error[:, 0].tolist()) | own}


CAPS, CLIENTS = {"chat": 2048, "agent": 4096, "reasoning": 16384}, {"chat": 512, "agent": 64, "reasoning": 128}
OWN = {name: SCHEDULERS[name] for name in ("vllm_v1", "sglang")} | {"trtllm": Scheduler(trtllm=TrtllmSettings())}


def capped(kind: str, requests: int, seed: int) -> Workload:
    """Draw requests at 0 s: ShareGPT, Mooncake (at most 32,000), or lognormal outputs (median 2,500, sigma 1)."""
    if kind == "reasoning":
        output = np.random.default_rng(seed).lognormal(np.log(2500), 1.0, requests).clip(1, CAPS[kind]).astype(int)
        return Workload(np.zeros(requests), np.full(requests, 200), output, max_tokens=np.full(requests, CAPS[kind]))
    made = preset({"chat": "sharegpt", "agent": "mooncake-conv"}[kind]).generate(requests, seed=seed)
    made = made.take(np.flatnonzero(made.prompt_tokens < 32_000))
    return replace(made, arrival_s=np.zeros(len(made)), max_tokens=np.full(len(made), CAPS[kind]))


def caution(kind: str, engine: str, requests: int, seed: int) -> dict[str, dict[str, float]]:
    """Return throughput and preemptions with CLIENTS, p99 at 80 % of the own rate, and bursts, by what is reserved."""
    work, old, found = capped(kind, requests, seed), capped(kind, 5000, 1000 + seed), dict[str, dict[str, float]]()
    samples = Samples(Prompts(len(old), prompt_tokens=old.prompt_tokens), old.output_tokens, np.zeros(len(old), bool))
    exact = replace(work, predicted_tokens=work.output_tokens.astype(float))
    predicted, median = (attach(work, Ecdf().fit(samples), statistic=name) for name in ("mean", "median"))
    runs: dict[str, tuple[Workload, float | None, str]] = {"own": (work, None, ""), "evicting": (work, None, "")}
    runs |= {f"share {share:g}": (predicted, share, "") for share in (0.2, 0.1, 0.4)}
    runs |= {"exact": (exact, 0.0, ""), "exact 0.2": (exact, 0.2, ""), "within own": (predicted, 0.2, "own")}
    runs |= {"median within own": (median, 0.2, "own"), "within evicting": (predicted, 0.2, "evicting")}
    longest = int((work.prompt_tokens + CAPS[kind]).max())
    limits = EngineLimits(max_num_seqs=256, max_num_batched_tokens=32768, max_model_len=longest)
    gaps_s = np.random.default_rng(seed).exponential(size=requests)
    preempts = Scheduler(trtllm=TrtllmSettings("MAX_UTILIZATION")) if engine == "trtllm" else OWN[engine]
    for name, (one, share, rule) in runs.items():
        scheduler = OWN[engine] if name == "own" else preempts
        if share is not None:
            budget = found[rule]["preemptions"] / len(work) if rule else np.inf
            scheduler = replace(preempts, reserve=True, max_recompute_share=share, max_preemptions_per_request=budget)
        made = deploy("llama-3.1-8b", "A100-40GB", limits=limits, scheduler=scheduler)
        r = simulate(replace(one, concurrency=CLIENTS[kind]), made, max_log_steps=0).requests
        low, high = np.quantile(r.finished_s, [0.2, 0.8])
        found[name] = {"requests_per_s": 0.6 * len(one) / (high - low), "preemptions": float(r.preemptions.sum())}
        if name in ("share 0.1", "share 0.4"):
            continue
        arrival_s = np.cumsum(gaps_s[: len(work)] / (0.8 * found["own"]["requests_per_s"]))
        r = simulate(one.with_arrivals(arrival_s), made, max_log_steps=0).requests
        tpot_s = (r.finished_s - r.first_token_s) / np.maximum(1, one.output_tokens - 1)
        for key, of in {"ttft": r.first_token_s - arrival_s, "jct": r.finished_s - arrival_s, "tpot": tpot_s}.items():
            found[name][f"p99_{key}_s"] = float(np.quantile(of, 0.99))
        if name in ("evicting", "share 0.2"):
            low, high, last = np.quantile(simulate(one, made, max_log_steps=0).requests.finished_s, [0.2, 0.8, 1])
            found[name] |= {"burst_s": float(last), "burst_middle_s": float(high - low)}
    found["exact"] = max(found["exact"], found.pop("exact 0.2"), key=lambda of: of["requests_per_s"])
    return found


def reserve(_shared: Path, quick: bool) -> dict[str, Any]:
    """Return gains, and shares of exact lengths' gain over NO_EVICT; its rules were chosen with other seeds."""
    rows, shares, bursts = dict[str, Any](), dict[str, dict[str, Any]](), dict[str, dict[str, list[float]]]()
    for kind, engine in itertools.product(CAPS, OWN):
        with ThreadPoolExecutor(2) as pool:
            runs = list(pool.map(partial(caution, kind, engine, 300 if quick else 3000), range(5, 7 if quick else 10)))
        rates = {name: np.array([run[name]["requests_per_s"] for run in runs]) for name in runs[0]}
        medians = {n: {k: float(np.median([r[n][k] for r in runs])) for k in of} for n, of in runs[0].items()}
        rows[f"engines.reserve_gain.{engine}.{kind}"] = summary(list(rates["share 0.2"] / rates["own"])) | medians
        for key in ("burst_s", "burst_middle_s"):
            bursts.setdefault(key, {})[f"{engine}.{kind}"] = [r["evicting"][key] / r["share 0.2"][key] for r in runs]
        for name in ("within evicting", "within own", "median within own", "evicting") if engine == "trtllm" else ():
            share = list((rates[name] - rates["own"]) / (rates["exact"] - rates["own"]))
            counts = [run[name]["preemptions"] for run in runs]
            shares.setdefault(name, {})[kind] = summary(share) | {"preemptions": counts, "shares": share}
    own = (("within own", "", "median within own"), ("within evicting", ".max_utilization", "evicting"))
    for name, row, other in own:
        mean = summary(list(np.mean([of["shares"] for of in shares[name].values()], axis=0)))
        rows["engines.reserve_recovered_share" + row] = mean | shares[name] | {other: shares[other]}
    return rows | {"engines.reserve_burst_gain": summary(list(itertools.chain(*bursts["burst_s"].values()))) | bursts}


SECTIONS = Sections("engines", __doc__)

if __name__ == "__main__":
    SECTIONS.main()
