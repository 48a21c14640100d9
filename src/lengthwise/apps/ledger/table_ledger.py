"""The ledger on tables of a database: one rule for all stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from lengthwise.apps.ledger.contracts import Ending, Lease, Output, Partial, State, TaskRow
from lengthwise.apps.ledger.postgres_store import PostgresStore
from lengthwise.apps.ledger.sql_store import (
    EDGE_COLUMNS,
    TASK_COLUMNS,
    Session,
    SqliteStore,
    Store,
    edge_rows,
    edges,
    pages,
    statements,
    task_rows,
)
from lengthwise.schema.app import Tasks
from lengthwise.schema.errors import InputError


def packed(text: str) -> bytes:
    """Any text, as UTF-8 that ``unpacked`` turns back into the same."""
    return text.encode("utf-8", "surrogatepass")


def unpacked(data: bytes) -> str:
    """The text of ``packed``."""
    return bytes(data).decode("utf-8", "surrogatepass")


def packed_ids(ids: Sequence[int]) -> bytes:
    """Tokens, eight bytes each."""
    return np.asarray(ids, "<i8").tobytes()


def unpacked_ids(data: bytes) -> tuple[int, ...]:
    """The tokens of ``packed_ids``."""
    return tuple(np.frombuffer(bytes(data), "<i8").tolist())


def output_of(text: bytes, finish_reason: str, prompt_tokens: int, output_tokens: int) -> Output:
    """An answer, of the columns of ``results``."""
    return Output(unpacked(text), finish_reason, prompt_tokens, output_tokens)


def partial_of(text: bytes, prompt_ids: bytes, output_ids: bytes) -> Partial:
    """An answer so far, of the columns of ``partials``."""
    return Partial(unpacked(text), unpacked_ids(prompt_ids), unpacked_ids(output_ids))


def task_row(task: int, state: int, attempts: int, key: str | None, error: Any, *answer: Any) -> TaskRow:
    """A task, of the columns of ``tasks`` and those of its answer (none: the first is None)."""
    told = None if error is None else unpacked(error)
    return TaskRow(task, State(state), attempts, key, None if answer[0] is None else output_of(*answer), told)


_POSSIBLE = (State.DONE, State.SKIPPED, State.DEAD, State.READY)


@dataclass
class Writes:
    """What one batch of endings writes.

    Attributes:
        accepted: For each ending, whether it ended the task's last lease.
        answers: Key to a row of ``results``.
        moving: Rows (state, whether it counts as an attempt, key, error, not before, task).
        passed: Tasks whose children need not wait for them any more.
        dead: Tasks behind which all is blocked.
    """

    accepted: list[bool] = field(default_factory=list)
    answers: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    moving: list[tuple[Any, ...]] = field(default_factory=list)
    passed: list[int] = field(default_factory=list)
    dead: list[int] = field(default_factory=list)


def check_endings(endings: Sequence[Ending]) -> None:
    """Raises InputError unless every ending says what its state needs."""
    for ending in endings:
        if ending.state not in _POSSIBLE:
            raise InputError(
                f"a lease ends DONE, SKIPPED, DEAD or READY; task {ending.task} came with "
                f"{State(ending.state).name}: it is the ledger that makes tasks so"
            )
        answered = bool(ending.key) and ending.output is not None
        if answered != (ending.state == State.DONE):
            raise InputError(
                f"a DONE task has a key and an output, and no other has an output; task {ending.task} came as "
                f"{State(ending.state).name} with key {ending.key!r} and {'an' if ending.output else 'no'} output"
            )


def writes_of(endings: Sequence[Ending], reserved: Mapping[int, int]) -> Writes:
    """What the endings change.

    Args:
        endings: Checked.
        reserved: Fences of those of their tasks that are leased.
    """
    found, open_leases = Writes(), dict(reserved)
    for ending in endings:
        if ending.key and ending.output is not None:
            found.answers.setdefault(ending.key, _answer(ending))
        fits = open_leases.get(ending.task) == ending.fence
        found.accepted.append(fits)
        if fits:
            del open_leases[ending.task]
            _move(found, ending)
    return found


def _move(found: Writes, ending: Ending) -> None:
    counts = ending.state in {State.DONE, State.DEAD} or (ending.state == State.READY and ending.counts)
    error = None if ending.error is None else packed(ending.error)
    found.moving.append((int(ending.state), int(counts), ending.key, error, float(ending.not_before_s), ending.task))
    if ending.state in {State.DONE, State.SKIPPED}:
        found.passed.append(ending.task)
    elif ending.state == State.DEAD:
        found.dead.append(ending.task)


def _answer(ending: Ending) -> tuple[Any, ...]:
    output = ending.output
    assert output is not None
    return (ending.key, packed(output.text), output.finish_reason, output.prompt_tokens, output.output_tokens)


_PAGE = 5_000


class TableLedger:
    """A ``Ledger`` on a store; ``open_ledger`` makes one.

    May be called from several threads, one at a time goes in. Attempts are those that ended and count: a lease that
    ran out is no attempt, since it says more of its owner than of the task.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._sql = statements(store.dialect)

    @property
    def where(self) -> str:
        """The place, for people; without a password."""
        return self._store.where

    def open(self, identity: str, tasks: Tasks) -> bool:
        """Lays the tasks out; True if they were there already, under the same identity (a resumed run).

        Another identity lays them out anew and keeps all results; leases of before end nothing any more.

        Raises:
            InputError: The identity is empty, or tells no difference between these tasks and others.
        """
        if not identity:
            raise InputError("the identity of a run must be a text that is not empty")
        return self._store.write(lambda session: self._opened(session, identity, tasks))

    def _opened(self, session: Session, identity: str, tasks: Tasks) -> bool:
        ((known, count, fence),) = session.rows(self._sql["run"])
        if known != identity:
            ((last,),) = session.rows(self._sql["fence"])
            self._lay_out(session, identity, tasks, max(fence, last or 0))
        elif count != len(tasks):
            raise InputError(
                f"one identity must stand for one list of tasks; {self.where} has {count} tasks under it, "
                f"{len(tasks)} came: put all that decides the tasks into the identity"
            )
        return bool(known == identity)

    def _lay_out(self, session: Session, identity: str, tasks: Tasks, fence: int) -> None:
        dialect = self._store.dialect
        for statement in dialect.empty:
            session.changed(statement)
        parents, children = edges(tasks)
        session.load("tasks", TASK_COLUMNS, task_rows(tasks, children, fence))
        session.load("edges", EDGE_COLUMNS, edge_rows(parents, children))
        for statement in dialect.laid_out:
            session.changed(statement)
        session.changed(self._sql["begin"], identity, len(tasks), fence)

    def lease(self, model: int, most: int, *, owner: str, now_s: float, lease_s: float) -> list[Lease]:
        """The first ready tasks of a model by number; never one that another holds."""
        if most <= 0:
            return []
        values = (int(model), now_s, most, owner, now_s + lease_s)
        found = self._store.write(lambda session: session.rows(self._sql["lease"], *values))
        return [Lease(task, fence, attempts + 1) for task, fence, attempts in sorted(found)]

    def heartbeat(self, owner: str, *, now_s: float, lease_s: float) -> int:
        """Lets all leases of an owner that have not been taken from it end ``lease_s`` from now; how many.

        With ``lease_s=0`` it gives them back: the next ``expire`` makes them ready.
        """
        return self._change("heartbeat", now_s + lease_s, owner)

    def expire(self, *, now_s: float) -> int:
        """Makes tasks of leases that ran out ready again; how many."""
        return self._change("expire", now_s)

    def finalize(self, endings: Sequence[Ending]) -> list[bool]:
        """Ends leases; False for each that was not the task's last lease, or had ended.

        Raises:
            InputError: An ending lacks what its state needs; nothing of the batch is kept.
        """
        check_endings(endings)
        return self._store.write(lambda session: self._stable(session, endings)) if endings else []

    def _stable(self, session: Session, endings: Sequence[Ending]) -> list[bool]:
        held = session.rows(self._sql["reserved"], sorted({ending.task for ending in endings}))
        writes = writes_of(endings, dict(held))
        if writes.answers:
            session.many(self._store.dialect.answers, [writes.answers[key] for key in sorted(writes.answers)])
            session.changed(self._sql["effort"], list(writes.answers))
        if writes.moving:
            session.many(self._store.dialect.moving, writes.moving)
        if writes.passed:
            if self._store.dialect.lock:
                session.rows(self._sql["children"], writes.passed)
            session.changed(self._sql["free"], writes.passed)
        if writes.dead:
            session.changed(self._sql["block"], writes.dead)
        return writes.accepted

    def results(self, keys: Sequence[str]) -> dict[str, Output]:
        """The answers that there are."""
        return {key: output_of(*answer) for key, *answer in self._paged("results", keys)}

    def outputs(self, tasks: Sequence[int]) -> dict[int, Output | None]:
        """The answers of tasks that are DONE; None of SKIPPED ones; others are left out."""
        found = self._paged("outputs", [int(task) for task in tasks])
        return {task: output_of(*answer) if state == State.DONE else None for task, state, *answer in found}

    def save(self, partials: Sequence[tuple[str, Partial]]) -> None:
        """Keeps answers so far, by key, until the key has a result."""
        rows: list[tuple[Any, ...]] = [
            (key, packed(part.text), packed_ids(part.prompt_ids), packed_ids(part.output_ids))
            for key, part in sorted(dict(partials).items(), key=lambda item: item[0])
        ]
        if rows:
            self._store.write(lambda session: session.many(self._store.dialect.partials, rows))

    def partials(self, keys: Sequence[str]) -> dict[str, Partial]:
        """What was saved last."""
        return {key: partial_of(*rest) for key, *rest in self._paged("partials", keys)}

    def counts(self) -> dict[tuple[int, State], int]:
        """Tasks by call and state; they add up to all."""
        found = self._store.read(lambda session: session.rows(self._store.dialect.counts))
        return {(call, State(state)): tasks for call, state, tasks in sorted(found)}

    def rows(self, first: int, most: int) -> list[TaskRow]:
        """Tasks from a number on, in order."""
        found = self._store.read(lambda session: session.rows(self._sql["rows"], int(first), max(0, most)))
        return [task_row(*row) for row in found]

    def lengths(self) -> list[tuple[int, State, int, int]]:
        """(task, state, prompt tokens, output tokens) of all that have ended, in order; no tokens without an answer."""
        found = self._store.read(lambda session: session.rows(self._sql["lengths"]))
        return [(task, State(state), prompt, output) for task, state, prompt, output in found]

    def sums(self) -> list[tuple[int, int, int]]:
        """(call, attempts, output tokens of answers) of each call, in order."""
        found = self._store.read(lambda session: session.rows(self._sql["sums"]))
        return [(int(call), int(attempts), int(tokens)) for call, attempts, tokens in found]

    def metadata(self) -> dict[str, str]:
        """What was noted beside the tasks (``note``)."""
        found = self._store.read(lambda session: session.rows(self._sql["metadata"]))
        return {name: unpacked(value) for name, value in found}

    def note(self, metadata: dict[str, str]) -> None:
        """Notes facts by name; an empty text removes one."""
        kept: list[tuple[Any, ...]] = [(n, packed(metadata[n])) for n in sorted(metadata) if metadata[n]]
        gone = sorted(name for name, value in metadata.items() if not value)

        def work(session: Session) -> None:
            session.changed(self._sql["discard"], gone)
            session.many(self._store.dialect.metadata, kept)

        if metadata:
            self._store.write(work)

    def _change(self, name: str, *values: Any) -> int:
        return self._store.write(lambda session: session.changed(self._sql[name], *values))

    def _paged(self, name: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        def work(session: Session) -> list[tuple[Any, ...]]:
            return [row for page in pages(values, _PAGE) for row in session.rows(self._sql[name], page)]

        return self._store.read(work)

    def close(self) -> None:
        """Lets go of the store."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


FILE = "ledger.sqlite"
"""The ledger's name in a folder."""
TIMEOUT_S = 30.0


def open_ledger(place: str | Path, *, read_only: bool = False, timeout_s: float = TIMEOUT_S) -> TableLedger:
    """The ledger at a place; made where there is none, unless it is opened to be read.

    Args:
        place: A file, a folder (``ledger.sqlite`` in it), or ``postgresql://user@host/database?schema=NAME``
            for several coordinators; each run has a schema of its own ("lengthwise" by default), which is made.
        read_only: For a look from beside while another process runs.
        timeout_s: How long to wait for others who write.

    Raises:
        InputError: What is there is no ledger, a newer lengthwise's, or another program's; or nothing is there
            to be read.
        OutputError: It cannot be written or reached.
        MissingExtraError: A PostgreSQL URL without the extra ``postgres``.
    """
    return TableLedger(_store(str(place), read_only, timeout_s))


def _store(place: str, read_only: bool, timeout_s: float) -> Store:
    if place.startswith(("postgresql://", "postgres://")):
        return PostgresStore(place, read_only=read_only, timeout_s=timeout_s)
    if "://" in place:
        raise InputError(
            f"a ledger is kept in a file or at postgresql://...; {place.rpartition('@')[2]!r} came: name one of these"
        )
    path = Path(place)
    return SqliteStore(path / FILE if path.is_dir() else path, read_only=read_only, timeout_s=timeout_s)
