"""When memory runs out: who is evicted, and in which order decodes claim their blocks."""

from __future__ import annotations

from lengthwise._jit import jit, jit_cold
from lengthwise.engine._expire import outstanding
from lengthwise.engine._groups import drop_partial, join, leave, member, settle
from lengthwise.engine._keys import key_of, note_overdue, rank_key
from lengthwise.engine._queue import queue_push, queue_rebuild
from lengthwise.policy import contracts

INFINITY = float("inf")
FORM_ONCE, RESTART_AS_DECODE = contracts.FORM_ONCE, contracts.RESTART_AS_DECODE


@jit
def enqueue(S, q, now_s, slot, rank):
    """Puts a request that comes back into a queue under its rank; it waits from now on."""
    S.slots[slot].queued_s = now_s
    line_up(S, q, now_s, slot, rank)


@jit_cold
def change_load(S, q, r, to):
    """A request is another replica's from now on, for routers; that one has something to look at."""
    tokens = outstanding(S.prompt[q.index], S.predicted[q.index])
    S.tokens[r] -= tokens
    S.tokens[to] += tokens
    S.touched[to] = 1


@jit
def line_up(S, q, now_s, slot, rank):
    """Puts a request into a queue under its rank; it waits since ``queued_s``, before the front and in a bin too."""
    request = S.slots[slot]
    request.waiting = 1
    key = rank_key(S, now_s, slot, rank)
    note_overdue(S, q, now_s, request)
    queue_push(S, q, key, request.index, slot)
    deadline_s = request.arrival_s + S.par[0].timeout_s
    S.queues[q].deadline_s = min(S.queues[q].deadline_s, deadline_s)
    if S.par[0].takes_over == 1 and S.pool_slot[S.queues[q].offset] == slot:
        decide(S, q)


@jit_cold
def decide(S, q):
    """All replicas of a queue look for takeovers at their next step."""
    for r in range(S.par[0].replicas):
        if S.replicas[r].queue == q:
            S.replicas[r].decide = 1


@jit_cold
def rank_again(S, q, now_s, rank):
    """Keys that time has changed: ranks a whole queue anew."""
    queue = S.queues[q]
    late = queue.overdue_s <= now_s
    queue.overdue_s = INFINITY
    for at in range(queue.offset, queue.offset + queue.length):
        slot = S.pool_slot[at]
        S.pool_key[at] = rank_key(S, now_s, slot, rank)
        note_overdue(S, q, now_s, S.slots[slot])
    queue_rebuild(S, q)
    if late and S.par[0].takes_over == 1:
        decide(S, q)


@jit_cold
def evict(S, r, slot, now_s, rank):
    """Sends an idle resident back to the queue, its blocks freed, to be recomputed or swapped in."""
    rep, q, w = S.replicas[r], S.slots[slot], S.work[0]
    par = S.par[rep.side]
    if q.decoding == 1:
        leave(S, rep.idle, slot)
    else:
        drop_partial(S, r, slot)
    if par.finds_again == 1:
        computed = q.prompt + q.generated - 1 if q.decoding == 1 else q.prefilled
        q.kept = computed // par.block_size
        q.kept_mark = rep.freed + q.blocks - q.kept
        q.kept_on = r
    rep.free_blocks += q.blocks
    rep.freed += q.blocks
    w.evicted = 1
    if par.swap == 1 and q.decoding == 1:
        q.swapped = 1
        w.swap_s += q.blocks * par.swap_s_per_block
    else:
        if q.decoding == 0 and w.plan_flags & RESTART_AS_DECODE != 0:
            total = q.prompt + q.output
            q.prompt = q.prefilled - q.generated
            q.output = total - q.prompt
        q.decoding = 0
        q.prefilled = 0
    q.blocks = 0
    S.running[r] -= 1
    S.ctr[0].evictions += 1
    q.eviction = S.ctr[0].evictions
    S.results[q.index].preemptions += 1
    to = rep.queue
    if rep.side == 1 and q.swapped == 0:  # to be prefilled again, where that is done
        to = q.home
        change_load(S, q, r, to)
    S.waiting[to] += 1
    enqueue(S, to, now_s, slot, rank)


