"""Which execution plans a model may have on a cluster, and what each of them is to the engine."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lengthwise import catalog, engine
from lengthwise.apps._islands import degrees
from lengthwise.apps.placement import fits
from lengthwise.apps.plan.switching import SwitchTimes
from lengthwise.schema.app import Cluster, Machine, ModelPlan
from lengthwise.schema.cost_tables import CostTables
from lengthwise.schema.deployment import Deployment, EngineLimits
from lengthwise.schema.errors import DoesNotFitError, InputError, ProfileError
from lengthwise.schema.model import ModelSpec

PIPELINES = (2, 4, 8, 16)


@dataclass(frozen=True)
class Served:
    """A model of the application as the planner sees it.

    Attributes:
        name: As the application calls it.
        model: Catalog name, ``config.json``, or shapes.
        limits: The engine's knobs.
        cost: Where seconds come from, as ``engine.deploy`` takes it.
        host: The engine's host, as ``engine.deploy`` takes it.
    """

    name: str
    model: str | ModelSpec
    limits: EngineLimits = EngineLimits()
    cost: str | CostTables = "roofline"
    host: str = "default"


@dataclass
class Space:
    """Valid plans of the models of an application on a cluster, and their deployments, each made once.

    A plan is valid if weights and one request fit (``engine.deploy``), ``tp`` divides the heads, and its GPUs can be
    placed. Pipelines are taken only for a model that fits no machine without.
    """

    models: Sequence[Served]
    cluster: Cluster
    times: SwitchTimes = field(default_factory=SwitchTimes)

    def __post_init__(self) -> None:
        self._made: dict[ModelPlan, Deployment] = {}
        self._plans: dict[int, tuple[ModelPlan, ...]] = {}
        self._fits: dict[tuple[tuple[str, int, int, int], ...], bool] = {}
        self._specs = [catalog.model(m.model) if isinstance(m.model, str) else m.model for m in self.models]
        self._seconds: dict[tuple[int, tuple[str, int, int], str], float] = {}

    def spec(self, model: int) -> ModelSpec:
        """A model's shapes."""
        return self._specs[model]

    def plans(self, model: int) -> tuple[ModelPlan, ...]:
        """Valid plans, from the fewest GPUs.

        Raises:
            DoesNotFitError: There are none; the message says why the largest replica does not do.
        """
        if model not in self._plans:
            self._plans[model] = self._valid(model)
        return self._plans[model]

    def deployment(self, plan: ModelPlan) -> Deployment:
        """What the engine needs of a plan; ``dp`` replicas behind a router that sends to the least busy one."""
        if plan not in self._made:
            one = self._one(plan)
            parallel = replace(one.parallel, replicas=plan.dp)
            scheduler = replace(one.scheduler, router="least_outstanding")
            self._made[plan] = one if plan.dp == 1 else replace(one, parallel=parallel, scheduler=scheduler)
        return self._made[plan]

    def fits(self, plans: Sequence[ModelPlan]) -> bool:
        """Whether plans have room beside one another."""
        key = tuple(sorted((p.gpu, p.dp, p.tp, p.pp) for p in plans))
        if key not in self._fits:
            # Which model is whose does not matter for room; their plans must only be told apart.
            told = [ModelPlan(n, *shape) for n, shape in enumerate(key)]
            self._fits[key] = sum(p.gpus for p in told) <= self.cluster.gpus and fits(told, self.cluster)
        return self._fits[key]

    def seconds(self, plan: ModelPlan, how: str) -> float:
        """Until a replica of the plan is ready, or has left its GPUs."""
        key = (plan.model, plan.shape, how)
        if key not in self._seconds:
            served = self.models[plan.model]
            weights = catalog.weight_bytes(self._specs[plan.model], served.limits.weight_dtype)
            self._seconds[key] = self.times.seconds(served.name, weights, plan, how)
        return self._seconds[key]

    def leave_s(self, plan: ModelPlan) -> float:
        """Until a replica of the plan that is not needed has left its GPUs: asleep where it can, else stopped."""
        return self.seconds(plan, "sleep" if self.sleeps(plan) else "stop")

    def sleeps(self, plan: ModelPlan) -> bool:
        """Whether a replica of the plan sleeps when it is not needed."""
        return self.times.can_wake(self.models[plan.model].name, plan)

    def _one(self, plan: ModelPlan) -> Deployment:
        one = replace(plan, dp=1)
        if one not in self._made:
            served, machine = self.models[plan.model], self._machine(plan)
            self._made[one] = engine.deploy(
                self._specs[plan.model],
                machine.gpu,
                node=machine.node,
                tp=plan.tp,
                pp=plan.pp,
                limits=served.limits,
                cost=served.cost,
                host=served.host,
            )
        return self._made[one]

    def _machine(self, plan: ModelPlan) -> Machine:
        """The first machine of the kind that has a group of this size."""
        machines = [m for m in self.cluster.machines if m.gpu.name == plan.gpu]
        return next((m for m in machines if plan.tp in degrees(m)), machines[0])

    def _valid(self, model: int) -> tuple[ModelPlan, ...]:
        kinds = dict.fromkeys(m.gpu.name for m in self.cluster.machines)
        why: list[InputError] = []
        found = [plan for kind in kinds for plan in self._of_kind(model, kind, (1,), why)]
        if not found:
            found = [plan for kind in kinds for plan in self._of_kind(model, kind, PIPELINES, why)]
        if not found:
            raise DoesNotFitError(
                f"{self.models[model].name} must fit the GPUs, in some number of them; none of "
                f"{self.cluster.gpus} will do. The last that was tried: {why[-1] if why else 'no group of GPUs'}"
            )
        return tuple(sorted(found, key=lambda p: (p.gpus, p)))

    def _of_kind(
        self, model: int, kind: str, pipelines: Sequence[int], why: list[InputError]
    ) -> list[ModelPlan]:
        machines = [m for m in self.cluster.machines if m.gpu.name == kind]
        there = sum(m.gpus for m in machines)
        tps = sorted({tp for m in machines for tp in degrees(m)})
        found = []
        for pp, tp in itertools.product(pipelines, tps):
            one = ModelPlan(model, kind, 1, tp, pp)
            if one.gpus > there or self._specs[model].attention.heads % tp or pp > self._specs[model].layers:
                continue
            try:
                self._one(one)
            except (DoesNotFitError, ProfileError) as error:
                why.append(error)
                continue
            more = (replace(one, dp=dp) for dp in range(1, there // one.gpus + 1))
            found += [plan for plan in more if self.fits([plan])]
        return found
