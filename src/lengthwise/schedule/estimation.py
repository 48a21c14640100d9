"""Throughput and latency of schedules, from the steady state of their timelines (ExeGPT, section 6)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
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
from lengthwise.schedule.lengths import TaskLengths, phase_position, require_steps
from lengthwise.schedule.stage_costs import (
    Setting,
    TablesByDegree,
    compiled,
    kv_transfer_s,
    normal_scores,
    projected_share,
    stage_bytes,
    stage_groups,
    transfer_bytes_per_token,
    visits_s,
    workspace,
)
from lengthwise.schema.errors import InputError
from lengthwise.schema.specs import ModelSpec
from lengthwise.schema.workload import Floats, Ints

MODEL_ERROR = 0.01  # relative error of RRA's latency estimate with several micro-batches, which ``latency_high_s`` adds
_RRA = CODES.index(Strategy.RRA)
_ENCODER_BATCHES = 2
"""Batches whose encoder output is on a prefill GPU: one that is computed and one that is transferred."""
_NARROW = 1e-9  # relative spread of prompt lengths below which they count as equal


class Reason(IntEnum):
    """Why a schedule is infeasible. ``FITS`` means that the schedule is feasible."""

    FITS = 0
    WEIGHTS = 1  # the weights alone exceed the memory of a GPU
    CACHE = 2  # cache and activations do not fit next to the weights, at the level of the assumptions
    GROUPS = 3  # no split into prefill and decode GPUs has room for the tensor-parallel groups
    LAYERS = 4  # there are more stages than layers


@dataclass(frozen=True, eq=False)
class Estimates:
    """Estimates of schedules, one row each. An infeasible schedule has a throughput of 0 and infinite latency.

    "At the level" means: with the work of every batch at its quantile ``Assumptions.level``.
    """

    throughput_rps: Floats  # completed requests per second
    unconstrained_rps: Floats  # completed requests per second if memory were unlimited; 0 if there is no layout
    # expected time from the start of a micro-batch's prefill to the last token of a request with
    # ``Setting.bound_tokens`` output tokens, without the wait for the prefill (at most one ``cycle_s``)
    latency_s: Floats
    latency_high_s: Floats  # the same time at the level
    cycle_s: Floats  # RRA: a round of prefill and N_D decode iterations; WAA: from one prefill to the next
    prefill_s: Floats  # pass of a batch (RRA: of all its micro-batches) through the prefill stages
    decode_s: Floats  # decode iteration, averaged over a phase
    decode_batch: Floats  # B_D: sequences at the start of a phase; WAA: in an iteration
    prefill_range: Floats  # share by which a batch's prefill takes longer at the level than on average
    decode_range: Floats  # share by which a decode iteration takes longer at the level than on average
    memory_share: Floats  # memory needs of the fullest GPU at the level, divided by its usable memory
    micro_batches: Ints  # number of micro-batches (B_m)
    prefill_gpus: Ints  # GPUs that prefill; RRA: all
    reason: Ints  # ``Reason`` codes

    @property
    def feasible(self) -> npt.NDArray[np.bool_]:
        """Return [n] whether each schedule is feasible."""
        return np.asarray(self.reason == Reason.FITS)

    def constrained_latency_s(self, *, worst_case: bool) -> Floats:
        """Return [n] the latencies that a bound limits: ``latency_high_s`` if ``worst_case``, else ``latency_s``."""
        return self.latency_high_s if worst_case else self.latency_s


class _Rows:
    def __init__(self, n: int) -> None:
        self.seconds = np.full((n, 7), np.nan)
        self.prefilled, self.decode_batch, self.memory_share = np.zeros(n), np.zeros(n), np.full(n, np.nan)
        self.micro_batches, self.prefill_gpus, self.reason = (np.zeros(n, dtype=np.int64) for _ in range(3))

    def set_memory(self, rows: Ints, needed_bytes: Floats, weight_bytes: float, available_bytes: float) -> None:
        self.memory_share[rows] = needed_bytes / available_bytes
        reason = Reason.WEIGHTS if weight_bytes > available_bytes else Reason.CACHE
        self.reason[rows] = np.where(needed_bytes > available_bytes, reason, Reason.FITS)

    def estimates(self) -> Estimates:
        fits = self.reason == Reason.FITS
        cycle_s, latency_s, high_s, prefill_s, decode_s, prefill_range, decode_range = self.seconds.T
        with np.errstate(divide="ignore", invalid="ignore"):
            rps = np.where(cycle_s > 0, self.prefilled / cycle_s, 0.0)
        return Estimates(
            np.where(fits, rps, 0.0), rps, np.where(fits, latency_s, np.inf), np.where(fits, high_s, np.inf),
            cycle_s, prefill_s, decode_s, self.decode_batch, prefill_range, decode_range, self.memory_share,
            self.micro_batches, self.prefill_gpus, self.reason,
        )  # fmt: skip


def resident_batches(model: ModelSpec, stages: int) -> int:
    """Return the number of batches that have KV cache on each GPU of a prefill pipeline.

    These are the batches in flight, and one whose cache is transferred. Two batches per stage are in flight: one that
    computes and one that waits. With a single stage only one batch is in flight. As in engines, a prompt reserves its
    blocks on all stages from its admission until its transfer is complete. The prefill GPUs of an encoder-decoder store
    only the encoder's output.
    """
    if model.encoder_layers:
        return _ENCODER_BATCHES
    return 1 + (2 * stages if stages > 1 else 1)


def choose_prefill_gpus(setting: Setting, controls: ControlColumns, rows: Ints) -> Ints:
    """Return the number of GPUs that prefill in each of the WAA ``rows``, or 0 if no split has room for the groups."""
    chosen = np.zeros(len(rows), dtype=np.int64)
    gpus, layers = setting.cluster.gpus, setting.model.layers
    load = setting.phase(1, renewal=True)
    for (strategy, tp, groups), at in _grouped(controls.strategy[rows], controls.tp[rows], controls.tp_groups[rows]):
        allowed = splits(gpus, tp, groups)
        if not len(allowed):
            continue
        new = controls.prefill_batch[rows[at]].astype(np.float64)
        parts = _decode_parts(setting, new, controls.micro_batches[rows[at]])
        if strategy == CODES.index(Strategy.WAA_C):
            # Seconds of a prefill, and of a decode iteration of B_E E[n] sequences, on one GPU that has all layers.
            packed = setting.packed(1 if 1 in setting.tables else tp)
            projected, stage = projected_share(setting.model), (layers, 1, 1)
            prefill_s = visits_s(packed, new, 0.0, stage, prefill=True, share=1.0 - projected)
            seqs, more = new * load.seqs[0] / parts, new * setting.task.mean_prompt_tokens / parts
            kv_tokens = new * load.kv_tokens[0] / parts
            decode_s = visits_s(packed, seqs, kv_tokens, stage, prefill=False, share=projected, more_tokens=more)
            chosen[at] = compute_split(prefill_s, parts * decode_s, gpus, allowed)
        else:
            chosen[at] = memory_split(*_even_bytes(setting, allowed, tp, groups, new, parts), allowed)
    return chosen


def _grouped(*keys: Ints) -> Iterator[tuple[list[int], Ints]]:
    """Yield each distinct tuple of keys with the indices where it occurs."""
    distinct, inverse = np.unique(np.column_stack(keys), axis=0, return_inverse=True)
    for number, key in enumerate(distinct.tolist()):
        yield key, np.flatnonzero(inverse.reshape(-1) == number)


def _decode_parts(setting: Setting, new: Floats, requested: Ints) -> Ints:
    batch = new * setting.phase(1, renewal=True).seqs[0]
    return np.asarray(np.minimum(np.maximum(requested, 1), np.maximum(np.floor(batch).astype(np.int64), 1)))


def _even_bytes(
    setting: Setting, allowed: Ints, tp: int, groups: int, new: Floats, parts: Ints
) -> tuple[Floats, Floats]:
    """Return [allowed, n] bytes on a prefill GPU and on a decode GPU, as if the layers were divided exactly evenly."""
    gpus, layers = setting.cluster.gpus, setting.model.layers
    # Groups for which the decode GPUs have no room are in the prefill pipeline and reduce its number of stages.
    stages = allowed - (groups - np.minimum(groups, (gpus - allowed) // tp)) * (tp - 1)
    batch = new * setting.phase(1, renewal=True).seqs[0]
    needs = setting.memory((Stage(1, layers, "both"),))[1]
    tokens, transferred = setting.prompt_tokens_high(new), transfer_bytes_per_token(setting.model)
    cached = np.array([setting.prompt_tokens_high(resident_batches(setting.model, int(n)) * new) for n in stages])
    ends, kv_bytes = {"first": True, "last": True}, needs.kv_layer_bytes
    prefill = needs.weight_bytes(layers, "prefill", **ends) + (0 if transferred else cached * layers * kv_bytes)
    decode = needs.weight_bytes(layers, "decode", **ends) + _waa_kv_high(setting, new, batch) * layers * kv_bytes
    active = tokens * needs.token_bytes + new * needs.seq_bytes + cached * (transferred or 0.0)
    prefill_bytes = prefill / allowed[:, None] + active
    return prefill_bytes, decode / (gpus - allowed)[:, None] + batch / parts * (needs.token_bytes + needs.seq_bytes)


def _waa_kv_high(setting: Setting, new: Floats, batch: Floats) -> Floats:
    """Return [n] cached tokens of WAA's decode batch at the level's quantile, with one batch that is about to join."""
    load = setting.phase(1, renewal=True)
    if load.seqs[0] == 0:
        return setting.prompt_tokens_high(new)
    entering = batch / load.seqs[0]
    spread = setting.z * np.sqrt(entering * load.kv_variance[0])
    return np.asarray(entering * load.kv_tokens[0] + spread + new * setting.task.mean_prompt_tokens)


class Estimator:
    """Estimates schedules of one task on one cluster. The estimator computes values that schedules share only once.

    ``tables`` has the cost tables of every tensor-parallel degree that a stage has. Raises InputError if the task's
    longest request exceeds the model's context.
    """

    def __init__(
        self,
        task: TaskLengths,
        cluster: Cluster,
        model: ModelSpec,
        tables: TablesByDegree,
        assumptions: Assumptions = Assumptions(),
    ) -> None:
        self.setting = Setting(task, cluster, model, tables, assumptions)

    def replace(self, **changes: Any) -> Estimator:
        """Return an estimator with some of the constructor's arguments replaced."""
        names = ("task", "cluster", "model", "tables", "assumptions")
        return Estimator(**{name: getattr(self.setting, name) for name in names} | changes)

    def estimate(self, controls: ControlColumns | Sequence[Controls], prefill_gpus: Ints | None = None) -> Estimates:
        """Return a row of estimates for each schedule.

        ``prefill_gpus`` [n] fixes the number of GPUs that prefill under WAA, for deployed schedules. If None, the
        strategy chooses the number. Raises InputError if N_D exceeds the longest output, WAA has only one GPU, groups
        exceed the GPUs, or a degree has no tables.
        """
        given = controls if isinstance(controls, ControlColumns) else columns(controls)
        return self._fill(given, prefill_gpus, timed=True).estimates()

    def reasons(self, controls: ControlColumns, prefill_gpus: Ints | None = None) -> Ints:
        """Return [n] ``Reason`` codes, faster than ``estimate``, with its errors. RRA needs no cost tables here."""
        return self._fill(controls, prefill_gpus, timed=False).reason

    def _fill(self, given: ControlColumns, prefill_gpus: Ints | None, *, timed: bool) -> _Rows:
        """Return all columns. Unless ``timed``, RRA's seconds stay NaN, because no memory need depends on them."""
        gpus, rra = self.setting.cluster.gpus, given.strategy == _RRA
        for steps in (given.decode_steps.min(initial=1), given.decode_steps.max(initial=1)):
            require_steps(self.setting.task, int(steps))
        if gpus < 2 and not rra.all():
            raise InputError("WAA needs at least 2 GPUs, one to prefill and one to decode; there is 1. Use RRA.")
        over = given.tp * given.tp_groups > gpus
        if over.any():
            row = int(np.argmax(over))
            raise InputError(
                f"tp_groups groups of tp GPUs must fit the {gpus} GPUs; "
                f"{given.tp_groups[row]} groups of {given.tp[row]} do not"
            )
        rows = _Rows(len(given))
        rows.prefill_gpus[rra] = gpus
        waa = np.flatnonzero(~rra)
        if len(waa):
            rows.prefill_gpus[waa] = (
                choose_prefill_gpus(self.setting, given, waa) if prefill_gpus is None else prefill_gpus[waa]
            )
        degree = np.where(given.tp_groups > 0, given.tp, 1)  # Without groups the degree does not matter.
        for (is_rra, tp, groups, split), at in _grouped(
            rra.astype(np.int64), degree, given.tp_groups, rows.prefill_gpus
        ):
            try:
                layers = self.setting.model.layers
                layout = rra_layout(layers, gpus, tp, groups) if is_rra else waa_layout(layers, gpus, split, tp, groups)
            except InputError:
                rows.reason[at] = Reason.LAYERS if split else Reason.GROUPS
                continue
            if is_rra:
                self._fill_rra(given, rows, at, layout, timed=timed)
            else:
                self._fill_waa(given, rows, at, layout, tp)
        return rows

    def _fill_rra(self, given: ControlColumns, rows: _Rows, at: Ints, layout: Layout, *, timed: bool) -> None:
        setting = self.setting
        new, steps = given.prefill_batch[at].astype(np.float64), given.decode_steps[at]
        # The loads of all phase lengths are stacked; a schedule's iterations begin at its offset.
        distinct, inverse = np.unique(steps, return_inverse=True)
        offset = np.concatenate([[0], np.cumsum(distinct)[:-1]])[inverse]
        loads = np.ascontiguousarray(np.concatenate([setting.phase(int(n)).columns for n in distinct]))
        parts = np.where(given.micro_batches[at] > 0, given.micro_batches[at], len(layout.stages))
        new = new * setting.batches.size_factor(new / np.minimum(parts, new))
        batch = new * loads[offset, 0]
        # B_E requests are prefilled in this many parts, even if fewer of them decode.
        parts = np.minimum(parts, np.maximum(np.floor(batch).astype(np.int64), given.prefill_batch[at]))
        prefilling = new / np.minimum(parts, new)
        rows.prefilled[at], rows.micro_batches[at], rows.decode_batch[at] = new, parts, batch
        if timed:
            groups, count = stage_groups(layout.stages)
            degrees = {stage.tp for stage in layout.stages}
            finish = np.array([phase_position(int(n), setting.iterations) for n in steps], dtype=np.int64).reshape(
                -1, 2
            )
            most, out = int(parts.max(initial=1)), np.zeros((len(new), 7))
            compiled("rra_rows")(
                setting.packed(max(degrees)), setting.packed(min(degrees)), groups, count, new, steps, parts,
                np.ascontiguousarray(finish[:, 1]), np.ascontiguousarray(finish[:, 0]), offset, loads, setting.z,
                setting.batches.relative_range(prefilling), normal_scores(most),
                np.zeros((len(count), int(steps.max(initial=1)) + 1)), np.ones(most), *workspace(most, len(count)), out,
            )  # fmt: skip
            out[:, 2] += out[:, 1] * np.where(parts > 1, MODEL_ERROR, 0.0)
            rows.seconds[at] = out
        # The memory must hold the largest cache in a phase, and the larger visit of prefill and decode.
        largest = np.array([int(np.argmax(setting.phase(int(n)).kv_tokens)) for n in distinct], dtype=np.int64)
        load = loads[offset + largest[inverse]]
        kv_high = new * load[:, 1] + setting.z * np.sqrt(new * load[:, 3])
        kv_high = np.maximum(kv_high, setting.prompt_tokens_high(new))
        decoding = batch / parts
        tokens, seqs = np.maximum(setting.prompt_tokens_high(prefilling), decoding), np.maximum(prefilling, decoding)
        needed = stage_bytes(setting.memory(layout.stages), layout.stages, kv_high, None, tokens, seqs)
        rows.set_memory(at, *needed, setting.available_bytes)

    def _fill_waa(self, given: ControlColumns, rows: _Rows, at: Ints, layout: Layout, tp: int) -> None:
        setting, task, model = self.setting, self.setting.task, self.setting.model
        new = given.prefill_batch[at].astype(np.float64)
        new = new * setting.batches.size_factor(new)
        parts = _decode_parts(setting, new, given.micro_batches[at])
        memory, out = setting.memory(layout.stages), np.zeros((len(new), 8))
        out_s, in_s = (
            kv_transfer_s(model, memory, side, task.mean_prompt_tokens) for side in (layout.prefill, layout.decode)
        )
        degrees = {stage.tp for stage in layout.stages}
        # By how many standard deviations a batch of only the longest prompts exceeds the mean batch.
        spread = max(task.prompt_variance**0.5, _NARROW * task.mean_prompt_tokens)
        longest = np.asarray((task.max_prompt_tokens - task.mean_prompt_tokens) * np.sqrt(new) / spread)
        compiled("waa_rows")(
            setting.packed(tp if tp in degrees else 1), setting.packed(1 if 1 in degrees else tp),
            *stage_groups(layout.prefill), *stage_groups(layout.decode), new, parts,
            np.ascontiguousarray(setting.phase(1, renewal=True).columns[0]), setting.iterations, out_s, in_s,
            projected_share(model), setting.assumptions.lockstep, setting.z, setting.batches.relative_range(new),
            longest, np.zeros((len(layout.prefill), 1)), out,
        )  # fmt: skip
        batch = out[:, 7]
        rows.seconds[at], rows.micro_batches[at] = out[:, :7], parts
        rows.prefilled[at], rows.decode_batch[at] = new, batch
        cached = setting.prompt_tokens_high(resident_batches(model, len(layout.prefill)) * new)
        transferred = transfer_bytes_per_token(model)
        prefill = stage_bytes(memory, layout.prefill, cached, transferred, setting.prompt_tokens_high(new), new)
        kv_high, visit = _waa_kv_high(setting, new, batch), batch / parts
        decode = stage_bytes(memory, layout.decode, kv_high, None, visit, visit)
        needed = np.maximum(prefill[0], decode[0]), max(prefill[1], decode[1])
        rows.set_memory(at, *needed, setting.available_bytes)
