"""How sure the numbers of a schedule are: by the requests that lengths were counted over, and by the costs.

A schedule is left as it is and estimated again: for lengths counted over requests that are drawn again (the bootstrap;
Efron, 1979), and under cost tables that are as far off as they may be. What a bound does to the choice itself is not
in it: a schedule that is chosen to meet a bound closely meets it in about half of the draws.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lengthwise.schedule.controls import ControlColumns, Controls, Strategy, columns
from lengthwise.schedule.drift import left_alone
from lengthwise.schedule.estimate import Estimator
from lengthwise.schedule.lengths import TaskLengths
from lengthwise.schedule.stage_seconds import DegreesTables
from lengthwise.schema.errors import InputError
from lengthwise.schema.schedule import FrontPoint
from lengthwise.schema.schedule_row import ScheduleRow
from lengthwise.schema.schedule_spread import Spread

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Fronts = tuple[tuple[str, tuple[FrontPoint, ...]], ...]

RESAMPLES, FEWEST = 200, 50
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
    fewer = max(FEWEST, _MOST_DRAWN // sample.requests)
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


def _banded(
    under: Sequence[Estimator], points: tuple[FrontPoint, ...], level: float
) -> tuple[FrontPoint, ...]:
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


__all__ = ["RESAMPLES", "SAMPLING_LEVEL", "Sample", "banded", "over_costs", "over_resamples"]
