"""Where the best schedules of RRA lie: at each length of phases the largest batch that memory and the bound allow.

More requests in a batch raise throughput and latency, at any number of decode iterations. Fewer iterations need not
raise it: with one to five between encodings stages wait, so that the corner which bounds a block in the search may be
below what the block holds, by more than a third where outputs are long.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from lengthwise.schedule.sides import Side
    from lengthwise.schedule.variables import Place

Ints = npt.NDArray[np.int64]

SHORT = 8
"""Every phase length up to it is tried, and of longer ones each ``RATIO`` times the one before."""
RATIO = 1.5
_BESIDE = (-1, 1)


def ridge(side: Side, point: Place, bound_s: float) -> Ints:
    """[n, variables] by lengths of phases the largest batch of RRA that meets a bound, in layouts of a side.

    The layouts are a point's, and those of the fewest and the most groups.
    """
    steps = ladder(point[1], side.variables[1].values[-1])
    groups = np.unique([point[2], side.variables[2].values[0], side.variables[2].values[-1]])
    grid = np.array([(step, group) for group in groups for step in steps], dtype=np.int64)
    batch = largest_batches(side, grid, bound_s)
    return np.column_stack([batch, grid])[batch > 0]


def ladder(steps: int, most: int) -> Ints:
    """Lengths of phases that are tried: all short ones, some long ones, and those beside a known one."""
    longer = SHORT * RATIO ** np.arange(1 + np.log(max(most / SHORT, 1.0)) / np.log(RATIO))
    near = [steps, *(steps + by for by in _BESIDE)]
    tried = np.concatenate([np.arange(1, SHORT), longer.astype(np.int64), near, [most]])
    return np.unique(tried[(tried >= 1) & (tried <= most)]).astype(np.int64)


def largest_batches(side: Side, grid: Ints, bound_s: float) -> Ints:
    """[n] the largest batch of each row of (iterations, groups) that meets a bound; 0: none does."""
    low = np.zeros(len(grid), dtype=np.int64)
    high = np.full(len(grid), side.variables[0].values[-1] + 1, dtype=np.int64)
    while (wide := high - low > 1).any():
        middle = (low + high)[wide] // 2
        got = side.perf(np.column_stack([middle, grid[wide]]))
        meets = np.isfinite(got.latency_s) & (got.latency_s <= bound_s)
        low[wide] = np.where(meets, middle, low[wide])
        high[wide] = np.where(meets, high[wide], middle)
    return low


__all__ = ["ladder", "largest_batches", "ridge"]
