"""What looking for a plan costs, counted rather than timed: the same input has the same plan."""

from __future__ import annotations

from collections.abc import Sequence

from lengthwise.apps.plan.runs import REPRESENTED_TASKS
from lengthwise.apps.plan.stages import Stages

LOOK_S, RUN_S, REQUEST_S = 4.5e-5, 1.7e-3, 5.2e-7
"""Seconds of a stage that is looked at, of a run that is simulated and of a request in it, about: fitted (least squares
of relative errors) to what the methods, lists and beam took on eight applications, on one core of a server. Most are
within a half; chains, whose requests wait for one another, take up to four times as long."""
AGAIN, LOOKS = 3.0, 6
"""So many times what Algorithm 1 simulates from the start it simulates in all, models that were cut, too; and so many
stages it looks at for each of these runs."""


class Purse:
    """What was spent on looking, in counted seconds.

    Args:
        counted: Whose work is counted, from now on.
        spent_s: Before that.
    """

    def __init__(self, counted: Sequence[Stages], spent_s: float = 0.0) -> None:
        self._counted = counted
        self._before_s = self._all_s() - spent_s

    @property
    def spent_s(self) -> float:
        """By now."""
        return self._all_s() - self._before_s

    def holds(self, cost_s: float, limit_s: float) -> bool:
        """Whether something is left of so much, and this too could be spent."""
        spent_s = self.spent_s
        return spent_s < limit_s and spent_s + cost_s <= limit_s

    def _all_s(self) -> float:
        return sum(
            LOOK_S * stages.looks
            + RUN_S * stages.runs.simulated_runs
            + REQUEST_S * stages.runs.simulated_requests
            for stages in self._counted
        )


def expected_cost_s(stages: Stages, name: str) -> float:
    """What a method will cost, about.

    Algorithm 1 simulates each model under each of its plans, and most of them again; "max" looks at those plans alone
    that have the most GPUs, each once.
    """
    seconds, alone = 0.0, name.startswith("max")
    for model, load in enumerate(stages.load.models):
        plans = stages.space.plans(model)
        most = max(plan.gpus for plan in plans) if alone else 0
        for plan in plans:
            if plan.gpus >= most:
                stands_for_all = len(load) >= REPRESENTED_TASKS * plan.dp
                requests = -(-len(load) // plan.dp) if stands_for_all else len(load)
                seconds += RUN_S + REQUEST_S * requests + (0.0 if alone else LOOK_S * LOOKS)
    return seconds * (1.0 if alone else AGAIN)
