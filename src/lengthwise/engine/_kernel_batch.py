"""Forms the next step of a replica: decodes, half-computed prompts, new requests, preemptions for waiting requests."""

from __future__ import annotations

from lengthwise._jit import jit, jit_cold
from lengthwise.cost._lookup import decode_attention, entry, masked_attention, merged_prefills, prefill_attention
from lengthwise.engine import kernel_layout
from lengthwise.engine._kernel_groups import (
    assign_return_number,
    free_skipped,
    frees_contents,
    join,
    needed_blocks,
    remove_partial,
)
from lengthwise.engine._kernel_memory import (
    add_prompt,
    aligned,
    blocks_to_admit,
    claim_blocks,
    expire,
    note_admission,
    preempt,
    preempt_for_partial,
    rank_residents,
    serve_in_order,
    slots_end,
    split_off,
    take_in_order,
    update_ranks,
)
from lengthwise.engine._kernel_prefix import (
    cache_blocks,
    count_shared,
    drop_block,
    find_cached,
    must_wait,
    reuse_found,
    taken_blocks,
)
from lengthwise.engine._kernel_queue import predicted_total, queue_pop, queue_push, remaining_of
from lengthwise.engine._kernel_speculation import take_decodes as take_speculating
from lengthwise.engine._kernel_tiers import (
    cache_loaded,
    count_loadable,
    is_loaded,
    leave_loading,
    reserved_blocks,
    restore_deferred,
    start_load,
)
from lengthwise.policy import contracts

COMPUTE, STARTED, DEFERRED, SHORT = range(4)
"""Results of ``_try_load``. COMPUTE: there is nothing to load. SHORT: blocks are short, so that admission ends."""
UNLIMITED = 2**62
BAD_PREEMPTION = kernel_layout.BAD_PREEMPTION
CHUNKED, PADDED, DECODES_WAIT = contracts.CHUNKED, contracts.PADDED, contracts.DECODES_WAIT
ONE_BATCH, ONE_BY_ONE = contracts.ONE_BATCH, contracts.ONE_BY_ONE
PAUSE_DECODES, NEW_PHASE = contracts.PAUSE_DECODES, contracts.NEW_PHASE
UNIFORM_SHARES = contracts.UNIFORM_SHARES
RESERVE_BLOCK, ADMIT_AFTER_PREEMPTION = contracts.RESERVE_BLOCK, contracts.ADMIT_AFTER_PREEMPTION


@jit
def form(S, r, now_s, rank, victim, batching, memory, preemption, rules):  # noqa: C901  one sequence
    """Form the next step of replica ``r`` in ``S.work``. Return False if there is nothing to run."""
    rep, w, stride = S.replicas[r], S.work[0], S.params[0].stride
    w.flight = r * stride + (rep.first_flight + rep.in_flight) % stride
    flight = S.flights[w.flight]
    flight.paused = 0
    w.seqs = w.decodes = w.prompts = w.prompt_tokens = w.longest = 0
    w.preempted_for_blocks = w.plan_flags = w.is_served = w.drafts = w.draft_pairs = w.accepted = 0
    w.swap_s = w.draft_s = 0.0
    expire(S, r, now_s)
    if S.params[rep.side].sglang == 1 or S.params[rep.side].trtllm > 0:
        return rules(S, r, now_s, rank) == 1
    decodes, waiting = S.groups[rep.idle_group].members, S.queues[rep.queue].length
    if decodes + rep.partials + waiting + S.tiers[r].loaded == 0:
        return False
    threshold = S.params[rep.side].long_prefill_token_threshold
    w.max_chunk = threshold if threshold > 0 and S.running[r] + waiting + S.tiers[r].loading > 1 else UNLIMITED
    admit, tokens, flags = _plan(S, r, decodes, 0, batching)
    w.plan_flags = flags
    if flags & NEW_PHASE != 0:
        rep.phase_steps = 0
        rep.phase_rounds = 0
    if admit > 0:
        rep.steps_since_admit = 0  # Counts from when the plan last allowed admissions, even if none took place.
        rep.ended_since_admit = 0
        _rank_and_preempt(S, r, now_s, rank, memory, preemption)
    rep.fresh = 0
    in_order = threshold > 0 or S.params[rep.side].aligned == 1
    if in_order and rep.partials > 0 and _are_blocks_short(S, r, tokens):
        _serve_one_by_one(S, r, now_s, tokens, rank, victim)
    elif flags & DECODES_WAIT == 0:
        _take_decodes(S, r, now_s, flags, tokens, rank, victim)
    prompt_budget = max(0, tokens - w.decodes - w.drafts)
    if rep.partials > 0 and w.is_served == 0:
        _continue_prompts(S, r, now_s, prompt_budget, rank, victim)
    if admit > 0 and (w.preempted_for_blocks == 0 or flags & ADMIT_AFTER_PREEMPTION != 0):
        _admit(S, r, now_s, admit, prompt_budget, flags, rank, batching, memory, rules)
        if w.deferred > 0:
            restore_deferred(S, r, now_s)
    if w.seqs == 0 and w.is_served == 0:  # With DECODES_WAIT, decodes run only if no prompt does.
        _take_decodes(S, r, now_s, flags, tokens, rank, victim)
    pauses = w.prompts > 0 and w.decodes == 0 and flags & PAUSE_DECODES != 0
    if pauses and S.groups[rep.idle_group].members > 0:
        rep.idle_group, flight.group = flight.group, rep.idle_group
        flight.paused = 1
    return w.seqs > 0


