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
from lengthwise.apps.run.fleet import Silent, silent
from lengthwise.apps.run.job import ENGINES, Layout, alive
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
    """One model, as a ledger has it.

    Attributes:
        tasks: By state, in lower case; ``calls``: the same for each call.
        tokens: Output tokens of the recorded outputs.
        tries: Finished attempts, with or without an output.
        engines: Engine, version and address of its running engines.
    """

    name: str
    tasks: dict[str, int] = field(default_factory=dict)
    calls: dict[str, dict[str, int]] = field(default_factory=dict)
    tokens: int = 0
    tries: int = 0
    engines: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Return the number of tasks."""
        return sum(self.tasks.values())

    @property
    def completed(self) -> int:
        """Return the number of tasks that have finished."""
        return sum(self.tasks.get(state.name.lower(), 0) for state in FINISHED)


def shape_of(layout: Layout) -> str:
    """Return the names of calls and models, as a ledger stores them."""
    tasks = layout.tasks
    return json.dumps({"calls": tasks.calls, "models": tasks.models, "pairs": layout.pairs})


def engines_of(names: tuple[str, ...], descriptions: Mapping[int, Collection[str]]) -> str:
    """Return the engines of a coordinator, as a ledger stores them; "" without any."""
    engines = {names[model]: sorted(set(some)) for model, some in sorted(descriptions.items())}
    return json.dumps(engines) if engines else ""


def status_of(ledger: Ledger) -> tuple[ModelStatus, ...]:
    """Return the status of each model, in the application's order; () of a run by an older lengthwise."""
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
    for owner in alive(ledger):
        engines = json.loads(metadata.get(ENGINES + owner) or "{}")
        for status in found:
            status.engines += tuple(engines.get(status.name, ()))
    return tuple(found)


@dataclass(frozen=True)
class Event:
    """A switch of an engine or of the plan, with the engine or the reason; ``model`` -1: none.

    ``what`` is "start", "wake", "ready", "sleep", "stop", "died", "replan" or "keep".
    """

    at_s: float
    what: str
    model: int
    gpus: Replica
    description: str


@dataclass(frozen=True)
class ModelProgress:
    """One model.

    Attributes:
        state: "runs", "starts", "waits" (for a later stage) or "finished".
        total: Its tasks; ``states``: by state.
        active: Running requests.
        tokens: Output tokens since the start of the run; ``tokens_per_s``: over the time with a ready engine.
        starts_s: Seconds since the earliest start that is still under way; None: no engine is starting.
        stage: Stage of the plan in which it runs or will run, from 0; None: none.
        left_s: Seconds for its remaining tasks at its rate so far; None: unknown, or none are left.
    """

    name: str
    state: str
    total: int
    states: Mapping[State, int]
    active: int
    tokens: int
    tokens_per_s: float
    plan: ModelPlan | None
    gpus: tuple[Replica, ...]
    starts_s: float | None = None
    stage: int | None = None
    left_s: float | None = None

    @property
    def completed(self) -> int:
        """Return the number of tasks that have finished."""
        return sum(self.states.get(state, 0) for state in FINISHED)


@dataclass(frozen=True)
class Progress:
    """The progress of a run ``at_s`` seconds since its start, in a stage (from 0) of so many.

    Attributes:
        share: Share of the work that is done, by expected tokens.
        left_s: Seconds left with the lower and upper end of the plan's uncertainty; None: unknown.
        silent: Engines that should answer and do not.
    """

    at_s: float
    stage: int
    stages: int
    models: tuple[ModelProgress, ...]
    share: float
    left_s: tuple[float, float, float] | None
    silent: tuple[Silent, ...] = ()


@dataclass
class Clock:
    """Times of a run, updated whenever its progress is read.

    Attributes:
        start_s: Start of the run, on the loop's clock.
        before: Share of the work that was done before the run, or before the plan that is followed since ``from_s``.
        at_s: Seconds since the start.
        moved_s: When the share last grew, since the start; ``share``: the share then.
        first_s: When an engine was first seen to be ready under that plan; None: none was yet.
    """

    start_s: float
    before: float = 0.0
    from_s: float = 0.0
    at_s: float = 0.0
    moved_s: float = 0.0
    share: float = 0.0
    first_s: float | None = None

    def check(self, now_s: float, share: float, *, is_served: bool = True) -> None:
        """Record the share that is done now; ``is_served``: an engine is ready."""
        self.at_s = now_s - self.start_s
        if is_served and self.first_s is None:
            self.first_s = self.at_s
        if share > self.share:
            self.moved_s, self.share = self.at_s, share

    def left(self, tracker: PlanTracker, share: float, *, is_served: bool = True) -> tuple[float, float, float] | None:
        """Return the seconds left with an interval; under a new plan, from what was done since it is followed."""
        planned_s = tracker.end_s
        if tracker.from_s > 0.0:
            if tracker.from_s != self.from_s:
                self.from_s, self.before = tracker.from_s, min(share, 1.0 - 1e-9)
                self.first_s = self.from_s if is_served else None
            planned_s = tracker.planned_s / (1.0 - self.before)
        at_s, run_plan = self.at_s - self.from_s, tracker.run_plan
        first_s = at_s if self.first_s is None else self.first_s - self.from_s
        moved_s, late_s = max(0.0, self.moved_s - self.from_s), max(0.0, first_s - run_plan.ready_s)
        slack, before = run_plan.slack, self.before
        return time_left(share, at_s, planned_s, slack, before=before, moved_s=moved_s, first_s=first_s, late_s=late_s)


