"""Multi-Bin Batching: theory against simulation, and what bins are worth for real answers' lengths."""

from __future__ import annotations

import csv
import gzip
import json
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from _harness import Row, machine

from lengthwise import Deployment, EngineLimits, Scheduler, Workload, catalog, cost, deploy, simulate, theory
from lengthwise.schema.deployment import Parallelism
from lengthwise.schema.workload import estimated_tokens

REQUESTS, SEEDS, THREADS = 128_000, 10, 2
TIMES = theory.UniformTimes(1.0, 20.0)
RATE_RPS = 10.0
BATCHES, BINS = (8, 16, 32, 64, 128), (1, 2, 4, 8, 16, 32, 64)
EXPONENTIAL = theory.ExponentialTimes(0.1)
ERRORS = (0.01, 0.05, 0.1, 0.2, 0.3, 0.5)

GSM8K = "data/text/zeroeval_gsm/outputs"
VICUNA = "data/traces/lengths_lmsys_chat_1m_vicuna13b_outputs.csv.gz"
ANSWERED = {  # answers to GSM8K, and the model whose speed stands for the one that gave them
    "Phi-3.5-mini-instruct": "phi-3.5-mini",
    "gemma-2-2b-it": "gemma-2b",
    "Qwen2-7B-Instruct": "qwen2.5-7b",
    "Meta-Llama-3-8B-Instruct": "llama-3-8b",
    "Meta-Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "Yi-1.5-9B-Chat": "llama-3-8b",
}
MAX_TOKENS, BATCH = 1024, 8
PROMPT_TOKENS = 200
STEP_S = 0.01
ACCURACY = {2: 0.8614, 4: 0.6297, 8: 0.4229}
"""Of the paper's BERT predictor by number of bins (its Table 1)."""

Requests = list[tuple[np.ndarray, np.ndarray]]


def sections(shared: Path, *, fast: bool) -> dict[str, Callable[[], list[Row]]]:
    """Every section by its name."""
    requests = REQUESTS // 10 if fast else REQUESTS
    return {
        "theory": lambda: theorems(requests),
        "saturation": lambda: saturation(requests),
        "robustness": lambda: robustness(requests),
        "exponential": lambda: exponential(requests),
        "gsm8k": lambda: gsm8k(shared, requests),
        "predictor": lambda: predictor(shared),
        "engine": lambda: engine(shared, 1000 if fast else 4000),
    }


def drawn(requests: int, seeds: int = SEEDS) -> Requests:
    """(Poisson arrivals at one a second, levels of service times) a seed: what all comparisons share."""
    made = []
    for seed in range(seeds):
        gaps, levels = np.random.default_rng(seed).spawn(2)
        made.append((np.cumsum(gaps.standard_exponential(requests)), levels.random(requests)))
    return made


def in_threads(work: Callable, requested: Sequence) -> list:
    """The answers in order; the compiled server lets other threads run."""
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(work, requested))


def theorems(requests: int) -> list[Row]:
    """Theorem 4.2 with one busy server, Lemma 5.1 with infinitely many: every batch size and number of bins."""
    theory.serve([0.0], [1.0], [0], batch=1, num_bins=1)  # compiled before the clock starts
    start = time.perf_counter()
    requests_by_seed = drawn(requests)
    service = [TIMES.quantile(levels) for _, levels in requests_by_seed]

    def measure(bins: int) -> list[tuple[int, int, float, float]]:
        cuts, found = theory.uniform_optimal(TIMES, bins), []
        put = [theory.bin_of(times, cuts) for times in service]
        for batch in BATCHES:
            rates, waits = [], []
            for (arrival, _), times, into in zip(requests_by_seed, service, put, strict=True):
                given = {"batch": batch, "num_bins": bins}
                rates.append(theory.serve(np.zeros(len(arrival)), times, into, servers=1, **given).throughput_rps)
                waits.append(theory.serve(arrival / RATE_RPS, times, into, servers=None, **given).latency_s)
            found.append((batch, bins, float(np.mean(rates)), float(np.mean(waits))))
        return found

    found = [one for several in in_threads(measure, BINS) for one in several]
    seconds = time.perf_counter() - start
    rate_errors, latency_errors = {}, {}
    for batch, bins, rate, wait in found:
        cuts = theory.uniform_optimal(TIMES, bins)
        key = f"B={batch} k={bins}"
        rate_errors[key] = rate / theory.uniform_throughput_rps(TIMES, batch, bins) - 1
        latency_errors[key] = wait / theory.latency_s(TIMES, cuts, batch, RATE_RPS) - 1
    asked = {"low_s": TIMES.low_s, "high_s": TIMES.high_s, "requests": requests, "seeds": SEEDS, "rate_rps": RATE_RPS}
    worst_rate, worst_wait = (max(map(abs, e.values())) for e in (rate_errors, latency_errors))
    if requests == REQUESTS:
        assert worst_rate < 0.01, rate_errors
        assert worst_wait < 0.01, latency_errors
    runs = 2 * len(found) * SEEDS
    return [
        Row(
            "multibin.throughput_error_max", worst_rate, "relative", 0.01, "lower",
            details=asked | {"errors": rate_errors},
        ),
        Row(
            "multibin.latency_error_max", worst_wait, "relative", 0.01, "lower",
            details=asked | {"errors": latency_errors},
        ),
        Row(
            "multibin.check_s", seconds, "s", 10, "lower",
            details={"runs": runs, "requests": runs * requests, "threads": THREADS, "machine": machine()},
        ),
    ]  # fmt: skip


