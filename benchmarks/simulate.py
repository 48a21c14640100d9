"""How fast the engine simulates, how time and memory grow, and what renewed ranks cost (``rerank``, for lengths.py).

The workload is Chat-1M on Llama-2-70B, TP 4 on A100s, a unified budget of 512 tokens, at about 85 % of the load at
which the queue grows without end. Figures are per CPU second of one thread, without compilation.
"""

import math
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from _harness import Row, cpu_seconds, fresh_process, machine, parser, show

from lengthwise import EngineLimits, Poisson, deploy, policy, preset, simulate
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.records import Records
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
    busy = records.totals.busy_s.mean() / records.end_s
    assert 0.5 < busy <= 1.0, busy


def speed(name: str, deployment: Deployment, requests: int, repeats: int, target: float) -> Row:
    """Measure simulated requests per CPU second, at a share of the rate at which a saturated deployment finishes."""
    saturated = simulate(chat(6_000 * deployment.parallel.replicas, 1e4), deployment, max_log_steps=0)
    done = np.sort(saturated.requests.finished_s)
    low, high = int(0.2 * len(done)), int(0.8 * len(done))
    rate_rps = LOAD * (high - low) / (done[high] - done[low])
    workload = chat(requests, rate_rps)
    records = simulate(workload, deployment, max_log_steps=0)
    check(records, workload)
    all_s = cpu_seconds(lambda: simulate(workload, deployment, max_log_steps=0), repeats)
    median_s = statistics.median(all_s)
    steps = int(records.totals.steps.sum())
    mean_batch = float(records.series.seqs_s.sum() / records.series.step_s.sum())
    details = {"requests": requests, "rate_rps": rate_rps, "ns_per_step": 1e9 * median_s / steps}
    details |= {"mean_batch": mean_batch, "machine": machine()}
    spread = (requests / max(all_s), requests / min(all_s))
    return Row(name, requests / median_s, "1/s", target, "higher", spread, details)


GROWTH = """
import json, resource, sys, time
sys.path.insert(0, {folder!r})
from simulate import LIMITS, chat, check
from lengthwise import deploy, simulate
deployment = deploy("llama-2-70b", "A100-80GB", tp=4, limits=LIMITS)
simulate(chat(100, 1.0), deployment, max_log_steps=0)
workload = chat({requests}, {rate})
start_s = time.process_time()
records = simulate(workload, deployment, max_log_steps=0)
seconds = time.process_time() - start_s
check(records, workload)
print(json.dumps([seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20]))
"""


def growth(rate_rps: float, sizes: list[int]) -> list[Row]:
    """Measure seconds and memory against the number of requests, each in a process of its own."""
    folder = str(Path(__file__).parent)
    points = [fresh_process(GROWTH.format(folder=folder, requests=n, rate=rate_rps)) for n in sizes]
    exponent = float(np.polyfit(np.log(sizes), np.log([seconds for seconds, _ in points]), 1)[0])
    details = {"points": dict(zip(sizes, points, strict=True)), "machine": machine()}
    rss_name = f"simulate.rss_gib_1e{round(math.log10(sizes[-1]))}"
    return [
        Row("simulate.growth_exponent", exponent, "", 1.1, "lower", details=details),
        Row(rss_name, points[-1][1], "GiB", 4.0, "lower"),
    ]


# The cost of predictions that change the order
WINDOW_TOKENS = 50
RATES_RPS = {"well below capacity": 2.9, "at capacity": 3.6, "overload": 4.5}
SCHEDULERS = ("srtf", "isrtf", "gittins", "elis", "hrrn")


def rerank(_shared: Path, quick: bool) -> dict[str, Any]:
    """Return simulated requests per second of each scheduler over those of first come, first served, paired.

    Without a bound on waiting, the cost of an overload grows with the queue: it is a row of its own.
    """
    requests = _predicted(preset("chat-1m").generate(10_000 if quick else 50_000, Poisson(1.0), seed=0))
    fcfs, found = _unbounded("vllm_v1"), {}
    for load, rate_rps in RATES_RPS.items():
        workload = replace(requests, arrival_s=requests.arrival_s / rate_rps)
        for name in SCHEDULERS:
            other = _unbounded(name)
            _, preemptions = _timed(workload, other)
            pairs = [(_timed(workload, fcfs)[0], _timed(workload, other)[0]) for _ in range(2 if quick else 3)]
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


def _timed(workload: Workload, deployment: Deployment) -> tuple[float, int]:
    """Return the CPU seconds of a simulation and its number of preemptions."""
    started_s = time.process_time()
    records = simulate(workload, deployment, max_log_steps=0)
    elapsed_s = time.process_time() - started_s
    assert np.isfinite(records.requests.finished_s).all(), "every request must finish"
    return elapsed_s, int(records.requests.preemptions.sum())


def main() -> None:
    args = parser(__doc__).parse_args()
    requests, repeats = (100_000, 3) if args.quick else (1_000_000, 5)
    one = deploy("llama-2-70b", "A100-80GB", tp=4, limits=LIMITS)
    piped = deploy("llama-2-70b", "A100-80GB", tp=4, pp=2, limits=LIMITS)
    routed = replace(policy.scheduler("vllm_v1"), router="least_outstanding")
    many = deploy("llama-2-70b", "A100-80GB", tp=4, replicas=64, limits=LIMITS, scheduler=routed)
    own = replace(one, scheduler=replace(one.scheduler, rank=shortest_prompt_with_aging))
    rows = [
        speed("simulate.chat.requests_per_s", one, requests, repeats, 300_000),
        speed("simulate.pp.requests_per_s", piped, requests, repeats, 100_000),
        speed("simulate.routed64.requests_per_s", many, requests, repeats, 100_000),
        speed("simulate.user_rank.requests_per_s", own, requests, repeats, 100_000),
    ]
    sizes = [10_000, 100_000, 1_000_000] + [10_000_000] * (not args.quick)
    show([*rows, *growth(rows[0].details["rate_rps"], sizes)], as_json=args.json)


if __name__ == "__main__":
    main()
