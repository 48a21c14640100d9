"""The room's door: an application's tasks and draws, models and GPUs become a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from lengthwise.apps.plan.beam import METHODS
from lengthwise.apps.plan.evaluate import (
    idle_seconds,
    makespans_s,
    mean_of,
    quantiles_of,
    spans_of,
    stages_of,
)
from lengthwise.apps.plan.play import play, spare_plans
from lengthwise.apps.plan.runs import REPRESENTED_TASKS
from lengthwise.apps.plan.searched import DEFAULT, Asked, Found, searched
from lengthwise.apps.plan.space import Served, Space
from lengthwise.apps.plan.stages import Stages
from lengthwise.apps.plan.switching import SwitchTimes
from lengthwise.engine import simulate
from lengthwise.schema.app import AppMethod, AppPlan, Cluster, ModelPlan
from lengthwise.schema.app_tasks import TaskDraw, Tasks
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.workload import Workload


def plan(
    tasks: Tasks,
    draws: Sequence[TaskDraw],
    models: Sequence[Served],
    cluster: Cluster,
    *,
    true_draws: Sequence[TaskDraw] = (),
    times: SwitchTimes | None = None,
    asked: Asked | None = None,
    begin: Callable[[AppPlan], None] | None = None,
) -> AppPlan:
    """Which models run when, on how many GPUs each, so that all is done soonest.

    Args:
        tasks: What the application may ask.
        draws: To plan with; the first one is searched on, all decide between plans.
        models: One for each of ``tasks.models``, in their order.
        cluster: The GPUs.
        true_draws: To tell the makespan by, drawn apart from those planned with; none: told by those.
        times: Of switching; None: assumed.
        asked: How to plan.
        begin: Told a plan at first sight, where the method is "lengthwise": engines of its first stage can start while
            a better plan is looked for. What is found then is most often one that goes on from there.

    Raises:
        InputError: There is no draw, or a name is unknown.
        DoesNotFitError: A model fits no GPUs of the cluster.
    """
    asked = asked or Asked()
    _check(tasks, draws, models, asked)
    space = Space(models, cluster, times or SwitchTimes())
    worlds = stages_of(tasks, draws, space)
    _warm(space, worlds[0])
    early: list[Found] = []

    def first(one: Found) -> None:
        early.append(one)
        assert begin is not None
        begin(_told(worlds, space, worlds[0], one, early))

    found = searched(worlds, space, asked, None if begin is None else first)
    best = next(one for one in found if one.name == asked.method)
    truth = stages_of(tasks, true_draws, space) if true_draws else worlds
    return _told(truth, space, worlds[0], best, found)


def _warm(space: Space, stages: Stages) -> None:
    """Has deployments made and the engine loaded, which is no part of any search."""
    plans = [plan for model in range(len(space.models)) for plan in space.plans(model)]
    for plan_ in plans:
        space.deployment(plan_)
    if any(len(one) for one in stages.load.models):
        one = Workload(np.zeros(1), np.ones(1, np.int64), np.ones(1, np.int64))
        simulate(one, space.deployment(plans[0]), keep_steps=0)


def _check(tasks: Tasks, draws: Sequence[TaskDraw], models: Sequence[Served], asked: Asked) -> None:
    if not draws:
        raise InputError("a plan needs at least one draw of lengths to plan with; there is none")
    if len(models) != len(tasks.models):
        raise InputError(f"there must be a model for each of {len(tasks.models)}; there are {len(models)}")
    if any(len(draw.present) != len(tasks) for draw in draws):
        raise InputError(f"every draw must be of all {len(tasks)} tasks")
    if asked.quantile is not None and not 0 < asked.quantile < 1:
        raise InputError(f"quantile must be above 0 and below 1; it is {asked.quantile}")
    for name in (asked.method, *asked.beside):
        if name not in METHODS and name != DEFAULT:
            raise UnknownNameError("planning method", name, (DEFAULT, *METHODS))


def _told(
    truth: Sequence[Stages], space: Space, first: Stages, best: Found, found: Sequence[Found]
) -> AppPlan:
    ends = {one.name: makespans_s(truth, one.planned, _spare(space, one)) for one in found}
    mine = ends[best.name]
    played = play(first, best.planned, _spare(space, best))
    # Where planning outlasts its first stage, the run waits for it.
    most_s = played.stages[0].end_s if played.stages else 0.0
    found = [replace(one, ahead_s=max(one.ahead_s, one.search_s - most_s)) for one in found]
    best = next(one for one in found if one.name == best.name)
    whole_s = mean_of(mine).value + best.ahead_s
    spans = spans_of(played, space, first)
    loads = first.load.models
    return AppPlan(
        models=tuple(one.name for one in space.models),
        method=best.name,
        stages=played.stages,
        planned=best.planned,
        spare=_spare(space, best),
        makespan=mean_of(mine),
        makespans_s=mine,
        quantiles_s=quantiles_of(mine),
        spans=spans,
        idle_s=idle_seconds(spans),
        flops=tuple(float(one.work(one.output).sum()) for one in loads),
        tokens=tuple(int(one.output.sum()) for one in loads),
        methods=tuple(_method(one, ends[one.name], whole_s) for one in found),
        search_s=best.search_s,
        notes=_notes(space, first),
    )


def _spare(space: Space, one: Found) -> tuple[ModelPlan, ...]:
    return spare_plans(space, len(space.models), one.planned)


def _method(one: Found, ends_s: Sequence[float], whole_s: float) -> AppMethod:
    mean = mean_of(ends_s)
    gain = (mean.value + one.ahead_s) / max(whole_s, 1e-12)
    stages = len(one.planned)
    return AppMethod(one.name, mean, one.planned_s, one.search_s, stages, gain, tuple(ends_s), one.ahead_s)


def _notes(space: Space, first: Stages) -> tuple[str, ...]:
    """What is assumed."""
    notes = []
    if not space.times.measured:
        rates = space.times.rates
        notes.append(
            f"switch times are assumed, not measured: {rates.engine_start_s:g} s to start an engine, weights at "
            f"{rates.disk_bytes_per_s / 1e9:g} GB/s from disk and {rates.pcie_bytes_per_s / 1e9:g} GB/s to each GPU; "
            "measure them (lengthwise app profile)"
        )
    if any(len(one) >= 2 * REPRESENTED_TASKS for one in first.load.models):
        notes.append(
            f"from {REPRESENTED_TASKS} independent tasks a replica on, one of a model's replicas stands for all of "
            "them: the one with the most tokens"
        )
    return tuple(notes)


__all__ = ["DEFAULT", "Asked", "plan"]
