"""Reads the cost tables inside compiled code; ``engine.step_time`` reads them in plain Python, with equal results."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lengthwise._jit import jit
from lengthwise.schema.cost_tables import MERGED, CostTables

Floats = npt.NDArray[np.float64]
_SLOPE_SPAN = 256


class PackedCost(NamedTuple):
    """CostTables laid out for one cache line a lookup; the slopes continue them beyond their last row."""

    by_tokens: Floats  # columns: layer, comm, first, send
    tokens_slope: Floats
    by_seqs: Floats  # columns: head, host
    seqs_slope: Floats
    prefill: Floats
    decode: Floats
    stage_layers: Floats
    merged: bool
    step_tokens: int
    merge_factor: float
    mixed: Floats
    has_beside: bool
    masked_s: float


def pack(cost: CostTables) -> PackedCost:
    """The tables as compiled code reads them."""
    by_tokens = np.column_stack([cost.layer_s, cost.comm_s, cost.first_s, cost.send_s])
    by_seqs = np.column_stack([cost.head_s, cost.host_s])
    return PackedCost(
        np.ascontiguousarray(by_tokens),
        _slope(by_tokens),
        np.ascontiguousarray(by_seqs),
        _slope(by_seqs),
        np.array(cost.prefill_s, dtype=np.float64, order="C"),
        np.array(cost.decode_s, dtype=np.float64, order="C"),
        np.array(cost.stage_layers, dtype=np.float64),
        cost.rule.kind == MERGED,
        int(cost.rule.step_tokens),
        float(cost.rule.merge_factor),
        np.ones((2, 2)) if cost.beside_prompts is None else np.array(cost.beside_prompts, np.float64, order="C"),
        cost.beside_prompts is not None,
        float(cost.masked_s),
    )


def _slope(table: Floats) -> Floats:
    span = min(_SLOPE_SPAN, len(table) - 1)
    return np.array((table[-1] - table[-1 - span]) / max(span, 1))


@jit
def row(table, slope, index, column):
    """The entry of a one-dimensional table, continued with its last slope."""
    last = table.shape[0] - 1
    if index <= last:
        return table[index, column]
    return table[last, column] + (index - last) * slope[column]


@jit
def grid_cell(value, points):
    """(index, fraction) of a value on the axis of ``grid_value``; beyond the last cell: fraction > 1."""
    if value < 32:
        index, fraction = value, 0.0
    else:
        shift = math.frexp(float(value))[1] - 5
        index = (shift + 1) * 16 + (value >> shift) - 16
        fraction = (value - ((value >> shift) << shift)) / (1 << shift)
    if index < points - 1:
        return index, fraction
    low, high = _grid_value(points - 2), _grid_value(points - 1)
    return points - 2, (value - low) / (high - low)


@jit
def _grid_value(index):
    if index < 32:
        return index
    return (16 + index % 16) << (index // 16 - 1)


@jit
def bilinear(table, x, y):
    """The table at (x, y), both axes on ``grid_value``."""
    i, u = grid_cell(x, table.shape[0])
    j, v = grid_cell(y, table.shape[1])
    low = table[i, j] + v * (table[i, j + 1] - table[i, j])
    high = table[i + 1, j] + v * (table[i + 1, j + 1] - table[i + 1, j])
    return low + u * (high - low)


@jit
def decode_attention(cost, seqs, kv_tokens, prompts):
    """Seconds of one layer's decode attention in a step of so many prompts; 0 without sequences."""
    if seqs == 0:
        return 0.0
    if not cost.merged:
        seconds = bilinear(cost.decode, seqs, kv_tokens)
        if prompts > 0 and cost.has_beside:
            seconds *= bilinear(cost.mixed, seqs, kv_tokens)
        return seconds
    column = (kv_tokens // seqs + cost.step_tokens - 1) // cost.step_tokens
    factor = cost.merge_factor if seqs > 1 else 1.0
    return factor * stepped(cost.decode, seqs, column)


@jit
def prefill_attention(cost, chunk, context):
    """Seconds of one layer's attention for one prompt's chunk (rule PER_REQUEST)."""
    return bilinear(cost.prefill, chunk, context)


@jit
def merged_prefill_attention(cost, prompts, chunks_squared, context_steps):
    """Seconds of one layer's attention for all prompts of a step (rule MERGED); 0 without prompts."""
    if prompts == 0:
        return 0.0
    factor = cost.merge_factor if prompts > 1 else 1.0
    return factor * stepped(cost.prefill, int(math.sqrt(chunks_squared) + 0.5), context_steps)


@jit
def masked_attention(cost, queries, keys, own):
    """Seconds of one layer's pairs of queries and keys that are not ``own`` pairs of one sequence."""
    return cost.masked_s * (queries * keys - own)


@jit
def stepped(table, i, j):
    """The table's own entry, the last one beyond its end."""
    return table[min(i, table.shape[0] - 1), min(j, table.shape[1] - 1)]
