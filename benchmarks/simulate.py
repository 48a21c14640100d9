"""How fast the engine simulates.

The workload is Chat-1M on Llama-2-70B, TP 4 on A100s, a unified budget of 512 tokens, at about 85 % of the load at
which the queue grows without end. Compilation does not count (cold.compile_s is in start.py). Figures are per CPU
second of one thread.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

import numpy as np
from _harness import Row, cpu_seconds, machine, parser, show

from lengthwise import EngineLimits, Poisson, deploy, policy, preset, simulate
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.records import Records
from lengthwise.schema.workload import Workload

LIMITS = EngineLimits(max_num_seqs=256, max_num_batched_tokens=512)
LOAD = 0.85


@policy.rank
def shortest_prompt_with_aging(prompt_tokens, arrival_s):
    """Rank of a user's own."""
    return prompt_tokens + 50.0 * arrival_s


def chat(requests: int, rate_rps: float) -> Workload:
    """Return requests of Chat-1M at a Poisson rate."""
    return preset("chat-1m").generate(requests, Poisson(rate_rps), seed=0)


def check(records: Records, workload: Workload) -> None:
    """Check that every request finished with exactly its tokens, at a plausible load."""
    assert (records.requests.status == 0).all()
    assert (records.requests.output_tokens == workload.output_tokens).all()
    busy = records.totals.busy_s.mean() / records.end_s
    assert 0.5 < busy <= 1.0, busy


def speed(name: str, deployment: Deployment, requests: int, repeats: int, target: float) -> Row:
    """Measure simulated requests per CPU second, at a share of the rate at which a saturated deployment finishes."""
    saturated = simulate(chat(6_000 * deployment.parallel.replicas, 1e4), deployment, keep_steps=0)
    done = np.sort(saturated.requests.finished_s)
    low, high = int(0.2 * len(done)), int(0.8 * len(done))
    rate_rps = LOAD * (high - low) / (done[high] - done[low])
    workload = chat(requests, rate_rps)
    records = simulate(workload, deployment, keep_steps=0)
    check(records, workload)
    all_s = cpu_seconds(lambda: simulate(workload, deployment, keep_steps=0), repeats)
    median_s = statistics.median(all_s)
    steps = int(records.totals.steps.sum())
    mean_batch = float(records.series.seqs_s.sum() / records.series.step_s.sum())
    details = {"requests": requests, "rate_rps": rate_rps, "ns_per_step": 1e9 * median_s / steps}
    details |= {"mean_batch": mean_batch, "machine": machine()}
    spread = (requests / max(all_s), requests / min(all_s))
    return Row(name, requests / median_s, "1/s", target, "higher", spread, details)


def main() -> None:
    """Measure and print all figures."""
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
    show(rows, as_json=args.json)


if __name__ == "__main__":
    main()
