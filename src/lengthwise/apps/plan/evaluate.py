"""Makespan of a plan on samples, and the activity of the GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from lengthwise.apps.placement import StagePlans, next_plans, place, switches
from lengthwise.apps.plan.draws import load_of
from lengthwise.apps.plan.space import Space
from lengthwise.apps.plan.stages import Delay, Plans, Runs, SimulatedStage, Stages
from lengthwise.schema.app import AppSpan, AppStage, Placement, Replica, Switch, TaskDraw, Tasks
from lengthwise.schema.errors import InternalError


def simulate_plan(
    stages: Stages,
    planned: Sequence[Plans],
    reserve: Plans,
    *,
    places: bool = True,
    started: tuple[Plans, Placement] = ((), {}),
) -> PlanSimulation:
    """Simulate the execution of a plan on one sample.

    Args:
        stages: Simulator of stages on the sample.
        planned: Plans of each stage.
        reserve: Plans of models without a stage.
        places: Whether replicas are placed on GPUs. Otherwise the simulation is faster, but no replica moves.
        started: Plans that run at the start, and their placement. The placement is used only with ``places``.

    Raises:
        InternalError: No model can make progress.
    """
    simulated = PlanSimulation(stages, places=places, started=started)
    while len(simulated.finished) < len(stages.load.models):
        simulated.advance(tuple(planned), reserve)
    return simulated


class PlanSimulation:
    """The execution of a plan on one sample. Each call of ``advance`` simulates the next stage."""

    def __init__(self, stages: Stages, *, places: bool, started: tuple[Plans, Placement]) -> None:
        self._stages, self._space, self._places = stages, stages.space, places
        self.state = stages.start()
        self.finished = stages.finished(self.state)
        self._now, self._starved = StagePlans(-1, started[0]), frozenset[int]()
        self._placement: Placement = started[1]
        self._asleep: dict[tuple[int, tuple[str, int, int]], tuple[Replica, ...]] = {}
        # Times at which stopping engines have left each GPU, and at which each replica is ready.
        self._free_s: dict[int, float] = {}
        self._ready_s: dict[tuple[int, Replica], float] = {}
        self.stages: list[AppStage] = []
        self.staged: list[SimulatedStage] = []

    @property
    def end_s(self) -> float:
        """Return the end of the last simulated stage. After all stages, this is the makespan."""
        return self.state.clock_s

    def advance(self, planned: Sequence[Plans], reserve: Plans) -> None:
        """Simulate the next stage of a plan. ``reserve`` holds the plans of models without a stage."""
        at, fits = self._now, self._space.fits
        now = next_plans(planned, at.stage, at.plans, self.finished, fits, reserve=reserve, starved=self._starved)
        placement, made, delays = self._placed(now.plans) if self._places else ({}, (), None)
        staged = self._stages.stage(self.state, now.plans, delays)
        is_stuck = staged.end_s <= self.state.clock_s and staged.ends_by < 0
        if not now.plans or (is_stuck and now == self._now):
            left = set(range(len(self._stages.load.models))) - self.finished
            raise InternalError(f"models {sorted(left)} have work left, but {now.plans} makes no progress")
        self.stages.append(AppStage(now.plans, placement, made, staged.state.clock_s, staged.end_s, staged.ends_by))
        self.staged.append(staged)
        blocked = (m for m, one in staged.live.items() if not one.run.is_complete)
        self._starved = frozenset(blocked) if staged.ends_by < 0 else frozenset()
        self._now, self._placement = now, placement
        self.state = self._stages.after(staged)
        self.finished = self._stages.finished(self.state)

    def _placed(self, plans: Plans) -> tuple[Placement, tuple[Switch, ...], dict[int, Delay]]:
        before, running, seconds = self._placement, self._now.plans, self._space.seconds
        asleep, stay = self._asleep, before
        if self._space.times.restarts_all:
            stay = {p.model: before[p.model] for p in {*running} & {*plans}}
        placement = place(plans, stay, self._space.cluster, seconds, running=running, sleeping=asleep)
        if placement is None:
            raise InternalError(f"plans that fit must have a placement; {plans} have none")
        made = switches(plans, placement, stay, seconds, running=running, sleeping=asleep)
        made = self._after_stops(made, plans, placement)
        resident = {(m, r) for m, replicas in placement.items() for r in replicas}
        self._asleep = {key: tuple(r for r in slept if (key[0], r) not in resident) for key, slept in asleep.items()}
        for plan in running:
            if self._space.sleeps(plan):
                key = (plan.model, plan.shape)
                stopped = (r for r in before.get(plan.model, ()) if (plan.model, r) not in resident)
                self._asleep[key] = tuple(sorted({*self._asleep.get(key, ()), *stopped}))
        return placement, made, self._delays(plans, placement, made)

    def _after_stops(self, made: tuple[Switch, ...], plans: Plans, placement: Placement) -> tuple[Switch, ...]:
        clock_s = self.state.clock_s
        retained = {(p.model, p.shape, r) for p in plans for r in placement[p.model]}
        for plan in self._now.plans:
            for replica in self._placement.get(plan.model, ()):
                is_loading = self._ready_s.get((plan.model, replica), 0.0) > clock_s  # is aborted at once
                if (plan.model, plan.shape, replica) not in retained and not is_loading:
                    free_s = clock_s + self._space.leave_s(plan)
                    self._free_s |= {gpu: max(free_s, self._free_s.get(gpu, 0.0)) for gpu in replica}
        delayed = []
        for one in made:
            wait_s = max(self._free_s.get(gpu, 0.0) for gpu in one.replica) - clock_s
            delayed.append(replace(one, seconds=one.seconds + max(0.0, wait_s)))
        self._ready_s |= {(one.model, one.replica): clock_s + one.seconds for one in delayed}
        return tuple(delayed)

    def _delays(self, plans: Plans, placement: Placement, made: Sequence[Switch]) -> dict[int, Delay]:
        delays: dict[int, Delay] = {}
        before = {plan.model: plan for plan in self._now.plans}
        for plan in plans:
            seconds = sorted(one.seconds for one in made if one.model == plan.model)
            replicas = len(placement[plan.model])
            if seconds and len(seconds) < replicas:
                delays[plan.model] = Delay(seconds[-1], replicas - len(seconds))
            elif seconds:
                first = sum(s < seconds[0] + 1e-6 for s in seconds)
                delays[plan.model] = Delay(seconds[-1], first % len(seconds), seconds[0])
            elif before.get(plan.model) != plan:
                delays[plan.model] = Delay(self._stages.pending_s(self.state, plan))
        return delays


def spare_plans(space: Space, planned: Sequence[Plans]) -> Plans:
    """Return, for each model without a stage, its plan with the fewest GPUs."""
    present = {plan.model for plans in planned for plan in plans}
    return tuple(space.plans(m)[0] for m in range(len(space.models)) if m not in present)


def stages_of(tasks: Tasks, draws: Sequence[TaskDraw], space: Space) -> list[Stages]:
    """Return the simulator of stages for each sample."""
    return [Stages(Runs(load_of(tasks, draw, space.specs), space)) for draw in draws]


def makespans_s(samples: Sequence[Stages], planned: Sequence[Plans], reserve: Plans) -> tuple[float, ...]:
    """Return the makespan of a plan on each sample."""
    return tuple(simulate_plan(stages, planned, reserve).end_s for stages in samples)


def spans_of(simulated: PlanSimulation, space: Space, stages: Stages) -> tuple[AppSpan, ...]:
    """Return the activity of each GPU over time, ordered by GPU and time. Equal neighbouring spans are merged."""
    parts: list[AppSpan] = []
    ready_s: dict[tuple[int, Replica], float] = {}
    for stage, staged in zip(simulated.stages, simulated.staged, strict=True):
        # Loading continues across the ends of stages.
        resident = [(model, replica) for model, replicas in stage.placement.items() for replica in replicas]
        ready_s = {key: ready_s.get(key, stage.start_s) for key in resident}
        ready_s |= {(one.model, one.replica): stage.start_s + one.seconds for one in stage.switches}
        spans = _stage_spans(stage, staged, ready_s, space, stages)
        parts += (span for span in spans if span.end_s > span.start_s)
    merged: list[AppSpan] = []
    for span in sorted(parts, key=lambda s: (s.gpu, s.start_s, s.end_s)):
        last = merged[-1] if merged else None
        if last and last.end_s == span.start_s and replace(last, start_s=span.start_s, end_s=span.end_s) == span:
            merged[-1] = replace(last, end_s=span.end_s)
        else:
            merged.append(span)
    return tuple(merged)


def _stage_spans(
    stage: AppStage, staged: SimulatedStage, ready: Mapping[tuple[int, Replica], float], space: Space, stages: Stages
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
    reason = _idle_reason(staged, space, stages)
    for gpu in range(space.cluster.gpus):
        if gpu not in used:
            yield AppSpan(gpu, stage.start_s, stage.end_s, reason)


def _idle_reason(staged: SimulatedStage, space: Space, stages: Stages) -> str:
    running = {plan.model for plan in staged.plans}
    finished = stages.finished(staged.state)
    left = set(range(len(space.models))) - finished - running
    if not left:
        return "tail"
    ready = left & set(stages.ready(finished, running))
    if not ready:
        return "waiting_for_parents"
    is_possible = any(space.fits((*staged.plans, p)) for m in ready for p in space.plans(m))
    return "left_free" if is_possible else "no_plan_fits"
