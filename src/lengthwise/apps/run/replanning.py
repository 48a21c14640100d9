"""What is left of a run planned anew, once its lengths or its clock have left what was planned with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from lengthwise.apps.plan import Asked, Space, plan
from lengthwise.apps.plan.evaluate import stages_of
from lengthwise.apps.plan.play import Played, play
from lengthwise.apps.plan.stages import Plans
from lengthwise.apps.run._rest import Rest, rest_of, seen_of
from lengthwise.apps.run._spread import Seen, Spread, has_moved, updated
from lengthwise.apps.run.assembling import SLACK, ends_s
from lengthwise.apps.run.contracts import Drifted, Guide, Revised
from lengthwise.apps.run.looking import LOOKS
from lengthwise.schema.app_tasks import Tasks

if TYPE_CHECKING:
    from lengthwise.workload import Marginal

FALSE_ALARMS = 0.01
"""The share of runs whose lengths are as planned that are looked at anew for their lengths all the same, at most."""
LEAST_CHANGE = 0.2
"""Means that are less apart than this are not worth a new plan."""
LEAST_GAIN = 0.05
"""A new plan is followed where it ends sooner by this share of what is left, and by more than chance over draws."""
_DRAWS = 4


@dataclass(eq=False)
class Replanner:
    """Plans anew from where a run is: what has ended with its lengths, what is under way from its tokens on.

    Attributes:
        tasks: Of the run, by place.
        lengths: As planned with, by model; None: as long as may be.
        longest: Context of each model.
        space: Plans of its models on the GPUs.
        stages: That are followed.
        spare: Of models in none of them.
        asked: How to plan.
        seed: Of all draws.
    """

    tasks: Tasks
    lengths: Sequence[Marginal | None]
    longest: Sequence[int]
    space: Space
    stages: tuple[Plans, ...]
    spare: Plans = ()
    asked: Asked = field(default_factory=lambda: Asked(beside=()))
    seed: int = 0

    def __post_init__(self) -> None:
        self._spreads = [Spread.of(one) for one in self.lengths]
        self._priors = list(self._spreads)

    def __call__(self, drifted: Drifted) -> Revised | None:
        """What to follow from there on; None: all is as planned."""
        seen = seen_of(self.tasks, drifted.ended, drifted.written, self.longest)
        moved = [m for m, one in enumerate(seen) if self._has_moved(m, one)]
        if not moved and not drifted.is_late:
            return None
        rest = rest_of(self.tasks, drifted.ended, drifted.written)
        if not len(rest.tasks):
            return None
        about = self._about(moved, seen, drifted)
        self._spreads = [updated(prior, one) for prior, one in zip(self._priors, seen, strict=True)]
        return self._revised(rest, drifted, about)

    def _has_moved(self, model: int, seen: Seen) -> bool:
        chance = FALSE_ALARMS / (LOOKS * len(self.longest))
        before = self._spreads[model]
        if not has_moved(before, seen, chance):
            return False
        return abs(self._ratio(model, seen) - 1.0) > LEAST_CHANGE

    def _ratio(self, model: int, seen: Seen) -> float:
        """Mean length as seen over that which was planned with."""
        mine = self.tasks.max_tokens[self.tasks.model == model]
        most = float(mine.max(initial=1))
        return updated(self._priors[model], seen).mean(most) / self._spreads[model].mean(most)

    def _about(self, moved: Sequence[int], seen: Sequence[Seen], drifted: Drifted) -> str:
        if not moved:
            way = "sooner" if drifted.at_s < drifted.planned_s else "later"
            return f"stage {drifted.stage + 1} ends {way} than planned"
        told = (f"{self.tasks.models[m]} {self._ratio(m, seen[m]):.2g} times" for m in moved)
        return f"answers are not as long as planned: of {', '.join(told)}"

    def _revised(self, rest: Rest, drifted: Drifted, about: str) -> Revised:
        """The better one of what is left of the old plan and a new one, both from where engines are now."""
        draws = rest.draws(self._spreads, self.longest, range(self.seed, self.seed + _DRAWS))
        worlds = stages_of(rest.tasks, draws, self.space)
        begun = drifted.running, drifted.placement
        old = self.stages[drifted.stage :] or (drifted.running,)
        spare = (*self.spare, *_last(self.stages, old))
        kept = [play(one, old, spare, begun=begun) for one in worlds]
        cluster, times = self.space.cluster, self.space.times
        made = plan(rest.tasks, draws, self.space.models, cluster, times=times, asked=self.asked)
        new = [play(one, made.planned, made.spare, begun=begun) for one in worlds]
        kept_s, new_s = _mean_s(kept), _mean_s(new)
        if new_s < kept_s * (1.0 - LEAST_GAIN) and _sooner_for_sure(new, kept):
            self.stages, self.spare = made.planned, made.spare
            return Revised(
                _guide(made.planned, made.spare, new),
                True,
                f"{about}; the rest is planned anew: {new_s:.0f} s rather than {kept_s:.0f} s",
            )
        self.stages, self.spare = old, spare
        return Revised(_guide(old, spare, kept), False, f"{about}; no other plan would end sooner")


def _last(stages: Sequence[Plans], ahead: Sequence[Plans]) -> Plans:
    """The last plans of models that are in none of the stages ahead: they may have more to do than was planned."""
    there = {plan_.model for plans in ahead for plan_ in plans}
    last = {plan_.model: plan_ for plans in stages for plan_ in plans}
    return tuple(plan_ for model, plan_ in sorted(last.items()) if model not in there)


def _mean_s(played: Sequence[Played]) -> float:
    return float(np.mean([one.end_s for one in played]))


def _sooner_for_sure(new: Sequence[Played], kept: Sequence[Played]) -> bool:
    """Whether the difference over the same draws is beyond twice its standard error."""
    gain_s = np.array([old.end_s - one.end_s for one, old in zip(new, kept, strict=True)])
    return bool(gain_s.mean() > 2.0 * gain_s.std(ddof=1) / math.sqrt(len(gain_s)))


def _guide(stages: tuple[Plans, ...], spare: Plans, played: Sequence[Played]) -> Guide:
    ends = [one.end_s for one in played]
    mean_s = max(float(np.mean(ends)), 1e-9)
    slack = (min(ends) / mean_s * SLACK[0], max(ends) / mean_s * SLACK[1])
    return Guide(stages, spare, ends_s(stages, played[0].stages), slack)


__all__ = ["FALSE_ALARMS", "Replanner"]
