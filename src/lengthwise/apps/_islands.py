"""Groups of GPUs that may serve as one tensor-parallel group, and how plans are packed onto them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

from lengthwise.schema.app import Cluster, Machine, ModelPlan, Replica

Packed = dict[ModelPlan, tuple[Replica, ...]]
_Stage = tuple[ModelPlan, int]
_Known = tuple[int, frozenset[int]]


def is_replica(gpus: Replica, plan: ModelPlan, cluster: Cluster) -> bool:
    """Whether these GPUs, stage after stage, may be a replica of the plan."""
    if (
        len(gpus) != plan.tp * plan.pp
        or len(set(gpus)) != len(gpus)
        or not set(gpus) <= set(range(cluster.gpus))
    ):
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
        self, plans: Sequence[ModelPlan], kept: Mapping[ModelPlan, Sequence[Replica]] | None = None
    ) -> Packed | None:
        """All replicas of the plans on GPUs of their own, those kept where they are; None: there is no room.

        Larger groups go first. Where all sizes are powers of two it does not matter where each goes, as long as it is
        aligned: a group leaves as much room for smaller ones here as there. Other sizes are searched through.
        """
        kept = kept or {}
        free = set(range(self._cluster.gpus)) - {g for there in kept.values() for r in there for g in r}
        wanted = sorted(
            (-plan.tp, -plan.pp, plan, n) for plan in plans for n in range(plan.dp - len(kept.get(plan, ())))
        )
        if sum(tp * pp for tp, pp, _, _ in wanted) > len(free):
            return None
        nested = self._nested and all(_is_power_of_two(plan.tp) for plan in plans)
        stages = [(plan, plan.pp - k) for _, _, plan, _ in wanted for k in range(plan.pp)]
        groups = self._filled(stages, free, set(), looks_back=not nested)
        return None if groups is None else _gathered(plans, stages, groups, kept)

    def _filled(
        self, stages: Sequence[_Stage], free: set[int], failed: set[_Known], *, looks_back: bool
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
    kept: Mapping[ModelPlan, Sequence[Replica]],
) -> Packed:
    """Replicas by plan, in order of their GPUs, from the groups of their stages."""
    made: Packed = {plan: tuple(kept.get(plan, ())) for plan in plans}
    of = {plan: [g for (stage, _), g in zip(stages, groups, strict=True) if stage == plan] for plan in plans}
    for plan, mine in of.items():
        for k in range(0, len(mine), plan.pp):
            made[plan] = (*made[plan], tuple(itertools.chain(*mine[k : k + plan.pp])))
    return {plan: tuple(sorted(replicas)) for plan, replicas in made.items()}


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
