"""State of the reference engine: requests, steps, queues, prefix caches, CPU memory and storage, replicas."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np

from lengthwise.engine.kernel_layout import SERIES_COLUMNS, gap_bin
from lengthwise.engine.setup import Params, Setup
from lengthwise.engine.step_time import CostReader, Drafts, StepCost
from lengthwise.policy.reservation import MemoryGate
from lengthwise.schema.deployment import KvGroups


@dataclass
class Wait:
    """Position of a request in a queue, and the time that it has waited."""

    since_s: float | None  # start of the current wait; None while the request is resident
    before_s: float = 0.0  # seconds of the earlier waits
    key: float = 0.0  # from the last ranking; the smallest key is admitted first
    bin_batch: int = 0  # number of the batch that its bin became; 0 without bins
    last_preemption: int = 0  # number of its last preemption among all preemptions; 0: none

    def total_s(self, now_s: float) -> float:
        return self.before_s + (0.0 if self.since_s is None else now_s - self.since_s)

    def overdue_at_s(self, max_wait_s: float) -> float:
        """Return when the waits sum up to ``max_wait_s``. For a resident, -infinity if they already do, or infinity."""
        if self.since_s is None:
            return -math.inf if self.before_s >= max_wait_s else math.inf
        return self.since_s + (max_wait_s - self.before_s)

    def end(self, now_s: float) -> None:
        self.before_s, self.since_s = self.total_s(now_s), None


@dataclass(frozen=True)
class Admission:
    """The last admission of a request: its number among all admissions, and the tokens generated until then."""

    number: int = -1
    generated: int = 0


@dataclass(eq=False)
class CachedBlock:
    """A full block whose content can be found by its node. ``holders`` is the number of requests that use the block."""

    node: int
    holders: int = 1


class BlockPool:
    """The KV blocks of a replica, with vLLM's prefix cache (vLLM 0.32, v1/core/block_pool.py).

    A free block with content is evicted only when no empty block is free, the least recently used first. Blocks of one
    request are freed last block first, so that a prefix loses its end first.
    """

    # Events at which a request's full blocks get their contents: a step that computes them is formed, or the request
    # frees them (blocks of its output, which no request looks up earlier).
    caches_when = frozenset({"scheduled", "preempted", "ended"})

    def __init__(self, blocks: int) -> None:
        self.free = blocks  # that no request uses, with and without content
        self.copies: dict[int, list[CachedBlock]] = {}  # cached blocks by node, the oldest, which a lookup finds, first
        self.evictable: dict[CachedBlock, None] = {}  # cached blocks that no request uses, least recently used first

    def take(self, blocks: int) -> None:
        """Take blocks without content."""
        self.free -= blocks
        while len(self.evictable) > self.free:
            block = next(iter(self.evictable))
            del self.evictable[block]
            self.copies[block.node].remove(block)
            if not self.copies[block.node]:
                del self.copies[block.node]

    def find(self, nodes: list[int]) -> list[CachedBlock]:
        """Return the cached blocks of the nodes from the first on, up to the first node that is not cached."""
        return [self.copies[node][0] for node in takewhile(self.copies.__contains__, nodes)]

    def count(self, nodes: list[int]) -> int:
        """Return how many of the nodes, from the first on, are cached."""
        return len(self.find(nodes))

    def in_use(self, blocks: list[CachedBlock], requests: int = 1) -> int:
        """Return how many of the blocks at least ``requests`` requests use."""
        return sum(block.holders >= requests for block in blocks)

    def hold(self, found: list[CachedBlock]) -> None:
        """Count one more request that uses the cached blocks."""
        for block in found:
            if block.holders == 0:
                del self.evictable[block]
                self.free -= 1
            block.holders += 1

    def cache(
        self, cached: list[CachedBlock], nodes: list[int], _prompt_blocks: int, _priority: int
    ) -> list[CachedBlock]:
        """Give a request's first blocks the contents ``nodes``. Return them; the first are ``cached`` already."""
        added = [CachedBlock(node) for node in nodes[len(cached) :]]
        for block in added:
            self.copies.setdefault(block.node, []).append(block)
        return cached + added

    def release(self, cached: list[CachedBlock], others: int = 0) -> None:
        """Free a request's cached blocks, given in the order of their tokens, and ``others`` blocks without content."""
        self.free += others
        for block in reversed(cached):
            block.holders -= 1
            if block.holders == 0:
                self.evictable[block] = None
                self.free += 1


@dataclass
class GroupPrefix:
    """The first ``length`` blocks of a request in every group: by group the cached ones, None for any other.

    ``boundaries`` are numbers of blocks after which a later request can continue: the full blocks before the prompt's
    last token, and the prefix of full attention if it was longer than that of the windows.
    """

    tables: list[list[CachedBlock | None]]
    length: int
    boundaries: tuple[int, ...] = ()

    def __len__(self) -> int:
        return sum(block is not None for table in self.tables for block in table)

    def skipped(self, local: int) -> int:
        """Return how many first blocks the ``local`` groups lack."""
        return sum(block is None for block in self.tables[0]) if local else 0


