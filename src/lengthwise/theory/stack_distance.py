"""Hit rates of an LRU cache at all sizes from one pass over its accesses: stack distances (Mattson et al., 1970)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


def stack_distances(start: Ints, item: Ints, size: Ints) -> Ints:
    """Return [m] the stack distance of the first block of each accessed item, or -1 at the item's first use.

    Request i looks up the items ``item[start[i] : start[i + 1]]``, all different, and then uses them, the last one
    first. Item k consists of ``size[k]`` blocks, which are used together, the last one first. An LRU cache finds block
    b (from 0) of an item if it has more than ``distance + b`` blocks; at the item's first use no cache finds it.
    """
    m = len(item)
    begin, end = np.repeat(start[:-1], np.diff(start)), np.repeat(start[1:], np.diff(start))
    place = begin + end - 1 - np.arange(m)  # in the order of use; a permutation that is its own inverse
    used, weight = item[place], size[place]
    order = np.argsort(used, kind="stable")
    again = used[order[1:]] == used[order[:-1]]
    before = np.full(m, -1, np.int64)
    before[order[1:][again]] = order[:-1][again]
    since = np.concatenate([[0], np.cumsum(weight)])
    warm = np.flatnonzero(before >= 0)
    # Distance: all blocks used since, counting each item that was used several times only once.
    repeated = _sums_above(before, weight, begin[warm], before[warm])
    distance = np.full(m, -1, np.int64)
    distance[warm] = since[begin[warm]] - since[before[warm] + 1] - repeated
    return np.asarray(distance[place])


def _sums_above(value: Ints, weight: Ints, end: Ints, bound: Ints) -> Ints:
    """Return [q] the sums of ``weight[:end]`` where ``value[:end]`` is above ``bound``, which is below ``len(value)``.

    Each range is a union of ranges of 2^k entries, one for each bit of its end; each level sorts its ranges once.
    """
    m = len(value)
    sums, order = np.zeros(len(end), np.int64), np.arange(m)
    for level in range(m.bit_length()):
        key = (order >> level) * (m + 1) + value[order] + 1
        merged = np.argsort(key, kind="stable")  # merges sorted runs, which this kind does in linear time
        order, key = order[merged], key[merged]
        below = np.concatenate([[0], np.cumsum(weight[order])])
        rows = np.flatnonzero(end >> level & 1)
        block = (end[rows] >> level) - 1
        low = np.searchsorted(key, block * (m + 1) + bound[rows] + 1, side="right")
        sums[rows] += below[(block + 1) << level] - below[low]
    return sums
