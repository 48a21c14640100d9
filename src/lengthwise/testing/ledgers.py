"""The conformance kit of ledgers: ``check_ledger(opened)`` in a test of one's own."""

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
        self._metadata: dict[str, str] = {}

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

    def heartbeat(self, owner: str, *, now_s: float, lease_s: float) -> int:
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

    def finalize(self, endings: Sequence[Ending]) -> list[bool]:
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

    def metadata(self) -> dict[str, str]:
        """By name."""
        return dict(self._metadata)

    def note(self, metadata: dict[str, str]) -> None:
        """Notes or forgets."""
        self._metadata = {name: value for name, value in {**self._metadata, **metadata}.items() if value}

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


STEPS = 120
_TASKS = 24
_KEYS = tuple(f"k{i}" for i in range(12))
_OWNERS = ("ann", "bob")
_ENDS = (State.DONE, State.DONE, State.DONE, State.READY, State.SKIPPED, State.DEAD)
Law = Callable[[Tasks, Sequence[TaskRow]], str]


def walk(opened: Callable[[], Ledger], model: ModelLedger, rng: np.random.Generator, law: Law) -> None:
    """Raises AssertionError at the first step after which a ledger differs from the rule, or breaks a law.

    Args:
        opened: A handle on one store, which is empty at first.
        model: The naive rule.
        rng: What draws the steps.
        law: What is wrong with tasks as they stand, or "".
    """
    walker = _Walker(opened, model, rng)
    for step in range(STEPS):
        kind = str(rng.choice(walker.KINDS))
        one, other = getattr(walker, kind)()
        if one != other:
            raise AssertionError(f"step {step}, {kind}: the rule says {other}; the ledger said {one}")
        walker.compare(f"step {step}, {kind}", law)
    walker.close()


class _Walker:
    """Two handles on one store, and what was leased so far."""

    KINDS = (
        "lease",
        "lease",
        "lease",
        "finalize",
        "finalize",
        "finalize",
        "save",
        "heartbeat",
        "expire",
        "note",
        "reopen",
        "lay_out",
    )

    def __init__(self, opened: Callable[[], Ledger], model: ModelLedger, rng: np.random.Generator) -> None:
        self._opened, self._model, self._rng = opened, model, rng
        self._handles = [opened(), opened()]
        self._now_s, self._layouts, self._message = 0.0, 0, 0
        self._leases: list[Lease] = []
        self._tasks = some_tasks(rng, _TASKS)
        self.lay_out()

    def compare(self, when: str, law: Law) -> None:
        ledger, model, every = self._handle(), self._model, range(_TASKS + 1)
        for name, values in (("rows", (0, 99)), ("counts", ()), ("results", (_KEYS,)), ("partials", (_KEYS,)),
                             ("metadata", ()), ("outputs", (every,))):  # fmt: skip
            came, told = getattr(ledger, name)(*values), getattr(model, name)(*values)
            if came != told:
                raise AssertionError(f"{when}: {name} must be {told}; {came} came")
        if wrong := law(self._tasks, ledger.rows(0, 99)):
            raise AssertionError(f"{when}: {wrong}")

    def close(self) -> None:
        for handle in self._handles:
            handle.close()

    def lay_out(self) -> tuple[Any, Any]:
        """Mostly the same run again."""
        if self._layouts == 0 or self._rng.random() < 0.1:
            self._layouts += 1
            self._tasks = some_tasks(self._rng, _TASKS)
        return self._both("open", f"run {self._layouts}", self._tasks)

    def lease(self) -> tuple[Any, Any]:
        self._now_s += float(self._rng.integers(0, 3))
        owner, most = str(self._rng.choice(_OWNERS)), int(self._rng.integers(0, 5))
        came, told = self._both(
            "lease", int(self._rng.integers(0, 2)), most, owner=owner, now_s=self._now_s, lease_s=5.0
        )
        self._leases += told
        return came, told

    def finalize(self) -> tuple[Any, Any]:
        """Leases of any age, some of them twice."""
        if not self._leases:
            return None, None
        recent = self._leases[-8:]
        some = [recent[int(i)] for i in self._rng.integers(0, len(recent), size=int(self._rng.integers(1, 5)))]
        return self._both("finalize", [self._ending(lease) for lease in some])

    def _ending(self, lease: Lease) -> Ending:
        state, self._message = _ENDS[int(self._rng.integers(0, len(_ENDS)))], self._message + 1
        if state == State.DONE:
            output = Output(f"said {self._message}", "stop", 3, self._message)
            return Ending(lease.task, lease.fence, state, str(self._rng.choice(_KEYS)), output)
        if state == State.READY:
            later_s, counts = self._now_s + float(self._rng.integers(0, 3)), bool(self._rng.integers(0, 2))
            error = f"error {self._message}" if counts else None
            return Ending(lease.task, lease.fence, state, error=error, not_before_s=later_s, counts=counts)
        return Ending(lease.task, lease.fence, state, error=f"error {self._message}" if state == State.DEAD else None)

    def save(self) -> tuple[Any, Any]:
        self._message += 1
        keys = [str(key) for key in self._rng.choice(_KEYS, size=3)]
        return self._both(
            "save", [(key, Partial(f"so far {i} {self._message}", (1,), (2, 3))) for i, key in enumerate(keys)]
        )

    def heartbeat(self) -> tuple[Any, Any]:
        return self._both("heartbeat", str(self._rng.choice(_OWNERS)), now_s=self._now_s, lease_s=5.0)

    def expire(self) -> tuple[Any, Any]:
        self._now_s += float(self._rng.integers(0, 4))
        return self._both("expire", now_s=self._now_s)

    def note(self) -> tuple[Any, Any]:
        values = ("", "a", "b")
        return self._both("note", {name: str(self._rng.choice(values)) for name in ("one", "two")})

    def reopen(self) -> tuple[Any, Any]:
        which = int(self._rng.integers(0, 2))
        self._handles[which].close()
        self._handles[which] = self._opened()
        return None, None

    def _both(self, name: str, *values: Any, **named: Any) -> tuple[Any, Any]:
        return getattr(self._handle(), name)(*values, **named), getattr(self._model, name)(*values, **named)

    def _handle(self) -> Ledger:
        return self._handles[int(self._rng.integers(0, 2))]


