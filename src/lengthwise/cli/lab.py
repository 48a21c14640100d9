"""``lengthwise lab``: whether length-aware scheduling is worth it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lengthwise import report
from lengthwise.cli.options import CostSource, HtmlReport, JsonFile, Quiet
from lengthwise.cli.outputs import write_answers
from lengthwise.cli.tables import console
from lengthwise.config import Scenario
from lengthwise.schema.lab import LabTable

EXAMPLES = """\b
Examples:
  lengthwise lab examples/lab-chat.toml
  lengthwise lab examples/lab-chat.toml --set lab.loads=[0.5,0.8] --report lab.html
"""


def run(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO", help="A .toml or .yaml file with [lab].")],
    *,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change a setting: lab.seeds=10; repeatable."),
    ] = None,
    cost: CostSource = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Independent repetitions behind a cell: 5.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time; default: one a CPU.")] = None,
    report: HtmlReport = None,
    json: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Find out whether length-aware scheduling is worth it at your load, and with which predictor.

    Every policy of [lab] meets the same requests with every predictor, at every load and batch size.
    """
    from lengthwise import config
    from lengthwise.cli import options, outputs
    from lengthwise.cli import progress as _progress
    from lengthwise.usecases import lab

    repeated = [] if seeds is None else [f"lab.seeds={seeds}"]
    asked = config.load(scenario, [*options.overrides(set_, cost), *repeated])
    outputs.require_answers(json, report, inputs=asked.files)
    options.tell(asked.notes, quiet=quiet)
    with _progress.shown(quiet=quiet) as progress:
        table = lab.lab(asked, jobs=jobs, progress=progress)
    if not quiet and json != outputs.STDOUT:
        show(table, asked)
    written = write(table, json, report)
    if not quiet:
        outputs.tell(written)


def show(table: LabTable, requested: Scenario) -> None:
    """Prints a table a load and batch size, and the verdicts."""
    out = console()
    if requested.description:
        out.print(requested.description, style="dim")
    out.print(report.lab_table(table))


def write(table: LabTable, json: Path | None, html: Path | None) -> list[Path]:
    """Writes the files that were asked for, each whole or not at all, and returns them."""
    return write_answers(
        json, html, lambda path: report.write_lab_json(path, table), lambda path: report.write_lab_html(path, table)
    )
