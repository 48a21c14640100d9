"""Defines applications of several models: their cluster, their tasks, and the plan of their execution."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.specs import GpuSpec, NodeSpec

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
PLAN_FORMAT = "lengthwise application plan 1"


@dataclass(frozen=True)
class Machine:
    """A number of GPUs of one kind in one node."""

    gpu: GpuSpec
    node: NodeSpec
    gpus: int


@dataclass(frozen=True)
class Cluster:
    """The machines on which an application runs. Their GPUs have numbers from 0 on, machine after machine."""

    machines: tuple[Machine, ...]

    @property
    def gpus(self) -> int:
        """Return the number of GPUs."""
        return sum(machine.gpus for machine in self.machines)

    @cached_property
    def machine_of(self) -> Ints:
        """Return the number of each GPU's machine, [gpus]."""
        return np.repeat(np.arange(len(self.machines)), [m.gpus for m in self.machines])

    @cached_property
    def first_of(self) -> tuple[int, ...]:
        """Return the number of the first GPU of each machine."""
        return tuple(np.cumsum([0, *(m.gpus for m in self.machines)])[:-1].tolist())


@dataclass(frozen=True, order=True)
class ModelPlan:
    """A model's execution plan: ``dp`` replicas, each with ``pp`` stages of ``tp`` GPUs of the kind ``gpu``."""

    model: int
    gpu: str
    dp: int = 1
    tp: int = 1
    pp: int = 1

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of all replicas."""
        return self.dp * self.tp * self.pp

    @property
    def shape(self) -> tuple[str, int, int]:
        """Return (gpu, tp, pp). Between plans of the same shape, replicas can continue without a restart."""
        return self.gpu, self.tp, self.pp


Replica = tuple[int, ...]  # the numbers of one replica's GPUs

Placement = dict[int, tuple[Replica, ...]]  # the replicas of each model (by number)


@dataclass(frozen=True)
class Switch:
    """The preparation of one replica when a stage starts."""

    model: int
    replica: Replica
    how: str  # "resident": its engine already runs; "wake": the engine sleeps; "start": it must be started
    seconds: float  # until the replica is ready, including the time in which other engines leave its GPUs


@dataclass(frozen=True)
class AppStage:
    """A period in which a set of models runs under fixed plans."""

    plans: tuple[ModelPlan, ...]
    placement: Placement
    switches: tuple[Switch, ...] = ()
    start_s: float = 0.0
    end_s: float = 0.0
    ends_by: int = -1  # number of the model whose completion ends the stage; -1: all work is done

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of all plans."""
        return sum(plan.gpus for plan in self.plans)


@dataclass(frozen=True)
class AppSpan:
    """What one GPU does during a period: it runs or loads a model, or is idle for a stated reason."""

    gpu: int
    start_s: float
    end_s: float
    # "run", "load", or the reason for being idle: "waiting_for_parents" (the running model, or every candidate, waits
    # for outputs of other models), "no_plan_fits" (a model could run, but has no plan for the free GPUs), "left_free"
    # (more GPUs for a model would gain less than loading costs), "tail" (all remaining models already run).
    what: str
    model: int = -1  # by number; -1: none
    plan: ModelPlan | None = None


@dataclass(frozen=True)
class AppMethod:
    """The result of one planning method. All methods are compared on the same random draws of output lengths."""

    name: str
    makespan: Estimate  # seconds, the mean over draws not used for planning, and its interval
    planned_s: float  # seconds on the draws used for planning (their mean, or the requested quantile)
    search_s: float  # seconds of planning
    stages: int
    gain: float  # mean makespan plus ``lead_s``, divided by that sum of the chosen method; 1 for the chosen method
    makespans_s: tuple[float, ...] = ()  # of each draw, the same draws for every method
    lead_s: float = math.nan  # seconds by which planning delays the run; NaN: ``search_s``

    def __post_init__(self) -> None:
        if math.isnan(self.lead_s):
            object.__setattr__(self, "lead_s", self.search_s)


@dataclass(frozen=True)
class AppWhatIf:
    """The makespan in seconds under a hypothetical change, and its difference on the same draws (negative: shorter)."""

    name: str
    makespan: Estimate
    difference: Estimate