Opened = Callable[[str], Ledger]
Check = Callable[[Opened, int], None]

_ODD_TEXTS = ("", "\x00", "\ud800 half a pair", "\U0001f600\u202e", "x" * 1_000_000, "'; DROP TABLE tasks; --%s?")


def check_ledger(opened: Opened, *, seed: int = 0, skip: Sequence[str] = ()) -> list[str]:
    """The names of the checks that a ledger passed: all that there are.

    Works in any test runner, or without one.

    Args:
        opened: Opens the store of a name (small letters, digits, ``_``), which is empty at first; the same name again,
            even while the first one is open, is another handle on the same store.
        seed: Of what is drawn.
        skip: Names of checks to leave out (see ``LEDGER_CHECKS``).

    Raises:
        AssertionError: A check failed; one sentence says what must hold and what came.
    """
    passed = [name for name in LEDGER_CHECKS if name not in skip]
    for name in passed:
        LEDGER_CHECKS[name](opened, seed)
    return passed


def broken_law(tasks: Tasks, rows: Sequence[TaskRow]) -> str:
    """What is wrong with tasks as they stand, in words; "" where every law holds.

    A task is blocked exactly where a parent is dead or blocked, and waits exactly where, else, a parent has not ended;
    DONE and no other has an answer; one key has one answer.
    """
    if [row.task for row in rows] != list(range(len(tasks))):
        return f"every task must be there once, in order; {len(rows)} rows came for {len(tasks)} tasks"
    answers: dict[str, Output] = {}
    for row in rows:
        states = {rows[parent].state for parent in parents_of(tasks, row.task)}
        if wrong := _out_of_place(row, states):
            return wrong
        if row.key and row.output and answers.setdefault(row.key, row.output) != row.output:
            return f"one key must have one answer; {row.key} has two"
    return ""


def _out_of_place(row: TaskRow, parents: set[State]) -> str:
    behind_dead = bool(parents & {State.DEAD, State.BLOCKED})
    waits = not behind_dead and not parents <= {State.DONE, State.SKIPPED}
    if (row.state == State.BLOCKED) != behind_dead or (row.state == State.WAITING) != waits:
        came = sorted(state.name for state in parents)
        return f"a task must be where its parents let it; task {row.task} is {row.state.name}, they are {came}"
    if (row.state == State.DONE) != (row.output is not None):
        return f"DONE and no other has an answer; task {row.task} is {row.state.name} with {row.output}"
    return ""


