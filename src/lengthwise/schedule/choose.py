"""The schedule of the highest throughput under a latency bound (ExeGPT, sections 5 and 7).

Each strategy is searched at each tensor-parallel degree, and the best of all is taken. What one search found
bounds the next: a strategy or a degree that cannot beat it is given up after a few points. Where the bests of RRA
have better neighbours, these are taken (``searched.improved``): with few decode iterations between encodings
throughput is not quite monotone.

The bound is for an output of ``Assumptions.level``, 99 % of them unless said otherwise. It is held against the
latency when batches' work is at the far end of its 99 % range, as the paper does ("We do consider this variance
when determining control variables", section 7.9); ``worst_case=False`` holds it against the expected latency.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lengthwise.schedule.branch_and_bound import Tolerances, branch_and_bound
from lengthwise.schedule.controls import Assumptions, Cluster, Controls, Strategy
from lengthwise.schedule.estimate import Estimator
from lengthwise.schedule.exhaustive import exhaustive as look_at_all
from lengthwise.schedule.found import Found
from lengthwise.schedule.lengths import TaskLengths
from lengthwise.schedule.searched import TIE, Searched, improved, nothing, told
from lengthwise.schedule.sides import Side
from lengthwise.schedule.stage_seconds import DegreesTables, cluster_tables
from lengthwise.schedule.variables import Ints, Perf
from lengthwise.schema.errors import InputError
from lengthwise.schema.model import ModelSpec
from lengthwise.schema.schedule import ScheduleSide
from lengthwise.schema.schedule_row import ScheduleRow

ALL = tuple(Strategy)


@dataclass(frozen=True)
class Choice:
    """The schedule that was chosen, and how sure that is.

    Attributes:
        bound_s: The latency that it holds.
        controls: Its control variables.
        row: What it yields.
        sides: Every strategy and degree, with what it came to.
        evaluated: Schedules estimated.
        points: Schedules there are.
        gap: The best of all has at most (1 + gap) times its throughput, if the tolerances hold. Those of RRA's short
            phases do not: with RRA among the strategies it is about so, not proved, unless all were looked at.
        seconds: The choice took.
    """

    bound_s: float
    controls: Controls
    row: ScheduleRow
    sides: tuple[ScheduleSide, ...]
    evaluated: int
    points: int
    gap: float
    seconds: float


class Planner:
    """All schedules of a task on a cluster; what is estimated for one bound is known for the next.

    Args:
        estimator: Of the task on the cluster.
        degrees: Tensor-parallel degrees that may be taken.
        strategies: Which may be taken.
        worst_case: Whether a bound is held against ``latency_high_s``, else against ``latency_s``.
        tolerances: How far from monotone estimates may be.
        clock: Seconds.

    Raises:
        InputError: There is no strategy, or WAA alone on one GPU.
    """

    def __init__(
        self,
        estimator: Estimator,
        degrees: Sequence[int],
        strategies: Sequence[Strategy] = ALL,
        *,
        worst_case: bool = True,
        tolerances: Tolerances | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not strategies or not degrees:
            raise InputError("a choice needs a strategy and a tensor-parallel degree; one of them is missing")
        gpus = estimator.setting.cluster.gpus
        if gpus < 2 and Strategy.RRA not in strategies:
            raise InputError(
                "WAA needs at least 2 GPUs, one to encode and one to decode; there is 1. Use RRA."
            )
        self.estimator, self.worst_case = estimator, worst_case
        self.strategies = tuple(strategies)
        self._degrees = tuple(degrees)
        self._tolerances, self._clock = tolerances or Tolerances(), clock
        wanted = [tp for tp in sorted(set(degrees), reverse=True) if tp <= gpus]
        self.sides = [
            Side(estimator, strategy, tp, worst_case=worst_case)
            for strategy in dict.fromkeys(strategies)
            for tp in wanted
        ]

    def best(self, bound_s: float = math.inf, *, apart: bool = False, exhaustive: bool = False) -> Choice:
        """The best schedule that meets a bound, as sure as ``Choice.gap`` says.

        Args:
            bound_s: Latency; infinite: any.
            apart: Find the best of every side, so that runner-ups are as sure as the choice; costs more.
            exhaustive: Look at every schedule.

        Raises:
            InputError: The bound is not above 0.
            ScheduleError: Nothing meets it, or nothing fits.
        """
        started_s = self._clock()
        searched = self.search(bound_s, self.sides, apart=apart, exhaustive=exhaustive)
        if not exhaustive:
            searched = improved(searched, bound_s)
        some = [one for one in searched if one.found.best]
        if not some:
            raise nothing(self.estimator, self.sides, searched, bound_s, worst_case=self.worst_case)
        most_rps = max(one.best.throughput_rps for one in some)
        ties = [one for one in some if one.best.throughput_rps >= most_rps * (1 - TIE)]
        won = min(ties, key=lambda one: one.best.latency_s)
        won.side.perf(np.array([won.best.point], dtype=np.int64))  # of a look at all nothing is kept
        row = won.side.row(won.best.point)
        return Choice(
            bound_s=bound_s,
            controls=won.side.controls(won.best.point),
            row=row,
            sides=tuple(told(side, searched, won, row, bound_s) for side in self.sides),
            evaluated=sum(one.found.evaluated for one in searched),
            points=sum(side.size for side in self.sides),
            gap=max(0.0, max(one.at_most_rps for one in searched) / row.throughput_rps - 1),
            seconds=self._clock() - started_s,
        )

    def anew(self, estimator: Estimator) -> Planner:
        """The same question of another estimator, such as one of other lengths."""
        return Planner(
            estimator,
            self._degrees,
            self.strategies,
            worst_case=self.worst_case,
            tolerances=self._tolerances,
            clock=self._clock,
        )

    def search(
        self,
        bound_s: float,
        sides: Sequence[Side],
        *,
        apart: bool = False,
        exhaustive: bool = False,
        known_rps: float = 0.0,
    ) -> list[Searched]:
        """What searches come to, of the sides that have points; unless ``apart``, each knows what others found.

        A throughput that is ``known_rps`` from elsewhere is not looked for again.
        """
        searched: list[Searched] = []
        for side in (side for side in sides if side.variables):
            known_rps = 0.0 if apart else known_rps
            found = self._searched(side, bound_s, known_rps, exhaustive=exhaustive)
            known_rps = max(known_rps, found.best.throughput_rps if found.best else 0.0)
            most_rps = known_rps * (1 + found.gap) if known_rps else (0.0 if found.gap == 0 else math.inf)
            searched.append(Searched(side, found, most_rps))
        return searched

    def _searched(self, side: Side, bound_s: float, known_rps: float, *, exhaustive: bool) -> Found:
        """What a search comes to; of the box's places it counts those that are schedules."""
        if exhaustive:
            found = look_at_all(side.perf_anew, side.variables, bound_s)
            return replace(found, evaluated=side.size, of=side.size)
        seen = 0

        def perf(points: Ints) -> Perf:
            nonlocal seen
            seen += int(side.within(points).sum())
            return side.perf(points)

        found = branch_and_bound(
            perf, side.variables, bound_s, self._tolerances, known_rps=known_rps * (1 - TIE)
        )
        return replace(found, evaluated=seen, of=side.size)


