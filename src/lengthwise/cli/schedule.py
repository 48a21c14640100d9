"""``lengthwise schedule``: the best schedule under a latency bound."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lengthwise.cli.options import CostSource, HtmlReport, JsonFile, Quiet

EXAMPLES = """\b
Examples:
  lengthwise schedule examples/schedule-opt-13b.toml
  lengthwise schedule examples/schedule-opt-13b.toml --latency-bound 6s --report schedule.html
  lengthwise schedule examples/schedule-opt-13b.toml --strategy rra --gpus 2
  lengthwise schedule examples/schedule-opt-13b.toml --baselines all
  lengthwise schedule examples/schedule-opt-13b.toml --deploy launch
"""


def run(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO", help="A .toml or .yaml file.")],
    *,
    latency_bound: Annotated[
        str | None, typer.Option(metavar="TIME", help="Latency that must be held: 5s; inf: none.")
    ] = None,
    bound_for: Annotated[
        str | None, typer.Option(metavar="QUANTILE", help="Of the outputs that the bound is for: p99.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs; default: as the scenario has.")] = None,
    strategy: Annotated[str | None, typer.Option(metavar="NAMES", help="Among which: rra,waa-c,waa-m.")] = None,
    baselines: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Other systems to hold it against: all, or vllm-v1,orca; simulated."),
    ] = None,
    expected: Annotated[
        bool, typer.Option("--expected", help="Hold the bound in the mean, not in the worst case.")
    ] = False,
    threshold: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Resize encodings: prompts and decode batch stay so near their means."),
    ] = None,
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Look at every schedule, to check the search.")
    ] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change a setting: schedule.gpus=8; repeatable."),
    ] = None,
    cost: CostSource = None,
    report: HtmlReport = None,
    deploy: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write what runs it: engines, gateway, plan, how to check it.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Let --deploy replace files that are in its folder.")] = False,
    json: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Find the schedule of the highest throughput under a latency bound (RRA, WAA), and show why.

    After ExeGPT: who encodes, how many at a time, and how often, from the lengths of prompts and outputs.
    """
    from lengthwise import backend, config
    from lengthwise.cli import options, outputs, schedule_results
    from lengthwise.cli import progress as _progress
    from lengthwise.usecases import schedule, schedule_launch

    given = schedule_results.given(
        latency_bound, bound_for, gpus, strategy, baselines, expected=expected, threshold=threshold
    )
    asked = config.load(scenario, [*options.overrides(set_, cost), *given])
    outputs.require_answers(json, report, inputs=asked.files)
    if deploy is not None:
        schedule_launch.require_served(asked)
        outputs.require_folder(deploy)
        backend.require_new(deploy, force=force)
    options.tell(asked.notes, quiet=quiet)
    plays = asked.schedule is not None and bool(asked.schedule.baselines)
    with _progress.shown(quiet=quiet or not plays) as progress:
        plan = schedule.plan_schedule(asked, exhaustive=exhaustive, progress=progress)
    if not quiet and json != outputs.STDOUT:
        schedule_results.show_schedule(plan, asked)
    written = schedule_results.write_schedule(plan, json, report)
    if deploy is not None:
        written += schedule_results.deploy(asked, plan, deploy, silent=quiet or json == outputs.STDOUT)
    if not quiet:
        outputs.tell(written)
