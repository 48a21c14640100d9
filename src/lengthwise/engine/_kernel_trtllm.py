"""Forms a step by TensorRT-LLM's rules: which requests fit in memory, then which fit in the step.

``_reference_trtllm`` states the rules. The kernel gets ``form_as_trtllm`` as an argument, so that only runs with these
rules compile them. All residents that decode are in the idle group while a step is formed, since a replica has one step
at a time. ``State.tmp_slot`` has the prompts that may run, ``State.tmp_tie`` how many tokens of each are in the step.
"""

from __future__ import annotations

from lengthwise._jit import jit, jit_cold
from lengthwise.engine._kernel_groups import remove_partial, update
from lengthwise.engine._kernel_memory import add_prompt, note_admission, preempt, update_ranks
from lengthwise.engine._kernel_queue import key_before, queue_pop, queue_push
from lengthwise.engine._kernel_reserve import fits_reserved
from lengthwise.engine._kernel_sglang import compact, put, take_decodes

MAX_UTILIZATION = 2
COMPLETE, FIRST_COME_FIRST_SERVED = 0, 1
INFINITY = float("inf")


def form_as_trtllm(S, r, now_s, rank):
    """Form the next step of replica ``r`` in ``S.work``. Return 0 if there is nothing to run."""
    rep, w, params = S.replicas[r], S.work[0], S.params[0]
    queue, room = S.queues[rep.queue], params.max_num_seqs - S.running[r]
    if queue.length > 0 and (params.rank_every_step == 1 or queue.overdue_at_s <= now_s):
        update_ranks(S, rep.queue, now_s, rank)
    group = S.groups[rep.idle_group]
    left, in_order = params.total_blocks - rep.reserved_blocks, False
    if params.trtllm == MAX_UTILIZATION:
        left = rep.free_blocks - S.block_needs[rep.idle_group, group.steps % params.block_size]
        in_order = left < 0 or (room > 0 and queue.length > 0 and _precedes_resident(S, r))
    prompts = _pause_until_fit(S, r, now_s, room, rank) if in_order else _fit_after_residents(S, r, left, room)
    _divide(S, prompts, params.token_budget - group.members)
    _start(S, r, prompts, now_s, rank)
    if group.members > 0:
        take_decodes(S, r)
    # While the same sequences decode, waiting requests still do not fit. In order, residents may be paused for them.
    is_settled = not in_order and params.central_queue == 0 and params.rank_every_step == 0 and params.reserve == 0
    rep.batch_is_full = 1 if is_settled and w.prompts == 0 else 0
    return 1 if w.seqs > 0 else 0


@jit
def _precedes(S, slot, key, index):
    """Return whether a request of this key and index precedes the resident in ``slot``."""
    q = S.slots[slot]
    return key_before(key, index, q.queue_key, q.index)


@jit
def _precedes_resident(S, r):
    """Return whether the first waiting request precedes the last resident in order, and thus perhaps others."""
    rep = S.replicas[r]
    at = S.queues[rep.queue].offset
    return S.running[r] > 0 and key_before(S.queued_key[at], S.queued_index[at], rep.last_key, rep.last_index)


@jit
def _blocks_for(S, tokens):
    size = S.params[0].block_size
    return (tokens + size - 1) // size


@jit
def _take_first(S, r, prompts):
    """Move the first request of the queue behind the ``prompts`` requests in ``tmp_slot``."""
    queue = S.queues[S.replicas[r].queue]
    slot = S.queued_slot[queue.offset]
    S.slots[slot].queue_key = S.queued_key[queue.offset]
    S.tmp_slot[prompts] = slot
    queue_pop(S, S.replicas[r].queue)


@jit
def _is_admissible(S, r, prompts):
    """Return whether the first waiting request fits by predicted length, or True if memory is not reserved."""
    if S.params[0].reserve == 0:
        return True
    return fits_reserved(S, r, S.queued_slot[S.queues[S.replicas[r].queue].offset], prompts)