class GroupPool:
    """The KV blocks of a replica whose layers form KV cache groups (vLLM 0.32, v1/core/kv_cache_coordinator.py).

    Every group has blocks and contents of its own; groups of windows or chunks come first, as their layers do in the
    models. A prefix is found if all groups have it: full attention every block, windows those of the last window, and
    chunks those of the last chunk. Windows give contents only to the blocks that one of ``boundaries`` needs
    (prefix_cache_retention_interval 0). States (``KvGroups.aligned``) are as windows of two tokens, of which a step
    writes only the last block. ``fresh`` has the states that no request can continue in the step being formed: those
    that the step writes, and those from which it computes the last tokens of a prompt.
    """

    caches_when = BlockPool.caches_when

    def __init__(self, blocks: int, groups: KvGroups) -> None:
        self.pool, self.groups, self.number = BlockPool(blocks), groups, groups.local + groups.full
        self.take = self.pool.take
        self.fresh: set[int] = set()

    @property
    def free(self) -> int:
        """Return the number of blocks that no request uses, with and without content."""
        return self.pool.free

    def _has(self, node: int, groups: range) -> bool:
        return all(node * self.number + g in self.pool.copies for g in groups)

    def find(self, nodes: list[int]) -> GroupPrefix:
        """Return the longest prefix of the nodes that all groups have."""
        local, every = self.groups.local, range(self.number)
        full = longest = len(list(takewhile(lambda node: self._has(node, every[local:]), nodes)))
        length, first = self._find_local(nodes[:full])
        while length < full and not self.groups.full:  # Without full attention, until the length stays.
            full = length
            length, first = self._find_local(nodes[:full])
        tables: list[list[CachedBlock | None]] = []
        for g in every:
            start = first if g < local else 0
            found = [self.pool.copies[node * self.number + g][0] for node in nodes[start:length]]
            tables.append([*[None] * start, *found])
        return GroupPrefix(tables, length, (longest,) if self.groups.full and longest > length else ())

    def _find_local(self, nodes: list[int]) -> tuple[int, int]:
        """Return (how many of the nodes local groups allow, how many of these lie before the window)."""
        groups, size = self.groups, self.groups.block_size
        if not groups.local:
            return len(nodes), 0
        has = [self._has(node, range(groups.local)) for node in nodes]
        if groups.chunked:
            first = len(nodes) * size // groups.local_tokens * groups.local_tokens // size
            return first + len(list(takewhile(bool, has[first:]))), first
        run = 0
        for k in reversed(range(len(nodes))):
            run = run + 1 if has[k] else 0
            if has[k] and run >= groups.window_blocks:
                return k + run, k
        return run, 0

    def count(self, nodes: list[int]) -> int:
        """Return how many of the nodes, from the first on, are found."""
        return self.find(nodes).length

    def must_wait(self, found: GroupPrefix, nodes: list[int]) -> bool:
        """Return whether the state after a found prefix cannot be continued in the step being formed."""
        return found.length > 0 and nodes[found.length - 1] in self.fresh

    def in_use(self, prefix: GroupPrefix, requests: int = 1) -> int:
        """Return how many blocks of the prefix at least ``requests`` requests use."""
        return self.pool.in_use(self._blocks(prefix), requests)

    def hold(self, found: GroupPrefix) -> None:
        """Count one more request that uses the prefix."""
        self.pool.hold(self._blocks(found))

    def _blocks(self, prefix: GroupPrefix) -> list[CachedBlock]:
        return [block for table in prefix.tables for block in table if block]

    def cache(self, cached: GroupPrefix, nodes: list[int], _prompt_blocks: int, _priority: int) -> GroupPrefix:
        """Give a request's first blocks the contents ``nodes``, in windows only those that a boundary needs."""
        groups = self.groups
        for k in range(cached.length, len(nodes)):
            is_needed = groups.chunked or any(end - groups.window_blocks <= k < end for end in cached.boundaries)
            if groups.aligned:
                is_needed = is_needed and k == len(nodes) - 1
                self.fresh.update(nodes[k : k + is_needed])
            for g, table in enumerate(cached.tables):
                block = CachedBlock(nodes[k] * self.number + g) if g >= groups.local or is_needed else None
                if block:
                    self.pool.copies.setdefault(block.node, []).append(block)
                table.append(block)
        cached.length = max(cached.length, len(nodes))
        if groups.aligned and len(nodes) == cached.boundaries[0] and cached.tables[0][len(nodes) - 1]:
            self.fresh.add(nodes[-1])
        return cached

    def skip(self, cached: GroupPrefix, first: int, end: int) -> None:
        """Free a request's blocks from ``first`` up to ``end`` in the local groups, before their windows."""
        freed = 1 if self.groups.aligned else end - first
        for table in cached.tables[: self.groups.local]:
            found = [block for block in table[first:end] if block]
            self.pool.release(found, freed - len(found))
            table[first:end] = [None] * len(table[first:end])

    def release(self, cached: GroupPrefix, others: int = 0) -> None:
        """Free a request's blocks, of which ``others`` have no content."""
        self.pool.free += others
        for table in cached.tables:
            self.pool.release([block for block in table if block])


@dataclass(eq=False)
class RadixSegment:
    """A segment of SGLang's radix tree. ``pages`` are the nodes of its consecutive pages.

    ``holders`` is the number of requests that use the segment, ``hits`` of those that inserted it. ``used`` and
    ``created`` are times of the tree's own clock.
    """

    pages: list[int]
    parent: RadixSegment | None
    priority: int
    used: int
    holders: int = 0
    hits: int = 0
    created: int = 0
    children: dict[int, RadixSegment] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.created = self.used

    def path(self) -> list[RadixSegment]:
        """Return the segments from this one up to the root, without the root."""
        return [self, *self.parent.path()] if self.parent else []


