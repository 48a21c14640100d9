"""Simulates policies with predictors on the same requests, and decides whether length-aware scheduling is worth it."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from lengthwise import engine
from lengthwise.metrics import request_column
from lengthwise.schema.deployment import Deployment, Scheduler
from lengthwise.schema.errors import InputError
from lengthwise.schema.estimate import UNKNOWN, Estimate
from lengthwise.schema.lab import FCFS, NOT_COMPARED, ONE_SEED, ORACLE, UNDECIDED, Cell, LabTable, LoadUnit, Verdict
from lengthwise.schema.records import Records, Status
from lengthwise.schema.workload import Workload
from lengthwise.statistics import Floats, joint_widening, mean_estimate, t_half_width

Run = dict[str, float]
RATIOS = ("jct.mean", "jct.p50", "jct.p99")

MIN_FULL_SHARE = 0.01  # share of requests that find all slots in use; below it, requests do not queue for slots
MIN_WAITING_SHARE = 0.05  # share of JCT spent waiting; below it, requests do not queue for memory either
MIN_GAIN = 0.01  # a smaller gain in mean JCT is not worth the effort, even if significant
OPEN_GAIN = 0.1  # a gain that is not significant is undecided if its interval includes this gain
MAX_SERVED_DIFFERENCE = 0.01  # if served shares differ by more, the means are of different requests
IMPROVEMENT, IDLE, MATCHING, NONE, TAIL = "worth it", "no queue", "lengths alike", "no gain", "the tail pays"


def estimates(own: Sequence[Run], fcfs: Sequence[Run], oracle: Sequence[Run], level: float) -> dict[str, Estimate]:
    """Return the values of a cell (a policy at a load). The runs of the policy, FCFS and the oracle are by seed."""

    def column(runs: Sequence[Run], name: str) -> npt.NDArray[np.float64]:
        return np.array([run[name] for run in runs])

    values = {name: mean_estimate(column(own, name), level) for name in own[0]}
    x, f, o = (column(runs, "jct.mean") for runs in (own, fcfs, oracle))
    values["gap_closed"] = gap_closed(x, f, o, level)
    for end, runs in (("fcfs", fcfs), ("oracle", oracle)):
        for name in RATIOS:
            values[f"{name}/{end}"] = ratio(column(own, name), column(runs, name), level)
    return values


def gap_closed(own: npt.ArrayLike, fcfs: npt.ArrayLike, oracle: npt.ArrayLike, level: float) -> Estimate:
    """Return (FCFS - own) / (FCFS - oracle) of means over seeds, or UNKNOWN if FCFS - oracle is not significant."""
    f, x, o = (np.asarray(v, float) for v in (fcfs, own, oracle))
    gap = mean_estimate(f - o, level)
    # A gap is significant, and at least a millionth of FCFS' mean.
    if not gap.value > 1e-6 * float(f.mean()) or (gap.has_interval and not gap.low > 0):
        return UNKNOWN
    return ratio(f - x, f - o, level)


def ratio(numerator: npt.ArrayLike, denominator: npt.ArrayLike, level: float) -> Estimate:
    """Return mean(numerator) / mean(denominator) over pairs of the same seed, with a linearised t interval."""
    a, b = np.asarray(numerator, float), np.asarray(denominator, float)
    mean = float(b.mean())
    if mean == 0:
        return UNKNOWN
    # The spread of a - ratio x b, in which noise of both cancels (Cochran, Sampling Techniques, 1977, 6.4).
    value = float(a.mean()) / mean
    return Estimate(value, float(t_half_width(a - value * b, level)) / abs(mean))


def decision(cells: Sequence[Cell], *, seeds: int, level: float = 0.95) -> Verdict:
    """Return the verdict on the cells of one load and batch size. The first two cells are FCFS and the oracle.

    Length-aware scheduling is worth it if some policy, with a predictor that exists, is significantly faster than FCFS
    in the mean, by at least 1 %, and raises the 99th percentile by no more than it reduces the mean (both in percent).
    The significance level applies to all candidates together (Bonferroni), because the best is chosen. With one seed,
    means are compared without a test of significance, and the verdict says so.
    """
    fcfs, oracle = cells[0], cells[1]
    tried = [cell for cell in cells[2:] if cell.policy != FCFS]
    # Candidates that know the true lengths count only if nothing else was tried.
    candidates = [cell for cell in tried if cell.predictor != ORACLE] or tried
    widening = math.nan
    if seeds > 1 and candidates:
        widening = joint_widening(level, len(candidates), seeds - 1)
    key = "jct.mean/fcfs"
    widened = [Estimate(cell[key].value, cell[key].half_width * widening) for cell in candidates]
    each = zip(candidates, widened, strict=True)
    candidates = [replace(cell, values={**cell.values, key: mean}) for cell, mean in each]

    def served_difference(cell: Cell) -> float:
        return abs(cell["served"].value - fcfs["served"].value)

    different = max((oracle, *candidates), key=served_difference)
    served = fcfs["served"].value
    if served_difference(different) > MAX_SERVED_DIFFERENCE:
        description = (
            f"{_percent(served)} of the requests are served under FCFS and {_percent(different['served'].value)} under "
            f"{different.name}: the means are of different requests. Raise timeout_s, or lower the load."
        )
        return Verdict(fcfs.batch, fcfs.load, False, NOT_COMPARED, "", description)
    reason, best, description = _compare(fcfs, oracle, candidates)
    if served < 1:
        description += f" {_percent(served)} of all requests are served; the means leave out the others."
    return Verdict(fcfs.batch, fcfs.load, reason == IMPROVEMENT, reason, best, description)


def _compare(fcfs: Cell, oracle: Cell, candidates: list[Cell]) -> tuple[str, str, str]:
    """Return the verdict's reason, the best cell's name, and a sentence. All cells serve the same share of requests."""
    full, waiting = fcfs["found_full"].value, fcfs["waiting_share"].value
    if full < MIN_FULL_SHARE and waiting < MIN_WAITING_SHARE and _gain(oracle) < MIN_GAIN:
        found_full = f"{_percent(full)} of the requests find it full"
        return IDLE, "", f"Everything fits the batch: {found_full}, so that the order does not matter."
    # Significantly faster than FCFS; with a single seed, by the mean.
    means = [(cell, cell["jct.mean/fcfs"]) for cell in candidates if _gain(cell) >= MIN_GAIN]
    faster = [cell for cell, mean in means if (mean.high if mean.has_interval else mean.value) < 1]
    acceptable = [cell for cell in faster if _tail(cell) <= _gain(cell)]
    if acceptable:
        best = max(acceptable, key=_gain)
        cuts = f"{best.name} cuts mean JCT by {_interval(best)}"
        tail = _change(best["jct.p99/fcfs"].value)
        if not best["jct.mean/fcfs"].has_interval:
            description = f"{cuts} and the 99th percentile {tail}, but one seed has no interval: run more seeds."
            return ONE_SEED, best.name, description
        significance = f" (significant among {len(candidates)} candidates)" if len(candidates) > 1 else ""
        closed = best["gap_closed"].value
        share = "" if math.isnan(closed) else f", {_percent(closed)} of the gain with known lengths"
        oracle_tail = _change(oracle["jct.p99/fcfs"].value)
        description = f"{cuts}{significance}{share}; the 99th percentile {tail}, under the oracle it {oracle_tail}."
        return IMPROVEMENT, best.name, description
    if faster:
        best = max(faster, key=lambda cell: _gain(cell) - _tail(cell))
        description = (
            f"{best.name} cuts mean JCT by {_interval(best)}, but the 99th percentile "
            f"{_change(best['jct.p99/fcfs'].value)}: the tail loses more than the mean gains. A bound on waiting "
            "(max_wait_s) or ageing trades some of the one for the other."
        )
        return TAIL, best.name, description
    best = max(candidates, key=_gain, default=oracle)
    if _gain(oracle) < MIN_GAIN:
        description = (
            f"Requests wait for {_percent(waiting)} of their JCT, but shortest job first with known lengths changes "
            f"mean JCT by {_interval(oracle, sign=True)}: lengths do not differ enough for the order to matter."
        )
        return MATCHING, best.name, description
    change, possible = _interval(best, sign=True), _percent(_gain(oracle))
    description = (
        f"The best candidate, {best.name}, changes mean JCT by {change}; known lengths would cut it by {possible}."
    )
    mean = best["jct.mean/fcfs"]
    is_open = mean.has_interval and 1 - mean.low >= OPEN_GAIN
    if is_open:
        description += f" The interval allows a gain of {_percent(min(1, 1 - mean.low))}: run more seeds or requests."
    return UNDECIDED if is_open else NONE, best.name, description


def answer(decisions: Sequence[Verdict], unit: LoadUnit) -> tuple[str, ...]:
    """Return a text for each reason among the verdicts, with the loads to which it applies and an example."""
    lines = []
    for reason in (IMPROVEMENT, ONE_SEED, UNDECIDED, TAIL, NONE, MATCHING, IDLE, NOT_COMPARED):
        if matching := [v for v in decisions if v.reason == reason]:
            everywhere = "at every load and batch size" if reason == IMPROVEMENT else "at any load or batch size"
            where = everywhere if len(matching) == len(decisions) else _loads_text(matching, unit)
            shown = matching[-1] if reason == IMPROVEMENT else matching[0]
            example = f" For instance at {unit.text(shown.load)}, batch {shown.batch}:" if len(matching) > 1 else ""
            lines.append(f"{shown.head} {where}.{example} {shown.description}")
    return tuple(lines)


def _gain(cell: Cell) -> float:
    return 1 - cell["jct.mean/fcfs"].value


def _tail(cell: Cell) -> float:
    return cell["jct.p99/fcfs"].value - 1


def _interval(cell: Cell, *, sign: bool = False) -> str:
    mean = cell["jct.mean/fcfs"]
    value = 100 * (mean.value - 1) * (1 if sign else -1)
    half = f" ± {100 * mean.half_width:.1f}" if mean.has_interval else ""
    return f"{value:+.1f}{half} %" if sign else f"{value:.1f}{half} %"


def _change(ratio: float) -> str:
    change = 100 * (ratio - 1)
    text = f"{'grows' if change > 0 else 'falls'} by {abs(change):.0f} %"
    return text if abs(change) >= 0.5 else "stays as it is"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if abs(share) >= 0.1 or share == 0 else f"{100 * share:.1f} %"


def _loads_text(verdicts: Sequence[Verdict], unit: LoadUnit) -> str:
    loads: dict[int, list[float]] = {}
    for v in verdicts:
        loads.setdefault(v.batch, []).append(v.load)
    batches: dict[tuple[float, ...], list[int]] = {}
    for batch, of_batch in loads.items():
        batches.setdefault(tuple(of_batch), []).append(batch)
    parts = []
    for same_loads, same_batches in batches.items():
        numbers, _, (*_, unit_text) = zip(*(unit.text(load).partition(" ") for load in same_loads), strict=True)
        parts.append(f"at {', '.join(numbers)} {unit_text} (batch {', '.join(map(str, same_batches))})")
    return " and ".join(parts)


T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
R = TypeVar("R")


@dataclass(frozen=True)
class Contestant:
    """A policy to compare, with its name in the table."""

    name: str
    scheduler: Scheduler
    predicts: bool = True  # whether it reads predictions
    max_wait_factor: float | None = None  # ``max_wait_s`` over FCFS' p99 of JCT at the same load; None: unchanged


@dataclass(frozen=True)
class Question:
    """The grid of policies, predictors, loads and batch sizes to compare."""

    policies: tuple[Contestant, ...]  # candidates; FCFS and the oracle always run
    predictors: tuple[str, ...]  # names of the bench's predictors; "oracle" predicts the true lengths
    loads: tuple[float, ...]  # in ``unit``
    batch_sizes: tuple[int, ...]  # concurrency limits of a replica
    seeds: int = 5  # runs of each cell; each seed has its own requests
    unit: LoadUnit = LoadUnit.CAPACITY
    # Batching and memory of FCFS and the oracle, which differ only in rank.
    base: Scheduler = Scheduler(rank="fcfs_preempted_first", memory="paged_by_chunk")  # noqa: RUF009 - frozen
    name: str = ""
    metadata: dict[str, str] = field(default_factory=dict)  # fixed properties, for headings
    level: float = 0.95  # of confidence intervals

    def __post_init__(self) -> None:  # noqa: C901 - one check a line
        for name in ("policies", "loads", "batch_sizes"):
            if not getattr(self, name):
                raise InputError(f"a lab needs at least one of its {name}; there is none")
        if self.seeds < 1:
            raise InputError(f"a lab needs at least 1 seed; it has {self.seeds}")
        if any(not 0 < load < float("inf") for load in self.loads):
            raise InputError(f"loads must be above 0 and finite; they are {list(self.loads)}")
        if any(batch < 1 for batch in self.batch_sizes):
            raise InputError(f"batch sizes must be at least 1; they are {list(self.batch_sizes)}")
        if any(p.max_wait_factor is not None and not p.max_wait_factor > 0 for p in self.policies):
            raise InputError("the longest wait, as a multiple of FCFS' 99th percentile, must be above 0")
        for kind, names in (("policies", [p.name for p in self.policies]), ("predictors", list(self.predictors))):
            if repeated := sorted({name for name in names if names.count(name) > 1}):
                raise InputError(f"the {kind} of a lab must have different names; repeated: {', '.join(repeated)}")
        if any(policy.predicts for policy in self.policies) and not self.predictors:
            raise InputError("a policy that reads predictions needs a predictor; name one, such as oracle")
        if bad := {FCFS, ORACLE} & {p.name for p in self.policies if p.predicts}:
            raise InputError(f"{bad.pop()!r} names an end of the gap; give the policy another name")


def baselines(question: Question) -> tuple[tuple[Contestant, str], tuple[Contestant, str]]:
    """Return FCFS and the oracle (shortest job first, nonpreemptive, known lengths), each with its predictor."""
    fcfs = question.base
    oracle = replace(fcfs, rank="sjf", preemption="never")
    return (Contestant(FCFS, fcfs, predicts=False), ""), (Contestant(ORACLE, oracle), ORACLE)


class Bench(Protocol):
    """Interface of the object that provides a lab's requests and deployments."""

    def requests(self, seed: int, predictor: str) -> Workload:
        """Return a seed's requests, equal for all predictors, with predictions unless ``predictor`` is ""."""

    def deployment(self, scheduler: Scheduler, batch: int) -> Deployment:
        """Return the deployment that runs at most ``batch`` requests at a time on a replica."""


