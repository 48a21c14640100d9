"""Tables that fit a terminal or a pipe."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

_GAP = 2
_MIN_TEXT_WIDTH = 16


@dataclass(frozen=True)
class FittedTable:
    """A table that fits the console. Columns of numbers are right-aligned.

    Names and numbers are never broken. If the table is too wide even with broken texts and heads, the columns in
    ``drops`` are left out one by one until the others fit. A line below the table names the columns left out.
    """

    columns: Sequence[str]  # heads of the columns, which must be distinct
    rows: Sequence[Sequence[str]]  # cells, one per column
    # columns whose text may be broken into lines, by default all but the first and the numeric ones
    wraps: Sequence[str] | None = None
    drops: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the table, and below it the names of the columns left out."""
        columns = {name: [row[i] for row in self.rows] for i, name in enumerate(self.columns)}
        numeric = {name for name, cells in columns.items() if all(map(_is_number, cells))}
        wraps = set(self.columns[1:]) - numeric if self.wraps is None else self.wraps
        widths, dropped = {}, []
        for name, cells in columns.items():
            longest, is_text = max(map(len, cells), default=0), name in wraps
            words = [len(word) for text in [name, *(cells if is_text else ())] for word in text.split()]
            widths[name] = max([*words, min(longest, _MIN_TEXT_WIDTH) if is_text else longest])

        def width() -> int:
            return sum(widths.values()) + _GAP * (len(widths) - 1)

        complete = width()
        for name in self.drops:
            if name in widths and width() > options.max_width:
                del widths[name]
                dropped.append(name)
        table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
        for name, cells in columns.items():
            if name in widths:
                missing = max(map(len, [name, *cells])) - widths[name]
                widths[name] += max(0, min(options.max_width - width(), missing))
                table.add_column(Text(name), justify="right" if name in numeric else "left", width=widths[name])
        for line in zip(*(columns[name] for name in widths), strict=True):
            table.add_row(*map(Text, line))
        yield from console.render(table, options.update(width=max(options.max_width, width())))
        if dropped:
            wider = f"COLUMNS={complete}" if options.no_wrap else "a wider terminal"
            yield Text(f"{wider} also shows: {', '.join(dropped)}", style="dim")


def _is_number(text: str) -> bool:
    return text[:1].isdigit() or text[:1] in ("", "-", "<")


def boxed_table() -> Table:
    """Return an empty table in the style of all answers."""
    return Table(header_style="bold", box=box.ROUNDED, border_style="dim")


@dataclass(frozen=True)
class SplitTable:
    """A boxed table that is broken between words only. Columns that do not fit are in further tables below.

    Each table begins with the first ``num_labels`` columns.
    """

    table: Table
    num_labels: int = 1

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the tables."""
        wide = options.update(width=10_000, no_wrap=False)

        def sized(column: Column) -> tuple[Column, int, int]:
            """Return a copy of a column, and its least and largest width with padding and border."""
            sizes = [Measurement.get(console, wide, cell) for cell in (column.header, *column.cells)]
            return copy(column), max(one.minimum for one in sizes) + 3, max(one.maximum for one in sizes) + 3

        rest = list(map(sized, self.table.columns))
        labels = [rest.pop(0) for _ in range(self.num_labels)]
        while rest:
            part, shown = copy(self.table), [*labels, rest.pop(0)]
            while rest and sum(least for _, least, _ in shown) + rest[0][1] < options.max_width:
                shown.append(rest.pop(0))
            spare = options.max_width - 1 - sum(least for _, least, _ in shown)
            for number, (column, least, most) in enumerate(shown):
                share = spare if number < len(labels) else spare // (len(shown) - number)
                column.width = least - 3 + max(0, min(most - least, share))
                spare -= column.width - least + 3
            part.columns = [copy(column) for column, _, _ in shown]
            yield part
