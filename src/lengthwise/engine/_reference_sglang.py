"""SGLang's scheduler (0.5.23) on one replica: admission by clients' limits, chunked prompts, retraction.

The rules are those of its ``Scheduler``, ``PrefillAdder``, ``NewTokenRatioTracker`` and
``ScheduleBatch.retract_decode`` without a radix cache, with or without overlap of steps. A test compares every step
with SGLang's own functions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

CLIP_TOKENS = 4096
"""Output tokens beyond which a limit reserves no more memory (``CLIP_MAX_NEW_TOKENS``)."""
RETRACT_STEPS = 20
"""Decode steps of every remaining request that the ratio after a retraction covers."""
INITIAL_RATIO, MIN_RATIO_FACTOR, DECAY_STEPS = 0.7, 0.14, 600


@dataclass
class NewTokenRatio:
    """Share of the running requests' remaining limits for which an admission reserves memory.

    It begins at 0.7 times ``schedule_conservativeness`` (at most 1) and falls with each decode step, in 600 steps to
    0.14 of that. A retraction sets it to the share of the limits that the remaining requests are expected to reach.
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

    def after_retraction(self, remaining: list[Sequence]) -> None:
        """Set the ratio by the requests that remain."""
        tokens = sum(q.generated for q in remaining) + RETRACT_STEPS * len(remaining)
        self.now = min(1.0, tokens / (sum(q.max_tokens for q in remaining) + 1))

    def reset(self) -> None:
        """Set the initial ratio, as an idle replica does."""
        self.now = self.initial


@dataclass(eq=False, slots=True)
class Sequence:
    """A request at the replica. ``kv_tokens`` of its prompt and output are in the KV cache."""

    number: int
    prompt_tokens: int
    max_tokens: int
    ignore_eos: bool = False
    generated: int = 0
    kv_tokens: int = 0

    @property
    def context(self) -> int:
        """Return the tokens that a prefill computes: the prompt, and after a retraction the output so far."""
        return self.prompt_tokens + self.generated


@dataclass(frozen=True)
class SglangLimits:
    """Limits of a replica, named as in SGLang; ``chunked_prefill_size`` None computes complete prompts."""

    page_size: int
    pages: int
    max_running_requests: int
    max_prefill_tokens: int = 16384
    chunked_prefill_size: int | None = 8192
    enable_mixed_chunk: bool = False
    schedule_conservativeness: float = 1.0
    schedule_policy: str = "fcfs"  # or "lof"
    clip_tokens: int = CLIP_TOKENS