def best_schedule(
    task: TaskLengths,
    cluster: Cluster,
    model: ModelSpec,
    bound_s: float = math.inf,
    *,
    tables: DegreesTables | None = None,
    assumptions: Assumptions = Assumptions(),
    strategies: Sequence[Strategy] = ALL,
    worst_case: bool = True,
    tolerances: Tolerances | None = None,
    exhaustive: bool = False,
) -> Choice:
    """The schedule of the highest throughput that meets a latency bound, as sure as ``Choice.gap`` says.

    Args:
        task: Lengths.
        cluster: GPUs.
        model: What is served.
        bound_s: Latency of an output of ``assumptions.level`` that must be held; infinite: any.
        tables: Cost tables by tensor-parallel degree, which say what degrees there are; None: roofline.
        assumptions: What to take for granted; ``level`` is the quantile of the output that the bound is for.
        strategies: Which may be taken; one that cannot be is passed over.
        worst_case: Whether the bound is held against ``latency_high_s``, else against ``latency_s``.
        tolerances: How far from monotone estimates may be.
        exhaustive: Look at every schedule.

    Raises:
        InputError: The bound is not above 0, the task is beyond the model, or WAA alone is asked for on one GPU.
        ScheduleError: Nothing meets the bound, or nothing fits.
    """
    known = tables or cluster_tables(model, cluster, tensor_degrees(model, cluster))
    estimator = Estimator(task, cluster, model, known, assumptions)
    planner = Planner(estimator, tuple(known), strategies, worst_case=worst_case, tolerances=tolerances)
    return planner.best(bound_s, exhaustive=exhaustive)


def tensor_degrees(model: ModelSpec, cluster: Cluster) -> tuple[int, ...]:
    """Powers of two that divide the heads, within a node and the cluster."""
    most = min(cluster.gpus, cluster.node.gpus)
    powers = (2**i for i in range(most.bit_length()))
    return tuple(tp for tp in powers if tp <= most and model.attention.heads % tp == 0)


__all__ = ["ALL", "Choice", "Planner", "best_schedule", "tensor_degrees"]
