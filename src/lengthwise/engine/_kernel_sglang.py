"""Forms a step by SGLang's rules: order, admission by clients' limits, chunks, retraction (``_reference_sglang``).

The kernel gets ``form_as_sglang`` as an argument, so that only runs with these rules compile them. All residents that
decode are in the idle group while a step is formed, since a replica has one step at a time.

With overlap, a step is formed while the one before it, the *pending* step, is in flight. Its tokens count when it ends,
and its decodes stay in the idle group, which is ``ahead`` by the token in flight if the step decodes. Its completed
prompts are ``joining``: the next step decodes them, but they enter the group when the pending step ends. Sequences that
this end will end by ``max_tokens`` are left out of the next step (``work.left_out``).
"""

from __future__ import annotations

from lengthwise._jit import jit, jit_cold
from lengthwise.engine import _reference_sglang, kernel_layout
from lengthwise.engine._kernel_contents import NONE
from lengthwise.engine._kernel_groups import next_event_step, remove_partial, update
from lengthwise.engine._kernel_memory import add_prompt, note_admission, preempt, update_ranks
from lengthwise.engine._kernel_prefix import RADIX, cache_blocks, find_cached, make_room, release_blocks, reuse_found
from lengthwise.engine._kernel_queue import queue_pop, queue_rebuild, queue_sort
from lengthwise.engine._kernel_radix import UNLINKED, match_prefix, page_of
from lengthwise.engine._kernel_reserve import fits_reserved
from lengthwise.schema.deployment import SCHEDULE_POLICIES

RETRACT_STEPS, MAX_MATCHED = kernel_layout.RETRACT_STEPS, kernel_layout.MAX_MATCHED
IN_BATCH_TOKENS, REFRESH_PASSES = kernel_layout.IN_BATCH_TOKENS, kernel_layout.REFRESH_PASSES
FCFS, LPM, DFS_WEIGHT, _, RANDOM = range(len(SCHEDULE_POLICIES))
ADMITTED, NO_TOKENS, NO_MEMORY = range(3)
UNLIMITED, INFINITY = 1 << 60, float("inf")

shuffle_key = jit(_reference_sglang.shuffle_key)


def form_as_sglang(S, r, now_s, rank):
    """Form the next step of replica ``r`` in ``S.work``. Return 0 if there is nothing to run."""
    rep, w = S.replicas[r], S.work[0]
    w.left_out = w.left_out_blocks = w.left_out_tokens = 0
    if S.params[0].async_scheduling == 1:
        _merge_pending(S, r)
    if _tries_queue(S, r):
        _prefill(S, r, now_s, rank)
    if w.prompts == 0 and _decoding(S, r) > 0:
        _leave_out_ending(S, r)
        is_short = _needed(S, r) > rep.free_blocks
        if is_short:
            _short_after_eviction(S, r)  # SGLang evicts even if it then decodes nothing.
        if _decoding(S, r) > 0 and not (is_short and w.left_out > 0):
            if is_short:
                _retract(S, r, now_s, rank)
            else:
                lower_ratio(S, r)
            take_decodes(S, r)
    if w.seqs == 0 and rep.in_flight == 0:
        rep.new_token_ratio = S.params[0].initial_token_ratio
    return 1 if w.seqs > 0 else 0


@jit
def _decoding(S, r):
    """Return how many sequences the next step decodes, if it decodes."""
    return S.groups[S.replicas[r].idle_group].members + S.replicas[r].joining - S.work[0].left_out


@jit
def _needed(S, r):
    """Return how many blocks the next decode step takes."""
    rep, size = S.replicas[r], S.params[0].block_size
    need = S.block_needs[rep.idle_group, (S.groups[rep.idle_group].steps + rep.ahead) % size]
    return need + (_of_joining(S, r)[0] if rep.joining > 0 else 0) - S.work[0].left_out_blocks


@jit_cold
def _of_joining(S, r):
    """Return (blocks that joining sequences need for a decode step, KV tokens that it reads of them)."""
    rep, stride, blocks, tokens = S.replicas[r], S.params[0].stride, 0, 0
    f = r * stride + (rep.first_flight + rep.in_flight - 1) % stride
    for i in range(S.flights[f].prompts):
        q = S.slots[S.prompt_slot[f, i]]
        if S.prompt_chunk[f, i] == 1 and q.blocks > 0:
            blocks += (q.prompt + q.generated) % S.params[0].block_size == 0
            tokens += q.prompt + q.generated + 1
    return blocks, tokens


