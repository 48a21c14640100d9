"""What schedules would yield: throughput and latency by the steady state of their timelines (ExeGPT, section 6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.schedule.controls import (
    CODES,
    Assumptions,
    Cluster,
    ControlColumns,
    Controls,
    Layout,
    Stage,
    Strategy,
    columns,
    compute_split,
    memory_split,
    rra_layout,
    splits,
    waa_layout,
)
from lengthwise.schedule.lengths import TaskLengths, finish, require_steps
from lengthwise.schedule.stage_costs import (
    DegreesTables,
    Setting,
    deviations,
    grouped,
    handed_bytes_per_token,
    handover_s,
    projected_share,
    stage_bytes,
    visits_s,
)
from lengthwise.schedule.timeline import workspace
from lengthwise.schema.errors import InputError
from lengthwise.schema.specs import ModelSpec

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Reason(IntEnum):
    """Why a schedule cannot be; FITS: it can."""

    FITS = 0
    WEIGHTS = 1
    """The weights alone are more than a GPU holds."""
    CACHE = 2
    """Cache and activations do not fit beside the weights, at the level of the assumptions."""
    GROUPS = 3
    """No split into encoding and decoding GPUs holds the tensor-parallel groups."""
    LAYERS = 4
    """There are more stages than layers."""


@dataclass(frozen=True, eq=False)
class Estimates:
    """A row a schedule. What cannot be has no throughput and infinite latency.

    Attributes:
        throughput_rps: Requests that complete a second.
        would_rps: The same where memory held it; 0 where no layout is possible.
        latency_s: From when its micro-batch begins to be encoded to the last token of a request whose output is
            the level's quantile. Waiting to be encoded is not in it; it is at most one ``cycle_s``.
        latency_high_s: The same at the level's range of the work of encodings and decode batches.
        cycle_s: RRA: a round of encoding and N_D decode iterations; WAA: from one encoding to the next.
        encode_s: One batch's way through the encoding stages (RRA: of all its micro-batches).
        decode_s: A decode iteration, mean over a phase.
        decode_batch: B_D, sequences when a phase begins; WAA: in an iteration.
        encode_range: Relative range of a batch's encoding at the level.
        decode_range: Relative range of a decode iteration.
        memory_share: What the fullest GPU needs over what it has, at the level.
        micro_batches: As used.
        encode_gpus: GPUs that encode; RRA: all.
        reason: ``Reason`` of each.
    """

    throughput_rps: Floats
    would_rps: Floats
    latency_s: Floats
    latency_high_s: Floats
    cycle_s: Floats
    encode_s: Floats
    decode_s: Floats
    decode_batch: Floats
    encode_range: Floats
    decode_range: Floats
    memory_share: Floats
    micro_batches: Ints
    encode_gpus: Ints
    reason: Ints

    @property
    def feasible(self) -> npt.NDArray[np.bool_]:
        """[n] whether a schedule can be."""
        return np.asarray(self.reason == Reason.FITS)


class Filling:
    """The columns of ``Estimates`` while they are filled."""

    def __init__(self, n: int) -> None:
        self.seconds = np.full((n, 7), np.nan)
        self.encoded, self.decode_batch, self.memory_share = np.zeros(n), np.zeros(n), np.full(n, np.nan)
        self.micro_batches, self.encode_gpus, self.reason = (np.zeros(n, dtype=np.int64) for _ in range(3))

    def reserve(self, current: Ints, needed_bytes: Floats, weight_bytes: float, available_bytes: float) -> None:
        """Says whether memory holds it."""
        self.memory_share[current] = needed_bytes / available_bytes
        reason = Reason.WEIGHTS if weight_bytes > available_bytes else Reason.CACHE
        self.reason[current] = np.where(needed_bytes > available_bytes, reason, Reason.FITS)

    def estimates(self) -> Estimates:
        """The finished columns."""
        fits = self.reason == Reason.FITS
        cycle_s, latency_s, high_s, encode_s, decode_s, encode_range, decode_range = self.seconds.T
        with np.errstate(divide="ignore", invalid="ignore"):
            would = np.where(cycle_s > 0, self.encoded / cycle_s, 0.0)
        return Estimates(
            np.where(fits, would, 0.0), would, np.where(fits, latency_s, np.inf), np.where(fits, high_s, np.inf),
            cycle_s, encode_s, decode_s, self.decode_batch, encode_range, decode_range, self.memory_share,
            self.micro_batches, self.encode_gpus, self.reason,
        )  # fmt: skip


ENCODER_OUTPUTS = 2
"""Batches whose encoder output an encoding GPU holds: one that waits for it, one on its way out."""
_NARROW = 1e-9
"""Prompts that vary by less of their mean are all alike."""


def batches_held(model: ModelSpec, stages: int) -> int:
    """Batches whose cache each GPU of an encoding pipeline holds: those under way, and one that leaves.

    Under way are two a stage, one computed and one that waits; before a single stage none need wait. A GPU has room for
    a prompt from when it is let in until it has been handed over, as engines have: its blocks are those of all stages.
    An encoder-decoder keeps no cache while it encodes, only outputs.
    """
    if model.encoder_layers:
        return ENCODER_OUTPUTS
    return 1 + (2 * stages if stages > 1 else 1)


def layout_of(setting: Setting, encode_gpus: int, tp: int, tp_groups: int) -> Layout:
    """The layout of one split."""
    return waa_layout(setting.model.layers, setting.cluster.gpus, encode_gpus, tp, tp_groups)


def batch_parts(setting: Setting, new: Floats, requested: Ints) -> Ints:
    """[n] micro-batches of the decode batch, never more than its sequences."""
    batch = new * setting.phase(1, renewal=True).seqs[0]
    return np.asarray(np.minimum(np.maximum(requested, 1), np.maximum(np.floor(batch).astype(np.int64), 1)))


def encode_gpus(setting: Setting, controls: ControlColumns, rows: Ints) -> Ints:
    """[rows] GPUs that encode; 0 where no split holds the groups."""
    chosen = np.zeros(len(rows), dtype=np.int64)
    pairs = np.column_stack([controls.strategy, controls.tp, controls.tp_groups])[rows]
    for strategy, tp, groups in np.unique(pairs, axis=0).tolist():
        here = np.flatnonzero((pairs == (strategy, tp, groups)).all(axis=1))
        allowed = splits(setting.cluster.gpus, tp, groups)
        if not len(allowed):
            continue
        new = controls.encode_batch[rows[here]].astype(np.float64)
        parts = batch_parts(setting, new, controls.micro_batches[rows[here]])
        if strategy == CODES.index(Strategy.WAA_C):
            chosen[here] = compute_split(*_work_s(setting, tp, new, parts), setting.cluster.gpus, allowed)
        else:
            stages = _encode_stages(setting.cluster.gpus, tp, groups, allowed)
            chosen[here] = memory_split(*_even_bytes(setting, allowed, stages, new, parts), allowed)
    return chosen


def waa_seconds(setting: Setting, layout: Layout, tp: int, new: Floats, parts: Ints) -> Floats:
    """[n, 8] the compiled loop's rows: cycle, latency, its high end, encoding, iteration, ranges, decode batch."""
    out = np.zeros((len(new), 8))
    sides = (*grouped(layout.encode), *grouped(layout.decode))
    share = setting.phase(1, renewal=True).columns()[0]
    sizes, prompt = setting.sizes(layout.stages), setting.task.mean_prompt_tokens
    out_s, in_s = (handover_s(setting.model, sizes, side, prompt) for side in (layout.encode, layout.decode))
    degrees = {stage.tp for stage in layout.stages}
    a = setting.packed(tp if tp in degrees else 1)
    b = setting.packed(1 if 1 in degrees else tp)
    _waa_kernel()(
        a, b, *sides, new, parts, np.ascontiguousarray(share), setting.iterations, out_s, in_s,
        projected_share(setting.model), setting.assumptions.lockstep, setting.z, setting.resized.ranges_of(new),
        _longest(setting, new), np.zeros((len(layout.encode), 1)), out,
    )  # fmt: skip
    return out


