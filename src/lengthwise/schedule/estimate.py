"""What schedules would yield: throughput and latency by the steady state of their timelines (ExeGPT, section 6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.schedule._prepared import Setting, deviations, grouped
from lengthwise.schedule.controls import (
    CODES,
    Assumptions,
    Cluster,
    ControlColumns,
    Controls,
    Strategy,
    columns,
)
from lengthwise.schedule.estimates import Estimates, Filling, Reason
from lengthwise.schedule.layout import Layout, rra_layout
from lengthwise.schedule.lengths import TaskLengths
from lengthwise.schedule.memory import stage_bytes
from lengthwise.schedule.rra import finish, require_steps
from lengthwise.schedule.stage_seconds import DegreesTables
from lengthwise.schedule.timeline import workspace
from lengthwise.schedule.waa import batch_parts, encode_gpus, layout_of, waa_bytes, waa_seconds
from lengthwise.schema.errors import InputError
from lengthwise.schema.model import ModelSpec

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

OWN_ERROR = 0.01
"""By what share of it a latency of several micro-batches may be more than is expected: so near the engine it is."""


class Estimator:
    """Estimates of many schedules of one task; what they share is worked out once.

    Args:
        task: Lengths.
        cluster: GPUs.
        model: What is served.
        tables: Cost tables by tensor-parallel degree: of 1 and of every ``tp`` asked for, as far as stages have it.
        assumptions: What to take for granted.

    Raises:
        InputError: The task's longest request is beyond the model's.
    """

    def __init__(
        self,
        task: TaskLengths,
        cluster: Cluster,
        model: ModelSpec,
        tables: DegreesTables,
        assumptions: Assumptions = Assumptions(),
    ) -> None:
        self.setting = Setting(task, cluster, model, tables, assumptions)

    def estimate(
        self, controls: ControlColumns | Sequence[Controls], encoding: Ints | None = None
    ) -> Estimates:
        """A row for each schedule.

        Args:
            controls: Schedules.
            encoding: [n] GPUs that encode under WAA, as deployed; None: as the strategy splits them for this task.

        Raises:
            InputError: N_D above the longest output, WAA with one GPU, groups that need more GPUs than there
                are, or a degree without tables.
        """
        given = controls if isinstance(controls, ControlColumns) else columns(controls)
        return self._filled(given, encoding, timed=True).estimates()

    def reasons(self, controls: ControlColumns) -> Ints:
        """[n] ``Reason`` of each schedule, for less than its seconds cost; raises as ``estimate`` does."""
        return self._filled(controls, None, timed=False).reason

    def _filled(self, given: ControlColumns, encoding: Ints | None, *, timed: bool) -> Filling:
        """All columns; without RRA's seconds, on which no memory depends, unless ``timed``."""
        self._require(given)
        rows = Filling(len(given))
        rra = given.strategy == CODES.index(Strategy.RRA)
        for tp, groups, here in _alike(given.tp, given.tp_groups, np.flatnonzero(rra)):
            self._rra(given, rows, here, tp, groups, timed=timed)
        others = np.flatnonzero(~rra)
        if len(others):
            chosen = encode_gpus(self.setting, given, others) if encoding is None else encoding[others]
            rows.encode_gpus[others] = chosen
            for tp, groups, here in _alike(given.tp, given.tp_groups, others):
                for split, part in _by(rows.encode_gpus, here):
                    self._waa(given, rows, part, tp, groups, split)
        return rows

    def _require(self, given: ControlColumns) -> None:
        gpus = self.setting.cluster.gpus
        for steps in (given.decode_steps.min(initial=1), given.decode_steps.max(initial=1)):
            require_steps(self.setting.task, int(steps))
        if gpus < 2 and (given.strategy != CODES.index(Strategy.RRA)).any():
            raise InputError(
                "WAA needs at least 2 GPUs, one to encode and one to decode; there is 1. Use RRA."
            )
        over = given.tp * given.tp_groups > gpus
        if over.any():
            row = int(np.argmax(over))
            raise InputError(
                f"tp_groups groups of tp GPUs must fit the {gpus} GPUs; "
                f"{given.tp_groups[row]} groups of {given.tp[row]} do not"
            )

    def _rra(
        self, given: ControlColumns, rows: Filling, here: Ints, tp: int, groups: int, *, timed: bool
    ) -> None:
        setting = self.setting
        rows.encode_gpus[here] = setting.cluster.gpus
        try:
            layout = rra_layout(setting.model.layers, setting.cluster.gpus, tp, groups)
        except InputError:
            rows.reason[here] = Reason.LAYERS
            return
        new, steps = given.encode_batch[here].astype(np.float64), given.decode_steps[here]
        offset, table = self._phases(steps)
        parts = np.where(given.micro_batches[here] > 0, given.micro_batches[here], len(layout.stages))
        new = new * setting.resized.times(new / np.minimum(parts, new))
        batch = new * table[offset, 0]
        there = np.maximum(np.floor(batch).astype(np.int64), given.encode_batch[here])
        parts = np.minimum(parts, there)  # B_E are encoded in as many parts however few of them decode
        rows.encoded[here], rows.micro_batches[here], rows.decode_batch[here] = new, parts, batch
        if timed:
            out = _rra_seconds(setting, layout, new, steps, parts, offset, table)
            out[:, 2] += out[:, 1] * np.where(parts > 1, OWN_ERROR, 0.0)
            rows.seconds[here] = out
        rows.hold(here, *_rra_bytes(setting, layout, new, parts, steps, offset, table), setting.usable_bytes)

    def _phases(self, steps: Ints) -> tuple[Ints, Floats]:
        """([n] where a schedule's iterations begin, their shares one under another)."""
        distinct, inverse = np.unique(steps, return_inverse=True)
        shares = [self.setting.phase(int(n)).columns() for n in distinct]
        begin = np.concatenate([[0], np.cumsum(distinct)[:-1]])
        return begin[inverse], np.ascontiguousarray(np.concatenate(shares))

    def _waa(
        self, given: ControlColumns, rows: Filling, here: Ints, tp: int, groups: int, split: int
    ) -> None:
        setting = self.setting
        try:
            layout = layout_of(setting, split, tp, groups)
        except InputError:
            rows.reason[here] = Reason.LAYERS if split else Reason.GROUPS
            return
        new = given.encode_batch[here].astype(np.float64)
        new = new * setting.resized.times(new)
        parts = batch_parts(setting, new, given.micro_batches[here])
        out = waa_seconds(setting, layout, tp, new, parts)
        rows.seconds[here], rows.micro_batches[here] = out[:, :7], parts
        rows.encoded[here], rows.decode_batch[here] = new, out[:, 7]
        rows.hold(here, *waa_bytes(setting, layout, new, parts, out[:, 7]), setting.usable_bytes)


