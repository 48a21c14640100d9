"""A job: an application's tasks in the order of the ledger, their requests, the plan, and the settings of a run."""

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
from lengthwise.apps.launch.engine import COMPLETIONS, TaskRequest
from lengthwise.apps.ledger.contracts import Output, State
from lengthwise.apps.ledger.table_ledger import Ledger
from lengthwise.schema.app import AppPlan, AppStage, Cluster, Floats, Ints, ModelPlan, Placement, TaskDraw, Tasks
from lengthwise.schema.errors import InputError, InternalError

Plans = tuple[ModelPlan, ...]

OWNER = "owner:"  # prefix of the names of the ledger's metadata on running coordinators
ENGINES = "engines:"  # prefix of the names of the ledger's metadata on the engines of a coordinator
SLACK = (0.9, 1.1)  # a run is as planned if its end is between these multiples of the ends of the plan's range
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Layout:
    """Tasks in the order of the ledger, which leases low places first. A task's place is its number in the ledger."""

    tasks: Tasks  # the tasks in that order; their ``call`` is an index into ``pairs``
    pairs: tuple[tuple[int, int], ...]  # (call, model) pairs, so that the ledger counts tasks by both
    task_of: Ints  # [n] for each place, its task's number in the application
    place_of: Ints  # [n] place of each task of the application

    def parents(self, place: int) -> Ints:
        """Return the places of the parents of the task at a place."""
        start = self.tasks.parent_start
        return self.tasks.parent[start[place] : start[place + 1]]


def ledger_layout(tasks: Tasks, expected_tokens: Floats) -> Layout:
    """Return the order of tasks in the ledger. Starts of chains with the most expected tokens ([n]) come first."""
    if len(expected_tokens) != len(tasks):
        raise InputError(
            f"there must be an expected length for each task ({len(tasks)}); there are {len(expected_tokens)}"
        )
    task_of = np.argsort(-chain_tokens(tasks, np.maximum(expected_tokens, 1.0)), kind="stable").astype(np.int64)
    place_of = np.empty_like(task_of)
    place_of[task_of] = np.arange(len(tasks))
    known, numbers = np.unique(tasks.call * len(tasks.models) + tasks.model, return_inverse=True)
    pairs = tuple(divmod(int(pair), len(tasks.models)) for pair in known)
    columns = ("model", "row", "round", "index", "prompt_tokens", "max_tokens", "known_tokens", "random_draw")
    counts = np.diff(tasks.parent_start)[task_of]
    start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    edge = np.repeat(tasks.parent_start[task_of] - start[:-1], counts) + np.arange(start[-1])
    placed = {name: getattr(tasks, name)[task_of] for name in columns} | {"call": numbers.astype(np.int64)[task_of]}
    edges = {"parent_start": start, "parent": place_of[tasks.parent[edge]], "shown": tasks.shown[edge]}
    return Layout(replace(tasks, **placed, **edges), pairs, task_of, place_of)


def chain_tokens(tasks: Tasks, tokens: Floats) -> Floats:
    """Return the tokens of the longest chain of dependent tasks that starts with each task, [n]."""
    from lengthwise.apps.plan.draws import depths

    longest = tokens.astype(np.float64).copy()
    child = np.repeat(np.arange(len(tasks)), np.diff(tasks.parent_start))
    depth = depths(child, tasks.parent, len(tasks))
    # From the deepest tasks up, so that the chains of all children of a task are known before its own.
    order = np.argsort(-depth[child], kind="stable")
    bounds = [*np.flatnonzero(np.diff(depth[child][order], prepend=-1)).tolist(), len(order)]
    for first, last in pairwise(bounds):
        edges = order[first:last]
        parents = tasks.parent[edges]
        np.maximum.at(longest, parents, tokens[parents] + longest[child[edges]])
    return longest


