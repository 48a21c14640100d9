"""Vidur's event loop and schedulers reimplemented in plain Python, apart from the engine.

The rules are those of microsoft/vidur (MIT, commit 7d47513), flaws included; nothing here knows
lengthwise. `play` runs requests through them, `recorded_stage_times` reads stage times from
Vidur's own prediction tables.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Rules:
    """One cluster. ``token_budget`` is Sarathi's chunk size or vLLM's padded tokens of a batch;
    ``slots`` (requests of maximal length that fit) matters to the request-level schedulers alone."""

    scheduler: str
    blocks: int
    token_budget: int = 512
    block_size: int = 16
    watermark: float = 0.01
    cap: int = 128
    stages: int = 1
    replicas: int = 1
    router: str = "round_robin"
    max_tokens: int = 4096
    slots: int = 128


@dataclass(eq=False)
class Job:
    """A request. ``prefill`` shifts at a restart, ``total`` never does."""

    number: int
    arrival_s: float
    prefill: int
    total: int
    done: int = 0
    decoding: bool = False
    restarts: int = 0
    scheduled_s: float = math.nan
    prefilled_s: float = math.nan
    completed_s: float = math.nan

    @property
    def completed(self) -> bool:
        return self.done == self.total

    def advance(self, tokens: int, now: float) -> None:
        self.done += tokens
        if self.done == self.prefill:
            self.decoding = True
            self.done += 1
            if math.isnan(self.prefilled_s):
                self.prefilled_s = now
        if self.completed:
            self.completed_s = now

    def restart(self) -> None:
        """All that was computed, be it part of the prompt only, is the new prompt."""
        self.prefill, self.done, self.decoding = self.done, 0, False
        self.restarts += 1


Batch = list[tuple[Job, int]]
StageTime = Callable[[Batch, int], float]


@dataclass(eq=False)
class Replica:
    """What one replica knows: requests that wait, are idle between two batches, or hold blocks."""

    rules: Rules
    waiting: list[Job] = field(default_factory=list)
    idle: list[Job] = field(default_factory=list)
    satisfied: dict[Job, int] = field(default_factory=dict)
    flying: int = 0

    def __post_init__(self) -> None:
        self.queues: list[list[Batch]] = [[] for _ in range(self.rules.stages)]
        self.busy = [False] * self.rules.stages
        self.reserve = int(self.rules.watermark * self.rules.blocks)
        self.step_cap = self.rules.cap // self.rules.stages

    @property
    def free(self) -> int:
        return self.rules.blocks - sum(self.satisfied.values())

    def form(self) -> Batch:
        raise NotImplementedError

    def finalize(self, batch: Batch) -> None:
        for job, _ in batch:
            if job.completed:
                del self.satisfied[job]
            else:
                self.idle.append(job)


class Paged(Replica):
    """Blocks on demand; who finds none is thrown back to the front of the queue."""

    def admissible(self, job: Job) -> bool:
        return self.free - math.ceil(job.prefill / self.rules.block_size) >= self.reserve

    def admit(self) -> Job:
        job = self.waiting.pop(0)
        self.satisfied[job] = math.ceil(job.prefill / self.rules.block_size)
        return job

    def throw_back(self, job: Job) -> None:
        job.restart()
        del self.satisfied[job]
        self.waiting.insert(0, job)

    def make_room(self, job: Job) -> bool:
        """Room for one more token, at the cost of the last idle jobs, at worst of the job itself.

        A free block is asked for even where none is needed."""
        while self.free < 1:
            if not self.idle:
                self.throw_back(job)
                return False
            self.throw_back(self.idle.pop())
        if job.done > self.satisfied[job] * self.rules.block_size:
            self.satisfied[job] += 1
        return True


class Vllm(Paged):
    """Prompts before anything else, never mixed with decodes."""

    def form(self) -> Batch:
        return self.prompts() or self.decodes()

    def prompts(self) -> Batch:
        batch: Batch = []
        longest = 0
        while self.waiting:
            head = self.waiting[0]
            longest = max(longest, head.prefill)
            padded = (len(batch) + 1) * longest
            if not self.admissible(head) or padded > self.rules.token_budget:
                break
            if len(self.satisfied) == self.rules.cap or len(batch) == self.step_cap:
                break
            batch.append((self.admit(), head.prefill))
        return batch

    def decodes(self) -> Batch:
        batch: Batch = []
        self.idle.sort(key=lambda job: job.arrival_s)
        while self.idle and len(batch) != self.step_cap:
            job = self.idle.pop(0)
            if self.make_room(job):
                batch.append((job, 1))
        return batch


class Sarathi(Paged):
    """Decodes first, then chunks of started prompts, then of new ones, within a budget of tokens."""

    def form(self) -> Batch:
        batch, started = self.decodes()
        used = len(batch)
        skipped = []
        for job in started:  # the cap on a batch is not asked here
            chunk = self.chunk(job, used)
            used += chunk
            if chunk:
                batch.append((job, chunk))
            else:
                skipped.append(job)
        self.idle = sorted(skipped + self.idle, key=lambda job: job.arrival_s)
        while self.waiting and len(self.satisfied) != self.rules.cap and len(batch) != self.step_cap:
            head = self.waiting[0]
            chunk = self.chunk(head, used)
            if not chunk or not self.admissible(head):
                break
            used += chunk
            batch.append((self.admit(), chunk))
        return batch

    def decodes(self) -> tuple[Batch, list[Job]]:
        batch: Batch = []
        started = []
        while self.idle and len(batch) != self.step_cap:
            job = self.idle.pop(0)
            if not job.decoding:
                started.append(job)
            elif self.make_room(job):
                batch.append((job, 1))
        return batch, started

    def chunk(self, job: Job, used: int) -> int:
        return max(0, min(job.prefill - job.done, self.rules.token_budget - used))


class WholeLength(Replica):
    """Blocks for the longest request there may be, held to the end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.step_cap = min(self.rules.slots, self.rules.cap)

    def fill_up(self, batch: Batch) -> Batch:
        each = self.rules.max_tokens // self.rules.block_size
        while self.waiting and len(batch) != self.step_cap and self.free >= each:
            job = self.waiting.pop(0)
            self.satisfied[job] = each
            batch.append((job, job.prefill))
        return batch