def saturation(requests: int) -> list[Row]:
    """Figure 3: throughput follows the arrival rate, then stays at Thr_k."""
    batch, seeds = 8, 3
    requests_by_seed = drawn(requests, seeds)
    shares = np.array([0.25, 0.5, 0.7, 0.9, 1.1, 1.25, 1.5])
    curves, worst = {}, 0.0
    for bins in (1, 2, 4, 8, 16, 32):
        cuts, limit = theory.uniform_optimal(TIMES, bins), theory.uniform_throughput_rps(TIMES, batch, bins)
        points = []
        for share in shares:
            rates = []
            for arrival, levels in requests_by_seed:
                times = TIMES.quantile(levels)
                served = theory.serve(
                    arrival / (share * limit), times, theory.bin_of(times, cuts), batch=batch, num_bins=bins
                )
                rates.append(served.throughput_rps)
            points.append(float(np.mean(rates)))
            worst = max(worst, abs(points[-1] / (min(share, 1.0) * limit) - 1))
        curves[str(bins)] = {"limit_rps": limit, "rate_rps": (shares * limit).tolist(), "served_rps": points}
    assert worst < (0.02 if requests == REQUESTS else 0.05), curves
    capacity = theory.capacity_rps(TIMES, batch)
    details = {"batch": batch, "capacity_rps": capacity, "curves": curves}
    return [Row("multibin.saturation_error_max", worst, "relative", 0.02, "lower", details=details)]


def robustness(requests: int) -> list[Row]:
    """Figure 8: throughput under neighbours' errors, simulated against the exact mixture."""
    batch, worst, curves = 8, 0.0, {}
    seeds = drawn(requests, 4)
    guesses = [np.random.default_rng(100 + seed).random(requests) for seed in range(len(seeds))]
    one = theory.throughput_rps(TIMES, [], batch)
    for bins in (2, 4, 8, 16, 32):
        cuts, points = theory.uniform_optimal(TIMES, bins), []
        for p in ERRORS:
            wrong, rates = theory.neighbours(bins, p), []
            for (_, levels), guess in zip(seeds, guesses, strict=True):
                times = TIMES.quantile(levels)
                put = theory.confuse(theory.bin_of(times, cuts), wrong, guess)
                served = theory.serve(np.zeros(requests), times, put, batch=batch, num_bins=bins)
                rates.append(served.throughput_rps)
            exact = theory.throughput_rps(TIMES, cuts, batch, wrong)
            points.append({"p": p, "exact_rps": exact, "simulated_rps": float(np.mean(rates)), "gain": exact / one - 1})
            worst = max(worst, abs(np.mean(rates) / exact - 1))
        assert all(point["gain"] >= -1e-12 for point in points), "bins must not hurt"
        curves[str(bins)] = points
    assert worst < (0.01 if requests == REQUESTS else 0.03), curves
    details = {"batch": batch, "curves": curves}
    return [Row("multibin.robustness_error_max", worst, "relative", 0.01, "lower", details=details)]