@dataclass
class RadixPrefix:
    """The first ``length`` pages of a request, which end with ``last`` in the tree.

    The request itself has inserted its first ``inserted`` pages since its admission.
    """

    last: RadixSegment
    length: int = 0
    inserted: int = 0

    def __len__(self) -> int:
        return self.length


RADIX_ORDERS: dict[str, Callable[[RadixSegment], tuple[int, int]]] = {
    "lru": lambda segment: (0, segment.used),
    "lfu": lambda segment: (segment.hits, segment.used),
    "slru": lambda segment: (int(segment.hits >= 2), segment.used),
    "priority": lambda segment: (segment.priority, segment.used),
    "fifo": lambda segment: (0, segment.created),
    "mru": lambda segment: (0, -segment.used),
    "filo": lambda segment: (0, -segment.created),
}
"""The order in which leaves are evicted, by eviction policy. The smallest value is evicted first."""


class RadixCache:
    """The KV blocks (pages) of a replica, with SGLang's prefix cache (SGLang 0.5.23, mem_cache/radix_cache.py).

    The tree has each page once. Pages that a request has computed enter it when a step with a part of the request's
    prompt ends, and when the request ends. Preemption inserts nothing, so the decoded tokens of a preempted request do
    not enter. Only leaves that no request uses are evicted, a complete segment at a time.
    """

    caches_when = frozenset({"computed", "ended"})  # events at which a request's full pages are inserted

    def __init__(self, pages: int, eviction_policy: str) -> None:
        self.free = pages  # that no request uses, in the tree or not
        self.evictable = 0  # pages of the tree that no request uses
        self.clock = 0  # number of uses so far, the time of ``RadixSegment.used``
        self.root = RadixSegment([], None, 0, 0)
        self._order = RADIX_ORDERS[eviction_policy]

    def segments(self) -> list[RadixSegment]:
        """Return the segments of the tree, the root first."""
        found = [self.root]
        for segment in found:
            found += segment.children.values()
        return found

    def take(self, pages: int) -> None:
        """Take pages without content."""
        self.free -= pages
        self.make_room(0)

    def make_room(self, pages: int) -> None:
        """Evict leaves until ``pages`` pages are empty, or every page is empty or has a holder."""
        while self.evictable > max(0, self.free - pages):
            leaves = [one for one in self.segments() if one.parent and not one.children and one.holders == 0]
            leaf = min(leaves, key=self._order)
            assert leaf.parent
            del leaf.parent.children[leaf.pages[0]]
            self.evictable -= len(leaf.pages)

    def count(self, nodes: list[int]) -> int:
        """Return how many of the nodes, from the first on, are in the tree."""
        known = {page for segment in self.segments() for page in segment.pages}
        return next((count for count, node in enumerate(nodes) if node not in known), len(nodes))

    def find(self, nodes: list[int]) -> RadixPrefix:
        """Return the longest prefix of the nodes that is in the tree, and mark it as used now."""
        if not nodes:
            return RadixPrefix(self.root)
        path = self._visit(nodes)
        return RadixPrefix(path[-1] if path else self.root, sum(len(segment.pages) for segment in path))

    def in_use(self, prefix: RadixPrefix, requests: int = 1) -> int:
        """Return how many pages of the prefix at least ``requests`` requests use."""
        return sum(len(segment.pages) for segment in prefix.last.path() if segment.holders >= requests)

    def hold(self, found: RadixPrefix) -> None:
        """Count one more request that uses the prefix."""
        for segment in found.last.path():
            if segment.holders == 0:
                self.evictable -= len(segment.pages)
                self.free -= len(segment.pages)
            segment.holders += 1

    def cache(self, cached: RadixPrefix, nodes: list[int], prompt_pages: int, priority: int) -> RadixPrefix:
        """Insert a request's first pages, and return them as a prefix of the tree. The first are ``cached`` already.

        If another request has inserted the same pages in the meantime, this request's copies are freed. A segment ends
        at the end of the prompt, so that the output can be evicted without the prompt.
        """
        known = self._insert(nodes, priority, cached.inserted)
        self.evictable += len(nodes) - known
        self.free += len(nodes) - len(cached)
        if 0 < prompt_pages < len(nodes):
            self._insert(nodes[:prompt_pages], priority + 1, prompt_pages)
        found = self.find(nodes)
        found.inserted = max(cached.inserted, len(nodes))
        self.hold(found)
        self.release(cached)
        return found

    def release(self, cached: RadixPrefix, others: int = 0) -> None:
        """Free a request's cached pages, and ``others`` pages that are not in the tree."""
        self.free += others
        for segment in cached.last.path():
            segment.holders -= 1
            if segment.holders == 0:
                self.evictable += len(segment.pages)
                self.free += len(segment.pages)

    def _now(self) -> int:
        self.clock += 1
        return self.clock

    def _visit(self, nodes: list[int]) -> list[RadixSegment]:
        """Return the segments of the nodes' longest prefix in the tree. Split the last one at the end of the prefix."""
        now, segment, at, path = self._now(), self.root, 0, []
        while at < len(nodes) and nodes[at] in segment.children:
            segment = segment.children[nodes[at]]
            segment.used = now
            same = sum(a == b for a, b in zip(segment.pages, nodes[at:], strict=False))  # A page is in one chain only.
            if same < len(segment.pages):
                segment = self._split(segment, same)
            path.append(segment)
            at += same
        return path

    def _split(self, child: RadixSegment, at: int) -> RadixSegment:
        assert child.parent
        upper = RadixSegment(child.pages[:at], child.parent, child.priority, self._now(), child.holders, child.hits)
        child.parent.children[child.pages[0]] = upper
        child.parent, child.pages = upper, child.pages[at:]
        upper.children[child.pages[0]] = child
        return upper

    def _insert(self, nodes: list[int], priority: int, inserted: int) -> int:
        """Insert nodes and return how many of them the tree had before.

        A segment counts a hit if it ends after the ``inserted`` pages that the same request has inserted before.
        """
        path, known = self._visit(nodes), 0
        for segment in path:
            known += len(segment.pages)
            segment.priority = max(segment.priority, priority)
            segment.hits += known > inserted
        if known < len(nodes):
            parent = path[-1] if path else self.root
            parent.children[nodes[known]] = RadixSegment(
                nodes[known:], parent, priority, self._now(), hits=int(len(nodes) > inserted)
            )
        return known


