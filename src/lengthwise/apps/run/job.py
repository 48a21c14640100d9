"""What a run is made of."""

from __future__ import annotations

import hashlib
import os
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lengthwise.apps import placement
from lengthwise.apps.launch.engine import COMPLETIONS, Ask
from lengthwise.apps.ledger.contracts import Ledger, Output, State
from lengthwise.schema.app import AppPlan, AppStage, Cluster, ModelPlan, Placement, TaskDraw, Tasks
from lengthwise.schema.errors import InputError, InternalError

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Layout:
    """Tasks by their place in the ledger, which leases the first places first.

    Attributes:
        tasks: By place. ``call`` is a pair of call and model, so that the ledger's counts tell of models too.
        pairs: (call, model) by number.
        task_of: [n] the application's number of the task at a place.
        place_of: [n] the place of a task.
    """

    tasks: Tasks
    pairs: tuple[tuple[int, int], ...]
    task_of: Ints
    place_of: Ints

    def parents(self, place: int) -> Ints:
        """Places that a place waits for."""
        start = self.tasks.parent_start
        return self.tasks.parent[start[place] : start[place + 1]]


def lay(tasks: Tasks, expected_tokens: Floats) -> Layout:
    """The longest chain that hangs on a task decides who is first: what is asked late must not be what ends late.

    Args:
        tasks: Of the application.
        expected_tokens: [n] output tokens that are expected of each, never those that come.
    """
    if len(expected_tokens) != len(tasks):
        raise InputError(
            f"there must be an expected length for each task ({len(tasks)}); there are {len(expected_tokens)}"
        )
    left = chains(tasks, np.maximum(expected_tokens, 1.0))
    task_of = np.argsort(-left, kind="stable").astype(np.int64)
    place_of = np.empty_like(task_of)
    place_of[task_of] = np.arange(len(tasks))
    pair = tasks.call * len(tasks.models) + tasks.model
    known, numbers = np.unique(pair, return_inverse=True)
    pairs = tuple(divmod(int(one), len(tasks.models)) for one in known)
    placed = _placed(replace(tasks, call=numbers.astype(np.int64)), task_of, place_of)
    return Layout(placed, pairs, task_of, place_of)


def chains(tasks: Tasks, tokens: Floats) -> Floats:
    """[n] tokens of the longest chain of tasks that begins with each.

    Children stand behind their parents, so that generations are gone through from the last one: those whose children
    are all known.
    """
    left = tokens.astype(np.float64).copy()
    child = np.repeat(np.arange(len(tasks)), np.diff(tasks.parent_start))
    depth = _depths(tasks, child)
    order = np.argsort(-depth[child], kind="stable")
    bounds = [*np.flatnonzero(np.diff(depth[child][order], prepend=-1)).tolist(), len(order)]
    for first, last in pairwise(bounds):
        edges = order[first:last]
        parents = tasks.parent[edges]
        np.maximum.at(left, parents, tokens[parents] + left[child[edges]])
    return left


def _depths(tasks: Tasks, child: Ints) -> Ints:
    """[n] how many parents stand above one another over each task."""
    depth = np.zeros(len(tasks), np.int64)
    while len(child):
        deeper = depth.copy()
        np.maximum.at(deeper, child, depth[tasks.parent] + 1)
        if (deeper == depth).all():
            break
        depth = deeper
    return depth


def _placed(tasks: Tasks, task_of: Ints, place_of: Ints) -> Tasks:
    """The same tasks in another order."""
    columns = ("call", "model", "row", "round", "index", "prompt_tokens", "max_tokens", "known_tokens", "random_draw")
    counts = np.diff(tasks.parent_start)[task_of]
    start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    edge = np.repeat(tasks.parent_start[task_of] - start[:-1], counts) + np.arange(start[-1])
    return replace(
        tasks,
        **{name: getattr(tasks, name)[task_of] for name in columns},
        parent_start=start,
        parent=place_of[tasks.parent[edge]],
        shown=tasks.shown[edge],
    )


def identity_of(words: str, layout: Layout) -> str:
    """What tells these tasks from others: the application and its inputs in words (a hash), and the layout."""
    found = hashlib.sha256(words.encode())
    tasks = layout.tasks
    for column in (tasks.call, tasks.model, tasks.row, tasks.round, tasks.index, tasks.parent, layout.task_of):
        found.update(np.ascontiguousarray(column, dtype="<i8").tobytes())
    return found.hexdigest()


Plans = tuple[ModelPlan, ...]


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """What a task asks, and the key of its answer."""

    key: str
    request: Ask


