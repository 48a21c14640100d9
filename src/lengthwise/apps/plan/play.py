"""A plan played: what runs next by ``dynamic``, where by ``placement``, as the runner does it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lengthwise.apps.dynamic import Now, next_plans
from lengthwise.apps.placement import place, switches
from lengthwise.apps.plan.space import Space
from lengthwise.apps.plan.stages import Delay, Plans, Staged, Stages, State
from lengthwise.schema.app import AppStage, Placement, Replica, Switch
from lengthwise.schema.errors import InternalError

Asleep = dict[tuple[int, tuple[str, int, int]], tuple[Replica, ...]]


@dataclass(frozen=True)
class Played:
    """How a plan turned out under one draw.

    Attributes:
        stages: As they came, with where and when.
        staged: Their simulations, one each.
        end_s: When all was done.
    """

    stages: tuple[AppStage, ...]
    staged: tuple[Staged, ...]
    end_s: float


def play(
    stages: Stages,
    planned: Sequence[Plans],
    spare: Plans,
    *,
    places: bool = True,
    begun: tuple[Plans, Placement] = ((), {}),
) -> Played:
    """How a plan turns out under a draw.

    Args:
        stages: Of the draw.
        planned: The plan's stages.
        spare: Plans of models that are in none of them.
        places: Whether replicas are placed; else nobody is ever moved for another, which is quicker.
        begun: Plans that run when it begins, and where; only with ``places``.

    Raises:
        InternalError: Nothing moves any more.
    """
    table = _Table(stages, places=places, begun=begun)
    while not table.is_done:
        table.turn(tuple(planned), spare)
    return Played(tuple(table.made), tuple(table.staged), table.state.clock_s)


class _Table:
    """What stands where between two stages."""

    def __init__(self, stages: Stages, *, places: bool, begun: tuple[Plans, Placement]) -> None:
        self._stages, self._space, self._places = stages, stages.space, places
        self.state: State = stages.start()
        self._now, self._starved = Now(-1, begun[0]), frozenset[int]()
        self._placement: Placement = begun[1]
        self._asleep: Asleep = {}
        self._left_s: dict[int, float] = {}
        self._ready_s: dict[tuple[int, Replica], float] = {}
        self.made: list[AppStage] = []
        self.staged: list[Staged] = []
        self._finished = stages.finished(self.state)

    @property
    def is_done(self) -> bool:
        return len(self._finished) == len(self._stages.load.models)

    def turn(self, planned: Sequence[Plans], spare: Plans) -> None:
        """One stage."""
        now = next_plans(
            planned,
            self._now.stage,
            self._now.plans,
            self._finished,
            self._space.fits,
            spare=spare,
            starved=self._starved,
        )
        placement, made = self._placed(now.plans)
        delays = self._delays(now.plans, placement, made) if self._places else None
        staged = self._stages.stage(self.state, now.plans, delays)
        self._require_progress(staged, now)
        self.made.append(
            AppStage(now.plans, placement, made, staged.state.clock_s, staged.end_s, staged.ends_by)
        )
        self.staged.append(staged)
        stuck = (m for m, one in staged.live.items() if not one.run.whole)
        self._starved = frozenset(stuck) if staged.ends_by < 0 else frozenset()
        self._now, self._placement = now, placement
        self.state = self._stages.after(staged)
        self._finished = self._stages.finished(self.state)

    def _placed(self, plans: Plans) -> tuple[Placement, tuple[Switch, ...]]:
        if not self._places:
            return {}, ()
        before, running, seconds = self._placement, self._now.plans, self._space.seconds
        asleep = self._asleep
        placement = place(plans, before, self._space.cluster, seconds, running=running, asleep=asleep)
        if placement is None:
            raise InternalError(f"plans that fit must have a place; {plans} have none")
        made = switches(plans, placement, before, seconds, running=running, asleep=asleep)
        made = self._behind_others(made, plans, placement)
        self._asleep = _slept(self._space, running, before, placement, self._asleep)
        return placement, made

    def _behind_others(
        self, made: tuple[Switch, ...], plans: Plans, placement: Placement
    ) -> tuple[Switch, ...]:
        """The same where engines that leave now, or still do, must be gone from a GPU before another loads there."""
        clock_s = self.state.clock_s
        stay = {(p.model, p.shape, r) for p in plans for r in placement[p.model]}
        for plan in self._now.plans:
            for replica in self._placement.get(plan.model, ()):
                loads = self._ready_s.get((plan.model, replica), 0.0) > clock_s  # is broken off
                if (plan.model, plan.shape, replica) not in stay and not loads:
                    gone_s = clock_s + self._space.leave_s(plan)
                    self._left_s |= {gpu: max(gone_s, self._left_s.get(gpu, 0.0)) for gpu in replica}
        waits_s = (max(self._left_s.get(gpu, 0.0) for gpu in one.replica) - clock_s for one in made)
        made = tuple(
            replace(one, seconds=one.seconds + max(0.0, wait_s))
            for one, wait_s in zip(made, waits_s, strict=True)
        )
        self._ready_s |= {(one.model, one.replica): clock_s + one.seconds for one in made}
        return made

    def _delays(self, plans: Plans, placement: Placement, made: Sequence[Switch]) -> dict[int, Delay]:
        """When models are ready, where that is not as it was: the first of their replicas, and the last one."""
        found: dict[int, Delay] = {}
        before = {plan.model: plan for plan in self._now.plans}
        for plan in plans:
            seconds = sorted(one.seconds for one in made if one.model == plan.model)
            if seconds and len(seconds) < len(placement[plan.model]):
                found[plan.model] = Delay(seconds[-1], len(placement[plan.model]) - len(seconds))
            elif seconds:
                first = sum(s < seconds[0] + 1e-6 for s in seconds)
                found[plan.model] = Delay(seconds[-1], first % len(seconds), seconds[0])
            elif before.get(plan.model) != plan:
                found[plan.model] = Delay(self._stages.pending_s(self.state, plan))
        return found

    def _require_progress(self, staged: Staged, now: Now) -> None:
        still = staged.end_s <= self.state.clock_s and staged.ends_by < 0
        if not now.plans or (still and now == self._now):
            left = set(range(len(self._stages.load.models))) - self._finished
            raise InternalError(f"models {sorted(left)} are left, and {now.plans} gets none of them on")


def _slept(space: Space, running: Plans, before: Placement, after: Placement, asleep: Asleep) -> Asleep:
    """Who sleeps now: who did and was not woken, and who was stopped where engines can sleep."""
    woken = {(m, r) for m, replicas in after.items() for r in replicas}
    found = {key: tuple(r for r in there if (key[0], r) not in woken) for key, there in asleep.items()}
    for plan in running:
        if space.sleeps(plan):
            key = (plan.model, plan.shape)
            stopped = (r for r in before.get(plan.model, ()) if (plan.model, r) not in woken)
            found[key] = tuple(sorted({*found.get(key, ()), *stopped}))
    return found


def spare_plans(space: Space, models: int, planned: Sequence[Plans]) -> Plans:
    """A plan for each model that no stage has: the one of the fewest GPUs."""
    there = {plan.model for plans in planned for plan in plans}
    return tuple(space.plans(m)[0] for m in range(models) if m not in there)
