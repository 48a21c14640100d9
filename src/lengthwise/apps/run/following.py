"""The plan followed: which plans run now, and whether it is as planned."""

from __future__ import annotations

from lengthwise.apps.dynamic import Now, next_plans
from lengthwise.apps.run.contracts import Drifted, Guide, Job, Plans
from lengthwise.apps.run.standing import Standing, Waits
from lengthwise.schema.errors import InternalError


class Following:
    """Where in the plan a run is.

    Attributes:
        now: The stage, and what runs.
        starved: Models that run and can do nothing before one that does not.
    """

    def __init__(self, job: Job) -> None:
        self._job, self._waits = job, Waits(job.layout)
        self.guide: Guide = job.guide
        self.now = Now(-1, ())
        self.starved: frozenset[int] = frozenset()
        self._seen: tuple[frozenset[int], frozenset[int]] | None = None
        self._late = -1
        self._from_s = 0.0

    def step(self, standing: Standing) -> Plans | None:
        """What is to run from now on; None: as before.

        Raises:
            InternalError: What runs can do nothing, and nothing else is planned.
        """
        running = {plan.model for plan in self.now.plans}
        self.starved = self._waits.starved(standing, running)
        seen = (standing.finished, self.starved)
        if seen == self._seen:
            return None
        before, self._seen = self.now, seen
        self.now = next_plans(
            self.guide.stages,
            self.now.stage,
            self.now.plans,
            standing.finished,
            self._job.rooms.fits,
            spare=self.guide.spare,
            starved=self.starved,
        )
        if before == self.now and running and running == self.starved | (running & standing.finished):
            raise InternalError(f"models {sorted(running)} wait for others, and the plan starts none of them")
        if not self.now.plans and not standing.is_over:
            left = sorted(set(range(len(standing.total))) - standing.finished)
            raise InternalError(f"models {left} are left, and the plan has none for them")
        return self.now.plans

    def drifted(self, standing: Standing, at_s: float) -> Drifted | None:
        """That the stage before ended too soon, or this one is too late; once a stage."""
        ends_s, stage = self.guide.ends_s, self.now.stage
        if not 0 <= stage < len(ends_s) or self._late >= stage:
            return None
        at_s -= self._from_s
        sooner, later = self.guide.slack
        started_early = stage > 0 and at_s < ends_s[stage - 1] * sooner
        if not started_early and at_s <= ends_s[stage] * later:
            return None
        self._late = stage
        planned_s = ends_s[stage - 1] if started_early else ends_s[stage]
        return Drifted(at_s, stage, planned_s, sorted(standing.finished), standing.ended, self.now.plans)

    def looked_at(self, standing: Standing, at_s: float) -> Drifted:
        """Where it is, whether or not that is as planned."""
        stage = max(0, self.now.stage)
        ends_s = self.guide.ends_s
        planned_s = ends_s[min(stage, len(ends_s) - 1)] if ends_s else 0.0
        finished, ended = sorted(standing.finished), standing.ended
        return Drifted(at_s - self._from_s, stage, planned_s, finished, ended, self.now.plans, is_late=False)

    @property
    def end_s(self) -> float | None:
        """When the plan is to end, from the start of the run; None: nobody knows."""
        ends_s = self.guide.ends_s
        return self._from_s + ends_s[-1] if ends_s else None

    @property
    def from_s(self) -> float:
        """Since when the plan is followed; 0: from the start of the run."""
        return self._from_s

    @property
    def planned_s(self) -> float:
        """How long what is followed is to take."""
        return self.guide.ends_s[-1] if self.guide.ends_s else 0.0

    def stage_of(self, model: int) -> int | None:
        """The stage in which a model is planned to run, this one or the next; None: in none that is to come."""
        stages = enumerate(self.guide.stages[max(0, self.now.stage) :], max(0, self.now.stage))
        return next((k for k, plans in stages if any(plan.model == model for plan in plans)), None)

    def follow(self, guide: Guide, at_s: float) -> None:
        """Goes on by another plan, from its beginning; what runs and is in its first stage stays."""
        self.guide, self._seen, self._late, self._from_s = guide, None, -1, at_s
        self.now = Now(-1, self.now.plans)