@jit_cold
def _merge_pending(S, r):
    """Insert the last chunk of a prompt into the tree, and put the last step's prompts in the order of decodes."""
    rep, f = S.replicas[r], S.replicas[r].unmerged - 1
    if rep.has_chunk == 1 and rep.partials > 0 and S.params[0].prefix_caching == RADIX:
        q = S.slots[S.partials[r, 0]]
        cache_blocks(S, r, q, q.prefilled)
    rep.has_chunk = 0
    if f < 0:
        return
    is_mixed = S.flights[f].decodes > 0
    rep.joining = merge_prompts(S, r, f, is_mixed, is_mixed or S.groups[rep.idle_group].members == 0)
    rep.unmerged = 0


@jit
def _ends_by_limit(S, r, q):
    """Return whether the pending step ends a sequence by its ``max_tokens``."""
    rep = S.replicas[r]
    if q.output < S.max_tokens[q.index]:
        return False
    if q.decoding == 0:
        return q.generated + 1 == q.output
    return rep.ahead == 1 and q.finish_step == S.groups[rep.idle_group].steps + 1


@jit
def _leave_out_ending(S, r):
    """Leave sequences that the pending step ends by ``max_tokens`` out of the next step."""
    rep = S.replicas[r]
    some_end = rep.ahead == 1 and S.groups[rep.idle_group].members > 0
    some_end = some_end and next_event_step(S, rep.idle_group) <= S.groups[rep.idle_group].steps + 1
    if rep.joining > 0 or some_end:
        _find_ending(S, r)


@jit_cold
def _find_ending(S, r):
    rep, w, size = S.replicas[r], S.work[0], S.params[0].block_size
    compact(S, r)
    for i in range(rep.ordered):
        q = S.slots[S.batch_order[r, i]]
        if _ends_by_limit(S, r, q):
            if q.decoding == 1:
                update(S, rep.idle_group, S.batch_order[r, i])
            w.left_out += 1
            w.left_out_blocks += (q.prompt + q.generated) % size == 0
            w.left_out_tokens += q.prompt + q.generated + 1
            rep.batch_is_full = 0


def no_rules(_S, _r, _now_s, _rank):
    """Fill the kernel's argument ``rules`` if policies form the steps. The kernel then never calls it."""
    return 0


@jit
def lower_ratio(S, r):
    """Lower the new token ratio of a replica, as every decode step without a retraction does."""
    rep, params = S.replicas[r], S.params[0]
    rep.new_token_ratio = max(rep.new_token_ratio - params.token_ratio_decay, params.least_token_ratio)


@jit
def note_room(S, r, seqs):
    """Record the evictions of a decode step, which needs an empty block for each of its sequences."""
    rep = S.replicas[r]
    rep.spare_blocks = min(rep.spare_blocks, rep.free_blocks - seqs)


@jit_cold
def insert_prompts(S, r, f):
    """Insert the prompts that a step has completed into the radix tree, and free those that end with it."""
    for i in range(S.flights[f].prompts):
        q = S.slots[S.prompt_slot[f, i]]
        if q.prefilled + S.prompt_chunk[f, i] == q.context:
            cache_blocks(S, r, q, q.context)
            if q.generated + 1 == q.output:
                release_blocks(S, r, q, q.blocks)
                q.blocks = 0


