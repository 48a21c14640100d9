"""The runner's own cost: 10,000 tasks on engines that answer at once, and a million planned and drained."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from _apps_studies import cluster, ensembling
from _harness import fresh_process, summary

from lengthwise.apps import run
from lengthwise.apps.launch import Ask, Draft, Engine, Lengths, SimulatedLauncher
from lengthwise.apps.ledger import Output, State, open_ledger
from lengthwise.apps.plan import PlanOptions, Space, plan
from lengthwise.schema.app import ModelPlan, Replica
from lengthwise.schema.errors import InternalError


class Instant:
    """An engine that answers at once."""

    max_num_seqs = 256
    description = "answers at once"
    is_alive = True

    async def stopped(self, within_s: float) -> bool:  # noqa: ARG002
        return False

    async def generate(self, request: Ask, draft: Draft) -> Output:
        draft.finish_reason = "stop"
        return Output(f"answer {request.task}", "stop", 20, 1)


class InstantLauncher(SimulatedLauncher):
    """Starts such engines at once, so that only the runner takes time."""

    async def start(self, plan: ModelPlan, gpus: Replica) -> Engine:  # noqa: ARG002
        self.starts += 1
        return Instant()

    async def stop(self, engine: Engine) -> None:
        pass


def drain(tasks: int, *, instant: bool) -> dict[str, Any]:
    """Plan and run tasks; return seconds of both, and check that every task is answered."""
    world = ensembling(-(-tasks // 9), 256)
    (draw,) = world.draws(1, 1)
    times = [time.perf_counter()]
    made = plan(world.tasks, [draw], world.models, cluster(), options=PlanOptions(method="min", additional=()))
    times.append(time.perf_counter())
    space = Space(world.models, cluster())
    seconds = (lambda _plan, _how: 0.0) if instant else space.seconds
    kind = InstantLauncher if instant else SimulatedLauncher
    launcher = kind(world.tasks.models, space.deployment, Lengths.of(world.tasks, draw), seconds)
    work = run.RunTasks(world.tasks, run.Drawn(world.tasks, draw), run.expected_tokens([draw]), "benchmark")
    job = run.job_of(work, run.Planned(run.run_plan_of(made), run.ClusterPlacer(space.cluster, seconds)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.sqlite"
        with open_ledger(path) as ledger:
            result = run.run_simulated(job, ledger, launcher)
        times.append(time.perf_counter())
        ledger_mib = sum(one.stat().st_size for one in Path(folder).rglob("*") if one.is_file()) / 2**20
    if result.of(State.DONE) != len(world.tasks):
        raise InternalError(f"{result.of(State.DONE)} of {len(world.tasks)} tasks are done")
    seconds_of = {"planned_s": times[1] - times[0], "run_s": times[2] - times[1], "virtual_s": float(result.seconds)}
    return {"tasks": len(world.tasks), "ledger_mib": ledger_mib} | seconds_of


FRESH = """
import json, resource, sys
sys.path.insert(0, {folder!r})
from lengthwise import engine
from _apps_runner import drain
engine.warm_up()
found = drain({tasks}, instant={instant})
found["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps(found))
"""


def _measured(tasks: int, *, instant: bool) -> dict[str, Any]:
    done = fresh_process(FRESH.format(folder=str(Path(__file__).parent), tasks=tasks, instant=instant))
    return dict(done["out"]) | {"cpu_s": done["cpu_s"]}


def overhead(_: Path, quick: bool) -> dict[str, Any]:
    """Return milliseconds of the runner's own code per task."""
    runs = [_measured(10_000, instant=True) for _ in range(1 if quick else 3)]
    each = summary([1000 * one["run_s"] / one["tasks"] for one in runs])
    return {"apps.runner_overhead_ms": each | {"details": {"runs": runs}}}


def million(_: Path, quick: bool) -> dict[str, Any]:
    """Return seconds and peak memory to plan and drain a million tasks."""
    found, name = _measured(45_000 if quick else 1_000_000, instant=False), f"apps.drain_{'quick' if quick else '1e6'}"
    return {
        f"{name}_s": {"value": found["planned_s"] + found["run_s"], "unit": "s", "details": found},
        f"{name}_peak_mib": {"value": found["peak_mib"], "unit": "MiB", "better": "lower", "details": found},
    }
