"""What becomes of a schedule when outputs get longer, more varied or more skewed (ExeGPT, section 7.6).

The chosen schedule is left as it is and estimated for the moved lengths; its bound is then that of the moved
distribution's quantile (the paper's SLA (a)), or of the fixed length of ``Assumptions.output_tokens`` (b). Beside it
stands what would be chosen anew, and how much tighter the bound must have been for the schedule chosen under it to
hold ("margin").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from lengthwise.schedule.choose import Choice, Planner
from lengthwise.schedule.controls import Controls, Strategy
from lengthwise.schedule.estimate import Estimator
from lengthwise.schedule.lengths import TaskLengths
from lengthwise.schedule.sides import row_of
from lengthwise.schema.errors import InputError, ScheduleError
from lengthwise.schema.schedule import DriftRow
from lengthwise.schema.schedule_row import ScheduleRow

Floats = npt.NDArray[np.float64]
Tighter = Callable[[float], ScheduleRow | None]

MOVES = (
    *(("mean", change) for change in (-0.30, -0.15, 0.15, 0.30)),
    *(("sd", change) for change in (-0.30, -0.15, 0.15, 0.30)),
    *(("skewness", change) for change in (-0.4, -0.2, 0.2, 0.4)),
)
"""Shares of mean and standard deviation, amounts of skewness, as in the paper's Figure 11."""

MARGINS = (0.02, 0.04, 0.06, 0.08, 0.10, 0.13, 0.16, 0.20, 0.25, 0.30, 0.35, 0.40, 0.45, 0.50)
"""Shares by which a bound is tightened, one after another, to find the first that would have been enough."""

_BISECTIONS = 60


def drift(
    planner: Planner, choice: Choice, moves: Sequence[tuple[str, float]] = MOVES
) -> tuple[DriftRow, ...]:
    """A row a move of the output lengths; moves of a spread that is not there are left out.

    Raises:
        InputError: A move is unknown.
    """
    task = planner.estimator.setting.task
    _, sd, _ = moments(task.output_pmf)
    tighter = lru_cache(maxsize=len(MARGINS))(lambda margin: _tighter(planner, choice.bound_s, margin))
    return tuple(
        _row(planner, choice, tighter, what, change) for what, change in moves if sd > 0 or what == "mean"
    )


def moved(pmf: Floats, what: str, change: float, most_tokens: int) -> Floats:
    """A distribution whose mean or sd is ``1 + change`` times as large, or whose skewness is ``change`` more.

    The other two moments stay, but for what rounding to tokens and the ends (1 and ``most_tokens``) do.

    Raises:
        InputError: ``what`` is not "mean", "sd" or "skewness".
    """
    tokens = np.arange(len(pmf), dtype=np.float64)
    mean, sd, skewness = moments(pmf)
    if what == "mean":
        return placed(tokens + mean * change, pmf, most_tokens)
    if what == "sd":
        return placed(mean + (tokens - mean) * (1 + change), pmf, most_tokens)
    if what != "skewness":
        raise InputError(f"mean, sd or skewness may move, not {what!r}")
    return placed(mean + sd * _skewed((tokens - mean) / sd, pmf, skewness + change), pmf, most_tokens)


def moments(pmf: Floats) -> tuple[float, float, float]:
    """Mean, standard deviation and skewness; 0 where there is no spread."""
    tokens = np.arange(len(pmf), dtype=np.float64)
    mean = float(pmf @ tokens)
    sd = math.sqrt(max(float(pmf @ (tokens - mean) ** 2), 0.0))
    return (mean, sd, float(pmf @ ((tokens - mean) / sd) ** 3)) if sd > 1e-9 * mean else (mean, 0.0, 0.0)


def _skewed(z: Floats, pmf: Floats, wanted: float) -> Floats:
    """Standard scores bent by ``z + c (z^2 - 1)`` until their skewness is as wanted, or as near as that can."""
    low, high = -0.5, 0.5
    for _ in range(_BISECTIONS):
        bend = (low + high) / 2
        bent = z + bend * (z * z - 1)
        bent -= pmf @ bent
        bent /= math.sqrt(pmf @ bent**2)
        low, high = (bend, high) if pmf @ bent**3 < wanted else (low, bend)
    return bent


