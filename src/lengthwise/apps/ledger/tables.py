"""The ledger on tables of a database: one rule for all stores."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from lengthwise.apps.ledger import _endings, _texts
from lengthwise.apps.ledger._layout import EDGE_COLUMNS, TASK_COLUMNS, edge_rows, edges, task_rows
from lengthwise.apps.ledger._sql import Session, Store, pages, statements
from lengthwise.apps.ledger.contracts import Ending, Lease, Output, Partial, State, TaskRow
from lengthwise.schema.app_tasks import Tasks
from lengthwise.schema.errors import InputError

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

    def beat(self, owner: str, *, now_s: float, lease_s: float) -> int:
        """Lets all leases of an owner that have not been taken from it end ``lease_s`` from now; how many.

        With ``lease_s=0`` it gives them back: the next ``expire`` makes them ready.
        """
        return self._change("beat", now_s + lease_s, owner)

    def expire(self, *, now_s: float) -> int:
        """Makes tasks of leases that ran out ready again; how many."""
        return self._change("expire", now_s)

    def settle(self, endings: Sequence[Ending]) -> list[bool]:
        """Ends leases; False for each that was not the task's last lease, or had ended.

        Raises:
            InputError: An ending lacks what its state needs; nothing of the batch is kept.
        """
        _endings.check(endings)
        return self._store.write(lambda session: self._settled(session, endings)) if endings else []

    def _settled(self, session: Session, endings: Sequence[Ending]) -> list[bool]:
        held = session.rows(self._sql["held"], sorted({ending.task for ending in endings}))
        writes = _endings.writes(endings, dict(held))
        if writes.answers:
            session.many(self._store.dialect.answers, [writes.answers[key] for key in sorted(writes.answers)])
            session.changed(self._sql["spent"], list(writes.answers))
        if writes.moved:
            session.many(self._store.dialect.moved, writes.moved)
        if writes.passed:
            if self._store.dialect.lock:
                session.rows(self._sql["children"], writes.passed)
            session.changed(self._sql["free"], writes.passed)
        if writes.dead:
            session.changed(self._sql["block"], writes.dead)
        return writes.accepted

    def results(self, keys: Sequence[str]) -> dict[str, Output]:
        """The answers that there are."""
        return {key: _texts.output(*answer) for key, *answer in self._paged("results", keys)}

    def outputs(self, tasks: Sequence[int]) -> dict[int, Output | None]:
        """The answers of tasks that are DONE; None of SKIPPED ones; others are left out."""
        found = self._paged("outputs", [int(task) for task in tasks])
        return {
            task: _texts.output(*answer) if state == State.DONE else None for task, state, *answer in found
        }

    def save(self, partials: Sequence[tuple[str, Partial]]) -> None:
        """Keeps answers so far, by key, until the key has a result."""
        rows: list[tuple[Any, ...]] = [
            (
                key,
                _texts.packed(part.text),
                _texts.packed_ids(part.prompt_ids),
                _texts.packed_ids(part.output_ids),
            )
            for key, part in sorted(dict(partials).items(), key=lambda item: item[0])
        ]
        if rows:
            self._store.write(lambda session: session.many(self._store.dialect.partials, rows))

    def partials(self, keys: Sequence[str]) -> dict[str, Partial]:
        """What was saved last."""
        return {key: _texts.partial(*rest) for key, *rest in self._paged("partials", keys)}

    def counts(self) -> dict[tuple[int, State], int]:
        """Tasks by call and state; they add up to all."""
        found = self._store.read(lambda session: session.rows(self._store.dialect.counts))
        return {(call, State(state)): tasks for call, state, tasks in sorted(found)}

    def rows(self, first: int, most: int) -> list[TaskRow]:
        """Tasks from a number on, in order."""
        found = self._store.read(lambda session: session.rows(self._sql["rows"], int(first), max(0, most)))
        return [_texts.task_row(*row) for row in found]

    def lengths(self) -> list[tuple[int, State, int, int]]:
        """(task, state, prompt tokens, output tokens) of all that have ended, in order; no tokens without an answer."""
        found = self._store.read(lambda session: session.rows(self._sql["lengths"]))
        return [(task, State(state), prompt, output) for task, state, prompt, output in found]

    def sums(self) -> list[tuple[int, int, int]]:
        """(call, attempts, output tokens of answers) of each call, in order."""
        found = self._store.read(lambda session: session.rows(self._sql["sums"]))
        return [(int(call), int(attempts), int(tokens)) for call, attempts, tokens in found]

    def facts(self) -> dict[str, str]:
        """What was noted beside the tasks (``note``)."""
        found = self._store.read(lambda session: session.rows(self._sql["facts"]))
        return {name: _texts.unpacked(value) for name, value in found}

    def note(self, facts: dict[str, str]) -> None:
        """Notes facts by name; an empty text removes one."""
        kept: list[tuple[Any, ...]] = [(n, _texts.packed(facts[n])) for n in sorted(facts) if facts[n]]
        gone = sorted(name for name, value in facts.items() if not value)

        def work(session: Session) -> None:
            session.changed(self._sql["forget"], gone)
            session.many(self._store.dialect.facts, kept)

        if facts:
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
