"""What an application of several models is run on, and the plan of it: what runs when."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lengthwise.schema.estimate import Estimate
from lengthwise.schema.hardware import GpuSpec, NodeSpec

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Machine:
    """GPUs of one kind in one node."""

    gpu: GpuSpec
    node: NodeSpec
    gpus: int


@dataclass(frozen=True)
class Cluster:
    """The GPUs that an application has, numbered through its machines in order."""

    machines: tuple[Machine, ...]

    @property
    def gpus(self) -> int:
        """How many there are."""
        return sum(machine.gpus for machine in self.machines)

    @cached_property
    def machine_of(self) -> Ints:
        """[gpus] the number of each one's machine."""
        return np.repeat(np.arange(len(self.machines)), [m.gpus for m in self.machines])

    @cached_property
    def first_of(self) -> tuple[int, ...]:
        """The number of each machine's first GPU."""
        return tuple(np.cumsum([0, *(m.gpus for m in self.machines)])[:-1].tolist())


@dataclass(frozen=True, order=True)
class ModelPlan:
    """A model's execution plan: ``dp`` replicas of ``pp`` stages of ``tp`` GPUs each, all of one kind.

    ``gpu`` is the kind's name in the cluster.
    """

    model: int
    gpu: str
    dp: int = 1
    tp: int = 1
    pp: int = 1

    @property
    def gpus(self) -> int:
        """Of all replicas."""
        return self.dp * self.tp * self.pp

    @property
    def shape(self) -> tuple[str, int, int]:
        """What one replica is: replicas of one shape can stay when ``dp`` changes."""
        return self.gpu, self.tp, self.pp


Replica = tuple[int, ...]
"""The numbers of one replica's GPUs."""

Placement = dict[int, tuple[Replica, ...]]
"""Where the replicas of each model (by number) are."""


@dataclass(frozen=True)
class Switch:
    """How a replica comes to be ready: "resident" (it was), "wake" (it slept) or "start", and how long that takes.

    Engines that leave its GPUs for it are gone first: their seconds are among these.
    """

    model: int
    replica: Replica
    how: str
    seconds: float


@dataclass(frozen=True)
class AppStage:
    """A span of time in which a set of models runs under fixed plans.

    Attributes:
        plans: One for each model that runs.
        placement: Where.
        switches: What had to be made ready, of those that were not resident.
        start_s: When it begins.
        end_s: When it ends.
        ends_by: The model that finished (by number), which ends the stage; -1: nothing was left.
    """

    plans: tuple[ModelPlan, ...]
    placement: Placement
    switches: tuple[Switch, ...] = ()
    start_s: float = 0.0
    end_s: float = 0.0
    ends_by: int = -1

    @property
    def gpus(self) -> int:
        """Of all plans."""
        return sum(plan.gpus for plan in self.plans)


@dataclass(frozen=True)
class AppSpan:
    """What one GPU does for a while.

    Attributes:
        gpu: Its number.
        start_s: From when.
        end_s: Until when.
        what: "run", "load", or why it idles: "waiting_for_parents" (of a model that runs, or of all that could),
            "no_plan_fits" (a model could run, but has no plan for the GPUs that are free), "left_free" (the plan
            gives it to nobody: more GPUs would gain less than loading costs), "tail" (all models that are left run).
        model: By number; -1 where it has none.
        plan: The model's.
    """

    gpu: int
    start_s: float
    end_s: float
    what: str
    model: int = -1
    plan: ModelPlan | None = None


@dataclass(frozen=True)
class AppMethod:
    """A way of planning, beside others, on the same draws.

    Attributes:
        name: Of the method.
        makespan: Seconds, the mean over the draws that were not planned with, and its interval.
        planned_s: Seconds on the draws planned with (their mean, or the quantile that was asked for).
        search_s: Seconds of planning.
        stages: How many.
        gain: How many times as long it takes end to end, search and all, as the plan that was taken.
        makespans_s: Seconds of each draw, the same draws for every method.
        ahead_s: Seconds of planning before engines of its first stage start; all, unless they start meanwhile.
    """

    name: str
    makespan: Estimate
    planned_s: float
    search_s: float
    stages: int
    gain: float
    makespans_s: tuple[float, ...] = ()
    ahead_s: float = math.nan

    def __post_init__(self) -> None:
        if math.isnan(self.ahead_s):
            object.__setattr__(self, "ahead_s", self.search_s)


@dataclass(frozen=True)
class AppWhatIf:
    """The makespan if something were different, and the difference on common draws (negative: sooner)."""

    name: str
    makespan: Estimate
    difference: Estimate


@dataclass(frozen=True)
class AppPlan:
    """What runs when, and how long it takes.

    Attributes:
        models: Names, as the application calls them.
        method: That made it.
        stages: As they come on the first draw planned with.
        planned: Plans of each stage, which the dynamic scheduler follows.
        spare: Plans of models that are in no stage: they had nothing to do in the lengths planned with.
        makespan: Seconds, the mean over draws that were not planned with, and its 95 % interval.
        makespans_s: [draws] of each of them.
        quantiles_s: By level: 0.05, 0.5, 0.95.
        spans: What each GPU does, on the first draw planned with.
        idle_s: GPU-seconds by why (``AppSpan.what``), loading too, on the same.
        flops: [models] of all tasks.
        tokens: [models] output tokens of all tasks.
        methods: All that were looked at.
        what_ifs: What something else would bring.
        search_s: Seconds of planning.
        notes: What is assumed, in words.
    """

    models: tuple[str, ...]
    method: str
    stages: tuple[AppStage, ...]
    planned: tuple[tuple[ModelPlan, ...], ...]
    spare: tuple[ModelPlan, ...]
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
