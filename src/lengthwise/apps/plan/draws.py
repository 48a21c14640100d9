"""Samples (draws) of an application: which tasks are present, and their lengths; and the load of each model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lengthwise.catalog import active_parameters, embedding_parameters
from lengthwise.schema.app import Coins, Flags, Floats, Ints, TaskDraw, Tasks
from lengthwise.schema.specs import ModelSpec
from lengthwise.workload import Marginal

_MAX_LENGTH_PASSES = 64


def draw(
    tasks: Tasks, lengths: Sequence[Marginal | None], max_model_len: Sequence[int], seed: int | Sequence[int]
) -> TaskDraw:
    """Sample which tasks of an application are present, and their lengths (SamuLLM, section 4.1).

    An output has its known length. Without one, the length is drawn from the model's distribution in ``lengths``, up to
    the task's max_tokens, or is max_tokens if the model has no distribution (None). A prompt includes the outputs of
    parents, as often as ``Tasks.shown`` states. Prompt and output together have at most max_model_len tokens. The draws
    of the first k tasks do not depend on later tasks.
    """
    length_rng, coin_rng = np.random.default_rng(seed).spawn(2)
    level = np.maximum(length_rng.random(len(tasks)), 2.0**-54)
    present = _present(tasks.random_draw, tasks.coins, coin_rng.random(len(tasks.coins)))
    wanted = tasks.max_tokens.copy()
    for m, marginal in enumerate(lengths):
        if marginal is not None:
            of_model = np.flatnonzero(tasks.model == m)
            sampled = np.maximum(np.rint(marginal.quantile(level[of_model])), 1).astype(np.int64)
            wanted[of_model] = np.minimum(wanted[of_model], sampled)
    wanted = np.where(tasks.known_tokens > 0, tasks.known_tokens, wanted)
    context = np.asarray(max_model_len, np.int64)[tasks.model]
    child = np.repeat(np.arange(len(tasks)), np.diff(tasks.parent_start))
    put = np.flatnonzero((tasks.shown > 0) & present[tasks.parent])
    child, parent, shown = child[put], tasks.parent[put], tasks.shown[put]
    output = wanted
    # Outputs lengthen the prompts of children, which shortens the outputs of these: iterate to the fixed point.
    for _ in range(_MAX_LENGTH_PASSES):
        added = np.bincount(child, shown * output[parent], len(tasks)).astype(np.int64)
        prompt = np.minimum(tasks.prompt_tokens + added, context - 1)
        cut = np.maximum(np.minimum(wanted, context - prompt), 1)
        if (cut == output).all():
            break
        output = cut
    return TaskDraw(present, prompt, output)


def _present(random_draw: Ints, coins: Coins, level: Floats) -> Flags:
    """Return whether each task is present, [n]. A task is present if its coin and all coins before it succeed."""
    if not len(coins):
        return np.ones(len(random_draw), bool)
    succeeds = level < coins.chance
    dependent = np.flatnonzero(coins.after >= 0)
    while len(dependent):
        before = succeeds.copy()
        succeeds[dependent] &= succeeds[coins.after[dependent]]
        if (before == succeeds).all():
            break
    return np.where(random_draw < 0, True, succeeds[random_draw])


def depths(child: Ints, parent: Ints, n: int) -> Ints:
    """Return the number of edges in the longest chain that ends at each of n tasks ([n])."""
    depth = np.zeros(n, np.int64)
    while len(child):
        before = depth.copy()
        np.maximum.at(depth, child, depth[parent] + 1)
        if (before == depth).all():
            break
    return depth


@dataclass(frozen=True)
class ModelLoad:
    """The present tasks of one model, in the order of their numbers."""

    task: Ints  # [k] number of each task
    prompt: Ints  # [k] prompt tokens
    output: Ints  # [k] output tokens
    # coefficients (a, b): x computed tokens of a task take a x + b x^2 FLOPs, as in ``metrics.model_flops``
    flops: tuple[float, float]
    inner: tuple[Ints, Ints]  # child and parent of each dependency within the model, as positions in ``task``
    # child (position in ``task``) and parent (number of the task) of each dependency on another model
    outer: tuple[Ints, Ints]

    def __len__(self) -> int:
        return len(self.task)

    @cached_property
    def depth(self) -> Ints:
        """Return the number of ``inner`` dependencies in the longest chain that ends at each task, [k]."""
        return depths(*self.inner, len(self.task))

    def work(self, produced: Ints) -> Floats:
        """Return each task's FLOPs for its prompt and ``produced`` tokens, or 0 without produced tokens ([k])."""
        tokens = np.where(produced > 0, self.prompt + produced, 0).astype(np.float64)
        linear, square = self.flops
        return linear * tokens + square * tokens * tokens


