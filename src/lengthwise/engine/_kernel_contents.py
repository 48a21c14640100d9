"""The records of cached blocks in the kernel, and the hash table that finds them by node.

Row r of ``State.cached`` is the cache of replica r. ``_kernel_prefix`` describes the further rows.
"""

from __future__ import annotations

from lengthwise._jit import jit

NONE = -1


@jit
def _home(S, node):
    """Return where the search for a node in the hash table starts (Fibonacci hashing; nodes are below 2^31)."""
    return ((node * 0x9E3779B1) >> 16) & (S.cache_table.shape[1] - 1)


@jit
def place_of(S, r, node):
    """Return the index of a node in the hash table, or the free index for it."""
    at, mask = _home(S, node), S.cache_table.shape[1] - 1
    while S.cache_table[r, at] != NONE and S.cached[r, S.cache_table[r, at]].node != node:
        at = (at + 1) & mask
    return at


@jit
def new_record(S, r, node):
    """Return a record for a block that one request uses. It is not in the hash table yet."""
    pool = S.pools[r]
    record = pool.free_record
    if record == NONE:
        record = pool.records
        pool.records += 1
    else:
        pool.free_record = S.cached[r, record].next
    entry = S.cached[r, record]
    entry.node = node
    entry.holders = 1
    entry.next_copy = NONE
    return record


@jit
def free_record(S, r, record):
    S.cached[r, record].next = S.pools[r].free_record
    S.pools[r].free_record = record


@jit
def clear_place(S, r, at):
    """Free index ``at`` of the hash table, and close the gap: move back later entries of the same probe sequence."""
    mask = S.cache_table.shape[1] - 1
    gap, at = at, (at + 1) & mask
    while S.cache_table[r, at] != NONE:
        home = _home(S, S.cached[r, S.cache_table[r, at]].node)
        if (at - home) & mask >= (at - gap) & mask:
            S.cache_table[r, gap] = S.cache_table[r, at]
            gap = at
        at = (at + 1) & mask
    S.cache_table[r, gap] = NONE
