"""Multi-Bin Batching: theory against simulation, and the gain of bins for recorded lengths."""

import csv
import gzip
import itertools
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import lru_cache
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import _texts
import numpy as np
from _harness import RECORDED, machine

from lengthwise import Deployment, EngineLimits, Scheduler, Workload, catalog, cost, deploy, simulate, theory
from lengthwise.schema.deployment import Parallelism
from lengthwise.schema.workload import estimated_tokens

REQUESTS, SEEDS, THREADS = 128_000, 10, 2
TIMES = theory.UniformTimes(1.0, 20.0)
RATE_RPS = 10.0
BATCHES, BINS = (8, 16, 32, 64, 128), (1, 2, 4, 8, 16, 32, 64)
EXPONENTIAL = theory.ExponentialTimes(0.1)
ERRORS = (0.01, 0.05, 0.1, 0.2, 0.3, 0.5)
SHARES = (0.05, 0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.1, 1.25, 1.5)
"""Request rates, in shares of the throughput of servers that always have a batch."""

GSM8K = "data/text/zeroeval_gsm/outputs"
VICUNA = "data/traces/lengths_lmsys_chat_1m_vicuna13b_outputs.csv.gz"
ANSWERS = RECORDED["gsm8k"]["models"]
PHI = "Phi-3.5-mini-instruct"
MAX_TOKENS, BATCH, PROMPT_TOKENS, STEP_S = 1024, 8, 200, 0.01
ACCURACY = {2: 0.8614, 4: 0.6297, 8: 0.4229}
"""Of the paper's BERT predictor by number of bins (its Table 1)."""

Rows = dict[str, dict[str, Any]]


def _row(value: float, unit: str, target: float, better: str = "lower", **details: Any) -> dict[str, Any]:
    return {"value": value, "unit": unit, "target": target, "better": better, "details": details}


def _requests(quick: bool) -> int:
    return REQUESTS // 10 if quick else REQUESTS


def _mean(served: list[theory.Served], name: str) -> float:
    return float(np.mean([getattr(one, name) for one in served]))


def theorems(_shared: Path, quick: bool) -> Rows:
    """Check Theorem 4.2 with one busy server and Lemma 5.1 with infinitely many, by batch size and number of bins."""
    given = {"requests": _requests(quick), "seeds": range(SEEDS)}
    theory.runs(TIMES, [], 1, requests=1)  # compiled before the clock starts
    start = time.perf_counter()

    def measure(bins: int) -> list[tuple[str, float, float]]:
        cuts, found = theory.uniform_optimal(TIMES, bins), []
        for batch in BATCHES:
            rate_rps = _mean(theory.runs(TIMES, cuts, batch, **given), "throughput_rps")
            wait_s = _mean(theory.runs(TIMES, cuts, batch, rate_rps=RATE_RPS, servers=None, **given), "latency_s")
            rate_error = rate_rps / theory.uniform_throughput_rps(TIMES, batch, bins) - 1
            wait_error = wait_s / theory.latency_s(TIMES, cuts, batch, RATE_RPS) - 1
            found.append((f"B={batch} k={bins}", rate_error, wait_error))
        return found

    with ThreadPoolExecutor(THREADS) as pool:  # the compiled server lets other threads run
        found = [one for several in pool.map(measure, BINS) for one in several]
    seconds, runs = time.perf_counter() - start, 2 * len(found) * SEEDS
    errors = {name: {key: of[at] for key, *of in found} for at, name in enumerate(("throughput", "latency"))}
    worst = {name: max(map(abs, of.values())) for name, of in errors.items()}
    assert quick or max(worst.values()) < 0.01, errors
    about = {"requests": runs * given["requests"], "threads": THREADS, "machine": machine()}
    rows = {f"multibin.{name}_error_max": _row(worst[name], "relative", 0.01, errors=errors[name]) for name in errors}
    return rows | {"multibin.check_s": _row(seconds, "s", 10, **about)}


