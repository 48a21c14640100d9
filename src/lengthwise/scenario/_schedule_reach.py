"""How far a schedule's steps go beyond the measurements behind its cost tables, in words."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lengthwise.metrics import Beyond
from lengthwise.schedule import TaskLengths
from lengthwise.schema.cost_tables import CostTables
from lengthwise.schema.schedule_row import ScheduleRow


def reach_notes(
    row: ScheduleRow, task: TaskLengths, level: float, tables: Mapping[int, CostTables], gpus: int
) -> list[str]:
    """A sentence for each bound of its tables' reach (the least of its degrees) that the schedule passes.

    Args:
        row: The schedule.
        task: What it serves.
        level: Quantile of the lengths that a single request is taken at.
        tables: By tensor-parallel degree.
        gpus: GPUs in all.
    """
    had, notes = largest_of(row, task, level), []
    reaches = [tables[tp].reach for tp in _degrees(row, gpus) if tp in tables]
    for bound, largest in had.items():
        known = [most for reach in reaches if (most := getattr(reach, bound)) is not None]
        if known and largest > min(known):
            words = Beyond(bound, min(known), largest, 1, 1, "steps").words
            notes.append(
                f"The schedule's steps have more {words} (about {largest:,}) than the measurements behind the "
                f"cost tables reached ({min(known):,}): their times are extrapolated."
            )
    return notes


def largest_of(row: ScheduleRow, task: TaskLengths, level: float) -> dict[str, int]:
    """The largest step of a schedule in the mean, by the bounds of ``Reach``; a single request at the level's lengths.

    RRA cuts encodings and decode batches into ``micro_batches`` parts, WAA decode batches alone. A request in flight
    caches its prompt and half of its output, outputs weighted by how long they are in flight.
    """
    parts = max(1, row.micro_batches)
    encoded = max(1.0, row.encode_batch / (parts if row.strategy == "rra" else 1))
    decoded, prompt = row.decode_batch / parts, task.mean_prompt_tokens
    square = float(task.output_pmf @ np.arange(len(task.output_pmf), dtype=np.float64) ** 2)
    cached = prompt + square / (2 * task.mean_output_tokens)
    longest = task.prompt_quantile(level)
    return {
        "tokens": round(max(encoded * prompt, decoded)),
        "seqs": round(max(encoded, decoded)),
        "chunk": longest,
        "context": longest + task.output_quantile(level),
        "kv_tokens": round(max(encoded * prompt, decoded * cached)),
    }


def _degrees(row: ScheduleRow, gpus: int) -> set[int]:
    """Tensor-parallel degrees of its stages."""
    grouped = row.tp * row.tp_groups
    return ({row.tp} if grouped else set()) | ({1} if grouped < gpus else set())
