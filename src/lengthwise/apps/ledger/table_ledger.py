"""The ledger of a run: tasks, leases and outputs, on any ``Store``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from lengthwise.apps.ledger.contracts import Ending, Lease, Output, Partial, State, TaskRow
from lengthwise.apps.ledger.postgres_store import PostgresStore
from lengthwise.apps.ledger.sql_store import SqliteStore, Store, load_tasks
from lengthwise.schema.app import Tasks
from lengthwise.schema.errors import InputError

FILE = "ledger.sqlite"  # the ledger's name in a folder
TIMEOUT_S = 30.0
_PAGE = 5_000
_END_STATES = (State.DONE, State.SKIPPED, State.DEAD, State.READY)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # engines send lone surrogates


def _decoded(data: bytes) -> str:
    return bytes(data).decode("utf-8", "surrogatepass")


def _encoded_ids(ids: Sequence[int]) -> bytes:
    return np.asarray(ids, "<i8").tobytes()


def _decoded_ids(data: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(bytes(data), "<i8").tolist())


def _output(text: bytes, finish_reason: str, prompt_tokens: int, output_tokens: int) -> Output:
    return Output(_decoded(text), finish_reason, prompt_tokens, output_tokens)


class Ledger:
    """Tasks, leases and outputs on disk. If any process dies, no recorded output is lost, and none is recorded twice.

    Times are wall-clock seconds (UTC) of the caller. Every method that changes the ledger is one atomic transaction, is
    durable when it returns, and may be repeated after a crash. Several threads may call it; the store runs one
    transaction at a time. An expired lease does not count as an attempt, because its owner failed rather than the task.
    """

    def __init__(self, store: Store) -> None:
        self.store, self._sql = store, store.sql

    def open(self, identity: str, tasks: Tasks) -> bool:
        """Insert the tasks of a run. Return True if the ledger already has them, so that the run is resumed.

        ``identity`` is a hash of everything that determines the tasks. Tasks of another identity are replaced, and
        their leases become invalid, but all outputs remain. Raises InputError if the identity is empty, or the ledger
        has another number of tasks under it.
        """
        if not identity:
            raise InputError("the identity of a run must be a text that is not empty")

        def work(store: Store) -> bool:
            ((known, count, fence),) = store.rows(self._sql["run"])
            if known == identity:
                if count != len(tasks):
                    raise InputError(
                        f"one identity must stand for one list of tasks; {store.where} has {count} tasks under it, "
                        f"not {len(tasks)}: let the identity contain everything that determines the tasks"
                    )
                return True
            # New fences are above those of all earlier leases, so that none of these fits a new task.
            ((last,),) = store.rows(self._sql["fence"])
            fence = max(fence, last or 0)
            for statement in store.empty:
                store.changed(statement)
            load_tasks(store, tasks, fence)
            for statement in store.filled:
                store.changed(statement)
            store.changed(self._sql["set_run"], identity, len(tasks), fence)
            return False

        return self.store.write(work)

    def lease(self, model: int, limit: int, *, owner: str, now_s: float, lease_s: float) -> list[Lease]:
        """Lease up to ``limit`` ready tasks of a model to ``owner`` for ``lease_s`` seconds, lowest numbers first."""
        if limit <= 0:
            return []
        values = (int(model), now_s, limit, owner, now_s + lease_s)
        found = self.store.write(lambda store: store.rows(self._sql["lease"], *values))
        return [Lease(task, fence, attempts + 1) for task, fence, attempts in sorted(found)]

    def heartbeat(self, owner: str, *, now_s: float, lease_s: float) -> int:
        """Extend an owner's leases that ``expire`` has not ended to ``now_s`` + ``lease_s``. Return their number.

        With ``lease_s=0``, the next ``expire`` makes their tasks ready.
        """
        return self.store.write(lambda store: store.changed(self._sql["heartbeat"], now_s + lease_s, owner))

    def expire(self, *, now_s: float) -> int:
        """Make the tasks of expired leases ready again. Return the number of these tasks."""
        return self.store.write(lambda store: store.changed(self._sql["expire"], now_s))

    def finalize(self, endings: Sequence[Ending]) -> list[bool]:
        """End leases, and return for each lease whether it was valid.

        A lease is valid until it ends, ``expire`` makes its task ready, or ``open`` replaces the tasks. A WAITING task
        becomes READY when its last parent is DONE or SKIPPED, and BLOCKED when a task that it depends on is DEAD. The
        first output of a key stays, whichever lease produced it. Raises InputError if an ending lacks what its state
        needs. Then nothing is recorded.
        """
        for ending in endings:
            state = State(ending.state).name
            if ending.state not in _END_STATES:
                raise InputError(
                    f"a lease ends DONE, SKIPPED, DEAD or READY; task {ending.task} ends {state}, a state that only "
                    "the ledger sets"
                )
            if (bool(ending.key) and ending.output is not None) != (ending.state == State.DONE):
                raise InputError(
                    f"a DONE task has a key and an output, and no other has an output; task {ending.task} ends "
                    f"{state} with key {ending.key!r} and {'an' if ending.output else 'no'} output"
                )
        return self.store.write(lambda store: self._finalize(store, endings)) if endings else []

    def _finalize(self, store: Store, endings: Sequence[Ending]) -> list[bool]:
        fences = dict(store.rows(self._sql["leased"], sorted({ending.task for ending in endings})))
        accepted: list[bool] = []
        outputs: dict[str, tuple[Any, ...]] = {}
        finished: list[tuple[Any, ...]] = []
        tasks_by_state: dict[State, list[int]] = {state: [] for state in _END_STATES}
        for ending in endings:
            output, state = ending.output, ending.state
            if ending.key and output is not None:
                columns = _encoded(output.text), output.finish_reason, output.prompt_tokens, output.output_tokens
                outputs.setdefault(ending.key, (ending.key, *columns))
            accepted.append(fences.get(ending.task) == ending.fence)
            if not accepted[-1]:
                continue
            del fences[ending.task]
            counts = state in {State.DONE, State.DEAD} or (state == State.READY and ending.counts)
            error = None if ending.error is None else _encoded(ending.error)
            finished.append((int(state), int(counts), ending.key, error, float(ending.not_before_s), ending.task))
            tasks_by_state[state].append(ending.task)
        if outputs:
            store.many(self._sql["add_results"], [outputs[key] for key in sorted(outputs)])
            store.changed(self._sql["drop_partials"], list(outputs))
        if finished:
            store.many(self._sql["end_leases"], finished)
        if passed := tasks_by_state[State.DONE] + tasks_by_state[State.SKIPPED]:
            if store.words["lock"]:
                store.rows(self._sql["children"], passed)
            store.changed(self._sql["free_children"], passed)
        if dead := tasks_by_state[State.DEAD]:
            store.changed(self._sql["block"], dead)
        return accepted

    def results(self, keys: Sequence[str]) -> dict[str, Output]:
        """Return the recorded outputs by key. A key without an output has no entry."""
        return {key: _output(*columns) for key, *columns in self._paged("results", keys)}

    def outputs(self, tasks: Sequence[int]) -> dict[int, Output | None]:
        """Return the outputs of DONE tasks, and None for SKIPPED tasks. Other tasks have no entry."""
        found = self._paged("outputs", [int(task) for task in tasks])
        return {task: _output(*columns) if state == State.DONE else None for task, state, *columns in found}

    def save(self, partials: Sequence[tuple[str, Partial]]) -> None:
        """Save interrupted outputs by key, unless the key already has an output."""
        rows: list[tuple[Any, ...]] = [
            (key, _encoded(part.text), _encoded_ids(part.prompt_ids), _encoded_ids(part.output_ids))
            for key, part in sorted(dict(partials).items(), key=lambda item: item[0])
        ]
        if rows:
            self.store.write(lambda store: store.many(self._sql["save_partials"], rows))

    def partials(self, keys: Sequence[str]) -> dict[str, Partial]:
        """Return the interrupted output that was saved last for each key without an output."""
        return {
            key: Partial(_decoded(text), _decoded_ids(prompt_ids), _decoded_ids(output_ids))
            for key, text, prompt_ids, output_ids in self._paged("partials", keys)
        }

    def counts(self) -> dict[tuple[int, State], int]:
        """Return the number of tasks by call and state."""
        return {(call, State(state)): tasks for call, state, tasks in sorted(self._read("counts"))}

    def rows(self, first: int, limit: int) -> list[TaskRow]:
        """Return up to ``limit`` tasks in order, from number ``first`` on."""
        return [
            TaskRow(
                task,
                State(state),
                attempts,
                key,
                None if columns[0] is None else _output(*columns),
                None if error is None else _decoded(error),
            )
            for task, state, attempts, key, error, *columns in self._read("rows", int(first), max(0, limit))
        ]

    def lengths(self) -> list[tuple[int, State, int, int]]:
        """Return (task, state, prompt tokens, output tokens) of finished tasks in order. No output means 0 tokens."""
        return [(task, State(state), prompt, output) for task, state, prompt, output in self._read("lengths")]

    def sums(self) -> list[tuple[int, int, int]]:
        """Return (call, attempts, output tokens) of each call, in order of calls."""
        return [(int(call), int(attempts), int(tokens)) for call, attempts, tokens in self._read("sums")]

    def metadata(self) -> dict[str, str]:
        """Return the texts that ``set_metadata`` stored, by name: application, coordinators, engines, cancellation."""
        return {name: _decoded(value) for name, value in self._read("metadata")}

    def set_metadata(self, metadata: dict[str, str]) -> None:
        """Store texts by name. An empty text removes the entry."""
        stored: list[tuple[Any, ...]] = [(n, _encoded(metadata[n])) for n in sorted(metadata) if metadata[n]]
        removed = sorted(name for name, value in metadata.items() if not value)

        def work(store: Store) -> None:
            store.changed(self._sql["remove_metadata"], removed)
            store.many(self._sql["set_metadata"], stored)

        if metadata:
            self.store.write(work)

    def _read(self, name: str, *values: Any) -> list[tuple[Any, ...]]:
        return self.store.read(lambda store: store.rows(self._sql[name], *values))

    def _paged(self, name: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Run a statement on a list of values, _PAGE values at a time, and return all rows."""
        pages = [list(values[first : first + _PAGE]) for first in range(0, len(values), _PAGE)]
        return self.store.read(lambda store: [row for page in pages for row in store.rows(self._sql[name], page)])

    def close(self) -> None:
        """Close the store."""
        self.store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_ledger(place: str | Path, *, read_only: bool = False, timeout_s: float = TIMEOUT_S) -> Ledger:
    """Return the ledger at a place. If there is none, create a ledger, unless ``read_only``.

    The place is a file, a folder (``ledger.sqlite`` in it), or ``postgresql://user@host/database?schema=NAME`` for
    several coordinators. A schema ("lengthwise" by default) contains one run at a time; it is created if missing.
    A write waits up to ``timeout_s`` seconds for other writers.

    Raises:
        InputError: The place is no ledger, belongs to a newer lengthwise or another program, or does not exist with
            ``read_only``.
        OutputError: The place cannot be written or reached.
        MissingExtraError: The place is a PostgreSQL URL, and the extra ``postgres`` is not installed.
    """
    place = str(place)
    if place.startswith(("postgresql://", "postgres://")):
        return Ledger(PostgresStore(place, read_only=read_only, timeout_s=timeout_s))
    if "://" in place:
        raise InputError(
            f"a ledger is a file, a folder or postgresql://...; it is {place.rpartition('@')[2]!r}: name one of these"
        )
    path = Path(place)
    return Ledger(SqliteStore(path / FILE if path.is_dir() else path, read_only=read_only, timeout_s=timeout_s))
