"""A look ahead over stages, and a plan bettered where it can be: "lengthwise".

Plans come from Algorithm 1, the heuristics, lists, and a beam over stages whose next steps are what all of these would
do. The best of them is then changed a stage at a time, as long as it ends sooner. What is looked at is counted, not
timed, so that the same input gives the same plan.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lengthwise.apps.plan.evaluate import play, spare_plans
from lengthwise.apps.plan.stages import Plans, Staged, Stages, State
from lengthwise.schema.app import ModelPlan
from lengthwise.schema.errors import InputError, InternalError, MissingExtraError

Chooser = Callable[[Stages, State], Plans]


def built(stages: Stages, choose: Chooser) -> list[Staged]:
    """All stages of an application, as chosen one after another.

    Raises:
        InternalError: A stage moved nothing.
    """
    made: list[Staged] = []
    state = stages.start()
    while len(stages.finished(state)) < len(stages.load.models):
        staged = stages.stage(state, choose(stages, state))
        if not staged.plans or (staged.flops <= 0 and staged.ends_by < 0):
            raise InternalError(f"stage {len(made)} was chosen to run {staged.plans}, which moves nothing")
        made.append(staged)
        state = stages.after(staged)
    return made


def kept_plans(stages: Stages, state: State, *, is_retained: bool) -> Plans:
    """Who runs and has something left to do, where he is kept: without preemption, under the same plan."""
    if not is_retained:
        return ()
    done = stages.finished(state)
    live = (one for one in state.live.values() if one.run.plan.model not in done)
    return tuple(one.run.plan for one in live if one.run.complete or one.at(state.clock_s) < one.run.seconds)


def gets_on(stages: Stages, state: State, plans: Plans, model: int) -> bool:
    """Whether a model has something to do in a stage: nobody who does not run stands before all of it."""
    live = stages.stage(state, plans).live[model]
    return live.run.seconds > max(0.0, state.clock_s - live.start_s)


def gpus_of(plans: Plans) -> int:
    """Of all plans."""
    return sum(plan.gpus for plan in plans)


@dataclass(frozen=True)
class Greedy:
    """Algorithm 1: a stage grows by the plan that adds the most throughput a GPU, until none adds any."""

    is_retained: bool = False

    def __call__(self, stages: Stages, state: State) -> Plans:
        """The plans of the next stage."""
        chosen = kept_plans(stages, state, is_retained=self.is_retained)
        fixed = {plan.model for plan in chosen}
        now = stages.stage(state, chosen).throughput if chosen else 0.0
        while True:
            best: tuple[float, float, Plans] | None = None
            for plans in _increments(stages, state, chosen, fixed):
                then = stages.stage(state, plans).throughput
                gain = (then - now) / (gpus_of(plans) - gpus_of(chosen))
                if best is None or gain > best[0]:
                    best = (gain, then, plans)
            if best is None or (best[0] < 0 and chosen):
                return chosen
            _, now, chosen = best


def _increments(stages: Stages, state: State, chosen: Plans, fixed: set[int]) -> Iterator[Plans]:
    """Stages of more GPUs: with one model more, or with a larger plan for one (lines 8 to 16)."""
    of = {plan.model: plan for plan in chosen}
    for model in stages.ready(stages.finished(state), of):
        if model in fixed:
            continue
        others = tuple(p for p in chosen if p.model != model)
        for plan in stages.space.plans(model):
            larger = model not in of or plan.gpus > of[model].gpus
            if larger and stages.space.fits((*others, plan)):
                yield tuple(sorted((*others, plan)))


MOST_SPLITS = 400
"""Ways to split GPUs evenly that are compared; the first of many."""


@dataclass(frozen=True)
class MaxHeuristic:
    """All GPUs to one model after another, under the plan with which it is done soonest."""

    is_retained: bool = False

    def __call__(self, stages: Stages, state: State) -> Plans:
        """The plan of the next stage."""
        if kept := kept_plans(stages, state, is_retained=True):
            return kept
        done = stages.finished(state)
        ready = stages.ready(done, ())
        able = (m for m in ready if gets_on(stages, state, stages.space.plans(m)[:1], m))
        model = next(able, ready[0])
        most = max(plan.gpus for plan in stages.space.plans(model))
        plans = [plan for plan in stages.space.plans(model) if plan.gpus == most]
        return (min(plans, key=lambda plan: (stages.stage(state, (plan,)).end_s, plan)),)


@dataclass(frozen=True)
class MinHeuristic:
    """As many models as there is room for, the GPUs split evenly; of the ways to do so the one of most throughput."""

    is_retained: bool = False

    def __call__(self, stages: Stages, state: State) -> Plans:
        """The plans of the next stage."""
        kept = kept_plans(stages, state, is_retained=self.is_retained)
        fixed = {plan.model for plan in kept}
        models = [m for m in self._all_ready(stages, state) if m not in fixed]
        for many in range(len(models), 0, -1):
            ways = (way for some in itertools.combinations(models, many) for way in _uniform(stages, state, kept, some))
            found = [stages.stage(state, plans) for plans in itertools.islice(ways, MOST_SPLITS)]
            if found:
                return max(found, key=lambda staged: staged.throughput).plans
        return kept

    def _all_ready(self, stages: Stages, state: State) -> list[int]:
        """Who may run in one stage with all others."""
        done = stages.finished(state)
        return stages.ready(done, set(range(len(stages.load.models))) - done)


def _uniform(stages: Stages, state: State, retained: Plans, models: Sequence[int]) -> Iterator[Plans]:
    """Ways to split the GPUs evenly: each model has as many as another, or one more."""
    if not _closed(stages, state, retained, models):
        return
    free = stages.space.cluster.gpus - gpus_of(retained)
    least = [stages.space.plans(m)[0].gpus for m in models]
    for shares in _shares(least, free):
        plans = _within(stages, state, retained, models, shares)
        if plans is not None:
            yield plans


def _shares(least: Sequence[int], free: int) -> Iterator[list[int]]:
    """Ways to give away all GPUs so that whoever has more than another needs more, or one more was left over."""
    shares, left = list(least), free - sum(least)
    low = [i for i, n in enumerate(shares) if n == min(shares)]
    while left >= len(low):
        shares = [n + (i in low) for i, n in enumerate(shares)]
        left -= len(low)
        low = [i for i, n in enumerate(shares) if n == min(shares)]
    for lucky in itertools.combinations(low, max(left, 0)) if left >= 0 else ():
        yield [n + (i in lucky) for i, n in enumerate(shares)]


def _closed(stages: Stages, state: State, retained: Plans, models: Sequence[int]) -> bool:
    """Whether all that these models wait for has finished or runs beside them."""
    beside = {*models, *(plan.model for plan in retained)}
    return set(models) <= set(stages.ready(stages.finished(state), beside))


def _within(
    stages: Stages, state: State, retained: Plans, models: Sequence[int], shares: Sequence[int]
) -> Plans | None:
    """For each model the plan within its share with which it is done soonest; fewer GPUs where there is no room."""
    for model, share in sorted(zip(models, shares, strict=True), key=lambda one: -one[1]):
        plans = [p for p in stages.space.plans(model) if p.gpus <= share]
        alone = {p: stages.stage(state, (p,)).end_s for p in plans if p.gpus == max(q.gpus for q in plans)}
        ranked = sorted(alone, key=lambda p: (alone[p], p)) + sorted(plans, key=lambda p: -p.gpus)
        fitting = next((p for p in ranked if stages.space.fits((*retained, p))), None)
        if fitting is None:
            return None
        retained = (*retained, fitting)
    return tuple(sorted(retained))


@dataclass(frozen=True)
class Listed:
    """Who runs goes on; who has most left goes next, on so many GPUs; what is then still free is given away greedily.

    Attributes:
        gpus: A model gets, if it has a plan of so many; else the next fewer, or its fewest.
        grows: Whether what is left over is given to those who gain by it (Algorithm 1 from there on).
    """

    gpus: int
    grows: bool

    def __call__(self, stages: Stages, state: State) -> Plans:
        """The plans of the next stage."""
        chosen = kept_plans(stages, state, is_retained=True)
        done = stages.finished(state)
        while True:
            there = {plan.model for plan in chosen}
            left = [m for m in stages.ready(done, there) if m not in there]
            plans = [self._plan(stages, state, m) for m in left]
            fitting = [(s, p) for s, p in plans if stages.space.fits((*chosen, p))]
            fitting = [(s, p) for s, p in fitting if gets_on(stages, state, (*chosen, p), p.model)]
            if not fitting:
                break
            chosen = (*chosen, max(fitting, key=lambda one: (one[0], one[1]))[1])
        chosen = tuple(sorted(chosen))
        if not self.grows or {p.model for p in chosen} | done < set(range(len(stages.load.models))):
            return chosen
        return _prefer_early(stages, state, chosen)

    def _plan(self, stages: Stages, state: State, model: int) -> tuple[float, ModelPlan]:
        """(seconds that it takes, the plan)."""
        plans = stages.space.plans(model)
        most = max((p.gpus for p in plans if p.gpus <= self.gpus), default=plans[0].gpus)
        ends = [(stages.stage(state, (p,)).seconds * p.gpus, p) for p in plans if p.gpus == most]
        return min(ends)


def _prefer_early(stages: Stages, state: State, chosen: Plans) -> Plans:
    """Free GPUs to whoever ends last, as long as that makes the last end sooner."""
    last_s = _last_s(stages, state, chosen)
    while True:
        ends = stages.stage(state, chosen).live
        slow = max(ends, key=lambda m: ends[m].end_s)
        others = tuple(p for p in chosen if p.model != slow)
        ways = [tuple(sorted((*others, p))) for p in stages.space.plans(slow)]
        found = [(_last_s(stages, state, plans), plans) for plans in ways if stages.space.fits(plans)]
        best = min(found, default=(last_s, chosen))
        if best[0] >= last_s:
            return chosen
        last_s, chosen = best


def _last_s(stages: Stages, state: State, plans: Plans) -> float:
    return max(one.end_s for one in stages.stage(state, plans).live.values())


Planned = tuple[Plans, ...]

METHODS: dict[str, Chooser] = {
    "samullm": Greedy(),
    "samullm_no_preemption": Greedy(is_retained=True),
    "max": MaxHeuristic(),
    "max_no_preemption": MaxHeuristic(is_retained=True),
    "min": MinHeuristic(),
    "min_no_preemption": MinHeuristic(is_retained=True),
}
"""SamuLLM's and the heuristics, by name."""

