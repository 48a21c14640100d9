"""Tables and numbers on a terminal or in a pipe."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from lengthwise.report.formatting import amount, two_digits

if TYPE_CHECKING:
    from rich.console import Console

    from lengthwise.report.html_page import Row, TableCell
    from lengthwise.schema.cost_tables import FitError

_PIPE_WIDTH = 100  # of tables in a pipe, unless COLUMNS is set
_GAP = 2


def print_table(columns: Sequence[str], rows: Iterable[Row], **options: Sequence[str]) -> None:
    """Print rows as a table that fits the width; ``options`` are those of ``FittedTable`` (wraps, drops)."""
    from lengthwise.report.fitted_table import FittedTable

    def text(cell: str | TableCell) -> str:
        return cell if isinstance(cell, str) else f"{cell.text} {cell.interval} {cell.model}".strip()

    console().print(FittedTable(columns, [list(map(text, row)) for row in rows], **options))


def print_properties(title: str, properties: Iterable[tuple[str, str]]) -> None:
    """Print a title, then one line per name and value. Empty values are left out."""
    from rich.table import Table

    out, lines = console(), [(name, value) for name, value in properties if value]
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for line in lines:
        table.add_row(*line)
    name_width = max((len(name) for name, _ in lines), default=0) + _GAP
    out.print(title, style="bold")
    out.print("\n".join(name.ljust(name_width) + value for name, value in lines) if out.soft_wrap else table)


def console() -> Console:
    """Return a console on standard output with the terminal's width.

    In a pipe, tables are COLUMNS wide, by default 100 columns, and text outside of tables is not broken into lines.
    """
    from rich.console import Console

    piped = not sys.stdout.isatty()
    columns = os.environ.get("COLUMNS", "")
    width = int(columns if columns.isdecimal() else 0) or _PIPE_WIDTH
    return Console(markup=False, highlight=False, soft_wrap=piped, width=width if piped else None)


def si(value: float, unit: str = "") -> str:
    """Return three significant digits with a decimal prefix: 312e12 and "FLOP/s" give "312 TFLOP/s"."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{amount(value / factor)} {prefix}{unit}".rstrip()
    return f"{amount(value)} {unit}".rstrip()


def count(value: float) -> str:
    """Return three significant digits in the notation of model names: 6.9e10 gives "69.0B"."""
    for factor, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if abs(value) >= factor:
            return f"{amount(value / factor)}{suffix}"
    return f"{value:,.0f}"


def gib(value: float) -> str:
    """Return bytes in GiB."""
    return f"{value / 2**30:,.2f} GiB"


def duration(seconds: float) -> str:
    """Return a time in a suitable unit: 0.0125 gives "12.5 ms"."""
    for factor, unit in ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= factor:
            return f"{amount(seconds / factor)} {unit}"
    return "0" if seconds == 0 else f"{seconds:.2g} s"


def fit_note(fit: Sequence[FitError]) -> str:
    """Return the cross-validated errors of a fitted profile as a sentence."""
    worst = max(fit, key=lambda operator: operator.median)
    typical = statistics.median(operator.median for operator in fit)
    median, highest, p95 = (two_digits(100 * share) for share in (typical, worst.median, worst.p95))
    return (
        f"cross-validated error {median} % (median operator), {highest} % for the worst, {worst.operator} "
        f"(95 % of its rows within {p95} %)"
    )
