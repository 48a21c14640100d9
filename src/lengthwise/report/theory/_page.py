"""The page's HTML. Everything that users named is escaped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from lengthwise.report._document import document, header, section
from lengthwise.report._marks import scrolling
from lengthwise.report._numbers import UNKNOWN, percent, rounded
from lengthwise.report.theory._answers import amount, answers, cuts_text
from lengthwise.schema.estimate import Estimate
from lengthwise.theory import ORDERS, MultiBinStudy, QueueStudy, share_kept

BINS_NOTE = (
    "Lines are formulas, marks are simulations with their 95 % intervals. A server runs one batch at a time, as "
    "long as its longest member; a bin sends off only full batches."
)
QUEUE_NOTE = (
    "Formulas of the M/G/1 queue, no simulation. SRPT with known sizes is what perfect knowledge gives; the dashed "
    "orders go by predictions."
)
BINS_TERMS = """<dl class="notes">
<dt>Throughput</dt><dd>B / E[time of a batch], of a server that always has a batch (Multi-Bin Batching, Theorem 4.2
and equation 2); with wrong bins the distribution of a batch's members is their exact mixture</dd>
<dt>Capacity</dt><dd>B / mean service time: batches whose members all take equally long (Remark 4.3)</dd>
<dt>Latency</dt><dd>k (B - 1) / (2 rate) + E[time of a batch], infinitely many servers (Lemma 5.1), so that no
batch waits for a server: a lower bound for one server, and a dash where the rate is more than it serves</dd>
<dt>Boundaries</dt><dd>the service times between two bins, in seconds</dd>
<dt>Left out</dt><dd>continuous batching, prefill, memory, and that a step of a fuller batch takes longer</dd>
</dl>"""
QUEUE_TERMS = """<dl class="notes">
<dt>FCFS</dt><dd>first come, first served (Pollaczek and Khinchine)</dd>
<dt>SJF</dt><dd>shortest first, a started request is finished; predicted: Mitzenmacher's SPJF</dd>
<dt>SRPT</dt><dd>shortest remaining first, with preemption; predicted: Mitzenmacher's SPRPT</dd>
<dt>Load</dt><dd>the share of the time that a slot is busy: arrival rate x mean service time / slots</dd>
<dt>Gap</dt><dd>what SRPT with known sizes saves of the mean time under FCFS</dd>
<dt>Kept</dt><dd>the share of that gap that SRPT keeps when it goes by predictions</dd>
<dt>Slowdown</dt><dd>time from arrival to end over the request's own service time, mean over requests</dd>
<dt>Slots</dt><dd>a batch is not one server. It is told as one server of slots times the speed whose waits are scaled by
Erlang's C: within some percent of the mean time in simulations of many slots, but waits of SJF up to a third low</dd>
<dt>Left out</dt><dd>steps that slow down as the batch fills, prefill, memory that holds fewer than all slots, and
what is preempted being computed again</dd>
</dl>"""


def page(
    study: MultiBinStudy | QueueStudy, ids: Sequence[str], *, styles: str, scripts: Sequence[str], data: str
) -> str:
    """The whole document; ``ids`` are those of its figures, ``data`` what they draw, as JSON."""
    bins = isinstance(study, MultiBinStudy)
    heading = "What bins are worth" if bins else "What an order of service is worth"
    said = "".join(f"<li><p>{escape(sentence)}</p></li>" for sentence in answers(study))
    boxes = "".join(f'<figure><div class="plot" id="{name}"></div></figure>' for name in ids)
    table = _bins_table(study) if isinstance(study, MultiBinStudy) else _queue_table(study)
    body = [
        header(heading, list(study.facts)),
        section("The answer", f'<ul class="verdicts">{said}</ul>'),
        section("Curves", f'<div class="grid">{boxes}</div>', BINS_NOTE if bins else QUEUE_NOTE),
        section("All numbers", scrolling("All numbers", table)),
        section("How to read it", BINS_TERMS if bins else QUEUE_TERMS),
    ]
    return document(heading, "".join(body), styles=styles, scripts=scripts, data=data)


def _bins_table(study: MultiBinStudy) -> str:
    timed = math.isfinite(study.rate_rps)
    heads = ["bins", "batch, s", "requests/s", "simulated", "more than one bin", "of capacity", "right bin"]
    heads += ["latency, s (no queue)", "simulated latency, s"] if timed else []
    heads += ["boundaries, s"]
    lines = []
    for row in study.rows:
        cells = [
            amount(row.batch_s),
            amount(row.throughput_rps),
            _estimate(row.simulated_rps),
            percent(row.throughput_rps / study.one_bin_rps - 1),
            percent(row.throughput_rps / study.capacity_rps),
            percent(row.accuracy),
        ]
        waits = [amount(row.latency_s), _estimate(row.simulated_latency_s)] if timed else []
        cells += [UNKNOWN] * len(waits) if study.overloads(row) else waits
        lines.append((str(row.bins), [*cells, cuts_text(row.cuts_s)]))
    return _table(heads, lines)


def _queue_table(study: QueueStudy) -> str:
    heads = ["load", *(f"{label}, s" for label in ORDERS.values()), "gap", "kept"]
    heads += ["slowdown, FCFS", "slowdown, SRPT"]
    return _table(heads, [(f"{load:g}", _queue_cells(study, i)) for i, load in enumerate(study.loads)])


def _queue_cells(study: QueueStudy, at: int) -> list[str]:
    """Mean times, what SRPT saves of FCFS, the predicted SRPT's share of that, and slowdowns at one load."""
    here = {name: sojourns[at] for name, sojourns in study.orders.items()}
    blind, best = here["fcfs"], here["srpt"]
    return [
        *(amount(here[name].mean_s) for name in ORDERS),
        percent(1 - best.mean_s / blind.mean_s),
        percent(share_kept(blind, here["sprpt"], best)),
        amount(blind.slowdown),
        amount(best.slowdown),
    ]


def _table(heads: Sequence[str], lines: Sequence[tuple[str, Sequence[str]]]) -> str:
    top = "".join(f'<th scope="col">{escape(head)}</th>' for head in heads)
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
        for name, cells in lines
    )
    return f"<thead><tr>{top}</tr></thead><tbody>{rows}</tbody>"


def _estimate(value: Estimate) -> str:
    if math.isnan(value.value):
        return UNKNOWN
    text, half = rounded(value.value, value.half_width)
    return f'{text} <span class="half">± {half}</span>' if half else text
