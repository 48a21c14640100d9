"""vLLM's prefix cache in the kernel: which blocks have contents, how many requests use them, which is evicted next.

``_reference_state.BlockPool`` states the rules. A block has a record only while it has a content; blocks without
content are only counted. A decode group takes free blocks without evicting contents, so that more blocks may have
contents than are free. ``evict_excess`` evicts the excess before the cache is read or grows.

Row r of the pools is the cache of replica r. Row ``params.replicas`` + r is the router's index of the prompts that it
sent to replica r (``_reference_state.PrefixIndex``): a cache whose blocks no request uses. From row ``params.tier_row``
on, the rows are the CPU memories of the replicas (``_kernel_tiers``).
"""

from __future__ import annotations

from lengthwise._jit import jit, jit_cold
from lengthwise.engine._kernel_contents import NONE, clear_place, free_record, new_record, place_of
from lengthwise.engine._kernel_radix import count_in_use, count_matched, evict_leaf, hold, insert_pages, match_prefix
from lengthwise.engine.kernel_layout import ALL

RADIX = 2  # value of ``Params.prefix_caching`` for SGLang's radix tree


@jit
def add_content(S, r, node):
    """Give a block that one request uses a content. Return the block's record."""
    block, at = new_record(S, r, node), place_of(S, r, node)
    if S.cache_table[r, at] == NONE:
        S.cache_table[r, at] = block
    else:
        older = S.cached[r, S.cache_table[r, at]]
        while older.next_copy != NONE:
            older = S.cached[r, older.next_copy]
        older.next_copy = block
    return block


@jit
def uncache(S, r, block):
    """Remove a block's content from the table."""
    entry = S.cached[r, block]
    at = place_of(S, r, entry.node)
    first = S.cache_table[r, at]
    if first != block:
        older = S.cached[r, first]
        while older.next_copy != block:
            older = S.cached[r, older.next_copy]
        older.next_copy = entry.next_copy
    elif entry.next_copy != NONE:
        S.cache_table[r, at] = entry.next_copy
    else:
        clear_place(S, r, at)
    free_record(S, r, block)


@jit
def evict_excess(S, r):
    """Evict unused contents, in the cache's order, until there are no more of them than free blocks."""
    if S.params[0].prefix_caching == RADIX:
        make_room(S, r, 0)
        return
    while S.pools[r].evictable > S.replicas[r].free_blocks:
        _evict_oldest(S, r)


@jit_cold
def make_room(S, r, blocks):
    """Evict leaves of a radix tree until ``blocks`` blocks are empty. First make up for evictions of decode steps."""
    rep = S.replicas[r]
    while S.pools[r].evictable > max(0, min(rep.free_blocks, rep.spare_blocks)):
        evict_leaf(S, r)
    rep.spare_blocks = ALL
    while S.pools[r].evictable > max(0, rep.free_blocks - blocks):
        evict_leaf(S, r)


@jit
def _evict_oldest(S, r):
    block = S.pools[r].oldest
    unlink(S, r, block)
    uncache(S, r, block)


@jit
def unlink(S, r, block):
    pool, entry = S.pools[r], S.cached[r, block]
    if entry.previous == NONE:
        pool.oldest = entry.next
    else:
        S.cached[r, entry.previous].next = entry.next
    if entry.next == NONE:
        pool.newest = entry.previous
    else:
        S.cached[r, entry.next].previous = entry.previous
    pool.evictable -= 1


@jit
def append(S, r, block):
    pool, entry = S.pools[r], S.cached[r, block]
    entry.previous = pool.newest
    entry.next = NONE
    if pool.newest == NONE:
        pool.oldest = block
    else:
        S.cached[r, pool.newest].next = block
    pool.newest = block
    pool.evictable += 1