class Orca(WholeLength):
    """Iteration-level: idle requests go on, the rest of the batch is new prompts, whole."""

    def form(self) -> Batch:
        going_on, self.idle = self.idle[: self.step_cap], self.idle[self.step_cap :]
        return self.fill_up([(job, 1) for job in going_on])


class FasterTransformer(WholeLength):
    """Request-level: a batch runs until its last member ends; none joins."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.paused: list[Batch] = []

    def form(self) -> Batch:
        if self.paused:
            return [(job, 1) for job, _ in self.paused.pop(0) if not job.completed]
        return self.fill_up([])

    def finalize(self, batch: Batch) -> None:
        if not all(job.completed for job, _ in batch):
            self.paused.append(batch)
            return
        for job, _ in batch:  # those who left the batch earlier keep their blocks: Vidur's leak
            del self.satisfied[job]


SCHEDULERS: dict[str, type[Replica]] = {
    "vllm": Vllm,
    "sarathi": Sarathi,
    "orca": Orca,
    "faster_transformer": FasterTransformer,
}


class Cluster:
    """The event loop. Events at equal times are handled in the order in which they were made."""

    def __init__(self, rules: Rules, stage_time: StageTime) -> None:
        self.rules, self.stage_time = rules, stage_time
        self.replicas = [SCHEDULERS[rules.scheduler](rules) for _ in range(rules.replicas)]
        self.unrouted: list[Job] = []
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.made = self.routed = self.iterations = 0
        self.now = 0.0

    def at(self, time_s: float, handler: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self.events, (time_s, self.made, handler, args))
        self.made += 1

    def run(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self.at(job.arrival_s, self.arrive, job)
        while self.events:
            self.now, _, handler, args = heapq.heappop(self.events)
            handler(*args)

    def arrive(self, job: Job) -> None:
        self.unrouted.append(job)
        self.at(self.now, self.route)

    def route(self) -> None:
        touched = set()
        queue_lengths = [len(replica.waiting) for replica in self.replicas]
        for job in self.unrouted:
            target = self.routed % len(self.replicas)
            if self.rules.router == "lor":
                target = queue_lengths.index(min(queue_lengths))
            self.routed += 1
            queue_lengths[target] += 1
            touched.add(target)
            self.replicas[target].waiting.append(job)
        self.unrouted = []
        for target in sorted(touched):
            self.at(self.now, self.fill, self.replicas[target])

    def fill(self, replica: Replica) -> None:
        while replica.flying < self.rules.stages:
            batch = replica.form()
            if not batch:
                break
            replica.flying += 1
            self.iterations += 1
            for job, _ in batch:
                if math.isnan(job.scheduled_s):
                    job.scheduled_s = self.now
            self.at(self.now, self.reach, replica, 0, batch)

    def reach(self, replica: Replica, stage: int, batch: Batch) -> None:
        replica.queues[stage].append(batch)
        self.at(self.now, self.start, replica, stage)

    def start(self, replica: Replica, stage: int) -> None:
        if replica.busy[stage] or not replica.queues[stage]:
            return
        replica.busy[stage] = True
        batch = replica.queues[stage].pop(0)
        self.at(self.now + self.stage_time(batch, stage), self.leave, replica, stage, batch)

    def leave(self, replica: Replica, stage: int, batch: Batch) -> None:
        replica.busy[stage] = False
        self.at(self.now, self.start, replica, stage)
        if stage == self.rules.stages - 1:
            self.at(self.now, self.end, replica, batch)
        else:
            self.at(self.now, self.reach, replica, stage + 1, batch)

    def end(self, replica: Replica, batch: Batch) -> None:
        for job, tokens in batch:
            job.advance(tokens, self.now)
        replica.flying -= 1
        replica.finalize(batch)
        self.at(self.now, self.fill, replica)


@dataclass(frozen=True)
class Simulated:
    """What happened; ``drained`` is Vidur's last assertion: no request waits, none holds blocks."""

    jobs: list[Job]
    iterations: int
    drained: bool

    def column(self, name: str) -> np.ndarray:
        return np.array([getattr(job, name) for job in self.jobs], dtype=float)


