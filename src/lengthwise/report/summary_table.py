"""The headline table for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from lengthwise.metrics import Counts
from lengthwise.report.binding import Binding, binding_of, bound_by
from lengthwise.report.formatting import buckets
from lengthwise.report.headline import Cell, Row, rows
from lengthwise.report.result import Result, check_results

FEW_SEEDS = 3
"""With fewer, Student's t is above 4 and intervals say little."""


def table(results: list[Result]) -> Group:
    """Variants side by side: metrics as rows, "value ± half-width (low - high)" as cells, what binds below.

    An interval that would leave what is possible (below 0, a share above 100 %) is cut there and
    shown with both its sides. The lines below are as wide as the console, not as the table.

    Bold green marks a variant that is better than all others beyond their intervals.

    Raises:
        InputError: There is no result, or two share a name.
    """
    check_results(results)
    return Group(_numbers(results), _caption(results))


def _numbers(results: list[Result]) -> Table:
    made = Table(header_style="bold", box=box.ROUNDED, border_style="dim")
    made.add_column("", no_wrap=True)
    for result in results:
        made.add_column(escape(result.name), justify="right", overflow="fold")
    shown = [row for row in rows(results) if row.metric.headline]
    for row, following in zip(shown, [*shown[1:], None], strict=True):
        last = following is None or following.metric.group != row.metric.group
        made.add_row(_label(row), *(_cell(c) for c in row.cells), end_section=last)
    return made


def intervals_note(results: Sequence[Result]) -> str:
    """Where the intervals come from, in a few words, and what to do where there are none."""
    summary = results[0].summary
    level = f"{100 * summary.level:g} % intervals"
    if summary.intervals == "seeds":
        few = ", few seeds: wide intervals" if len(summary.seeds) < FEW_SEEDS else ""
        return f"± half-widths of {level} over {len(summary.seeds)} seeds{few}"
    if not any(c.estimate.has_interval for row in rows(results) for c in row.cells):
        return f"no intervals: too few requests{'; use --seeds' if results[0].deployment else ''}"
    return f"± half-widths of {level} within one run (batch means)"


def model_note(results: Sequence[Result]) -> str:
    """What stands in brackets, in a few words; empty where nothing does."""
    told = [r for r in results if r.model_draws]
    if not told:
        return ""
    level = f"{100 * told[0].summary.model_level:g} %"
    return (
        f"In brackets: {level} intervals by the cost model's own error, from {told[0].model_draws} more runs of the "
        "same requests; it is common to all variants of one cost model"
    )


def notes_of(results: Sequence[Result]) -> list[tuple[str, str]]:
    """(variants, note) of what limits the trust, each note once."""
    who: dict[str, list[str]] = {}
    for result in results:
        for note in result.notes:
            who.setdefault(note, []).append(result.name)
    return [("" if len(names) == len(results) else ", ".join(names), note) for note, names in who.items()]


def counts_note(counts: Counts) -> str:
    """Requests by bucket; buckets that are empty go without saying."""
    parts = buckets(counts, "requests")
    why = {
        "prompt reaches max_model_len": counts.rejected_too_long,
        "prompt above the token budget of a step": counts.rejected_over_token_budget,
        "prompt above the KV memory": counts.rejected_over_kv_memory,
    }
    if any(why.values()):
        parts.append("rejected because " + ", ".join(f"{reason}: {n:,}" for reason, n in why.items() if n))
    if counts.preemptions:
        parts.append(f"{counts.preemptions:,} preemptions")
    return ", ".join(parts)


def _label(row: Row) -> Text:
    return Text.assemble(row.metric.label, (f" {row.unit}", "dim"))


def _cell(cell: Cell) -> Text:
    text = Text(cell.text, style="bold green" if cell.leads else "")
    if cell.interval:
        text.append(f" {cell.interval}", style="dim")
    if cell.model:
        text.append(f" {cell.model}", style="dim")
    return text


def _caption(results: list[Result]) -> Text:
    """Where intervals come from, buckets that are not plain, and what binds, once a sentence."""
    lines = [Text(f"{_description(intervals_note(results))}.")]
    if any(r.summary.counts.finished < r.summary.counts.arrivals for r in results):
        lines += [Text.assemble((r.name, "bold"), f": {counts_note(r.summary.counts)}.") for r in results]
    else:
        lines[0].append(" All requests finished.")
    if note := model_note(results):
        lines.insert(1, Text(f"{note}."))
    for who, note in notes_of(results):
        lines.append(Text.assemble((f"{who}: " if who else "", "bold"), (note, "bold yellow")))
    names: dict[Binding, list[str]] = {}
    for result in results:
        names.setdefault(binding_of(result), []).append(result.name)
    for binding, bound in names.items():
        if all(r.deployment is None for r in results if r.name in bound):
            continue
        line = Text.assemble((", ".join(bound), "bold"), ": ", (binding.warning, "bold"))
        by = f" {_description(bound_by(binding))} " if binding.warning else f"{bound_by(binding)} "
        lines.append(line.append_text(Text.assemble(by, (binding.resource, "bold"), f". {binding.description}")))
    return Text("\n").join(lines)


def _description(text: str) -> str:
    return text[:1].upper() + text[1:]
