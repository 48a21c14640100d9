"""Binary heaps: of waiting requests by (key, index), of events by (time, number), and of sent children by arrival."""

from __future__ import annotations

from lengthwise._jit import jit, jit_cold
from lengthwise.engine import kernel_layout
from lengthwise.schema.records import Rejection, Status

BAD_RANK = kernel_layout.BAD_RANK
INFINITY = float("inf")
FINISHED, REJECTED = int(Status.FINISHED), int(Status.REJECTED)
NOT_FINISHED = int(Rejection.PARENT_NOT_FINISHED)
SENT = -1  # In ``parents_left``: all parents have finished, and the arrival time is known.


@jit
def queue_push(S, queue_index, key, index, slot):
    """Add a request to a queue. A full queue first moves to a larger range of the array that all queues share."""
    queue = S.queues[queue_index]
    if queue.length == queue.room:
        _grow(S, queue)
    i = queue.length
    queue.length += 1
    offset = queue.offset
    while i > 0:
        parent = (i - 1) >> 1
        if not key_before(key, index, S.queued_key[offset + parent], S.queued_index[offset + parent]):
            break
        _copy(S, offset + parent, offset + i)
        i = parent
    _put(S, offset + i, key, index, slot)


@jit
def queue_pop(S, queue_index):
    queue = S.queues[queue_index]
    queue.length -= 1
    if queue.length > 0:
        end = queue.offset + queue.length
        _move_down(S, queue.offset, queue.length, 0, S.queued_key[end], S.queued_index[end], S.queued_slot[end])


