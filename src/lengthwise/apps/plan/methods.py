"""Planning methods: SamuLLM's Algorithm 1, heuristics, and a beam search with local improvement.

The beam search extends plans by the stages that the choosers in ``STEPS`` select. ``improve`` then changes the best
plan, one stage at a time while its makespan decreases. Limits count stages, not seconds: equal inputs give equal plans.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from lengthwise.apps.plan.evaluate import simulate_plan, spare_plans
from lengthwise.apps.plan.stages import Plans, SimulatedStage, Stages, State
from lengthwise.schema.app import ModelPlan
from lengthwise.schema.errors import InternalError

Chooser = Callable[[Stages, State], Plans]  # returns the plans of the next stage
Planned = tuple[Plans, ...]


def chosen_stages(stages: Stages, choose: Chooser) -> list[SimulatedStage]:
    """Simulate the stages that ``choose`` selects until all models finish. Raises InternalError without progress."""
    staged: list[SimulatedStage] = []
    state = stages.start()
    while len(stages.finished(state)) < len(stages.load.models):
        one = stages.stage(state, choose(stages, state))
        if not one.plans or (one.flops <= 0 and one.ends_by < 0):
            raise InternalError(f"stage {len(staged)} runs {one.plans}, which makes no progress")
        staged.append(one)
        state = stages.after(one)
    return staged


def chosen_plan(stages: Stages, choose: Chooser) -> Planned:
    """Return the plan that results if ``choose`` selects one stage after another."""
    return tuple(staged.plans for staged in chosen_stages(stages, choose))


def _running_plans(stages: Stages, state: State) -> Plans:
    finished = stages.finished(state)
    live = (one for m, one in state.live.items() if m not in finished)
    return tuple(one.run.plan for one in live if one.run.is_complete or one.at(state.clock_s) < one.run.seconds)


def _makes_progress(stages: Stages, state: State, plans: Plans, model: int) -> bool:
    """Return whether a model can work in a stage. It cannot if all its tasks wait for models that do not run."""
    live = stages.stage(state, plans).live[model]
    return live.run.seconds > max(0.0, state.clock_s - live.start_s)


def _gpus(plans: Plans) -> int:
    return sum(plan.gpus for plan in plans)


def greedy(stages: Stages, state: State, *, no_preemption: bool = False) -> Plans:
    """Choose the plans of a stage by Algorithm 1 of SamuLLM.

    The algorithm adds a model or enlarges a plan, whichever adds the most throughput per GPU, until every change would
    reduce the throughput. With ``no_preemption``, running models retain their plans.
    """
    chosen = _running_plans(stages, state) if no_preemption else ()
    fixed = {plan.model for plan in chosen}
    throughput = stages.stage(state, chosen).throughput if chosen else 0.0
    while True:
        best: tuple[float, float, Plans] | None = None
        for plans in _extensions(stages, state, chosen, fixed):
            new = stages.stage(state, plans).throughput
            gain = (new - throughput) / (_gpus(plans) - _gpus(chosen))
            if best is None or gain > best[0]:
                best = (gain, new, plans)
        if best is None or (best[0] < 0 and chosen):
            return chosen
        _, throughput, chosen = best


def _extensions(stages: Stages, state: State, chosen: Plans, fixed: set[int]) -> Iterator[Plans]:
    """Yield stages with one more model, or with a larger plan of a chosen model (lines 8 to 16 of Algorithm 1)."""
    plan_of = {plan.model: plan for plan in chosen}
    for model in stages.ready(stages.finished(state), plan_of):
        if model in fixed:
            continue
        others = tuple(p for p in chosen if p.model != model)
        for plan in stages.space.plans(model):
            is_larger = model not in plan_of or plan.gpus > plan_of[model].gpus
            if is_larger and stages.space.fits((*others, plan)):
                yield tuple(sorted((*others, plan)))


def max_heuristic(stages: Stages, state: State) -> Plans:
    """Choose one model to run alone until it finishes, with its fastest plan of the most GPUs."""
    if running := _running_plans(stages, state):
        return running
    ready = stages.ready(stages.finished(state), ())
    able = (m for m in ready if _makes_progress(stages, state, stages.space.plans(m)[:1], m))
    plans = stages.space.plans(next(able, ready[0]))
    gpus = max(plan.gpus for plan in plans)
    largest = (plan for plan in plans if plan.gpus == gpus)
    return (min(largest, key=lambda plan: (stages.stage(state, (plan,)).end_s, plan)),)


_MAX_SPLITS = 400  # maximum number of even splits of the GPUs that are compared


def min_heuristic(stages: Stages, state: State, *, no_preemption: bool = False) -> Plans:
    """Split the GPUs evenly between as many models as fit. Of such splits, choose the one with the most throughput."""
    retained = _running_plans(stages, state) if no_preemption else ()
    fixed = {plan.model for plan in retained}
    finished = stages.finished(state)
    ready = stages.ready(finished, set(range(len(stages.load.models))) - finished)
    models = [m for m in ready if m not in fixed]
    for count in range(len(models), 0, -1):
        subsets = itertools.combinations(models, count)
        splits = (plans for subset in subsets for plans in _even_splits(stages, state, retained, subset))
        found = [stages.stage(state, plans) for plans in itertools.islice(splits, _MAX_SPLITS)]
        if found:
            return max(found, key=lambda staged: staged.throughput).plans
    return retained


def _even_splits(stages: Stages, state: State, retained: Plans, models: Sequence[int]) -> Iterator[Plans]:
    """Yield plans that split the free GPUs evenly between models, if all parents of the models have finished or run."""
    running = {*models, *(plan.model for plan in retained)}
    if not set(models) <= set(stages.ready(stages.finished(state), running)):
        return
    fewest = [stages.space.plans(m)[0].gpus for m in models]
    for shares in even_shares(fewest, stages.space.cluster.gpus - _gpus(retained)):
        plans = retained
        for model, share in sorted(zip(models, shares, strict=True), key=lambda one: -one[1]):
            options = [p for p in stages.space.plans(model) if p.gpus <= share]
            most = max((p.gpus for p in options), default=0)
            end_s = {p: stages.stage(state, (p,)).end_s for p in options if p.gpus == most}
            ranked = sorted(end_s, key=lambda p: (end_s[p], p)) + sorted(options, key=lambda p: -p.gpus)
            plan = next((p for p in ranked if stages.space.fits((*plans, p))), None)
            if plan is None:
                break
            plans = (*plans, plan)
        else:
            yield tuple(sorted(plans))


def even_shares(fewest: Sequence[int], free: int) -> Iterator[list[int]]:
    """Yield even splits of ``free`` GPUs. Shares differ by at most one GPU, unless a minimum (``fewest``) is larger."""
    shares, left = list(fewest), free - sum(fewest)
    low = [i for i, n in enumerate(shares) if n == min(shares)]
    while left >= len(low):
        shares = [n + (i in low) for i, n in enumerate(shares)]
        left -= len(low)
        low = [i for i, n in enumerate(shares) if n == min(shares)]
    if left >= 0:
        for extended in itertools.combinations(low, left):
            yield [n + (i in extended) for i, n in enumerate(shares)]


def list_schedule(stages: Stages, state: State, *, gpus: int, grows: bool) -> Plans:
    """Let running models continue, then start the models with the most remaining work (list scheduling).

    Args:
        gpus: Number of GPUs of each new plan. A model without such a plan gets the next smaller one, or its smallest.
        grows: Whether the model that finishes last gets more GPUs while this makes the end of the last model earlier.
    """

    def option(model: int) -> tuple[float, ModelPlan]:
        plans = stages.space.plans(model)
        size = max((p.gpus for p in plans if p.gpus <= gpus), default=plans[0].gpus)
        return min((stages.stage(state, (p,)).seconds * p.gpus, p) for p in plans if p.gpus == size)

    def last_s(plans: Plans) -> float:
        return max(one.end_s for one in stages.stage(state, plans).live.values())

    chosen = _running_plans(stages, state)
    finished = stages.finished(state)
    while True:
        models = {plan.model for plan in chosen}
        options = [option(m) for m in stages.ready(finished, models) if m not in models]
        fitting = [(s, p) for s, p in options if stages.space.fits((*chosen, p))]
        able = [(s, p) for s, p in fitting if _makes_progress(stages, state, (*chosen, p), p.model)]
        if not able:
            break
        chosen = (*chosen, max(able)[1])
    chosen = tuple(sorted(chosen))
    if not grows or {p.model for p in chosen} | finished < set(range(len(stages.load.models))):
        return chosen
    end_s = last_s(chosen)
    while True:
        live = stages.stage(state, chosen).live
        slowest = max(live, key=lambda m: live[m].end_s)
        others = tuple(p for p in chosen if p.model != slowest)
        candidates = [tuple(sorted((*others, p))) for p in stages.space.plans(slowest)]
        ends = [(last_s(plans), plans) for plans in candidates if stages.space.fits(plans)]
        best_s, best = min(ends, default=(end_s, chosen))
        if best_s >= end_s:
            return chosen
        end_s, chosen = best_s, best


METHODS: dict[str, Chooser] = {
    "samullm": greedy,
    "samullm_no_preemption": partial(greedy, no_preemption=True),
    "max": max_heuristic,
    "max_no_preemption": max_heuristic,
    "min": min_heuristic,
    "min_no_preemption": partial(min_heuristic, no_preemption=True),
}
"""SamuLLM's methods and heuristics by name."""

