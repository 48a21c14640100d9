"""What to run for the chosen configurations."""

from __future__ import annotations

import math
import re
from pathlib import Path

from lengthwise import backend, report
from lengthwise.scenario.scenario import Scenario
from lengthwise.scenario.searches import Asked, questions, settled
from lengthwise.scenario.variants import Variant, build
from lengthwise.schema.errors import OutputError
from lengthwise.schema.plan import Choice, Plan, Standing, Study

CLAIM_REQUESTS = 2000
CLAIM_S = 200.0
CLAIM_SEEDS = 5
WARMUP_SHARE = 0.2


def write_launches(scenario: Scenario, study: Study, folder: Path, top: int = 1) -> list[Path]:
    """A folder for each of the best configurations of each plan; returns these folders.

    Each holds server scripts, Kubernetes resources, a load test, and a scenario whose simulation repeats
    the claim.

    Raises:
        OutputError: A folder or file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot make the folder {folder}: {error.strerror}") from error
    made: list[Path] = []
    for asked, plan in zip(questions(scenario), study.plans, strict=True):
        best = [c for c in plan.choices if c.standing is Standing.RANKED][:top]
        for at, choice in enumerate(best):
            name = _slug(f"{plan.name if len(study.plans) > 1 else ''} {at + 1} {choice.name}")
            _write(folder / name, asked, plan, choice)
            made.append(folder / name)
    return made


def _write(folder: Path, asked: Asked, plan: Plan, choice: Choice) -> None:
    whole = _claimed(settled(asked, choice))
    variant = build(whole)[0]
    backend.write_launch(
        folder,
        variant.deployment,
        name=_slug(choice.name),
        scenario_text=whole.to_toml(),
        workload=variant.workload(whole.run.seed),
        rate_rps=_rate(choice, variant),
        claim=_claim(plan, choice),
    )


def _claimed(whole: Scenario) -> Scenario:
    """Long enough to show the claim, several times, without the time in which the batches fill up."""
    rate = whole.workload.request_rate
    if rate is None:
        return whole.with_run(seeds=max(whole.run.seeds, CLAIM_SEEDS))
    requests = max(whole.workload.num_requests or 0, CLAIM_REQUESTS, math.ceil(rate * CLAIM_S))
    longer = whole if whole.workload.is_replay else _with_requests(whole, requests)
    warmup_s = WARMUP_SHARE * requests / rate if math.isfinite(rate) else 0.0
    return longer.with_run(seeds=max(whole.run.seeds, CLAIM_SEEDS), warmup_s=round(warmup_s, 1))


def _with_requests(whole: Scenario, requests: int) -> Scenario:
    section = whole.workload.model_copy(update={"num_requests": requests})
    return whole.model_copy(update={"workload": section})


def _rate(choice: Choice, variant: Variant) -> float:
    if choice.at is not None:
        return choice.at.rate_rps
    return variant.scenario.workload.request_rate or 1.0


def _claim(plan: Plan, choice: Choice) -> str:
    assert choice.at is not None  # it is ranked
    told = [
        f"{report.metric_text(limit.metric, choice.at.value(limit.metric))} ({report.limit_text(limit)})"
        for limit in plan.limits
    ]
    held = f": {', '.join(told)}" if told else ""
    objective = choice.objective
    half = (
        f" ± {report.rounded(objective.value, objective.half_width)[1]}" if objective.half_width > 0 else ""
    )
    what = plan.objective.label
    return (
        f"Simulated at {choice.at.rate_rps:.4g} requests a second{held}. "
        f"{what[0].upper()}{what[1:]}: {objective.value:,.6g}{half} {plan.objective.unit}, "
        f"on {choice.gpus} GPU{'s' if choice.gpus > 1 else ''} at ${choice.price_per_hour_usd:.2f} an hour"
        f"{_where(choice)}."
    )


def _where(choice: Choice) -> str:
    """That the numbers are of a rate a little below the capacity, which the objective is of."""
    rate = choice.capacity_rps
    if not rate.has_interval:
        return ""
    value, half = report.rounded(rate.value, rate.half_width)
    return f", at its capacity of {value} ± {half}; the run is at the lower end of that"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
