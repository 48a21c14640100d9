"""``lengthwise lab``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from lengthwise.cli import options, outputs, progress
from lengthwise.cli.options import CostSource, HtmlReport, Jobs, JsonFile, Quiet

EXAMPLES = """\b
Examples:
  lengthwise lab examples/lab-chat.toml
  lengthwise lab examples/lab-chat.toml --set lab.loads=[0.5,0.8] --report lab.html
"""


def run(
    scenario_file: Annotated[Path, Argument(metavar="SCENARIO", help="A .toml or .yaml file with [lab].")],
    *,
    set_: Annotated[list[str] | None, options.setting("lab.seeds=10")] = None,
    cost: CostSource = None,
    seeds: Annotated[int | None, Option(min=1, help="Independent repetitions of each cell; default: 5.")] = None,
    jobs: Jobs = None,
    report: HtmlReport = None,
    json: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Compare scheduling policies and length predictors on the same requests.

    Every policy of [lab] serves the same requests with every predictor, at every load and batch size.
    """
    from lengthwise import config

    repeated = [] if seeds is None else [f"lab.seeds={seeds}"]
    scenario = config.load(scenario_file, [*options.overrides(set_, cost), *repeated])
    outputs.require_outputs(json, report, scenario.files)
    options.print_notes(scenario.notes, quiet=quiet)
    from lengthwise import report as reports
    from lengthwise.cli.tables import console
    from lengthwise.usecases import lab

    with progress.simulating(quiet=quiet) as advance:
        table = lab.lab(scenario, jobs=jobs, progress=advance)
    if not quiet and json != outputs.STDOUT:
        out = console()
        if scenario.description:
            out.print(scenario.description, style="dim")
        out.print(reports.lab_table(table))
    outputs.write_outputs(json, report, table, reports.write_lab_json, reports.write_lab_html, quiet=quiet)
