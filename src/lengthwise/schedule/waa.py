"""WAA: some GPUs encode, the others decode; encoded batches are handed over through host memory.

An encoding of B_E requests comes out every ``period``; of the decode batch, B_E complete in that time. With one
iteration a period the batch is ``B_E E[n]``. Where decoding that batch takes longer than an encoding, encoding
waits for it. Where it is faster, decoding goes on at its own pace, and the batch is what Little's law leaves:
as many as arrive in ``E[n]`` iterations. ``Assumptions.lockstep`` makes decoding wait instead.

A batch's requests are handed over one at a time. In the mean one is in their middle, and waits half of a micro-batch's
time for the next of them, which it joins.

Batches are not equally long. With only as many as stages each next one would wait for the longest of them, and a
dozen stages lose 40 % with three prompts a batch. So one more a stage may wait in between: the pipeline holds two a
stage, and their cache, and loses next to nothing; who comes behind a long one waits for it at every stage.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.schedule._prepared import Setting, grouped
from lengthwise.schedule.controls import CODES, ControlColumns, Strategy
from lengthwise.schedule.layout import Layout, Stage, compute_split, memory_split, splits, waa_layout
from lengthwise.schedule.memory import handed_bytes_per_token, handover_s, stage_bytes
from lengthwise.schedule.stage_seconds import projected_share, visits_s
from lengthwise.schema.model import ModelSpec

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

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


def batch_parts(setting: Setting, new: Floats, asked: Ints) -> Ints:
    """[n] micro-batches of the decode batch, never more than its sequences."""
    batch = new * setting.phase(1, renewal=True).seqs[0]
    return np.asarray(np.minimum(np.maximum(asked, 1), np.maximum(np.floor(batch).astype(np.int64), 1)))


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
    _kernel()(
        a, b, *sides, new, parts, np.ascontiguousarray(share), setting.iterations, out_s, in_s,
        projected_share(setting.model), setting.assumptions.lockstep, setting.z, setting.resized.ranges_of(new),
        _longest(setting, new), np.zeros((len(layout.encode), 1)), out,
    )  # fmt: skip
    return out


def waa_bytes(
    setting: Setting, layout: Layout, new: Floats, parts: Ints, batch: Floats
) -> tuple[Floats, float]:
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


def _even_bytes(
    setting: Setting, allowed: Ints, stages: Ints, new: Floats, parts: Ints
) -> tuple[Floats, Floats]:
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
def _kernel() -> Any:
    from lengthwise.schedule._compiled import compiled

    return compiled("waa_rows")


__all__ = ["batch_parts", "batches_held", "encode_gpus", "layout_of", "waa_bytes", "waa_seconds"]
