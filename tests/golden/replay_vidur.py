"""Replays recorded runs of Vidur through the engine: python tests/golden/replay_vidur.py DIR.

Every case `g*.json.gz` in DIR is run on the operator tables recorded beside it
(`tables_<model>_tp<T>_pp<P>.npz`). One line a case: iterations and restarts, ours and theirs,
and the largest relative error of completion, first-schedule and prefill-completion times.
Exit 1 on an error above 1e-9 or on any count that differs.
"""

from __future__ import annotations

import gzip
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise import catalog, cost, policy
from lengthwise.engine import simulate
from lengthwise.schema.deployment import Deployment, EngineLimits, KvPlan, Parallelism, Scheduler
from lengthwise.schema.errors import LengthwiseError
from lengthwise.schema.records import Records
from lengthwise.schema.workload import Workload

TOLERANCE = 1e-9
SCHEDULERS = {
    "vllm": "vidur_vllm",
    "sarathi": "vidur_sarathi",
    "orca": "vidur_orca",
    "faster_transformer": "vidur_faster_transformer",
}
ROUTERS = {"round_robin": "round_robin", "lor": "least_waiting"}


@dataclass(frozen=True)
class Comparison:
    """Ours against theirs for one case."""

    name: str
    iterations: tuple[int, int]
    restarts: tuple[int, int]
    finished: tuple[int, int]
    completion: float
    first_schedule: float
    prefill_completion: float

    @property
    def passes(self) -> bool:
        """Whether all counts agree and no time is off by more than the tolerance."""
        counts = (self.iterations, self.restarts, self.finished)
        errors = (self.completion, self.first_schedule, self.prefill_completion)
        return all(a == b for a, b in counts) and all(e <= TOLERANCE for e in errors)

    def __str__(self) -> str:
        decision = "ok  " if self.passes else "FAIL"
        return (
            f"{decision} {self.name}: iterations {self.iterations[0]}/{self.iterations[1]}, restarts "
            f"{self.restarts[0]}/{self.restarts[1]}, finished {self.finished[0]}/{self.finished[1]}, relative error "
            f"completion {self.completion:.1e}, first schedule {self.first_schedule:.1e}, "
            f"prefill completion {self.prefill_completion:.1e}"
        )


def workload_of(case: dict[str, Any]) -> Workload:
    """The requests of a case in the order in which Vidur routes them."""
    rows = sorted(case["requests"], key=lambda r: (r["arrived_at"], r["id"]))
    return Workload(
        np.array([r["arrived_at"] for r in rows]),
        np.array([r["prefill_tokens"] for r in rows]),
        np.array([r["decode_tokens"] for r in rows]),
    )


def deployment_of(case: dict[str, Any], folder: Path) -> Deployment:
    """The deployment of a case: Vidur's scheduler rules, memory plan and tables."""
    cluster = case["config"]["cluster_config"]
    rep, sched = cluster["replica_config"], cluster["replica_scheduler_config"]
    tp, pp = rep["tensor_parallel_size"], rep["num_pipeline_stages"]
    short = rep["model_name"].split("/")[-1]
    model = catalog.model(rep["model_name"])
    parallel = Parallelism(tp, pp, cluster["num_replicas"])
    tables = cost.vidur_tables(folder / f"tables_{short}_tp{tp}_pp{pp}.npz", model, pp)
    max_tokens = case["config"]["request_generator_config"].get("max_tokens") or 4096
    # Vidur runs with less memory than one longest sequence; such a sequence just must not come.
    blocks, block_size = int(case["summary"]["kv_blocks_per_replica"]), sched["block_size"]
    name = sched["name"]
    gpu = catalog.gpu("A100-80GB" if rep["device"] == "a100" else rep["device"])
    scheduler: Scheduler = replace(
        policy.scheduler(SCHEDULERS[name]), router=ROUTERS[cluster["global_scheduler_config"]["name"]]
    )
    return Deployment(
        model,
        gpu,
        catalog.default_node(gpu, tp * pp),
        parallel,
        limits_of(case, sched, pp),
        scheduler,
        tables,
        KvPlan(blocks, block_size, 0.0, 0.0, 0.0, 0.0, planner="vidur"),
        max_model_len=min(max_tokens, blocks * block_size),
        name=short,
    )


def limits_of(case: dict[str, Any], sched: dict[str, Any], pp: int) -> EngineLimits:
    """Vidur's caps. Its request-level schedulers bound a batch by memory slots, the others by cap / PP."""
    cap = sched["batch_size_cap"]
    if sched["name"] in ("orca", "faster_transformer"):
        slots = int(case["summary"]["max_batch_size_memory_planner_capped"])
        seqs, step_seqs = max(slots, cap) * pp, min(slots, cap)
    else:
        seqs, step_seqs = cap, cap // pp
    return EngineLimits(
        max_num_seqs=seqs,
        max_step_seqs=step_seqs,
        max_num_batched_tokens=sched.get("chunk_size") or sched.get("max_tokens_in_batch") or 4096,
        block_size=sched["block_size"],
        watermark=sched["watermark_blocks_fraction"],
    )


def compare(path: Path, engine: str = "kernel") -> Comparison:
    """Replays one case."""
    with gzip.open(path) as file:
        case = json.load(file)
    records = simulate(workload_of(case), deployment_of(case, path.parent), engine=engine)
    reference = sorted(case["requests"], key=lambda r: (r["arrived_at"], r["id"]))
    return Comparison(
        path.name.removesuffix(".json.gz"),
        (int(records.totals.steps.sum()), case["summary"]["iterations"]),
        (int(records.requests.preemptions.sum()), case["summary"]["num_restarts_total"]),
        (int((records.requests.status == 0).sum()), case["summary"]["completed"]),
        _error(records, "finished_s", [r["completed_at"] for r in reference]),
        _error(records, "scheduled_s", [r["scheduled_at"] for r in reference]),
        _error(records, "first_token_s", [r["prefill_completed_at"] for r in reference]),
    )


def _error(records: Records, column: str, other: list[float]) -> float:
    """Largest relative error of a column of times; infinite where one never came."""
    own, expected = getattr(records.requests, column), np.array(other, dtype=float)
    error = np.abs(own - expected) / np.maximum(np.abs(expected), 1e-9)
    return float(np.nan_to_num(error, nan=np.inf).max())


def main(arguments: list[str]) -> int:
    """Replays all cases of a folder."""
    if len(arguments) != 1 or not Path(arguments[0]).is_dir():
        print("usage: python tests/golden/replay_vidur.py DIR (a folder of g*.json.gz and tables_*.npz)")
        return 2
    paths = sorted(Path(arguments[0]).glob("g*.json.gz"))
    if not paths:
        print(f"no g*.json.gz in {arguments[0]}")
        return 2
    failed = 0
    for path in paths:
        try:
            result = compare(path)
        except (LengthwiseError, KeyError, OSError) as error:
            print(f"FAIL {path.name}: {type(error).__name__}: {error}")
            failed += 1
            continue
        print(result)
        failed += not result.passes
    print(f"{len(paths) - failed} of {len(paths)} cases pass")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