def identity_of(source_hashes: str, layout: Layout) -> str:
    """Return a hash that identifies the tasks. ``source_hashes`` has the hashes of the application and its inputs."""
    found = hashlib.sha256(source_hashes.encode())
    tasks = layout.tasks
    for column in (tasks.call, tasks.model, tasks.row, tasks.round, tasks.index, tasks.parent, layout.task_of):
        found.update(np.ascontiguousarray(column, dtype="<i8").tobytes())
    return found.hexdigest()


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """The request of a task, and the key under which its output is stored."""

    key: str
    request: TaskRequest


Outputs = Callable[[int], Output | None]  # returns the output of a finished task, or None if it was skipped


class Decider(Protocol):
    """Builds the request of a task after the task's parents have finished."""

    def decide(self, task: int, outputs: Outputs) -> RequestSpec | None:
        """Return the request of a task, or None if the task is skipped. Raises InputError if the task is dead."""


@dataclass(frozen=True)
class RunPlan:
    """A plan in the form that a run follows."""

    stages: tuple[Plans, ...]
    reserve: Plans = ()  # plans of models that are in no stage
    ends_s: tuple[float, ...] = ()  # planned end of each stage, in seconds from the start, or () if unknown
    # a stage ends as planned if its end is between these two multiples of the planned end
    slack: tuple[float, float] = (0.8, 1.25)
    # planned seconds of each stage in which engines load, each weighted by its share of the GPUs, or ()
    loads_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class Settings:
    """Retries and intervals of a run."""

    max_attempts: int = 3  # number of failed attempts after which a task is dead
    lease_s: float = 60.0  # seconds after which a lease expires unless it is renewed
    # Longest wait before the second attempt; it doubles with each further one. Jitter at most halves it.
    backoff_s: float = 1.0
    max_backoff_s: float = 60.0  # maximum seconds between attempts
    save_s: float = 2.0  # interval at which unfinished outputs are saved
    linger_s: float = 0.2  # maximum seconds until an output is recorded with others if no task waits for this output
    engine_failures: int = 8  # number of consecutive failures after which an engine is restarted
    # number of crashes of a model's engines without an answer in between that ends the run
    max_engine_failures: int = 12
    seed: int = 0  # seed of the jitter
    replans: int = 3  # maximum number of times that the rest of the run gets another plan. 0 means never

    def __post_init__(self) -> None:
        for name in ("max_attempts", "lease_s", "backoff_s", "save_s", "engine_failures", "max_engine_failures"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} must be above 0; it is {getattr(self, name)}")


@dataclass(frozen=True)
class PlanDeviation:
    """The state of a run that may have left its plan."""

    at_s: float  # seconds since the start of the plan that the run follows
    stage: int  # number of the current stage
    # planned end of this stage or, if the stage before ended too early, of that one, in the same seconds
    planned_s: float
    running: Plans  # plans that run
    # Whether a stage ended too early or is late. If not, the replanner only checks the lengths.
    is_off_time: bool = True
    # (number in the ledger, state, prompt tokens, output tokens) of finished tasks
    completed: Sequence[tuple[int, State, int, int]] = ()
    # tokens of unfinished outputs, by the task's number in the ledger
    written: Mapping[int, int] = field(default_factory=dict)
    placement: Placement = field(default_factory=dict)  # GPUs of the engines


@dataclass(frozen=True)
class RevisedPlan:
    """The result of replanning: another plan (``is_new``), or the old plan with new planned times."""

    run_plan: RunPlan
    is_new: bool
    description: str


Replan = Callable[[PlanDeviation], RevisedPlan | None]  # returns the plan to follow from now on; None: as before


@dataclass(frozen=True)
class Job:
    """The tasks, plan and settings of a run. ``identity`` is a hash of the application, its inputs and the layout."""

    layout: Layout
    expected_tokens: Floats  # [n] expected output tokens of each task, in the order of ``layout``
    decider: Decider
    run_plan: RunPlan
    placer: Placer
    identity: str
    owner: str  # name of this coordinator, which no other coordinator has
    settings: Settings = field(default_factory=Settings)
    # Returns a revised plan if the run has left its plan. If None, the plan is never revised.
    replan: Replan | None = None
    # Waits for a search that still runs when engines start, and returns its plan. None: no search.
    pending_plan: Callable[[], RunPlan] | None = None

    def backoff_s(self, place: int, attempt: int) -> float:
        """Return the seconds until the next attempt. Their jitter depends only on seed, place and attempt."""
        settings = self.settings
        longest = min(settings.max_backoff_s, settings.backoff_s * 2.0 ** (attempt - 1))
        return float(longest * np.random.default_rng((settings.seed, place, attempt)).uniform(0.5, 1.0))


