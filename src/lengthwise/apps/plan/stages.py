"""Stages of an application, one after another: who runs under which plan, until the first model finishes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np

from lengthwise import engine
from lengthwise.apps.plan.draws import Load, ModelLoad
from lengthwise.apps.plan.space import Space
from lengthwise.schema.app import Flags, Floats, Ints, ModelPlan
from lengthwise.schema.errors import InternalError
from lengthwise.schema.workload import After, Workload

CURVE_POINTS = 256
REPRESENTED_TASKS = 50
"""Tasks a replica from which on one of ``dp`` equal replicas stands for all: the one with the most tokens."""

MOST_HELD_TASKS = 10_000_000
"""Tasks of all runs that are kept (two numbers each); beyond, the oldest are forgotten and simulated again."""


@dataclass(frozen=True)
class Work:
    """What a model has behind it.

    Attributes:
        key: Equal keys, equal work.
        produced: [k] tokens produced; all of them where a task has ended.
        completed_s: [k] when, on the clock of the application; infinite where it has not.
    """

    key: Hashable
    produced: Ints
    completed_s: Floats


@dataclass(frozen=True)
class Run:
    """What becomes of a model's tasks under a plan, if it is left to run.

    Attributes:
        plan: The plan.
        load: Of the model.
        before: The work that it starts from.
        key: Equal keys, equal runs.
        first_s: [k] when the first token of this run came; infinite of those that are not in it.
        finish_s: [k] when the last one came.
        complete: Whether all that was left is in it: no task waits for somebody who does not run.
    """

    plan: ModelPlan
    load: ModelLoad
    before: Work
    key: Hashable
    first_s: Floats
    finish_s: Floats
    complete: bool

    @cached_property
    def seconds(self) -> float:
        """Until all that is in it has ended."""
        return float(self.finish_s[self._inside].max(initial=0.0))

    @cached_property
    def _inside(self) -> Flags:
        return np.asarray(np.isfinite(self.finish_s))

    def produced(self, at_s: float) -> Ints:
        """[k] tokens produced by then; between the first and the last token of a task in proportion to time."""
        before, output = self.before.produced, self.load.output
        made = before.copy()
        going = np.flatnonzero((self.first_s <= at_s) & (self.finish_s > at_s))
        first, last = self.first_s[going], self.finish_s[going]
        more = (output - before)[going] - 1
        made[going] += np.minimum(1 + (more * (at_s - first) / (last - first)).astype(np.int64), more)
        return np.where(self.finish_s <= at_s, output, made)

    def work_at(self, at_s: float, start_s: float) -> Work:
        """What is behind the model when the run is cut; ``start_s`` is its start on the clock."""
        completed_s = np.where(self.finish_s <= at_s, start_s + self.finish_s, self.before.completed_s)
        return Work((self.key, float(at_s)), self.produced(at_s), completed_s)

    def flops(self, at_s: float) -> float:
        """FLOPs of the progress made by then, from its start on."""
        step_s, made = self._curve
        if at_s <= 0.0:
            return 0.0
        place = at_s / step_s
        k = int(place)
        if k >= CURVE_POINTS:
            return made[-1]
        return made[k] + (place - k) * (made[k + 1] - made[k])

    def when(self, flops: float) -> float:
        """When so much progress has been made."""
        step_s, made = self._curve
        k = min(int(np.searchsorted(made, flops, side="right")) - 1, CURVE_POINTS - 1)
        rise = made[k + 1] - made[k]
        return step_s * (k + ((flops - made[k]) / rise if rise > 0 else 1.0))

    @cached_property
    def _curve(self) -> tuple[float, list[float]]:
        """(seconds a point, FLOPs at each point): ramps of all tasks between their first and last tokens, summed."""
        step_s = max(self.seconds, 1e-9) / CURVE_POINTS
        inside = self._inside
        first, last = self.first_s[inside], self.finish_s[inside]
        low = self.load.work(np.maximum(self.before.produced, 1))[inside]
        had = self.load.work(self.before.produced)[inside]
        rise = (self.load.work(self.load.output)[inside] - low) / np.maximum(last - first, 1e-12)
        begins = np.minimum(np.ceil(first / step_s).astype(np.int64), CURVE_POINTS)
        ends = np.minimum(np.ceil(last / step_s).astype(np.int64), CURVE_POINTS)
        size = CURVE_POINTS + 1
        fixed = np.bincount(begins, low - had - rise * first, size) + np.bincount(ends, rise * last, size)
        slope = np.bincount(begins, rise, size) - np.bincount(ends, rise, size)
        made = np.cumsum(fixed) + np.cumsum(slope) * step_s * np.arange(size)
        return step_s, np.maximum.accumulate(np.maximum(made, 0.0)).tolist()


class Runs:
    """Runs of a draw, each simulated once.

    Args:
        load: The draw.
        space: Plans and deployments.
        fast: Whether a model that goes on under another plan is read off the run of that plan from the very start:
            its rest is what that run has left after as much progress. Exact enough to compare plans by, and nothing
            is simulated.
        known: Runs of the same draw that are known already; what has nothing behind it is simulated there, for both.

    Attributes:
        simulated_requests: So far.
        simulated_runs: That these were in.
        clock: Seconds; None: nobody wants to know.
        duration_s: What each run took to simulate, by that clock.
        requested: Keys of the runs that were asked for; whoever wants to know empties it.
    """

    def __init__(self, load: Load, space: Space, *, fast: bool = False, known: Runs | None = None) -> None:
        self.load, self.space, self.fast = load, space, fast
        self.made: dict[Hashable, Run] = dict(known.made) if known else {}
        self._known = known
        self._fresh = [Work("fresh", m.fresh, m.disabled) for m in load.models]
        self._reserved = sum(len(run.load) for run in self.made.values())
        self.simulated_requests = self.simulated_runs = 0
        self.clock: Callable[[], float] | None = None
        self.duration_s: dict[Hashable, float] = {}
        self.requested: set[Hashable] = set()

    def fresh(self, model: int) -> Work:
        """Nothing behind it."""
        return self._fresh[model]

    def run(self, plan: ModelPlan, before: Work, arrival_s: Floats | None = None) -> Run:
        """The run of a plan on what is left; ``arrival_s``: [k] when tasks come, infinite: not in this run."""
        if arrival_s is not None and not (arrival_s > 0).any():
            arrival_s = None
        if self._known is not None and before.key == "fresh":
            return self._known.run(plan, before, arrival_s)
        came = None if arrival_s is None else blake2b(arrival_s.tobytes(), digest_size=16).digest()
        key = (plan, before.key, came)
        if self.clock is not None:
            self.requested.add(key)
        if key not in self.made:
            started_s = self.clock() if self.clock is not None else 0.0
            viewed = self.fast and came is None and before.key != "fresh"
            run = self._viewed(plan, before, key) if viewed else self._made(plan, before, arrival_s, key)
            self._keep(run)
            if self.clock is not None:
                self.duration_s[key] = self.clock() - started_s
        return self.made[key]

    def joined(self, first: Run, at_s: float, rest: Run) -> Run:
        """One run of two: the first goes on until its own ``at_s``, when the other replicas of the rest join it."""
        key = ("joined", first.key, at_s, rest.key)
        if key not in self.made:
            begun, ended = first.first_s <= at_s, first.finish_s <= at_s
            first_s = np.where(begun, first.first_s, at_s + rest.first_s)
            finish_s = np.where(ended, first.finish_s, at_s + rest.finish_s)
            self._keep(Run(rest.plan, first.load, first.before, key, first_s, finish_s, rest.complete))
        return self.made[key]

    def _keep(self, run: Run) -> None:
        self.made[run.key] = run
        self._reserved += len(run.load)
        while self._reserved > MOST_HELD_TASKS and len(self.made) > 1:
            self._reserved -= len(self.made.pop(next(iter(self.made))).load)

    def _viewed(self, plan: ModelPlan, before: Work, key: Hashable) -> Run:
        whole = self.run(plan, self._fresh[plan.model])
        behind_s = whole.when(float(whole.load.work(before.produced).sum()))
        left = before.produced < whole.load.output
        finish_s = np.where(left, np.maximum(whole.finish_s - behind_s, 1e-6), np.inf)
        first_s = np.where(left, np.clip(whole.first_s - behind_s, 0.0, finish_s), np.inf)
        return Run(plan, whole.load, before, key, first_s, finish_s, complete=True)

    def _made(self, plan: ModelPlan, before: Work, arrival_s: Floats | None, key: Hashable) -> Run:
        load = self.load.models[plan.model]
        left = before.produced < load.output
        come = np.zeros(len(load)) if arrival_s is None else _passed_on(load, arrival_s, left)
        inside = np.flatnonzero(left & np.isfinite(come))
        first_s, finish_s = load.disabled.copy(), load.disabled.copy()
        if len(inside):
            first_s[inside], finish_s[inside] = self._simulated(plan, before, come, inside)
        return Run(plan, load, before, key, first_s, finish_s, complete=len(inside) == int(left.sum()))

    def _simulated(self, plan: ModelPlan, before: Work, come: Floats, inside: Ints) -> tuple[Floats, Floats]:
        """When each has its first and its last token."""
        load = self.load.models[plan.model]
        order = inside[np.argsort(come[inside], kind="stable")]
        after = _after(load, order)
        mine, group = order, plan.dp
        # Around a cycle of models only what is simulated whole settles: nothing in it hangs on what comes later.
        alike = after is None and not self.load.cyclic
        if plan.dp > 1 and alike and len(order) >= REPRESENTED_TASKS * plan.dp:
            mine, plan = _heaviest(load, before, order, plan.dp), replace(plan, dp=1)
        produced = before.produced[mine]
        arrival_s = come[mine]
        requests = Workload(arrival_s, load.prompt[mine] + produced, load.output[mine] - produced, **after or {})
        self.simulated_requests += len(mine)
        self.simulated_runs += 1
        told = engine.simulate(requests, self.space.deployment(plan), keep_steps=0).requests
        # One that no engine takes ends when it comes, as it does in a run (with an error).
        first_s = np.where(np.isnan(told.first_token_s), arrival_s, told.first_token_s)
        finish_s = np.where(np.isnan(told.finished_s), arrival_s, told.finished_s)
        if len(mine) < len(order):
            first_s, finish_s = (np.repeat(column, group)[: len(order)] for column in (first_s, finish_s))
            first_s = np.maximum(first_s, come[order])
            finish_s = np.maximum(finish_s, first_s)
        back = np.argsort(order)
        return first_s[back], finish_s[back]


def _heaviest(load: ModelLoad, before: Work, order: Ints, dp: int) -> Ints:
    """Of ``dp`` hands that tasks are dealt to in turn, the fullest one with the most tokens."""
    size = -(-len(order) // dp)
    full = len(order) - dp * (size - 1)
    tokens = load.output - before.produced
    return max((order[r::dp] for r in range(full)), key=lambda hand: int(tokens[hand].sum()))


def _passed_on(load: ModelLoad, arrival_s: Floats, left: Flags) -> Floats:
    """Arrivals under which nobody comes before those of the same model that he waits for."""
    child, parent = load.inner
    come, waits = np.where(left, arrival_s, 0.0), left[parent] if len(parent) else left[:0]
    child, parent = child[waits], parent[waits]
    for level in range(1, int(load.depth.max(initial=0)) + 1 if len(child) else 0):
        here = load.depth[child] == level
        np.maximum.at(come, child[here], come[parent[here]])
    return come


def _after(load: ModelLoad, order: Ints) -> dict[str, Any] | None:
    """The workload's ``after`` of tasks in this order; None where nobody waits for another of them."""
    child, parent = load.inner
    place = np.full(len(load), -1)
    place[order] = np.arange(len(order))
    both = (place[child] >= 0) & (place[parent] >= 0)
    if not both.any():
        return None

    child, parent = place[child[both]], place[parent[both]]
    by = np.argsort(child, kind="stable")
    start = np.searchsorted(child[by], np.arange(len(order) + 1))
    return {"after": After(start.astype(np.int64), parent[by].astype(np.int64))}


