"""A plan of an application as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from lengthwise.schema.app import AppPlan, AppStage, ModelPlan
from lengthwise.schema.estimate import Estimate

_WHY = {
    "load": "loading",
    "waiting_for_parents": "waiting for other models' answers",
    "no_plan_fits": "no plan fits what is free",
    "left_free": "left free",
    "tail": "the end of a stage",
}
_MOST_STAGES = 24


def show(plan: AppPlan, title: str, gpus: int) -> None:
    """Prints stages, makespan, idle GPUs, other methods, what something else would bring, and notes."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    console.print(f"{title}: {span(plan.makespan)} on {gpus} GPUs, {len(plan.stages)} stages", markup=False)
    low, high = plan.quantiles_s.get(0.05), plan.quantiles_s.get(0.95)
    if low is not None and high is not None:
        console.print(f"90 % of the draws lie within {seconds(low)} to {seconds(high)}", markup=False)
    console.print(_stages(plan))
    if plan.methods:
        console.print(_methods(plan))
    if plan.what_ifs:
        console.print(_what_ifs(plan))
    for line in (*_idle(plan, gpus), *(f"note: {note}" for note in plan.notes)):
        typer.echo(line)


def seconds(value: float) -> str:
    """A time for people."""
    if value < 120:
        return f"{value:.3g} s"
    return f"{value / 60:.3g} min" if value < 7200 else f"{value / 3600:.3g} h"


def span(estimate: Estimate) -> str:
    """A time with its interval."""
    told = seconds(estimate.value)
    return f"{told} \N{PLUS-MINUS SIGN} {seconds(estimate.half_width)}" if estimate.has_interval else told


def named(plan: ModelPlan, models: Sequence[str]) -> str:
    """A model's plan in words."""
    cut = f" x tp {plan.tp}" if plan.tp > 1 else ""
    pipeline = f" x pp {plan.pp}" if plan.pp > 1 else ""
    return f"{models[plan.model]}: {plan.dp}{cut}{pipeline}"


def _stages(plan: AppPlan) -> Any:
    table = _table("stage", "from", "to", "model: replicas x GPUs", "GPUs", "made ready", "ends as finished")
    shown = plan.stages[:_MOST_STAGES]
    for number, stage in enumerate(shown, 1):
        table.add_row(
            str(number),
            seconds(stage.start_s),
            seconds(stage.end_s),
            "\n".join(named(one, plan.models) for one in stage.plans),
            str(stage.gpus),
            _switches(stage, plan.models),
            plan.models[stage.ends_by] if stage.ends_by >= 0 else "",
        )
    if len(plan.stages) > len(shown):
        table.add_row("...", "", "", f"{len(plan.stages) - len(shown)} more", "", "", "")
    return table


def _switches(stage: AppStage, models: Sequence[str]) -> str:
    longest: dict[int, float] = {}
    for one in stage.switches:
        longest[one.model] = max(longest.get(one.model, 0.0), one.seconds)
    return "\n".join(f"{models[model]} {seconds(took)}" for model, took in sorted(longest.items()))


def _methods(plan: AppPlan) -> Any:
    table = _table("method", "makespan", "search", "stages", "times as long, end to end")
    for one in plan.methods:
        table.add_row(one.name, span(one.makespan), seconds(one.search_s), str(one.stages), f"{one.gain:.2f}")
    return table


def _what_ifs(plan: AppPlan) -> Any:
    table = _table("what if", "makespan", "difference")
    for one in plan.what_ifs:
        sign = "+" if one.difference.value > 0 else "-"
        apart = Estimate(abs(one.difference.value), one.difference.half_width)
        table.add_row(one.name.replace("_", " "), span(one.makespan), sign + span(apart))
    return table


def _idle(plan: AppPlan, gpus: int) -> list[str]:
    whole = gpus * (plan.stages[-1].end_s if plan.stages else 0.0)
    if not whole:
        return []
    told = [
        f"{taken / whole:.0%} {_WHY.get(why, why)}"
        for why, taken in sorted(plan.idle_s.items(), key=lambda one: -one[1])
        if taken / whole >= 0.005
    ]
    return [f"GPU time without work: {', '.join(told)}" if told else "GPUs work all the time"]


def _table(*columns: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
