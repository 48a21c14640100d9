"""SGLang's scheduler (0.5.23) on one replica: order of the queue, admission by clients' limits, chunks, retraction.

The rules are those of its ``Scheduler``, ``SchedulePolicy``, ``PrefillAdder``, ``NewTokenRatioTracker`` and
``ScheduleBatch.retract_decode``, with or without its radix cache, and with or without overlap of steps. A test compares
every step with SGLang's own functions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lengthwise.engine._reference_state import RadixSegment, Request, Step
from lengthwise.engine.kernel_layout import CLIP_TOKENS, IN_BATCH_TOKENS, MAX_MATCHED, REFRESH_PASSES, RETRACT_STEPS

INITIAL_RATIO, MIN_RATIO_FACTOR, DECAY_STEPS = 0.7, 0.14, 600


@dataclass
class NewTokenRatio:
    """Share of the running requests' remaining limits for which an admission reserves memory.

    The ratio begins at 0.7 times ``schedule_conservativeness`` (at most 1) and falls with each decode step, in 600
    steps to 0.14 of its first value. A retraction sets it to the share of the remaining requests' limits that these
    have generated or are expected to generate in the next ``RETRACT_STEPS`` steps.
    """

    conservativeness: float = 1.0

    def __post_init__(self) -> None:
        self.initial = min(INITIAL_RATIO * self.conservativeness, 1.0)
        self.least = min(self.initial * MIN_RATIO_FACTOR, 1.0)
        self.decay = (self.initial - self.least) / DECAY_STEPS
        self.now = self.initial

    def after_step(self) -> None:
        """Lower the ratio after a decode step without a retraction."""
        self.now = max(self.now - self.decay, self.least)

    def after_retraction(self, remaining: list[Request]) -> None:
        """Set the ratio by the requests that remain."""
        tokens = sum(q.generated for q in remaining) + RETRACT_STEPS * len(remaining)
        self.now = min(1.0, tokens / (sum(q.rules.max_tokens for q in remaining) + 1))

    def reset(self) -> None:
        """Set the initial ratio, as an idle replica does."""
        self.now = self.initial


def shuffle_key(seed: int, replica: int, number: int, index: int) -> int:
    """Return a request's key in a random order of the queue: a hash of the seed, the replica, the pass and the request.

    All values are below 2^31. The keys of one pass differ. The kernel compiles this function.
    """
    value = 0
    for part in (seed, replica, number, index):
        value ^= part
        for _ in range(2):
            value ^= value >> 16
            value = (value * 0x7FEB352D) & 0xFFFFFFFF
            value ^= value >> 15
    return value >> 1 << 31 | index


@dataclass(frozen=True)
class SglangLimits:
    """Limits of a replica, named as in SGLang; ``chunked_prefill_size`` None computes complete prompts.

    ``max_matched`` and ``in_batch_tokens`` are ``kernel_layout.MAX_MATCHED`` and ``IN_BATCH_TOKENS``.
    """

    page_size: int
    max_running_requests: int
    max_prefill_tokens: int = 16384
    chunked_prefill_size: int | None = 8192
    enable_mixed_chunk: bool = False
    schedule_conservativeness: float = 1.0
    clip_tokens: int = CLIP_TOKENS
    schedule_policy: str = "fcfs"
    refreshes_prefixes: bool = False
    max_matched: int = MAX_MATCHED
    in_batch_tokens: int = IN_BATCH_TOKENS


class _PrefillPass:
    """The budgets of one pass over the queue (``PrefillAdder`` and ``PrefillBudget``)."""

    def __init__(self, replica: SglangReplica, decodes: int) -> None:
        limits, self.replica = replica.limits, replica
        self.size, self.clip, self.ratio = limits.page_size, limits.clip_tokens, replica.ratio.now
        self.left_input = limits.max_prefill_tokens - decodes
        chunk = limits.chunked_prefill_size
        self.left_chunk = None if chunk is None else chunk - decodes
        self.reserved: float = decodes
        self.allocated = decodes
        total = 0.0
        for q in replica.running:  # One after the other: ``sum`` rounds differently from Python 3.12 on.
            total += self._reserve_of(q)
        self.reserved += total
        self.states: list[tuple[float, int]] | None = None
        self.prompts: list[tuple[Request, int]] = []

    def _reserve_of(self, q: Request) -> float:
        return min(q.rules.max_tokens - q.generated, self.clip) * (1.0 if q.rules.ignore_eos else self.ratio)

    @property
    def left_total(self) -> float:
        """Return the free tokens beyond all reservations."""
        return self.replica.free_tokens - self.reserved

    @property
    def has_memory(self) -> bool:
        """Return whether tokens are free beyond the reservations, and beyond what this pass allocates."""
        return self.left_total > 0 and self.replica.free_tokens - self.allocated > 0

    @property
    def has_tokens(self) -> bool:
        """Return whether the step may have more prompt tokens."""
        return self.left_input > 0 and (self.left_chunk is None or self.left_chunk > 0)

    def add(self, q: Request, tokens: int, new_tokens: int) -> None:
        """Put ``tokens`` of a prompt into the step, and reserve ``new_tokens`` for its output."""
        pages = -(-tokens // self.size) * self.size
        self.prompts.append((q, tokens))
        self.allocated += pages + self.size
        self.reserved += pages + self.size + new_tokens
        self.left_input -= pages
        if self.left_chunk is not None:
            self.left_chunk -= pages

    def _left(self, q: Request) -> int:
        return q.context - q.rules.kv_tokens

    def resume(self, q: Request) -> bool:
        """Add the next chunk of a prompt, even without memory to reserve. Return whether it completes the prompt.

        Where SGLang would run out of memory, the chunk is cut to the free tokens.
        """
        assert self.left_chunk is not None
        left, tokens = self._left(q), min(self.left_chunk, int(self.left_total))
        tokens = tokens if tokens > 0 else self.left_chunk
        tokens = min(left, tokens, self.replica.free_tokens + -q.rules.kv_tokens % self.size)
        if tokens > 0:
            self.add(q, tokens, min(q.rules.max_tokens, self.clip) if tokens == left else 0)
        return tokens == left

    def admit(self, q: Request) -> bool | None:
        """Add a waiting request or its first chunk. Return None if memory is short, False if another budget is.

        Only the tokens after its cached prefix, the first ``rules.kv_tokens`` tokens, count. With memory reserved by
        predicted length, that reservation is the other budget, and replaces SGLang's reservation by limits.
        """
        if admissible := self.replica.admissible:
            chunked = [self.replica.chunked] if self.replica.chunked else []
            residents = dict.fromkeys([*self.replica.running, *chunked, *(one for one, _ in self.prompts)])
            if not admissible([q], list(residents)):
                return False
        elif q.rules.ignore_eos and not self.replica.nodes_of:
            return self._admit_exact(q)
        new_tokens, left = min(max(q.rules.max_tokens - q.generated, 0), self.clip), self._left(q)
        if left + new_tokens + self.size >= self.left_total:
            return None
        pages = -(-left // self.size) * self.size
        if self.left_chunk is None:
            if self.prompts and pages >= self.left_input:
                return False
        elif pages > self.left_chunk:
            tokens = self.left_chunk // self.size * self.size
            if tokens > 0:
                self.add(q, tokens, 0)
            return tokens > 0
        self.add(q, left, min(q.rules.max_tokens, self.clip))
        return True

    def _admit_exact(self, q: Request) -> bool | None:
        """Admit a request of known length if memory suffices at the end of each request, the shortest first."""
        paged = -(-q.context // self.size) * self.size + self.size
        left = self.replica.free_tokens - self.allocated
        if paged > min(left, self.left_total):
            return None
        if self.states is None:
            known = [q, *self.replica.running, *(one for one, _ in self.prompts)]
            self.states = sorted(filter(None, map(self._state_of, known)), key=lambda state: state[0])
        elif (state := self._state_of(q)) is not None:
            longer = (i for i, other in enumerate(self.states) if state[0] <= other[0])
            self.states.insert(next(longer, max(len(self.states) - 1, 0)), state)
        freed = 0
        for i, (tokens, occupied) in enumerate(self.states):
            count = len(self.states) - i
            if left - paged + freed - tokens * count <= count:
                return None
            freed += occupied
        complete = self.left_chunk is None or q.context <= self.left_chunk
        if not complete and self.left_chunk is not None and (self.left_chunk <= 0 or self.replica.chunked is not None):
            return False  # A second prompt in part would take the place of the first.
        self.add(
            q, q.context if complete else self.left_chunk or 0, min(q.rules.max_tokens, self.clip) if complete else 0
        )
        return True

    def _state_of(self, q: Request) -> tuple[float, int] | None:
        tokens = q.rules.max_tokens * (1.0 if q.rules.ignore_eos else self.ratio) - q.generated
        return (tokens, q.context) if tokens > 0 else None


class SglangReplica:
    """A replica that forms steps as SGLang does. ``form`` forms a step, and ``end`` notes that it has ended.

    With overlap (SGLang's default), the caller forms the next step before the step in flight ends. The next step
    therefore also decodes sequences that the step in flight ends, except those that end by ``max_tokens``; these
    decodes are lost, and so is the last token of a retracted request. The caller sets ``rules.kv_tokens`` of an ended
    request to 0.
    """

    def __init__(
        self,
        limits: SglangLimits,
        pool: Any,
        waiting: list[Request],
        update_keys: Callable[[], None],
        preempt: Callable[[Step, Request], None],
        admissible: Callable[[list[Request], list[Request]], int] | None = None,
        *,
        nodes_of: Callable[[Request], list[int]] | None = None,
        shuffle_key: Callable[[int, Request], int] = lambda _number, q: q.index,
    ) -> None:
        """``update_keys`` renews the keys of ``waiting``. ``preempt`` frees a request's blocks, and queues it again.

        ``admissible`` returns how many of the first waiting requests may join the residents, if memory is reserved by
        predicted length. With a radix cache, ``pool`` is a ``RadixCache``, and ``nodes_of`` returns the nodes of a
        request's full pages. ``shuffle_key`` gives the policy "random" its keys in a pass, by the pass's number.
        """
        self.limits, self.ratio = limits, NewTokenRatio(limits.schedule_conservativeness)
        self.pool, self.waiting = pool, waiting  # in the order of entry; the smallest ``wait.key`` is admitted first
        self._update_keys, self._preempt, self.admissible = update_keys, preempt, admissible
        self.nodes_of, self._shuffle_key = nodes_of, shuffle_key
        # With overlap: inserts what ``chunked`` has computed into the tree, before the next step is formed.
        self.cache_chunk: Callable[[Request], None] | None = None
        self._passes = self._refreshes = 0
        self.running: list[Request] = []  # sequences that decode, in the order in which their prefills have ended
        self.is_full = False  # an admission has failed since a request last left ``running``: no other is tried
        self.chunked: Request | None = None  # its prompt is half-computed
        self._last: Step | None = None
        self._pending: Step | None = None  # formed, and not ended

    @property
    def free_tokens(self) -> int:
        """Return the tokens of the free pages."""
        free: int = self.pool.free
        return free * self.limits.page_size

    @property
    def free_rows(self) -> int:
        """Return how many more requests may have memory, up to ``max_running_requests``."""
        pending = self._pending
        members = [*(q for q, _ in pending.prompts), *pending.decodes] if pending else []
        chunked = [] if self.chunked is None else [self.chunked]
        return self.limits.max_running_requests - len(
            {q for q in (*self.running, *chunked, *members) if q.rules.kv_tokens}
        )

    def form(self, step: Step) -> None:
        """Fill the next step; it stays empty if the replica is idle."""
        self._merge()
        self._prefill(step)
        if not step.prompts and self.running:
            self._decode(step)
        is_idle = not step.prompts and not step.decodes
        if is_idle and self._pending is None:
            self.ratio.reset()
        self._last, self._pending = step, None if is_idle else step

    def end(self, step: Step) -> None:
        """Note that a step has ended."""
        if self._pending is step:
            self._pending = None

    def _resize(self, q: Request, kv_tokens: int) -> None:
        pages = -(-kv_tokens // self.limits.page_size)
        self.pool.take(pages - q.blocks)
        q.blocks, q.rules.kv_tokens = pages, kv_tokens

    def _merge(self) -> None:
        """Move the prompts of the last step to ``running``, and remove sequences that have ended."""
        last, self._last = self._last, None
        if last is not None and last.prompts:
            if self.cache_chunk and self.chunked and self.chunked in [q for q, _ in last.prompts]:
                self.cache_chunk(self.chunked)
            members = [*(q for q, _ in last.prompts), *(last.decodes)]
            merged = [q for q in members if q.rules.kv_tokens and q is not self.chunked]
            if len(merged) < len(members):
                self.is_full = False
            if merged and not self.running:
                self.is_full = False  # SGLang takes the new batch with a flag of its own.
            self.running += merged
        left = [q for q in self.running if q.rules.kv_tokens]
        if len(left) < len(self.running):
            self.is_full = False
        self.running = left
        if self.chunked is not None and not self.chunked.rules.kv_tokens:
            self.chunked = None

    def _prefill(self, step: Step) -> None:
        """Fill a step with prompts, and in a mixed one with decodes, if a prompt can run."""
        limits = self.limits
        if not self._tries_queue():
            return
        queue = self._order()
        taken, rows = _PrefillPass(self, len(self.running) if limits.enable_mixed_chunk else 0), self.free_rows
        if self.chunked is not None and taken.resume(self.chunked):
            self.chunked = None
        if self.chunked is None or taken.prompts:
            self._admit(taken, queue, rows + len(taken.prompts))
        step.prompts = taken.prompts
        # With larger pages, SGLang makes room for a page more for each request.
        size = limits.page_size
        extra = len(step.prompts) if size > 1 else 0
        self._make_room(-(-sum(tokens for _, tokens in step.prompts) // size) + extra)
        for q, tokens in step.prompts:
            self._resize(q, q.rules.kv_tokens + tokens)
        if step.prompts and limits.enable_mixed_chunk and self.running:
            self._leave_out_ending()
            if self.running and self._fits(self.running):
                self._extend(self.running)
                step.decodes, self.running = self.running, []

    def _leave_out_ending(self) -> bool:
        """Remove from ``running`` sequences that the pending step ends by max_tokens. Return whether there were any."""
        pending = self._pending
        if pending is None:
            return False
        members = {*(q for q, _ in pending.prompts), *pending.decodes}
        left = [q for q in self.running if q not in members or q.generated + 1 < q.rules.max_tokens]
        is_any = len(left) < len(self.running)
        self.running, self.is_full = left, self.is_full and not is_any
        return is_any

    def _tries_queue(self) -> bool:
        """Return whether a prompt may run. A half-computed prompt always continues."""
        self.is_full = self.is_full and bool(self.running)
        if self.chunked is not None:
            return True
        if self.is_full or not self.waiting:
            return False
        self.is_full = min(self.limits.max_running_requests - len(self.running), self.free_rows) <= 0
        return not self.is_full

    def _order(self) -> list[Request]:
        """Return the waiting requests in the order of the policy. Policies other than fcfs sort the queue itself."""
        policy, waiting = self.limits.schedule_policy, self.waiting
        if policy == "fcfs":
            self._update_keys()
        self._passes += 1
        if policy == "lpm" and len(waiting) <= self.limits.max_matched:
            keys = self._prefix_keys()
            waiting.sort(key=lambda q: keys[q])
            return waiting[:]
        if policy == "dfs-weight":
            paths = self._tree_paths()
            waiting.sort(key=lambda q: paths[q])
            return waiting[:]
        if policy == "lof":
            waiting.sort(key=lambda q: -q.rules.max_tokens)
        elif policy == "random":
            waiting.sort(key=lambda q: self._shuffle_key(self._passes, q))
        order = sorted(waiting, key=lambda q: q.wait.key) if policy == "fcfs" else waiting[:]
        self._refresh_prefixes(order)
        return order

    def _match(self, q: Request, tokens: int) -> Any:
        """Find the pages of the request's first ``tokens`` tokens in the tree. They count as used now."""
        assert self.nodes_of
        return self.pool.find(self.nodes_of(q)[: tokens // self.limits.page_size])

    def _refresh_prefixes(self, order: list[Request]) -> None:
        """In every 32nd pass count the prefixes of waiting requests as used, the first one's last (policy "lru")."""
        if not (self.limits.refreshes_prefixes and order):
            return
        if self._refreshes % REFRESH_PASSES == 0:
            for q in reversed(order[: self.limits.max_matched]):
                self._match(q, q.context)
        self._refreshes += 1

    def _prefix_keys(self) -> dict[Request, float]:
        """Return keys by which the request with the longest cached prefix is first (policy "lpm").

        Of waiting requests that begin alike, and of whose beginning little is cached, only one is tried early: the
        others are last, so that they find what that one computes.
        """
        assert self.nodes_of
        least, size, keys, seen = self.limits.in_batch_tokens, self.limits.page_size, dict[Request, float](), set[int]()
        for q in self.waiting:
            tokens = len(self._match(q, q.context)) * size
            keys[q] = -min(tokens, q.context - 1)
            if tokens <= least and q.context // size * size >= least:
                begin = self.nodes_of(q)[-(-least // size) - 1]
                if begin in seen:
                    keys[q] = math.inf
                seen.add(begin)
        return keys

    def _tree_paths(self) -> dict[Request, list[tuple[float, int]]]:
        """Return keys that sort requests as a depth-first search of the tree finds their prefixes ("dfs-weight").

        Of the children of a segment, the one with the most waiting requests is first, of equal ones the oldest. The
        requests whose prefix ends with the segment follow its children.
        """
        last = {q: self._match(q, q.context).last for q in self.waiting}  # A look-up may split what others found.
        paths = {q: segment.path()[::-1] for q, segment in last.items()}
        weight = Counter[RadixSegment](segment for path in paths.values() for segment in path)

        def place(segment: RadixSegment) -> tuple[float, int]:
            assert segment.parent
            return -weight[segment], list(segment.parent.children).index(segment.pages[0])

        return {q: [*map(place, path), (math.inf, 0)] for q, path in paths.items()}

    def _admit(self, taken: _PrefillPass, queue: list[Request], rows: int) -> None:
        """Admit requests of the queue in order, until one cannot be admitted. The step may have ``rows`` prompts."""
        most = min(self.limits.max_running_requests - len(self.running), rows)
        for q in queue:
            if taken.has_memory and not taken.has_tokens:
                return
            self.is_full = self.is_full or len(taken.prompts) >= most
            if self.is_full:
                return
            admitted = self._admit_with_prefix(taken, q) if self.nodes_of else taken.admit(q)
            if admitted:
                self.waiting.remove(q)
                if q.rules.kv_tokens + taken.prompts[-1][1] < q.context:
                    self.chunked = q
            if admitted is None or (admitted and not taken.has_memory):
                self.is_full = bool(taken.prompts or self.running)
                return
            if not admitted or not taken.has_tokens:
                return

    def _admit_with_prefix(self, taken: _PrefillPass, q: Request) -> bool | None:
        """Admit a waiting request with its cached prefix, which leaves at least its last token to compute."""
        found = self._match(q, q.context - 1)
        self.pool.hold(found)
        q.rules.kv_tokens = len(found) * self.limits.page_size
        admitted = taken.admit(q)
        if admitted:
            q.cached, q.blocks, q.prefilled = found, len(found), q.rules.kv_tokens
        else:
            q.rules.kv_tokens = 0
            self.pool.release(found)
        return admitted

    def _make_room(self, pages: int) -> None:
        """Evict cached pages until ``pages`` are empty, if there are enough that no request holds."""
        if self.nodes_of:
            self.pool.make_room(pages)

    def _fits(self, sequences: list[Request]) -> bool:
        """Return whether each of the sequences can have one more token."""
        pages = sum(q.rules.kv_tokens % self.limits.page_size == 0 for q in sequences)
        self._make_room(pages)
        free: int = self.pool.free
        return pages <= free

    def _extend(self, sequences: list[Request]) -> None:
        self._make_room(len(sequences))
        for q in sequences:
            self._resize(q, q.rules.kv_tokens + 1)

    def _decode(self, step: Step) -> None:
        some_end = self._leave_out_ending()
        if not self.running or (some_end and not self._fits(self.running)):
            return
        if self._fits(self.running):
            self.ratio.after_step()
        else:
            self._retract(step)
        step.decodes = list(self.running)
        self._extend(step.decodes)

    def _retract(self, step: Step) -> None:
        """Retract at least one request: those with the fewest output tokens, and of them the longest prompts, first.

        The last one fits alone, by its limit, once the half-computed prompt is retracted, too.
        """
        order = sorted(self.running, key=lambda q: (q.generated, -q.prompt), reverse=True)
        retracted = False
        while len(order) > 1 and (not retracted or not self._fits(order)):
            self._preempt(step, order.pop())
            self._make_room(-(-RETRACT_STEPS * len(order) // self.limits.page_size))
            retracted = True
        if not self._fits(order) and self.chunked is not None:
            self._preempt(step, self.chunked)
            self.chunked = None
        self.running, self.is_full = order, False
        self.ratio.after_retraction(order)
