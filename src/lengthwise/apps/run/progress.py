"""How far a run is: a snapshot for whoever shows it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from lengthwise.apps.ledger.contracts import FINISHED, Ledger, State
from lengthwise.apps.run.dispatch import Reused
from lengthwise.apps.run.fleet import Silent, silent
from lengthwise.apps.run.job import ENGINES, Layout, alive
from lengthwise.schema.app import ModelPlan, Replica
from lengthwise.schema.errors import EngineError

SHAPE = "shape"
"""The fact that tells what calls and models the ledger's numbers are."""


@dataclass(frozen=True)
class ModelStatus:
    """One model.

    Attributes:
        name: As the application calls it.
        tasks: By state, in small letters, those of all its calls.
        calls: The same, call by call.
        tokens: Output tokens of the answers that are recorded.
        tries: Attempts that ended, in answers or not.
        engines: What answers for it now: engine, version, address.
    """

    name: str
    tasks: Mapping[str, int]
    calls: Mapping[str, Mapping[str, int]]
    tokens: int
    tries: int
    engines: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """All tasks."""
        return sum(self.tasks.values())

    @property
    def completed(self) -> int:
        """Those that have ended."""
        return sum(self.tasks.get(state.name.lower(), 0) for state in FINISHED)


@dataclass
class _Sum:
    calls: dict[str, dict[str, int]] = field(default_factory=dict)
    tasks: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    tries: int = 0

    def add(self, call: str, state: State, tasks: int) -> None:
        name = state.name.lower()
        for counts in (self.tasks, self.calls.setdefault(call, {})):
            counts[name] = counts.get(name, 0) + tasks


def shape_of(layout: Layout) -> str:
    """What a ledger notes of its calls and models."""
    tasks = layout.tasks
    return json.dumps({"calls": tasks.calls, "models": tasks.models, "pairs": layout.pairs})


def engines_of(names: tuple[str, ...], abouts: Mapping[int, set[str]]) -> str:
    """What a coordinator notes of its engines; nothing where it has none."""
    told = {names[model]: sorted(some) for model, some in sorted(abouts.items())}
    return json.dumps(told) if told else ""


def status_of(ledger: Ledger) -> tuple[ModelStatus, ...]:
    """Each model in the application's order; () of a run that an older lengthwise laid out."""
    metadata = ledger.metadata()
    if SHAPE not in metadata:
        return ()
    shape = json.loads(metadata[SHAPE])
    sums = [_Sum() for _ in shape["models"]]
    for (pair, state), tasks in ledger.counts().items():
        call, model = shape["pairs"][pair]
        sums[model].add(shape["calls"][call], state, tasks)
    for pair, tries, tokens in ledger.sums():
        one = sums[shape["pairs"][pair][1]]
        one.tries, one.tokens = one.tries + tries, one.tokens + tokens
    engines = _engines(metadata, alive(ledger))
    return tuple(
        ModelStatus(name, one.tasks, one.calls, one.tokens, one.tries, tuple(engines.get(name, ())))
        for name, one in zip(shape["models"], sums, strict=True)
    )


def _engines(metadata: Mapping[str, str], owners: list[str]) -> dict[str, list[str]]:
    """By model's name, of coordinators that are alive."""
    found: dict[str, list[str]] = {}
    for owner in owners:
        told: Any = json.loads(metadata.get(ENGINES + owner) or "{}")
        for name, abouts in told.items():
            found.setdefault(name, []).extend(abouts)
    return found


if TYPE_CHECKING:
    from lengthwise.apps.run.dispatch import ModelDispatcher
    from lengthwise.apps.run.job import Job
    from lengthwise.apps.run.plan_tracking import PlanTracker
    from lengthwise.apps.run.task_state import ReplicaSlot


