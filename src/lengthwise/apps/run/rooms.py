"""Where engines have room: on a cluster's GPUs, or wherever others run them."""

from __future__ import annotations

from dataclasses import dataclass

from lengthwise.apps import placement
from lengthwise.apps.run.contracts import Plans
from lengthwise.schema.app import Cluster, ModelPlan, Placement
from lengthwise.schema.errors import InternalError


@dataclass(frozen=True)
class ClusterRooms:
    """The GPUs of a cluster, with the least to load anew.

    Attributes:
        cluster: Of the GPUs.
        seconds: Until a replica is ready.
    """

    cluster: Cluster
    seconds: placement.Seconds

    def fits(self, plans: Plans) -> bool:
        """Whether plans have room beside one another."""
        return placement.fits(plans, self.cluster)

    def place(self, plans: Plans, before: Placement, running: Plans, asleep: Placement) -> Placement:
        """Where their replicas go."""
        slept = {(plan.model, plan.shape): asleep[plan.model] for plan in plans if plan.model in asleep}
        found = placement.place(plans, before, self.cluster, self.seconds, running=running, asleep=slept)
        if found is None:
            raise InternalError(f"plans that fit must have a place; {plans} have none")
        return found

    def ready_s(self, plan: ModelPlan) -> float:
        """As planned."""
        return self.seconds(plan, "start")


@dataclass(frozen=True)
class GivenRooms:
    """Engines that others run: all have room, and a replica is its number among its model's."""

    def fits(self, plans: Plans) -> bool:  # noqa: ARG002 - the contract's
        """They run already."""
        return True

    def place(
        self,
        plans: Plans,
        before: Placement,  # noqa: ARG002 - the contract's
        running: Plans,  # noqa: ARG002
        asleep: Placement,  # noqa: ARG002
    ) -> Placement:
        """Their numbers."""
        return {plan.model: tuple((number,) for number in range(plan.dp)) for plan in plans}

    def ready_s(self, plan: ModelPlan) -> float:  # noqa: ARG002 - the contract's
        """Nobody knows."""
        return 0.0