class TaskRunner(Protocol):
    """Interface of functions that run tasks, possibly in parallel."""

    def __call__(self, tasks: Sequence[T], work: Callable[[T], R]) -> Iterator[tuple[int, R]]:
        """Yield the index and the result of each task as it completes. Raises the first error of a task."""


def one_by_one(tasks: Sequence[Any], work: Callable[[Any], Any]) -> Iterator[tuple[int, Any]]:
    """Run every task in order, in this thread."""
    for i, task in enumerate(tasks):
        yield i, work(task)


WARMUP_SHARE = 0.2  # share of the requests that capacity leaves out, while the batch fills up
MIN_FULL_BATCHES = 8  # of a burst that measures capacity; in a smaller one, few long requests finish during the queue
MIN_SPAN = 3  # of the arrivals, in 99th percentiles of the time that a request takes alone; in less, no queue settles


def at_rate(workload: Workload, rate_rps: float) -> Workload:
    """Return the requests with arrivals scaled to a mean rate. Raises InputError if they have no arrivals."""
    workload.require_independent("a lab")
    since_s = workload.arrival_s - workload.arrival_s[0]
    if workload.concurrency is not None or len(workload) < 2 or not since_s[-1] > 0:
        raise InputError(
            "a lab scales arrivals to its loads, so requests must arrive one after the other; "
            "give the workload a request_rate (its value does not matter here) or arrivals of a kind with a rate"
        )
    return replace(workload, arrival_s=since_s * ((len(workload) - 1) / (since_s[-1] * rate_rps)))


