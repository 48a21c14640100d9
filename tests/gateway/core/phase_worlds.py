"""Engines in virtual time behind the scheduler in mode rra: real batches, late tokens, clients in a loop."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from dataclasses import dataclass, field

from scheduler_worlds import request

from lengthwise.engine.continuous_batching import BatchSequence, ContinuousBatch, Limits, SequenceOrder
from lengthwise.gateway.config import Admission, Dispatch, Order, Phases
from lengthwise.gateway.core import Scheduler
from lengthwise.gateway.scheduling import WorkerState
from lengthwise.testing.engine_server import LinearSteps


class Logged(ContinuousBatch):
    """Records each step: (end, decodes, prompts)."""

    def __init__(self, limits, steps):
        super().__init__(limits, steps)
        self.ran = []

    def advance(self, until_s):
        while (now_s := self.next_s()) <= until_s and now_s < math.inf:
            super().advance(now_s)
            step = self.step
            if step is not None and (not self.ran or self.ran[-1][0] != step.end_s):
                self.ran.append((step.end_s, step.decodes, len(step.prompts)))

    @property
    def cycles(self):
        """(prompts of a prefill, steps from it to the next one), but of the last."""
        at = [n for n, (_, _, prompts) in enumerate(self.ran) if prompts]
        return [(self.ran[a][2], b - a) for a, b in itertools.pairwise(at)]


@dataclass
class Job:
    """A request, and how its answer comes: in pieces of so many tokens; whole: all at its end."""

    tokens: int
    prompt_tokens: int = 50
    piece: int = 1
    complete: bool = False
    arrival_s: float = 0.0
    leaves_s: float = math.inf
    number: int = 0
    got: int = 0
    report: int = 0
    worker: str = ""
    q: BatchSequence | None = None
    sent_s: list[float] = field(default_factory=list)
    finished_s: float = math.nan
    stopped: bool = False


class PhaseWorld:
    """Runs jobs to their end. Without arrivals of their own, ``loop`` of them are in at a time."""

    def __init__(
        self, phases, jobs, *, loop=None, workers=("w",), limits=None, delay_s=0.001, jitter_s=0.0, seed=0,
        prompt_s=0.0, **order,
    ):  # fmt: skip
        self.steps, self.limits = LinearSteps(0.05, 0.0, prompt_s), limits or Limits(64, 4096)
        given = {"max_wait_s": math.inf} | order
        self.scheduler = Scheduler(Order("rra", **given), Admission(no_engine_s=math.inf), Dispatch(phases=phases))
        self.delay_s, self.jitter_s, self.dice = delay_s, jitter_s, random.Random(seed)
        self.epochs, self.up = dict.fromkeys(workers, 0), dict.fromkeys(workers, True)
        self.batches = {name: Logged(self.limits, self.steps) for name in workers}
        self.now_s, self.events, self.count = 0.0, [], 0
        self.jobs, self.phases, self.most = {}, [], dict.fromkeys(workers, 0)
        self.left = iter(jobs)
        self.tell_workers()
        if loop is None:
            for job in self.left:
                self.at(job.arrival_s, self.arrives, job)
        else:
            for job in itertools.islice(self.left, loop):
                self.at(0.0, self.arrives, job)

    def at(self, at_s, what, *report):
        self.count += 1
        heapq.heappush(self.events, (at_s, self.count, what, report))

    def tell_workers(self):
        states = [
            WorkerState(name, ("m",), up=self.up[name], slots=self.limits.max_num_seqs, epoch=epoch)
            for name, epoch in self.epochs.items()
        ]
        for one in self.scheduler.update_workers(self.now_s, states):
            job = self.jobs[one]
            job.worker, job.q, job.got = "", None, job.report
            self.scheduler.requeue(self.now_s, one, job.report)

    def run(self, until_s=math.inf):
        while True:
            engine_s = min((batch.next_s() for batch in self.batches.values()), default=math.inf)
            event_s = self.events[0][0] if self.events else math.inf
            next_s = min(engine_s, event_s, self.scheduler.next_s(self.now_s))
            if next_s == math.inf or next_s > until_s:
                return self
            self.now_s = max(self.now_s, next_s)
            if self.events and event_s <= self.now_s:
                _, _, what, reported = heapq.heappop(self.events)
                what(*reported)
            elif engine_s <= self.now_s:
                for batch in self.batches.values():
                    batch.advance(self.now_s)
            self.schedule()

    def schedule(self):
        decisions = self.scheduler.schedule(self.now_s)
        assert not decisions.preempt
        assert not decisions.expire
        self.phases += decisions.phases
        for one, name in decisions.assign:
            job = self.jobs[one]
            assert not job.worker, "never two workers at once"
            job.worker = name
            job.sent_s.append(self.now_s)
            self.at(self.now_s + self.delay_s, self.enters, job, name, self.epochs[name])
        for worker in self.scheduler.statistics(self.now_s).workers:
            self.most[worker.name] = max(self.most[worker.name], worker.in_flight)

    def arrives(self, job):
        job.number = len(self.jobs)
        self.jobs[job.number] = job
        q = request(job.number, self.now_s, predicted=100, prompt_tokens=job.prompt_tokens, preemptible=False)
        assert self.scheduler.offer(self.now_s, q) is None
        if job.leaves_s < math.inf:
            self.at(max(self.now_s, job.leaves_s), self.goes, job)

    def enters(self, job, name, epoch):
        if job.worker != name or epoch != self.epochs[name]:
            return
        arrives_s = max(self.now_s, 0.0)

        def token(at_s):
            job.got += 1
            over = job.got >= job.tokens
            if over or (not job.complete and job.got % job.piece == 0):
                late_s = self.delay_s + self.jitter_s * self.dice.random()
                self.at(at_s + late_s, self.hears, job, name, epoch, job.got)
            return over

        job.q = BatchSequence(SequenceOrder(self.count, arrives_s), job.prompt_tokens + job.report, on_token=token)
        self.batches[name].enter(job.q)

    def hears(self, job, name, epoch, tokens):
        if job.worker != name or epoch != self.epochs[name] or not math.isnan(job.finished_s) or job.stopped:
            return
        if tokens > job.report:
            job.report = tokens
            self.scheduler.on_progress(self.now_s, job.number, tokens)
        if tokens >= job.tokens:
            job.finished_s, job.worker = self.now_s, ""
            self.over(job)

    def goes(self, job):
        if math.isnan(job.finished_s) and not job.stopped:
            job.stopped = True
            if job.worker and job.q is not None:
                self.batches[job.worker].abort(job.q, self.now_s)
            job.worker = ""
            self.over(job)

    def over(self, job):
        self.scheduler.remove(self.now_s, job.number)
        if (following := next(self.left, None)) is not None:
            self.at(self.now_s + self.delay_s, self.arrives, following)

    def dies(self, name, back_s):
        """All that it had is lost; it comes back empty."""
        self.epochs[name] += 1
        self.up[name] = False
        self.batches[name] = Logged(self.limits, self.steps)
        self.tell_workers()
        self.at(self.now_s + back_s, self.comes_back, name)

    def comes_back(self, name):
        self.up[name] = True
        self.tell_workers()

    @property
    def unserved(self):
        return [job for job in self.jobs.values() if math.isnan(job.finished_s) and not job.stopped]


def outputs(count, seed, *, low=1, high=30, **metadata):
    """Jobs of random length."""
    dice = random.Random(seed)
    return [Job(dice.randint(low, high), prompt_tokens=dice.randint(10, 100), **metadata) for _ in range(count)]


def schedule(prefill_batch=4, decode_steps=7, **more):
    return Phases(prefill_batch, decode_steps, **more)
