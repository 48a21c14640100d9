"""How an application may turn out: which tasks come to be, and how long they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lengthwise.catalog import active_parameters, embedding_parameters
from lengthwise.schema.app import Flags, Floats, Ints, TaskDraw, Tasks
from lengthwise.schema.specs import ModelSpec
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
    prompt, output = _stable(tasks, present, whole, most)
    return TaskDraw(present, prompt, output)


def _present(tasks: Tasks, level: Floats) -> Flags:
    falls = level < tasks.coin_chance
    hangs = np.flatnonzero(tasks.coin_after >= 0)
    while len(hangs):
        before = falls.copy()
        falls[hangs] &= falls[tasks.coin_after[hangs]]
        if (before == falls).all():
            break
    return np.where(tasks.random_draw < 0, True, falls[tasks.random_draw]) if len(falls) else np.ones(len(tasks), bool)


def _outputs(tasks: Tasks, lengths: Sequence[Marginal | None], level: Floats) -> Ints:
    """[n] without regard to the longest context."""
    out = tasks.max_tokens.copy()
    for m, marginal in enumerate(lengths):
        if marginal is not None:
            mine = np.flatnonzero(tasks.model == m)
            drawn = np.maximum(np.rint(marginal.quantile(level[mine])), 1).astype(np.int64)
            out[mine] = np.minimum(out[mine], drawn)
    return np.where(tasks.known_tokens > 0, tasks.known_tokens, out)


def _stable(tasks: Tasks, present: Flags, complete: Ints, most: Ints) -> tuple[Ints, Ints]:
    """Prompts with what parents put in, and outputs within the context; each hangs on the other."""
    child = np.repeat(np.arange(len(tasks)), np.diff(tasks.parent_start))
    put = np.flatnonzero((tasks.shown > 0) & present[tasks.parent])
    child, parent, shown = child[put], tasks.parent[put], tasks.shown[put]
    output = complete
    for _ in range(_SETTLES):
        added = np.bincount(child, shown * output[parent], len(tasks)).astype(np.int64)
        prompt = np.minimum(tasks.prompt_tokens + added, most - 1)
        then = np.maximum(np.minimum(complete, most - prompt), 1)
        if (then == output).all():
            break
        output = then
    return prompt, output


@dataclass(frozen=True)
class ModelLoad:
    """The tasks of one model that come to be, in order of their numbers.

    Attributes:
        task: [k] numbers.
        prompt: [k] tokens.
        output: [k] tokens.
        flops: FLOPs of a task with so many computed tokens x: flops[0] x + flops[1] x^2, as ``metrics.model_flops``.
        inner: (child, parent), positions in here: who waits for whom inside the model.
        outer: (child position in here, parent task) of parents in other models.
        levels: Positions by the longest chain of ``inner`` before them, from the second level on.
    """

    task: Ints
    prompt: Ints
    output: Ints
    flops: tuple[float, float]
    inner: tuple[Ints, Ints]
    outer: tuple[Ints, Ints]

    def __len__(self) -> int:
        return len(self.task)

    @cached_property
    def fresh(self) -> Ints:
        """[k] zeros: nobody has produced anything."""
        return np.zeros(len(self.task), np.int64)

    @cached_property
    def disabled(self) -> Floats:
        """[k] infinities: nobody has ended."""
        return np.full(len(self.task), np.inf)

    @cached_property
    def depth(self) -> Ints:
        """[k] tasks in the longest chain of ``inner`` before each."""
        depth = np.zeros(len(self.task), np.int64)
        child, parent = self.inner
        while len(child):
            before = depth.copy()
            np.maximum.at(depth, child, depth[parent] + 1)
            if (before == depth).all():
                break
        return depth

    def work(self, produced: Ints) -> Floats:
        """[k] FLOPs that so many produced tokens stand for; none where none was produced."""
        tokens = np.where(produced > 0, self.prompt + produced, 0).astype(np.float64)
        linear, square = self.flops
        return linear * tokens + square * tokens * tokens


@dataclass(frozen=True)
class Load:
    """A draw, model by model.

    Attributes:
        models: The load of each.
        parents: For each model, the others that it takes outputs of.
        order: Models, parents before children where there are no cycles.
        cyclic: Whether some models wait for one another.
        position: [tasks] each task's position in its model's load.
        model: [tasks] each task's model.
    """

    models: tuple[ModelLoad, ...]
    parents: tuple[frozenset[int], ...]
    order: tuple[int, ...]
    cyclic: bool
    position: Ints
    model: Ints


def load_of(tasks: Tasks, draw: TaskDraw, specs: list[ModelSpec]) -> Load:
    """A draw laid out model by model."""
    position = np.zeros(len(tasks), np.int64)
    child = np.repeat(np.arange(len(tasks)), np.diff(tasks.parent_start))
    alive = draw.present[child] & draw.present[tasks.parent]
    child, parent = child[alive], tasks.parent[alive]
    numbers = [np.flatnonzero(draw.present & (tasks.model == m)) for m in range(len(specs))]
    for mine in numbers:
        position[mine] = np.arange(len(mine))
    own = tasks.model[child]
    same = own == tasks.model[parent]
    loads, parents = [], []
    for m, spec in enumerate(specs):
        inside, across = same & (own == m), ~same & (own == m)
        loads.append(
            ModelLoad(
                task=numbers[m],
                prompt=np.maximum(draw.prompt_tokens[numbers[m]], 1),
                output=np.maximum(draw.output_tokens[numbers[m]], 1),
                flops=_flops(spec),
                inner=(position[child[inside]], position[parent[inside]]),
                outer=(position[child[across]], parent[across]),
            )
        )
        parents.append(frozenset(np.unique(tasks.model[parent[across]]).tolist()))
    order, cyclic = _ordered(parents)
    return Load(tuple(loads), tuple(parents), order, cyclic, position, tasks.model)


def _flops(spec: ModelSpec) -> tuple[float, float]:
    """FLOPs a token, and a squared token: a token attends to half of all on average."""
    attention = spec.attention
    lookup = 0 if spec.tied_embeddings else embedding_parameters(spec)
    key_dim = attention.head_dim + (attention.rope_head_dim if attention.is_mla else 0)
    dims = key_dim + (attention.v_head_dim or attention.head_dim)
    return 2.0 * (active_parameters(spec) - lookup), 1.0 * attention.heads * dims * spec.layers


def _ordered(parents: list[frozenset[int]]) -> tuple[tuple[int, ...], bool]:
    """Models in topological order, the lowest number first; of a cycle the lowest number goes first."""
    left, order, cyclic = dict(enumerate(parents)), [], False
    while left:
        ready = [m for m, some in left.items() if not some & set(left) - {m}]
        cyclic |= not ready
        order.append(ready[0] if ready else next(iter(left)))
        del left[order[-1]]
    return tuple(order), cyclic