@jit_cold
def order_to_leave(S, r, now_s, leave_rank):
    """Idle residents in ``scratch``, those who leave first last; returns how many."""
    count = 0
    for i in range(_settled(S, r)):
        slot = _idle(S, r, i)
        count = _insert(S, count, slot, key_of(S, leave_rank, now_s, S.slots[slot]))
    return count


@jit_cold
def rank_residents(S, r, now_s, rank):
    """Idle residents that have got on, with their keys in the queue, in ``scratch``, unsorted; how many.

    Whoever has produced nothing since it was admitted is not among them: every admission is worth a
    token at least, or two requests could take turns for ever.
    """
    count = 0
    for i in range(_settled(S, r)):
        slot = _idle(S, r, i)
        if S.slots[slot].generated > S.slots[slot].entered:
            S.scratch_key[count] = rank_key(S, now_s, slot, rank)
            S.scratch_tie[count] = S.slots[slot].seat
            S.scratch_slot[count] = slot
            count += 1
    return count


@jit_cold
def _settled(S, r):
    """How many are idle on a replica, all brought up to date."""
    g = S.replicas[r].idle
    for i in range(S.groups[g].members):
        settle(S, g, member(S, g, i))
    return S.groups[g].members + S.replicas[r].partials


@jit
def _idle(S, r, i):
    g = S.replicas[r].idle
    members = S.groups[g].members
    return member(S, g, i) if i < members else S.partials[r, i - members]


@jit_cold
def _insert(S, count, slot, key):
    """Insertion by (key, seat): rare, and nearly sorted where it is not."""
    seat, i = S.slots[slot].seat, count
    while i > 0 and (
        S.scratch_key[i - 1] > key or (S.scratch_key[i - 1] == key and S.scratch_tie[i - 1] > seat)
    ):
        S.scratch_key[i] = S.scratch_key[i - 1]
        S.scratch_tie[i] = S.scratch_tie[i - 1]
        S.scratch_slot[i] = S.scratch_slot[i - 1]
        i -= 1
    S.scratch_key[i] = key
    S.scratch_tie[i] = seat
    S.scratch_slot[i] = slot
    return count + 1


@jit_cold
def claim_blocks(S, r, now_s, limit, spare, rank, leave_rank):
    """Decodes claim their next blocks in order, the last in order are evicted for them.

    Those who claimed stand first in ``scratch`` (half-computed prompts left out); returns how many.
    """
    rep = S.replicas[r]
    count = order_to_leave(S, r, now_s, leave_rank)
    last, claimed, i = count - 1, 0, 0
    while i <= last and claimed < limit:
        slot = S.scratch_slot[i]
        i += 1
        if S.slots[slot].decoding == 0:
            continue
        need = blocks_needed(S, slot)
        while _short(S, r, need, spare) and last >= i:
            evict(S, r, S.scratch_slot[last], now_s, rank)
            last -= 1
        if _short(S, r, need, spare):
            evict(S, r, slot, now_s, rank)
            break
        rep.free_blocks -= need
        S.scratch_slot[claimed] = slot
        claimed += 1
    return claimed


@jit
def _short(S, r, need, spare):
    """Whether blocks lack; a spare one is not asked of the last on a replica, but by Vidur's rule."""
    free = S.replicas[r].free_blocks
    asked = S.running[r] > 1 or S.work[0].plan_flags & FORM_ONCE != 0
    return free < need or (asked and free < spare)


@jit
def blocks_needed(S, slot):
    """Blocks that a settled decode lacks for its next token: 0 or 1."""
    q, block_size = S.slots[slot], S.par[0].block_size
    return max(0, (q.prompt + q.generated + block_size - 1) // block_size - q.blocks)


@jit_cold
def split_off(S, source, target, count):
    """Moves the first ``count`` slots of ``scratch`` from one group into another."""
    for i in range(count):
        slot = S.scratch_slot[i]
        leave(S, source, slot)
        join(S, target, slot)


@jit_cold
def free_partial_room(S, r, need, slot, now_s, rank, leave_rank):
    """Evicts until ``need`` blocks are free; False when the asking prompt itself had to leave."""
    rep = S.replicas[r]
    while rep.free_blocks < need:
        count = order_to_leave(S, r, now_s, leave_rank)
        victim = S.scratch_slot[count - 1]
        evict(S, r, victim, now_s, rank)
        if victim == slot:
            return False
    return True