@dataclass(frozen=True)
class Event:
    """Something that happened to an engine or the plan: "start", "wake", "ready", "sleep", "stop", "died", "replan".

    Attributes:
        at_s: Since the start.
        what: Of these.
        model: By number; -1: of none.
        gpus: Of the replica.
        description: The engine, in a few words.
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
        name: As the application calls it.
        state: "runs", "starts", "waits" (for its turn) or "finished".
        total: Tasks.
        states: Of them, by state.
        active: Requests under way.
        tokens: Output tokens that were written since the start.
        tokens_per_s: Since the start of the run, of the time in which it ran.
        plan: Under which it runs.
        gpus: Of its replicas.
        starts_s: For so long an engine of it has been starting; None: none is.
        stage: Of the plan in which it runs, or will, from 0; None: in none.
        left_s: Seconds that its tasks would take at its rate so far; None: it has none yet, or nothing is left.
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
        """Tasks that have ended."""
        return sum(self.states.get(state, 0) for state in FINISHED)


@dataclass(frozen=True)
class Progress:
    """The whole run.

    Attributes:
        at_s: Seconds since the start.
        stage: Of the plan, from 0.
        stages: How many it has.
        models: Each of them.
        share: Of the work, by expected tokens.
        left_s: Seconds left, and as low and high as the plan was unsure; None: nobody can tell yet.
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
    """When a run is looked at, again and again.

    Attributes:
        start_s: When it began, on the loop's clock.
        before: The share of the work that was done before it began, or before the plan that is followed now.
        from_s: Since when that plan is followed.
        at_s: Seconds since the start.
        moved_s: When the share was last seen to have grown, since the start.
        share: By then.
        first_s: When an engine was first seen to be ready since that plan is followed; None: none was yet.
    """

    start_s: float
    before: float = 0.0
    from_s: float = 0.0
    at_s: float = 0.0
    moved_s: float = 0.0
    share: float = 0.0
    first_s: float | None = None

    def check(self, now_s: float, share: float, *, is_served: bool = True) -> None:
        """It is now so late, so much is done, and an engine is ready or none is."""
        self.at_s = now_s - self.start_s
        if is_served and self.first_s is None:
            self.first_s = self.at_s
        if share > self.share:
            self.moved_s, self.share = self.at_s, share

    def left(self, tracker: PlanTracker, share: float, *, is_served: bool = True) -> tuple[float, float, float] | None:
        """Seconds left with an interval; by a plan that was made anew from what has gone on since."""
        planned_s = tracker.end_s
        if tracker.from_s > 0.0:
            if tracker.from_s != self.from_s:
                self.from_s, self.before = tracker.from_s, min(share, 1.0 - 1e-9)
                self.first_s = self.from_s if is_served else None
            planned_s = tracker.planned_s / (1.0 - self.before)
        moved_s = max(0.0, self.moved_s - self.from_s)
        at_s, run_plan = self.at_s - self.from_s, tracker.run_plan
        first_s = at_s if self.first_s is None else self.first_s - self.from_s
        return time_left(
            share, at_s, planned_s, run_plan.slack,
            before=self.before, moved_s=moved_s, first_s=first_s, late_s=max(0.0, first_s - run_plan.ready_s),
        )  # fmt: skip


Counts = Mapping[tuple[int, int, State], int]


def snapshot(
    job: Job,
    tracker: PlanTracker,
    lines: Sequence[ModelDispatcher],
    slots: Sequence[ReplicaSlot],
    counts: Counts,
    clock: Clock,
    now_s: float,
) -> Progress:
    """How far a run is, from what its parts know."""
    names = job.layout.tasks.models
    mean = _mean_tokens(job)
    share = worked(job, counts, sum(_written(slot) for slot in slots))
    is_served = any(slot.engine is not None for slot in slots)
    clock.check(now_s, share, is_served=is_served)
    models = tuple(
        _model(model, names[model], tracker, lines[model], slots, counts, mean, clock) for model in range(len(names))
    )
    left = clock.left(tracker, share, is_served=is_served)
    stages, unheard = len(tracker.run_plan.stages), silent(slots, job.placer, clock.start_s, now_s)
    return Progress(clock.at_s, tracker.now.stage, stages, models, share, left, unheard)


def _model(
    model: int,
    name: str,
    tracker: PlanTracker,
    line: ModelDispatcher,
    slots: Sequence[ReplicaSlot],
    counts: Counts,
    mean: Mapping[tuple[int, int], float],
    clock: Clock,
) -> ModelProgress:
    states: dict[State, int] = {}
    left_tokens = 0.0
    for (call, of, state), tasks in counts.items():
        if of == model:
            states[state] = states.get(state, 0) + tasks
            left_tokens += 0.0 if state in FINISHED else tasks * mean[call, of]
    total = sum(states.values())
    mine = [slot for slot in slots if slot.plan.model == model]
    plan = next((plan for plan in tracker.now.plans if plan.model == model), None)
    is_over = total == sum(states.get(state, 0) for state in FINISHED)
    here_s = clock.start_s + clock.at_s
    rate = line.tokens / ran_s if (ran_s := line.ran_s(clock.at_s)) > 0 else 0.0
    return ModelProgress(
        name=name,
        state=_state(mine, is_over=is_over),
        total=total,
        states=states,
        active=line.active,
        tokens=line.tokens,
        tokens_per_s=rate,
        plan=plan,
        gpus=tuple(slot.gpus for slot in mine),
        starts_s=max((here_s - b.since_s for b in mine if b.engine is None), default=None),
        stage=None if is_over else tracker.stage_of(model),
        left_s=left_tokens / rate if rate > 0 and not is_over else None,
    )


