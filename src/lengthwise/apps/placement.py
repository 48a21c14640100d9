"""Where replicas are: on GPUs that their links join well, with the least to load anew.

A replica's pipeline stages are groups of ``tp`` GPUs of one kind. Up to ``NodeSpec.link_group`` GPUs, a group lies
within one island of fast links, aligned to its size (pairs are 0-1, 2-3, never 1-2); a larger one is made of whole
islands of one machine. The stages of a pipeline may lie in several machines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from lengthwise.apps._islands import Room, is_replica
from lengthwise.schema.app import Cluster, ModelPlan, Placement, Replica, Switch

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
    asleep: Asleep | None = None,
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
        asleep: Replicas that can be woken, where they are.
    """
    known = _known(plans, before, running, asleep or {}, cluster, seconds)
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
    asleep: Asleep | None = None,
) -> tuple[Switch, ...]:
    """What has to be made ready of a placement, and how; what is there already is left out."""
    made = []
    for plan in plans:
        there = set(_resident(plan, before, running))
        slept = set((asleep or {}).get((plan.model, plan.shape), ()))
        for replica in after[plan.model]:
            if replica not in there:
                how = "wake" if replica in slept else "start"
                made.append(Switch(plan.model, replica, how, seconds(plan, how)))
    return tuple(made)


_Known = tuple[float, ModelPlan, Replica]
"""Seconds that are saved, of whom, where."""


def _known(
    plans: Sequence[ModelPlan],
    before: Placement,
    running: Sequence[ModelPlan],
    asleep: Asleep,
    cluster: Cluster,
    seconds: Seconds,
) -> list[_Known]:
    """Places where a replica would be ready sooner than by starting it, the greatest saving first."""
    found: dict[tuple[ModelPlan, Replica], float] = {}
    for plan in plans:
        start_s, wake_s = seconds(plan, "start"), seconds(plan, "wake")
        for replica in asleep.get((plan.model, plan.shape), ()):
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

    def __init__(self, plans: Sequence[ModelPlan], known: Sequence[_Known], room: Room) -> None:
        self._plans, self._known, self._room = plans, known, room
        self._rest_s = [0.0]
        for saved_s, _, _ in reversed(known):
            self._rest_s.append(self._rest_s[-1] + saved_s)
        self._rest_s.reverse()
        self._best_s, self._best, self._looks = -1.0, (), 0  # type: tuple[float, tuple[_Known, ...], int]

    def best(self) -> dict[ModelPlan, tuple[Replica, ...]]:
        """Replicas to keep, by plan."""
        self._look(0, 0.0, ())
        return {plan: tuple(r for _, p, r in self._best if p == plan) for plan in self._plans}

    def _look(self, i: int, saved_s: float, taken: tuple[_Known, ...]) -> None:
        if saved_s + self._rest_s[i] <= self._best_s or self._looks >= MOST_LOOKS:
            return
        if i == len(self._known):
            self._best_s, self._best = saved_s, taken
            return
        if self._may(one := self._known[i], taken):
            self._look(i + 1, saved_s + one[0], (*taken, one))
        self._look(i + 1, saved_s, taken)

    def _may(self, one: _Known, taken: tuple[_Known, ...]) -> bool:
        """Whether it can be kept beside those taken, with room for all others."""
        _, plan, replica = one
        if sum(p == plan for _, p, _ in taken) == plan.dp or any(set(replica) & set(r) for _, _, r in taken):
            return False
        self._looks += 1
        kept: dict[ModelPlan, tuple[Replica, ...]] = {}
        for _, p, r in (*taken, one):
            kept[p] = (*kept.get(p, ()), r)
        return self._room.packed(self._plans, kept) is not None
