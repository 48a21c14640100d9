"""CPU memory and storage behind the prefix cache: loads before admission, stores of computed blocks, order of use.

``_reference_state.Tier`` states the rules. Row ``params.tier_row`` + r of the pools is the CPU memory of replica r: all
its chunks are in the list of its evictable blocks, the least recently used first, and ``holders`` counts their loads.
``S.offloads[i]`` is the state of request i; while the request waits for its load, and then for a step, its slot is in
``S.loading[r]``.
"""

from __future__ import annotations

from lengthwise._jit import jit, jit_cold
from lengthwise.cost._lookup import entry, merged_prefills, prefill_attention
from lengthwise.engine._kernel_contents import NONE, place_of
from lengthwise.engine._kernel_prefix import add_content, append, cache_blocks, uncache, unlink
from lengthwise.engine._kernel_queue import note_overdue_time, push_event, queue_push
from lengthwise.engine.kernel_layout import MAX_READS

LOADING, LOADED, CACHED = 1, 2, 3
"""States of a load. CACHED: the loaded blocks are in the GPU's prefix cache."""
USED, READ = 1, 3
"""Values of ``State.is_used``. READ: read from storage, which is a use, too."""
PRESENT, ENTERING = 1, 2
"""States of a node in storage. ENTERING: the node gets a chunk if the storage has room."""
INFINITY = float("inf")


@jit_cold
def start_load(S, r, slot, first, end, now_s):
    """Start the load of blocks ``first`` to ``end`` of a request that has left the queue and taken its blocks."""
    q, params, tier = S.slots[slot], S.params[0], S.tiers[r]
    offload, result = S.offloads[q.index], S.results[q.index]
    end_s = max(now_s, tier.loads_until_s) + (params.offload_latency_s + (end - first) * params.offload_block_s)
    _count_loads(S, r, q.index, first, end, 1)
    _move_to(S, q.index, r)
    tier.loads_until_s = end_s
    offload.state = LOADING
    offload.slot = slot
    offload.load_first = first
    offload.load_end = end
    offload.stored = end
    offload.flagged = max(offload.flagged, end)
    read = 0
    for k in range(S.request_blocks_start[q.index] + first, S.request_blocks_start[q.index] + end):
        read += S.is_used[k] == READ
        S.is_used[k] |= USED
    q.queued_for_s += now_s - q.queued_at_s
    q.queued_at_s = end_s
    S.replicas[r].deadline_s = min(S.replicas[r].deadline_s, q.arrival_s + params.timeout_s)
    S.loading[r, tier.loading] = slot
    tier.loading += 1
    result.load_s += end_s - now_s
    if q.admission < 0:
        result.cached_tokens = q.prefilled
        result.loaded_tokens = min(end * params.block_size, q.context - 1) - q.prefilled
        result.storage_tokens = min(read * params.block_size, result.loaded_tokens)
    push_event(S, end_s, len(S.replicas) + q.index)


@jit_cold
def count_loadable(S, r, q, found, now_s):
    """Return how many chunks continue the ``found`` blocks, 0 if computing them is faster, or -1 to defer the request.

    The chunk with the last token of the context counts: if it is loaded, the step computes that token alone.
    """
    params, offload = S.params[0], S.offloads[q.index]
    reads = params.storage_blocks > 0 and offload.num_reads < MAX_READS
    while params.load_if_faster == 1:
        at, end_s, loads = _estimate_load(S, r, q, found, reads, now_s)
        begin = found * params.block_size
        tokens = min(at * params.block_size, q.context - 1) - begin
        if at == found or loads or end_s - now_s < _prefill_s(S, tokens, begin):
            break
        if not reads:
            return 0
        reads = False
    read = _read(S, r, q, found, now_s) if reads else 0
    row, at, passed, loads, ready_s = params.tier_row + r, found, 0, False, now_s
    most = q.context // params.block_size
    for run in range(S.node_start[q.index], S.node_start[q.index + 1]):
        for k in range(max(at, passed), min(most, passed + S.node_length[run])):
            block = S.cache_table[row, place_of(S, row, S.node_first[run] + k - passed)]
            if block == NONE:
                break
            loads = loads or S.cached[row, block].holders > 0
            ready_s = max(ready_s, S.chunk_ready_s[r, block])
            at += 1
        passed += S.node_length[run]
        if at < passed:
            break
    if read > 0 or ready_s > now_s:
        _move_to(S, q.index, r)
        if offload.wakes == 0:
            offload.wakes = 1
            push_event(S, ready_s, len(S.replicas) + len(S.results) + q.index)
        return -1
    return -1 if loads else at - found