def isolated_s(workload: Workload, deployment: Deployment, engine_name: str) -> Floats:
    """Return the seconds that each request takes on an idle deployment ([n]). Rejected requests have NaN."""
    one = replace(deployment, parallel=replace(deployment.parallel, replicas=1))
    single = replace(workload, arrival_s=np.zeros(len(workload)), concurrency=1)
    r = engine.simulate(single, one, max_log_steps=0, engine=engine_name).requests
    return np.asarray(r.finished_s - r.scheduled_s)


def saturated_rps(workload: Workload, deployment: Deployment, engine_name: str) -> float:
    """Return the capacity in requests per second: the rate of finishes while requests wait, if all arrive at once."""
    # Copies of prompts that share prefixes would hit in the cache, so those requests stay as they are.
    slots = deployment.limits.max_num_seqs * deployment.parallel.ranks
    copies = 1 if workload.prefixes is not None else math.ceil(MIN_FULL_BATCHES * slots / len(workload))
    rows = np.tile(np.arange(len(workload)), copies)
    burst = replace(workload.take(rows, np.zeros(len(rows))), concurrency=None)
    r = engine.simulate(burst, deployment, max_log_steps=0, engine=engine_name).requests
    finished_s = np.sort(r.finished_s[np.isfinite(r.finished_s)])
    if not len(finished_s):
        raise InputError("no request of the lab's workload can ever be served; look at lengthwise explain")
    queued_s = finished_s[finished_s <= np.nanmax(r.scheduled_s)]
    first = int(WARMUP_SHARE * len(queued_s))
    if len(queued_s) - first < 2:  # all requests run at once, without a queue
        return len(finished_s) / float(finished_s[-1])
    return (len(queued_s) - 1 - first) / float(queued_s[-1] - queued_s[first])


