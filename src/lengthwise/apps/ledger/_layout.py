"""Tasks as rows of a table, a chunk at a time: a million of them never stand in memory as objects."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from lengthwise.schema.app_tasks import Tasks

Ints = npt.NDArray[np.int64]
Chunk = list[tuple[int, ...]]
CHUNK = 20_000

TASK_COLUMNS = ("task", "call", "model", "state", "pending", "fence")
EDGE_COLUMNS = ("parent", "child")


def edges(tasks: Tasks) -> tuple[Ints, Ints]:
    """(parents, children), each pair once, in the order of parents: a table in the order of its key only grows."""
    children = np.repeat(np.arange(len(tasks)), np.diff(tasks.parent_start))
    pairs = np.unique(tasks.parent * max(1, len(tasks)) + children)
    return pairs // max(1, len(tasks)), pairs % max(1, len(tasks))


def task_rows(tasks: Tasks, children: Ints, fence: int) -> Iterator[Chunk]:
    """Rows of ``TASK_COLUMNS``: ready (1) without parents, else waiting (0) for so many.

    Args:
        tasks: All of them.
        children: Of the pairs of ``edges``.
        fence: Above those of all leases that there were, so that no old one fits a new task.
    """
    pending = np.bincount(children, minlength=len(tasks))
    for first in range(0, len(tasks), CHUNK):
        part = slice(first, min(first + CHUNK, len(tasks)))
        size = part.stop - part.start
        columns = (np.arange(part.start, part.stop), tasks.call[part], tasks.model[part], pending[part] == 0)
        numbers = [column.astype(np.int64).tolist() for column in (*columns, pending[part])]
        yield list(zip(*numbers, [fence] * size, strict=True))


def edge_rows(parents: Ints, children: Ints) -> Iterator[Chunk]:
    """Rows of ``EDGE_COLUMNS``."""
    for first in range(0, len(parents), CHUNK):
        part = slice(first, first + CHUNK)
        yield list(zip(parents[part].tolist(), children[part].tolist(), strict=True))