def rates(shared: Path, quick: bool, lengths: str) -> Rows:
    """Check Figures 3 and 4 (uniform times), 9 (exponential) and 6 (GSM8K, 8 servers): batch 8, by request rate."""
    times = {"uniform": TIMES, "exponential": EXPONENTIAL}.get(lengths) or answers(shared, PHI)[0]
    servers, worst, worst_low, by_bins = 8 if lengths == "gsm8k" else 1, 0.0, 0.0, {}

    def served(rate_rps: float) -> tuple[float, float]:
        given = {"servers": servers, "requests": _requests(quick), "seeds": range(SEEDS)}
        runs = theory.runs(times, cuts, BATCH, rate_rps=rate_rps, **given)
        return _mean(runs, "throughput_rps"), _mean(runs, "latency_s")

    one_rps = servers * theory.throughput_rps(times, [], BATCH)
    for bins in BINS[:-1]:
        by_recursion = lengths == "exponential"
        cuts = theory.exponential_recursion(times, BATCH, bins) if by_recursion else theory.equal_mass(times, bins)
        limit_rps = servers * theory.throughput_rps(times, cuts, BATCH)
        served_rps, latency_s = np.transpose([served(share * limit_rps) for share in SHARES])
        worst = max(worst, *np.abs(served_rps / (np.minimum(SHARES, 1.0) * limit_rps) - 1))
        worst_low = max(worst_low, abs(latency_s[0] / theory.latency_s(times, cuts, BATCH, SHARES[0] * limit_rps) - 1))
        found = {"limit_rps": limit_rps, "served_rps": served_rps.tolist(), "latency_s": latency_s.tolist()}
        by_bins[str(bins)] = found | {"least_s": min(latency_s), "busy_s": served(0.95 * one_rps)[1]}
    assert worst < (0.05 if quick else 0.02), by_bins
    ratios = {name: by_bins["2"][f"{name}_s"] / by_bins["1"][f"{name}_s"] for name in ("least", "busy")}
    about = {"batch": BATCH, "servers": servers, "shares": SHARES, "busy_rps": 0.95 * one_rps, "curves": by_bins}
    return {
        f"multibin.{lengths}_saturation_error_max": _row(worst, "relative", 0.02, **about),
        f"multibin.{lengths}_low_rate_error_max": _row(worst_low, "relative", 0.02, share=SHARES[0]),
        f"multibin.{lengths}_busy_latency": _row(ratios["busy"], "2 bins over 1", 1.0),
        f"multibin.{lengths}_least_latency": _row(ratios["least"], "2 bins over 1", math.nan if servers == 1 else 1.0),
    }


def shortest(_shared: Path, quick: bool) -> Rows:
    """Compare shortest batch first with first formed, first served (Section 3): uniform times, one server, batch 8."""
    by_bins = {}
    for bins in BINS[:-1]:
        cuts, latency_s = theory.uniform_optimal(TIMES, bins), {"first": [], "shortest": []}
        rate_rps = 0.9 * theory.throughput_rps(TIMES, cuts, BATCH)
        given = {"rate_rps": rate_rps, "requests": _requests(quick), "seeds": range(3)}
        expected = _mean(theory.runs(TIMES, cuts, BATCH, **given), "latency_s")
        for run in theory.runs(TIMES, cuts, BATCH, servers=None, **given):  # full at once under every order
            formed_s, end_s = np.unique(np.stack([run.formed_s, run.end_s])[:, run.served], axis=1)
            for name, key in (("first", formed_s), ("shortest", end_s - formed_s)):
                latency_s[name].append(run.latency_s + np.mean(waiting_s(formed_s, end_s - formed_s, key)))
        mean_s = {name: float(np.mean(of)) for name, of in latency_s.items()}
        assert abs(mean_s["first"] / expected - 1) < 1e-9, (bins, mean_s, expected)
        by_bins[str(bins)] = mean_s
    ratios = [of["shortest"] / of["first"] for of in by_bins.values()]
    return {"multibin.shortest_batch_latency": _row(max(ratios), "of first formed", 1.0, load=0.9, mean_s=by_bins)}


