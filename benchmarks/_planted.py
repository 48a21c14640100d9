"""Calibrations (coverage on planted runs, the value of counters and step logs, computing time), and profiles."""

import math
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from _circle import Run, Setting, machine_of, this_thread
from _harness import machine
from _intervals import exact_interval

from lengthwise import Workload, catalog, deploy, simulate
from lengthwise.cost.estimators import Target, fit_profile
from lengthwise.cost.profiles import import_aiconfigurator, write_profile
from lengthwise.measure.calibration import Calibration, Iterations, calibrate
from lengthwise.measure.calibration.parameters import apply
from lengthwise.measure.calibration.result import Parameter
from lengthwise.measure.operators import MeasurementSettings, measure_operators
from lengthwise.schema.deployment import Deployment, EngineLimits, Parallelism
from lengthwise.schema.records import RunResult
from lengthwise.statistics import mean_estimate

sys.path.append(str(Path(__file__).parents[1] / "tests" / "measure"))  # planted runs are those of the tests

# Coverage: runs with known parameters

PLANTED = {"work": 1.3, "host_step": 2e-3, "host_sequence": 40e-6}
NOISE, REQUESTS, RATE_RPS = 0.02, 240, 6.0
COVERAGE_RUNS, QUICK_RUNS = 20, 2


def coverage(_shared: Path, quick: bool) -> dict[str, Any]:
    """Return the share of determined parameters whose interval contains the planted value; a seed per run."""
    deployment = deploy("llama-3-8b", "H100", limits=EngineLimits(64, 2048, max_model_len=8192))
    found = {run: covered(deployment, run) for run in range(1, 1 + (QUICK_RUNS if quick else COVERAGE_RUNS))}
    return {"calibrate_coverage": coverage_row({run: satisfied(one) for run, one in found.items()})}


def covered(deployment: Deployment, run: int) -> Calibration:
    """Calibrate to a run of an engine with the planted parameters, measured with noise."""
    rng = np.random.default_rng(run)
    arrival_s = np.cumsum(rng.exponential(1 / RATE_RPS, REQUESTS))
    lengths = rng.integers(200, 3000, REQUESTS), rng.integers(50, 400, REQUESTS)
    workload = Workload(arrival_s - arrival_s[0], *lengths, name=f"run {run}")
    records = simulate(workload, replace(deployment, cost=apply(deployment.cost, PLANTED)))
    r = records.requests
    first_s = r.arrival_s + (r.first_token_s - r.arrival_s) * np.exp(NOISE * rng.standard_normal(REQUESTS))
    rest_s = (r.finished_s - r.first_token_s) * np.exp(NOISE * rng.standard_normal(REQUESTS))
    clients = replace(r, scheduled_s=np.full(REQUESTS, np.nan), first_token_s=first_s, finished_s=first_s + rest_s)
    measured = RunResult(replace(records, requests=clients, steps=None), workload, "bench")
    return calibrate([measured], deployment, seed=run)


def satisfied(found: Calibration) -> dict[str, tuple[bool, bool]]:
    """Return by parameter whether it was determined, and whether its interval, as the runs gave it, holds the truth."""
    rows = {}
    for p in found.parameters:
        low, high = (p.low, p.high) if p.bare is None else p.bare  # before it was widened to contain its prior
        rows[p.name] = p.determined, bool(low <= PLANTED.get(p.name, p.prior) <= high)
    return rows


def coverage_row(runs: Mapping[int, Mapping[str, tuple[bool, bool]]]) -> dict[str, Any]:
    """Return the row of ``satisfied`` of each run: determined parameters, and separately the others."""
    every = [(name, *of) for found in runs.values() for name, of in found.items()]
    hits = {name: [holds for one, known, holds in every if known and one == name] for name, known, _ in every if known}
    known, others = ([holds for _, determined, holds in every if determined == of] for of in (True, False))

    def share(of: Sequence[bool]) -> dict[str, Any]:
        low, high = exact_interval(sum(of), len(of))
        return {"n": len(of), "satisfied": sum(of), "low": round(low, 3), "high": round(high, 3)}

    details: dict[str, Any] = {"n": len(known), "of_runs": len(runs), "satisfied": sum(known), "planted": PLANTED}
    details["missing"] = {"n": len(others), "satisfied": sum(others)}
    details["by_parameter"] = {name: share(of) for name, of in hits.items()}
    details["runs"] = {run: {name: of[1] for name, of in found.items() if of[0]} for run, found in runs.items()}
    return {"value": float(np.mean(known)), "ci": exact_interval(sum(known), len(known)), "details": details}


