"""What the laboratory is asked, and who answers for the parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from lengthwise import engine
from lengthwise.lab.decisions import Run, answer, decision, estimates
from lengthwise.metrics import request_column
from lengthwise.schema.deployment import Deployment, Scheduler
from lengthwise.schema.errors import InputError
from lengthwise.schema.lab import FCFS, ORACLE, Cell, LabTable, LoadUnit
from lengthwise.schema.records import Records, RequestRecords, Status
from lengthwise.schema.workload import Workload

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Contestant:
    """A policy under a name.

    Attributes:
        name: For tables.
        scheduler: The policy.
        predicts: Whether it reads predictions.
        longest_wait: Nobody waits longer than so many times the 99th percentile of JCT under FCFS at the
            same load: sets the scheduler's ``max_wait_s``. None: it stays as it is.
    """

    name: str
    scheduler: Scheduler
    predicts: bool = True
    longest_wait: float | None = None


@dataclass(frozen=True)
class Question:
    """A grid of policies, predictors, loads and batch sizes.

    Attributes:
        policies: What is compared; FCFS and the oracle run in any case.
        predictors: Names that the bench knows; "oracle" knows the lengths.
        loads: In ``unit``.
        batch_sizes: Most requests that run at a time on a replica.
        seeds: How often each cell is run, each time on other requests.
        unit: Of the loads.
        base: How steps are formed and memory is given under FCFS and the oracle, which differ in rank alone.
        name: For tables.
        metadata: What is fixed, for headings.
        level: Confidence level of intervals.
    """

    policies: tuple[Contestant, ...]
    predictors: tuple[str, ...]
    loads: tuple[float, ...]
    batch_sizes: tuple[int, ...]
    seeds: int = 5
    unit: LoadUnit = LoadUnit.CAPACITY
    base: Scheduler = Scheduler(rank="fcfs_evicted_first", memory="paged_by_chunk")  # noqa: RUF009 - it is frozen
    name: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    level: float = 0.95

    def __post_init__(self) -> None:
        for what in ("policies", "loads", "batch_sizes"):
            if not getattr(self, what):
                raise InputError(f"a lab needs at least one of its {what}; there is none")
        if self.seeds < 1:
            raise InputError(f"a lab needs at least 1 seed; it has {self.seeds}")
        if any(not 0 < load < float("inf") for load in self.loads):
            raise InputError(f"loads must be above 0 and finite; they are {list(self.loads)}")
        if any(batch < 1 for batch in self.batch_sizes):
            raise InputError(f"batch sizes must be at least 1; they are {list(self.batch_sizes)}")
        if any(p.longest_wait is not None and not p.longest_wait > 0 for p in self.policies):
            raise InputError("the longest wait, as a multiple of FCFS' 99th percentile, must be above 0")
        names = [policy.name for policy in self.policies]
        _require_each_once("policies", names)
        _require_each_once("predictors", list(self.predictors))
        if any(policy.predicts for policy in self.policies) and not self.predictors:
            raise InputError("a policy that reads predictions needs a predictor; name one, such as oracle")
        if bad := {FCFS, ORACLE} & {p.name for p in self.policies if p.predicts}:
            raise InputError(f"{bad.pop()!r} names an end of the gap; give the policy another name")


def ends(question: Question) -> tuple[tuple[Contestant, str], tuple[Contestant, str]]:
    """FCFS and the oracle with their predictors: shortest first with lengths known, nobody interrupted (ELIS)."""
    fcfs = question.base
    oracle = replace(fcfs, rank="sjf", takeover="never")
    return (Contestant(FCFS, fcfs, predicts=False), ""), (Contestant(ORACLE, oracle), ORACLE)


def _require_each_once(what: str, names: Sequence[str]) -> None:
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(f"the {what} of a lab must have different names; twice: {', '.join(twice)}")


class Bench(Protocol):
    """Who makes the requests and what serves them."""

    def requests(self, seed: int, predictor: str) -> Workload:
        """The requests of a seed, the same for every predictor, with its predictions ("": none)."""
        ...

    def deployment(self, scheduler: Scheduler, batch: int) -> Deployment:
        """What serves, at most ``batch`` requests at a time on a replica."""
        ...


class Each(Protocol):
    """Does work for every task, perhaps several at a time: (place, result) as they come."""

    def __call__(self, tasks: Sequence[T], work: Callable[[T], R]) -> Iterator[tuple[int, R]]:
        """The first error is raised here."""
        ...


def one_by_one(tasks: Sequence[Any], work: Callable[[Any], Any]) -> Iterator[tuple[int, Any]]:
    """Every task in its order, in this thread."""
    for at, task in enumerate(tasks):
        yield at, work(task)


Floats = npt.NDArray[np.float64]
WARM_SHARE = 0.2
"""Of the requests that a full queue serves, left out of its rate: the batch fills up."""


def at_rate(workload: Workload, rate_rps: float) -> Workload:
    """The same requests in the same order, their times stretched to a mean rate.

    Raises:
        InputError: They have no times that could be stretched.
    """
    workload.require_nobody_after("a lab")
    since_s = workload.arrival_s - workload.arrival_s[0]
    if workload.concurrency is not None or len(workload) < 2 or not since_s[-1] > 0:
        raise InputError(
            "a lab stretches arrivals to its loads, so requests must arrive one after the other; "
            "give the workload a request_rate (its value does not matter here) or arrivals of a kind with a rate"
        )
    return replace(workload, arrival_s=since_s * ((len(workload) - 1) / (since_s[-1] * rate_rps)))


def isolated_s(workload: Workload, deployment: Deployment, how: str) -> Floats:
    """[n] seconds that each request takes with nobody else there; NaN for those that are refused."""
    one = replace(deployment, parallel=replace(deployment.parallel, replicas=1))
    single = replace(workload, arrival_s=np.zeros(len(workload)), concurrency=1)
    records = engine.simulate(single, one, keep_steps=0, engine=how)
    r = records.requests
    return np.asarray(r.finished_s - r.scheduled_s)


def saturated_rps(workload: Workload, deployment: Deployment, how: str) -> float:
    """Requests a second while none of the replicas' queues is ever empty: all arrive at once."""
    burst = replace(workload, arrival_s=np.zeros(len(workload)), concurrency=None)
    r = engine.simulate(burst, deployment, keep_steps=0, engine=how).requests
    ended = np.sort(r.finished_s[np.isfinite(r.finished_s)])
    if not len(ended):
        raise InputError("no request of the lab's workload can ever be served; look at lengthwise explain")
    busy = ended[ended <= np.nanmax(r.scheduled_s)]
    first = int(WARM_SHARE * len(busy))
    if len(busy) - first < 2:  # all run at once: no queue to speak of
        return len(ended) / float(ended[-1])
    return (len(busy) - 1 - first) / float(busy[-1] - busy[first])


