"""One model under one plan over the tasks that it has left: simulated once, asked often.

Times of a run are counted from when its replicas are ready. It is a pure function of the plan, of what had been
produced before, and of when tasks come, so it is kept under these and used wherever they come again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np

from lengthwise import engine
from lengthwise.apps.plan.load import Load, ModelLoad
from lengthwise.apps.plan.space import Space
from lengthwise.schema.app import ModelPlan
from lengthwise.schema.app_tasks import Flags, Floats, Ints
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
        ended_s: [k] when, on the clock of the application; infinite where it has not.
    """

    key: Hashable
    produced: Ints
    ended_s: Floats


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
        whole: Whether all that was left is in it: no task waits for somebody who does not run.
    """

    plan: ModelPlan
    load: ModelLoad
    before: Work
    key: Hashable
    first_s: Floats
    finish_s: Floats
    whole: bool

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
        ended_s = np.where(self.finish_s <= at_s, start_s + self.finish_s, self.before.ended_s)
        return Work((self.key, float(at_s)), self.produced(at_s), ended_s)

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
        quick: Whether a model that goes on under another plan is read off the run of that plan from the very start:
            its rest is what that run has left after as much progress. Exact enough to compare plans by, and nothing
            is simulated.
        known: Runs of the same draw that are known already; what has nothing behind it is simulated there, for both.

    Attributes:
        simulated_requests: So far.
        simulated_runs: That these were in.
        clock: Seconds; None: nobody wants to know.
        took_s: What each run took to simulate, by that clock.
        asked: Keys of the runs that were asked for; whoever wants to know empties it.
    """

    def __init__(self, load: Load, space: Space, *, quick: bool = False, known: Runs | None = None) -> None:
        self.load, self.space, self.quick = load, space, quick
        self.made: dict[Hashable, Run] = dict(known.made) if known else {}
        self._known = known
        self._fresh = [Work("fresh", m.fresh, m.never) for m in load.models]
        self._held = sum(len(run.load) for run in self.made.values())
        self.simulated_requests = self.simulated_runs = 0
        self.clock: Callable[[], float] | None = None
        self.took_s: dict[Hashable, float] = {}
        self.asked: set[Hashable] = set()

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
            self.asked.add(key)
        if key not in self.made:
            started_s = self.clock() if self.clock is not None else 0.0
            viewed = self.quick and came is None and before.key != "fresh"
            run = self._viewed(plan, before, key) if viewed else self._made(plan, before, arrival_s, key)
            self._keep(run)
            if self.clock is not None:
                self.took_s[key] = self.clock() - started_s
        return self.made[key]

    def joined(self, first: Run, at_s: float, rest: Run) -> Run:
        """One run of two: the first goes on until its own ``at_s``, when the other replicas of the rest join it."""
        key = ("joined", first.key, at_s, rest.key)
        if key not in self.made:
            begun, ended = first.first_s <= at_s, first.finish_s <= at_s
            first_s = np.where(begun, first.first_s, at_s + rest.first_s)
            finish_s = np.where(ended, first.finish_s, at_s + rest.finish_s)
            self._keep(Run(rest.plan, first.load, first.before, key, first_s, finish_s, rest.whole))
        return self.made[key]

    def _keep(self, run: Run) -> None:
        self.made[run.key] = run
        self._held += len(run.load)
        while self._held > MOST_HELD_TASKS and len(self.made) > 1:
            self._held -= len(self.made.pop(next(iter(self.made))).load)

    def _viewed(self, plan: ModelPlan, before: Work, key: Hashable) -> Run:
        whole = self.run(plan, self._fresh[plan.model])
        behind_s = whole.when(float(whole.load.work(before.produced).sum()))
        left = before.produced < whole.load.output
        finish_s = np.where(left, np.maximum(whole.finish_s - behind_s, 1e-6), np.inf)
        first_s = np.where(left, np.clip(whole.first_s - behind_s, 0.0, finish_s), np.inf)
        return Run(plan, whole.load, before, key, first_s, finish_s, whole=True)

    def _made(self, plan: ModelPlan, before: Work, arrival_s: Floats | None, key: Hashable) -> Run:
        load = self.load.models[plan.model]
        left = before.produced < load.output
        come = np.zeros(len(load)) if arrival_s is None else _passed_on(load, arrival_s, left)
        inside = np.flatnonzero(left & np.isfinite(come))
        first_s, finish_s = load.never.copy(), load.never.copy()
        if len(inside):
            first_s[inside], finish_s[inside] = self._simulated(plan, before, come, inside)
        return Run(plan, load, before, key, first_s, finish_s, whole=len(inside) == int(left.sum()))

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
        requests = Workload(
            arrival_s, load.prompt[mine] + produced, load.output[mine] - produced, **after or {}
        )
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
