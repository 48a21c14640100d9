"""The rule of ledgers told naively: plain dictionaries, nothing kept on disk, every step looks at everything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lengthwise.apps.ledger import Ending, Lease, Output, Partial, State, TaskRow
from lengthwise.schema.app_tasks import Tasks


@dataclass
class _Task:
    """A task as it stands."""

    call: int
    model: int
    parents: set[int]
    fence: int
    state: State = State.WAITING
    attempts: int = 0
    owner: str = ""
    until_s: float = 0.0
    not_before_s: float = 0.0
    key: str | None = None
    error: str | None = None


class ModelLedger:
    """A ``Ledger`` in memory: what a store must answer, whatever is asked of it."""

    def __init__(self) -> None:
        self._identity, self._fence = "", 0
        self._tasks: list[_Task] = []
        self._results: dict[str, Output] = {}
        self._partials: dict[str, Partial] = {}
        self._facts: dict[str, str] = {}

    def open(self, identity: str, tasks: Tasks) -> bool:
        """Lays out, unless that was done."""
        if identity == self._identity:
            return True
        self._identity = identity
        self._fence = max([self._fence, *(task.fence for task in self._tasks)])
        self._tasks = [
            _Task(int(tasks.call[i]), int(tasks.model[i]), set(parents_of(tasks, i)), self._fence)
            for i in range(len(tasks))
        ]
        self._follow()
        return False

    def _follow(self) -> None:
        """What waits becomes ready or blocked by its parents, which stand before it."""
        for task in self._tasks:
            states = {self._tasks[parent].state for parent in task.parents}
            if task.state == State.WAITING and states & {State.DEAD, State.BLOCKED}:
                task.state = State.BLOCKED
            elif task.state == State.WAITING and states <= {State.DONE, State.SKIPPED}:
                task.state = State.READY

    def lease(self, model: int, most: int, *, owner: str, now_s: float, lease_s: float) -> list[Lease]:
        """The first that are ready."""
        found: list[Lease] = []
        for number, task in enumerate(self._tasks):
            fits = task.state == State.READY and task.model == model and task.not_before_s <= now_s
            if fits and len(found) < most:
                task.state, task.owner, task.until_s = State.LEASED, owner, now_s + lease_s
                task.fence += 1
                found.append(Lease(number, task.fence, task.attempts + 1))
        return found

    def beat(self, owner: str, *, now_s: float, lease_s: float) -> int:
        """Prolongs."""
        held = [task for task in self._tasks if task.state == State.LEASED and task.owner == owner]
        for task in held:
            task.until_s = now_s + lease_s
        return len(held)

    def expire(self, *, now_s: float) -> int:
        """Takes back."""
        over = [task for task in self._tasks if task.state == State.LEASED and task.until_s <= now_s]
        for task in over:
            task.state = State.READY
        return len(over)

    def settle(self, endings: Sequence[Ending]) -> list[bool]:
        """Ends leases, one after the other."""
        accepted = [self._end(ending) for ending in endings]
        self._follow()
        return accepted

    def _end(self, ending: Ending) -> bool:
        if ending.key and ending.output is not None:
            self._results.setdefault(ending.key, ending.output)
            self._partials.pop(ending.key, None)
        task = self._tasks[ending.task] if ending.task < len(self._tasks) else None
        if task is None or task.state != State.LEASED or task.fence != ending.fence:
            return False
        again = ending.state == State.READY
        counts = ending.counts if again else ending.state != State.SKIPPED
        task.attempts += int(counts)
        task.state, task.key, task.not_before_s = ending.state, ending.key, ending.not_before_s
        task.error = (ending.error or task.error) if again else ending.error
        return True

    def results(self, keys: Sequence[str]) -> dict[str, Output]:
        """Answers."""
        return {key: self._results[key] for key in keys if key in self._results}

    def outputs(self, tasks: Sequence[int]) -> dict[int, Output | None]:
        """Answers of tasks."""
        rows = {number: self._row(number) for number in tasks if number < len(self._tasks)}
        return {n: row.output for n, row in rows.items() if row.state in {State.DONE, State.SKIPPED}}

    def save(self, partials: Sequence[tuple[str, Partial]]) -> None:
        """Keeps what has no result."""
        self._partials.update((key, partial) for key, partial in partials if key not in self._results)

    def partials(self, keys: Sequence[str]) -> dict[str, Partial]:
        """Answers so far."""
        return {key: self._partials[key] for key in keys if key in self._partials}

    def counts(self) -> dict[tuple[int, State], int]:
        """By call and state."""
        return dict(Counter((task.call, task.state) for task in self._tasks))

    def rows(self, first: int, most: int) -> list[TaskRow]:
        """In order."""
        return [self._row(number) for number in range(first, min(first + most, len(self._tasks)))]

    def _row(self, number: int) -> TaskRow:
        task = self._tasks[number]
        done = task.state == State.DONE and task.key is not None
        output = self._results[str(task.key)] if done else None
        return TaskRow(number, task.state, task.attempts, task.key, output, task.error)

    def facts(self) -> dict[str, str]:
        """By name."""
        return dict(self._facts)

    def note(self, facts: dict[str, str]) -> None:
        """Notes or forgets."""
        self._facts = {name: value for name, value in {**self._facts, **facts}.items() if value}

    def close(self) -> None:
        """Nothing to let go of."""


def parents_of(tasks: Tasks, number: int) -> list[int]:
    """The tasks that one waits for."""
    return [int(p) for p in tasks.parent[tasks.parent_start[number] : tasks.parent_start[number + 1]]]


def some_tasks(
    rng: np.random.Generator, count: int, *, models: int = 2, calls: int = 3, most_parents: int = 3
) -> Tasks:
    """A random graph: chains, fans, a parent named twice, tasks that wait for nobody."""
    wide = most_parents + 1
    parents = [rng.integers(0, max(1, i), size=int(rng.integers(0, wide)) if i else 0) for i in range(count)]
    start = np.concatenate([[0], np.cumsum([len(some) for some in parents])]).astype(np.int64)
    parent = np.concatenate([np.zeros(0), *parents]).astype(np.int64)
    zeros, ones = np.zeros(count, np.int64), np.ones(count, np.int64)
    call, model = (rng.integers(0, most, size=count) for most in (calls, models))
    return Tasks(
        tuple(f"call{i}" for i in range(calls)), tuple(f"model{i}" for i in range(models)), call, model,
        zeros, zeros, zeros, ones, ones, zeros, start, parent, np.ones_like(parent), zeros - 1,
    )  # fmt: skip
