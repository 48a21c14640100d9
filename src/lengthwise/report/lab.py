"""Laboratories to people: is length-aware scheduling worth it, as a terminal table, a page and a file."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lengthwise.report.formatting import UNKNOWN, rounded
from lengthwise.report.html_document import asset, document, header, plotly_js, scrolling, section
from lengthwise.report.json_file import plain
from lengthwise.schema.errors import InputError
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.files import write_whole
from lengthwise.schema.lab import FCFS, ORACLE, Cell, LabTable, Verdict

MORE, LESS, NEITHER = 1, -1, 0


@dataclass(frozen=True)
class Metric:
    """A metric of Cell.values as it is shown: its value times ``factor``, in ``unit``."""

    name: str
    label: str
    unit: str
    factor: float
    better: int


METRICS = (
    Metric("gap_closed", "Gap closed", "%", 100.0, MORE),
    Metric("jct.mean", "Mean JCT", "s", 1.0, LESS),
    Metric("jct.mean/fcfs", "Mean JCT over FCFS'", "", 1.0, LESS),
    Metric("jct.p50/fcfs", "Median JCT over FCFS'", "", 1.0, LESS),
    Metric("jct.p99/fcfs", "P99 JCT over FCFS'", "", 1.0, LESS),
    Metric("jct.p99/oracle", "P99 JCT over the oracle's", "", 1.0, LESS),
    Metric("jct.p50", "Median JCT", "s", 1.0, LESS),
    Metric("jct.p99", "P99 JCT", "s", 1.0, LESS),
    Metric("ttft.mean", "Mean TTFT", "s", 1.0, LESS),
    Metric("slowdown.mean", "Mean slowdown", "", 1.0, LESS),
    Metric("slowdown.p99", "P99 slowdown", "", 1.0, LESS),
    Metric("wait.max", "Longest wait", "s", 1.0, LESS),
    Metric("requests_per_s", "Requests", "/s", 1.0, MORE),
    Metric("preemptions_per_request", "Preemptions/request", "", 1.0, LESS),
    Metric("recomputed_tokens_per_request", "Recomputed tokens/request", "", 1.0, LESS),
    Metric("found_full", "Found all seats taken", "%", 100.0, NEITHER),
    Metric("served", "Served", "%", 100.0, MORE),
)
BY_NAME = {metric.name: metric for metric in METRICS}


def shown(metric: Metric, estimate: Estimate) -> tuple[str, str]:
    """A value and its half-width as text, in the metric's unit; the second is empty where it is not known."""
    if math.isnan(estimate.value):
        return UNKNOWN, ""
    return rounded(estimate.value * metric.factor, estimate.half_width * metric.factor)


def side_names(table: LabTable) -> list[tuple[str, str]]:
    """(policy, predictor) of every row, FCFS and the oracle first."""
    return list(dict.fromkeys((cell.policy, cell.predictor) for cell in table.cells))


def place_text(table: LabTable, batch: int, load: float) -> str:
    """One load and batch size in words, with the rate in requests a second."""
    rate_rps = table.at(batch, load)[0].rate_rps
    rate = "" if table.unit == "rps" else f" ({rounded(rate_rps, math.nan)[0]} requests/s)"
    return f"{table.unit.text(load)}{rate}, batch {batch}"


def cell_of(table: LabTable, side: tuple[str, str], batch: int, load: float) -> Cell:
    """The cell of a row at one load and batch size."""
    return next(c for c in table.at(batch, load) if (c.policy, c.predictor) == side)


def check_table(table: LabTable) -> None:
    """Raises InputError where there is nothing to show."""
    if not table.cells:
        raise InputError("a laboratory's report needs at least one cell; there is none")


NAMES = {FCFS: "FCFS", ORACLE: "oracle (SJF, lengths known)"}