Outputs = Callable[[int], Output | None]
"""The answer of a task that has ended, by the application's number; None of a skipped one."""


class Decider(Protocol):
    """What a task asks, once its parents have ended."""

    def decide(self, task: int, outputs: Outputs) -> RequestSpec | None:
        """The request; None: the task is skipped.

        Raises:
            InputError: There is none that could be sent; the task is dead then.
        """
        ...


@dataclass(frozen=True)
class RunPlan:
    """What runs when, as planned.

    Attributes:
        stages: Plans of each stage.
        reserve: Plans of models that are in no stage.
        ends_s: When each stage is to end, from the start; () where nobody knows.
        slack: How much sooner and later than that is as planned, as shares.
        ready_s: When the first engine is to be ready, from the start.
    """

    stages: tuple[Plans, ...]
    reserve: Plans = ()
    ends_s: tuple[float, ...] = ()
    slack: tuple[float, float] = (0.8, 1.25)
    ready_s: float = 0.0


class Placer(Protocol):
    """Where engines have room."""

    def fits(self, plans: Plans) -> bool:
        """Whether plans have room beside one another."""
        ...

    def place(self, plans: Plans, before: Placement, running: Plans, in_sleep: Placement) -> Placement:
        """Where their replicas go; ``in_sleep`` are those of the same plans that could be woken."""
        ...

    def ready_s(self, plan: ModelPlan) -> float:
        """Seconds from its start until a replica is ready, as planned; 0: nobody knows."""
        ...


@dataclass(frozen=True)
class Settings:
    """How patient a run is.

    Attributes:
        max_attempts: After so many a task is dead.
        lease_s: A lease that is not prolonged for so long is given to others.
        backoff_s: Before the second attempt; twice as long before each further one, less or more by chance.
        max_backoff_s: Longest time between attempts.
        save_s: How often answers so far are kept.
        linger_s: How long an answer on which nothing hangs may wait to be recorded with others.
        engine_failures: After so many failures in a row an engine is started anew.
        max_engine_failures: After so many ends of a model's engines without an answer between them the run gives up.
        seed: Of what is left to chance.
        replans: So often at most the rest is planned anew; 0: never.
    """

    max_attempts: int = 3
    lease_s: float = 60.0
    backoff_s: float = 1.0
    max_backoff_s: float = 60.0
    save_s: float = 2.0
    linger_s: float = 0.2
    engine_failures: int = 8
    max_engine_failures: int = 12
    seed: int = 0
    replans: int = 3

    def __post_init__(self) -> None:
        for name in ("max_attempts", "lease_s", "backoff_s", "save_s", "engine_failures", "max_engine_failures"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} must be above 0; it is {getattr(self, name)}")


@dataclass(frozen=True)
class Job:
    """A run.

    Attributes:
        layout: Its tasks as they stand in the ledger.
        expected_tokens: [n] by place.
        decider: What they ask.
        run_plan: What runs when.
        placer: Where.
        identity: Tells this application on these inputs from others.
        owner: Tells this coordinator from others, dead ones included.
        settings: How patient it is.
        replan: A new run_plan for what is left, once reality has left the plan's interval; None: the old one stays.
        seek: ModelDependencies for the plan that is still looked for when engines start; None: the run_plan is of it.
    """

    layout: Layout
    expected_tokens: Floats
    decider: Decider
    run_plan: RunPlan
    placer: Placer
    identity: str
    owner: str
    settings: Settings = field(default_factory=Settings)
    replan: Replan | None = None
    seek: Callable[[], RunPlan] | None = None

    def backoff_s(self, place: int, tries: int) -> float:
        """Seconds until the next attempt, the same for the same attempt of the same task."""
        settings = self.settings
        longest = min(settings.max_backoff_s, settings.backoff_s * 2.0 ** (tries - 1))
        return float(longest * np.random.default_rng((settings.seed, place, tries)).uniform(0.5, 1.0))


@dataclass(frozen=True)
class PlanDeviation:
    """Where a run is that may not be where it was planned to be.

    Attributes:
        at_s: Since the start.
        stage: The stage that it is in.
        planned_s: When that stage was to end.
        finished: Models that have nothing left to do.
        done: Tasks that have ended, by model.
        running: What runs.
        is_late: Whether its clock has left the plan's interval; else its lengths are to be looked at.
        ended: (place, state, prompt tokens, output tokens) of tasks that have ended.
        written: Tokens of answers so far, by place.
        placement: Where engines are.
    """

    at_s: float
    stage: int
    planned_s: float
    finished: Sequence[int]
    done: Sequence[int]
    running: Plans
    is_late: bool = True
    completed: Sequence[tuple[int, State, int, int]] = ()
    written: Mapping[int, int] = field(default_factory=dict)
    placement: Placement = field(default_factory=dict)


