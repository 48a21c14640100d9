"""Tables and numbers on a terminal or in a pipe."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from lengthwise.report.formatting import two_digits

if TYPE_CHECKING:
    from rich.console import Console, JustifyMethod

    from lengthwise.schema.cost_tables import FitError

_PIPE_WIDTH = 400  # a pipe has no width: lines stay unbroken, for grep and for wide editors
_GAP = 2
_MIN_TEXT_WIDTH = 16


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    wraps: Sequence[str] | None = None,
    drops: Sequence[str] = (),
    piped: int | None = None,
) -> None:
    """Print rows under distinct column heads; columns of numbers are aligned to the right.

    Names and numbers are never broken. On a narrow terminal the columns of ``drops`` are left out one by one until the
    others fit, and are named below the table.

    Args:
        rows: Cells, one per column.
        wraps: Columns whose text may be broken into lines; None: all but the first and the numeric ones.
        piped: Width in a pipe; None: lines are never broken.
    """
    from rich.table import Table

    out, rows = console(piped), [list(row) for row in rows]
    cells = {name: [row[i] for row in rows] for i, name in enumerate(columns)}
    numeric = {name for name, column in cells.items() if all(_is_number(text) for text in column)}
    wrapping = set(columns[1:]) - numeric if wraps is None else set(wraps)
    widths = {name: max(map(len, [name, *column])) for name, column in cells.items()}
    for name in wrapping & set(columns):
        longest_word = max((len(word) for text in [name, *cells[name]] for word in text.split()), default=0)
        widths[name] = max(min(widths[name], _MIN_TEXT_WIDTH), longest_word)

    def spare() -> int:
        return out.width - sum(widths[name] + _GAP for name in shown) + _GAP

    shown, dropped = list(columns), []
    for name in (name for name in drops if name in columns):
        if spare() >= 0:
            break
        shown.remove(name)
        dropped.append(name)
    for name in shown:
        if name in wrapping:
            longest = max(map(len, cells[name]), default=0)
            widths[name] += max(0, min(spare(), longest - widths[name]))
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for name in shown:
        side: JustifyMethod = "right" if name in numeric else "left"
        table.add_column(name, justify=side, overflow="fold", no_wrap=name not in wrapping, width=widths[name])
    for line in zip(*(cells[name] for name in shown), strict=True):
        table.add_row(*line)
    out.print(table)
    if dropped:
        out.print(f"a wider terminal also shows: {', '.join(dropped)}", style="dim")


def print_properties(title: str, properties: Iterable[tuple[str, str]], *, piped: int | None = None) -> None:
    """Print a title and a line for each name and value; empty values are left out."""
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in properties:
        if value:
            table.add_row(name, value)
    out = console(piped)
    out.print(title, style="bold")
    out.print(table)


def console(piped: int | None = None) -> Console:
    """Return standard output, as wide as the terminal; in a pipe as wide as ``piped``, by default 400."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else piped or _PIPE_WIDTH
    return Console(markup=False, highlight=False, soft_wrap=False, width=width)


def _is_number(text: str) -> bool:
    return text[:1].isdigit() or text[:1] in ("", "-", "<")


def si(value: float, unit: str = "") -> str:
    """Return three significant digits with a decimal prefix: 312e12, "FLOP/s" gives "312 TFLOP/s"."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{_three_digits(value / factor)} {prefix}{unit}".rstrip()
    return f"{_three_digits(value)} {unit}".rstrip()


def count(value: float) -> str:
    """Return three significant digits in the notation of model names: 6.9e10 gives "69.0B"."""
    for factor, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if abs(value) >= factor:
            return f"{_three_digits(value / factor)}{suffix}"
    return f"{value:,.0f}"


def gib(value: float) -> str:
    """Return bytes in GiB."""
    return f"{value / 2**30:,.2f} GiB"


def duration(seconds: float) -> str:
    """Return a time in the unit that suits it: 0.0125 gives "12.5 ms"."""
    for factor, unit in ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= factor:
            return f"{_three_digits(seconds / factor)} {unit}"
    return "0" if seconds == 0 else f"{seconds:.2g} s"


def _three_digits(value: float) -> str:
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def fit_note(fit: Sequence[FitError]) -> str:
    """Return a fitted profile's cross-validated errors in a sentence."""
    worst = max(fit, key=lambda operator: operator.median)
    typical = statistics.median(operator.median for operator in fit)
    median, highest, p95 = (two_digits(100 * share) for share in (typical, worst.median, worst.p95))
    return (
        f"cross-validated error {median} % (median operator), {highest} % for the worst, {worst.operator} "
        f"(95 % of its rows within {p95} %)"
    )