@jit_cold
def _estimate_load(S, r, q, found, reads, now_s):
    """Return (end of the chunks that continue the ``found`` blocks, when their load would end, whether one loads now).

    With ``reads``, chunks of the storage count, too. Loads of other requests count only before the first chunk that
    must be read from storage.
    """
    params, row, srow, tier = S.params[0], S.params[0].tier_row + r, _storage_row(S, r), S.tiers[r]
    at, passed, read, loads, start_s, most = found, 0, 0, False, now_s, q.context // S.params[0].block_size
    for run in range(S.node_start[q.index], S.node_start[q.index + 1]):
        for k in range(max(at, passed), min(most, passed + S.node_length[run])):
            node = S.node_first[run] + k - passed
            block = S.cache_table[row, place_of(S, row, node)]
            if block != NONE:
                start_s = max(start_s, S.chunk_ready_s[r, block])
                loads = loads or (read == 0 and S.cached[row, block].holders > 0)
            elif reads and _is_stored(S, srow, node, now_s):
                read += 1
            else:
                break
            at += 1
        passed += S.node_length[run]
        if at < passed:
            break
    if read > 0:
        read_s = params.storage_latency_s + read * params.storage_read_block_s
        start_s = max(start_s, max(now_s, tier.reads_until_s) + read_s)
    load_s = params.offload_latency_s + (at - found) * params.offload_block_s
    return at, max(start_s, tier.loads_until_s) + load_s, loads


@jit
def _storage_row(S, r):
    return 0 if S.params[0].storage_shared == 1 else r


@jit
def _is_stored(S, srow, node, now_s):
    return S.stored[srow, node].state == PRESENT and S.stored[srow, node].ready_s <= now_s


@jit_cold
def _read(S, r, q, found, now_s):  # noqa: C901  two passes over a request's blocks
    """Start to read the chunks that continue the ``found`` blocks and are in storage alone. Return their number."""
    params, row, srow, tier = S.params[0], S.params[0].tier_row + r, _storage_row(S, r), S.tiers[r]
    at, passed, read, most = found, 0, 0, q.context // S.params[0].block_size
    for run in range(S.node_start[q.index], S.node_start[q.index + 1]):
        for k in range(max(at, passed), min(most, passed + S.node_length[run])):
            node = S.node_first[run] + k - passed
            if S.cache_table[row, place_of(S, row, node)] == NONE:
                if not _is_stored(S, srow, node, now_s):
                    break
                if not _evict(S, r, 1 - (params.offload_blocks - S.pools[row].evictable), now_s):
                    break
                _enter(S, r, node, INFINITY)
                read += 1
            at += 1
        passed += S.node_length[run]
        if at < passed:
            break
    if read == 0:
        return 0
    end_s = max(now_s, tier.reads_until_s) + (params.storage_latency_s + read * params.storage_read_block_s)
    tier.reads_until_s = end_s
    offload, base = S.offloads[q.index], S.request_blocks_start[q.index]
    _move_to(S, q.index, r)
    offload.num_reads += 1
    offload.flagged = max(offload.flagged, at)
    passed = 0
    for run in range(S.node_start[q.index], S.node_start[q.index + 1]):
        passed += S.node_length[run]
    for run in range(S.node_start[q.index + 1] - 1, S.node_start[q.index] - 1, -1):
        passed -= S.node_length[run]
        for k in range(min(at, passed + S.node_length[run]) - 1, max(found, passed) - 1, -1):
            node = S.node_first[run] + k - passed
            block = S.cache_table[row, place_of(S, row, node)]
            if block != NONE and S.chunk_ready_s[r, block] == INFINITY:
                S.chunk_ready_s[r, block] = end_s
                S.chunk_busy_until_s[r, block] = end_s
                S.is_used[base + k] = READ
                S.stored[srow, node].busy_until_s = max(S.stored[srow, node].busy_until_s, end_s)
                _unlink_stored(S, srow, node)
                _append_stored(S, srow, node)
    return read