Plans = tuple[ModelPlan, ...]
MOST_PASSES = 1000
"""Passes over models that wait for one another: one a time that outputs go back and forth."""


@dataclass(frozen=True)
class Live:
    """A run that is under way.

    Attributes:
        run: All of it.
        start_s: When its replicas were (or will be) ready, the first of them where others join.
        isolated: Those that were first, as they would go on; None: all are ready at once.
        joins_s: When the others join.
    """

    run: Run
    start_s: float
    isolated: Live | None = None
    joins_s: float = 0.0

    def at(self, clock_s: float) -> float:
        """The run's own time; its end exactly where the clock stands at it but for rounding."""
        at_s = clock_s - self.start_s
        return self.run.seconds if abs(at_s - self.run.seconds) <= 1e-9 * max(1.0, clock_s) else at_s

    @property
    def end_s(self) -> float:
        """When it ends, on the clock."""
        return self.start_s + self.run.seconds

    def completed_s(self) -> Floats:
        """[k] when each task ends if the run goes on."""
        there = np.isfinite(self.run.finish_s)
        return np.where(there, self.start_s + self.run.finish_s, self.run.before.completed_s)


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
    """Seconds until replicas of a plan are ready; ``retained`` others go on meanwhile, or are ready after ``first_s``."""

    seconds: float
    retained: int = 0
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
        scans: Stages that were looked at so far.
    """

    def __init__(self, runs: Runs) -> None:
        self.runs, self.load, self.space = runs, runs.load, runs.space
        self.scans = 0

    def start(self) -> State:
        """Before anything."""
        return State(0.0, tuple(self.runs.fresh(m) for m in range(len(self.load.models))))

    def finished(self, state: State) -> frozenset[int]:
        """Models that have nothing left."""
        return frozenset(m for m in range(len(self.load.models)) if self._is_done(state, m))

    def _is_done(self, state: State, model: int) -> bool:
        live = state.live.get(model)
        if live is not None:
            return live.run.complete and live.at(state.clock_s) >= live.run.seconds
        work = state.rest[model]
        return not (work.produced < self.load.models[model].output).any()

    def ready(self, finished: Collection[int], chosen: Collection[int]) -> list[int]:
        """Models that are left and whose inputs come from finished or chosen ones, or wait for it as it for them."""
        there = set(finished) | set(chosen)
        order = [m for m in self.load.order if m not in finished]
        if not self.load.cyclic:
            return [m for m in order if self.load.parents[m] <= there]
        return [m for m in order if self.load.parents[m] - there <= self._out_of_range(m)]

    def _out_of_range(self, model: int) -> set[int]:
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
        there = self._present(state, plan)
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
        self.scans += 1
        if delays is None:
            delays = self._delays(state, plans)
        live = self._lives(state, plans, delays)
        ends = [(one.end_s, m) for m, one in live.items() if one.run.complete]
        end_s, by = min(ends) if ends else (max((one.end_s for one in live.values()), default=state.clock_s), -1)
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
        stay = {plan.model: self._present(state, plan) for plan in plans}
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

    def _present(self, state: State, plan: ModelPlan) -> int:
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
            return self._retry(state, was, others)
        delay = delay or Delay(0.0)
        ready_s = state.clock_s + delay.seconds
        if not delay.retained:
            return self._started(state, plan, state.work(plan.model), ready_s, others)
        if was is not None and not delay.first_s and was.run.plan == replace(plan, dp=delay.retained):
            alone = self._retry(state, was, others)
        else:
            first_s = state.clock_s + (delay.first_s or self.pending_s(state, plan))
            alone = self._started(state, replace(plan, dp=delay.retained), state.work(plan.model), first_s, others)
        return self._joined(state, plan, alone, ready_s, others)

    def _started(self, state: State, plan: ModelPlan, work: Work, start_s: float, others: Others) -> Live:
        return Live(self.runs.run(plan, work, self._arrivals(state, plan.model, start_s, others)), start_s)

    def _retry(self, state: State, was: Live, others: Others) -> Live:
        """What goes on, by when its tasks come now."""
        if was.isolated is None:
            return self._started(state, was.run.plan, was.run.before, was.start_s, others)
        return self._joined(state, was.run.plan, self._retry(state, was.isolated, others), was.joins_s, others)

    def _joined(self, state: State, plan: ModelPlan, isolated: Live, joins_s: float, others: Others) -> Live:
        """Replicas that go on, and share what is left with those that join them."""
        if joins_s <= isolated.start_s:
            return self._started(state, plan, isolated.run.before, isolated.start_s, others)
        at_s = isolated.at(joins_s)
        rest = self._started(state, plan, isolated.run.work_at(at_s, isolated.start_s), joins_s, others)
        return Live(self.runs.joined(isolated.run, at_s, rest.run), isolated.start_s, isolated, joins_s)

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
            told = others[other].completed_s() if other in others else state.work(other).completed_s
            np.maximum.at(come, child[mine], told[self.load.position[parent[mine]]] - start_s)
        return np.maximum(come, 0.0)