def placed(tokens: Floats, pmf: Floats, most_tokens: int) -> Floats:
    """Probabilities of whole tokens; what lies between two goes to both, so that the mean stays."""
    within = np.clip(tokens, 1.0, float(most_tokens))
    below = np.floor(within).astype(np.int64)
    above = np.minimum(below + 1, most_tokens)
    share = within - below
    made = np.bincount(below, weights=pmf * (1 - share), minlength=most_tokens + 1)
    made = made + np.bincount(above, weights=pmf * share, minlength=most_tokens + 1)
    made[made < 1e-15] = 0.0
    return np.asarray(made / made.sum())


def _row(planner: Planner, choice: Choice, tighter: Tighter, what: str, change: float) -> DriftRow:
    setting = planner.estimator.setting
    most_tokens = setting.model.max_model_len - setting.task.max_prompt_tokens
    task = TaskLengths(setting.task.prompt_pmf, moved(setting.task.output_pmf, what, change, most_tokens))
    estimator = Estimator(task, setting.cluster, setting.model, setting.tables, setting.assumptions)
    kept, held_s = left_alone(estimator, choice.row, worst_case=planner.worst_case)
    replanned = _replanned(planner, estimator, choice.bound_s)
    holds = math.isfinite(held_s) and held_s <= choice.bound_s
    return DriftRow(
        what,
        change,
        *moments(task.output_pmf),
        kept=kept if math.isfinite(held_s) else None,
        kept_held_s=held_s,
        holds=holds,
        replanned=replanned,
        margin=0.0 if holds else first_margin(planner, estimator, choice.bound_s, tighter),
        reload=replanned is not None and moves_weights(choice.row, replanned),
    )


def left_alone(estimator: Estimator, row: ScheduleRow, *, worst_case: bool) -> tuple[ScheduleRow, float]:
    """A schedule as it is deployed, split and all, for an estimator's task, and the latency that is held."""
    rra = row.strategy == Strategy.RRA
    controls = Controls(
        Strategy(row.strategy),
        row.encode_batch,
        min(row.decode_steps, estimator.setting.task.max_output_tokens),
        None if rra else row.micro_batches,
        row.tp,
        row.tp_groups,
    )
    got = estimator.estimate([controls], np.array([row.encode_gpus], dtype=np.int64))
    return row_of(controls, got), float((got.latency_high_s if worst_case else got.latency_s)[0])


def first_margin(
    planner: Planner, estimator: Estimator, bound_s: float, tighter: Tighter | None = None
) -> float:
    """The first margin whose schedule, chosen by a planner, holds a bound for an estimator's task; NaN: none does.

    ``tighter`` gives the planner's choice by margin, where it is known already.
    """
    chosen = tighter or (lambda margin: _tighter(planner, bound_s, margin))
    for margin in MARGINS if math.isfinite(bound_s) else ():
        row = chosen(margin)
        if row is None:
            break
        if left_alone(estimator, row, worst_case=planner.worst_case)[1] <= bound_s:
            return margin
    return math.nan


def _tighter(planner: Planner, bound_s: float, margin: float) -> ScheduleRow | None:
    """What is chosen under a tighter bound; None: nothing meets it."""
    return _replanned(planner, planner.estimator, bound_s * (1 - margin))


def _replanned(planner: Planner, estimator: Estimator, bound_s: float) -> ScheduleRow | None:
    asked = planner if estimator is planner.estimator else planner.anew(estimator)
    try:
        return asked.best(bound_s).row
    except ScheduleError:
        return None


def moves_weights(row: ScheduleRow, other: ScheduleRow) -> bool:
    """Whether one schedule cannot become the other without loading weights."""
    return (row.family, row.encode_gpus) != (other.family, other.encode_gpus)


__all__ = [
    "MARGINS",
    "MOVES",
    "drift",
    "first_margin",
    "left_alone",
    "moments",
    "moved",
    "moves_weights",
    "placed",
]
