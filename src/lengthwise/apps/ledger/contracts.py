"""What a ledger keeps of a run, and what it promises: whatever dies, nothing is lost and nothing doubled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from lengthwise.schema.app import Tasks


class State(IntEnum):
    """Where a task is. It ends in exactly one of the last four."""

    WAITING = 0
    """For parents."""
    READY = 1
    LEASED = 2
    DONE = 3
    SKIPPED = 4
    """A branch that was not taken, a round that was not needed."""
    DEAD = 5
    """Tried so often that it is left alone, its last error kept."""
    BLOCKED = 6
    """Behind a dead one."""


FINISHED = (State.DONE, State.SKIPPED, State.DEAD, State.BLOCKED)


@dataclass(frozen=True)
class Output:
    """An answer.

    Attributes:
        text: What the model said.
        finish_reason: "stop" or "length".
        prompt_tokens: As the engine counts them.
        output_tokens: As the engine counts them, over all attempts that it was continued from.
    """

    text: str
    finish_reason: str
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Partial:
    """An answer so far, of a generation that was cut off.

    ``prompt_ids`` and ``output_ids`` are the engine's own tokens, which a continuation is asked with; none where the
    engine does not tell them.
    """

    text: str
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Lease:
    """The right to work on a task until it runs out; ``fence`` grows with every lease of the task."""

    task: int
    fence: int
    attempt: int


@dataclass(frozen=True)
class Ending:
    """What came of a lease.

    Attributes:
        task: Whose.
        fence: Of the lease; of a stale one only the output is kept, by its key.
        state: DONE (with key and output), SKIPPED, DEAD (with error), or READY: to be tried again (with error), from
            ``not_before_s`` on.
        key: Of the request, in hex.
        output: The answer.
        error: Why it failed.
        not_before_s: When it may be leased again.
        counts: Whether a READY one counts as an attempt; a preempted one does not.
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
    """A task as it stands, for exports and status pages."""

    task: int
    state: State
    attempts: int
    key: str | None
    output: Output | None
    error: str | None


class Ledger(Protocol):
    """Kept on disk. Times are wall-clock seconds (UTC), handed in. All methods may be called again after a crash.

    Every method that changes something is one transaction: all of it or nothing, and durable when it returns.
    """

    def open(self, identity: str, tasks: Tasks) -> bool:
        """Lays the tasks out; True if they were there already, under the same identity (a resumed run).

        Another identity (the application or its inputs changed) lays them out anew and keeps all results.
        """
        ...

    def lease(self, model: int, most: int, *, owner: str, now_s: float, lease_s: float) -> list[Lease]:
        """The first ready tasks of a model by number; never one that another holds."""
        ...

    def heartbeat(self, owner: str, *, now_s: float, lease_s: float) -> int:
        """Prolongs all leases of an owner that have not been taken from it; how many."""
        ...

    def expire(self, *, now_s: float) -> int:
        """Makes tasks of leases that ran out ready again; how many."""
        ...

    def finalize(self, endings: Sequence[Ending]) -> list[bool]:
        """Ends leases; False for each that was not the task's last lease, or had ended.

        A DONE or SKIPPED task makes children ready that waited for it last; one that is DEAD blocks all behind it. A
        result of a key that has one already is dropped: the first one stays, whoever brought it.
        """
        ...

    def results(self, keys: Sequence[str]) -> dict[str, Output]:
        """The answers that there are."""
        ...

    def outputs(self, tasks: Sequence[int]) -> dict[int, Output | None]:
        """The answers of tasks that are DONE; None of SKIPPED ones; others are left out."""
        ...

    def save(self, partials: Sequence[tuple[str, Partial]]) -> None:
        """Keeps answers so far, by key, until the key has a result."""
        ...

    def partials(self, keys: Sequence[str]) -> dict[str, Partial]:
        """What was saved last."""
        ...

    def counts(self) -> dict[tuple[int, State], int]:
        """Tasks by call and state; they add up to all."""
        ...

    def rows(self, first: int, most: int) -> list[TaskRow]:
        """Tasks from a number on, in order."""
        ...

    def lengths(self) -> list[tuple[int, State, int, int]]:
        """(task, state, prompt tokens, output tokens) of all that have ended, in order; no tokens without an answer."""
        ...

    def sums(self) -> list[tuple[int, int, int]]:
        """(call, attempts, output tokens of answers) of each call, in order."""
        ...

    def metadata(self) -> dict[str, str]:
        """What was noted beside the tasks (``note``): the application, versions, who runs."""
        ...

    def note(self, metadata: dict[str, str]) -> None:
        """Notes facts by name; an empty text removes one."""
        ...

    def close(self) -> None:
        """Lets go of the store."""
        ...