def waa_bytes(setting: Setting, layout: Layout, new: Floats, parts: Ints, batch: Floats) -> tuple[Floats, float]:
    """([n] bytes on the fullest GPU at the level, the weights on the heaviest) of both sides."""
    sizes, kv_high = setting.sizes(layout.stages), _kv_high(setting, new, batch)
    handed = handed_bytes_per_token(setting.model)
    held = setting.prompt_tokens_high(batches_held(setting.model, len(layout.encode)) * new)
    encode = stage_bytes(sizes, layout.encode, held, handed, setting.prompt_tokens_high(new), new)
    in_visit = batch / parts
    decode = stage_bytes(sizes, layout.decode, kv_high, None, in_visit, in_visit)
    return np.maximum(encode[0], decode[0]), max(encode[1], decode[1])


def _longest(setting: Setting, new: Floats) -> Floats:
    """[n] how many standard deviations of its tokens a batch of nothing but the longest prompt is beyond the mean."""
    task = setting.task
    spread = max(task.prompt_variance**0.5, _NARROW * task.mean_prompt_tokens)
    return np.asarray((task.max_prompt_tokens - task.mean_prompt_tokens) * np.sqrt(new) / spread)


def _kv_high(setting: Setting, new: Floats, batch: Floats) -> Floats:
    """[n] cached tokens of the decode batch at the level, and of one more batch that joins."""
    share = setting.phase(1, renewal=True)
    if share.seqs[0] == 0:
        return setting.prompt_tokens_high(new)
    entering = batch / share.seqs[0]
    spread = setting.z * np.sqrt(entering * share.kv_variance[0])
    return np.asarray(entering * share.kv_tokens[0] + spread + new * setting.task.mean_prompt_tokens)


