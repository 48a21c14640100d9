"""A measured point told as a closed loop of requests, and run through the engine."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from _silicon_rows import Point
from _silicon_steps import Host, RankOperators, tables

from lengthwise import cost, policy
from lengthwise.engine import simulate
from lengthwise.schema.cost_tables import CostTables
from lengthwise.schema.deployment import Deployment, EngineLimits, KvPlan, Parallelism
from lengthwise.schema.records import Records
from lengthwise.schema.workload import Workload

PROMPTS_A_CLIENT = 10
SHORTEST = 0.8
BLOCK = 16


@dataclass(frozen=True)
class Loop:
    """The load and the engine of a point: one rank's share of the clients."""

    clients: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    budget: int
    mixed: bool
    wait_steps: float

    @property
    def mean_prompt(self) -> float:
        """Tokens of a prompt."""
        return sum(self.prompt) / 2

    @property
    def mean_output(self) -> float:
        """Tokens of an output."""
        return sum(self.output) / 2


def loop_of(point: Point) -> Loop:
    """The load of a point: InferenceMAX draws lengths, a sweep keeps them fixed."""
    low = SHORTEST if point.inferencemax else 1.0
    return Loop(
        clients=max(1, math.ceil(point.concurrency / point.dp)),
        prompt=(max(1, int(low * point.isl)), point.isl),
        output=(max(1, int(low * point.osl)), point.osl),
        budget=max(8192, point.isl + point.osl if point.backend == "trtllm" else 0),
        mixed=point.backend != "sglang",
        wait_steps=_wait_steps(point),
    )


def _wait_steps(point: Point) -> float:
    """Steps for which a new request waits by the engine's settings, on average.

    SGLang is told to look for requests every 10 (below 16 clients) or 30 steps on B200. TensorRT-LLM is told to
    gather prompts for up to 20 steps with 1,024 tokens in and out on fewer than 8 GPUs (Llama), 40 (DeepSeek FP8,
    64 to 255 clients).
    """
    if not point.inferencemax:
        return 0.0
    if point.backend == "sglang" and point.gpu == "B200":
        return (10 if point.concurrency < 16 else 30) / 2
    if point.backend == "trtllm" and (point.isl, point.osl) == (1024, 1024):
        if point.model.startswith("llama"):
            return 20.0 if point.tp < 8 else 0.0
        return 40.0 if point.dtype == "fp8" and 64 <= point.concurrency < 256 else 0.0
    return 0.0


def simulated(point: Point, ops: RankOperators, host: Host) -> tuple[float, float]:
    """(mean TTFT, mean TPOT) in seconds from the point's own roofline."""
    loop = loop_of(point)
    length = loop.prompt[1] + loop.output[1] + 1
    return run(point, ops, tables(ops, host, loop.clients, loop.budget, length), host)


def run(point: Point, ops: RankOperators, table: CostTables, host: Host) -> tuple[float, float]:
    """(mean TTFT, mean TPOT) in seconds of the closed loop on these tables; waits by settings added."""
    loop = loop_of(point)
    deployment = _deployment(point, ops, table, loop)
    ttft_s, tpot_s = means(simulate(workload(loop), deployment, keep_steps=0))
    return ttft_s + loop.wait_steps * tpot_s + front_s(point, host), tpot_s


def means(records: Records) -> tuple[float, float]:
    """(mean TTFT, mean TPOT) of all requests in seconds."""
    requests = records.requests
    first = requests.first_token_s - requests.arrival_s
    several = requests.output_tokens > 1
    later = (requests.finished_s - requests.first_token_s)[several]
    return float(np.mean(first)), float(np.mean(later / (requests.output_tokens[several] - 1)))


def front_s(point: Point, host: Host) -> float:
    """What a request waits before the engine has it: its own way, and in the opening wave that of others.

    All clients send at once, so that of ten requests each one waits for half of the others.
    """
    return host.request_s + host.queue_s * (1 + point.concurrency / 2 / PROMPTS_A_CLIENT)


def workload(loop: Loop, seed: int = 0) -> Workload:
    """Ten requests a client, all waiting from the start."""
    rng, n = np.random.default_rng(seed), PROMPTS_A_CLIENT * loop.clients
    prompts = rng.integers(loop.prompt[0], loop.prompt[1], size=n, endpoint=True)
    outputs = rng.integers(loop.output[0], loop.output[1], size=n, endpoint=True)
    return Workload(np.zeros(n), prompts, outputs, concurrency=loop.clients)


def _deployment(point: Point, ops: RankOperators, table: CostTables, loop: Loop) -> Deployment:
    length = loop.prompt[1] + loop.output[1] + 1
    limits = EngineLimits(
        max_num_seqs=loop.clients,
        max_num_batched_tokens=max(loop.budget, loop.clients),
        max_model_len=length,
        weight_dtype=point.dtype,
        kv_dtype=ops.shard.kv_dtype,
    )
    scheduler = policy.scheduler("vllm_v1" if loop.mixed else "vllm_v0")
    return Deployment(
        model=ops.model,
        gpu=ops.kernels.gpu,
        node=ops.node,
        parallel=Parallelism(),
        limits=limits,
        scheduler=scheduler,
        cost=table,
        kv=_memory(point, ops, limits, length),
        max_model_len=length,
    )


def _memory(point: Point, ops: RankOperators, limits: EngineLimits, length: int) -> KvPlan:
    """What the GPUs hold beside the weights; at least one longest request."""
    cut = Parallelism(point.tp * point.dp)
    plan = cost.plan_memory(ops.model, ops.kernels.gpu, cut, limits, length, num_blocks=None)
    if plan.num_blocks * BLOCK < 2 * length:
        raise ValueError(f"{point.id}: weights leave no room")
    return plan
