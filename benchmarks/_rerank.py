"""How fast the kernel stays when lengths are predicted again every 50 tokens and requests change places."""

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


def figures(shared: Path | None, fast: bool) -> dict[str, Any]:
    """Simulated requests a second of each scheduler over those of first come, first served, paired.

    Without a bound on waiting: in overload whoever becomes overdue has the whole queue ranked anew, and
    ``hrrn`` has it at every step, so that their cost grows with the queue. Overload is a row of its own.
    """
    del shared
    requests = _predicted(preset("chat-1m").generate(10_000 if fast else 50_000, Poisson(1.0), seed=0))
    found: dict[str, Any] = {}
    for load, rate_rps in RATES_RPS.items():
        workload = replace(requests, arrival_s=requests.arrival_s / rate_rps)
        for name in SCHEDULERS:
            _seconds(workload, _deployment(name))
            found[f"{name}, {load}"] = _comparison(workload, name, repeats=2 if fast else 3)
    return {
        "lengths.rerank_relative_speed": _slowest({k: v for k, v in found.items() if "overload" not in k}),
        "lengths.rerank_overload_relative_speed": _slowest({k: v for k, v in found.items() if "overload" in k}),
    }


def _slowest(found: dict[str, Any]) -> dict[str, Any]:
    slowest = min(found, key=lambda k: found[k]["relative_speed"])
    return {"value": found[slowest]["relative_speed"], "slowest": slowest, "by_scheduler": found}


def _predicted(workload: Workload) -> Workload:
    """Remaining lengths told anew every window, each time wrong by a log-normal of sigma 0.5."""
    rng, output = np.random.default_rng(1), workload.output_tokens
    rows = -(-output // WINDOW_TOKENS)
    start = np.concatenate([[0], np.cumsum(rows)])
    so_far = (np.arange(start[-1]) - np.repeat(start[:-1], rows)) * WINDOW_TOKENS
    remaining = np.maximum(1.0, (np.repeat(output, rows) - so_far) * rng.lognormal(0, 0.5, start[-1]))
    return replace(workload, predictions=Predictions(WINDOW_TOKENS, start, so_far + remaining, remaining))


def _deployment(scheduler: str) -> Deployment:
    limits = EngineLimits(max_num_seqs=64)
    unbounded = replace(policy.scheduler(scheduler), max_wait_s=math.inf)
    return deploy("llama-2-70b", "A100-80GB", tp=4, limits=limits, scheduler=unbounded)


def _comparison(workload: Workload, name: str, repeats: int) -> dict[str, Any]:
    fcfs, other = _deployment("vllm_v1"), _deployment(name)
    pairs = [(_seconds(workload, fcfs)[0], _seconds(workload, other)) for _ in range(repeats)]
    preemptions = pairs[0][1][1]
    ratios = [fcfs_s / other_s for fcfs_s, (other_s, _) in pairs]
    return {
        "relative_speed": statistics.median(ratios),
        "range": [min(ratios), max(ratios)],
        "requests_per_s": len(workload) / statistics.median(other_s for _, (other_s, _) in pairs),
        "preemptions": preemptions,
    }


def _seconds(workload: Workload, deployment: Deployment) -> tuple[float, int]:
    started_s = time.process_time()
    records = simulate(workload, deployment, keep_steps=0)
    elapsed_s = time.process_time() - started_s
    assert np.isfinite(records.requests.finished_s).all(), "every request must finish"
    return elapsed_s, int(records.requests.preemptions.sum())