@jit_cold
def find_cached(S, r, q):
    """Find the cached blocks with which a waiting request begins. Return (their number, how many of them are in use).

    Their records are in the request's part of ``State.request_blocks``, or end with ``work.found_segment`` in a radix
    tree. The block of the request's last token is never among them, so that there is a token to compute.
    """
    evict_excess(S, r)
    most = (q.prompt + q.generated - 1) // S.params[S.replicas[r].side].block_size
    if S.params[0].prefix_caching == RADIX:
        return match_prefix(S, r, q.index, most)
    if S.params[0].hybrid == 1:
        return _find_in_groups(S, r, q.index, most)
    found, shared, base = 0, 0, S.request_blocks_start[q.index]
    for run in range(S.node_start[q.index], S.node_start[q.index + 1]):
        for node in range(S.node_first[run], S.node_first[run] + min(S.node_length[run], most - found)):
            block = S.cache_table[r, place_of(S, r, node)]
            if block == NONE:
                return found, shared
            S.request_blocks[base + found] = block
            shared += S.cached[r, block].holders > 0
            found += 1
    return found, shared


@jit_cold
def _find_in_groups(S, r, i, most):  # noqa: C901  one sequence
    """Do as ``find_cached`` with up to ``most`` blocks of request ``i`` in KV cache groups (``GroupPool.find``)."""
    w, params, base, found = S.work[0], S.params[0], S.request_blocks_start[i], 0
    groups, local = params.attention_groups, params.local_groups
    for run in range(S.node_start[i], S.node_start[i + 1]):
        if found == most:
            break
        for node in range(S.node_first[run], S.node_first[run] + min(S.node_length[run], most - found)):
            for g in range(groups):
                block = S.cache_table[r, place_of(S, r, node * groups + g)]
                S.request_blocks[base + found * groups + g] = block
                if g >= local and block == NONE:
                    most = found
            if found == most:
                break
            found += 1
    longest, length, first = found, found, 0
    if local > 0:
        length, first = _find_local(S, base, found)
        while length < found and groups == local:  # Without full attention: until the length no longer falls.
            found = length
            length, first = _find_local(S, base, found)
    w.found_length = length
    w.found_skipped = first
    w.found_boundary = longest if groups > local and longest > length else 0
    shared = 0
    for k in range(length):
        for g in range(groups):
            if g < local and k < first:
                S.request_blocks[base + k * groups + g] = NONE
            else:
                shared += S.cached[r, S.request_blocks[base + k * groups + g]].holders > 0
    return length, shared


@jit_cold
def _find_local(S, base, count):
    """Return (how many of the first ``count`` blocks local groups allow, how many of these lie before the window)."""
    params, run = S.params[0], 0
    if params.chunked_local == 1:
        first = count * params.block_size // params.local_tokens * params.local_tokens // params.block_size
        length = first
        while length < count and _has_local(S, base, length):
            length += 1
        return length, first
    for k in range(count - 1, -1, -1):
        if not _has_local(S, base, k):
            run = 0
            continue
        run += 1
        if run >= params.window_blocks:
            return k + run, k
    return run, 0


@jit
def _has_local(S, base, k):
    groups = S.params[0].attention_groups
    missing = 0
    for g in range(S.params[0].local_groups):
        missing += S.request_blocks[base + k * groups + g] == NONE
    return missing == 0


@jit
def taken_blocks(S, found):
    """Return how many blocks a request has whose first ``found`` blocks are cached (in every KV cache group)."""
    params = S.params[0]
    if found == 0:
        return 0
    return params.attention_groups * found - params.local_groups * S.work[0].found_skipped


@jit_cold
def reuse_found(S, r, q, found):
    """Count the request as a user of the ``found`` blocks of ``find_cached``. Blocks without users were free before."""
    q.cached = found
    if S.params[0].prefix_caching == RADIX:
        q.cached_segment = S.work[0].found_segment
        hold(S, r, q.cached_segment, 1)
        return
    base = S.request_blocks_start[q.index]
    for k in range(found * S.params[0].attention_groups):
        if S.request_blocks[base + k] == NONE:
            continue
        entry = S.cached[r, S.request_blocks[base + k]]
        if entry.holders == 0:
            unlink(S, r, S.request_blocks[base + k])
            S.replicas[r].free_blocks -= 1
        entry.holders += 1


