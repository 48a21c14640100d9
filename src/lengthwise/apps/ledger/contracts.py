"""The ledger of a run: whatever process dies, no output is lost and none is recorded twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from lengthwise.schema.app import Tasks


class State(IntEnum):
    """State of a task; it finishes in exactly one of the last four."""

    WAITING = 0
    """For parents."""
    READY = 1
    LEASED = 2
    DONE = 3
    SKIPPED = 4
    """A branch that was not taken, or a round that was not needed."""
    DEAD = 5
    """Out of attempts; its last error is recorded."""
    BLOCKED = 6
    """Waits for a dead task."""


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


class Ledger(Protocol):
    """Tasks, leases and outputs on disk. Times are wall-clock seconds (UTC) of the caller.

    Every method that changes the ledger is one atomic transaction, is durable when it returns, and may be repeated
    after a crash.
    """

    def open(self, identity: str, tasks: Tasks) -> bool:
        """Insert the tasks; return True if they are there already, under the same identity (a resumed run).

        Another identity (the application or its inputs changed) replaces the tasks and keeps all outputs.
        """
        ...

    def lease(self, model: int, most: int, *, owner: str, now_s: float, lease_s: float) -> list[Lease]:
        """Lease the first ready tasks of a model, by number; never a task that is leased already."""
        ...

    def heartbeat(self, owner: str, *, now_s: float, lease_s: float) -> int:
        """Let all unexpired leases of an owner end ``lease_s`` from now; return their number."""
        ...

    def expire(self, *, now_s: float) -> int:
        """Make the tasks of expired leases ready again; return their number."""
        ...

    def finalize(self, endings: Sequence[Ending]) -> list[bool]:
        """End leases; return False for each that was not the task's last lease, or had ended.

        The last finished parent makes a WAITING child READY; a DEAD task blocks all tasks behind it. The first output
        of a key stays, whichever lease brought it.
        """
        ...

    def results(self, keys: Sequence[str]) -> dict[str, Output]:
        """Return the known outputs by key."""
        ...

    def outputs(self, tasks: Sequence[int]) -> dict[int, Output | None]:
        """Return the outputs of DONE tasks, and None of SKIPPED ones; the others have no entry."""
        ...

    def save(self, partials: Sequence[tuple[str, Partial]]) -> None:
        """Save interrupted outputs by key, until the key has an output."""
        ...

    def partials(self, keys: Sequence[str]) -> dict[str, Partial]:
        """Return the last saved interrupted output of each key."""
        ...

    def counts(self) -> dict[tuple[int, State], int]:
        """Return the tasks by call and state."""
        ...

    def rows(self, first: int, most: int) -> list[TaskRow]:
        """Return tasks from a number on, in order."""
        ...

    def lengths(self) -> list[tuple[int, State, int, int]]:
        """Return (task, state, prompt tokens, output tokens) of all finished tasks, in order; 0 without an output."""
        ...

    def sums(self) -> list[tuple[int, int, int]]:
        """Return (call, attempts, output tokens) of each call, in order."""
        ...

    def metadata(self) -> dict[str, str]:
        """Return the facts by name: the application, versions, coordinators (see ``note``)."""
        ...

    def note(self, metadata: dict[str, str]) -> None:
        """Store facts by name; "" removes one."""
        ...

    def close(self) -> None:
        """Close the store."""
        ...
