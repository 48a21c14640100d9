"""Where a step of the model would lie and nothing was measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from lengthwise.schema.cost_tables import Floats
from lengthwise.schema.profile import OPERATOR_PARTS, Profile

STEP_TOKENS, STEP_SEQS, UNKNOWN_LENGTH = 8192, 256, 8192
"""Largest step, largest batch, and longest request where the model does not tell."""

FARTHEST = 2.05
"""Neighbours that are this many times apart leave a gap; doubling grids do not."""

CELL = 4
"""A cell of the plane of attention spans this factor along either axis."""


@dataclass(frozen=True)
class Gap:
    """A range without a point: for each axis its name, the lowest and the highest value."""

    axes: tuple[tuple[str, int, int], ...]

    def __str__(self) -> str:
        return " with ".join(f"{name} {low:,} to {high:,}" for name, low, high in self.axes)


def gaps(rows: Profile, longest: int | None) -> tuple[Gap, ...]:
    """The gaps of one operator on one shard; none for kernels of no model, which have no end.

    Args:
        rows: Of one operator and TP degree.
        longest: Tokens of the model's longest request; None: not known.
    """
    if not len(rows) or not (rows["tp"] > 0).all():
        return ()
    part, longest = OPERATOR_PARTS[rows.operators[0]], longest or UNKNOWN_LENGTH
    if part == "prefill":
        fits = (rows["chunk"], rows["context"])
        ends = (min(STEP_TOKENS, longest), longest)
        return tuple(_plane(("chunk", "context"), *fits, *ends, sum_at_most=longest))
    if part == "decode":
        mean = rows["kv_tokens"] / np.maximum(rows["seqs"], 1)
        return tuple(_plane(("sequences", "mean context"), rows["seqs"], mean, STEP_SEQS, longest))
    if part in ("head", "host"):
        return tuple(_line("sequences", rows["tokens"], STEP_SEQS))
    return tuple(_line("tokens", rows["tokens"], STEP_TOKENS)) if part in ("layer", "first") else ()


def _line(name: str, values: npt.NDArray[np.int64], last: int) -> Iterator[Gap]:
    points = np.unique(values[values > 0])
    if not len(points):
        return
    if points[0] > FARTHEST:
        yield Gap(((name, 1, int(points[0]) - 1),))
    for low, high in pairwise(points):
        if high / low > FARTHEST and low < last:
            yield Gap(((name, int(low) + 1, int(high) - 1),))
    if points[-1] < last:
        yield Gap(((name, int(points[-1]) + 1, last),))


def _plane(
    names: tuple[str, str],
    x: Floats | npt.NDArray[np.int64],
    y: Floats | npt.NDArray[np.int64],
    x_last: int,
    y_last: int,
    sum_at_most: int | None = None,
) -> Iterator[Gap]:
    """Cells of a grid of powers without a point, those beside each other as one."""
    x_edges, y_edges = _edges(x_last), _edges(y_last)
    there = np.zeros((len(x_edges) - 1, len(y_edges) - 1), dtype=bool)
    column = np.searchsorted(x_edges, x, side="left") - 1
    row = np.maximum(np.searchsorted(y_edges, y, side="left") - 1, 0)
    inside = (column >= 0) & (column < there.shape[0]) & (row < there.shape[1])
    there[column[inside], row[inside]] = True
    if sum_at_most is not None:  # a cell whose smallest step is too long is none
        there |= x_edges[:-1, None] + y_edges[None, :-1] + 1 > sum_at_most
    runs = [tuple(_runs(~there[i])) for i in range(len(there))]
    open_: dict[tuple[int, int], int] = {}
    for i in range(len(runs) + 1):
        now = set(runs[i]) if i < len(runs) else set()
        for run in sorted(set(open_) - now):
            first = open_.pop(run)
            yield _cell(names, x_edges, y_edges, (first, i), run)
        for run in now - set(open_):
            open_[run] = i


def _cell(
    names: tuple[str, str],
    x: npt.NDArray[np.int64],
    y: npt.NDArray[np.int64],
    i: tuple[int, int],
    j: tuple[int, int],
) -> Gap:
    low = 0 if j[0] == 0 else int(y[j[0]]) + 1
    return Gap(((names[0], int(x[i[0]]) + 1, int(x[i[1]])), (names[1], low, int(y[j[1]]))))


def _edges(last: int) -> npt.NDArray[np.int64]:
    """0, then 16, 64, 256 ... to the last value: cells are (edge, next edge], the last one of more than a doubling."""
    inner = [0, 4 * CELL]
    while inner[-1] * CELL < last:
        inner.append(inner[-1] * CELL)
    return np.array([*(edge for edge in inner if 2 * edge < last), last], dtype=np.int64)


def _runs(missing: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Half-open ranges of neighbours that are missing."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], missing.astype(int), [0]])))
    yield from ((int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True))
