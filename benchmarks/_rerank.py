"""Simulation speed when lengths are predicted again every 50 tokens and requests change places."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise import EngineLimits, Poisson, deploy, policy, preset, simulate
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.workload import Predictions, Workload

WINDOW_TOKENS = 50
RATES_RPS = {"well below capacity": 2.9, "at capacity": 3.6, "overload": 4.5}
SCHEDULERS = ("srtf", "isrtf", "gittins", "elis", "hrrn")


def figures(_shared: Path, quick: bool) -> dict[str, Any]:
    """Return simulated requests per second of each scheduler over those of first come, first served, paired.

    Without a bound on waiting, the cost of an overload grows with the queue: it is a row of its own.
    """
    requests = _predicted(preset("chat-1m").generate(10_000 if quick else 50_000, Poisson(1.0), seed=0))
    fcfs, found = _deployment("vllm_v1"), {}
    for load, rate_rps in RATES_RPS.items():
        workload = replace(requests, arrival_s=requests.arrival_s / rate_rps)
        for name in SCHEDULERS:
            other = _deployment(name)
            _, preemptions = _seconds(workload, other)
            pairs = [(_seconds(workload, fcfs)[0], _seconds(workload, other)[0]) for _ in range(2 if quick else 3)]
            ratios = [fcfs_s / other_s for fcfs_s, other_s in pairs]
            found[f"{name}, {load}"] = {
                "relative_speed": statistics.median(ratios),
                "range": [min(ratios), max(ratios)],
                "requests_per_s": len(workload) / statistics.median(other_s for _, other_s in pairs),
                "preemptions": preemptions,
            }
    rows = {}
    for row, overload in (("lengths.rerank_relative_speed", False), ("lengths.rerank_overload_relative_speed", True)):
        some = {name: of for name, of in found.items() if name.endswith("overload") == overload}
        slowest = min(some, key=lambda name: some[name]["relative_speed"])
        rows[row] = {"value": some[slowest]["relative_speed"], "slowest": slowest, "by_scheduler": some}
    return rows


def _predicted(workload: Workload) -> Workload:
    """Add remaining lengths predicted in every window, each time with a log-normal error of sigma 0.5."""
    rng, output = np.random.default_rng(1), workload.output_tokens
    rows = -(-output // WINDOW_TOKENS)
    start = np.concatenate([[0], np.cumsum(rows)])
    so_far = (np.arange(start[-1]) - np.repeat(start[:-1], rows)) * WINDOW_TOKENS
    remaining = np.maximum(1.0, (np.repeat(output, rows) - so_far) * rng.lognormal(0, 0.5, start[-1]))
    return replace(workload, predictions=Predictions(WINDOW_TOKENS, start, so_far + remaining, remaining))


def _deployment(scheduler: str) -> Deployment:
    unbounded = replace(policy.scheduler(scheduler), max_wait_s=math.inf)
    return deploy("llama-2-70b", "A100-80GB", tp=4, limits=EngineLimits(max_num_seqs=64), scheduler=unbounded)


def _seconds(workload: Workload, deployment: Deployment) -> tuple[float, int]:
    """Return the CPU seconds of a simulation and its number of preemptions."""
    started_s = time.process_time()
    records = simulate(workload, deployment, keep_steps=0)
    elapsed_s = time.process_time() - started_s
    assert np.isfinite(records.requests.finished_s).all(), "every request must finish"
    return elapsed_s, int(records.requests.preemptions.sum())
