"""Applications of several models: their cluster, their tasks, and the plan of their execution."""

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


@dataclass(frozen=True)
class Machine:
    """GPUs of one kind in one node."""

    gpu: GpuSpec
    node: NodeSpec
    gpus: int


@dataclass(frozen=True)
class Cluster:
    """The GPUs of an application, numbered through its machines in order."""

    machines: tuple[Machine, ...]

    @property
    def gpus(self) -> int:
        """Return the number of GPUs."""
        return sum(machine.gpus for machine in self.machines)

    @cached_property
    def machine_of(self) -> Ints:
        """Return [gpus] the number of each GPU's machine."""
        return np.repeat(np.arange(len(self.machines)), [m.gpus for m in self.machines])

    @cached_property
    def first_of(self) -> tuple[int, ...]:
        """Return the number of each machine's first GPU."""
        return tuple(np.cumsum([0, *(m.gpus for m in self.machines)])[:-1].tolist())


@dataclass(frozen=True, order=True)
class ModelPlan:
    """A model's execution plan: ``dp`` replicas of ``pp`` stages of ``tp`` GPUs each, all of the kind ``gpu``."""

    model: int
    gpu: str
    dp: int = 1
    tp: int = 1
    pp: int = 1

    @property
    def gpus(self) -> int:
        """Return the GPUs of all replicas."""
        return self.dp * self.tp * self.pp

    @property
    def shape(self) -> tuple[str, int, int]:
        """Return (gpu, tp, pp): replicas of one shape can stay when ``dp`` changes."""
        return self.gpu, self.tp, self.pp


Replica = tuple[int, ...]
"""The numbers of one replica's GPUs."""

Placement = dict[int, tuple[Replica, ...]]
"""The replicas of each model (by number)."""


@dataclass(frozen=True)
class Switch:
    """How a replica becomes ready ("resident", "wake" from sleep, or "start") and how many seconds that takes."""

    model: int
    replica: Replica
    how: str
    seconds: float  # including those of engines that leave its GPUs first


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
        """Return the GPUs of all plans."""
        return sum(plan.gpus for plan in self.plans)


@dataclass(frozen=True)
class AppSpan:
    """One GPU's activity over a period."""

    gpu: int
    start_s: float
    end_s: float
    # "run", "load", or the reason that it is idle: "waiting_for_parents" (of a running model, or of all
    # candidates), "no_plan_fits" (a model could run, but has no plan for the free GPUs), "left_free" (by the
    # plan: more GPUs would gain less than loading costs), "tail" (all remaining models run).
    what: str
    model: int = -1  # by number; -1: none
    plan: ModelPlan | None = None


@dataclass(frozen=True)
class AppMethod:
    """A planning method, compared with others on the same draws of lengths."""

    name: str
    makespan: Estimate  # seconds, the mean over draws not used for planning, and its interval
    planned_s: float  # seconds on the draws used for planning (their mean, or the requested quantile)
    search_s: float  # seconds of planning
    stages: int
    gain: float
    makespans_s: tuple[float, ...] = ()  # seconds of each draw, the same draws for every method
    # Seconds of planning until engines of the first stage start; all, unless they start meanwhile.
    lead_s: float = math.nan

    def __post_init__(self) -> None:
        if math.isnan(self.lead_s):
            object.__setattr__(self, "lead_s", self.search_s)


@dataclass(frozen=True)
class AppWhatIf:
    """The makespan under a change, and its difference on common draws (negative: sooner)."""

    name: str
    makespan: Estimate
    difference: Estimate


@dataclass(frozen=True)
class AppPlan:
    """The execution plan of an application and its duration."""

    models: tuple[str, ...]
    method: str
    stages: tuple[AppStage, ...]
    planned: tuple[tuple[ModelPlan, ...], ...]
    # Plans of models without a stage: they had no work in the lengths used for planning.
    reserve: tuple[ModelPlan, ...]
    makespan: Estimate  # seconds, the mean over draws not used for planning, and its 95 % interval
    makespans_s: tuple[float, ...]  # [draws] of each of them
    quantiles_s: dict[float, float]  # by level: 0.05, 0.5, 0.95
    spans: tuple[AppSpan, ...]
    flops: tuple[float, ...]  # [models] of all tasks
    tokens: tuple[int, ...]  # [models] output tokens of all tasks
    methods: tuple[AppMethod, ...] = ()
    what_ifs: tuple[AppWhatIf, ...] = ()
    search_s: float = 0.0  # seconds of planning
    notes: tuple[str, ...] = ()

    @property
    def idle_s(self) -> dict[str, float]:
        """Return the GPU-seconds without a running model, by reason (``AppSpan.what``), loading included."""
        found = defaultdict[str, float](float)
        for span in self.spans:
            if span.what != "run":
                found[span.what] += span.end_s - span.start_s
        return dict(sorted(found.items()))


@dataclass(frozen=True)
class Coins:
    """Random events that decide which tasks become present, drawn or observed at run time."""

    chance: Floats  # [k] probability that a coin succeeds, given that the one before it did
    after: Ints  # [k] number of the coin before it, which is smaller, or -1

    def __len__(self) -> int:
        return len(self.chance)

    def __post_init__(self) -> None:
        if not (self.after < np.arange(len(self.after))).all():
            raise InputError("every coin must depend on an earlier one")


@dataclass(frozen=True)
class Tasks:
    """All potential calls of an application to its models: one row per task, parents before children.

    Which tasks become present is drawn (or observed at run time) by *coins*: a branch that is taken, a round of a loop
    that is still needed, an item of a list that exists. A task is present if its coin and all coins before it succeed.
    """

    calls: tuple[str, ...]
    models: tuple[str, ...]
    call: Ints  # [n] index into ``calls``
    model: Ints  # [n] index into ``models``
    row: Ints  # [n] row of the inputs
    round: Ints  # [n] round of a loop, from 0
    index: Ints  # [n] item of a fan-out, from 0
    prompt_tokens: Ints  # [n] of the prompt without the parents' outputs
    max_tokens: Ints  # [n] longest requested output
    known_tokens: Ints  # [n] output length if it is known beforehand, else 0
    parent_start: Ints  # [n+1] first index of a task's parents in ``parent``
    parent: Ints  # [m] tasks whose outputs a task waits for
    shown: Ints  # [m] occurrences of the parent's output in the task's prompt; 0: the task only waits for it
    random_draw: Ints  # [n] coin of the task, or -1: it is always present
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
        """Return (start [n+1], child [m]): the tasks that wait for each task, by number."""
        child = np.repeat(np.arange(len(self)), np.diff(self.parent_start))
        order = np.argsort(self.parent, kind="stable")
        start = np.searchsorted(self.parent[order], np.arange(len(self) + 1))
        return start.astype(np.int64), child[order]


@dataclass(frozen=True)
class TaskDraw:
    """One outcome of the tasks' presence and lengths."""

    present: Flags  # [n] whether the task is present
    prompt_tokens: Ints  # [n] with the parents' outputs, cut to the model's limit
    output_tokens: Ints  # [n] at least 1 if present
