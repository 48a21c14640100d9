"""What the figures show, as plain data that the page's script draws: a chart of GPUs by time, of plan and run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lengthwise.report.apps._facts import AppFacts
from lengthwise.report.apps._ran import Spell, lanes_of, spells_of
from lengthwise.report.apps._words import TIMES, WHY, scale_of, shape, took
from lengthwise.schema.app import AppPlan, AppSpan

MOST_MARKS = 60
"""Stages beyond so many are not marked: lines would hide what is between them."""


@dataclass(frozen=True)
class Bar:
    """A stretch of one row.

    Attributes:
        row: From 0.
        start_s: From when.
        end_s: Until when.
        model: By number; -1: none.
        what: As of AppSpan.
        label: What stands in it.
        words: What is told of it.
    """

    row: int
    start_s: float
    end_s: float
    model: int
    what: str
    label: str
    words: str


def figures(plan: AppPlan | None, models: Sequence[str], about: AppFacts) -> dict[str, Any]:
    """The charts: "plan", where there is one, and "run", where it was run; both by one clock."""
    charts = []
    if plan is not None:
        rows = list(about.gpus) or [
            f"GPU {k}" for k in range(1 + max((s.gpu for s in plan.spans), default=0))
        ]
        bars = [_planned(span, models) for span in plan.spans]
        charts.append(("plan", rows, bars, [stage.end_s for stage in plan.stages]))
    if about.manifest is not None:
        lanes = lanes_of(about.manifest, about.gpus)
        spells = spells_of(about.manifest)
        charts.append(("run", list(lanes.values()), _ran(spells, lanes, models), []))
    end_s = max((bar.end_s for _, _, bars, _ in charts for bar in bars), default=0.0)
    scale, unit = scale_of(end_s)
    return {
        "unit": unit,
        "end": _short(end_s / scale),
        "models": list(models),
        "charts": [_chart(*chart, scale) for chart in charts],
    }


def _chart(name: str, rows: Sequence[str], bars: Sequence[Bar], marks: Sequence[float], scale: float) -> Any:
    return {
        "id": name,
        "rows": list(rows),
        "bars": [
            [bar.row, _short(bar.start_s / scale), _short(bar.end_s / scale), bar.model, bar.what, bar.label, bar.words]
            for bar in bars
        ],
        "marks": [_short(mark / scale) for mark in marks] if len(marks) <= MOST_MARKS else [],
    }  # fmt: skip


def _planned(span: AppSpan, models: Sequence[str]) -> Bar:
    name = models[span.model] if span.model >= 0 else ""
    label, how = "", ""
    if span.plan is not None:
        label = f"{span.plan.dp}{TIMES}{span.plan.tp}" + (
            f"{TIMES}{span.plan.pp}" if span.plan.pp > 1 else ""
        )
        how = (
            f", {shape(span.plan)} (dp {TIMES} tp {TIMES} pp: {span.plan.dp}, {span.plan.tp}, {span.plan.pp})"
        )
    says = {"run": f"{name} runs{how}", "load": f"{name} is loaded{how}"}
    words = says.get(span.what) or f"idle: {WHY.get(span.what, span.what)}" + (f" ({name})" if name else "")
    when = f"{took(span.start_s)} to {took(span.end_s)}, {took(span.end_s - span.start_s)}"
    shown = label if span.what == "run" else ""
    return Bar(span.gpu, span.start_s, span.end_s, span.model, span.what, shown, f"{words}\n{when}")


def _ran(spells: Sequence[Spell], lanes: Mapping[Any, str], models: Sequence[str]) -> list[Bar]:
    row_of = {lane: row for row, lane in enumerate(lanes)}
    number = {name: k for k, name in enumerate(models)}
    bars = []
    for spell in spells:
        words = f"{spell.model} {'runs' if spell.what == 'run' else 'is loaded'}"
        if spell.ended == "died":
            words += ", then its engine died"
        when = f"{took(spell.start_s)} to {took(spell.end_s)}, {took(spell.end_s - spell.start_s)}"
        bars.append(
            Bar(
                row_of[spell.lane],
                spell.start_s,
                spell.end_s,
                number.get(spell.model, -1),
                spell.what,
                "died" if spell.ended == "died" else "",
                f"{words}\n{when}",
            )
        )
    return bars


def _short(value: float) -> float:
    return float(f"{value:.6g}")
