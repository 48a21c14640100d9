"""From a plan and an application to a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lengthwise.apps.run.contracts import Decider, Guide, Job, Replan, Rooms, Settings
from lengthwise.apps.run.layout import Floats, identity_of, lay
from lengthwise.apps.run.owners import new_owner
from lengthwise.schema.app import AppPlan, AppStage, ModelPlan
from lengthwise.schema.app_tasks import TaskDraw, Tasks

SLACK = (0.9, 1.1)
"""How much sooner and later than its draws say a plan may be."""


@dataclass(frozen=True)
class Planned:
    """What a run follows.

    Attributes:
        guide: What runs when.
        rooms: Where.
        replan: A new guide once reality has left the plan's interval; None: the old one stays.
    """

    guide: Guide
    rooms: Rooms
    replan: Replan | None = None


@dataclass(frozen=True)
class Work:
    """What there is to do.

    Attributes:
        tasks: All that may be asked.
        decider: What each of them asks.
        expected_tokens: [n] of their outputs, as planned with.
        words: Tells the application and its inputs from others: their hashes.
    """

    tasks: Tasks
    decider: Decider
    expected_tokens: Floats
    words: str = field(default="")


def job_of(
    work: Work, planned: Planned, settings: Settings | None = None, *, owner: str | None = None
) -> Job:
    """A run of an application by a plan.

    Args:
        work: What there is to do.
        planned: What it follows.
        settings: How patient it is.
        owner: Tells this coordinator from others; None: a new one.
    """
    layout = lay(work.tasks, work.expected_tokens)
    return Job(
        layout=layout,
        expected_tokens=work.expected_tokens[layout.task_of],
        decider=work.decider,
        guide=planned.guide,
        rooms=planned.rooms,
        identity=identity_of(work.words, layout),
        owner=owner or new_owner(),
        settings=settings or Settings(),
        replan=planned.replan,
    )


def expected_tokens(draws: Sequence[TaskDraw]) -> Floats:
    """[n] mean output tokens over draws, nothing where a task does not come to be."""
    sums = sum(np.where(draw.present, draw.output_tokens, 0).astype(np.float64) for draw in draws)
    return np.asarray(sums / len(draws), np.float64)


def guide_of(plan: AppPlan) -> Guide:
    """What a plan says of when models run; it is as planned within the 5 % and 95 % quantiles of its makespan."""
    mean_s = plan.makespan.value
    low_s, high_s = plan.quantiles_s.get(0.05, mean_s), plan.quantiles_s.get(0.95, mean_s)
    slack = (low_s / mean_s * SLACK[0], high_s / mean_s * SLACK[1]) if mean_s > 0 else SLACK
    return Guide(
        plan.planned, plan.spare, ends_s(plan.planned, plan.stages), slack, first_ready_s(plan.stages)
    )


def first_ready_s(played: Sequence[AppStage]) -> float:
    """When the first engine is ready; 0 where one of the first stage is there from the start."""
    if not played:
        return 0.0
    seconds = [one.seconds for one in played[0].switches]
    switched = {one.model for one in played[0].switches}
    return 0.0 if any(plan.model not in switched for plan in played[0].plans) else min(seconds)


def ends_s(planned: Sequence[Sequence[ModelPlan]], played: Sequence[AppStage]) -> tuple[float, ...]:
    """When each planned stage ends: when the plan, played, was last in it.

    A played stage is in the next planned one as soon as something runs that only that one has.
    """
    found, at = [0.0] * len(planned), 0
    for stage in played:
        while at + 1 < len(found) and set(stage.plans) & (set(planned[at + 1]) - set(planned[at])):
            at += 1
        if found:
            found[at] = stage.end_s
    return tuple(np.maximum.accumulate(found).tolist()) if found else ()


def given_guide(plans: Sequence[ModelPlan]) -> Guide:
    """Of engines that others run: all models at once."""
    return Guide((tuple(plans),))