# Counters: planted runs whose server counts its steps as vLLM does

COUNTER_RUNS = 12
PERIODS_S = (0.25, 0.5, 1.0)  # between two reads of the counters, in turns
ANSWER_S = 0.005
KINDS = ("requests", "counters", "log")
"""Inputs of a fit: requests alone, and counters or a log of every step as well."""
Report = tuple[float, float, float]
"""The result for a planted value, in logs of it: value, low, high."""


def counters(_shared: Path, quick: bool) -> dict[str, Any]:
    """Return by parameter the mean error in log of the planted value with counters, and with other inputs."""
    from planted_counters import logged, scraped
    from planted_runs import LIMITS, MIN_COUNT, TRUTH, requests
    from planted_runs import NOISE as RUN_NOISE

    deployment, runs = deploy("llama-3-8b", "H100", limits=LIMITS), []
    for seed in range(QUICK_RUNS if quick else COUNTER_RUNS):
        workload, period_s = requests(seed=seed), PERIODS_S[seed % len(PERIODS_S)]
        run = scraped(workload, deployment, TRUTH, period_s, noise=RUN_NOISE, seed=seed, answer_s=ANSWER_S)
        log = logged(workload, deployment, TRUTH, TRUTH["host_step"] / 2)  # a log does not see half of the host
        fitted = partial(calibrate, [run], deployment, fit=MIN_COUNT, seed=seed)
        found = {"requests": fitted(scrape="no"), "counters": fitted(), "log": fitted(iterations=log)}

        def report(p: Parameter, truth: float) -> Report:
            return tuple(math.log(value / truth) for value in (p.value, p.low, p.high))

        runs.append({k: {n: report(of[n], truth) for n, truth in TRUTH.items()} for k, of in found.items()})
    return {f"fidelity.counters.{name}_error": counters_row(name, runs, TRUTH[name]) for name in TRUTH}


def counters_row(name: str, runs: Sequence[Mapping[str, Mapping[str, Report]]], planted: float) -> dict[str, Any]:
    """Return a parameter's mean error over runs (by kind, then by parameter) with Student's interval."""
    kinds = {}
    for kind in KINDS:
        some = [run[kind][name] for run in runs]
        mean = mean_estimate([abs(off) for off, _, _ in some])
        ends = {"error": mean.value, "low": max(0.0, mean.low), "high": mean.high}
        kinds[kind] = {key: round(value, 4) for key, value in ends.items()}
        kinds[kind]["width"] = round(float(np.mean([high - low for _, low, high in some])), 3)
        kinds[kind]["satisfied"] = sum(low <= 0 <= high for _, low, high in some)
    of = kinds["counters"]
    details = {"of_runs": len(runs), "planted": planted, "kinds": kinds}
    return {"value": of["error"], "ci": [of["low"], of["high"]], "details": details}


# Times: calibrations on about 300 requests

SAVED = Path(__file__).parent / "results" / "live"
TIMED_REQUESTS = 300
RATES_RPS, HELD_RPS, EACH, PERIOD_S = (2.0, 4.0, 6.0), 5.0, 100, 0.5


@dataclass(frozen=True)
class Case:
    """Input of a calibration: runs to fit to, a held-out one, and the engine's log of steps where there is one."""

    runs: Sequence[RunResult]
    held_out: RunResult
    deployment: Deployment
    iterations: Iterations | None = None


def times(_shared: Path, quick: bool) -> dict[str, Any]:
    """Return the seconds of the slowest case; quick: of the planted runs alone."""
    from _live import FIFO, WIDE

    cases: dict[str, Callable[[], Case]] = {
        "simulated, with counters": planted_case,
        "vLLM on a CPU": partial(saved_case, "vllm", WIDE),
        "transformers on a CPU": partial(saved_case, "transformers", FIFO),
    }
    found = {name: timed(cases[name]()) for name in list(cases)[: 1 if quick else None]}
    slowest = max(found, key=lambda name: found[name]["wall_s"])
    details = {"slowest": slowest, "cases": found, "machine": machine()}
    return {"calibrate_300_s": {"value": found[slowest]["wall_s"], "details": details}}


