"""Execution plans that each model can have on a cluster, their deployments, and the times to switch between them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lengthwise import catalog, engine, policy
from lengthwise.apps.placement import degrees, fits
from lengthwise.cost.model_error import comparable_deployments
from lengthwise.schema.app import Cluster, ModelPlan
from lengthwise.schema.cost_tables import CostTables
from lengthwise.schema.deployment import Deployment, EngineLimits
from lengthwise.schema.errors import DoesNotFitError, InputError, ProfileError, UnknownNameError
from lengthwise.schema.files import write_atomic
from lengthwise.schema.specs import ModelSpec

FULL_CACHE = replace(policy.scheduler("vllm_v1"), hybrid_kv_cache=False)
"""The scheduler of applications' engines, in which every layer caches all tokens."""

HOWS = ("start", "wake", "stop", "sleep")  # the first two end with a ready replica, the others with free GPUs


@dataclass(frozen=True)
class SwitchRates:
    """Assumed start time of an engine and bandwidths of weights, where no switch time was measured.

    Weights are read from disk in one stream per replica, and copied to its GPUs in parallel (PCIe 4). The values are
    near SamuLLM's vLLM on 8 x A100: 29 s for 13 B parameters (section 2: 30 to 35 s), 15 s for 6 B (section 5.1: from
    11 s). Some of its models take up to 47 s, for unknown reasons. Stopping or putting to sleep takes no time.
    """

    engine_start_s: float = 2.0
    disk_bytes_per_s: float = 1e9
    pcie_bytes_per_s: float = 25e9

    def seconds(self, weight_bytes: float, gpus: int, how: str) -> float:
        """Return the seconds to start, wake, stop or put to sleep a replica. A wake copies weights from host memory."""
        if how in ("stop", "sleep"):
            return 0.0
        copied_s = weight_bytes / gpus / self.pcie_bytes_per_s
        if how == "wake":
            return copied_s
        return self.engine_start_s + weight_bytes / self.disk_bytes_per_s + copied_s


@dataclass(frozen=True)
class SwitchTimes:
    """Times to start, wake, stop or put to sleep a replica. Times that were not measured follow from ``rates``."""

    # seconds by (model, GPU, tp, pp, one of ``HOWS``)
    measured: Mapping[tuple[str, str, int, int, str], float] = field(default_factory=dict)
    rates: SwitchRates = SwitchRates()
    # whether engines without a measured "wake" sleep instead of stopping, and wake on the same GPUs
    wakes: bool = False
    # whether a change of plan restarts all replicas of the model, as in SamuLLM (section 5.1)
    restarts_all: bool = False

    def seconds(self, name: str, weight_bytes: float, plan: ModelPlan, how: str) -> float:
        """Return the seconds until one replica of the plan is ready or off its GPUs. ``how`` is one of ``HOWS``."""
        if how not in HOWS:
            raise UnknownNameError("way to switch a replica", how, HOWS)
        found = self.measured.get((name, plan.gpu, plan.tp, plan.pp, how))
        if found is not None:
            return found
        if how == "wake" and not self.wakes:
            return self.seconds(name, weight_bytes, plan, "start")
        return self.rates.seconds(weight_bytes, plan.tp * plan.pp, how)

    def can_wake(self, name: str, plan: ModelPlan) -> bool:
        """Return whether a replica of the plan sleeps, instead of stopping, when it is not needed."""
        return self.wakes or (name, plan.gpu, plan.tp, plan.pp, "wake") in self.measured


def write_switch_times(path: Path | str, times: SwitchTimes) -> None:
    """Write measured times as TOML, each as a ``[[replica]]`` with model, gpu, tp, pp, how and seconds."""
    import tomlkit

    names = ("model", "gpu", "tp", "pp", "how", "seconds")
    rows = [dict(zip(names, (*key, float(times.measured[key])), strict=True)) for key in sorted(times.measured)]
    write_atomic(path, tomlkit.dumps({"replica": rows}).encode())


_PIPELINES = (2, 4, 8, 16)


@dataclass(frozen=True)
class Served:
    """A model of the application as the planner uses it. ``limits``, ``cost`` and ``host`` are as in ``engine.deploy``.

    ``model`` is a catalog name, a path of a ``config.json``, or a ModelSpec.
    """

    name: str
    model: str | ModelSpec
    limits: EngineLimits = EngineLimits()
    cost: str | CostTables = "roofline"
    host: str = "default"


