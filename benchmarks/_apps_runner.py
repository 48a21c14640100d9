"""What the runner costs of its own: 10,000 tasks of engines that take no time, and a million planned and drained."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from _apps_worlds import World, cluster, ensembling
from _harness import fresh_process

from lengthwise.apps.launch import Ask, Draft, Engine, Lengths, SimulatedLauncher
from lengthwise.apps.ledger import Output, State, open_ledger
from lengthwise.apps.plan import RequestSpec, Space, plan
from lengthwise.apps.run import (
    ClusterPlacer,
    Drawn,
    Planned,
    RunTasks,
    expected_tokens,
    job_of,
    run_plan_of,
    run_simulated,
)
from lengthwise.schema.app import AppPlan, ModelPlan, Replica, TaskDraw
from lengthwise.schema.errors import InternalError

TASKS, QUICK_TASKS = 1_000_000, 45_000
MODELS = 9


class Instant:
    """An engine that answers at once."""

    max_num_seqs = 256
    description = "answers at once"
    is_alive = True

    async def stopped(self, within_s: float) -> bool:  # noqa: ARG002 - it never is
        """Never."""
        return False

    async def generate(self, request: Ask, draft: Draft) -> Output:
        """One token."""
        draft.finish_reason = "stop"
        return Output(f"answer {request.task}", "stop", 20, 1)


class InstantLauncher(SimulatedLauncher):
    """Engines that are there at once and answer at once: what is left is our own code."""

    async def start(self, plan: ModelPlan, gpus: Replica) -> Engine:  # noqa: ARG002 - all are alike
        """At once."""
        self.starts += 1
        return Instant()

    async def stop(self, engine: Engine) -> None:
        """Nothing to do."""


def drain(tasks: int, *, instant: bool, clock: Callable[[], float]) -> dict[str, Any]:
    """Seconds of planning and of running so many tasks, and that each of them ended with an answer."""
    world = ensembling(-(-tasks // MODELS), 256)
    (draw,) = world.draws(1, 1)
    started_s = clock()
    made = plan(world.tasks, [draw], world.models, cluster(), requested=RequestSpec(method="min", additional=()))
    planned_s = clock() - started_s
    with tempfile.TemporaryDirectory() as folder:
        started_s = clock()
        finished_s = _run(world, draw, made, Path(folder), instant=instant)
        run_s = clock() - started_s
        ledger_mib = sum(one.stat().st_size for one in Path(folder).rglob("*") if one.is_file()) / 2**20
    return {
        "tasks": len(world.tasks),
        "planned_s": planned_s,
        "run_s": run_s,
        "virtual_s": finished_s,
        "virtual_planned_s": made.makespan.value,
        "ledger_mib": ledger_mib,
    }


def _run(world: World, draw: TaskDraw, made: AppPlan, folder: Path, *, instant: bool) -> float:
    """Virtual seconds of the run."""
    space = Space(world.models, cluster())
    kind = InstantLauncher if instant else SimulatedLauncher
    seconds = (lambda _plan, _how: 0.0) if instant else space.seconds
    launcher = kind(world.tasks.models, space.deployment, Lengths.of(world.tasks, draw), seconds)
    work = RunTasks(world.tasks, Drawn(world.tasks, draw), expected_tokens([draw]), "benchmark")
    job = job_of(work, Planned(run_plan_of(made), ClusterPlacer(space.cluster, seconds)))
    with open_ledger(folder / "ledger.sqlite") as ledger:
        ended = run_simulated(job, ledger, launcher)
        if ended.of(State.DONE) != len(world.tasks):
            raise InternalError(f"{ended.of(State.DONE)} of {len(world.tasks)} tasks are done")
    return float(ended.seconds)


_FRESH = """
import json, resource, sys, time
sys.path.insert(0, {here!r})
from lengthwise import engine
from _apps_runner import drain
engine.warm_up()
found = drain({tasks}, instant={instant}, clock=time.perf_counter)
found["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps(found))
"""


def measured(tasks: int, *, instant: bool) -> dict[str, Any]:
    code = _FRESH.format(current=str(Path(__file__).parent), tasks=tasks, instant=instant)
    done = fresh_process(code)
    return dict(done["out"]) | {"cpu_s": done["cpu_s"]}


def figures(_: Path, fast: bool) -> dict[str, Any]:
    """Milliseconds of our own code a task."""
    all_ = [measured(10_000, instant=True) for _ in range(1 if fast else 3)]
    each = [1000 * one["run_s"] / one["tasks"] for one in all_]
    value = {"value": float(np.median(each)), "ci": (min(each), max(each)), "details": {"runs": all_}}
    return {"apps.runner_overhead_ms": value}