def lab_data(table: LabTable) -> dict[str, Any]:
    """Sides, loads, batches, and for every metric a number and half-width a side, batch and load."""
    sides = side_names(table)
    told = [m for m in METRICS if any(not math.isnan(cell[m.name].value) for cell in table.cells)]
    policies = list(dict.fromkeys(policy for policy, _ in sides))
    predictors = list(dict.fromkeys(predictor for _, predictor in sides))
    return {
        "unit": {"capacity": "share of capacity", "isolated": "x the average rate", "rps": "requests/s"}[table.unit],
        "loads": [float(load) for load in table.loads],
        "loadTexts": [table.unit.text(load) for load in table.loads],
        "batches": table.batches,
        "sides": [
            {
                "name": NAMES.get(policy, f"{policy} ({predictor})" if predictor else policy),
                "policy": policies.index(policy),
                "predictor": predictors.index(predictor),
                "end": policy in NAMES,
            }
            for policy, predictor in sides
        ],
        "policies": [NAMES.get(policy, policy) for policy in policies],
        "predictors": [predictor or "needs none" for predictor in predictors],
        "metrics": [
            {"name": m.name, "label": m.label, "unit": m.unit, "factor": m.factor, "better": m.better} for m in told
        ],
        "values": {m.name: [_of_side(table, side, m.name) for side in sides] for m in told},
    }


def _of_side(table: LabTable, side: tuple[str, str], metric: str) -> list[list[list[float | None]]]:
    """[batches][loads] of (value, half-width)."""
    return [
        [
            [_short(e.value), _short(e.half_width)]
            for load in table.loads
            for e in (cell_of(table, side, batch, load)[metric],)
        ]
        for batch in table.batches
    ]


