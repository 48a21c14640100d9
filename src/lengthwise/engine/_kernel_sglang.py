"""Forms a step by SGLang's rules: admission by clients' limits, chunked prompts, retraction (``_reference_sglang``).

The kernel gets ``form_as_sglang`` as an argument, so that only runs with these rules compile them. All residents that
decode are in the idle group while a step is formed, since a replica has one step at a time.
"""

from __future__ import annotations

from lengthwise._jit import jit, jit_cold
from lengthwise.engine import kernel_layout
from lengthwise.engine._kernel_groups import remove_partial, update
from lengthwise.engine._kernel_memory import add_prompt, note_admission, preempt, update_ranks
from lengthwise.engine._kernel_queue import queue_pop
from lengthwise.engine._kernel_reserve import fits_reserved

RETRACT_STEPS = kernel_layout.RETRACT_STEPS
ADMITTED, NO_TOKENS, NO_MEMORY = range(3)
UNLIMITED = 1 << 60


def form_as_sglang(S, r, now_s, rank):
    """Form the next step of replica ``r`` in ``S.work``. Return 0 if there is nothing to run."""
    rep, w = S.replicas[r], S.work[0]
    if _tries_queue(S, r):
        _prefill(S, r, now_s, rank)
    group = S.groups[rep.idle_group]
    if w.prompts == 0 and group.members > 0:
        if S.block_needs[rep.idle_group, group.steps % S.params[0].block_size] <= rep.free_blocks:
            lower_ratio(S, r)
        else:
            _retract(S, r, now_s, rank)
        take_decodes(S, r)
    if w.seqs == 0:
        rep.new_token_ratio = S.params[0].initial_token_ratio
    return 1 if w.seqs > 0 else 0


def no_rules(_S, _r, _now_s, _rank):
    """Serve as the kernel's argument ``rules`` in runs whose steps policies form. The kernel never calls it."""
    return 0


@jit
def lower_ratio(S, r):
    """Lower the new token ratio of a replica, as every decode step without a retraction does."""
    rep, params = S.replicas[r], S.params[0]
    rep.new_token_ratio = max(rep.new_token_ratio - params.token_ratio_decay, params.least_token_ratio)


@jit_cold
def merge_prompts(S, r, f, is_mixed, is_alone):
    """Append the prompts that a step has completed to the order of decodes.

    If the step also decoded (``is_mixed``), put the prompts first. ``is_alone``: no sequence decodes outside of it.
    """
    rep, prompts, merged = S.replicas[r], S.flights[f].prompts, 0
    if is_alone:
        rep.batch_is_full = 0
    compact(S, r)
    for i in range(prompts):
        q = S.slots[S.prompt_slot[f, i]]
        if q.prefilled < q.context:
            rep.batch_is_full = 0
        elif q.generated < q.output:
            S.tmp_slot[merged] = S.prompt_slot[f, i]
            merged += 1
    if is_mixed:
        for i in range(rep.ordered):
            S.tmp_slot[merged + i] = S.batch_order[r, i]
        merged += rep.ordered
        rep.ordered = 0
    for i in range(merged):
        put(S, r, rep.ordered, S.tmp_slot[i])
        rep.ordered += 1


@jit_cold
def compact(S, r):
    """Remove sequences that no longer decode from ``batch_order``. Their slots may be in use on another replica."""
    count, first = 0, r * S.batch_order.shape[1]
    for i in range(S.replicas[r].ordered):
        slot = S.batch_order[r, i]
        if S.slots[slot].place == first + i:
            put(S, r, count, slot)
            count += 1
    S.replicas[r].ordered = count


@jit
def put(S, r, i, slot):
    """Give a request place ``i`` of the replica's row of ``batch_order``."""
    S.batch_order[r, i] = slot
    S.slots[slot].place = r * S.batch_order.shape[1] + i


