"""Placement of replicas on well-connected GPUs with the least loading time, and the plans to run next.

Each pipeline stage of a replica runs on a group of ``tp`` GPUs of one kind. A group of up to ``NodeSpec.link_group``
GPUs lies within one island of fast links and is aligned to its size: pairs are 0-1 and 2-3, never 1-2. A larger group
consists of complete islands of one machine. The stages of a pipeline may lie in several machines.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lengthwise.schema.app import Cluster, Machine, ModelPlan, Placement, Replica, Switch

_Packed = dict[ModelPlan, tuple[Replica, ...]]


def is_replica(gpus: Replica, plan: ModelPlan, cluster: Cluster) -> bool:
    """Return whether these GPUs, listed stage after stage, can be a replica of the plan."""
    if len(gpus) != plan.tp * plan.pp or len(set(gpus)) != len(gpus) or not set(gpus) <= set(range(cluster.gpus)):
        return False
    for k in range(0, len(gpus), plan.tp):
        number = int(cluster.machine_of[gpus[k]])
        machine = cluster.machines[number]
        group = tuple(gpu - cluster.first_of[number] for gpu in gpus[k : k + plan.tp])
        is_inside = all(0 <= gpu < machine.gpus for gpu in group)
        if machine.gpu.name != plan.gpu or not is_inside or group not in _groups(machine, set(group), plan.tp):
            return False
    return True


def _groups(machine: Machine, free: set[int], tp: int) -> list[Replica]:
    """Return groups of ``tp`` free GPUs, numbered within the machine, or at most one if groups span islands."""
    size = machine.node.link_group
    islands = [tuple(range(k, min(k + size, machine.gpus))) for k in range(0, machine.gpus, size)]
    if tp <= size:
        aligned = [i[k : k + tp] for i in islands for k in range(0, len(i) - tp + 1, tp)]
        return [group for group in aligned if free.issuperset(group)]
    complete = [island for island in islands if len(island) == size and free.issuperset(island)]
    if tp % size or len(complete) < tp // size:
        return []
    return [tuple(itertools.chain(*complete[: tp // size]))]


def degrees(machine: Machine) -> list[int]:
    """Return the tensor-parallel degrees (powers of two) for which a machine has a group of GPUs."""
    tps = [2**k for k in range(machine.gpus.bit_length())]
    return [tp for tp in tps if _groups(machine, set(range(machine.gpus)), tp)]


def _packed(
    cluster: Cluster, plans: Sequence[ModelPlan], retained: Mapping[ModelPlan, Sequence[Replica]] | None = None
) -> _Packed | None:
    """Return disjoint replicas of all plans, including the ``retained`` ones, or None if the GPUs do not suffice."""
    retained = retained or {}
    free = frozenset(range(cluster.gpus)) - {g for replicas in retained.values() for r in replicas for g in r}
    missing = sorted(
        (-plan.tp, -plan.pp, plan, n) for plan in plans for n in range(plan.dp - len(retained.get(plan, ())))
    )
    if sum(tp * pp for tp, pp, _, _ in missing) > len(free):
        return None
    # If all sizes are powers of two, all aligned positions leave equal space for smaller groups: try only the first.
    sizes = [*(m.node.link_group for m in cluster.machines), *(plan.tp for plan in plans)]
    backtracks = any(size & (size - 1) for size in sizes)
    stages = [(plan, plan.pp - k) for _, _, plan, _ in missing for k in range(plan.pp)]
    failed: set[tuple[int, frozenset[int]]] = set()

    def fill(first: int, free: frozenset[int]) -> list[Replica] | None:
        if first == len(stages):
            return []
        if (first, free) in failed:
            return None
        for group in _free_groups(cluster, *stages[first], free):
            rest = fill(first + 1, free - set(group))
            if rest is not None:
                return [group, *rest]
            if not backtracks:
                break
        failed.add((first, free))
        return None

    groups = fill(0, free)
    if groups is None:
        return None
    packed: _Packed = {}
    for plan in plans:
        gpus = [g for (stage, _), group in zip(stages, groups, strict=True) if stage == plan for g in group]
        size = plan.tp * plan.pp
        added = (tuple(gpus[k : k + size]) for k in range(0, len(gpus), size))
        packed[plan] = tuple(sorted((*retained.get(plan, ()), *added)))
    return packed


def _free_groups(cluster: Cluster, plan: ModelPlan, stages: int, free: frozenset[int]) -> list[Replica]:
    """Return the free groups for a pipeline stage. Machines with room for all ``stages`` that are left come first."""
    found = []
    for machine, first in zip(cluster.machines, cluster.first_of, strict=True):
        if machine.gpu.name != plan.gpu:
            continue
        size = machine.node.link_group
        local = {g - first for g in free if first <= g < first + machine.gpus}
        per_island = Counter(g // size for g in local)
        is_short = len(local) < plan.tp * stages
        found += [
            (is_short, len(local), per_island[group[0] // size], tuple(first + g for g in group))
            for group in _groups(machine, local, plan.tp)
        ]
    return [group for *_, group in sorted(found)]


Shape = tuple[str, int, int]
Asleep = Mapping[tuple[int, Shape], tuple[Replica, ...]]  # sleeping replicas by (model, shape)
Seconds = Callable[[ModelPlan, str], float]  # seconds until a replica of the plan is ready by "wake" or "start"

_MAX_RETAINED_SETS = 5_000  # sets of retained replicas that the search tries; enough for the optimum on 16 GPUs


def fits(plans: Sequence[ModelPlan], cluster: Cluster) -> bool:
    """Return whether the plans can run at the same time on the cluster."""
    return _packed(cluster, plans) is not None


def place(
    plans: Sequence[ModelPlan],
    before: Placement,
    cluster: Cluster,
    seconds: Seconds,
    *,
    running: Sequence[ModelPlan] = (),
    sleeping: Asleep | None = None,
) -> Placement | None:
    """Return the placement of replicas with the least total loading time, or None if the plans do not fit.

    A replica of ``before`` can stay, without loading, if its model's plan in ``running`` has the shape of the new plan.
    Without a plan in ``running``, it can stay if the number of GPUs is equal. Replicas in ``sleeping`` can wake. The
    search tries _MAX_RETAINED_SETS sets of replicas that stay, so that on more than 16 GPUs it may miss the least time.
    """
    if not fits(plans, cluster):
        return None
    saved_s: dict[tuple[ModelPlan, Replica], float] = {}
    for plan in plans:
        start_s, wake_s = seconds(plan, "start"), seconds(plan, "wake")
        for replica in (sleeping or {}).get((plan.model, plan.shape), ()):
            saved_s[plan, replica] = start_s - wake_s
        for replica in _resident(plan, before, running):
            saved_s[plan, replica] = start_s
    valid = [(s, plan, replica) for (plan, replica), s in saved_s.items() if is_replica(replica, plan, cluster)]
    candidates = sorted(valid, key=lambda one: (-one[0], one[1], one[2]))
    placed = _packed(cluster, plans, _retained(cluster, plans, candidates))
    assert placed is not None
    return {plan.model: placed[plan] for plan in plans}


def switches(
    plans: Sequence[ModelPlan],
    after: Placement,
    before: Placement,
    seconds: Seconds,
    *,
    running: Sequence[ModelPlan] = (),
    sleeping: Asleep | None = None,
) -> tuple[Switch, ...]:
    """Return the replicas that must start or wake so that the placement ``after`` replaces ``before``."""
    found = []
    for plan in plans:
        resident = set(_resident(plan, before, running))
        asleep = set((sleeping or {}).get((plan.model, plan.shape), ()))
        for replica in after[plan.model]:
            if replica not in resident:
                how = "wake" if replica in asleep else "start"
                found.append(Switch(plan.model, replica, how, seconds(plan, how)))
    return tuple(found)


def _resident(plan: ModelPlan, before: Placement, running: Sequence[ModelPlan]) -> list[Replica]:
    shapes = {p.model: p.shape for p in running}
    if shapes.get(plan.model, plan.shape) != plan.shape:
        return []
    return [replica for replica in before.get(plan.model, ()) if len(replica) == plan.tp * plan.pp]


_Candidate = tuple[float, ModelPlan, Replica]  # (seconds saved, plan, replica)


def _retained(
    cluster: Cluster, plans: Sequence[ModelPlan], candidates: Sequence[_Candidate]
) -> dict[ModelPlan, list[Replica]]:
    """Return the candidates that together save the most seconds by staying on their GPUs (branch and bound)."""
    # [i] seconds that all candidates from i on save, which bound the gain of the rest.
    rest_s = list(itertools.accumulate((saved_s for saved_s, _, _ in reversed(candidates)), initial=0.0))[::-1]
    best_s, best, tried = -1.0, (), 0  # type: float, tuple[_Candidate, ...], int

    def by_plan(taken: Sequence[_Candidate]) -> dict[ModelPlan, list[Replica]]:
        return {plan: [replica for _, other, replica in taken if other == plan] for _, plan, _ in taken}

    def search(i: int, saved_s: float, taken: tuple[_Candidate, ...]) -> None:
        nonlocal best_s, best, tried
        if saved_s + rest_s[i] <= best_s or tried >= _MAX_RETAINED_SETS:
            return
        if i == len(candidates):
            best_s, best = saved_s, taken
            return
        one = candidates[i]
        _, plan, replica = one
        overlaps = any(set(replica) & set(other) for _, _, other in taken)
        if not overlaps and sum(p == plan for _, p, _ in taken) < plan.dp:
            tried += 1
            if _packed(cluster, plans, by_plan((*taken, one))) is not None:
                search(i + 1, saved_s + one[0], (*taken, one))
        search(i + 1, saved_s, taken)

    search(0, 0.0, ())
    return by_plan(best)


Plans = tuple[ModelPlan, ...]
Fits = Callable[[Plans], bool]


@dataclass(frozen=True)
class StagePlans:
    """A stage's number and plans, at most one per model. After the last stage, ``stage`` is the number of stages."""

    stage: int
    plans: Plans


