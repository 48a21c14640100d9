"""Waiting requests: binary heaps by (key, order of arrival) in one pool of memory."""

from __future__ import annotations

from lengthwise._jit import jit, jit_cold


@jit
def queue_push(S, q, key, index, slot):
    """Adds a request; the queue moves to a larger stretch of the pool when it is full."""
    queue = S.queues[q]
    if queue.length == queue.room:
        _move(S, queue)
    i = queue.length
    queue.length += 1
    offset = queue.offset
    while i > 0:
        parent = (i - 1) >> 1
        if not _before(key, index, S.pool_key[offset + parent], S.pool_index[offset + parent]):
            break
        _copy(S, offset + parent, offset + i)
        i = parent
    _put(S, offset + i, key, index, slot)


@jit
def queue_pop(S, q):
    """Removes the first request."""
    queue = S.queues[q]
    queue.length -= 1
    if queue.length > 0:
        end = queue.offset + queue.length
        _sift_down(S, queue.offset, queue.length, 0, S.pool_key[end], S.pool_index[end], S.pool_slot[end])


@jit_cold
def queue_rebuild(S, q):
    """Restores the order after keys have changed in place."""
    queue = S.queues[q]
    for i in range(queue.length // 2 - 1, -1, -1):
        at = queue.offset + i
        _sift_down(S, queue.offset, queue.length, i, S.pool_key[at], S.pool_index[at], S.pool_slot[at])


@jit
def _sift_down(S, offset, length, i, key, index, slot):
    while True:
        child = 2 * i + 1
        if child >= length:
            break
        a = offset + child
        if child + 1 < length and _before(
            S.pool_key[a + 1], S.pool_index[a + 1], S.pool_key[a], S.pool_index[a]
        ):
            child += 1
            a += 1
        if not _before(S.pool_key[a], S.pool_index[a], key, index):
            break
        _copy(S, a, offset + i)
        i = child
    _put(S, offset + i, key, index, slot)


@jit
def _before(key_a, index_a, key_b, index_b):
    return key_a < key_b or (key_a == key_b and index_a < index_b)


@jit
def _copy(S, source, target):
    S.pool_key[target] = S.pool_key[source]
    S.pool_index[target] = S.pool_index[source]
    S.pool_slot[target] = S.pool_slot[source]


@jit
def _put(S, at, key, index, slot):
    S.pool_key[at] = key
    S.pool_index[at] = index
    S.pool_slot[at] = slot


@jit_cold
def _move(S, queue):
    top = S.ctr[0].pool_top
    for i in range(queue.length):
        _copy(S, queue.offset + i, top + i)
    queue.offset = top
    queue.room = max(64, 2 * queue.room)
    S.ctr[0].pool_top += queue.room