def estimate(
    controls: ControlColumns | Sequence[Controls],
    task: TaskLengths,
    cluster: Cluster,
    model: ModelSpec,
    tables: DegreesTables,
    assumptions: Assumptions = Assumptions(),
) -> Estimates:
    """``Estimator.estimate`` for one call."""
    return Estimator(task, cluster, model, tables, assumptions).estimate(controls)


def _rra_seconds(
    setting: Setting,
    layout: Layout,
    new: Floats,
    steps: Ints,
    parts: Ints,
    offset: Ints,
    table: Floats,
) -> Floats:
    out = np.zeros((len(new), 7))
    groups, count = grouped(layout.stages)
    degrees = {stage.tp for stage in layout.stages}
    a, b = setting.packed(max(degrees)), setting.packed(min(degrees))
    ends = np.array([finish(int(n), setting.iterations) for n in steps], dtype=np.int64).reshape(len(new), 2)
    phases, at = np.ascontiguousarray(ends[:, 0]), np.ascontiguousarray(ends[:, 1])
    most = int(parts.max(initial=1))
    most_range = setting.resized.ranges_of(new / np.minimum(parts, new))
    scratch = workspace(most, len(count))
    visit_s = np.zeros((len(count), int(steps.max(initial=1)) + 1))
    _kernel()(
        a, b, groups, count, new, steps, parts, at, phases, offset, table, setting.z, most_range,
        deviations(most), visit_s, np.ones(most), *scratch, out,
    )  # fmt: skip
    return out


def _rra_bytes(
    setting: Setting, layout: Layout, new: Floats, parts: Ints, steps: Ints, offset: Ints, table: Floats
) -> tuple[Floats, float]:
    """As ``waa.waa_bytes``: the most that is cached in a phase, the larger of an encode and a decode visit."""
    most = {int(n): int(np.argmax(setting.phase(int(n)).kv_tokens)) for n in np.unique(steps)}
    share = table[offset + np.array([most[int(n)] for n in steps], dtype=np.int64)]
    kv_high = new * share[:, 1] + setting.z * np.sqrt(new * share[:, 3])
    kv_high = np.maximum(kv_high, setting.prompt_tokens_high(new))
    encoding = new / np.minimum(parts, new)
    tokens = np.maximum(setting.prompt_tokens_high(encoding), new * table[offset, 0] / parts)
    seqs = np.maximum(encoding, new * table[offset, 0] / parts)
    return stage_bytes(setting.sizes(layout.stages), layout.stages, kv_high, None, tokens, seqs)


def _alike(tp: Ints, groups: Ints, rows: Ints) -> list[tuple[int, int, Ints]]:
    """Rows of one layout together; without groups the degree does not matter."""
    degree = np.where(groups[rows] > 0, tp[rows], 1)
    pairs = np.column_stack([degree, groups[rows]])
    found = np.unique(pairs, axis=0).tolist()
    return [(t, g, rows[(pairs == (t, g)).all(axis=1)]) for t, g in found]


def _by(values: Ints, rows: Ints) -> list[tuple[int, Ints]]:
    return [(int(value), rows[values[rows] == value]) for value in np.unique(values[rows])]


def _kernel() -> Any:
    from lengthwise.schedule._compiled import compiled

    return compiled("rra_rows")


__all__ = ["Estimator", "estimate"]
