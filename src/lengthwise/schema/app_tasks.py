"""What an application may ask of its models, as columns, and one way in which it may turn out. No texts here."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Tasks:
    """Everything that an application may ask of its models: a row a task, parents before children.

    Which of them really come to be is drawn (or found out while it runs) by *coins*: a branch that is taken, a round
    of a loop that is still needed, an item of a list that is there. A task comes to be where its coin, and all
    coins that that one hangs on, fall so.

    Attributes:
        calls: Names of the calls.
        models: Names of the models, as the application calls them.
        call: [n] index into ``calls``.
        model: [n] index into ``models``.
        row: [n] which row of the inputs.
        round: [n] round of a loop, from 0.
        index: [n] item of a fan-out, from 0.
        prompt_tokens: [n] of the prompt without what parents put into it.
        max_tokens: [n] longest output that is asked for.
        known_tokens: [n] output length where it is known beforehand, else 0.
        parent_start: [n+1] where a task's parents begin in ``parent``.
        parent: [m] tasks whose outputs a task waits for.
        shown: [m] how often the parent's output stands in the task's prompt; 0: only waited for.
        coin: [n] which coin, or -1: it always comes to be.
        coin_chance: [k] probability that the coin falls so, given that the one before it did.
        coin_after: [k] the coin that it hangs on, with a smaller number, or -1.
    """

    calls: tuple[str, ...]
    models: tuple[str, ...]
    call: Ints
    model: Ints
    row: Ints
    round: Ints
    index: Ints
    prompt_tokens: Ints
    max_tokens: Ints
    known_tokens: Ints
    parent_start: Ints
    parent: Ints
    shown: Ints
    coin: Ints
    coin_chance: Floats = field(default_factory=lambda: np.zeros(0))
    coin_after: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self.model)

    def __post_init__(self) -> None:
        n = len(self.model)
        for name in ("call", "row", "round", "index", "prompt_tokens", "max_tokens", "known_tokens", "coin"):
            if len(getattr(self, name)) != n:
                raise InputError(
                    f"{name} must have one value a task ({n}); it has {len(getattr(self, name))}"
                )
        if len(self.parent_start) != n + 1 or len(self.parent) != len(self.shown):
            raise InputError("parent_start must have one entry more than tasks, shown one for each parent")
        child = np.repeat(np.arange(n), np.diff(self.parent_start))
        if len(self.parent) and not ((self.parent >= 0) & (self.parent < child)).all():
            raise InputError("every parent must stand before its child")
        if len(self.coin_after) and not (self.coin_after < np.arange(len(self.coin_after))).all():
            raise InputError("every coin must hang on an earlier one")

    @cached_property
    def children(self) -> tuple[Ints, Ints]:
        """(start [n+1], child [m]): the tasks that wait for each, by number."""
        child = np.repeat(np.arange(len(self)), np.diff(self.parent_start))
        order = np.argsort(self.parent, kind="stable")
        start = np.searchsorted(self.parent[order], np.arange(len(self) + 1))
        return start.astype(np.int64), child[order]


@dataclass(frozen=True)
class TaskDraw:
    """One way in which it may turn out.

    Attributes:
        present: [n] whether the task comes to be.
        prompt_tokens: [n] with what its parents put into it, cut to what its model takes.
        output_tokens: [n] at least 1 where present.
    """

    present: Flags
    prompt_tokens: Ints
    output_tokens: Ints