def play(
    arrival_s: Sequence[float], prefill: Sequence[int], decode: Sequence[int], rules: Rules, stage_time: StageTime
) -> Simulated:
    """Runs the requests, which stand in order of arrival, to the end or until nothing moves."""
    columns = zip(arrival_s, prefill, decode, strict=True)
    jobs = [Job(i, float(a), int(p), int(p + d)) for i, (a, p, d) in enumerate(columns)]
    cluster = Cluster(rules, stage_time)
    cluster.run(jobs)
    drained = not any(replica.waiting or replica.satisfied for replica in cluster.replicas)
    return Simulated(jobs, cluster.iterations, drained)


@dataclass(frozen=True)
class Features:
    """All that a stage time depends on; contexts in units of 64 tokens, rounded up."""

    tokens: int
    prefills: int
    chunk: int
    context: int
    decodes: int
    mean_context: int


def features(batch: Batch, unit: int = 64) -> Features:
    """A batch as Vidur's predictor sees it: one merged prompt and decodes of equal context."""
    prompts = [(job, tokens) for job, tokens in batch if not job.decoding]
    contexts = [job.done for job, _ in batch if job.decoding]
    return Features(
        tokens=sum(tokens for _, tokens in batch),
        prefills=len(prompts),
        chunk=round(math.sqrt(sum(tokens**2 for _, tokens in prompts))),
        context=sum(-(-job.done // unit) for job, _ in prompts),
        decodes=len(contexts),
        mean_context=-(-(sum(contexts) // len(contexts)) // unit) if contexts else 0,
    )


LAYER_OPERATORS = (
    *("attn_pre_proj", "attn_post_proj", "attn_rope", "input_layernorm"),
    *("mlp_up_proj", "mlp_down_proj", "mlp_act", "add"),
)


def recorded_stage_times(
    tables: Mapping[str, np.ndarray], layers: int, stages: int, grouped_heads: bool, post_norm: bool = True
) -> StageTime:
    """Seconds of a stage from Vidur's prediction tables (milliseconds of one layer)."""
    merging = 1.1 if grouped_heads else 1.0
    operators = [*LAYER_OPERATORS, *(["post_attention_layernorm"] if post_norm else [])]

    def stage_time(batch: Batch, stage: int) -> float:
        f = features(batch)
        rounded = -(-f.tokens // 8) * 8
        layer_ms = sum(tables[name][rounded] for name in operators) + tables["attn_kv_cache_save"][f.tokens]
        if "all_reduce" in tables:
            layer_ms += 2 * (tables["all_reduce"][rounded] + 0.02)
        if f.prefills:
            layer_ms += tables["attn_prefill"][f.context, f.chunk] * (merging if f.prefills > 1 else 1.0)
        if f.decodes:
            layer_ms += tables["attn_decode"][f.decodes, f.mean_context] * (merging if f.decodes > 1 else 1.0)
        send_ms = tables["send_recv"][rounded] if stage < stages - 1 else 0.0
        return float(layer_ms * (layers / stages) + send_ms) / 1000.0

    return stage_time
