"""Lists: who runs goes on, who has most left goes next, on so many GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from lengthwise.apps.plan.choosers import gets_on, kept_plans
from lengthwise.apps.plan.stages import Plans, Stages, State
from lengthwise.schema.app import ModelPlan


@dataclass(frozen=True)
class Listed:
    """Who runs goes on; who has most left goes next, on so many GPUs; what is then still free is given away greedily.

    Attributes:
        gpus: A model gets, if it has a plan of so many; else the next fewer, or its fewest.
        grows: Whether what is left over is given to those who gain by it (Algorithm 1 from there on).
    """

    gpus: int
    grows: bool

    def __call__(self, stages: Stages, state: State) -> Plans:
        """The plans of the next stage."""
        chosen = kept_plans(stages, state, keeps=True)
        done = stages.finished(state)
        while True:
            there = {plan.model for plan in chosen}
            left = [m for m in stages.ready(done, there) if m not in there]
            plans = [self._plan(stages, state, m) for m in left]
            fitting = [(s, p) for s, p in plans if stages.space.fits((*chosen, p))]
            fitting = [(s, p) for s, p in fitting if gets_on(stages, state, (*chosen, p), p.model)]
            if not fitting:
                break
            chosen = (*chosen, max(fitting, key=lambda one: (one[0], one[1]))[1])
        chosen = tuple(sorted(chosen))
        if not self.grows or {p.model for p in chosen} | done < set(range(len(stages.load.models))):
            return chosen
        return _sooner(stages, state, chosen)

    def _plan(self, stages: Stages, state: State, model: int) -> tuple[float, ModelPlan]:
        """(seconds that it takes, the plan)."""
        plans = stages.space.plans(model)
        most = max((p.gpus for p in plans if p.gpus <= self.gpus), default=plans[0].gpus)
        ends = [(stages.stage(state, (p,)).seconds * p.gpus, p) for p in plans if p.gpus == most]
        return min(ends)


def _sooner(stages: Stages, state: State, chosen: Plans) -> Plans:
    """Free GPUs to whoever ends last, as long as that makes the last end sooner."""
    last_s = _last_s(stages, state, chosen)
    while True:
        ends = stages.stage(state, chosen).live
        slow = max(ends, key=lambda m: ends[m].end_s)
        others = tuple(p for p in chosen if p.model != slow)
        ways = [tuple(sorted((*others, p))) for p in stages.space.plans(slow)]
        found = [(_last_s(stages, state, plans), plans) for plans in ways if stages.space.fits(plans)]
        best = min(found, default=(last_s, chosen))
        if best[0] >= last_s:
            return chosen
        last_s, chosen = best


def _last_s(stages: Stages, state: State, plans: Plans) -> float:
    return max(one.end_s for one in stages.stage(state, plans).live.values())
