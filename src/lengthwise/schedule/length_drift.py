"""Performance of a schedule under other lengths or other costs than planned (ExeGPT, section 7.6).

``drift`` evaluates the chosen schedule for outputs whose mean, standard deviation or skewness changes. The bound limits
the latency at the quantile of these outputs (the paper's SLA (a)), or at the fixed length ``Assumptions.output_tokens``
(b). A row also has the best schedule for these outputs, and ``margin``: the share by which planning must tighten the
bound so that its schedule still meets the original bound under these outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from lengthwise.schedule.controls import columns
from lengthwise.schedule.estimation import Estimator
from lengthwise.schedule.frontier import Fronts
from lengthwise.schedule.lengths import TaskLengths
from lengthwise.schedule.planner import Choice, Planner
from lengthwise.schedule.search_space import controls_of, row_of
from lengthwise.schedule.stage_costs import TablesByDegree
from lengthwise.schema.errors import InputError
from lengthwise.schema.schedule import DriftRow, ScheduleRow, Spread
from lengthwise.schema.workload import Floats, Ints

MOVES = (
    *(("mean", change) for change in (-0.30, -0.15, 0.15, 0.30)),
    *(("sd", change) for change in (-0.30, -0.15, 0.15, 0.30)),
    *(("skewness", change) for change in (-0.4, -0.2, 0.2, 0.4)),
)
"""Relative changes of mean and standard deviation, absolute changes of skewness, as in the paper's Figure 11."""
MARGINS = (0.02, 0.04, 0.06, 0.08, 0.10, 0.13, 0.16, 0.20, 0.25, 0.30, 0.35, 0.40, 0.45, 0.50)
"""Shares by which a bound is tightened, in the order in which they are tried."""
RESAMPLES, MIN_RESAMPLES, SAMPLING_LEVEL = 200, 50, 0.95
"""Bootstrap draws, their minimum for very large samples, and the level of their interval."""
_MAX_DRAWN_REQUESTS = 20_000_000
_BISECTIONS = 60
_ESTIMATES = ("throughput_rps", "latency_s", "latency_high_s")


def drift(planner: Planner, choice: Choice, moves: Sequence[tuple[str, float]] = MOVES) -> tuple[DriftRow, ...]:
    """Return a row for each change of the output lengths. If all outputs are equally long, only their mean changes."""
    setting, bound_s = planner.estimator.setting, choice.bound_s
    max_tokens = setting.model.max_model_len - setting.task.max_prompt_tokens
    tightened = lru_cache(maxsize=len(MARGINS))(lambda margin: planner.best_row(bound_s * (1 - margin)))
    rows = []
    for moment, change in moves:
        if moment != "mean" and moments(setting.task.output_pmf)[1] == 0:
            continue
        output_pmf = shift_moment(setting.task.output_pmf, moment, change, max_tokens)
        task = TaskLengths(setting.task.prompt_pmf, output_pmf)
        estimator = planner.estimator.replace(task=task)
        deployed, latency_s = evaluate_deployed(estimator, choice.row, worst_case=planner.worst_case)
        replanned = planner.with_estimator(estimator).best_row(bound_s)
        satisfied = math.isfinite(latency_s) and latency_s <= bound_s
        row = DriftRow(
            moment,
            change,
            *moments(task.output_pmf),
            retained=deployed if math.isfinite(latency_s) else None,
            retained_latency_s=latency_s,
            is_satisfied=satisfied,
            replanned=replanned,
            margin=0.0 if satisfied else min_margin(planner, estimator, bound_s, tightened),
            reload=replanned is not None and needs_loading(choice.row, replanned),
        )
        rows.append(row)
    return tuple(rows)


def shift_moment(pmf: Floats, moment: str, change: float, max_tokens: int) -> Floats:
    """Return a distribution with another "mean", "sd" or "skewness" (``moment``) and the same other two moments.

    A mean or sd is multiplied by ``1 + change``, and ``change`` is added to a skewness. The moments are approximate,
    because lengths are rounded to whole tokens from 1 to ``max_tokens``. Raises InputError for another ``moment``.
    """
    tokens = np.arange(len(pmf), dtype=np.float64)
    mean, sd, skewness = moments(pmf)
    if moment == "mean":
        return as_pmf(tokens + mean * change, pmf, max_tokens)
    if moment == "sd":
        return as_pmf(mean + (tokens - mean) * (1 + change), pmf, max_tokens)
    if moment != "skewness":
        raise InputError(f"moment must be mean, sd or skewness; it is {moment!r}")
    # Bisect for the c with which the standard scores z + c (z^2 - 1) have the desired skewness, or the nearest.
    z, low, high = (tokens - mean) / sd, -0.5, 0.5
    for _ in range(_BISECTIONS):
        bend = (low + high) / 2
        bent = z + bend * (z * z - 1)
        bent -= pmf @ bent
        bent /= math.sqrt(pmf @ bent**2)
        low, high = (bend, high) if pmf @ bent**3 < skewness + change else (low, bend)
    return as_pmf(mean + sd * bent, pmf, max_tokens)