STEPS: tuple[Chooser, ...] = (
    *(Listed(gpus, grows) for gpus in (1, 2, 4, 8) for grows in (False, True)),
    MinHeuristic(),
)


@dataclass(frozen=True)
class Effort:
    """How long to look.

    Attributes:
        width: Of the beam.
        beam_tasks: Tasks, times stages, that the beam may look at.
        better_tasks: Tasks, times stages, that the improvement may look at.
        share: Of the best makespan that is known, as counted seconds of search, at most so much is spent.
    """

    width: int = 3
    beam_tasks: float = 4e6
    better_tasks: float = 4e6
    share: float = 0.005


def planned(made: Sequence[Staged]) -> Planned:
    """The plans of stages."""
    return tuple(staged.plans for staged in made)


def beam(stages: Stages, effort: Effort, has_left: Callable[[], bool] = lambda: True) -> list[Planned]:
    """The plans that a beam over stages ends with, the soonest first; none where the effort does not reach the end."""
    bound = _Bound(stages)
    front: list[tuple[float, State, Planned]] = [(0.0, stages.start(), ())]
    found: list[tuple[float, Planned]] = []
    left = effort.beam_tasks / max(1, sum(len(m) for m in stages.load.models))
    while front and left > 0 and has_left():
        steps: dict[tuple[float, Planned], tuple[float, State, Planned]] = {}
        for _, state, path in front:
            for plans in _next(stages, state):
                left -= 1
                then = stages.after(stages.stage(state, plans))
                if stages.finished(then) == frozenset(range(len(stages.load.models))):
                    found.append((then.clock_s, (*path, plans)))
                elif then.clock_s > state.clock_s or len(path) < len(stages.load.models):
                    score = then.clock_s + bound.seconds(then)
                    steps[score, (*path, plans)] = (score, then, (*path, plans))
        best_s = min((end_s for end_s, _ in found), default=float("inf"))
        ranked = sorted((key for key in steps if key[0] < best_s), key=lambda key: (key[0], len(key[1]), key[1]))
        front = [steps[key] for key in ranked[: effort.width]]
    return [path for _, path in sorted(found)]


