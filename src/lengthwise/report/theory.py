"""Closed forms of Multi-Bin Batching and of scheduling in an M/G/1 queue: sentences, a page, JSON fields."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lengthwise.report.curves import Figure, json_numbers
from lengthwise.report.formatting import PLUS_MINUS, UNKNOWN, amount, counted, percent, rounded, seconds
from lengthwise.report.html_page import Row, TableCell, write_page
from lengthwise.report.json_file import json_text, plain
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.files import write_atomic
from lengthwise.theory import ORDERS, MultiBinStudy, QueueStudy, share_retained

SHOWN_CUTS = 4  # boundaries that are written out
MIN_RELEVANT = 0.05  # a smaller gain is not worth a predictor
SERIES = {"fcfs": 0, "sjf": 1, "spjf": 4, "sprpt": 3, "srpt": 2}  # colours of the scheduling orders


def answers(study: MultiBinStudy | QueueStudy) -> list[str]:
    """Return sentences on the gain of bins, or of a scheduling order, and on the loads at which it is small."""
    return _multibin_answers(study) if isinstance(study, MultiBinStudy) else _queue_answers(study)


def cuts_text(cuts_s: Iterable[float]) -> str:
    """Return the boundaries of bins as text. Of many boundaries only the first ones and the last are shown."""
    shown = [f"{cut:.4g}" for cut in cuts_s]
    if len(shown) > SHOWN_CUTS:
        shown = [*shown[: SHOWN_CUTS - 1], "..", shown[-1]]
    return " ".join(shown) or "none"


def _multibin_answers(study: MultiBinStudy) -> list[str]:
    best = max(study.rows, key=lambda row: row.throughput_rps)
    max_gain = study.capacity_rps / study.one_bin_rps - 1
    sentences = [
        (
            f"{counted(best.bins, 'bin')} of batches of {study.batch} serve {amount(best.throughput_rps)} requests/s: "
            f"{percent(best.throughput_rps / study.one_bin_rps - 1)} more than one bin, and "
            f"{percent(best.throughput_rps / study.capacity_rps)} of the capacity with infinitely many bins."
        )
    ]
    if math.isfinite(study.target_rps):
        share = percent(study.target_rps / study.capacity_rps)
        needed = "No tried number of bins reaches"
        if study.bins_needed:
            needed = f"{counted(study.bins_needed, 'bin')} with known lengths reach"
        sentences.append(f"{needed} {share} of the capacity.")
    if max_gain < MIN_RELEVANT:
        reason = f"the lengths differ so little that even infinitely many bins gain only {percent(max_gain)}."
        sentences.append(f"Bins are not worth it: {reason}")
    if math.isfinite(study.rate_rps) and study.rate_rps >= study.one_bin_rps:
        enough = next((row.bins for row in study.rows if row.throughput_rps > study.rate_rps), None)
        answer = f"{counted(enough, 'bin')} can" if enough else "with one server, none of the tried numbers of bins can"
        sentences.append(f"One bin cannot serve {amount(study.rate_rps)} requests/s; {answer}.")
    return sentences


def _queue_answers(study: QueueStudy) -> list[str]:
    fcfs, srpt, sprpt = (study.orders[name][-1] for name in ("fcfs", "srpt", "sprpt"))
    cut = 1 - srpt.mean_s / fcfs.mean_s
    times = f"from {seconds(fcfs.mean_s)} to {seconds(srpt.mean_s)} (by {percent(cut)})"
    sentences = [f"At a load of {study.loads[-1]:g}, known lengths would reduce the mean time {times}."]
    if cut >= MIN_RELEVANT:
        retained = share_retained(fcfs, sprpt, srpt)
        sentences.append(
            f"The predictor retains {percent(retained)} of this gain."
            if retained > 0
            else "The predictor retains nothing of this gain: its order is worse than first come, first served."
        )
    pairs = zip(study.loads, study.orders["fcfs"], study.orders["srpt"], strict=True)
    small = [load for load, slow, fast in pairs if 1 - fast.mean_s / slow.mean_s < MIN_RELEVANT]
    if small:
        sentences.append(
            f"Up to a load of {max(small):g}, even known lengths gain less than {percent(MIN_RELEVANT)}: there is no "
            "queue to reorder, so length-aware scheduling is not worth it."
        )
    return sentences


def _multibin_cards(study: MultiBinStudy) -> list[tuple[str, str, str]]:
    """Return the answer's numbers as (label, value, note)."""
    best = max(study.rows, key=lambda row: row.throughput_rps)
    return [
        ("Bins", str(best.bins), f"best of {len(study.rows)}, batches of {study.batch}"),
        ("Requests/s", amount(best.throughput_rps), f"{amount(study.one_bin_rps)} with one bin"),
        ("Gain over one bin", percent(best.throughput_rps / study.one_bin_rps - 1), "in requests/s"),
        ("Of the capacity", percent(best.throughput_rps / study.capacity_rps), "with infinitely many bins"),
    ]