def moments(pmf: Floats) -> tuple[float, float, float]:
    """Return mean, standard deviation and skewness. The last two are 0 if all lengths are equal."""
    tokens = np.arange(len(pmf), dtype=np.float64)
    mean = float(pmf @ tokens)
    sd = math.sqrt(max(float(pmf @ (tokens - mean) ** 2), 0.0))
    return (mean, sd, float(pmf @ ((tokens - mean) / sd) ** 3)) if sd > 1e-9 * mean else (mean, 0.0, 0.0)


def as_pmf(tokens: Floats, pmf: Floats, max_tokens: int) -> Floats:
    """Return the distribution of fractional lengths ``tokens`` that have the probabilities ``pmf``.

    Each probability is divided between the two integers next to the length, so that the mean stays the same.
    """
    within = np.clip(tokens, 1.0, float(max_tokens))
    below = np.floor(within).astype(np.int64)
    above = np.minimum(below + 1, max_tokens)
    share = within - below
    result = np.bincount(below, weights=pmf * (1 - share), minlength=max_tokens + 1)
    result = result + np.bincount(above, weights=pmf * share, minlength=max_tokens + 1)
    result[result < 1e-15] = 0.0
    return np.asarray(result / result.sum())


def evaluate_deployed(estimator: Estimator, row: ScheduleRow, *, worst_case: bool) -> tuple[ScheduleRow, float]:
    """Return a deployed schedule with the estimates of ``estimator``, and the latency that a bound limits.

    The GPUs stay split as in ``row``, even if the strategy would now choose another split. N_D is at most the longest
    output.
    """
    steps = min(row.decode_steps, estimator.setting.task.max_output_tokens)
    controls = replace(controls_of(row), decode_steps=steps)
    got = estimator.estimate([controls], np.array([row.prefill_gpus], dtype=np.int64))
    return row_of(controls, got), float(got.constrained_latency_s(worst_case=worst_case)[0])


def min_margin(
    planner: Planner, estimator: Estimator, bound_s: float, tightened: Callable[[float], ScheduleRow | None]
) -> float:
    """Return the smallest margin whose schedule meets the bound under an estimator's task, or NaN if none does.

    ``tightened`` returns the schedule that the planner chooses at a margin. An infinite bound also gives NaN.
    """
    for margin in MARGINS if math.isfinite(bound_s) else ():
        row = tightened(margin)
        if row is None:
            break
        if evaluate_deployed(estimator, row, worst_case=planner.worst_case)[1] <= bound_s:
            return margin
    return math.nan


def needs_loading(row: ScheduleRow, other: ScheduleRow) -> bool:
    """Return whether weights must be loaded to change from one schedule to the other."""
    return (row.family, row.prefill_gpus) != (other.family, other.prefill_gpus)


@dataclass(frozen=True, eq=False)
class Sample:
    """Requests from which a task's lengths were estimated.

    ``prompt_tokens`` are [n] and ``output_tokens`` [m]. One may be None if its distribution is known. If ``paired``,
    values at the same index belong to the same request, so that both must be given and equally long.
    """

    prompt_tokens: Ints | None
    output_tokens: Ints | None
    paired: bool = True

    def __post_init__(self) -> None:
        columns = [side for side in (self.prompt_tokens, self.output_tokens) if side is not None]
        if not columns:
            raise InputError("a sample must be of prompts, of outputs, or of both")
        if self.paired and (len(columns) < 2 or len(columns[0]) != len(columns[1])):
            raise InputError("paired lengths must be as many prompts as outputs")

    @property
    def requests(self) -> int:
        """Return the number of requests, or the smaller number if prompts and outputs differ in number."""
        return min(len(side) for side in (self.prompt_tokens, self.output_tokens) if side is not None)

    def resampled(self, known: TaskLengths, rng: np.random.Generator) -> TaskLengths:
        """Return the lengths of a bootstrap sample of the same size. Known distributions stay the same."""
        prompt, output = self.prompt_tokens, self.output_tokens
        if self.paired and prompt is not None and output is not None:
            rows = rng.integers(0, len(prompt), len(prompt))
            return TaskLengths.from_samples(prompt[rows], output[rows])

        def pmf(tokens: Ints | None, known_pmf: Floats) -> Floats:
            if tokens is None:
                return known_pmf
            return np.bincount(tokens[rng.integers(0, len(tokens), len(tokens))]) / len(tokens)

        return TaskLengths(pmf(prompt, known.prompt_pmf), pmf(output, known.output_pmf))


