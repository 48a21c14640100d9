"""The progress, the status and the result of a run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from lengthwise.apps.ledger.contracts import FINISHED, State
from lengthwise.apps.ledger.table_ledger import Ledger
from lengthwise.apps.run.dispatch import Reused
from lengthwise.apps.run.fleet import Silent, silent_engines
from lengthwise.apps.run.job import ENGINES, Layout, live_coordinators
from lengthwise.schema.app import ModelPlan, Replica
from lengthwise.schema.errors import EngineError

if TYPE_CHECKING:
    from lengthwise.apps.run.dispatch import ModelDispatcher
    from lengthwise.apps.run.job import Job
    from lengthwise.apps.run.plan_tracking import PlanTracker
    from lengthwise.apps.run.task_state import ReplicaSlot

SHAPE = "shape"  # the fact that holds the names of the calls and models behind the ledger's numbers
Counts = Mapping[tuple[int, int, State], int]  # tasks by call, model and state


@dataclass
class ModelStatus:
    """The status of one model according to the ledger."""

    name: str
    tasks: dict[str, int] = field(default_factory=dict)  # number of tasks by state, in lower case
    calls: dict[str, dict[str, int]] = field(default_factory=dict)  # the same for each call
    tokens: int = 0  # output tokens of the recorded outputs
    tries: int = 0  # number of finished attempts, with or without an output
    engines: tuple[str, ...] = ()  # engine, version and address of each running engine

    @property
    def total(self) -> int:
        """Return the number of tasks."""
        return sum(self.tasks.values())

    @property
    def completed(self) -> int:
        """Return the number of tasks that have finished."""
        return sum(self.tasks.get(state.name.lower(), 0) for state in FINISHED)


def encoded_names(layout: Layout) -> str:
    """Return the names of calls and models as the JSON text that the ledger stores."""
    tasks = layout.tasks
    return json.dumps({"calls": tasks.calls, "models": tasks.models, "pairs": layout.pairs})


def encoded_engines(names: tuple[str, ...], descriptions: Mapping[int, Collection[str]]) -> str:
    """Return the engines of a coordinator as the JSON text that the ledger stores, or "" if there are no engines."""
    engines = {names[model]: sorted(set(some)) for model, some in sorted(descriptions.items())}
    return json.dumps(engines) if engines else ""


def status_of(ledger: Ledger) -> tuple[ModelStatus, ...]:
    """Return the status of each model, in the application's order, or () if the ledger is of an older lengthwise."""
    metadata = ledger.metadata()
    if SHAPE not in metadata:
        return ()
    shape = json.loads(metadata[SHAPE])
    found = [ModelStatus(name) for name in shape["models"]]
    for (pair, state), tasks in ledger.counts().items():
        call, model = shape["pairs"][pair]
        status, name = found[model], state.name.lower()
        for counts in (status.tasks, status.calls.setdefault(shape["calls"][call], {})):
            counts[name] = counts.get(name, 0) + tasks
    for pair, attempts, tokens in ledger.sums():
        status = found[shape["pairs"][pair][1]]
        status.tries, status.tokens = status.tries + attempts, status.tokens + tokens
    for owner in live_coordinators(ledger):
        engines = json.loads(metadata.get(ENGINES + owner) or "{}")
        for status in found:
            status.engines += tuple(engines.get(status.name, ()))
    return tuple(found)


@dataclass(frozen=True)
class Event:
    """A change of an engine, or of the plan if ``model`` is -1. ``description`` is the engine, or the reason.

    ``what`` is "start", "wake", "ready", "sleep", "stop" or "died" of an engine, and "replan" or "keep" of the plan.
    """

    at_s: float
    what: str
    model: int
    gpus: Replica
    description: str


@dataclass(frozen=True)
class ModelProgress:
    """The progress of one model."""

    name: str
    state: str  # "runs", "starts", "waits" (for a later stage) or "finished"
    total: int  # number of tasks
    states: Mapping[State, int]  # number of tasks by state
    active: int  # number of running requests
    tokens: int  # output tokens since the start of the run
    tokens_per_s: float  # output tokens per second in which an engine was ready
    plan: ModelPlan | None
    gpus: tuple[Replica, ...]
    # seconds since the earliest start that is still under way, or None if no engine is starting
    starts_s: float | None = None
    # current or later stage of the plan in which the model runs, from 0, or None if there is none
    stage: int | None = None
    # seconds for the remaining tasks at the rate so far, or None if they are unknown or no tasks remain
    left_s: float | None = None

    @property
    def completed(self) -> int:
        """Return the number of tasks that have finished."""
        return sum(self.states.get(state, 0) for state in FINISHED)