@jit_cold
def _fit_after_residents(S, r, left, room):
    """Put the prompts of residents into ``tmp_slot``, and up to ``room`` waiting requests that fit in ``left`` blocks.

    No request is paused. Return the number of prompts.
    """
    rep, params = S.replicas[r], S.params[0]
    queue, prompts = S.queues[rep.queue], rep.partials
    budget = params.token_budget - S.groups[rep.idle_group].members
    for count in range(rep.partials):
        slot, i = S.partials[r, count], count
        q = S.slots[slot]
        while i > 0 and _precedes(S, S.tmp_slot[i - 1], q.queue_key, q.index):
            S.tmp_slot[i] = S.tmp_slot[i - 1]
            i -= 1
        S.tmp_slot[i] = slot
    if params.trtllm_chunking == FIRST_COME_FIRST_SERVED:
        for i in range(rep.partials):
            q = S.slots[S.tmp_slot[i]]
            budget -= _size(S, q.context - q.prefilled, budget)
    while queue.length > 0 and prompts < rep.partials + room and (budget > 0 or prompts == 0):
        q = S.slots[S.queued_slot[queue.offset]]
        q.context = q.prompt + q.generated
        need = _blocks_for(S, q.context)
        if params.trtllm != MAX_UTILIZATION:
            need = _blocks_for(S, q.prompt + S.max_tokens[q.index])
        size = _size(S, q.context, budget)
        if prompts == 0 and params.trtllm_chunking == COMPLETE and q.context > params.token_budget:
            size = q.context
        if need > left or (size == 0 and params.trtllm_chunking == COMPLETE) or not _is_admissible(S, r, prompts):
            return prompts
        _take_first(S, r, prompts)
        left -= need
        if params.trtllm_chunking <= FIRST_COME_FIRST_SERVED:
            budget -= size
        prompts += 1
    return prompts


@jit
def _size(S, tokens, budget):
    """Return how many of a prompt's ``tokens`` fit in the step's ``budget``: without chunking all or 0."""
    if tokens <= budget:
        return tokens
    unit = S.params[0].block_size
    return budget // unit * unit if S.params[0].trtllm_chunking != COMPLETE else 0


@jit_cold
def _pause_until_fit(S, r, now_s, room, rank):  # noqa: C901  one sequence
    """Go through residents and waiting requests in order, and put the prompts that fit for a step into ``tmp_slot``.

    If a request does not fit, residents are paused for it, the last in order first. Return the number of prompts.
    """
    rep, queue = S.replicas[r], S.queues[S.replicas[r].queue]
    _order_residents(S, r)
    first, end, waiting, prompts, left = 0, rep.ordered, 0, 0, rep.free_blocks
    while True:
        is_waiting = waiting < room and queue.length > 0
        if is_waiting and first < rep.ordered:  # No request behind a paused one is tried.
            before = S.batch_order[r, first]
            is_waiting = _precedes(S, before, S.queued_key[queue.offset], S.queued_index[queue.offset])
        if is_waiting and not _is_admissible(S, r, prompts):
            room, is_waiting = waiting, False
        if not is_waiting and first == end:
            break
        slot = S.queued_slot[queue.offset] if is_waiting else S.batch_order[r, first]
        q = S.slots[slot]
        if is_waiting:
            q.context = q.prompt + q.generated
        need = _blocks_for(S, q.prompt + q.generated) - q.blocks
        if need <= left:
            left -= need
            if is_waiting:
                _take_first(S, r, prompts)
                waiting += 1
                prompts += 1
            else:
                first += 1
                if q.decoding == 0:
                    S.tmp_slot[prompts] = slot
                    prompts += 1
        elif first < end:
            end -= 1
            left += S.slots[S.batch_order[r, end]].blocks
        else:
            break
    for i in range(rep.ordered - 1, end - 1, -1):
        preempt(S, r, S.batch_order[r, i], now_s, rank)
    rep.ordered = end
    return prompts


