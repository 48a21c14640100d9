"""What looking for a plan costs, counted rather than timed: the same input has the same plan."""

from __future__ import annotations

from collections.abc import Sequence

from lengthwise.apps.plan.runs import REPRESENTED_TASKS
from lengthwise.apps.plan.stages import Stages

LOOK_S, REQUEST_S = 7e-5, 5e-6
"""Seconds of a stage that is looked at and of a request that is simulated, about: fitted to what the methods took on
two applications, on one core of a server."""
AGAIN = 1.5
"""So many times what Algorithm 1 simulates from the start it simulates in all: models that were cut, too."""


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
            LOOK_S * stages.looks + REQUEST_S * stages.runs.simulated_requests for stages in self._counted
        )


def expected_cost_s(stages: Stages, name: str) -> float:
    """What a method will cost, about.

    Algorithm 1 simulates each model under each of its plans, and some of them again; "max" looks at those plans alone
    that have the most GPUs.
    """
    requests = 0
    for model, load in enumerate(stages.load.models):
        plans = stages.space.plans(model)
        most = max(plan.gpus for plan in plans) if name.startswith("max") else 0
        for plan in plans:
            if plan.gpus >= most:
                stands_for_all = len(load) >= REPRESENTED_TASKS * plan.dp
                requests += -(-len(load) // plan.dp) if stands_for_all else len(load)
    return AGAIN * REQUEST_S * requests