class PrefixIndex:
    """A router's index of the prompts that it sent to a replica: the ``size`` last used nodes, the oldest first.

    The blocks of a prompt count as used from the last to the first, so that a prefix loses its end first.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.nodes: dict[int, None] = {}

    def find(self, nodes: list[int]) -> int:
        """Return how many of the nodes, from the first on, are known."""
        return next((count for count, node in enumerate(nodes) if node not in self.nodes), len(nodes))

    def add(self, nodes: list[int]) -> None:
        """Count a prompt's nodes as used now."""
        for node in reversed(nodes):
            self.nodes.pop(node, None)
            self.nodes[node] = None
        while len(self.nodes) > self.size:
            del self.nodes[next(iter(self.nodes))]


@dataclass
class Chunk:
    """A block in CPU memory or in storage. It can be read from ``ready_s`` on.

    ``loads`` is the number of loads into the GPU pool that read it now. Its other transfers end by ``busy_until_s``.
    """

    ready_s: float
    busy_until_s: float
    loads: int = 0


class ChunkPool:
    """Up to ``size`` chunks by node, the least recently used first."""

    def __init__(self, size: float) -> None:
        self.size = size
        self.chunks: dict[int, Chunk] = {}

    def make_room(self, count: int, now_s: float, offered: Collection[int] = ()) -> bool:
        """Evict chunks so that ``count`` more fit, and return True, or evict none and return False.

        Chunks in transfer and those of the nodes ``offered`` stay.
        """
        short = count - (self.size - len(self.chunks))
        idle = [
            node for node, chunk in self.chunks.items()
            if chunk.loads == 0 and chunk.busy_until_s <= now_s and node not in offered
        ]  # fmt: skip
        if len(idle) < short:
            return False
        for node in idle[: int(max(0, short))]:
            del self.chunks[node]
        return True

    def touch(self, nodes: list[int]) -> None:
        """Mark a prompt's nodes as used now, from the last to the first."""
        for node in reversed(nodes):
            if node in self.chunks:
                self.chunks[node] = self.chunks.pop(node)


@dataclass
class Link:
    """One direction of a link. It moves one job at a time, in ``latency_s`` plus ``block_s`` for each block."""

    block_s: float
    latency_s: float
    until_s: float = 0.0  # end of the last job

    def end_s(self, blocks: int, from_s: float) -> float:
        """Return when a job of ``blocks`` blocks would end, if it may start at ``from_s`` at the earliest."""
        return max(from_s, self.until_s) + (self.latency_s + blocks * self.block_s)

    def move(self, blocks: int, from_s: float) -> float:
        """Start a job, and return when it ends."""
        self.until_s = self.end_s(blocks, from_s)
        return self.until_s


