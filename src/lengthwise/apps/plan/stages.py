"""Stages of an application, one after another: who runs under which plan, until the first model finishes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from lengthwise.apps.plan.runs import Run, Runs, Work
from lengthwise.schema.app import ModelPlan
from lengthwise.schema.app_tasks import Floats
from lengthwise.schema.errors import InternalError

Plans = tuple[ModelPlan, ...]
MOST_PASSES = 1000
"""Passes over models that wait for one another: one a time that outputs go back and forth."""


@dataclass(frozen=True)
class Live:
    """A run that is under way.

    Attributes:
        run: All of it.
        start_s: When its replicas were (or will be) ready, the first of them where others join.
        alone: Those that were first, as they would go on; None: all are ready at once.
        joins_s: When the others join.
    """

    run: Run
    start_s: float
    alone: Live | None = None
    joins_s: float = 0.0

    def at(self, clock_s: float) -> float:
        """The run's own time; its end exactly where the clock stands at it but for rounding."""
        at_s = clock_s - self.start_s
        return self.run.seconds if abs(at_s - self.run.seconds) <= 1e-9 * max(1.0, clock_s) else at_s

    @property
    def end_s(self) -> float:
        """When it ends, on the clock."""
        return self.start_s + self.run.seconds

    def ended_s(self) -> Floats:
        """[k] when each task ends if the run goes on."""
        there = np.isfinite(self.run.finish_s)
        return np.where(there, self.start_s + self.run.finish_s, self.run.before.ended_s)


Others = Mapping[int, Live]


@dataclass(frozen=True)
class State:
    """An application between two stages.

    Attributes:
        clock_s: Now.
        rest: What is behind the models that do not run.
        live: Those that ran up to now.
    """

    clock_s: float
    rest: tuple[Work, ...]
    live: Mapping[int, Live] = field(default_factory=dict)

    @property
    def plans(self) -> Plans:
        """Under which the live ones run."""
        return tuple(live.run.plan for live in self.live.values())

    def work(self, model: int) -> Work:
        """What is behind a model now."""
        live = self.live.get(model)
        return self.rest[model] if live is None else live.run.work_at(live.at(self.clock_s), live.start_s)


@dataclass(frozen=True)
class Delay:
    """Seconds until replicas of a plan are ready; ``kept`` others go on meanwhile, or are ready after ``first_s``."""

    seconds: float
    kept: int = 0
    first_s: float = 0.0


@dataclass(frozen=True)
class Staged:
    """A stage that was simulated.

    Attributes:
        state: Before it.
        plans: What runs.
        live: The runs.
        end_s: When the first model finishes; where none can, when all that can be done is.
        ends_by: The model that finishes; -1: none can.
        flops: Of the progress made in it.
    """

    state: State
    plans: Plans
    live: Mapping[int, Live]
    end_s: float
    ends_by: int
    flops: float

    @property
    def seconds(self) -> float:
        """Of the stage, loading and all."""
        return self.end_s - self.state.clock_s

    @property
    def throughput(self) -> float:
        """FLOPs a second (T_E)."""
        return self.flops / max(self.seconds, 1e-9)


