"""Tasks, leases and outputs as the ledger of a run stores them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any


class State(IntEnum):
    """State of a task. A task has finished if it is in one of the last four states."""

    WAITING = 0  # for parents
    READY = 1
    LEASED = 2
    DONE = 3
    SKIPPED = 4  # its condition is false, its loop has ended, or it has no list item or no output to work on
    DEAD = 5  # refused for good, or out of attempts; its last error is recorded
    BLOCKED = 6  # depends on a dead task


FINISHED = (State.DONE, State.SKIPPED, State.DEAD, State.BLOCKED)


@dataclass(frozen=True)
class Output:
    """A complete output. If it was interrupted and continued, ``output_tokens`` includes the earlier parts."""

    text: str
    finish_reason: str
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Partial:
    """The text of an interrupted output, and the token ids from which to continue, or () if they are unknown."""

    text: str
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Lease:
    """The right of one coordinator to work on a task, until the coordinator ends the lease or the lease expires.

    ``attempt`` counts from 1. Each later lease of a task has a larger ``fence``, so that earlier ones are outdated.
    """

    task: int
    fence: int
    attempt: int

    def ending(self, state: State, **fields: Any) -> Ending:
        """Return the record that ends this lease with ``state``. ``fields`` are further fields of ``Ending``."""
        return Ending(self.task, self.fence, state, **fields)


@dataclass(frozen=True)
class Ending:
    """The end of a lease, and the state in which it leaves the task."""

    task: int
    fence: int  # fence of the lease; if the lease is no longer valid, only the output is recorded, under its key
    state: State  # DONE (with key and output), SKIPPED, DEAD (with error), or READY (to be tried again, with error)
    key: str | None = None  # key of the request, in hex
    output: Output | None = None
    error: str | None = None  # cause of the failure
    not_before_s: float = 0.0  # time from which a READY task may be leased again
    counts: bool = True  # whether a READY task has used up an attempt; an interrupted task has not


@dataclass(frozen=True)
class TaskRow:
    """What the ledger stores about a task, for exports and status pages."""

    task: int
    state: State
    attempts: int
    key: str | None
    output: Output | None
    error: str | None
