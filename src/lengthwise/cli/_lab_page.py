"""What ``lengthwise lab`` shows and leaves behind."""

from __future__ import annotations

from pathlib import Path

from lengthwise import report
from lengthwise.cli._outputs import write_answers
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
    return write_answers(
        json,
        html,
        lambda path: report.write_lab_json(path, table),
        lambda path: report.write_lab_html(path, table),
    )
