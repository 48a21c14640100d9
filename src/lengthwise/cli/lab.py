"""``lengthwise lab``: whether length-aware scheduling is worth it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
    cost: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE", help="roofline, profile:FILE, tables:FILE, vidur:DIR, vidur_forest:DIR"
        ),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Independent repetitions behind a cell: 5.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at a time; default: one a CPU.")] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write a self-contained HTML report to this file.")
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(help="Write all numbers to this file; -: to standard output, without the table."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print no table and no progress.")] = False,
) -> None:
    """Find out whether length-aware scheduling is worth it at your load, and with which predictor.

    Every policy of [lab] meets the same requests with every predictor, at every load and batch size.
    """
    from lengthwise import scenario as scenarios
    from lengthwise.cli import _lab_page, _outputs, _progress, _settings

    repeated = [] if seeds is None else [f"lab.seeds={seeds}"]
    asked = scenarios.load(scenario, [*_settings.overrides(set_, cost), *repeated])
    files = [path for path in (json, report) if path is not None and str(path) != "-"]
    _outputs.require_writable(files, inputs=asked.files)
    if report is not None:
        _outputs.require_plotly()
    with _progress.shown(quiet=quiet) as progress:
        table = scenarios.lab(asked, jobs=jobs, progress=progress)
    if not quiet and str(json) != "-":
        _lab_page.show(table, asked)
    for path in _lab_page.write(table, json, report):
        if not quiet:
            typer.echo(f"wrote {path}", err=True)
