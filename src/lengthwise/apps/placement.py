"""Where replicas are: on GPUs that their links join well, with the least to load anew.

A replica's pipeline stages are groups of ``tp`` GPUs of one kind. Up to ``NodeSpec.link_group`` GPUs, a group lies
within one island of fast links, aligned to its size (pairs are 0-1, 2-3, never 1-2); a larger one is made of whole
islands of one machine. The stages of a pipeline may lie in several machines.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lengthwise.schema.app import Cluster, Machine, ModelPlan, Placement, Replica, Switch

Packed = dict[ModelPlan, tuple[Replica, ...]]
_Stage = tuple[ModelPlan, int]
_FailedState = tuple[int, frozenset[int]]


def is_replica(gpus: Replica, plan: ModelPlan, cluster: Cluster) -> bool:
    """Whether these GPUs, stage after stage, may be a replica of the plan."""
    if len(gpus) != plan.tp * plan.pp or len(set(gpus)) != len(gpus) or not set(gpus) <= set(range(cluster.gpus)):
        return False
    groups = [gpus[k : k + plan.tp] for k in range(0, len(gpus), plan.tp)]
    return all(_is_group(group, plan.gpu, cluster) for group in groups)


def _is_group(group: Replica, gpu: str, cluster: Cluster) -> bool:
    number = int(cluster.machine_of[group[0]])
    machine, first = cluster.machines[number], cluster.first_of[number]
    here = tuple(g - first for g in group)
    if machine.gpu.name != gpu or list(here) != sorted(here) or not 0 <= here[0] <= here[-1] < machine.gpus:
        return False
    return here in _groups(machine, set(here), len(here))


def _islands(machine: Machine) -> list[Replica]:
    """Of a machine's GPUs, numbered from 0; the last one may be smaller."""
    size = machine.node.link_group
    return [tuple(range(k, min(k + size, machine.gpus))) for k in range(0, machine.gpus, size)]


