"""How long a plan takes over many draws, and what its GPUs do meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lengthwise.apps.placement import Now, next_plans, place, switches
from lengthwise.apps.plan.draws import load_of
from lengthwise.apps.plan.space import Space
from lengthwise.apps.plan.stages import Delay, Plans, Runs, Staged, Stages, State
from lengthwise.schema.app import AppSpan, AppStage, Placement, Replica, Switch, TaskDraw, Tasks
from lengthwise.schema.errors import InternalError

Asleep = dict[tuple[int, tuple[str, int, int]], tuple[Replica, ...]]


@dataclass(frozen=True)
class Simulated:
    """How a plan turned out under one draw.

    Attributes:
        stages: As they came, with where and when.
        staged: Their simulations, one each.
        end_s: When all was done.
    """

    stages: tuple[AppStage, ...]
    staged: tuple[Staged, ...]
    end_s: float


def play(
    stages: Stages,
    planned: Sequence[Plans],
    reserve: Plans,
    *,
    places: bool = True,
    started: tuple[Plans, Placement] = ((), {}),
) -> Simulated:
    """How a plan turns out under a draw.

    Args:
        stages: Of the draw.
        planned: The plan's stages.
        reserve: Plans of models that are in none of them.
        places: Whether replicas are placed; else nobody is ever moved for another, which is quicker.
        started: Plans that run when it begins, and where; only with ``places``.

    Raises:
        InternalError: Nothing moves any more.
    """
    table = _Table(stages, places=places, started=started)
    while not table.is_done:
        table.turn(tuple(planned), reserve)
    return Simulated(tuple(table.made), tuple(table.staged), table.state.clock_s)


class _Table:
    """What stands where between two stages."""

    def __init__(self, stages: Stages, *, places: bool, started: tuple[Plans, Placement]) -> None:
        self._stages, self._space, self._places = stages, stages.space, places
        self.state: State = stages.start()
        self._now, self._starved = Now(-1, started[0]), frozenset[int]()
        self._placement: Placement = started[1]
        self._asleep: Asleep = {}
        self._left_s: dict[int, float] = {}
        self._ready_s: dict[tuple[int, Replica], float] = {}
        self.made: list[AppStage] = []
        self.staged: list[Staged] = []
        self._finished = stages.finished(self.state)

    @property
    def is_done(self) -> bool:
        return len(self._finished) == len(self._stages.load.models)

    def turn(self, planned: Sequence[Plans], reserve: Plans) -> None:
        """One stage."""
        now = next_plans(
            planned,
            self._now.stage,
            self._now.plans,
            self._finished,
            self._space.fits,
            reserve=reserve,
            starved=self._starved,
        )
        placement, made = self._placed(now.plans)
        delays = self._delays(now.plans, placement, made) if self._places else None
        staged = self._stages.stage(self.state, now.plans, delays)
        self._require_progress(staged, now)
        self.made.append(AppStage(now.plans, placement, made, staged.state.clock_s, staged.end_s, staged.ends_by))
        self.staged.append(staged)
        blocked = (m for m, one in staged.live.items() if not one.run.complete)
        self._starved = frozenset(blocked) if staged.ends_by < 0 else frozenset()
        self._now, self._placement = now, placement
        self.state = self._stages.after(staged)
        self._finished = self._stages.finished(self.state)

    def _placed(self, plans: Plans) -> tuple[Placement, tuple[Switch, ...]]:
        if not self._places:
            return {}, ()
        before, running, seconds = self._placement, self._now.plans, self._space.seconds
        in_sleep = self._asleep
        placement = place(plans, before, self._space.cluster, seconds, running=running, in_sleep=in_sleep)
        if placement is None:
            raise InternalError(f"plans that fit must have a place; {plans} have none")
        made = switches(plans, placement, before, seconds, running=running, in_sleep=in_sleep)
        made = self._behind_others(made, plans, placement)
        self._asleep = _sleep(self._space, running, before, placement, self._asleep)
        return placement, made

    def _behind_others(self, made: tuple[Switch, ...], plans: Plans, placement: Placement) -> tuple[Switch, ...]:
        """The same where engines that leave now, or still do, must be gone from a GPU before another loads there."""
        clock_s = self.state.clock_s
        stay = {(p.model, p.shape, r) for p in plans for r in placement[p.model]}
        for plan in self._now.plans:
            for replica in self._placement.get(plan.model, ()):
                loads = self._ready_s.get((plan.model, replica), 0.0) > clock_s  # is broken off
                if (plan.model, plan.shape, replica) not in stay and not loads:
                    gone_s = clock_s + self._space.leave_s(plan)
                    self._left_s |= {gpu: max(gone_s, self._left_s.get(gpu, 0.0)) for gpu in replica}
        waits_s = (max(self._left_s.get(gpu, 0.0) for gpu in one.replica) - clock_s for one in made)
        made = tuple(
            replace(one, seconds=one.seconds + max(0.0, wait_s)) for one, wait_s in zip(made, waits_s, strict=True)
        )
        self._ready_s |= {(one.model, one.replica): clock_s + one.seconds for one in made}
        return made

    def _delays(self, plans: Plans, placement: Placement, made: Sequence[Switch]) -> dict[int, Delay]:
        """When models are ready, where that is not as it was: the first of their replicas, and the last one."""
        found: dict[int, Delay] = {}
        before = {plan.model: plan for plan in self._now.plans}
        for plan in plans:
            seconds = sorted(one.seconds for one in made if one.model == plan.model)
            if seconds and len(seconds) < len(placement[plan.model]):
                found[plan.model] = Delay(seconds[-1], len(placement[plan.model]) - len(seconds))
            elif seconds:
                first = sum(s < seconds[0] + 1e-6 for s in seconds)
                found[plan.model] = Delay(seconds[-1], first % len(seconds), seconds[0])
            elif before.get(plan.model) != plan:
                found[plan.model] = Delay(self._stages.pending_s(self.state, plan))
        return found

    def _require_progress(self, staged: Staged, now: Now) -> None:
        still = staged.end_s <= self.state.clock_s and staged.ends_by < 0
        if not now.plans or (still and now == self._now):
            left = set(range(len(self._stages.load.models))) - self._finished
            raise InternalError(f"models {sorted(left)} are left, and {now.plans} gets none of them on")


def _sleep(space: Space, running: Plans, before: Placement, after: Placement, in_sleep: Asleep) -> Asleep:
    """Who sleeps now: who did and was not woken, and who was stopped where engines can sleep."""
    woken = {(m, r) for m, replicas in after.items() for r in replicas}
    found = {key: tuple(r for r in there if (key[0], r) not in woken) for key, there in in_sleep.items()}
    for plan in running:
        if space.sleeps(plan):
            key = (plan.model, plan.shape)
            stopped = (r for r in before.get(plan.model, ()) if (plan.model, r) not in woken)
            found[key] = tuple(sorted({*found.get(key, ()), *stopped}))
    return found


def spare_plans(space: Space, models: int, planned: Sequence[Plans]) -> Plans:
    """A plan for each model that no stage has: the one of the fewest GPUs."""
    there = {plan.model for plans in planned for plan in plans}
    return tuple(space.plans(m)[0] for m in range(models) if m not in there)


QUANTILES = (0.05, 0.5, 0.95)


def stages_of(tasks: Tasks, draws: Sequence[TaskDraw], space: Space) -> list[Stages]:
    """Stages of each draw."""
    specs = [space.spec(m) for m in range(len(space.models))]
    return [Stages(Runs(load_of(tasks, draw, specs), space)) for draw in draws]


def makespans_s(draws: Sequence[Stages], planned: Sequence[Plans], reserve: Plans) -> tuple[float, ...]:
    """Seconds that a plan takes, a draw each."""
    return tuple(play(stages, planned, reserve).end_s for stages in draws)


def quantiles_of(values: Sequence[float]) -> dict[float, float]:
    """By level."""
    return {level: float(np.quantile(values, level)) for level in QUANTILES}


def judged(values: Sequence[float], quantile: float | None) -> float:
    """What plans are compared by: the mean, or a quantile."""
    return float(np.mean(values) if quantile is None else np.quantile(values, quantile))


def spans_of(simulated: Simulated, space: Space, stages: Stages) -> tuple[AppSpan, ...]:
    """What each GPU does, in order of GPUs and time; neighbours that do the same are one."""
    parts: list[AppSpan] = []
    ready_s: dict[tuple[int, Replica], float] = {}
    for stage, staged in zip(simulated.stages, simulated.staged, strict=True):
        ready_s = _ready(stage, ready_s)
        spans = _of_stage(stage, staged, ready_s, space, stages)
        parts += (span for span in spans if span.end_s > span.start_s)
    joined: list[AppSpan] = []
    for span in sorted(parts, key=lambda s: (s.gpu, s.start_s, s.end_s)):
        if joined and _continues(last := joined[-1], span):
            joined[-1] = AppSpan(last.gpu, last.start_s, span.end_s, last.what, last.model, last.plan)
        else:
            joined.append(span)
    return tuple(joined)


def _continues(last: AppSpan, span: AppSpan) -> bool:
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
    stage: AppStage, staged: Staged, ready: Mapping[tuple[int, Replica], float], space: Space, stages: Stages
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