@dataclass
class Space:
    """The valid plans of an application's models on a cluster, and their cached deployments.

    A plan is valid if ``engine.deploy`` accepts it (weights and one request fit in memory, its costs are known), ``tp``
    divides the number of heads, and its GPUs can be placed. Plans have ``pp`` > 1 only if none with ``pp`` 1 is valid.
    """

    models: Sequence[Served]
    cluster: Cluster
    times: SwitchTimes = field(default_factory=SwitchTimes)
    deployments: Mapping[ModelPlan, Deployment] = field(
        default_factory=dict
    )  # those that are not built from ``models``

    def __post_init__(self) -> None:
        self._deployments = dict(self.deployments)
        self._plans: dict[int, tuple[ModelPlan, ...]] = {}
        self._fits: dict[tuple[tuple[str, int, int, int], ...], bool] = {}
        self.specs = [catalog.model(m.model) if isinstance(m.model, str) else m.model for m in self.models]
        self._seconds: dict[tuple[int, tuple[str, int, int], str], float] = {}

    def plans(self, model: int) -> tuple[ModelPlan, ...]:
        """Return the valid plans of a model, by increasing number of GPUs.

        Raises:
            DoesNotFitError: There is no valid plan. The message has the reason why the last plan is invalid.
        """
        if model not in self._plans:
            reasons: list[InputError] = []
            found = [*self._valid_plans(model, (1,), reasons)] or [*self._valid_plans(model, _PIPELINES, reasons)]
            if not found:
                raise DoesNotFitError(
                    f"{self.models[model].name} must fit the GPUs; no number of them, up to all "
                    f"{self.cluster.gpus}, suffices. The last plan that was tried: "
                    f"{reasons[-1] if reasons else 'no group of GPUs'}"
                )
            self._plans[model] = tuple(sorted(found, key=lambda p: (p.gpus, p)))
        return self._plans[model]

    def deployment(self, plan: ModelPlan) -> Deployment:
        """Return a plan's deployment, whose router sends each request to the replica with the fewest requests."""
        if plan not in self._deployments:
            one = self._replica(replace(plan, dp=1))
            if plan.dp > 1:
                parallel = replace(one.parallel, replicas=plan.dp)
                one = replace(one, parallel=parallel, scheduler=replace(one.scheduler, router="least_outstanding"))
            self._deployments[plan] = one
        return self._deployments[plan]

    def with_model_errors(self, plans: Iterable[ModelPlan], draws: int) -> list[Space]:
        """Return a copy for each draw of the cost model's error, in which deployments of ``plans`` have its costs.

        In each draw, a model has the same error on all GPUs of one kind and in all plans. Without known errors there
        are no copies.
        """
        every = {one for plan in plans for one in (plan, replace(plan, dp=1))}
        made = {plan: comparable_deployments(self.deployment(plan), draws)[1:] for plan in every}
        return [
            replace(self, deployments={plan: drawn[number] for plan, drawn in made.items() if drawn})
            for number in range(max(map(len, made.values()), default=0))
        ]

    def fits(self, plans: Sequence[ModelPlan]) -> bool:
        """Return whether the plans can run at the same time."""
        key = tuple(sorted((p.gpu, p.dp, p.tp, p.pp) for p in plans))
        if key not in self._fits:
            # Only sizes matter; model numbers just keep equal plans distinct.
            distinct = [ModelPlan(n, *shape) for n, shape in enumerate(key)]
            self._fits[key] = sum(p.gpus for p in distinct) <= self.cluster.gpus and fits(distinct, self.cluster)
        return self._fits[key]

    def seconds(self, plan: ModelPlan, how: str) -> float:
        """Return the seconds until a replica of the plan is ready or off its GPUs. ``how`` is one of ``HOWS``."""
        key = (plan.model, plan.shape, how)
        if key not in self._seconds:
            served = self.models[plan.model]
            weights = catalog.weight_bytes(self.specs[plan.model], served.limits.weight_dtype)
            self._seconds[key] = self.times.seconds(served.name, weights, plan, how)
        return self._seconds[key]

    def with_one_gpu_less(self) -> Space | None:
        """Return the space without the cluster's last GPU, or None if a model does not fit there."""
        *others, last = self.cluster.machines
        machines = (*others, replace(last, gpus=last.gpus - 1)) if last.gpus > 1 else tuple(others)
        smaller = Space(self.models, Cluster(machines), self.times)
        try:
            return smaller if machines and all(smaller.plans(m) for m in range(len(self.models))) else None
        except DoesNotFitError:
            return None

    def stays(self, before: ModelPlan, plan: ModelPlan) -> bool:
        """Return whether a model's replicas continue to run when its plan changes."""
        return before == plan if self.times.restarts_all else before.shape == plan.shape

    def leave_s(self, plan: ModelPlan) -> float:
        """Return the seconds until an unneeded replica has left its GPUs. A replica that cannot sleep stops."""
        return self.seconds(plan, "sleep" if self.sleeps(plan) else "stop")

    def sleeps(self, plan: ModelPlan) -> bool:
        """Return whether a replica of the plan sleeps, instead of stopping, when it is not needed."""
        return self.times.can_wake(self.models[plan.model].name, plan)

    def _replica(self, plan: ModelPlan) -> Deployment:
        if plan not in self._deployments:
            served = self.models[plan.model]
            machines = [m for m in self.cluster.machines if m.gpu.name == plan.gpu]
            machine = next((m for m in machines if plan.tp in degrees(m)), machines[0])
            self._deployments[plan] = engine.deploy(
                self.specs[plan.model],
                machine.gpu,
                node=machine.node,
                tp=plan.tp,
                pp=plan.pp,
                limits=served.limits,
                scheduler=FULL_CACHE,
                cost=served.cost,
                host=served.host,
            )
        return self._deployments[plan]

    def _valid_plans(self, model: int, pipelines: Sequence[int], reasons: list[InputError]) -> Iterator[ModelPlan]:
        spec = self.specs[model]
        for kind in dict.fromkeys(m.gpu.name for m in self.cluster.machines):
            machines = [m for m in self.cluster.machines if m.gpu.name == kind]
            gpus = sum(m.gpus for m in machines)
            tps = sorted({tp for m in machines for tp in degrees(m)})
            for pp, tp in itertools.product(pipelines, tps):
                one = ModelPlan(model, kind, 1, tp, pp)
                if one.gpus > gpus or spec.attention.heads % tp or pp > spec.layers:
                    continue
                try:
                    self._replica(one)
                except (DoesNotFitError, ProfileError) as error:
                    reasons.append(error)
                    continue
                more = (replace(one, dp=dp) for dp in range(1, gpus // one.gpus + 1))
                yield from (plan for plan in more if self.fits([plan]))