def _groups(machine: Machine, free: set[int], tp: int) -> list[Replica]:
    """Groups of ``tp`` of a machine's free GPUs, numbered from 0; of whole free islands, which are all alike, one."""
    islands, size = _islands(machine), machine.node.link_group
    if tp <= size:
        aligned = [i[k : k + tp] for i in islands for k in range(0, len(i) - tp + 1, tp)]
        return [group for group in aligned if free.issuperset(group)]
    whole = [island for island in islands if len(island) == size and free.issuperset(island)]
    if tp % size or len(whole) < tp // size:
        return []
    return [tuple(itertools.chain(*whole[: tp // size]))]


def degrees(machine: Machine) -> list[int]:
    """Tensor-parallel degrees of which a machine has a group: powers of two."""
    tps = [2**k for k in range(machine.gpus.bit_length())]
    return [tp for tp in tps if _groups(machine, set(range(machine.gpus)), tp)]


class Room:
    """The GPUs of a cluster, to be packed."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._nested = all(_is_power_of_two(m.node.link_group) for m in cluster.machines)

    def packed(
        self, plans: Sequence[ModelPlan], retained: Mapping[ModelPlan, Sequence[Replica]] | None = None
    ) -> Packed | None:
        """All replicas of the plans on GPUs of their own, those kept where they are; None: there is no room.

        Larger groups go first. Where all sizes are powers of two it does not matter where each goes, as long as it is
        aligned: a group leaves as much room for smaller ones here as there. Other sizes are searched through.
        """
        retained = retained or {}
        free = set(range(self._cluster.gpus)) - {g for there in retained.values() for r in there for g in r}
        wanted = sorted(
            (-plan.tp, -plan.pp, plan, n) for plan in plans for n in range(plan.dp - len(retained.get(plan, ())))
        )
        if sum(tp * pp for tp, pp, _, _ in wanted) > len(free):
            return None
        nested = self._nested and all(_is_power_of_two(plan.tp) for plan in plans)
        stages = [(plan, plan.pp - k) for _, _, plan, _ in wanted for k in range(plan.pp)]
        groups = self._filled(stages, free, set(), looks_back=not nested)
        return None if groups is None else _gathered(plans, stages, groups, retained)

    def _filled(
        self, stages: Sequence[_Stage], free: set[int], failed: set[_FailedState], *, looks_back: bool
    ) -> list[Replica] | None:
        """A group for each stage, in order; with ``looks_back`` all ways are tried."""
        if not stages:
            return []
        key = (len(stages), frozenset(free))
        if key in failed:
            return None
        for group in self._free_groups(*stages[0], free):
            rest = self._filled(stages[1:], free - set(group), failed, looks_back=looks_back)
            if rest is not None:
                return [group, *rest]
            if not looks_back:
                break
        failed.add(key)
        return None

    def _free_groups(self, plan: ModelPlan, stages: int, free: set[int]) -> list[Replica]:
        """Free groups that a stage may take: in the fullest machine and island first, which leaves others whole.

        A pipeline stays in one machine where one has room for all ``stages`` of it that are left.
        """
        found = []
        for machine, first in zip(self._cluster.machines, self._cluster.first_of, strict=True):
            if machine.gpu.name != plan.gpu:
                continue
            size = machine.node.link_group
            here = {g - first for g in free if first <= g < first + machine.gpus}
            beside = Counter(g // size for g in here)
            for group in _groups(machine, here, plan.tp):
                short = len(here) < plan.tp * stages
                found.append((short, len(here), beside[group[0] // size], tuple(first + g for g in group)))
        return [group for *_, group in sorted(found)]


def _gathered(
    plans: Sequence[ModelPlan],
    stages: Sequence[_Stage],
    groups: Sequence[Replica],
    retained: Mapping[ModelPlan, Sequence[Replica]],
) -> Packed:
    """Replicas by plan, in order of their GPUs, from the groups of their stages."""
    made: Packed = {plan: tuple(retained.get(plan, ())) for plan in plans}
    of = {plan: [g for (stage, _), g in zip(stages, groups, strict=True) if stage == plan] for plan in plans}
    for plan, mine in of.items():
        for k in range(0, len(mine), plan.pp):
            made[plan] = (*made[plan], tuple(itertools.chain(*mine[k : k + plan.pp])))
    return {plan: tuple(sorted(replicas)) for plan, replicas in made.items()}


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


Shape = tuple[str, int, int]
Asleep = Mapping[tuple[int, Shape], tuple[Replica, ...]]
Seconds = Callable[[ModelPlan, str], float]
"""Seconds until a replica of the plan is ready, by how: "wake" or "start"."""

MOST_LOOKS = 5_000
"""Sets of replicas that are tried to be kept; up to 16 GPUs all that could be better are."""


def fits(plans: Sequence[ModelPlan], cluster: Cluster) -> bool:
    """Whether the plans have room beside one another."""
    return Room(cluster).packed(plans) is not None


def place(
    plans: Sequence[ModelPlan],
    before: Placement,
    cluster: Cluster,
    seconds: Seconds,
    *,
    running: Sequence[ModelPlan] = (),
    in_sleep: Asleep | None = None,
) -> Placement | None:
    """Where the replicas of the plans go, with the least seconds of making ready in all; None: they have no room.

    Replicas that are there stay where they can. The same input gives the same placement.

    Args:
        plans: At most one a model.
        before: Where replicas are now.
        cluster: The GPUs.
        seconds: Until a replica is ready.
        running: The plans of those replicas: they stay only under the same shape. Without, replicas of as many GPUs
            count as the same.
        in_sleep: Replicas that can be woken, where they are.
    """
    known = _known(plans, before, running, in_sleep or {}, cluster, seconds)
    room = Room(cluster)
    if room.packed(plans) is None:
        return None
    kept = _Keep(plans, known, room).best()
    placed = room.packed(plans, kept)
    assert placed is not None
    return {plan.model: placed[plan] for plan in plans}


def switches(
    plans: Sequence[ModelPlan],
    after: Placement,
    before: Placement,
    seconds: Seconds,
    *,
    running: Sequence[ModelPlan] = (),
    in_sleep: Asleep | None = None,
) -> tuple[Switch, ...]:
    """What has to be made ready of a placement, and how; what is there already is left out."""
    made = []
    for plan in plans:
        there = set(_resident(plan, before, running))
        slept = set((in_sleep or {}).get((plan.model, plan.shape), ()))
        for replica in after[plan.model]:
            if replica not in there:
                how = "wake" if replica in slept else "start"
                made.append(Switch(plan.model, replica, how, seconds(plan, how)))
    return tuple(made)


_RetainedReplica = tuple[float, ModelPlan, Replica]
"""Seconds that are saved, of whom, where."""


def _known(
    plans: Sequence[ModelPlan],
    before: Placement,
    running: Sequence[ModelPlan],
    in_sleep: Asleep,
    cluster: Cluster,
    seconds: Seconds,
) -> list[_RetainedReplica]:
    """Places where a replica would be ready sooner than by starting it, the greatest saving first."""
    found: dict[tuple[ModelPlan, Replica], float] = {}
    for plan in plans:
        start_s, wake_s = seconds(plan, "start"), seconds(plan, "wake")
        for replica in in_sleep.get((plan.model, plan.shape), ()):
            found[plan, replica] = start_s - wake_s
        for replica in _resident(plan, before, running):
            found[plan, replica] = start_s
    good = [(s, p, r) for (p, r), s in found.items() if is_replica(r, p, cluster)]
    return sorted(good, key=lambda one: (-one[0], one[1], one[2]))


def _resident(plan: ModelPlan, before: Placement, running: Sequence[ModelPlan]) -> Iterable[Replica]:
    shapes = {p.model: p.shape for p in running}
    if shapes.get(plan.model, plan.shape) != plan.shape:
        return ()
    size = plan.tp * plan.pp
    return tuple(replica for replica in before.get(plan.model, ()) if len(replica) == size)


class _Keep:
    """Which of the known places to keep: branch and bound over taking or leaving each, the dearest first."""

    def __init__(self, plans: Sequence[ModelPlan], known: Sequence[_RetainedReplica], room: Room) -> None:
        self._plans, self._known, self._room = plans, known, room
        self._rest_s = [0.0]
        for saved_s, _, _ in reversed(known):
            self._rest_s.append(self._rest_s[-1] + saved_s)
        self._rest_s.reverse()
        self._best_s, self._best, self._looks = -1.0, (), 0  # type: tuple[float, tuple[_RetainedReplica, ...], int]

    def best(self) -> dict[ModelPlan, tuple[Replica, ...]]:
        """Replicas to keep, by plan."""
        self._poll(0, 0.0, ())
        return {plan: tuple(r for _, p, r in self._best if p == plan) for plan in self._plans}

    def _poll(self, i: int, saved_s: float, taken: tuple[_RetainedReplica, ...]) -> None:
        if saved_s + self._rest_s[i] <= self._best_s or self._looks >= MOST_LOOKS:
            return
        if i == len(self._known):
            self._best_s, self._best = saved_s, taken
            return
        if self._may(one := self._known[i], taken):
            self._poll(i + 1, saved_s + one[0], (*taken, one))
        self._poll(i + 1, saved_s, taken)

    def _may(self, one: _RetainedReplica, taken: tuple[_RetainedReplica, ...]) -> bool:
        """Whether it can be kept beside those taken, with room for all others."""
        _, plan, replica = one
        if sum(p == plan for _, p, _ in taken) == plan.dp or any(set(replica) & set(r) for _, _, r in taken):
            return False
        self._looks += 1
        kept: dict[ModelPlan, tuple[Replica, ...]] = {}
        for _, p, r in (*taken, one):
            kept[p] = (*kept.get(p, ()), r)
        return self._room.packed(self._plans, kept) is not None


Plans = tuple[ModelPlan, ...]
Fits = Callable[[Plans], bool]


@dataclass(frozen=True)
class Now:
    """What is to run from now on.

    Attributes:
        stage: The plan's stage that we are in, from 0; as many as there are: behind the last one.
        plans: What runs, by model, at most one plan each.
    """

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
) -> Now:
    """What runs now that a model has finished, or at the very start.

    Where everything goes as planned, these are the plan's own stages, one after another.

    Args:
        stages: The plan's.
        at: The stage that we are in; -1 at the start.
        running: What ran up to now, finished ones too.
        finished: Models that have nothing left to do.
        fits: Whether some plans have room beside one another (``placement.fits``).
        reserve: Plans for models that are in no stage: they had nothing to do in the lengths planned with. They
            run where there is room behind the last stage, as do models that have more to do than was planned.
        starved: Models that can do nothing before one that does not run: they are not kept for being in their
            last stage.
    """
    at, stages = _entered(stages, at, running, finished, starved), tuple(stages)
    ahead = {plan.model for stage in stages[at:] for plan in stage}
    here = _open(stages[at] if at < len(stages) else _waiting_after(stages, reserve, starved), finished)
    live = _open(running, finished)
    kept = [p for p in live if p in here or (p.model not in ahead and p.model not in starved)]
    chosen = _added(tuple(kept), here, fits)
    if at < len(stages) and len(here) < len(stages[at]):
        chosen = _early(chosen, stages[at:], live, finished, fits)
    chosen = _added(chosen, live, fits)
    if at < len(stages) and not chosen:
        chosen = _added(chosen, _open(reserve, finished), fits)
    return Now(at, tuple(sorted(chosen)))


def _entered(
    stages: Sequence[Plans], at: int, running: Plans, finished: Collection[int], starved: Collection[int]
) -> int:
    """The stage to be in: the next one where this one is over, the first that has something left to do."""
    if at < 0 or (at < len(stages) and _is_over(stages[at], running, finished, starved)):
        at += 1
    while at < len(stages) and not _open(stages[at], finished):
        at += 1
    return at


def _waiting_after(stages: Sequence[Plans], reserve: Plans, starved: Collection[int]) -> Plans:
    """What may run behind the last stage: spare plans and each model's last one, but for those who can do nothing.

    Models that take turns (a draft, its critique) may need more turns than the lengths planned with.
    """
    last = {plan.model: plan for stage in stages for plan in stage}
    return tuple(plan for plan in (*reserve, *last.values()) if plan.model not in starved)


def _is_over(stage: Plans, running: Plans, finished: Collection[int], starved: Collection[int]) -> bool:
    """One of its models has finished, or can do no more, and none waits to be started."""
    left = _open(stage, finished)
    ended = len(left) < len(stage) or any(plan.model in starved for plan in left)
    return ended and all(plan in running for plan in left)


def _early(chosen: Plans, stages: Sequence[Plans], live: Plans, finished: Collection[int], fits: Fits) -> Plans:
    """What was chosen, and models of later stages where a finished one of this stage left its GPUs.

    A later stage is looked at only when all of the one before it run; nobody who runs is stopped for it.
    """
    for here, later in pairwise(stages):
        if any(plan not in chosen for plan in _open(here, finished)):
            break
        held = tuple(p for p in live if p.model not in {q.model for q in chosen})
        new = tuple(p for p in _open(later, finished) if p.model not in {q.model for q in held})
        chosen = _added(chosen, new, lambda plans, held=held: fits((*plans, *held)))  # type: ignore[misc]
    return chosen


def _added(chosen: Plans, more: Plans, fits: Fits) -> Plans:
    """Those chosen, and in order those more whose model is not there yet and who have room."""
    for plan in more:
        if all(plan.model != p.model for p in chosen) and fits((*chosen, plan)):
            chosen = (*chosen, plan)
    return chosen


def _open(plans: Plans, finished: Collection[int]) -> Plans:
    return tuple(plan for plan in plans if plan.model not in finished)