def _queue_cards(study: QueueStudy) -> list[tuple[str, str, str]]:
    """Return the answer's numbers as (label, value, note), at the highest load."""
    fcfs, srpt, sprpt = (study.orders[name][-1] for name in ("fcfs", "srpt", "sprpt"))
    return [
        ("Mean time, FCFS", seconds(fcfs.mean_s), f"at a load of {study.loads[-1]:g}"),
        ("With known lengths", seconds(srpt.mean_s), f"SRPT, {percent(srpt.mean_s / fcfs.mean_s)} of FCFS"),
        ("With predicted lengths", seconds(sprpt.mean_s), f"SPRPT, {percent(sprpt.mean_s / fcfs.mean_s)} of FCFS"),
        ("Retained", percent(share_retained(fcfs, sprpt, srpt)), "of the gain of known lengths"),
    ]


def write_theory_html(path: Path | str, study: MultiBinStudy | QueueStudy) -> None:
    """Write an HTML page with the answers, curves and numbers of a study."""
    is_multibin = isinstance(study, MultiBinStudy)
    drawn = _multibin_figures(study) if isinstance(study, MultiBinStudy) else _queue_figures(study)
    heads, rows = _multibin_rows(study) if isinstance(study, MultiBinStudy) else _queue_rows(study)
    write_page(
        path,
        "theory",
        data=drawn,
        heading="What bins are worth" if is_multibin else "What a scheduling order is worth",
        metadata=study.metadata,
        cards=_multibin_cards(study) if isinstance(study, MultiBinStudy) else _queue_cards(study),
        answers=answers(study),
        is_multibin=is_multibin,
        ids=[figure["id"] for figure in drawn],
        heads=heads,
        rows=rows,
    )


def _multibin_rows(study: MultiBinStudy) -> tuple[list[str], list[Row]]:
    has_latency = math.isfinite(study.rate_rps)
    heads = ["bins", "batch, s", "requests/s", "simulated", "gain over one bin", "of capacity", "correct bin"]
    heads += ["latency, s (no queue)", "simulated latency, s"] if has_latency else []
    rows: list[Row] = []
    for row in study.rows:
        latencies = [amount(row.latency_s), estimate_cell(row.simulated_latency_s)] if has_latency else []
        rows.append(
            [
                str(row.bins),
                amount(row.batch_s),
                amount(row.throughput_rps),
                estimate_cell(row.simulated_rps),
                percent(row.throughput_rps / study.one_bin_rps - 1),
                percent(row.throughput_rps / study.capacity_rps),
                percent(row.accuracy),
                *([UNKNOWN] * len(latencies) if study.overloads(row) else latencies),
                cuts_text(row.cuts_s),
            ]
        )
    return [*heads, "boundaries, s"], rows


def _queue_rows(study: QueueStudy) -> tuple[list[str], list[Row]]:
    times = [f"{label}, s" for label in ORDERS.values()]
    heads = ["load", *times, "gap", "retained", "slowdown, FCFS", "slowdown, SRPT"]
    rows: list[Row] = []
    for i, load in enumerate(study.loads):
        at_load = {name: sojourns[i] for name, sojourns in study.orders.items()}
        fcfs, srpt = at_load["fcfs"], at_load["srpt"]
        shares = 1 - srpt.mean_s / fcfs.mean_s, share_retained(fcfs, at_load["sprpt"], srpt)
        means, slowdowns = (at_load[name].mean_s for name in ORDERS), (fcfs.slowdown, srpt.slowdown)
        rows.append([f"{load:g}", *map(amount, means), *map(percent, shares), *map(amount, slowdowns)])
    return heads, rows


def estimate_cell(value: Estimate) -> TableCell:
    """Return a value with its interval as a cell."""
    text, half = rounded(value.value, value.half_width)
    return TableCell(text, f"{PLUS_MINUS} {half}" if half else "")