STEPS: tuple[Chooser, ...] = (
    *(partial(list_schedule, gpus=gpus, grows=grows) for gpus in (1, 2, 4, 8) for grows in (False, True)),
    min_heuristic,
)
"""Choosers whose stages the beam explores."""


@dataclass(frozen=True)
class Effort:
    """Limits of a search."""

    width: int = 3  # number of unfinished plans that the beam search extends at a time
    beam_tasks: float = 4e6  # limit of the beam search: the number of simulated stages times the number of tasks
    improve_tasks: float = 4e6  # the same limit of the local improvement
    # maximum seconds of the search, as ``SearchBudget`` counts them, as a share of the best known makespan
    share: float = 0.005


def beam(stages: Stages, effort: Effort, has_budget: Callable[[], bool] = lambda: True) -> list[Planned]:
    """Return the complete plans that a beam search finds within its effort, the shortest makespan first.

    The search extends the most promising unfinished plans by a stage at a time, while ``has_budget`` returns True.
    """
    models = len(stages.load.models)
    remaining_s = _bound(stages)
    front: list[tuple[float, State, Planned]] = [(0.0, stages.start(), ())]
    found: list[tuple[float, Planned]] = []
    left = effort.beam_tasks / max(1, sum(len(m) for m in stages.load.models))
    while front and left > 0 and has_budget():
        steps: dict[tuple[float, Planned], tuple[float, State, Planned]] = {}
        for _, state, path in front:
            options = dict.fromkeys(choose(stages, state) for choose in STEPS)
            for plans in [plans for plans in options if plans and stages.stage(state, plans).flops > 0]:
                left -= 1
                then, longer = stages.after(stages.stage(state, plans)), (*path, plans)
                if len(stages.finished(then)) == models:
                    found.append((then.clock_s, longer))
                elif then.clock_s > state.clock_s or len(path) < models:
                    score = then.clock_s + remaining_s(then)
                    steps[score, longer] = (score, then, longer)
        best_s = min((end_s for end_s, _ in found), default=math.inf)
        ranked = sorted((key for key in steps if key[0] < best_s), key=lambda key: (key[0], len(key[1]), key[1]))
        front = [steps[key] for key in ranked[: effort.width]]
    return [path for _, path in sorted(found)]