def next_plans(
    stages: Sequence[Plans],
    at: int,
    running: Plans,
    finished: Collection[int],
    fits: Fits,
    *,
    reserve: Plans = (),
    starved: Collection[int] = (),
) -> StagePlans:
    """Return the stage to run at the start, or after a model has finished or is blocked: usually the next stage.

    Args:
        at: Number of the current stage, or -1 at the start.
        running: Plans that ran up to now, including plans of finished models.
        finished: Models without remaining work.
        fits: Function that returns whether plans can run at the same time.
        reserve: Plans of models without a stage, which had no work in the samples used for planning. They run after the
            last stage, as do models with more work than planned, or earlier if no other plan can run.
        starved: Running models that wait for a model that does not run. They stop even in their last stage.
    """
    if at < 0:
        at = 0
    elif at < len(stages):
        rest = _unfinished(stages[at], finished)
        has_progressed = len(rest) < len(stages[at]) or any(plan.model in starved for plan in rest)
        at += has_progressed and all(plan in running for plan in rest)
    while at < len(stages) and not _unfinished(stages[at], finished):
        at += 1
    if at < len(stages):
        candidates = stages[at]
    else:
        # Models that take turns (a draft and its critique) may need more turns than planned.
        last = {plan.model: plan for stage in stages for plan in stage}
        candidates = tuple(plan for plan in (*reserve, *last.values()) if plan.model not in starved)
    ahead = {plan.model for stage in stages[at:] for plan in stage}
    current, live = _unfinished(candidates, finished), _unfinished(running, finished)
    retained = [p for p in live if p in current or (p.model not in ahead and p.model not in starved)]
    chosen = _extended(tuple(retained), current, fits)
    if at < len(stages) and len(current) < len(stages[at]):
        chosen = _with_later_stages(chosen, stages[at:], live, finished, fits)
    chosen = _extended(chosen, live, fits)
    if at < len(stages) and not chosen:
        chosen = _extended(chosen, _unfinished(reserve, finished), fits)
    return StagePlans(at, tuple(sorted(chosen)))


def _with_later_stages(
    chosen: Plans, stages: Sequence[Plans], live: Plans, finished: Collection[int], fits: Fits
) -> Plans:
    """Return the chosen plans, and plans of later stages that fit on the GPUs of finished models."""
    for stage, later in pairwise(stages):
        if any(plan not in chosen for plan in _unfinished(stage, finished)):
            break
        models = {p.model for p in chosen}
        others = tuple(p for p in live if p.model not in models)
        new = tuple(p for p in _unfinished(later, finished) if all(p.model != q.model for q in others))
        chosen = _extended(chosen, new, lambda plans, others=others: fits((*plans, *others)))  # type: ignore[misc]
    return chosen


def _extended(chosen: Plans, more: Plans, fits: Fits) -> Plans:
    for plan in more:
        if all(plan.model != p.model for p in chosen) and fits((*chosen, plan)):
            chosen = (*chosen, plan)
    return chosen


def _unfinished(plans: Plans, finished: Collection[int]) -> Plans:
    return tuple(plan for plan in plans if plan.model not in finished)
