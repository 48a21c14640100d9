"""Continuous batching without input or output: requests enter, time is let pass, tokens come out.

The rules are those of the engine room under the scheduler ``vllm_v1`` (or its likes by priority): one token
budget a step, decodes first, prompts in chunks, blocks on demand, eviction by recompute. A test holds the two
against each other request by request.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lengthwise.engine.step_time import StepTime, step_time
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError, UnknownNameError


@dataclass(frozen=True)
class Limits:
    """The knobs of one engine under their vLLM names.

    Attributes:
        max_num_seqs: Requests that run at once.
        max_num_batched_tokens: Tokens of a step.
        block_size: KV tokens of a block.
        num_blocks: Blocks of the KV cache.
        watermark: Share of the blocks that an admission leaves free.
        max_num_queued_reqs: More that wait are refused; None: none are.
        by_priority: Smaller priority first; else first come, first served.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    num_blocks: int = 4096
    watermark: float = 0.01
    max_num_queued_reqs: int | None = None
    by_priority: bool = False


@dataclass(eq=False, slots=True)
class BatchSequence:
    """One output under way.

    Attributes:
        number: In order of arrival; breaks ties.
        arrival_s: On the engine's time.
        prompt_tokens: Before the output.
        on_token: Called with the time of every token; True where it is the last.
        priority: Smaller goes first.
    """

    number: int
    arrival_s: float
    prompt_tokens: int
    on_token: Callable[[float], bool]
    priority: int = 0
    generated: int = 0
    prefilled: int = 0
    blocks: int = 0
    admission: int = -1
    eviction: int = 0
    slot_index: int = 0
    decoding: bool = False
    state: str = "arriving"
    """Then "waiting", "running", and in the end "finished" or "aborted"."""
    first_token_s: float = math.nan
    finished_s: float = math.nan
    preemptions: int = 0

    @property
    def context(self) -> int:
        """Tokens that must be in the cache before the next one can come."""
        return self.prompt_tokens + self.generated


