"""Errors over next to nothing: their intervals tell nothing, and are not told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from lengthwise.metrics._compare_result import MetricError

FARTHEST = 100.0
"""So many times the ratio of the runs, an interval's upper end comes of a truth that is nearly 0 in some draws."""
NOTHING = 1e-3
"""A quantile below this share of its run's mean is next to nothing, as the gaps of tokens that came in one piece."""


def without_nonsense(errors: Sequence[MetricError]) -> tuple[tuple[MetricError, ...], tuple[str, ...]]:
    """The errors, without an interval where they are relative to next to nothing; a doubt that names them."""
    means = {one.metric: one.b for one in errors if one.stat == "mean"}
    vague = {one.key for one in errors if one.has_interval and _vague(one, means.get(one.metric, 0.0))}
    kept = tuple(replace(one, low=math.nan, high=math.nan) if one.key in vague else one for one in errors)
    if not vague:
        return kept, ()
    names = ", ".join(f"{one.metric.upper()} {one.stat}".strip() for one in errors if one.key in vague)
    told = f"{names} of B can be next to nothing: errors relative to that can be anything, so no interval is told."
    return kept, (told,)


def _vague(one: MetricError, mean_b: float) -> bool:
    ratio = 1 + one.error
    return not math.isfinite(one.high) or 1 + one.high > FARTHEST * ratio or one.b < NOTHING * mean_b
