"""A look ahead over stages, and a plan bettered where it can be: "lengthwise".

Plans come from Algorithm 1, the heuristics, lists, and a beam over stages whose next steps are what all of these would
do. The best of them is then changed a stage at a time, as long as it ends sooner. What is looked at is counted, not
timed, so that the same input gives the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lengthwise.apps.plan.choosers import Chooser, built
from lengthwise.apps.plan.greedy import Greedy
from lengthwise.apps.plan.heuristics import MaxHeuristic, MinHeuristic
from lengthwise.apps.plan.lists import Listed
from lengthwise.apps.plan.play import play, spare_plans
from lengthwise.apps.plan.stages import Plans, Staged, Stages, State
from lengthwise.schema.app import ModelPlan
from lengthwise.schema.errors import InternalError

Planned = tuple[Plans, ...]

METHODS: dict[str, Chooser] = {
    "samullm": Greedy(),
    "samullm_no_preemption": Greedy(keeps=True),
    "max": MaxHeuristic(),
    "max_no_preemption": MaxHeuristic(keeps=True),
    "min": MinHeuristic(),
    "min_no_preemption": MinHeuristic(keeps=True),
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
        ranked = sorted(
            (key for key in steps if key[0] < best_s), key=lambda key: (key[0], len(key[1]), key[1])
        )
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


def bettered(
    stages: Stages, plan: Planned, effort: Effort, has_left: Callable[[], bool] = lambda: True
) -> Planned:
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
    return tuple(
        tuple(sorted(new if k >= first and p in old else p for p in plans)) for k, plans in enumerate(plan)
    )


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
