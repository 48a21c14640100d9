"""CPU memory behind the prefix cache: loads before admission, stores of computed blocks, and their recency.

``_reference_state.Tier`` states the rules. Row ``params.tier_row`` + r of the pools is the tier of replica r: all its
chunks are in the list of its evictable blocks, the least recently used first, and ``holders`` counts their loads. A
request is ``S.offloads[i]``; while it waits for its load, and then for a step, its slot is in ``S.loading[r]``.
"""

from __future__ import annotations

from lengthwise._jit import jit, jit_cold
from lengthwise.cost._lookup import entry, merged_prefills, prefill_attention
from lengthwise.engine._kernel_contents import NONE, place_of
from lengthwise.engine._kernel_prefix import add_content, append, cache_blocks, uncache, unlink
from lengthwise.engine._kernel_queue import note_overdue_time, push_event, queue_push

LOADING, LOADED, FOUND = 1, 2, 3
"""States of a load. FOUND: the loaded blocks are in the GPU's prefix cache."""


@jit_cold
def start_load(S, r, slot, first, end, now_s):
    """Start the load of blocks ``first`` to ``end`` of a request that has left the queue and taken its blocks."""
    q, params, tier = S.slots[slot], S.params[0], S.tiers[r]
    load, result = S.offloads[q.index], S.results[q.index]
    end_s = _load_end_s(S, r, q.index, first, end, now_s)
    _count_loads(S, r, q.index, first, end, 1)
    _move_to(S, q.index, r)
    tier.reads_until_s = end_s
    load.state = LOADING
    load.slot = slot
    load.load_first = first
    load.load_end = end
    load.stored = end
    load.offered = max(load.offered, end)
    for k in range(first, end):
        S.is_used[S.request_blocks_start[q.index] + k] = 1
    q.queued_for_s += now_s - q.queued_at_s
    q.queued_at_s = end_s
    S.replicas[r].deadline_s = min(S.replicas[r].deadline_s, q.arrival_s + params.timeout_s)
    S.loading[r, tier.loading] = slot
    tier.loading += 1
    result.load_s += end_s - now_s
    if q.admission < 0:
        result.cached_tokens = q.prefilled
        result.loaded_tokens = min(end * params.block_size, q.context - 1) - q.prefilled
    push_event(S, end_s, len(S.replicas) + q.index)


@jit_cold
def count_loadable(S, r, q, found, now_s):
    """Return how many chunks continue the ``found`` blocks, 0 if computing them is faster, or -1 to defer the request.

    The block of the last token can be loaded: then that token alone is computed.
    """
    params, row, at, passed, deferred = S.params[0], S.params[0].tier_row + r, found, 0, False
    most, missing = q.context // S.params[0].block_size, False
    for run in range(S.node_start[q.index], S.node_start[q.index + 1]):
        while at < min(most, passed + S.node_length[run]) and not missing:
            block = S.cache_table[row, place_of(S, row, S.node_first[run] + at - passed)]
            if block == NONE:
                missing = True
            else:
                deferred = deferred or S.cached[row, block].holders > 0
                at += 1
        if missing:
            break
        passed += S.node_length[run]
    if deferred:
        return -1
    if params.load_if_faster == 1 and at > found:
        begin = found * params.block_size
        tokens = min(at * params.block_size, q.context - 1) - begin
        if _load_end_s(S, r, q.index, found, at, now_s) - now_s >= _prefill_s(S, tokens, begin):
            return 0
    return at - found


@jit_cold
def _load_end_s(S, r, i, first, end, now_s):
    """Return when a load of blocks ``first`` to ``end`` of request ``i`` that starts now ends."""
    params, row, passed = S.params[0], S.params[0].tier_row + r, 0
    start_s = max(now_s, S.tiers[r].reads_until_s)
    for run in range(S.node_start[i], S.node_start[i + 1]):
        for k in range(max(first, passed), min(end, passed + S.node_length[run])):
            block = S.cache_table[row, place_of(S, row, S.node_first[run] + k - passed)]
            start_s = max(start_s, S.chunk_ready_s[r, block])
        passed += S.node_length[run]
    return start_s + (params.offload_latency_s + (end - first) * params.offload_block_s)


@jit_cold
def _count_loads(S, r, i, first, end, more):
    """Add ``more`` to the loads of the chunks of blocks ``first`` to ``end`` of request ``i``, where there are any."""
    row, passed = S.params[0].tier_row + r, 0
    for run in range(S.node_start[i], S.node_start[i + 1]):
        for k in range(max(first, passed), min(end, passed + S.node_length[run])):
            block = S.cache_table[row, place_of(S, row, S.node_first[run] + k - passed)]
            if block != NONE:
                S.cached[row, block].holders += more
        passed += S.node_length[run]