def measured(records: Records, max_num_seqs: int, isolated: Floats) -> dict[str, float]:
    """The numbers of a run by the names of ``schema.lab.Cell``, the paired ones left out.

    Args:
        records: What the run left behind.
        max_num_seqs: Requests that can run at a time on all replicas.
        isolated: [n] seconds that each request takes alone.

    Raises:
        InputError: Nothing was served.
    """
    r = records.requests
    done = r.status == Status.FINISHED
    if not done.any():
        raise InputError("no request of the lab's workload was served; raise timeout_s or look at lengthwise explain")
    jct_s, wait_s = (request_column(r, name)[done] for name in ("jct_s", "queued_for_s"))
    slowdown = jct_s / isolated[done]
    return {
        "jct.mean": float(jct_s.mean()),
        "jct.p50": float(np.quantile(jct_s, 0.5)),
        "jct.p99": float(np.quantile(jct_s, 0.99)),
        "ttft.mean": float(request_column(r, "ttft_s")[done].mean()),
        "wait.mean": float(wait_s.mean()),
        "wait.max": float(np.nanmax(r.queued_for_s)),
        "waiting_share": float(wait_s.sum() / jct_s.sum()),
        "found_full": _found_full(r, max_num_seqs),
        "slowdown.mean": float(slowdown.mean()),
        "slowdown.p99": float(np.quantile(slowdown, 0.99)),
        "requests_per_s": float(done.sum() / records.end_s),
        "preemptions_per_request": float(r.preemptions.sum() / len(r.status)),
        "recomputed_tokens_per_request": _recomputed(records, r, done) / len(r.status),
        "served": float(done.mean()),
    }


