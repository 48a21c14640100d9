"""The best schedule that needs no weights moved: as deployed, but for batches and phases."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from lengthwise.schedule.choose import Planner
from lengthwise.schedule.controls import ControlColumns, Strategy
from lengthwise.schedule.estimates import Estimates
from lengthwise.schedule.searched import improved, least_seen_s
from lengthwise.schedule.sides import Side
from lengthwise.schema.schedule_row import ScheduleRow

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class InPlace:
    """The best that a deployed schedule can become while it runs; what one bound took to answer is known for the next.

    It has the deployed one's strategy, groups and split of GPUs, and is found as a planner finds a choice, by the same
    steps and as surely.

    Args:
        planner: Of the lengths; it says what latency a bound is held against.
        deployed: What runs.
        seats: Neither its encodings nor its decode batch are larger; infinite: any.
    """

    def __init__(self, planner: Planner, deployed: ScheduleRow, *, seats: float = math.inf) -> None:
        self._planner = planner
        self._side = _DeployedSide(planner, deployed, seats)

    def best(self, bound_s: float = math.inf) -> ScheduleRow | None:
        """The one of the highest throughput found that meets a bound; None: none does."""
        for one in improved(self._planner.search(bound_s, [self._side]), bound_s):
            if one.found.best:
                return self._side.row(one.best.point)
        return None

    @property
    def least_s(self) -> float:
        """The least latency that was seen, as it is once no bound could be met; infinite: nothing can run."""
        return least_seen_s([self._side])


class _DeployedSide(Side):
    """The schedules of the deployed layout that have seats."""

    def __init__(self, planner: Planner, deployed: ScheduleRow, seats: float) -> None:
        self._deployed, self._seats = deployed, seats
        strategy = Strategy(deployed.strategy)
        super().__init__(planner.estimator, strategy, deployed.tp, worst_case=planner.worst_case)

    def estimates(self, points: Ints) -> Estimates:
        return self._split_as_deployed(self.columns(points))

    def held_s(self, estimates: Estimates) -> Floats:
        return np.where(estimates.decode_batch <= self._seats, super().held_s(estimates), np.inf)

    def _groups(self) -> tuple[int, ...]:
        return (self._deployed.tp_groups,)

    def _largest_batch(self, groups: tuple[int, ...]) -> int:
        return int(min(super()._largest_batch(groups), self._seats))

    def _all_runs(self, groups: tuple[int, ...], most: int) -> Ints:
        """All batches of as many micro-batches are one run: no GPU changes sides."""
        return np.array([(1, most, micro, group) for group in groups for micro in self._micro_batches()])

    def _reasons(self, columns: ControlColumns) -> Ints:
        return self._split_as_deployed(columns).reason

    def _split_as_deployed(self, columns: ControlColumns) -> Estimates:
        split = np.full(len(columns), self._deployed.encode_gpus, dtype=np.int64)
        return self._estimator.estimate(columns, split)


__all__ = ["InPlace"]
