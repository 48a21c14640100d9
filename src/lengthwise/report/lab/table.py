"""The answer of a laboratory for a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lengthwise.report.lab._words import BY_NAME, check_table, place_text, shown
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.lab import FCFS, ORACLE, Cell, LabTable, Verdict

HEADS = {
    "gap_closed": "gap closed, %",
    "jct.mean": "JCT, s",
    "jct.p99/fcfs": "P99/FCFS",
    "jct.p99/oracle": "P99/oracle",
    "slowdown.mean": "mean slowdown",
    "slowdown.p99": "P99 slowdown",
    "wait.max": "longest wait, s",
    "requests_per_s": "req/s",
    "preemptions_per_request": "preempted/request",
    "recomputed_tokens_per_request": "recomputed tokens/request",
}
IDLE = "no queue"
"""The reason of verdicts where everything fits the batch."""
ENDS = {FCFS: "FCFS", ORACLE: "oracle (SJF)"}


def lab_table(table: LabTable) -> Group:
    """A table a load and batch size, and whether length-aware scheduling is worth it there.

    Raises:
        InputError: There is no cell.
    """
    check_table(table)
    parts: list[RenderableType] = []
    for verdict in table.verdicts:
        parts += [Text(place_text(table, verdict.batch, verdict.load), style="bold")]
        if verdict.reason != IDLE:  # where nothing queues all rows are alike
            parts += [_grid(table.at(verdict.batch, verdict.load), verdict)]
        parts += [_verdict(verdict), Text()]
    seeds = "1 seed" if table.seeds == 1 else f"{table.seeds} seeds"
    lines = [Text(line) for line in table.answer]
    facts = (
        f"{table.requests:,} requests x {seeds} a row, the same in all of them; ± half-widths of "
        f"{100 * table.level:g} % intervals, paired by seed. The gap is that in mean JCT between FCFS and the "
        "shortest first with lengths known."
    )
    return Group(*parts, *lines, Text(facts, style="dim"))


def _grid(cells: list[Cell], verdict: Verdict) -> Table:
    made = Table(header_style="bold", box=box.ROUNDED, border_style="dim")
    made.add_column("policy", overflow="fold", min_width=8)
    made.add_column("predictor", overflow="fold", min_width=8)
    heads = {name: head for name, head in HEADS.items() if _told(name, cells)}
    for head in heads.values():
        made.add_column(head, justify="right", overflow="fold")
    for cell in cells:
        end = ENDS.get(cell.policy)
        style = "dim" if end else "bold green" if verdict.worth_it and cell.name == verdict.best else ""
        names = [end or cell.policy, "" if end else cell.predictor]
        made.add_row(*names, *(_text(cell, name) for name in heads), style=style)
    return made


def _told(name: str, cells: list[Cell]) -> bool:
    """Columns of zeros throughout say nothing."""
    return not name.endswith("_per_request") or any(cell[name].value > 0 for cell in cells)


def _text(cell: Cell, name: str) -> str:
    value, half = shown(BY_NAME[name], cell[name])
    with_half = name in ("gap_closed", "jct.p99/fcfs")
    if not with_half:
        value, _ = shown(BY_NAME[name], Estimate(cell[name].value))
    return f"{value} ± {half}" if with_half and half not in ("", "0") else value


def _verdict(verdict: Verdict) -> Text:
    head = (f"{verdict.head}: ", "bold green" if verdict.worth_it else "bold red")
    return Text.assemble(head, verdict.sentence)
