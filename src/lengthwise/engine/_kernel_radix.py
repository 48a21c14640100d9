"""SGLang's radix tree in the kernel: segments of pages, how many requests use them, which leaf is evicted next.

``_reference_state.RadixCache`` states the rules. A segment has a record of ``State.cached`` (node of its first page,
number of ``holders``) and one of ``State.segments``. Its pages are ``length`` pages of the request ``owner``, from page
``start`` on. A single page has no record: requests that begin alike have the same runs of nodes, so that two lists of
pages are compared run by run. The evictable leaves are a heap.
"""

from __future__ import annotations

from lengthwise._jit import jit, jit_cold
from lengthwise.engine._kernel_contents import NONE, clear_place, free_record, new_record, place_of
from lengthwise.engine.kernel_layout import ALL
from lengthwise.schema.deployment import RADIX_EVICTION_POLICIES

LRU, LFU, SLRU, PRIORITY, FIFO, MRU, FILO = range(len(RADIX_EVICTION_POLICIES))
UNLINKED = -2
"""``next`` of a segment that no order of the queue has linked."""


@jit
def page_of(S, i, at):
    """Return the node of a request's page ``at``."""
    run = S.node_start[i]
    while at >= S.node_length[run]:
        at -= S.node_length[run]
        run += 1
    return S.node_first[run] + at


@jit_cold
def _follow(S, r, i, depth, pages):
    """Return (segment that begins with page ``depth`` of request ``i``, first page in which they differ).

    Only the first ``pages`` pages of the request count. Without such a segment, return (NONE, depth).
    """
    run, end = S.node_start[i], S.node_length[S.node_start[i]]
    while depth >= end:
        run += 1
        end += S.node_length[run]
    segment = S.cache_table[r, place_of(S, r, S.node_first[run] + S.node_length[run] - (end - depth))]
    if segment == NONE:
        return NONE, depth
    owner = S.segments[r, segment].owner
    stop, shift = min(pages, depth + S.segments[r, segment].length), S.node_start[owner] - S.node_start[i]
    while (
        end < stop
        and S.node_first[run + 1] == S.node_first[run + 1 + shift]
        and S.node_length[run + 1] == S.node_length[run + 1 + shift]
    ):
        run += 1
        end += S.node_length[run]
    return segment, min(end, stop)


@jit
def _order(S, r, segment):
    """Return the sort key of an evictable leaf. The smallest is evicted first."""
    entry, policy = S.segments[r, segment], S.params[0].radix_policy
    group, time = 0, entry.used
    if policy == LFU:
        group = entry.hits
    elif policy == SLRU:
        group = min(entry.hits, 2) // 2
    elif policy == PRIORITY:
        group = entry.priority
    elif policy == MRU:
        time = -entry.used
    elif policy == FIFO:
        time = entry.created
    elif policy == FILO:
        time = -entry.created
    return group, time


