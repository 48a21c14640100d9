"""The lab's answer to whether length-aware scheduling is worth it: a terminal table, a page and a JSON file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from lengthwise.report.curves import json_number
from lengthwise.report.fitted_table import SplitTable, boxed_table
from lengthwise.report.formatting import PLUS_MINUS, amount, counted, rounded
from lengthwise.report.html_page import TableCell, write_page
from lengthwise.report.json_file import json_text, plain
from lengthwise.schema.errors import InputError
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.files import write_atomic
from lengthwise.schema.lab import FCFS, ORACLE, Cell, LabTable, Verdict
from lengthwise.schema.metric_names import LESS, MORE, NEITHER, PREFIX_CACHE


@dataclass(frozen=True)
class Metric:
    """How to show a metric of ``Cell.values``. The value times ``factor`` is shown in the unit ``unit``."""

    name: str
    label: str
    unit: str
    factor: float
    better: int  # the better direction: LESS, MORE or NEITHER


METRICS = (
    Metric("gap_closed", "Gap closed", "%", 100.0, MORE),
    Metric("jct.mean", "Mean JCT", "s", 1.0, LESS),
    Metric("jct.mean/fcfs", "Mean JCT / FCFS", "", 1.0, LESS),
    Metric("jct.p50/fcfs", "Median JCT / FCFS", "", 1.0, LESS),
    Metric("jct.p99/fcfs", "P99 JCT / FCFS", "", 1.0, LESS),
    Metric("jct.p99/oracle", "P99 JCT / oracle", "", 1.0, LESS),
    Metric("jct.p50", "Median JCT", "s", 1.0, LESS),
    Metric("jct.p99", "P99 JCT", "s", 1.0, LESS),
    Metric("ttft.mean", "Mean TTFT", "s", 1.0, LESS),
    Metric("slowdown.mean", "Mean slowdown", "", 1.0, LESS),
    Metric("slowdown.p99", "P99 slowdown", "", 1.0, LESS),
    Metric("wait.max", "Longest wait", "s", 1.0, LESS),
    Metric("requests_per_s", "Requests", "/s", 1.0, MORE),
    Metric("preemptions_per_request", "Preemptions/request", "", 1.0, LESS),
    Metric("recomputed_tokens_per_request", "Recomputed tokens/request", "", 1.0, LESS),
    Metric("hit_rate", "Prompt tokens cached", "%", 100.0, MORE),
    Metric("loaded_share", "Prompt tokens loaded", "%", 100.0, NEITHER),
    Metric("found_full", "Batch full on arrival", "%", 100.0, NEITHER),
    Metric("served", "Served", "%", 100.0, MORE),
)
BY_NAME = {metric.name: metric for metric in METRICS}
LISTED = (  # columns of the page's tables
    "gap_closed", "jct.mean", "jct.p50/fcfs", "jct.p99/fcfs", "jct.p50/oracle", "jct.p99/oracle", "slowdown.mean",
    "slowdown.p99", "wait.max", "requests_per_s", "preemptions_per_request", "recomputed_tokens_per_request",
    "hit_rate", "loaded_share",
)  # fmt: skip
TERMINAL_HEADS = {
    "gap_closed": "gap closed, %",
    "jct.mean": "JCT, s",
    "jct.p99/fcfs": "P99/FCFS",
    "jct.p99/oracle": "P99/oracle",
    "slowdown.mean": "mean slowdown",
    "slowdown.p99": "P99 slowdown",
    "wait.max": "longest wait, s",
    "requests_per_s": "req/s",
    "preemptions_per_request": "preemptions/request",
    "recomputed_tokens_per_request": "recomputed tokens/request",
    "hit_rate": "cached, %",
    "loaded_share": "loaded, %",
}
NAMES = {FCFS: "FCFS", ORACLE: "oracle (SJF, lengths known)"}  # the two ends of the gap


def place_text(table: LabTable, batch: int, load: float) -> str:
    """Return a load and a batch size as text, with the rate in requests/s."""
    rate_rps = table.at(batch, load)[0].rate_rps
    rate = "" if table.unit == "rps" else f" ({amount(rate_rps)} requests/s)"
    return f"{table.unit.text(load)}{rate}, batch {batch}"


def _check_table(table: LabTable) -> None:
    if not table.cells:
        raise InputError("a laboratory's report needs at least one cell; there is none")


def _texts(metric: Metric, estimate: Estimate) -> tuple[str, str]:
    """Return a value and "± half-width" in the metric's unit. The second is "" if the half-width is unknown or 0."""
    value, half = rounded(estimate.value * metric.factor, estimate.half_width * metric.factor)
    return value, f"{PLUS_MINUS} {half}" if half not in ("", "0") else ""


def lab_table(table: LabTable) -> Group:
    """Return a table and a verdict for each load and batch size. Raises InputError if there are no results."""
    _check_table(table)
    parts: list[RenderableType] = []
    for decision in table.decisions:
        cells = table.at(decision.batch, decision.load)
        parts.append(Text(place_text(table, decision.batch, decision.load), style="bold"))
        if decision.reason != "no queue":  # all rows are equal where nothing queues
            parts.append(_grid(cells, decision))
        head = (f"{decision.head}: ", "bold green" if decision.is_improvement else "bold red")
        parts += [Text.assemble(head, decision.description), Text()]
    caption = (
        f"{table.requests:,} requests x {counted(table.seeds, 'seed')} per row, the same in all rows; ± half-widths of "
        f"{100 * table.level:g} % intervals, paired by seed. The gap is that in mean JCT between FCFS and "
        "shortest job first with known lengths."
    )
    return Group(*parts, *map(Text, table.answer), Text(caption, style="dim"))