@dataclass(frozen=True)
class Load:
    """The present tasks of a sample, grouped by model."""

    models: tuple[ModelLoad, ...]  # tasks of each model
    parents: tuple[frozenset[int], ...]  # for each model, the other models whose outputs its tasks use
    order: tuple[int, ...]  # models, parents before children unless there are cycles
    is_cyclic: bool  # whether some models wait for one another
    position: Ints  # [tasks] position of each task in the ``ModelLoad`` of its model
    model: Ints  # [tasks] number of each task's model

    @cached_property
    def parts(self) -> tuple[frozenset[int], ...]:
        """Return the independent parts of the graph: sets of models whose tasks depend on one another.

        All models without dependencies are together one part. Parts without tasks are left out.
        """
        from scipy.sparse.csgraph import connected_components

        links = np.zeros((len(self.models), len(self.models)))
        for model, parents in enumerate(self.parents):
            links[model, list(parents)] = 1.0
        part_of = connected_components(links, directed=False)[1]
        part_of[np.bincount(part_of)[part_of] == 1] = -1
        parts = (np.flatnonzero(part_of == part).tolist() for part in np.unique(part_of))
        return tuple(frozenset(part) for part in parts if any(len(self.models[m]) for m in part))

    def only(self, models: Collection[int]) -> Load:
        """Return the load of an application that has only the tasks of these models."""
        none = np.zeros(0, np.int64)
        empty = [ModelLoad(none, none, none, load.flops, (none, none), (none, none)) for load in self.models]
        loads = tuple(load if m in models else empty[m] for m, load in enumerate(self.models))
        parents = tuple(some if m in models else frozenset() for m, some in enumerate(self.parents))
        return replace(self, models=loads, parents=parents)


def load_of(tasks: Tasks, draw: TaskDraw, specs: list[ModelSpec]) -> Load:
    """Return the present tasks of a sample, grouped by model."""
    position = np.zeros(len(tasks), np.int64)
    child = np.repeat(np.arange(len(tasks)), np.diff(tasks.parent_start))
    alive = draw.present[child] & draw.present[tasks.parent]
    child, parent = child[alive], tasks.parent[alive]
    numbers = [np.flatnonzero(draw.present & (tasks.model == m)) for m in range(len(specs))]
    for of_model in numbers:
        position[of_model] = np.arange(len(of_model))
    child_model = tasks.model[child]
    is_inner = child_model == tasks.model[parent]
    loads, parents = [], []
    for m, spec in enumerate(specs):
        inner, outer = is_inner & (child_model == m), ~is_inner & (child_model == m)
        loads.append(
            ModelLoad(
                task=numbers[m],
                prompt=np.maximum(draw.prompt_tokens[numbers[m]], 1),
                output=np.maximum(draw.output_tokens[numbers[m]], 1),
                flops=_flops(spec),
                inner=(position[child[inner]], position[parent[inner]]),
                outer=(position[child[outer]], parent[outer]),
            )
        )
        parents.append(frozenset(np.unique(tasks.model[parent[outer]]).tolist()))
    left, order, is_cyclic = dict(enumerate(parents)), [], False
    while left:
        ready = [m for m, some in left.items() if not some & set(left) - {m}]
        is_cyclic |= not ready
        order.append(ready[0] if ready else next(iter(left)))  # of a cycle, the lowest number
        del left[order[-1]]
    return Load(tuple(loads), tuple(parents), tuple(order), is_cyclic, position, tasks.model)


def _flops(spec: ModelSpec) -> tuple[float, float]:
    """Return the FLOPs per token and per squared token. On average, a token attends to half of all tokens."""
    attention = spec.attention
    lookup = 0 if spec.tied_embeddings else embedding_parameters(spec)
    key_dim = attention.head_dim + (attention.rope_head_dim if attention.is_mla else 0)
    dims = key_dim + (attention.v_head_dim or attention.head_dim)
    return 2.0 * (active_parameters(spec) - lookup), 1.0 * attention.heads * dims * spec.caching_layers
