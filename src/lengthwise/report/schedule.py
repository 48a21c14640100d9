"""The page and the JSON files of a schedule under a latency bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lengthwise.report import schedule_text as text
from lengthwise.report.curves import Figure, json_number, json_numbers
from lengthwise.report.formatting import UNKNOWN, amount, percent, seconds, span
from lengthwise.report.html_page import TableCell, write_page
from lengthwise.report.json_file import json_text, plain
from lengthwise.schema.files import write_atomic
from lengthwise.schema.schedule import SYSTEM_NAMES, FrontPoint, SchedulePlan, ScheduleRow, Watched

STRATEGIES = {"rra": 0, "waa-c": 1, "waa-m": 2, "static": 4}  # colours of the strategies
OTHERS = {  # colours and dashes of other systems
    "fastertransformer": (4, "dot"),
    "deepspeed-inference": (4, "dash"),
    "orca": (5, "dot"),
    "vllm": (6, "dot"),
    "sarathi": (7, "dot"),
    "vllm-v1": (3, "dot"),
    "vllm-v1-disaggregated": (3, "dash"),
}
WRAPPED_HEADS = {"best found", "not chosen because", "re-planned", "best that meets the bound"}
"""Columns whose words may wrap, so that the last column stays visible."""
YIELD_NAMES = (
    "requests/s", "latency", "worst case", "a round", "prefill", "a decode iteration", "decode batch", "memory",
)  # fmt: skip


def write_schedule_html(path: Path | str, plan: SchedulePlan) -> None:
    """Write a self-contained HTML page of a schedule."""
    static = plan.static.best.words if plan.static.best else "static batching: no batch meets the bound"
    yields = zip(YIELD_NAMES, _yield_cells(plan.chosen), _yield_cells(plan.static.best), strict=True)
    write_page(
        path,
        "schedule",
        data=figures(plan),
        heading=plan.name or "Which schedule",
        metadata=list(plan.metadata.values()),
        cards=_cards(plan),
        answers=text.sentences(plan),
        breakpoints=[(f"from {seconds(kink.bound_s)}", kink.words) for kink in plan.breakpoints],
        chosen=(("", plan.chosen.words, static), list(yields)),
        spreads=_table(text.SPREAD_HEADS, [text.spread_cells(spread) for spread in plan.uncertainty.spreads]),
        sides=_table(text.SIDE_HEADS, [text.side_cells(side) for side in plan.search.sides]),
        others=_table(text.OTHER_HEADS, [text.other_cells(other, plan.chosen) for other in plan.others]),
        drift=_table(text.DRIFT_HEADS, [text.drift_cells(row, plan.bound.limit_s) for row in plan.drift]),
        reload=(
            f"Loading weights takes {seconds(plan.redeploy.dram_s)} from host memory and "
            f"{seconds(plan.redeploy.ssd_s)} from drives ({plan.redeploy.source}); a change of B_E or N_D "
            "alone needs no loading."
        ),
    )


def _cards(plan: SchedulePlan) -> list[tuple[str, str, str]]:
    """Return the answer's numbers as (label, value, interval or note)."""
    chosen, bound, static = plan.chosen, plan.bound, plan.static.best
    by_cost = next((spread for spread in plan.uncertainty.spreads if spread.source == "costs"), None)

    def interval(name: str) -> str:
        return "" if by_cost is None else f"({span(*getattr(by_cost, name))}) by errors of the costs"

    latency = "latency_high_s" if bound.worst_case else "latency_s"
    limit = f"bound {seconds(bound.limit_s)}" if math.isfinite(bound.limit_s) else "no bound"
    cards = [
        ("Requests/s", amount(chosen.throughput_rps), interval("throughput_rps")),
        ("Latency, worst case" if bound.worst_case else "Latency", seconds(getattr(chosen, latency)), limit),
        ("For outputs of", f"{bound.tokens:,} tokens", ""),
    ]
    if by_cost is not None and math.isfinite(bound.limit_s):
        cards.append(("Bound met in", percent(by_cost.met_share), f"of {by_cost.draws} draws of the costs' errors"))
    if static is not None and static.throughput_rps > 0:
        cards.append(
            ("Over static batching", f"x {chosen.throughput_rps / static.throughput_rps:.2f}", "in requests/s")
        )
    return [
        *cards,
        ("Decode batch", amount(chosen.decode_batch), ""),
        ("Memory", percent(chosen.memory_share), "of each GPU"),
    ]


