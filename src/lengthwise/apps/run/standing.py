"""Where a run stands, from the ledger's counts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from lengthwise.apps.ledger.contracts import ENDED, State
from lengthwise.apps.run.layout import Layout

Counts = Mapping[tuple[int, State], int]


@dataclass(frozen=True)
class Standing:
    """Tasks by model.

    Attributes:
        total: [models] all tasks.
        ended: [models] that have ended.
        able: [models] that are ready or leased: something can be done for them now.
        finished: Models that have nothing left to do.
    """

    total: tuple[int, ...]
    ended: tuple[int, ...]
    able: tuple[int, ...]
    finished: frozenset[int]

    @property
    def is_over(self) -> bool:
        """Whether all have ended."""
        return self.total == self.ended


def standing(layout: Layout, counts: Counts) -> Standing:
    """Of counts by pair of call and model."""
    models = len(layout.tasks.models)
    total, ended, able = [0] * models, [0] * models, [0] * models
    for (pair, state), tasks in counts.items():
        model = layout.pairs[pair][1]
        total[model] += tasks
        ended[model] += tasks if state in ENDED else 0
        able[model] += tasks if state in (State.READY, State.LEASED) else 0
    finished = frozenset(model for model in range(models) if total[model] == ended[model])
    return Standing(tuple(total), tuple(ended), tuple(able), finished)


class Waits:
    """Which models wait for which."""

    def __init__(self, layout: Layout) -> None:
        tasks = layout.tasks
        child = np.repeat(np.arange(len(tasks)), np.diff(tasks.parent_start))
        pairs = np.unique(tasks.model[tasks.parent] * len(tasks.models) + tasks.model[child])
        self._children: dict[int, set[int]] = {}
        for pair in pairs.tolist():
            parent, model = divmod(pair, len(tasks.models))
            self._children.setdefault(parent, set()).add(model)

    def starved(self, now: Standing, running: Collection[int]) -> frozenset[int]:
        """Running models that have nothing to do before one is done that does not run."""
        reached = {model for model in running if now.able[model]}
        open_ = sorted(reached)
        while open_:
            for model in self._children.get(open_.pop(), ()):
                if model in running and model not in reached:
                    reached.add(model)
                    open_.append(model)
        return frozenset(m for m in running if m not in reached and m not in now.finished)
