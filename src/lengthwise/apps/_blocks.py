"""Tasks of a call in a round of its loop, as a block of numbers, and what stands where in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lengthwise.schema.app_tasks import Ints


@dataclass(frozen=True, eq=False)
class Block:
    """Tasks of one call in one round, row by row.

    Attributes:
        call: Number of the call.
        round: Round of its loop.
        first: Number of the first task.
        start: [rows+1] where each row's tasks begin, from ``first``.
        model: [tasks] who is asked.
        index: [tasks] place within the row.
        prompt_tokens: [tasks] without what other calls put in.
        known_tokens: [tasks] of the output, 0 where not known.
        coin: [tasks] or -1.
        is_chain: Whether each task of a row waits for the one before it.
    """

    call: int
    round: int
    first: int
    start: Ints
    model: Ints
    index: Ints
    prompt_tokens: Ints
    known_tokens: Ints
    coin: Ints
    is_chain: bool

    def __len__(self) -> int:
        return len(self.model)

    @property
    def rows(self) -> Ints:
        """[tasks] the row of each."""
        return np.repeat(np.arange(len(self.start) - 1), np.diff(self.start))

    def of_row(self, row: int) -> range:
        """Numbers of a row's tasks."""
        return range(self.first + int(self.start[row]), self.first + int(self.start[row + 1]))

    def last_of_row(self, row: int) -> range:
        """The number of a row's last task; none where there is none."""
        return self.of_row(row)[-1:]


Edges = tuple[Ints, Ints]
"""(child, parent), by number."""


def to_all(child: Block, parent: Block) -> Edges:
    """From each task to all of its row in another block."""
    lengths = np.diff(parent.start)[child.rows]
    begins = parent.first + parent.start[child.rows]
    return _children(child, lengths), _ranges(begins, lengths)


def to_last(child: Block, parent: Block) -> Edges:
    """From each task to the last of its row in another block."""
    rows = child.rows
    there = np.flatnonzero(np.diff(parent.start)[rows] > 0)
    return child.first + there, parent.first + parent.start[rows[there] + 1] - 1


def along(block: Block) -> Edges:
    """From each task of a chain to the one before it."""
    later = np.flatnonzero(block.index > 0)
    return block.first + later, block.first + later - 1


def _children(child: Block, lengths: Ints) -> Ints:
    return np.repeat(child.first + np.arange(len(child)), lengths)


def _ranges(begins: Ints, lengths: Ints) -> Ints:
    """begins[0], begins[0]+1, ..., one run of so many for each."""
    total = int(lengths.sum())
    offset = np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.repeat(begins, lengths) + np.arange(total) - offset
