"""What becomes of a schedule when outputs get longer, more varied or more skewed (ExeGPT, section 7.6).

The chosen schedule is left as it is and estimated for the moved lengths; its bound is then that of the moved
distribution's quantile (the paper's SLA (a)), or of the fixed length of ``Assumptions.output_tokens`` (b). Beside it
stands what would be chosen anew, and how much tighter the bound must have been for the schedule chosen under it to
hold ("margin").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from lengthwise.schedule.choose import Choice, Planner
from lengthwise.schedule.controls import ControlColumns, Controls, Strategy, columns
from lengthwise.schedule.estimation import Estimator
from lengthwise.schedule.lengths import TaskLengths
from lengthwise.schedule.sides import row_of
from lengthwise.schedule.stage_costs import DegreesTables
from lengthwise.schema.errors import InputError, ScheduleError
from lengthwise.schema.schedule import DriftRow, FrontPoint, ScheduleRow, Spread

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


def drift(planner: Planner, choice: Choice, moves: Sequence[tuple[str, float]] = MOVES) -> tuple[DriftRow, ...]:
    """A row a move of the output lengths; moves of a spread that is not there are left out.

    Raises:
        InputError: A move is unknown.
    """
    task = planner.estimator.setting.task
    _, sd, _ = moments(task.output_pmf)
    tighter = lru_cache(maxsize=len(MARGINS))(lambda margin: _tighter(planner, choice.bound_s, margin))
    return tuple(_row(planner, choice, tighter, what, change) for what, change in moves if sd > 0 or what == "mean")


def moved(pmf: Floats, what: str, change: float, max_tokens: int) -> Floats:
    """A distribution whose mean or sd is ``1 + change`` times as large, or whose skewness is ``change`` more.

    The other two moments stay, but for what rounding to tokens and the ends (1 and ``max_tokens``) do.

    Raises:
        InputError: ``what`` is not "mean", "sd" or "skewness".
    """
    tokens = np.arange(len(pmf), dtype=np.float64)
    mean, sd, skewness = moments(pmf)
    if what == "mean":
        return placed(tokens + mean * change, pmf, max_tokens)
    if what == "sd":
        return placed(mean + (tokens - mean) * (1 + change), pmf, max_tokens)
    if what != "skewness":
        raise InputError(f"mean, sd or skewness may move, not {what!r}")
    return placed(mean + sd * _skew((tokens - mean) / sd, pmf, skewness + change), pmf, max_tokens)


def moments(pmf: Floats) -> tuple[float, float, float]:
    """Mean, standard deviation and skewness; 0 where there is no spread."""
    tokens = np.arange(len(pmf), dtype=np.float64)
    mean = float(pmf @ tokens)
    sd = math.sqrt(max(float(pmf @ (tokens - mean) ** 2), 0.0))
    return (mean, sd, float(pmf @ ((tokens - mean) / sd) ** 3)) if sd > 1e-9 * mean else (mean, 0.0, 0.0)


def _skew(z: Floats, pmf: Floats, desired: float) -> Floats:
    """Standard scores bent by ``z + c (z^2 - 1)`` until their skewness is as wanted, or as near as that can."""
    low, high = -0.5, 0.5
    for _ in range(_BISECTIONS):
        bend = (low + high) / 2
        bent = z + bend * (z * z - 1)
        bent -= pmf @ bent
        bent /= math.sqrt(pmf @ bent**2)
        low, high = (bend, high) if pmf @ bent**3 < desired else (low, bend)
    return bent


def placed(tokens: Floats, pmf: Floats, max_tokens: int) -> Floats:
    """Probabilities of whole tokens; what lies between two goes to both, so that the mean stays."""
    within = np.clip(tokens, 1.0, float(max_tokens))
    below = np.floor(within).astype(np.int64)
    above = np.minimum(below + 1, max_tokens)
    share = within - below
    made = np.bincount(below, weights=pmf * (1 - share), minlength=max_tokens + 1)
    made = made + np.bincount(above, weights=pmf * share, minlength=max_tokens + 1)
    made[made < 1e-15] = 0.0
    return np.asarray(made / made.sum())


def _row(planner: Planner, choice: Choice, tighter: Tighter, what: str, change: float) -> DriftRow:
    setting = planner.estimator.setting
    max_tokens = setting.model.max_model_len - setting.task.max_prompt_tokens
    task = TaskLengths(setting.task.prompt_pmf, moved(setting.task.output_pmf, what, change, max_tokens))
    estimator = Estimator(task, setting.cluster, setting.model, setting.tables, setting.assumptions)
    kept, held_s = left_alone(estimator, choice.row, worst_case=planner.worst_case)
    replanned = _replanned(planner, estimator, choice.bound_s)
    holds = math.isfinite(held_s) and held_s <= choice.bound_s
    return DriftRow(
        what,
        change,
        *moments(task.output_pmf),
        retained=kept if math.isfinite(held_s) else None,
        kept_held_s=held_s,
        is_satisfied=holds,
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


def first_margin(planner: Planner, estimator: Estimator, bound_s: float, tighter: Tighter | None = None) -> float:
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


Ints = npt.NDArray[np.int64]
Fronts = tuple[tuple[str, tuple[FrontPoint, ...]], ...]

RESAMPLES, MIN_COUNT = 200, 50
"""Draws of the bootstrap, and of very many requests."""
SAMPLING_LEVEL = 0.95

_MOST_DRAWN = 20_000_000


@dataclass(frozen=True, eq=False)
class Sample:
    """Requests that a task's lengths were counted over.

    Attributes:
        prompt_tokens: [n] of each; None: prompts are known.
        output_tokens: [m] of each; None: outputs are known.
        paired: Whether both are of the same requests, one after another.
    """

    prompt_tokens: Ints | None
    output_tokens: Ints | None
    paired: bool = True

    def __post_init__(self) -> None:
        if self.prompt_tokens is None and self.output_tokens is None:
            raise InputError("a sample must be of prompts, of outputs, or of both")
        if self.paired and (
            self.prompt_tokens is None
            or self.output_tokens is None
            or len(self.prompt_tokens) != len(self.output_tokens)
        ):
            raise InputError("paired lengths must be as many prompts as outputs")

    @property
    def requests(self) -> int:
        """How many; of two lists the shorter one."""
        return min(len(side) for side in (self.prompt_tokens, self.output_tokens) if side is not None)

    def task(self, known: TaskLengths, rng: np.random.Generator) -> TaskLengths:
        """Lengths counted over as many requests, drawn again; a side that is known stays."""
        prompt, output = self.prompt_tokens, self.output_tokens
        if self.paired and prompt is not None and output is not None:
            rows = rng.integers(0, len(prompt), len(prompt))
            return TaskLengths.from_samples(prompt[rows], output[rows])
        return TaskLengths(
            known.prompt_pmf if prompt is None else _counted(prompt, rng),
            known.output_pmf if output is None else _counted(output, rng),
        )


def over_resamples(
    estimator: Estimator,
    row: ScheduleRow,
    sample: Sample,
    bound_s: float = math.inf,
    *,
    worst_case: bool = True,
    draws: int = RESAMPLES,
    seed: int = 0,
) -> Spread:
    """What a schedule yields over requests drawn again.

    Args:
        estimator: Of the task whose lengths were counted.
        row: The schedule, as deployed.
        sample: What was counted.
        bound_s: Latency that must be held; infinite: any.
        worst_case: Whether the bound is held against ``latency_high_s``.
        draws: How many; fewer of very many requests.
        seed: Of the draws.
    """
    setting, rng = estimator.setting, np.random.default_rng(seed)
    fewer = max(MIN_COUNT, _MOST_DRAWN // sample.requests)
    rows = []
    for _ in range(min(draws, fewer)):
        task = sample.task(setting.task, rng)
        other = Estimator(task, setting.cluster, setting.model, setting.tables, setting.assumptions)
        rows.append(left_alone(other, row, worst_case=worst_case))
    return _spread("lengths", rows, bound_s, SAMPLING_LEVEL, sample.requests)


def over_costs(
    estimator: Estimator,
    row: ScheduleRow,
    off: Sequence[DegreesTables],
    bound_s: float = math.inf,
    *,
    worst_case: bool = True,
    level: float = 0.9,
) -> Spread:
    """What a schedule yields under cost tables that are off.

    Args:
        estimator: With the tables as they are.
        row: The schedule, as deployed.
        off: Tables by degree, each draw's.
        bound_s: Latency that must be held; infinite: any.
        worst_case: Whether the bound is held against ``latency_high_s``.
        level: Share of the draws that lies within.

    Raises:
        InputError: There is no draw.
    """
    if not off:
        raise InputError("an interval of the costs needs tables that are off; there are none")
    rows = [left_alone(_under(estimator, tables), row, worst_case=worst_case) for tables in off]
    spread = _spread("costs", rows, bound_s, level, 0)
    return replace(
        spread,
        throughput_rps=_holding(spread.throughput_rps, row.throughput_rps),
        latency_s=_holding(spread.latency_s, row.latency_s),
        latency_high_s=_holding(spread.latency_high_s, row.latency_high_s),
    )


def banded(estimator: Estimator, fronts: Fronts, off: Sequence[DegreesTables], level: float = 0.9) -> Fronts:
    """Frontiers with the throughput of each schedule under cost tables that are off."""
    if not off:
        return fronts
    under = [_under(estimator, tables) for tables in off]
    return tuple((strategy, _banded(under, points, level)) for strategy, points in fronts)


def _banded(under: Sequence[Estimator], points: tuple[FrontPoint, ...], level: float) -> tuple[FrontPoint, ...]:
    given, split = _columns(points)
    drawn = np.array([estimator.estimate(given, split).throughput_rps for estimator in under])
    ends = np.quantile(drawn, _tails(level), axis=0, method="hazen").T.tolist()
    return tuple(
        replace(point, band_rps=_holding((low, high), point.row.throughput_rps))
        for point, (low, high) in zip(points, ends, strict=True)
    )


def _columns(points: Iterable[FrontPoint]) -> tuple[ControlColumns, Ints]:
    rows = [point.row for point in points]
    made = [
        Controls(
            Strategy(row.strategy),
            row.encode_batch,
            row.decode_steps,
            None if row.strategy == Strategy.RRA else row.micro_batches,
            row.tp,
            row.tp_groups,
        )
        for row in rows
    ]
    return columns(made), np.array([row.encode_gpus for row in rows], dtype=np.int64)


def _under(estimator: Estimator, tables: DegreesTables) -> Estimator:
    setting = estimator.setting
    return Estimator(setting.task, setting.cluster, setting.model, tables, setting.assumptions)


def _spread(
    source: str, rows: Sequence[tuple[ScheduleRow, float]], bound_s: float, level: float, requests: int
) -> Spread:
    held = np.array([held_s for _, held_s in rows])
    names = ("throughput_rps", "latency_s", "latency_high_s")
    ends = {name: _ends(np.array([getattr(row, name) for row, _ in rows]), level) for name in names}
    return Spread(
        source=source,
        draws=len(rows),
        level=level,
        requests=requests,
        held_share=float((np.isfinite(held) & (held <= bound_s)).mean()),
        **ends,
    )


def _ends(values: Floats, level: float) -> tuple[float, float]:
    """The interval's ends; where some cannot run, and so take for ever, none is put between two values."""
    tails = _tails(level)
    if np.isfinite(values).all():
        low, high = np.quantile(values, tails, method="hazen").tolist()
    else:
        low, high = np.quantile(values, tails, method="inverted_cdf").tolist()
    return low, high


def _tails(level: float) -> list[float]:
    return [(1 - level) / 2, (1 + level) / 2]


def _holding(ends: tuple[float, float], value: float) -> tuple[float, float]:
    return min(ends[0], value), max(ends[1], value)


def _counted(tokens: Ints, rng: np.random.Generator) -> Floats:
    return np.bincount(tokens[rng.integers(0, len(tokens), len(tokens))]) / len(tokens)