def _yield_cells(row: ScheduleRow | None) -> list[str]:
    if row is None:
        return [UNKNOWN] * len(YIELD_NAMES)
    return [
        amount(row.throughput_rps), seconds(row.latency_s), seconds(row.latency_high_s), seconds(row.cycle_s),
        seconds(row.prefill_s), seconds(row.decode_s), amount(row.decode_batch), percent(row.memory_share),
    ]  # fmt: skip


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[Sequence[str], list[list[str | TableCell]]]:
    """Return the table's headings and cells. Cells of text wrap, but not within "B_E = 52" and "2 x TP 4"."""
    space = "\N{NO-BREAK SPACE}"

    def cell(head: str, words: str) -> str | TableCell:
        if head not in WRAPPED_HEADS:
            return words
        fixed = words.replace(" = ", f"{space}={space}").replace(" x TP ", f"{space}x{space}TP{space}")
        return TableCell(fixed, css="words")

    return heads, [[row[0], *map(cell, heads[1:], row[1:])] for row in rows]


def figures(plan: SchedulePlan) -> dict[str, Any]:
    """Return the curves of the frontier and the bars of the timeline."""
    static_by_formula = []
    if plan.static.front:
        static_by_formula = [_curve("static batching, by formula", STRATEGIES["static"], "dashdot", plan.static.front)]
    chosen_latency_s = plan.chosen.latency_high_s if plan.bound.worst_case else plan.chosen.latency_s
    static = plan.static.best
    return {
        "bound": json_number(plan.bound.limit_s),
        "worst": plan.bound.worst_case,
        "curves": [_curve(strategy.upper(), STRATEGIES[strategy], "solid", points) for strategy, points in plan.front],
        "others": static_by_formula
        + [_curve(SYSTEM_NAMES[one.system], *OTHERS[one.system], one.front) for one in plan.others],
        "chosen": _mark(plan.chosen, chosen_latency_s),
        "static": None if static is None else _mark(static, static.latency_s),
        "stages": list(plan.timeline.stages),
        "bars": [
            [bar.stage, json_number(bar.start_s), json_number(bar.end_s), int(bar.is_prefill), bar.micro_batch]
            for bar in plan.timeline.bars
        ],
    }


def _curve(name: str, series: int, dash: str, points: Sequence[FrontPoint]) -> Figure:
    return {
        "name": name,
        "series": series,
        "dash": dash,
        "x": json_numbers(p.constrained_latency_s for p in points),
        "y": json_numbers(p.row.throughput_rps for p in points),
        "band": [json_numbers(p.band_rps) for p in points if p.band_rps is not None],
        "words": [p.row.words for p in points],
    }


def _mark(row: ScheduleRow, latency_s: float) -> Figure:
    return {"x": json_number(latency_s), "y": json_number(row.throughput_rps), "words": row.words}


def write_schedule_json(path: Path | str, plan: SchedulePlan, answer: Sequence[str] | None = None) -> None:
    """Write a plan and the sentences of its ``answer``, by default the printed ones, to a JSON file."""
    fields = {"answer": text.sentences(plan) if answer is None else answer, **plain(plan)}
    bound, static, timeline, uncertainty = (fields.pop(name) for name in ("bound", "static", "timeline", "uncertainty"))
    fields |= {
        "bound_s": bound["limit_s"],
        "level": bound["level"],
        "quantile_tokens": bound["tokens"],
        "worst_case": bound["worst_case"],
        **fields.pop("search"),
        "static": static["best"],
        "static_front": static["front"],
        "front": [{"strategy": strategy, "points": points} for strategy, points in fields["front"]],
        "stages": timeline["stages"],
        "timeline": timeline["bars"],
        "spreads": uncertainty["spreads"],
        "spread_notes": uncertainty["notes"],
    }
    write_atomic(path, json_text("schedule", fields).encode())


def write_watched_json(path: Path | str, report: Watched) -> None:
    """Write all results of a replay to a JSON file. Raises OutputError if the file cannot be written."""
    fields = {"answer": text.watch_sentences(report), **plain(report), "late": report.late}
    write_atomic(path, json_text("schedule_watch", fields).encode())