class Tier:
    """CPU memory behind a replica's GPU pool, and storage behind it, by vLLM's rules (0.32, v1/kv_offload).

    A chunk that is stored in CPU memory is then written to the storage. A chunk that only the storage has is read into
    CPU memory before it can be loaded. Several replicas may share the ``storage``, each with its own link to it.
    """

    def __init__(self, params: Params, storage: ChunkPool) -> None:
        self.pool, self.storage = ChunkPool(params.offload_blocks), storage
        self.loads, self.stores = (Link(params.offload_block_s, params.offload_latency_s) for _ in range(2))
        self.reads = Link(params.storage_read_block_s, params.storage_latency_s)
        self.writes = Link(params.storage_write_block_s, params.storage_latency_s)

    def find(self, nodes: list[int]) -> list[Chunk]:
        """Return the chunks of CPU memory of the nodes from the first on, up to the first node that has none."""
        return [self.pool.chunks[node] for node in takewhile(self.pool.chunks.__contains__, nodes)]

    def count(self, nodes: list[int], now_s: float, *, reads: bool) -> int:
        """Return how many of the nodes, from the first on, are in CPU memory or, with ``reads``, in storage."""
        known = (node in self.pool.chunks or (reads and self._is_stored(node, now_s)) for node in nodes)
        return next((count for count, is_known in enumerate(known) if not is_known), len(nodes))

    def load_end_s(self, nodes: list[int], now_s: float) -> float:
        """Return when a load of nodes would end, after the reads and stores that it needs."""
        start_s, read = now_s, 0
        for node in nodes:
            if node in self.pool.chunks:
                start_s = max(start_s, self.pool.chunks[node].ready_s)
            else:
                read += 1
        if read:
            start_s = max(start_s, self.reads.end_s(read, now_s))
        return self.loads.end_s(len(nodes), start_s)

    def read(self, nodes: list[int], now_s: float) -> list[int]:
        """Start to read into CPU memory the nodes that only the storage has. Return their positions.

        The search stops at a node that neither has, or for which CPU memory has no room. To make room, it may evict
        nodes that it found before (vLLM's rule).
        """
        found = []
        for k, node in enumerate(nodes):
            if node not in self.pool.chunks:
                if not self._is_stored(node, now_s) or not self.pool.make_room(1, now_s):
                    break
                self.pool.chunks[node] = Chunk(math.inf, math.inf)
                found.append(k)
        if found:
            end_s = self.reads.move(len(found), now_s)
            read = [nodes[k] for k in found]
            for node in read:
                self.pool.chunks[node] = Chunk(end_s, end_s)
                self.storage.chunks[node].busy_until_s = max(self.storage.chunks[node].busy_until_s, end_s)
            self.storage.touch(read)
        return found

    def store(self, nodes: list[int], now_s: float, computed_s: float) -> bool:
        """Store the nodes that CPU memory lacks, all or none. Their blocks are computed by ``computed_s``.

        Return False if they do not fit.
        """
        new = [node for node in nodes if node not in self.pool.chunks]
        if new:
            if not self.pool.make_room(len(new), now_s, set(nodes)):
                return False
            end_s = self.stores.move(len(new), computed_s)
            self.pool.chunks |= {node: Chunk(end_s, end_s) for node in new}
            self._write(new, now_s, end_s)
        return True

    def _is_stored(self, node: int, now_s: float) -> bool:
        return node in self.storage.chunks and self.storage.chunks[node].ready_s <= now_s

    def _write(self, nodes: list[int], now_s: float, stored_s: float) -> None:
        """From ``stored_s`` on, write the nodes that the storage lacks, if all of them fit.

        Until the write ends, no node is evicted from CPU memory. The first node written counts as the last used.
        """
        missing = [node for node in nodes if node not in self.storage.chunks]
        if missing and self.storage.make_room(len(missing), now_s):
            end_s = self.writes.move(len(missing), stored_s)
            self.storage.chunks |= {node: Chunk(end_s, end_s) for node in reversed(missing)}
            for node in nodes:
                self.pool.chunks[node].busy_until_s = end_s


@dataclass
class Offload:
    """Blocks that a request has stored in and loaded from the ``Tier`` of ``replica``. Block 0 is the request's first.

    ``used`` blocks count as used when the request ends: those that it reads from storage or loads, and those that it
    stores or finds stored.
    """

    replica: int = -1  # number of the replica; -1 at first
    stored: int = 0  # first blocks of the request that it has stored or found stored
    used: set[int] = field(default_factory=set)
    read: set[int] = field(default_factory=set)  # blocks that the request has read from storage
    num_reads: int = 0  # reads from storage that the request has started
    load_range: tuple[int, int] | None = None  # (first block, end) of the request's load; None: it has none
    end_s: float = math.inf  # when the load ends
    is_loaded: bool = False  # the load has ended
    is_cached: bool = False  # other requests can find the loaded blocks in the GPU pool
    tokens: int = 0  # first tokens of the request that are in blocks that may be stored when it ends

    def move_to(self, replica: int) -> None:
        """Forget all blocks if the request is on another replica than before."""
        if self.replica != replica:
            self.replica, self.stored, self.used, self.read = replica, 0, set(), set()


@dataclass
class Transfer:
    """A request's ``blocks`` on prefill replica ``source``, the first of them ``cached``; 0 once fetched or freed."""

    source: Replica
    blocks: int
    cached: Any

    def release(self) -> None:
        if self.blocks:
            self.source.pool.release(self.cached, self.blocks - len(self.cached))
            self.source.pending = True
            self.blocks = 0


@dataclass(eq=False)
class Receiver:
    """A decode replica, and the ``blocks`` that it keeps for a request whose layers are sent during its prefill.

    If the request ends with its first token, ``left`` are its blocks on the prefill replica until the transfer ends.
    """

    replica: Replica
    blocks: int
    left: Transfer | None = None


@dataclass
class Path:
    """The transfers from one replica to another that share links.

    ``targets`` has for each request the service of the path (seconds at full bandwidth) at which its transfer ends.
    """

    served_s: float = 0.0
    rate: float = 0.0
    end_s: float = math.inf
    targets: dict[Request, float] = field(default_factory=dict)


