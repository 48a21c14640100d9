"""Times, plans and what something else would bring, as the terminal and the pages say them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from lengthwise.report._numbers import UNKNOWN, rounded
from lengthwise.schema.app import AppPlan, AppStage, AppWhatIf, ModelPlan
from lengthwise.schema.estimate import Estimate

WHY = {
    "load": "loading",
    "waiting_for_parents": "waiting for other models' answers",
    "no_plan_fits": "no plan fits what is free",
    "left_free": "left free",
    "tail": "the end: all that is left runs",
}
"""What GPUs do in which no model runs."""
LITTLE = 1e-6
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
    if not estimate.has_interval or _is_nothing(estimate.half_width, estimate.value):
        return took(estimate.value)
    scale, unit = scale_of(estimate.value)
    value, half = rounded(estimate.value / scale, estimate.half_width / scale)
    return f"{value} {PLUS_MINUS} {half} {unit}"


def difference(estimate: Estimate, of_s: float) -> str:
    """A difference of times of about ``of_s`` seconds, with its sign and interval; "none" where there is none."""
    half_s = 0.0 if math.isnan(estimate.half_width) else estimate.half_width
    if _is_nothing(estimate.value, of_s) and _is_nothing(half_s, of_s):
        return "none"
    scale, unit = scale_of(max(abs(estimate.value), half_s))
    known = not _is_nothing(half_s, of_s)
    value, half = rounded(abs(estimate.value) / scale, half_s / scale if known else math.nan)
    sign = "" if not re.search("[1-9]", value) else "+" if estimate.value > 0 else MINUS
    return f"{sign}{value} {PLUS_MINUS} {half} {unit}" if known else f"{sign}{value} {unit}"


def scale_of(value: float) -> tuple[float, str]:
    """Seconds of the unit that suits a time, and its name."""
    if abs(value) < 120:
        return 1.0, "s"
    return (60.0, "min") if abs(value) < 7200 else (3600.0, "h")


def _is_nothing(value: float, of_s: float) -> bool:
    return abs(value) <= LITTLE * max(abs(of_s), 1e-9)


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
        return {"disk_twice_as_fast": "a disk twice as fast"}.get(
            what_if.name, what_if.name.replace("_", " ")
        )
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