@jit
def _plan(S, r, decodes, next_tokens, batching):
    rep, w = S.replicas[r], S.work[0]
    params = S.params[rep.side]
    return batching(
        decodes, rep.partials, S.queues[rep.queue].length + S.tiers[r].loaded, S.running[r], rep.in_flight,
        params.token_budget, params.max_num_seqs, rep.steps_since_admit, rep.ended_since_admit, rep.phase_steps,
        rep.phase_rounds, w.prompts, w.prompt_tokens, next_tokens, params.pp, params.parameter_0, params.parameter_1,
        params.parameter_2, params.parameter_3, params.parameter_4, params.parameter_5,
    )  # fmt: skip


@jit
def _rank_and_preempt(S, r, now_s, rank, memory, preemption):
    rep = S.replicas[r]
    params, queue = S.params[rep.side], S.queues[rep.queue]
    if queue.length == 0:
        return
    may_free_seqs = params.preempts_by_policy == 1 or S.work[0].plan_flags & ADMIT_AFTER_PREEMPTION != 0
    full = not may_free_seqs and S.running[r] >= params.max_num_seqs
    if not full and (params.rank_every_step == 1 or queue.overdue_at_s <= now_s):
        update_ranks(S, rep.queue, now_s, rank)
    if params.preempts_by_policy == 1 and (
        rep.check_preemption == 1 or rep.steps_since_check >= params.preemption_interval_steps
    ):
        preempt_for_waiting(S, r, now_s, rank, memory, preemption)


@jit_cold
def preempt_for_waiting(S, r, now_s, rank, memory, preemption):
    """Preempt running requests so that waiting requests of smaller keys get memory and a slot of ``max_num_seqs``."""
    rep, params = S.replicas[r], S.params[0]
    # Candidates from ``sorted_from`` on are sorted by key, and those from ``left`` on are to be preempted.
    ranked, candidates, sorted_from, left = False, 0, 0, 0
    free_blocks, free_seqs = rep.free_blocks, params.max_num_seqs - S.running[r]
    queue = S.queues[rep.queue]
    popped = 0
    while popped < params.max_num_seqs and queue.length > 0:
        slot = S.queued_slot[queue.offset]
        key = S.queued_key[queue.offset]
        queue_pop(S, rep.queue)
        S.tmp_waiting[popped] = slot
        S.tmp_waiting_key[popped] = key
        popped += 1
        k, trial_blocks, trial_seqs = left, free_blocks, free_seqs
        blocks = _blocks_if_free(S, slot, trial_blocks, trial_seqs, memory)
        if blocks < 0 and not ranked:
            candidates = rank_residents(S, r, now_s, rank)
            ranked, sorted_from, left, k = True, candidates, candidates, candidates
        while blocks < 0 and k > 0:
            if k == sorted_from:
                sorted_from -= 1
                _worst_to_end(S, k)
            if not _may_preempt(S, r, slot, key, k - 1, popped, now_s, preemption):
                break
            k -= 1
            trial_blocks += S.slots[S.tmp_slot[k]].blocks
            if params.prefix_caching > 0:
                trial_blocks -= count_shared(S, r, S.slots[S.tmp_slot[k]])
            trial_seqs += 1
            blocks = _blocks_if_free(S, slot, trial_blocks, trial_seqs, memory)
        if blocks < 0:
            break
        left, free_blocks, free_seqs = k, trial_blocks - blocks, trial_seqs - 1
    for i in range(popped):
        slot = S.tmp_waiting[i]
        queue_push(S, rep.queue, S.tmp_waiting_key[i], S.slots[slot].index, slot)
    preempted_tokens, shortages = rep.preempted_tokens, rep.shortages
    for i in range(candidates - 1, left - 1, -1):
        preempt(S, r, S.tmp_slot[i], now_s, rank)
    # ``preempt`` counts preemptions for lack of blocks, but these were by rank.
    rep.preempted_tokens, rep.shortages = preempted_tokens, shortages
    S.work[0].preempted_for_blocks = 0
    rep.check_preemption = 0
    rep.steps_since_check = 0


