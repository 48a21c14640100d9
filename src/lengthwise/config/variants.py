"""From a checked scenario to the nouns that the engine takes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise import catalog, cost, engine, policy, theory
from lengthwise.config.files import python_object, resolved
from lengthwise.config.scenario import Scenario
from lengthwise.config.sections import DecodeSection, DeploymentSection, EngineSection, SchedulerSection
from lengthwise.config.workload import PerSeed, per_seed
from lengthwise.cost import HostOverhead
from lengthwise.schema.deployment import Deployment, EngineLimits, Scheduler
from lengthwise.schema.errors import InputError, PolicyError, UnknownNameError
from lengthwise.schema.specs import GpuSpec, ModelSpec
from lengthwise.schema.workload import Workload
from lengthwise.search import Space

Floats = npt.NDArray[np.float64]

MAX_BINS = 1024
_OTHER_SEED = 2**62
"""Added to the run's seed: the boundaries come from other requests than those that are simulated."""


def _equal_mass(lengths: Floats, k: int, batch: int) -> Floats:  # noqa: ARG001 - one contract for all rules
    """As many requests in every bin."""
    return theory.equal_mass(theory.SampledTimes(lengths), k)


def _uniform_optimal(lengths: Floats, k: int, batch: int) -> Floats:  # noqa: ARG001
    """Bins of equal width, the best where lengths are uniform (Lemma 4.1)."""
    low, high = float(lengths.min()), float(lengths.max())
    return np.zeros(0) if low == high else theory.uniform_optimal(theory.UniformTimes(low, high), k)


def _exponential(lengths: Floats, k: int, batch: int) -> Floats:
    """The recursion of Lemma A.1, for lengths that are exponential of the same mean."""
    return theory.exponential_recursion(theory.ExponentialTimes(1.0 / float(lengths.mean())), batch, k)


def _learned(lengths: Floats, k: int, batch: int) -> Floats:
    """The least expected time of a batch of ``max_num_seqs``, for lengths of any distribution."""
    return theory.learned(theory.SampledTimes(lengths), batch, k)


RULES: dict[str, Callable[[Floats, int, int], Floats]] = {
    "equal_mass": _equal_mass,
    "uniform_optimal": _uniform_optimal,
    "exponential": _exponential,
    "learned": _learned,
}
"""Ways to cut a workload's predicted lengths into ``k`` bins."""
BINNING_RULES = {
    name: f"Multi-Bin, boundaries from the workload: {(rule.__doc__ or '')}" for name, rule in RULES.items()
}
"""The rules by name, in a line each."""


def binning_of(binning: Any, scenario: Scenario) -> Any:
    """What the scheduler takes: None for "none", boundaries for a rule, anything else as it is.

    Raises:
        PolicyError: A rule's parameters are wrong, or the workload predicts nothing.
    """
    if binning == "none":
        return None
    if not isinstance(binning, str) or binning.partition("(")[0].strip() not in RULES:
        _require_known(binning)
        return binning
    name, k = _rule(binning)
    cuts = RULES[name](_lengths(binning, scenario), k, scenario.engine.max_num_seqs)
    return f"bins(boundaries={_edges(cuts)})"


def _require_known(binning: Any) -> None:
    """Raises UnknownNameError, which lists the rules too."""
    if not isinstance(binning, str):
        return
    try:
        policy.resolve("binning", binning)
    except UnknownNameError as error:
        known = [*error.known, *(f"{name}(k=8)" for name in RULES)]
        raise UnknownNameError(error.kind, error.name, known) from None


def _rule(text: str) -> tuple[str, int]:
    name, given = policy.call_of("binning", text) if "(" in text else (text, {})
    k = given.get("k")
    if set(given) != {"k"} or isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= MAX_BINS:
        raise PolicyError(
            f"binning {name} takes a number of bins from 1 to {MAX_BINS}, as in {name}(k=8); got {text!r}"
        )
    return name, k


