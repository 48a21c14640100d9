"""Evaluations by workers, each kept as soon as it is done and none done twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lengthwise.schema.plan import Choice
from lengthwise.search.bench import Bench, Task
from lengthwise.search.codec import from_dict, to_dict
from lengthwise.search.store import Store, content_key
from lengthwise.search.workers import Workers

Progress = Callable[[str, int, int], None]


@dataclass
class Run:
    """A search under way.

    Attributes:
        bench: What evaluates.
        workers: Who does it.
        identity: Text that tells this question from others in the same store.
        store: Where evaluations are kept; None keeps none.
        progress: Called with the step's name, evaluations done and evaluations to do.
    """

    bench: Bench
    workers: Workers
    identity: str = ""
    store: Store | None = None
    progress: Progress = lambda *_: None
    clock: Callable[[], float] = time.monotonic
    reused: int = 0
    simulations: int = 0
    requests: int = 0
    done: dict[str, int] = field(default_factory=dict)
    expected: dict[str, int] = field(default_factory=dict)
    started_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.started_s = self.clock()

    def restart(self) -> None:
        """The search begins now."""
        self.started_s = self.clock()

    def seconds(self) -> float:
        """Since the search began."""
        return self.clock() - self.started_s

    def expect(self, step: str, count: int) -> None:
        """Says how many evaluations of a step there will be, as far as is known."""
        self.expected[step] = count

    def each(self, step: str, choices: Sequence[Choice], extra: tuple[Any, ...] = ()) -> list[Choice]:
        """The choices after a step, in their order."""
        tasks = [Task(step, choice, extra) for choice in choices]
        keys = [self._key(task) for task in tasks]
        found: dict[int, Choice] = {}
        for at, key in enumerate(keys):
            told = self.store.get(key) if self.store is not None else None
            if told is not None:
                found[at] = from_dict(told)
        self.reused += len(found)
        left = [at for at in range(len(tasks)) if at not in found]
        self._tell(step, len(found))
        for place, choice in self.workers.run([tasks[at] for at in left], self.bench):
            at = left[place]
            found[at] = choice
            if self.store is not None:
                self.store.put(keys[at], to_dict(choice))
            self._tell(step, 1)
        for at, task in enumerate(tasks):
            self.simulations += found[at].simulations - task.choice.simulations
            self.requests += found[at].requests - task.choice.requests
        return [found[at] for at in range(len(tasks))]

    def _key(self, task: Task) -> str:
        if self.store is None:
            return ""
        return content_key(self.identity, task.step, task.choice.settings, task.extra)

    def _tell(self, step: str, more: int) -> None:
        self.done[step] = self.done.get(step, 0) + more
        self.progress(step, self.done[step], max(self.expected.get(step, 0), self.done[step]))
