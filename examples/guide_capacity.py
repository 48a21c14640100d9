"""How many requests a second can Llama-2-70B on four A100s take, by workload, scheduler, batch and chunk?

The question of Vidur's Figure 1, see docs/guide-compare-schedulers.md. Capacity as Vidur defines it: the
largest Poisson rate at which 99 % of the requests wait less than 5 s before they are scheduled.

    python examples/guide_capacity.py                                   # about a minute on one core
    python examples/guide_capacity.py --requests 500 --batches 64 256   # ten seconds
    python examples/guide_capacity.py --tp 2                            # on half the GPUs
    python examples/guide_capacity.py --cost vidur:PROFILES             # on Vidur's data/profiling
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from lengthwise import Deployment, EngineLimits, Poisson, Scheduler, Summary, deploy, preset, simulate, summarize
from lengthwise.policy import batching

WORKLOADS = ("chat-1m", "arxiv-4k", "bwb-4k")
LONGEST_WAIT_S = 5.0
TOLERANCE = 0.02


@batching
def orca_plus(decodes, token_budget, max_num_seqs):
    """Return the limits of Orca's batches: decodes and complete prompts, with a bound on the prompts' tokens."""
    return max_num_seqs, decodes + token_budget, 0


SCHEDULERS = {
    "vLLM v0": ("vllm_v0", 4096),
    "Orca+": (Scheduler(batching=orca_plus, memory="paged"), 4096),
    "Sarathi 512": ("sarathi", 512),
    "Sarathi 1024": ("sarathi", 1024),
    "Sarathi 2048": ("sarathi", 2048),
}


def deployed(scheduler: str, batch: int, tp: int, cost: str) -> Deployment:
    """Return the deployment with one of the schedulers, at most ``batch`` sequences at a time."""
    policy, tokens = SCHEDULERS[scheduler]
    limits = EngineLimits(max_num_seqs=batch, max_num_batched_tokens=tokens, max_model_len=4096)
    return deploy("llama-2-70b", "A100-80GB", tp=tp, limits=limits, scheduler=policy, cost=cost)


def at_rate(deployment: Deployment, workload: str, rate_rps: float, requests: int, seed: int) -> Summary:
    """Return the summary of one run. The same seed gives every configuration the same requests."""
    arriving = preset(workload).generate(requests, Poisson(rate_rps), seed=seed)
    return summarize(simulate(arriving, deployment), deployment)


def capacity_rps(deployment: Deployment, workload: str, requests: int, seed: int) -> float:
    """Return the largest rate that keeps the 99th percentile of the wait below 5 s, within 2 %."""

    def keeps_up(rate_rps: float) -> bool:
        summary = at_rate(deployment, workload, rate_rps, requests, seed)
        return summary.queueing_delay_s.p99.value <= LONGEST_WAIT_S

    low, high = 0.0, 1.0
    while keeps_up(high):
        low, high = high, 2 * high
    while high - low > TOLERANCE * high:
        middle = (low + high) / 2
        low, high = (middle, high) if keeps_up(middle) else (low, middle)
    return low


def rows(workload: str, requested: argparse.Namespace) -> Iterator[tuple[str, int, float, Summary]]:
    """Yield (scheduler, batch, capacity, summary at 85 % of it) of every configuration."""
    for scheduler in SCHEDULERS:
        for batch in requested.batches:
            deployment = deployed(scheduler, batch, requested.tp, requested.cost)
            rate_rps = capacity_rps(deployment, workload, requested.requests, requested.seed)
            usual = at_rate(deployment, workload, 0.85 * rate_rps, requested.requests, requested.seed)
            yield scheduler, batch, rate_rps, usual


def main() -> None:
    """Print a table of all configurations for each workload, the best marked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--workloads", nargs="+", default=WORKLOADS, choices=WORKLOADS)
    parser.add_argument("--batches", nargs="+", type=int, default=[32, 64, 128, 256, 512])
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cost", default="roofline")
    arguments = parser.parse_args()
    for workload in arguments.workloads:
        print(f"{workload}: capacity, and TTFT and TBT at 85 % of it")  # noqa: T201 - its purpose
        table = list(rows(workload, arguments))
        best = max(rate_rps for _, _, rate_rps, _ in table)
        for scheduler, batch, rate_rps, usual in table:
            ttft_s, tbt_ms = usual.ttft_s.p90.value, 1e3 * usual.tbt_s.p99.value
            mark = "  <- best" if rate_rps == best else ""
            print(  # noqa: T201 - its purpose
                f"  {scheduler:12}  batch {batch:3}  {rate_rps:5.2f} requests/s"
                f"  TTFT p90 {ttft_s:5.2f} s  TBT p99 {tbt_ms:5.0f} ms{mark}"
            )


if __name__ == "__main__":
    main()
