"""Whether speculative decoding helps at a load: sentences, a table, a page with curves, JSON fields."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lengthwise.report.curves import Figure
from lengthwise.report.formatting import PLUS_MINUS, amount, counted, model_text, percent, rounded
from lengthwise.report.html_page import Row, TableCell, write_page
from lengthwise.report.json_file import json_text, plain
from lengthwise.report.theory import estimate_cell, figure_of, line_of, marks_of
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.files import write_atomic
from lengthwise.schema.speculation import DraftLength, SpeculationStudy

NAMES = {"ngram": "N-gram", "eagle": "EAGLE", "eagle3": "EAGLE-3", "mtp": "MTP", "draft_model": "the draft model"}


def speedup_rows(study: SpeculationStudy) -> tuple[list[str], list[Row]]:
    """Return heads and rows of the table: a row for each load and number of proposed tokens."""
    heads = ["load", "requests/s", "proposed", "TPOT, ms", "TPOT shorter, x", "JCT, s", "JCT shorter, x"]
    heads += ["tokens/step", "sequences"]
    rows: list[Row] = [
        [
            percent(load),
            amount(rate),
            str(one.tokens),
            estimate_cell(one.tpot_s[at].scaled(1e3)),
            _speedup(one, one.tpot_speedup[at]),
            estimate_cell(one.jct_s[at]),
            _speedup(one, one.jct_speedup[at]),
            estimate_cell(one.tokens_per_step[at]),
            estimate_cell(one.batch_seqs[at]),
        ]
        for at, (load, rate) in enumerate(zip(study.loads, study.rates_rps, strict=True))
        for one in study.lengths
    ]
    return heads, rows


def capacity_rows(study: SpeculationStudy) -> tuple[list[str], list[Row]]:
    """Return heads and rows of the table of capacities."""
    rows: list[Row] = []
    for one in study.lengths:
        ratio = TableCell("-") if one.tokens == 0 else estimate_cell(_capacity_ratio(study, one))
        cell = estimate_cell(one.capacity_rps)
        rate = TableCell(cell.text, cell.interval, model_text(one.capacity_rps))
        rows.append([str(one.tokens), rate, ratio, one.binds])
    return ["proposed", "capacity, requests/s", "of that without", "bound by"], rows


def _speedup(one: DraftLength, value: Estimate) -> str | TableCell:
    if one.tokens == 0:
        return "-"
    cell = estimate_cell(value)
    return TableCell(cell.text, cell.interval, model_text(value))


def _capacity_ratio(study: SpeculationStudy, one: DraftLength) -> Estimate:
    base, own = study.lengths[0].capacity_rps, one.capacity_rps
    relative = math.hypot(base.half_width / base.value, own.half_width / own.value) if own.value > 0 else math.nan
    ratio = own.value / base.value
    return Estimate(ratio, relative * ratio)


def answers(study: SpeculationStudy) -> list[str]:
    """Return sentences: by how much speculation shortens answers at each end of the loads, and where it stops."""
    others, found = study.lengths[1:], []
    for at in dict.fromkeys((0, len(study.loads) - 1)):
        best = max(others, key=lambda one: one.tpot_speedup[at].value)
        where = f"At {percent(study.loads[at])} of the capacity without it ({amount(study.rates_rps[at])} requests/s)"
        found.append(
            f"{where}, {NAMES[study.method]} with {counted(best.tokens, 'token')} makes the mean time per output token "
            f"{_factor(best.tpot_speedup[at])} and the mean JCT {_factor(best.jct_speedup[at])}."
        )
    best = max(others, key=lambda one: one.capacity_rps.value)
    ratio = _capacity_ratio(study, best)
    text, half = rounded(ratio.value, ratio.half_width)
    found.append(
        f"The capacity is {amount(study.base_rps)} requests/s without speculation and at most "
        f"{amount(best.capacity_rps.value)} with it ({counted(best.tokens, 'token')}): {text} "
        f"{f'± {half} ' if half else ''}times as much."
    )
    found += [_stop(study, one) for one in others]
    return found


def _factor(speedup: Estimate) -> str:
    inverse = speedup.value < 1
    value = 1 / speedup.value if inverse else speedup.value
    text, half = rounded(value, speedup.half_width / speedup.value**2 if inverse else speedup.half_width)
    return f"{text}{f' ± {half}' if half else ''} times {'longer' if inverse else 'shorter'}"


def stop_load(study: SpeculationStudy, one: DraftLength) -> float:
    """Return the load above which speculation makes the mean JCT longer; NaN: at none that was simulated.

    Between two loads it is interpolated. It is 0 if the JCT is longer at the lowest load already.
    """
    gains = np.array([value.value for value in one.jct_speedup]) - 1
    order = np.argsort(study.loads)
    loads, gains = np.array(study.loads)[order], gains[order]
    if gains[0] < 0:
        return 0.0
    below = np.flatnonzero(gains < 0)
    if not len(below):
        return math.nan
    i = int(below[0])
    return float(loads[i - 1] + (loads[i] - loads[i - 1]) * gains[i - 1] / (gains[i - 1] - gains[i]))


def _stop(study: SpeculationStudy, one: DraftLength) -> str:
    name = NAMES[study.method]
    load, tokens = stop_load(study, one), f"{name[0].upper()}{name[1:]} with {counted(one.tokens, 'token')}"
    if math.isnan(load):
        return f"{tokens} shortens the mean JCT at every load up to {percent(max(study.loads))}."
    if load == 0.0:
        return f"{tokens} lengthens the mean JCT even at {percent(min(study.loads))} load."
    return (
        f"{tokens} shortens the mean JCT up to a load of about {percent(load)} "
        f"({amount(load * study.base_rps)} requests/s), and lengthens it above."
    )


def _figures(study: SpeculationStudy) -> list[Figure]:
    x = {"label": "requests/s"}

    def curves(name: str, scale: float, lengths: Sequence[DraftLength]) -> list[Figure]:
        drawn = []
        for one in lengths:
            values = [value.scaled(scale) for value in getattr(one, name)]
            label = f"{one.tokens} proposed" if one.tokens else "without"
            colour = study.lengths.index(one)
            drawn.append(line_of(label, colour, study.rates_rps, [value.value for value in values]))
            drawn.append(marks_of(label, colour, study.rates_rps, values, 0) | {"silent": True})
        return drawn

    others = study.lengths[1:]
    no_gain = [(1.0, "no gain")]
    return [
        figure_of("tpot", "Time per output token: times shorter", x, {"label": "x"}, curves("tpot_speedup", 1, others),
                  no_gain),
        figure_of("jct", "JCT: times shorter", x, {"label": "x"}, curves("jct_speedup", 1, others), no_gain),
        figure_of("tpot-ms", "Time per output token", x, {"label": "ms"}, curves("tpot_s", 1e3, study.lengths)),
    ]  # fmt: skip


def _cards(study: SpeculationStudy) -> list[tuple[str, str, str]]:
    """Return the answer's numbers as (label, value, interval or note)."""

    def ratio(value: Estimate) -> str:
        text, half = rounded(value.value, value.half_width)
        return f"x {text}{f' {PLUS_MINUS} {half}' if half else ''}"

    cards, others = [], study.lengths[1:]
    for at in dict.fromkeys((0, len(study.loads) - 1)):
        best, load = max(others, key=lambda one: one.tpot_speedup[at].value), f"at {percent(study.loads[at])} load"
        proposed = f"faster, {best.tokens} proposed"
        cards.append((f"TPOT {load}", ratio(best.tpot_speedup[at]), proposed))
        cards.append((f"JCT {load}", ratio(best.jct_speedup[at]), proposed))
    best = max(others, key=lambda one: one.capacity_rps.value)
    return [*cards, ("Capacity", ratio(_capacity_ratio(study, best)), f"of that without, {best.tokens} proposed")]


def write_speculation_html(path: Path | str, study: SpeculationStudy) -> None:
    """Write an HTML page with the answers, curves and numbers of a study."""
    drawn = _figures(study)
    heads, rows = speedup_rows(study)
    capacity_heads, capacities = capacity_rows(study)
    write_page(
        path,
        "speculation",
        data=drawn,
        heading="Does speculative decoding help at your load?",
        metadata=(study.name, *study.metadata, f"{study.requests:,} requests", counted(study.seeds, "seed")),
        cards=_cards(study),
        answers=answers(study),
        notes=study.notes,
        ids=[figure["id"] for figure in drawn],
        heads=heads,
        rows=rows,
        capacity_heads=capacity_heads,
        capacities=capacities,
    )


def write_speculation_json(path: Path | str, study: SpeculationStudy) -> None:
    """Write the study to a JSON file. Raises OutputError if the file cannot be written."""
    stops = {str(one.tokens): stop_load(study, one) for one in study.lengths[1:]}
    fields = {"answers": answers(study), "stops_at_load": stops, **plain(study)}
    write_atomic(path, json_text("speculation", fields).encode())
