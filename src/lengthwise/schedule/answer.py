"""The whole answer to "which schedule": the choice, what else there was, and what would become of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lengthwise.schedule._others import Progress, others
from lengthwise.schedule._parts import parts
from lengthwise.schedule.choose import Choice, Planner
from lengthwise.schedule.controls import Strategy
from lengthwise.schedule.drift import drift
from lengthwise.schedule.explain import Explanation, explain
from lengthwise.schedule.frontier import explored_s, fronts_seen, kinks, most_seen_rps
from lengthwise.schedule.layout import Stage
from lengthwise.schedule.redeploy import redeployment
from lengthwise.schedule.searched import TIE
from lengthwise.schedule.static import static_batches
from lengthwise.schema.errors import ScheduleError
from lengthwise.schema.schedule import SchedulePlan, TimelineBar

MOST_BARS = 2500
"""Bars of a timeline, from its start on."""


def answer(
    planner: Planner,
    bound_s: float = math.inf,
    *,
    name: str = "",
    facts: Mapping[str, str] | None = None,
    exhaustive: bool = False,
    baselines: Sequence[str] = (),
    seed: int = 0,
    progress: Progress = lambda *_: None,
) -> SchedulePlan:
    """The best schedule under a bound with its runner-ups, frontier, drift and timeline, and doing nothing beside it.

    Args:
        planner: Whose schedules.
        bound_s: Latency that must be held; infinite: any.
        name: Of the question.
        facts: What is fixed, by name.
        exhaustive: Look at every schedule for the choice.
        baselines: Other systems to hold it against (``SYSTEMS``), which takes longer than all the rest.
        seed: Of the lengths that those are played with.
        progress: Called with how many of their configurations were played out, and 0.

    Raises:
        InputError: The bound is not above 0.
        ScheduleError: Nothing meets it, or nothing fits.
    """
    choice = _chosen(planner, bound_s, exhaustive=exhaustive)
    setting = planner.estimator.setting
    searched_s = explored_s(planner)
    if most_seen_rps(planner, bound_s) > choice.row.throughput_rps * (1 + TIE):
        choice = _again(planner, choice)
    fronts = fronts_seen(planner, {of: [*known_s, bound_s] for of, known_s in searched_s.items()})
    static = static_batches(planner.estimator)
    explained = explain(planner.estimator, choice.controls)
    return SchedulePlan(
        name=name,
        facts=dict(facts or {}),
        bound_s=bound_s,
        level=setting.assumptions.level,
        quantile_tokens=setting.bound_tokens,
        worst_case=planner.worst_case,
        chosen=choice.row,
        sides=choice.sides,
        gap=choice.gap,
        evaluated=choice.evaluated,
        points=choice.points,
        seconds=choice.seconds,
        static=static.best(bound_s),
        static_front=static.front(bound_s),
        front=fronts,
        kinks=kinks(fronts),
        drift=drift(planner, choice),
        redeploy=redeployment(setting.model, setting.cluster, Strategy(choice.row.strategy)),
        stages=_stages(explained, choice),
        timeline=_bars(explained),
        others=others(planner, bound_s, baselines, seed, progress),
        threshold=setting.assumptions.threshold,
        parts=parts(planner, bound_s, choice.row.throughput_rps),
    )


def _chosen(planner: Planner, bound_s: float, *, exhaustive: bool) -> Choice:
    """The choice; where there is none the error says which part of the GPUs would have one by itself."""
    try:
        return planner.best(bound_s, apart=True, exhaustive=exhaustive)
    except ScheduleError as error:
        less = parts(planner, bound_s)
        if less is None:
            raise
        raise ScheduleError(
            f"{error}. Fewer GPUs meet it: {less.words}, with {less.row.words}, {less.throughput_rps:.3g} requests/s "
            f"(--gpus {less.gpus} plans a part)"
        ) from None


def _again(planner: Planner, choice: Choice) -> Choice:
    """The choice once more, where the frontier came by something better; it has cost all that was estimated."""
    better = planner.best(choice.bound_s, apart=True)
    evaluated = sum(side.evaluated for side in planner.sides)
    return replace(better, evaluated=evaluated, seconds=choice.seconds + better.seconds)


def _stages(explained: Explanation, choice: Choice) -> tuple[str, ...]:
    split = choice.controls.strategy is not Strategy.RRA
    stages = explained.layout.encode + (explained.layout.decode if split else ())
    return tuple(f"{place}: {_stage(stage)}" for place, stage in enumerate(stages, 1))


def _stage(stage: Stage) -> str:
    does = {"both": "", "encode": ", encodes", "decode": ", decodes"}[stage.role]
    gpus = "1 GPU" if stage.tp == 1 else f"{stage.tp} GPUs"
    return f"{gpus}, {stage.layers} {'layer' if stage.layers == 1 else 'layers'}{does}"


def _bars(explained: Explanation) -> tuple[TimelineBar, ...]:
    visits = sorted(explained.timeline, key=lambda visit: (visit.start_s, visit.stage))[:MOST_BARS]
    return tuple(TimelineBar(v.stage, v.start_s, v.end_s, v.kind == "encode", v.micro_batch) for v in visits)


__all__ = ["MOST_BARS", "answer"]
