"""Forms the next step of a replica: decodes, prompts under way, new requests."""

from __future__ import annotations

from lengthwise._jit import jit, jit_cold
from lengthwise.cost._lookup import decode_attention, masked_attention, merged_prefill_attention, prefill_attention, row
from lengthwise.engine import kernel_layout
from lengthwise.engine._kernel_groups import drop_partial, join, sit
from lengthwise.engine._kernel_memory import (
    ask_memory,
    charge,
    claim_blocks,
    evict,
    expire,
    free_partial_room,
    rank_again,
    rank_residents,
    split_off,
)
from lengthwise.engine._kernel_queue import predicted_total, queue_pop, queue_push, remaining_of
from lengthwise.policy import contracts

BAD_TAKEOVER = kernel_layout.BAD_TAKEOVER


@jit_cold
def give_way(S, r, now_s, rank, memory, takeover):
    """Waiting requests without a seat or memory take those of worse running ones, where the policy lets them."""
    rep, par = S.replicas[r], S.par[0]
    ranked, running, worst_from, left = False, 0, 0, 0
    free_slots, free = par.max_num_seqs - S.running[r], rep.free_blocks
    queue = S.queues[rep.queue]
    tried = 0
    while tried < par.max_num_seqs and queue.length > 0:
        slot = S.pool_slot[queue.offset]
        key = S.pool_key[queue.offset]
        queue_pop(S, rep.queue)
        S.scratch_waiting[tried] = slot
        S.scratch_waiting_key[tried] = key
        tried += 1
        k, room, slot_index = left, free, free_slots
        blocks = _blocks_to_enter(S, slot, room, slot_index, memory)
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
            slot_index += 1
            blocks = _blocks_to_enter(S, slot, room, slot_index, memory)
        if blocks < 0:
            break
        left, free, free_slots = k, room - blocks, slot_index - 1
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
def _blocks_to_enter(S, slot, free, free_slots, memory):
    """Blocks that a waiting request would take; -1: it has no seat or too little memory."""
    if free_slots < 1:
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
        par.max_num_seqs - free_slots,
        0,
    )


@jit_cold
def _takes_place(S, r, waiting, key, k, attempts, now_s, takeover):
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
        S.queues[S.replicas[r].queue].length + attempts,
        w.queued_for_s + (now_s - w.queued_s),
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


CHUNKED, PADDED, DECODES_WAIT = contracts.CHUNKED, contracts.PADDED, contracts.DECODES_WAIT
ONE_BATCH, ONE_BY_ONE = contracts.ONE_BATCH, contracts.ONE_BY_ONE
DECODES_REST, NEW_PHASE = contracts.DECODES_REST, contracts.NEW_PHASE
UNIFORM_SHARES = contracts.UNIFORM_SHARES
RESERVE_BLOCK, ADMIT_AFTER_EVICTION = contracts.RESERVE_BLOCK, contracts.ADMIT_AFTER_EVICTION


@jit
def form(S, r, now_s, rank, leave_rank, batching, memory, takeover):
    """Fills ``work`` with the next step of a replica; False: there is nothing to run."""
    rep, w = S.replicas[r], S.work[0]
    _blank(S, r)
    expire(S, r, now_s)
    decodes, waiting = S.groups[rep.idle].members, S.queues[rep.queue].length
    if decodes + rep.partials + waiting == 0:
        return False
    admit, tokens, flags = _plan(S, r, decodes, 0, batching)
    w.plan_flags = flags
    if flags & NEW_PHASE != 0:
        rep.phase_steps = 0
        rep.phase_rounds = 0
    if admit > 0:
        rep.steps_since = 0
        rep.ended_since = 0
        _let_in_turn(S, r, now_s, rank, memory, takeover)
    if flags & DECODES_WAIT == 0:
        _take_decodes(S, r, now_s, flags, rank, leave_rank)
    prompt_tokens = max(0, tokens - w.decodes)
    if rep.partials > 0:
        _continue_prompts(S, r, now_s, prompt_tokens, rank, leave_rank)
    if admit > 0 and (w.evicted == 0 or flags & ADMIT_AFTER_EVICTION != 0):
        _admit(S, r, now_s, admit, prompt_tokens, flags, rank, batching, memory)
    if w.seqs == 0:
        _take_decodes(S, r, now_s, flags, rank, leave_rank)
    if w.prompts > 0 and flags & DECODES_REST != 0:
        _let_rest(S, r)
    return w.seqs > 0


