"""Seconds that a prompt takes alone on an idle replica, read from cost tables for many prompts at once."""

from __future__ import annotations

import numpy as np

from lengthwise.cost._lookup import end_slope
from lengthwise.schema.cost_tables import MERGED, CostTables, Floats, Ints, grid_axis


def prompt_seconds(cost: CostTables, prompt_tokens: Ints, cached_tokens: Ints, max_step_tokens: int) -> Floats:
    """Return the seconds [n] in which an idle replica computes prompts after their ``cached_tokens`` first tokens.

    A prompt is split into chunks of at most ``max_step_tokens``, each of which is a step through all pipeline stages.
    A prompt that is cached in full takes no time.
    """
    done, end = np.array(cached_tokens, np.int64), np.asarray(prompt_tokens, np.int64)
    seconds = np.zeros(len(end))
    rows = np.flatnonzero(done < end)
    while len(rows):
        chunk = np.minimum(end[rows] - done[rows], max_step_tokens)
        seconds[rows] += _chunk_seconds(cost, chunk, done[rows])
        done[rows] += chunk
        rows = rows[done[rows] < end[rows]]
    return seconds


def _chunk_seconds(cost: CostTables, chunk: Ints, context: Ints) -> Floats:
    last, total = len(cost.stage_layers) - 1, np.zeros(len(chunk))
    for stage, layers in enumerate(cost.stage_layers):
        is_other = cost.other is not None and cost.other.stages[stage]
        tables = cost.other.tables if cost.other is not None and is_other else cost
        total += layers * (_row(tables.layer_s, chunk) + _row(tables.comm_s, chunk) + _prefill(tables, chunk, context))
        total += layers * _row(tables.shared_s, chunk) if tables.shared_s is not None else 0.0
        if stage == 0:
            total += _row(tables.embedding_s, chunk) + tables.host_s[1]
        total += tables.head_s[1] if stage == last else _row(tables.send_s, chunk)
    return total


def _row(table: Floats, tokens: Ints) -> Floats:
    last = len(table) - 1
    return np.asarray(table[np.minimum(tokens, last)] + np.maximum(tokens - last, 0) * end_slope(table))


def _prefill(cost: CostTables, chunk: Ints, context: Ints) -> Floats:
    table = np.asarray(cost.prefill_s)
    if cost.rule.kind == MERGED:
        steps = -(-context // cost.rule.step_tokens)
        return np.asarray(table[np.minimum(chunk, table.shape[0] - 1), np.minimum(steps, table.shape[1] - 1)])
    return interpolated(table, chunk, context)


def interpolated(table: Floats, x: Ints | Floats, y: Ints | Floats) -> Floats:
    """Return the values [n] of a table at points (x, y) [n] of at least 0. Both axes have those of ``grid_value``."""
    i, u = _cell(x, table.shape[0])
    j, v = _cell(y, table.shape[1])
    low = table[i, j] + v * (table[i, j + 1] - table[i, j])
    high = table[i + 1, j] + v * (table[i + 1, j + 1] - table[i + 1, j])
    return np.asarray(low + u * (high - low))


def _cell(values: Ints | Floats, points: int) -> tuple[Ints, Floats]:
    axis = grid_axis(2**40)[:points]
    index = np.minimum(np.searchsorted(axis, values, side="right") - 1, points - 2)
    return index, (values - axis[index]) / (axis[index + 1] - axis[index])
