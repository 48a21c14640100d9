"""How an application may turn out: which tasks come to be, and how long they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lengthwise.schema.app_tasks import Flags, Floats, Ints, TaskDraw, Tasks
from lengthwise.workload import Marginal

_SETTLES = 64


def draw(
    tasks: Tasks, lengths: Sequence[Marginal | None], max_model_len: Sequence[int], seed: int | Sequence[int]
) -> TaskDraw:
    """One way in which an application may turn out (SamuLLM, section 4.1).

    An output has min(X, max_tokens, max_model_len - prompt) tokens, X from its model's distribution or known
    beforehand; prompts hold the outputs of parents. The first k tasks do not depend on those behind them.

    Args:
        tasks: The application's.
        lengths: Of each model; None: as long as may be.
        max_model_len: Of each model.
        seed: Equal ones draw the same.
    """
    of_lengths, of_coins = np.random.default_rng(seed).spawn(2)
    level = np.maximum(of_lengths.random(len(tasks)), 2.0**-54)
    present = _present(tasks, of_coins.random(len(tasks.coin_chance)))
    whole = _outputs(tasks, lengths, level)
    most = np.asarray(max_model_len, np.int64)[tasks.model]
    prompt, output = _settled(tasks, present, whole, most)
    return TaskDraw(present, prompt, output)


def _present(tasks: Tasks, level: Floats) -> Flags:
    falls = level < tasks.coin_chance
    hangs = np.flatnonzero(tasks.coin_after >= 0)
    while len(hangs):
        before = falls.copy()
        falls[hangs] &= falls[tasks.coin_after[hangs]]
        if (before == falls).all():
            break
    return np.where(tasks.coin < 0, True, falls[tasks.coin]) if len(falls) else np.ones(len(tasks), bool)


def _outputs(tasks: Tasks, lengths: Sequence[Marginal | None], level: Floats) -> Ints:
    """[n] without regard to the longest context."""
    out = tasks.max_tokens.copy()
    for m, marginal in enumerate(lengths):
        if marginal is not None:
            mine = np.flatnonzero(tasks.model == m)
            drawn = np.maximum(np.rint(marginal.quantile(level[mine])), 1).astype(np.int64)
            out[mine] = np.minimum(out[mine], drawn)
    return np.where(tasks.known_tokens > 0, tasks.known_tokens, out)


def _settled(tasks: Tasks, present: Flags, whole: Ints, most: Ints) -> tuple[Ints, Ints]:
    """Prompts with what parents put in, and outputs within the context; each hangs on the other."""
    child = np.repeat(np.arange(len(tasks)), np.diff(tasks.parent_start))
    put = np.flatnonzero((tasks.shown > 0) & present[tasks.parent])
    child, parent, shown = child[put], tasks.parent[put], tasks.shown[put]
    output = whole
    for _ in range(_SETTLES):
        added = np.bincount(child, shown * output[parent], len(tasks)).astype(np.int64)
        prompt = np.minimum(tasks.prompt_tokens + added, most - 1)
        then = np.maximum(np.minimum(whole, most - prompt), 1)
        if (then == output).all():
            break
        output = then
    return prompt, output
