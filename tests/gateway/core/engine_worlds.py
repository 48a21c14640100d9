"""Engines in virtual time under the real scheduler: steps, prompts that are computed, and ways there and back."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from statistics import NormalDist

import numpy as np

from lengthwise.gateway.config import Admission, Dispatch, Order
from lengthwise.gateway.core import Scheduler
from lengthwise.gateway.length_prediction.prediction import condition
from lengthwise.gateway.request import LengthPrediction, Request
from lengthwise.gateway.scheduling import WorkerState
from lengthwise.predict.distribution import LEVELS


@dataclass(frozen=True)
class Costs:
    """Of an engine: a step, more for each sequence and each prompt token in it, and the way there or back."""

    step_s: float = 0.01
    seq_s: float = 0.001
    prompt_s: float = 0.0002
    way_s: float = 0.002


@dataclass(eq=False)
class Job:
    """A request, its true length, and what became of it."""

    request: Request
    tokens: int
    row: np.ndarray
    made: int = 0
    to_compute: int = 0
    engine: str = ""
    visit: int = 0
    finished_s: float = math.nan

    @property
    def jct_s(self):
        return self.finished_s - self.request.arrival_s


@dataclass(eq=False)
class Engine:
    """One with its batch; a step is under way while it has one."""

    name: str
    batch: dict[int, Job] = field(default_factory=dict)
    steps: bool = False


def jobs_of(seed, count, rate_rps, *, mean_tokens=30.0, prompt_tokens=40, noise=0.6, spread=0.9):
    """Gamma gaps as ELIS', log-normal lengths, and a predictor that is off by ``noise`` (log), and knows it."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.gamma(0.73, 1 / (0.73 * rate_rps), count))
    lengths = np.exp(rng.normal(math.log(mean_tokens) - spread**2 / 2, spread, count))
    tokens = np.clip(np.round(lengths), 1, 20 * mean_tokens).astype(int)
    message = tokens * np.exp(rng.normal(0.0, noise, count))
    prompts = np.maximum(1, rng.exponential(prompt_tokens, count).round()).astype(int)
    normal = np.array([_normal(level) for level in LEVELS])
    made = []
    for i in range(count):
        row = np.maximum(1.0, message[i] * np.exp(noise * normal))
        metadata = {"model": "m", "prompt_tokens": int(prompts[i]), "max_tokens": 100_000, "preemptible": True}
        request = Request(
            i, float(arrivals[i]), length_prediction=LengthPrediction(float(row.mean()), quantiles=row), **metadata
        )
        made.append(Job(request, int(tokens[i]), row))
    return made


def _normal(level):
    return NormalDist().inv_cdf(min(max(float(level), 0.001), 0.999))


def capacity_rps(jobs, costs, cap, engines=1):
    """Requests a second of engines whose batches are full."""
    tokens = np.mean([job.tokens for job in jobs])
    prompt = np.mean([job.request.prompt_tokens for job in jobs])
    return engines / (tokens * (costs.step_s + costs.seq_s * cap) / cap + prompt * costs.prompt_s)


class EngineWorld:
    """Runs jobs to their end through a scheduler of an order."""

    def __init__(self, order, jobs, costs, *, cap=1, engines=1):
        self.order, self.costs = order, costs
        self.scheduler = Scheduler(order, Admission(), Dispatch())
        self.jobs = {job.request.id: job for job in jobs}
        self.engines = {f"w{k}": Engine(f"w{k}") for k in range(engines)}
        self.now_s, self.events, self.count = 0.0, [], 0
        self.scheduler.update_workers(0.0, [WorkerState(name, ("m",), concurrency=cap) for name in self.engines])
        for job in jobs:
            self.at(job.request.arrival_s, self.arrives, job)

    def at(self, at_s, what, *arguments):
        self.count += 1
        heapq.heappush(self.events, (at_s, self.count, what, arguments))

    def run(self):
        while self.events:
            self.now_s, _, what, arguments = heapq.heappop(self.events)
            what(*arguments)
            self.schedule()
            wake_s = self.scheduler.next_s(self.now_s)
            if math.isfinite(wake_s) and (not self.events or wake_s < self.events[0][0]):
                self.at(max(wake_s, self.now_s), self.wakes)
        assert all(not math.isnan(job.finished_s) for job in self.jobs.values())
        return self

    def wakes(self):
        """The scheduler asked for it."""

    def arrives(self, job):
        assert self.scheduler.offer(self.now_s, job.request) is None

    def schedule(self):
        decisions = self.scheduler.schedule(self.now_s)
        for one in decisions.preempt:
            job = self.jobs[one]
            self.at(self.now_s + self.costs.way_s, self.is_back, job, job.visit)
        for one, name in decisions.assign:
            job = self.jobs[one]
            job.visit, job.engine = job.visit + 1, name
            self.at(self.now_s + self.costs.way_s, self.reaches, job)

    def is_back(self, job, visit):
        if job.visit != visit or not math.isnan(job.finished_s):
            return
        self.engines[job.engine].batch.pop(job.request.id, None)
        self.scheduler.requeue(self.now_s, job.request.id, job.made)

    def reaches(self, job):
        job.to_compute = job.request.prompt_tokens + job.made
        engine = self.engines[job.engine]
        engine.batch[job.request.id] = job
        if not engine.steps:
            self.begin(engine)

    def begin(self, engine):
        present = list(engine.batch.values())
        engine.steps = bool(present)
        if present:
            costs = self.costs
            prompts = sum(job.to_compute for job in present)
            step_s = costs.step_s + costs.seq_s * len(present) + costs.prompt_s * prompts
            self.at(self.now_s + step_s, self.stepped, engine, [(job, job.visit) for job in present])

    def stepped(self, engine, active):
        for job, visit in active:
            if job.visit == visit and job.request.id in engine.batch:
                self.makes(engine, job)
        self.begin(engine)

    def makes(self, engine, job):
        job.made, job.to_compute = job.made + 1, 0
        q = job.request
        self.scheduler.on_progress(self.now_s, q.id, job.made)
        if job.made == job.tokens:
            del engine.batch[q.id]
            job.finished_s = self.now_s + self.costs.way_s
            self.scheduler.remove(self.now_s, q.id)
        elif job.made % self.order.window_tokens == 0:
            row = condition(job.row, job.made)
            self.scheduler.repredict(self.now_s, q.id, LengthPrediction(float(row.mean()), quantiles=row))

    def mean_s(self):
        return float(np.mean([job.jct_s for job in self.jobs.values()]))

    def p99_s(self):
        return float(np.quantile([job.jct_s for job in self.jobs.values()], 0.99))


def mean_s(mode, seed, load, *, costs, cap=1, engines=1, count=200, window_tokens=50, **more):
    """Mean JCT, its P99, and cuts of a mode at so many times the rate that full batches serve."""
    traffic = {name: more.pop(name) for name in ("mean_tokens", "prompt_tokens", "noise", "spread") if name in more}
    rate_rps = load * capacity_rps(jobs_of(seed, count, 1.0, **traffic), costs, cap, engines)
    jobs = jobs_of(seed, count, rate_rps, **traffic)
    order = Order(mode, window_tokens=window_tokens, max_wait_s=math.inf, **more)
    world = EngineWorld(order, jobs, costs, cap=cap, engines=engines).run()
    return world.mean_s(), world.p99_s(), world.scheduler.statistics(world.now_s).preemptions
