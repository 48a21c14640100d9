"""Small worlds in which a policy must hold: few requests, short memory, predictions that may be wrong."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.policy import Policy
from lengthwise.schema.cost_tables import CostTables, grid_axis
from lengthwise.schema.deployment import Deployment, EngineLimits, KvPlan, Parallelism, Scheduler
from lengthwise.schema.hardware import GpuSpec, LinkSpec, NodeSpec
from lengthwise.schema.model import AttentionSpec, FfnSpec, ModelSpec
from lengthwise.schema.prediction import Predictions
from lengthwise.schema.workload import Workload

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_MODEL = ModelSpec("toy", 4, 64, 1000, AttentionSpec(4, 4, 16), FfnSpec(128), 4096)
_LINK = LinkSpec("toy", 1e9, 1e-6, "a toy")
_GPU = GpuSpec("toy", {"bfloat16": 1e12}, 1e9, 1e11, 100.0, 10.0, 1.0, "a toy", "a toy")
_NODE = NodeSpec("toy", 8, _LINK, 8, _LINK, _LINK, "a toy")
_MAX_LEN = 200
_WRONG = ("right", "random", "reversed", "constant", "zero", "huge")
_RANKS = ("fcfs", "srtf", "hrrn", "mlfq(quantum=8, levels=3)")
_BATCHINGS = ("unified", "static", "prefill_first", "windowed")


@dataclass(frozen=True)
class World:
    """A workload and a deployment with the policy in its place."""

    workload: Workload
    deployment: Deployment

    def bounded(self, max_wait_s: float) -> World:
        """The same world, waiting bounded."""
        scheduler = replace(self.deployment.scheduler, max_wait_s=max_wait_s)
        return World(self.workload, replace(self.deployment, scheduler=scheduler))

    def __str__(self) -> str:
        s = self.deployment.scheduler
        return f"{self.workload.name} under {s.batching}, takeover {s.takeover}, seed {self.workload.extra['seed'][0]}"


def worlds(policy: Policy, count: int, seed: int) -> list[World]:
    """``count`` worlds for a policy; the same seed gives the same worlds."""
    return [_world(policy, np.random.default_rng([seed, i]), i) for i in range(count)]


def _world(policy: Policy, rng: np.random.Generator, number: int) -> World:
    blocks = _MAX_LEN // 4 + int(rng.choice([4, 20, 200]))
    limits = EngineLimits(max_num_seqs=int(rng.integers(1, 8)), max_num_batched_tokens=256, block_size=4)
    deployed = Deployment(
        _MODEL,
        _GPU,
        _NODE,
        Parallelism(1, 1, int(rng.integers(1, 4))),
        limits,
        _scheduler(policy, rng),
        _costs(),
        KvPlan(blocks, 4, 0.0, 0.0, 0.0, 0.0, swap_s_per_block=1e-5),
        max_model_len=_MAX_LEN,
    )
    return World(_workload(rng, _WRONG[number % len(_WRONG)], number), deployed)


def _scheduler(policy: Policy, rng: np.random.Generator) -> Scheduler:
    made = Scheduler(
        rank=str(rng.choice(_RANKS)),
        batching=str(rng.choice(_BATCHINGS)),
        takeover=str(rng.choice(["never", "by_rank", "worth_it"])),
        preempt=str(rng.choice(["recompute", "swap"])),
        router=str(rng.choice(["round_robin", "central", "least_tokens"])),
    )
    if policy.axis == "binning":
        made = replace(made, rank="completed_batches", batching="static_bins", batch_wait_s=0.2)
    axis: dict[str, Any] = {policy.axis: policy}
    return replace(made, **axis)


def _workload(rng: np.random.Generator, wrong: str, number: int) -> Workload:
    n = int(rng.integers(15, 30))
    output = rng.integers(1, 40, n)
    window = int(rng.choice([0, 5, 20]))
    totals, again = _predicted(rng, wrong, output, window)
    return Workload(
        np.sort(rng.uniform(0, rng.choice([0.01, 0.5]), n)),
        rng.integers(1, 60, n),
        output,
        predicted_tokens=totals,
        predictions=again,
        priority=rng.integers(0, 3, n),
        tenant=rng.integers(0, 3, n),
        extra={"seed": np.full(n, number)},
        name=f"{wrong} predictions",
    )


def _predicted(
    rng: np.random.Generator, wrong: str, output: Ints, window: int
) -> tuple[Floats | None, Predictions | None]:
    if window == 0:
        return _guess(rng, wrong, output), None
    rows = -(-output // window)
    start = np.concatenate([[0], np.cumsum(rows)])
    total = _guess(rng, wrong, np.repeat(output, rows))
    return None, Predictions(window, start, total, rng.uniform(1, 50, len(total)))


def _guess(rng: np.random.Generator, wrong: str, output: Ints) -> Floats:
    guesses: dict[str, Floats] = {
        "right": output.astype(float),
        "random": rng.lognormal(2, 1.5, len(output)),
        "reversed": (41 - output).astype(float),
        "constant": np.full(len(output), 17.0),
        "zero": np.zeros(len(output)),
        "huge": rng.uniform(1e9, 1e11, len(output)),
    }
    return guesses[wrong]


def _costs() -> CostTables:
    """A floor, a slope and an uneven bump, so that sums in another order show."""
    t, b = np.arange(129) / 128, np.arange(33) / 32
    chunk, context = grid_axis(512), grid_axis(1024)
    return CostTables(
        layer_s=1e-3 + 2e-3 * t + 1e-5 * np.sin(np.arange(129)),
        comm_s=1e-4 + 1e-4 * t,
        first_s=1e-5 * t,
        send_s=1e-5 + 1e-5 * t,
        head_s=1e-4 + 1e-4 * b,
        host_s=2e-4 + 1e-4 * b,
        prefill_s=1e-8 * chunk[:, None] * (chunk[:, None] / 2 + context[None, :]),
        decode_s=1e-6 * grid_axis(32)[:, None] + 3e-9 * grid_axis(4096)[None, :],
        stage_layers=np.array([4]),
    )
