"""Ways to choose what runs in the next stage, and the plans that they make.

Each asks for the state between two stages and tells the plans of the next one.
"""

from __future__ import annotations

from collections.abc import Callable

from lengthwise.apps.plan.stages import Plans, Staged, Stages, State
from lengthwise.schema.errors import InternalError

Chooser = Callable[[Stages, State], Plans]


def built(stages: Stages, choose: Chooser) -> list[Staged]:
    """All stages of an application, as chosen one after another.

    Raises:
        InternalError: A stage moved nothing.
    """
    made: list[Staged] = []
    state = stages.start()
    while len(stages.finished(state)) < len(stages.load.models):
        staged = stages.stage(state, choose(stages, state))
        if not staged.plans or (staged.flops <= 0 and staged.ends_by < 0):
            raise InternalError(f"stage {len(made)} was chosen to run {staged.plans}, which moves nothing")
        made.append(staged)
        state = stages.after(staged)
    return made


def kept_plans(stages: Stages, state: State, *, keeps: bool) -> Plans:
    """Who runs and is not done, where he is kept: without preemption, under the same plan."""
    done = stages.finished(state)
    return tuple(p for p in state.plans if p.model not in done) if keeps else ()


def gpus_of(plans: Plans) -> int:
    """Of all plans."""
    return sum(plan.gpus for plan in plans)