@jit_cold
def queue_rebuild(S, queue_index):
    queue = S.queues[queue_index]
    for i in range(queue.length // 2 - 1, -1, -1):
        at = queue.offset + i
        _move_down(S, queue.offset, queue.length, i, S.queued_key[at], S.queued_index[at], S.queued_slot[at])


@jit_cold
def queue_sort(S, queue_index):
    """Sort a queue, the first request first, which is also an order of its heap (Shell's method)."""
    queue = S.queues[queue_index]
    offset, gap = queue.offset, queue.length // 2
    while gap > 0:
        for i in range(offset + gap, offset + queue.length):
            key, index, slot = S.queued_key[i], S.queued_index[i], S.queued_slot[i]
            while i >= offset + gap and key_before(key, index, S.queued_key[i - gap], S.queued_index[i - gap]):
                _copy(S, i - gap, i)
                i -= gap  # noqa: PLW2901
            _put(S, i, key, index, slot)
        gap //= 2


@jit
def _move_down(S, offset, length, i, key, index, slot):
    while True:
        child = 2 * i + 1
        if child >= length:
            break
        a, b = offset + child, offset + child + 1
        if child + 1 < length and key_before(S.queued_key[b], S.queued_index[b], S.queued_key[a], S.queued_index[a]):
            child += 1
            a += 1
        if not key_before(S.queued_key[a], S.queued_index[a], key, index):
            break
        _copy(S, a, offset + i)
        i = child
    _put(S, offset + i, key, index, slot)


@jit
def key_before(key_a, index_a, key_b, index_b):
    """Return whether request or event a precedes b: by key, and among equal keys by index."""
    return key_a < key_b or (key_a == key_b and index_a < index_b)


@jit
def _copy(S, source, target):
    _put(S, target, S.queued_key[source], S.queued_index[source], S.queued_slot[source])


@jit
def _put(S, at, key, index, slot):
    S.queued_key[at] = key
    S.queued_index[at] = index
    S.queued_slot[at] = slot


@jit_cold
def _grow(S, queue):
    top = S.counters[0].queued_top
    for i in range(queue.length):
        _copy(S, queue.offset + i, top + i)
    queue.offset = top
    queue.room = max(64, 2 * queue.room)
    S.counters[0].queued_top += queue.room


@jit
def overdue_at_s(S, request):
    """Return the time at which a waiting request will have waited ``max_wait_s`` in total."""
    return request.queued_at_s + (S.params[0].max_wait_s - request.queued_for_s)


@jit
def note_overdue_time(S, queue_index, now_s, request):
    """Lower the queue's ``overdue_at_s`` to the time at which a request becomes overdue, unless it already is."""
    at_s = overdue_at_s(S, request)
    if at_s > now_s:
        S.queues[queue_index].overdue_at_s = min(S.queues[queue_index].overdue_at_s, at_s)


@jit
def rank_key(S, now_s, slot, rank):
    """Return a request's queue key: its rank, -infinity when overdue, or under TensorRT-LLM its key at admission."""
    q = S.slots[slot]
    late = overdue_at_s(S, q) <= now_s if q.waiting == 1 else q.queued_for_s >= S.params[0].max_wait_s
    if not late and S.params[0].trtllm > 0 and q.admission >= 0:
        return q.queue_key
    return -INFINITY if late else key_of(S, rank, now_s, q)


@jit
def predicted_total(S, i, generated):
    """Return the total output length predicted for request ``i`` after ``generated`` tokens."""
    window = S.params[0].predicted_window
    if window == 0:
        return S.predicted[i]
    return S.predicted_total[min(S.predicted_start[i] + generated // window, S.predicted_start[i + 1] - 1)]


@jit
def _gittins_rank(S, i, generated, remaining):
    window = S.params[0].predicted_window
    if window == 0:
        return remaining
    return S.gittins_rank[min(S.predicted_start[i] + generated // window, S.predicted_start[i + 1] - 1)]


@jit
def remaining_of(S, q):
    """Return the predicted remaining tokens, at least 1. Call ``_kernel_groups.update`` first for a group member."""
    return max(1.0, predicted_total(S, q.index, q.generated) - q.generated)


@jit_cold
def key_of(S, function, now_s, q):
    """Return the key that a rank or victim policy gives a request. For NaN, set ``problem`` and return 0.

    Call ``_kernel_groups.update`` first for a member of a group.
    """
    predicted = predicted_total(S, q.index, q.generated)
    remaining = max(1.0, predicted - q.generated)
    queued_for_s = q.queued_for_s + (now_s - q.queued_at_s if q.waiting == 1 else 0.0)
    gittins_rank = _gittins_rank(S, q.index, q.generated, remaining)
    key = function(
        now_s, q.arrival_s, q.prompt, q.generated, predicted, remaining, gittins_rank, queued_for_s, q.priority,
        q.admission, q.last_preemption, S.service[q.tenant], q.bin_batch,
    )  # fmt: skip
    if key != key:  # noqa: PLR0124  NaN
        S.counters[0].problem = BAD_RANK
        S.counters[0].problem_value = q.index
        return 0.0
    return key


@jit
def push_event(S, end_s, r):
    """Add the end of a step of replica ``r``, or for ``r`` >= replicas, event ``r - replicas`` of ``handle_event``."""
    i = S.counters[0].events
    S.counters[0].events += 1
    while i > 0:
        parent = (i - 1) >> 1
        if not key_before(end_s, r, S.event_s[parent], S.event_number[parent]):
            break
        S.event_s[i] = S.event_s[parent]
        S.event_number[i] = S.event_number[parent]
        i = parent
    S.event_s[i] = end_s
    S.event_number[i] = r


@jit
def pop_event(S):
    """Remove the earliest event, and return the ``r`` with which ``push_event`` added it."""
    first = S.event_number[0]
    S.counters[0].events -= 1
    length = S.counters[0].events
    end_s, r, i = S.event_s[length], S.event_number[length], 0
    while True:
        child = 2 * i + 1
        if child >= length:
            break
        if child + 1 < length and key_before(
            S.event_s[child + 1], S.event_number[child + 1], S.event_s[child], S.event_number[child]
        ):
            child += 1
        if not key_before(S.event_s[child], S.event_number[child], end_s, r):
            break
        S.event_s[i] = S.event_s[child]
        S.event_number[i] = S.event_number[child]
        i = child
    S.event_s[i] = end_s
    S.event_number[i] = r
    return first


@jit
def next_request(S):
    """Return the request that reaches the front end next, now or later, or -1 if none is known."""
    counters = S.counters[0]
    if S.params[0].has_dependents == 0:
        return counters.next if counters.next < counters.released else -1
    while counters.next < counters.released and S.parents_left[counters.next] != 0:
        counters.next += 1
    if counters.sent_children == 0:
        return counters.next if counters.next < counters.released else -1
    top = S.sent_children[0]
    if counters.next < counters.released and _arrives_before(S, counters.next, top):
        return counters.next
    return top


@jit
def take_request(S, i):
    counters = S.counters[0]
    if i == counters.next:
        counters.next += 1
        return
    counters.sent_children -= 1
    last, at = S.sent_children[counters.sent_children], 0
    while 2 * at + 1 < counters.sent_children:
        down = 2 * at + 1
        if down + 1 < counters.sent_children and _arrives_before(S, S.sent_children[down + 1], S.sent_children[down]):
            down += 1
        if not _arrives_before(S, S.sent_children[down], last):
            break
        S.sent_children[at] = S.sent_children[down]
        at = down
    S.sent_children[at] = last


@jit_cold
def release_children(S, i, status, now_s):
    """Send the children that waited only for request ``i``, or reject all descendants if ``i`` did not finish."""
    if status != FINISHED:
        _reject_descendants(S, i, now_s)
        return
    counters = S.counters[0]
    for k in range(S.child_start[i], S.child_start[i + 1]):
        child = S.child[k]
        S.parents_left[child] -= 1
        if S.parents_left[child] == 0:
            S.parents_left[child] = SENT
            S.arrival_s[child] = max(S.arrival_s[child], now_s + S.delay_s[child])
            at = counters.sent_children
            counters.sent_children += 1
            while at > 0:
                up = (at - 1) // 2
                if not _arrives_before(S, child, S.sent_children[up]):
                    break
                S.sent_children[at] = S.sent_children[up]
                at = up
            S.sent_children[at] = child


@jit
def _reject_descendants(S, i, now_s):
    end = len(S.sent_children)
    at = end - 1  # the unused end of ``sent_children`` is the stack of the search
    S.sent_children[at] = i
    while at < end:
        one = S.sent_children[at]
        at += 1
        for k in range(S.child_start[one], S.child_start[one + 1]):
            child = S.child[k]
            if S.results[child].status == REJECTED:
                continue
            S.results[child].status = REJECTED
            S.results[child].rejection = NOT_FINISHED
            S.arrival_s[child] = now_s
            at -= 1
            S.sent_children[at] = child


@jit
def _arrives_before(S, a, b):
    return S.arrival_s[a] < S.arrival_s[b] or (S.arrival_s[a] == S.arrival_s[b] and a < b)
