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
    """Who runs and has something left to do, where he is kept: without preemption, under the same plan."""
    if not keeps:
        return ()
    done = stages.finished(state)
    live = (one for one in state.live.values() if one.run.plan.model not in done)
    return tuple(one.run.plan for one in live if one.run.whole or one.at(state.clock_s) < one.run.seconds)


def gets_on(stages: Stages, state: State, plans: Plans, model: int) -> bool:
    """Whether a model has something to do in a stage: nobody who does not run stands before all of it."""
    live = stages.stage(state, plans).live[model]
    return live.run.seconds > max(0.0, state.clock_s - live.start_s)


def gpus_of(plans: Plans) -> int:
    """Of all plans."""
    return sum(plan.gpus for plan in plans)
