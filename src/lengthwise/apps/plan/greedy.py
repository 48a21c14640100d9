"""SamuLLM's greedy search (Algorithm 1), a stage at a time. ``keeps``: without preemption."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lengthwise.apps.plan.choosers import gpus_of, kept_plans
from lengthwise.apps.plan.stages import Plans, Stages, State


@dataclass(frozen=True)
class Greedy:
    """Algorithm 1: a stage grows by the plan that adds the most throughput a GPU, until none adds any."""

    keeps: bool = False

    def __call__(self, stages: Stages, state: State) -> Plans:
        """The plans of the next stage."""
        chosen = kept_plans(stages, state, keeps=self.keeps)
        fixed = {plan.model for plan in chosen}
        now = stages.stage(state, chosen).throughput if chosen else 0.0
        while True:
            best: tuple[float, float, Plans] | None = None
            for plans in _grown(stages, state, chosen, fixed):
                then = stages.stage(state, plans).throughput
                gain = (then - now) / (gpus_of(plans) - gpus_of(chosen))
                if best is None or gain > best[0]:
                    best = (gain, then, plans)
            if best is None or (best[0] < 0 and chosen):
                return chosen
            _, now, chosen = best


def _grown(stages: Stages, state: State, chosen: Plans, fixed: set[int]) -> Iterator[Plans]:
    """Stages of more GPUs: with one model more, or with a larger plan for one (lines 8 to 16)."""
    of = {plan.model: plan for plan in chosen}
    for model in stages.ready(stages.finished(state), of):
        if model in fixed:
            continue
        others = tuple(p for p in chosen if p.model != model)
        for plan in stages.space.plans(model):
            larger = model not in of or plan.gpus > of[model].gpus
            if larger and stages.space.fits((*others, plan)):
                yield tuple(sorted((*others, plan)))
