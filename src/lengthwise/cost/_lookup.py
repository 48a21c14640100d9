"""Reads cost tables in compiled code; ``engine.step_time`` reads them in plain Python, with equal results."""

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
    """Cost tables as arrays for compiled code. The slopes continue the tables beyond their last row."""

    by_tokens: Floats  # columns: layer, comm, (token) embedding, send
    tokens_slope: Floats
    by_seqs: Floats  # columns: head, host
    seqs_slope: Floats
    prefill: Floats
    decode: Floats
    stage_layers: Floats
    merged: bool
    context_unit_tokens: int  # contexts are rounded up to multiples of it (rule MERGED)
    merge_factor: float
    beside_prompts: Floats
    has_beside_prompts: bool
    masked_s: float


def pack(cost: CostTables) -> PackedCost:
    """Return the cost tables in the layout for compiled code."""
    by_tokens = np.column_stack([cost.layer_s, cost.comm_s, cost.embedding_s, cost.send_s])
    by_seqs = np.column_stack([cost.head_s, cost.host_s])
    return PackedCost(
        np.ascontiguousarray(by_tokens),
        end_slope(by_tokens),
        np.ascontiguousarray(by_seqs),
        end_slope(by_seqs),
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


def end_slope(table: Floats) -> Floats:
    """Return the growth of each column per row, over the last rows of a table."""
    span = min(_SLOPE_SPAN, len(table) - 1)
    return np.array((table[-1] - table[-1 - span]) / max(span, 1))


@jit
def entry(table, slope, index, column):
    """Return the entry of one column of a table over one variable. Beyond the end, the last slope continues."""
    last = table.shape[0] - 1
    if index <= last:
        return table[index, column]
    return table[last, column] + (index - last) * slope[column]


@jit
def grid_cell(value, points):
    """Return the cell of an axis in which a number lies, and the fraction within the cell.

    The axis has the first ``points`` values of ``grid_value``. Beyond its end the fraction exceeds 1.
    """
    if value < 32:
        index = int(value)
        fraction = float(value - index)
    else:
        shift = math.frexp(float(value))[1] - 5
        scaled = value / (1 << shift)
        index = (shift + 1) * 16 + int(scaled) - 16
        fraction = scaled - int(scaled)
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
    """Return the interpolated value of a table at (x, y). Both axes have the points of ``grid_value``."""
    i, u = grid_cell(x, table.shape[0])
    j, v = grid_cell(y, table.shape[1])
    low = table[i, j] + v * (table[i, j + 1] - table[i, j])
    high = table[i + 1, j] + v * (table[i + 1, j + 1] - table[i + 1, j])
    return low + u * (high - low)


@jit
def decode_attention(cost, seqs, kv_tokens, prompts):
    """Return the seconds of one layer's decode attention in a step with ``prompts`` prompts, or 0 if ``seqs`` is 0."""
    if seqs == 0:
        return 0.0
    if not cost.merged:
        seconds = bilinear(cost.decode, seqs, kv_tokens)
        if prompts > 0 and cost.has_beside_prompts:
            seconds *= bilinear(cost.beside_prompts, seqs, kv_tokens)
        return seconds
    context_units = (kv_tokens // seqs + cost.context_unit_tokens - 1) // cost.context_unit_tokens
    factor = cost.merge_factor if seqs > 1 else 1.0
    return factor * entry_2d(cost.decode, seqs, context_units)


@jit
def prefill_attention(cost, chunk, context):
    """Return the seconds of one layer's attention for one prompt's chunk (rule PER_REQUEST)."""
    return bilinear(cost.prefill, chunk, context)


@jit
def merged_prefills(cost, prompts, chunks_squared, context_units):
    """Return the seconds of one layer's attention for all prompts of a step, by the sum of their squared chunks."""
    if prompts == 0:
        return 0.0
    factor = cost.merge_factor if prompts > 1 else 1.0
    return factor * entry_2d(cost.prefill, int(math.sqrt(chunks_squared) + 0.5), context_units)


@jit
def masked_attention(cost, queries, keys, own):
    """Return a layer's seconds for the (query, key) pairs that a dense mask discards: all pairs but ``own``."""
    return cost.masked_s * (queries * keys - own)


@jit
def entry_2d(table, i, j):
    """Return the entry of a table without interpolation. Beyond an end, this is the last entry."""
    return table[min(i, table.shape[0] - 1), min(j, table.shape[1] - 1)]