def _found_full(r: RequestRecords, max_num_seqs: int) -> float:
    """Share of requests that, when they arrive, find at least so many others under way."""
    gone_s = np.sort(np.where(np.isfinite(r.finished_s), r.finished_s, r.arrival_s))
    there = np.arange(len(gone_s)) - np.searchsorted(gone_s, r.arrival_s, side="right")
    return float((there >= max_num_seqs).mean())


def _recomputed(records: Records, r: RequestRecords, done: npt.NDArray[np.bool_]) -> float:
    """Tokens computed beyond once each; the last output token is never computed on."""
    once = (r.prompt_tokens + np.maximum(r.output_tokens, 1) - 1)[done].sum()
    return max(0.0, float(records.totals.tokens.sum() - once))


Progress = Callable[[int, int], None]
Side = tuple[Contestant, str]
Place = tuple[int, float]


def lab(
    question: Question,
    bench: Bench,
    *,
    each: Each = one_by_one,
    progress: Progress = lambda *_: None,
    how: str = "kernel",
) -> LabTable:
    """The whole table: a cell a policy, predictor, load and batch size, and what follows from them.

    In every cell of a seed the same requests arrive in the same order with the same predictions; a load only
    stretches their times (common random numbers), so that differences are of the policies alone. A run
    lasts until its last request has ended, also where the load is above what can be served.

    Args:
        question: What is asked.
        bench: Who makes requests and deployments.
        each: Who does the runs, perhaps several at a time.
        progress: Called with runs done and runs in all.
        how: The engine, as ``engine.simulate`` names it.

    Raises:
        InputError: The requests cannot be stretched to a load, or none is ever served.
    """
    runner = _Runner(question, bench, each, progress, how)
    runner.prepare()
    cells = tuple(runner.cells())
    batches = list(dict.fromkeys(question.batch_sizes))
    places = [(batch, load) for batch in batches for load in question.loads]
    here = ([c for c in cells if (c.batch, c.load) == place] for place in places)
    decisions = tuple(decision(one, seeds=question.seeds, level=question.level) for one in here)
    return LabTable(
        name=question.name,
        metadata=question.metadata,
        unit=question.unit,
        cells=cells,
        decisions=decisions,
        answer=answer(decisions, question.unit),
        seeds=question.seeds,
        requests=runner.count,
        level=question.level,
    )