@dataclass(frozen=True)
class Progress:
    """The progress of a run, ``at_s`` seconds since its start, in stage ``stage`` (from 0) of ``stages``."""

    at_s: float
    stage: int
    stages: int
    models: tuple[ModelProgress, ...]
    share: float  # share of the expected tokens that is done
    # seconds left, and the lower and upper end of their interval, or None if unknown
    left_s: tuple[float, float, float] | None
    silent: tuple[Silent, ...] = ()  # engines that should answer but do not


@dataclass
class Clock:
    """Times of a run, which are updated whenever its progress is read."""

    start_s: float  # start of the run, on the loop's clock
    before: float = 0.0  # share of the work that was done before ``from_s``
    from_s: float = 0.0  # time since which the run follows its current plan, from the start
    at_s: float = 0.0  # seconds since the start
    idle_s: float = 0.0  # seconds since ``from_s`` in which engines loaded, each counted by its share of the GPUs
    # ``at_s``, ``idle_s`` and the tracker's ``late_s`` when the share of the work last grew
    moved: tuple[float, float, float] = (0.0, 0.0, 0.0)
    share: float = 0.0  # share of the work at that time

    def check(self, now_s: float, share: float, *, loading: float = 0.0, late_s: float = 0.0) -> None:
        """Record the share of the work that is done now. ``loading`` is the share of the GPUs whose engines load."""
        self.idle_s += loading * (now_s - self.start_s - self.at_s)
        self.at_s = now_s - self.start_s
        if share > self.share:
            self.moved, self.share = (self.at_s, self.idle_s, late_s), share

    def left(self, tracker: PlanTracker, share: float) -> tuple[float, float, float] | None:
        """Return the seconds left and the ends of their interval. After a new plan, only the work since then counts."""
        if tracker.from_s != self.from_s:
            self.from_s, self.before, self.idle_s = tracker.from_s, min(share, 1.0 - 1e-9), 0.0
            self.moved = (self.from_s, 0.0, 0.0)
        (moved_s, idle_s, late_s), loads_s, stage = self.moved, tracker.run_plan.loads_s, max(0, tracker.now.stage)
        clock_s = self.at_s - tracker.late_s  # of the plan, which stands still while an engine is overdue
        # A new plan covers the work that was left when it was made; the plan of a resumed run covers all work.
        planned_s = tracker.planned_s * (1.0 if self.from_s > 0.0 else 1.0 - self.before)
        loaded_s = min(sum(loads_s[stage : stage + 1]), max(0.0, moved_s - tracker.stage_s))
        return time_left(
            share,
            moved_s - self.from_s - idle_s,
            self.from_s + planned_s - clock_s,
            tracker.run_plan.slack,
            before=self.before,
            later_s=sum(loads_s[stage:]) - loaded_s,
            still_s=clock_s - (moved_s - late_s),
        )


def progress_of(
    job: Job,
    tracker: PlanTracker,
    dispatchers: Sequence[ModelDispatcher],
    slots: Sequence[ReplicaSlot],
    counts: Counts,
    clock: Clock,
    now_s: float,
) -> Progress:
    """Return the progress of a run. ``counts`` are the numbers of tasks in the ledger."""
    mean = _mean_tokens(job)
    # Tokens of outputs that are not complete yet count too.
    written = float(sum(len(task.draft.output_ids) for slot in slots for task in slot.active.values()))
    share = work_done(job, counts, written)
    gpus, ready = (sum(len(slot.gpus) for slot in some) for some in (slots, [s for s in slots if s.engine is not None]))
    clock.check(now_s, share, loading=1.0 - ready / max(gpus, 1), late_s=tracker.late_s)
    models = []
    for model, name in enumerate(job.layout.tasks.models):
        states: Counter[State] = Counter()
        left_tokens = 0.0
        for (call, model_of_call, state), tasks in counts.items():
            if model_of_call == model:
                states[state] += tasks
                left_tokens += 0.0 if state in FINISHED else tasks * mean[call, model]
        is_finished = all(state in FINISHED for state, tasks in states.items() if tasks)
        own = [slot for slot in slots if slot.plan.model == model]
        if is_finished:
            progress_state = "finished"
        elif any(slot.engine is not None for slot in own):
            progress_state = "runs"
        else:
            progress_state = "starts" if own else "waits"
        dispatcher = dispatchers[model]
        engine_ready_s = dispatcher.engine_ready_s(clock.at_s)
        rate = dispatcher.tokens / engine_ready_s if engine_ready_s > 0 else 0.0
        models.append(
            ModelProgress(
                name=name,
                state=progress_state,
                total=sum(states.values()),
                states=states,
                active=dispatcher.active,
                tokens=dispatcher.tokens,
                tokens_per_s=rate,
                plan=next((plan for plan in tracker.now.plans if plan.model == model), None),
                gpus=tuple(slot.gpus for slot in own),
                starts_s=max((now_s - slot.started_s for slot in own if slot.engine is None), default=None),
                stage=None if is_finished else tracker.stage_of(model),
                left_s=left_tokens / rate if rate > 0 and not is_finished else None,
            )
        )
    stage, stages = tracker.now.stage, len(tracker.run_plan.stages)
    left_s = clock.left(tracker, share)
    unresponsive = silent_engines(slots, job.placer, clock.start_s, now_s)
    return Progress(clock.at_s, stage, stages, tuple(models), share, left_s, unresponsive)