def waiting_s(formed_s: np.ndarray, batch_s: np.ndarray, key: np.ndarray) -> list[float]:
    """Return the seconds that each batch waits for one server, which takes the smallest key of the full batches."""
    free_s, at, full, waits = 0.0, 0, [], []
    while at < len(formed_s) or full:
        free_s = free_s if full else max(free_s, formed_s[at])
        while at < len(formed_s) and formed_s[at] <= free_s:
            heappush(full, (key[at], at))
            at += 1
        batch = heappop(full)[1]
        waits.append(free_s - formed_s[batch])
        free_s += batch_s[batch]
    return waits


def robustness(_shared: Path, quick: bool) -> Rows:
    """Check Figure 8: throughput under errors into neighbouring bins, simulated against the exact mixture."""
    worst, curves, one = 0.0, {}, theory.throughput_rps(TIMES, [], BATCH)
    for bins in (2, 4, 8, 16, 32):
        cuts, points = theory.uniform_optimal(TIMES, bins), []
        for p in ERRORS:
            wrong = theory.neighbours(bins, p)
            given = {"requests": _requests(quick), "seeds": range(SEEDS), "confusion": wrong}
            mean = _mean(theory.runs(TIMES, cuts, BATCH, **given), "throughput_rps")
            exact = theory.throughput_rps(TIMES, cuts, BATCH, wrong)
            points.append({"p": p, "exact_rps": exact, "simulated_rps": mean, "gain": exact / one - 1})
            worst = max(worst, abs(mean / exact - 1))
        assert all(point["gain"] >= -1e-12 for point in points), "bins must not hurt"
        curves[str(bins)] = points
    assert worst < (0.03 if quick else 0.01), curves
    return {"multibin.robustness_error_max": _row(worst, "relative", 0.01, batch=BATCH, curves=curves)}


def exponential(_shared: Path, quick: bool) -> Rows:
    """Check Appendix A.4: the bound holds, and the recursion's boundaries beat equal masses."""
    requests, grid = _requests(quick), {}
    for batch, bins in itertools.product((8, 32, 128), (2, 4, 8, 16, 32, 64)):
        cuts = theory.exponential_recursion(EXPONENTIAL, batch, bins)
        served = theory.runs(EXPONENTIAL, cuts, batch, requests=requests, seeds=range(SEEDS))
        rules = {"exact_s": cuts, "equal_mass_s": theory.equal_mass(EXPONENTIAL, bins)}
        of = {name: theory.expected_batch_s(EXPONENTIAL, some, batch) for name, some in rules.items()}
        of |= {"simulated_s": float(np.mean([batch / one.throughput_rps for one in served]))}
        of["bound_s"] = theory.exponential_least_bound_s(EXPONENTIAL, batch, bins)
        assert of["exact_s"] <= of["bound_s"] * (1 + 1e-12), (batch, bins)
        rarest = EXPONENTIAL.masses(cuts).min() * requests / batch  # batches of the rarest bin
        assert rarest < 50 or abs(of["simulated_s"] / of["exact_s"] - 1) < 0.03, (batch, bins, of)
        grid[f"B={batch} k={bins}"] = of
    bound = max(of["exact_s"] / of["bound_s"] for of in grid.values())
    gain = min(of["equal_mass_s"] / of["exact_s"] - 1 for of in grid.values())
    return {
        "multibin.exponential_over_bound": _row(bound, "of bound", 1.0, rate_per_s=EXPONENTIAL.rate_per_s, grid=grid),
        "multibin.exponential_over_equal_mass": _row(gain, "gain at least", 0.0, "higher"),
    }


