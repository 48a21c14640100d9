"""``lengthwise simulate``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from lengthwise.cli import options, outputs, progress
from lengthwise.cli.options import (
    Columns,
    CostSource,
    Gpu,
    HtmlReport,
    Jobs,
    JsonFile,
    Model,
    OptionalScenario,
    Quiet,
    Rate,
    Tp,
    WorkloadName,
)

if TYPE_CHECKING:
    from lengthwise.config import Scenario
    from lengthwise.report import Result

EXAMPLES = """\b
Examples:
  lengthwise simulate --model llama-3.1-8b --gpu H100 --rate 20
  lengthwise simulate examples/chat-70b.toml
  lengthwise simulate examples/chat-70b.toml --set deployment.tp=8 --seeds 5
  lengthwise simulate examples/chat-70b.toml --report report.html --timeline trace.json
"""


def run(
    scenario_file: OptionalScenario = None,
    *,
    model: Model = None,
    gpu: Gpu = None,
    tp: Tp = None,
    rate: Rate = None,
    workload: WorkloadName = None,
    column: Columns = None,
    set_: Annotated[list[str] | None, options.setting("deployment.tp=8")] = None,
    variant: Annotated[str | None, Option(metavar="NAME", help="Only this variant of the scenario.")] = None,
    cost: CostSource = None,
    seeds: Annotated[int | None, Option(min=1, help="Repetitions; the table shows 95 % intervals.")] = None,
    jobs: Jobs = None,
    json: JsonFile = None,
    report: HtmlReport = None,
    timeline: Annotated[Path | None, Option(help="Write a trace for Perfetto to this file.")] = None,
    records: Annotated[
        Path | None,
        Option(
            metavar="FILE.parquet",
            help="Write the first seed's requests and times; with several variants one each, FILE-VARIANT.parquet.",
        ),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Simulate a scenario: latency, goodput and cost of a deployment."""
    from lengthwise.usecases import short_options
    from lengthwise.usecases.variants import build

    scenario = short_options.scenario_of(
        scenario_file,
        [*short_options.columns(column), *options.overrides(set_, cost)],
        model=model,
        gpu=gpu,
        tp=tp,
        rate=rate,
        workload=workload,
    )
    if variant is not None:
        scenario = scenario.only(variant)
    if seeds is not None:
        scenario = scenario.with_run(seeds=seeds)
    names = [expanded.name for expanded in scenario.variant_scenarios()]
    timelines, record_files = variant_files(timeline, names), variant_files(records, names, first_unnamed=False)
    outputs.require_outputs(json, report, scenario.files, [*timelines.values(), *record_files.values()])
    variants = build(scenario)
    options.print_notes(scenario.notes, quiet=quiet)
    from lengthwise.report import write_timeline
    from lengthwise.usecases import simulate

    with progress.simulating(quiet=quiet) as advance:
        outcomes = simulate.run(
            scenario, variants=variants, jobs=jobs, progress=advance, log_steps=timeline is not None, in_processes=True
        )
    results = [simulate.result_of(outcome) for outcome in outcomes]
    if not quiet:
        for note in simulate.ineffective_options(variants, scenario.run.seeds):
            typer.echo(note, err=True)
        if json != outputs.STDOUT:
            show(scenario, results)
    write(results, json, report, quiet=quiet)
    for result in results:
        if result.name in timelines:
            write_timeline(timelines[result.name], result.records)
    if record_files:
        from lengthwise.measure import write_records

        for outcome in outcomes:
            write_records(simulate.recorded_run(outcome), record_files[outcome.variant.name])
    outputs.print_written([] if quiet else [*timelines.values(), *record_files.values()])


def variant_files(path: Path | None, names: Sequence[str], *, first_unnamed: bool = True) -> dict[str, Path]:
    """Return the output file of each variant, such as out-b.json for the variant "b", or {} without a path.

    If ``first_unnamed``, the first of several variants gets the path as given (out.json).
    """
    if path is None:
        return {}
    if path == outputs.STDOUT:  # ``require_outputs`` reports that this file cannot be standard output.
        return {names[0]: path}
    unnamed = 1 if first_unnamed or len(names) == 1 else 0
    return {name: path if i < unnamed else outputs.variant_path(path, name) for i, name in enumerate(names)}


def show(scenario: Scenario, results: list[Result]) -> None:
    """Print the scenario's description, the table of results, and the sources of fitted step times."""
    from lengthwise import report
    from lengthwise.cli.tables import console, fit_note

    out = console()
    if scenario.description:
        out.print(scenario.description, style="dim")
    out.print(report.table(results))
    deployed = [one for r in results if r.deployment for one in r.deployment.replica_groups]
    for costs in {id(one.cost): one.cost for one in deployed}.values():
        source, fit = costs.evidence.source, costs.evidence.fit
        if fit or source.startswith("profile "):
            out.print(f"step times: {source}{f', {fit_note(fit)}' if fit else ''}", style="dim", highlight=False)


def write(results: list[Result], json: Path | None, html: Path | None, *, quiet: bool) -> None:
    """Write the requested files and, unless ``quiet``, print their paths."""
    from lengthwise import report

    outputs.write_outputs(json, html, results, report.write_json, report.write_html, quiet=quiet)
