"""Waiting requests: binary heaps by (key, order of arrival) in one pool of memory."""

from __future__ import annotations

from lengthwise._jit import jit, jit_cold
from lengthwise.engine import kernel_layout
from lengthwise.schema.records import Rejection, Status


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
        if not _key_before(key, index, S.pool_key[offset + parent], S.pool_index[offset + parent]):
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
        if child + 1 < length and _key_before(S.pool_key[a + 1], S.pool_index[a + 1], S.pool_key[a], S.pool_index[a]):
            child += 1
            a += 1
        if not _key_before(S.pool_key[a], S.pool_index[a], key, index):
            break
        _copy(S, a, offset + i)
        i = child
    _put(S, offset + i, key, index, slot)


@jit
def _key_before(key_a, index_a, key_b, index_b):
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


BAD_RANK = kernel_layout.BAD_RANK
INFINITY = float("inf")


@jit
def overdue_s(S, request):
    """When a waiting request will have waited too long in all."""
    return request.queued_s + (S.par[0].max_wait_s - request.queued_for_s)


@jit
def note_overdue(S, q, now_s, request):
    """Keeps when the next of a queue will have waited too long."""
    deadline_s = overdue_s(S, request)
    if deadline_s > now_s:
        S.queues[q].overdue_s = min(S.queues[q].overdue_s, deadline_s)


@jit
def rank_key(S, now_s, slot, rank):
    """The key in the queue: whoever has waited too long goes before all others."""
    q = S.slots[slot]
    late = overdue_s(S, q) <= now_s if q.waiting == 1 else q.queued_for_s >= S.par[0].max_wait_s
    return -INFINITY if late else key_of(S, rank, now_s, q)