@jit_cold
def _worst_to_end(S, count):
    worst, last = 0, count - 1
    for i in range(1, count):
        key, tie = S.tmp_key[i], S.tmp_tie[i]
        if key > S.tmp_key[worst] or (key == S.tmp_key[worst] and tie > S.tmp_tie[worst]):
            worst = i
    key, tie, slot = S.tmp_key[worst], S.tmp_tie[worst], S.tmp_slot[worst]
    S.tmp_key[worst], S.tmp_tie[worst] = S.tmp_key[last], S.tmp_tie[last]
    S.tmp_slot[worst] = S.tmp_slot[last]
    S.tmp_key[last], S.tmp_tie[last], S.tmp_slot[last] = key, tie, slot


@jit
def _blocks_if_free(S, slot, free_blocks, free_seqs, memory):
    """Return the blocks that a waiting request gets with these free blocks and slots, or -1 if it must wait."""
    if free_seqs < 1:
        return -1
    q, params = S.slots[slot], S.params[0]
    context = q.prompt + q.generated
    return memory(
        context, context, predicted_total(S, q.index, q.generated), params.max_model_len, params.block_size,
        free_blocks, params.total_blocks, params.watermark_blocks, params.max_num_seqs - free_seqs, 0,
    )  # fmt: skip


@jit_cold
def _may_preempt(S, r, waiting_slot, key, k, popped, now_s, preemption):
    if not key < S.tmp_key[k]:
        return False
    waiting, running = S.slots[waiting_slot], S.slots[S.tmp_slot[k]]
    gain = preemption(
        key, S.tmp_key[k], remaining_of(S, waiting), remaining_of(S, running), running.generated,
        _recompute_steps(S, r, running), S.running[r], S.queues[S.replicas[r].queue].length + popped,
        waiting.queued_for_s + (now_s - waiting.queued_at_s), S.results[running.index].preemptions,
    )  # fmt: skip
    if gain != gain:  # noqa: PLR0124  NaN
        S.counters[0].problem = BAD_PREEMPTION
        S.counters[0].problem_value = waiting.index
        return False
    return gain > 0


@jit_cold
def _recompute_steps(S, r, q):
    cost, group = S.cost, S.groups[S.replicas[r].idle_group]
    seqs = max(1, group.members)
    kv_tokens = group.kv_tokens if group.members > 0 else 0
    decode_s = decode_attention(cost, group.members, kv_tokens, 0)
    decode_s += masked_attention(cost, group.members, kv_tokens, kv_tokens)
    step_s = _layer_s(S, seqs) + decode_s
    if S.params[0].swap == 1 and q.decoding == 1:
        layers = 0.0
        for p in range(len(cost.stage_layers)):
            layers += cost.stage_layers[p]
        return 2 * q.blocks * S.params[0].swap_s_per_block / (layers * step_s)
    tokens = q.prompt + q.generated if q.decoding == 1 else q.prefilled
    prefill_s = 0.0
    if tokens > 0:
        prefill_s = merged_prefills(cost, 1, tokens * tokens, 0) if cost.merged else prefill_attention(cost, tokens, 0)
    return (_layer_s(S, tokens) + prefill_s) / step_s


@jit
def _layer_s(S, tokens):
    cost = S.cost
    layer_s = entry(cost.by_tokens, cost.tokens_slope, tokens, 0) + entry(cost.by_tokens, cost.tokens_slope, tokens, 1)
    return layer_s + entry(S.shared, S.shared_slope, tokens, 0)