@dataclass(eq=False, slots=True)
class Step:
    """What runs together now."""

    end_s: float = 0.0
    decodes: list[BatchSequence] = field(default_factory=list)
    prompts: list[tuple[BatchSequence, int]] = field(default_factory=list)
    evicted: bool = False

    @property
    def seqs(self) -> int:
        """Sequences in it."""
        return len(self.decodes) + len(self.prompts)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens in it."""
        return sum(chunk for _, chunk in self.prompts)


class Batch:
    """One engine's scheduler and memory; it knows no clock.

    Attributes:
        waiting: Requests in the engine's queue.
        preemptions: Evictions so far.
        tokens: Output tokens so far.
    """

    def __init__(self, limits: Limits, step_time: StepTime) -> None:
        self.limits, self._step_time = limits, step_time
        self.waiting: list[BatchSequence] = []
        self.free_blocks = limits.num_blocks
        self.preemptions = self.tokens = self.steps = 0
        self._arriving: deque[BatchSequence] = deque()
        self._idle: list[BatchSequence] = []
        self._step: Step | None = None
        self._admissions = self._next_slot = 0

    # -- from outside -------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """Requests that wait, those that have just come included."""
        return len(self.waiting) + len(self._arriving)

    @property
    def running(self) -> int:
        """Requests that hold a place in the batch."""
        return len(self._idle) + (self._step.seqs if self._step else 0)

    @property
    def kv_used(self) -> float:
        """Share of the KV cache in use."""
        return 1.0 - self.free_blocks / self.limits.num_blocks

    def enter(self, q: BatchSequence) -> None:
        """A request comes at its ``arrival_s``, not before any that came earlier."""
        self._arriving.append(q)

    def next_s(self) -> float:
        """When something happens next; inf while nothing can."""
        step_s = self._step.end_s if self._step else math.inf
        return min(step_s, self._arriving[0].arrival_s) if self._arriving else step_s

    def advance(self, until_s: float) -> None:
        """All that happens up to a time, in order; of one instant first arrivals, then a step's end."""
        while (now := self.next_s()) <= until_s and now < math.inf:
            while self._arriving and self._arriving[0].arrival_s <= now:
                self._wait(self._arriving.popleft())
            if self._step and self._step.end_s <= now:
                self._end(self._step, now)
            if self._step is None:
                self._launch(now)

    def abort(self, q: BatchSequence) -> bool:
        """Takes a request out at once, its memory free again; False where it was over."""
        if q.state not in {"arriving", "waiting", "running"}:
            return False
        if q.state == "arriving":
            self._arriving.remove(q)
        elif q.state == "waiting":
            self.waiting.remove(q)
        elif q in self._idle:
            self._idle.remove(q)
        elif self._step is not None:
            self._step.decodes = [d for d in self._step.decodes if d is not q]
            self._step.prompts = [(p, chunk) for p, chunk in self._step.prompts if p is not q]
        self._release(q, "aborted")
        return True

    # -- the queue ------------------------------------------------------------------------------

    def _wait(self, q: BatchSequence) -> None:
        q.state = "waiting"
        self.waiting.append(q)

    def _order(self, q: BatchSequence) -> tuple[float, float, int]:
        if self.limits.by_priority:
            return q.priority, q.arrival_s, q.number
        return 0.0, -float(q.eviction) if q.eviction else q.arrival_s, q.number

    def _leave_order(self, q: BatchSequence) -> tuple[float, float, int]:
        if self.limits.by_priority:
            return q.priority, q.arrival_s, q.slot_index
        return 0.0, q.admission, q.slot_index

    # -- a step ---------------------------------------------------------------------------------

    def _launch(self, now: float) -> None:
        step = self._form()
        if not step.seqs and step.evicted:
            step = self._form()
        if not step.seqs:
            return
        prompts = [(chunk, q.prefilled) for q, chunk in step.prompts]
        kv_tokens = sum(q.context for q in step.decodes)
        step.end_s = now + self._step_time(len(step.decodes), kv_tokens, prompts)
        self._step = step
        self.steps += 1

    def _form(self) -> Step:
        step = Step()
        self._take_decodes(step)
        budget = max(0, self.limits.max_num_batched_tokens - len(step.decodes))
        self._continue_prompts(step, budget)
        if not step.evicted:
            self._admit(step, budget)
        if not step.seqs:
            self._take_decodes(step)
        return step

    def _take_decodes(self, step: Step) -> None:
        for q in sorted((q for q in self._idle if q.decoding), key=self._leave_order):
            if q in self._idle and self._make_room(step, q, q.context):
                self._idle.remove(q)
                step.decodes.append(q)

    def _continue_prompts(self, step: Step, budget: int) -> None:
        for q in sorted((q for q in self._idle if not q.decoding), key=lambda q: q.admission):
            chunk = min(q.context - q.prefilled, budget - step.prompt_tokens)
            if chunk <= 0:
                return
            if q in self._idle and self._make_room(step, q, q.prefilled + chunk):
                self._idle.remove(q)
                step.prompts.append((q, chunk))

    def _make_room(self, step: Step, q: BatchSequence, tokens: int) -> bool:
        """Gives a request the blocks for its tokens, evicting the last idle ones; False if that was itself."""
        need = max(0, self._blocks(tokens) - q.blocks)
        while self.free_blocks < need:
            victim = max(self._idle, key=self._leave_order)
            self._evict(step, victim)
            if victim is q:
                return False
        self.free_blocks -= need
        q.blocks += need
        return True

    def _evict(self, step: Step, q: BatchSequence) -> None:
        self._idle.remove(q)
        self.free_blocks += q.blocks
        step.evicted = True
        self.preemptions += 1
        q.blocks, q.decoding, q.prefilled = 0, False, 0
        q.preemptions += 1
        q.eviction = self.preemptions
        self._wait(q)

    def _admit(self, step: Step, budget: int) -> None:
        while self.waiting and len(self._idle) + step.seqs < self.limits.max_num_seqs:
            q = min(self.waiting, key=self._order)
            chunk = min(q.context, budget - step.prompt_tokens)
            if chunk <= 0 or not self._fits(q, len(self._idle) + step.seqs):
                return
            self.waiting.remove(q)
            q.blocks = self._blocks(chunk)
            self.free_blocks -= q.blocks
            self._admissions += 1
            q.admission, q.state = self._admissions, "running"
            step.prompts.append((q, chunk))

    def _fits(self, q: BatchSequence, num_running: int) -> bool:
        spare = self.free_blocks - self._blocks(q.context)
        return spare >= (int(self.limits.watermark * self.limits.num_blocks) if num_running else 0)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_size)

    # -- its end --------------------------------------------------------------------------------

    def _end(self, step: Step, now: float) -> None:
        self._step = None
        for q in sorted(step.decodes, key=lambda q: q.slot_index):
            self._emit(q, now)
        for q, chunk in step.prompts:
            q.prefilled += chunk
            if q.prefilled < q.context:
                self._assign_slot(q)
            else:
                self._emit(q, now)

    def _emit(self, q: BatchSequence, now: float) -> None:
        q.decoding = True
        q.generated += 1
        self.tokens += 1
        if q.generated == 1:
            q.first_token_s = now
        if q.on_token(now):
            q.finished_s = now
            self._release(q, "finished")
        else:
            self._assign_slot(q)

    def _assign_slot(self, q: BatchSequence) -> None:
        self._next_slot += 1
        q.slot_index = self._next_slot
        self._idle.append(q)

    def _release(self, q: BatchSequence, state: str) -> None:
        self.free_blocks += q.blocks
        q.blocks, q.state = 0, state


KINDS = ("vllm", "sglang", "llama.cpp", "openai")


@dataclass(frozen=True)
class LinearSteps:
    """Seconds of a step as a line: fixed, each decode, each prompt token, each KV token that a decode reads."""

    fixed_s: float = 0.004
    decode_s: float = 0.0002
    prompt_token_s: float = 0.00002
    kv_token_s: float = 0.0

    def __call__(self, decodes: int, kv_tokens: int, prompts: Sequence[tuple[int, int]]) -> float:
        """The seconds of one step."""
        tokens = sum(chunk for chunk, _ in prompts)
        return self.fixed_s + self.decode_s * decodes + self.prompt_token_s * tokens + self.kv_token_s * kv_tokens


