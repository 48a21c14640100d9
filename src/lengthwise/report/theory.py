"""Theory to people: what bins, and what an order of service, are worth; a page with theory over simulation."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise.report.formatting import UNKNOWN, percent, rounded, seconds
from lengthwise.report.html_document import asset, document, header, plotly_js, scrolling, section
from lengthwise.report.json_file import plain
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.files import write_whole
from lengthwise.theory import ORDERS, MultiBinStudy, QueueStudy, share_retained

SHOWN_CUTS = 4
"""So many boundaries are written out."""
MIN_RELEVANT = 0.05
"""A gain of less than this share is not worth a predictor."""


def answers(study: MultiBinStudy | QueueStudy) -> list[str]:
    """What the study says, a sentence each."""
    return _multibin_sentences(study) if isinstance(study, MultiBinStudy) else _queue_sentences(study)


def amount(value: float) -> str:
    """A number with three digits."""
    return rounded(value, math.nan)[0]


def cuts_text(cuts_s: Iterable[float]) -> str:
    """Boundaries in a row; of many the first ones and the last."""
    shown = [f"{cut:.4g}" for cut in cuts_s]
    if len(shown) > SHOWN_CUTS:
        shown = [*shown[: SHOWN_CUTS - 1], "..", shown[-1]]
    return " ".join(shown) or "none"


def _multibin_sentences(study: MultiBinStudy) -> list[str]:
    best = max(study.rows, key=lambda row: row.throughput_rps)
    most = study.capacity_rps / study.one_bin_rps - 1
    told = [
        (
            f"{_bin_count_text(best.bins)} of batches of {study.batch} serve {amount(best.throughput_rps)} requests a second: "
            f"{percent(best.throughput_rps / study.one_bin_rps - 1)} more than one bin, "
            f"{percent(best.throughput_rps / study.capacity_rps)} of the capacity that infinitely many would reach."
        )
    ]
    if math.isfinite(study.target_rps):
        share = percent(study.target_rps / study.capacity_rps)
        told.append(
            f"{_bin_count_text(study.bins_needed)} with known lengths reach {share} of the capacity."
            if study.bins_needed
            else f"No number of bins that was tried reaches {share} of the capacity."
        )
    if most < MIN_RELEVANT:
        told.append(
            f"No number of bins is worth it here: the lengths differ so little that even infinitely many gain "
            f"{percent(most)}."
        )
    if math.isfinite(study.rate_rps) and study.rate_rps >= study.one_bin_rps:
        enough = next((row.bins for row in study.rows if row.throughput_rps > study.rate_rps), None)
        told.append(
            f"One bin cannot serve {amount(study.rate_rps)} requests a second; "
            + (f"{_bin_count_text(enough)} can." if enough else "none of these numbers of bins can with one server.")
        )
    return told


def _queue_sentences(study: QueueStudy) -> list[str]:
    last = len(study.loads) - 1
    blind, best, guessed = (study.orders[name][last] for name in ("fcfs", "srpt", "sprpt"))
    cut = 1 - best.mean_s / blind.mean_s
    told = [
        (
            f"At a load of {study.loads[last]:g}, knowing every length would cut the mean time from "
            f"{seconds(blind.mean_s)} to {seconds(best.mean_s)} (by {percent(cut)})."
        )
    ]
    if cut >= MIN_RELEVANT:
        kept = share_retained(blind, guessed, best)
        told.append(
            f"The predictor keeps {percent(kept)} of that."
            if kept > 0
            else "The predictor keeps nothing of that: its order is worse than first come, first served."
        )
    small = [
        load
        for load, fcfs, srpt in zip(study.loads, study.orders["fcfs"], study.orders["srpt"], strict=True)
        if 1 - srpt.mean_s / fcfs.mean_s < MIN_RELEVANT
    ]
    if small:
        told.append(
            f"Up to a load of {max(small):g} even perfect knowledge gains less than {percent(MIN_RELEVANT)}: there is "
            "no queue to order, so length-aware scheduling is not worth it."
        )
    return told


def _bin_count_text(count: int | None) -> str:
    return "1 bin" if count == 1 else f"{count:,} bins"


Figure = dict[str, Any]
SLOWEST = {"fcfs": 0, "sjf": 1, "spjf": 4, "sprpt": 3, "srpt": 2}
"""Colours of the orders."""


def figures(study: MultiBinStudy | QueueStudy) -> list[Figure]:
    """All figures of a study."""
    return _multibin_figures(study) if isinstance(study, MultiBinStudy) else _queue_figures(study)


def _multibin_figures(study: MultiBinStudy) -> list[Figure]:
    bins = [row.bins for row in study.rows]
    ticks = {"label": "bins, log scale", "log": True, "ticks": bins}
    drawn = [
        _figure(
            "throughput", "Throughput by number of bins", ticks, {"label": "requests a second"},
            [
                _line("theory", 0, bins, [row.throughput_rps for row in study.rows]),
                _marks("simulated", 0, bins, [row.simulated_rps for row in study.rows]),
            ],
            [(study.capacity_rps, "capacity")]
            + ([(study.target_rps, "target")] if math.isfinite(study.target_rps) else []),
        )
    ]  # fmt: skip
    if math.isfinite(study.rate_rps):
        drawn.append(
            _figure(
                "latency", "Latency without a queue, by number of bins", ticks, {"label": "seconds"},
                [
                    _line("theory", 1, bins, [row.latency_s for row in study.rows]),
                    _marks("simulated", 1, bins, [row.simulated_latency_s for row in study.rows]),
                ],
            )
        )  # fmt: skip
    return [*drawn, *_saturation(study), *_robustness(study)]


def _saturation(study: MultiBinStudy) -> list[Figure]:
    if study.saturation is None:
        return []
    rates, found = study.saturation
    limits = {row.bins: row.throughput_rps for row in study.rows}
    curves = []
    for i, (bins, points) in enumerate(found.items()):
        curves.append(_line(_bin_count_label(bins), i, rates, [min(rate, limits[bins]) for rate in rates]))
        curves.append(_marks(_bin_count_label(bins), i, rates, [Estimate(p.value) for p in points]) | {"silent": True})
    x, y = {"label": "arrivals, requests a second"}, {"label": "served a second"}
    return [_figure("saturation", "Throughput by arrival rate", x, y, curves, [(study.capacity_rps, "capacity")])]


def _robustness(study: MultiBinStudy) -> list[Figure]:
    if study.robustness is None:
        return []
    chances, found = study.robustness
    curves = [_line(_bin_count_label(bins), i, chances, rates) for i, (bins, rates) in enumerate(found.items())]
    x = {"label": "chance of each neighbouring bin"}
    return [_figure("robustness", "Throughput under wrong bins", x, {"label": "requests a second"}, curves)]


def _queue_figures(study: QueueStudy) -> list[Figure]:
    x = {"label": "load"}
    sojourns = [_order(study, name, [one.mean_s for one in study.orders[name]]) for name in SLOWEST]
    slower = [_order(study, name, [one.slowdown for one in study.orders[name]]) for name in SLOWEST]
    shown = list(study.retained)[:: max(1, len(study.retained) // 4)]
    kept = [_line(f"load {load:g}", i, study.sigmas, study.retained[load]) for i, load in enumerate(shown)]
    waiting = [_line(f"load {load:g}", i, study.sigmas, study.retained_nonpreemptive[load]) for i, load in enumerate(shown)]
    error = {"label": "error of the predictor, sd of ln(predicted / true)"}
    share = {"label": "of the gap from FCFS to SRPT", "format": ".0%"}
    return [
        _figure("sojourn", "Mean time from arrival to end", x, {"label": "seconds, log scale", "log": True}, sojourns),
        _figure("slowdown", "Mean slowdown", x, {"label": "time over service time, log scale", "log": True}, slower),
        _figure("retained", "What a predictor keeps, preemptive", error, share, kept),
        _figure("kept-waiting", "What a predictor keeps, not preemptive", error, share, waiting),
    ]


def _order(study: QueueStudy, name: str, values: Sequence[float]) -> Figure:
    curve = _line(ORDERS[name], SLOWEST[name], study.loads, values)
    return curve | {"dash": "dash" if name in ("spjf", "sprpt") else "solid"}


def _figure(
    name: str,
    title: str,
    x: dict[str, Any],
    y: dict[str, Any],
    curves: Sequence[Figure],
    levels: Sequence[tuple[float, str]] = (),
) -> Figure:
    drawn = [curve for curve in curves if any(value is not None for value in curve["y"])]
    lines = [{"y": _short([value])[0], "text": text} for value, text in levels]
    return {"id": name, "title": title, "x": x, "y": y, "curves": drawn, "levels": lines}


def _line(name: str, series: int, x: Iterable[float], y: Iterable[float]) -> Figure:
    return {"name": name, "series": series, "mode": "lines", "x": _short(x), "y": _short(y)}


def _marks(name: str, series: int, x: Iterable[float], y: Sequence[Estimate]) -> Figure:
    """Simulated points with their intervals."""
    values, halves = _short(e.value for e in y), _short(e.half_width for e in y)
    return {"name": name, "series": series, "mode": "markers", "x": _short(x), "y": values, "half": halves}


def _bin_count_label(count: int) -> str:
    return "1 bin" if count == 1 else f"{count} bins"


def _short(values: Iterable[float]) -> list[float | None]:
    return [float(f"{v:.5g}") if math.isfinite(v) else None for v in map(float, values)]


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
    said = "".join(f"<li><p>{escape(description)}</p></li>" for description in answers(study))
    boxes = "".join(f'<figure><div class="plot" id="{name}"></div></figure>' for name in ids)
    table = _bins_table(study) if isinstance(study, MultiBinStudy) else _queue_table(study)
    body = [
        header(heading, list(study.metadata)),
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
    heads = ["load", *(f"{label}, s" for label in ORDERS.values()), "gap", "retained"]
    heads += ["slowdown, FCFS", "slowdown, SRPT"]
    return _table(heads, [(f"{load:g}", _queue_cells(study, i)) for i, load in enumerate(study.loads)])


def _queue_cells(study: QueueStudy, at: int) -> list[str]:
    """Mean times, what SRPT saves of FCFS, the predicted SRPT's share of that, and slowdowns at one load."""
    here = {name: sojourns[at] for name, sojourns in study.orders.items()}
    blind, best = here["fcfs"], here["srpt"]
    return [
        *(amount(here[name].mean_s) for name in ORDERS),
        percent(1 - best.mean_s / blind.mean_s),
        percent(share_retained(blind, here["sprpt"], best)),
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


def write_theory_html(path: Path | str, study: MultiBinStudy | QueueStudy) -> None:
    """A page that answers, draws and lists a study; it fetches nothing, and the same study gives the same bytes.

    Raises:
        MissingExtraError: plotly is not installed.
        OutputError: The file cannot be written.
    """
    plotly = plotly_js()
    drawn = figures(study)
    text = page(
        study,
        [figure["id"] for figure in drawn],
        styles=asset("page.css"),
        scripts=[plotly, asset("look.js"), asset("theory/theory.js")],
        data=json.dumps(drawn, separators=(",", ":"), allow_nan=False),
    )
    write_whole(path, text.encode())


VERSION = 1


def theory_facts(study: MultiBinStudy | QueueStudy) -> dict[str, Any]:
    """The study as plain values for JSON (see the module)."""
    kind = "multibin" if isinstance(study, MultiBinStudy) else "queue"
    head = {"format": "lengthwise.theory", "version": VERSION, "kind": kind, "answers": answers(study)}
    told: dict[str, Any] = plain(head | _bare(study))
    return told


def _bare(value: Any) -> Any:
    """Dataclasses, arrays and mappings as what JSON knows."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _bare(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _bare(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_bare(item) for item in value]
    return value
