"""The errors of one run against another for a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from lengthwise.metrics import Comparison, MetricError
from lengthwise.report.compare._words import (
    NAMES,
    client_text,
    counts_text,
    distance_cells,
    distance_heads,
    error_text,
    how_paired,
    interval_text,
    is_sure,
    scale_of,
    value_text,
)


def compare_table(comparison: Comparison) -> Group:
    """Doubts, then a row a number: A, B, the error and its interval; then distances and requests by bucket.

    Yellow marks errors whose interval does not hold 0.
    """
    return Group(_doubts(comparison), _numbers(comparison), _distances(comparison), _caption(comparison))


def _doubts(comparison: Comparison) -> Text:
    lines = [Text.assemble(("doubt: ", "bold yellow"), doubt) for doubt in comparison.doubts]
    return Text("\n").join(lines) if lines else Text("No doubts.", style="dim")


def _numbers(comparison: Comparison) -> Table:
    table = Table(header_style="bold", box=box.ROUNDED, border_style="dim")
    table.add_column("", no_wrap=True)
    for side, run in (("A", comparison.a), ("B", comparison.b)):
        table.add_column(f"{side}: {escape(run.name)}", justify="right", overflow="fold")
    table.add_column("error", justify="right")
    table.add_column("interval", justify="right")
    shown = comparison.errors
    for one, following in zip(shown, [*shown[1:], None], strict=True):
        last = following is None or (one.stat != "" and following.metric != one.metric)
        table.add_row(*_row(comparison, one), end_section=last)
    return table


def _row(comparison: Comparison, one: MetricError) -> tuple[Text | str, ...]:
    scale, unit = scale_of(comparison, one.metric)
    label = Text.assemble(f"{NAMES[one.metric]} {one.stat}".strip(), (f" {unit}" if unit else "", "dim"))
    error = Text(error_text(one), style="yellow" if is_sure(one) else "")
    values = (value_text(value * scale) for value in (one.a, one.b))
    return (label, *values, error, Text(interval_text(one), style="dim"))


def _distances(comparison: Comparison) -> Table:
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("whole distributions")
    for head in distance_heads(comparison):
        table.add_column(head, justify="right")
    for one in comparison.distances:
        table.add_row(NAMES[one.metric], *distance_cells(comparison, one))
    return table


def _caption(comparison: Comparison) -> Text:
    lines = [f"{how_paired(comparison)}."]
    for side, run in (("A", comparison.a), ("B", comparison.b)):
        own = f"; {client_text(run)}" if run.client else ""
        lines.append(f"{side} ({run.source}): {counts_text(run.counts)}{own}.")
    return Text("\n".join(lines), style="dim")
