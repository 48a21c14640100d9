"""``lengthwise schedule watch``: what a schedule that follows live lengths would have done."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lengthwise.cli.options import CostSource, JsonFile, Quiet

EXAMPLES = """\b
Examples:
  lengthwise schedule watch examples/schedule-opt-13b.toml --records run.parquet
  lengthwise schedule watch examples/schedule-opt-13b.toml --workload exegpt-t --horizon 10min
"""


def run(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO", help="A .toml or .yaml file.")],
    *,
    records: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Replay a run: records of bench or simulate.")
    ] = None,
    workload: Annotated[
        str | None, typer.Option(metavar="FILE|NAME", help="Replay a trace, or draws of a preset.")
    ] = None,
    format_: Annotated[
        str | None, typer.Option("--format", help="The trace's format; without it, it is detected.")
    ] = None,
    false_positive_rate: Annotated[
        float, typer.Option(metavar="SHARE", help="Probability of ever an alarm if lengths never change.")
    ] = 0.01,
    min_requests: Annotated[int, typer.Option(min=1, help="Requests since a change before it is acted on.")] = 100,
    every: Annotated[int, typer.Option(min=1, help="Test one request in so many, where neighbours are alike.")] = 1,
    storage: Annotated[str, typer.Option(metavar="PLACE", help="Where weights are loaded from: dram or ssd.")] = "dram",
    horizon: Annotated[str, typer.Option(metavar="TIME", help="How long new lengths are taken to last.")] = "1h",
    margin: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Tighten the bound by this; default: after the drift seen.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of what is drawn.")] = 0,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change a setting: schedule.gpus=8; repeatable."),
    ] = None,
    cost: CostSource = None,
    json: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Replay requests in order: when lengths moved, what is then best, what changing costs and gains.

    Says what would have happened without: by how much the bound would have been broken, and for how many.
    """
    from lengthwise import config, schedule
    from lengthwise.cli import options, outputs, schedule_results
    from lengthwise.usecases import schedule_adaptation

    asked = config.load(scenario, options.overrides(set_, cost))
    outputs.require_answers(json, None, inputs=asked.files)
    watch = schedule.Monitor(false_positive_rate, min_requests, every, seed)
    terms = schedule_results.terms(storage, horizon, margin)
    live = schedule_results.live_of(records, workload, format_, seed)
    options.tell(asked.notes, quiet=quiet)
    told = schedule_adaptation.replay(schedule_adaptation.adapter_of(asked, watch, terms), live, asked.name)
    if not quiet and json != outputs.STDOUT:
        schedule_results.show_adaptation(told)
    written = schedule_results.write_adaptation(told, json)
    if not quiet:
        outputs.tell(written)
