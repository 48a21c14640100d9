"""The conformance kit of ledgers: ``check_ledger(opened)`` in a test of one's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from lengthwise.apps.ledger import Ending, Lease, Ledger, Output, Partial, State, TaskRow
from lengthwise.schema.app_tasks import Tasks
from lengthwise.schema.errors import InputError
from lengthwise.testing._ledger_model import ModelLedger, parents_of, some_tasks
from lengthwise.testing._ledger_walk import walk

Opened = Callable[[str], Ledger]
Check = Callable[[Opened, int], None]

_ODD_TEXTS = (
    "",
    "\x00",
    "\ud800 half a pair",
    "\U0001f600\u202e",
    "x" * 1_000_000,
    "'; DROP TABLE tasks; --%s?",
)


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
        return (
            f"a task must be where its parents let it; task {row.task} is {row.state.name}, they are {came}"
        )
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
    _equal("an accepted ending", ledger.settle([_done(old, "k", "first")]), [True])
    held = _leased(ledger, 5)
    _equal("a changed run", other.open("two", tasks), False)
    _equal("counts of a changed run", sum(other.counts().values()), 30)
    _equal("results of a changed run", set(other.results(["k", "none"])), {"k"})
    again = _leased(other, 30)
    _require(
        {lease.task for lease in held} <= {lease.task for lease in again}, "tasks of a changed run are new"
    )
    _equal(
        "leases of before the change",
        ledger.settle([_done(lease, f"s{lease.task}", "old") for lease in held]),
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
    _equal(
        "a stale ending", ledger.settle([replace(_done(lease, "k", "first"), fence=lease.fence - 1)]), [False]
    )
    _equal("partials of an answered key", ledger.partials(["k", "other"]), {"other": Partial("h")})
    ledger.save([("k", Partial("late"))])
    _equal("partials of an answered key", ledger.partials(["k"]), {})
    twice = [_done(lease, "k", "second"), _done(lease, "k", "third")]
    _equal("one lease ended twice", ledger.settle(twice), [True, False])
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
        ledger.settle([_done(one, "k", text), Ending(two.task, two.fence, State.DEAD, error=text)])
        ledger.close()
        ledger = opened(f"texts_{number}")
        _equal("an answer", ledger.results(["k"])["k"].text, text)
        _equal("an answer so far", ledger.partials(["part"])["part"].text, text)
        _equal("an error", ledger.rows(two.task, 1)[0].error, text)
        _equal("a fact", ledger.facts(), {"fact": text} if text else {})
        ledger.close()


def refuses_whole(opened: Opened, seed: int) -> None:
    """A batch with an ending that cannot be is refused whole."""
    ledger = opened("refusal")
    ledger.open("run", some_tasks(np.random.default_rng(seed), 20, models=1, most_parents=0))
    one, two = _leased(ledger, 2)
    before = ledger.rows(0, 20)
    answer = Output("x", "stop", 1, 1)
    for wrong in (Ending(two.task, two.fence, State.DONE), Ending(two.task, two.fence, State.BLOCKED),
                  Ending(two.task, two.fence, State.SKIPPED, "k", answer)):  # fmt: skip
        try:
            ledger.settle([_done(one, "good", "x"), wrong])
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
            ledger.settle([Ending(lease.task, lease.fence, state, of[0], of[1], error)])
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
            taken = ledger.settle([_done(lease, f"k{lease.task}", "x") for lease in leases])
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
