"""Doing nothing: static batches that run until their longest output is done, as FasterTransformer does.

A batch is encoded, then decoded as many times as the longest output needs; nobody leaves before, nobody enters.
Tensor parallelism is as wide as a node allows, what is left of the GPUs are pipeline stages of it (ExeGPT,
section 7.1). Prompts count as long as they are, which is in its favour.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lengthwise.schedule._prepared import Setting
from lengthwise.schedule.estimate import Estimator
from lengthwise.schedule.frontier import shown_of
from lengthwise.schedule.layout import Layout, Stage, rra_layout
from lengthwise.schedule.memory import stage_bytes
from lengthwise.schedule.stage_seconds import visits_s
from lengthwise.schema.errors import InputError
from lengthwise.schema.schedule import FrontPoint
from lengthwise.schema.schedule_row import ScheduleRow

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MULTIPLE = 4
"""Batches are multiples of so many requests, and smaller ones."""
LARGEST = 4096


@dataclass(frozen=True, eq=False)
class StaticBatches:
    """Static batches that memory holds, a row each, from small to large.

    Attributes:
        batch: Requests.
        latency_s: From a batch's encoding to its last token.
        encode_s: Of the whole batch.
        decode_s: A decode iteration, mean.
        memory_share: What the fullest GPU needs over what it has.
        steps: Decode iterations.
        micro_batches: Parts in the pipeline.
        tp: Tensor-parallel degree.
        tp_groups: Stages of it; 0: of one GPU each.
        gpus: In all.
    """

    batch: Ints
    latency_s: Floats
    encode_s: Floats
    decode_s: Floats
    memory_share: Floats
    steps: int
    micro_batches: Ints
    tp: int
    tp_groups: int
    gpus: int

    def best(self, bound_s: float) -> ScheduleRow | None:
        """The batch of the highest throughput that meets a bound; None: none does."""
        good = np.flatnonzero(self.latency_s <= bound_s)
        if not len(good):
            return None
        return self.row(int(good[np.argmax((self.batch / self.latency_s)[good])]))

    def front(self, at_s: float = math.inf) -> tuple[FrontPoint, ...]:
        """Those that none beats in both throughput and latency, thinned, by latency; the best at a bound is kept."""
        rps = self.batch / self.latency_s
        before = np.maximum.accumulate(np.concatenate([[0.0], rps]))[:-1]
        best = np.flatnonzero(rps > before)
        at = best[shown_of(self.latency_s[best], rps[best], [at_s])] if len(best) else best
        return tuple(FrontPoint(float(self.latency_s[i]), self.row(int(i))) for i in at)

    def bounds_s(self, quantiles: tuple[float, ...] = (0.1, 0.3, 0.7)) -> tuple[float, ...]:
        """Quantiles of the latencies over batches in multiples of four, which ExeGPT takes for bounds."""
        latency_s = self.latency_s[self.batch % MULTIPLE == 0]
        if not len(latency_s):
            return ()
        return tuple(float(bound_s) for bound_s in np.quantile(latency_s, quantiles))

    def row(self, at: int) -> ScheduleRow:
        """One of them as a schedule."""
        batch, latency_s = int(self.batch[at]), float(self.latency_s[at])
        return ScheduleRow(
            strategy="static",
            encode_batch=batch,
            decode_steps=self.steps,
            micro_batches=int(self.micro_batches[at]),
            tp=self.tp,
            tp_groups=self.tp_groups,
            encode_gpus=self.gpus,
            throughput_rps=batch / latency_s,
            latency_s=latency_s,
            latency_high_s=latency_s,
            cycle_s=latency_s,
            encode_s=float(self.encode_s[at]),
            decode_s=float(self.decode_s[at]),
            decode_batch=float(batch),
            memory_share=float(self.memory_share[at]),
        )


def static_batches(estimator: Estimator) -> StaticBatches:
    """All static batches of an estimator's task on its cluster; none where they do not fit."""
    setting = estimator.setting
    tp, layout = _widest(setting)
    batch = np.concatenate([np.arange(1, MULTIPLE), np.arange(MULTIPLE, LARGEST + 1, MULTIPLE)])
    if not layout.stages:
        batch = batch[:0]
    stages = len(layout.stages)
    parts = np.minimum(batch, max(stages, 1))
    steps = setting.task.max_output_tokens - setting.assumptions.from_encode
    share = _memory_share(setting, layout, batch, parts)
    fits = share <= 1
    batch, parts, share = batch[fits], parts[fits], share[fits]
    encode_s = _encode_s(setting, layout, batch, parts)
    decode_s = _decode_s(setting, layout, batch, parts, steps)
    return StaticBatches(
        batch=batch,
        latency_s=encode_s + decode_s,
        encode_s=encode_s,
        decode_s=decode_s / max(steps, 1),
        memory_share=share,
        steps=steps,
        micro_batches=parts,
        tp=tp,
        tp_groups=stages if tp > 1 else 0,
        gpus=setting.cluster.gpus,
    )