@jit_cold
def _update_leaf(S, r, segment):
    """Add a segment to the heap of evictable leaves, move it to its position there, or remove it from there."""
    pool, entry = S.pools[r], S.segments[r, segment]
    at = entry.place
    if entry.children == 0 and S.cached[r, segment].holders == 0:
        if at == NONE:
            at = pool.leaves
            pool.leaves += 1
    else:
        if at == NONE:
            return
        entry.place = NONE
        pool.leaves -= 1
        if at == pool.leaves:
            return
        segment = S.leaves[r, pool.leaves]
    key, child = _order(S, r, segment), 0
    while at > 0 and key < _order(S, r, S.leaves[r, (at - 1) // 2]):
        _set_leaf(S, r, at, S.leaves[r, (at - 1) // 2])
        at = (at - 1) // 2
    while 2 * at + 1 < pool.leaves:
        child = 2 * at + 1
        if child + 1 < pool.leaves and _order(S, r, S.leaves[r, child + 1]) < _order(S, r, S.leaves[r, child]):
            child += 1
        if not _order(S, r, S.leaves[r, child]) < key:
            break
        _set_leaf(S, r, at, S.leaves[r, child])
        at = child
    _set_leaf(S, r, at, segment)


@jit
def _set_leaf(S, r, at, segment):
    S.leaves[r, at] = segment
    S.segments[r, segment].place = at


@jit_cold
def evict_leaf(S, r):
    """Evict the first leaf by the eviction policy."""
    pool, segment = S.pools[r], S.leaves[r, 0]
    entry = S.segments[r, segment]
    S.cached[r, segment].holders = 1  # ``_update_leaf`` then removes it from the heap.
    _update_leaf(S, r, segment)
    clear_place(S, r, place_of(S, r, S.cached[r, segment].node))
    free_record(S, r, segment)
    pool.evictable -= entry.length
    if entry.parent != NONE:
        S.segments[r, entry.parent].children -= 1
        _update_leaf(S, r, entry.parent)


@jit
def _add(S, r, i, start, length, parent, priority):
    """Add a segment of a request's pages, with neither holders nor children, and return it."""
    segment = new_record(S, r, page_of(S, i, start))
    entry, pool = S.segments[r, segment], S.pools[r]
    pool.clock += 1
    S.cached[r, segment].holders = 0
    S.cache_table[r, place_of(S, r, S.cached[r, segment].node)] = segment
    entry.owner = i
    entry.start = start
    entry.length = length
    entry.parent = parent
    entry.priority = priority
    entry.children = 0
    entry.hits = 0
    entry.place = NONE
    entry.used = pool.clock
    entry.created = pool.clock
    entry.born = pool.clock
    entry.weight = 0
    entry.first = NONE
    entry.next = UNLINKED
    return segment


@jit_cold
def _split(S, r, child, at):
    """Split a segment before page ``at`` of its owner. Return the new segment, which is the first part."""
    lower = S.segments[r, child]
    upper = _add(S, r, lower.owner, lower.start, at - lower.start, lower.parent, lower.priority)
    S.cached[r, upper].holders = S.cached[r, child].holders
    S.segments[r, upper].hits = lower.hits
    S.segments[r, upper].born = lower.born
    S.segments[r, upper].children = 1
    S.cached[r, child].node = page_of(S, lower.owner, at)
    S.cache_table[r, place_of(S, r, S.cached[r, child].node)] = child
    lower.length -= at - lower.start
    lower.start = at
    lower.parent = upper
    _update_leaf(S, r, child)  # It was just used.
    return upper


@jit_cold
def _visit(S, r, i, pages, priority, inserted):
    """Mark the segments of request i's first ``pages`` pages as used now. Return (number of pages found, last segment).

    The last segment is split at the end of these pages. Each segment's priority becomes at least ``priority`` (-ALL: no
    change). Segments that end after the first ``inserted`` pages count a hit (ALL: none does).
    """
    depth, last, now = 0, NONE, S.pools[r].clock + 1
    S.pools[r].clock = now
    while depth < pages:
        segment, end = _follow(S, r, i, depth, pages)
        if segment == NONE:
            break
        entry = S.segments[r, segment]
        entry.used = now
        if end < entry.start + entry.length:
            segment = _split(S, r, segment, end)
            entry = S.segments[r, segment]
        entry.priority = max(entry.priority, priority)
        entry.hits += end > inserted
        _update_leaf(S, r, segment)
        depth, last = end, segment
    return depth, last


@jit_cold
def match_prefix(S, r, i, pages):
    """Find the longest prefix of request i's first ``pages`` pages that is in the tree, and mark it as used now.

    Return (number of pages found, how many of them requests use). ``work.found_segment`` is the last segment.
    """
    depth, last = _visit(S, r, i, pages, -ALL, ALL) if pages > 0 else (0, NONE)
    S.work[0].found_segment = last
    return depth, count_in_use(S, r, last, 1)


@jit_cold
def count_in_use(S, r, segment, requests):
    """Return how many pages from the root to the end of a segment at least ``requests`` requests use."""
    count = 0
    while segment != NONE:
        if S.cached[r, segment].holders >= requests:
            count += S.segments[r, segment].length
        segment = S.segments[r, segment].parent
    return count


@jit_cold
def count_matched(S, r, i, pages):
    """Return how many of request i's first ``pages`` pages are in the tree, without marking them as used."""
    depth = 0
    while depth < pages:
        segment, end = _follow(S, r, i, depth, pages)
        if segment == NONE:
            break
        depth = end
        if depth < S.segments[r, segment].start + S.segments[r, segment].length:
            break
    return depth


@jit_cold
def hold(S, r, segment, change):
    """Add ``change`` (1 or -1) to the number of holders of a segment and of all segments above it."""
    rep, pool = S.replicas[r], S.pools[r]
    while segment != NONE:
        entry, length = S.cached[r, segment], S.segments[r, segment].length
        before = entry.holders
        entry.holders += change
        if before == 0 or entry.holders == 0:
            rep.free_blocks -= change * length
            pool.evictable -= change * length
            _update_leaf(S, r, segment)
        segment = S.segments[r, segment].parent


@jit_cold
def insert_pages(S, r, q, pages):
    """Insert a request's first ``pages`` pages, and free its copies of pages that others inserted in the meantime.

    A segment ends at the end of the prompt, so that the output can be evicted without the prompt.
    """
    i, priority, prompt = q.index, -S.priority[q.index], S.prompt[q.index] // S.params[0].block_size
    known, last = _visit(S, r, i, pages, priority, q.inserted)
    if known < pages:
        segment = _add(S, r, i, known, pages - known, last, priority)
        S.segments[r, segment].hits = 1 if pages > q.inserted else 0
        if last != NONE:
            S.segments[r, last].children += 1
            _update_leaf(S, r, last)
        _update_leaf(S, r, segment)
        S.pools[r].evictable += pages - known
    S.replicas[r].free_blocks += pages - q.cached
    if 0 < prompt < pages:
        _visit(S, r, i, prompt, priority + 1, prompt)
    _, last = _visit(S, r, i, pages, -ALL, ALL)
    hold(S, r, last, 1)
    hold(S, r, q.cached_segment, -1)
    q.cached = pages
    q.cached_segment = last
    q.inserted = max(q.inserted, pages)