def new_owner() -> str:
    """Return a new coordinator's name: host, boot, process, its start time, and a random part."""
    return "/".join((socket.gethostname(), _boot(), str(os.getpid()), _start_time(os.getpid()), uuid.uuid4().hex[:8]))


def is_dead(owner: str) -> bool:
    """Return whether a coordinator of this host is known to be dead, because its process no longer exists."""
    parts = owner.split("/")
    if len(parts) != 5 or parts[0] != socket.gethostname() or not parts[2].isdigit():
        return False
    return parts[1] != _boot() or _start_time(int(parts[2])) != parts[3]


def join_run(ledger: Ledger, job: Job, now_s: float) -> bool:
    """Open the ledger for a coordinator, and release leases of dead ones. Return whether the run is resumed."""
    resumed = ledger.open(job.identity, job.layout.tasks)
    dead = [owner for owner in _owners(ledger) if is_dead(owner)]
    for owner in dead:
        ledger.heartbeat(owner, now_s=now_s, lease_s=0.0)
    cleared = [prefix + owner for owner in dead for prefix in (OWNER, ENGINES)]
    ledger.set_metadata({OWNER + job.owner: "runs", **dict.fromkeys([*cleared, "cancel"], "")})
    ledger.expire(now_s=now_s)
    return resumed


def live_coordinators(ledger: Ledger) -> list[str]:
    """Return the names of registered coordinators, except for those of this host that are known to be dead."""
    return [owner for owner in _owners(ledger) if not is_dead(owner)]


def _owners(ledger: Ledger) -> list[str]:
    return [name.removeprefix(OWNER) for name in ledger.metadata() if name.startswith(OWNER)]


def _boot() -> str:
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"


def _start_time(pid: int) -> str:
    """Return the start time of a process in kernel ticks, or "" if the process does not run."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return ""
    return "" if words[0] in "ZX" else words[19]


@dataclass(frozen=True)
class Planned:
    """The plan of a run, the placer, and the function that revises the plan, or None if the plan is never revised."""

    run_plan: RunPlan
    placer: Placer
    replan: Replan | None = None


@dataclass(frozen=True)
class RunTasks:
    """The tasks of a run. ``source_hashes`` is a text with the hashes of the application and its inputs."""

    tasks: Tasks
    decider: Decider
    expected_tokens: Floats
    source_hashes: str = ""


def job_of(work: RunTasks, planned: Planned, settings: Settings | None = None, *, owner: str | None = None) -> Job:
    """Return the job that runs tasks by a plan. Without ``owner``, the coordinator gets a new name."""
    layout = ledger_layout(work.tasks, work.expected_tokens)
    return Job(
        layout=layout,
        expected_tokens=work.expected_tokens[layout.task_of],
        decider=work.decider,
        run_plan=planned.run_plan,
        placer=planned.placer,
        identity=identity_of(work.source_hashes, layout),
        owner=owner or new_owner(),
        settings=settings or Settings(),
        replan=planned.replan,
    )


def expected_tokens(draws: Sequence[TaskDraw]) -> Floats:
    """Return the mean output tokens of each task over the draws, [n]. A draw without the task counts as 0 tokens."""
    tokens = [np.where(draw.present, draw.output_tokens, 0) for draw in draws]
    return np.asarray(np.mean(tokens, axis=0), np.float64)


def run_plan_of(plan: AppPlan) -> RunPlan:
    """Return a planner's result in the form that a run follows, with the 5 and 95 % quantiles as its range."""
    mean_s = plan.makespan.value
    range_s = (plan.quantiles_s.get(0.05, mean_s), mean_s, plan.quantiles_s.get(0.95, mean_s))
    return simulated_run_plan(plan.planned, plan.reserve, plan.stages, range_s)


