"""Tables and numbers on a terminal or in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

_WIDE = 400  # a pipe has no width: lines stay whole, for grep and for wide editors


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> None:
    """Prints rows under their columns; every column but the first is aligned to the right if numeric."""
    rows = [list(row) for row in rows]
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        numeric = all(_is_number(row[index]) for row in rows)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold", header_style="bold")
    for row in rows:
        table.add_row(*row)
    console().print(table)


def print_facts(title: str, facts: Iterable[tuple[str, str]]) -> None:
    """Prints a title and what is known, a line each; what is empty is left out."""
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in facts:
        if value:
            table.add_row(key, value)
    out = console()
    out.print(title, style="bold")
    out.print(table)


def console() -> Console:
    """Standard output; a pipe has no width, so that lines stay whole."""
    return Console(
        markup=False, highlight=False, soft_wrap=False, width=None if sys.stdout.isatty() else _WIDE
    )


def _is_number(text: str) -> bool:
    return text[:1].isdigit() or text[:1] in ("", "-", "<")


def si(value: float, unit: str = "") -> str:
    """Three significant digits with a decimal prefix: 312e12, "FLOP/s" gives "312 TFLOP/s"."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{_digits(value / factor)} {prefix}{unit}".rstrip()
    return f"{_digits(value)} {unit}".rstrip()


def count(value: float) -> str:
    """Three significant digits as models are named: 6.9e10 gives "69.0B"."""
    for factor, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if abs(value) >= factor:
            return f"{_digits(value / factor)}{suffix}"
    return f"{value:,.0f}"


def gib(value: float) -> str:
    """Bytes in GiB."""
    return f"{value / 2**30:,.2f} GiB"


def duration(seconds: float) -> str:
    """Seconds in the unit that reads well: 0.0125 gives "12.5 ms"."""
    for factor, unit in ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= factor:
            return f"{_digits(seconds / factor)} {unit}"
    return "0" if seconds == 0 else f"{seconds:.2g} s"


def _digits(value: float) -> str:
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"
