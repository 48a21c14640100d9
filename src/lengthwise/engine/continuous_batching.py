"""Continuous batching as a live object: requests enter, produce tokens and leave while time passes.

The rules are those of the scheduler ``vllm_v1``, optionally by priority: one token budget for each step, decodes first,
prompts in chunks, KV blocks on demand, preemption by recompute. ``simulate`` has all requests before it starts; a
``ContinuousBatch`` serves requests whose arrivals and lengths are unknown in advance. Tests compare both for each
request.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from lengthwise.engine.step_time import StepTime
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError


@dataclass(frozen=True)
class Limits:
    """Limits of one engine, named as in vLLM."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    block_size: int = 16  # KV tokens of a block
    num_blocks: int = 4096
    watermark: float = 0.0  # share of the blocks that an admission must leave free, except to an empty batch
    max_num_queued_reqs: int | None = None  # queue length above which the server refuses requests; None sets no limit
    by_priority: bool = False  # serve the smallest priority first; otherwise serve first come, first served

    @classmethod
    def of(cls, deployment: Deployment) -> Self:
        """Return the limits of one replica of a deployment. Raises InputError if its layers form KV cache groups."""
        if deployment.kv.groups is not None:
            raise InputError(
                f"an emulated engine counts every layer of {deployment.model.name} in full; plan its memory with "
                "hybrid_kv_cache = false"
            )
        limits, kv, by_priority = deployment.limits, deployment.kv, deployment.scheduler.rank == "priority"
        sizes = limits.max_num_seqs, limits.max_num_batched_tokens, kv.block_size, kv.num_blocks
        return cls(*sizes, deployment.watermark, by_priority=by_priority)


@dataclass(eq=False, slots=True)
class SequenceOrder:
    """Properties of a sequence that determine its position in the queue and in the order of preemption."""

    number: int  # position in the order of arrival, which breaks ties in the queue
    arrival_s: float  # arrival in engine time
    priority: int = 0  # smaller numbers are served first if ``Limits.by_priority``
    admission: int = -1  # sequence number of its last admission, or -1 before the first
    last_preemption: int = 0  # sequence number of its last preemption, or 0 if it was never preempted
    last_chunk: int = 0  # sequence number of its last computed prompt chunk, which breaks ties among victims

    def in_queue(self, *, by_priority: bool) -> tuple[float, float, int]:
        """Return the sort key of a waiting sequence. The smallest key is admitted first."""
        if by_priority:
            return self.priority, self.arrival_s, self.number
        return 0.0, -float(self.last_preemption) if self.last_preemption else self.arrival_s, self.number

    def among_victims(self, *, by_priority: bool) -> tuple[float, float, int]:
        """Return the sort key of an admitted sequence. The largest key is preempted first."""
        if by_priority:
            return self.priority, self.arrival_s, self.last_chunk
        return 0.0, self.admission, self.last_chunk


@dataclass(eq=False, slots=True)
class BatchSequence:
    """One sequence of a request: its prompt and one output."""

    order: SequenceOrder
    prompt_tokens: int
    output_tokens: int | None = None  # length of the output, or None if ``on_token`` decides when the output ends
    # Called with the time of every token. Returns True for the last token.
    on_token: Callable[[float], bool] | None = None
    on_finish: Callable[[], None] | None = None  # called after the last token, but not after an abort
    generated: int = 0  # output tokens so far; while it decodes without ``on_token``, see ``ContinuousBatch.generated``
    prefilled: int = 0  # computed tokens of the context during prefill
    blocks: int = 0  # KV blocks in use during prefill
    decoding: bool = False
    joined_step: int = 0  # ``ContinuousBatch.steps`` when it started to decode, or when ``generated`` was last updated
    last_step: int = 0  # ``ContinuousBatch.steps`` after its last token
    state: str = "arriving"  # "arriving", "waiting", "running", then "finished" or "aborted"
    first_token_s: float = math.nan
    finished_s: float = math.nan
    preemptions: int = 0

    @property
    def context(self) -> int:
        """Number of tokens that the KV cache must hold before the next token."""
        return self.prompt_tokens + self.generated


@dataclass(eq=False, slots=True)
class Step:
    """The step under way, or a run of ``count`` equal decode steps."""

    start_s: float
    decodes: int
    prompts: list[tuple[BatchSequence, int]] = field(default_factory=list)
    count: int = 1
    end_s: float = 0.0

    def passed(self, now_s: float) -> int:
        """Return how many of the ``count`` steps are complete at ``now_s``."""
        if now_s >= self.end_s:
            return self.count
        share = (now_s - self.start_s) / (self.end_s - self.start_s)
        return max(0, math.floor(share * self.count + 1e-9))


