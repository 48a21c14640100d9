"""Optimal plans of small applications, with which tests and benchmarks compare the plans of a search."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lengthwise.apps.plan.methods import Planned
from lengthwise.apps.plan.stages import Plans, Stages, State
from lengthwise.schema.app import ModelPlan
from lengthwise.schema.errors import InputError

_TICKS_PER_S = 1000


@dataclass(frozen=True)
class Unpreempted:
    """The best schedule found in which each model runs once, under one plan; ``proved``: it is optimal.

    ``bound_s`` is a lower bound of all such makespans. ``starts_s`` is when each model starts to load, by its plan.
    """

    makespan_s: float
    bound_s: float
    starts_s: dict[ModelPlan, float]
    proved: bool


def best_unpreempted(stages: Stages, *, effort_s: float = 10.0) -> Unpreempted:
    """Return the best schedule in which each model loads and runs once, after all models whose outputs it takes.

    GPUs are only counted and not placed; with islands of links, the result is therefore a lower bound. Durations are
    simulated and include loading. ``effort_s`` limits the solver's work, in its own deterministic seconds.

    Raises:
        InputError: Models wait for one another, or GPUs are of several kinds.
    """
    from ortools.sat.python import cp_model

    kinds = {machine.gpu.name for machine in stages.space.cluster.machines}
    if stages.load.is_cyclic or len(kinds) > 1:
        problem = "models wait for one another" if stages.load.is_cyclic else f"there are {sorted(kinds)}"
        raise InputError(f"the exact solver takes models without cycles on GPUs of one kind; {problem}")
    model: Any = cp_model.CpModel()
    options = {m: durations(stages, m) for m in stages.load.order if len(stages.load.models[m])}
    horizon = sum(max(ticks for _, ticks in plans) for plans in options.values())
    end: Any = model.new_int_var(0, horizon, "end")
    picks, bounds, intervals, demands = {}, {}, [], []
    for m, plans in options.items():
        first, last = model.new_int_var(0, horizon, f"s{m}"), model.new_int_var(0, horizon, f"e{m}")
        bounds[m] = (first, last)
        for plan, ticks in plans:
            picks[plan] = model.new_bool_var(str(plan))
            intervals.append(model.new_optional_interval_var(first, ticks, last, picks[plan], str(plan)))
            demands.append(plan.gpus)
        model.add_exactly_one(picks[plan] for plan, _ in plans)
        model.add(last <= end)
    for m, (first, _) in bounds.items():
        for parent in stages.load.parents[m] & bounds.keys():
            model.add(first >= bounds[parent][1])
    model.add_cumulative(intervals, demands, stages.space.cluster.gpus)
    model.minimize(end)
    solver = cp_model.CpSolver()
    solver.parameters.catch_sigint_signal = False  # else it leaves the process without a handler, and Ctrl-C kills it
    # One worker and no wall clock: equal instances give equal answers on any machine.
    solver.parameters.num_workers, solver.parameters.random_seed = 1, 0
    solver.parameters.max_deterministic_time = effort_s
    code = solver.solve(model)
    if code not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise InputError(f"the solver must find a schedule within its effort of {effort_s} s; raise effort_s")
    return Unpreempted(
        solver.objective_value / _TICKS_PER_S,
        solver.best_objective_bound / _TICKS_PER_S,
        {p: solver.value(bounds[p.model][0]) / _TICKS_PER_S for p, taken in picks.items() if solver.value(taken)},
        code == cp_model.OPTIMAL,
    )


def durations(stages: Stages, model: int) -> list[tuple[ModelPlan, int]]:
    """Return (plan, milliseconds to load and run on complete inputs) of plans that are faster than smaller ones."""
    found: list[tuple[ModelPlan, int]] = []
    for plan in stages.space.plans(model):
        run = stages.runs.run(plan, stages.runs.fresh[model])
        ticks = round((stages.space.seconds(plan, "start") + run.seconds) * _TICKS_PER_S)
        if all(ticks < other for _, other in found):
            found.append((plan, ticks))
    return found


@dataclass(frozen=True)
class Best:
    """The best staged plan, its makespan, and the number of stages that were simulated to find it."""

    planned: Planned
    makespan_s: float
    evaluated: int


def best_staged(stages: Stages, *, max_stages: int = 200_000) -> Best:
    """Return the best of all staged plans (Definition 1), from a search over all valid stages, one after another.

    A stage ends when its first model finishes. The search is feasible for tiny instances only: InputError is raised if
    more than ``max_stages`` stages must be simulated.
    """
    best, evaluated = Best((), math.inf, 0), 0

    def search(state: State, path: Planned) -> None:
        nonlocal best, evaluated
        if len(stages.finished(state)) == len(stages.load.models):
            best = Best(path, state.clock_s, evaluated)
            return
        found = []
        for plans in _valid_stages(stages, state):
            staged = stages.stage(state, plans)
            evaluated += 1
            if evaluated > max_stages:
                raise InputError(
                    f"an instance must have at most {max_stages} stages for a complete search; this one has more"
                )
            if staged.ends_by >= 0 and staged.end_s < best.makespan_s:
                found.append((-staged.throughput, plans, staged))
        for _, plans, staged in sorted(found, key=lambda one: one[:2]):
            if staged.end_s < best.makespan_s:
                search(stages.after(staged), (*path, plans))

    search(stages.start(), ())
    return Best(best.planned, best.makespan_s, evaluated)


def _valid_stages(stages: Stages, state: State) -> Iterator[Plans]:
    """Yield every set of plans that can be the next stage."""
    finished = stages.finished(state)
    left = [m for m in stages.load.order if m not in finished]
    for count in range(1, len(left) + 1):
        for models in itertools.combinations(left, count):
            if set(models) <= set(stages.ready(finished, models)):
                for plans in itertools.product(*(stages.space.plans(m) for m in models)):
                    if stages.space.fits(plans):
                        yield tuple(sorted(plans))
