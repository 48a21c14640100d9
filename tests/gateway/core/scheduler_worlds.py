"""A tiny world in virtual time around the scheduler: workers are servers, a token takes a fixed time."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

from lengthwise.gateway.config import Admission, Dispatch, Order
from lengthwise.gateway.core import Scheduler
from lengthwise.gateway.request import Client, LengthPrediction, Request
from lengthwise.gateway.scheduling import WorkerState


def request(number, arrival_s=0.0, *, predicted=100.0, **metadata):
    """A request that may be cut, with a predicted length; fields of its client are given as its own."""
    client = Client(**{name: metadata.pop(name) for name in Client.__slots__ if name in metadata})
    given = {"model": "m", "prompt_tokens": 10, "max_tokens": 100_000, "preemptible": True, "client": client} | metadata
    return Request(number, arrival_s, length_prediction=LengthPrediction(float(predicted)), **given)


def worker(name="w", *, cap=1, models=("m",), **metadata):
    """A worker with a fixed cap."""
    return WorkerState(name, tuple(models), concurrency=cap, **metadata)


def scheduler(mode="srtf", *, admission=None, dispatch=None, workers=None, **order):
    """A scheduler that receives its workers at time 0."""
    made = Scheduler(Order(mode=mode, **order), admission or Admission(), dispatch or Dispatch())
    made.update_workers(0.0, [worker()] if workers is None else workers)
    return made


def sent(decisions):
    """Ids that were sent, in order."""
    return [one for one, _ in decisions.assign]


@dataclass
class Job:
    """What the world knows of a request, and what became of it."""

    request: Request
    tokens: int
    done: float = 0.0
    worker: str = ""
    started_s: float = math.nan
    finished_s: float = math.nan
    visit: int = 0
    sent_s: list[float] = field(default_factory=list)


class World:
    """Runs jobs (request, true tokens) to their end; checks what must hold at every step."""

    def __init__(self, scheduler, jobs, workers, *, token_s=0.01, window=50):
        self.scheduler, self.workers = scheduler, {one.name: one for one in workers}
        self.jobs = {q.id: Job(q, tokens) for q, tokens in jobs}
        self.token_s, self.window = token_s, window
        self.now_s, self.events, self.count = 0.0, [], 0
        self.active = {one.name: set() for one in workers}
        self.log = []
        scheduler.update_workers(0.0, workers)
        for job in self.jobs.values():
            self.at(job.request.arrival_s, "arrives", job)

    def at(self, at_s, what, job=None, visit=0):
        self.count += 1
        heapq.heappush(self.events, (at_s, self.count, what, job, visit))

    def run(self):
        while self.events:
            at_s, _, what, job, visit = heapq.heappop(self.events)
            assert at_s >= self.now_s
            self.now_s = at_s
            if what != "wakes":
                getattr(self, what)(job, visit)
            self.schedule()
            wake_s = self.scheduler.next_s(self.now_s)
            assert wake_s > self.now_s, "nothing is left to be decided now"
            if math.isfinite(wake_s) and (not self.events or wake_s < self.events[0][0]):
                self.at(wake_s, "wakes")
        return self

    def arrives(self, job, visit):
        assert self.scheduler.offer(self.now_s, job.request) is None

    def ends(self, job, visit):
        if job.visit == visit and job.worker:
            self.active[job.worker].discard(job.request.id)
            self.generated(job, job.tokens)
            job.worker, job.finished_s = "", self.now_s
            self.scheduler.remove(self.now_s, job.request.id)

    def passes_window(self, job, visit):
        if job.visit == visit and job.worker:
            self.generated(job, self.made(job))
            self.at(self.now_s + self.window * self.token_s, "passes_window", job, visit)

    def generated(self, job, tokens):
        self.scheduler.on_progress(self.now_s, job.request.id, tokens)

    def made(self, job):
        """Tokens so far; a cut loses what was made of a token."""
        return min(job.tokens, round(job.done + (self.now_s - job.sent_s[-1]) / self.token_s - 0.499))

    def schedule(self):
        decisions = self.scheduler.schedule(self.now_s)
        if decisions:
            self.log.append((self.now_s, decisions))
        for one in decisions.preempt:
            self.cut(self.jobs[one])
        for one, name in decisions.assign:
            self.send(self.jobs[one], name)
        if decisions.preempt:
            self.schedule()

    def cut(self, job):
        assert job.worker, "only who runs is cut"
        assert job.request.preemptible
        job.done = self.made(job)
        self.active[job.worker].discard(job.request.id)
        job.worker = ""
        job.visit += 1
        self.scheduler.requeue(self.now_s, job.request.id, int(job.done))

    def send(self, job, name):
        assert not job.worker, "never two workers at once"
        assert math.isnan(job.finished_s)
        assert len(self.active[name]) < self.workers[name].concurrency
        job.worker, job.visit = name, job.visit + 1
        self.active[name].add(job.request.id)
        job.sent_s.append(self.now_s)
        if math.isnan(job.started_s):
            job.started_s = self.now_s
        left = (job.tokens - job.done) * self.token_s
        self.at(self.now_s + left, "ends", job, job.visit)
        if left > self.window * self.token_s:
            self.at(self.now_s + self.window * self.token_s, "passes_window", job, job.visit)
