"""Which execution plans a model may have on a cluster, and what each of them is to the engine."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lengthwise import catalog, engine
from lengthwise.apps.placement import degrees, fits
from lengthwise.schema.app import Cluster, Machine, ModelPlan
from lengthwise.schema.cost_tables import CostTables
from lengthwise.schema.deployment import Deployment, EngineLimits
from lengthwise.schema.errors import DoesNotFitError, InputError, ProfileError, UnknownNameError
from lengthwise.schema.files import write_whole
from lengthwise.schema.specs import ModelSpec

HOWS = ("start", "wake", "stop", "sleep")
"""A replica is ready after the first two, and has left its GPUs after the others."""


@dataclass(frozen=True)
class SwitchRates:
    """What is assumed where nothing was measured: an engine's own start, and what weights pass through.

    Chosen so that starting comes to what SamuLLM measured with vLLM on 8 x A100 (section 5.1: 11 s to 47 s, for models
    of 6 B to 70 B parameters, 12.5 to 138 GB): one stream from disk for all GPUs of a replica, then PCIe 4 to each GPU
    beside the others. It is a fit to the two ends of a range, not a measurement of any disk. Of engines that end or
    fall asleep nothing is assumed: those seconds count where they were measured.
    """

    engine_start_s: float = 7.0
    disk_bytes_per_s: float = 3.7e9
    pcie_bytes_per_s: float = 25e9

    def seconds(self, weight_bytes: float, gpus: int, how: str) -> float:
        """Until a replica of so many GPUs is ready, or gone; a wake copies weights from host memory alone."""
        if how in ("stop", "sleep"):
            return 0.0
        copied_s = weight_bytes / gpus / self.pcie_bytes_per_s
        if how == "wake":
            return copied_s
        return self.engine_start_s + weight_bytes / self.disk_bytes_per_s + copied_s


@dataclass(frozen=True)
class SwitchTimes:
    """Seconds by (model, GPU, tp, pp, how); what is not there is told by the rates.

    Attributes:
        measured: The table; how is one of ``HOWS``.
        rates: For what was not measured.
        wakes: Whether engines sleep (and wake on the same GPUs) rather than being stopped, where nothing was measured.
    """

    measured: Mapping[tuple[str, str, int, int, str], float] = field(default_factory=dict)
    rates: SwitchRates = SwitchRates()
    wakes: bool = False

    def seconds(self, name: str, weight_bytes: float, plan: ModelPlan, how: str) -> float:
        """Until one replica of the plan is ready, or has left its GPUs.

        Raises:
            UnknownNameError: There is no such way.
        """
        if how not in HOWS:
            raise UnknownNameError("way to switch a replica", how, HOWS)
        found = self.measured.get((name, plan.gpu, plan.tp, plan.pp, how))
        if found is not None:
            return found
        if how == "wake" and not self.wakes:
            return self.seconds(name, weight_bytes, plan, "start")
        return self.rates.seconds(weight_bytes, plan.tp * plan.pp, how)

    def can_wake(self, name: str, plan: ModelPlan) -> bool:
        """Whether a replica of the plan sleeps when it is not needed."""
        return self.wakes or (name, plan.gpu, plan.tp, plan.pp, "wake") in self.measured


def read_switch_times(path: Path | str) -> SwitchTimes:
    """The table of a file as ``write_switch_times`` writes it.

    Raises:
        InputError: The file cannot be read, or a row lacks something; the message names it.
    """
    try:
        told = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read the switch times {path}: {error}") from error
    rows = told.get("replica", [])
    return SwitchTimes({_key(row, n, path): _seconds(row, n, path) for n, row in enumerate(rows, 1)})


def write_switch_times(path: Path | str, times: SwitchTimes) -> None:
    """Writes what was measured: TOML, a ``[[replica]]`` with model, gpu, tp, pp, how and seconds each."""
    lines = []
    for (model, gpu, tp, pp, how), seconds in sorted(times.measured.items()):
        lines += ["[[replica]]", f"model = {_text(model)}", f"gpu = {_text(gpu)}", f"tp = {tp}", f"pp = {pp}"]
        lines += [f'how = "{how}"', f"seconds = {float(seconds)!r}", ""]
    write_whole(path, "\n".join(lines).encode())


def _key(row: Mapping[str, object], n: int, path: Path | str) -> tuple[str, str, int, int, str]:
    missing = [key for key in ("model", "gpu", "how", "seconds") if key not in row]
    if missing:
        raise InputError(f"{path}: replica {n} must have model, gpu, how and seconds; it lacks {', '.join(missing)}")
    how = str(row["how"])
    if how not in HOWS:
        raise UnknownNameError("way to switch a replica", how, HOWS)
    tp, pp = row.get("tp", 1), row.get("pp", 1)
    if not isinstance(tp, int) or not isinstance(pp, int) or min(tp, pp) < 1:
        raise InputError(f"{path}: replica {n}: tp and pp must be whole numbers of at least 1; they are {tp} and {pp}")
    return str(row["model"]), str(row["gpu"]), tp, pp, how


def _seconds(row: Mapping[str, object], n: int, path: Path | str) -> float:
    value = row["seconds"]
    if not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise InputError(f"{path}: replica {n}: seconds must be a number of at least 0; it is {value!r}")
    return float(value)


def _text(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


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

    def _of_kind(self, model: int, kind: str, pipelines: Sequence[int], cause: list[InputError]) -> list[ModelPlan]:
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
                cause.append(error)
                continue
            more = (replace(one, dp=dp) for dp in range(1, there // one.gpus + 1))
            found += [plan for plan in more if self.fits([plan])]
        return found
