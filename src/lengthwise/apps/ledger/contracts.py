"""Tasks, leases and outputs as the ledger of a run has them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any


class State(IntEnum):
    """State of a task; it finishes in exactly one of the last four."""

    WAITING = 0  # for parents
    READY = 1
    LEASED = 2
    DONE = 3
    SKIPPED = 4  # a branch that was not taken, or a round that was not needed
    DEAD = 5  # out of attempts; its last error is recorded
    BLOCKED = 6  # waits for a dead task


FINISHED = (State.DONE, State.SKIPPED, State.DEAD, State.BLOCKED)


@dataclass(frozen=True)
class Output:
    """An output; tokens as the engine counts them, over all attempts that it continues."""

    text: str
    finish_reason: str
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Partial:
    """An interrupted output with the engine's token ids, from which it is continued; () if they are unknown."""

    text: str
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Lease:
    """The right to work on a task until it expires; ``fence`` grows with every lease of the task."""

    task: int
    fence: int
    attempt: int

    def ending(self, state: State, **fields: Any) -> Ending:
        """Return its end; ``fields`` as of ``Ending``."""
        return Ending(self.task, self.fence, state, **fields)


@dataclass(frozen=True)
class Ending:
    """The end of a lease.

    Attributes:
        fence: Of the lease; of a stale lease only the output is recorded, by its key.
        state: DONE (with key and output), SKIPPED, DEAD (with error), or READY: to be tried again (with error).
        key: Of the request, in hex.
        error: Why it failed.
        not_before_s: When a READY task may be leased again.
        counts: Whether a READY one has used up an attempt; a preempted one has not.
    """

    task: int
    fence: int
    state: State
    key: str | None = None
    output: Output | None = None
    error: str | None = None
    not_before_s: float = 0.0
    counts: bool = True


@dataclass(frozen=True)
class TaskRow:
    """A task, for exports and status pages."""

    task: int
    state: State
    attempts: int
    key: str | None
    output: Output | None
    error: str | None
