"""How tasks stand in the ledger: in the order in which they are to be asked."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from lengthwise.schema.app_tasks import Tasks
from lengthwise.schema.errors import InputError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Layout:
    """Tasks by their place in the ledger, which leases the first places first.

    Attributes:
        tasks: By place. ``call`` is a pair of call and model, so that the ledger's counts tell of models too.
        pairs: (call, model) by number.
        task_of: [n] the application's number of the task at a place.
        place_of: [n] the place of a task.
    """

    tasks: Tasks
    pairs: tuple[tuple[int, int], ...]
    task_of: Ints
    place_of: Ints

    def parents(self, place: int) -> Ints:
        """Places that a place waits for."""
        start = self.tasks.parent_start
        return self.tasks.parent[start[place] : start[place + 1]]


def lay(tasks: Tasks, expected_tokens: Floats) -> Layout:
    """The longest chain that hangs on a task decides who is first: what is asked late must not be what ends late.

    Args:
        tasks: Of the application.
        expected_tokens: [n] output tokens that are expected of each, never those that come.
    """
    if len(expected_tokens) != len(tasks):
        raise InputError(
            f"there must be an expected length for each task ({len(tasks)}); there are {len(expected_tokens)}"
        )
    left = chains(tasks, np.maximum(expected_tokens, 1.0))
    task_of = np.argsort(-left, kind="stable").astype(np.int64)
    place_of = np.empty_like(task_of)
    place_of[task_of] = np.arange(len(tasks))
    pair = tasks.call * len(tasks.models) + tasks.model
    known, numbers = np.unique(pair, return_inverse=True)
    pairs = tuple(divmod(int(one), len(tasks.models)) for one in known)
    placed = _placed(replace(tasks, call=numbers.astype(np.int64)), task_of, place_of)
    return Layout(placed, pairs, task_of, place_of)


def chains(tasks: Tasks, tokens: Floats) -> Floats:
    """[n] tokens of the longest chain of tasks that begins with each.

    Children stand behind their parents, so that generations are gone through from the last one: those whose children
    are all known.
    """
    left = tokens.astype(np.float64).copy()
    child = np.repeat(np.arange(len(tasks)), np.diff(tasks.parent_start))
    depth = _depths(tasks, child)
    order = np.argsort(-depth[child], kind="stable")
    bounds = [*np.flatnonzero(np.diff(depth[child][order], prepend=-1)).tolist(), len(order)]
    for first, last in pairwise(bounds):
        edges = order[first:last]
        parents = tasks.parent[edges]
        np.maximum.at(left, parents, tokens[parents] + left[child[edges]])
    return left


def _depths(tasks: Tasks, child: Ints) -> Ints:
    """[n] how many parents stand above one another over each task."""
    depth = np.zeros(len(tasks), np.int64)
    while len(child):
        deeper = depth.copy()
        np.maximum.at(deeper, child, depth[tasks.parent] + 1)
        if (deeper == depth).all():
            break
        depth = deeper
    return depth


def _placed(tasks: Tasks, task_of: Ints, place_of: Ints) -> Tasks:
    """The same tasks in another order."""
    columns = (
        "call",
        "model",
        "row",
        "round",
        "index",
        "prompt_tokens",
        "max_tokens",
        "known_tokens",
        "coin",
    )
    counts = np.diff(tasks.parent_start)[task_of]
    start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    edge = np.repeat(tasks.parent_start[task_of] - start[:-1], counts) + np.arange(start[-1])
    return replace(
        tasks,
        **{name: getattr(tasks, name)[task_of] for name in columns},
        parent_start=start,
        parent=place_of[tasks.parent[edge]],
        shown=tasks.shown[edge],
    )


def identity_of(words: str, layout: Layout) -> str:
    """What tells these tasks from others: the application and its inputs in words (a hash), and the layout."""
    found = hashlib.sha256(words.encode())
    tasks = layout.tasks
    for column in (
        tasks.call,
        tasks.model,
        tasks.row,
        tasks.round,
        tasks.index,
        tasks.parent,
        layout.task_of,
    ):
        found.update(np.ascontiguousarray(column, dtype="<i8").tobytes())
    return found.hexdigest()
