"""What the laboratory is asked, and who answers for the parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from lengthwise.schema.deployment import Deployment, Scheduler
from lengthwise.schema.errors import InputError
from lengthwise.schema.lab import FCFS, ORACLE, LoadUnit
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
        facts: What is fixed, for headings.
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
    facts: dict[str, str] = field(default_factory=dict)
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
