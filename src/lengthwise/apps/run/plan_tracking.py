"""Follows a run's plan: which plans run now, whether the run is as planned, and the search for a better plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lengthwise.apps.ledger.contracts import FINISHED, State
from lengthwise.apps.placement import StagePlans, next_plans
from lengthwise.apps.run.job import Job, Layout, PlanDeviation, Plans, Replan, RunPlan
from lengthwise.apps.run.task_state import LedgerWriter
from lengthwise.schema.app import Placement
from lengthwise.schema.errors import InternalError, LengthwiseError

MAX_CHECKS = 24  # maximum number of checks of the output lengths, each _CHECK_SHARE of the planned time after the last
SEARCHES_PER_REPLAN = 3  # maximum number of searches per plan that ``Settings.replans`` allows
_CHECK_SHARE = 1 / 12
_MIN_CHECK_INTERVAL_S = 1.0


@dataclass(frozen=True)
class Status:
    """Numbers of tasks of each model (all, finished, and ready or leased), and the models that have finished."""

    total: tuple[int, ...]
    completed: tuple[int, ...]
    available: tuple[int, ...]
    finished: frozenset[int]

    @classmethod
    def of(cls, layout: Layout, counts: Mapping[tuple[int, State], int]) -> Status:
        """Return the status for the ledger's counts, which are by state and by pair of call and model."""
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
    """Follows a plan, and searches for better ones while the run continues.

    Args:
        at_s: Returns the seconds since the start of the run.
        written_tokens: Returns the tokens of unfinished outputs, by the task's number in the ledger.
        placement: Returns the GPUs of all engines.
        is_overdue: Returns whether an engine takes longer to start than planned.
        report: Receives "replan" or "keep", and the reason. After "replan", the run follows another plan.
    """

    def __init__(
        self,
        job: Job,
        writer: LedgerWriter,
        at_s: Callable[[], float],
        written_tokens: Callable[[], Mapping[int, int]],
        placement: Callable[[], Placement],
        is_overdue: Callable[[], bool],
        report: Callable[[str, str], None],
    ) -> None:
        self._job, self._writer, self._at_s, self._report = job, writer, at_s, report
        self._written_tokens, self._placement, self._is_overdue = written_tokens, placement, is_overdue
        tasks = job.layout.tasks
        child = np.repeat(np.arange(len(tasks)), np.diff(tasks.parent_start))
        pairs = np.unique(tasks.model[tasks.parent] * len(tasks.models) + tasks.model[child])
        self._waits = {divmod(pair, len(tasks.models)) for pair in pairs.tolist()}
        self.blocked: frozenset[int] = frozenset()  # running models that wait for a model that does not run
        self._last: tuple[frozenset[int], frozenset[int]] | None = None
        self._deviated_stage = -1
        self._is_searching = False
        self._checks = self._replans = self._searches = 0
        self._next_check_s: float | None = None
        self.stage_s = self._checked_s = 0.0  # when the current stage began, from the start of the run
        # seconds since ``from_s`` in which an engine took longer to start than planned; the plan's clock stops
        self.late_s = 0.0
        self.run_plan, self.from_s = job.run_plan, 0.0  # the plan that the run follows since ``from_s``
        self.now = StagePlans(-1, ())  # the current stage, and the plans that run

    def step(self, status: Status) -> Plans | None:
        """Return the plans to run from now on, or None if nothing changes.

        Raises:
            InternalError: Running models wait for models that the plan does not start, or work is left without a plan.
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
        if before.stage != self.now.stage:
            self.stage_s = self._at_s()
        if before == self.now and running and running == self.blocked | (running & status.finished):
            raise InternalError(f"models {sorted(running)} wait for others, and the plan starts none of them")
        if not self.now.plans and not status.is_finished:
            left = sorted(set(range(len(status.total))) - status.finished)
            raise InternalError(f"models {left} are left, and the plan has none for them")
        return self.now.plans

    def _blocked(self, status: Status, running: Collection[int]) -> frozenset[int]:
        """Return the running models whose remaining tasks all wait for models that do not run."""
        reached: set[int] = set()
        new = {model for model in running if status.available[model]}
        while new:
            reached |= new
            new = {child for parent, child in self._waits if parent in new and child in running} - reached
        return frozenset(set(running) - reached - status.finished)

    def _deviation(self, at_s: float) -> PlanDeviation | None:
        """Return the run's state, once per stage, if the stage before ended too early or the current one is late."""
        ends_s, stage, (early, late) = self.run_plan.ends_s, self.now.stage, self.run_plan.slack
        at_s -= self.from_s
        if not 0 <= stage < len(ends_s) or self._deviated_stage >= stage:
            return None
        started_early = stage > 0 and at_s < ends_s[stage - 1] * early
        if not started_early and at_s - self.late_s <= ends_s[stage] * late:
            return None
        self._deviated_stage = stage
        return PlanDeviation(at_s, stage, ends_s[stage - 1] if started_early else ends_s[stage], self.now.plans)

    @property
    def planned_s(self) -> float:
        """Return the seconds that the plan takes, or 0 if they are unknown."""
        return self.run_plan.ends_s[-1] if self.run_plan.ends_s else 0.0

    def stage_of(self, model: int) -> int | None:
        """Return the number of the current or the next stage in which a model runs, or None."""
        first = max(0, self.now.stage)
        stages = enumerate(self.run_plan.stages[first:], first)
        return next((k for k, plans in stages if any(plan.model == model for plan in plans)), None)

    def follow(self, run_plan: RunPlan, at_s: float) -> None:
        """Follow another plan from its first stage on. Running replicas that this stage also has continue."""
        self.late_s = self.late_s if at_s == self.from_s else 0.0
        self.run_plan, self.from_s, self.now = run_plan, at_s, StagePlans(-1, self.now.plans)
        self._last, self._deviated_stage = None, -1

    def pending_search(self) -> Coroutine[Any, Any, None] | None:
        """Return a coroutine that waits for the job's ``pending_plan`` and follows it, or None if there is none."""
        if self._job.pending_plan is None:
            return None
        self._is_searching = True
        return self._follow_found(self._job.pending_plan)

    async def _follow_found(self, pending_plan: Callable[[], RunPlan]) -> None:
        try:
            run_plan = await self._writer.background(pending_plan)
        except LengthwiseError as error:
            self._report("keep", f"no other plan was found: {error}")
        else:
            same_start = run_plan.stages[:1] == self.run_plan.stages[:1]
            self.follow(run_plan, 0.0 if same_start else self._at_s())
            if not same_start:
                self._report("replan", "a better plan was found, which begins with other engines")
        self._is_searching = False

    def due_search(self) -> Coroutine[Any, Any, None] | None:
        """Return a coroutine that searches for a better plan, or None if there is no reason for a search now."""
        limit, replan, at_s = self._job.settings.replans, self._job.replan, self._at_s()
        self.late_s += at_s - self._checked_s if self._is_overdue() else 0.0
        self._checked_s = at_s
        is_spent = self._replans >= limit or self._searches >= SEARCHES_PER_REPLAN * limit
        if replan is None or self._is_searching or is_spent:
            return None
        deviation = self._deviation(at_s)
        if deviation is None and self.run_plan.ends_s and self._checks < MAX_CHECKS:
            interval_s = max(_MIN_CHECK_INTERVAL_S, self.planned_s * _CHECK_SHARE)
            if self._next_check_s is None:
                self._next_check_s = at_s + interval_s
            if at_s >= self._next_check_s:
                self._checks, self._next_check_s = self._checks + 1, at_s + interval_s
                ends_s, stage = self.run_plan.ends_s, max(0, self.now.stage)
                planned_s, plans = ends_s[min(stage, len(ends_s) - 1)], self.now.plans
                deviation = PlanDeviation(at_s - self.from_s, stage, planned_s, plans, is_off_time=False)
        if deviation is None:
            return None
        self._is_searching = True
        return self._replan(replan, deviation, at_s)

    async def _replan(self, replan: Replan, deviation: PlanDeviation, at_s: float) -> None:
        found = None
        try:
            completed = await self._writer.call(self._writer.ledger.lengths)
            written, placement = self._written_tokens(), dict(self._placement())
            complete = replace(deviation, completed=completed, written=written, placement=placement)
            found = await self._writer.background(lambda: replan(complete))
        except LengthwiseError as error:
            # If the search fails, the run continues with its plan.
            self._report("keep", f"no other plan was found: {error}")
        if found is None and deviation.is_off_time:
            self._report("keep", f"stage {deviation.stage + 1}")
        if found is not None:
            self._searches += 1
            self._replans += found.is_new
            self.follow(found.run_plan, at_s)
            self._report("replan" if found.is_new else "keep", found.description)
        self._is_searching = False