def exponential(requests: int) -> list[Row]:
    """Appendix A.4: the bound holds, and the recursion's boundaries beat equal masses."""
    levels = drawn(requests, 4)
    grid, tightest, least = {}, 0.0, math.inf
    for batch in (8, 32, 128):
        for bins in (2, 4, 8, 16, 32, 64):
            cuts = theory.exponential_recursion(EXPONENTIAL, batch, bins)
            bound = theory.exponential_least_bound_s(EXPONENTIAL, batch, bins)
            simulated = _busy_batch_s(EXPONENTIAL, cuts, batch, levels)
            even = theory.expected_batch_s(EXPONENTIAL, theory.equal_mass(EXPONENTIAL, bins), batch)
            exact = theory.expected_batch_s(EXPONENTIAL, cuts, batch)
            best = theory.expected_batch_s(EXPONENTIAL, theory.learned(EXPONENTIAL, batch, bins), batch)
            assert exact <= bound * (1 + 1e-12), (batch, bins)
            fills = EXPONENTIAL.masses(cuts).min() * requests / batch  # batches of the rarest bin
            assert fills < 50 or abs(simulated / exact - 1) < 0.03, (batch, bins, simulated / exact)
            grid[f"B={batch} k={bins}"] = {
                "bound_s": bound, "exact_s": exact, "simulated_s": simulated, "equal_mass_s": even, "learned_s": best,
                "batches_of_the_rarest_bin": fills,
            }  # fmt: skip
            tightest, least = max(tightest, exact / bound), min(least, even / exact - 1)
    details = {"rate_per_s": EXPONENTIAL.rate_per_s, "grid": grid}
    return [
        Row("multibin.exponential_over_bound", tightest, "of bound", 1.0, "lower", details=details),
        Row("multibin.exponential_over_equal_mass", least, "gain at least", 0.0, "higher"),
    ]


def _busy_batch_s(times: theory.ServiceTimes, cuts: np.ndarray, batch: int, seeds: Requests) -> float:
    means = []
    for _, levels in seeds:
        service = times.quantile(levels)
        given = {"batch": batch, "num_bins": len(cuts) + 1}
        served = theory.serve(np.zeros(len(levels)), service, theory.bin_of(service, cuts), **given)
        means.append(batch / served.throughput_rps)
    return float(np.mean(means))


def gsm8k(shared: Path, requests: int) -> list[Row]:
    """Known lengths, batch 8, all at once: throughput by number of bins on real answers to GSM8K."""
    if not (shared / GSM8K).is_dir():
        return [_skipped("multibin.gain_32_bins", f"{GSM8K} is not there")]
    told = {}
    for answered, speed in ANSWERED.items():
        times, line = answers(shared, answered, speed)
        by_bins = {}
        for bins in (2, 4, 8, 16, 32):
            even, own = theory.equal_mass(times, bins), theory.learned(times, BATCH, bins)
            by_bins[str(bins)] = {
                "equal_mass": theory.gain(times, even, BATCH),
                "learned": theory.gain(times, own, BATCH),
                "simulated_equal_mass": _simulated_gain(times, even, requests),
                "simulated_learned": _simulated_gain(times, own, requests),
            }
        capacity = theory.capacity_rps(times, BATCH) / theory.throughput_rps(times, [], BATCH) - 1
        told[answered] = line | {"gain": by_bins, "infinitely_many_bins": capacity}
    phi = told["Phi-3.5-mini-instruct"]["gain"]["32"]
    assert all(abs(phi[rule] - phi[f"simulated_{rule}"]) < 0.03 for rule in ("equal_mass", "learned")), phi
    details = {"batch": BATCH, "max_tokens": MAX_TOKENS, "by_model": told}
    return [
        Row("multibin.gain_32_bins", phi["simulated_learned"], "gain", 0.63, "higher", details=details),
        Row("multibin.gain_32_bins_equal_mass", phi["simulated_equal_mass"], "gain", 0.6, "higher"),
    ]


def _simulated_gain(times: theory.ServiceTimes, cuts: np.ndarray, requests: int) -> float:
    with_bins = theory.runs(times, cuts, BATCH, requests=requests, seeds=range(2))
    without = theory.runs(times, [], BATCH, requests=requests, seeds=range(2))
    pairs = zip(with_bins, without, strict=True)
    return float(np.mean([a.throughput_rps / b.throughput_rps - 1 for a, b in pairs]))