def _work_s(setting: Setting, tp: int, new: Floats, parts: Ints) -> tuple[Floats, Floats]:
    """Seconds of a GPU that held all layers: of an encoding, and of a decode iteration of B_E E[n]."""
    packed = setting.packed(1 if 1 in setting.tables else tp)
    share, layers = setting.phase(1, renewal=True), setting.model.layers
    projected, ends = projected_share(setting.model), (layers, 1, 1)
    encode = visits_s(packed, new, 0.0, *ends, encode=True, share=1.0 - projected)
    seqs, more = new * share.seqs[0] / parts, new * setting.task.mean_prompt_tokens / parts
    kv_tokens = new * share.kv_tokens[0] / parts
    decode = visits_s(packed, seqs, kv_tokens, *ends, encode=False, share=projected, more_tokens=more)
    return encode, parts * decode


def _encode_stages(gpus: int, tp: int, tp_groups: int, allowed: Ints) -> Ints:
    """[allowed] stages of the encoding pipeline: groups that the decoding GPUs do not hold are in it."""
    encoding = tp_groups - np.minimum(tp_groups, (gpus - allowed) // tp)
    return np.asarray(allowed - encoding * (tp - 1))


def _even_bytes(setting: Setting, allowed: Ints, stages: Ints, new: Floats, parts: Ints) -> tuple[Floats, Floats]:
    """[allowed, n] bytes of an encoding and of a decoding GPU, were the layers spread evenly to fractions."""
    gpus, layers = setting.cluster.gpus, setting.model.layers
    batch = new * setting.phase(1, renewal=True).seqs[0]
    size = setting.sizes((Stage(1, layers, "both"),))[1]
    tokens, handed = setting.prompt_tokens_high(new), handed_bytes_per_token(setting.model)
    held = np.array([setting.prompt_tokens_high(batches_held(setting.model, int(n)) * new) for n in stages])
    ends, kv_bytes = {"first": True, "last": True}, size.kv_layer_bytes
    encode = size.weight_bytes(layers, "encode", **ends) + (0 if handed else held * layers * kv_bytes)
    decode = size.weight_bytes(layers, "decode", **ends) + _kv_high(setting, new, batch) * layers * kv_bytes
    active = tokens * size.token_bytes + new * size.seq_bytes + held * (handed or 0.0)
    encoding = encode / allowed[:, None] + active
    return encoding, decode / (gpus - allowed)[:, None] + batch / parts * (size.token_bytes + size.seq_bytes)


@lru_cache(maxsize=1)
def _waa_kernel() -> Any:
    from lengthwise.schedule.timeline import compiled

    return compiled("waa_rows")


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

    def estimate(self, controls: ControlColumns | Sequence[Controls], encoding: Ints | None = None) -> Estimates:
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
        for tp, groups, here in _matching(given.tp, given.tp_groups, np.flatnonzero(rra)):
            self._rra(given, rows, here, tp, groups, timed=timed)
        others = np.flatnonzero(~rra)
        if len(others):
            chosen = encode_gpus(self.setting, given, others) if encoding is None else encoding[others]
            rows.encode_gpus[others] = chosen
            for tp, groups, here in _matching(given.tp, given.tp_groups, others):
                for split, part in _by(rows.encode_gpus, here):
                    self._waa(given, rows, part, tp, groups, split)
        return rows

    def _require(self, given: ControlColumns) -> None:
        gpus = self.setting.cluster.gpus
        for steps in (given.decode_steps.min(initial=1), given.decode_steps.max(initial=1)):
            require_steps(self.setting.task, int(steps))
        if gpus < 2 and (given.strategy != CODES.index(Strategy.RRA)).any():
            raise InputError("WAA needs at least 2 GPUs, one to encode and one to decode; there is 1. Use RRA.")
        over = given.tp * given.tp_groups > gpus
        if over.any():
            row = int(np.argmax(over))
            raise InputError(
                f"tp_groups groups of tp GPUs must fit the {gpus} GPUs; "
                f"{given.tp_groups[row]} groups of {given.tp[row]} do not"
            )

    def _rra(self, given: ControlColumns, rows: Filling, current: Ints, tp: int, groups: int, *, timed: bool) -> None:
        setting = self.setting
        rows.encode_gpus[current] = setting.cluster.gpus
        try:
            layout = rra_layout(setting.model.layers, setting.cluster.gpus, tp, groups)
        except InputError:
            rows.reason[current] = Reason.LAYERS
            return
        new, steps = given.encode_batch[current].astype(np.float64), given.decode_steps[current]
        offset, table = self._phases(steps)
        parts = np.where(given.micro_batches[current] > 0, given.micro_batches[current], len(layout.stages))
        new = new * setting.resized.times(new / np.minimum(parts, new))
        batch = new * table[offset, 0]
        there = np.maximum(np.floor(batch).astype(np.int64), given.encode_batch[current])
        parts = np.minimum(parts, there)  # B_E are encoded in as many parts however few of them decode
        rows.encoded[current], rows.micro_batches[current], rows.decode_batch[current] = new, parts, batch
        if timed:
            out = _rra_seconds(setting, layout, new, steps, parts, offset, table)
            out[:, 2] += out[:, 1] * np.where(parts > 1, OWN_ERROR, 0.0)
            rows.seconds[current] = out
        rows.reserve(current, *_rra_bytes(setting, layout, new, parts, steps, offset, table), setting.available_bytes)

    def _phases(self, steps: Ints) -> tuple[Ints, Floats]:
        """([n] where a schedule's iterations begin, their shares one under another)."""
        distinct, inverse = np.unique(steps, return_inverse=True)
        shares = [self.setting.phase(int(n)).columns() for n in distinct]
        begin = np.concatenate([[0], np.cumsum(distinct)[:-1]])
        return begin[inverse], np.ascontiguousarray(np.concatenate(shares))

    def _waa(self, given: ControlColumns, rows: Filling, current: Ints, tp: int, groups: int, split: int) -> None:
        setting = self.setting
        try:
            layout = layout_of(setting, split, tp, groups)
        except InputError:
            rows.reason[current] = Reason.LAYERS if split else Reason.GROUPS
            return
        new = given.encode_batch[current].astype(np.float64)
        new = new * setting.resized.times(new)
        parts = batch_parts(setting, new, given.micro_batches[current])
        out = waa_seconds(setting, layout, tp, new, parts)
        rows.seconds[current], rows.micro_batches[current] = out[:, :7], parts
        rows.encoded[current], rows.decode_batch[current] = new, out[:, 7]
        rows.reserve(current, *waa_bytes(setting, layout, new, parts, out[:, 7]), setting.available_bytes)


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
    setting: Setting, layout: Layout, new: Floats, steps: Ints, parts: Ints, offset: Ints, table: Floats
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
    _rra_kernel()(
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


def _matching(tp: Ints, groups: Ints, rows: Ints) -> list[tuple[int, int, Ints]]:
    """Rows of one layout together; without groups the degree does not matter."""
    degree = np.where(groups[rows] > 0, tp[rows], 1)
    pairs = np.column_stack([degree, groups[rows]])
    found = np.unique(pairs, axis=0).tolist()
    return [(t, g, rows[(pairs == (t, g)).all(axis=1)]) for t, g in found]


def _by(values: Ints, rows: Ints) -> list[tuple[int, Ints]]:
    return [(int(value), rows[values[rows] == value]) for value in np.unique(values[rows])]


def _rra_kernel() -> Any:
    from lengthwise.schedule.timeline import compiled

    return compiled("rra_rows")