def spread_over_resamples(
    estimator: Estimator,
    row: ScheduleRow,
    sample: Sample,
    bound_s: float = math.inf,
    *,
    worst_case: bool = True,
    draws: int = RESAMPLES,
    seed: int = 0,
) -> Spread:
    """Return the 95 % interval of a deployed schedule's estimates over up to ``draws`` bootstrap samples."""
    task, rng = estimator.setting.task, np.random.default_rng(seed)
    draws = min(draws, max(MIN_RESAMPLES, _MAX_DRAWN_REQUESTS // sample.requests))
    others = (estimator.replace(task=sample.resampled(task, rng)) for _ in range(draws))
    rows = [evaluate_deployed(other, row, worst_case=worst_case) for other in others]
    return _spread("lengths", rows, bound_s, SAMPLING_LEVEL, sample.requests)


def spread_over_costs(
    estimator: Estimator,
    row: ScheduleRow,
    perturbed: Sequence[TablesByDegree],
    bound_s: float = math.inf,
    *,
    worst_case: bool = True,
    level: float = 0.9,
) -> Spread:
    """Return the ``level`` interval of a deployed schedule's estimates over ``perturbed`` tables, ``row`` included."""
    if not perturbed:
        raise InputError("an interval of the costs needs perturbed tables; there are none")
    others = (estimator.replace(tables=tables) for tables in perturbed)
    rows = [evaluate_deployed(other, row, worst_case=worst_case) for other in others]
    spread = _spread("costs", rows, bound_s, level, 0)
    ends: dict[str, Any] = {n: _including(getattr(spread, n), getattr(row, n)) for n in _ESTIMATES}
    return replace(spread, **ends)


def with_bands(estimator: Estimator, fronts: Fronts, perturbed: Sequence[TablesByDegree], level: float = 0.9) -> Fronts:
    """Return the frontiers with the interval of each schedule's throughput over sets of ``perturbed`` cost tables."""
    if not perturbed:
        return fronts
    others = [estimator.replace(tables=tables) for tables in perturbed]
    result = []
    for strategy, points in fronts:
        rows = [point.row for point in points]
        controls, split = columns(map(controls_of, rows)), np.array([row.prefill_gpus for row in rows], dtype=np.int64)
        draws = np.array([other.estimate(controls, split).throughput_rps for other in others])
        bands = np.quantile(draws, _tails(level), axis=0, method="hazen").T.tolist()
        banded_points = [
            replace(point, band_rps=_including((low, high), point.row.throughput_rps))
            for point, (low, high) in zip(points, bands, strict=True)
        ]
        result.append((strategy, tuple(banded_points)))
    return tuple(result)


def _spread(
    source: str, rows: Sequence[tuple[ScheduleRow, float]], bound_s: float, level: float, requests: int
) -> Spread:
    latency_s = np.array([constrained_s for _, constrained_s in rows])
    ends = {}
    for name in _ESTIMATES:
        values = np.array([getattr(row, name) for row, _ in rows])
        # If some latencies are infinite, an end must be one of the values, not an interpolation.
        method: Literal["hazen", "inverted_cdf"] = "hazen" if np.isfinite(values).all() else "inverted_cdf"
        ends[name] = tuple(np.quantile(values, _tails(level), method=method).tolist())
    return Spread(
        source=source,
        draws=len(rows),
        level=level,
        requests=requests,
        met_share=float((np.isfinite(latency_s) & (latency_s <= bound_s)).mean()),
        **ends,
    )


def _tails(level: float) -> list[float]:
    return [(1 - level) / 2, (1 + level) / 2]


def _including(ends: tuple[float, float], value: float) -> tuple[float, float]:
    return min(ends[0], value), max(ends[1], value)