@jit_cold
def merge_prompts(S, r, f, is_mixed, is_alone):
    """Append the prompts that a step has completed to the order of decodes.

    If the step also decoded (``is_mixed``), put the prompts first. ``is_alone``: no sequence decodes outside of it.
    Return how many prompts are appended.
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
    appended = merged
    if is_mixed:
        for i in range(rep.ordered):
            S.tmp_slot[merged + i] = S.batch_order[r, i]
        merged += rep.ordered
        rep.ordered = 0
    for i in range(merged):
        put(S, r, rep.ordered, S.tmp_slot[i])
        rep.ordered += 1
    return appended


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
    if _decoding(S, r) == 0:
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
    ranks_again = params.rank_every_step == 1 or S.queues[rep.queue].overdue_at_s <= now_s
    if ranks_again or params.schedule_policy != FCFS or params.prefix_caching > 0:
        _order(S, r, now_s, rank)
    decodes = _decoding(S, r)
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
    _admit(S, r, min(params.max_num_seqs - decodes, params.max_num_seqs - S.running[r] + resumed))
    if params.prefix_caching > 0 and w.prompts > 0:  # With larger pages, a page more for each request.
        more = w.prompts if params.block_size > 1 else 0
        make_room(S, r, (w.prompt_tokens + params.block_size - 1) // params.block_size + more)
    for i in range(w.prompts):
        slot = S.prompt_slot[w.flight, i]
        q = S.slots[slot]
        if params.prefix_caching > 0 and q.admission < 0:
            S.results[q.index].cached_tokens = q.prefilled
        blocks = (q.prefilled + S.prompt_chunk[w.flight, i] + params.block_size - 1) // params.block_size
        rep.free_blocks -= blocks - q.blocks
        q.blocks = blocks
        if i >= resumed:
            note_admission(S, r, slot, now_s, rank)
    if params.enable_mixed_chunk == 1 and w.prompts > 0 and decodes > 0:
        _leave_out_ending(S, r)
        if _decoding(S, r) > 0 and not _short_after_eviction(S, r):
            take_decodes(S, r)


@jit
def take_decodes(S, r):
    """Put the decoding residents into the step, and give them the blocks that they need for it."""
    rep, w = S.replicas[r], S.work[0]
    group, flight, decodes = S.groups[rep.idle_group], S.flights[w.flight], _decoding(S, r)
    note_room(S, r, decodes)
    rep.free_blocks -= _needed(S, r)
    w.decodes = decodes
    w.seqs += decodes
    if S.params[0].async_scheduling == 0:
        rep.idle_group, flight.group = flight.group, rep.idle_group
        return
    w.kv_tokens = group.kv_tokens + rep.ahead * group.members - w.left_out_tokens
    if rep.joining > 0:
        w.kv_tokens += _of_joining(S, r)[1]


@jit_cold
def _reserved_tokens(S, r):
    """Return the tokens that are kept free for the outputs of decoding sequences, summed in their order."""
    rep, total = S.replicas[r], 0.0
    compact(S, r)
    for i in range(rep.ordered):
        q = S.slots[S.batch_order[r, i]]
        if q.decoding == 1:
            update(S, rep.idle_group, S.batch_order[r, i])
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
def _order(S, r, now_s, rank):
    """Order the queue by the policy for a pass over it."""
    rep, params = S.replicas[r], S.params[0]
    queue, policy = S.queues[rep.queue], params.schedule_policy
    rep.passes += 1
    if queue.length == 0:
        return
    if policy == FCFS and (params.rank_every_step == 1 or queue.overdue_at_s <= now_s):
        update_ranks(S, rep.queue, now_s, rank)
    if policy == DFS_WEIGHT or (policy == LPM and queue.length <= MAX_MATCHED):
        queue_sort(S, rep.queue)
        make_room(S, r, 0)
        if policy == LPM:
            _order_by_prefix(S, r, queue)
        else:
            _order_by_tree(S, r, queue)
        return
    if policy == RANDOM:
        for at in range(queue.offset, queue.offset + queue.length):
            index = S.slots[S.queued_slot[at]].index
            S.queued_index[at] = shuffle_key(params.shuffle_seed, r, rep.passes, index)
        queue_rebuild(S, rep.queue)
    if params.refreshes_prefixes == 1:
        if rep.refreshes % REFRESH_PASSES == 0:
            queue_sort(S, rep.queue)
            make_room(S, r, 0)
            for i in range(min(queue.length, MAX_MATCHED) - 1, -1, -1):
                _match(S, r, S.slots[S.queued_slot[queue.offset + i]])
        rep.refreshes += 1


@jit
def _match(S, r, q):
    """Return how many pages of a waiting request are in the tree, which end with ``work.found_segment``."""
    return match_prefix(S, r, q.index, (q.prompt + q.generated) // S.params[0].block_size)[0]


@jit_cold
def _order_by_prefix(S, r, queue):
    """Order by the longest cached prefix. Keys are in ``tmp_key``, pages in which requests begin in ``tmp_tie``."""
    size, seen = S.params[0].block_size, 0
    begin = (IN_BATCH_TOKENS + size - 1) // size - 1
    for i in range(queue.length):
        slot = S.queued_slot[queue.offset + i]
        q, at = S.slots[slot], i
        found, context = _match(S, r, q) * size, q.prompt + q.generated
        key = -float(min(found, context - 1))
        if found <= IN_BATCH_TOKENS and context // size * size >= IN_BATCH_TOKENS:
            page, k = page_of(S, q.index, begin), 0
            while k < seen and S.tmp_tie[k] != page:
                k += 1
            if k < seen:
                key = INFINITY
            else:
                S.tmp_tie[seen] = page
                seen += 1
        while at > 0 and S.tmp_key[at - 1] > key:
            S.tmp_key[at] = S.tmp_key[at - 1]
            S.queued_slot[queue.offset + at] = S.queued_slot[queue.offset + at - 1]
            at -= 1
        S.tmp_key[at] = key
        S.queued_slot[queue.offset + at] = slot


@jit_cold
def _order_by_tree(S, r, queue):
    """Order as a depth-first search of the tree finds the requests' prefixes, heavier children first."""
    begin, end = queue.offset, queue.offset + queue.length
    for at in range(begin, end):
        q = S.slots[S.queued_slot[at]]
        _match(S, r, q)
        q.cached_segment = S.work[0].found_segment
    for at in range(begin, end):
        segment = S.slots[S.queued_slot[at]].cached_segment
        while segment != NONE:
            S.segments[r, segment].weight += 1
            segment = S.segments[r, segment].parent
    top = NONE
    for at in range(begin, end):
        segment = S.slots[S.queued_slot[at]].cached_segment
        while segment != NONE and S.segments[r, segment].next == UNLINKED:
            top = _link(S, r, segment, top)
            segment = S.segments[r, segment].parent
    _number(S, r, top)
    for at in range(begin, end):
        segment = S.slots[S.queued_slot[at]].cached_segment
        S.queued_key[at] = INFINITY if segment == NONE else float(S.segments[r, segment].weight)
    queue_sort(S, S.replicas[r].queue)
    for at in range(begin, end):
        S.counters[0].entries += 1  # Requests that enter later are behind these.
        S.queued_index[at] = S.counters[0].entries
        S.queued_key[at] = 0.0
        q = S.slots[S.queued_slot[at]]
        segment = q.cached_segment
        q.cached_segment = NONE
        while segment != NONE and S.segments[r, segment].next != UNLINKED:
            entry = S.segments[r, segment]
            entry.weight = 0
            entry.first = NONE
            entry.next = UNLINKED
            segment = entry.parent


