"""The schedules of one strategy at one tensor-parallel degree, as points that branch and bound can search."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import numpy.typing as npt

from lengthwise.schedule.controls import CODES, ControlColumns, Controls, Strategy, rra_layout, splits
from lengthwise.schedule.estimation import Estimates, Estimator, Reason, choose_prefill_gpus
from lengthwise.schedule.optimizer import Perf, Place, Variable
from lengthwise.schema.errors import InputError
from lengthwise.schema.schedule import ScheduleRow
from lengthwise.schema.workload import Floats, Ints

MAX_BATCH = 2**14
EVERY_PHASE, PHASE_STEP = 1024, 0.02
"""All phases up to this many decode iterations are searched; longer ones in relative steps of ``PHASE_STEP``."""
MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
REASONS = {
    Reason.WEIGHTS: "its weights do not fit the GPUs",
    Reason.CACHE: "its weights leave no memory for even one request",
    Reason.GROUPS: "no split into prefill and decode GPUs has room for a group",
    Reason.LAYERS: "it has more stages than the model has layers",
}


class SearchSpace:
    """The schedules of a strategy at a tensor-parallel degree. ``perf`` estimates each schedule at most once.

    RRA has the variables (B_E, N_D, groups). A larger batch raises throughput and latency; more decode iterations
    between prefills lower both. The direction of groups is unknown.

    WAA has the variables (B_E, run). A larger batch may move GPUs between prefill and decode, which breaks
    monotonicity. Therefore the batches are divided into runs with the same split, micro-batches and groups. Within a
    run a larger batch raises throughput and latency. The direction of runs is unknown. Points beyond the end of a run
    are infeasible and have the throughput of the run's last batch.

    ``groups`` are the numbers of groups of ``tp`` GPUs to try. If None, they are 1 to as many as fit, or 0 if ``tp`` is
    1 (every GPU is a stage of its own). ``prefill_gpus`` is the number of GPUs that prefill under WAA. If None, the
    strategy chooses it. ``max_num_seqs`` limits prefill and decode batches. If no schedule is feasible, ``variables``
    is empty and ``infeasible_reason`` has the reason. ``evaluated`` of ``size`` schedules have been estimated so far.
    """

    def __init__(
        self,
        estimator: Estimator,
        strategy: Strategy,
        tp: int,
        *,
        worst_case: bool,
        groups: tuple[int, ...] | None = None,
        prefill_gpus: int | None = None,
        max_num_seqs: float = math.inf,
    ) -> None:
        self.strategy, self.tp = strategy, tp
        self._estimator, self._worst_case = estimator, worst_case
        self._prefill_gpus, self._max_num_seqs = prefill_gpus, max_num_seqs
        self._known: dict[Place, tuple[float, float]] = {}
        self.runs = np.zeros((0, 4), dtype=np.int64)
        """[runs, 4] first batch, number of batches, micro-batches and groups of each WAA run."""
        self.infeasible_reason, self.size, self.evaluated = "", 0, 0
        self.variables: tuple[Variable, ...] = ()
        found = self._possible_groups(groups)
        max_batch = int(min(self._largest_batch(found), max_num_seqs)) if found else 0
        if max_batch and strategy is Strategy.RRA:
            longest = estimator.setting.task.max_output_tokens
            self.variables = (
                Variable("prefill_batch", tuple(range(1, max_batch + 1))),
                Variable("decode_steps", _phase_lengths(longest), rising=False),
                Variable("tp_groups", found, rising=None),
            )
            self.size = max_batch * len(self.variables[1].values) * len(found)
        elif max_batch:
            self.runs = self._runs_of_one_split(found, max_batch)
            self.variables = (
                Variable("prefill_batch", tuple(range(int(self.runs[:, 1].max())))),
                Variable("run", tuple(range(len(self.runs))), rising=None),
            )
            self.size = int(self.runs[:, 1].sum())

    def perf(self, points: Ints) -> Perf:
        """Return the performance of points, and store it, so that later calls do not estimate these points again."""
        keys: list[Place] = list(map(tuple, points.tolist()))
        new = [key for key in dict.fromkeys(keys) if key not in self._known]
        if new:
            new_points = np.array(new, dtype=np.int64)
            got = self.perf_uncached(new_points)
            self._known.update(
                zip(new, zip(got.latency_s.tolist(), got.throughput_rps.tolist(), strict=True), strict=True)
            )
            self.evaluated += int(self.within(new_points).sum())
        known = np.array([self._known[key] for key in keys]).reshape(len(keys), 2)
        return Perf(known[:, 0], known[:, 1])

    def perf_uncached(self, points: Ints) -> Perf:
        """Return the performance of points without storing it. Throughput is that without a memory limit."""
        got = self.estimates(points)
        latency_s = got.constrained_latency_s(worst_case=self._worst_case)
        runs = self.within(points) & (got.decode_batch <= self._max_num_seqs)
        return Perf(np.where(runs, latency_s, np.inf), got.unconstrained_rps)

    def within(self, points: Ints) -> npt.NDArray[np.bool_]:
        """Return [n] whether points are schedules. Points beyond the end of a WAA run are not."""
        if self.strategy is Strategy.RRA:
            return np.ones(len(points), dtype=np.bool_)
        return np.asarray(points[:, 0] < self.runs[points[:, 1], 1])

    def estimates(self, points: Ints) -> Estimates:
        """Return all estimates of points."""
        controls = self.columns(points)
        return self._estimator.estimate(controls, self._split(len(controls)))

    def columns(self, points: Ints) -> ControlColumns:
        """Return the control variables of points."""
        if self.strategy is Strategy.RRA:
            return self._columns(*points.T)
        run = self.runs[points[:, 1]]
        return self._columns(run[:, 0] + np.minimum(points[:, 0], run[:, 1] - 1), run[:, 2], run[:, 3])

    def controls(self, point: Place) -> Controls:
        """Return the control variables of one point."""
        return self.columns(np.array([point], dtype=np.int64)).row(0)

    def row(self, point: Place) -> ScheduleRow:
        """Return the schedule of one point, with its estimates."""
        return row_of(self.controls(point), self.estimates(np.array([point], dtype=np.int64)))

    def evaluated_points(self) -> tuple[Ints, Floats, Floats]:
        """Return the feasible points estimated by ``perf`` [n, variables], their latencies [n] and throughputs [n]."""
        points = np.array(list(self._known), dtype=np.int64).reshape(-1, max(len(self.variables), 1))
        known = np.array(list(self._known.values())).reshape(-1, 2)
        feasible = np.isfinite(known[:, 0])
        return points[feasible], known[feasible, 0], known[feasible, 1]

    def best_evaluated(self, bound_s: float) -> Place | None:
        """Return the point with the highest throughput so far that meets a bound, or None if no point does."""
        points, latency_s, rps = self.evaluated_points()
        good = np.flatnonzero(latency_s <= bound_s)
        return tuple(points[good[np.argmax(rps[good])]].tolist()) if len(good) else None

    def neighbors(self, point: Place) -> Ints:
        """Return [n, variables] RRA points with other phase lengths and about the same prefill or decode batch.

        They are worth trying because throughput is least monotone with few decode iterations between prefills. For WAA
        the only such point is ``point``.
        """
        if self.strategy is not Strategy.RRA:
            return np.array([point], dtype=np.int64)
        batch, steps, groups = point
        batches, phases = self.variables[0].values, self.variables[1].values
        others = np.unique(np.clip([*(steps + by for by in range(-3, 4)), steps // 2, 2 * steps], 1, phases[-1]))
        level = np.concatenate([np.rint(batch * others / steps), np.full(len(others), batch)])
        grid = level[:, None] + np.array([-2, -1, 0, 1, 2])
        found = np.column_stack([
            np.clip(grid, batches[0], batches[-1]).ravel(),
            np.repeat(np.tile(others, 2), grid.shape[1]),
            np.full(grid.size, groups),
        ])  # fmt: skip
        return np.unique(found.astype(np.int64), axis=0)

    def second_variable_line(self, point: Place) -> Ints:
        """Return [n, variables] the points that differ from ``point`` only in N_D. For WAA this is only the point."""
        second = self.variables[1]
        values = (point[1],) if second.rising is None else second.values
        points = np.tile(np.array(point, dtype=np.int64), (len(values), 1))
        points[:, 1] = values
        return points

    def _split(self, n: int) -> Ints | None:
        return None if self._prefill_gpus is None else np.full(n, self._prefill_gpus, dtype=np.int64)

    def _columns(self, batch: Ints, second: Ints, groups: Ints) -> ControlColumns:
        rra, ones = self.strategy is Strategy.RRA, np.ones(len(batch), dtype=np.int64)
        return ControlColumns(
            strategy=CODES.index(self.strategy) * ones,
            prefill_batch=batch,
            decode_steps=second if rra else ones,
            micro_batches=0 * ones if rra else second,
            tp=self.tp * ones,
            tp_groups=groups,
        )

    def _possible_groups(self, requested: tuple[int, ...] | None) -> tuple[int, ...]:
        setting = self._estimator.setting
        gpus, layers = setting.cluster.gpus, setting.model.layers
        groups = requested
        if groups is None:
            groups = (0,) if self.tp == 1 else tuple(range(1, gpus // self.tp + 1))
        if self.tp > 1 and 1 not in setting.tables:  # No GPU may be a stage of its own.
            groups = tuple(g for g in groups if g * self.tp == gpus)
            if not groups:
                self.infeasible_reason = "single GPUs next to the groups have no cost tables"
                return ()
        if self.strategy is Strategy.RRA:
            found = tuple(g for g in groups if _has_layers(layers, gpus, self.tp, g))
            reason = REASONS[Reason.LAYERS]
        else:
            found = tuple(g for g in groups if len(splits(gpus, self.tp, g)))
            reason = "it needs 2 GPUs or more" if gpus < 2 else REASONS[Reason.GROUPS]
        self.infeasible_reason = "" if found else reason
        return found

    def _micro_batches(self) -> tuple[int, ...]:
        return tuple(m for m in MICRO_BATCHES if m < max(self._estimator.setting.cluster.gpus, 2))

    def _largest_batch(self, groups: tuple[int, ...]) -> int:
        """Return the largest prefill batch that fits in memory (or up to 1/16 more). If none fits, set the reason."""
        powers = 2 ** np.arange(MAX_BATCH.bit_length())
        fits = np.flatnonzero(self._fits(powers, groups))
        if not len(fits):
            return 0
        low = int(powers[fits[-1]])
        if low == MAX_BATCH:
            return low
        between = np.unique(np.linspace(low, 2 * low, 17).astype(np.int64))
        last = int(np.flatnonzero(self._fits(between, groups))[-1])
        return max(int(between[last + 1]) - 1, low) if last + 1 < len(between) else 2 * low

    def _fits(self, batches: Ints, groups: tuple[int, ...]) -> npt.NDArray[np.bool_]:
        """Return [batches] whether any schedule with that prefill batch and one of ``groups`` fits in memory.

        For RRA it is enough to test the longest phase, which needs the least memory. If no batch fits, the method sets
        ``infeasible_reason``.
        """
        longest = self._estimator.setting.task.max_output_tokens
        second = (longest,) if self.strategy is Strategy.RRA else self._micro_batches()
        grid = np.meshgrid(batches, np.array(second), np.array(groups), indexing="ij")
        controls = self._columns(*(axis.ravel() for axis in grid))
        reasons = self._estimator.reasons(controls, self._split(len(controls))).reshape(len(batches), -1)
        fits = (reasons == Reason.FITS).any(axis=1)
        if not fits.any():
            nearest = Reason.CACHE if (reasons[0] == Reason.CACHE).any() else Reason(int(reasons[0].min()))
            self.infeasible_reason = REASONS[nearest]
        return np.asarray(fits)

    def _runs_of_one_split(self, groups: tuple[int, ...], max_batch: int) -> Ints:
        if self._prefill_gpus is not None:
            return np.array([(1, max_batch, micro, group) for group in groups for micro in self._micro_batches()])
        grid = np.meshgrid(groups, self._micro_batches(), np.arange(1, max_batch + 1), indexing="ij")
        group, micro, batch = (axis.ravel() for axis in grid)
        split = choose_prefill_gpus(self._estimator.setting, self._columns(batch, micro, group), np.arange(len(batch)))
        starts = np.flatnonzero((batch == 1) | (np.diff(split, prepend=0) != 0))
        lengths = np.diff(np.append(starts, len(batch)))
        return np.column_stack([batch[starts], lengths, micro[starts], group[starts]])


_ESTIMATED = {field.name for field in fields(Estimates)} & {field.name for field in fields(ScheduleRow)}


def row_of(controls: Controls, estimates: Estimates, at: int = 0) -> ScheduleRow:
    """Return a schedule with these control variables and the estimates in row ``at``."""
    return ScheduleRow(
        strategy=controls.strategy.value,
        prefill_batch=controls.prefill_batch,
        decode_steps=controls.decode_steps,
        tp=controls.tp,
        tp_groups=controls.tp_groups,
        **{name: getattr(estimates, name)[at].item() for name in _ESTIMATED},
    )


def controls_of(row: ScheduleRow) -> Controls:
    """Return the control variables of a schedule."""
    strategy = Strategy(row.strategy)
    micro_batches = None if strategy is Strategy.RRA else row.micro_batches
    return Controls(strategy, row.prefill_batch, row.decode_steps, micro_batches, row.tp, row.tp_groups)


def _phase_lengths(longest: int) -> tuple[int, ...]:
    """Return all numbers of decode iterations up to EVERY_PHASE, then some in steps of PHASE_STEP up to ``longest``."""
    count = math.ceil(math.log(max(longest / EVERY_PHASE, 1)) / math.log1p(PHASE_STEP))
    longer = np.geomspace(min(EVERY_PHASE, longest), longest, count + 1).round().astype(int).tolist()
    return tuple(sorted({*range(1, min(EVERY_PHASE, longest) + 1), *longer}))


def _has_layers(layers: int, gpus: int, tp: int, groups: int) -> bool:
    try:
        rra_layout(layers, gpus, tp, groups)
    except InputError:
        return False
    return True
