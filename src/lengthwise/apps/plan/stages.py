"""Simulates stages, in which sets of models run under fixed plans until the first model finishes."""

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
"""From this number of independent tasks per replica on, only one of ``dp`` replicas is simulated: that with the most
tokens."""

MAX_CACHED_TASKS = 10_000_000
"""Maximum tasks of all cached runs (two numbers each); the oldest runs are evicted, and simulated again on demand."""


@dataclass(frozen=True)
class Work:
    """The progress of a model's [k] tasks. Equal progress has equal keys."""

    key: Hashable
    produced: Ints  # [k] number of tokens produced
    completed_s: Floats  # [k] completion time on the application's clock; infinite for unfinished tasks


@dataclass(frozen=True)
class Run:
    """The simulated execution of a model's remaining tasks under a plan. Equal runs have equal keys."""

    plan: ModelPlan
    load: ModelLoad
    before: Work  # work completed before the run
    key: Hashable
    # [k] time of the first token, from the start of the run; infinite for tasks that are not in it
    first_token_s: Floats
    finish_s: Floats  # [k] time of the last token, from the start of the run
    is_complete: bool  # whether the run finishes all tasks, because none waits for a model that does not run

    @cached_property
    def seconds(self) -> float:
        """Return the seconds until all tasks of the run have finished."""
        return float(self.finish_s[self._included].max(initial=0.0))

    @cached_property
    def _included(self) -> Flags:
        return np.asarray(np.isfinite(self.finish_s))

    def produced(self, at_s: float) -> Ints:
        """Return each task's tokens at ``at_s``, [k]. They are interpolated between the first and the last token."""
        before, output = self.before.produced, self.load.output
        tokens = before.copy()
        active = np.flatnonzero((self.first_token_s <= at_s) & (self.finish_s > at_s))
        first, last = self.first_token_s[active], self.finish_s[active]
        more = (output - before)[active] - 1
        tokens[active] += np.minimum(1 + (more * (at_s - first) / (last - first)).astype(np.int64), more)
        return np.where(self.finish_s <= at_s, output, tokens)

    def work_at(self, at_s: float, start_s: float) -> Work:
        """Return the completed work if the run stops ``at_s`` seconds after its start at ``start_s`` of the clock."""
        completed_s = np.where(self.finish_s <= at_s, start_s + self.finish_s, self.before.completed_s)
        return Work((self.key, float(at_s)), self.produced(at_s), completed_s)

    def flops(self, at_s: float) -> float:
        """Return the FLOPs that the run computes in its first ``at_s`` seconds."""
        step_s, flops = self._curve
        if at_s <= 0.0:
            return 0.0
        position = at_s / step_s
        k = int(position)
        if k >= CURVE_POINTS:
            return flops[-1]
        return flops[k] + (position - k) * (flops[k + 1] - flops[k])

    def time_at(self, flops: float) -> float:
        """Return the seconds in which the run computes this many FLOPs."""
        step_s, points = self._curve
        k = min(int(np.searchsorted(points, flops, side="right")) - 1, CURVE_POINTS - 1)
        rise = points[k + 1] - points[k]
        return step_s * (k + ((flops - points[k]) / rise if rise > 0 else 1.0))

    @cached_property
    def _curve(self) -> tuple[float, list[float]]:
        """Return (seconds per point, FLOPs at each point). A task's FLOPs rise from the first to the last token."""
        step_s = max(self.seconds, 1e-9) / CURVE_POINTS
        included = self._included
        first, last = self.first_token_s[included], self.finish_s[included]
        low = self.load.work(np.maximum(self.before.produced, 1))[included]
        before = self.load.work(self.before.produced)[included]
        rise = (self.load.work(self.load.output)[included] - low) / np.maximum(last - first, 1e-12)
        begins = np.minimum(np.ceil(first / step_s).astype(np.int64), CURVE_POINTS)
        ends = np.minimum(np.ceil(last / step_s).astype(np.int64), CURVE_POINTS)
        size = CURVE_POINTS + 1
        fixed = np.bincount(begins, low - before - rise * first, size) + np.bincount(ends, rise * last, size)
        slope = np.bincount(begins, rise, size) - np.bincount(ends, rise, size)
        flops = np.cumsum(fixed) + np.cumsum(slope) * step_s * np.arange(size)
        return step_s, np.maximum.accumulate(np.maximum(flops, 0.0)).tolist()