@lru_cache
def answers(shared: Path, succeeded: str, speed: str) -> tuple[theory.SampledTimes, dict[str, float]]:
    """Service times of one model's answers, linear in their tokens, and the line."""
    with gzip.open(shared / GSM8K / f"{succeeded}.jsonl.gz", "rt", encoding="utf-8") as file:
        tokens = np.array([min(MAX_TOKENS, estimated_tokens(json.loads(row)["output"])) for row in file])
    fixed_s, token_s = line_of(speed, float(tokens.mean()))
    told = {
        "answers": len(tokens),
        "tokens_mean": float(tokens.mean()),
        "tokens_p99": float(np.quantile(tokens, 0.99)),
        "tokens_cv": float(tokens.std() / tokens.mean()),
        "speed_of": speed,
        "fixed_s": fixed_s,
        "token_s": token_s,
    }
    return theory.SampledTimes(fixed_s + token_s * tokens), told


@lru_cache
def line_of(model: str, output_tokens: float, prompt_tokens: int = PROMPT_TOKENS) -> tuple[float, float]:
    """(seconds of the prefill, seconds a token) of a static batch on an A100-80GB, by the roofline."""
    spec, gpu, node = catalog.model(model), catalog.gpu("A100-80GB"), catalog.node("dgx-a100")
    given = (spec, gpu, node, Parallelism(), EngineLimits())
    context = int(BATCH * (prompt_tokens + output_tokens / 2))
    decode = cost.operators(*given, decode_seqs=BATCH, kv_tokens=context)
    prefill = cost.operators(*given, prefill=[(prompt_tokens, 0)] * BATCH)
    return sum(row.seconds for row in prefill), sum(row.seconds for row in decode)


def predictor(shared: Path) -> list[Row]:
    """What the paper's confusion keeps of the gain; and a real predictor of another paper, on its own lengths."""
    rows: list[Row] = []
    if (shared / GSM8K).is_dir():
        times, _ = answers(shared, "Phi-3.5-mini-instruct", "phi-3.5-mini")
        told = {"gsm8k": kept(times)}
        if (shared / VICUNA).is_file():
            tokens, classes = _vicuna(shared)
            fixed_s, token_s = line_of("vicuna-13b", float(tokens.mean()))
            chat = theory.SampledTimes(fixed_s + token_s * tokens)
            told["lmsys"] = kept(chat)
            told["lmsys"]["ssjf 5 classes"] = _by_classes(chat, fixed_s + token_s * tokens, classes)
        told["paper, lmsys, 4 bins"] = {"known": 0.45, "predicted": 0.08}
        four = told["gsm8k"]["4"]
        share = four["neighbours first"] / four["known"]
        rows.append(Row("multibin.kept_by_bert_4_bins", share, "of the gain", 0.178, "higher", details=told))
        return rows
    return [_skipped("multibin.kept_by_bert_4_bins", f"{GSM8K} is not there")]


def kept(times: theory.SampledTimes) -> dict[str, dict[str, float]]:
    """Gains over one bin by number of bins: known lengths, and the paper's accuracies.

    The paper's matrices are lost: errors on the neighbours alone are the best case, errors spread
    evenly over all other bins about the worst.
    """
    found = {}
    for bins, accuracy in ACCURACY.items():
        even = theory.equal_mass(times, bins)
        own = theory.learned(times, BATCH, bins)
        near = theory.of_accuracy(bins, accuracy)
        spread = np.full((bins, bins), (1 - accuracy) / (bins - 1))
        np.fill_diagonal(spread, accuracy)
        found[str(bins)] = {
            "known": theory.gain(times, even, BATCH),
            "known, learned boundaries": theory.gain(times, own, BATCH),
            "neighbours first": theory.gain(times, even, BATCH, near),
            "neighbours first, learned boundaries": theory.gain(times, own, BATCH, near),
            "spread evenly": theory.gain(times, even, BATCH, spread),
        }
    return found


def _vicuna(shared: Path) -> tuple[np.ndarray, np.ndarray]:
    with gzip.open(shared / VICUNA, "rt", encoding="utf-8") as file:
        rows = [(float(r["output_token_length"]), int(r["pred_5class"])) for r in csv.DictReader(file)]
    tokens, classes = np.array([r[0] for r in rows]), np.array([r[1] for r in rows])
    return tokens[tokens > 0], classes[tokens > 0]


def _by_classes(times: theory.SampledTimes, service_s: np.ndarray, classes: np.ndarray) -> dict[str, float]:
    """The gain of binning by the classes that a trained predictor gave."""
    batch_s = sum(
        np.mean(classes == c) * theory.expected_batch_s(theory.SampledTimes(service_s[classes == c]), [], BATCH)
        for c in np.unique(classes)
    )
    one_s = theory.expected_batch_s(times, [], BATCH)
    known = theory.gain(times, theory.equal_mass(times, len(np.unique(classes))), BATCH)
    return {"predicted": one_s / batch_s - 1, "known, as many bins": known}