@jit_cold
def _prefill_s(S, tokens, context):
    """Return the seconds in which all layers compute ``tokens`` prompt tokens after ``context`` others."""
    cost, layers = S.cost, 0.0
    for p in range(len(cost.stage_layers)):
        layers += cost.stage_layers[p]
    layer_s = entry(cost.by_tokens, cost.tokens_slope, tokens, 0) + entry(cost.by_tokens, cost.tokens_slope, tokens, 1)
    if cost.merged:
        units = (context + cost.context_unit_tokens - 1) // cost.context_unit_tokens
        layer_s += merged_prefills(cost, 1, tokens * tokens, units)
    else:
        layer_s += prefill_attention(cost, tokens, context)
    return layers * layer_s


@jit_cold
def reserved_blocks(S, r):
    """Return the blocks that prompts in progress and other loads of a replica still need."""
    rep, stride, blocks = S.replicas[r], S.params[0].stride, 0
    for i in range(rep.partials):
        blocks += _missing_blocks(S, S.partials[r, i])
    for k in range(rep.in_flight):
        f = r * stride + (rep.first_flight + k) % stride
        for i in range(S.flights[f].prompts):
            blocks += _missing_blocks(S, S.prompt_slot[f, i])
    for i in range(S.work[0].prompts):
        blocks += _missing_blocks(S, S.prompt_slot[S.work[0].flight, i])
    for i in range(S.tiers[r].loading):
        blocks += _missing_blocks(S, S.loading[r, i])
    return blocks