class Stages:
    """Stages of one draw.

    Attributes:
        looks: Stages that were looked at so far.
    """

    def __init__(self, runs: Runs) -> None:
        self.runs, self.load, self.space = runs, runs.load, runs.space
        self.looks = 0

    def start(self) -> State:
        """Before anything."""
        return State(0.0, tuple(self.runs.fresh(m) for m in range(len(self.load.models))))

    def finished(self, state: State) -> frozenset[int]:
        """Models that have nothing left."""
        return frozenset(m for m in range(len(self.load.models)) if self._is_done(state, m))

    def _is_done(self, state: State, model: int) -> bool:
        live = state.live.get(model)
        if live is not None:
            return live.run.whole and live.at(state.clock_s) >= live.run.seconds
        work = state.rest[model]
        return not (work.produced < self.load.models[model].output).any()

    def ready(self, finished: Collection[int], chosen: Collection[int]) -> list[int]:
        """Models that are left and whose inputs come from finished or chosen ones, or wait for it as it for them."""
        there = set(finished) | set(chosen)
        order = [m for m in self.load.order if m not in finished]
        if not self.load.cyclic:
            return [m for m in order if self.load.parents[m] <= there]
        return [m for m in order if self.load.parents[m] - there <= self._beyond(m)]

    def _beyond(self, model: int) -> set[int]:
        """Models that take outputs of this one, over however many others."""
        found: set[int] = set()
        seek = {model}
        while seek:
            seek = {m for m, some in enumerate(self.load.parents) if some & seek} - found
            found |= seek
        return found if model in found else set()

    def delay(self, state: State, plan: ModelPlan, wait_s: float = 0.0) -> Delay:
        """When a model is ready under a plan, moves of others left aside.

        Args:
            state: Now.
            plan: The plan.
            wait_s: Until there is room for what has to start.
        """
        there = self._there(state, plan)
        if there == plan.dp:
            return Delay(self.pending_s(state, plan))
        return Delay(wait_s + self.space.seconds(plan, "start"), there)

    def pending_s(self, state: State, plan: ModelPlan) -> float:
        """Seconds until those replicas of a plan's shape are ready that are being loaded now; 0 where none is."""
        live = state.live.get(plan.model)
        if live is None or live.run.plan.shape != plan.shape:
            return 0.0
        return max(0.0, live.start_s - state.clock_s)

    def stage(self, state: State, plans: Plans, delays: Mapping[int, Delay] | None = None) -> Staged:
        """What comes of running these plans from now on.

        Args:
            state: Now.
            plans: One a model.
            delays: Of models that have replicas made ready, moved ones too; None: ``delay``.
        """
        self.looks += 1
        if delays is None:
            delays = self._delays(state, plans)
        live = self._lives(state, plans, delays)
        ends = [(one.end_s, m) for m, one in live.items() if one.run.whole]
        end_s, by = (
            min(ends) if ends else (max((one.end_s for one in live.values()), default=state.clock_s), -1)
        )
        end_s = max(end_s, state.clock_s)
        flops = sum(
            one.run.flops(one.at(end_s)) - one.run.flops(one.at(state.clock_s) if m in state.live else 0.0)
            for m, one in live.items()
        )
        return Staged(state, plans, live, end_s, by, flops)

    def after(self, staged: Staged) -> State:
        """The state at the end of a stage."""
        rest = list(staged.state.rest)
        for m in staged.state.live.keys() - staged.live.keys():
            rest[m] = staged.state.work(m)
        for m, one in staged.live.items():
            rest[m] = one.run.before
        return State(staged.end_s, tuple(rest), dict(staged.live))

    def _delays(self, state: State, plans: Plans) -> dict[int, Delay]:
        """Of those whose plan is another than before; where each of them is, nobody says."""
        wait_s = self._wait_s(state, plans)
        changed = (p for p in plans if p.model not in state.live or state.live[p.model].run.plan != p)
        return {plan.model: self.delay(state, plan, wait_s) for plan in changed}

    def _wait_s(self, state: State, plans: Plans) -> float:
        """Until engines that leave are gone, where those that start need their GPUs."""
        stay = {plan.model: self._there(state, plan) for plan in plans}
        leaving = [
            live.run.plan
            for model, live in state.live.items()
            if live.run.plan.dp > stay.get(model, 0) and live.start_s <= state.clock_s
        ]
        longest_s = max((self.space.leave_s(plan) for plan in leaving), default=0.0)
        if longest_s <= 0.0:
            return 0.0
        free = self.space.cluster.gpus - sum(plan.gpus for plan in state.plans)
        needed = sum((plan.dp - stay[plan.model]) * plan.tp * plan.pp for plan in plans)
        return longest_s if needed > free else 0.0

    def _there(self, state: State, plan: ModelPlan) -> int:
        """Replicas of a plan's shape that go on, or go on being loaded."""
        live = state.live.get(plan.model)
        same = live is not None and live.run.plan.shape == plan.shape
        return min(live.run.plan.dp, plan.dp) if live is not None and same else 0

    def _lives(self, state: State, plans: Plans, delays: Mapping[int, Delay]) -> dict[int, Live]:
        """The runs of a stage, parents before children; around a cycle until nothing moves."""
        of = {plan.model: plan for plan in plans}
        order = [m for m in self.load.order if m in of]
        live: dict[int, Live] = {}
        for _ in range(MOST_PASSES):
            before = {m: one.run.key for m, one in live.items()}
            for m in order:
                live[m] = self._live(state, of[m], live, delays.get(m))
            if not self.load.cyclic or before == {m: one.run.key for m, one in live.items()}:
                return {m: live[m] for m in sorted(live)}
        raise InternalError(f"models that wait for one another did not settle in {MOST_PASSES} passes")

    def _live(self, state: State, plan: ModelPlan, others: Others, delay: Delay | None) -> Live:
        was = state.live.get(plan.model)
        if was is not None and was.run.plan == plan and (delay is None or not delay.seconds):
            return self._again(state, was, others)
        delay = delay or Delay(0.0)
        ready_s = state.clock_s + delay.seconds
        if not delay.kept:
            return self._begun(state, plan, state.work(plan.model), ready_s, others)
        if was is not None and not delay.first_s and was.run.plan == replace(plan, dp=delay.kept):
            alone = self._again(state, was, others)
        else:
            first_s = state.clock_s + (delay.first_s or self.pending_s(state, plan))
            alone = self._begun(state, replace(plan, dp=delay.kept), state.work(plan.model), first_s, others)
        return self._joined(state, plan, alone, ready_s, others)

    def _begun(self, state: State, plan: ModelPlan, work: Work, start_s: float, others: Others) -> Live:
        return Live(self.runs.run(plan, work, self._arrivals(state, plan.model, start_s, others)), start_s)

    def _again(self, state: State, was: Live, others: Others) -> Live:
        """What goes on, by when its tasks come now."""
        if was.alone is None:
            return self._begun(state, was.run.plan, was.run.before, was.start_s, others)
        return self._joined(state, was.run.plan, self._again(state, was.alone, others), was.joins_s, others)

    def _joined(self, state: State, plan: ModelPlan, alone: Live, joins_s: float, others: Others) -> Live:
        """Replicas that go on, and share what is left with those that join them."""
        if joins_s <= alone.start_s:
            return self._begun(state, plan, alone.run.before, alone.start_s, others)
        at_s = alone.at(joins_s)
        rest = self._begun(state, plan, alone.run.work_at(at_s, alone.start_s), joins_s, others)
        return Live(self.runs.joined(alone.run, at_s, rest.run), alone.start_s, alone, joins_s)

    def _arrivals(self, state: State, model: int, start_s: float, others: Others) -> Floats | None:
        """[k] when a model's tasks come, from its start on, as far as other models tell."""
        load = self.load.models[model]
        child, parent = load.outer
        if not len(child):
            return None
        come = np.zeros(len(load))
        whose = self.load.model[parent]
        for other in self.load.parents[model]:
            mine = whose == other
            told = others[other].ended_s() if other in others else state.work(other).ended_s
            np.maximum.at(come, child[mine], told[self.load.position[parent[mine]]] - start_s)
        return np.maximum(come, 0.0)
