"""Keys of the queue's order: what a rank is told, and who goes before all others."""

from __future__ import annotations

from lengthwise._jit import jit, jit_cold
from lengthwise.engine import _layout as layout

BAD_RANK = layout.BAD_RANK
INFINITY = float("inf")


@jit
def overdue_s(S, request):
    """When a waiting request will have waited too long in all."""
    return request.queued_s + (S.par[0].max_wait_s - request.waited_s)


@jit
def note_overdue(S, q, now_s, request):
    """Keeps when the next of a queue will have waited too long."""
    due_s = overdue_s(S, request)
    if due_s > now_s:
        S.queues[q].overdue_s = min(S.queues[q].overdue_s, due_s)


@jit
def rank_key(S, now_s, slot, rank):
    """The key in the queue: whoever has waited too long goes before all others."""
    q = S.slots[slot]
    late = overdue_s(S, q) <= now_s if q.waiting == 1 else q.waited_s >= S.par[0].max_wait_s
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
    waited_s = q.waited_s + (now_s - q.queued_s if q.waiting == 1 else 0.0)
    key = function(
        now_s,
        q.arrival_s,
        q.prompt,
        q.generated,
        predicted,
        remaining,
        _predicted_index(S, q.index, q.generated, remaining),
        waited_s,
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
