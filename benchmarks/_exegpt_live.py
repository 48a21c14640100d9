"""RRA on a real engine: what was expected of schedules beside what a CPU vLLM under our scheduler class did.

    python benchmarks/_exegpt_live.py --out FOLDER [--quick]

A vLLM of a small random-weight model on one thread is profiled and calibrated (as ``_live`` does); by these tables the
estimator chooses schedules for a task of known lengths; engines held to them, and the stock scheduler with as many
requests under way, get the same requests, of which some always wait. Repeats go in turns; ranges are over repeats.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import _circle
import _exegpt_live_gateway as gateway
import _exegpt_live_load as load
import _live
import _vllm
import numpy as np
from _circle import Setting
from _exegpt_live_rows import GATEWAY, RRA, STOCK, Expected, rows
from _harness import strict_json
from _turns import Turn, in_turns

from lengthwise import Deployment
from lengthwise.measure import write_records
from lengthwise.measure.calibration import read_iterations
from lengthwise.schedule import Cluster, Controls, Estimator, Strategy, TaskLengths
from lengthwise.schema.cost_tables import CostTables

SETTING = Setting("rra", 64, 4096)
_ROOM = 1.3
"""Seats over the mean decode batch: none is missed."""
BOUNDS = {"fast": 1.4, "middle": 2.2, "most": math.inf}
"""Latency of the longest output over the least that any schedule has."""


@dataclass(frozen=True)
class Plan:
    """How much of it."""

    live: _live.Plan
    repeats: int = 3
    window_s: float = 20.0
    least: int = 400
    """Requests in the window."""
    names: tuple[str, ...] = tuple(BOUNDS)


FULL = Plan(replace(_live.FULL, settings=(SETTING,), repeats=2))
QUICK = Plan(
    replace(_live.QUICK, settings=(SETTING,), profile_s=90.0),
    repeats=1,
    window_s=6.0,
    least=100,
    names=("fast", "most"),
)


def figures(shared: Path, fast: bool, out: Path | None = None) -> dict[str, Any]:
    """Rows by name; raises FileNotFoundError where no engine is installed. ``shared`` is not needed."""
    del shared
    _vllm.require()
    plan = QUICK if fast else FULL
    with tempfile.TemporaryDirectory() as folder:
        place = Path(out) if out else Path(folder) / "out"
        place.mkdir(parents=True, exist_ok=True)
        circle = _live.Circle(place.resolve(), Path(folder), plan.live)
        told = _measured(circle, plan)
        (place / "rows.json").write_text("".join(strict_json({"name": n} | row) + "\n" for n, row in told.items()))
        return told


def _measured(circle: _live.Circle, plan: Plan) -> dict[str, Any]:
    """Calibrates on the stock engine, then runs the chosen schedules beside it."""
    d = circle.deployment(SETTING)
    task = TaskLengths.from_workload(load.workload(1 << 16, 0))
    with contextlib.ExitStack() as stack:
        stock = stack.enter_context(_engine(circle, d, "stock"))
        tables, notes = _calibrated(circle, d, stock)
        chosen = [one for one in choose(task, d, tables) if one.name in plan.names]
        held = {one.name: stack.enter_context(_engine(circle, d, one.name, one.controls)) for one in chosen}
        circle.say(f"{len(held)} engines are held to schedules")
        runs: dict[str, list[dict[str, Any]]] = {}
        for repeat in range(plan.repeats):
            for one in chosen:
                for kind, seen in _once(circle, plan, one, held[one.name], stock, repeat).items():
                    runs.setdefault(f"{one.name} {kind}", []).append(seen)
    simulated = {one.name: load.simulated(d, tables, one.controls, _requests(plan, one)) for one in chosen}
    return rows(chosen, runs, simulated, notes | {"machine": circle.machine})


def _once(
    circle: _live.Circle, plan: Plan, one: Expected, satisfied: str, stock: str, repeat: int
) -> dict[str, dict[str, Any]]:
    """One schedule: inside the engine, kept by a gateway, and the stock scheduler with as many requests under way."""
    made, name = load.workload(_requests(plan, one), 100 + repeat), circle.model.name
    record = circle.work / f"{one.name}.phases.jsonl"
    before = len(record.read_text().splitlines()) if record.exists() else 0
    served = asyncio.run(load.sent(satisfied, name, made, f"r{repeat}x", one.requested))
    phases = [json.loads(line) for line in record.read_text().splitlines()[before:]]
    found = {RRA: load.seen(phases, served, made, one.controls)}
    found[GATEWAY] = asyncio.run(
        gateway.run(stock, name, made, f"g{repeat}x", one.controls, one.requested, SETTING.seqs)
    )
    plain = asyncio.run(load.sent(stock, name, made, f"s{repeat}x", one.under_way))
    found[STOCK] = load.seen_plain(plain, made)
    told = {kind: f"{of['throughput_rps']:.2f}/s {of['latency_s']:.3f} s" for kind, of in found.items()}
    circle.say(f"{one.name} {repeat}: expected {one.throughput_rps:.2f}/s {one.latency_s:.3f} s; {told}")
    return found


def _requests(plan: Plan, one: Expected) -> int:
    """So many that the window lasts as planned between the filling of the batch and its emptying."""
    batch, ramp = one.controls.encode_batch, load.ramp(one.controls)
    phases = max(10, math.ceil(plan.window_s / one.cycle_s), math.ceil(plan.least / batch))
    return min(4000, batch * (2 * ramp + phases + 4))


def choose(task: TaskLengths, d: Deployment, tables: CostTables) -> list[Expected]:
    """For each bound the schedule of the highest throughput whose decode batch the seats hold; each once."""
    estimator = Estimator(task, Cluster(d.gpu, d.node, 1), d.model, {1: tables})
    max_tokens = SETTING.step_tokens / task.max_prompt_tokens
    grid = [
        Controls(Strategy.RRA, batch, steps)
        for batch in range(1, 33)
        for steps in range(1, task.max_output_tokens, 2)
        if batch <= 2 * max_tokens
    ]
    told = estimator.estimate(grid)
    fits = told.feasible & (told.decode_batch * _ROOM <= SETTING.seqs)
    fits &= told.decode_batch >= 2
    min_s = float(told.latency_s[fits].min())
    found: dict[Controls, Expected] = {}
    for name, times in BOUNDS.items():
        good = np.flatnonzero(fits & (told.latency_s <= times * min_s))
        row = int(good[np.argmax(told.throughput_rps[good])])
        numbers = {
            column: float(getattr(told, column)[row])
            for column in Expected.__dataclass_fields__
            if column not in ("name", "controls")
        }
        found.setdefault(grid[row], Expected(name, grid[row], **numbers))
    return list(found.values())


@contextlib.contextmanager
def _engine(circle: _live.Circle, d: Deployment, name: str, controls: Controls | None = None) -> Iterator[str]:
    """The URL of a vLLM under a schedule, or with its own scheduler."""
    words: tuple[str, ...] = ("--distributed-executor-backend", load.ONE_PROCESS)
    if controls is not None:
        schedule = {
            "encode_batch": controls.encode_batch,
            "decode_steps": controls.decode_steps,
            "record": str(circle.work / f"{name}.phases.jsonl"),
        }
        words += ("--scheduler-cls", "lengthwise.gateway.plugin.RraScheduler")
        words += ("--additional-config", json.dumps({"lengthwise": schedule}))
    log = circle.work / f"vllm-{name}.log"
    with _vllm.served(d, circle.model, log, *words) as engine:
        if controls is not None and "holds this engine to" not in log.read_text():
            raise RuntimeError(f"the engine keeps its own schedule: {log.read_text()[-2000:]}")
        circle.say(f"vLLM {name} ready after {engine.ready_after_s:.0f} s")
        load.GROUPS[engine.url] = engine.process.pid
        yield engine.url


def _calibrated(circle: _live.Circle, d: Deployment, url: str) -> tuple[CostTables, dict[str, Any]]:
    """Cost tables of this engine: its machine's profile, calibrated on static and half load.

    An engine whose model runs in the scheduler's own process logs seconds that are not the steps', so counters are
    kept, too; what the calibration made of either is in its notes.
    """
    notes: dict[str, Any] = {}
    log = circle.work / "vllm-stock.log"
    where, served = (url, circle.model.name, log, load.GROUPS[url], notes, circle.out), _circle.facts_of(d)
    told = _vllm.Watched(*where, scrape=True, deployment=served)
    plan = circle.plan
    turn = Turn(SETTING, told.bench, told.named, load.LENGTHS, plan.static_s, plan.seconds)
    runs = list(in_turns([turn], plan.repeats))
    for run in runs:
        write_records(run.measured, circle.out / f"{run.name}.measured.parquet")
    learnt = [run for run in runs if run.load in _circle.LEARNT]
    held = [run for run in runs if run.load not in _circle.LEARNT]
    path = _vllm.iterations_of(circle.out, next(run.name for run in learnt if run.load == "half"))
    steps = read_iterations(path) if path.exists() else None
    bare = circle.tables(d)
    found = _circle.calibrated(learnt, held, replace(d, cost=bare), steps)
    circle.say(f"calibrated on {len(learnt)} runs: {'; '.join(found.notes)}")
    return found.tables, {
        "held_out_errors": _errors(d, found.tables, held),
        "held_out_errors_of_profile": _errors(d, bare, held),
        "calibration": [asdict(one) for one in found.parameters],
        "calibration_notes": list(found.notes),
        "runs": notes,
    }


def _errors(d: Deployment, tables: CostTables, runs: Sequence[_circle.Run]) -> dict[str, dict[str, float]]:
    found = _circle.errors(d, tables, runs)
    return {run: {metric: round(value, 4) for metric, value in one.items()} for run, one in found.items()}


def main() -> None:
    """The section alone."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for records and rows")
    parser.add_argument("--quick", action="store_true", help="a smaller model, shorter runs, once each")
    given = parser.parse_args()
    started = time.monotonic()
    for name, row in figures(given.out, given.fast, given.out).items():
        print(f"{name:34} {row['value']:10.4g} {row['unit']}")
    print(f"{time.monotonic() - started:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
