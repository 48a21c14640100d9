"""What the tables say of logged steps, part by part, so that a change of scales is a sum."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from lengthwise.measure.calibrate.iterations import Iterations
from lengthwise.schema.cost_tables import MERGED, CostTables, grid_axis
from lengthwise.schema.deployment import Deployment

Floats = npt.NDArray[np.float64]


def step_parts(log: Iterations, deployment: Deployment) -> dict[str, Floats]:
    """[m] seconds of each step by part: work, prefill, decode, comm; and counts: sequences, pairs of others.

    The latter are pairs of a query and a key of two sequences, over all layers.

    A prompt's chunk is the mean of its step, without context before it; the KV tokens of decodes are what the
    cache held, less the prompts' own.
    """
    cost = deployment.cost
    layers = float(cost.stage_layers.sum())
    tokens, seqs = log.prefill_tokens + log.decode_seqs, log.prefill_seqs + log.decode_seqs
    capacity = deployment.kv.num_blocks * deployment.kv.block_size
    held = np.nan_to_num(log.kv_share) * capacity - log.prefill_tokens
    kv_tokens = np.maximum(log.decode_seqs, held)
    send = _row(cost.send_s, tokens) * (len(cost.stage_layers) - 1)
    return {
        "work": layers * _row(cost.layer_s, tokens) + _row(cost.first_s, tokens) + _row(cost.head_s, seqs),
        "comm": layers * _row(cost.comm_s, tokens) + send,
        "prefill": layers * _prefill(cost, log),
        "decode": layers * _decode(cost, log.decode_seqs, kv_tokens, log.prefill_seqs > 0),
        "sequences": seqs,
        "pairs": layers * _pairs_of_others(log, kv_tokens),
    }


def seconds_of(parts: Mapping[str, Floats], values: Mapping[str, float]) -> Floats:
    """[m] seconds of the steps with these scales and this host."""
    return np.asarray(
        kernels_of(parts, values) + values["log_step"] + values["host_sequence"] * parts["sequences"]
    )


def kernels_of(parts: Mapping[str, Floats], values: Mapping[str, float]) -> Floats:
    """[m] seconds without the host's."""
    kernels = sum(parts[name] * values.get(name, 1.0) for name in ("work", "comm", "prefill", "decode"))
    return np.asarray(kernels + values.get("masked", 0.0) * parts["pairs"])


def prompt_attention(cost: CostTables, prompt_tokens: npt.NDArray[np.int64], most: int) -> Floats:
    """[n] seconds of a layer's attention over whole prompts, computed alone and at most so many tokens a step.

    As everywhere here, merged tables (Vidur's) are read without the context before a chunk.
    """
    seconds, done = np.zeros(len(prompt_tokens)), np.zeros(len(prompt_tokens))
    while (left := prompt_tokens - done).max(initial=0.0) > 0:
        chunk = np.minimum(left, most)
        merged = cost.rule.kind == MERGED
        own = _stepped(cost.prefill_s, chunk, 0 * done) if merged else _bilinear(cost.prefill_s, chunk, done)
        seconds += np.where(left > 0, own, 0.0)
        done = done + chunk
    return seconds


def _pairs_of_others(log: Iterations, kv_tokens: Floats) -> Floats:
    """[m] pairs of a query and a key that are of two sequences; prompts are of equal chunks."""
    cached = np.where(log.decode_seqs > 0, kv_tokens, 0.0)
    own = cached + log.prefill_tokens**2 / np.maximum(1, log.prefill_seqs)
    return np.asarray((log.prefill_tokens + log.decode_seqs) * (cached + log.prefill_tokens) - own)


def _prefill(cost: CostTables, log: Iterations) -> Floats:
    prompts = np.maximum(1, log.prefill_seqs)
    if cost.rule.kind == MERGED:  # sqrt of the sum of squares of equal chunks
        factor = np.where(log.prefill_seqs > 1, cost.rule.merge_factor, 1.0)
        one = factor * _stepped(cost.prefill_s, log.prefill_tokens / np.sqrt(prompts), np.zeros(len(log)))
        return np.where(log.prefill_seqs > 0, one, 0.0)
    return log.prefill_seqs * _bilinear(cost.prefill_s, log.prefill_tokens / prompts, np.zeros(len(log)))


def _decode(cost: CostTables, seqs: Floats, kv_tokens: Floats, beside: npt.NDArray[np.bool_]) -> Floats:
    """Seconds of a layer's decode attention; longer in the steps ``beside`` prompts, where the tables say so."""
    if cost.rule.kind == MERGED:
        factor = np.where(seqs > 1, cost.rule.merge_factor, 1.0)
        steps = np.ceil(kv_tokens / np.maximum(1, seqs) / cost.rule.step_tokens)
        return np.where(seqs > 0, factor * _stepped(cost.decode_s, seqs, steps), 0.0)
    seconds = _bilinear(cost.decode_s, seqs, kv_tokens)
    if cost.beside_prompts is not None:
        seconds = seconds * np.where(beside, _bilinear(cost.beside_prompts, seqs, kv_tokens), 1.0)
    return np.where(seqs > 0, seconds, 0.0)


def _row(table: Floats, at: Floats) -> Floats:
    return np.interp(at, np.arange(len(table)), table)


def _stepped(table: Floats, i: Floats, j: Floats) -> Floats:
    rows = np.minimum(np.round(i).astype(np.int64), table.shape[0] - 1)
    return np.asarray(table[rows, np.minimum(j.astype(np.int64), table.shape[1] - 1)])


def _bilinear(table: Floats, x: Floats, y: Floats) -> Floats:
    (i, u), (j, v) = _cell(x, table.shape[0]), _cell(y, table.shape[1])
    low = table[i, j] + v * (table[i, j + 1] - table[i, j])
    high = table[i + 1, j] + v * (table[i + 1, j + 1] - table[i + 1, j])
    return np.asarray(low + u * (high - low))


def _cell(values: Floats, points: int) -> tuple[npt.NDArray[np.int64], Floats]:
    axis = grid_axis(2**30)[:points].astype(np.float64)
    index = np.clip(np.searchsorted(axis, values, side="right") - 1, 0, points - 2)
    return index, (values - axis[index]) / (axis[index + 1] - axis[index])