@dataclass(frozen=True)
class RevisedPlan:
    """What comes of looking at a plan anew.

    Attributes:
        run_plan: To follow from where the run was when it was looked at.
        is_new: Whether it is another plan; else the old one, with the times at which it is to be where by now.
        description: Why, in words.
    """

    run_plan: RunPlan
    is_new: bool
    description: str


Replan = Callable[[PlanDeviation], "RunPlan | RevisedPlan | None"]
"""What to follow once reality has left the plan's interval; None: as before."""


OWNER = "owner:"
"""Facts of coordinators that have begun and not ended: the name behind it, nothing else in the value."""
ENGINES = "engines:"
"""Facts of the engines that a coordinator has; its name stands behind it."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def new_owner() -> str:
    """A name of a coordinator of this process: host, boot, process and its start, and which of the process'."""
    return "/".join((socket.gethostname(), _boot(), str(os.getpid()), _started(os.getpid()), uuid.uuid4().hex[:8]))


def is_dead(owner: str) -> bool:
    """Whether a coordinator is known to be gone: it ran on this host, and its process does not run any more."""
    parts = owner.split("/")
    if len(parts) != 5 or parts[0] != socket.gethostname() or not parts[2].isdigit():
        return False
    if parts[1] != _boot():
        return True
    return _started(int(parts[2])) != parts[3]


def enter(ledger: Ledger, job: Job, now_s: float) -> bool:
    """Opens the ledger for a run and takes what dead coordinators held; whether the run was there before."""
    resumed = ledger.open(job.identity, job.layout.tasks)
    known = [name.removeprefix(OWNER) for name in ledger.metadata() if name.startswith(OWNER)]
    gone = [owner for owner in known if is_dead(owner)]
    for owner in gone:
        ledger.heartbeat(owner, now_s=now_s, lease_s=0.0)
    ledger.note(
        {OWNER + job.owner: "runs", **dict.fromkeys((OWNER + owner for owner in gone), ""), "cancel": ""}
        | dict.fromkeys((ENGINES + owner for owner in gone), "")
    )
    ledger.expire(now_s=now_s)
    return resumed


def leave(ledger: Ledger, owner: str) -> None:
    """It runs no more."""
    ledger.note({OWNER + owner: "", ENGINES + owner: ""})


def alive(ledger: Ledger) -> list[str]:
    """Coordinators that have begun, have not ended, and are not known to be dead."""
    owners = [name.removeprefix(OWNER) for name in ledger.metadata() if name.startswith(OWNER)]
    return [owner for owner in owners if not is_dead(owner)]


def _boot() -> str:
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"