@jit
def wake(S, i):
    """Let the replica of a deferred request form a step."""
    S.offloads[i].wakes = 0
    S.pending[S.offloads[i].replica] = 1


@jit_cold
def _count_loads(S, r, i, first, end, more):
    """Add ``more`` to the loads of those blocks from ``first`` to ``end`` of request ``i`` that have a chunk."""
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
    offload = S.offloads[i]
    _count_loads(S, offload.replica, i, offload.load_first, offload.load_end, -1)
    offload.state = LOADED
    S.tiers[offload.replica].loaded += 1
    S.pending[offload.replica] = 1


@jit
def is_loaded(S, q):
    """Return whether the load of a request has ended."""
    return S.offloads[q.index].state != LOADING


@jit_cold
def cache_loaded(S, r, q):
    """Let requests find the loaded blocks of a request in the GPU pool. Its last token remains to be computed."""
    offload, block_size = S.offloads[q.index], S.params[0].block_size
    if offload.state == LOADED:
        offload.state = CACHED
        cache_blocks(S, r, q, offload.load_end * block_size)
        q.prefilled = min(offload.load_end * block_size, q.context - 1)


@jit_cold
def leave_loading(S, r, at):
    """Remove the request at index ``at``, whose load has ended, from the row of ``State.loading``."""
    tier = S.tiers[r]
    S.offloads[S.slots[S.loading[r, at]].index].state = 0
    tier.loading -= 1
    tier.loaded -= 1
    for k in range(at, tier.loading):
        S.loading[r, k] = S.loading[r, k + 1]


@jit_cold
def _move_to(S, i, r):
    offload, base = S.offloads[i], S.request_blocks_start[i]
    if offload.replica != r:
        S.is_used[base : base + offload.flagged] = 0
        offload.replica = r
        offload.stored = 0
        offload.flagged = 0


@jit_cold
def store_prompts(S, r, now_s, end_s):
    """Store the blocks that the prompts of the step in ``work`` fill. They are computed by ``end_s``."""
    w = S.work[0]
    for k in range(w.prompts):
        q = S.slots[S.prompt_slot[w.flight, k]]
        tokens = q.prefilled + S.prompt_chunk[w.flight, k]
        _store(S, r, q.index, _storable_tokens(S, q.index, tokens), now_s, end_s)


@jit
def _storable_tokens(S, i, tokens):
    return tokens if S.params[0].offload_outputs == 1 else min(tokens, S.prompt[i])


@jit_cold
def end_offloading(S, r, q):
    """Add a request that ends or moves to a decode replica to its replica's pending stores."""
    i = q.index
    if S.params[0].offload_blocks == 0 or S.replicas[r].side == 1 or S.offloads[i].replica < 0:
        return
    offload = S.offloads[i]
    tier = S.tiers[offload.replica]
    offload.tokens = _storable_tokens(S, i, q.prompt + q.generated - 1 if q.decoding == 1 else q.prefilled)
    before, after = NONE, tier.first_pending_store  # The list is sorted by request.
    while after != NONE and after < i:
        before, after = after, S.offloads[after].next_pending_store
    offload.next_pending_store = after
    if before == NONE:
        tier.first_pending_store = i
    else:
        S.offloads[before].next_pending_store = i