def run_values(
    records: Records, max_num_seqs: int, isolated: Floats, deployment: Deployment | None = None
) -> dict[str, float]:
    """Return one run's values, named as in ``schema.lab.Cell``. ``isolated`` [n] is the result of ``isolated_s``.

    ``deployment`` is given if prompts share prefixes; the values then include the hit rate of its prefix cache.
    """
    r = records.requests
    done = r.status == Status.FINISHED
    if not done.any():
        raise InputError("no request of the lab's workload was served; raise timeout_s or look at lengthwise explain")
    jct_s, wait_s = (request_column(r, name)[done] for name in ("jct_s", "queued_for_s"))
    slowdown = jct_s / isolated[done]
    left_s = np.sort(np.where(np.isfinite(r.finished_s), r.finished_s, r.arrival_s))
    in_system = np.arange(len(left_s)) - np.searchsorted(left_s, r.arrival_s, side="right")
    # Each token is computed once, except the last output token and tokens that were cached or loaded.
    once = (r.prompt_tokens + np.maximum(r.output_tokens, 1) - 1)[done].sum()
    found: Run = {}
    if deployment is not None and deployment.limits.enable_prefix_caching:
        assert r.cached_tokens is not None
        assert r.loaded_tokens is not None
        cached, loaded, prompt = (int(c[done].sum()) for c in (r.cached_tokens, r.loaded_tokens, r.prompt_tokens))
        once -= cached + loaded
        found["hit_rate"] = cached / prompt
        found |= {"loaded_share": loaded / prompt} if deployment.offload_blocks else {}
    recomputed = max(0.0, float(records.totals.tokens.sum() - once))
    return {
        "jct.mean": float(jct_s.mean()),
        "jct.p50": float(np.quantile(jct_s, 0.5)),
        "jct.p99": float(np.quantile(jct_s, 0.99)),
        "ttft.mean": float(request_column(r, "ttft_s")[done].mean()),
        "wait.mean": float(wait_s.mean()),
        "wait.max": float(np.nanmax(r.queued_for_s)),
        "waiting_share": float(wait_s.sum() / jct_s.sum()),
        "found_full": float((in_system >= max_num_seqs).mean()),
        "slowdown.mean": float(slowdown.mean()),
        "slowdown.p99": float(np.quantile(slowdown, 0.99)),
        "requests_per_s": float(done.sum() / records.end_s),
        "preemptions_per_request": float(r.preemptions.sum() / len(r.status)),
        "recomputed_tokens_per_request": recomputed / len(r.status),
        "served": float(done.mean()),
        **found,
    }