@jit
def _missing_blocks(S, slot):
    q, block_size = S.slots[slot], S.params[0].block_size
    return max(0, (q.prompt + q.generated + block_size - 1) // block_size - q.blocks)


@jit_cold
def restore_deferred(S, r, now_s):
    """Put the deferred requests back into the queue."""
    w, queue = S.work[0], S.replicas[r].queue
    for k in range(w.deferred):
        slot = S.deferred[k]
        queue_push(S, queue, S.deferred_key[k], S.slots[slot].index, slot)
        note_overdue_time(S, queue, now_s, S.slots[slot])
    w.deferred = 0


@jit_cold
def end_load(S, i):
    """End the load of request ``i``, which then waits for a step."""
    load = S.offloads[i]
    _count_loads(S, load.replica, i, load.load_first, load.load_end, -1)
    load.state = LOADED
    S.tiers[load.replica].loaded += 1
    S.pending[load.replica] = 1


@jit
def is_loaded(S, q):
    """Return whether the load of a request has ended."""
    return S.offloads[q.index].state != LOADING


@jit_cold
def find_loaded(S, r, q):
    """Let requests find the loaded blocks of a request in the GPU's prefix cache. The last token is left to compute."""
    load, block_size = S.offloads[q.index], S.params[0].block_size
    if load.state == LOADED:
        load.state = FOUND
        cache_blocks(S, r, q, load.load_end * block_size)
        q.prefilled = min(load.load_end * block_size, q.context - 1)


@jit_cold
def leave_loading(S, r, at):
    """Take the request at place ``at`` out of the loading ones. Its load has ended."""
    tier = S.tiers[r]
    S.offloads[S.slots[S.loading[r, at]].index].state = 0
    tier.loading -= 1
    tier.loaded -= 1
    for k in range(at, tier.loading):
        S.loading[r, k] = S.loading[r, k + 1]


@jit_cold
def _move_to(S, i, r):
    load, base = S.offloads[i], S.request_blocks_start[i]
    if load.replica != r:
        S.is_used[base : base + load.offered] = 0
        load.replica = r
        load.stored = 0
        load.offered = 0


@jit_cold
def store_prompts(S, r, now_s, end_s):
    """Store the blocks that the prompts of the step in ``work`` fill. Their blocks are computed by ``end_s``."""
    w = S.work[0]
    for k in range(w.prompts):
        q = S.slots[S.prompt_slot[w.flight, k]]
        tokens = q.prefilled + S.prompt_chunk[w.flight, k]
        _store(S, r, q.index, _storable_tokens(S, q.index, tokens), now_s, end_s)


@jit
def _storable_tokens(S, i, tokens):
    return tokens if S.params[0].offload_outputs == 1 else min(tokens, S.prompt[i])


@jit_cold
def note_end(S, r, q):
    """Note a request that ends, or is prefilled: its last blocks are stored and count as used with the next step."""
    i = q.index
    if S.params[0].offload_blocks == 0 or S.replicas[r].side == 1 or S.offloads[i].replica < 0:
        return
    load = S.offloads[i]
    tier = S.tiers[load.replica]
    load.tokens = _storable_tokens(S, i, q.prompt + q.generated - 1 if q.decoding == 1 else q.prefilled)
    before, after = NONE, tier.first_ended  # In the order of arrival.
    while after != NONE and after < i:
        before, after = after, S.offloads[after].next_ended
    load.next_ended = after
    if before == NONE:
        tier.first_ended = i
    else:
        S.offloads[before].next_ended = i


@jit_cold
def touch_ended(S, r, now_s):
    """Store the last blocks of the requests that have ended, and count their chunks as used, the first as the last."""
    tier = S.tiers[r]
    i = tier.first_ended
    while i != NONE:
        _store(S, r, i, S.offloads[i].tokens, now_s, now_s)
        i = S.offloads[i].next_ended
    while tier.first_ended != NONE:
        _touch(S, r, tier.first_ended)
        tier.first_ended = S.offloads[tier.first_ended].next_ended


@jit_cold
def _touch(S, r, i):
    load, row, passed, base = S.offloads[i], S.params[0].tier_row + r, 0, S.request_blocks_start[i]
    for run in range(S.node_start[i], S.node_start[i + 1]):
        passed += S.node_length[run]
    for run in range(S.node_start[i + 1] - 1, S.node_start[i] - 1, -1):
        passed -= S.node_length[run]
        for k in range(min(load.offered, passed + S.node_length[run]) - 1, passed - 1, -1):
            block = S.cache_table[row, place_of(S, row, S.node_first[run] + k - passed)]
            if block != NONE and S.is_used[base + k] == 1:
                unlink(S, row, block)
                append(S, row, block)


@jit_cold
def _store(S, r, i, tokens, now_s, computed_s):
    load, row, end = S.offloads[i], S.params[0].tier_row + r, tokens // S.params[0].block_size
    _move_to(S, i, r)
    if end <= load.stored:
        return
    load.offered = max(load.offered, end)
    new, passed, base = 0, 0, S.request_blocks_start[i]
    for run in range(S.node_start[i], S.node_start[i + 1]):
        for k in range(max(load.stored, passed), min(end, passed + S.node_length[run])):
            block = S.cache_table[row, place_of(S, row, S.node_first[run] + k - passed)]
            new += block == NONE
            if block == NONE or S.chunk_ready_s[r, block] <= now_s:
                S.is_used[base + k] = 1
        passed += S.node_length[run]
    _count_loads(S, r, i, load.stored, end, 1)  # So that they are not evicted here.
    fits = _evict(S, r, new - (S.params[0].offload_blocks - S.pools[row].evictable), now_s)
    _count_loads(S, r, i, load.stored, end, -1)
    if not fits:
        return
    if new > 0:
        tier = S.tiers[r]
        start_s = max(computed_s, tier.writes_until_s)
        tier.writes_until_s = start_s + (S.params[0].offload_latency_s + new * S.params[0].offload_block_s)
        _insert(S, r, i, load.stored, end)
    load.stored = end


@jit_cold
def _insert(S, r, i, first, end):
    row, passed = S.params[0].tier_row + r, 0
    for run in range(S.node_start[i], S.node_start[i + 1]):
        for k in range(max(first, passed), min(end, passed + S.node_length[run])):
            node = S.node_first[run] + k - passed
            if S.cache_table[row, place_of(S, row, node)] == NONE:
                block = add_content(S, row, node)
                S.cached[row, block].holders = 0
                S.chunk_ready_s[r, block] = S.tiers[r].writes_until_s
                append(S, row, block)
        passed += S.node_length[run]


@jit_cold
def _evict(S, r, count, now_s):
    """Evict the ``count`` least recently used chunks that are in no transfer. Return False if there are fewer."""
    row, idle = S.params[0].tier_row + r, 0
    block = S.pools[row].oldest
    while block != NONE and idle < count:
        idle += S.cached[row, block].holders == 0 and S.chunk_ready_s[r, block] <= now_s
        block = S.cached[row, block].next
    if idle < count:
        return False
    block = S.pools[row].oldest
    while count > 0:
        after = S.cached[row, block].next
        if S.cached[row, block].holders == 0 and S.chunk_ready_s[r, block] <= now_s:
            unlink(S, row, block)
            uncache(S, row, block)
            count -= 1
        block = after
    return True
