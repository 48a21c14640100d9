"""What runs next, as a plan's stages say and as it turned out: SamuLLM's dynamic scheduler (section 4.3).

Models do not finish in the order in which a plan thought they would. The rule: a model that runs in its last stage,
or that goes on under the same plan, is kept. Of the others, the next stage's go first; what ran before goes on where
there is still room. A stage is left for the next one when one of its models has finished and all others of it have
been started (or have finished).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lengthwise.schema.app import ModelPlan

Plans = tuple[ModelPlan, ...]
Fits = Callable[[Plans], bool]


@dataclass(frozen=True)
class Now:
    """What is to run from now on.

    Attributes:
        stage: The plan's stage that we are in, from 0; as many as there are: behind the last one.
        plans: What runs, by model, at most one plan each.
    """

    stage: int
    plans: Plans


def next_plans(
    stages: Sequence[Plans],
    at: int,
    running: Plans,
    finished: Collection[int],
    fits: Fits,
    *,
    spare: Plans = (),
    starved: Collection[int] = (),
) -> Now:
    """What runs now that a model has finished, or at the very start.

    Where everything goes as planned, these are the plan's own stages, one after another.

    Args:
        stages: The plan's.
        at: The stage that we are in; -1 at the start.
        running: What ran up to now, finished ones too.
        finished: Models that have nothing left to do.
        fits: Whether some plans have room beside one another (``placement.fits``).
        spare: Plans for models that are in no stage: they had nothing to do in the lengths planned with. They
            run where there is room behind the last stage, as do models that have more to do than was planned.
        starved: Models that can do nothing before one that does not run: they are not kept for being in their
            last stage.
    """
    at, stages = _entered(stages, at, running, finished, starved), tuple(stages)
    ahead = {plan.model for stage in stages[at:] for plan in stage}
    here = _open(stages[at] if at < len(stages) else _behind(stages, spare, starved), finished)
    live = _open(running, finished)
    kept = [p for p in live if p in here or (p.model not in ahead and p.model not in starved)]
    chosen = _added(tuple(kept), here, fits)
    if at < len(stages) and len(here) < len(stages[at]):
        chosen = _early(chosen, stages[at:], live, finished, fits)
    chosen = _added(chosen, live, fits)
    if at < len(stages) and not chosen:
        chosen = _added(chosen, _open(spare, finished), fits)
    return Now(at, tuple(sorted(chosen)))


def _entered(
    stages: Sequence[Plans], at: int, running: Plans, finished: Collection[int], starved: Collection[int]
) -> int:
    """The stage to be in: the next one where this one is over, the first that has something left to do."""
    if at < 0 or (at < len(stages) and _is_over(stages[at], running, finished, starved)):
        at += 1
    while at < len(stages) and not _open(stages[at], finished):
        at += 1
    return at


def _behind(stages: Sequence[Plans], spare: Plans, starved: Collection[int]) -> Plans:
    """What may run behind the last stage: spare plans and each model's last one, but for those who can do nothing.

    Models that take turns (a draft, its critique) may need more turns than the lengths planned with.
    """
    last = {plan.model: plan for stage in stages for plan in stage}
    return tuple(plan for plan in (*spare, *last.values()) if plan.model not in starved)


def _is_over(stage: Plans, running: Plans, finished: Collection[int], starved: Collection[int]) -> bool:
    """One of its models has finished, or can do no more, and none waits to be started."""
    left = _open(stage, finished)
    ended = len(left) < len(stage) or any(plan.model in starved for plan in left)
    return ended and all(plan in running for plan in left)


def _early(
    chosen: Plans, stages: Sequence[Plans], live: Plans, finished: Collection[int], fits: Fits
) -> Plans:
    """What was chosen, and models of later stages where a finished one of this stage left its GPUs.

    A later stage is looked at only when all of the one before it run; nobody who runs is stopped for it.
    """
    for here, later in pairwise(stages):
        if any(plan not in chosen for plan in _open(here, finished)):
            break
        held = tuple(p for p in live if p.model not in {q.model for q in chosen})
        new = tuple(p for p in _open(later, finished) if p.model not in {q.model for q in held})
        chosen = _added(chosen, new, lambda plans, held=held: fits((*plans, *held)))  # type: ignore[misc]
    return chosen


def _added(chosen: Plans, more: Plans, fits: Fits) -> Plans:
    """Those chosen, and in order those more whose model is not there yet and who have room."""
    for plan in more:
        if all(plan.model != p.model for p in chosen) and fits((*chosen, plan)):
            chosen = (*chosen, plan)
    return chosen


def _open(plans: Plans, finished: Collection[int]) -> Plans:
    return tuple(plan for plan in plans if plan.model not in finished)