def _state(own: Sequence[ReplicaSlot], *, is_over: bool) -> str:
    if is_over:
        return "finished"
    if any(slot.engine is not None for slot in own):
        return "runs"
    return "starts" if own else "waits"


def _written(slot: ReplicaSlot) -> float:
    """Tokens of answers that are not there whole yet."""
    return float(sum(len(work.draft.output_ids) for work in slot.active.values()))


def _mean_tokens(job: Job) -> dict[tuple[int, int], float]:
    """Of the tasks of each call and model, as expected."""
    pairs = len(job.layout.pairs)
    call = job.layout.tasks.call
    sums = np.bincount(call, weights=job.expected_tokens, minlength=pairs)
    numbers = np.maximum(np.bincount(call, minlength=pairs), 1)
    return dict(zip(job.layout.pairs, (sums / numbers).tolist(), strict=True))


def worked(job: Job, counts: Counts, written_tokens: float = 0.0) -> float:
    """The share of the work that is done, each task of a call and model taken as the mean of them.

    Args:
        job: The run.
        counts: Tasks by state.
        written_tokens: Of answers that are under way; taken for at most half of what is left.
    """
    mean = _mean_tokens(job)
    done = sum(n * mean[call, model] for (call, model, state), n in counts.items() if state in FINISHED)
    whole = float(job.expected_tokens.sum())
    if whole <= 0:
        return 1.0
    left = max(0.0, whole - done)
    return min(1.0, (done + min(written_tokens, 0.5 * left)) / whole)


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
    """Seconds left with an interval: by the plan's clock at first, by what was measured the further the run is.

    Until an engine is ready nothing is measured: the plan's clock stands still while the first one is late, and the
    time before it counts towards what work takes only as far as the work is done.

    Args:
        share: Of the work that is done.
        at_s: Since the start.
        planned_s: When the plan ends, from the start of the whole.
        slack: How much sooner and later than planned is as planned.
        before: Share that was done before the start, in a run that is gone on with.
        moved_s: When the share last grew: what it told then holds until it grows again. None: now.
        first_s: When the first engine was ready; now, where none is yet.
        late_s: How much later that is than planned.
    """
    if share >= 1.0:
        return 0.0, 0.0, 0.0
    made, moved_s = share - before, at_s if moved_s is None else moved_s
    way = made / (1.0 - before)
    idle_s = late_s + (first_s - late_s) * (1.0 - way)
    work_s = max(0.0, moved_s - idle_s)
    measured_s = work_s * (1.0 - share) / made - (at_s - moved_s) if made > 0.0 and work_s > 0.0 else None
    by_plan_s = None if planned_s is None else planned_s * (1.0 - before) + late_s - at_s
    if by_plan_s is not None and by_plan_s <= 0.0:
        by_plan_s = None  # its time is over, and it is not done: the plan knows nothing more
    if measured_s is None or by_plan_s is None:
        left_s = by_plan_s if measured_s is None else measured_s
    else:
        left_s = way * measured_s + (1.0 - way) * by_plan_s
    if left_s is None or left_s <= 0.0:
        return None
    return left_s, left_s * slack[0], left_s * slack[1]


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    Attributes:
        how: "done", "stopped" (asked to by a signal or its caller), "cancelled" (by another process) or "failed" (its
            engines did).
        counts: Tasks by (call, model) and state.
        seconds: Until nothing was left to do, or it was stopped, on its clock; engines are ended behind that.
        resumed: Whether it went on with what stood in the ledger.
        reused: What was taken from before the application changed; None: it had not, or there was nothing.
        engines: What answered, by model.
        events: Switches and what went wrong with engines, with seconds from the start.
        silent: Engines that should have answered when it ended, and did not.
        error: What its engines failed of, in words.
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
        """Tasks in a state."""
        return sum(tasks for (_, _, one), tasks in self.counts.items() if one == state)

    @property
    def exit_code(self) -> int:
        """0: all answered or skipped; 1: some are dead or blocked; 130: it was stopped."""
        if self.how != "done":
            return 130
        return 1 if self.of(State.DEAD) + self.of(State.BLOCKED) else 0


class EnginesFailedError(EngineError):
    """Engines of a run did not start, or died again and again.

    Attributes:
        completed: How the run ended by that; what was answered before is kept.
    """

    def __init__(self, completed: RunResult) -> None:
        super().__init__(completed.error)
        self.completed = completed