class Runs:
    """Simulates runs on one sample and caches them.

    Args:
        fast: Whether the run of a model after a change of plan is not simulated, but taken from a complete run under
            the new plan, from equal progress on. This is accurate enough to compare plans.
        known: Another instance for the same sample. Runs of models that have completed no work come from its cache.
    """

    def __init__(self, load: Load, space: Space, *, fast: bool = False, known: Runs | None = None) -> None:
        self.load, self.space, self.fast = load, space, fast
        self.cached: dict[Hashable, Run] = dict(known.cached) if known else {}
        self._known = known
        # the progress of each model before the start, which is none
        self.fresh = [Work("fresh", np.zeros(len(m), np.int64), np.full(len(m), np.inf)) for m in load.models]
        self._cached_tasks = sum(len(run.load) for run in self.cached.values())
        self.simulated_requests = self.simulated_runs = 0
        self.clock: Callable[[], float] | None = None  # returns seconds; None: simulations are not timed
        self.duration_s: dict[Hashable, float] = {}  # seconds that each simulation took, by key of the run
        self.requested: set[Hashable] = set()  # keys of all runs requested since the caller last cleared it

    def run(self, plan: ModelPlan, before: Work, arrival_s: Floats | None = None) -> Run:
        """Return the run of a model under a plan, from the work ``before`` to its end.

        ``arrival_s`` [k] are the times at which tasks become ready, infinite for tasks that are not in this run.
        """
        if arrival_s is not None and not (arrival_s > 0).any():
            arrival_s = None
        if self._known is not None and before.key == "fresh":
            return self._known.run(plan, before, arrival_s)
        arrivals = None if arrival_s is None else blake2b(arrival_s.tobytes(), digest_size=16).digest()
        key = (plan, before.key, arrivals)
        if self.clock is not None:
            self.requested.add(key)
        if key not in self.cached:
            started_s = self.clock() if self.clock is not None else 0.0
            if self.fast and arrivals is None and before.key != "fresh":
                self._cache(self._derived(plan, before, key))
            else:
                self._cache(self._simulated(plan, before, arrival_s, key))
            if self.clock is not None:
                self.duration_s[key] = self.clock() - started_s
        return self.cached[key]

    def joined(self, first: Run, at_s: float, rest: Run) -> Run:
        """Return the run that equals ``first`` for ``at_s`` seconds, and then ``rest``, which has more replicas."""
        key = ("joined", first.key, at_s, rest.key)
        if key not in self.cached:
            first_token_s = np.where(first.first_token_s <= at_s, first.first_token_s, at_s + rest.first_token_s)
            finish_s = np.where(first.finish_s <= at_s, first.finish_s, at_s + rest.finish_s)
            self._cache(Run(rest.plan, first.load, first.before, key, first_token_s, finish_s, rest.is_complete))
        return self.cached[key]

    def _cache(self, run: Run) -> None:
        self.cached[run.key] = run
        self._cached_tasks += len(run.load)
        while self._cached_tasks > MAX_CACHED_TASKS and len(self.cached) > 1:
            self._cached_tasks -= len(self.cached.pop(next(iter(self.cached))).load)

    def _derived(self, plan: ModelPlan, before: Work, key: Hashable) -> Run:
        full = self.run(plan, self.fresh[plan.model])
        offset_s = full.time_at(float(full.load.work(before.produced).sum()))
        left = before.produced < full.load.output
        finish_s = np.where(left, np.maximum(full.finish_s - offset_s, 1e-6), np.inf)
        first_token_s = np.where(left, np.clip(full.first_token_s - offset_s, 0.0, finish_s), np.inf)
        return Run(plan, full.load, before, key, first_token_s, finish_s, is_complete=True)

    def _simulated(self, plan: ModelPlan, before: Work, arrival_s: Floats | None, key: Hashable) -> Run:
        load = self.load.models[plan.model]
        left = before.produced < load.output
        arrival_s = np.zeros(len(load)) if arrival_s is None else _after_parents(load, arrival_s, left)
        included = np.flatnonzero(left & np.isfinite(arrival_s))
        first_token_s, finish_s = np.full((2, len(load)), np.inf)
        if len(included):
            first_token_s[included], finish_s[included] = self._token_times(plan, before, arrival_s, included)
        return Run(plan, load, before, key, first_token_s, finish_s, is_complete=len(included) == int(left.sum()))

    def _token_times(self, plan: ModelPlan, before: Work, arrival_s: Floats, included: Ints) -> tuple[Floats, Floats]:
        load = self.load.models[plan.model]
        order = included[np.argsort(arrival_s[included], kind="stable")]
        after = _dependencies(load, order)
        simulated, group = order, plan.dp
        # In a cycle of models, only a simulation of all tasks converges, since no task then depends on later ones.
        is_independent = after is None and not self.load.is_cyclic
        if plan.dp > 1 and is_independent and len(order) >= REPRESENTED_TASKS * plan.dp:
            # Replicas get the tasks in turn; of those with the most tasks, the one with the most tokens is simulated.
            size = -(-len(order) // plan.dp)
            tokens = load.output - before.produced
            replicas = (order[r :: plan.dp] for r in range(len(order) - plan.dp * (size - 1)))
            simulated, plan = max(replicas, key=lambda one: int(tokens[one].sum())), replace(plan, dp=1)
        produced, ready_s = before.produced[simulated], arrival_s[simulated]
        requests = Workload(
            ready_s, load.prompt[simulated] + produced, load.output[simulated] - produced, **after or {}
        )
        self.simulated_requests += len(simulated)
        self.simulated_runs += 1
        records = engine.simulate(requests, self.space.deployment(plan), max_log_steps=0).requests
        # A rejected request finishes on arrival, as in a real run (with an error).
        first_token_s = np.where(np.isnan(records.first_token_s), ready_s, records.first_token_s)
        finish_s = np.where(np.isnan(records.finished_s), ready_s, records.finished_s)
        if len(simulated) < len(order):
            first_token_s, finish_s = (np.repeat(column, group)[: len(order)] for column in (first_token_s, finish_s))
            first_token_s = np.maximum(first_token_s, arrival_s[order])
            finish_s = np.maximum(finish_s, first_token_s)
        back = np.argsort(order)
        return first_token_s[back], finish_s[back]


def _after_parents(load: ModelLoad, arrival_s: Floats, left: Flags) -> Floats:
    """Return the arrivals, each delayed until all unfinished parents in the same model have arrived."""
    child, parent = load.inner
    arrival_s = np.where(left, arrival_s, 0.0)
    waits = left[parent] if len(parent) else left[:0]
    child, parent = child[waits], parent[waits]
    for level in range(1, int(load.depth.max(initial=0)) + 1 if len(child) else 0):
        at_level = load.depth[child] == level
        np.maximum.at(arrival_s, child[at_level], arrival_s[parent[at_level]])
    return arrival_s


def _dependencies(load: ModelLoad, order: Ints) -> dict[str, Any] | None:
    """Return the argument ``after`` of a Workload of tasks in this order, or None if no task waits for another."""
    child, parent = load.inner
    position = np.full(len(load), -1)
    position[order] = np.arange(len(order))
    both = (position[child] >= 0) & (position[parent] >= 0)
    if not both.any():
        return None
    child, parent = position[child[both]], position[parent[both]]
    by_child = np.argsort(child, kind="stable")
    start = np.searchsorted(child[by_child], np.arange(len(order) + 1))
    return {"after": After(start.astype(np.int64), parent[by_child].astype(np.int64))}


Plans = tuple[ModelPlan, ...]
_MAX_PASSES = 1000
"""Maximum passes over models that wait for one another; each time that outputs pass between them takes one."""


@dataclass(frozen=True)
class Live:
    """A run in progress, with its complete simulated execution. Its first replicas are ready at ``start_s``.

    If further replicas join at ``joins_s``, ``isolated`` is the run of the first replicas alone. It is None if all
    replicas are ready at once.
    """

    run: Run
    start_s: float
    isolated: Live | None = None
    joins_s: float = 0.0

    def at(self, clock_s: float) -> float:
        """Return the seconds since the start of the run. If only rounding differs from the end, return the end."""
        at_s = clock_s - self.start_s
        return self.run.seconds if abs(at_s - self.run.seconds) <= 1e-9 * max(1.0, clock_s) else at_s

    @property
    def end_s(self) -> float:
        """Return the end of the run on the application's clock."""
        return self.start_s + self.run.seconds

    def completed_s(self) -> Floats:
        """Return the completion times of the tasks if the run continues, [k]."""
        is_finite = np.isfinite(self.run.finish_s)
        return np.where(is_finite, self.start_s + self.run.finish_s, self.run.before.completed_s)


@dataclass(frozen=True)
class State:
    """The state of an application between two stages, at ``clock_s`` seconds.

    ``live`` holds, by model, the runs of the models that ran up to now. ``rest`` is the completed work of all others.
    """

    clock_s: float
    rest: tuple[Work, ...]
    live: Mapping[int, Live] = field(default_factory=dict)

    def work(self, model: int) -> Work:
        """Return the completed work of a model."""
        live = self.live.get(model)
        return self.rest[model] if live is None else live.run.work_at(live.at(self.clock_s), live.start_s)


@dataclass(frozen=True)
class Delay:
    """Seconds until all replicas of a plan are ready.

    ``retained`` replicas are ready earlier, after ``retained_s`` seconds (0: they are ready already).
    """

    seconds: float
    retained: int = 0
    retained_s: float = 0.0


@dataclass(frozen=True)
class SimulatedStage:
    """A simulated stage, which starts in ``state``."""

    state: State
    plans: Plans
    live: Mapping[int, Live]
    # Time at which the first model finishes. If no model can finish, the time of the last possible progress.
    end_s: float
    ends_by: int  # number of the model whose finish ends the stage, or -1 if no model can finish
    flops: float  # FLOPs that all models compute in the stage

    @property
    def seconds(self) -> float:
        """Return the duration of the stage, loading included."""
        return self.end_s - self.state.clock_s

    @property
    def throughput(self) -> float:
        """Return the FLOPs per second of the stage (T_E in SamuLLM)."""
        return self.flops / max(self.seconds, 1e-9)


class Stages:
    """Simulates stages on one sample. ``evaluated`` counts the simulated stages."""

    def __init__(self, runs: Runs) -> None:
        self.runs, self.load, self.space = runs, runs.load, runs.space
        self.evaluated = 0

    def start(self) -> State:
        """Return the state before the first stage."""
        return State(0.0, tuple(self.runs.fresh))

    def finished(self, state: State) -> frozenset[int]:
        """Return the models without remaining work."""

        def is_finished(model: int) -> bool:
            live = state.live.get(model)
            if live is not None:
                return live.run.is_complete and live.at(state.clock_s) >= live.run.seconds
            return not (state.rest[model].produced < self.load.models[model].output).any()

        return frozenset(m for m in range(len(self.load.models)) if is_finished(m))

    def ready(self, finished: Collection[int], chosen: Collection[int]) -> list[int]:
        """Return the unfinished models whose parents are finished or chosen, or in the same cycle as the model."""
        sources = set(finished) | set(chosen)
        order = [m for m in self.load.order if m not in finished]
        if not self.load.is_cyclic:
            return [m for m in order if self.load.parents[m] <= sources]
        return [m for m in order if self.load.parents[m] - sources <= self._cycle(m)]

    def _cycle(self, model: int) -> set[int]:
        """Return the models that use this model's outputs, even indirectly, or {} if it does not use its own."""
        found: set[int] = set()
        new = {model}
        while new:
            new = {m for m, parents in enumerate(self.load.parents) if parents & new} - found
            found |= new
        return found if model in found else set()

    def delay(self, state: State, plan: ModelPlan, wait_s: float = 0.0) -> Delay:
        """Return the delay of a plan whose replicas do not move. New ones start to load after ``wait_s`` seconds."""
        retained = self._retained(state, plan)
        if retained == plan.dp:
            return Delay(self.pending_s(state, plan))
        return Delay(wait_s + self.space.seconds(plan, "start"), retained)

    def pending_s(self, state: State, plan: ModelPlan) -> float:
        """Return the seconds until loading replicas of a plan's shape are ready, or 0 if none are loading."""
        live = state.live.get(plan.model)
        if live is None or not self.space.stays(live.run.plan, plan):
            return 0.0
        return max(0.0, live.start_s - state.clock_s)

    def stage(self, state: State, plans: Plans, delays: Mapping[int, Delay] | None = None) -> SimulatedStage:
        """Simulate the stage that runs these plans, at most one per model.

        ``delays`` has an entry for each model with replicas that load or move. None computes the entries by ``delay``.
        """
        self.evaluated += 1
        if delays is None:
            wait_s = self._wait_s(state, plans)
            changed = (p for p in plans if p.model not in state.live or state.live[p.model].run.plan != p)
            delays = {plan.model: self.delay(state, plan, wait_s) for plan in changed}
        live = self._stage_runs(state, plans, delays)
        ends = [(one.end_s, m) for m, one in live.items() if one.run.is_complete]
        end_s, by = min(ends) if ends else (max((one.end_s for one in live.values()), default=state.clock_s), -1)
        end_s = max(end_s, state.clock_s)
        flops = sum(
            one.run.flops(one.at(end_s)) - one.run.flops(one.at(state.clock_s) if m in state.live else 0.0)
            for m, one in live.items()
        )
        return SimulatedStage(state, plans, live, end_s, by, flops)

    def after(self, staged: SimulatedStage) -> State:
        """Return the state at the end of a stage."""
        rest = list(staged.state.rest)
        for m in staged.state.live.keys() - staged.live.keys():
            rest[m] = staged.state.work(m)
        for m, one in staged.live.items():
            rest[m] = one.run.before
        return State(staged.end_s, tuple(rest), dict(staged.live))

    def _wait_s(self, state: State, plans: Plans) -> float:
        """Return the seconds until stopping engines have left GPUs that new replicas need."""
        retained = {plan.model: self._retained(state, plan) for plan in plans}
        started = [live.run.plan for live in state.live.values() if live.start_s <= state.clock_s]
        stopping = [plan for plan in started if plan.dp > retained.get(plan.model, 0)]
        longest_s = max(map(self.space.leave_s, stopping), default=0.0)
        if longest_s <= 0.0:
            return 0.0
        free = self.space.cluster.gpus - sum(live.run.plan.gpus for live in state.live.values())
        needed = sum((plan.dp - retained[plan.model]) * plan.tp * plan.pp for plan in plans)
        return longest_s if needed > free else 0.0

    def _retained(self, state: State, plan: ModelPlan) -> int:
        live = state.live.get(plan.model)
        return min(live.run.plan.dp, plan.dp) if live is not None and self.space.stays(live.run.plan, plan) else 0

    def _stage_runs(self, state: State, plans: Plans, delays: Mapping[int, Delay]) -> dict[int, Live]:
        """Return the runs of a stage by model. For a cycle of models, repeat the simulation until no run changes."""
        plan_of = {plan.model: plan for plan in plans}
        order = [m for m in self.load.order if m in plan_of]
        live: dict[int, Live] = {}
        for _ in range(_MAX_PASSES):
            before = {m: one.run.key for m, one in live.items()}
            for m in order:
                live[m] = self._live(state, plan_of[m], live, delays.get(m))
            if not self.load.is_cyclic or before == {m: one.run.key for m, one in live.items()}:
                return {m: live[m] for m in sorted(live)}
        raise InternalError(f"models that wait for one another did not converge in {_MAX_PASSES} passes")

    def _live(self, state: State, plan: ModelPlan, others: Mapping[int, Live], delay: Delay | None) -> Live:
        previous = state.live.get(plan.model)
        if previous is not None and previous.run.plan == plan and (delay is None or not delay.seconds):
            return self._continued(state, previous, others)
        delay = delay or Delay(0.0)
        ready_s = state.clock_s + delay.seconds
        if not delay.retained:
            return self._started(state, plan, state.work(plan.model), ready_s, others)
        first = replace(plan, dp=delay.retained)
        if previous is not None and not delay.retained_s and previous.run.plan == first:
            isolated = self._continued(state, previous, others)
        else:
            begin_s = state.clock_s + (delay.retained_s or self.pending_s(state, plan))
            isolated = self._started(state, first, state.work(plan.model), begin_s, others)
        return self._joined(state, plan, isolated, ready_s, others)

    def _started(self, state: State, plan: ModelPlan, work: Work, start_s: float, others: Mapping[int, Live]) -> Live:
        """Return a run whose tasks become ready as their parents in other models finish."""
        load = self.load.models[plan.model]
        child, parent = load.outer
        arrival_s = None
        if len(child):
            arrival_s = np.zeros(len(load))
            parent_model = self.load.model[parent]
            for other in self.load.parents[plan.model]:
                of_other = parent_model == other
                completed_s = others[other].completed_s() if other in others else state.work(other).completed_s
                finish_s = completed_s[self.load.position[parent[of_other]]]
                np.maximum.at(arrival_s, child[of_other], finish_s - start_s)
        return Live(self.runs.run(plan, work, arrival_s), start_s)

    def _continued(self, state: State, previous: Live, others: Mapping[int, Live]) -> Live:
        run = previous.run
        if previous.isolated is None:
            return self._started(state, run.plan, run.before, previous.start_s, others)
        isolated = self._continued(state, previous.isolated, others)
        return self._joined(state, run.plan, isolated, previous.joins_s, others)

    def _joined(
        self, state: State, plan: ModelPlan, isolated: Live, joins_s: float, others: Mapping[int, Live]
    ) -> Live:
        """Return a run whose replicas share the remaining work with further replicas that join at ``joins_s``."""
        if joins_s <= isolated.start_s:
            return self._started(state, plan, isolated.run.before, isolated.start_s, others)
        at_s = isolated.at(joins_s)
        rest = self._started(state, plan, isolated.run.work_at(at_s, isolated.start_s), joins_s, others)
        return Live(self.runs.joined(isolated.run, at_s, rest.run), isolated.start_s, isolated, joins_s)
