"""Waiting requests that take the places of running ones."""

from __future__ import annotations

from lengthwise._jit import jit, jit_cold
from lengthwise.cost._lookup import (
    decode_attention,
    masked_attention,
    merged_prefill_attention,
    prefill_attention,
    row,
)
from lengthwise.engine import _layout as layout
from lengthwise.engine._evict import evict, rank_residents
from lengthwise.engine._keys import predicted_total, remaining_of
from lengthwise.engine._queue import queue_pop, queue_push

BAD_TAKEOVER = layout.BAD_TAKEOVER


@jit_cold
def give_way(S, r, now_s, rank, memory, takeover):
    """Waiting requests without a seat or memory take those of worse running ones, where the policy lets them."""
    rep, par = S.replicas[r], S.par[0]
    ranked, running, worst_from, left = False, 0, 0, 0
    seats, free = par.max_num_seqs - S.running[r], rep.free_blocks
    queue = S.queues[rep.queue]
    tried = 0
    while tried < par.max_num_seqs and queue.length > 0:
        slot = S.pool_slot[queue.offset]
        key = S.pool_key[queue.offset]
        queue_pop(S, rep.queue)
        S.scratch_waiting[tried] = slot
        S.scratch_waiting_key[tried] = key
        tried += 1
        k, room, seat = left, free, seats
        blocks = _blocks_to_enter(S, slot, room, seat, memory)
        if blocks < 0 and not ranked:
            running = rank_residents(S, r, now_s, rank)
            ranked, worst_from, left, k = True, running, running, running
        while blocks < 0 and k > 0:
            if k == worst_from:
                worst_from -= 1
                _worst_to_end(S, k)
            if not _takes_place(S, r, slot, key, k - 1, tried, now_s, takeover):
                break
            k -= 1
            room += S.slots[S.scratch_slot[k]].blocks
            seat += 1
            blocks = _blocks_to_enter(S, slot, room, seat, memory)
        if blocks < 0:
            break
        left, free, seats = k, room - blocks, seat - 1
    for i in range(tried):
        slot = S.scratch_waiting[i]
        queue_push(S, rep.queue, S.scratch_waiting_key[i], S.slots[slot].index, slot)
    for i in range(running - 1, left - 1, -1):
        evict(S, r, S.scratch_slot[i], now_s, rank)
    S.work[0].evicted = 0
    rep.decide = 0
    rep.undecided = 0


@jit_cold
def _worst_to_end(S, count):
    """Brings the worst of the first ``count`` in ``scratch`` to their end."""
    worst, last = 0, count - 1
    for i in range(1, count):
        key, tie = S.scratch_key[i], S.scratch_tie[i]
        if key > S.scratch_key[worst] or (key == S.scratch_key[worst] and tie > S.scratch_tie[worst]):
            worst = i
    key, tie, slot = S.scratch_key[worst], S.scratch_tie[worst], S.scratch_slot[worst]
    S.scratch_key[worst], S.scratch_tie[worst] = S.scratch_key[last], S.scratch_tie[last]
    S.scratch_slot[worst] = S.scratch_slot[last]
    S.scratch_key[last], S.scratch_tie[last], S.scratch_slot[last] = key, tie, slot


@jit
def _blocks_to_enter(S, slot, free, seats, memory):
    """Blocks that a waiting request would take; -1: it has no seat or too little memory."""
    if seats < 1:
        return -1
    q, par = S.slots[slot], S.par[0]
    context = q.prompt + q.generated
    return memory(
        context,
        context,
        predicted_total(S, q.index, q.generated),
        par.max_model_len,
        par.block_size,
        free,
        par.total_blocks,
        par.watermark_blocks,
        par.max_num_seqs - seats,
        0,
    )


@jit_cold
def _takes_place(S, r, waiting, key, k, tried, now_s, takeover):
    """Whether a waiting request may take the place of the running one at ``k`` in ``scratch``."""
    if not key < S.scratch_key[k]:
        return False
    w, q = S.slots[waiting], S.slots[S.scratch_slot[k]]
    gain = takeover(
        key,
        S.scratch_key[k],
        remaining_of(S, w),
        remaining_of(S, q),
        q.generated,
        return_steps(S, r, q),
        S.running[r],
        S.queues[S.replicas[r].queue].length + tried,
        w.waited_s + (now_s - w.queued_s),
        S.results[q.index].preemptions,
    )
    if gain != gain:  # noqa: PLR0124  NaN
        S.ctr[0].problem = BAD_TAKEOVER
        S.ctr[0].problem_request = w.index
        return False
    return gain > 0


@jit_cold
def return_steps(S, r, q):
    """What bringing a running request back would cost, in decode steps of the replica's batch.

    A layer's time to compute its tokens again, or its blocks out and in again, over that of a step.
    """
    cost, group = S.cost, S.groups[S.replicas[r].idle]
    seqs = max(1, group.members)
    kv_tokens = group.kv_tokens if group.members > 0 else 0
    decode_s = decode_attention(cost, group.members, kv_tokens, 0)
    decode_s += masked_attention(cost, group.members, kv_tokens, kv_tokens)
    step_s = _linear(cost, seqs, 0) + _linear(cost, seqs, 1) + decode_s
    if S.par[0].swap == 1 and q.decoding == 1:
        layers = 0.0
        for p in range(len(cost.stage_layers)):
            layers += cost.stage_layers[p]
        return 2 * q.blocks * S.par[0].swap_s_per_block / (layers * step_s)
    tokens = q.prompt + q.generated if q.decoding == 1 else q.prefilled
    prefill_s = 0.0
    if tokens > 0:
        if cost.merged:
            prefill_s = merged_prefill_attention(cost, 1, tokens * tokens, 0)
        else:
            prefill_s = prefill_attention(cost, tokens, 0)
    return (_linear(cost, tokens, 0) + _linear(cost, tokens, 1) + prefill_s) / step_s


@jit
def _linear(cost, tokens, column):
    return row(cost.by_tokens, cost.tokens_slope, tokens, column)