@jit
def _tries_queue(S, r):
    rep, params = S.replicas[r], S.params[0]
    if S.groups[rep.idle_group].members == 0:
        rep.batch_is_full = 0
    if rep.partials > 0:
        return True
    if rep.batch_is_full == 1 or S.queues[rep.queue].length == 0:
        return False
    rep.batch_is_full = 1 if S.running[r] >= params.max_num_seqs else 0
    return rep.batch_is_full == 0


@jit_cold
def _prefill(S, r, now_s, rank):
    rep, w, params = S.replicas[r], S.work[0], S.params[0]
    decodes = S.groups[rep.idle_group].members
    decoding = decodes if params.enable_mixed_chunk == 1 else 0
    w.left_input = params.max_prefill_tokens - decoding
    w.left_chunk = params.chunked_prefill_size - decoding if params.chunked_prefill_size > 0 else UNLIMITED
    w.allocated = decoding
    w.reserved = decoding + _reserved_tokens(S, r)
    w.ends = 0
    resumed = 0
    if rep.partials > 0:
        if not _resume(S, r):
            return
        resumed = 1
    _admit(S, r, now_s, min(params.max_num_seqs - decodes, params.max_num_seqs - S.running[r] + resumed), rank)
    for i in range(w.prompts):
        slot = S.prompt_slot[w.flight, i]
        q = S.slots[slot]
        blocks = (q.prefilled + S.prompt_chunk[w.flight, i] + params.block_size - 1) // params.block_size
        rep.free_blocks -= blocks - q.blocks
        q.blocks = blocks
        if i >= resumed:
            note_admission(S, r, slot, now_s, rank)
    if params.enable_mixed_chunk == 1 and w.prompts > 0 and decodes > 0:
        group = S.groups[rep.idle_group]
        if S.block_needs[rep.idle_group, group.steps % params.block_size] <= rep.free_blocks:
            take_decodes(S, r)


@jit
def take_decodes(S, r):
    """Put the decoding residents into the step, and give them the blocks that they need for it."""
    rep, w = S.replicas[r], S.work[0]
    group, flight = S.groups[rep.idle_group], S.flights[w.flight]
    rep.free_blocks -= S.block_needs[rep.idle_group, group.steps % S.params[0].block_size]
    w.decodes = group.members
    w.seqs += group.members
    rep.idle_group, flight.group = flight.group, rep.idle_group


@jit_cold
def _reserved_tokens(S, r):
    """Return the tokens that are kept free for the outputs of decoding sequences, summed in their order."""
    rep, total = S.replicas[r], 0.0
    compact(S, r)
    for i in range(rep.ordered):
        update(S, rep.idle_group, S.batch_order[r, i])
        q = S.slots[S.batch_order[r, i]]
        share = 1.0 if S.ignore_eos[q.index] else rep.new_token_ratio
        total += min(S.max_tokens[q.index] - q.generated, S.params[0].clip_tokens) * share
    return total


@jit
def _unreserved_tokens(S, r):
    """Return the free tokens beyond all reservations."""
    return S.replicas[r].free_blocks * S.params[0].block_size - S.work[0].reserved


@jit
def _add(S, slot, tokens, new_tokens):
    """Put ``tokens`` of a prompt into the step, and reserve ``new_tokens`` for its output."""
    w, size = S.work[0], S.params[0].block_size
    pages = (tokens + size - 1) // size * size
    add_prompt(S, slot, tokens)
    w.allocated += pages + size
    w.reserved += pages + size + new_tokens
    w.left_input -= pages
    w.left_chunk -= pages


@jit_cold
def _resume(S, r):
    """Add the next chunk of the half-computed prompt. Return False if none fits."""
    rep, w, slot = S.replicas[r], S.work[0], S.partials[r, 0]
    q, size = S.slots[slot], S.params[0].block_size
    left, tokens = q.context - q.prefilled, min(w.left_chunk, int(_unreserved_tokens(S, r)))
    if tokens <= 0:
        tokens = w.left_chunk
    tokens = min(left, tokens, (rep.free_blocks + q.blocks) * size - q.prefilled)
    if tokens <= 0:
        return False
    remove_partial(S, r, slot)
    _add(S, slot, tokens, min(S.max_tokens[q.index], S.params[0].clip_tokens) if tokens == left else 0)
    return True