def answers_as_the_rule(opened: Opened, seed: int) -> None:
    """On random walks over two handles, closed and opened again at will, it says what the naive rule says."""
    for number in range(4):
        rng = np.random.default_rng([seed, number])
        walk(lambda number=number: opened(f"walk_{number}"), ModelLedger(), rng, broken_law)  # type: ignore[misc]


def lays_out_once(opened: Opened, seed: int) -> None:
    """One identity is laid out once; another lays out anew, keeps results, and leases of before end nothing."""
    tasks = some_tasks(np.random.default_rng(seed), 30, models=1, most_parents=0)
    ledger, other = opened("layout"), opened("layout")
    _equal("a run that is new", [ledger.open("one", tasks), other.open("one", tasks)], [False, True])
    (old,) = _leased(ledger, 1)
    _equal("an accepted ending", ledger.finalize([_done(old, "k", "first")]), [True])
    held = _leased(ledger, 5)
    _equal("a changed run", other.open("two", tasks), False)
    _equal("counts of a changed run", sum(other.counts().values()), 30)
    _equal("results of a changed run", set(other.results(["k", "none"])), {"k"})
    again = _leased(other, 30)
    _require({lease.task for lease in held} <= {lease.task for lease in again}, "tasks of a changed run are new")
    _equal(
        "leases of before the change",
        ledger.finalize([_done(lease, f"s{lease.task}", "old") for lease in held]),
        [False] * len(held),
    )
    ledger.close()
    other.close()


def first_answer_stays(opened: Opened, seed: int) -> None:
    """A key has one answer for ever, also one that a stale lease brought; then nothing partial is left of it."""
    ledger = opened("answers")
    ledger.open("run", some_tasks(np.random.default_rng(seed), 20, models=1, most_parents=0))
    ledger.save([("k", Partial("half", (1, 2), (3,))), ("other", Partial("h"))])
    _equal("what was saved", ledger.partials(["k"]), {"k": Partial("half", (1, 2), (3,))})
    (lease,) = _leased(ledger, 1)
    _equal("a stale ending", ledger.finalize([replace(_done(lease, "k", "first"), fence=lease.fence - 1)]), [False])
    _equal("partials of an answered key", ledger.partials(["k", "other"]), {"other": Partial("h")})
    ledger.save([("k", Partial("late"))])
    _equal("partials of an answered key", ledger.partials(["k"]), {})
    twice = [_done(lease, "k", "second"), _done(lease, "k", "third")]
    _equal("one lease ended twice", ledger.finalize(twice), [True, False])
    output = ledger.outputs([lease.task])[lease.task]
    _equal("the answer of its key", output and output.text, "first")
    ledger.close()


def keeps_any_text(opened: Opened, seed: int) -> None:
    """Whatever a model says comes back the same: NUL, half a surrogate, a million letters."""
    tasks = some_tasks(np.random.default_rng(seed), 60, models=1, most_parents=0)
    for number, text in enumerate(_ODD_TEXTS):
        ledger = opened(f"texts_{number}")
        ledger.open("run", tasks)
        one, two = _leased(ledger, 2)
        ledger.save([("part", Partial(text))])
        ledger.note({"fact": text})
        ledger.finalize([_done(one, "k", text), Ending(two.task, two.fence, State.DEAD, error=text)])
        ledger.close()
        ledger = opened(f"texts_{number}")
        _equal("an answer", ledger.results(["k"])["k"].text, text)
        _equal("an answer so far", ledger.partials(["part"])["part"].text, text)
        _equal("an error", ledger.rows(two.task, 1)[0].error, text)
        _equal("a fact", ledger.metadata(), {"fact": text} if text else {})
        ledger.close()


