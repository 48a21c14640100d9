"""Applications of several models: their cluster, their tasks, and the plan of their execution."""

from __future__ import annotations

import math
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
    """How a replica becomes ready ("resident", "wake" from sleep, or "start") and how many seconds that takes.

    The seconds include those of engines that leave its GPUs first.
    """

    model: int
    replica: Replica
    how: str
    seconds: float


@dataclass(frozen=True)
class AppStage:
    """A period in which a set of models runs under fixed plans.

    Attributes:
        ends_by: Number of the model whose completion ends the stage; -1: all work is done.
    """

    plans: tuple[ModelPlan, ...]
    placement: Placement
    switches: tuple[Switch, ...] = ()
    start_s: float = 0.0
    end_s: float = 0.0
    ends_by: int = -1

    @property
    def gpus(self) -> int:
        """Return the GPUs of all plans."""
        return sum(plan.gpus for plan in self.plans)


@dataclass(frozen=True)
class AppSpan:
    """One GPU's activity over a period.

    Attributes:
        what: "run", "load", or the reason that it is idle: "waiting_for_parents" (of a running model, or of all
            candidates), "no_plan_fits" (a model could run, but has no plan for the free GPUs), "left_free" (by the
            plan: more GPUs would gain less than loading costs), "tail" (all remaining models run).
        model: By number; -1: none.
    """

    gpu: int
    start_s: float
    end_s: float
    what: str
    model: int = -1
    plan: ModelPlan | None = None


@dataclass(frozen=True)
class AppMethod:
    """A planning method, compared with others on the same draws of lengths.

    Attributes:
        makespan: Seconds, the mean over draws not used for planning, and its interval.
        planned_s: Seconds on the draws used for planning (their mean, or the requested quantile).
        search_s: Seconds of planning.
        makespans_s: Seconds of each draw, the same draws for every method.
        lead_s: Seconds of planning before engines of its first stage start; all, unless they start meanwhile.
    """

    name: str
    makespan: Estimate
    planned_s: float
    search_s: float
    stages: int
    gain: float
    makespans_s: tuple[float, ...] = ()
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
    """The execution plan of an application and its duration.

    Attributes:
        reserve: Plans of models without a stage: they had no work in the lengths used for planning.
        makespan: Seconds, the mean over draws not used for planning, and its 95 % interval.
        makespans_s: [draws] of each of them.
        quantiles_s: By level: 0.05, 0.5, 0.95.
        idle_s: GPU-seconds by reason (``AppSpan.what``), loading included, on the same draw.
        flops: [models] of all tasks.
        tokens: [models] output tokens of all tasks.
        search_s: Seconds of planning.
    """

    models: tuple[str, ...]
    method: str
    stages: tuple[AppStage, ...]
    planned: tuple[tuple[ModelPlan, ...], ...]
    reserve: tuple[ModelPlan, ...]
    makespan: Estimate
    makespans_s: tuple[float, ...]
    quantiles_s: dict[float, float]
    spans: tuple[AppSpan, ...]
    idle_s: dict[str, float]
    flops: tuple[float, ...]
    tokens: tuple[int, ...]
    methods: tuple[AppMethod, ...] = ()
    what_ifs: tuple[AppWhatIf, ...] = ()
    search_s: float = 0.0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tasks:
    """All potential calls of an application to its models: one row per task, parents before children.

    Which tasks become present is drawn (or observed at run time) by *coins*: a branch that is taken, a round of a loop
    that is still needed, an item of a list that exists. A task is present if its coin and all coins before it succeed.

    Attributes:
        call: [n] index into ``calls``.
        model: [n] index into ``models``.
        row: [n] row of the inputs.
        round: [n] round of a loop, from 0.
        index: [n] item of a fan-out, from 0.
        prompt_tokens: [n] of the prompt without the parents' outputs.
        max_tokens: [n] longest requested output.
        known_tokens: [n] output length if it is known beforehand, else 0.
        parent_start: [n+1] first index of a task's parents in ``parent``.
        parent: [m] tasks whose outputs a task waits for.
        shown: [m] occurrences of the parent's output in the task's prompt; 0: the task only waits for it.
        random_draw: [n] coin of the task, or -1: it is always present.
        coin_chance: [k] probability that the coin succeeds, given that the one before it did.
        coin_after: [k] number of the coin before it, which is smaller, or -1.
    """

    calls: tuple[str, ...]
    models: tuple[str, ...]
    call: Ints
    model: Ints
    row: Ints
    round: Ints
    index: Ints
    prompt_tokens: Ints
    max_tokens: Ints
    known_tokens: Ints
    parent_start: Ints
    parent: Ints
    shown: Ints
    random_draw: Ints
    coin_chance: Floats = field(default_factory=lambda: np.zeros(0))
    coin_after: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

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
        if len(self.coin_after) and not (self.coin_after < np.arange(len(self.coin_after))).all():
            raise InputError("every coin must depend on an earlier one")

    @cached_property
    def children(self) -> tuple[Ints, Ints]:
        """Return (start [n+1], child [m]): the tasks that wait for each task, by number."""
        child = np.repeat(np.arange(len(self)), np.diff(self.parent_start))
        order = np.argsort(self.parent, kind="stable")
        start = np.searchsorted(self.parent[order], np.arange(len(self) + 1))
        return start.astype(np.int64), child[order]


@dataclass(frozen=True)
class TaskDraw:
    """One outcome of the tasks' presence and lengths.

    Attributes:
        present: [n] whether the task is present.
        prompt_tokens: [n] with the parents' outputs, cut to the model's limit.
        output_tokens: [n] at least 1 if present.
    """

    present: Flags
    prompt_tokens: Ints
    output_tokens: Ints
