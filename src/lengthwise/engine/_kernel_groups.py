"""Groups of sequences that decode together. A step updates the group's sums in O(1); an entry takes O(log members).

The heap of a group has one entry for each member. Its key is the group step of the member's final token. For a member
with a spare block (allocated, still empty), the key is the group step at which it needs one more block, if that is
earlier. Members without a spare block are counted in ``block_needs`` by the step (modulo the block size) of their next
block. A *cohort* is the members whose most recent token came at the same time.

With several KV cache groups of layers (``schema.deployment.KvGroups``, ``params.hybrid``) members have no spare blocks.
A member whose window leaves a block with every multiple of the block size is counted in ``block_frees`` by the step.
The heap has the step at which this begins, or at which the next chunk of attention begins.
"""

from __future__ import annotations

from lengthwise._jit import jit, jit_cold
from lengthwise.engine._kernel_prefix import evict_excess, skip_blocks

_SHIFT = 32
_MASK = (1 << _SHIFT) - 1


@jit
def overlaps(S):
    """Return whether SGLang's rules form each step before the one before it ends (``_kernel_sglang``)."""
    return S.params[0].async_scheduling == 1 and S.params[0].sglang == 1


@jit
def join(S, g, slot):
    group, q = S.groups[g], S.slots[slot]
    block_size = S.params[0].block_size
    q.join_step = group.steps
    q.finish_step = group.steps + q.output - q.generated + q.extra_steps
    hybrid = S.params[0].hybrid == 1
    ahead = -(q.prompt + q.generated - 1) % block_size
    if not hybrid:
        ahead = q.blocks * block_size + 1 - (q.prompt + q.generated)
    q.next_block_step = group.steps + ahead
    q.in_block_needs = 1 if ahead < block_size + overlaps(S) else 0  # With overlap it may be in the next step already.
    event = q.finish_step
    if q.in_block_needs == 1:
        S.block_needs[g, q.next_block_step % block_size] += 1
    elif q.next_block_step < q.finish_step:
        event = q.next_block_step
    if hybrid and S.params[0].async_scheduling == 0:
        event = min(event, _count_skipped(S, g, q))
    _move_up(S.heaps, g, group.members, (event << _SHIFT) | slot)
    group.members += 1
    group.kv_tokens += q.prompt + q.generated
    _add_to_cohort(S, g, q.last_token_s, 1)


@jit
def skipped_blocks(S, computed):
    """Return how many leading blocks a request no longer needs in a local group (``KvGroups.skipped``)."""
    params = S.params[0]
    if params.local_groups == 0:
        return 0
    if params.chunked_local == 1:
        return computed // params.local_tokens * params.local_tokens // params.block_size
    return max(0, computed - params.local_tokens + 1) // params.block_size


@jit_cold
def _count_skipped(S, g, q):
    """Count the blocks that a new member frees at the next step and later. Return the step of its next event."""
    params, group, computed, event = S.params[0], S.groups[g], q.prompt + q.generated - 1, q.finish_step
    pending = skipped_blocks(S, computed) - q.skipped
    if params.local_groups > 0 and params.chunked_local == 1:
        event = group.steps + params.local_tokens - computed % params.local_tokens
    elif params.local_groups > 0:
        first = params.local_tokens - 1 + params.block_size - computed
        q.next_free_step = group.steps + first
        if params.aligned == 1 and first <= 0 and first % params.block_size == 0:
            event = min(event, group.steps + 1)  # Else the window would free the block of ``pending`` again.
        elif first > 0:
            event = q.next_free_step
        else:
            _count_free(S, g, q)
            if first % params.block_size == 0:
                pending -= 1
    q.surplus = (min(pending, 1) if params.aligned == 1 else pending) * params.local_groups
    group.surplus += q.surplus
    return event


@jit
def _count_free(S, g, q):
    q.in_block_frees = 1
    S.block_frees[g, q.next_free_step % S.params[0].block_size] += 1


@jit_cold
def _pass_window(S, g, slot):
    """Note that the next step moves a member's window past a block or chunk. Return the step of its next event."""
    q, params = S.slots[slot], S.params[0]
    if params.chunked_local == 0:
        _count_free(S, g, q)
        return q.finish_step
    update(S, g, slot)
    q.surplus = (skipped_blocks(S, q.prompt + q.generated - 1) - q.skipped) * params.local_groups
    S.groups[g].surplus += q.surplus
    return min(q.finish_step, S.groups[g].steps + params.local_tokens)


@jit_cold
def free_skipped(S, r, g):
    """Return the blocks that the members of a group free at the next step before their windows."""
    group, params = S.groups[g], S.params[0]
    if params.aligned == 1:  # First evict what earlier steps displaced: these blocks must not save it.
        evict_excess(S, r)
    freed = group.surplus + params.local_groups * S.block_frees[g, group.steps % params.block_size]
    group.surplus = 0
    return freed


