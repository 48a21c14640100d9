"""Deployments that are textbook queues, and what the textbooks say of them.

Costs are made so that a step of T computed tokens takes a time that is known exactly; a request
of one output token is then one step, one of many outputs is a prefill and its decodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import gammaln
from scipy.stats import t as student

from lengthwise.engine import simulate
from lengthwise.schema.cost_tables import CostTables, grid_axis
from lengthwise.schema.deployment import Deployment, EngineLimits, KvPlan, Parallelism, Scheduler
from lengthwise.schema.records import Records
from lengthwise.schema.specs import AttentionSpec, FfnSpec, GpuSpec, LinkSpec, ModelSpec, NodeSpec
from lengthwise.schema.workload import Workload

LINK = LinkSpec("link", 1e9, 1e-6, "made up")
NODE = NodeSpec("node", 8, LINK, 8, LINK, LINK, "made up")
GPU = GpuSpec("gpu", {"bfloat16": 1e12}, 1e9, 1e11, 100.0, 10.0, 1.0, "made up", "made up")
MODEL = ModelSpec("queue", 1, 64, 1000, AttentionSpec(4, 4, 16), FfnSpec(128), 1 << 40)
BLOCK = 1024
FIRST_COME = Scheduler()


def step_costs(
    floor_s: float, token_s: float, *, stages: tuple[int, ...] = (1,), kv_token_s: float = 0.0
) -> CostTables:
    """A layer of a step of T tokens takes floor_s + token_s T, and kv_token_s for each cached token decoded over."""
    nothing, tokens = np.zeros(2), np.arange(2.0)
    kv = grid_axis(1 << 16)
    return CostTables(
        layer_s=floor_s + token_s * tokens,
        comm_s=nothing,
        embedding_s=nothing,
        send_s=nothing,
        head_s=nothing,
        host_s=nothing,
        prefill_s=np.zeros((2, 2)),
        decode_s=np.tile(kv_token_s * kv, (2, 1)),
        stage_layers=np.array(stages),
    )


def deployment(cost: CostTables, scheduler: Scheduler = FIRST_COME, **limits: Any) -> Deployment:
    """A replica (or ``replicas``) with memory and token budget for anything, of ``max_num_seqs``."""
    replicas, blocks = limits.pop("replicas", 1), limits.pop("num_blocks", 1 << 20)
    max_len = limits.pop("max_model_len", BLOCK << 20)
    limits = {"max_num_batched_tokens": 1 << 40, "block_size": BLOCK, "watermark": 0.0} | limits
    return Deployment(
        MODEL,
        GPU,
        NODE,
        Parallelism(1, len(cost.stage_layers), replicas),
        EngineLimits(**limits),
        scheduler,
        cost,
        KvPlan(blocks, limits["block_size"], 0.0, 0.0, 0.0, 0.0),
        max_model_len=max_len,
    )


def one_step_requests(arrival_s: Any, service_s: Any, token_s: float) -> Workload:
    """Requests of one step, as long as ``service_s`` to the nearest ``token_s``."""
    tokens = np.maximum(np.rint(service_s / token_s).astype(np.int64), 1)
    return Workload(arrival_s, tokens, np.ones(len(tokens), np.int64))


def poisson(rng: np.random.Generator, rate_rps: float, n: int) -> Any:
    """[n] arrival times."""
    return np.cumsum(rng.exponential(1 / rate_rps, n))


def waits(records: Records, warmup: int = 0) -> Any:
    """[n - warmup] seconds from arrival to the first step."""
    return (records.requests.scheduled_s - records.requests.arrival_s)[warmup:]


def check_mean(one_run: Callable[[np.random.Generator], float], expected: float, runs: int = 16) -> None:
    """Independent runs agree with a formula: inside the 99.9 % interval, which is a few per cent wide."""
    means = np.array([one_run(np.random.default_rng(seed)) for seed in range(runs)])
    half = student.ppf(0.9995, runs - 1) * means.std(ddof=1) / math.sqrt(runs)
    assert half < 0.08 * expected, f"too few requests to tell: {means.mean()} +- {half}"
    assert abs(means.mean() - expected) < half, f"{means.mean()} +- {half}, the formula says {expected}"


def run(workload: Workload, server: Deployment, seed: int = 0) -> Records:
    """Records of a run that keeps no log of more than ten thousand steps."""
    return simulate(workload, server, seed=seed, max_log_steps=10_000)


def pollaczek_khinchine(rate_rps: float, mean_s: float, square_s2: float) -> float:
    """Mean wait of M/G/1, first come first served (Pollaczek 1930, Khinchine 1932)."""
    return rate_rps * square_s2 / (2 * (1 - rate_rps * mean_s))


def shortest_first(rate_rps: float, sizes_s: Any, shares: Any) -> float:
    """Mean wait of M/G/1, shortest job first without preemption, for a service of few sizes.

    Each size is a priority class (Cobham 1954, Phipps 1956): the work ahead of class k comes from
    sizes up to k, and those below k overtake while it waits.
    """
    residual_s = rate_rps * np.sum(shares * sizes_s**2) / 2
    load = rate_rps * shares * sizes_s
    up_to = np.cumsum(load)
    return float(np.sum(shares * residual_s / ((1 - (up_to - load)) * (1 - up_to))))


def erlang_c(servers: int, offered: float) -> float:
    """Share of arrivals that wait in M/M/c (Erlang 1917); ``offered`` is rate x mean service."""
    below = sum(math.exp(k * math.log(offered) - gammaln(k + 1)) for k in range(servers))
    full = math.exp(servers * math.log(offered) - gammaln(servers + 1)) * servers / (servers - offered)
    return full / (below + full)


def gi_m_1_wait(transform: Callable[[float], float], service_rate: float) -> float:
    """Mean wait of GI/M/1; ``transform`` is the Laplace transform of the time between arrivals."""
    sigma = brentq(lambda s: transform(service_rate * (1 - s)) - s, 1e-12, 1 - 1e-9)
    return sigma / (service_rate * (1 - sigma))