Progress = Callable[[int, int], None]
Side = tuple[Contestant, str]
Point = tuple[int, float]  # batch size and load


def lab(
    question: Question,
    bench: Bench,
    *,
    each: TaskRunner = one_by_one,
    progress: Progress = lambda *_: None,
    engine_name: str = "kernel",
) -> LabTable:
    """Simulate each policy, predictor, load and batch size. Return a table of the values, with verdicts.

    For each seed, all cells have the same requests in the same order with the same predictions; a load only scales
    arrival times (common random numbers), so that only policies cause differences. A run ends when its last request
    finishes, also at loads above capacity. ``progress`` receives the numbers of completed and of all runs. Raises
    InputError if requests have no arrivals to scale, or if none can be served.
    """
    runner = _Runner(question, bench, each, progress, engine_name)
    runner.prepare()
    cells = tuple(runner.cells())
    by_point = ([cell for cell in cells if (cell.batch, cell.load) == point] for point in runner.rates)
    verdicts = (decision(group, seeds=question.seeds, level=question.level) for group in by_point)
    decisions = tuple(map(runner.checked, verdicts))
    shared: dict[str, Any] = {n: getattr(question, n) for n in ("name", "metadata", "unit", "seeds", "level")}
    return LabTable(
        cells=cells,
        decisions=decisions,
        answer=answer(decisions, question.unit),
        requests=len(next(iter(runner.workloads.values()))),
        **shared,
    )


