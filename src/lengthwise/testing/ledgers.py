"""Conformance kit for ledgers: call ``check_ledger(open_ledger)`` in a test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lengthwise.apps.ledger import Ending, Lease, Ledger, Output, Partial, State, TaskRow
from lengthwise.schema.app import Tasks
from lengthwise.schema.errors import InputError
from lengthwise.testing.checks import require, run_checks


@dataclass
class _Task:
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


class ReferenceLedger:
    """A simple ``Ledger`` in memory, with which other ledgers are compared."""

    def __init__(self) -> None:
        self._identity, self._fence = "", 0
        self._tasks: list[_Task] = []
        self._results: dict[str, Output] = {}
        self._partials: dict[str, Partial] = {}
        self._metadata: dict[str, str] = {}

    def open(self, identity: str, tasks: Tasks) -> bool:
        """Create the tasks of a run. Return True if the run already existed."""
        if identity == self._identity:
            return True
        self._identity = identity
        self._fence = max([self._fence, *(task.fence for task in self._tasks)])
        self._tasks = [
            _Task(int(tasks.call[i]), int(tasks.model[i]), set(parents_of(tasks, i)), self._fence)
            for i in range(len(tasks))
        ]
        self._propagate()
        return False

    def _propagate(self) -> None:
        """Make waiting tasks ready or blocked. One pass suffices because parents come before children."""
        for task in self._tasks:
            states = {self._tasks[parent].state for parent in task.parents}
            if task.state == State.WAITING and states & {State.DEAD, State.BLOCKED}:
                task.state = State.BLOCKED
            elif task.state == State.WAITING and states <= {State.DONE, State.SKIPPED}:
                task.state = State.READY

    def lease(self, model: int, most: int, *, owner: str, now_s: float, lease_s: float) -> list[Lease]:
        """Lease the first ready tasks of a model, at most ``most``."""
        leases: list[Lease] = []
        for number, task in enumerate(self._tasks):
            is_ready = task.state == State.READY and task.model == model and task.not_before_s <= now_s
            if is_ready and len(leases) < most:
                task.state, task.owner, task.until_s = State.LEASED, owner, now_s + lease_s
                task.fence += 1
                leases.append(Lease(number, task.fence, task.attempts + 1))
        return leases

    def heartbeat(self, owner: str, *, now_s: float, lease_s: float) -> int:
        """Extend all leases of an owner, and return their number."""
        leased = [task for task in self._tasks if task.state == State.LEASED and task.owner == owner]
        for task in leased:
            task.until_s = now_s + lease_s
        return len(leased)

    def expire(self, *, now_s: float) -> int:
        """Make the tasks with expired leases ready, and return the number of these tasks."""
        expired = [task for task in self._tasks if task.state == State.LEASED and task.until_s <= now_s]
        for task in expired:
            task.state = State.READY
        return len(expired)

    def finalize(self, endings: Sequence[Ending]) -> list[bool]:
        """End leases in order. Return for each ending whether its lease was valid."""
        accepted = [self._finalize(ending) for ending in endings]
        self._propagate()
        return accepted

    def _finalize(self, ending: Ending) -> bool:
        if ending.key and ending.output is not None:
            self._results.setdefault(ending.key, ending.output)
            self._partials.pop(ending.key, None)
        task = self._tasks[ending.task] if ending.task < len(self._tasks) else None
        if task is None or task.state != State.LEASED or task.fence != ending.fence:
            return False
        is_retry = ending.state == State.READY
        task.attempts += int(ending.counts if is_retry else ending.state != State.SKIPPED)
        task.state, task.key, task.not_before_s = ending.state, ending.key, ending.not_before_s
        task.error = (ending.error or task.error) if is_retry else ending.error
        return True

    def results(self, keys: Sequence[str]) -> dict[str, Output]:
        """Return the outputs of the keys that have a result."""
        return {key: self._results[key] for key in keys if key in self._results}

    def outputs(self, tasks: Sequence[int]) -> dict[int, Output | None]:
        """Return the outputs of the tasks that are done or skipped."""
        rows = {number: self._row(number) for number in tasks if number < len(self._tasks)}
        return {n: row.output for n, row in rows.items() if row.state in {State.DONE, State.SKIPPED}}

    def save(self, partials: Sequence[tuple[str, Partial]]) -> None:
        """Store partial outputs of the keys that have no result."""
        self._partials.update((key, partial) for key, partial in partials if key not in self._results)

    def partials(self, keys: Sequence[str]) -> dict[str, Partial]:
        """Return the partial outputs of the keys that have one."""
        return {key: self._partials[key] for key in keys if key in self._partials}

    def counts(self) -> dict[tuple[int, State], int]:
        """Return the number of tasks for each pair of call and state."""
        return dict(Counter((task.call, task.state) for task in self._tasks))

    def rows(self, first: int, most: int) -> list[TaskRow]:
        """Return the tasks from number ``first`` on, at most ``most``."""
        return [self._row(number) for number in range(first, min(first + most, len(self._tasks)))]

    def _row(self, number: int) -> TaskRow:
        task = self._tasks[number]
        output = self._results[task.key] if task.state == State.DONE and task.key is not None else None
        return TaskRow(number, task.state, task.attempts, task.key, output, task.error)

    def metadata(self) -> dict[str, str]:
        """Return the notes of the run."""
        return dict(self._metadata)

    def set_metadata(self, metadata: dict[str, str]) -> None:
        """Store metadata by name. An empty value removes the entry."""
        self._metadata = {name: value for name, value in {**self._metadata, **metadata}.items() if value}

    def close(self) -> None:
        """Do nothing, because an in-memory ledger has no resources."""


def parents_of(tasks: Tasks, number: int) -> list[int]:
    """Return the parents of a task."""
    return [int(p) for p in tasks.parent[tasks.parent_start[number] : tasks.parent_start[number + 1]]]


def draw_tasks(rng: np.random.Generator, count: int, *, models: int = 2, calls: int = 3, max_parents: int = 3) -> Tasks:
    """Return a random graph of tasks, some with no parents, several children, or a parent listed twice."""
    parents = [rng.integers(0, max(1, i), size=int(rng.integers(0, max_parents + 1)) if i else 0) for i in range(count)]
    start = np.concatenate([[0], np.cumsum([len(p) for p in parents])]).astype(np.int64)
    parent = np.concatenate([np.zeros(0), *parents]).astype(np.int64)
    zeros, ones = np.zeros(count, np.int64), np.ones(count, np.int64)
    call, model = (rng.integers(0, limit, size=count) for limit in (calls, models))
    return Tasks(
        tuple(f"call{i}" for i in range(calls)), tuple(f"model{i}" for i in range(models)), call, model,
        zeros, zeros, zeros, ones, ones, zeros, start, parent, np.ones_like(parent), zeros - 1,
    )  # fmt: skip


STEPS = 120
_TASKS = 24
_KEYS = tuple(f"k{i}" for i in range(12))
_OWNERS = ("ann", "bob")
_ENDINGS = (State.DONE, State.DONE, State.DONE, State.READY, State.SKIPPED, State.DEAD)


class _RandomWalk:
    """Performs the same random operations on a ledger, through two handles, and on a ``ReferenceLedger``."""

    OPERATIONS = (*["lease", "finalize"] * 3, "save", "heartbeat", "expire", "set_metadata", "reopen", "open")

    def __init__(self, open_ledger: Callable[[], Ledger], reference: ReferenceLedger, rng: np.random.Generator) -> None:
        self._open_ledger, self._reference, self._rng = open_ledger, reference, rng
        self._handles = [open_ledger(), open_ledger()]
        self._now_s, self._num_runs, self._counter = 0.0, 0, 0
        self._leases: list[Lease] = []
        self._tasks = draw_tasks(rng, _TASKS)
        self.open()

    def run(self) -> None:
        for step in range(STEPS):
            operation = str(self._rng.choice(self.OPERATIONS))
            where = f"step {step}, {operation}"
            actual, expected = getattr(self, operation)()
            require(actual == expected, f"{where}: the reference returns {expected}; the ledger returned {actual}")
            handle = self._handle()
            for name, values in (("rows", (0, 99)), ("counts", ()), ("results", (_KEYS,)), ("partials", (_KEYS,)),
                                 ("metadata", ()), ("outputs", (range(_TASKS + 1),))):  # fmt: skip
                actual, expected = getattr(handle, name)(*values), getattr(self._reference, name)(*values)
                require(actual == expected, f"{where}: {name} must be {expected}; the ledger returned {actual}")
            violation = broken_invariant(self._tasks, handle.rows(0, 99))
            require(not violation, f"{where}: {violation}")
        for handle in self._handles:
            handle.close()

    def open(self) -> tuple[Any, Any]:
        if self._num_runs == 0 or self._rng.random() < 0.1:
            self._num_runs += 1
            self._tasks = draw_tasks(self._rng, _TASKS)
        return self._both("open", f"run {self._num_runs}", self._tasks)

    def lease(self) -> tuple[Any, Any]:
        self._now_s += float(self._rng.integers(0, 3))
        owner, limit = str(self._rng.choice(_OWNERS)), int(self._rng.integers(0, 5))
        model = int(self._rng.integers(0, 2))
        actual, expected = self._both("lease", model, limit, owner=owner, now_s=self._now_s, lease_s=5.0)
        self._leases += expected
        return actual, expected

    def finalize(self) -> tuple[Any, Any]:
        if not self._leases:
            return None, None
        recent = self._leases[-8:]
        chosen = self._rng.integers(0, len(recent), size=int(self._rng.integers(1, 5)))
        return self._both("finalize", [self._ending(recent[int(i)]) for i in chosen])

    def _ending(self, lease: Lease) -> Ending:
        state, self._counter = _ENDINGS[int(self._rng.integers(0, len(_ENDINGS)))], self._counter + 1
        if state == State.DONE:
            output = Output(f"output {self._counter}", "stop", 3, self._counter)
            return Ending(lease.task, lease.fence, state, str(self._rng.choice(_KEYS)), output)
        if state == State.READY:
            not_before_s, counts = self._now_s + float(self._rng.integers(0, 3)), bool(self._rng.integers(0, 2))
            error = f"error {self._counter}" if counts else None
            return Ending(lease.task, lease.fence, state, error=error, not_before_s=not_before_s, counts=counts)
        return Ending(lease.task, lease.fence, state, error=f"error {self._counter}" if state == State.DEAD else None)

    def save(self) -> tuple[Any, Any]:
        self._counter += 1
        keys = [str(key) for key in self._rng.choice(_KEYS, size=3)]
        partials = [Partial(f"partial {i} {self._counter}", (1,), (2, 3)) for i in range(3)]
        return self._both("save", list(zip(keys, partials, strict=True)))

    def heartbeat(self) -> tuple[Any, Any]:
        return self._both("heartbeat", str(self._rng.choice(_OWNERS)), now_s=self._now_s, lease_s=5.0)

    def expire(self) -> tuple[Any, Any]:
        self._now_s += float(self._rng.integers(0, 4))
        return self._both("expire", now_s=self._now_s)

    def set_metadata(self) -> tuple[Any, Any]:
        return self._both("set_metadata", {name: str(self._rng.choice(("", "a", "b"))) for name in ("one", "two")})

    def reopen(self) -> tuple[Any, Any]:
        number = int(self._rng.integers(0, 2))
        self._handles[number].close()
        self._handles[number] = self._open_ledger()
        return None, None

    def _both(self, name: str, *values: Any, **keywords: Any) -> tuple[Any, Any]:
        return getattr(self._handle(), name)(*values, **keywords), getattr(self._reference, name)(*values, **keywords)

    def _handle(self) -> Ledger:
        return self._handles[int(self._rng.integers(0, 2))]


OpenLedger = Callable[[str], Ledger]
Check = Callable[[OpenLedger, int], None]

_UNUSUAL_TEXTS = ("", "\x00", "\ud800 half a pair", "\U0001f600\u202e", "x" * 1_000_000, "'; DROP TABLE tasks; --%s?")


def check_ledger(open_ledger: OpenLedger, *, seed: int = 0, skip: Sequence[str] = ()) -> list[str]:
    """Run the checks of ``LEDGER_CHECKS``, with or without a test runner. Return the names of the passed checks.

    ``open_ledger`` opens the store with a name (lower-case letters, digits, ``_``). A store is empty at first. Opening
    the same name again, even while it is open, returns another handle of the same store. An AssertionError states the
    requirement that a ledger violates, and what the ledger returned.
    """
    return run_checks(LEDGER_CHECKS, skip, lambda: (open_ledger, seed))


def broken_invariant(tasks: Tasks, rows: Sequence[TaskRow]) -> str:
    """Return a sentence on the first invariant that a ledger's rows violate, or "" if there is none.

    A task is blocked if and only if a parent is dead or blocked. Otherwise it waits if and only if a parent is
    unfinished. Exactly the tasks in state DONE have an output, and each key has one output.
    """
    if [row.task for row in rows] != list(range(len(tasks))):
        return f"every task must occur once, in order; the ledger has {len(rows)} rows for {len(tasks)} tasks"
    outputs: dict[str, Output] = {}
    for row in rows:
        parents = {rows[parent].state for parent in parents_of(tasks, row.task)}
        is_blocked = bool(parents & {State.DEAD, State.BLOCKED})
        is_waiting = not is_blocked and not parents <= {State.DONE, State.SKIPPED}
        if (row.state == State.BLOCKED) != is_blocked or (row.state == State.WAITING) != is_waiting:
            names = sorted(state.name for state in parents)
            return f"a task's state must follow from its parents; task {row.task} is {row.state.name}, they are {names}"
        if (row.state == State.DONE) != (row.output is not None):
            return f"exactly DONE tasks must have an output; task {row.task} is {row.state.name} with {row.output}"
        if row.key and row.output and outputs.setdefault(row.key, row.output) != row.output:
            return f"one key must have one output; {row.key} has two"
    return ""


def results_equal_reference(open_ledger: OpenLedger, seed: int) -> None:
    """Check random operations on two handles, sometimes closed and reopened, against ``ReferenceLedger``."""
    for number in range(4):
        rng = np.random.default_rng([seed, number])
        _RandomWalk(lambda number=number: open_ledger(f"walk_{number}"), ReferenceLedger(), rng).run()  # type: ignore[misc]


def creates_tasks_once(open_ledger: OpenLedger, seed: int) -> None:
    """Check that a new identity creates the tasks anew, retains results and invalidates earlier leases."""
    tasks = draw_tasks(np.random.default_rng(seed), 30, models=1, max_parents=0)
    ledger, other = open_ledger("layout"), open_ledger("layout")
    _equal("open of a new run", [ledger.open("one", tasks), other.open("one", tasks)], [False, True])
    (lease,) = _lease(ledger, 1)
    _equal("an accepted ending", ledger.finalize([_done(lease, "k", "first")]), [True])
    stale = _lease(ledger, 5)
    _equal("open of a changed run", other.open("two", tasks), False)
    _equal("counts of a changed run", sum(other.counts().values()), 30)
    _equal("results of a changed run", set(other.results(["k", "none"])), {"k"})
    leased = {lease.task for lease in _lease(other, 30)}
    require({lease.task for lease in stale} <= leased, "tasks of a changed run must be new")
    accepted = ledger.finalize([_done(lease, f"s{lease.task}", "old") for lease in stale])
    _equal("leases from before the change", accepted, [False] * len(stale))
    ledger.close()
    other.close()


def first_output_wins(open_ledger: OpenLedger, seed: int) -> None:
    """Check that a key retains its first output, even from a stale lease, and loses its partial output."""
    ledger = open_ledger("answers")
    ledger.open("run", draw_tasks(np.random.default_rng(seed), 20, models=1, max_parents=0))
    ledger.save([("k", Partial("half", (1, 2), (3,))), ("other", Partial("h"))])
    _equal("saved partials", ledger.partials(["k"]), {"k": Partial("half", (1, 2), (3,))})
    (lease,) = _lease(ledger, 1)
    _equal("a stale ending", ledger.finalize([replace(_done(lease, "k", "first"), fence=lease.fence - 1)]), [False])
    _equal("partials of a finished key", ledger.partials(["k", "other"]), {"other": Partial("h")})
    ledger.save([("k", Partial("late"))])
    _equal("partials of a finished key", ledger.partials(["k"]), {})
    twice = [_done(lease, "k", "second"), _done(lease, "k", "third")]
    _equal("one lease ended twice", ledger.finalize(twice), [True, False])
    output = ledger.outputs([lease.task])[lease.task]
    _equal("the output of its key", output and output.text, "first")
    ledger.close()


def stores_any_text(open_ledger: OpenLedger, seed: int) -> None:
    """Check that the ledger stores any text: NUL, half a surrogate pair, a million letters."""
    tasks = draw_tasks(np.random.default_rng(seed), 60, models=1, max_parents=0)
    for number, text in enumerate(_UNUSUAL_TEXTS):
        ledger = open_ledger(f"texts_{number}")
        ledger.open("run", tasks)
        one, two = _lease(ledger, 2)
        ledger.save([("part", Partial(text))])
        ledger.set_metadata({"fact": text})
        ledger.finalize([_done(one, "k", text), Ending(two.task, two.fence, State.DEAD, error=text)])
        ledger.close()
        ledger = open_ledger(f"texts_{number}")
        _equal("an output", ledger.results(["k"])["k"].text, text)
        _equal("a partial output", ledger.partials(["part"])["part"].text, text)
        _equal("an error", ledger.rows(two.task, 1)[0].error, text)
        _equal("metadata", ledger.metadata(), {"fact": text} if text else {})
        ledger.close()


def rejects_batches_atomically(open_ledger: OpenLedger, seed: int) -> None:
    """Check that a batch with one invalid ending is rejected completely."""
    ledger = open_ledger("rejection")
    ledger.open("run", draw_tasks(np.random.default_rng(seed), 20, models=1, max_parents=0))
    one, two = _lease(ledger, 2)
    before = ledger.rows(0, 20)
    output = Output("x", "stop", 1, 1)
    for invalid in (Ending(two.task, two.fence, State.DONE), Ending(two.task, two.fence, State.BLOCKED),
                    Ending(two.task, two.fence, State.SKIPPED, "k", output)):  # fmt: skip
        try:
            ledger.finalize([_done(one, "good", "x"), invalid])
        except InputError:
            _equal("after a rejection", (ledger.rows(0, 20), ledger.results(["good", "k"])), (before, {}))
        else:
            raise AssertionError(f"an invalid ending must be rejected; this was not: {invalid}")
    ledger.close()


def aggregates_match_rows(open_ledger: OpenLedger, seed: int) -> None:
    """Check ``lengths`` and ``sums`` against ``rows``, also for tasks that share an output or are retried."""
    rng = np.random.default_rng(seed)
    tasks = draw_tasks(rng, 60, models=1, max_parents=1)
    ledger = open_ledger("sums")
    ledger.open("run", tasks)
    states = (State.DONE, State.DONE, State.SKIPPED, State.DEAD, State.READY)
    for _ in range(12):
        for lease in _lease(ledger, 7):
            state = states[int(rng.integers(len(states)))]
            number = int(rng.integers(6))
            output = Output("x", "stop", number, 1 + number)
            error = "e" if state in (State.DEAD, State.READY) else None
            key, result = (f"k{number}", output) if state == State.DONE else (None, None)
            ledger.finalize([Ending(lease.task, lease.fence, state, key, result, error)])
    rows = ledger.rows(0, 60)
    finished = [row for row in rows if row.state >= State.DONE]
    tokens = {row.task: (row.output.prompt_tokens, row.output.output_tokens) for row in finished if row.output}
    expected = [(row.task, row.state, *tokens.get(row.task, (0, 0))) for row in finished]
    _equal("lengths of finished tasks", ledger.lengths(), expected)
    sums: dict[int, list[int]] = {}
    for row in rows:
        call_sums = sums.setdefault(int(tasks.call[row.task]), [0, 0])
        call_sums[0] += row.attempts
        call_sums[1] += tokens.get(row.task, (0, 0))[1]
    _equal("sums of each call", ledger.sums(), [(call, *sums[call]) for call in sorted(sums)])
    ledger.close()


def concurrent_leases_are_unique(open_ledger: OpenLedger, seed: int) -> None:
    """Check that four threads that lease and finalize tasks get each task exactly once."""
    tasks = draw_tasks(np.random.default_rng(seed), 300, models=1)
    first = open_ledger("crowd")
    first.open("run", tasks)

    def drain(number: int) -> list[int]:
        ledger, leased = open_ledger("crowd"), []
        while any(not state >= State.DONE for _, state in ledger.counts()):
            leases = ledger.lease(0, 7, owner=f"owner{number}", now_s=0, lease_s=1e9)
            leased += [lease.task for lease in leases]
            accepted = ledger.finalize([_done(lease, f"k{lease.task}", "x") for lease in leases])
            require(all(accepted), "the owner of a lease must be able to end it")
        ledger.close()
        return leased

    with ThreadPoolExecutor(4) as pool:
        leased = [task for part in pool.map(drain, range(4)) for task in part]
    _equal("tasks leased concurrently", sorted(leased), list(range(300)))
    _equal("an invariant", broken_invariant(tasks, first.rows(0, 301)), "")
    first.close()


LEDGER_CHECKS: dict[str, Check] = {check.__name__: check for check in (
    results_equal_reference, creates_tasks_once, first_output_wins, stores_any_text, rejects_batches_atomically,
    aggregates_match_rows, concurrent_leases_are_unique,
)}  # fmt: skip
"""Checks by name, in the order in which they run."""


def _lease(ledger: Ledger, count: int) -> list[Lease]:
    return ledger.lease(0, count, owner="me", now_s=0.0, lease_s=60.0)


def _done(lease: Lease, key: str, text: str) -> Ending:
    return Ending(lease.task, lease.fence, State.DONE, key, Output(text, "stop", 1, 1))


def _equal(subject: str, actual: object, expected: object) -> None:
    require(actual == expected, f"{subject}: must be {str(expected)[:200]}; the ledger returned {str(actual)[:200]}")