def _lengths(binning: str, scenario: Scenario) -> Floats:
    """Predicted lengths of other requests of the workload; of a replayed trace, which has no others, its own."""
    draw = per_seed(scenario.workload, scenario.folder, scenario.predictor, scenario.deployment.model)
    requests = draw(scenario.run.seed + _OTHER_SEED)
    if requests.predicted_tokens is None:
        raise PolicyError(
            f"binning {binning!r} cuts predicted output lengths, and this workload has none; give it some "
            '([predictor] kind = "oracle" predicts the truth)'
        )
    return np.maximum(requests.predicted_tokens, 1.0)


def _edges(cuts: Floats) -> list[float]:
    """Where bins begin, for cuts that are the last of each bin; whole numbers stay whole, none stands twice."""
    begins = np.where(cuts == np.floor(cuts), cuts + 1, cuts)
    return [float(f"{edge:.9g}") for edge in np.unique(begins)]


TABLES = "tables:"
_KEYS = ("model", "gpu", "node", "tp", "weight_dtype", "kv_dtype")
"""Settings of a deployment on which seconds hang; of stages the files themselves tell."""


def require_own(scenario: Scenario, deployed: Deployment) -> None:
    """Nothing, if the scenario's file of tables is of what is deployed, does not tell, or there is none.

    Raises:
        ProfileError: The tables are of another model, GPU, degree or data type.
    """
    if (path := _path(scenario)) is not None:
        cost.require_made_for(path, cost.MadeFor.of_deployment(deployed))


def untold_note(scenario: Scenario) -> str:
    """That nothing tells what the scenario's file of tables is of; empty where it tells, or there is none."""
    path, on = _path(scenario), scenario.deployment
    if path is None or cost.made_for(path) is not None:
        return ""
    return (
        f"What the cost tables in {path} are of is not kept in them (older files do not tell): that they are of "
        f"{on.model} on {on.gpu} with tp {on.tp} is taken on trust. Calibrate or fit them again to have it checked."
    )