@dataclass
class _Runner:
    """The runs of one table, in three waves: requests, what they take alone and saturated, cells."""

    question: Question
    bench: Bench
    each: Each
    progress: Progress
    how: str
    workloads: dict[tuple[int, str], Workload] = field(default_factory=dict)
    isolated: dict[int, npt.NDArray[np.float64]] = field(default_factory=dict)
    rates: dict[Place, float] = field(default_factory=dict)
    fcfs_p99_s: dict[Place, float] = field(default_factory=dict)
    done: int = 0
    of: int = 0

    def prepare(self) -> None:
        """Requests with predictions, their times alone, and the rate of every load."""
        q = self.question
        seeds = range(q.seeds)
        wanted = [(seed, name) for seed in seeds for name in dict.fromkeys(("", ORACLE, *q.predictors))]
        batches = list(dict.fromkeys(q.batch_sizes))
        saturated = [(seed, batch) for batch in batches for seed in seeds] if self._by_capacity else []
        runs = len(self._sides()) * len(batches) * len(q.loads) * q.seeds
        self.of = len(wanted) + q.seeds + len(saturated) + runs
        self.progress(0, self.of)
        self.workloads = dict(zip(wanted, self._all(wanted, lambda at: self.bench.requests(*at)), strict=True))
        self._check_same()
        self.isolated = dict(zip(seeds, self._all(list(seeds), self._alone), strict=True))
        capacity = dict(zip(saturated, self._all(saturated, self._saturated), strict=True))
        for batch in batches:
            of_batch = [capacity[at] for at in saturated if at[1] == batch]
            for load in q.loads:
                self.rates[batch, load] = load * self._unit_rps(batch, of_batch)

    def cells(self) -> Iterator[Cell]:
        """Every cell; FCFS and the oracle come first at each load and batch size."""
        q, sides = self.question, self._sides()
        fcfs = self._batch_size(sides[:1])
        for place in self.rates:
            self.fcfs_p99_s[place] = float(np.mean([run["jct.p99"] for run in fcfs[place, 0]]))
        runs = fcfs | self._batch_size(sides, first=1)
        for place, rate_rps in self.rates.items():
            for at, (policy, predictor) in enumerate(sides):
                values = estimates(runs[place, at], runs[place, 0], runs[place, 1], q.level)
                yield Cell(policy.name, predictor, *place, rate_rps, values)

    def _batch_size(self, sides: list[Side], first: int = 0) -> dict[tuple[Place, int], list[Run]]:
        """The runs of some sides at every place, one a seed."""
        keys = [(place, at) for place in self.rates for at in range(first, len(sides))]
        tasks = [(*place, sides[at], seed) for place, at in keys for seed in range(self.question.seeds)]
        found = self._all(tasks, lambda task: self._run(*task))
        size = self.question.seeds
        return {key: found[i * size : (i + 1) * size] for i, key in enumerate(keys)}

    @property
    def count(self) -> int:
        """Requests of a run."""
        return len(next(iter(self.workloads.values())))

    @property
    def _by_capacity(self) -> bool:
        return self.question.unit is LoadUnit.CAPACITY

    def _sides(self) -> list[Side]:
        """The two ends, then every policy with every predictor that it reads; nothing twice."""
        sides: list[Side] = list(ends(self.question))
        for policy in self.question.policies:
            if policy.name != FCFS:
                sides += [(policy, name) for name in (self.question.predictors if policy.predicts else ("",))]
        return sides

    def _run(self, batch: int, load: float, side: Side, seed: int) -> Run:
        policy, predictor = side
        workload = at_rate(self.workloads[seed, predictor], self.rates[batch, load])
        scheduler = policy.scheduler
        if policy.longest_wait is not None:
            scheduler = replace(scheduler, max_wait_s=policy.longest_wait * self.fcfs_p99_s[batch, load])
        served = self.bench.deployment(scheduler, batch)
        try:
            records = engine.simulate(workload, served, seed=seed, keep_steps=0, engine=self.how)
        except InputError as error:
            error.add_note(f"in the lab's policy {policy.name!r} with predictor {predictor!r}")
            raise
        return measured(records, batch * served.parallel.replicas, self.isolated[seed])

    def _alone(self, seed: int) -> npt.NDArray[np.float64]:
        most = max(self.question.batch_sizes)
        return isolated_s(self.workloads[seed, ""], self.bench.deployment(self.question.base, most), self.how)

    def _saturated(self, at: tuple[int, int]) -> float:
        seed, batch = at
        served = self.bench.deployment(self.question.base, batch)
        return saturated_rps(self.workloads[seed, ""], served, self.how)

    def _unit_rps(self, batch: int, saturated: list[float]) -> float:
        if self.question.unit is LoadUnit.RPS:
            return 1.0
        if self._by_capacity:
            return float(np.mean(saturated))
        return batch / float(np.nanmean(np.concatenate(list(self.isolated.values()))))

    def _check_same(self) -> None:
        """Predictors change predictions alone."""
        for (seed, name), workload in self.workloads.items():
            plain = self.workloads[seed, ""]
            if not np.array_equal(workload.output_tokens, plain.output_tokens):
                raise InputError(f"predictor {name!r} changed the requests of seed {seed}; it may only predict")

    def _all(self, tasks: Sequence[Any], work: Callable[[Any], Any]) -> list[Any]:
        results: dict[int, Any] = {}
        for at, result in self.each(tasks, work):
            results[at] = result
            self.done += 1
            self.progress(self.done, self.of)
        return [results[at] for at in range(len(tasks))]