@dataclass
class SglangStep:
    """A step: prompts with their tokens, decoded sequences, and the sequences that were retracted for memory."""

    prompts: list[tuple[Sequence, int]] = field(default_factory=list)
    decodes: list[Sequence] = field(default_factory=list)
    retracted: list[Sequence] = field(default_factory=list)
    unfinished: Sequence | None = None  # the prompt that the step does not complete


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
        self.reserved += sum([self._reserve_of(q) for q in replica.running])
        self.states: list[tuple[float, int]] | None = None
        self.prompts: list[tuple[Sequence, int]] = []

    def _reserve_of(self, q: Sequence) -> float:
        return min(q.max_tokens - q.generated, self.clip) * (1.0 if q.ignore_eos else self.ratio)

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

    def add(self, q: Sequence, tokens: int, new_tokens: int) -> None:
        """Put ``tokens`` of a prompt into the step, and reserve ``new_tokens`` for its output."""
        pages = -(-tokens // self.size) * self.size
        self.prompts.append((q, tokens))
        self.allocated += pages + self.size
        self.reserved += pages + self.size + new_tokens
        self.left_input -= pages
        if self.left_chunk is not None:
            self.left_chunk -= pages

    def resume(self, q: Sequence) -> bool:
        """Add the next chunk of a prompt, even without memory to reserve. Return whether it completes the prompt."""
        assert self.left_chunk is not None
        left, tokens = q.context - q.kv_tokens, min(self.left_chunk, int(self.left_total))
        tokens = tokens if tokens > 0 else self.left_chunk
        is_last = left <= tokens
        self.add(q, min(left, tokens), min(q.max_tokens, self.clip) if is_last else 0)
        return is_last

    def admit(self, q: Sequence) -> bool | None:
        """Add a waiting request, or its first chunk. Return None if memory is short, False if other budgets are."""
        if q.ignore_eos:
            return self._admit_exact(q)
        new_tokens = min(max(q.max_tokens - q.generated, 0), self.clip)
        if q.context + new_tokens + self.size >= self.left_total:
            return None
        pages = -(-q.context // self.size) * self.size
        if self.left_chunk is None:
            if self.prompts and pages >= self.left_input:
                return False
        elif pages > self.left_chunk:
            tokens = self.left_chunk // self.size * self.size
            if tokens > 0:
                self.add(q, tokens, 0)
            return tokens > 0
        self.add(q, q.context, min(q.max_tokens, self.clip))
        return True

    def _admit_exact(self, q: Sequence) -> bool | None:
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
        whole = self.left_chunk is None or q.context <= self.left_chunk
        if not whole and self.left_chunk is not None and self.left_chunk <= 0:
            return False
        self.add(q, q.context if whole else self.left_chunk or 0, min(q.max_tokens, self.clip) if whole else 0)
        return True

    def _state_of(self, q: Sequence) -> tuple[float, int] | None:
        tokens = q.max_tokens * (1.0 if q.ignore_eos else self.ratio) - q.generated
        return (tokens, q.context) if tokens > 0 else None


class SglangReplica:
    """A replica that forms steps as SGLang does. ``enter`` adds a request, ``form`` a step, and ``end`` ends it.

    With overlap (SGLang's default), ``end`` of a step comes after ``form`` of the next one. That one therefore decodes
    sequences which have just ended, except where ``max_tokens`` ends them; what it computes for those is lost, as is
    the last token of a retracted request.

    Attributes:
        waiting: The queue. A retracted request joins at its end.
        running: Sequences that decode, in the order in which their prefills have ended.
        is_full: Whether an admission failed since the last request left ``running``: the queue is not tried again.
        chunked: The request whose prompt is computed in part.
    """

    def __init__(self, limits: SglangLimits) -> None:
        self.limits, self.ratio = limits, NewTokenRatio(limits.schedule_conservativeness)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.is_full = False
        self.chunked: Sequence | None = None
        self.free_pages, self.free_rows = limits.pages, limits.max_running_requests
        self._last: SglangStep | None = None
        self._pending: SglangStep | None = None  # formed, and not ended

    @property
    def free_tokens(self) -> int:
        """Return the tokens of the free pages."""
        return self.free_pages * self.limits.page_size

    def enter(self, q: Sequence) -> None:
        """Add a request to the queue."""
        self.waiting.append(q)

    def form(self) -> SglangStep:
        """Return the next step; an empty one if the replica is idle."""
        self._merge()
        step = self._prefill()
        if not step.prompts:
            step = self._decode()
        is_idle = not step.prompts and not step.decodes
        if is_idle and self._pending is None:
            self.ratio.reset()
        self._last, self._pending = step, None if is_idle else step
        return step

    def end(self, step: SglangStep, outputs: dict[int, int]) -> None:
        """End a step: all but an unfinished prompt have one more token, and leave after ``outputs`` tokens."""
        for q in [*(q for q, _ in step.prompts if q is not step.unfinished), *step.decodes]:
            if q.kv_tokens == 0:
                continue  # It has left since the step was formed.
            q.generated += 1
            if q.generated == outputs[q.number]:
                self._release(q)
        if self._pending is step:
            self._pending = None

    def _resize(self, q: Sequence, kv_tokens: int) -> None:
        pages = [-(-tokens // self.limits.page_size) for tokens in (q.kv_tokens, kv_tokens)]
        self.free_pages -= pages[1] - pages[0]
        self.free_rows += (q.kv_tokens > 0) - (kv_tokens > 0)
        q.kv_tokens = kv_tokens

    def _release(self, q: Sequence) -> None:
        self._resize(q, 0)

    def _merge(self) -> None:
        """Move the prompts of the last step to ``running``, and take out what has ended."""
        last, self._last = self._last, None
        if last is not None and last.prompts:
            members = [*(q for q, _ in last.prompts), *(last.decodes)]
            merged = [q for q in members if q.kv_tokens and q is not last.unfinished]
            if len(merged) < len(members):
                self.is_full = False
            if merged and not self.running:
                self.is_full = False  # SGLang takes the new batch with a flag of its own.
            self.running += merged
        left = [q for q in self.running if q.kv_tokens]
        if len(left) < len(self.running):
            self.is_full = False
        self.running = left

    def _prefill(self) -> SglangStep:
        """Return a step with prompts, and in a mixed one with decodes; an empty one if no prompt can run."""
        step, limits = SglangStep(), self.limits
        if not self._tries_queue():
            return step
        if limits.schedule_policy == "lof":
            self.waiting.sort(key=lambda q: -q.max_tokens)
        taken = _PrefillPass(self, len(self.running) if limits.enable_mixed_chunk else 0)
        if self.chunked is not None and taken.resume(self.chunked):
            self.chunked = None
        self._admit(taken)
        step.prompts, step.unfinished = taken.prompts, self.chunked
        for q, tokens in step.prompts:
            self._resize(q, q.kv_tokens + tokens)
        if step.prompts and limits.enable_mixed_chunk and self.running:
            self._leave_out_ending()
            if self.running and self._fits(self.running):
                self._extend(self.running)
                step.decodes, self.running = self.running, []
        return step

    def _leave_out_ending(self) -> bool:
        """Take out of ``running`` what the pending step ends by ``max_tokens``. Return whether there was something."""
        pending = self._pending
        if pending is None:
            return False
        members = {*(q for q, _ in pending.prompts), *pending.decodes}
        left = [q for q in self.running if q not in members or q.generated + 1 < q.max_tokens]
        is_any = len(left) < len(self.running)
        self.running, self.is_full = left, self.is_full and not is_any
        return is_any

    def _tries_queue(self) -> bool:
        """Return whether a prompt may run: one that is computed in part always continues."""
        self.is_full = self.is_full and bool(self.running)
        if self.chunked is not None:
            return True
        if self.is_full or not self.waiting:
            return False
        self.is_full = min(self.limits.max_running_requests - len(self.running), self.free_rows) <= 0
        return not self.is_full

    def _admit(self, taken: _PrefillPass) -> None:
        """Admit waiting requests in order, until one cannot be admitted."""
        free_seqs = self.limits.max_running_requests - len(self.running)
        for q in list(self.waiting):
            if taken.has_memory and not taken.has_tokens:
                return
            rows = self.free_rows + sum(p.kv_tokens > 0 for p, _ in taken.prompts)
            self.is_full = self.is_full or len(taken.prompts) >= min(free_seqs, rows)
            if self.is_full:
                return
            admitted = taken.admit(q)
            if admitted:
                self.waiting.remove(q)
                if taken.prompts[-1][1] < q.context:
                    self.chunked = q
            if admitted is None or (admitted and not taken.has_memory):
                self.is_full = bool(taken.prompts or self.running)
                return
            if not admitted or not taken.has_tokens:
                return

    def _fits(self, sequences: list[Sequence]) -> bool:
        """Return whether each of the sequences can have one more token."""
        return sum(q.kv_tokens % self.limits.page_size == 0 for q in sequences) <= self.free_pages

    def _extend(self, sequences: list[Sequence]) -> None:
        for q in sequences:
            self._resize(q, q.kv_tokens + 1)

    def _decode(self) -> SglangStep:
        step = SglangStep()
        if not self.running:
            return step
        some_end = self._leave_out_ending()
        if not self.running or (some_end and not self._fits(self.running)):
            return step
        if self._fits(self.running):
            self.ratio.after_step()
        else:
            self._retract(step)
        step.decodes = list(self.running)
        self._extend(step.decodes)
        return step

    def _retract(self, step: SglangStep) -> None:
        """Retract at least one request: those with the fewest output tokens, and of them the longest prompts, first."""
        order = sorted(self.running, key=lambda q: (q.generated, -q.prompt_tokens), reverse=True)
        while len(order) > 1 and (not step.retracted or not self._fits(order)):
            q = order.pop()
            self._release(q)
            step.retracted.append(q)
        assert self._fits(order), "a request fits alone, by its limit"
        self.running = order
        self.ratio.after_retraction(order)
        self.waiting += step.retracted
        self.is_full = self.is_full and not step.retracted