@jit
def _plan(S, r, decodes, next_tokens, batching):
    """What the batching policy says now."""
    rep = S.replicas[r]
    par = S.par[rep.side]
    return batching(
        decodes,
        rep.partials,
        S.queues[rep.queue].length,
        S.running[r],
        rep.in_flight,
        par.token_budget,
        par.max_num_seqs,
        rep.steps_since,
        rep.ended_since,
        rep.phase_steps,
        rep.phase_rounds,
        S.work[0].prompts,
        S.work[0].prompt_tokens,
        next_tokens,
        par.pp,
        par.parameter_0,
        par.parameter_1,
        par.parameter_2,
        par.parameter_3,
        par.parameter_4,
        par.parameter_5,
    )


@jit
def _let_rest(S, r):
    """The idle group goes along with the step's prompts; it is not computed."""
    rep, flight = S.replicas[r], S.flights[S.work[0].flight]
    if S.work[0].decodes == 0 and S.groups[rep.idle].members > 0:
        rep.idle, flight.group = flight.group, rep.idle
        flight.rests = 1


@jit
def _let_in_turn(S, r, now_s, rank, memory, takeover):
    """The queue in the order of now, and running requests out of the way of better waiting ones."""
    rep = S.replicas[r]
    par, queue = S.par[rep.side], S.queues[rep.queue]
    if queue.length == 0:
        return
    stays = par.takes_over == 0 and S.work[0].plan_flags & ADMIT_AFTER_EVICTION == 0
    full = stays and S.running[r] >= par.max_num_seqs
    if not full and (par.rekey == 1 or queue.overdue_s <= now_s):
        rank_again(S, rep.queue, now_s, rank)
    if par.takes_over == 1 and (rep.decide == 1 or rep.undecided >= par.window):
        give_way(S, r, now_s, rank, memory, takeover)


@jit
def _blank(S, r):
    rep, w, stride = S.replicas[r], S.work[0], S.par[0].stride
    w.flight = r * stride + (rep.first_flight + rep.in_flight) % stride
    S.flights[w.flight].rests = 0
    w.seqs = 0
    w.decodes = 0
    w.prompts = 0
    w.prompt_tokens = 0
    w.longest = 0
    w.evicted = 0
    w.plan_flags = 0
    w.swap_s = 0.0