@jit_cold
def complete_offloading(S, r, now_s):
    """Store the last blocks of the replica's pending stores, and mark all their used chunks as used now."""
    tier = S.tiers[r]
    i = tier.first_pending_store
    while i != NONE:
        _store(S, r, i, S.offloads[i].tokens, now_s, now_s)
        i = S.offloads[i].next_pending_store
    while tier.first_pending_store != NONE:
        _touch(S, r, tier.first_pending_store)
        tier.first_pending_store = S.offloads[tier.first_pending_store].next_pending_store


@jit_cold
def _touch(S, r, i):
    offload, row, passed, base = S.offloads[i], S.params[0].tier_row + r, 0, S.request_blocks_start[i]
    for run in range(S.node_start[i], S.node_start[i + 1]):
        passed += S.node_length[run]
    for run in range(S.node_start[i + 1] - 1, S.node_start[i] - 1, -1):
        passed -= S.node_length[run]
        for k in range(min(offload.flagged, passed + S.node_length[run]) - 1, passed - 1, -1):
            block = S.cache_table[row, place_of(S, row, S.node_first[run] + k - passed)]
            if block != NONE and S.is_used[base + k] != 0:
                unlink(S, row, block)
                append(S, row, block)


@jit_cold
def _store(S, r, i, tokens, now_s, computed_s):
    offload, row, end = S.offloads[i], S.params[0].tier_row + r, tokens // S.params[0].block_size
    _move_to(S, i, r)
    if end <= offload.stored:
        return
    offload.flagged = max(offload.flagged, end)
    new, passed, base = 0, 0, S.request_blocks_start[i]
    for run in range(S.node_start[i], S.node_start[i + 1]):
        for k in range(max(offload.stored, passed), min(end, passed + S.node_length[run])):
            block = S.cache_table[row, place_of(S, row, S.node_first[run] + k - passed)]
            new += block == NONE
            if block == NONE or S.chunk_ready_s[r, block] <= now_s:
                S.is_used[base + k] |= USED
        passed += S.node_length[run]
    _count_loads(S, r, i, offload.stored, end, 1)  # ``_evict`` does not take chunks with loads.
    fits = _evict(S, r, new - (S.params[0].offload_blocks - S.pools[row].evictable), now_s)
    _count_loads(S, r, i, offload.stored, end, -1)
    if not fits:
        return
    if new > 0:
        tier = S.tiers[r]
        start_s = max(computed_s, tier.stores_until_s)
        tier.stores_until_s = start_s + (S.params[0].offload_latency_s + new * S.params[0].offload_block_s)
        _insert(S, r, i, offload.stored, end)
        _write(S, r, i, offload.stored, end, now_s)
    offload.stored = end


@jit_cold
def _insert(S, r, i, first, end):
    """Add the chunks of a store. They are busy (until infinity) until ``_write`` sets the end."""
    row, passed = S.params[0].tier_row + r, 0
    for run in range(S.node_start[i], S.node_start[i + 1]):
        for k in range(max(first, passed), min(end, passed + S.node_length[run])):
            node = S.node_first[run] + k - passed
            if S.cache_table[row, place_of(S, row, node)] == NONE:
                _enter(S, r, node, S.tiers[r].stores_until_s)
        passed += S.node_length[run]


@jit
def _enter(S, r, node, ready_s):
    row = S.params[0].tier_row + r
    block = add_content(S, row, node)
    S.cached[row, block].holders = 0
    S.chunk_ready_s[r, block] = ready_s
    S.chunk_busy_until_s[r, block] = INFINITY
    append(S, row, block)