@jit_cold
def _order_residents(S, r):
    """Sort the residents in ``batch_order`` by key and index, and bring their records up to date."""
    rep = S.replicas[r]
    compact(S, r)
    for count in range(rep.ordered):
        slot, i = S.batch_order[r, count], count
        q = S.slots[slot]
        if q.decoding == 1:
            update(S, rep.idle_group, slot)
        while i > 0 and _precedes(S, S.batch_order[r, i - 1], q.queue_key, q.index):
            put(S, r, i, S.batch_order[r, i - 1])
            i -= 1
        put(S, r, i, slot)
    rep.last_key = -INFINITY
    if rep.ordered > 0:
        last = S.slots[S.batch_order[r, rep.ordered - 1]]
        rep.last_key = last.queue_key
        rep.last_index = last.index


@jit_cold
def _divide(S, prompts, budget):
    """Set in ``tmp_tie`` how many tokens of each prompt are in the step."""
    chunking, total, is_full = S.params[0].trtllm_chunking, 0, False
    for i in range(prompts):
        q = S.slots[S.tmp_slot[i]]
        total += q.context - q.prefilled
    if chunking > FIRST_COME_FIRST_SERVED and total > budget:
        _divide_equally(S, prompts, budget)
        return
    for i in range(prompts):
        q = S.slots[S.tmp_slot[i]]
        size = _size(S, q.context - q.prefilled, budget)
        if chunking == COMPLETE and i == 0 and q.context > S.params[0].token_budget:
            size = q.context  # A paused request may become longer than a step.
        if chunking == COMPLETE and (is_full or size == 0):
            is_full, size = True, 0
        S.tmp_tie[i] = size
        budget -= size


@jit_cold
def _divide_equally(S, prompts, budget):
    """Give each prompt a block in turn, until no block fits in the budget."""
    more = 1
    for i in range(prompts):
        S.tmp_tie[i] = 0
    while budget > 0 and more > 0:
        more = 0
        for i in range(prompts):
            q = S.slots[S.tmp_slot[i]]
            block = min(S.params[0].block_size, q.context - q.prefilled - S.tmp_tie[i])
            if block <= budget:
                S.tmp_tie[i] += block
                budget -= block
                more += block


@jit_cold
def _start(S, r, prompts, now_s, rank):
    """Put prompts with tokens into the step, with blocks for all their tokens, and the others back into the queue."""
    rep = S.replicas[r]
    for i in range(prompts):
        slot = S.tmp_slot[i]
        q = S.slots[slot]
        if S.tmp_tie[i] == 0 and q.waiting == 1:
            queue_push(S, rep.queue, q.queue_key, q.index, slot)
    for i in range(prompts):
        slot = S.tmp_slot[i]
        q = S.slots[slot]
        if S.tmp_tie[i] == 0:
            continue
        if q.waiting == 0:
            remove_partial(S, r, slot)
        else:
            q.blocks = _blocks_for(S, q.context)
            rep.free_blocks -= q.blocks
            _note_place(S, r, slot)
            note_admission(S, r, slot, now_s, rank)
        add_prompt(S, slot, S.tmp_tie[i])


@jit
def _note_place(S, r, slot):
    """Reserve the blocks of a request that starts or, with MAX_UTILIZATION, add it to the residents in order."""
    rep, q = S.replicas[r], S.slots[slot]
    if S.params[0].trtllm != MAX_UTILIZATION:
        q.reserved = _blocks_for(S, q.prompt + S.max_tokens[q.index])
        rep.reserved_blocks += q.reserved
        return
    if S.running[r] == 0 or not key_before(q.queue_key, q.index, rep.last_key, rep.last_index):
        rep.last_key = q.queue_key
        rep.last_index = q.index
    if rep.ordered == S.batch_order.shape[1]:
        compact(S, r)
    put(S, r, rep.ordered, slot)
    rep.ordered += 1
