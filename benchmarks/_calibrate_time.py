"""How long a calibration to 300 requests over three loads takes, by what is known beside them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import _live
import _vllm
from _circle import Run, Setting
from _harness import machine

from lengthwise.engine import deploy
from lengthwise.measure.calibration import Calibration, Iterations, calibrate, read_iterations
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.records import Measured

sys.path.append(str(Path(__file__).parents[1] / "tests" / "measure"))

RETAINED = Path(__file__).parent / "results" / "live"
REQUESTS = 300
RATES_RPS, HELD_RPS, EACH, PERIOD_S = (2.0, 4.0, 6.0), 5.0, 100, 0.5


@dataclass(frozen=True)
class Case:
    """What is calibrated: runs to fit to, one that is held out, and the engine's log of steps where it keeps one."""

    runs: Sequence[Measured]
    satisfied: Measured
    deployment: Deployment
    iterations: Iterations | None = None


def figures(_shared: Path, fast: bool) -> dict[str, Any]:
    """The slowest case's seconds by the clock, and all of them; quick: the planted runs alone."""
    names = list(CASES)[:1] if fast else list(CASES)
    return {"calibrate_300_s": row({name: timed(name, CASES[name]()) for name in names})}


def row(cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The slowest of the cases by the clock; processor time, to which no neighbour adds, stands beside."""
    slowest = max(cases, key=lambda name: float(cases[name]["wall_s"]))
    details = {"slowest": slowest, "counted": "wall_s", "cases": cases, "machine": machine()}
    return {"value": cases[slowest]["wall_s"], "details": details}


def timed(name: str, case: Case) -> dict[str, Any]:
    """What a calibration took, of how many requests, and what it looked at and for."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    found = calibrate(
        case.runs, case.deployment, holdout=[case.satisfied], iterations=case.iterations, allow=("warnings",)
    )
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    told = {
        "requests": found.fitted,
        "runs": len(case.runs),
        "beside_them": beside(found, case.iterations),
        "masks": masks(found),
        "simulations": found.simulations,
        "cpu_s": round(cpu_s, 2),
        "wall_s": round(wall_s, 2),
    }
    print(f"{name}: {json.dumps(told)}", file=sys.stderr, flush=True)
    return told


def beside(found: Calibration, iterations: Iterations | None) -> str:
    """What a calibration fitted beside its requests, by what it says of itself."""
    if iterations is not None:
        return "a log of steps"
    return "counters" if any("counters were fitted" in note for note in found.notes) else "nothing"


def masks(found: Calibration) -> str:
    """Whether dense masks were looked for, and found."""
    if any("dense masks were not looked for" in note for note in found.notes):
        return "not looked for"
    return "found" if found.tables.masked_s > 0 else "looked for"


def planted() -> Case:
    """Simulated runs of three loads whose server kept counters; nobody says which engine it is."""
    from planted_counters import scraped
    from planted_runs import LIMITS, TRUTH, requests

    deployment = deploy("llama-3-8b", "H100", limits=LIMITS)
    *runs, held = (
        scraped(requests(rate, EACH, seed), deployment, TRUTH, PERIOD_S, noise=0.02, seed=seed)
        for seed, rate in enumerate((*RATES_RPS, HELD_RPS))
    )
    return Case(runs, held, deployment)


def kept(engine: str, setting: Setting) -> Case:
    """Runs of a real engine that are kept, one round of loads after the other until there are enough requests."""
    folder = RETAINED / engine
    circle = _live.Circle(folder, folder, _live.FULL, retry=folder)
    runs, held = enough(circle.kept_runs(setting))
    log = _vllm.iterations_of(folder, next(run.name for run in runs if run.load == "half"))
    base = circle.deployment(setting)
    return Case(
        [run.measured for run in runs],
        held.measured,
        replace(base, cost=circle.tables(base)),
        read_iterations(log) if log.exists() else None,
    )


def enough(runs: Sequence[Run], least: int = REQUESTS) -> tuple[Sequence[Run], Run]:
    """The first runs with so many requests together, a whole round at least, and the next one."""
    rounds, total = len({run.load for run in runs}), 0
    for at, run in enumerate(runs[:-1]):
        total += len(run.measured.workload)
        if total >= least and at + 1 >= rounds:
            return runs[: at + 1], runs[at + 1]
    return runs[:-1], runs[-1]


CASES: dict[str, Callable[[], Case]] = {
    "simulated, with counters": planted,
    "vLLM on a CPU": lambda: kept("vllm", _live.WIDE),
    "transformers on a CPU": lambda: kept("transformers", _live.FIFO),
}