class ContinuousBatch:
    """Scheduler and KV memory of one engine, without a clock.

    Successive decode steps of the same sequences run as one, each at the mean of their costs, unless a sequence has
    ``on_token``. The batch only has sums over decoding sequences, because each gets a token in every step: its context
    is a constant plus ``steps``, and it needs a new block whenever ``steps`` modulo the block size has a certain value.
    """

    def __init__(self, limits: Limits, step_time: StepTime) -> None:
        self.limits, self._step_time = limits, step_time
        self.waiting: list[BatchSequence] = []  # requests in the engine's queue, in the order of admission
        self.free_blocks = limits.num_blocks
        self.preemptions = self.tokens = self.steps = 0  # so far: preemptions, output tokens, completed steps
        self.step: Step | None = None  # the step under way, or None if there is nothing to do
        self._arriving: deque[BatchSequence] = deque()
        self._prefilling: list[BatchSequence] = []
        self._decodes: dict[BatchSequence, None] = {}  # in the order in which they started to decode
        self._listeners = 0
        self._kv_tokens = 0
        # Number of decodes by the value of ``-steps`` modulo the block size at which they need a block.
        self._block_needs = [0] * limits.block_size
        self._ends: list[tuple[int, int, BatchSequence]] = []
        self._admissions = self._chunks = 0

    @property
    def queued(self) -> int:
        """Number of waiting requests, including requests that have just arrived."""
        return len(self.waiting) + len(self._arriving)

    @property
    def running(self) -> int:
        """Number of admitted requests."""
        return len(self._decodes) + len(self._prefilling) + (len(self.step.prompts) if self.step else 0)

    @property
    def kv_used(self) -> float:
        """Share of the KV cache in use."""
        return 1.0 - self.free_blocks / self.limits.num_blocks

    def generated(self, q: BatchSequence, now_s: float) -> int:
        """Return how many tokens a sequence has produced by ``now_s``."""
        if not q.decoding:
            return q.generated
        return q.generated + self.steps - q.joined_step + (self.step.passed(now_s) if self.step else 0)

    def enter(self, q: BatchSequence) -> None:
        """Add a request, which arrives at its ``order.arrival_s``. Requests must be added in the order of arrival."""
        self._arriving.append(q)

    def next_s(self) -> float:
        """Return the time of the next event, or infinity if there is none."""
        step_s = self.step.end_s if self.step else math.inf
        return min(step_s, self._arriving[0].order.arrival_s) if self._arriving else step_s

    def advance(self, until_s: float) -> None:
        """Process all events up to ``until_s`` in order. At one instant, arrivals precede the end of a step."""
        while (now_s := self.next_s()) <= until_s and now_s < math.inf:
            while self._arriving and self._arriving[0].order.arrival_s <= now_s:
                self._shorten_run(now_s)
                self._enqueue(self._arriving.popleft())
            if self.step and self.step.end_s <= now_s:
                self._end(now_s)
            if self.step is None:
                self._launch(now_s)

    def abort(self, q: BatchSequence, now_s: float) -> bool:
        """Remove a request at ``now_s`` and free its memory. Return False if the request had already ended."""
        self.advance(now_s)
        if q.state not in {"arriving", "waiting", "running"}:
            return False
        if q.state == "arriving":
            self._arriving.remove(q)
        elif q.state == "waiting":
            self.waiting.remove(q)
        else:
            self._shorten_run(now_s)
            self._remove(q)
        q.state = "aborted"
        return True

    def _enqueue(self, q: BatchSequence) -> None:
        q.state = "waiting"
        insort(self.waiting, q, key=lambda q: q.order.in_queue(by_priority=self.limits.by_priority))

    def _victim_order(self, q: BatchSequence) -> tuple[float, float, int]:
        return q.order.among_victims(by_priority=self.limits.by_priority)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_size)

    def _launch(self, now_s: float) -> None:
        preemptions = self.preemptions
        prompts = self._form()
        if not prompts and not self._decodes and self.preemptions > preemptions:
            prompts = self._form()
        decodes, kv_tokens = len(self._decodes), self._kv_tokens
        if not prompts and not decodes:
            return
        step = self.step = Step(now_s, decodes, prompts)
        if not (prompts or self._prefilling or self._listeners or self.preemptions > preemptions):
            step.count = self._steps_until_change()
        chunks = [(chunk, q.prefilled) for q, chunk in prompts]
        mean_s = self._step_time(decodes, kv_tokens + decodes * (step.count - 1) // 2, chunks)
        step.end_s = now_s + step.count * mean_s

    def _form(self) -> list[tuple[BatchSequence, int]]:
        """Form the next step. Return its prompts as (sequence, tokens of the chunk)."""
        preemptions, prompts = self.preemptions, list[tuple[BatchSequence, int]]()
        self._grow_decodes()
        left = max(0, self.limits.max_num_batched_tokens - len(self._decodes))
        for q in sorted(self._prefilling, key=lambda q: q.order.admission):
            chunk = min(q.context - q.prefilled, left)
            if chunk <= 0:
                break
            if q in self._prefilling and self._grow_prompt(q, q.prefilled + chunk):
                self._prefilling.remove(q)
                prompts.append((q, chunk))
                left -= chunk
        if self.preemptions > preemptions:
            return prompts
        running = len(self._decodes) + len(self._prefilling) + len(prompts)
        while self.waiting and running < self.limits.max_num_seqs:
            q = self.waiting[0]
            chunk = min(q.context, left)
            reserve = int(self.limits.watermark * self.limits.num_blocks) if running else 0
            if chunk <= 0 or self.free_blocks - self._blocks(q.context) < reserve:
                break
            del self.waiting[0]
            q.blocks = self._blocks(chunk)
            self.free_blocks -= q.blocks
            self._admissions += 1
            q.order.admission, q.state = self._admissions, "running"
            prompts.append((q, chunk))
            left -= chunk
            running += 1
        return prompts

    def _grow_decodes(self) -> None:
        need = self._block_needs[-self.steps % self.limits.block_size]
        if need <= self.free_blocks:
            self.free_blocks -= need
            return
        candidates = sorted([*self._decodes, *self._prefilling], key=self._victim_order)
        position, granted = 0, 0
        while position < len(candidates):
            q = candidates[position]
            position += 1
            if not q.decoding or (q.context + self.steps - q.joined_step - 1) % self.limits.block_size:
                continue
            while self.free_blocks - granted < 1 and len(candidates) >= position:
                self._preempt(candidates.pop())
            granted += len(candidates) >= position
        self.free_blocks -= granted  # only now: until then ``_remove`` counts blocks as before this step

    def _grow_prompt(self, q: BatchSequence, tokens: int) -> bool:
        while self.free_blocks < self._blocks(tokens) - q.blocks:
            victim = max(self._prefilling, key=self._victim_order)
            self._preempt(victim)
            if victim is q:
                return False
        self.free_blocks -= self._blocks(tokens) - q.blocks
        q.blocks = self._blocks(tokens)
        return True

    def _preempt(self, q: BatchSequence) -> None:
        self._remove(q)
        self.preemptions += 1
        q.preemptions += 1
        q.order.last_preemption, q.prefilled = self.preemptions, 0
        self._enqueue(q)

    def _steps_until_change(self) -> int:
        while not self._is_end(*self._ends[0]):
            heapq.heappop(self._ends)
        cycles, free = divmod(self.free_blocks, len(self._decodes))
        count = 1 + cycles * self.limits.block_size
        for k in range(1, self.limits.block_size):
            free -= self._block_needs[-(self.steps + k) % self.limits.block_size]
            if free < 0:
                break
            count += 1
        return min(count, self._ends[0][0] - self.steps)

    def _shorten_run(self, now_s: float) -> None:
        """If several decode steps run as one, complete the steps that have passed and let only the next one run."""
        step = self.step
        if step is None or step.count == 1:
            return
        passed, each_s = min(step.passed(now_s), step.count - 1), (step.end_s - step.start_s) / step.count
        self._complete_steps(passed)
        step.start_s += passed * each_s
        step.count, step.end_s = 1, step.start_s + each_s

    def _complete_steps(self, count: int) -> None:
        """Complete ``count`` decode steps in which no sequence starts or ends, and take the blocks they need."""
        size, decodes = self.limits.block_size, len(self._decodes)
        self.free_blocks -= decodes * (count // size)
        for k in range(1, count % size + 1):
            self.free_blocks -= self._block_needs[-(self.steps + k) % size]
        self.steps += count
        self._kv_tokens += decodes * count
        self.tokens += decodes * count

    def _end(self, now_s: float) -> None:
        step = self.step
        assert step is not None
        self._complete_steps(step.count - 1)
        self.step = None
        self.steps += 1
        self._kv_tokens += len(self._decodes)
        self.tokens += len(self._decodes)
        for q in list(self._decodes) if self._listeners else ():
            if q.on_token is not None:
                self._update_generated(q)
                if q.on_token(now_s):
                    self._finish(q, now_s)
        while self._ends and self._ends[0][0] <= self.steps:
            end = heapq.heappop(self._ends)
            if self._is_end(*end):
                self._finish(end[2], now_s)
        for q, chunk in step.prompts:
            q.prefilled += chunk
            self._prefilling.append(q)
            self._chunks += 1
            q.order.last_chunk = self._chunks
            if q.prefilled == q.context:
                self._start_decoding(q, now_s)

    def _start_decoding(self, q: BatchSequence, now_s: float) -> None:
        q.generated += 1
        self.tokens += 1
        if q.generated == 1:
            q.first_token_s = now_s
        is_last = q.generated == q.output_tokens if q.on_token is None else q.on_token(now_s)
        if is_last:
            self._finish(q, now_s)
            return
        self._prefilling.remove(q)
        q.decoding, q.joined_step = True, self.steps
        self._decodes[q] = None
        self._listeners += q.on_token is not None
        self._kv_tokens += q.context
        self._block_needs[(q.context - 1 - self.steps) % self.limits.block_size] += 1
        if q.on_token is None:
            assert q.output_tokens is not None
            q.last_step = self.steps + q.output_tokens - q.generated
            heapq.heappush(self._ends, (q.last_step, q.order.last_chunk, q))

    def _is_end(self, last_step: int, _: int, q: BatchSequence) -> bool:
        """Return whether an entry of ``_ends`` is valid. It is not if the sequence was preempted since."""
        return q.decoding and q.last_step == last_step

    def _update_generated(self, q: BatchSequence) -> None:
        q.generated += self.steps - q.joined_step
        q.joined_step = self.steps

    def _finish(self, q: BatchSequence, now_s: float) -> None:
        self._remove(q)
        q.finished_s, q.state = now_s, "finished"
        if q.on_finish is not None:
            q.on_finish()

    def _remove(self, q: BatchSequence) -> None:
        if q.decoding:
            del self._decodes[q]
            self._update_generated(q)
            q.decoding = False
            self._listeners -= q.on_token is not None
            self._kv_tokens -= q.context
            self._block_needs[(q.context - 1 - self.steps) % self.limits.block_size] -= 1
            # The newest token has its block only while the step that reads it is under way.
            self.free_blocks += self._blocks(q.context if self.step else q.context - 1)
        else:
            self.free_blocks += q.blocks
            if q in self._prefilling:
                self._prefilling.remove(q)
            elif self.step:
                self.step.prompts = [(p, chunk) for p, chunk in self.step.prompts if p is not q]
        q.blocks = 0


class Loop(Protocol):
    """The part of an asyncio event loop that ``ClockedBatch`` uses."""

    def time(self) -> float: ...  # noqa: D102
    def call_at(self, when: float, callback: Callable[[], None]) -> Any: ...  # noqa: D102


class ClockedBatch:
    """A batch whose time follows the clock of an event loop, ``speed`` times as fast.

    In engine time each step starts when the step before it ends. If the loop wakes late, the callbacks come late, but
    the engine does not become slower, and ``simulate`` can reproduce its work from the arrivals. Requests that enter at
    one instant are admitted together.
    """

    def __init__(self, limits: Limits, step_time: StepTime, loop: Loop, *, speed: float = 1.0) -> None:
        self.batch = ContinuousBatch(limits, step_time)
        self._loop, self._speed, self._started_s = loop, speed, loop.time()
        self._timer: Any = None
        self._deadline_s = math.inf
        self._entered = 0

    def now_s(self) -> float:
        """Return the engine time in seconds since the start."""
        return (self._loop.time() - self._started_s) * self._speed

    def enter(
        self,
        prompt_tokens: int,
        *,
        output_tokens: int | None = None,
        on_token: Callable[[float], bool] | None = None,
        on_finish: Callable[[], None] | None = None,
        priority: int = 0,
    ) -> BatchSequence:
        """Add a request that arrives now, and return its sequence."""
        order = SequenceOrder(self._entered, self.now_s(), priority)
        q = BatchSequence(order, prompt_tokens, output_tokens, on_token, on_finish)
        self._entered += 1
        self.batch.enter(q)
        self._set_timer()
        return q

    def generated(self, q: BatchSequence) -> int:
        """Return how many tokens a sequence has produced so far."""
        return self.batch.generated(q, self.now_s())

    def abort(self, q: BatchSequence) -> bool:
        """Remove a request now. Return False if the request had already ended."""
        found = self.batch.abort(q, self.now_s())
        self._set_timer()
        return found

    def stop(self) -> None:
        """Stop the engine: no further event is processed by the clock."""
        if self._timer is not None:
            self._timer.cancel()
        self._deadline_s = -math.inf

    def _set_timer(self) -> None:
        deadline_s = self.batch.next_s()
        if self._deadline_s == -math.inf or (deadline_s == self._deadline_s and self._timer is not None):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._deadline_s, self._timer = deadline_s, None
        if deadline_s < math.inf:
            self._timer = self._loop.call_at(self._started_s + deadline_s / self._speed, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        # The timer may be early by the rounding of its time. Without ``max`` it would be set again without progress.
        self.batch.advance(max(self.now_s(), self._deadline_s))
        self._set_timer()