def _bound(stages: Stages) -> Callable[[State], float]:
    """Return a function that bounds a state's remaining seconds from below, at each model's best rate on all GPUs."""
    runs, loads = stages.runs, stages.load.models
    total = [float(load.work(load.output).sum()) for load in loads]
    rate = [1.0] * len(total)
    for m, flops in enumerate(total):
        if flops:
            singles = (p for p in stages.space.plans(m) if p.dp == 1)
            rate[m] = max(flops / max(runs.run(p, runs.fresh[m]).seconds, 1e-9) / p.gpus for p in singles)

    def remaining_s(state: State) -> float:
        done = [float(load.work(state.work(m).produced).sum()) for m, load in enumerate(loads)]
        gpu_s = sum((total[m] - done[m]) / rate[m] for m in range(len(loads)))
        return gpu_s / stages.space.cluster.gpus

    return remaining_s


def improve(stages: Stages, plan: Planned, effort: Effort, has_budget: Callable[[], bool] = lambda: True) -> Planned:
    """Change a plan one stage at a time while its makespan decreases, and return the result."""
    left = int(effort.improve_tasks / max(1, sum(len(m) for m in stages.load.models)))

    def end_s(one: Planned) -> float:
        try:
            return simulate_plan(stages, one, spare_plans(stages.space, one), places=False).end_s
        except InternalError:  # after the change, models wait for one another forever
            return math.inf

    best_s, is_improved = end_s(plan), True
    tried = {plan}
    while is_improved and left > 0:
        is_improved = False
        for other in _neighbours(stages, plan):
            if other in tried or left <= 0 or not has_budget():
                continue
            tried.add(other)
            left -= len(other)
            if (other_s := end_s(other)) < best_s - 1e-9:
                plan, best_s, is_improved = other, other_s, True
                break
    return plan


def _neighbours(stages: Stages, plan: Planned) -> Iterator[Planned]:  # noqa: C901 - one kind of change after another
    """Yield plans in which one model has another plan, throughout or from a stage on, or joins or leaves a stage."""
    space = stages.space

    def swapped(old: Collection[ModelPlan], new: ModelPlan, first: int) -> Iterator[Planned]:
        other = tuple(
            tuple(sorted(new if k >= first and p in old else p for p in plans)) for k, plans in enumerate(plan)
        )
        if other != plan and all(space.fits(plans) for plans in other):
            yield other

    plans_of: dict[int, set[ModelPlan]] = {}
    for p in itertools.chain(*plan):
        plans_of.setdefault(p.model, set()).add(p)
    for model, used in sorted(plans_of.items()):
        for new in space.plans(model):
            if new not in used or len(used) > 1:
                yield from swapped(used, new, 0)
    for k in range(len(plan) - 1, -1, -1):
        later = dict.fromkeys(itertools.chain(*plan[k + 1 :]))
        for old in plan[k]:
            for new in space.plans(old.model):
                if new != old:
                    yield from swapped({old}, new, k)
            if len(plan[k]) > 1 and any(p.model == old.model for p in later):
                yield (*plan[:k], tuple(p for p in plan[k] if p != old), *plan[k + 1 :])
        models = {p.model for p in plan[k]}
        for p in later:
            if p.model not in models and space.fits((*plan[k], p)):
                yield (*plan[:k], tuple(sorted((*plan[k], p))), *plan[k + 1 :])