@dataclass(frozen=True)
class EngineSpec:
    """One emulated engine.

    Attributes:
        model: Its name, and with it every answer.
        kind: One of KINDS: whose routes, metrics and polarity of priorities.
        limits: Of batch and memory.
        steps: What a step takes.
        speed: Engine seconds that pass in a real one.
        max_model_len: Longest prompt and output together.
        mean_tokens: Mean length of answers whose length the request does not fix.
        api_key: Asked for on /v1; None: nobody is asked.
    """

    model: str = "toy"
    kind: str = "vllm"
    limits: Limits = field(default_factory=Limits)
    steps: StepTime = LinearSteps()
    speed: float = 1.0
    max_model_len: int = 8192
    mean_tokens: int = 64
    api_key: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnknownNameError("kind of engine", self.kind, KINDS)
        if not self.speed > 0:
            raise InputError(f"speed must be above 0; it is {self.speed}")
        held = self.limits.num_blocks * self.limits.block_size
        if self.max_model_len > held:
            raise InputError(
                f"max_model_len must be at most what the KV cache holds, {held} tokens; it is {self.max_model_len}. "
                "Lower it, or give more num_blocks"
            )


def emulated(deployment: Deployment, *, kind: str = "vllm", speed: float = 1.0, model: str = "") -> EngineSpec:
    """One replica of a deployment as an engine: its cost tables, its memory, its limits.

    Where the rank is "priority", the latest arrival of the worst class is evicted, as vLLM does.

    Raises:
        InputError: The deployment is none that can be emulated; the message says why.
    """
    _require_emulable(deployment)
    limits = deployment.limits
    return EngineSpec(
        model=model or deployment.model.name,
        kind=kind,
        limits=Limits(
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            deployment.kv.block_size,
            deployment.kv.num_blocks,
            limits.watermark,
            by_priority=deployment.scheduler.rank == "priority",
        ),
        steps=step_time(deployment.cost),
        speed=speed,
        max_model_len=deployment.max_model_len,
    )


def _require_emulable(deployment: Deployment) -> None:
    scheduler, limits = deployment.scheduler, deployment.limits
    wrong = {
        "pp = 1 (one pipeline stage)": deployment.parallel.pp != 1,
        'batching "unified"': scheduler.batching != "unified",
        'memory "paged_by_chunk"': scheduler.memory != "paged_by_chunk",
        'rank "fcfs_evicted_first" or "priority"': scheduler.rank not in ("fcfs_evicted_first", "priority"),
        'preempt "recompute"': scheduler.preempt != "recompute",
        'takeover "never"': scheduler.takeover != "never",
        "no bins": scheduler.binning is not None,
        "max_wait_s = inf": scheduler.max_wait_s != math.inf,
        "no prefix caching": limits.enable_prefix_caching,
        "no max_step_seqs": limits.max_step_seqs not in (None, limits.max_num_seqs),
    }
    if lacking := [what for what, is_wrong in wrong.items() if is_wrong]:
        raise InputError(f"an emulated engine is like vllm_v1; this deployment must have {', '.join(lacking)}")


class ClockedBatch:
    """Lets a batch's time pass with the running loop's, ``spec.speed`` times as fast.

    Steps follow each other on the engine's own time, from one's end to the next: a loop that wakes late hands
    tokens out late, but the engine does not get slower, and what it did can be simulated from its arrivals.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.batch = Batch(spec.limits, spec.steps)
        self._speed = spec.speed
        self._loop = asyncio.get_running_loop()
        self._begun_s = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._deadline_s = math.inf
        self._entered = 0

    def now_s(self) -> float:
        """Engine seconds since it started."""
        return (self._loop.time() - self._begun_s) * self._speed

    def enter(self, prompt_tokens: int, on_token: Callable[[float], bool], priority: int = 0) -> BatchSequence:
        """A request that comes now."""
        q = BatchSequence(self._entered, self.now_s(), prompt_tokens, on_token, priority)
        self._entered += 1
        self.batch.enter(q)
        self._wake()
        return q

    def abort(self, q: BatchSequence) -> bool:
        """Takes a request out now; False where it was over."""
        self.batch.advance(self.now_s())
        gone = self.batch.abort(q)
        self._wake()
        return gone

    def stop(self) -> None:
        """Time stands still for good."""
        if self._timer is not None:
            self._timer.cancel()
        self._deadline_s = -math.inf

    def _wake(self) -> None:
        if self._deadline_s == -math.inf:
            return
        self.batch.advance(self.now_s())
        deadline_s = self.batch.next_s()
        if deadline_s == self._deadline_s and self._timer is not None and not self._timer.cancelled():
            return
        if self._timer is not None:
            self._timer.cancel()
        self._deadline_s, self._timer = deadline_s, None
        if deadline_s < math.inf:
            self._timer = self._loop.call_at(self._begun_s + deadline_s / self._speed, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        self._wake()