def gsm8k(shared: Path, quick: bool) -> Rows:
    """Return gains with known lengths by number of bins, batch 8, all at once, on recorded answers to GSM8K."""
    requests, by_model = _requests(quick), {}
    for answered in ANSWERS:
        times, line = answers(shared, answered)
        by_bins = {}

        def served_rps(cuts: Any, times: theory.SampledTimes = times) -> float:
            return _mean(theory.runs(times, cuts, BATCH, requests=requests, seeds=range(2)), "throughput_rps")

        one_rps = served_rps([])
        for bins in (2, 4, 8, 16, 32):
            rules = {"equal_mass": theory.equal_mass(times, bins), "learned": theory.learned(times, BATCH, bins)}
            found = {name: theory.gain(times, cuts, BATCH) for name, cuts in rules.items()}
            simulated = {name: served_rps(cuts) / one_rps - 1 for name, cuts in rules.items()}
            by_bins[str(bins)] = found | {f"simulated_{name}": gain for name, gain in simulated.items()}
        capacity = theory.capacity_rps(times, BATCH) / theory.throughput_rps(times, [], BATCH) - 1
        by_model[answered] = line | {"gain": by_bins, "infinitely_many_bins": capacity}
    phi = by_model[PHI]["gain"]["32"]
    assert all(abs(phi[rule] - phi[f"simulated_{rule}"]) < 0.03 for rule in ("equal_mass", "learned")), phi
    details = {"batch": BATCH, "max_tokens": MAX_TOKENS, "by_model": by_model}
    return {
        "multibin.gain_32_bins": _row(phi["simulated_learned"], "gain", 0.63, "higher", **details),
        "multibin.gain_32_bins_equal_mass": _row(phi["simulated_equal_mass"], "gain", 0.6, "higher"),
    }


@lru_cache
def answers(shared: Path, answered: str) -> tuple[theory.SampledTimes, dict[str, Any]]:
    """Return service times of one model's answers, linear in their tokens, and the line."""
    rows = _texts.lines(shared / GSM8K / f"{answered}.jsonl.gz")
    tokens = np.array([min(MAX_TOKENS, estimated_tokens(row["output"])) for row in rows])
    fixed_s, token_s = line_of(ANSWERS[answered], float(tokens.mean()))
    line = {"answers": len(tokens), "tokens_mean": float(tokens.mean()), "fixed_s": fixed_s, "token_s": token_s}
    return theory.SampledTimes(fixed_s + token_s * tokens), line


@lru_cache
def line_of(model: str, output_tokens: float) -> tuple[float, float]:
    """Return (seconds of the prefill, seconds per token) of a static batch on an A100-80GB, by the roofline."""
    spec, gpu, node = catalog.model(model), catalog.gpu("A100-80GB"), catalog.node("dgx-a100")
    given = (spec, gpu, node, Parallelism(), EngineLimits())
    decode = cost.operators(*given, decode_seqs=BATCH, kv_tokens=int(BATCH * (PROMPT_TOKENS + output_tokens / 2)))
    prefill = cost.operators(*given, prefill=[(PROMPT_TOKENS, 0)] * BATCH)
    return sum(row.seconds for row in prefill), sum(row.seconds for row in decode)


def predictor(shared: Path, _quick: bool) -> Rows:
    """Return the gain that remains under the paper's confusion, and that of another paper's predictor."""
    details: dict[str, Any] = {"gsm8k": predicted_gains(answers(shared, PHI)[0])}
    if not (shared / VICUNA).is_file():  # the paper's share is of this data set
        return {}
    with gzip.open(shared / VICUNA, "rt", encoding="utf-8") as file:
        rows = [(float(r["output_token_length"]), int(r["pred_5class"])) for r in csv.DictReader(file)]
    tokens, classes = (np.array(column) for column in zip(*(row for row in rows if row[0] > 0), strict=True))
    fixed_s, token_s = line_of("vicuna-13b", float(tokens.mean()))
    service_s, batch_s, known_classes = fixed_s + token_s * tokens, 0.0, np.unique(classes)
    chat = theory.SampledTimes(service_s)
    for c in known_classes:
        times = theory.SampledTimes(service_s[classes == c])
        batch_s += np.mean(classes == c) * theory.expected_batch_s(times, [], BATCH)
    known = theory.gain(chat, theory.equal_mass(chat, len(known_classes)), BATCH)
    gains = {"predicted": theory.expected_batch_s(chat, [], BATCH) / batch_s - 1, "known, as many bins": known}
    details["lmsys"] = predicted_gains(chat) | {"ssjf 5 classes": gains}
    four = details["lmsys"]["4"]
    share = min(four["neighbours first"], four["spread evenly"]) / four["known"]
    return {"multibin.kept_by_bert_4_bins": _row(share, "of the gain", 0.178, "higher", **details)}


