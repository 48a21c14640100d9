"""Tables and numbers on a terminal or in a pipe."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterable, Sequence

from rich.console import Console, JustifyMethod
from rich.table import Table

from lengthwise.schema.cost_tables import CostTables

_WIDE = 400  # a pipe has no width: lines stay whole, for grep and for wide editors
_GAP = 2
_LEAST = 16  # a column of words is readable from here on


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    wraps: Sequence[str] | None = None,
    drops: Sequence[str] = (),
    piped: int | None = None,
) -> None:
    """Prints rows under their columns; every column that is numeric is aligned to the right.

    Names and numbers stay whole on a narrow terminal: columns are left out instead, and named below.

    Args:
        columns: The heads, each another.
        rows: Cells, as many in each row as there are columns.
        wraps: Columns of words, which may be broken; None: all but the first and the numeric ones.
        drops: Columns that may be left out, the least important first.
        piped: Columns of text in a pipe, where lines shall not stay whole.
    """
    out, rows = console(piped), [list(row) for row in rows]
    numeric = {name for at, name in enumerate(columns) if all(_is_number(row[at]) for row in rows)}
    wrapping = set(columns[1:]) - numeric if wraps is None else set(wraps)
    least = {
        name: _least_width([name, *(row[at] for row in rows)], wraps=name in wrapping)
        for at, name in enumerate(columns)
    }
    dropped = _dropped(least, drops, out.width)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    kept = [at for at, name in enumerate(columns) if name not in dropped]
    spare = out.width - _total([least[columns[at]] for at in kept])
    for at in kept:
        name = columns[at]
        more = max(0, min(spare, max(len(row[at]) for row in rows) - least[name])) if name in wrapping else 0
        spare -= more
        side: JustifyMethod = "right" if name in numeric else "left"
        table.add_column(name, justify=side, overflow="fold", no_wrap=name not in wrapping, width=least[name] + more)
    for row in rows:
        table.add_row(*(row[at] for at in kept))
    out.print(table)
    if dropped:
        out.print(f"a wider terminal also shows: {', '.join(dropped)}", style="dim")


def _least_width(cells: Sequence[str], *, wraps: bool) -> int:
    """What a column needs: its longest cell, or the longest word where it may be broken between words."""
    whole = max(map(len, cells))
    return max(min(whole, _LEAST), *(len(word) for cell in cells for word in cell.split())) if wraps else whole


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _dropped(least: dict[str, int], drops: Sequence[str], width: int) -> list[str]:
    """The first of ``drops`` without which the rest fits."""
    dropped: list[str] = []
    for name in drops:
        kept = [least[one] for one in least if one not in dropped]
        if _total(kept) <= width:
            break
        dropped.append(name)
    return dropped


def print_facts(title: str, metadata: Iterable[tuple[str, str]], *, piped: int | None = None) -> None:
    """Prints a title and what is known, a line each; what is empty is left out."""
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in metadata:
        if value:
            table.add_row(key, value)
    out = console(piped)
    out.print(title, style="bold")
    out.print(table)


def console(piped: int | None = None) -> Console:
    """Standard output, as wide as the terminal; a pipe has no width, so that lines stay whole, or ``piped``."""
    width = None if sys.stdout.isatty() else piped or _WIDE
    return Console(markup=False, highlight=False, soft_wrap=False, width=width)


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


def two_digits(value: float) -> str:
    """Two significant digits, never with an exponent: 0.0123 gives "0.012", 104 "104"."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(0, 1 - math.floor(math.log10(abs(float(f"{value:.1e}")))))
    return f"{value:,.{decimals}f}"


def _digits(value: float) -> str:
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def fit_note(cost: CostTables) -> str:
    """Cross-validated errors of a fitted profile in a few words."""
    typical = statistics.median(one.median for one in cost.fit)
    worst = max(cost.fit, key=lambda one: one.median)
    median, most, p95 = (two_digits(100 * share) for share in (typical, worst.median, worst.p95))
    return (
        f"cross-validated error {median} % (median operator), {most} % for the worst, {worst.operator} "
        f"(95 % of its rows within {p95} %)"
    )