@jit
def predicted_total(S, i, generated):
    """The length predicted of request ``i`` once it had produced so many tokens."""
    window = S.par[0].predicted_window
    if window == 0:
        return S.predicted[i]
    return S.predicted_total[min(S.predicted_start[i] + generated // window, S.predicted_start[i + 1] - 1)]


@jit
def _predicted_index(S, i, generated, remaining):
    window = S.par[0].predicted_window
    if window == 0:
        return remaining
    return S.predicted_index[min(S.predicted_start[i] + generated // window, S.predicted_start[i + 1] - 1)]


@jit
def remaining_of(S, q):
    """Predicted tokens still to come of a settled request, at least 1."""
    return max(1.0, predicted_total(S, q.index, q.generated) - q.generated)


@jit_cold
def key_of(S, function, now_s, q):
    """A rank or leave key of a settled request; NaN is noted as a problem."""
    predicted = predicted_total(S, q.index, q.generated)
    remaining = max(1.0, predicted - q.generated)
    queued_for_s = q.queued_for_s + (now_s - q.queued_s if q.waiting == 1 else 0.0)
    key = function(
        now_s,
        q.arrival_s,
        q.prompt,
        q.generated,
        predicted,
        remaining,
        _predicted_index(S, q.index, q.generated, remaining),
        queued_for_s,
        q.priority,
        q.admission,
        q.eviction,
        S.service[q.tenant],
        q.batch,
    )
    if key != key:  # noqa: PLR0124  NaN
        S.ctr[0].problem = BAD_RANK
        S.ctr[0].problem_request = q.index
        return 0.0
    return key


@jit
def push_event(S, end_s, r):
    i = S.ctr[0].events
    S.ctr[0].events += 1
    while i > 0:
        parent = (i - 1) >> 1
        if not _prefer_early(end_s, r, S.event_s[parent], S.event_replica[parent]):
            break
        S.event_s[i] = S.event_s[parent]
        S.event_replica[i] = S.event_replica[parent]
        i = parent
    S.event_s[i] = end_s
    S.event_replica[i] = r


@jit
def pop_event(S):
    """The replica whose step ends first."""
    first = S.event_replica[0]
    S.ctr[0].events -= 1
    length = S.ctr[0].events
    end_s, r, i = S.event_s[length], S.event_replica[length], 0
    while True:
        child = 2 * i + 1
        if child >= length:
            break
        if child + 1 < length and _prefer_early(
            S.event_s[child + 1], S.event_replica[child + 1], S.event_s[child], S.event_replica[child]
        ):
            child += 1
        if not _prefer_early(S.event_s[child], S.event_replica[child], end_s, r):
            break
        S.event_s[i] = S.event_s[child]
        S.event_replica[i] = S.event_replica[child]
        i = child
    S.event_s[i] = end_s
    S.event_replica[i] = r
    return first


@jit
def _prefer_early(s_a, r_a, s_b, r_b):
    return s_a < s_b or (s_a == s_b and r_a < r_b)


FINISHED, REJECTED = int(Status.FINISHED), int(Status.REJECTED)
NOT_FINISHED = int(Rejection.PARENT_NOT_FINISHED)


@jit
def first_sent(S):
    """The request that goes to the front next, or -1: who waits for nobody and is first, or the top of the heap."""
    ctr = S.ctr[0]
    if S.par[0].follows == 0:
        return ctr.next if ctr.next < ctr.released else -1
    while ctr.next < ctr.released and S.follow_left[ctr.next] != 0:
        ctr.next += 1
    if ctr.sent == 0:
        return ctr.next if ctr.next < ctr.released else -1
    top = S.sent[0]
    if ctr.next < ctr.released and _sent_before(S, ctr.next, top):
        return ctr.next
    return top


@jit
def take_sent(S, i):
    """Takes that request away."""
    ctr = S.ctr[0]
    if i == ctr.next:
        ctr.next += 1
    else:
        _pop(S)


@jit_cold
def send_followers(S, i, status, now_s):
    """Sends those that waited for request ``i`` alone; where it did not finish, all behind it never come."""
    if status != FINISHED:
        _refuse_behind(S, i, now_s)
        return
    for k in range(S.follow_start[i], S.follow_start[i + 1]):
        child = S.follow[k]
        S.follow_left[child] -= 1
        if S.follow_left[child] == 0:
            S.follow_left[child] = -1
            S.arrival_s[child] = max(S.arrival_s[child], now_s)
            _push(S, child)


@jit
def _refuse_behind(S, i, now_s):
    """Who is refused waits on the free end of the heap for those behind it to be looked at."""
    end = len(S.sent)
    at = end - 1
    S.sent[at] = i
    while at < end:
        one = S.sent[at]
        at += 1
        for k in range(S.follow_start[one], S.follow_start[one + 1]):
            child = S.follow[k]
            if S.results[child].status == REJECTED:
                continue
            S.results[child].status = REJECTED
            S.results[child].rejection = NOT_FINISHED
            S.arrival_s[child] = now_s
            at -= 1
            S.sent[at] = child


@jit
def _sent_before(S, a, b):
    return S.arrival_s[a] < S.arrival_s[b] or (S.arrival_s[a] == S.arrival_s[b] and a < b)


@jit
def _push(S, i):
    ctr = S.ctr[0]
    at = ctr.sent
    ctr.sent += 1
    while at > 0:
        up = (at - 1) // 2
        if not _sent_before(S, i, S.sent[up]):
            break
        S.sent[at] = S.sent[up]
        at = up
    S.sent[at] = i


@jit
def _pop(S):
    ctr = S.ctr[0]
    ctr.sent -= 1
    last, at = S.sent[ctr.sent], 0
    while 2 * at + 1 < ctr.sent:
        down = 2 * at + 1
        if down + 1 < ctr.sent and _sent_before(S, S.sent[down + 1], S.sent[down]):
            down += 1
        if not _sent_before(S, S.sent[down], last):
            break
        S.sent[at] = S.sent[down]
        at = down
    S.sent[at] = last
