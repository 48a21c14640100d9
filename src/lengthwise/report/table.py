"""The headline table for a terminal."""

from __future__ import annotations

from rich import box
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from lengthwise.metrics import Counts, Summary
from lengthwise.report._rows import Cell, Row, rows
from lengthwise.report.binding import Binding, bound_by, what_binds
from lengthwise.report.result import Result, check_results


def table(results: list[Result]) -> Table:
    """Variants side by side: metrics as rows, "value ± half-width" as cells, what binds below.

    Bold green marks a variant that is better than all others beyond their intervals.

    Raises:
        InputError: There is no result, or two share a name.
    """
    check_results(results)
    made = Table(
        caption=_caption(results),
        caption_justify="left",
        caption_style="",
        header_style="bold",
        box=box.ROUNDED,
        border_style="dim",
    )
    made.add_column("", no_wrap=True)
    for result in results:
        made.add_column(escape(result.name), justify="right", overflow="fold")
    shown = [row for row in rows(results) if row.metric.headline]
    for row, following in zip(shown, [*shown[1:], None], strict=True):
        last = following is None or following.metric.group != row.metric.group
        made.add_row(_label(row), *(_cell(c) for c in row.cells), end_section=last)
    return made


def intervals_note(summary: Summary) -> str:
    """Where the intervals come from, in a few words."""
    level = f"{100 * summary.level:g} % intervals"
    if summary.intervals == "seeds":
        return f"± half-widths of {level} over {len(summary.seeds)} seeds"
    return f"± half-widths of {level} within one run (batch means)"


def counts_note(counts: Counts) -> str:
    """Requests by bucket; buckets that are empty go without saying."""
    others = {"rejected": counts.rejected, "timed out": counts.timed_out, "unfinished": counts.unfinished}
    parts = [f"{counts.finished:,} of {counts.arrived:,} requests finished"]
    parts += [f"{count:,} {name}" for name, count in others.items() if count]
    why = {
        "prompt reaches max_model_len": counts.rejected_too_long,
        "prompt above the token budget of a step": counts.rejected_over_token_budget,
        "prompt above the KV memory": counts.rejected_over_kv_memory,
    }
    if counts.rejected:
        parts.append("rejected because " + ", ".join(f"{reason}: {n:,}" for reason, n in why.items() if n))
    if counts.preemptions:
        parts.append(f"{counts.preemptions:,} preemptions")
    return ", ".join(parts)


def _label(row: Row) -> Text:
    return Text.assemble(row.metric.label, (f" {row.unit}", "dim"))


def _cell(cell: Cell) -> Text:
    text = Text(cell.text, style="bold green" if cell.leads else "")
    if cell.half_width:
        text.append(f" ± {cell.half_width}", style="dim")
    return text


def _caption(results: list[Result]) -> Text:
    """Where intervals come from, buckets that are not plain, and what binds, once a sentence."""
    lines = [Text(f"{intervals_note(results[0].summary)}.")]
    if any(r.summary.counts.finished < r.summary.counts.arrived for r in results):
        lines += [Text.assemble((r.name, "bold"), f": {counts_note(r.summary.counts)}.") for r in results]
    else:
        lines[0].append(" All requests finished.")
    names: dict[Binding, list[str]] = {}
    for result in results:
        names.setdefault(what_binds(result.summary), []).append(result.name)
    for binding, who in names.items():
        head = (", ".join(who), "bold"), f": {bound_by(binding)} ", (binding.resource, "bold")
        lines.append(Text.assemble(*head, f". {binding.sentence}"))
    return Text("\n").join(lines)