def refuses_whole(opened: Opened, seed: int) -> None:
    """A batch with an ending that cannot be is refused whole."""
    ledger = opened("rejection")
    ledger.open("run", some_tasks(np.random.default_rng(seed), 20, models=1, most_parents=0))
    one, two = _leased(ledger, 2)
    before = ledger.rows(0, 20)
    answer = Output("x", "stop", 1, 1)
    for wrong in (Ending(two.task, two.fence, State.DONE), Ending(two.task, two.fence, State.BLOCKED),
                  Ending(two.task, two.fence, State.SKIPPED, "k", answer)):  # fmt: skip
        try:
            ledger.finalize([_done(one, "good", "x"), wrong])
        except InputError:
            _equal("after a refusal", (ledger.rows(0, 20), ledger.results(["good", "k"])), (before, {}))
        else:
            raise AssertionError(f"an ending that cannot be must be refused; this was not: {wrong}")
    ledger.close()


def sums_up(opened: Opened, seed: int) -> None:
    """Lengths and sums are those of the tasks as they stand, also of such as share an answer or were tried twice."""
    rng = np.random.default_rng(seed)
    tasks = some_tasks(rng, 60, models=1, most_parents=1)
    ledger = opened("sums")
    ledger.open("run", tasks)
    for _ in range(12):
        for lease in _leased(ledger, 7):
            states = (State.DONE, State.DONE, State.SKIPPED, State.DEAD, State.READY)
            state = states[int(rng.integers(len(states)))]
            key = f"k{int(rng.integers(6))}"
            answer = Output("x", "stop", int(key[1:]), 1 + int(key[1:]))
            of = (key, answer) if state == State.DONE else (None, None)
            error = "e" if state in (State.DEAD, State.READY) else None
            ledger.finalize([Ending(lease.task, lease.fence, state, of[0], of[1], error)])
    rows = ledger.rows(0, 60)
    ended = [row for row in rows if row.state >= State.DONE]
    tokens = {row.task: (row.output.prompt_tokens, row.output.output_tokens) for row in ended if row.output}
    expected = [(row.task, row.state, *tokens.get(row.task, (0, 0))) for row in ended]
    _equal("lengths of what has ended", ledger.lengths(), expected)
    sums: dict[int, list[int]] = {}
    for row in rows:
        one = sums.setdefault(int(tasks.call[row.task]), [0, 0])
        one[0] += row.attempts
        one[1] += tokens.get(row.task, (0, 0))[1]
    _equal("sums of each call", ledger.sums(), [(call, *sums[call]) for call in sorted(sums)])
    ledger.close()


def many_lease_at_once(opened: Opened, seed: int) -> None:
    """Several who lease and settle at once get every task once, and none is left."""
    tasks = some_tasks(np.random.default_rng(seed), 300, models=1)
    first = opened("crowd")
    first.open("run", tasks)

    def drain(number: int) -> list[int]:
        ledger, mine = opened("crowd"), []
        while any(not state >= State.DONE for _, state in ledger.counts()):
            leases = ledger.lease(0, 7, owner=f"owner{number}", now_s=0, lease_s=1e9)
            mine += [lease.task for lease in leases]
            taken = ledger.finalize([_done(lease, f"k{lease.task}", "x") for lease in leases])
            _require(all(taken), "who holds a lease must be able to end it")
        ledger.close()
        return mine

    with ThreadPoolExecutor(4) as pool:
        got = [task for mine in pool.map(drain, range(4)) for task in mine]
    _equal("tasks leased by several at once", sorted(got), list(range(300)))
    _equal("a law", broken_law(tasks, first.rows(0, 301)), "")
    first.close()


LEDGER_CHECKS: dict[str, Check] = {
    "answers_as_the_rule": answers_as_the_rule,
    "lays_out_once": lays_out_once,
    "first_answer_stays": first_answer_stays,
    "keeps_any_text": keeps_any_text,
    "refuses_whole": refuses_whole,
    "sums_up": sums_up,
    "many_lease_at_once": many_lease_at_once,
}
"""What a ledger must keep, in the order in which it is looked at."""


def _leased(ledger: Ledger, most: int) -> list[Lease]:
    return ledger.lease(0, most, owner="me", now_s=0.0, lease_s=60.0)


def _done(lease: Lease, key: str, text: str) -> Ending:
    return Ending(lease.task, lease.fence, State.DONE, key, Output(text, "stop", 1, 1))


def _equal(what: str, came: object, expected: object) -> None:
    _require(came == expected, f"{what}: {str(expected)[:200]} must come; {str(came)[:200]} came")


def _require(good: bool, message: str) -> None:
    if not good:
        raise AssertionError(message)
