"""Random walks over a ledger and the naive rule side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lengthwise.apps.ledger import Ending, Lease, Ledger, Output, Partial, State, TaskRow
from lengthwise.schema.app_tasks import Tasks
from lengthwise.testing._ledger_model import ModelLedger, some_tasks

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
        "settle",
        "settle",
        "settle",
        "save",
        "beat",
        "expire",
        "note",
        "reopen",
        "lay_out",
    )

    def __init__(self, opened: Callable[[], Ledger], model: ModelLedger, rng: np.random.Generator) -> None:
        self._opened, self._model, self._rng = opened, model, rng
        self._handles = [opened(), opened()]
        self._now_s, self._layouts, self._said = 0.0, 0, 0
        self._leases: list[Lease] = []
        self._tasks = some_tasks(rng, _TASKS)
        self.lay_out()

    def compare(self, when: str, law: Law) -> None:
        ledger, model, every = self._handle(), self._model, range(_TASKS + 1)
        for name, values in (("rows", (0, 99)), ("counts", ()), ("results", (_KEYS,)), ("partials", (_KEYS,)),
                             ("facts", ()), ("outputs", (every,))):  # fmt: skip
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

    def settle(self) -> tuple[Any, Any]:
        """Leases of any age, some of them twice."""
        if not self._leases:
            return None, None
        recent = self._leases[-8:]
        some = [
            recent[int(i)] for i in self._rng.integers(0, len(recent), size=int(self._rng.integers(1, 5)))
        ]
        return self._both("settle", [self._ending(lease) for lease in some])

    def _ending(self, lease: Lease) -> Ending:
        state, self._said = _ENDS[int(self._rng.integers(0, len(_ENDS)))], self._said + 1
        if state == State.DONE:
            output = Output(f"said {self._said}", "stop", 3, self._said)
            return Ending(lease.task, lease.fence, state, str(self._rng.choice(_KEYS)), output)
        if state == State.READY:
            later_s, counts = self._now_s + float(self._rng.integers(0, 3)), bool(self._rng.integers(0, 2))
            error = f"error {self._said}" if counts else None
            return Ending(lease.task, lease.fence, state, error=error, not_before_s=later_s, counts=counts)
        return Ending(
            lease.task, lease.fence, state, error=f"error {self._said}" if state == State.DEAD else None
        )

    def save(self) -> tuple[Any, Any]:
        self._said += 1
        keys = [str(key) for key in self._rng.choice(_KEYS, size=3)]
        return self._both(
            "save", [(key, Partial(f"so far {i} {self._said}", (1,), (2, 3))) for i, key in enumerate(keys)]
        )

    def beat(self) -> tuple[Any, Any]:
        return self._both("beat", str(self._rng.choice(_OWNERS)), now_s=self._now_s, lease_s=5.0)

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