def simulated_run_plan(
    planned: tuple[Plans, ...], reserve: Plans, simulated: Sequence[AppStage], range_s: tuple[float, float, float]
) -> RunPlan:
    """Return a simulated plan in the form that a run follows.

    A planned stage lasts until a simulated one runs a plan that the next stage has and this one lacks. The run is as
    planned from 0.9 x the low end to 1.1 x the high end of the makespan's ``range_s`` (low end, mean, high end).
    """
    low_s, mean_s, high_s = range_s
    slack = (low_s / mean_s * SLACK[0], high_s / mean_s * SLACK[1]) if mean_s > 0 else SLACK
    ends_s, loads_s, at = [0.0] * len(planned), [0.0] * len(planned), 0
    for stage in simulated if planned else ():
        while at + 1 < len(planned) and set(stage.plans) & (set(planned[at + 1]) - set(planned[at])):
            at += 1
        ends_s[at] = stage.end_s
        seconds = (len(one.replica) * min(one.seconds, stage.end_s - stage.start_s) for one in stage.switches)
        loads_s[at] += sum(seconds) / max(stage.gpus, 1)
    return RunPlan(planned, reserve, tuple(np.maximum.accumulate(ends_s).tolist()), slack, tuple(loads_s))


@dataclass(frozen=True)
class ClusterPlacer:
    """Places replicas on a cluster so that they load in the shortest time. ``seconds`` is as in ``placement.place``."""

    cluster: Cluster
    seconds: placement.Seconds

    def fits(self, plans: Plans) -> bool:
        """Return whether the plans fit on the cluster at the same time."""
        return placement.fits(plans, self.cluster)

    def place(self, plans: Plans, before: Placement, running: Plans, sleeping: Placement) -> Placement:
        """Return the GPUs of each replica. ``sleeping`` has the GPUs of sleeping engines, by model, that can wake."""
        asleep = {(plan.model, plan.shape): sleeping[plan.model] for plan in plans if plan.model in sleeping}
        found = placement.place(plans, before, self.cluster, self.seconds, running=running, sleeping=asleep)
        if found is None:
            raise InternalError(f"plans that fit must have a place; {plans} have none")
        return found

    def ready_s(self, plan: ModelPlan) -> float:
        """Return the planned seconds from the start of a replica until it is ready."""
        return self.seconds(plan, "start")


@dataclass(frozen=True)
class StaticPlacer:
    """Numbers the engines of each model instead of placing them, since they already run."""

    def fits(self, plans: Plans) -> bool:  # noqa: ARG002 - as of ``ClusterPlacer``
        """Return True, since all engines already run."""
        return True

    def place(self, plans: Plans, before: Placement, running: Plans, sleeping: Placement) -> Placement:  # noqa: ARG002
        """Return the number of each engine among the engines of its model."""
        return {plan.model: tuple((number,) for number in range(plan.dp)) for plan in plans}

    def ready_s(self, plan: ModelPlan) -> float:  # noqa: ARG002 - the protocol's
        """Return 0, since the time is unknown."""
        return 0.0


Placer = ClusterPlacer | StaticPlacer


@dataclass(frozen=True)
class DrawDecider:
    """A ``Decider`` that requests the tasks that are present in a draw, and skips all others."""

    tasks: Tasks
    draw: TaskDraw

    def decide(self, task: int, outputs: Outputs) -> RequestSpec | None:  # noqa: ARG002 - the protocol's
        """Return a request that identifies the task, or None if the draw does not contain the task."""
        if not self.draw.present[task]:
            return None
        words = f"{self.tasks.models[self.tasks.model[task]]} {task} {self.draw.prompt_tokens[task]}"
        key = hashlib.sha256(words.encode()).hexdigest()
        return RequestSpec(key, TaskRequest(task, COMPLETIONS, {"max_tokens": int(self.tasks.max_tokens[task])}))