def require_one_each(scenario: Scenario, space: Space) -> None:
    """Nothing, if no file of tables stands for several models, GPUs, degrees or data types of a search's space.

    Raises:
        InputError: One does, and would make them all alike.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for axes in space.alternatives():
        for source in _values("cost", scenario, axes):
            if not str(source).startswith(TABLES):
                continue
            for key in _KEYS:
                values = found.setdefault(source, {}).setdefault(key, {})
                values.update({str(value): value for value in _values(key, scenario, axes)})
    for source, keys in found.items():
        several = [f"{key} {', '.join(values)}" for key, values in keys.items() if len(values) > 1]
        if several:
            raise InputError(
                f"a search with cost {source!r} must be of what the tables were made for: one model on one GPU at one "
                f"tensor-parallel degree; its space has {'; '.join(several)}, which the tables would make all alike. "
                "Give a source that tells them apart (roofline, profile:FILE), or a file for each in [[search.either]]"
            )


def _values(key: str, scenario: Scenario, axes: Mapping[str, Sequence[Any]]) -> Iterator[Any]:
    yield from axes.get(f"deployment.{key}", (getattr(scenario.deployment, key),))


def _path(scenario: Scenario) -> str | None:
    source = scenario.deployment.cost
    if not source.startswith(TABLES):
        return None
    return str(resolved(source.removeprefix(TABLES), scenario.folder))


_AXES = ("rank", "leave", "batching", "memory", "preempt", "router", "takeover", "binning")
_NUMBERS = ("max_wait_s", "batch_wait_s", "window_tokens")
_KEY_OF_KIND = {
    "model": "deployment.model",
    "GPU": "deployment.gpu",
    "node": "deployment.node",
    "host": "deployment.host",
    "memory planner": "deployment.memory_planner",
    "workload": "workload.preset",
    "trace format": "workload.format",
    "scheduler": "scheduler.policy",
    **{f"{axis} policy": f"scheduler.{axis}" for axis in _AXES},
}

_OF_DECODE = "of the side that decodes, deployment.decode"


@dataclass(frozen=True)
class Variant:
    """One side of a comparison: what runs, and the requests of each seed.

    Attributes:
        name: From the file, or the scenario's own name where it has no variants.
        scenario: The variant's whole settings.
        deployment: What runs.
        workload: From a seed to its requests; variants with equal [workload] share them.
    """

    name: str
    scenario: Scenario
    deployment: Deployment
    workload: Callable[[int], Workload]

    @property
    def has_chance(self) -> bool:
        """Whether a seed changes anything: drawn requests, or a router that draws among replicas."""
        router = policy.resolve("router", self.deployment.scheduler.router)
        draws = router.uses("draw_a") or router.uses("draw_b")
        drawn = not self.scenario.workload.is_replay or self.scenario.predictor.has_chance
        return drawn or (draws and self.deployment.parallel.replicas > 1)


def build(scenario: Scenario) -> list[Variant]:
    """What a scenario asks to be simulated, one entry a variant.

    Raises:
        InputError: A name, a file or a size does not work out; a note says in which variant.
    """
    sources: dict[str, PerSeed] = {}
    variants = []
    for whole in scenario.effective():
        with _located(scenario, whole):
            variants.append(Variant(whole.name, whole, deployment(whole), _source(whole, sources)))
    return variants


def deployment(scenario: Scenario) -> Deployment:
    """The deployment of a scenario without its variants; raises InputError as ``build`` does."""
    section = scenario.deployment
    deployed = engine.deploy(
        model=_model(section, scenario),
        gpu=spec_of(section.gpu, scenario),
        node=spec_of(section.node, scenario) if section.node else None,
        tp=section.tp,
        pp=section.pp,
        replicas=section.replicas,
        limits=_limits(scenario.engine, section),
        scheduler=scheduler(scenario),
        cost=cost_source(section, scenario),
        host=host(section),
        memory_planner=section.memory_planner,
        num_blocks=section.num_blocks,
    )
    require_own(scenario, deployed)
    if section.decode is not None:
        deployed = _disaggregated(deployed, section, section.decode, scenario)
    return replace(deployed, name=scenario.name)


def _disaggregated(
    local: Deployment, section: DeploymentSection, remote: DecodeSection, scenario: Scenario
) -> Deployment:
    """The deployment with its decode side."""
    try:
        axes: dict[str, Any] = {
            axis: _named_or_object(getattr(remote, axis), scenario) for axis in ("batching", "memory", "router")
        }
        decodes = engine.deploy(
            local.model,
            local.gpu,
            node=local.node,
            tp=remote.tp,
            pp=remote.pp,
            replicas=remote.replicas,
            limits=replace(local.limits, **remote.limits, max_model_len=local.max_model_len),
            scheduler=replace(local.scheduler, **axes, preempt=remote.preempt, takeover="never", binning=None),
            cost=cost_source(section, scenario),
            host=host(section),
            memory_planner=section.memory_planner,
            num_blocks=remote.num_blocks,
        )
        require_own(scenario, decodes)
    except InputError as error:
        error.add_note(_OF_DECODE)
        raise
    link = None if remote.link == "host" else local.node.link_for(section.tp * section.pp + remote.tp * remote.pp)
    way = engine.kv_transfer_over(link, local, decodes)
    way = replace(way, fixed_s=way.fixed_s + remote.kv_transfer, one_at_a_time=remote.one_at_a_time)
    return engine.disaggregate(local, decodes, way)


def scheduler(scenario: Scenario) -> Scheduler:
    """The scheduler of a scenario: the named one, with what the file sets itself."""
    given = scenario.scheduler.model_dump(exclude={"policy"}, exclude_none=True)
    own: dict[str, Any] = {axis: _named_or_object(given[axis], scenario) for axis in _AXES if axis in given}
    own |= {name: given[name] for name in _NUMBERS if name in given}
    chosen = replace(_whole_scheduler(scenario.scheduler, scenario), **own)
    return replace(chosen, binning=binning_of(chosen.binning, scenario))


def _whole_scheduler(section: SchedulerSection, scenario: Scenario) -> Scheduler:
    if ":" not in section.policy:
        return _named_scheduler(section.policy)
    given = python_object(section.policy, scenario.folder)
    if isinstance(given, policy.Policy):
        axis: dict[str, Any] = {given.axis: given}
        return replace(policy.scheduler("vllm_v1"), **axis)
    if isinstance(given, Scheduler):
        return given
    raise PolicyError(
        f"scheduler.policy {section.policy!r} must be a Scheduler or a function decorated with "
        f"lengthwise.policy.rank, batching, memory, router, takeover or binning; it is a {type(given).__name__}"
    )


def _named_scheduler(name: str) -> Scheduler:
    try:
        return policy.scheduler(name)
    except UnknownNameError:
        if axis := _axis_of(name):
            raise PolicyError(
                f"there is no scheduler named {name!r}; it is a {axis}: give scheduler.{axis} = {json.dumps(name)}"
            ) from None
        raise


def _axis_of(text: str) -> str | None:
    """The axis that has a policy of this name, its parameters right or not; None where there is none."""
    if text.partition("(")[0].strip() in RULES:
        return "binning"
    for axis in ("rank", "batching", "memory", "router", "takeover", "binning"):
        try:
            policy.resolve(axis, text)
        except UnknownNameError:
            continue
        except PolicyError:
            return axis
        return axis
    return None


def _named_or_object(value: str, scenario: Scenario) -> object:
    return python_object(value, scenario.folder) if ":" in value else value


def hardware(scenario: Scenario) -> tuple[ModelSpec, GpuSpec]:
    """The model and the GPU that a scenario names; raises InputError where one of them is not known."""
    section = scenario.deployment
    return _model(section, scenario), catalog.gpu(spec_of(section.gpu, scenario))


def _model(section: DeploymentSection, scenario: Scenario) -> ModelSpec:
    """A catalog name wins over a path; a path starts at the scenario's folder."""
    path = resolved(section.model, scenario.folder)
    if section.model.endswith(".json"):
        return catalog.model(path)
    try:
        return catalog.model(section.model)
    except UnknownNameError:
        if path.exists():
            return catalog.model(path)
        raise