@jit_cold
def _admit(S, r, now_s, most, rank):
    """Admit waiting requests in order, until one cannot be admitted. The step may have ``most`` prompts."""
    rep, w, params = S.replicas[r], S.work[0], S.params[0]
    queue = S.queues[rep.queue]
    if queue.length > 0 and (params.rank_every_step == 1 or queue.overdue_at_s <= now_s):
        update_ranks(S, rep.queue, now_s, rank)
    while queue.length > 0:
        if _has_memory(S, r) and not _has_prompt_budget(S):
            return
        if w.prompts >= most:
            rep.batch_is_full = 1
        if rep.batch_is_full == 1:
            return
        slot = S.queued_slot[queue.offset]
        tried = _try(S, r, slot)
        if tried == ADMITTED:
            queue_pop(S, rep.queue)
        if tried == NO_MEMORY or (tried == ADMITTED and not _has_memory(S, r)):
            rep.batch_is_full = 1 if w.prompts > 0 or S.groups[rep.idle_group].members > 0 else 0
            return
        if tried == NO_TOKENS or not _has_prompt_budget(S):
            return


@jit
def _has_memory(S, r):
    free_tokens = S.replicas[r].free_blocks * S.params[0].block_size
    return _unreserved_tokens(S, r) > 0 and free_tokens - S.work[0].allocated > 0


@jit
def _has_prompt_budget(S):
    return S.work[0].left_input > 0 and S.work[0].left_chunk > 0


@jit
def _try(S, r, slot):
    """Add a waiting request or its first chunk to the step. Return ADMITTED, NO_TOKENS or NO_MEMORY."""
    q, w, params = S.slots[slot], S.work[0], S.params[0]
    size, max_tokens = params.block_size, S.max_tokens[q.index]
    q.context = q.prompt + q.generated
    if params.reserve == 1:
        if not fits_reserved(S, r, slot, 0):
            return NO_TOKENS
    elif S.ignore_eos[q.index]:
        return _try_exact(S, r, slot)
    new_tokens = min(max(max_tokens - q.generated, 0), params.clip_tokens)
    if q.context + new_tokens + size >= _unreserved_tokens(S, r):
        return NO_MEMORY
    pages = (q.context + size - 1) // size * size
    if params.chunked_prefill_size == 0:
        if w.prompts > 0 and pages >= w.left_input:
            return NO_TOKENS
    elif pages > w.left_chunk:
        tokens = w.left_chunk // size * size
        if tokens > 0:
            _add(S, slot, tokens, 0)
        return ADMITTED if tokens > 0 else NO_TOKENS
    _add(S, slot, q.context, min(max_tokens, params.clip_tokens))
    return ADMITTED


@jit_cold
def _try_exact(S, r, slot):
    """Add a request of known length if memory suffices at the end of each request, the shortest first."""
    q, w, size = S.slots[slot], S.work[0], S.params[0].block_size
    paged = (q.context + size - 1) // size * size + size
    left = S.replicas[r].free_blocks * size - w.allocated
    if paged > min(left, _unreserved_tokens(S, r)):
        return NO_MEMORY
    if w.ends == 0:
        _add_expected_ends(S, r, slot)
    else:
        _add_expected_end(S, r, slot, False)
    freed = 0
    for i in range(w.ends):
        count = w.ends - i
        if left - paged + freed - S.tmp_key[i] * count <= count:
            return NO_MEMORY
        freed += S.tmp_tie[i]
    if q.context > w.left_chunk and (w.left_chunk <= 0 or _has_part(S)):
        return NO_TOKENS
    if q.context <= w.left_chunk:
        _add(S, slot, q.context, min(S.max_tokens[q.index], S.params[0].clip_tokens))
    else:
        _add(S, slot, w.left_chunk, 0)
    return ADMITTED


