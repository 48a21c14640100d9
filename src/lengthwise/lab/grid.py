"""The laboratory: every policy with every predictor on the same requests, under every load and batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise import engine
from lengthwise.lab.measure import alone_s, at_rate, measured, saturated_rps
from lengthwise.lab.pairs import Run, estimates
from lengthwise.lab.question import Bench, Contestant, Each, Question, ends, one_by_one
from lengthwise.lab.verdict import answer, verdict
from lengthwise.schema.errors import InputError
from lengthwise.schema.lab import FCFS, ORACLE, Cell, LabTable, LoadUnit
from lengthwise.schema.workload import Workload

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
    verdicts = tuple(verdict(one, seeds=question.seeds, level=question.level) for one in here)
    return LabTable(
        name=question.name,
        facts=question.facts,
        unit=question.unit,
        cells=cells,
        verdicts=verdicts,
        answer=answer(verdicts, question.unit),
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
    alone: dict[int, npt.NDArray[np.float64]] = field(default_factory=dict)
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
        self.workloads = dict(
            zip(wanted, self._all(wanted, lambda at: self.bench.requests(*at)), strict=True)
        )
        self._check_same()
        self.alone = dict(zip(seeds, self._all(list(seeds), self._alone), strict=True))
        capacity = dict(zip(saturated, self._all(saturated, self._saturated), strict=True))
        for batch in batches:
            of_batch = [capacity[at] for at in saturated if at[1] == batch]
            for load in q.loads:
                self.rates[batch, load] = load * self._unit_rps(batch, of_batch)

    def cells(self) -> Iterator[Cell]:
        """Every cell; FCFS and the oracle come first at each load and batch size."""
        q, sides = self.question, self._sides()
        fcfs = self._wave(sides[:1])
        for place in self.rates:
            self.fcfs_p99_s[place] = float(np.mean([run["jct.p99"] for run in fcfs[place, 0]]))
        runs = fcfs | self._wave(sides, first=1)
        for place, rate_rps in self.rates.items():
            for at, (policy, predictor) in enumerate(sides):
                values = estimates(runs[place, at], runs[place, 0], runs[place, 1], q.level)
                yield Cell(policy.name, predictor, *place, rate_rps, values)

    def _wave(self, sides: list[Side], first: int = 0) -> dict[tuple[Place, int], list[Run]]:
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
        return measured(records, batch * served.parallel.replicas, self.alone[seed])

    def _alone(self, seed: int) -> npt.NDArray[np.float64]:
        most = max(self.question.batch_sizes)
        return alone_s(self.workloads[seed, ""], self.bench.deployment(self.question.base, most), self.how)

    def _saturated(self, at: tuple[int, int]) -> float:
        seed, batch = at
        served = self.bench.deployment(self.question.base, batch)
        return saturated_rps(self.workloads[seed, ""], served, self.how)

    def _unit_rps(self, batch: int, saturated: list[float]) -> float:
        if self.question.unit is LoadUnit.RPS:
            return 1.0
        if self._by_capacity:
            return float(np.mean(saturated))
        return batch / float(np.nanmean(np.concatenate(list(self.alone.values()))))

    def _check_same(self) -> None:
        """Predictors change predictions alone."""
        for (seed, name), workload in self.workloads.items():
            plain = self.workloads[seed, ""]
            if not np.array_equal(workload.output_tokens, plain.output_tokens):
                raise InputError(
                    f"predictor {name!r} changed the requests of seed {seed}; it may only predict"
                )

    def _all(self, tasks: Sequence[Any], work: Callable[[Any], Any]) -> list[Any]:
        results: dict[int, Any] = {}
        for at, result in self.each(tasks, work):
            results[at] = result
            self.done += 1
            self.progress(self.done, self.of)
        return [results[at] for at in range(len(tasks))]
