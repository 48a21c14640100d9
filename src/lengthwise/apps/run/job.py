"""A job: the tasks of an application in the order of the ledger, their requests, the plan, and its coordinator."""

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

from lengthwise.apps import placement
from lengthwise.apps.launch.engine import COMPLETIONS, Ask
from lengthwise.apps.ledger.contracts import Output, State
from lengthwise.apps.ledger.table_ledger import Ledger
from lengthwise.schema.app import AppPlan, AppStage, Cluster, Floats, Ints, ModelPlan, Placement, TaskDraw, Tasks
from lengthwise.schema.errors import InputError, InternalError

Plans = tuple[ModelPlan, ...]

OWNER = "owner:"  # prefix of the ledger's keys that name the running coordinators
ENGINES = "engines:"  # prefix of the ledger's keys that list the engines of a coordinator
SLACK = (0.9, 1.1)  # a run is as planned within these factors of the plan's range
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Layout:
    """Tasks in the order of the ledger, which leases low places first.

    In ``tasks``, ``call`` is an index of ``pairs`` (call, model), so that the ledger counts both. ``task_of`` [n] is
    the application's task at a place, and ``place_of`` [n] the place of a task.
    """

    tasks: Tasks
    pairs: tuple[tuple[int, int], ...]
    task_of: Ints
    place_of: Ints

    def parents(self, place: int) -> Ints:
        """Return the places that a place waits for."""
        start = self.tasks.parent_start
        return self.tasks.parent[start[place] : start[place + 1]]


def lay(tasks: Tasks, expected_tokens: Floats) -> Layout:
    """Order tasks by the longest chain of expected tokens that starts with them: long chains must not start last."""
    if len(expected_tokens) != len(tasks):
        raise InputError(
            f"there must be an expected length for each task ({len(tasks)}); there are {len(expected_tokens)}"
        )
    task_of = np.argsort(-chains(tasks, np.maximum(expected_tokens, 1.0)), kind="stable").astype(np.int64)
    place_of = np.empty_like(task_of)
    place_of[task_of] = np.arange(len(tasks))
    known, numbers = np.unique(tasks.call * len(tasks.models) + tasks.model, return_inverse=True)
    pairs = tuple(divmod(int(pair), len(tasks.models)) for pair in known)
    columns = ("model", "row", "round", "index", "prompt_tokens", "max_tokens", "known_tokens", "random_draw")
    counts = np.diff(tasks.parent_start)[task_of]
    start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    edge = np.repeat(tasks.parent_start[task_of] - start[:-1], counts) + np.arange(start[-1])
    placed = replace(
        tasks,
        **{name: getattr(tasks, name)[task_of] for name in columns},
        call=numbers.astype(np.int64)[task_of],
        parent_start=start,
        parent=place_of[tasks.parent[edge]],
        shown=tasks.shown[edge],
    )
    return Layout(placed, pairs, task_of, place_of)


def chains(tasks: Tasks, tokens: Floats) -> Floats:
    """Return [n] the tokens of the longest chain of tasks that starts with each."""
    from lengthwise.apps.plan.draws import depths

    longest = tokens.astype(np.float64).copy()
    child = np.repeat(np.arange(len(tasks)), np.diff(tasks.parent_start))
    depth = depths(child, tasks.parent, len(tasks))
    # From the deepest generation up, so that the chains of all children of a task are known before its own.
    order = np.argsort(-depth[child], kind="stable")
    bounds = [*np.flatnonzero(np.diff(depth[child][order], prepend=-1)).tolist(), len(order)]
    for first, last in pairwise(bounds):
        edges = order[first:last]
        parents = tasks.parent[edges]
        np.maximum.at(longest, parents, tokens[parents] + longest[child[edges]])
    return longest


def identity_of(words: str, layout: Layout) -> str:
    """Return a hash that identifies the tasks: by the hashes of application and inputs (``words``), and the layout."""
    found = hashlib.sha256(words.encode())
    tasks = layout.tasks
    for column in (tasks.call, tasks.model, tasks.row, tasks.round, tasks.index, tasks.parent, layout.task_of):
        found.update(np.ascontiguousarray(column, dtype="<i8").tobytes())
    return found.hexdigest()


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """The request of a task, and the key of its output."""

    key: str
    request: Ask


Outputs = Callable[[int], Output | None]
"""Returns the output of a finished task, by its number in the application; None for a skipped task."""


class Decider(Protocol):
    """Builds the request of a task, once its parents have finished."""

    def decide(self, task: int, outputs: Outputs) -> RequestSpec | None:
        """Return the request; None: the task is skipped. Raise InputError if it cannot be built: the task is dead."""


