"""All schedules of one strategy at one tensor-parallel degree, as a box that can be searched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.schedule.controls import CODES, ControlColumns, Controls, Strategy, rra_layout, splits
from lengthwise.schedule.estimation import Estimates, Estimator, Reason, encode_gpus
from lengthwise.schedule.optimizer import Perf, Place, Variable
from lengthwise.schema.errors import InputError
from lengthwise.schema.schedule import ScheduleRow

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

LARGEST_BATCH = 2**14
"""Encode batches are not looked for beyond."""

WHY_NOT = {
    Reason.WEIGHTS: "its weights do not fit the GPUs",
    Reason.CACHE: "beside the weights there is no memory for even one request",
    Reason.GROUPS: "no split into encoding and decoding GPUs holds a group",
    Reason.LAYERS: "it has more stages than the model has layers",
}
_BESIDE = (-3, -2, -1, 0, 1, 2, 3)
MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


class Side:
    """The schedules of a strategy at a degree, each estimated once, and what is known of them so far.

    RRA is searched over (B_E, N_D, groups). More requests in a batch raise throughput and latency, more decode
    iterations between encodings lower both; of groups nothing is assumed.

    WAA is searched over (B_E, run). A larger batch may move GPUs from one side to the other, which breaks what is
    monotone; so batches go by runs of one split, micro-batches and groups, and of a run nothing is assumed but that
    within it a larger batch raises both. A place beyond a run's end cannot run, and would have what its end has.

    Args:
        estimator: Of the task on its cluster.
        strategy: Whose schedules.
        tp: Degree of the groups, of which there is at least one; 1: every GPU is a stage of its own.
        worst_case: Whether latencies are ``latency_high_s``.
    """

    def __init__(self, estimator: Estimator, strategy: Strategy, tp: int, *, worst_case: bool) -> None:
        self.strategy, self.tp = strategy, tp
        self._estimator, self._worst_case = estimator, worst_case
        self._known: dict[Place, tuple[float, float]] = {}
        self.why_not, self.size, self._evaluated = "", 0, 0
        self.variables: tuple[Variable, ...] = ()
        groups = self._groups()
        most = self._largest_batch(groups) if groups else 0
        if most and strategy is Strategy.RRA:
            self._vary_phases(groups, most)
        elif most:
            self._vary_runs(groups, most)

    @property
    def evaluated(self) -> int:
        """How many of them were estimated so far; places beyond a run's end are none of them."""
        return self._evaluated

    def perf(self, points: Ints) -> Perf:
        """What points yield; each is estimated once."""
        keys: list[Place] = list(map(tuple, points.tolist()))
        new = [key for key in dict.fromkeys(keys) if key not in self._known]
        if new:
            got = self.perf_anew(np.array(new, dtype=np.int64))
            rows = zip(new, got.latency_s.tolist(), got.throughput_rps.tolist(), strict=True)
            self._known.update((key, (latency, rps)) for key, latency, rps in rows)
            self._evaluated += int(self.within(np.array(new, dtype=np.int64)).sum())
        known = np.array([self._known[key] for key in keys]).reshape(len(keys), 2)
        return Perf(known[:, 0], known[:, 1])

    def perf_anew(self, points: Ints) -> Perf:
        """The same, nothing kept; of what memory does not hold the throughput it would have."""
        got = self.estimates(points)
        return Perf(np.where(self.within(points), self.constrained_latency_s(got), np.inf), got.would_rps)

    def within(self, points: Ints) -> npt.NDArray[np.bool_]:
        """Whether points are schedules, not places beyond a run's end."""
        if self.strategy is Strategy.RRA:
            return np.ones(len(points), dtype=np.bool_)
        return np.asarray(points[:, 0] < self._runs[points[:, 1], 1])

    def estimates(self, points: Ints) -> Estimates:
        """All that is estimated of points."""
        return self._estimator.estimate(self.columns(points))

    def constrained_latency_s(self, estimates: Estimates) -> Floats:
        """The latency that a bound is held against."""
        return estimates.latency_high_s if self._worst_case else estimates.latency_s

    def columns(self, points: Ints) -> ControlColumns:
        """Points as control variables."""
        if self.strategy is Strategy.RRA:
            return self._columns(*points.T)
        run = self._runs[points[:, 1]]
        return self._columns(run[:, 0] + np.minimum(points[:, 0], run[:, 1] - 1), run[:, 2], run[:, 3])

    def controls(self, point: Place) -> Controls:
        """One of them."""
        return self.columns(np.array([point], dtype=np.int64)).row(0)

    def row(self, point: Place) -> ScheduleRow:
        """What one of them yields."""
        return row_of(self.controls(point), self.estimates(np.array([point], dtype=np.int64)))

    def seen(self) -> tuple[Ints, Floats, Floats]:
        """([n, variables] points, [n] latencies, [n] throughputs) of those estimated so far that can run."""
        points = np.array(list(self._known), dtype=np.int64).reshape(-1, max(len(self.variables), 1))
        known = np.array(list(self._known.values())).reshape(-1, 2)
        runs = np.isfinite(known[:, 0])
        return points[runs], known[runs, 0], known[runs, 1]

    def best_seen(self, bound_s: float) -> Place | None:
        """The one of highest throughput that was seen to meet a bound."""
        points, latency_s, rps = self.seen()
        good = np.flatnonzero(latency_s <= bound_s)
        if not len(good):
            return None
        best: Place = tuple(points[good[np.argmax(rps[good])]].tolist())
        return best

    def neighbors(self, point: Place) -> Ints:
        """[n, variables] RRA's neighbours of a point: as large a decode batch at other phases, and a little beside.

        Few decode iterations between encodings are where throughput is least monotone: waiting micro-batches.
        """
        if self.strategy is not Strategy.RRA:
            return np.array([point], dtype=np.int64)
        batch, steps, groups = point
        batches, phases = self.variables[0].values, self.variables[1].values
        others = np.unique(np.clip([steps + by for by in _BESIDE] + [steps // 2, 2 * steps], 1, phases[-1]))
        level = np.concatenate([np.rint(batch * others / steps), np.full(len(others), batch)])
        grid = level[:, None] + np.array([-2, -1, 0, 1, 2])
        made = np.column_stack([
            np.clip(grid, batches[0], batches[-1]).ravel(),
            np.repeat(np.tile(others, 2), grid.shape[1]),
            np.full(grid.size, groups),
        ])  # fmt: skip
        return np.unique(made.astype(np.int64), axis=0)

    def additional(self, point: Place) -> Ints:
        """[n, variables] the points that differ from one in their second variable at most, if it has a direction."""
        second = self.variables[1]
        values = (point[1],) if second.rising is None else second.values
        points = np.tile(np.array(point, dtype=np.int64), (len(values), 1))
        points[:, 1] = values
        return points

    def _vary_phases(self, groups: tuple[int, ...], most: int) -> None:
        longest = self._estimator.setting.task.max_output_tokens
        self.variables = (
            Variable("encode_batch", tuple(range(1, most + 1))),
            Variable("decode_steps", tuple(range(1, longest + 1)), rising=False),
            Variable("tp_groups", groups, rising=None),
        )
        self.size = most * longest * len(groups)

    def _vary_runs(self, groups: tuple[int, ...], most: int) -> None:
        self._runs = self._all_runs(groups, most)
        self.size = int(self._runs[:, 1].sum())
        self.variables = (
            Variable("encode_batch", tuple(range(int(self._runs[:, 1].max())))),
            Variable("run", tuple(range(len(self._runs))), rising=None),
        )

    def _all_runs(self, groups: tuple[int, ...], most: int) -> Ints:
        return runs_of(self._estimator, self._columns, groups, self._micro_batches(), most)

    def _columns(self, batch: Ints, second: Ints, groups: Ints) -> ControlColumns:
        rra, ones = self.strategy is Strategy.RRA, np.ones(len(batch), dtype=np.int64)
        return ControlColumns(
            strategy=CODES.index(self.strategy) * ones,
            encode_batch=batch,
            decode_steps=second if rra else ones,
            micro_batches=0 * ones if rra else second,
            tp=self.tp * ones,
            tp_groups=groups,
        )

    def _groups(self) -> tuple[int, ...]:
        """How many groups there may be; layouts without a layer for every stage are left out."""
        gpus, layers = self._estimator.setting.cluster.gpus, self._estimator.setting.model.layers
        wanted = (0,) if self.tp == 1 else tuple(range(1, gpus // self.tp + 1))
        if self.tp > 1 and 1 not in self._estimator.setting.tables:  # nobody may be alone
            wanted = tuple(g for g in wanted if g * self.tp == gpus)
            self.why_not = "" if wanted else "single GPUs beside the groups have no cost tables"
            if not wanted:
                return ()
        if self.strategy is Strategy.RRA:
            found = tuple(g for g in wanted if _has_layers(layers, gpus, self.tp, g))
            self.why_not = "" if found else WHY_NOT[Reason.LAYERS]
            return found
        found = tuple(g for g in wanted if len(splits(gpus, self.tp, g)))
        self.why_not = "" if found else "it needs 2 GPUs or more" if gpus < 2 else WHY_NOT[Reason.GROUPS]
        return found

    def _micro_batches(self) -> tuple[int, ...]:
        return tuple(m for m in MICRO_BATCHES if m < max(self._estimator.setting.cluster.gpus, 2))

    def _largest_batch(self, groups: tuple[int, ...]) -> int:
        """The largest encode batch that memory holds in some way, to 1/16; 0: none, and it says why."""
        powers = 2 ** np.arange(LARGEST_BATCH.bit_length())
        fits = np.flatnonzero(self._fits(powers, groups))
        if not len(fits):
            return 0
        low = int(powers[fits[-1]])
        if low == LARGEST_BATCH:
            return low
        between = np.unique(np.linspace(low, 2 * low, 17).astype(np.int64))
        last = int(np.flatnonzero(self._fits(between, groups))[-1])
        return max(int(between[last + 1]) - 1, low) if last + 1 < len(between) else 2 * low

    def _fits(self, batches: Ints, groups: tuple[int, ...]) -> npt.NDArray[np.bool_]:
        """[batches] whether memory holds them in some way: RRA with the least that is cached."""
        longest = self._estimator.setting.task.max_output_tokens
        second = (longest,) if self.strategy is Strategy.RRA else self._micro_batches()
        grid = np.meshgrid(batches, np.array(second), np.array(groups), indexing="ij")
        reasons = self._reasons(self._columns(*(axis.ravel() for axis in grid))).reshape(len(batches), -1)
        fits = (reasons == Reason.FITS).any(axis=1)
        if not fits.any():
            nearest = Reason.CACHE if (reasons[0] == Reason.CACHE).any() else Reason(int(reasons[0].min()))
            self.why_not = WHY_NOT[nearest]
        return np.asarray(fits)

    def _reasons(self, columns: ControlColumns) -> Ints:
        return self._estimator.reasons(columns)


def row_of(controls: Controls, estimates: Estimates, at: int = 0) -> ScheduleRow:
    """One row of estimates with its control variables."""
    numbers: Any = {name: float(getattr(estimates, name)[at]) for name in _NUMBERS}
    return ScheduleRow(
        strategy=controls.strategy.value,
        encode_batch=controls.encode_batch,
        decode_steps=controls.decode_steps,
        micro_batches=int(estimates.micro_batches[at]),
        tp=controls.tp,
        tp_groups=controls.tp_groups,
        encode_gpus=int(estimates.encode_gpus[at]),
        **numbers,
    )


_NUMBERS = (
    "throughput_rps", "latency_s", "latency_high_s", "cycle_s", "encode_s", "decode_s", "decode_batch", "memory_share",
)  # fmt: skip


def runs_of(
    estimator: Estimator,
    columns: Callable[[Ints, Ints, Ints], ControlColumns],
    groups: tuple[int, ...],
    micro_batches: tuple[int, ...],
    most: int,
) -> Ints:
    """[runs, 4] first batch, batches, micro-batches and groups of every run of batches that WAA splits alike."""
    grid = np.meshgrid(np.array(groups), np.array(micro_batches), np.arange(1, most + 1), indexing="ij")
    group, micro, batch = (axis.ravel() for axis in grid)
    split = encode_gpus(estimator.setting, columns(batch, micro, group), np.arange(len(batch)))
    starts = np.flatnonzero((batch == 1) | (np.diff(split, prepend=0) != 0))
    lengths = np.diff(np.append(starts, len(batch)))
    return np.column_stack([batch[starts], lengths, micro[starts], group[starts]])


def _has_layers(layers: int, gpus: int, tp: int, groups: int) -> bool:
    try:
        rra_layout(layers, gpus, tp, groups)
    except InputError:
        return False
    return True