class Fabric:
    """KV transfers that share the bandwidth of both their replicas and of a switch (``links_at_once``), max-min fair.

    Progressive filling (Bertsekas and Gallager, Data Networks, 1992, section 6.5.2): the link with the smallest share
    for each of its transfers gives all of them this share, and the others divide what is left. ``paths`` are keyed by
    the numbers of both replicas.
    """

    def __init__(self, replicas: int, links_at_once: float = math.inf) -> None:
        self.paths: dict[tuple[int, int], Path] = {}
        self.bandwidth, self.now_s = [1.0] * replicas + [links_at_once], 0.0

    @property
    def end_s(self) -> float:
        """Return when the first transfer has sent all its bytes."""
        return min((path.end_s for path in self.paths.values()), default=math.inf)

    def start(self, q: Request, ends: tuple[int, int], link_s: float, now_s: float) -> None:
        """Start a transfer of ``link_s`` seconds at full bandwidth."""
        self._serve(now_s)
        path = self.paths.setdefault(ends, Path())
        path.targets[q] = path.served_s + link_s
        self._share()

    def end(self, now_s: float) -> list[tuple[Request, int]]:
        """Remove the transfers that have sent all their bytes. Return each request with its decode replica."""
        self._serve(now_s)
        done = []
        for (_, to), path in self.paths.items():
            if path.end_s <= now_s:
                path.served_s = min(path.targets.values())
                finished = [q for q, target_s in path.targets.items() if target_s <= path.served_s]
                done += [(q, to) for q in finished]
                path.targets = {q: target_s for q, target_s in path.targets.items() if q not in finished}
        self.paths = {ends: path for ends, path in self.paths.items() if path.targets}
        self._share()
        return done

    def _serve(self, now_s: float) -> None:
        for path in self.paths.values():
            path.served_s += path.rate * (now_s - self.now_s)
        self.now_s = now_s

    def _share(self) -> None:
        left, unknown, switch = list(self.bandwidth), sorted(self.paths), len(self.bandwidth) - 1
        while unknown:
            counts = Counter(link for ends in unknown for link in (*ends, switch) for _ in self.paths[ends].targets)
            full = min(counts, key=lambda link: (left[link] / counts[link], link))
            rate = left[full] / counts[full]
            for ends in [ends for ends in unknown if full in (*ends, switch)]:
                path = self.paths[ends]
                path.rate = rate
                path.end_s = self.now_s + max(0.0, min(path.targets.values()) - path.served_s) / rate
                for link in {*ends, switch} - {full}:
                    left[link] -= rate * len(path.targets)
            unknown = [ends for ends in unknown if full not in (*ends, switch)]


@dataclass
class LastStep:
    """Time of a request's last token, and sequence number of its last return from a step to the idle residents.

    The sequence number breaks ties between victims. With speculation, the request's next step verifies ``drafts``
    proposed tokens and gives it ``emits`` tokens, ``hit`` is whether its last step for which tokens were to be proposed
    accepted any (None: it had none), and ``next_hit`` the same after the next step. The last step accepted ``unhashed``
    tokens, which give no block a content before the next step. Since then a KV transfer may have brought the request
    (``is_received``): its drafter has seen no hidden state, so that it proposes no tokens for the next step.
    """

    token_s: float | None = None
    return_number: int = 0
    drafts: int = 0
    emits: int = 1
    hit: bool | None = None
    next_hit: bool | None = None
    unhashed: int = 0
    is_received: bool = False


@dataclass
class RulesState:
    """Data of a request for the rules of one engine.

    The client's limits are for SGLang and TensorRT-LLM. ``kv_tokens`` (SGLang) are the tokens for which the request has
    KV memory. In every local group of layers (``KvGroups``, vLLM) the request has freed its first ``skipped`` blocks.
    """

    max_tokens: int = 0
    ignore_eos: bool = False
    kv_tokens: int = 0
    skipped: int = 0


@dataclass(eq=False)
class Request:
    """A request that has passed the front end. In the kernel it is a ``kernel_layout.slot_t``.

    ``prefilled`` counts the computed tokens of the context until the request is ``decoding``. The first of its
    ``blocks`` are ``cached``, so that other requests find them: a list of ``CachedBlock`` or a ``RadixPrefix``. The KV
    cache of a ``swapped`` request is in host memory.
    """

    index: int
    arrival_s: float
    prompt: int
    output: int
    wait: Wait
    generated: int = 0
    prefilled: int = 0
    last: LastStep = field(default_factory=LastStep)
    decoding: bool = False
    swapped: bool = False
    blocks: int = 0
    cached: Any = ()
    admission: Admission = Admission()
    transfer: Transfer | None = None
    rules: RulesState = field(default_factory=RulesState)

    @property
    def context(self) -> int:
        """Return how many tokens the KV cache must have before the next token can be computed."""
        return self.prompt + self.generated

    @property
    def computed(self) -> int:
        """Return how many tokens of the context are in a resident's KV cache between two steps."""
        return self.context - 1 if self.decoding else self.prefilled

    def queue_order(self) -> tuple[float, int]:
        """Return the sort key of a waiting request. The smallest is admitted first."""
        return self.wait.key, self.index

    def admission_order(self, *, prompts_last: bool) -> tuple[bool, int]:
        """Return the sort key of a resident under vLLM's rules: by admission; maybe half-computed prompts last."""
        return prompts_last and not self.decoding, self.admission.number