@jit_cold
def _link(S, r, segment, top):
    """Add a segment to the children of its parent, before lighter ones. Return the first segment without a parent."""
    entry, before = S.segments[r, segment], NONE
    at = top if entry.parent == NONE else S.segments[r, entry.parent].first
    while at != NONE:
        other = S.segments[r, at]
        if other.weight < entry.weight or (other.weight == entry.weight and other.born > entry.born):
            break
        before, at = at, other.next
    entry.next = at
    if before != NONE:
        S.segments[r, before].next = segment
    elif entry.parent == NONE:
        return segment
    else:
        S.segments[r, entry.parent].first = segment
    return top


@jit_cold
def _number(S, r, segment):
    """Replace the weights of the linked segments by their numbers in the search, children before their parent."""
    count = 0
    while segment != NONE:
        while S.segments[r, segment].first != NONE:
            segment = S.segments[r, segment].first
        count += 1
        S.segments[r, segment].weight = count
        while segment != NONE and S.segments[r, segment].next == NONE:
            segment = S.segments[r, segment].parent
            if segment != NONE:
                count += 1
                S.segments[r, segment].weight = count
        if segment != NONE:
            segment = S.segments[r, segment].next


@jit_cold
def _admit(S, r, most):
    """Admit waiting requests in order, until one cannot be admitted. The step may have ``most`` prompts."""
    rep, w = S.replicas[r], S.work[0]
    queue = S.queues[rep.queue]
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
            rep.batch_is_full = 1 if w.prompts > 0 or _decoding(S, r) > 0 else 0
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
    """Add a waiting request or its first chunk, after the cached prefix. Return ADMITTED, NO_TOKENS or NO_MEMORY."""
    q = S.slots[slot]
    q.context = q.prompt + q.generated
    if S.params[0].prefix_caching > 0:
        _take_prefix(S, r, q)
    tried = _try_rest(S, r, slot)
    if S.params[0].prefix_caching > 0 and tried != ADMITTED:
        release_blocks(S, r, q, q.blocks)
        q.blocks = 0
        q.prefilled = 0
    return tried


