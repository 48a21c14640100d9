"""How fast the engine simulates, how much memory it takes, and how both grow.

The workload is Chat-1M on Llama-2-70B, TP 4 on A100s, a unified budget of 512 tokens, at about
85 % of the load at which the queue would grow without end. Compiling is left out here
(cold.compile_s is in start.py). Figures are per CPU second of one thread.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from _harness import Row, arguments, best_cpu_s, fresh_process, machine, show

from lengthwise import EngineLimits, Poisson, deploy, policy, preset, simulate
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.records import Records
from lengthwise.schema.workload import Workload

LIMITS = EngineLimits(max_num_seqs=256, max_num_batched_tokens=512)
LOAD = 0.85


@policy.rank
def shortest_prompt_with_aging(prompt_tokens, arrival_s):
    """A user's own rank."""
    return prompt_tokens + 50.0 * arrival_s


def chat(requests: int, rate_rps: float, seed: int = 0) -> Workload:
    return preset("chat-1m").generate(requests, Poisson(rate_rps), seed=seed)


def saturation_rps(deployment: Deployment) -> float:
    """Requests a second that leave a saturated deployment: the rate above which its queue grows."""
    records = simulate(chat(6_000 * deployment.parallel.replicas, 1e4), deployment, keep_steps=0)
    done = np.sort(records.requests.finished_s)
    low, high = int(0.2 * len(done)), int(0.8 * len(done))
    return (high - low) / (done[high] - done[low])


def check(records: Records, workload: Workload) -> None:
    """The answer, not only the speed: everything finished with exactly its tokens, at a sane load."""
    assert (records.requests.status == 0).all()
    assert (records.requests.output_tokens == workload.output_tokens).all()
    busy = records.totals.busy_s.mean() / records.end_s
    assert 0.5 < busy <= 1.0, busy


def speed(name: str, deployment: Deployment, requests: int, repeats: int, target: float) -> Row:
    rate = LOAD * saturation_rps(deployment)
    workload = chat(requests, rate)
    records = simulate(workload, deployment, keep_steps=0)
    check(records, workload)
    median, all_s = best_cpu_s(lambda: simulate(workload, deployment, keep_steps=0), repeats)
    steps = int(records.totals.steps.sum())
    details = {
        "requests": requests,
        "rate_rps": rate,
        "load": LOAD,
        "steps": steps,
        "ns_per_step": 1e9 * median / steps,
        "mean_batch": float(records.series.seqs_s.sum() / records.series.step_s.sum()),
        "busy_share": float(records.totals.busy_s.mean() / records.end_s),
        "machine": machine(),
    }
    spread = (requests / max(all_s), requests / min(all_s))
    return Row(name, requests / median, "1/s", target, "higher", spread, details)


GROWTH = """
import json, resource, time
import sys; sys.path.insert(0, "benchmarks")
from simulate import LIMITS, chat, check
from lengthwise import deploy, simulate
deployment = deploy("llama-2-70b", "A100-80GB", tp=4, limits=LIMITS)
simulate(chat(100, 1.0), deployment, keep_steps=0)
workload = chat({requests}, {rate})
start = time.process_time()
records = simulate(workload, deployment, keep_steps=0)
seconds = time.process_time() - start
check(records, workload)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
print(json.dumps({{"seconds": seconds, "peak_gib": peak}}))
"""


def growth(rate: float, sizes: list[int]) -> list[Row]:
    """Seconds and memory against the number of requests, each in a process of its own."""
    points = []
    for requests in sizes:
        out = fresh_process(GROWTH.format(requests=requests, rate=rate))["out"]
        points.append({"requests": requests, **out})
    x = [math.log(p["requests"]) for p in points]
    y = [math.log(p["seconds"]) for p in points]
    exponent = float(np.polyfit(x, y, 1)[0])
    details = {"points": points, "machine": machine()}
    return [
        Row("simulate.growth_exponent", exponent, "", 1.1, "lower", None, details),
        Row(f"simulate.rss_gib_1e{round(math.log10(sizes[-1]))}", points[-1]["peak_gib"], "GiB", 4.0, "lower"),
    ]


def main() -> None:
    args = arguments(__doc__ or "")
    requests, repeats = (100_000, 3) if args.fast else (1_000_000, 5)
    sizes = [10_000, 100_000, 1_000_000] if args.fast else [10_000, 100_000, 1_000_000, 10_000_000]
    one = deploy("llama-2-70b", "A100-80GB", tp=4, limits=LIMITS)
    piped = deploy("llama-2-70b", "A100-80GB", tp=4, pp=2, limits=LIMITS)
    many = deploy(
        "llama-2-70b",
        "A100-80GB",
        tp=4,
        replicas=64,
        limits=LIMITS,
        scheduler=replace(policy.scheduler("vllm_v1"), router="least_outstanding"),
    )
    own = replace(one, scheduler=replace(one.scheduler, rank=shortest_prompt_with_aging))
    rows = [
        speed("simulate.chat.requests_per_s", one, requests, repeats, 300_000),
        speed("simulate.pp.requests_per_s", piped, requests, repeats, 100_000),
        speed("simulate.routed64.requests_per_s", many, requests, repeats, 100_000),
        speed("simulate.user_rank.requests_per_s", own, requests, repeats, 100_000),
    ]
    rows += growth(rows[0].details["rate_rps"], sizes)
    show(rows, as_json=args.json)


if __name__ == "__main__":
    main()
