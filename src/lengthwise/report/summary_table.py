"""The metrics table for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from lengthwise.metrics import Counts
from lengthwise.report.binding import Binding, binding_of, bound_by
from lengthwise.report.formatting import buckets, capitalized
from lengthwise.report.headline import Cell, rows
from lengthwise.report.result import Result, check_results

FEW_SEEDS = 3  # with fewer seeds, Student's t is above 4 and intervals are very wide


def table(results: list[Result]) -> Group:
    """Return variants side by side, bottlenecks below; raise InputError if none is given or names repeat."""
    check_results(results)
    numbers = Table(header_style="bold", box=box.ROUNDED, border_style="dim")
    numbers.add_column("", no_wrap=True)
    for result in results:
        numbers.add_column(Text(result.name), justify="right", overflow="fold")
    shown = [row for row in rows(results) if row.metric.headline]
    for row, following in zip(shown, [*shown[1:], None], strict=True):
        last = following is None or following.metric.group != row.metric.group
        label = Text.assemble(row.metric.label, (f" {row.unit}", "dim"))
        numbers.add_row(label, *(_cell(cell) for cell in row.cells), end_section=last)
    return Group(numbers, _caption(results))


def _cell(cell: Cell) -> Text:
    text = Text(cell.text, style="bold green" if cell.leads else "")
    for interval in filter(None, (cell.interval, cell.model)):
        text.append(f" {interval}", style="dim")
    return text


def _caption(results: list[Result]) -> Text:
    lines = [Text(f"{capitalized(intervals_note(results))}.")]
    if note := model_note(results):
        lines.append(Text(f"{note}."))
    if any(r.summary.counts.finished < r.summary.counts.arrivals for r in results):
        lines += [Text.assemble((r.name, "bold"), f": {counts_note(r.summary.counts)}.") for r in results]
    else:
        lines[0].append(" All requests finished.")
    for names, note in notes_of(results):
        lines.append(Text.assemble((f"{names}: " if names else "", "bold"), (note, "bold yellow")))
    groups: dict[Binding, list[str]] = {}
    for result in results:
        if result.deployment is not None:
            groups.setdefault(binding_of(result), []).append(result.name)
    for binding, variants in groups.items():
        by = f" {capitalized(bound_by(binding))} " if binding.warning else f"{bound_by(binding)} "
        lines.append(
            Text.assemble(
                (", ".join(variants), "bold"), ": ", (binding.warning, "bold"), by, (binding.resource, "bold"),
                f". {binding.description}",
            )
        )  # fmt: skip
    return Text("\n").join(lines)


def intervals_note(results: Sequence[Result]) -> str:
    """Return where the intervals come from, and the remedy where there are none."""
    summary = results[0].summary
    level = f"{100 * summary.level:g} % intervals"
    if summary.intervals == "seeds":
        few = ", few seeds: wide intervals" if len(summary.seeds) < FEW_SEEDS else ""
        return f"± half-widths of {level} over {len(summary.seeds)} seeds{few}"
    if not any(c.estimate.has_interval for row in rows(results) for c in row.cells):
        return f"no intervals: too few requests{'; use --seeds' if results[0].deployment else ''}"
    return f"± half-widths of {level} within one run (batch means)"


def model_note(results: Sequence[Result]) -> str:
    """Return the meaning of the numbers in brackets; empty where there are none."""
    drawn = next((r for r in results if r.model_draws), None)
    if drawn is None:
        return ""
    return (
        f"In brackets: {100 * drawn.summary.model_level:g} % intervals of the cost model's error, from "
        f"{drawn.model_draws} more runs of the same requests; variants with one cost model share this error"
    )


def notes_of(results: Sequence[Result]) -> list[tuple[str, str]]:
    """Return (variants, note) for each distinct note; variants is "" where the note applies to all."""
    names: dict[str, list[str]] = {}
    for result in results:
        for note in result.notes:
            names.setdefault(note, []).append(result.name)
    return [("" if len(some) == len(results) else ", ".join(some), note) for note, some in names.items()]


def counts_note(counts: Counts) -> str:
    """Return requests by outcome, reasons of rejections, and preemptions."""
    parts = buckets(counts, "requests")
    reasons = {
        "prompt reaches max_model_len": counts.rejected_too_long,
        "prompt above the token budget of a step": counts.rejected_over_token_budget,
        "prompt above the KV memory": counts.rejected_over_kv_memory,
    }
    if any(reasons.values()):
        parts.append("rejected because " + ", ".join(f"{reason}: {n:,}" for reason, n in reasons.items() if n))
    if counts.preemptions:
        parts.append(f"{counts.preemptions:,} preemptions")
    return ", ".join(parts)