def _short(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


FRONTIER_NOTE = (
    "Up is a larger share of the gap in mean JCT between FCFS and the oracle, left a shorter tail. Bars are "
    "intervals. A colour is a policy, a shape a predictor; the line joins what nothing else beats in both. "
    "What lies below -100 % is drawn there with an open mark."
)
ACROSS_NOTE = (
    "The same policies over all loads, or over all batch sizes. A colour is a policy, a dash and a mark a predictor. "
    "A gap closed below -100 % is drawn at -100 % with an open mark; hover for its value."
)
HEAT_NOTE = (
    "Every policy and predictor at every load and batch size. Darker is better; of the gap closed the shade goes from "
    "0 to 100 %, and red is worse than FCFS."
)
ALL_NOTE = "Means over seeds; ± half-widths of {level} intervals, paired by seed."

FRONTIER = """<div class="tools"><label>Load <select id="load"></select></label>
<label>Batch size <select id="batch"></select></label>
<label>Tail <select id="tail"></select></label></div>
<figure><div class="plot tall" id="frontier"></div></figure>
<ul class="legend" id="policies"></ul><ul class="legend" id="predictors"></ul>"""
ACROSS = """<div class="tools"><label>Of <select id="metric"></select></label>
<label>Across <select id="across"></select></label>
<label id="fixed-label">at <select id="fixed"></select></label></div>
<figure><div class="plot tall" id="curves"></div></figure><ul class="legend" id="sides"></ul>"""
HEAT = """<div class="tools"><label>Of <select id="heat-metric"></select></label></div>
<div class="scroll" tabindex="0" role="region" aria-label="Heat map"><table id="heat"></table></div>"""

RULE = (
    "Worth it: some policy with a predictor that can be had surely cuts the mean JCT of FCFS by 1 % at least, and "
    "costs the 99th percentile no more than that."
)
LISTED = (
    "gap_closed", "jct.mean", "jct.p50/fcfs", "jct.p99/fcfs", "jct.p50/oracle", "jct.p99/oracle", "slowdown.mean",
    "slowdown.p99", "wait.max", "requests_per_s", "preemptions_per_request", "recomputed_tokens_per_request",
)  # fmt: skip

NOTES = """<dl class="notes">
<dt>JCT</dt><dd>arrival until last token (also end-to-end latency)</dd>
<dt>FCFS</dt><dd>first come, first served</dd>
<dt>Oracle</dt><dd>the shortest output first with lengths known, nobody interrupted; what interrupts can do better</dd>
<dt>Gap closed</dt><dd>(mean JCT of FCFS - its own) / (mean JCT of FCFS - the oracle's); unknown where seeds do not
tell that there is a gap</dd>
<dt>Slowdown</dt><dd>JCT over the JCT of the same request with nobody else there</dd>
<dt>Longest wait</dt><dd>time in queues in all, after evictions, too; the longest of a run, mean over seeds</dd>
<dt>Recomputed</dt><dd>tokens computed again because their request had to leave its seat</dd>
<dt>Interval</dt><dd>± is the half-width of a {level} interval over seeds of the simulation; every policy meets
the same requests at the same times, so that what they share falls out</dd>
<dt>Worth it</dt><dd>some policy with a predictor that can be had is surely faster than FCFS in the mean, by 1 % at
least, and costs the 99th percentile no more than it gains the mean; sure for all that were tried together
(Bonferroni), never with one seed, and not judged where served shares differ by more than one point</dd>
</dl>"""


def page(table: LabTable, *, styles: str, scripts: Sequence[str], data: str) -> str:
    """The whole document; ``data`` is what its figures draw, as JSON."""
    heading, level = table.name or "Is length-aware scheduling worth it?", f"{100 * table.level:g} %"
    metadata = [
        *table.metadata.values(),
        f"{table.requests:,} requests",
        "1 seed" if table.seeds == 1 else f"{table.seeds} seeds",
    ]
    body = [
        header(heading, metadata),
        section("Is length-aware scheduling worth it?", _answers(table)),
        section("Gap closed against the tail", _interactive(FRONTIER), FRONTIER_NOTE),
        section("By load and batch size", _interactive(ACROSS), ACROSS_NOTE),
        section("All at once", _interactive(HEAT), HEAT_NOTE),
        section("All numbers", _listing(table), ALL_NOTE.format(level=level)),
        section("How to read it", NOTES.format(level=level)),
    ]
    return document(heading, "".join(body), styles=styles, scripts=scripts, data=data)


def _interactive(html: str) -> str:
    return f'<div class="interactive">{html}</div>'


def _answers(table: LabTable) -> str:
    items = "".join(_answer(table, decision) for decision in table.decisions)
    return f'<p class="muted">{RULE}</p><ul class="verdicts">{items}</ul>'


def _answer(table: LabTable, decision: Verdict) -> str:
    kind = "yes" if decision.is_improvement else "no"
    place = escape(place_text(table, decision.batch, decision.load))
    return (
        f'<li><h3>{place}</h3><p class="binds {kind}">{decision.head}</p>'
        f'<p class="muted">{escape(decision.description)}</p></li>'
    )


def _listing(table: LabTable) -> str:
    metrics = [BY_NAME.get(name) or _bare(name) for name in LISTED]
    heads = "".join(f'<th scope="col">{escape(_head(metric))}</th>' for metric in metrics)
    made = []
    for decision in table.decisions:
        cells = table.at(decision.batch, decision.load)
        rows = "".join(_row(cell, metrics) for cell in cells)
        place = place_text(table, decision.batch, decision.load)
        whole = f"<thead><tr><td></td>{heads}</tr></thead><tbody>{rows}</tbody>"
        made.append(f"<details><summary>{escape(place)}</summary>{scrolling(place, whole)}</details>")
    return "".join(made)


def _bare(name: str) -> Metric:
    return Metric(name, "Median JCT over the oracle's" if name == "jct.p50/oracle" else name, "", 1.0, -1)


def _head(metric: Metric) -> str:
    return f"{metric.label}, {metric.unit}" if metric.unit not in ("", "/s") else metric.label


def _row(cell: Cell, metrics: Sequence[Metric]) -> str:
    texts = (shown(metric, cell[metric.name]) for metric in metrics)
    cells = "".join(f"<td>{value}{_half(half)}</td>" for value, half in texts)
    return f'<tr><th scope="row">{escape(NAMES.get(cell.policy, cell.name))}</th>{cells}</tr>'


def _half(half: str) -> str:
    return f' <span class="half">± {half}</span>' if half not in ("", "0") else ""


def write_lab_html(path: Path | str, table: LabTable) -> None:
    """A self-contained page: the answer, gap closed against the tail, by load and batch, all numbers.

    Nothing is fetched when it is opened (a content security policy sees to that), and the same table
    gives the same bytes.

    Raises:
        InputError: There is no cell.
        MissingExtraError: plotly is not installed.
        OutputError: The file cannot be written.
    """
    check_table(table)
    plotly = plotly_js()
    data = json.dumps(lab_data(table), separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    text = page(
        table,
        styles=asset("page.css") + asset("lab/lab.css"),
        scripts=[plotly, asset("look.js"), asset("lab/lab.js")],
        data=data,
    )
    write_whole(path, text.encode())


VERSION = 1


def write_lab_json(path: Path | str, table: LabTable) -> None:
    """A JSON file with everything that a laboratory found, under stable keys (see the module).

    Raises:
        InputError: There is no cell.
        OutputError: The file cannot be written.
    """
    check_table(table)
    made = {"format": "lengthwise.lab", "version": VERSION, **plain(dataclasses.asdict(table))}
    text = json.dumps(made, indent=2, ensure_ascii=False, allow_nan=False)
    write_whole(path, (text + "\n").encode())


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
    for decision in table.decisions:
        parts += [Text(place_text(table, decision.batch, decision.load), style="bold")]
        if decision.reason != IDLE:  # where nothing queues all rows are alike
            parts += [_grid(table.at(decision.batch, decision.load), decision)]
        parts += [_decision(decision), Text()]
    seeds = "1 seed" if table.seeds == 1 else f"{table.seeds} seeds"
    lines = [Text(line) for line in table.answer]
    metadata = (
        f"{table.requests:,} requests x {seeds} a row, the same in all of them; ± half-widths of "
        f"{100 * table.level:g} % intervals, paired by seed. The gap is that in mean JCT between FCFS and the "
        "shortest first with lengths known."
    )
    return Group(*parts, *lines, Text(metadata, style="dim"))


def _grid(cells: list[Cell], decision: Verdict) -> Table:
    made = Table(header_style="bold", box=box.ROUNDED, border_style="dim")
    made.add_column("policy", overflow="fold", min_width=8)
    made.add_column("predictor", overflow="fold", min_width=8)
    heads = {name: head for name, head in HEADS.items() if _report(name, cells)}
    for head in heads.values():
        made.add_column(head, justify="right", overflow="fold")
    for cell in cells:
        end = ENDS.get(cell.policy)
        style = "dim" if end else "bold green" if decision.is_improvement and cell.name == decision.best else ""
        names = [end or cell.policy, "" if end else cell.predictor]
        made.add_row(*names, *(_text(cell, name) for name in heads), style=style)
    return made


def _report(name: str, cells: list[Cell]) -> bool:
    """Columns of zeros throughout say nothing."""
    return not name.endswith("_per_request") or any(cell[name].value > 0 for cell in cells)


def _text(cell: Cell, name: str) -> str:
    value, half = shown(BY_NAME[name], cell[name])
    with_half = name in ("gap_closed", "jct.p99/fcfs")
    if not with_half:
        value, _ = shown(BY_NAME[name], Estimate(cell[name].value))
    return f"{value} ± {half}" if with_half and half not in ("", "0") else value


def _decision(decision: Verdict) -> Text:
    head = (f"{decision.head}: ", "bold green" if decision.is_improvement else "bold red")
    return Text.assemble(head, decision.description)
