"""Schedules to people: what was chosen and why, as a page and a file."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from lengthwise.report.formatting import UNKNOWN, percent, seconds
from lengthwise.report.html_document import asset, document, header, plotly_js, scrolling, section
from lengthwise.report.json_file import plain
from lengthwise.report.schedule_text import (
    DRIFT_HEADS,
    OTHER_HEADS,
    SIDE_HEADS,
    SURE_HEADS,
    amount,
    drift_cells,
    other_cells,
    sentences,
    side_cells,
    sure_cells,
    watched_said,
)
from lengthwise.schema.files import write_whole
from lengthwise.schema.schedule import SYSTEM_NAMES, FrontPoint, SchedulePlan, ScheduleRow, Watched

FRONT_NOTE = (
    "Throughput against the latency bound. A point is a schedule that none of its strategy beats in both; at a bound "
    "the best is the last point to its left. Searched bounds are exact, between them there may be a little more. Doing "
    "nothing is static batches, by formula. All are of one pipeline of all GPUs. "
    "Bands: throughput of the same schedules if costs are off as far as they may be, nine draws of ten."
)
TIME_NOTE = (
    "A piece of the steady state, as it would go with mean batches. A row is a stage, a bar a micro-batch: filled ones "
    "encode, light ones decode."
)
DRIFT_NOTE = (
    "The outputs move, the schedule stays: what it then yields, whether the bound still holds for the same quantile of "
    "the outputs as they then are (or for its fixed length), what would be chosen anew, and how much tighter the bound "
    "must have been (margin)."
)
OTHERS_NOTE = (
    "What other systems would yield under the same bound on the same GPUs, with the same costs and memory, each in its "
    'best configuration. "Of the choice": their throughput over that of the chosen schedule. They may cut the GPUs '
    "into replicas; RRA and WAA, as in their paper, take all of them for one pipeline."
)
SURE_NOTE = (
    "The chosen schedule, left as it is, over requests drawn again from those that lengths were counted over, and "
    "under cost tables whose parts are off as far as measurements and fits say they may be. The choice is not made "
    "anew: one that meets its bound closely meets it in about half of the draws, unless a tighter bound was asked for."
)
_WORDS = {"best seen", "why not", "re-planned", "best that meets the bound"}
TERMS = """<dl class="notes">
<dt>RRA</dt><dd>every GPU encodes and decodes: B_E new requests are encoded, then all that are there
decode N_D times</dd>
<dt>WAA</dt><dd>some GPUs only encode, the others only decode, B_m micro-batches at a time; split so that computation
(WAA-C) or memory (WAA-M) is even</dd>
<dt>TP</dt><dd>tensor-parallel degree; "2 x TP 4" are two groups of four GPUs, each one stage; other GPUs are stages
of their own</dd>
<dt>Latency</dt><dd>from the start of a request's encoding to its last token, for an output of the bound's quantile;
waiting to be encoded is not in it</dd>
<dt>Worst case</dt><dd>the same when batches are as heavy as the quantile of their work</dd>
<dt>At most</dt><dd>no schedule of the strategy at this degree that meets the bound has more, as far as estimates are
monotone; "about" (RRA): not proved, as they are not where phases are short; searches end once a side cannot win, so its
best may be a little better than the best seen</dd>
<dt>Doing nothing</dt><dd>static batches, padded to the longest output, tensor parallelism as wide as a node allows
(FasterTransformer)</dd>
<dt>Other systems</dt><dd>played out by the event engine with a full queue and drawn lengths, in every way to cut
the GPUs into equal replicas and with batches up to what memory holds; worst case: within which outputs of the
quantile are done as often as the quantile says; where nobody leaves a batch, with the longest outputs there are</dd>
<dt>After</dt><dd>ExeGPT, Oh et al., ASPLOS 2024</dd>
</dl>"""


def page(plan: SchedulePlan, *, styles: str, scripts: Sequence[str], data: str) -> str:
    """The whole document; ``data`` is what its figures draw, as JSON."""
    heading = plan.name or "Which schedule"
    body = [
        header(heading, list(plan.metadata.values())),
        section("The answer", _answer(plan)),
        section("Throughput against the bound", _figure("front") + _kinks(plan), FRONT_NOTE),
        section("When each stage does what", _figure("timeline"), TIME_NOTE),
        section("Chosen, and doing nothing", _additional(plan)),
        _significant(plan),
        section("What else there was", _table("What else there was", SIDE_HEADS, map(side_cells, plan.sides))),
        _others(plan),
        section("If outputs drift", _drift(plan), DRIFT_NOTE),
        section("How to read it", TERMS),
    ]
    return document(heading, "".join(body), styles=styles, scripts=scripts, data=data)


def _answer(plan: SchedulePlan) -> str:
    said = "".join(f"<li><p>{escape(description)}</p></li>" for description in sentences(plan))
    return f'<ul class="verdicts">{said}</ul>'


def _figure(name: str) -> str:
    return f'<figure><div class="plot tall" id="{name}"></div></figure>'


def _kinks(plan: SchedulePlan) -> str:
    items = "".join(f"<dt>from {seconds(k.bound_s)}</dt><dd>{escape(k.words)}</dd>" for k in plan.breakpoints)
    return f'<dl class="notes">{items}</dl>' if items else ""


def _additional(plan: SchedulePlan) -> str:
    heads = ("", plan.chosen.words, plan.static.words if plan.static else "doing nothing: no batch meets the bound")
    rows = [_metadata(plan.chosen), _metadata(plan.static)]
    return _table("Chosen", heads, ([name, one, rows[1][name]] for name, one in rows[0].items()))


def _significant(plan: SchedulePlan) -> str:
    if not plan.spreads:
        return ""
    return section("How sure it is", _table("How sure it is", SURE_HEADS, map(sure_cells, plan.spreads)), SURE_NOTE)


def _others(plan: SchedulePlan) -> str:
    if not plan.others:
        return ""
    rows = (other_cells(other, plan.chosen) for other in plan.others)
    return section("Other systems", _table("Other systems", OTHER_HEADS, rows), OTHERS_NOTE)


def _metadata(row: ScheduleRow | None) -> dict[str, str]:
    names = (
        "requests/s",
        "latency",
        "worst case",
        "a round",
        "encoding",
        "a decode iteration",
        "decode batch",
        "memory",
    )
    if row is None:
        return dict.fromkeys(names, UNKNOWN)
    values = (
        amount(row.throughput_rps), seconds(row.latency_s), seconds(row.latency_high_s), seconds(row.cycle_s),
        seconds(row.encode_s), seconds(row.decode_s), amount(row.decode_batch), percent(row.memory_share),
    )  # fmt: skip
    return dict(zip(names, values, strict=True))


def _drift(plan: SchedulePlan) -> str:
    loading = plan.redeploy
    told = (
        f"Loading the weights anew takes {seconds(loading.dram_s)} from host memory and {seconds(loading.ssd_s)} from "
        f"drives ({loading.source}); changing B_E or N_D alone takes nothing."
    )
    rows = (drift_cells(row, plan.bound_s) for row in plan.drift)
    return _table("If outputs drift", DRIFT_HEADS, rows) + f'<p class="muted">{escape(told)}</p>'


def _table(label: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose columns of words break into lines, so that the last one is seen without scrolling."""
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(map(_cell, heads[1:], rest))}</tr>' for first, *rest in rows
    )
    return scrolling(label, f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>")


def _cell(head: str, text: str) -> str:
    if head not in _WORDS:
        return f"<td>{escape(text)}</td>"
    whole = escape(text).replace(" = ", "&nbsp;=&nbsp;").replace(" x TP ", "&nbsp;x&nbsp;TP&nbsp;")
    return f'<td class="words">{whole}</td>'


SERIES = {"rra": 0, "waa-c": 1, "waa-m": 2, "static": 4}
"""Colours of the strategies."""
OTHERS = {
    "fastertransformer": (4, "dot"),
    "deepspeed-inference": (4, "dash"),
    "orca": (5, "dot"),
    "vllm": (6, "dot"),
    "sarathi": (7, "dot"),
    "vllm-v1": (3, "dot"),
    "vllm-v1-disaggregated": (3, "dash"),
}
"""Colours and lines of other systems."""


def figures(plan: SchedulePlan) -> dict[str, Any]:
    """The frontier's curves and the timeline's bars."""
    return {
        "bound": _short(plan.bound_s),
        "worst": plan.worst_case,
        "curves": [_curve(strategy.upper(), (SERIES[strategy], "solid"), points) for strategy, points in plan.front],
        "others": _nothing_done(plan)
        + [_curve(SYSTEM_NAMES[one.system], OTHERS[one.system], one.front) for one in plan.others],
        "chosen": _reserved(plan),
        "static": _static(plan),
        "stages": list(plan.stages),
        "bars": [
            [bar.stage, _short(bar.start_s), _short(bar.end_s), int(bar.encodes), bar.micro_batch]
            for bar in plan.timeline
        ],
    }


def _nothing_done(plan: SchedulePlan) -> list[dict[str, Any]]:
    """Static batches by formula, whatever else was played out; none where memory holds none."""
    points = plan.static_front
    return [_curve("doing nothing, by formula", (SERIES["static"], "dashdot"), points)] if points else []


def _curve(name: str, poll: tuple[int, str], points: tuple[FrontPoint, ...]) -> dict[str, Any]:
    return {
        "name": name,
        "series": poll[0],
        "dash": poll[1],
        "x": [_short(p.constrained_latency_s) for p in points],
        "y": [_short(p.row.throughput_rps) for p in points],
        "band": [[_short(end) for end in p.band_rps] for p in points if p.band_rps is not None],
        "words": [p.row.words for p in points],
    }


def _reserved(plan: SchedulePlan) -> dict[str, Any]:
    row = plan.chosen
    held_s = row.latency_high_s if plan.worst_case else row.latency_s
    return {"x": _short(held_s), "y": _short(row.throughput_rps), "words": row.words}


def _static(plan: SchedulePlan) -> dict[str, Any] | None:
    row = plan.static
    if row is None:
        return None
    return {"x": _short(row.latency_s), "y": _short(row.throughput_rps), "words": row.words}


def _short(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


def write_schedule_html(path: Path | str, plan: SchedulePlan) -> None:
    """A page of a choice: the answer, frontier, timeline, runner-ups, drift; it fetches nothing.

    The same plan gives the same bytes.

    Raises:
        MissingExtraError: plotly is not installed.
        OutputError: The file cannot be written.
    """
    plotly = plotly_js()
    text = page(
        plan,
        styles=asset("page.css") + ".plot.tall { height: 420px; }\n",
        scripts=[plotly, asset("look.js"), asset("schedule/schedule.js")],
        data=json.dumps(figures(plan), separators=(",", ":"), allow_nan=False),
    )
    write_whole(path, text.encode())


VERSION = 1


def write_schedule_json(path: Path | str, plan: SchedulePlan, answer: Sequence[str] | None = None) -> None:
    """A JSON file with everything that is known of a choice, under stable keys (see the module).

    Args:
        path: Where it shall stand.
        plan: The choice.
        answer: It in sentences; None: as the command prints it.

    Raises:
        OutputError: The file cannot be written.
    """
    told = dataclasses.asdict(plan)
    told["front"] = [{"strategy": strategy, "points": list(points)} for strategy, points in told["front"]]
    head = {
        "format": "lengthwise.schedule",
        "version": VERSION,
        "answer": sentences(plan) if answer is None else list(answer),
    }
    text = json.dumps(plain(head | told), indent=2, ensure_ascii=False, allow_nan=False)
    write_whole(path, (text + "\n").encode())


def write_watched_json(path: Path | str, report: Watched) -> None:
    """A JSON file with everything that a replay came to, under stable keys (see the module).

    Raises:
        OutputError: The file cannot be written.
    """
    head = {"format": "lengthwise.schedule_watch", "version": VERSION, "answer": watched_said(report)}
    tree = plain(head | dataclasses.asdict(report) | {"late": report.late})
    text = json.dumps(tree, indent=2, ensure_ascii=False, allow_nan=False)
    write_whole(path, (text + "\n").encode())
