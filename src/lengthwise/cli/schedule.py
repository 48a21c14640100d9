"""``lengthwise schedule``."""

from __future__ import annotations

import json as json_module
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from lengthwise.cli import options, outputs, progress
from lengthwise.cli.options import CostSource, HtmlReport, JsonFile, LatencyBound, Quiet, ScenarioFile, Threshold

if TYPE_CHECKING:
    from lengthwise.config import Scenario
    from lengthwise.schema.schedule import SchedulePlan

EXAMPLES = """\b
Examples:
  lengthwise schedule examples/schedule-opt-13b.toml
  lengthwise schedule examples/schedule-opt-13b.toml --latency-bound 6s --report schedule.html
  lengthwise schedule examples/schedule-opt-13b.toml --strategy rra --gpus 2
  lengthwise schedule examples/schedule-opt-13b.toml --baselines all
  lengthwise schedule examples/schedule-opt-13b.toml --deploy launch
"""


def run(
    scenario_file: ScenarioFile,
    *,
    latency_bound: LatencyBound = None,
    bound_for: Annotated[
        str | None, Option(metavar="QUANTILE", help="Quantile of output lengths that the bound is for; default: p99.")
    ] = None,
    gpus: Annotated[int | None, Option(min=1, help="GPUs; default: those of the scenario.")] = None,
    strategy: Annotated[str | None, Option(metavar="NAMES", help="Strategies to try: rra,waa-c,waa-m.")] = None,
    baselines: Annotated[
        str | None, Option(metavar="NAMES", help="Compare with simulated systems: all, or vllm-v1,orca.")
    ] = None,
    expected: Annotated[bool, Option("--expected", help="Bound the mean latency, not the worst case.")] = False,
    threshold: Threshold = None,
    exhaustive: Annotated[bool, Option("--exhaustive", help="Evaluate every schedule, to check the search.")] = False,
    set_: Annotated[list[str] | None, options.setting("schedule.gpus=8")] = None,
    cost: CostSource = None,
    report: HtmlReport = None,
    deploy: Annotated[Path | None, Option(metavar="DIR", help="Write launch files: engines, gateway, plan.")] = None,
    force: Annotated[bool, Option("--force", help="Let --deploy replace the files in its folder.")] = False,
    json: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Find the best schedule under a latency bound (RRA, WAA).

    The method is ExeGPT's: the lengths of prompts and outputs decide which GPUs prefill, in which batches, how often.
    """
    start_s = time.monotonic()

    from lengthwise import config

    changes = settings(latency_bound, strategy, threshold, bound_for, gpus, baselines, expected=expected)
    scenario = config.load(scenario_file, [*options.overrides(set_, cost), *changes])
    outputs.require_outputs(json, report, scenario.files)

    from lengthwise import backend
    from lengthwise.cli.tables import console
    from lengthwise.report.schedule import write_schedule_html, write_schedule_json
    from lengthwise.usecases import schedule, schedule_launch

    if deploy is not None:
        schedule_launch.require_served(scenario)
        outputs.require_folder(deploy)
        backend.require_new(deploy, force=force)
    options.print_notes(scenario.notes, quiet=quiet)
    simulates = scenario.schedule is not None and bool(scenario.schedule.baselines)
    with progress.simulating(quiet=quiet or not simulates) as advance:
        plan = schedule.plan_schedule(scenario, exhaustive=exhaustive, progress=advance)
    seconds = time.monotonic() - start_s
    printing = not quiet and json != outputs.STDOUT
    if printing:
        show(plan, scenario, seconds)
    outputs.write_outputs(json, report, plan, write_schedule_json, write_schedule_html, quiet=quiet)
    if deploy is not None:
        launch = schedule_launch.write_schedule_launch(scenario, plan, deploy)
        if printing:
            console().print(f"\n{launch.message}")
        outputs.print_written([] if quiet else [deploy])


def settings(
    latency_bound: str | None,
    strategy: str | None,
    threshold: float | None,
    bound_for: str | None = None,
    gpus: int | None = None,
    baselines: str | None = None,
    *,
    expected: bool = False,
) -> list[tuple[str, str]]:
    """Return the command's options and the settings of [schedule] that they make, in the form that ``--set`` takes."""
    changes: dict[str, Any] = {"gpus": gpus, "threshold": threshold}
    if latency_bound is not None:
        from lengthwise.usecases.short_options import toml_value

        changes["latency_bound"] = toml_value(latency_bound)
    changes["bound_for"] = None if bound_for is None else json_module.dumps(bound_for)
    for key, text in (("strategies", strategy), ("baselines", baselines)):
        if text is not None:
            changes[key] = json_module.dumps([name.strip().lower() for name in text.split(",")])
    changes["worst_case"] = "false" if expected else None
    names = {"strategies": "strategy", "worst_case": "expected"}
    return [
        (f"--{names.get(key, key).replace('_', '-')}", f"schedule.{key}={value}")
        for key, value in changes.items()
        if value is not None
    ]


def show(plan: SchedulePlan, scenario: Scenario, seconds: float) -> None:
    """Print the schedule, the runners-up, other systems, schedules for other bounds, and the effect of drift."""
    from lengthwise.cli.tables import console, duration, print_table
    from lengthwise.report import schedule_text as text

    out = console()
    if scenario.description:
        out.print(scenario.description, style="dim")
    out.print("; ".join(plan.metadata.values()), style="dim")
    for line in text.sentences(plan):
        out.print(line)
    out.print()
    heads, rows = text.SIDE_HEADS, [text.side_cells(side) for side in plan.search.sides]
    print_table(heads, rows, wraps=(heads[2], heads[-1]), drops=("at most", "worst case"))
    if spreads := plan.uncertainty.spreads:
        out.print("\nUncertainty of the chosen schedule:")
        print_table(text.SPREAD_HEADS, map(text.spread_cells, spreads), wraps=("if",), drops=("within",))
    if plan.others:
        out.print("\nOther systems on the same GPUs:")
        rows = [text.other_cells(other, plan.chosen) for other in plan.others]
        print_table(text.OTHER_HEADS, rows, wraps=("best that meets the bound",), drops=("95 %", "latency"))
    if plan.breakpoints:
        out.print("\nBest by bound:")
    for point in plan.breakpoints:
        out.print(f"  from {point.bound_s:.3g} s  {point.words}")
    out.print("\nIf outputs drift and the schedule stays:")
    rows = [text.drift_cells(row, plan.bound.limit_s) for row in plan.drift]
    print_table(text.DRIFT_HEADS, rows, wraps=("re-planned",), drops=("sd", "mean", "reload"))
    loading = plan.redeploy
    out.print(
        f"Reload: re-planning moves weights, {loading.dram_s:.2g} s from host memory, {loading.ssd_s:.2g} s from "
        f"drives ({loading.source}). Margin: how much tighter the planned bound must be to "
        f"hold after the drift. Planned in {duration(seconds)}; the search took {duration(plan.search.seconds)} of it.",
        style="dim",
    )