@jit_cold
def cache_blocks(S, r, q, tokens):
    """Let other requests find the full blocks of the request's first ``tokens`` tokens. It must have these blocks."""
    evict_excess(S, r)
    full, base, passed = tokens // S.params[S.replicas[r].side].block_size, S.request_blocks_start[q.index], 0
    if S.params[0].prefix_caching == RADIX:
        if full > 0:
            insert_pages(S, r, q, full)
        return
    for run in range(S.node_start[q.index], S.node_start[q.index + 1]):
        if q.cached >= full:
            break
        while q.cached < min(full, passed + S.node_length[run]):
            if S.params[0].hybrid == 1:
                _cache_in_groups(S, r, q, S.node_first[run] + q.cached - passed, full)
                q.cached += 1
                continue
            S.request_blocks[base + q.cached] = add_content(S, r, S.node_first[run] + q.cached - passed)
            q.cached += 1
        passed += S.node_length[run]
    if S.params[0].aligned == 1 and full > 0 and full == (S.prompt[q.index] - 1) // S.params[0].block_size:
        block = S.request_blocks[base + (full - 1) * S.params[0].attention_groups]
        if block != NONE:
            _add_fresh(S, r, S.cached[r, block].node // S.params[0].attention_groups)


@jit_cold
def _add_fresh(S, r, node):
    S.fresh[r, S.replicas[r].fresh] = node
    S.replicas[r].fresh += 1


@jit_cold
def _cache_in_groups(S, r, q, node, full):
    """Give block ``q.cached`` of a request the content ``node``; in windows only where a later request can continue.

    Of the ``full`` first blocks, a step writes only the last one in groups of states.
    """
    params, k = S.params[0], q.cached
    groups, base = params.attention_groups, S.request_blocks_start[q.index]
    replay = (S.prompt[q.index] - 1) // params.block_size
    is_needed = params.chunked_local == 1 or replay - params.window_blocks <= k < replay
    is_needed = is_needed or q.boundary - params.window_blocks <= k < q.boundary
    if params.aligned == 1:
        is_needed = is_needed and k == full - 1
        if is_needed and full != replay:  # Else ``cache_blocks`` adds it.
            _add_fresh(S, r, node)
    for g in range(groups):
        has_content = is_needed or g >= params.local_groups
        S.request_blocks[base + k * groups + g] = add_content(S, r, node * groups + g) if has_content else NONE


@jit_cold
def skip_blocks(S, r, q, end):
    """Free a request's blocks up to ``end`` in local groups, before their windows. Return how many it had."""
    params = S.params[0]
    groups, base, first = params.attention_groups, S.request_blocks_start[q.index], q.skipped
    if end <= first:
        return 0
    if params.chunked_local == 1:  # Its decodes have filled blocks that get their contents at the latest now.
        cache_blocks(S, r, q, end * params.block_size)
    evict_excess(S, r)
    last = first if params.aligned == 1 else end - 1
    for g in range(params.local_groups):
        for k in range(last, first - 1, -1):
            if k >= q.cached or S.request_blocks[base + k * groups + g] == NONE:
                S.replicas[r].free_blocks += 1
                continue
            _release_one(S, r, S.request_blocks[base + k * groups + g])
            S.request_blocks[base + k * groups + g] = NONE
    q.skipped = end
    return (last + 1 - first) * params.local_groups


@jit_cold
def drop_block(S, r, q, found, shared):
    """Return what ``find_cached`` found without the last block."""
    if found == 0:
        return 0, 0
    last = S.request_blocks[S.request_blocks_start[q.index] + found - 1]
    return found - 1, shared - (S.cached[r, last].holders > 0)


@jit_cold
def must_wait(S, r, q, found):
    """Return whether the state after a request's ``found`` blocks cannot be continued in the step being formed."""
    groups, rep = S.params[0].attention_groups, S.replicas[r]
    if found > 0:
        block = S.request_blocks[S.request_blocks_start[q.index] + (found - 1) * groups]
        for i in range(rep.fresh):
            if S.fresh[r, i] * groups == S.cached[r, block].node:
                return True
    return False


@jit
def _release_one(S, r, block):
    S.cached[r, block].holders -= 1
    if S.cached[r, block].holders == 0:
        append(S, r, block)
        S.replicas[r].free_blocks += 1


@jit_cold
def release_blocks(S, r, q, blocks):
    """Free ``blocks`` blocks of a request, of which the first ``q.cached`` have contents."""
    evict_excess(S, r)
    rep, base, groups = S.replicas[r], S.request_blocks_start[q.index], S.params[0].attention_groups
    if S.params[0].hybrid == 1:
        for g in range(groups):
            for k in range(q.cached - 1, -1, -1):
                if S.request_blocks[base + k * groups + g] != NONE:
                    _release_one(S, r, S.request_blocks[base + k * groups + g])
                    blocks -= 1
        rep.free_blocks += blocks
        q.cached = 0
        return
    rep.free_blocks += blocks - q.cached
    if S.params[0].prefix_caching == RADIX:
        hold(S, r, q.cached_segment, -1)
        q.cached = 0
        q.cached_segment = NONE
        q.inserted = 0
        return
    for k in range(q.cached - 1, -1, -1):
        _release_one(S, r, S.request_blocks[base + k])
    q.cached = 0


@jit_cold
def count_shared(S, r, q):
    """Return how many of a resident's blocks other requests use, too."""
    if S.params[0].prefix_caching == RADIX:
        return count_in_use(S, r, q.cached_segment, 2)
    shared, base = 0, S.request_blocks_start[q.index]
    for k in range(q.cached):
        shared += S.cached[r, S.request_blocks[base + k]].holders > 1
    return shared


@jit_cold
def count_cached(S, r, i):
    """Return how many blocks of the prompt of request ``i``, from the first on, are in row ``r`` of the pools."""
    count, most = 0, S.prompt[i] // S.params[0].block_size
    if S.params[0].hybrid == 1 and r < S.params[0].replicas:
        return _find_in_groups(S, r, i, most)[0]
    for run in range(S.node_start[i], S.node_start[i + 1]):
        for node in range(S.node_first[run], S.node_first[run] + min(S.node_length[run], most - count)):
            if S.cache_table[r, place_of(S, r, node)] == NONE:
                return count
            count += 1
    return count


@jit_cold
def index_prompt(S, r, i):
    """Mark the blocks of request i's prompt, from the last to the first, as used in the router's index of a replica."""
    row, passed, most = S.params[0].replicas + r, 0, S.prompt[i] // S.params[0].block_size
    for run in range(S.node_start[i], S.node_start[i + 1]):
        passed += S.node_length[run]
    for run in range(S.node_start[i + 1] - 1, S.node_start[i] - 1, -1):
        passed -= S.node_length[run]
        for k in range(min(S.node_length[run], most - passed) - 1, -1, -1):
            block = S.cache_table[row, place_of(S, row, S.node_first[run] + k)]
            if block == NONE:
                block = add_content(S, row, S.node_first[run] + k)
                S.cached[row, block].holders = 0
            else:
                unlink(S, row, block)
            append(S, row, block)
    while S.pools[row].evictable > S.params[0].index_blocks:
        _evict_oldest(S, row)


@jit_cold
def set_router_arrays(S, i):
    """Set the router's arguments ``free_blocks``, ``prefix_tokens`` and ``index_tokens`` for request ``i``."""
    params = S.params[0]
    for r in range(params.replicas):
        S.router_free_blocks[r] = S.replicas[r].free_blocks
        if params.router_prefix == 1 and params.prefix_caching == RADIX:
            evict_excess(S, r)
            S.prefix_tokens[r] = count_matched(S, r, i, S.prompt[i] // params.block_size) * params.block_size
        elif params.router_prefix == 1:
            evict_excess(S, r)
            S.prefix_tokens[r] = count_cached(S, r, i) * params.block_size
        elif params.router_prefix == 2:
            S.prefix_tokens[r] = count_cached(S, params.replicas + r, i) * params.block_size
            S.index_tokens[r] = S.pools[params.replicas + r].evictable * params.block_size


@jit
def previous_replica(routed, previous_turn, i):
    """Return the replica that a side's router chose for the latest turn before request ``i``, or -1 if there is none.

    ``routed`` and ``previous_turn`` are empty if the router does not take ``previous_replica``.
    """
    if len(previous_turn) == 0:
        return -1
    before = previous_turn[i]
    while before >= 0 and routed[before] < 0:
        before = previous_turn[before]
    return routed[before] if before >= 0 else -1