def _multibin_figures(study: MultiBinStudy) -> list[Figure]:
    bins = [row.bins for row in study.rows]
    x = {"label": "bins, log scale", "log": True, "ticks": bins}
    requests_per_s = {"label": "requests/s"}
    levels = [(study.capacity_rps, "capacity")]
    if math.isfinite(study.target_rps):
        levels.append((study.target_rps, "target"))

    def curves_of(series: int, exact: str, simulated: str) -> list[Figure]:
        line, marks = ([getattr(row, name) for row in study.rows] for name in (exact, simulated))
        return [line_of("theory", series, bins, line), marks_of("simulated", series, bins, marks)]

    curves = curves_of(0, "throughput_rps", "simulated_rps")
    drawn = [figure_of("throughput", "Throughput by number of bins", x, requests_per_s, curves, levels)]
    if math.isfinite(study.rate_rps):
        curves = curves_of(1, "latency_s", "simulated_latency_s")
        drawn.append(
            figure_of("latency", "Latency without a queue, by number of bins", x, {"label": "seconds"}, curves)
        )
    if study.saturation is not None:
        rates, found = study.saturation
        limits = {row.bins: row.throughput_rps for row in study.rows}
        curves = []
        for i, (count, points) in enumerate(found.items()):
            name = counted(count, "bin")
            curves.append(line_of(name, i, rates, [min(rate, limits[count]) for rate in rates]))
            curves.append(marks_of(name, i, rates, [Estimate(p.value) for p in points]) | {"silent": True})
        x, y = {"label": "arrivals, requests/s"}, {"label": "served, requests/s"}
        drawn.append(figure_of("saturation", "Throughput by arrival rate", x, y, curves, levels[:1]))
    if study.robustness is not None:
        chances, rates_of = study.robustness
        curves = [
            line_of(counted(count, "bin"), i, chances, rates) for i, (count, rates) in enumerate(rates_of.items())
        ]
        x = {"label": "probability of each neighbouring bin"}
        drawn.append(figure_of("robustness", "Throughput with mispredicted bins", x, requests_per_s, curves))
    return drawn


def _queue_figures(study: QueueStudy) -> list[Figure]:
    def by_order(attribute: str) -> list[Figure]:
        return [
            line_of(ORDERS[name], series, study.loads, [getattr(one, attribute) for one in study.orders[name]])
            | {"dash": "dash" if name in ("spjf", "sprpt") else "solid"}
            for name, series in SERIES.items()
        ]

    shown = list(study.retained)[:: max(1, len(study.retained) // 4)]
    preemptive = [line_of(f"load {load:g}", i, study.sigmas, study.retained[load]) for i, load in enumerate(shown)]
    without = [
        line_of(f"load {load:g}", i, study.sigmas, study.retained_nonpreemptive[load]) for i, load in enumerate(shown)
    ]
    x, error = {"label": "load"}, {"label": "predictor error, sd of ln(predicted / true)"}
    times = {"label": "seconds, log scale", "log": True}
    ratios = {"label": "time / service time, log scale", "log": True}
    share = {"label": "share of the gap from FCFS to SRPT", "format": ".0%"}
    return [
        figure_of("sojourn", "Mean time from arrival to completion", x, times, by_order("mean_s")),
        figure_of("slowdown", "Mean slowdown", x, ratios, by_order("slowdown")),
        figure_of("retained", "Gain retained with predictions, preemptive", error, share, preemptive),
        figure_of(
            "retained-nonpreemptive", "Gain retained with predictions, without preemption", error, share, without
        ),
    ]


def figure_of(
    name: str,
    title: str,
    x: dict[str, Any],
    y: dict[str, Any],
    curves: Sequence[Figure],
    levels: Sequence[tuple[float, str]] = (),
) -> Figure:
    """Return a figure; ``levels`` are horizontal lines as (value, text)."""
    drawn = [curve for curve in curves if any(value is not None for value in curve["y"])]
    lines = [{"y": json_numbers([value])[0], "text": text} for value, text in levels]
    return {"id": name, "title": title, "x": x, "y": y, "curves": drawn, "levels": lines}


def line_of(name: str, series: int, x: Iterable[float], y: Iterable[float]) -> Figure:
    """Return a curve as a line with the colour of ``series``."""
    return {"name": name, "series": series, "mode": "lines", "x": json_numbers(x), "y": json_numbers(y)}


def marks_of(
    name: str, series: int, x: Iterable[float], y: Sequence[Estimate], low: float = -math.inf, high: float = math.inf
) -> Figure:
    """Return a curve as marks with their intervals, cut to values from ``low`` to ``high``."""
    up = json_numbers(min(e.half_width, high - e.value) for e in y)  # NaN: no interval
    down = json_numbers(min(e.half_width, e.value - low) for e in y)
    return line_of(name, series, x, (e.value for e in y)) | {"mode": "markers", "up": up, "down": down}


def write_theory_json(path: Path | str, study: MultiBinStudy | QueueStudy) -> None:
    """Write the study to a JSON file. Raises OutputError if the file cannot be written."""
    kind = "multibin" if isinstance(study, MultiBinStudy) else "queue"
    write_atomic(path, json_text("theory", {"kind": kind, "answers": answers(study), **plain(study)}).encode())
