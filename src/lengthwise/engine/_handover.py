"""From the side that prefills to the one that decodes: who waits to be fetched, transfers, what they hold."""

from __future__ import annotations

from lengthwise._jit import jit_cold
from lengthwise.engine import _layout as layout
from lengthwise.engine._events import push_event
from lengthwise.engine._evict import change_load, enqueue, rank_again
from lengthwise.engine._expire import expire, let_go
from lengthwise.engine._fits import ask_memory, remaining_tokens
from lengthwise.engine._groups import join, sit
from lengthwise.engine._keys import predicted_total
from lengthwise.engine._queue import queue_pop

BAD_DECODE_ROUTE = layout.BAD_DECODE_ROUTE


@jit_cold
def hand_over(S, D, r, slot, now_s, rank, router):
    """A prompt is through, its first token out: its cache stays where it is until it has been fetched."""
    q, first = S.slots[slot], S.par[0].replicas
    q.home = r
    q.held = q.blocks
    q.blocks = 0
    S.running[r] -= 1
    a, b = D.draws[q.index, 0], D.draws[q.index, 1]
    to = router(q.index, a, b, D.waiting_there, D.running_there, D.tokens_there)
    if to < 0 or to >= S.par[0].decodes:
        S.ctr[0].problem = BAD_DECODE_ROUTE
        S.ctr[0].problem_request = to
        return
    change_load(S, q, r, first + to)
    S.waiting[first + to] += 1
    enqueue(S, first + to, now_s, slot, rank)


@jit_cold
def fetch(S, D, r, now_s, rank, memory):
    """Starts transfers, in the order of the queue, for as long as there are seats and memory for whole requests."""
    expire(S, r, now_s)
    rep = S.replicas[r]
    par, queue = S.par[rep.side], S.queues[rep.queue]
    if queue.length > 0 and S.running[r] < par.max_num_seqs and (par.rekey == 1 or queue.overdue_s <= now_s):
        rank_again(S, rep.queue, now_s, rank)
    while queue.length > 0 and S.running[r] < par.max_num_seqs:
        slot = S.pool_slot[queue.offset]
        q = S.slots[slot]
        if q.held == 0:  # swapped out: it comes back with a step
            return
        q.context = q.prompt + q.generated
        S.work[0].decodes = 0
        S.work[0].prompts = 0
        blocks = ask_memory(S, r, slot, q.context, memory)
        if blocks < 0:
            return
        queue_pop(S, rep.queue)
        rep.free_blocks -= blocks
        q.blocks = blocks
        S.ctr[0].admissions += 1
        q.admission = S.ctr[0].admissions
        q.entered = q.generated
        q.waiting = 0
        q.waited_s += now_s - q.queued_s
        S.results[q.index].replica = r
        q.there = r
        S.running[r] += 1
        S.waiting[rep.queue] -= 1
        _set_out(S, D, r, slot, now_s)


@jit_cold
def _set_out(S, D, r, slot, now_s):
    """A transfer that is let in now: it ends later, or at once."""
    rep, q = S.replicas[r], S.slots[slot]
    ends_s = _ends_s(S, r, q, now_s)
    if ends_s <= now_s:
        _seat(S, r, slot)
        return
    S.partials[r, rep.coming] = slot
    rep.coming += 1
    D.slot_of[q.index] = slot
    push_event(S, ends_s, len(S.replicas) + q.index)


@jit_cold
def _ends_s(S, r, q, now_s):
    rep, home, par = S.replicas[r], S.replicas[q.home], S.par[1]
    taken_s = par.handover_fixed_s + (q.context - 1) * par.handover_token_s
    if par.one_at_a_time == 0:
        return now_s + taken_s
    ends_s = max(now_s, home.sends_until_s, rep.receives_until_s) + taken_s
    home.sends_until_s = ends_s
    rep.receives_until_s = ends_s
    return ends_s


@jit_cold
def arrive(S, D, i):
    """The transfer of request ``i`` has ended."""
    slot = D.slot_of[i]
    r = S.slots[slot].there
    rep, at = S.replicas[r], 0
    while S.partials[r, at] != slot:
        at += 1
    rep.coming -= 1
    S.partials[r, at] = S.partials[r, rep.coming]
    _seat(S, r, slot)
    S.touched[r] = 1


@jit_cold
def _seat(S, r, slot):
    rep, q = S.replicas[r], S.slots[slot]
    let_go(S, q)
    rep.deadline_s = min(rep.deadline_s, q.arrival_s + S.par[0].timeout_s)
    sit(S, slot)
    join(S, rep.idle, slot)


@jit_cold
def blocks_to_decode(S, i, memory):
    """Blocks that an idle replica of the decode side would give request ``i`` after its first token; -1: none."""
    par, context, predicted = S.par[1], S.prompt[i] + 1, predicted_total(S, i, 1)
    peak = context + remaining_tokens(predicted, 1) if par.needs_peak == 1 else 0
    return memory(
        context,
        context,
        predicted,
        par.max_model_len,
        par.block_size,
        par.total_blocks,
        par.total_blocks,
        par.watermark_blocks,
        0,
        peak,
    )