@jit_cold
def _are_blocks_short(S, r, tokens):
    """Return whether the residents' next tokens and chunks, of at most ``tokens`` in all, need more than is free.

    If not, their order does not matter: under vLLM's rules the token budget can cut only the last resident's chunk.
    """
    rep, params, size = S.replicas[r], S.params[0], S.params[0].block_size
    need = S.block_needs[rep.idle_group, S.groups[rep.idle_group].steps % size]
    if params.aligned == 1:  # A decode may follow a prompt that takes all tokens.
        need *= params.attention_groups
        for i in range(rep.partials):
            q = S.slots[S.partials[r, i]]
            blocks = (q.context + size - 1) // size - (q.prefilled + size - 1) // size
            need += (params.attention_groups - params.local_groups) * blocks + params.local_groups
        return need > rep.free_blocks or S.slots[S.partials[r, 0]].admission < rep.newest_decode
    left = tokens - S.groups[rep.idle_group].members
    for i in range(rep.partials):
        q = S.slots[S.partials[r, i]]
        chunk = min(q.context - q.prefilled, left, S.work[0].max_chunk)
        need += max(0, (q.prefilled + chunk + size - 1) // size - q.blocks)
        left -= chunk
    return need > rep.free_blocks


@jit_cold
def _serve_one_by_one(S, r, now_s, tokens, rank, victim):
    """Take back the decodes of the step, and serve the residents one by one, as vLLM does."""
    rep, w = S.replicas[r], S.work[0]
    flight = S.flights[w.flight]
    if w.decodes > 0:
        rep.idle_group, flight.group = flight.group, rep.idle_group
        rep.free_blocks += S.block_needs[rep.idle_group, S.groups[rep.idle_group].steps % S.params[0].block_size]
        w.seqs -= w.decodes
        w.decodes = 0
    w.is_served = 1
    w.decodes = serve_in_order(S, r, now_s, tokens, rank, victim)
    w.seqs += w.decodes
    if w.decodes == 0:
        return  # With an empty idle group, the swap below would replace its ``last_end_s``.
    if w.decodes == S.groups[rep.idle_group].members:
        rep.idle_group, flight.group = flight.group, rep.idle_group
    else:
        split_off(S, rep.idle_group, flight.group, w.decodes)


@jit
def _take_decodes(S, r, now_s, flags, tokens, rank, victim):  # noqa: C901, PLR0912  one sequence
    rep, w = S.replicas[r], S.work[0]
    group = S.groups[rep.idle_group]
    if group.members == 0:
        return
    params, flight = S.params[rep.side], S.flights[w.flight]
    limit = params.max_step_seqs - w.seqs
    if flags & UNIFORM_SHARES != 0:
        limit = min(limit, (S.running[r] - rep.incoming + params.max_in_flight - 1) // params.max_in_flight)
    reserve = 1 if flags & RESERVE_BLOCK != 0 else 0
    need = S.block_needs[rep.idle_group, group.steps % S.params[0].block_size]
    if params.hybrid == 1:
        need *= params.attention_groups
    if params.speculates == 1:
        taken = take_speculating(S, r, now_s, rank, victim)
        if taken == 0:
            return
    elif group.members <= (min(limit, tokens) if params.aligned == 1 else limit) and rep.free_blocks - need >= reserve:
        taken = group.members
        if frees_contents(S, r, rep.idle_group, group.steps):
            take_in_order(S, r, now_s, victim)
        else:
            rep.free_blocks -= need
            if params.hybrid == 1:
                rep.free_blocks += free_skipped(S, r, rep.idle_group)
    elif params.vllm_priority == 1 or params.aligned == 1:
        _serve_one_by_one(S, r, now_s, tokens, rank, victim)
        return
    else:
        taken = claim_blocks(S, r, now_s, limit, reserve, rank, victim)
        if taken == 0:
            return
        if taken < group.members:
            split_off(S, rep.idle_group, flight.group, taken)
            S.groups[flight.group].surplus = 0
            w.decodes = taken
            w.seqs += taken
            return
    rep.idle_group, flight.group = flight.group, rep.idle_group
    w.decodes = taken
    w.seqs += taken


@jit
def _continue_prompts(S, r, now_s, prompt_budget, rank, victim):
    rep, w, at = S.replicas[r], S.work[0], 0
    params = S.params[rep.side]
    while rep.partials > at and w.seqs < params.max_step_seqs:
        slot = S.partials[r, at]
        q = S.slots[slot]
        chunk = min(q.context - q.prefilled, prompt_budget - w.prompt_tokens, w.max_chunk)
        if chunk <= 0:
            return
        if params.aligned == 1:
            chunk = aligned(S, q, q.prefilled, chunk, q.boundary)
            if chunk == 0:
                at += 1
                continue
        need = max(0, (slots_end(S, q.prefilled + chunk) + params.block_size - 1) // params.block_size - q.blocks)
        if params.hybrid == 1:
            need = needed_blocks(S, r, q, q.prefilled + chunk)
        if rep.free_blocks < need and params.vllm_priority == 1:
            _serve_one_by_one(S, r, now_s, prompt_budget + w.decodes, rank, victim)
            return
        if rep.free_blocks < need and not preempt_for_partial(S, r, need, slot, now_s, rank, victim):
            continue
        rep.free_blocks -= need
        q.blocks += need
        if params.prefix_caching == 1:
            cache_blocks(S, r, q, q.prefilled + chunk)
        remove_partial(S, r, slot)
        add_prompt(S, slot, chunk)


@jit
def chunk_for(S, context, preempted_before, prompt_budget, flags):
    """Return how many of a prompt's ``context`` tokens the step in ``work`` computes, or 0 if the prompt must wait."""
    w = S.work[0]
    left = prompt_budget - w.prompt_tokens
    if flags & CHUNKED != 0:
        return max(0, min(context, left))
    if w.prompts == 0 and preempted_before:
        return context
    counted = (w.prompts + 1) * max(w.longest, context) - w.prompt_tokens if flags & PADDED != 0 else context
    return context if counted <= left else 0


@jit_cold
def _padded(S, q, prompt_budget, chunk, cached):
    """Return the tokens of a prompt's first chunk. If one token is left, vLLM pads it to the size of a verification.

    The result is 0 if that exceeds the budget, so that the request must wait.
    """
    w, tokens = S.work[0], 1 + S.params[0].padding_tokens
    is_last = cached == q.context - 1 and (w.decodes > 0 or cached > 0)
    if not is_last or cached + tokens >= S.params[0].max_model_len:
        return chunk
    return tokens if tokens <= prompt_budget - w.prompt_tokens else 0


@jit
def _take_blocks(S, r, q, blocks, found, tokens):
    """Give an admitted request ``blocks`` blocks, ``found`` of them cached, and cache those of its first ``tokens``."""
    params = S.params[S.replicas[r].side]
    S.replicas[r].free_blocks -= blocks - taken_blocks(S, found)
    q.blocks = blocks
    if params.hybrid == 1:
        q.skipped = (tokens - 1) // params.block_size if params.aligned == 1 and found == 0 else S.work[0].found_skipped
        q.boundary = S.work[0].found_boundary
    if found > 0:
        reuse_found(S, r, q, found)
        q.prefilled = found * params.block_size
    if params.prefix_caching == 1 and q.swapped == 0:
        cache_blocks(S, r, q, min(tokens, q.context))
    if q.admission < 0:
        S.results[q.index].cached_tokens = found * params.block_size


@jit_cold
def _admit_loaded(S, r, now_s, admit, prompt_budget, rank, batching, memory):
    """Admit the requests whose load has ended. Return their number, or -1 if no other request may be admitted."""
    rep, w, tier, admitted, at = S.replicas[r], S.work[0], S.tiers[r], 0, 0
    params = S.params[0]
    while at < tier.loading:
        slot = S.loading[r, at]
        q = S.slots[slot]
        if not is_loaded(S, q):
            at += 1
            continue
        left = prompt_budget - w.prompt_tokens
        is_full = S.running[r] >= params.max_num_seqs or w.seqs >= params.max_step_seqs
        if admitted >= admit or is_full or left <= 0:
            return -1
        cache_loaded(S, r, q)
        chunk = min(q.context - q.prefilled, left, w.max_chunk)
        decodes = S.groups[rep.idle_group].members
        if w.plan_flags & ONE_BY_ONE != 0 and _plan(S, r, decodes, chunk, batching)[0] <= 0:
            return -1
        blocks = blocks_to_admit(S, r, slot, q.prefilled + chunk, 0, memory)
        if blocks < 0:
            return -1
        leave_loading(S, r, at)
        rep.free_blocks -= blocks - q.blocks
        q.blocks = blocks
        cache_blocks(S, r, q, q.prefilled + chunk)
        note_admission(S, r, slot, now_s, rank)
        add_prompt(S, slot, chunk)
        admitted += 1
    return admitted


@jit_cold
def _try_load(S, r, slot, found, shared, now_s, memory):
    """Start the load of the chunks that continue a waiting request's ``found`` cached blocks, if there are any.

    Other requests use ``shared`` of the cached blocks. STARTED and DEFERRED take the request out of the queue.
    DEFERRED: its chunks are just being stored, read or loaded for another request; it returns to the queue as soon as
    this step is formed.
    """
    q, params, queue = S.slots[slot], S.params[0], S.replicas[r].queue
    count = count_loadable(S, r, q, found, now_s)
    if count < 0:
        w = S.work[0]
        S.deferred[w.deferred] = slot
        S.deferred_key[w.deferred] = S.queued_key[S.queues[queue].offset]
        w.deferred += 1
        queue_pop(S, queue)
        return DEFERRED
    if count == 0:
        return COMPUTE
    blocks = blocks_to_admit(S, r, slot, (found + count) * params.block_size, shared, memory)
    if blocks < 0:
        return SHORT
    need, reserved = blocks - shared, reserved_blocks(S, r)
    if reserved > 0:
        need += reserved + params.watermark_blocks
    if need > S.replicas[r].free_blocks:
        return SHORT
    queue_pop(S, queue)
    S.replicas[r].free_blocks -= blocks - found
    q.blocks = blocks
    q.prefilled = found * params.block_size
    if found > 0:
        reuse_found(S, r, q, found)
    start_load(S, r, slot, found, found + count, now_s)
    return STARTED


@jit
def _admit(S, r, now_s, admit, prompt_budget, flags, rank, batching, memory, rules):  # noqa: C901, PLR0911, PLR0912
    rep, w = S.replicas[r], S.work[0]
    params, queue = S.params[rep.side], S.queues[rep.queue]
    admitted, bin_batch, pads = 0, 0, params.padding_tokens > 0 and w.prompts == 0
    if S.tiers[r].loaded > 0:
        admitted = _admit_loaded(S, r, now_s, admit, prompt_budget, rank, batching, memory)
        if admitted < 0:
            return
    while (
        queue.length > 0 and admitted < admit and S.running[r] < params.max_num_seqs and w.seqs < params.max_step_seqs
    ):
        slot = S.queued_slot[queue.offset]
        q = S.slots[slot]
        # A request with ``transfer_blocks`` enters by a transfer, not with a step.
        if q.transfer_blocks > 0 or (admitted > 0 and q.bin_batch != bin_batch and flags & ONE_BATCH != 0):
            return
        q.context = q.prompt + q.generated
        chunk, found, shared = 1, 0, 0
        if params.prefix_caching > 0 and q.swapped == 0 and flags & CHUNKED != 0:
            found, shared = find_cached(S, r, q)
            if params.drops_block == 1:
                found, shared = drop_block(S, r, q, found, shared)
        cached = found * params.block_size
        if q.swapped == 0:
            chunk = min(chunk_for(S, q.context - cached, q.last_preemption > 0, prompt_budget, flags), w.max_chunk)
        if params.aligned == 1:
            if must_wait(S, r, q, found):
                return
            chunk = aligned(S, q, cached, chunk, w.found_boundary)
        if pads:
            chunk = _padded(S, q, prompt_budget, chunk, cached)
        if chunk <= 0:
            return
        if flags & ONE_BY_ONE != 0 and _plan(S, r, S.groups[rep.idle_group].members, chunk, batching)[0] <= 0:
            return
        if params.offload_blocks > 0 and q.swapped == 0 and flags & CHUNKED != 0:
            tried = _try_load(S, r, slot, found, shared, now_s, memory)
            if tried == SHORT:
                return
            if tried != COMPUTE:
                continue
        if params.reserve == 1:
            w.candidate = slot
            if rules(S, r, now_s, rank) == 0:
                return
        blocks = blocks_to_admit(S, r, slot, cached + chunk, shared, memory)
        if blocks < 0:
            return
        queue_pop(S, rep.queue)
        _take_blocks(S, r, q, blocks, found, cached + chunk)
        note_admission(S, r, slot, now_s, rank)
        admitted += 1
        bin_batch = q.bin_batch
        if q.swapped == 1:
            q.swapped = 0
            w.swap_s += q.blocks * params.swap_s_per_block
            assign_return_number(S, slot)
            join(S, rep.idle_group, slot)
        else:
            add_prompt(S, slot, chunk)