@jit_cold
def _write(S, r, i, first, end, now_s):
    """Write the chunks that ``_insert`` added and the storage lacks, if it has room. Set until when they are busy."""
    params, row, srow, tier, missing = S.params[0], S.params[0].tier_row + r, _storage_row(S, r), S.tiers[r], 0
    passed, busy_until_s = 0, tier.stores_until_s
    for run in range(S.node_start[i], S.node_start[i + 1]):
        for k in range(max(first, passed), min(end, passed + S.node_length[run])):
            node = S.node_first[run] + k - passed
            block = S.cache_table[row, place_of(S, row, node)]
            is_new = params.storage_blocks > 0 and S.chunk_busy_until_s[r, block] == INFINITY
            if is_new and S.stored[srow, node].state != PRESENT:
                S.stored[srow, node].state = ENTERING
                missing += 1
        passed += S.node_length[run]
    fits = missing > 0 and _evict_stored(S, srow, missing, now_s)
    if fits:
        write_s = params.storage_latency_s + missing * params.storage_write_block_s
        busy_until_s = max(busy_until_s, tier.writes_until_s) + write_s
        tier.writes_until_s = busy_until_s
    for run in range(S.node_start[i + 1] - 1, S.node_start[i] - 1, -1):
        passed -= S.node_length[run]
        for k in range(min(end, passed + S.node_length[run]) - 1, max(first, passed) - 1, -1):
            node = S.node_first[run] + k - passed
            block = S.cache_table[row, place_of(S, row, node)]
            if S.chunk_busy_until_s[r, block] == INFINITY:
                S.chunk_busy_until_s[r, block] = busy_until_s
            if params.storage_blocks > 0 and S.stored[srow, node].state == ENTERING:
                S.stored[srow, node].state = PRESENT if fits else 0
                if fits:
                    S.stored[srow, node].ready_s = busy_until_s
                    S.stored[srow, node].busy_until_s = busy_until_s
                    _append_stored(S, srow, node)


@jit_cold
def _evict_stored(S, srow, count, now_s):
    """Evict the least recently used chunks of the storage until ``count`` fit. Return False if too few are idle."""
    pool, idle = S.storages[srow], 0
    short = count - (S.params[0].storage_blocks - pool.chunks)
    node = pool.oldest
    while node != NONE and idle < short:
        idle += S.stored[srow, node].busy_until_s <= now_s
        node = S.stored[srow, node].next
    if idle < short:
        return False
    node = pool.oldest
    while short > 0:
        after = S.stored[srow, node].next
        if S.stored[srow, node].busy_until_s <= now_s:
            _unlink_stored(S, srow, node)
            S.stored[srow, node].state = 0
            short -= 1
        node = after
    return True


@jit
def _unlink_stored(S, srow, node):
    pool, entry = S.storages[srow], S.stored[srow, node]
    if entry.previous == NONE:
        pool.oldest = entry.next
    else:
        S.stored[srow, entry.previous].next = entry.next
    if entry.next == NONE:
        pool.newest = entry.previous
    else:
        S.stored[srow, entry.next].previous = entry.previous
    pool.chunks -= 1


@jit
def _append_stored(S, srow, node):
    pool, entry = S.storages[srow], S.stored[srow, node]
    entry.previous = pool.newest
    entry.next = NONE
    if pool.newest == NONE:
        pool.oldest = node
    else:
        S.stored[srow, pool.newest].next = node
    pool.newest = node
    pool.chunks += 1


@jit_cold
def _evict(S, r, count, now_s):
    """Evict the ``count`` least recently used chunks that are in no transfer. Return False if there are fewer."""
    row, idle = S.params[0].tier_row + r, 0
    block = S.pools[row].oldest
    while block != NONE and idle < count:
        idle += S.cached[row, block].holders == 0 and S.chunk_busy_until_s[r, block] <= now_s
        block = S.cached[row, block].next
    if idle < count:
        return False
    block = S.pools[row].oldest
    while count > 0:
        after = S.cached[row, block].next
        if S.cached[row, block].holders == 0 and S.chunk_busy_until_s[r, block] <= now_s:
            unlink(S, row, block)
            uncache(S, row, block)
            count -= 1
        block = after
    return True