@jit
def _take_decodes(S, r, now_s, flags, rank, leave_rank):
    """Puts the idle group into the step; block by block in order only where memory is short."""
    rep, w = S.replicas[r], S.work[0]
    group = S.groups[rep.idle]
    if group.members == 0:
        return
    par = S.par[rep.side]
    limit = par.max_step_seqs - w.seqs
    if flags & UNIFORM_SHARES != 0:
        limit = min(limit, (S.running[r] - rep.incoming + par.flights - 1) // par.flights)
    spare = 1 if flags & RESERVE_BLOCK != 0 else 0
    need = S.phases[rep.idle, group.steps % S.par[0].block_size]
    flight = S.flights[w.flight]
    if group.members <= limit and rep.free_blocks - need >= spare:
        rep.free_blocks -= need
        taken = group.members
    else:
        taken = claim_blocks(S, r, now_s, limit, spare, rank, leave_rank)
        if taken < group.members:
            split_off(S, rep.idle, flight.group, taken)
            w.decodes = taken
            w.seqs += taken
            return
    rep.idle, flight.group = flight.group, rep.idle
    w.decodes = taken
    w.seqs += taken


@jit
def _continue_prompts(S, r, now_s, prompt_tokens, rank, leave_rank):
    """Half-computed prompts go on in the order of their admission."""
    rep, w = S.replicas[r], S.work[0]
    par = S.par[rep.side]
    while rep.partials > 0 and w.seqs < par.max_step_seqs:
        slot = S.partials[r, 0]
        q = S.slots[slot]
        chunk = min(q.context - q.prefilled, prompt_tokens - w.prompt_tokens)
        if chunk <= 0:
            return
        need = max(0, (q.prefilled + chunk + par.block_size - 1) // par.block_size - q.blocks)
        if rep.free_blocks < need and not free_partial_room(S, r, need, slot, now_s, rank, leave_rank):
            continue
        rep.free_blocks -= need
        q.blocks += need
        drop_partial(S, r, slot)
        _add_prompt(S, slot, chunk)


@jit
def _add_prompt(S, slot, chunk):
    w = S.work[0]
    S.prompt_slot[w.flight, w.prompts] = slot
    S.prompt_chunk[w.flight, w.prompts] = chunk
    w.prompts += 1
    w.seqs += 1
    w.prompt_tokens += chunk
    w.longest = max(w.longest, chunk)


@jit
def chunk_for(S, context, evicted_before, prompt_tokens, flags):
    """How much of a prompt the step may take; 0: it must wait."""
    w = S.work[0]
    left = prompt_tokens - w.prompt_tokens
    if flags & CHUNKED != 0:
        return max(0, min(context, left))
    if w.prompts == 0 and evicted_before:
        return context
    counted = (w.prompts + 1) * max(w.longest, context) - w.prompt_tokens if flags & PADDED != 0 else context
    return context if counted <= left else 0


@jit
def _found_again(S, r, q, flags):
    """Tokens of an evicted request whose blocks nobody has taken since.

    Blocks are taken in the order in which they were freed, those of its end before those of its beginning.
    """
    rep = S.replicas[r]
    par = S.par[rep.side]
    if par.finds_again == 0 or q.retained == 0 or q.swapped == 1 or q.kept_on != r or flags & CHUNKED == 0:
        return 0
    taken_since = max(0, rep.total_released - rep.free_blocks - q.kept_mark)
    return max(0, q.retained - taken_since) * par.block_size


@jit
def _admit(S, r, now_s, admit, prompt_tokens, flags, rank, batching, memory):
    """Lets waiting requests in, in the order of their rank, until one has to wait."""
    rep, w = S.replicas[r], S.work[0]
    par, queue = S.par[rep.side], S.queues[rep.queue]
    admitted, batch = 0, 0
    while queue.length > 0 and admitted < admit and S.running[r] < par.max_num_seqs and w.seqs < par.max_step_seqs:
        slot = S.pool_slot[queue.offset]
        q = S.slots[slot]
        if q.reserved > 0 or (admitted > 0 and q.batch != batch and flags & ONE_BATCH != 0):
            return  # held: it comes by a transfer, not with a step
        q.context = q.prompt + q.generated
        chunk, found = 1, _found_again(S, r, q, flags)
        if q.swapped == 0:
            chunk = chunk_for(S, q.context - found, q.eviction > 0, prompt_tokens, flags)
        if chunk <= 0:
            return
        if flags & ONE_BY_ONE != 0 and _plan(S, r, S.groups[rep.idle].members, chunk, batching)[0] <= 0:
            return
        blocks = ask_memory(S, r, slot, found + chunk, memory)
        if blocks < 0:
            return
        queue_pop(S, rep.queue)
        rep.free_blocks -= blocks
        rep.total_released -= found // par.block_size
        q.retained = 0
        if found > 0:
            q.prefilled = found
        q.blocks = blocks
        if q.admission < 0 and par.charges == 1:
            charge(S, q)
            if par.rekey == 1:
                rank_again(S, rep.queue, now_s, rank)
        S.ctr[0].admissions += 1
        admitted += 1
        q.admission = S.ctr[0].admissions
        batch = q.batch
        q.waiting = 0
        q.entered = q.generated
        q.queued_for_s += now_s - q.queued_s
        _place(S, r, slot, now_s, chunk)


@jit
def _place(S, r, slot, now_s, chunk):
    rep, q, w = S.replicas[r], S.slots[slot], S.work[0]
    result = S.results[q.index]
    if result.scheduled_s != result.scheduled_s:
        result.scheduled_s = now_s
    result.replica = r
    S.running[r] += 1
    S.waiting[rep.queue] -= 1
    rep.deadline_s = min(rep.deadline_s, q.arrival_s + S.par[0].timeout_s)
    if q.swapped == 1:
        q.swapped = 0
        w.swap_s += q.blocks * S.par[rep.side].swap_s_per_block
        sit(S, slot)
        join(S, rep.idle, slot)
    else:
        _add_prompt(S, slot, chunk)
