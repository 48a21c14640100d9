"""Vidur's what-if study repeated (examples/vidur-study.toml for four models): twelve scenarios, and their time."""

import statistics
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from _harness import machine
from _sections import Sections

from lengthwise import config, engine, search
from lengthwise.schema.plan import Plan
from lengthwise.search import capacity_search, measurement
from lengthwise.usecases import capacity
from lengthwise.usecases import search as study_search

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALLER = ("search.space.pp=[1]", "search.space.tp=[4]")
MODELS = ("llama-2-7b", "internlm-20b", "llama-2-70b", "qwen-72b")


def scenario(model: str, *more: str, variants: int = 3) -> config.Scenario:
    settings = [f"deployment.model={model}", "search.sensitivity=false", *more]
    loaded = config.load(EXAMPLES / "vidur-study.toml", settings)
    return loaded.model_copy(update={"variants": loaded.variants[:variants]})


def check(plan: Plan, precision: float) -> None:
    """Check that the best deployment meets the limits to the requested precision."""
    best = plan.best
    assert best is not None, plan.name
    assert best.objective.half_width <= precision * best.objective.value, (plan.name, best.objective)
    assert best.at is not None
    assert best.at.satisfied, plan.name
    assert best.objective.value <= best.bounds.objective * (1 + 1e-9)
    for limit in plan.limits:
        assert limit.is_satisfied(best.at.value(limit.metric) * 0.98), (plan.name, limit)


def counted(runs: list[tuple[float, float]], workload: Any, deployment: Any, *args: Any, **options: Any) -> Any:
    """Simulate a run, and add the GPU hours and dollars that it would take on GPUs."""
    hours = float(workload.arrival_s[-1]) / 3600
    runs.append((hours * deployment.parallel.gpus, hours * deployment.price_per_hour_usd))
    return measurement.simulated_window(workload, deployment, *args, **options)


def study(_shared: Path, quick: bool, jobs: int = 2) -> dict[str, Any]:
    """Return time, simulated requests, GPU hours of real runs and the share of pruned candidates of the scenarios."""
    precision = 0.15 if quick else 0.025
    few = (f"search.precision={precision}", "search.seeds=2", "search.space.max_num_seqs=[128, 256]", *SMALLER)
    models, more, variants = (MODELS[2:3], few, 1) if quick else (MODELS, (), 3)
    engine.warm_up()
    wall_s, effort, answers, projected = {}, [], [], {}
    start_cpu_s, start_s = time.process_time(), time.perf_counter()
    with search.threads(jobs) as workers:
        for model in models:
            runs: list[tuple[float, float]] = []
            with mock.patch.object(capacity_search, "simulated_window", partial(counted, runs)):
                plans = study_search.plan(scenario(model, *more, variants=variants), workers).plans
            projected[model] = dict(zip(("gpu_hours", "usd"), map(sum, zip(*runs, strict=True)), strict=True))
            for plan in plans:
                check(plan, precision)
                effort.append(plan.effort)
                answer = {"model": model, "workload": plan.name, "best": plan.best.name, "tied": plan.tied}
                answers.append(answer | asdict(plan.best.objective) | {"draws": None})
                wall_s[f"{model} {plan.name}"] = plan.effort.seconds
                print(f"{answers[-1]}: {plan.effort.seconds:.1f} s", file=sys.stderr)
    total_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    columns = ("candidates", "rejected", "pruned", "simulations", "requests")
    candidates, rejected, pruned, simulations, requests = (sum(getattr(one, of) for one in effort) for of in columns)
    details = {"machine": machine(), "jobs": jobs, "cpu_s": cpu_s, "candidates": candidates, "simulations": simulations}
    details |= {"seconds_by_scenario": wall_s, "answers": answers}
    gpu_hours = sum(of["gpu_hours"] for of in projected.values())
    return {
        "search.paper.total_s": {"value": total_s, **details},
        "search.paper.scenario_max_s": max(wall_s.values()),
        "search.paper.simulated_requests": {"value": requests, "unit": "requests", "better": "lower"},
        "search.projected_gpu_hours": {"value": gpu_hours, "unit": "hours", "better": "lower", **projected},
        "search.pruned_share": pruned / (candidates - rejected),
    }


def single(_shared: Path, quick: bool) -> dict[str, Any]:
    """Return the seconds of one capacity of one configuration to 2.5 %, warm, under two sets of limits."""
    engine.warm_up()
    details: dict[str, Any] = {}
    for limits in ('{ "queueing_delay.p99" = 5.0 }', '{ "ttft.p90" = 2.0, "tbt.p99" = 0.2 }'):
        chat = config.load(EXAMPLES / "chat-70b.toml", [f"search.limits={limits}"])
        chat, times_s = chat.model_copy(update={"variants": []}), [time.perf_counter()]
        for _ in range(1 if quick else 5):
            rate = capacity.capacities(chat)[0].capacity.rate_rps
            times_s.append(time.perf_counter())
        assert rate.half_width <= 0.025 * rate.value
        details[limits] = {"rate_rps": rate.value, "half_width": rate.half_width, "seconds": np.diff(times_s).tolist()}
    slowest_s = max(statistics.median(of["seconds"]) for of in details.values())
    return {"capacity.single_s": {"value": slowest_s, **details, "machine": machine()}}


SECTIONS = Sections("search", __doc__)

if __name__ == "__main__":
    SECTIONS.main()