@jit
def frees_contents(S, r, g, steps):
    """Return whether members free blocks that may have contents when the group has made ``steps`` steps.

    States of outputs have no contents. But the order in which members free and take their blocks matters if taking
    them evicts contents. Under asynchronous scheduling every member frees its blocks by itself (``settled_tokens``).
    """
    params, phase = S.params[0], steps % S.params[0].block_size
    if params.async_scheduling == 1:
        return params.local_groups > 0
    caches = params.hybrid == 1 and params.prefix_caching == 1
    if params.aligned == 1:
        empty = S.replicas[r].free_blocks - S.pools[r].evictable
        takes = S.block_needs[g, phase] * params.attention_groups
        return S.groups[g].surplus != 0 or (S.block_frees[g, phase] > 0 and takes > max(0, empty))
    return caches and (S.groups[g].surplus != 0 or S.block_frees[g, steps % params.block_size] > 0)


@jit
def is_dummy(S, f):
    """Return whether ``f`` is a data-parallel rank's dummy step."""
    return S.flights[f].decodes + S.flights[f].prompts == 0


@jit
def settled_tokens(S, r, q, computed):
    """Return how many of a resident's ``computed`` tokens no step in flight computes (asynchronous scheduling)."""
    rep, params = S.replicas[r], S.params[0]
    if params.async_scheduling == 0 or rep.in_flight == 0:
        return computed
    newest = r * params.stride + (rep.first_flight + rep.in_flight - 1) % params.stride
    if params.dp > 1 and is_dummy(S, newest):
        return computed
    return computed - (q.chunk_tokens if q.chunk_step == rep.steps else q.decoding)


@jit_cold
def needed_blocks(S, r, q, end):
    """Free a resident's blocks before its window. Return how many it needs for ``end`` tokens."""
    rep, params = S.replicas[r], S.params[0]
    computed = q.prompt + q.generated - 1 if q.decoding == 1 else q.prefilled
    skipped = skipped_blocks(S, settled_tokens(S, r, q, computed))
    if params.prefix_caching == 1:
        q.blocks -= skip_blocks(S, r, q, skipped)
    else:
        freed = (skipped - q.skipped) * params.local_groups
        rep.free_blocks += freed
        q.blocks -= freed
        q.skipped = skipped
    S.groups[rep.idle_group].surplus -= q.surplus
    q.surplus = 0
    return max(0, resident_blocks(S, q, end) - q.blocks)


@jit
def resident_blocks(S, q, tokens):
    """Return the blocks that a request has for ``tokens`` tokens without those that it has freed."""
    params = S.params[0]
    blocks = (tokens + params.block_size - 1) // params.block_size
    in_local = min(blocks - q.skipped, 2) if params.aligned == 1 else blocks - q.skipped
    full = params.attention_groups - params.local_groups
    return full * blocks + params.local_groups * in_local + params.state_groups


@jit_cold
def _update_blocks(S, q):
    params = S.params[0]  # Each block is freed by itself, except where members free theirs together.
    if (params.prefix_caching == 0 and params.async_scheduling == 0) or params.aligned == 1:
        q.skipped = skipped_blocks(S, q.prompt + q.generated - 2)
    q.blocks = resident_blocks(S, q, q.prompt + q.generated - 1)
    q.surplus = 0


@jit_cold
def remove(S, g, slot):
    """Remove the sequence in ``slot`` from group ``g``. The record of the sequence is brought up to date first."""
    group, q = S.groups[g], S.slots[slot]
    update(S, g, slot)
    at = 0
    while (S.heaps[g, at] & _MASK) != slot:
        at += 1
    _remove_entry(S, g, at)
    _uncount_block(S, g, q)
    group.kv_tokens -= q.prompt + q.generated
    for c in range(group.cohorts):
        if S.cohort_s[g, c] == q.last_token_s:
            S.cohort_n[g, c] -= 1
            break