def spec_of(name: str, scenario: Scenario) -> str:
    """A GPU's or node's name, or the path of the file that describes it."""
    return str(resolved(name, scenario.folder)) if name.endswith(".toml") else name


def cost_source(section: DeploymentSection, scenario: Scenario) -> str:
    """The cost source with its path resolved."""
    source, colon, place = section.cost.partition(":")
    return f"{source}:{resolved(place, scenario.folder)}" if colon else source


def host(section: DeploymentSection) -> str | HostOverhead:
    """What the engine's host adds to a step and before the engine: a name of ``cost.HOST_NAMES``, or seconds."""
    given = section.host
    return given if isinstance(given, str) else HostOverhead(**given.model_dump())


def _limits(section: EngineSection, on: DeploymentSection) -> EngineLimits:
    limits = section.model_dump()
    if section.max_step_seqs == "per_stage":
        limits["max_step_seqs"] = max(1, section.max_num_seqs // on.pp)
    return EngineLimits(**limits, weight_dtype=on.weight_dtype, kv_dtype=on.kv_dtype)


def _source(scenario: Scenario, known: dict[str, PerSeed]) -> PerSeed:
    model, predictor = scenario.deployment.model, scenario.predictor
    key = scenario.workload.model_dump_json()
    if predictor.kind != "none":
        key += predictor.model_dump_json() + model
    if key not in known:
        known[key] = per_seed(scenario.workload, scenario.folder, predictor, model)
    return known[key]


@contextmanager
def _located(scenario: Scenario, complete: Scenario) -> Iterator[None]:
    """Tells an error where in the file its cause stands."""
    try:
        yield
    except InputError as error:
        told = _OF_DECODE in getattr(error, "__notes__", ())
        key = _KEY_OF_KIND.get(error.kind, "") if isinstance(error, UnknownNameError) and not told else ""
        variant = f"variant {complete.name!r} of " if scenario.variants else ""
        error.add_note(f"in {variant}{scenario.source}{f', {key}' if key else ''}")
        raise