@jit_cold
def _take_prefix(S, r, q):
    found, _ = find_cached(S, r, q)
    reuse_found(S, r, q, found)
    q.blocks = found
    q.prefilled = found * S.params[0].block_size


@jit
def _try_rest(S, r, slot):
    """Add what a request has to compute to the step, or its first chunk."""
    q, w, params = S.slots[slot], S.work[0], S.params[0]
    size, max_tokens, left = params.block_size, S.max_tokens[q.index], q.context - q.prefilled
    if params.reserve == 1:
        if not fits_reserved(S, r, slot, 0):
            return NO_TOKENS
    elif S.ignore_eos[q.index] and params.prefix_caching == 0:
        return _try_exact(S, r, slot)
    new_tokens = min(max(max_tokens - q.generated, 0), params.clip_tokens)
    if left + new_tokens + size >= _unreserved_tokens(S, r):
        return NO_MEMORY
    pages = (left + size - 1) // size * size
    if params.chunked_prefill_size == 0:
        if w.prompts > 0 and pages >= w.left_input:
            return NO_TOKENS
    elif pages > w.left_chunk:
        tokens = w.left_chunk // size * size
        if tokens > 0:
            _add(S, slot, tokens, 0)
        return ADMITTED if tokens > 0 else NO_TOKENS
    _add(S, slot, left, min(max_tokens, params.clip_tokens))
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

    If ``is_sorted`` is false, insert it before the first one that is not shorter, or else before the last one (SGLang).
    """
    q, w = S.slots[slot], S.work[0]
    share = 1.0 if S.ignore_eos[q.index] else S.replicas[r].new_token_ratio
    tokens = S.max_tokens[q.index] * share - q.generated
    if tokens <= 0:
        return
    at = w.ends if is_sorted else 0
    if is_sorted:
        while at > 0 and S.tmp_key[at - 1] > tokens:
            at -= 1
    else:
        while at < w.ends - 1 and S.tmp_key[at] < tokens:
            at += 1
    for i in range(w.ends, at, -1):
        S.tmp_key[i] = S.tmp_key[i - 1]
        S.tmp_tie[i] = S.tmp_tie[i - 1]
    S.tmp_key[at] = tokens
    S.tmp_tie[at] = q.prompt + q.generated
    w.ends += 1


@jit_cold
def _retract(S, r, now_s, rank):
    """Retract at least one request: those with the fewest output tokens, and of them the longest prompts, first."""
    rep, size = S.replicas[r], S.params[0].block_size
    if rep.in_flight > 0:
        _note_order(S, r)
    count = _order_by_output(S, r)
    left = count
    while left > 1 and (left == count or _short_after_eviction(S, r)):
        left -= 1
        preempt(S, r, S.tmp_slot[left], now_s, rank)
        if S.params[0].prefix_caching > 0:
            make_room(S, r, (RETRACT_STEPS * left + size - 1) // size)
    if _short_after_eviction(S, r) and rep.partials > 0:
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


@jit_cold
def _note_order(S, r):
    """Note the order of the pending step, in which its sequences end, as a retraction changes that of the next one."""
    rep = S.replicas[r]
    compact(S, r)
    for i in range(rep.ordered):
        S.slots[S.batch_order[r, i]].return_number = i
    rep.is_reordered = 1


@jit_cold
def _short_after_eviction(S, r):
    """Evict cached blocks that no request holds for a decode step. Return whether blocks are short even so."""
    rep, need = S.replicas[r], _needed(S, r)
    if S.params[0].prefix_caching > 0:
        make_room(S, r, need)
    return need > rep.free_blocks


@jit_cold
def _order_by_output(S, r):
    """Sort the decoding sequences into ``tmp_slot``, so that retractions take the last ones. Return their number."""
    rep, count = S.replicas[r], 0
    compact(S, r)
    for at in range(rep.ordered):
        slot, i = S.batch_order[r, at], count
        q = S.slots[slot]
        if S.work[0].left_out > 0 and _ends_by_limit(S, r, q):
            continue
        if q.decoding == 1:
            update(S, rep.idle_group, slot)
        count += 1
        while i > 0:
            before = S.slots[S.tmp_slot[i - 1]]
            if before.generated > q.generated or (before.generated == q.generated and before.prompt <= q.prompt):
                break
            S.tmp_slot[i] = S.tmp_slot[i - 1]
            i -= 1
        S.tmp_slot[i] = slot
    return count
