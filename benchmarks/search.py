"""Vidur's what-if study, asked again: twelve scenarios, and how long their answers take.

examples/vidur-study.toml for four models: on at most 16 GPUs, TP and PP in {1, 2, 4}, three schedulers,
five batch sizes, three chunk sizes where they apply, A100 and H100, TTFT p90 of 2 s and TBT p99 of 200 ms.
The study's wall time depends on the neighbours of a shared machine; CPU seconds stand in the details.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import Any

from _harness import Row, machine, show

from lengthwise import config, engine, search
from lengthwise.schema.plan import Plan, Status, Study
from lengthwise.usecases import capacity
from lengthwise.usecases import search as search_module

STUDY = Path(__file__).parent.parent / "examples" / "vidur-study.toml"
MODELS = ("llama-2-7b", "internlm-20b", "llama-2-70b", "qwen-72b")
CHAT = Path(__file__).parent.parent / "examples" / "chat-70b.toml"


def asked(model: str, *, sensitivity: bool = False, **overrides: Any) -> config.Scenario:
    """The study of one model; sensitivity to the limits is a question of its own."""
    given = [f"deployment.model={model}", f"search.sensitivity={str(sensitivity).lower()}"]
    return config.load(STUDY, [*given, *(f"{key}={value}" for key, value in overrides.items())])


def check(study: Study) -> None:
    """Each plan has a winner that holds the limits to the precision that was asked for."""
    for plan in study.plans:
        best = plan.best
        assert best is not None, plan.name
        assert best.objective.half_width <= 0.025 * best.objective.value, (plan.name, best.objective)
        assert best.at is not None
        assert best.at.satisfied, plan.name
        assert best.objective.value <= best.bound * (1 + 1e-9)
        for limit in plan.limits:
            assert limit.is_satisfied(best.at.value(limit.metric) * 0.98), (plan.name, limit)


def paper(jobs: int, models: tuple[str, ...]) -> list[Row]:
    """All scenarios; what they took, how many simulations and requests, and what they say."""
    wall_s: dict[str, float] = {}
    plans: dict[str, Plan] = {}
    swaps: dict[str, list[float]] = {}
    start_cpu_s, start_s = time.process_time(), time.perf_counter()
    with search.threads(jobs) as workers:
        for model in models:
            study = search_module.plan(asked(model), workers)
            check(study)
            for plan in study.plans:
                wall_s[f"{model} {plan.name}"] = plan.effort.seconds
                print(f"{model} {plan.name}: {plan.effort.seconds:.1f} s", file=sys.stderr)
                plans[f"{model} {plan.name}"] = plan
            swaps[model] = [swap.ratio for swap in study.swaps if math.isfinite(swap.ratio)]
    total_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    spent = [plan.effort for plan in plans.values()]
    simulations, requests = sum(s.simulations for s in spent), sum(s.requests for s in spent)
    candidates, runnable = sum(s.candidates for s in spent), sum(s.candidates - s.rejected for s in spent)
    details = {
        "machine": machine(),
        "jobs": jobs,
        "cpu_s": cpu_s,
        "candidates": candidates,
        "simulations": simulations,
        "seconds_by_scenario": wall_s,
        "winners": {name: _report(plan) for name, plan in plans.items()},
        "worst_swap_by_model": {model: max(found, default=math.nan) for model, found in swaps.items()},
    }
    pruned = sum(s.pruned for s in spent) / runnable
    return [
        Row("search.paper.total_s", total_s, "s", 900, "lower", details=details),
        Row("search.paper.scenario_max_s", max(wall_s.values()), "s", 75, "lower"),
        Row(
            "search.paper.simulated_requests", requests, "requests", 1e10, "lower", details={"simulations": simulations}
        ),
        Row("search.pruned_share", pruned, "of runnable", 0.5, "higher"),
    ]


def single() -> Row:
    """One capacity of one configuration to 2.5 %, warm; three SLOs."""
    whole = config.load(CHAT).effective()[0]
    seconds = []
    told = {}
    for limits in ('{ "queueing_delay.p99" = 5.0 }', '{ "ttft.p90" = 2.0, "tbt.p99" = 0.2 }'):
        one = config.load(CHAT, [f"search.limits={limits}"]).model_copy(update={"variants": []})
        repeats = []
        for _ in range(5):
            start = time.perf_counter()
            found = capacity.capacities(one)[0]
            repeats.append(time.perf_counter() - start)
        rate = found.capacity.rate_rps
        assert rate.half_width <= 0.025 * rate.value
        seconds.append(sorted(repeats)[2])
        told[limits] = {"rate_rps": rate.value, "half_width": rate.half_width, "seconds": repeats}
    assert whole.deployment.model == "llama-2-70b"
    return Row("capacity.single_s", max(seconds), "s", 0.5, "lower", details=told | {"machine": machine()})


def scaling() -> Row:
    """One scenario on one worker and on two, threads and processes: the wall's ratio; the same answer."""
    one = asked("llama-2-70b")
    one = one.model_copy(update={"variants": one.variants[:1]})
    walls: dict[str, float] = {}
    answers = []
    for name, worker_pool in (
        ("threads 1", search.threads(1)),
        ("threads 2", search.threads(2)),
        ("processes 1", search.processes(1)),
        ("processes 2", search.processes(2)),
    ):
        with worker_pool as workers:
            start = time.perf_counter()
            study = search_module.plan(one, workers)
            walls[name] = time.perf_counter() - start
        answers.append([(c.key, c.objective) for c in study.plans[0].choices if c.status is Status.RANKED])
    assert all(answer == answers[0] for answer in answers)
    ratios = {kind: walls[f"{kind} 1"] / walls[f"{kind} 2"] for kind in ("threads", "processes")}
    details = {"walls": walls, "ratios": ratios, "machine": machine()}
    return Row("search.scaling_2_workers", max(ratios.values()), "times", 1.8, "higher", details=details)


def _report(plan: Plan) -> dict[str, Any]:
    best = plan.best
    assert best is not None
    assert best.at is not None
    return {
        "name": best.name,
        "requests_per_dollar": best.objective.value,
        "half_width": best.objective.half_width,
        "capacity_rps": best.capacity_rps.value,
        "binds": best.binds,
        "tied": plan.tied,
        "ttft_p90_s": best.at.value("ttft.p90"),
        "tbt_p99_s": best.at.value("tbt.p99"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--quick", action="store_true", help="one model of the study")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    engine.warm_up()
    rows = [single()]
    rows += paper(given.jobs, MODELS[2:3] if given.fast else MODELS)
    if not given.fast:
        rows.append(scaling())
    show(rows, as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