@jit
def update(S, g, slot):
    """Bring the generated tokens, blocks and last token time in a member's own record up to date."""
    group, q = S.groups[g], S.slots[slot]
    steps = group.steps - q.join_step
    if steps > 0:
        block_size = S.params[0].block_size
        q.generated += steps
        if S.params[0].hybrid == 1:
            _update_blocks(S, q)
        else:
            q.blocks = max(q.blocks, (q.prompt + q.generated - 1 + block_size - 1) // block_size)
        q.last_token_s = group.last_end_s
        q.join_step = group.steps


@jit
def assign_return_number(S, slot):
    """Give a request that returns from a step to the idle residents the next return number.

    Return numbers break ties between victims. Members of a group retain their numbers while no other resident is idle,
    because their order does not change.
    """
    S.counters[0].returns += 1
    S.slots[slot].return_number = S.counters[0].returns


@jit_cold
def renumber(S, g):
    """Give the members of a group new return numbers in their present order, higher than all others."""
    members = S.groups[g].members
    for count in range(members):
        slot = S.heaps[g, count] & _MASK
        return_number = S.slots[slot].return_number
        i = count
        while i > 0 and S.tmp_tie[i - 1] > return_number:
            S.tmp_tie[i] = S.tmp_tie[i - 1]
            S.tmp_slot[i] = S.tmp_slot[i - 1]
            i -= 1
        S.tmp_tie[i] = return_number
        S.tmp_slot[i] = slot
    for i in range(members):
        assign_return_number(S, S.tmp_slot[i])


@jit_cold
def merge(S, source, target):
    group = S.groups[source]
    for i in range(group.members):
        slot = S.heaps[source, i] & _MASK
        update(S, source, slot)
        _uncount_block(S, source, S.slots[slot])
        join(S, target, slot)
    group.members = group.kv_tokens = group.cohorts = 0


@jit
def member(S, g, i):
    return S.heaps[g, i] & _MASK


@jit
def next_event_step(S, g):
    """Return the first step of the group at which a heap entry is due. The group must not be empty."""
    return S.heaps[g, 0] >> _SHIFT


@jit
def advance(S, g, now_s):
    """Add one token to every member of a group. ``pop_finished`` then removes the members that are complete."""
    group = S.groups[g]
    group.steps += 1
    group.kv_tokens += group.members
    group.last_end_s = now_s
    group.cohorts = 1
    S.cohort_s[g, 0] = now_s
    S.cohort_n[g, 0] = group.members


@jit
def pop_finished(S, g):
    """Remove one member that has produced its last token. Return the member's slot, or -1 if there is none."""
    group = S.groups[g]
    while group.members > 0 and next_event_step(S, g) <= group.steps:
        slot = member(S, g, 0)
        q = S.slots[slot]
        if q.finish_step <= group.steps:
            update(S, g, slot)
            _remove_entry(S, g, 0)
            _uncount_block(S, g, q)
            group.kv_tokens -= q.prompt + q.generated
            S.cohort_n[g, 0] -= 1
            return slot
        event = q.finish_step
        if S.params[0].hybrid == 1:
            event = _pass_window(S, g, slot)
        else:
            q.in_block_needs = 1
            S.block_needs[g, q.next_block_step % S.params[0].block_size] += 1
        _move_down(S.heaps, g, group.members, 0, (event << _SHIFT) | slot)
    return -1


@jit
def _uncount_block(S, g, q):
    if q.in_block_needs == 1:
        S.block_needs[g, q.next_block_step % S.params[0].block_size] -= 1
        q.in_block_needs = 0
    if S.params[0].hybrid == 1:
        if q.in_block_frees == 1:
            S.block_frees[g, q.next_free_step % S.params[0].block_size] -= 1
            q.in_block_frees = 0
        S.groups[g].surplus -= q.surplus
        q.surplus = 0


@jit
def _add_to_cohort(S, g, last_token_s, count):
    group = S.groups[g]
    c = group.cohorts
    while c > 0 and S.cohort_s[g, c - 1] > last_token_s:
        c -= 1
    if c > 0 and S.cohort_s[g, c - 1] == last_token_s:
        S.cohort_n[g, c - 1] += count
        return
    if group.cohorts == S.cohort_s.shape[1]:
        c = _drop_empty_cohorts(S, g, last_token_s)
    for i in range(group.cohorts, c, -1):
        S.cohort_s[g, i] = S.cohort_s[g, i - 1]
        S.cohort_n[g, i] = S.cohort_n[g, i - 1]
    S.cohort_s[g, c] = last_token_s
    S.cohort_n[g, c] = count
    group.cohorts += 1


@jit_cold
def _drop_empty_cohorts(S, g, last_token_s):
    group = S.groups[g]
    remaining, place = 0, 0
    for c in range(group.cohorts):
        if S.cohort_n[g, c] > 0:
            S.cohort_s[g, remaining] = S.cohort_s[g, c]
            S.cohort_n[g, remaining] = S.cohort_n[g, c]
            remaining += 1
            if S.cohort_s[g, remaining - 1] < last_token_s:
                place = remaining
    group.cohorts = remaining
    return place


@jit
def _remove_entry(S, g, at):
    group = S.groups[g]
    group.members -= 1
    if at == group.members:
        return
    key = S.heaps[g, group.members]
    if at > 0 and key < S.heaps[g, (at - 1) >> 1]:
        _move_up(S.heaps, g, at, key)
    else:
        _move_down(S.heaps, g, group.members, at, key)


@jit
def _move_up(heaps, g, i, key):
    while i > 0:
        parent = (i - 1) >> 1
        if heaps[g, parent] <= key:
            break
        heaps[g, i] = heaps[g, parent]
        i = parent
    heaps[g, i] = key


@jit
def _move_down(heaps, g, length, i, key):
    while True:
        child = 2 * i + 1
        if child >= length:
            break
        if child + 1 < length and heaps[g, child + 1] < heaps[g, child]:
            child += 1
        if heaps[g, child] >= key:
            break
        heaps[g, i] = heaps[g, child]
        i = child
    heaps[g, i] = key


@jit_cold
def remove_partial(S, r, slot):
    rep = S.replicas[r]
    at = 0
    while S.partials[r, at] != slot:
        at += 1
    rep.partials -= 1
    for i in range(at, rep.partials):
        S.partials[r, i] = S.partials[r, i + 1]
