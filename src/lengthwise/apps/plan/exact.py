"""Optima of small instances, to say how far from them other plans are.

Two of them: the best schedule without preemption (a constraint programme), and the best of all staged plans of
SamuLLM's Definition 1 (every one is looked at).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lengthwise.apps.plan.beam import Planned
from lengthwise.apps.plan.choosers import gpus_of
from lengthwise.apps.plan.stages import Plans, Stages, State
from lengthwise.schema.app import ModelPlan
from lengthwise.schema.errors import InputError, MissingExtraError

TICKS_PER_S = 1000
MOST_STAGED = 200_000


@dataclass(frozen=True)
class Unpreempted:
    """The best schedule in which each model runs once, under one plan.

    Attributes:
        makespan_s: Of it.
        bound_s: No such schedule is shorter.
        starts_s: When each model starts to load, by plan.
        proved: Whether it is the optimum.
    """

    makespan_s: float
    bound_s: float
    starts_s: dict[ModelPlan, float]
    proved: bool


def best_unpreempted(stages: Stages, *, effort_s: float = 10.0) -> Unpreempted:
    """The best schedule in which each model loads and runs once, after all models that it takes outputs of.

    GPUs count, not where they lie: under islands of links it is a lower bound. Durations are simulated, loading
    included.

    Args:
        stages: Of a draw.
        effort_s: Of the solver, in its own deterministic seconds.

    Raises:
        MissingExtraError: There is no OR-tools.
        InputError: Models wait for one another, or GPUs are of several kinds.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise MissingExtraError("the exact solver", "exact") from error
    _require_simple(stages)
    model: Any = cp_model.CpModel()
    options = {m: _durations(stages, m) for m in stages.load.order if len(stages.load.models[m])}
    most = sum(max(ticks for _, ticks in some) for some in options.values())
    end: Any = model.new_int_var(0, most, "end")
    picks, bounds, intervals, demands = {}, {}, [], []
    for m, some in options.items():
        first, last = model.new_int_var(0, most, f"s{m}"), model.new_int_var(0, most, f"e{m}")
        bounds[m] = (first, last)
        for plan, ticks in some:
            taken = model.new_bool_var(str(plan))
            intervals.append(model.new_optional_interval_var(first, ticks, last, taken, str(plan)))
            demands.append(plan.gpus)
            picks[plan] = taken
        model.add_exactly_one(picks[plan] for plan, _ in some)
        model.add(last <= end)
    for m, (first, _) in bounds.items():
        for parent in stages.load.parents[m] & bounds.keys():
            model.add(first >= bounds[parent][1])
    model.add_cumulative(intervals, demands, stages.space.cluster.gpus)
    model.minimize(end)
    return _solved(cp_model, model, effort_s, picks, bounds)


def _solved(cp_model: Any, model: Any, effort_s: float, picks: Any, bounds: Any) -> Unpreempted:
    solver = cp_model.CpSolver()
    # One worker and no clock: the same instance gives the same answer on any machine.
    solver.parameters.num_workers, solver.parameters.random_seed = 1, 0
    solver.parameters.max_deterministic_time = effort_s
    code = solver.solve(model)
    if code not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise InputError(f"the solver must find a schedule within its effort of {effort_s} s; raise effort_s")
    starts = {
        p: solver.value(bounds[p.model][0]) / TICKS_PER_S for p, taken in picks.items() if solver.value(taken)
    }
    return Unpreempted(
        solver.objective_value / TICKS_PER_S,
        solver.best_objective_bound / TICKS_PER_S,
        starts,
        code == cp_model.OPTIMAL,
    )


def _require_simple(stages: Stages) -> None:
    kinds = {machine.gpu.name for machine in stages.space.cluster.machines}
    if stages.load.cyclic or len(kinds) > 1:
        raise InputError(
            "the exact solver takes models without cycles on GPUs of one kind; "
            f"here {'models wait for one another' if stages.load.cyclic else f'there are {sorted(kinds)}'}"
        )


def _durations(stages: Stages, model: int) -> list[tuple[ModelPlan, int]]:
    """(plan, ticks of loading and running with all inputs there), without plans that another beats."""
    found: list[tuple[ModelPlan, int]] = []
    for plan in stages.space.plans(model):
        run = stages.runs.run(plan, stages.runs.fresh(model))
        ticks = round((stages.space.seconds(plan, "start") + run.seconds) * TICKS_PER_S)
        if all(ticks < other for _, other in found):
            found.append((plan, ticks))
    return found


@dataclass(frozen=True)
class Best:
    """The best staged plan, and how many stages were simulated for it."""

    planned: Planned
    makespan_s: float
    looked: int


def best_staged(stages: Stages, *, most: int = MOST_STAGED) -> Best:
    """The best of all staged plans (Definition 1): every valid set of models and plans, stage after stage.

    A stage ends with the first model that finishes. Only for tiny instances.

    Args:
        stages: Of a draw.
        most: Stages that may be simulated.

    Raises:
        InputError: There are more.
    """
    best: list[Any] = [math.inf, (), 0]
    _seek(stages, stages.start(), (), best, most)
    return Best(best[1], best[0], best[2])


def _seek(stages: Stages, state: State, path: Planned, best: list[Any], most: int) -> None:
    if len(stages.finished(state)) == len(stages.load.models):
        best[:2] = [state.clock_s, path]
        return
    found = []
    for plans in _valid(stages, state):
        staged = stages.stage(state, plans)
        best[2] += 1
        if best[2] > most:
            raise InputError(f"an instance must have at most {most} stages to look at all; this one has more")
        if staged.ends_by >= 0 and staged.end_s < best[0]:
            found.append((-staged.throughput, plans, staged))
    for _, plans, staged in sorted(found, key=lambda one: one[:2]):
        if staged.end_s < best[0]:
            _seek(stages, stages.after(staged), (*path, plans), best, most)


def _valid(stages: Stages, state: State) -> Iterator[Plans]:
    """Every set of plans that may be a stage."""
    done = stages.finished(state)
    left = [m for m in stages.load.order if m not in done]
    for many in range(1, len(left) + 1):
        for some in itertools.combinations(left, many):
            if set(some) <= set(stages.ready(done, some)):
                for plans in itertools.product(*(stages.space.plans(m) for m in some)):
                    if gpus_of(plans) <= stages.space.cluster.gpus and stages.space.fits(plans):
                        yield tuple(sorted(plans))