def _widest(setting: Setting) -> tuple[int, Layout]:
    """The widest degree that divides the cluster within a node, and its stages; none: no layout has layers for all."""
    gpus, node = setting.cluster.gpus, setting.cluster.node.gpus
    for tp in sorted(setting.tables, reverse=True):
        if tp > node or gpus % tp:
            continue
        try:
            return tp, rra_layout(setting.model.layers, gpus, tp, gpus // tp if tp > 1 else 0)
        except InputError:
            break
    return 1, Layout(())


def _memory_share(setting: Setting, layout: Layout, batch: Ints, parts: Ints) -> Floats:
    """Room is kept for every output to be the longest."""
    if not layout.stages:
        return np.zeros(len(batch))
    whole, in_visit = batch.astype(np.float64), batch / np.maximum(parts, 1)
    kv_tokens = setting.prompt_tokens_high(whole) + whole * setting.task.max_output_tokens
    tokens = setting.prompt_tokens_high(in_visit)
    needed, _ = stage_bytes(setting.sizes(layout.stages), layout.stages, kv_tokens, None, tokens, in_visit)
    return np.asarray(needed / setting.usable_bytes)


def _encode_s(setting: Setting, layout: Layout, batch: Ints, parts: Ints) -> Floats:
    visits = [
        count * _visit(setting, stage, place, len(layout.stages), batch / parts, 0.0, encode=True)
        for place, (stage, count) in _kinds(layout)
    ]
    slowest = [
        _visit(setting, stage, place, len(layout.stages), batch / parts, 0.0, encode=True)
        for place, (stage, _) in _kinds(layout)
    ]
    if not visits:
        return np.zeros(len(batch))
    return np.asarray(np.sum(visits, axis=0) + (parts - 1) * np.max(slowest, axis=0))


def _decode_s(setting: Setting, layout: Layout, batch: Ints, parts: Ints, steps: int) -> Floats:
    """Seconds of all decode iterations: each one way through the stages, or the slowest stage's visits."""
    if not steps or not len(batch):
        return np.zeros(len(batch))
    seqs = (batch / parts)[:, None] + np.zeros(steps)
    kv_tokens = seqs * (setting.task.mean_prompt_tokens + np.arange(1, steps + 1))
    whole, slowest = np.zeros(seqs.shape), np.zeros(seqs.shape)
    for place, (stage, count) in _kinds(layout):
        visit = _visit(setting, stage, place, len(layout.stages), seqs, kv_tokens, encode=False)
        whole, slowest = whole + count * visit, np.maximum(slowest, visit)
    return np.asarray(np.maximum(whole, parts[:, None] * slowest).sum(axis=1))


def _visit(
    setting: Setting,
    stage: Stage,
    place: int,
    stages: int,
    seqs: Floats,
    kv_tokens: Floats | float,
    *,
    encode: bool,
) -> Floats:
    ends = place == 0, place == stages - 1
    return visits_s(setting.packed(stage.tp), seqs, kv_tokens, stage.layers, *ends, encode=encode)


def _kinds(layout: Layout) -> list[tuple[int, tuple[Stage, int]]]:
    """The first and the last stage, and those between them that differ: (place, (stage, how many))."""
    last = len(layout.stages) - 1
    found: dict[tuple[Stage, bool, bool], tuple[int, int]] = {}
    for place, stage in enumerate(layout.stages):
        key = stage, place == 0, place == last
        first, count = found.get(key, (place, 0))
        found[key] = first, count + 1
    return [(place, (key[0], count)) for key, (place, count) in found.items()]


__all__ = ["StaticBatches", "static_batches"]