def progress_of(
    job: Job,
    tracker: PlanTracker,
    dispatchers: Sequence[ModelDispatcher],
    slots: Sequence[ReplicaSlot],
    counts: Counts,
    clock: Clock,
    now_s: float,
) -> Progress:
    """Return the progress of a run from the state of its parts."""
    mean = _mean_tokens(job)
    # Tokens of outputs that are not complete yet count too.
    written = float(sum(len(task.draft.output_ids) for slot in slots for task in slot.active.values()))
    share = work_done(job, counts, written)
    is_served = any(slot.engine is not None for slot in slots)
    clock.check(now_s, share, is_served=is_served)
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
        ran_s = dispatcher.ran_s(clock.at_s)
        rate = dispatcher.tokens / ran_s if ran_s > 0 else 0.0
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
    left_s = clock.left(tracker, share, is_served=is_served)
    unresponsive = silent(slots, job.placer, clock.start_s, now_s)
    return Progress(clock.at_s, stage, stages, tuple(models), share, left_s, unresponsive)


def _mean_tokens(job: Job) -> dict[tuple[int, int], float]:
    """Return the mean expected tokens of the tasks of each call and model."""
    pairs = len(job.layout.pairs)
    call = job.layout.tasks.call
    sums = np.bincount(call, weights=job.expected_tokens, minlength=pairs)
    numbers = np.maximum(np.bincount(call, minlength=pairs), 1)
    return dict(zip(job.layout.pairs, (sums / numbers).tolist(), strict=True))


def work_done(job: Job, counts: Counts, written_tokens: float = 0.0) -> float:
    """Return the share of the work that is done; each task counts as the mean of its call and model.

    ``written_tokens`` of incomplete outputs count for at most half of what is left.
    """
    mean = _mean_tokens(job)
    done = sum(n * mean[call, model] for (call, model, state), n in counts.items() if state in FINISHED)
    total = float(job.expected_tokens.sum())
    if total <= 0:
        return 1.0
    return min(1.0, (done + min(written_tokens, 0.5 * max(0.0, total - done))) / total)


def time_left(
    share: float,
    at_s: float,
    planned_s: float | None,
    slack: tuple[float, float],
    *,
    before: float = 0.0,
    moved_s: float | None = None,
    first_s: float = 0.0,
    late_s: float = 0.0,
) -> tuple[float, float, float] | None:
    """Return the seconds left with an interval: the plan's estimate at first, the measured one towards the end.

    Until an engine is ready nothing is measured: the plan's clock stops while the first engine is late, and the planned
    time to its start counts as working time in proportion to the share of the work that is done.

    Args:
        share: Share of the work that is done, ``at_s`` since the start.
        planned_s: When the plan ends, from the start; None: unknown.
        slack: Factors of the interval's ends.
        before: Share that was done before the start of a resumed run.
        moved_s: When the share last grew: the estimate of then holds until it grows again. None: now.
        first_s: When the first engine was ready, or now.
        late_s: How much later than planned that is.
    """
    if share >= 1.0:
        return 0.0, 0.0, 0.0
    own_share, moved_s = share - before, at_s if moved_s is None else moved_s
    measured_weight = own_share / (1.0 - before)
    idle_s = late_s + (first_s - late_s) * (1.0 - measured_weight)
    work_s = max(0.0, moved_s - idle_s)
    measured_s = None
    if own_share > 0.0 and work_s > 0.0:
        measured_s = work_s * (1.0 - share) / own_share - (at_s - moved_s)
    by_plan_s = None if planned_s is None else planned_s * (1.0 - before) + late_s - at_s
    if by_plan_s is not None and by_plan_s <= 0.0:
        by_plan_s = None  # the run is later than the plan, which says nothing about the rest
    if measured_s is None or by_plan_s is None:
        left_s = by_plan_s if measured_s is None else measured_s
    else:
        left_s = measured_weight * measured_s + (1.0 - measured_weight) * by_plan_s
    if left_s is None or left_s <= 0.0:
        return None
    return left_s, left_s * slack[0], left_s * slack[1]


@dataclass(frozen=True)
class RunResult:
    """The result of a run.

    Attributes:
        how: "done", "stopped" (by a signal or the caller), "cancelled" (by another process) or "failed" (its engines).
        seconds: Until all tasks had finished or it was stopped, on its clock, without the time to stop the engines.
        resumed: Whether it continued a run of the same application.
        reused: Outputs from before the application changed; None: it has not changed, or there are none.
        silent: Engines that should have answered at the end and did not; ``error``: why engines failed.
    """

    how: str
    counts: dict[tuple[int, int, State], int]
    seconds: float
    resumed: bool
    reused: Reused | None = None
    engines: dict[int, tuple[str, ...]] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    silent: tuple[Silent, ...] = ()
    error: str = ""

    def of(self, state: State) -> int:
        """Return the number of tasks in a state."""
        return sum(tasks for (_, _, found), tasks in self.counts.items() if found == state)

    @property
    def exit_code(self) -> int:
        """Return 0 if all tasks are answered or skipped, 1 if some are dead or blocked, 130 if it ended early."""
        if self.how != "done":
            return 130
        return 1 if self.of(State.DEAD) + self.of(State.BLOCKED) else 0


class EnginesFailedError(EngineError):
    """Engines of a run did not start, or died repeatedly; ``completed`` is the result so far."""

    def __init__(self, completed: RunResult) -> None:
        super().__init__(completed.error)
        self.completed = completed
