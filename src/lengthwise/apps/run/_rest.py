"""What is left of an application: its tasks without those that have ended, answers under way from where they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lengthwise.apps.draws import draw
from lengthwise.apps.ledger.contracts import State
from lengthwise.apps.run._spread import Ints, Seen, Spread
from lengthwise.schema.app_tasks import Flags, TaskDraw, Tasks

EndedRows = Sequence[tuple[int, State, int, int]]
"""(task, state, prompt tokens, output tokens) of all that have ended."""


@dataclass(frozen=True, eq=False)
class Rest:
    """What is left.

    Attributes:
        tasks: Those that have not ended.
        written: [k] tokens of their answers so far, which stand in their prompts now.
    """

    tasks: Tasks
    written: Ints

    def draws(
        self, spreads: Sequence[Spread], longest: Sequence[int], seeds: Sequence[int]
    ) -> list[TaskDraw]:
        """Ways in which it may turn out."""
        return [self._draw(spreads, longest, seed) for seed in seeds]

    def _draw(self, spreads: Sequence[Spread], longest: Sequence[int], seed: int) -> TaskDraw:
        tasks = self.tasks
        level = np.random.default_rng((seed, 1)).random(len(tasks))
        tokens = np.ones(len(tasks), np.int64)
        for model, spread in enumerate(spreads):
            mine = np.flatnonzero(tasks.model == model)
            tokens[mine] = spread.drawn(level[mine], self.written[mine]) - self.written[mine]
        tokens = np.where(tasks.known_tokens > 0, tasks.known_tokens, np.minimum(tokens, tasks.max_tokens))
        known = replace(tasks, known_tokens=np.maximum(tokens, 1))
        return draw(known, [None] * len(spreads), longest, (seed, 2))


def rest_of(tasks: Tasks, ended: EndedRows, written: Mapping[int, int]) -> Rest:
    """What is left of tasks when some have ended and others have so many tokens already."""
    place, state, _, output = _columns(ended)
    over = np.zeros(len(tasks), bool)
    over[place] = True
    tokens = np.zeros(len(tasks), np.int64)
    tokens[place] = output
    had = np.zeros(len(tasks), np.int64)
    had[list(written)] = list(written.values())
    left = np.flatnonzero(~over)
    had = had[left]
    child = np.repeat(np.arange(len(tasks)), np.diff(tasks.parent_start))
    put = np.flatnonzero(over[tasks.parent] & (tasks.shown > 0))
    shown = np.bincount(child[put], tasks.shown[put] * tokens[tasks.parent[put]], len(tasks)).astype(np.int64)
    number = np.cumsum(~over) - 1
    stays = np.flatnonzero(~over[child] & ~over[tasks.parent])
    start = np.searchsorted(number[child[stays]], np.arange(len(left) + 1)).astype(np.int64)
    same = ("call", "model", "row", "round", "index", "coin")
    known = tasks.known_tokens[left]
    return Rest(
        replace(
            tasks,
            **{name: getattr(tasks, name)[left] for name in same},
            prompt_tokens=tasks.prompt_tokens[left] + shown[left] + had,
            max_tokens=np.maximum(tasks.max_tokens[left] - had, 1),
            known_tokens=np.where(known > 0, np.maximum(known - had, 1), 0),
            parent_start=start,
            parent=number[tasks.parent[stays]],
            shown=tasks.shown[stays],
            coin_chance=_fallen(tasks, place, state),
        ),
        had,
    )


def _columns(ended: EndedRows) -> tuple[Ints, Ints, Ints, Ints]:
    rows = np.array([tuple(map(int, row)) for row in ended], np.int64).reshape(-1, 4)
    return rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3]


def _fallen(tasks: Tasks, place: Ints, state: Ints) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Chances of coins, certain ones of those that have fallen."""
    chance = tasks.coin_chance.copy()
    for which, sure in ((State.SKIPPED, 0.0), (State.DONE, 1.0)):
        coins = tasks.coin[place[state == which]]
        chance[coins[coins >= 0]] = sure
    return chance


def seen_of(tasks: Tasks, ended: EndedRows, written: Mapping[int, int], longest: Sequence[int]) -> list[Seen]:
    """What was seen of each model's lengths; tasks whose lengths were known beforehand tell nothing."""
    place, state, prompt, output = _columns(ended)
    free: Flags = (state == State.DONE) & (tasks.known_tokens[place] == 0)
    place, prompt, output = place[free], prompt[free], output[free]
    model = tasks.model[place]
    full = (output >= tasks.max_tokens[place]) | (prompt + output >= np.asarray(longest)[model])
    some = np.array(list(written), np.int64)
    going = np.array(list(written.values()), np.float64)
    counts = tasks.known_tokens[some] == 0
    some, going = some[counts], going[counts]
    found = []
    for m in range(len(longest)):
        at_limit = output[full & (model == m)] - 1.0
        cut = np.concatenate([at_limit, going[tasks.model[some] == m]])
        found.append(Seen(output[~full & (model == m)].astype(np.float64), cut))
    return found
