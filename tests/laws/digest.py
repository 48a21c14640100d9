"""Prints a digest of a few fixed runs; another process must print the same."""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from worlds import GPU, MODEL, NODE, cost_tables

from lengthwise.engine import simulate
from lengthwise.policy import scheduler
from lengthwise.schema.deployment import Deployment, EngineLimits, KvPlan, Parallelism
from lengthwise.schema.workload import Workload


def bytes_of(record: object) -> bytes:
    """All columns of a record, byte by byte."""
    if dataclasses.is_dataclass(record):
        return b"".join(bytes_of(getattr(record, field.name)) for field in dataclasses.fields(record))
    return record.tobytes() if isinstance(record, np.ndarray) else repr(record).encode()


def fixed_runs() -> bytes:
    """The bytes of three runs: memory short, stages, replicas that are drawn at random."""
    rng = np.random.default_rng(11)
    workload = Workload(
        np.sort(rng.uniform(0, 0.5, 200)),
        rng.integers(1, 200, 200),
        rng.integers(1, 60, 200),
        predicted_tokens=rng.uniform(1, 60, 200),
    )
    limits, out = EngineLimits(max_num_seqs=12, max_num_batched_tokens=64, block_size=4), b""
    for name, router, pp, replicas in (
        ("vllm_v1", "random", 1, 4),
        ("sarathi", "round_robin", 3, 1),
        ("lightllm", "central", 1, 2),
    ):
        chosen = dataclasses.replace(scheduler(name), router=router)
        deployment = Deployment(
            MODEL, GPU, NODE, Parallelism(1, pp, replicas), limits, chosen, cost_tables([2] * pp),
            KvPlan(80, 4, 0.0, 0.0, 0.0, 0.0), max_model_len=300,
        )  # fmt: skip
        out += bytes_of(simulate(workload, deployment, seed=5))
    return out


if __name__ == "__main__":
    print(hashlib.sha256(fixed_runs()).hexdigest())