def predicted_gains(times: theory.SampledTimes) -> dict[str, dict[str, float]]:
    """Return gains over one bin by number of bins: known lengths, and the paper's accuracies."""
    # Its matrices are unpublished: errors into neighbours are the best case, errors spread evenly about the worst.
    found = {}
    for bins, accuracy in ACCURACY.items():
        cuts, spread = theory.equal_mass(times, bins), np.full((bins, bins), (1 - accuracy) / (bins - 1))
        np.fill_diagonal(spread, accuracy)
        near = theory.confusion_of_accuracy(bins, accuracy)
        errors = {"known": None, "neighbours first": near, "spread evenly": spread}
        found[str(bins)] = {name: theory.gain(times, cuts, BATCH, wrong) for name, wrong in errors.items()}
    return found


def engine(shared: Path, quick: bool) -> Rows:
    """Compare the event engine with static batches and bins to the batch server, at 10 ms a step and the roofline's."""
    requests = 1000 if quick else 4000
    times, line = answers(shared, PHI)
    fixed_s, token_s = line["fixed_s"], line["token_s"]
    known = np.rint((np.asarray(times.values_s) - fixed_s) / token_s).astype(np.int64)
    tokens = np.random.default_rng(0).choice(known, requests)

    def engine_rps(deployment: Deployment) -> float:
        work = Workload(np.zeros(requests), np.full(requests, PROMPT_TOKENS), tokens, predicted_tokens=tokens)
        return requests / float(simulate(work, deployment).requests.finished_s.max())

    def server_rps(edges: np.ndarray, fixed_s: float, token_s: float) -> float:
        sizes = {"batch": BATCH, "num_bins": len(edges) + 1, "drain": True}
        put = theory.bin_of(tokens, edges)
        return theory.serve(np.zeros(requests), fixed_s + token_s * tokens, put, **sizes).throughput_rps

    same, roofline = {}, {}
    for bins in (1, 4, 8, 32):
        edges = np.rint((theory.equal_mass(times, bins) - fixed_s) / token_s)
        binning = f"bins(boundaries={(edges + 0.5).tolist()})"
        scheduler = Scheduler(rank="completed_batches", batching="static_bins", memory="paged", binning=binning)
        limits = EngineLimits(max_num_seqs=BATCH, max_num_batched_tokens=8192)
        own = deploy("phi-3.5-mini", "A100-80GB", node="dgx-a100", limits=limits, scheduler=scheduler)
        names = [one.name for one in fields(own.cost) if isinstance(getattr(own.cost, one.name), np.ndarray)]
        equal = {name: np.zeros_like(getattr(own.cost, name)) for name in names if name.endswith("_s")}
        equal["host_s"] = np.full_like(own.cost.host_s, STEP_S)
        same[bins] = engine_rps(replace(own, cost=replace(own.cost, **equal))), server_rps(edges, 0.0, STEP_S)
        roofline[bins] = engine_rps(own), server_rps(edges, fixed_s, token_s)
    exact, close = (max(abs(e / s - 1) for e, s in one.values()) for one in (same, roofline))
    assert exact < 1e-9, same
    assert close < 0.05, roofline
    gains = {}
    for bins, rates in roofline.items():
        gain = {f"{name}_gain": rates[i] / roofline[1][i] - 1 for i, name in enumerate(("engine", "server"))}
        gains[str(bins)] = gain | {"theory_gain": theory.gain(times, theory.equal_mass(times, bins), BATCH)}
    details = {"requests": requests, "batch": BATCH, "prompt_tokens": PROMPT_TOKENS, "by_bins": gains}
    return {
        "multibin.engine_error": _row(exact, "relative", 1e-9, step_s=STEP_S),
        "multibin.engine_roofline_error": _row(close, "relative", 0.05, **details),
    }