def engine(shared: Path, requests: int = 4000) -> list[Row]:
    """The whole engine with static batches and bins, against the batch server on the same requests.

    Once with steps that all take 10 ms, where both must agree, and once with the roofline's steps, where
    the batch server takes the line that ``line_of`` drew through them: the engine's batches get faster as
    members finish, the line does not. What is left in the bins leaves at the end in both.
    """
    if not (shared / GSM8K).is_dir():
        return [_skipped("multibin.engine_error", f"{GSM8K} is not there")]
    times, line = answers(shared, "Phi-3.5-mini-instruct", "phi-3.5-mini")
    seen = np.rint((np.asarray(times.values_s) - line["fixed_s"]) / line["token_s"]).astype(np.int64)
    tokens = np.random.default_rng(0).choice(seen, requests)
    same, roofline = {}, {}
    for bins in (1, 4, 8, 32):
        edges = np.rint((theory.equal_mass(times, bins) - line["fixed_s"]) / line["token_s"])
        own = _engine(edges)
        same[bins] = (_engine_rps(tokens, _with_equal_steps(own, STEP_S)), _server_rps(tokens, edges, 0.0, STEP_S))
        roofline[bins] = (_engine_rps(tokens, own), _server_rps(tokens, edges, line["fixed_s"], line["token_s"]))
    exact, close = (max(abs(e / s - 1) for e, s in one.values()) for one in (same, roofline))
    assert exact < 1e-9, same
    assert close < 0.06, roofline
    gains = {
        str(bins): {
            "engine_gain": roofline[bins][0] / roofline[1][0] - 1,
            "server_gain": roofline[bins][1] / roofline[1][1] - 1,
            "engine_rps": roofline[bins][0],
            "server_rps": roofline[bins][1],
            "theory_gain": theory.gain(times, theory.equal_mass(times, bins), BATCH),
        }
        for bins in roofline
    }
    details = {"requests": requests, "batch": BATCH, "prompt_tokens": PROMPT_TOKENS, "by_bins": gains}
    return [
        Row("multibin.engine_error", exact, "relative", 1e-9, "lower", details={"step_s": STEP_S}),
        Row("multibin.engine_roofline_error", close, "relative", 0.05, "lower", details=details),
    ]


def _engine(edges: np.ndarray) -> Deployment:
    own = Scheduler(
        rank="completed_batches",
        batching="static_bins",
        memory="paged",
        binning=f"bins(boundaries={(edges + 0.5).tolist()})",
    )
    limits = EngineLimits(max_num_seqs=BATCH, max_num_batched_tokens=8192)
    return deploy("phi-3.5-mini", "A100-80GB", node="dgx-a100", limits=limits, scheduler=own)


def _with_equal_steps(deployment: Deployment, step_s: float) -> Deployment:
    """The same deployment where every step takes as long, whatever it holds."""
    tables = {
        field.name: np.zeros_like(getattr(deployment.cost, field.name))
        for field in fields(deployment.cost)
        if field.name.endswith("_s") and isinstance(getattr(deployment.cost, field.name), np.ndarray)
    }
    tables["host_s"] = np.full_like(deployment.cost.host_s, step_s)
    return replace(deployment, cost=replace(deployment.cost, **tables))


def _engine_rps(tokens: np.ndarray, deployment: Deployment) -> float:
    work = Workload(
        arrival_s=np.zeros(len(tokens)),
        prompt_tokens=np.full(len(tokens), PROMPT_TOKENS),
        output_tokens=tokens,
        predicted_tokens=tokens,
    )
    return len(tokens) / float(simulate(work, deployment).requests.finished_s.max())


def _server_rps(tokens: np.ndarray, edges: np.ndarray, fixed_s: float, token_s: float) -> float:
    service_s = fixed_s + token_s * tokens
    given = {"batch": BATCH, "num_bins": len(edges) + 1, "drain": True}
    served = theory.serve(np.zeros(len(tokens)), service_s, theory.bin_of(tokens, edges), **given)
    return served.throughput_rps


def _skipped(name: str, cause: str) -> Row:
    return Row(name, math.nan, "", math.nan, "higher", details={"skipped": cause})