def _next(stages: Stages, state: State) -> list[Plans]:
    """What the choosers would do now, each once; nothing that moves nothing."""
    options = dict.fromkeys(choose(stages, state) for choose in STEPS)
    return [plans for plans in options if plans and stages.stage(state, plans).flops > 0]


class _Bound:
    """Seconds that what is left takes at least: all GPUs at work at each model's best FLOPs a second and GPU."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._total = [float(m.work(m.output).sum()) for m in stages.load.models]
        self._rate = [self._best(m) if total else 1.0 for m, total in enumerate(self._total)]

    def _best(self, model: int) -> float:
        """FLOPs a second and GPU, at best over the plans of the fewest and of all sizes of replicas."""
        runs, plans = self._stages.runs, self._stages.space.plans(model)
        fresh = runs.fresh(model)
        singles = [plan for plan in plans if plan.dp == 1]
        return max(self._total[model] / max(runs.run(p, fresh).seconds, 1e-9) / p.gpus for p in singles)

    def seconds(self, state: State) -> float:
        """For all that is left."""
        gpus = self._stages.space.cluster.gpus
        left = 0.0
        for m, total in enumerate(self._total):
            load = self._stages.load.models[m]
            left += (total - float(load.work(state.work(m).produced).sum())) / self._rate[m]
        return left / gpus


def bettered(stages: Stages, plan: Planned, effort: Effort, has_left: Callable[[], bool] = lambda: True) -> Planned:
    """A plan that ends no later: changed one stage at a time as long as that helps."""
    models = len(stages.load.models)
    left = int(effort.better_tasks / max(1, sum(len(m) for m in stages.load.models)))

    def end_s(one: Planned) -> float:
        try:
            return play(stages, one, spare_plans(stages.space, models, one), places=False).end_s
        except InternalError:  # a change under which models wait for one another for ever
            return float("inf")

    best_s, moved = end_s(plan), True
    tried = {plan}
    while moved and left > 0:
        moved = False
        for other in _changed(stages, plan):
            if other in tried or left <= 0 or not has_left():
                continue
            tried.add(other)
            left -= len(other)
            if (then_s := end_s(other)) < best_s - 1e-9:
                plan, best_s, moved = other, then_s, True
                break
    return plan


def _changed(stages: Stages, plan: Planned) -> Iterator[Planned]:
    """Plans beside a plan: a model has another plan throughout, or from one stage on, or joins or leaves a stage."""
    for model, mine in sorted(_plans_of(plan).items()):
        for new in stages.space.plans(model):
            if new not in mine or len(mine) > 1:
                yield from _if_fits(stages, plan, _swapped(plan, mine, new, 0))
    for k in range(len(plan) - 1, -1, -1):
        for old in plan[k]:
            for new in stages.space.plans(old.model):
                if new != old:
                    yield from _if_fits(stages, plan, _swapped(plan, {old}, new, k))
            if len(plan[k]) > 1 and any(p.model == old.model for later in plan[k + 1 :] for p in later):
                yield _without(plan, k, old)
        yield from _joined(stages, plan, k)


def _swapped(plan: Planned, old: Collection[ModelPlan], new: ModelPlan, first: int) -> Planned:
    """A plan with the new one for the old ones, from a stage on."""
    return tuple(tuple(sorted(new if k >= first and p in old else p for p in plans)) for k, plans in enumerate(plan))


def _if_fits(stages: Stages, plan: Planned, other: Planned) -> Iterator[Planned]:
    if other != plan and all(stages.space.fits(plans) for plans in other):
        yield other


def _without(plan: Planned, k: int, old: ModelPlan) -> Planned:
    return (*plan[:k], tuple(p for p in plan[k] if p != old), *plan[k + 1 :])


def _joined(stages: Stages, plan: Planned, k: int) -> Iterator[Planned]:
    """Models of later stages that there is room for in this one already."""
    here = {p.model for p in plan[k]}
    for p in dict.fromkeys(p for later in plan[k + 1 :] for p in later):
        if p.model not in here and stages.space.fits((*plan[k], p)):
            yield (*plan[:k], tuple(sorted((*plan[k], p))), *plan[k + 1 :])


def _plans_of(plan: Planned) -> Mapping[int, set[ModelPlan]]:
    found: dict[int, set[ModelPlan]] = {}
    for plans in plan:
        for p in plans:
            found.setdefault(p.model, set()).add(p)
    return found


def rolled_out(stages: Stages, choose: Chooser) -> Planned:
    """The plan that a way of choosing makes."""
    return planned(built(stages, choose))


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
    return _solution(cp_model, model, effort_s, picks, bounds)


def _solution(cp_model: Any, model: Any, effort_s: float, picks: Any, bounds: Any) -> Unpreempted:
    solver = cp_model.CpSolver()
    # One worker and no clock: the same instance gives the same answer on any machine.
    solver.parameters.num_workers, solver.parameters.random_seed = 1, 0
    solver.parameters.max_deterministic_time = effort_s
    code = solver.solve(model)
    if code not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise InputError(f"the solver must find a schedule within its effort of {effort_s} s; raise effort_s")
    starts = {p: solver.value(bounds[p.model][0]) / TICKS_PER_S for p, taken in picks.items() if solver.value(taken)}
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
    evaluated: int


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
