"""Cost tables of one tensor-parallel degree as compiled code reads them, at amounts that need not be whole.

What is expected of a batch is rarely a whole number, so tables are read between their entries. ``cost._lookup``
reads the same axis at whole amounts, by their bits; these are not whole.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lengthwise._jit import jit, jit_cold

Floats = npt.NDArray[np.float64]


class DegreeTables(NamedTuple):
    """One degree's tables.

    ``by_tokens`` columns: layer with its collectives, first, send. ``by_seqs``: head, host. ``prompt``: of one
    prompt the mean tokens, mean square, variance of tokens, mean attention seconds of a layer, their
    covariance with tokens and variance; attention is 0 there where the tables merge prompts.
    """

    by_tokens: Floats
    tokens_slope: Floats
    by_seqs: Floats
    seqs_slope: Floats
    prefill: Floats
    decode: Floats
    prompt: Floats
    merged: bool
    step_tokens: int
    merge_factor: float
    masked_s: float


@jit
def at(table, slope, amount, column):
    """The table between its entries, and beyond the last one with its last slope."""
    last = table.shape[0] - 1
    if amount >= last:
        return table[last, column] + (amount - last) * slope[column]
    index = int(amount)
    low = table[index, column]
    return low + (amount - index) * (table[index + 1, column] - low)


@jit
def _cell(value, points):
    """(index, fraction) of a value on the axis of ``schema.cost_tables.grid_value``."""
    if value < 32.0:
        index = int(value)
        fraction = value - index
    else:
        shift = math.frexp(value)[1] - 5
        scaled = value / (1 << shift)
        whole = int(scaled)
        index = (shift + 1) * 16 + whole - 16
        fraction = scaled - whole
    if index < points - 1:
        return index, fraction
    low, high = _grid(points - 2), _grid(points - 1)
    return points - 2, (value - low) / (high - low)


@jit
def _grid(index):
    if index < 32:
        return index
    return (16 + index % 16) << (index // 16 - 1)


@jit
def _between(table, x, y):
    i, u = _cell(x, table.shape[0])
    j, v = _cell(y, table.shape[1])
    low = table[i, j] + v * (table[i, j + 1] - table[i, j])
    high = table[i + 1, j] + v * (table[i + 1, j + 1] - table[i + 1, j])
    return low + u * (high - low)


@jit
def _stepped(table, i, j):
    return table[min(i, table.shape[0] - 1), min(j, table.shape[1] - 1)]


@jit
def decode_attention_s(t, seqs, kv_tokens):
    """One layer's decode attention."""
    masked = t.masked_s * max(seqs - 1.0, 0.0) * kv_tokens
    if not t.merged:
        return _between(t.decode, seqs, kv_tokens) + masked
    factor = t.merge_factor if seqs > 1.0 else 1.0
    column = math.ceil(kv_tokens / seqs / t.step_tokens)
    whole = int(seqs)
    low, high = _stepped(t.decode, whole, column), _stepped(t.decode, whole + 1, column)
    return factor * (low + (seqs - whole) * (high - low)) + masked


@jit
def encode_attention_s(t, seqs):
    """One layer's attention of so many prompts, expected over their lengths."""
    mean = t.prompt[0]
    masked = t.masked_s * max(seqs * (seqs - 1.0), 0.0) * mean * mean
    if not t.merged:
        return seqs * t.prompt[3] + masked
    factor = t.merge_factor if seqs > 1.0 else 1.0
    return factor * _stepped(t.prefill, int(math.sqrt(seqs * t.prompt[1]) + 0.5), 0) + masked


@jit_cold
def encode_layer_s(t, seqs, share):
    """One layer's seconds for ``seqs`` prompts; ``share`` of its matrix products is done here."""
    tokens = seqs * t.prompt[0]
    return share * at(t.by_tokens, t.tokens_slope, tokens, 0) + encode_attention_s(t, seqs)


@jit_cold
def decode_layer_s(t, seqs, kv_tokens, more_tokens, share):
    """One layer's seconds for one token of ``seqs`` sequences; 0 without.

    ``share`` of its matrix products over ``more_tokens`` newly encoded ones comes on top.
    """
    if seqs <= 0.0:
        return 0.0
    layer = at(t.by_tokens, t.tokens_slope, seqs, 0) + decode_attention_s(t, seqs, kv_tokens)
    if share > 0.0 and more_tokens > 0.0:
        layer += share * at(t.by_tokens, t.tokens_slope, more_tokens, 0)
    return layer


@jit_cold
def ends_s(t, seqs, tokens, first, last):
    """What only the first stage, only the last, and all but the last have; 0 without sequences."""
    if seqs <= 0.0:
        return 0.0
    seconds = 0.0
    if first > 0.0:
        seconds += at(t.by_tokens, t.tokens_slope, tokens, 1) + at(t.by_seqs, t.seqs_slope, seqs, 1)
    if last > 0.0:
        return seconds + at(t.by_seqs, t.seqs_slope, seqs, 0)
    return seconds + at(t.by_tokens, t.tokens_slope, tokens, 2)


@jit_cold
def encode_deviation_s(t, seqs, share, layers):
    """Standard deviation of a stage's seconds for ``seqs`` prompts: independent ones, linear near the mean."""
    tokens = seqs * t.prompt[0]
    step = 0.01 * tokens + 1.0
    ahead = at(t.by_tokens, t.tokens_slope, tokens + step, 0) - at(t.by_tokens, t.tokens_slope, tokens, 0)
    slope = share * ahead / step
    variance = slope * slope * t.prompt[2] + 2.0 * slope * t.prompt[4] + t.prompt[5]
    return layers * math.sqrt(max(variance, 0.0) * seqs)