@dataclass(frozen=True)
class RunPlan:
    """A plan as a run follows it.

    Attributes:
        reserve: Plans of models that are in no stage.
        ends_s: Planned end of each stage, from the start; () if unknown.
        slack: A stage is as planned if it ends within these factors of its planned end.
        ready_s: Planned time until the first engine is ready, from the start.
    """

    stages: tuple[Plans, ...]
    reserve: Plans = ()
    ends_s: tuple[float, ...] = ()
    slack: tuple[float, float] = (0.8, 1.25)
    ready_s: float = 0.0


@dataclass(frozen=True)
class Settings:
    """Retries and intervals of a run.

    Attributes:
        max_attempts: A task is dead after so many.
        lease_s: A lease that is not renewed for so long is given to others.
        backoff_s: Time before the second attempt; it doubles with each further one, and has jitter.
        max_backoff_s: Longest time between attempts.
        save_s: Interval at which unfinished outputs are saved.
        linger_s: How long an output that unblocks no task may wait to be recorded with others.
        engine_failures: An engine is restarted after so many failures in a row.
        max_engine_failures: The run fails after so many crashes of a model's engines without an answer in between.
        seed: Of the jitter.
        replans: How often the rest is planned again at most; 0: never.
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
class PlanDeviation:
    """The state of a run that may have left its plan.

    Attributes:
        planned_s: Planned end of the stage.
        is_off_time: Whether its clock has left the plan's interval; else its lengths are to be checked.
        completed: (place, state, prompt tokens, output tokens) of finished tasks.
        written: Tokens of unfinished outputs, by place.
    """

    at_s: float
    stage: int
    planned_s: float
    running: Plans
    is_off_time: bool = True
    completed: Sequence[tuple[int, State, int, int]] = ()
    written: Mapping[int, int] = field(default_factory=dict)
    placement: Placement = field(default_factory=dict)


@dataclass(frozen=True)
class RevisedPlan:
    """The outcome of a new planning: another plan (``is_new``), or the old one with its times from now on."""

    run_plan: RunPlan
    is_new: bool
    description: str


Replan = Callable[[PlanDeviation], RevisedPlan | None]
"""Returns the plan to follow once a run has left its plan; None: as before."""


@dataclass(frozen=True)
class Job:
    """A run of an application and its inputs (``identity``).

    Attributes:
        expected_tokens: [n] output tokens by place.
        owner: Identifies this coordinator, also among dead ones.
        replan: None: the plan is never revised.
        seek: Waits for the plan that is still searched for when engines start; None: ``run_plan`` is final.
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

    def backoff_s(self, place: int, attempt: int) -> float:
        """Return the seconds until the next attempt, the same for the same attempt of the same task."""
        settings = self.settings
        longest = min(settings.max_backoff_s, settings.backoff_s * 2.0 ** (attempt - 1))
        return float(longest * np.random.default_rng((settings.seed, place, attempt)).uniform(0.5, 1.0))


def new_owner() -> str:
    """Return a name for a coordinator of this process: host, boot, process, its start time, and a random part."""
    return "/".join((socket.gethostname(), _boot(), str(os.getpid()), _start_time(os.getpid()), uuid.uuid4().hex[:8]))


def is_dead(owner: str) -> bool:
    """Return whether a coordinator is known to be dead: it ran on this host, and its process does not exist."""
    parts = owner.split("/")
    if len(parts) != 5 or parts[0] != socket.gethostname() or not parts[2].isdigit():
        return False
    return parts[1] != _boot() or _start_time(int(parts[2])) != parts[3]


def enter(ledger: Ledger, job: Job, now_s: float) -> bool:
    """Open the ledger for a run and release the leases of dead coordinators; return whether the run is resumed."""
    resumed = ledger.open(job.identity, job.layout.tasks)
    dead = [owner for owner in _owners(ledger) if is_dead(owner)]
    for owner in dead:
        ledger.heartbeat(owner, now_s=now_s, lease_s=0.0)
    cleared = [prefix + owner for owner in dead for prefix in (OWNER, ENGINES)]
    ledger.note({OWNER + job.owner: "runs", **dict.fromkeys([*cleared, "cancel"], "")})
    ledger.expire(now_s=now_s)
    return resumed


def alive(ledger: Ledger) -> list[str]:
    """Return the coordinators that are not known to have finished or died."""
    return [owner for owner in _owners(ledger) if not is_dead(owner)]


def _owners(ledger: Ledger) -> list[str]:
    return [name.removeprefix(OWNER) for name in ledger.metadata() if name.startswith(OWNER)]


def _boot() -> str:
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"


