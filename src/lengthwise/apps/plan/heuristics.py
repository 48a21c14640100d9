"""SamuLLM's two competitors (section 5), a stage at a time. ``keeps``: without preemption."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lengthwise.apps.plan.choosers import gets_on, gpus_of, kept_plans
from lengthwise.apps.plan.stages import Plans, Stages, State

MOST_SPLITS = 400
"""Ways to split GPUs evenly that are compared; the first of many."""


@dataclass(frozen=True)
class MaxHeuristic:
    """All GPUs to one model after another, under the plan with which it is done soonest."""

    keeps: bool = False

    def __call__(self, stages: Stages, state: State) -> Plans:
        """The plan of the next stage."""
        if kept := kept_plans(stages, state, keeps=True):
            return kept
        done = stages.finished(state)
        ready = stages.ready(done, ())
        able = (m for m in ready if gets_on(stages, state, stages.space.plans(m)[:1], m))
        model = next(able, ready[0])
        most = max(plan.gpus for plan in stages.space.plans(model))
        plans = [plan for plan in stages.space.plans(model) if plan.gpus == most]
        return (min(plans, key=lambda plan: (stages.stage(state, (plan,)).end_s, plan)),)


@dataclass(frozen=True)
class MinHeuristic:
    """As many models as there is room for, the GPUs split evenly; of the ways to do so the one of most throughput."""

    keeps: bool = False

    def __call__(self, stages: Stages, state: State) -> Plans:
        """The plans of the next stage."""
        kept = kept_plans(stages, state, keeps=self.keeps)
        fixed = {plan.model for plan in kept}
        models = [m for m in self._all_ready(stages, state) if m not in fixed]
        for many in range(len(models), 0, -1):
            ways = (
                way
                for some in itertools.combinations(models, many)
                for way in _even(stages, state, kept, some)
            )
            found = [stages.stage(state, plans) for plans in itertools.islice(ways, MOST_SPLITS)]
            if found:
                return max(found, key=lambda staged: staged.throughput).plans
        return kept

    def _all_ready(self, stages: Stages, state: State) -> list[int]:
        """Who may run in one stage with all others."""
        done = stages.finished(state)
        return stages.ready(done, set(range(len(stages.load.models))) - done)


def _even(stages: Stages, state: State, kept: Plans, models: Sequence[int]) -> Iterator[Plans]:
    """Ways to split the GPUs evenly: each model has as many as another, or one more."""
    if not _closed(stages, state, kept, models):
        return
    free = stages.space.cluster.gpus - gpus_of(kept)
    least = [stages.space.plans(m)[0].gpus for m in models]
    for shares in _shares(least, free):
        plans = _within(stages, state, kept, models, shares)
        if plans is not None:
            yield plans


def _shares(least: Sequence[int], free: int) -> Iterator[list[int]]:
    """Ways to give away all GPUs so that whoever has more than another needs more, or one more was left over."""
    shares, left = list(least), free - sum(least)
    low = [i for i, n in enumerate(shares) if n == min(shares)]
    while left >= len(low):
        shares = [n + (i in low) for i, n in enumerate(shares)]
        left -= len(low)
        low = [i for i, n in enumerate(shares) if n == min(shares)]
    for lucky in itertools.combinations(low, max(left, 0)) if left >= 0 else ():
        yield [n + (i in lucky) for i, n in enumerate(shares)]


def _closed(stages: Stages, state: State, kept: Plans, models: Sequence[int]) -> bool:
    """Whether all that these models wait for has finished or runs beside them."""
    beside = {*models, *(plan.model for plan in kept)}
    return set(models) <= set(stages.ready(stages.finished(state), beside))


def _within(
    stages: Stages, state: State, kept: Plans, models: Sequence[int], shares: Sequence[int]
) -> Plans | None:
    """For each model the plan within its share with which it is done soonest; fewer GPUs where there is no room."""
    for model, share in sorted(zip(models, shares, strict=True), key=lambda one: -one[1]):
        plans = [p for p in stages.space.plans(model) if p.gpus <= share]
        alone = {p: stages.stage(state, (p,)).end_s for p in plans if p.gpus == max(q.gpus for q in plans)}
        ranked = sorted(alone, key=lambda p: (alone[p], p)) + sorted(plans, key=lambda p: -p.gpus)
        fitting = next((p for p in ranked if stages.space.fits((*kept, p))), None)
        if fitting is None:
            return None
        kept = (*kept, fitting)
    return tuple(sorted(kept))