@dataclass(eq=False)
class Step:
    """A step that is being formed or is in flight."""

    start_s: float
    end_s: float = 0.0
    decodes: list[Request] = field(default_factory=list)
    prompts: list[tuple[Request, int]] = field(default_factory=list)  # (request, prompt tokens that the step computes)
    # Residents that decode, but get no token from this step, because it computes prompts (PAUSE_DECODES).
    paused: list[Request] = field(default_factory=list)
    # Requests that are out of the queue while the step is formed, because their chunks are in transfer.
    deferred: list[Request] = field(default_factory=list)
    # Under asynchronous scheduling: requests that get a token when the step ends (by SGLang's rules, only those whose
    # prompt it completes), and those of them for which it is the last token.
    emitting: list[Request] = field(default_factory=list)
    finishing: list[Request] = field(default_factory=list)
    is_served: bool = False  # vLLM's priority has served the residents one by one, because blocks were short
    busy_s: float = 0.0  # seconds by which the step extends the time in which the replica is busy
    swap_s: float = 0.0  # seconds in which the step moves KV cache between GPU and host memory
    preempted_for_blocks: bool = False  # a resident was preempted for lack of blocks
    flags: int = 0  # of the batching policy's plan (``policy.contracts``)
    max_chunk: float = math.inf  # prompt tokens of one request (vLLM's ``long_prefill_token_threshold``)

    @property
    def seqs(self) -> int:
        return len(self.decodes) + len(self.prompts)

    @property
    def prompt_tokens(self) -> int:
        return sum(chunk for _, chunk in self.prompts)

    def tokens_of(self, q: Request) -> int:
        """Return how many tokens of a request the step computes."""
        return sum(d is q for d in self.decodes) + sum(chunk for p, chunk in self.prompts if p is q)

    @property
    def kv_tokens(self) -> int:
        """Return how many KV tokens the decodes read, the one that they compute included."""
        return sum(q.rules.kv_tokens or q.context for q in self.decodes)

    @property
    def decode_tokens(self) -> int:
        """Return the tokens of decodes, with proposed ones that they verify."""
        return sum(1 + q.last.drafts for q in self.decodes)


@dataclass(eq=False)
class Queue:
    """Waiting requests and bins. ``overdue_at_s`` is the earliest time at which a waiting request becomes overdue."""

    waiting: list[Request]
    bins: list[list[Request]]
    overdue_at_s: float = math.inf

    @property
    def first(self) -> Request:
        return min(self.waiting, key=Request.queue_order)

    @property
    def length(self) -> int:
        return len(self.waiting) + sum(map(len, self.bins))


