"""Follow a plan: which plans run now, whether the run is as planned, and the search for a better plan meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lengthwise.apps.ledger.contracts import FINISHED, State
from lengthwise.apps.placement import Now, next_plans
from lengthwise.apps.run.job import Job, Layout, PlanDeviation, Plans, Replan, RevisedPlan, RunPlan
from lengthwise.apps.run.task_state import LedgerWriter
from lengthwise.schema.app import Placement
from lengthwise.schema.errors import InternalError, LengthwiseError

MAX_CHECKS = 24
"""How often lengths are checked at most, each time after a twelfth of the planned time."""
SEARCHES_PER_REPLAN = 3
"""So many searches at most for each new plan that is allowed."""
_CHECK_SHARE = 1 / 12
_MIN_CHECK_INTERVAL_S = 1.0


@dataclass(frozen=True)
class Status:
    """[models] Tasks: all, those that have finished, those that are ready or leased; and models without any left."""

    total: tuple[int, ...]
    completed: tuple[int, ...]
    available: tuple[int, ...]
    finished: frozenset[int]

    @classmethod
    def of(cls, layout: Layout, counts: Mapping[tuple[int, State], int]) -> Status:
        """Sum the ledger's counts, which are by pair of call and model."""
        models = len(layout.tasks.models)
        total, completed, available = [0] * models, [0] * models, [0] * models
        for (pair, state), tasks in counts.items():
            model = layout.pairs[pair][1]
            total[model] += tasks
            completed[model] += tasks if state in FINISHED else 0
            available[model] += tasks if state in (State.READY, State.LEASED) else 0
        finished = frozenset(model for model in range(models) if total[model] == completed[model])
        return cls(tuple(total), tuple(completed), tuple(available), finished)

    @property
    def is_finished(self) -> bool:
        """Return whether all tasks have finished."""
        return self.total == self.completed


class PlanTracker:
    """Where in its plan a run is.

    Attributes:
        run_plan: The plan that is followed since ``from_s``, from the start of the run.
        now: The stage, and the plans that run.
        blocked: Running models that wait for one that does not run.
    """

    def __init__(self, job: Job) -> None:
        self._job, tasks = job, job.layout.tasks
        child = np.repeat(np.arange(len(tasks)), np.diff(tasks.parent_start))
        self._waits = set(zip(tasks.model[tasks.parent].tolist(), tasks.model[child].tolist(), strict=True))
        self.run_plan: RunPlan = job.run_plan
        self.from_s = 0.0
        self.now = Now(-1, ())
        self.blocked: frozenset[int] = frozenset()
        self._last: tuple[frozenset[int], frozenset[int]] | None = None
        self._deviated_stage = -1

    def step(self, status: Status) -> Plans | None:
        """Return the plans to run from now on; None: as before.

        Raises:
            InternalError: The running models have no work, and the plan starts no other.
        """
        running = {plan.model for plan in self.now.plans}
        self.blocked = self._blocked(status, running)
        before, last = self.now, (status.finished, self.blocked)
        if last == self._last:
            return None
        self._last = last
        stages, reserve, fits = self.run_plan.stages, self.run_plan.reserve, self._job.placer.fits
        self.now = next_plans(
            stages, before.stage, before.plans, status.finished, fits, reserve=reserve, starved=self.blocked
        )
        if before == self.now and running and running == self.blocked | (running & status.finished):
            raise InternalError(f"models {sorted(running)} wait for others, and the plan starts none of them")
        if not self.now.plans and not status.is_finished:
            left = sorted(set(range(len(status.total))) - status.finished)
            raise InternalError(f"models {left} are left, and the plan has none for them")
        return self.now.plans

    def _blocked(self, status: Status, running: Collection[int]) -> frozenset[int]:
        """Return the running models that have no work until a model finishes tasks that does not run."""
        reached: set[int] = set()
        new = {model for model in running if status.available[model]}
        while new:
            reached |= new
            new = {child for parent, child in self._waits if parent in new and child in running} - reached
        return frozenset(set(running) - reached - status.finished)

    def deviation(self, status: Status, at_s: float, *, always: bool = False) -> PlanDeviation | None:
        """Return the state of the run if the stage before ended too early or this one is late, once for each stage.

        ``always``: return it in any case, to check the lengths.
        """
        ends_s, stage, at_s = self.run_plan.ends_s, self.now.stage, at_s - self.from_s
        if always:
            stage = max(0, stage)
            planned_s = ends_s[min(stage, len(ends_s) - 1)] if ends_s else 0.0
        else:
            if not 0 <= stage < len(ends_s) or self._deviated_stage >= stage:
                return None
            early, late = self.run_plan.slack
            started_early = stage > 0 and at_s < ends_s[stage - 1] * early
            if not started_early and at_s <= ends_s[stage] * late:
                return None
            self._deviated_stage = stage
            planned_s = ends_s[stage - 1] if started_early else ends_s[stage]
        finished = sorted(status.finished)
        return PlanDeviation(at_s, stage, planned_s, finished, status.completed, self.now.plans, is_late=not always)

    @property
    def planned_s(self) -> float:
        """Return how long the plan takes; 0: unknown."""
        return self.run_plan.ends_s[-1] if self.run_plan.ends_s else 0.0

    @property
    def end_s(self) -> float | None:
        """Return when the plan ends, from the start of the run; None: unknown."""
        return self.from_s + self.planned_s if self.run_plan.ends_s else None

    def stage_of(self, model: int) -> int | None:
        """Return the stage in which a model runs, the current or a later one; None: in none of them."""
        first = max(0, self.now.stage)
        stages = enumerate(self.run_plan.stages[first:], first)
        return next((k for k, plans in stages if any(plan.model == model for plan in plans)), None)

    def follow(self, run_plan: RunPlan, at_s: float) -> None:
        """Follow another plan from its first stage on; replicas that are in that stage are not interrupted."""
        self.run_plan, self._last, self._deviated_stage, self.from_s = run_plan, None, -1, at_s
        self.now = Now(-1, self.now.plans)


