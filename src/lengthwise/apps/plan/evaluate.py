"""How long a plan takes over many draws, and what its GPUs do meanwhile."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from lengthwise.apps.plan.load import load_of
from lengthwise.apps.plan.play import Played, play
from lengthwise.apps.plan.runs import Runs
from lengthwise.apps.plan.space import Space
from lengthwise.apps.plan.stages import Plans, Staged, Stages
from lengthwise.schema.app import AppSpan, AppStage, Replica
from lengthwise.schema.app_tasks import TaskDraw, Tasks
from lengthwise.schema.estimate import Estimate

QUANTILES = (0.05, 0.5, 0.95)


def stages_of(tasks: Tasks, draws: Sequence[TaskDraw], space: Space) -> list[Stages]:
    """Stages of each draw."""
    specs = [space.spec(m) for m in range(len(space.models))]
    return [Stages(Runs(load_of(tasks, draw, specs), space)) for draw in draws]


def makespans_s(draws: Sequence[Stages], planned: Sequence[Plans], spare: Plans) -> tuple[float, ...]:
    """Seconds that a plan takes, a draw each."""
    return tuple(play(stages, planned, spare).end_s for stages in draws)


def mean_of(values: Sequence[float]) -> Estimate:
    """The mean and its 95 % interval (Student's t); of one value there is none."""
    from scipy.special import stdtrit

    n = len(values)
    if n < 2:
        return Estimate(float(values[0]) if n else math.nan)
    half = stdtrit(n - 1, 0.975) * np.std(values, ddof=1) / math.sqrt(n)
    return Estimate(float(np.mean(values)), float(half))


def quantiles_of(values: Sequence[float]) -> dict[float, float]:
    """By level."""
    return {level: float(np.quantile(values, level)) for level in QUANTILES}


def judged(values: Sequence[float], quantile: float | None) -> float:
    """What plans are compared by: the mean, or a quantile."""
    return float(np.mean(values) if quantile is None else np.quantile(values, quantile))


def spans_of(played: Played, space: Space, stages: Stages) -> tuple[AppSpan, ...]:
    """What each GPU does, in order of GPUs and time; neighbours that do the same are one."""
    parts: list[AppSpan] = []
    ready_s: dict[tuple[int, Replica], float] = {}
    for stage, staged in zip(played.stages, played.staged, strict=True):
        ready_s = _ready(stage, ready_s)
        spans = _of_stage(stage, staged, ready_s, space, stages)
        parts += (span for span in spans if span.end_s > span.start_s)
    joined: list[AppSpan] = []
    for span in sorted(parts, key=lambda s: (s.gpu, s.start_s, s.end_s)):
        if joined and _goes_on(last := joined[-1], span):
            joined[-1] = AppSpan(last.gpu, last.start_s, span.end_s, last.what, last.model, last.plan)
        else:
            joined.append(span)
    return tuple(joined)


def _goes_on(last: AppSpan, span: AppSpan) -> bool:
    same = (last.gpu, last.what, last.model, last.plan) == (span.gpu, span.what, span.model, span.plan)
    return same and last.end_s == span.start_s


def idle_seconds(spans: Sequence[AppSpan]) -> dict[str, float]:
    """GPU-seconds in which no model ran, by why."""
    found: dict[str, float] = {}
    for span in spans:
        if span.what != "run":
            found[span.what] = found.get(span.what, 0.0) + span.end_s - span.start_s
    return dict(sorted(found.items()))


def _ready(stage: AppStage, before: Mapping[tuple[int, Replica], float]) -> dict[tuple[int, Replica], float]:
    """When each replica of a stage is ready: loading goes on over the ends of stages."""
    there = [(model, replica) for model, replicas in stage.placement.items() for replica in replicas]
    found = {key: before.get(key, stage.start_s) for key in there}
    return found | {(one.model, one.replica): stage.start_s + one.seconds for one in stage.switches}


def _of_stage(
    stage: AppStage,
    staged: Staged,
    ready: Mapping[tuple[int, Replica], float],
    space: Space,
    stages: Stages,
) -> Iterator[AppSpan]:
    used: set[int] = set()
    for plan in stage.plans:
        live = staged.live[plan.model]
        for replica in stage.placement[plan.model]:
            ready_s = min(max(ready[plan.model, replica], stage.start_s), stage.end_s)
            done_s = min(max(live.end_s, ready_s), stage.end_s)
            for gpu in replica:
                used.add(gpu)
                yield AppSpan(gpu, stage.start_s, ready_s, "load", plan.model, plan)
                yield AppSpan(gpu, ready_s, done_s, "run", plan.model, plan)
                yield AppSpan(gpu, done_s, stage.end_s, "waiting_for_parents", plan.model, plan)
    why = _why_free(staged, space, stages)
    for gpu in range(space.cluster.gpus):
        if gpu not in used:
            yield AppSpan(gpu, stage.start_s, stage.end_s, why)


def _why_free(staged: Staged, space: Space, stages: Stages) -> str:
    """Why GPUs that no model has in a stage are free."""
    running = {plan.model for plan in staged.plans}
    done = stages.finished(staged.state)
    left = set(range(len(space.models))) - done - running
    if not left:
        return "tail"
    ready = left & set(stages.ready(done, running))
    if not ready:
        return "waiting_for_parents"
    could = any(space.fits((*staged.plans, p)) for m in ready for p in space.plans(m))
    return "left_free" if could else "no_plan_fits"
