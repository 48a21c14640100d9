"""What ``lengthwise lab`` shows and leaves behind."""

from __future__ import annotations

import tempfile
from pathlib import Path

import typer

from lengthwise import report
from lengthwise.cli._show import console
from lengthwise.scenario import Scenario
from lengthwise.schema.lab import LabTable


def show(table: LabTable, asked: Scenario) -> None:
    """Prints a table a load and batch size, and the verdicts."""
    out = console()
    if asked.description:
        out.print(asked.description, style="dim")
    out.print(report.lab_table(table))


def write(table: LabTable, json: Path | None, html: Path | None) -> list[Path]:
    """Writes the files that were asked for, each whole or not at all, and returns them."""
    written = []
    if json is not None and str(json) == "-":
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "lab.json"
            report.write_lab_json(path, table)
            typer.echo(path.read_text("utf-8"), nl=False)
    elif json is not None:
        report.write_lab_json(json, table)
        written.append(json)
    if html is not None:
        report.write_lab_html(html, table)
        written.append(html)
    return written