@dataclass
class _Runner:
    """Runs all simulations of a table: first those of single requests and of capacities, then those of the cells."""

    question: Question
    bench: Bench
    each: TaskRunner
    progress: Progress
    engine_name: str
    workloads: dict[tuple[int, str], Workload] = field(default_factory=dict)
    isolated: dict[int, Floats] = field(default_factory=dict)
    rates: dict[Point, float] = field(default_factory=dict)
    fcfs_p99_s: dict[Point, float] = field(default_factory=dict)
    done: int = 0
    total: int = 0

    def prepare(self) -> None:
        """Create the requests with predictions. Simulate their times alone, and the request rate of each load."""
        q = self.question
        seeds, batches = range(q.seeds), list(dict.fromkeys(q.batch_sizes))
        sources = [(seed, name) for seed in seeds for name in dict.fromkeys(("", ORACLE, *q.predictors))]
        saturated = [(seed, batch) for batch in batches for seed in seeds] if q.unit is LoadUnit.CAPACITY else []
        runs = len(self._sides()) * len(batches) * len(q.loads) * q.seeds
        self.total = len(sources) + q.seeds + len(saturated) + runs
        self.progress(0, self.total)
        self.workloads = self._run_all(sources, lambda source: self.bench.requests(*source))
        for (seed, name), workload in self.workloads.items():
            if not np.array_equal(workload.output_tokens, self.workloads[seed, ""].output_tokens):
                raise InputError(f"predictor {name!r} changed the requests of seed {seed}; it may only predict")
        deployments = {batch: self.bench.deployment(q.base, batch) for batch in batches}
        largest = deployments[max(batches)]
        self.isolated = self._run_all(
            seeds, lambda seed: isolated_s(self.workloads[seed, ""], largest, self.engine_name)
        )
        capacity = self._run_all(
            saturated, lambda run: saturated_rps(self.workloads[run[0], ""], deployments[run[1]], self.engine_name)
        )
        for batch in batches:
            unit_rps = 1.0
            if q.unit is LoadUnit.CAPACITY:
                unit_rps = float(np.mean([capacity[seed, batch] for seed in seeds]))
            elif q.unit is not LoadUnit.RPS:
                unit_rps = batch / float(np.nanmean(np.concatenate(list(self.isolated.values()))))
            self.rates |= {(batch, load): load * unit_rps for load in q.loads}

    def checked(self, verdict: Verdict) -> Verdict:
        """Return the verdict, or that it is undecided: no gain, but the requests arrive before a queue can settle."""
        alone_s = float(np.nanquantile(np.concatenate(list(self.isolated.values())), 0.99))
        requests = len(self.workloads[0, ""])
        span_s = requests / self.rates[verdict.batch, verdict.load]
        if verdict.reason not in (IDLE, MATCHING) or span_s >= MIN_SPAN * alone_s:
            return verdict
        description = (
            f"The run is too short for a queue to settle: the {requests:,} requests of a seed arrive within "
            f"{span_s:,.3g} s, and 1 % of them take {alone_s:,.3g} s or more alone. Raise workload.num_requests; of a "
            "trace, give more rows or fewer --seeds, which share them."
        )
        return replace(verdict, reason=UNDECIDED, description=description)

    def cells(self) -> Iterator[Cell]:
        """Yield all cells. For each load and batch size, the cells of FCFS and the oracle come first."""
        sides = self._sides()
        fcfs = self._run_sides(sides[:1])
        for point in self.rates:
            self.fcfs_p99_s[point] = float(np.mean([run["jct.p99"] for run in fcfs[point, 0]]))
        runs = fcfs | self._run_sides(sides, first=1)
        for point, rate_rps in self.rates.items():
            for i, (policy, predictor) in enumerate(sides):
                values = estimates(runs[point, i], runs[point, 0], runs[point, 1], self.question.level)
                yield Cell(policy.name, predictor, *point, rate_rps, values)

    def _run_sides(self, sides: list[Side], first: int = 0) -> dict[tuple[Point, int], list[Run]]:
        """Run the sides (pairs of a policy and a predictor) from index ``first`` on. Return a run for each seed."""
        keys = [(point, i) for point in self.rates for i in range(first, len(sides))]
        seeds = range(self.question.seeds)
        tasks = [(point, i, seed) for point, i in keys for seed in seeds]
        runs = self._run_all(tasks, lambda task: self._run(*task[0], sides[task[1]], task[2]))
        return {key: [runs[*key, seed] for seed in seeds] for key in keys}

    def _sides(self) -> list[Side]:
        policies = [policy for policy in self.question.policies if policy.name != FCFS]
        names = ((policy, self.question.predictors if policy.predicts else ("",)) for policy in policies)
        return [*baselines(self.question), *((policy, name) for policy, own in names for name in own)]

    def _run(self, batch: int, load: float, side: Side, seed: int) -> Run:
        (policy, predictor), scheduler = side, side[0].scheduler
        workload = at_rate(self.workloads[seed, predictor], self.rates[batch, load])
        if policy.max_wait_factor is not None:
            scheduler = replace(scheduler, max_wait_s=policy.max_wait_factor * self.fcfs_p99_s[batch, load])
        deployment = self.bench.deployment(scheduler, batch)
        try:
            records = engine.simulate(workload, deployment, seed=seed, max_log_steps=0, engine=self.engine_name)
        except InputError as error:
            error.add_note(f"in the lab's policy {policy.name!r} with predictor {predictor!r}")
            raise
        full, cache = batch * deployment.parallel.ranks, deployment if workload.prefixes is not None else None
        return run_values(records, full, self.isolated[seed], cache)

    def _run_all(self, tasks: Sequence[K], work: Callable[[K], R]) -> dict[K, R]:
        results: dict[int, R] = {}
        for i, result in self.each(tasks, work):
            results[i] = result
            self.done += 1
            self.progress(self.done, self.total)
        return {task: results[i] for i, task in enumerate(tasks)}