class Replica:
    """A replica, or one of its data-parallel ranks, with requests, steps in the pipeline, and totals."""

    def __init__(self, setup: Setup, number: int, queue: Queue, histogram: Any, storage: ChunkPool) -> None:
        self.s, self.number, self.queue = setup, number, queue  # the setup is that of the replica's side
        blocks, limits = setup.params.total_blocks, setup.deployment.limits
        is_radix = limits.enable_prefix_caching and limits.prefix_cache == "sglang"
        self.pool: Any = RadixCache(blocks, limits.radix_eviction_policy) if is_radix else BlockPool(blocks)
        if (groups := setup.deployment.kv.groups) is not None:
            self.pool = GroupPool(blocks, groups)
        hide_host = setup.params.hide_host
        self.cost = CostReader(setup.deployment.cost, by_stage=setup.first_replica > 0, hide_host=hide_host)
        self.idle: list[Request] = []  # residents in no step; under asynchronous scheduling, also those in flight
        self.flights: list[Step] = []  # steps in the pipeline, the oldest first
        self.incoming: dict[Request, float] = {}  # requests in transfer to this replica, and when each transfer ends
        # Requests with a load from ``tier``, until they join a step after its end. They are not residents.
        self.loading: dict[Request, Offload] = {}
        # Requests that have ended or moved to a decode replica, whose last blocks are not stored yet.
        self.pending_stores: list[Request] = []
        self.tier = Tier(setup.params, storage)
        self.sglang: Any = None  # the ``SglangReplica`` that forms the steps
        self.trtllm: Any = None  # the ``TrtllmReplica`` that forms the steps
        self.overlaps = setup.params.sglang and setup.params.async_scheduling  # forms a step before the last one ends
        share, budget = setup.params.max_recompute_share, setup.params.preemption_budget
        self.gate = MemoryGate(share, budget, setup.needs) if setup.params.reserve else None
        # The marked step, whose end ends a round, and the steps started after it (``Reference._launch``).
        self.round_steps: list[Step] = []
        self.outstanding_tokens = self.steps_since_admit = self.ended_since_admit = 0
        self.preempted_tokens = 0  # computed tokens of requests preempted for lack of memory since the last step
        self.finished = 0  # requests that have ended since the last step
        self.phase_steps = self.phase_rounds = self.steps_since_check = 0
        self.pending = self.check_preemption = False  # ``pending``: the replica is to be scheduled at this instant
        self.is_blocked = False  # forms no step before the oldest in flight ends, because the last one was empty
        self.host_free_s = 0.0  # when the host is free to form another step
        self.wake_s = math.inf  # when the host becomes free for a step that had to wait for it
        self.drafts = 0  # tokens that the drafter has proposed for each sequence of the next step
        self.sends_until_s = self.receives_until_s = 0.0
        self.totals = setup.blank_replicas()[0]  # sums over the replica's steps
        self.series = np.zeros((setup.params.series_bins, len(SERIES_COLUMNS)))
        self.steps: list[tuple[Any, ...]] = []
        self.gaps: list[tuple[int, float]] = []
        self._histogram = histogram
        self.stage_free_s = [0.0] * setup.params.pp  # when each pipeline stage ends its last step
        self.ranks = [self]  # data-parallel ranks of the replica, which have equally many steps in flight

    @property
    def running(self) -> list[Request]:
        """Return the residents and the requests in transfer to this replica, without those of a step being formed."""
        if self.s.params.async_scheduling:
            return list(self.idle)
        in_flight = [q for s in self.flights for q in (*s.decodes, *s.paused, *(p for p, _ in s.prompts))]
        return self.idle + in_flight + list(self.incoming)

    def admissible(self, waiting: list[Request], residents: list[Request]) -> int:
        """Return how many of the first waiting requests fit beside the residents by predicted length."""
        assert self.gate is not None
        size = self.s.params.block_size
        return self.gate.admissible(waiting, residents, self.s.params.total_blocks * size, size)

    def adapt_gate(self, step: Step) -> None:
        """Adapt the margin of reserved memory to a step that has just started."""
        assert self.gate is not None
        row, params, tokens = self.totals, self.s.params, len(step.decodes) + step.prompt_tokens
        row["prompt_tokens"] += step.prompt_tokens
        row["prompt_s"] += step.busy_s * step.prompt_tokens / tokens
        spent_s, idle_s = step.swap_s, 0.0
        if self.preempted_tokens > 0:
            spent_s += self.preempted_tokens * row["prompt_s"] / row["prompt_tokens"]
            self.preempted_tokens = 0
        if self.queue.waiting and len(self.running) < params.max_num_seqs:
            idle_s = step.busy_s * len(step.decodes) / tokens * self.pool.free / params.total_blocks
        if row["busy_s"] > 0:
            turnovers_per_s = row["tokens"] / (params.total_blocks * params.block_size * row["busy_s"])
            self.gate.adapt(spent_s, idle_s, turnovers_per_s, self.finished)
            self.finished = 0

    @property
    def loaded(self) -> list[Request]:
        """Return the requests that have ended their load and wait for a step."""
        return [q for q, offload in self.loading.items() if offload.is_loaded]

    def count_gap(self, gap_s: float, count: int) -> None:
        """Count ``count`` tokens, each ``gap_s`` after the previous token of its request."""
        self._histogram[gap_bin(gap_s)] += count
        self.totals["gaps"] += count
        self.totals["gap_sum_s"] += gap_s * count
        self.totals["gap_max_s"] = max(self.totals["gap_max_s"], gap_s)
        self.gaps.append((count, gap_s))

    def step_cost(self, step: Step, drafts: Drafts | None = None) -> StepCost:
        """Return the cost of a step, which may verify proposed tokens."""
        prompts = [(chunk, q.prefilled) for q, chunk in step.prompts]
        return self.cost.step(len(step.decodes), step.kv_tokens, prompts, step.swap_s, drafts)

    def prepare(self, step: Step, cost: StepCost) -> float:
        """Return when the host has prepared a step, if it does so beside the GPU, else when the step starts."""
        if self.s.params.hide_host:
            self.host_free_s = max(step.start_s, self.host_free_s) + cost.host_s
            return self.host_free_s
        return step.start_s

    def record_step(self, step: Step, cost: StepCost, end_s: float) -> None:
        """Set the end of a step, and record it."""
        row, kv_tokens, step.end_s = self.totals, step.kv_tokens, end_s
        decodes, prompts, prompt_tokens = len(step.decodes), len(step.prompts), step.prompt_tokens
        in_use, waiting = self.s.params.total_blocks - self.pool.free, len(self.queue.waiting) + len(self.loading)
        busy_s = step.busy_s = end_s - max(step.start_s, row["busy_until_s"])
        row["busy_until_s"] = end_s
        row["busy_s"] += busy_s
        row["kv_block_s"] += in_use * busy_s
        row["steps"] += 1
        row["tokens"] += step.decode_tokens + prompt_tokens
        row["pairs"] += kv_tokens + sum(q.last.drafts * q.context for q in step.decodes)
        for q, chunk in step.prompts:
            row["pairs"] += chunk * q.prefilled + chunk * (chunk + 1) / 2
        row["kv_read"] += kv_tokens
        row["swap_s"] += step.swap_s
        for part in (
            "layer_s", "comm_s", "prefill_attention_s", "decode_attention_s", "host_s", "head_s", "embedding_s",
            "send_s",
        ):  # fmt: skip
            row[part] += getattr(cost, part)
        bins = len(self.series)
        while end_s >= bins * row["series_bin_s"]:
            self.series[: bins // 2] = self.series[0::2] + self.series[1::2]
            self.series[bins // 2 :] = 0.0
            row["series_bin_s"] *= 2
        outputs = sum(q.last.emits for q in step.decodes if q.generated < q.output)
        outputs += sum(q.prefilled + chunk >= q.context for q, chunk in step.prompts)
        outputs *= not self.overlaps  # They count at the step's end.
        values = (busy_s, step.seqs * busy_s, waiting * busy_s, in_use * busy_s, prompt_tokens, outputs)
        self.series[int(end_s / row["series_bin_s"])] += values
        if step.seqs:
            self.steps.append((self.number, decodes, prompts, prompt_tokens, in_use, waiting, step.start_s, end_s))