class PlanMonitor:
    """Searches for better plans while the run continues.

    Args:
        written_tokens: Returns the tokens of unfinished outputs, by place.
        placement: Returns the GPUs of all engines.
        report: Called with "replan" or "keep" and the reason; there may be another plan to follow.
    """

    def __init__(
        self,
        job: Job,
        writer: LedgerWriter,
        written_tokens: Callable[[], Mapping[int, int]],
        placement: Callable[[], Placement],
        report: Callable[[str, str], None],
    ) -> None:
        self._job, self._writer, self._report = job, writer, report
        self._written_tokens, self._placement = written_tokens, placement
        self._is_searching = False
        self._checks = self._replans = self._searches = 0
        self._next_check_s: float | None = None

    def seek(self, tracker: PlanTracker, at_s: Callable[[], float]) -> Coroutine[Any, Any, None] | None:
        """Return the wait for the plan that is still searched for, to be started now; None: there is no such search.

        ``at_s`` returns seconds since the start of the run.
        """
        if self._job.seek is None:
            return None
        self._is_searching = True
        return self._follow_sought(tracker, self._job.seek, at_s)

    async def _follow_sought(
        self, tracker: PlanTracker, seek: Callable[[], RunPlan], at_s: Callable[[], float]
    ) -> None:
        try:
            run_plan = await self._writer.background(seek)
        except LengthwiseError as error:
            self._report("keep", f"no other plan was found: {error}")
        else:
            same_start = run_plan.stages[:1] == tracker.run_plan.stages[:1]
            tracker.follow(run_plan, 0.0 if same_start else at_s())
            if not same_start:
                self._report("replan", "a better plan was found, which begins with other engines")
        self._is_searching = False

    def check(self, tracker: PlanTracker, status: Status, at_s: float) -> Coroutine[Any, Any, None] | None:
        """Return the search for a better plan, to be started now; None: there is no reason for one."""
        limit, replan = self._job.settings.replans, self._job.replan
        is_spent = self._replans >= limit or self._searches >= SEARCHES_PER_REPLAN * limit
        if replan is None or self._is_searching or is_spent:
            return None
        deviation = tracker.deviation(status, at_s)
        if deviation is None and tracker.end_s is not None and self._checks < MAX_CHECKS:
            interval_s = max(_MIN_CHECK_INTERVAL_S, tracker.planned_s * _CHECK_SHARE)
            if self._next_check_s is None:
                self._next_check_s = at_s + interval_s
            if at_s >= self._next_check_s:
                self._checks, self._next_check_s = self._checks + 1, at_s + interval_s
                deviation = tracker.deviation(status, at_s, always=True)
        if deviation is None:
            return None
        self._is_searching = True
        return self._replan(tracker, replan, deviation, at_s)

    async def _replan(self, tracker: PlanTracker, replan: Replan, deviation: PlanDeviation, at_s: float) -> None:
        found = None
        try:
            completed = await self._writer.call(self._writer.ledger.lengths)
            complete = replace(
                deviation, completed=completed, written=self._written_tokens(), placement=dict(self._placement())
            )
            found = await self._writer.background(lambda: replan(complete))
        except LengthwiseError as error:
            # The run continues by the plan that it has, whatever happens to the search for another.
            self._report("keep", f"no other plan was found: {error}")
        if isinstance(found, RunPlan):
            found = RevisedPlan(found, True, f"stage {deviation.stage + 1}")
        elif found is None and deviation.is_late:
            self._report("keep", f"stage {deviation.stage + 1}")
        if found is not None:
            self._searches += 1
            self._replans += found.is_new
            tracker.follow(found.run_plan, at_s)
            self._report("replan" if found.is_new else "keep", found.description)
        self._is_searching = False