def _grid(cells: list[Cell], decision: Verdict) -> SplitTable:
    made = boxed_table()
    made.add_column("policy")
    made.add_column("predictor")
    # A column of preemptions or cached tokens that is 0 or unknown in every row carries no information.
    optional = {name for name in TERMINAL_HEADS if name.endswith("_per_request")} | PREFIX_CACHE.keys()
    shown = [name for name in TERMINAL_HEADS if name not in optional or any(cell[name].value > 0 for cell in cells)]
    for name in shown:
        made.add_column(TERMINAL_HEADS[name], justify="right")
    for cell in cells:
        texts = []
        for name in shown:
            has_half = name in ("gap_closed", "jct.p99/fcfs")
            estimate = cell[name] if has_half else Estimate(cell[name].value)
            texts.append(" ".join(filter(None, _texts(BY_NAME[name], estimate))))
        is_end = cell.policy in NAMES
        style = "dim" if is_end else "bold green" if decision.is_improvement and cell.name == decision.best else ""
        policy = {FCFS: "FCFS", ORACLE: "oracle (SJF)"}.get(cell.policy, cell.policy)
        made.add_row(policy, "" if is_end else cell.predictor, *texts, style=style)
    return SplitTable(made, 2)


def _cards(table: LabTable) -> list[tuple[str, str, str]]:
    """Return the answer's numbers as (label, value, note): those of the largest gain, or of known lengths."""
    won = [decision for decision in table.decisions if decision.is_improvement]
    cards = [("Worth it", f"{len(won)} of {len(table.decisions)}", "loads and batch sizes")]
    ends = [
        cell
        for one in won or table.decisions
        for cell in table.at(one.batch, one.load)
        if (cell.name == one.best if won else cell.policy == ORACLE)
    ]
    if ends:
        best = min(ends, key=lambda cell: cell["jct.mean/fcfs"].value)
        about = f"{NAMES.get(best.policy, best.name)}, {place_text(table, best.batch, best.load)}"
        for name in ("jct.mean/fcfs", "jct.p99/fcfs", "jct.mean"):
            metric = BY_NAME[name]
            cards.append((metric.label, " ".join(filter(None, (*_texts(metric, best[name]), metric.unit))), about))
    return cards


def write_lab_html(path: Path | str, table: LabTable) -> None:
    """Write a self-contained HTML page of a lab. Raises InputError if there are no results."""
    _check_table(table)
    listed = [n for n in LISTED if n not in PREFIX_CACHE or any(not math.isnan(c[n].value) for c in table.cells)]
    metrics = [BY_NAME.get(name) or Metric(name, "Median JCT / oracle", "", 1.0, LESS) for name in listed]
    heads = [f"{m.label}, {m.unit}" if m.unit not in ("", "/s") else m.label for m in metrics]
    places = []
    for decision in table.decisions:
        cells = table.at(decision.batch, decision.load)
        rows = [[NAMES.get(c.policy, c.name), *(TableCell(*_texts(m, c[m.name])) for m in metrics)] for c in cells]
        places.append((place_text(table, decision.batch, decision.load), decision, rows))
    write_page(
        path,
        "lab",
        data=_columns(table),
        heading=table.name or "Is length-aware scheduling worth it?",
        metadata=[*table.metadata.values(), f"{table.requests:,} requests", counted(table.seeds, "seed")],
        cards=_cards(table),
        heads=["", *heads],
        places=places,
        level=f"{100 * table.level:g} %",
    )


def _columns(table: LabTable) -> dict[str, Any]:
    cells = {(cell.policy, cell.predictor, cell.batch, cell.load): cell for cell in table.cells}
    sides = list(dict.fromkeys((cell.policy, cell.predictor) for cell in table.cells))
    metrics = [m for m in METRICS if any(not math.isnan(cell[m.name].value) for cell in table.cells)]
    policies = list(dict.fromkeys(policy for policy, _ in sides))
    predictors = list(dict.fromkeys(predictor for _, predictor in sides))

    def pair(e: Estimate) -> list[float | None]:
        return [json_number(e.value), json_number(e.half_width)]

    def values(name: str, side: tuple[str, str]) -> list[list[list[float | None]]]:
        return [[pair(cells[*side, batch, load][name]) for load in table.loads] for batch in table.batches]

    def named(policy: str, predictor: str) -> dict[str, Any]:
        name = NAMES.get(policy, f"{policy} ({predictor})" if predictor else policy)
        places = {"policy": policies.index(policy), "predictor": predictors.index(predictor)}
        return {"name": name, **places, "end": policy in NAMES}

    units = {"capacity": "share of capacity", "rps": "requests/s"}
    return {
        "unit": units.get(table.unit, "x the average rate"),
        "loads": [float(load) for load in table.loads],
        "loadTexts": [table.unit.text(load) for load in table.loads],
        "batches": table.batches,
        "sides": [named(*side) for side in sides],
        "policies": [NAMES.get(policy, policy) for policy in policies],
        "predictors": [predictor or "no predictor" for predictor in predictors],
        "metrics": [vars(metric) for metric in metrics],
        "values": {metric.name: [values(metric.name, side) for side in sides] for metric in metrics},
    }


def write_lab_json(path: Path | str, table: LabTable) -> None:
    """Write all results of a lab to a JSON file. Raises InputError if there are no results."""
    _check_table(table)
    write_atomic(path, json_text("lab", plain(table)).encode())
