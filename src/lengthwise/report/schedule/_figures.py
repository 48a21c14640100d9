"""What the figures show, as plain data that the page's script draws: the frontier and the timeline."""

from __future__ import annotations

import math
from typing import Any

from lengthwise.schema.schedule import FrontPoint, SchedulePlan
from lengthwise.schema.schedule_row import SYSTEM_NAMES

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
        "curves": [
            _curve(strategy.upper(), (SERIES[strategy], "solid"), points) for strategy, points in plan.front
        ],
        "others": _nothing_done(plan)
        + [_curve(SYSTEM_NAMES[one.system], OTHERS[one.system], one.front) for one in plan.others],
        "chosen": _held(plan),
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


def _curve(name: str, look: tuple[int, str], points: tuple[FrontPoint, ...]) -> dict[str, Any]:
    return {
        "name": name,
        "series": look[0],
        "dash": look[1],
        "x": [_short(p.held_s) for p in points],
        "y": [_short(p.row.throughput_rps) for p in points],
        "band": [[_short(end) for end in p.band_rps] for p in points if p.band_rps is not None],
        "words": [p.row.words for p in points],
    }


def _held(plan: SchedulePlan) -> dict[str, Any]:
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