def _start_time(pid: int) -> str:
    """Return the start time of a process in kernel ticks; "" if it does not run."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return ""
    return "" if words[0] in "ZX" else words[19]


@dataclass(frozen=True)
class Planned:
    """The plan of a run, its placer, and how it is revised (None: never)."""

    run_plan: RunPlan
    placer: Placer
    replan: Replan | None = None


@dataclass(frozen=True)
class RunTasks:
    """The tasks of a run; ``words`` holds the hashes of the application and its inputs."""

    tasks: Tasks
    decider: Decider
    expected_tokens: Floats
    words: str = ""


def job_of(work: RunTasks, planned: Planned, settings: Settings | None = None, *, owner: str | None = None) -> Job:
    """Return the run of an application by a plan; ``owner`` None: a new coordinator of this process."""
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
    """Return [n] the mean output tokens over draws; a task that a draw does not contain counts 0."""
    tokens = [np.where(draw.present, draw.output_tokens, 0) for draw in draws]
    return np.asarray(np.mean(tokens, axis=0), np.float64)


def run_plan_of(plan: AppPlan) -> RunPlan:
    """Return a plan's stages; as planned is from 0.9 times the makespan's 5 % to 1.1 times its 95 % quantile."""
    mean_s = plan.makespan.value
    low_s, high_s = plan.quantiles_s.get(0.05, mean_s), plan.quantiles_s.get(0.95, mean_s)
    slack = (low_s / mean_s * SLACK[0], high_s / mean_s * SLACK[1]) if mean_s > 0 else SLACK
    ready_s = 0.0
    if plan.stages:
        switches, plans = plan.stages[0].switches, plan.stages[0].plans
        if {running.model for running in plans} <= {switch.model for switch in switches}:
            ready_s = min(switch.seconds for switch in switches)  # else an engine is ready from the start
    return RunPlan(plan.planned, plan.reserve, ends_s(plan.planned, plan.stages), slack, ready_s)


def ends_s(planned: Sequence[Sequence[ModelPlan]], simulated: Sequence[AppStage]) -> tuple[float, ...]:
    """Return when each planned stage ends in its simulation.

    A simulated stage belongs to the next planned one as soon as a plan runs that only that one has.
    """
    found, at = [0.0] * len(planned), 0
    for stage in simulated if planned else ():
        while at + 1 < len(found) and set(stage.plans) & (set(planned[at + 1]) - set(planned[at])):
            at += 1
        found[at] = stage.end_s
    return tuple(np.maximum.accumulate(found).tolist()) if found else ()


def static_run_plan(plans: Sequence[ModelPlan]) -> RunPlan:
    """Return the plan of engines that run already: all models at once."""
    return RunPlan((tuple(plans),))


@dataclass(frozen=True)
class ClusterPlacer:
    """Places replicas on the GPUs of a cluster with the shortest loading time; ``seconds`` until one is ready."""

    cluster: Cluster
    seconds: placement.Seconds

    def fits(self, plans: Plans) -> bool:
        """Return whether plans fit beside one another."""
        return placement.fits(plans, self.cluster)

    def place(self, plans: Plans, before: Placement, running: Plans, in_sleep: Placement) -> Placement:
        """Return the GPUs of each replica; ``in_sleep``: those of the same plans that can be woken."""
        asleep = {(plan.model, plan.shape): in_sleep[plan.model] for plan in plans if plan.model in in_sleep}
        found = placement.place(plans, before, self.cluster, self.seconds, running=running, in_sleep=asleep)
        if found is None:
            raise InternalError(f"plans that fit must have a place; {plans} have none")
        return found

    def ready_s(self, plan: ModelPlan) -> float:
        """Return the planned seconds from the start of a replica until it is ready."""
        return self.seconds(plan, "start")


@dataclass(frozen=True)
class StaticPlacer:
    """Numbers the engines of each model, which run already, instead of placing them."""

    def fits(self, plans: Plans) -> bool:  # noqa: ARG002 - as of ``ClusterPlacer``
        """Return True."""
        return True

    def place(self, plans: Plans, before: Placement, running: Plans, in_sleep: Placement) -> Placement:  # noqa: ARG002
        """Return the number of each engine among those of its model."""
        return {plan.model: tuple((number,) for number in range(plan.dp)) for plan in plans}

    def ready_s(self, plan: ModelPlan) -> float:  # noqa: ARG002 - the protocol's
        """Return 0: unknown."""
        return 0.0


Placer = ClusterPlacer | StaticPlacer


@dataclass(frozen=True)
class Drawn:
    """Requests the tasks that are present in a draw, and skips the others."""

    tasks: Tasks
    draw: TaskDraw

    def decide(self, task: int, outputs: Outputs) -> RequestSpec | None:  # noqa: ARG002 - the protocol's
        """Return a request that identifies the task; None if it is not in the draw."""
        if not self.draw.present[task]:
            return None
        words = f"{self.tasks.models[self.tasks.model[task]]} {task} {self.draw.prompt_tokens[task]}"
        key = hashlib.sha256(words.encode()).hexdigest()
        return RequestSpec(key, Ask(task, COMPLETIONS, {"max_tokens": int(self.tasks.max_tokens[task])}))
