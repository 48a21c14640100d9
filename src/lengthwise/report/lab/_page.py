"""The page's HTML, section by section. Everything that users named is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from lengthwise.report._document import document, header, section
from lengthwise.report._marks import scrolling
from lengthwise.report.lab._data import NAMES
from lengthwise.report.lab._words import BY_NAME, Metric, place_text, shown
from lengthwise.schema.lab import Cell, LabTable, Verdict

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
    facts = [
        *table.facts.values(),
        f"{table.requests:,} requests",
        "1 seed" if table.seeds == 1 else f"{table.seeds} seeds",
    ]
    body = [
        header(heading, facts),
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
    items = "".join(_answer(table, verdict) for verdict in table.verdicts)
    return f'<p class="muted">{RULE}</p><ul class="verdicts">{items}</ul>'


def _answer(table: LabTable, verdict: Verdict) -> str:
    kind = "yes" if verdict.worth_it else "no"
    place = escape(place_text(table, verdict.batch, verdict.load))
    return (
        f'<li><h3>{place}</h3><p class="binds {kind}">{verdict.head}</p>'
        f'<p class="muted">{escape(verdict.sentence)}</p></li>'
    )


def _listing(table: LabTable) -> str:
    metrics = [BY_NAME.get(name) or _bare(name) for name in LISTED]
    heads = "".join(f'<th scope="col">{escape(_head(metric))}</th>' for metric in metrics)
    made = []
    for verdict in table.verdicts:
        cells = table.at(verdict.batch, verdict.load)
        rows = "".join(_row(cell, metrics) for cell in cells)
        place = place_text(table, verdict.batch, verdict.load)
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