@jit_cold
def _has_part(S):
    """Return whether the step computes a prompt in part."""
    w, has_part = S.work[0], False
    for i in range(w.prompts):
        q = S.slots[S.prompt_slot[w.flight, i]]
        has_part = has_part or q.prefilled + S.prompt_chunk[w.flight, i] < q.context
    return has_part


@jit_cold
def _add_expected_ends(S, r, slot):
    w, rep = S.work[0], S.replicas[r]
    _add_expected_end(S, r, slot, True)
    for i in range(rep.ordered):
        _add_expected_end(S, r, S.batch_order[r, i], True)
    for i in range(w.prompts):
        _add_expected_end(S, r, S.prompt_slot[w.flight, i], True)


@jit_cold
def _add_expected_end(S, r, slot, is_sorted):
    """Add a request's remaining tokens to ``tmp_key`` and its tokens so far to ``tmp_tie``, the shortest first.

    If ``is_sorted`` is false, insert it before equal ones, and before the last one even if that is shorter (SGLang).
    """
    q, w = S.slots[slot], S.work[0]
    share = 1.0 if S.ignore_eos[q.index] else S.replicas[r].new_token_ratio
    tokens = S.max_tokens[q.index] * share - q.generated
    if tokens <= 0:
        return
    i = w.ends
    if not is_sorted and i > 0 and tokens > S.tmp_key[i - 1]:
        i = i - 1
        S.tmp_key[i + 1] = S.tmp_key[i]
        S.tmp_tie[i + 1] = S.tmp_tie[i]
    else:
        while i > 0 and (S.tmp_key[i - 1] > tokens or (not is_sorted and S.tmp_key[i - 1] == tokens)):
            S.tmp_key[i] = S.tmp_key[i - 1]
            S.tmp_tie[i] = S.tmp_tie[i - 1]
            i -= 1
    S.tmp_key[i] = tokens
    S.tmp_tie[i] = q.prompt + q.generated
    w.ends += 1


@jit_cold
def _retract(S, r, now_s, rank):
    """Retract at least one request: those with the fewest output tokens, and of them the longest prompts, first."""
    rep, size = S.replicas[r], S.params[0].block_size
    group = S.groups[rep.idle_group]
    count = _order_by_output(S, r)
    left = count
    while left > 1 and (left == count or _is_short(S, rep, group, size)):
        left -= 1
        preempt(S, r, S.tmp_slot[left], now_s, rank)
    if _is_short(S, rep, group, size) and rep.partials > 0:
        preempt(S, r, S.partials[r, 0], now_s, rank)
    generated, limits = 0, 0
    for i in range(left):
        slot = S.tmp_slot[i]
        put(S, r, i, slot)
        generated += S.slots[slot].generated
        limits += S.max_tokens[S.slots[slot].index]
    rep.ordered = left
    rep.batch_is_full = 0
    rep.new_token_ratio = min(1.0, (generated + RETRACT_STEPS * left) / (limits + 1))


@jit
def _is_short(S, rep, group, size):
    return S.block_needs[rep.idle_group, group.steps % size] > rep.free_blocks


@jit_cold
def _order_by_output(S, r):
    """Sort the decoding sequences into ``tmp_slot``, the first to be retracted last. Return how many there are."""
    rep = S.replicas[r]
    compact(S, r)
    for count in range(rep.ordered):
        slot, i = S.batch_order[r, count], count
        update(S, rep.idle_group, slot)
        q = S.slots[slot]
        while i > 0:
            before = S.slots[S.tmp_slot[i - 1]]
            if before.generated > q.generated or (before.generated == q.generated and before.prompt <= q.prompt):
                break
            S.tmp_slot[i] = S.tmp_slot[i - 1]
            i -= 1
        S.tmp_slot[i] = slot
    return rep.ordered
