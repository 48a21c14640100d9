"""What an application of several models is run on, and the plan of it: what runs when."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.specs import GpuSpec, NodeSpec

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
        reserve: Plans of models that are in no stage: they had nothing to do in the lengths planned with.
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


Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Tasks:
    """Everything that an application may ask of its models: a row a task, parents before children.

    Which of them really come to be is drawn (or found out while it runs) by *coins*: a branch that is taken, a round
    of a loop that is still needed, an item of a list that is there. A task comes to be where its coin, and all
    coins that that one hangs on, fall so.

    Attributes:
        calls: Names of the calls.
        models: Names of the models, as the application calls them.
        call: [n] index into ``calls``.
        model: [n] index into ``models``.
        row: [n] which row of the inputs.
        round: [n] round of a loop, from 0.
        index: [n] item of a fan-out, from 0.
        prompt_tokens: [n] of the prompt without what parents put into it.
        max_tokens: [n] longest output that is asked for.
        known_tokens: [n] output length where it is known beforehand, else 0.
        parent_start: [n+1] where a task's parents begin in ``parent``.
        parent: [m] tasks whose outputs a task waits for.
        shown: [m] how often the parent's output stands in the task's prompt; 0: only waited for.
        random_draw: [n] which coin, or -1: it always comes to be.
        coin_chance: [k] probability that the coin falls so, given that the one before it did.
        coin_after: [k] the coin that it hangs on, with a smaller number, or -1.
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
            raise InputError("every parent must stand before its child")
        if len(self.coin_after) and not (self.coin_after < np.arange(len(self.coin_after))).all():
            raise InputError("every coin must hang on an earlier one")

    @cached_property
    def children(self) -> tuple[Ints, Ints]:
        """(start [n+1], child [m]): the tasks that wait for each, by number."""
        child = np.repeat(np.arange(len(self)), np.diff(self.parent_start))
        order = np.argsort(self.parent, kind="stable")
        start = np.searchsorted(self.parent[order], np.arange(len(self) + 1))
        return start.astype(np.int64), child[order]


@dataclass(frozen=True)
class TaskDraw:
    """One way in which it may turn out.

    Attributes:
        present: [n] whether the task comes to be.
        prompt_tokens: [n] with what its parents put into it, cut to what its model takes.
        output_tokens: [n] at least 1 where present.
    """

    present: Flags
    prompt_tokens: Ints
    output_tokens: Ints
