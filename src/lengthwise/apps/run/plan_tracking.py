"""The plan followed: which plans run now, and whether it is as planned."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from lengthwise.apps.ledger.contracts import FINISHED, State
from lengthwise.apps.placement import Now, next_plans
from lengthwise.apps.run.job import Job, Layout, PlanDeviation, Plans, RevisedPlan, RunPlan
from lengthwise.apps.run.task_state import LedgerWriter
from lengthwise.schema.app import Placement
from lengthwise.schema.errors import InternalError, LengthwiseError

Counts = Mapping[tuple[int, State], int]


@dataclass(frozen=True)
class Status:
    """Tasks by model.

    Attributes:
        total: [models] all tasks.
        ended: [models] that have ended.
        capabilities: [models] that are ready or leased: something can be done for them now.
        finished: Models that have nothing left to do.
    """

    total: tuple[int, ...]
    completed: tuple[int, ...]
    capabilities: tuple[int, ...]
    finished: frozenset[int]

    @property
    def is_over(self) -> bool:
        """Whether all have ended."""
        return self.total == self.completed


def standing(layout: Layout, counts: Counts) -> Status:
    """Of counts by pair of call and model."""
    models = len(layout.tasks.models)
    total, ended, able = [0] * models, [0] * models, [0] * models
    for (pair, state), tasks in counts.items():
        model = layout.pairs[pair][1]
        total[model] += tasks
        ended[model] += tasks if state in FINISHED else 0
        able[model] += tasks if state in (State.READY, State.LEASED) else 0
    finished = frozenset(model for model in range(models) if total[model] == ended[model])
    return Status(tuple(total), tuple(ended), tuple(able), finished)


class ModelDependencies:
    """Which models wait for which."""

    def __init__(self, layout: Layout) -> None:
        tasks = layout.tasks
        child = np.repeat(np.arange(len(tasks)), np.diff(tasks.parent_start))
        pairs = np.unique(tasks.model[tasks.parent] * len(tasks.models) + tasks.model[child])
        self._children: dict[int, set[int]] = {}
        for pair in pairs.tolist():
            parent, model = divmod(pair, len(tasks.models))
            self._children.setdefault(parent, set()).add(model)

    def starved(self, now: Status, running: Collection[int]) -> frozenset[int]:
        """Running models that have nothing to do before one is done that does not run."""
        reached = {model for model in running if now.capabilities[model]}
        open_ = sorted(reached)
        while open_:
            for model in self._children.get(open_.pop(), ()):
                if model in running and model not in reached:
                    reached.add(model)
                    open_.append(model)
        return frozenset(m for m in running if m not in reached and m not in now.finished)


class PlanTracker:
    """Where in the plan a run is.

    Attributes:
        now: The stage, and what runs.
        starved: Models that run and can do nothing before one that does not.
    """

    def __init__(self, job: Job) -> None:
        self._job, self._waits = job, ModelDependencies(job.layout)
        self.run_plan: RunPlan = job.run_plan
        self.now = Now(-1, ())
        self.starved: frozenset[int] = frozenset()
        self._seen: tuple[frozenset[int], frozenset[int]] | None = None
        self._late = -1
        self._from_s = 0.0

    def step(self, status: Status) -> Plans | None:
        """What is to run from now on; None: as before.

        Raises:
            InternalError: What runs can do nothing, and nothing else is planned.
        """
        running = {plan.model for plan in self.now.plans}
        self.starved = self._waits.starved(status, running)
        seen = (status.finished, self.starved)
        if seen == self._seen:
            return None
        before, self._seen = self.now, seen
        self.now = next_plans(
            self.run_plan.stages,
            self.now.stage,
            self.now.plans,
            status.finished,
            self._job.placer.fits,
            reserve=self.run_plan.reserve,
            starved=self.starved,
        )
        if before == self.now and running and running == self.starved | (running & status.finished):
            raise InternalError(f"models {sorted(running)} wait for others, and the plan starts none of them")
        if not self.now.plans and not status.is_over:
            left = sorted(set(range(len(status.total))) - status.finished)
            raise InternalError(f"models {left} are left, and the plan has none for them")
        return self.now.plans

    def deviation(self, status: Status, at_s: float) -> PlanDeviation | None:
        """That the stage before ended too soon, or this one is too late; once a stage."""
        ends_s, stage = self.run_plan.ends_s, self.now.stage
        if not 0 <= stage < len(ends_s) or self._late >= stage:
            return None
        at_s -= self._from_s
        sooner, later = self.run_plan.slack
        started_early = stage > 0 and at_s < ends_s[stage - 1] * sooner
        if not started_early and at_s <= ends_s[stage] * later:
            return None
        self._late = stage
        planned_s = ends_s[stage - 1] if started_early else ends_s[stage]
        return PlanDeviation(at_s, stage, planned_s, sorted(status.finished), status.completed, self.now.plans)

    def looked_at(self, status: Status, at_s: float) -> PlanDeviation:
        """Where it is, whether or not that is as planned."""
        stage = max(0, self.now.stage)
        ends_s = self.run_plan.ends_s
        planned_s = ends_s[min(stage, len(ends_s) - 1)] if ends_s else 0.0
        finished, ended = sorted(status.finished), status.completed
        return PlanDeviation(at_s - self._from_s, stage, planned_s, finished, ended, self.now.plans, is_late=False)

    @property
    def end_s(self) -> float | None:
        """When the plan is to end, from the start of the run; None: nobody knows."""
        ends_s = self.run_plan.ends_s
        return self._from_s + ends_s[-1] if ends_s else None

    @property
    def from_s(self) -> float:
        """Since when the plan is followed; 0: from the start of the run."""
        return self._from_s

    @property
    def planned_s(self) -> float:
        """How long what is followed is to take."""
        return self.run_plan.ends_s[-1] if self.run_plan.ends_s else 0.0

    def stage_of(self, model: int) -> int | None:
        """The stage in which a model is planned to run, this one or the next; None: in none that is to come."""
        stages = enumerate(self.run_plan.stages[max(0, self.now.stage) :], max(0, self.now.stage))
        return next((k for k, plans in stages if any(plan.model == model for plan in plans)), None)

    def follow(self, run_plan: RunPlan, at_s: float) -> None:
        """Goes on by another plan, from its beginning; what runs and is in its first stage stays."""
        self.run_plan, self._seen, self._late, self._from_s = run_plan, None, -1, at_s
        self.now = Now(-1, self.now.plans)


LOOKS = 24
"""How often lengths are looked at, each time after a twelfth of the time that was planned."""
SEARCHES = 3
"""For each plan made anew so often another is sought at most."""
_LOOK_SHARE = 1 / 12
_EARLIEST_S = 1.0


class PlanMonitor:
    """Looks at a run without holding it up.

    Args:
        job: The run.
        books: Its ledger.
        written: Tells tokens of answers so far, by place.
        placement: Tells where engines are.
        report: Hears what came of it ("replan" or "keep", and why), and that there is another run_plan to follow.
    """

    def __init__(
        self,
        job: Job,
        books: LedgerWriter,
        written: Callable[[], Mapping[int, int]],
        placement: Callable[[], Placement],
        report: Callable[[str, str], None],
    ) -> None:
        self._job, self._books, self._report = job, books, report
        self._written, self._placement = written, placement
        self._in_progress: asyncio.Task[None] | None = None
        self._looks = self._replans = self._searches = 0
        self._next_s: float | None = None

    def seek(self, tracker: PlanTracker, at_s: Callable[[], float]) -> asyncio.Task[None] | None:
        """Begins to wait for the plan that is still looked for; None: none is.

        Args:
            tracker: What follows it then.
            at_s: Tells seconds since the start of the run.
        """
        if self._job.seek is None:
            return None
        self._in_progress = asyncio.get_running_loop().create_task(self._sought(tracker, self._job.seek, at_s))
        return self._in_progress

    async def _sought(self, tracker: PlanTracker, seek: Callable[[], RunPlan], at_s: Callable[[], float]) -> None:
        try:
            run_plan = await self._books.additional(seek)
        except LengthwiseError as error:
            self._report("keep", f"no other plan was found: {error}")
        else:
            goes_on = run_plan.stages[:1] == tracker.run_plan.stages[:1]
            tracker.follow(run_plan, 0.0 if goes_on else at_s())
            if not goes_on:
                self._report("replan", "a better plan was found, which begins with other engines")
        self._in_progress = None

    def check(self, tracker: PlanTracker, status: Status, at_s: float) -> asyncio.Task[None] | None:
        """Begins to look where there is reason to; what has begun, to be watched for errors."""
        if self._job.replan is None or self._in_progress is not None:
            return None
        most = self._job.settings.replans
        if self._replans >= most or self._searches >= SEARCHES * most:
            return None
        deviation = tracker.deviation(status, at_s)
        if deviation is None and self._is_time(tracker, at_s):
            deviation = tracker.looked_at(status, at_s)
        if deviation is None:
            return None
        self._in_progress = asyncio.get_running_loop().create_task(self._looked(tracker, deviation, at_s))
        return self._in_progress

    def _is_time(self, tracker: PlanTracker, at_s: float) -> bool:
        if tracker.end_s is None or self._looks >= LOOKS:
            return False
        apart_s = max(_EARLIEST_S, tracker.planned_s * _LOOK_SHARE)
        if self._next_s is None:
            self._next_s = at_s + apart_s
        if at_s < self._next_s:
            return False
        self._looks, self._next_s = self._looks + 1, at_s + apart_s
        return True

    async def _looked(self, tracker: PlanTracker, deviation: PlanDeviation, at_s: float) -> None:
        replan = self._job.replan
        assert replan is not None
        try:
            ended = await self._books.call(self._books.ledger.lengths)
            whole = replace(deviation, completed=ended, written=self._written(), placement=dict(self._placement()))
            found = await self._books.additional(lambda: replan(whole))
        except LengthwiseError as error:
            # A run goes on by the plan that it has, whatever comes of looking for another.
            self._report("keep", f"no other plan was found: {error}")
            found = None
        if isinstance(found, RunPlan):
            found = RevisedPlan(found, True, f"stage {deviation.stage + 1}")
        elif found is None and deviation.is_late:
            self._report("keep", f"stage {deviation.stage + 1}")
        if found is not None:
            self._searches += 1
            self._replans += found.is_new
            tracker.follow(found.run_plan, at_s)
            self._report("replan" if found.is_new else "keep", found.description)
        self._in_progress = None