@dataclass(frozen=True)
class AppPlan:
    """The execution plan of an application and its duration."""

    models: tuple[str, ...]
    method: str
    stages: tuple[AppStage, ...]
    planned: tuple[tuple[ModelPlan, ...], ...]  # plans of each stage as the method chose them, before the simulation
    reserve: tuple[ModelPlan, ...]  # plans of models without work in the draws used for planning, so without a stage
    makespan: Estimate  # seconds, the mean over draws not used for planning, and its 95 % interval
    makespans_s: tuple[float, ...]  # [draws] makespan of each draw
    quantiles_s: dict[float, float]  # by level: 0.05, 0.5, 0.95
    spans: tuple[AppSpan, ...]
    flops: tuple[float, ...]  # [models] FLOPs of all tasks
    tokens: tuple[int, ...]  # [models] output tokens of all tasks
    methods: tuple[AppMethod, ...] = ()
    what_ifs: tuple[AppWhatIf, ...] = ()
    search_s: float = 0.0  # seconds of planning
    notes: tuple[str, ...] = ()

    @property
    def idle_s(self) -> dict[str, float]:
        """Return the GPU-seconds in which no model runs, by ``AppSpan.what``, "load" included."""
        found = defaultdict[str, float](float)
        for span in self.spans:
            if span.what != "run":
                found[span.what] += span.end_s - span.start_s
        return dict(sorted(found.items()))


@dataclass(frozen=True)
class Coins:
    """Random events (coins) that decide which tasks of an application are present. A run observes their outcomes."""

    chance: Floats  # [k] probability that a coin succeeds, given that its predecessor succeeded
    after: Ints  # [k] number of its predecessor, which is smaller, or -1

    def __len__(self) -> int:
        return len(self.chance)

    def __post_init__(self) -> None:
        if not (self.after < np.arange(len(self.after))).all():
            raise InputError("every coin must depend on an earlier one")


@dataclass(frozen=True)
class Tasks:
    """All potential calls of an application to its models: one row per task, parents before children.

    A coin decides whether a branch is taken, a round of a loop is needed, or an item of a list exists. A task is
    present if its coin and all predecessors of that coin succeed.
    """

    calls: tuple[str, ...]
    models: tuple[str, ...]
    call: Ints  # [n] index into ``calls``
    model: Ints  # [n] index into ``models``
    row: Ints  # [n] row of the inputs
    round: Ints  # [n] round of a loop, from 0
    index: Ints  # [n] item of a fan-out, from 0
    prompt_tokens: Ints  # [n] tokens of the prompt without the parents' outputs
    max_tokens: Ints  # [n] longest requested output
    known_tokens: Ints  # [n] output length if it is known beforehand, else 0
    parent_start: Ints  # [n+1] first index of a task's parents in ``parent``
    parent: Ints  # [m] tasks whose outputs a task waits for
    shown: Ints  # [m] occurrences of the parent's output in the task's prompt; 0: the task only waits for it
    random_draw: Ints  # [n] number of the task's coin, or -1: the task is always present
    coins: Coins = field(default_factory=lambda: Coins(np.zeros(0), np.zeros(0, np.int64)))

    def __len__(self) -> int:
        return len(self.model)

    def __post_init__(self) -> None:
        n = len(self.model)
        for name in ("call", "row", "round", "index", "prompt_tokens", "max_tokens", "known_tokens", "random_draw"):
            if len(getattr(self, name)) != n:
                raise InputError(f"{name} must have one value a task ({n}); it has {len(getattr(self, name))}")
        if len(self.parent_start) != n + 1 or len(self.parent) != len(self.shown):
            raise InputError("parent_start must have one entry more than tasks, shown one for each parent")
        child = np.repeat(np.arange(n), np.diff(self.parent_start))
        if len(self.parent) and not ((self.parent >= 0) & (self.parent < child)).all():
            raise InputError("every parent must come before its child")

    @cached_property
    def children(self) -> tuple[Ints, Ints]:
        """Return (start [n+1], child [m]): the tasks ``child[start[i] : start[i + 1]]`` wait for task i."""
        child = np.repeat(np.arange(len(self)), np.diff(self.parent_start))
        order = np.argsort(self.parent, kind="stable")
        start = np.searchsorted(self.parent[order], np.arange(len(self) + 1))
        return start.astype(np.int64), child[order]


@dataclass(frozen=True)
class TaskDraw:
    """One random draw of the present tasks and their lengths."""

    present: Flags  # [n] whether the task is present
    prompt_tokens: Ints  # [n] including the parents' outputs, at most the model's limit
    output_tokens: Ints  # [n] at least 1 if present