def timed(case: Case) -> dict[str, Any]:
    """Return the time of a calibration, the number of its requests, and its input."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    options = {"holdout": [case.held_out], "iterations": case.iterations, "allow": ("warnings",)}
    found = calibrate(case.runs, case.deployment, **options)
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    about = {"requests": found.fitted} | noted(found, case.iterations)
    return about | {"simulations": found.simulations, "cpu_s": round(cpu_s, 2), "wall_s": round(wall_s, 2)}


def noted(found: Calibration, iterations: Iterations | None) -> dict[str, str]:
    """Return the input of a calibration other than requests, and whether dense masks were looked for and found."""
    notes, masks = " ".join(found.notes), "found" if found.tables.masked_s > 0 else "looked for"
    masks = "not looked for" if "dense masks were not looked for" in notes else masks
    counters = "counters" if "counters were fitted" in notes else "nothing"
    return {"beside_them": "a log of steps" if iterations is not None else counters, "masks": masks}


def planted_case() -> Case:
    """Return simulated runs of three loads whose server had counters, of an unnamed engine."""
    from planted_counters import scraped
    from planted_runs import LIMITS, TRUTH, requests

    deployment = deploy("llama-3-8b", "H100", limits=LIMITS)
    *runs, held_out = (
        scraped(requests(rate, EACH, seed), deployment, TRUTH, PERIOD_S, noise=0.02, seed=seed)
        for seed, rate in enumerate((*RATES_RPS, HELD_RPS))
    )
    return Case(runs, held_out, deployment)


def saved_case(engine: str, setting: Setting) -> Case:
    """Return saved runs of a real engine, one round of loads after the other until there are enough requests."""
    import _live

    folder = SAVED / engine
    circle = _live.Circle(folder, folder, _live.FULL, again=folder)
    runs, held_out = enough(circle.saved_runs(setting))
    split = circle.split(runs, setting)
    return Case([run.measured for run in runs], held_out.measured, split.priced, split.steps)


def enough(runs: Sequence[Run], least: int = TIMED_REQUESTS) -> tuple[Sequence[Run], Run]:
    """Return the first runs with ``least`` requests together, at least one round, and the next one."""
    rounds, total = len({run.load for run in runs}), 0
    for at, run in enumerate(runs[:-1]):
        total += len(run.measured.workload)
        if total >= least and at + 1 >= rounds:
            return runs[: at + 1], runs[at + 1]
    return runs[:-1], runs[-1]


MODEL, MAX_TOKENS = "qwen2.5-0.5b", 2048
LIMITS = EngineLimits(max_num_seqs=64, max_num_batched_tokens=1024, weight_dtype="float32", kv_dtype="float32")
BUDGET_S, QUICK_BUDGET_S = 300.0, 60.0
TABLES = "data/profiles/aiconfigurator"


def profiles(shared: Path, quick: bool) -> dict[str, Any]:
    """Return the seconds to import one system's tables as a profile, and the error of this machine's operators."""
    # The error is the median over operators of the median error on points that the fit has not seen.
    rows: dict[str, Any] = {}
    if (shared / TABLES).exists():
        with tempfile.TemporaryDirectory() as folder:
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            profile = import_aiconfigurator(shared / TABLES, "h200_sxm", "vllm", "0.24.0")
            write_profile(profile, Path(folder) / "h200.parquet")
            wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        assert len(profile) > 200_000
        rows["profile.import_h200_s"] = {"value": wall_s, "cpu_s": cpu_s, "rows": len(profile)}
    model, gpu, budget_s = catalog.model(MODEL), this_thread(), QUICK_BUDGET_S if quick else BUDGET_S
    sizes = {"max_tokens": LIMITS.max_num_batched_tokens, "max_seqs": LIMITS.max_num_seqs, "max_context": MAX_TOKENS}
    found = measure_operators(model, MeasurementSettings("cpu", "float32", threads=1, **sizes), budget_s=budget_s)
    node = catalog.default_node(gpu, 1)
    _, report = fit_profile(found.profile, Target(model, gpu, node, Parallelism(), LIMITS, MAX_TOKENS))
    errors = {fit.name: fit.median_error for fit in report.operators}
    details = {"model": MODEL, "budget_s": budget_s, "points": len(found.profile), "operators": errors}
    value, details["machine"] = float(np.median([*errors.values()])), machine_of(gpu, "float32")
    return rows | {"profile.cv_median_error": {"value": value, "details": details}}
