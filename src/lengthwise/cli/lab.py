"""``lengthwise lab``: whether length-aware scheduling is worth it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lengthwise.cli._options import CostSource, HtmlReport, JsonFile, Quiet

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
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Independent repetitions behind a cell: 5.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time; default: one a CPU.")] = None,
    report: HtmlReport = None,
    json: JsonFile = None,
    quiet: Quiet = False,
) -> None:
    """Find out whether length-aware scheduling is worth it at your load, and with which predictor.

    Every policy of [lab] meets the same requests with every predictor, at every load and batch size.
    """
    from lengthwise import scenario as scenarios
    from lengthwise.cli import _lab_page, _outputs, _progress, _settings

    repeated = [] if seeds is None else [f"lab.seeds={seeds}"]
    asked = scenarios.load(scenario, [*_settings.overrides(set_, cost), *repeated])
    _outputs.require_answers(json, report, inputs=asked.files)
    _settings.tell(asked.notes, quiet=quiet)
    with _progress.shown(quiet=quiet) as progress:
        table = scenarios.lab(asked, jobs=jobs, progress=progress)
    if not quiet and json != _outputs.STDOUT:
        _lab_page.show(table, asked)
    written = _lab_page.write(table, json, report)
    if not quiet:
        _outputs.tell(written)
