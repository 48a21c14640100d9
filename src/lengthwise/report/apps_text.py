"""What a plan and a run come to, a sentence each."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lengthwise.report.formatting import UNKNOWN, percent, rounded
from lengthwise.schema.app import AppMethod, AppPlan, AppStage, AppWhatIf, ModelPlan
from lengthwise.schema.estimate import Estimate

WHY = {
    "load": "loading",
    "waiting_for_parents": "waiting for other models' answers",
    "no_plan_fits": "no plan fits what is free",
    "left_free": "left free",
    "tail": "the end: all that is left runs",
}
"""What GPUs do in which no model runs."""
MIN_RELEVANT = 1e-6
"""Shares of a makespan below it are what adding up in another order makes, not a difference."""
PLUS_MINUS, MINUS, TIMES = "\N{PLUS-MINUS SIGN}", "\N{MINUS SIGN}", "\N{MULTIPLICATION SIGN}"


def took(value: float) -> str:
    """A time for people: "45.3 s", "12.4 min", "3.21 h"."""
    if not math.isfinite(value):
        return UNKNOWN
    scale, unit = scale_of(value)
    shown = value / scale
    return f"{rounded(shown, math.nan)[0] if shown >= 0.001 else '0'} {unit}"


def took_about(estimate: Estimate) -> str:
    """A time with its interval, both to the digits that the interval leaves: "45.30 +- 0.28 s"."""
    if not estimate.has_interval or _is_empty(estimate.half_width, estimate.value):
        return took(estimate.value)
    scale, unit = scale_of(estimate.value)
    value, half = rounded(estimate.value / scale, estimate.half_width / scale)
    return f"{value} {PLUS_MINUS} {half} {unit}"


def difference(estimate: Estimate, of_s: float) -> str:
    """A difference of times of about ``of_s`` seconds, with its sign and interval; "none" where there is none."""
    half_s = 0.0 if math.isnan(estimate.half_width) else estimate.half_width
    if _is_empty(estimate.value, of_s) and _is_empty(half_s, of_s):
        return "none"
    scale, unit = scale_of(max(abs(estimate.value), half_s))
    known = not _is_empty(half_s, of_s)
    value, half = rounded(abs(estimate.value) / scale, half_s / scale if known else math.nan)
    sign = "" if not re.search("[1-9]", value) else "+" if estimate.value > 0 else MINUS
    return f"{sign}{value} {PLUS_MINUS} {half} {unit}" if known else f"{sign}{value} {unit}"


def scale_of(value: float) -> tuple[float, str]:
    """Seconds of the unit that suits a time, and its name."""
    if abs(value) < 120:
        return 1.0, "s"
    return (60.0, "min") if abs(value) < 7200 else (3600.0, "h")


def _is_empty(value: float, of_s: float) -> bool:
    return abs(value) <= MIN_RELEVANT * max(abs(of_s), 1e-9)


def shape(plan: ModelPlan) -> str:
    """Replicas and what each of them is: "2", "2 x tp 4", "1 x tp 2 x pp 2"."""
    cut = f" {TIMES} tp {plan.tp}" if plan.tp > 1 else ""
    return f"{plan.dp}{cut}{f' {TIMES} pp {plan.pp}' if plan.pp > 1 else ''}"


def gpus_had(plan: ModelPlan, *, is_mixed: bool) -> str:
    """How many GPUs a plan has, and of which kind where there are several: "4", "4 H100"."""
    return f"{plan.gpus} {plan.gpu}" if is_mixed else str(plan.gpus)


def named(plan: ModelPlan, models: Sequence[str]) -> str:
    """A model's plan: "judge: 2 x tp 4"."""
    return f"{models[plan.model]}: {shape(plan)}"


def gpus_of(stage: AppStage, model: int) -> str:
    """Where a model's replicas are: "0,1 2,3"."""
    return " ".join(",".join(map(str, replica)) for replica in stage.placement.get(model, ()))


def switched(stage: AppStage) -> dict[int, tuple[str, float]]:
    """How each model that had to be made ready was, and how long its slowest replica took."""
    found: dict[int, tuple[str, float]] = {}
    for one in stage.switches:
        if one.model not in found or one.seconds > found[one.model][1]:
            found[one.model] = (one.how, one.seconds)
    return found