def _mean_tokens(job: Job) -> dict[tuple[int, int], float]:
    pairs = len(job.layout.pairs)
    call = job.layout.tasks.call
    sums = np.bincount(call, weights=job.expected_tokens, minlength=pairs)
    numbers = np.maximum(np.bincount(call, minlength=pairs), 1)
    return dict(zip(job.layout.pairs, (sums / numbers).tolist(), strict=True))


def work_done(job: Job, counts: Counts, written_tokens: float = 0.0) -> float:
    """Return the share of the work that is done. Each task counts with the mean tokens of its call and model.

    The ``written_tokens`` of incomplete outputs count for at most half of the work that is left.
    """
    mean = _mean_tokens(job)
    done = sum(n * mean[call, model] for (call, model, state), n in counts.items() if state in FINISHED)
    total = float(job.expected_tokens.sum())
    if total <= 0:
        return 1.0
    return min(1.0, (done + min(written_tokens, 0.5 * max(0.0, total - done))) / total)


def time_left(
    share: float,
    work_s: float,
    planned_s: float,
    slack: tuple[float, float],
    *,
    before: float = 0.0,
    later_s: float = 0.0,
    still_s: float = 0.0,
) -> tuple[float, float, float] | None:
    """Return the seconds left and the ends of their interval, at first from the plan, later from the measured rate.

    Args:
        share: Share of the work that is done.
        work_s: Seconds of that work, without the loading of engines.
        planned_s: Seconds until the plan ends. If they are not positive, the plan says nothing about the rest.
        slack: Factors of the interval's ends.
        before: Share that was done before the start of a resumed run.
        later_s: Planned seconds of loading that follow that work.
        still_s: Seconds since the share last grew, which count as work or loading.
    """
    if share >= 1.0:
        return 0.0, 0.0, 0.0
    own_share, left_s = share - before, planned_s
    if own_share > 0.0 and work_s > 0.0:
        measured_s = work_s * (1.0 - share) / own_share + later_s - still_s
        # Squared: the last requests leave engines half empty, which only the plan knows before they do.
        weight = (own_share / (1.0 - before)) ** 2 if planned_s > 0.0 else 1.0
        left_s = weight * measured_s + (1.0 - weight) * planned_s
    return (left_s, left_s * slack[0], left_s * slack[1]) if left_s > 0.0 else None


@dataclass(frozen=True)
class RunResult:
    """The result of a run."""

    # "done", "stopped" (by a signal or the caller), "cancelled" (by another process) or "failed" (its engines)
    how: str
    counts: dict[tuple[int, int, State], int]
    seconds: float  # time until all tasks had finished or the run was stopped, without the time to stop the engines
    resumed: bool  # whether the run continued an earlier run of the same application
    # outputs from before the application changed, or None if it has not changed or there are none
    reused: Reused | None = None
    engines: dict[int, tuple[str, ...]] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    silent: tuple[Silent, ...] = ()  # engines that should have answered at the end but did not
    error: str = ""  # cause of "failed"

    def of(self, state: State) -> int:
        """Return the number of tasks in a state."""
        return sum(tasks for (_, _, found), tasks in self.counts.items() if found == state)

    @property
    def exit_code(self) -> int:
        """Return 0 if all tasks are answered or skipped, 1 if some are dead or blocked, 130 if the run ended early."""
        if self.how != "done":
            return 130
        return 1 if self.of(State.DEAD) + self.of(State.BLOCKED) else 0


class EnginesFailedError(EngineError):
    """Engines of a run did not start, or died repeatedly. ``completed`` is the result up to then."""

    def __init__(self, completed: RunResult) -> None:
        super().__init__(completed.error)
        self.completed = completed
