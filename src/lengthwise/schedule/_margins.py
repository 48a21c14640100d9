"""How much tighter a bound is taken after a drift, against another one."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

from lengthwise.schedule.choose import Planner
from lengthwise.schedule.drift import Floats, first_margin, left_alone, moments, moved
from lengthwise.schedule.estimate import Estimator
from lengthwise.schedule.lengths import TaskLengths
from lengthwise.schema.schedule_row import ScheduleRow

_SHARES = (1.0, 0.5, 0.25)
Chosen = Callable[[float], ScheduleRow | None]
"""The best schedule under a bound; None: nothing meets it."""


def margin_after(
    planner: Planner, chosen: Chosen, before: TaskLengths, bound_s: float, most_cost: float
) -> float:
    """The first margin that holds the bound if lengths move on by as much as they moved, or by a part of it."""
    free = None if math.isinf(bound_s) else chosen(bound_s)
    if free is None:
        return 0.0
    setting = planner.estimator.setting
    tighter = lru_cache(maxsize=None)(lambda margin: chosen(bound_s * (1 - margin)))
    for share in _SHARES:
        moved_on = further(before, setting.task, share, setting.model.max_model_len)
        estimator = Estimator(moved_on, setting.cluster, setting.model, setting.tables, setting.assumptions)
        if left_alone(estimator, free, worst_case=planner.worst_case)[1] <= bound_s:
            return 0.0
        margin = first_margin(planner, estimator, bound_s, tighter)
        row = tighter(margin) if math.isfinite(margin) else None
        if row and row.throughput_rps >= (1 - most_cost) * free.throughput_rps:
            return margin
    return 0.0


def further(before: TaskLengths, task: TaskLengths, share: float, longest_tokens: int) -> TaskLengths:
    """Lengths that moved on: longer and more varied by a share of what mean and deviation just moved."""
    prompt = _more(before.prompt_pmf, task.prompt_pmf, share, longest_tokens - task.max_output_tokens)
    output = _more(before.output_pmf, task.output_pmf, share, longest_tokens - (len(prompt) - 1))
    return TaskLengths(prompt, output)


def _more(before: Floats, after: Floats, share: float, most_tokens: int) -> Floats:
    (mean, sd, _), (mean_after, sd_after, _) = moments(before), moments(after)
    spread = moved(after, "sd", share * abs(sd_after / sd - 1) if sd else 0.0, most_tokens)
    made = moved(spread, "mean", share * abs(mean_after / mean - 1), most_tokens)
    return made[: int(made.nonzero()[0][-1]) + 1]


__all__ = ["Chosen", "further", "margin_after"]
