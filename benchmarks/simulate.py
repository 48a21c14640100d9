"""How fast the engine simulates, how time and memory grow, and what renewed ranks cost (``rerank``, for lengths.py).

The workload is Chat-1M on Llama-2-70B, TP 4 on A100s, a unified budget of 512 tokens, at about 85 % of the load at
which the queue grows without end. Figures are per CPU second of one thread, without compilation.
"""

import math
import resource
import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from _harness import cpu_seconds, fresh_process, machine, summary
from _sections import Sections

from lengthwise import EngineLimits, Poisson, Records, deploy, policy, preset, simulate
from lengthwise.schema.deployment import Deployment, Parallelism
from lengthwise.schema.workload import Predictions, Workload

LIMITS = EngineLimits(max_num_seqs=256, max_num_batched_tokens=512)
LOAD = 0.85


@policy.rank
def shortest_prompt_with_aging(prompt_tokens, arrival_s):
    return prompt_tokens + 50.0 * arrival_s


def chat(requests: int, rate_rps: float) -> Workload:
    return preset("chat-1m").generate(requests, Poisson(rate_rps), seed=0)


def check(records: Records, workload: Workload) -> None:
    """Check that every request finished with exactly its tokens, at a plausible load."""
    assert (records.requests.status == 0).all()
    assert (records.requests.output_tokens == workload.output_tokens).all()
    assert 0.5 < records.totals.busy_s.mean() / records.end_s <= 1.0


def stable_rps(deployment: Deployment) -> float:
    """Return a share of the rate at which a saturated deployment finishes requests."""
    saturated = simulate(chat(6_000 * deployment.parallel.ranks, 1e4), deployment, max_log_steps=0)
    done = np.sort(saturated.requests.finished_s)
    low, high = int(0.2 * len(done)), int(0.8 * len(done))
    return LOAD * (high - low) / (done[high] - done[low])


def deployments() -> dict[str, Deployment]:
    """Return the deployments whose simulation is timed."""
    one = deploy("llama-2-70b", "A100-80GB", tp=4, limits=LIMITS)
    routed = replace(policy.scheduler("vllm_v1"), router="least_outstanding")
    return {
        "chat": one,
        "pp": deploy("llama-2-70b", "A100-80GB", tp=4, pp=2, limits=LIMITS),
        "routed64": deploy("llama-2-70b", "A100-80GB", tp=4, replicas=64, limits=LIMITS, scheduler=routed),
        "ranks8": replace(one, parallel=Parallelism(4, dp=8), cost=replace(one.cost, shared_s=one.cost.layer_s / 8)),
        "user_rank": replace(one, scheduler=replace(one.scheduler, rank=shortest_prompt_with_aging)),
    }


def speed(_shared: Path, quick: bool, name: str) -> dict[str, Any]:
    """Return simulated requests per CPU second of a deployment under a load that it holds."""
    deployment, requests = deployments()[name], 100_000 if quick else 1_000_000
    rate_rps = stable_rps(deployment)
    workload = chat(requests, rate_rps)
    records = simulate(workload, deployment, max_log_steps=0)
    check(records, workload)
    all_s = cpu_seconds(lambda: simulate(workload, deployment, max_log_steps=0), 3 if quick else 5)
    ns_per_step = 1e9 * statistics.median(all_s) / int(records.totals.steps.sum())
    mean_batch = float(records.series.seqs_s.sum() / records.series.step_s.sum())
    details = {"requests": requests, "rate_rps": rate_rps, "ns_per_step": ns_per_step, "mean_batch": mean_batch}
    row = f"{'deploy' if name == 'ranks8' else f'simulate.{name}'}.requests_per_s"
    return {row: summary([requests / seconds for seconds in all_s]) | details | {"machine": machine()}}


def grown(requests: int, rate_rps: float) -> tuple[float, float]:
    """Return the CPU seconds of a simulation, and the GiB of memory that this process has used."""
    deployment, done = deploy("llama-2-70b", "A100-80GB", tp=4, limits=LIMITS), list[Records]()
    simulate(chat(100, 1.0), deployment, max_log_steps=0)  # loads the compiled code
    workload = chat(requests, rate_rps)
    (seconds,) = cpu_seconds(lambda: done.append(simulate(workload, deployment, max_log_steps=0)), 1)
    check(done[0], workload)
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def growth(_shared: Path, quick: bool) -> dict[str, Any]:
    """Return how seconds grow with the number of requests, and the memory of most, each in a process of its own."""
    folder, rate_rps = str(Path(__file__).parent), stable_rps(deployments()["chat"])
    sizes = [10_000, 100_000, 1_000_000] + [10_000_000] * (not quick)
    code = f"import json, sys; sys.path.insert(0, {folder!r}); from simulate import grown; print(json.dumps(grown"
    points = [fresh_process(f"{code}({n}, {rate_rps})))") for n in sizes]
    exponent = float(np.polyfit(np.log(sizes), np.log([seconds for seconds, _ in points]), 1)[0])
    by_size = {str(n): of for n, of in zip(sizes, points, strict=True)}
    return {
        "simulate.growth_exponent": {"value": exponent, "points": by_size, "machine": machine()},
        f"simulate.rss_gib_1e{round(math.log10(sizes[-1]))}": {"value": points[-1][1], "unit": "GiB"},
    }


# The cost of predictions that change the order
WINDOW_TOKENS = 50
RATES_RPS = {"well below capacity": 2.9, "at capacity": 3.6, "overload": 4.5}
SCHEDULERS = ("srtf", "isrtf", "gittins", "elis", "hrrn")


def rerank(_shared: Path, quick: bool) -> dict[str, Any]:
    """Return simulated requests per second of each scheduler over those of first come, first served, paired."""
    # Without a bound on waiting, the cost of an overload grows with the queue: it is a row of its own.
    requests = _predicted(preset("chat-1m").generate(10_000 if quick else 50_000, Poisson(1.0), seed=0))
    fcfs, found = _unbounded("vllm_v1"), {}
    for load, rate_rps in RATES_RPS.items():
        workload = replace(requests, arrival_s=requests.arrival_s / rate_rps)
        for name in SCHEDULERS:
            runs = [partial(simulate, workload, one, max_log_steps=0) for one in (fcfs, _unbounded(name))]
            done = [run().requests for run in runs]
            assert all(np.isfinite(requests.finished_s).all() for requests in done), "every request must finish"
            preemptions = int(done[1].preemptions.sum())
            pairs = [[cpu_seconds(run, 1)[0] for run in runs] for _ in range(2 if quick else 3)]
            ratios = [fcfs_s / other_s for fcfs_s, other_s in pairs]
            about = {"requests_per_s": len(workload) / statistics.median(other_s for _, other_s in pairs)}
            about |= {"range": [min(ratios), max(ratios)], "preemptions": preemptions}
            found[f"{name}, {load}"] = about | {"relative_speed": statistics.median(ratios)}
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


def _unbounded(scheduler: str) -> Deployment:
    unbounded = replace(policy.scheduler(scheduler), max_wait_s=math.inf)
    return deploy("llama-2-70b", "A100-80GB", tp=4, limits=EngineLimits(max_num_seqs=64), scheduler=unbounded)


SECTIONS = Sections("simulate", __doc__)

if __name__ == "__main__":
    SECTIONS.main()
