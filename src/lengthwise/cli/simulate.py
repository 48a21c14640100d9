"""``lengthwise simulate``: the main question."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lengthwise.cli.options import CostSource, HtmlReport, JsonFile, Quiet

EXAMPLES = """\b
Examples:
  lengthwise simulate examples/chat-70b.toml
  lengthwise simulate examples/chat-70b.toml --set deployment.tp=8 --seeds 5
  lengthwise simulate examples/chat-70b.toml --report report.html --timeline trace.json
"""


def run(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO", help="A .toml or .yaml file.")],
    *,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change a setting: deployment.tp=8; repeatable."),
    ] = None,
    variant: Annotated[str | None, typer.Option(metavar="NAME", help="Only this variant of the scenario.")] = None,
    cost: CostSource = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Repetitions; the table shows a 95 % interval over them.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time; default: one a core.")] = None,
    json: JsonFile = None,
    report: HtmlReport = None,
    timeline: Annotated[Path | None, typer.Option(help="Write a trace for Perfetto to this file.")] = None,
    records: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.parquet",
            help="Write requests and what happened to them, first seed; several variants: FILE-NAME.parquet.",
        ),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Simulate a scenario: what users will see, and why."""
    from lengthwise import config
    from lengthwise.cli import options, outputs
    from lengthwise.cli import progress as _progress
    from lengthwise.cli import results as _records
    from lengthwise.cli import results as _results
    from lengthwise.usecases import simulate
    from lengthwise.usecases.variants import build

    asked = config.load(scenario, options.overrides(set_, cost))
    if variant is not None:
        asked = asked.only(variant)
    if seeds is not None:
        asked = asked.with_run(seeds=seeds)
    names = [whole.name for whole in asked.effective()]
    traces, kept = _results.timelines(timeline, names), _records.places(records, names)
    outputs.require_answers(json, report, asked.files, [*traces.values(), *kept.values()])
    variants = build(asked)
    options.tell(asked.notes, quiet=quiet)
    with _progress.shown(quiet=quiet) as progress:
        outcomes = simulate.run(asked, variants=variants, jobs=jobs, progress=progress, every_step=timeline is not None)
    results = _results.results_of(outcomes)
    if not quiet:
        _results.tell_of_replays(variants, asked.run.seeds)
        _results.hint(variants)
    if not quiet and json != outputs.STDOUT:
        _results.show(asked, results)
    written = _results.write(results, json, report, traces) + _records.write_simulated(outcomes, kept)
    if not quiet:
        outputs.tell(written)