def _started(pid: int) -> str:
    """When a process began, in the kernel's ticks; "" of one that does not run."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return ""
    return "" if words[0] in "ZX" else words[19]


SLACK = (0.9, 1.1)
"""How much sooner and later than its draws say a plan may be."""


@dataclass(frozen=True)
class Planned:
    """What a run follows.

    Attributes:
        run_plan: What runs when.
        placer: Where.
        replan: A new run_plan once reality has left the plan's interval; None: the old one stays.
    """

    run_plan: RunPlan
    placer: Placer
    replan: Replan | None = None


@dataclass(frozen=True)
class RunTasks:
    """What there is to do.

    Attributes:
        tasks: All that may be asked.
        decider: What each of them asks.
        expected_tokens: [n] of their outputs, as planned with.
        words: Tells the application and its inputs from others: their hashes.
    """

    tasks: Tasks
    decider: Decider
    expected_tokens: Floats
    words: str = field(default="")


def job_of(work: RunTasks, planned: Planned, settings: Settings | None = None, *, owner: str | None = None) -> Job:
    """A run of an application by a plan.

    Args:
        work: What there is to do.
        planned: What it follows.
        settings: How patient it is.
        owner: Tells this coordinator from others; None: a new one.
    """
    layout = lay(work.tasks, work.expected_tokens)
    return Job(
        layout=layout,
        expected_tokens=work.expected_tokens[layout.task_of],
        decider=work.decider,
        run_plan=planned.run_plan,
        placer=planned.placer,
        identity=identity_of(work.words, layout),
        owner=owner or new_owner(),
        settings=settings or Settings(),
        replan=planned.replan,
    )


def expected_tokens(draws: Sequence[TaskDraw]) -> Floats:
    """[n] mean output tokens over draws, nothing where a task does not come to be."""
    sums = sum(np.where(draw.present, draw.output_tokens, 0).astype(np.float64) for draw in draws)
    return np.asarray(sums / len(draws), np.float64)


def run_plan_of(plan: AppPlan) -> RunPlan:
    """What a plan says of when models run; it is as planned within the 5 % and 95 % quantiles of its makespan."""
    mean_s = plan.makespan.value
    low_s, high_s = plan.quantiles_s.get(0.05, mean_s), plan.quantiles_s.get(0.95, mean_s)
    slack = (low_s / mean_s * SLACK[0], high_s / mean_s * SLACK[1]) if mean_s > 0 else SLACK
    return RunPlan(plan.planned, plan.reserve, ends_s(plan.planned, plan.stages), slack, first_ready_s(plan.stages))


def first_ready_s(simulated: Sequence[AppStage]) -> float:
    """When the first engine is ready; 0 where one of the first stage is there from the start."""
    if not simulated:
        return 0.0
    seconds = [one.seconds for one in simulated[0].switches]
    switched = {one.model for one in simulated[0].switches}
    return 0.0 if any(plan.model not in switched for plan in simulated[0].plans) else min(seconds)


def ends_s(planned: Sequence[Sequence[ModelPlan]], simulated: Sequence[AppStage]) -> tuple[float, ...]:
    """When each planned stage ends: when the plan, played, was last in it.

    A played stage is in the next planned one as soon as something runs that only that one has.
    """
    found, at = [0.0] * len(planned), 0
    for stage in simulated:
        while at + 1 < len(found) and set(stage.plans) & (set(planned[at + 1]) - set(planned[at])):
            at += 1
        if found:
            found[at] = stage.end_s
    return tuple(np.maximum.accumulate(found).tolist()) if found else ()


def static_run_plan(plans: Sequence[ModelPlan]) -> RunPlan:
    """Of engines that others run: all models at once."""
    return RunPlan((tuple(plans),))


@dataclass(frozen=True)
class ClusterPlacer:
    """The GPUs of a cluster, with the least to load anew.

    Attributes:
        cluster: Of the GPUs.
        seconds: Until a replica is ready.
    """

    cluster: Cluster
    seconds: placement.Seconds

    def fits(self, plans: Plans) -> bool:
        """Whether plans have room beside one another."""
        return placement.fits(plans, self.cluster)

    def place(self, plans: Plans, before: Placement, running: Plans, in_sleep: Placement) -> Placement:
        """Where their replicas go."""
        slept = {(plan.model, plan.shape): in_sleep[plan.model] for plan in plans if plan.model in in_sleep}
        found = placement.place(plans, before, self.cluster, self.seconds, running=running, in_sleep=slept)
        if found is None:
            raise InternalError(f"plans that fit must have a place; {plans} have none")
        return found

    def ready_s(self, plan: ModelPlan) -> float:
        """As planned."""
        return self.seconds(plan, "start")


@dataclass(frozen=True)
class StaticPlacer:
    """Engines that others run: all have room, and a replica is its number among its model's."""

    def fits(self, plans: Plans) -> bool:  # noqa: ARG002 - the contract's
        """They run already."""
        return True

    def place(
        self,
        plans: Plans,
        before: Placement,  # noqa: ARG002 - the contract's
        running: Plans,  # noqa: ARG002
        in_sleep: Placement,  # noqa: ARG002
    ) -> Placement:
        """Their numbers."""
        return {plan.model: tuple((number,) for number in range(plan.dp)) for plan in plans}

    def ready_s(self, plan: ModelPlan) -> float:  # noqa: ARG002 - the contract's
        """Nobody knows."""
        return 0.0


@dataclass(frozen=True)
class Drawn:
    """A decider that asks for what is present in a draw, and skips the rest.

    Attributes:
        tasks: Of the application.
        draw: One way in which it may turn out.
    """

    tasks: Tasks
    draw: TaskDraw

    def decide(self, task: int, outputs: Outputs) -> RequestSpec | None:  # noqa: ARG002 - the contract's
        """A request that says which task it is; None: the draw has it not."""
        if not self.draw.present[task]:
            return None
        words = f"{self.tasks.models[self.tasks.model[task]]} {task} {self.draw.prompt_tokens[task]}"
        key = hashlib.sha256(words.encode()).hexdigest()
        return RequestSpec(key, Ask(task, COMPLETIONS, {"max_tokens": int(self.tasks.max_tokens[task])}))