def supposed(what_if: AppWhatIf) -> str:
    """What would be different."""
    found = re.fullmatch(r"(island|gpus)_(plus|minus)_(\d+)", what_if.name)
    if found is None:
        return {"disk_twice_as_fast": "a disk twice as fast"}.get(what_if.name, what_if.name.replace("_", " "))
    kind, way, count = found.groups()
    more = "more" if way == "plus" else "fewer"
    if kind == "gpus":
        return f"one {more} GPU" if count == "1" else f"{count} GPUs {more}"
    one = "one more" if way == "plus" else "one fewer"
    island = "pair of GPUs" if count == "2" else f"island of {count} GPUs"
    return f"{one} {island} (by fast links)"


def idle_shares(plan: AppPlan, gpus: int) -> list[tuple[str, float]]:
    """Why GPUs did not work and in which share of all their time, the most first."""
    whole = gpus * (plan.stages[-1].end_s if plan.stages else 0.0)
    if not whole:
        return []
    shares = [(why, taken / whole) for why, taken in plan.idle_s.items()]
    return sorted(shares, key=lambda one: (-one[1], one[0]))


@dataclass(frozen=True)
class AppFacts:
    """What was planned, on what; and what became of it.

    Attributes:
        name: Of the application.
        metadata: What is fixed, in a few words each: rows, tasks, models, nodes.
        gpus: A name for each GPU, in their order; () where engines were given.
        is_mixed: Whether they are of several kinds.
        manifest: Of a run, as its folder holds it; None: it was only planned.
        tokens: Output tokens that were recorded, by model's name.
        answers: Answers that were recorded, by model's name.
    """

    name: str
    metadata: Sequence[str] = ()
    gpus: Sequence[str] = ()
    is_mixed: bool = False
    manifest: Mapping[str, Any] | None = None
    tokens: Mapping[str, int] = field(default_factory=dict)
    answers: Mapping[str, int] = field(default_factory=dict)


MIN_SHARE = 0.005
"""Shares of GPU time below it are not named."""


def sentences(plan: AppPlan, app_metadata: AppFacts) -> list[str]:
    """The answer: how long, how sure, what GPUs do, what others would take, what would help."""
    return [*_makespan(plan, app_metadata), *_idle(plan, app_metadata), *_others(plan), *_helps(plan)]


def _makespan(plan: AppPlan, app_metadata: AppFacts) -> Iterator[str]:
    stages = f"{len(plan.stages)} stage{'s' if len(plan.stages) != 1 else ''}"
    on = f" on {len(app_metadata.gpus)} GPU{'s' if len(app_metadata.gpus) != 1 else ''}" if app_metadata.gpus else ""
    told = f"All is done in {took_about(plan.makespan)}{on}, in {stages}"
    draws = len(plan.makespans_s)
    if draws > 1 and plan.makespan.has_interval:
        told += f": the mean over {draws} draws of lengths that were not planned with, and its 95 % interval"
    yield f"{told}."
    low, high = plan.quantiles_s.get(0.05), plan.quantiles_s.get(0.95)
    if low is not None and high is not None:
        yield f"Nine draws of ten lie within {took(low)} to {took(high)}."


def _idle(plan: AppPlan, app_metadata: AppFacts) -> Iterator[str]:
    shares = idle_shares(plan, len(app_metadata.gpus))
    if not shares:
        return
    works = max(0.0, 1.0 - sum(share for _, share in shares))
    told = [f"{percent(share)} {WHY.get(why, why)}" for why, share in shares if share >= MIN_SHARE]
    rest = f"; the rest: {', '.join(told)}" if told else ""
    yield f"Models run in {percent(works)} of all GPU time{rest}."


def _others(plan: AppPlan) -> Iterator[str]:
    others = sorted((one for one in plan.methods if one.name != plan.method), key=lambda one: one.gain)
    if not others:
        return
    told = ", ".join(f"{one.name.replace('_', ' ')} {one.gain:.2f}" for one in others)
    yield f"Planned otherwise it takes, search and all, so many times as long: {told}."
    mine = next((one for one in plan.methods if one.name == plan.method), None)
    if mine is not None:
        yield from _search(mine, others)


def _search(own: AppMethod, others: list[AppMethod]) -> Iterator[str]:
    best = min(others, key=lambda one: one.makespan.value)
    saved_s = best.makespan.value - own.makespan.value
    more_s = own.search_s - best.search_s
    if saved_s > 0 and more_s > 0:
        yield (
            f"Of the others' plans, that of {best.name.replace('_', ' ')} ends first; looking for a better one took "
            f"{took(more_s)} and brought {took(saved_s)}."
        )


def _helps(plan: AppPlan) -> Iterator[str]:
    for one in plan.what_ifs:
        change = difference(one.difference, plan.makespan.value)
        thing = supposed(one)
        if change == "none":
            yield f"With {thing} it would take as long."
        else:
            yield f"With {thing} it would take {took_about(one.makespan)} ({change})."
