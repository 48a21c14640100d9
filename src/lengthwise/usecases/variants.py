"""Deployments, schedulers and requests of a checked scenario: one variant for each table of [[variants]]."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise import catalog, cost, engine, policy, theory
from lengthwise.config.files import python_object, resolved
from lengthwise.config.scenario import Scenario
from lengthwise.config.sections import ENGINES, DecodeSection
from lengthwise.policy.contracts import PREFIX_ARGUMENTS
from lengthwise.schema.deployment import (
    Deployment,
    EngineLimits,
    KVOffloading,
    KVStorage,
    Parallelism,
    Scheduler,
    SglangSettings,
    TrtllmSettings,
)
from lengthwise.schema.errors import DoesNotFitError, InputError, PolicyError, UnknownNameError, error_note
from lengthwise.schema.specs import GpuSpec, ModelSpec
from lengthwise.schema.speculation import MTP_ACCEPTANCE, Speculation
from lengthwise.schema.workload import Workload
from lengthwise.usecases.requests import Sharing, sharing_of, workload_by_seed

Floats = npt.NDArray[np.float64]
TABLES = "tables:"  # begins a cost source that is a file of cost tables
MAX_BINS = 1024
_BINNING_SEED = 2**62  # added to the run's seed: bin boundaries are of other requests than those that are simulated
_AXES = ("rank", "victim", "batching", "memory", "preemption_mode", "router", "preemption", "binning")
_KEY_OF_KIND = {
    "model": "deployment.model",
    "GPU": "deployment.gpu",
    "node": "deployment.node",
    "host": "deployment.host",
    "memory planner": "deployment.memory_planner",
    "workload": "workload.preset",
    "trace format": "workload.format",
    "dtype": "deployment.weight_dtype or kv_dtype",
    "scheduler": "scheduler.policy",
    **{f"{axis} policy": f"scheduler.{axis}" for axis in _AXES},
}
_IN_DECODE, _IN_GROUP = "of deployment.decode", "of deployment.groups"


@dataclass(frozen=True)
class Variant:
    """One variant of a scenario: a deployment, and the requests of each seed."""

    name: str  # from the file, or the scenario's own name where it has no variants
    scenario: Scenario
    deployment: Deployment
    # From a seed to its requests; variants with equal [workload] share them.
    workload: Callable[[int], Workload]

    @property
    def is_random(self) -> bool:
        """Return whether requests, predictions, a router, the queue's order or accepted tokens are random."""
        deployed, drawn = self.deployment, not self.scenario.workload.is_replay or self.scenario.predictor.is_random
        sides = [(deployed.scheduler.router, deployed.schedulers)]
        sides += [(deployed.decode.router, deployed.decode.parallel.ranks)] if deployed.decode else []
        draws = (policy.resolve("router", router).uses("draw_a", "draw_b") and count > 1 for router, count in sides)
        return drawn or any(draws) or deployed.scheduler.shuffles or deployed.speculation is not None


def build(scenario: Scenario) -> list[Variant]:
    """Return the variants of a scenario, ready to be simulated."""
    shared: dict[str, Callable[[int], Workload]] = {}
    variants = []
    for expanded in scenario.variant_scenarios():
        with location_note(scenario, expanded, with_key=True):
            deployed = deployment(expanded)
            # The block size of shared prompts depends on the engine's block size.
            key = f"{expanded.workload.model_dump_json()} {expanded.engine.block_size}"
            if expanded.predictor.kind != "none":
                key += expanded.predictor.model_dump_json() + expanded.deployment.model
            if key not in shared:
                shared[key] = workload_by_seed(expanded)
            variants.append(Variant(expanded.name, expanded, deployed, shared[key]))
    return variants


@contextmanager
def location_note(scenario: Scenario, expanded: Scenario, *, with_key: bool = False) -> Iterator[None]:
    """Add a note to an InputError in this context: the file and the variant that caused it.

    If ``with_key``, the note on an unknown name also has the file's key under which the name is given.
    """
    try:
        with engine_note(expanded):
            yield
    except InputError as error:
        variant = f"variant {expanded.name!r} of " if scenario.variants else ""
        key = ""
        inner = any(note.startswith((_IN_DECODE, _IN_GROUP)) for note in getattr(error, "__notes__", ()))
        if with_key and isinstance(error, UnknownNameError) and not inner:
            key = _KEY_OF_KIND.get(error.kind, "")
        error.add_note(f"in {variant}{scenario.source}{f', {key}' if key else ''}")
        raise


@contextmanager
def engine_note(scenario: Scenario) -> Iterator[None]:
    """Add a note to an InputError in this context: the settings in its message that are the engine's defaults."""
    try:
        yield
    except InputError as error:
        found = []
        for section, defaults in scenario.engine_defaults().items():
            for key, value in defaults.items():
                named = rf"(scheduler|policy\b.*) [\"']{value}[\"']" if key == "policy" else rf"\b{key}\b"
                if key not in getattr(scenario, section).model_fields_set and re.search(named, str(error)):
                    found.append(f"{section}.{key} = {json.dumps(value)}")
        if found:
            error.add_note(f'engine = "{scenario.engine.name}" sets {" and ".join(found)}')
        raise


def speculation(scenario: Scenario) -> Speculation | None:
    """Return the scenario's speculative decoding, or None without it."""
    section = scenario.deployment.speculation
    if section is None or section.num_speculative_tokens == 0:
        return None
    with_mtp = {name: model.metadata.mtp_modules > 0 for name, model in catalog.models().items()}
    if section.method == "mtp" and not with_mtp.get(name := model_of(scenario).name, True):
        raise InputError(
            f'deployment.speculation.method = "mtp" needs a model with modules of multi-token prediction, and {name} '
            f"has none (models that have them: {', '.join(filter(with_mtp.get, with_mtp))}). Take another method, such "
            "as eagle3 or ngram"
        )
    given = section.model_dump(exclude={"num_speculative_tokens_per_batch_size", "draft_model"})
    ranges, rates, draft = section.num_speculative_tokens_per_batch_size, section.acceptance, section.draft_model or ""
    if rates is None and section.method != "mtp":
        raise InputError(
            f'deployment.speculation with method = "{section.method}" needs acceptance, which is missing. Give a rate, '
            "or one for each position"
        )
    given["acceptance"] = MTP_ACCEPTANCE if rates is None else tuple(rates) if isinstance(rates, list) else rates
    if draft and resolved(draft, scenario.folder).exists():
        draft = str(resolved(draft, scenario.folder))
    return Speculation(**given, per_batch_size=tuple((a, b, k) for a, b, k in ranges or ()), draft_model=draft)


def model_of(scenario: Scenario) -> ModelSpec:
    """Return the model, which is a catalog name or, if there is none, a path relative to the scenario's folder."""
    name = scenario.deployment.model
    path = resolved(name, scenario.folder)
    if name.endswith(".json"):
        return catalog.model(path)
    try:
        return catalog.model(name)
    except UnknownNameError:
        if path.exists():
            return catalog.model(path)
        raise


def hardware(scenario: Scenario) -> tuple[ModelSpec, GpuSpec]:
    """Return the model and the GPU of a scenario. Raises InputError if one is unknown, or for groups of replicas."""
    if scenario.deployment.groups:
        raise InputError(
            "a schedule needs one kind of GPU, and the deployment has groups of replicas, which may differ; remove "
            "[[deployment.groups]]"
        )
    return model_of(scenario), catalog.gpu(scenario.file_or_name(scenario.deployment.gpu))


def deployment(scenario: Scenario, sharing: Sharing | None = None) -> Deployment:
    """Return the deployment of a scenario without variants.

    ``sharing`` is the result of ``sharing_of`` for the scenario; None: it is computed if a router needs it. Raises
    InputError if the deployment cannot be built, and PolicyError if its router needs prefixes or sessions that the
    workload does not have.
    """
    if scenario.deployment.groups:
        return _mixed(scenario, sharing)
    section, limits = scenario.deployment, scenario.engine.model_dump(exclude={"name"})
    if scenario.engine.max_step_seqs == "per_stage":
        limits["max_step_seqs"] = max(1, scenario.engine.max_num_seqs // section.pp)
    if (offloading := limits["kv_offloading"]) is not None:
        if (storage := offloading["storage"]) is not None:
            offloading["storage"] = KVStorage(latency_s=storage.pop("latency"), **storage)
        limits["kv_offloading"] = KVOffloading(latency_s=offloading.pop("latency"), **offloading)
    chosen = scheduler(scenario)
    if section.decode_side is not None:  # KV cache groups are not transferred yet.
        chosen = replace(chosen, hybrid_kv_cache=False)
    deploy = partial(
        engine.deploy,
        model=model_of(scenario),
        gpu=scenario.file_or_name(section.gpu),
        node=scenario.file_or_name(section.node) if section.node else None,
        **section.model_dump(include={"tp", "pp", "replicas", "memory_planner", "num_blocks", *cost.EXPERT_KEYS}),
        limits=EngineLimits(**limits, weight_dtype=section.weight_dtype, kv_dtype=section.kv_dtype),
        cost=scenario.cost_source,
        host=section.host_overhead,
        speculation=speculation(scenario),
    )
    deployed = deploy(scheduler=chosen)
    _require_own_tables(scenario, deployed)
    if section.decode_side is not None:
        deployed = _disaggregated(deployed, section.decode_side, scenario)
    if overlaps_by_engine(scenario) and not overlap_refusal(deployed):
        ahead = replace(deployed.scheduler, async_scheduling=True)  # with groups, two steps in flight need more memory
        deployed = deploy(scheduler=ahead) if deployed.kv.groups else replace(deployed, scheduler=ahead)
    sides = (deployed.scheduler, deployed.decode)
    routers = [policy.resolve("router", side.router) for side in sides if side is not None]
    if any(router.uses(*PREFIX_ARGUMENTS) for router in routers):
        sharing = sharing or sharing_of(scenario)
        for router in routers:
            sharing.require_for(router)
    return replace(deployed, name=scenario.name)


def smallest_tp(scenario: Scenario) -> int:
    """Return the scenario's tp if the model fits, otherwise the smallest tp at which it does.

    Raises DoesNotFitError if there is none.
    """
    with location_note(scenario, scenario, with_key=True):
        try:
            return deployment(scenario).parallel.tp
        except DoesNotFitError as error:
            if error.smallest_tp is None:
                raise
            return error.smallest_tp


def _mixed(scenario: Scenario, sharing: Sharing | None) -> Deployment:
    """Return the deployment of several groups of replicas, each built as a deployment of its own."""
    groups = []
    for number, group in enumerate(scenario.deployment.groups):
        with error_note(f"{_IN_GROUP}.{number}"):
            groups.append(deployment(scenario.updated(group.overrides), sharing))
    if overlaps_by_engine(scenario) and any(map(overlap_refusal, groups)):
        return _mixed(scenario.updated({"scheduler": {"async_scheduling": False}}), sharing)
    return replace(engine.mix(groups), name=scenario.name)


def overlaps_by_engine(scenario: Scenario) -> bool:
    """Return whether the scenario leaves ``async_scheduling`` to its engine, whose default is to overlap steps."""
    own = scenario.engine.name is not None and ENGINES[scenario.engine.name].async_scheduling
    return own and scenario.scheduler.async_scheduling is None


def overlap_refusal(deployed: Deployment) -> str:
    """Return why the steps of a named engine's deployment do not overlap, or "" if they do."""
    if deployed.gpu.is_cpu and not deployed.scheduler.engine_rules:
        return "vLLM forms them in turn on a CPU"
    return engine.async_refusal(deployed)


def _disaggregated(prefill: Deployment, section: DecodeSection, scenario: Scenario) -> Deployment:
    axes: dict[str, Any] = {
        axis: _name_or_object(getattr(section, axis), scenario) for axis in ("batching", "memory", "router")
    }
    side = scenario.of_decode_side()
    node = side.file_or_name(side.deployment.node) if side.deployment.node else None
    with error_note(_IN_DECODE):
        gpu = catalog.gpu(side.file_or_name(side.deployment.gpu))
        decode = engine.deploy(
            prefill.model,
            gpu,
            node=prefill.node if node is None and gpu == prefill.gpu else node,
            **section.model_dump(include={"tp", "pp", "dp", "replicas", "num_blocks"}),
            **_decode_experts(prefill.parallel, section),
            limits=replace(prefill.limits, **section.limits, max_model_len=prefill.max_model_len),
            scheduler=replace(
                prefill.scheduler,
                **axes,
                preemption_mode=section.preemption_mode,
                preemption="never",
                binning=None,
                reserve=False,
            ),
            cost=side.cost_source,
            host=scenario.deployment.host_overhead,
            memory_planner=scenario.deployment.memory_planner,
            speculation=speculation(scenario),
        )
        _require_own_tables(side, decode)
    # The router may pair any two replicas, so the link is the one that connects all GPUs.
    if section.link == "host":
        transfer = engine.kv_transfer_over(None, prefill, decode)
    else:
        transfer = engine.kv_transfer_between(prefill, decode, prefill.gpus + decode.gpus)
    model = prefill.model
    # A transfer has one part for each caching layer of the largest stage.
    layers = round(max(catalog.stage_layers(model, prefill.parallel.pp)) * model.caching_layers / model.layers)
    moved = decode.kv.kv_bytes_per_block / decode.kv.block_size * decode.parallel.tp * decode.parallel.pp  # a token
    transfer = replace(
        transfer,
        fixed_s=transfer.fixed_s + section.kv_transfer,
        links_at_once=section.switch_gb_per_s * 1e9 * transfer.token_s / moved if moved else math.inf,
        sharing=section.link_sharing,
        timeout_s=section.kv_transfer_timeout,
        kv_load_failure_policy=section.kv_load_failure_policy,
        layers=layers if section.layerwise else 0,
    )
    deployed = engine.disaggregate(prefill, decode, transfer)
    assert deployed.decode is not None
    local = section.model_dump(include={"max_local_prefill_length", "max_prefill_queue_size"})
    return replace(deployed, decode=replace(deployed.decode, **local))


def _decode_experts(prefill: Parallelism, section: DecodeSection) -> dict[str, Any]:
    """Return how the decode side divides experts and exchanges tokens: as it states, or like the prefill side."""
    gpus = (section.tp or 1) * (section.dp or 1)
    ep = section.ep or (gpus if 1 < prefill.ep == prefill.tp * prefill.dp else min(prefill.ep, gpus))
    redundant, exchange = section.redundant_experts, str(section.all2all_backend or "")
    if redundant is None and ep > 1:
        redundant = prefill.redundant_experts
    if not exchange and (section.dp or 1) > 1 and ep == gpus:
        exchange = prefill.all2all_backend
    return {"ep": ep, "redundant_experts": redundant, "all2all_backend": exchange or Parallelism.all2all_backend}


def tables_path(scenario: Scenario) -> str | None:
    """Return the path of a scenario's file of cost tables, or None if the costs have another source."""
    source = scenario.deployment.cost
    return str(resolved(source.removeprefix(TABLES), scenario.folder)) if source.startswith(TABLES) else None


def _require_own_tables(scenario: Scenario, deployed: Deployment) -> None:
    if (path := tables_path(scenario)) is not None:
        cost.require_made_for(path, cost.MadeFor.of_deployment(deployed))


def unchecked_tables_note(scenario: Scenario) -> str:
    """Return a warning if the file of cost tables does not record its model and GPU, otherwise ""."""
    path, deployed = tables_path(scenario), scenario.deployment
    if path is None or cost.made_for(path) is not None:
        return ""
    return (
        f"The cost tables in {path} do not record their model and GPU (older files do not). It is assumed that they "
        f"were made for {deployed.model} on {deployed.gpu} with tp {deployed.tp}. Calibrate or fit them again to check."
    )


def scheduler(scenario: Scenario) -> Scheduler:
    """Return the scheduler that a scenario names, with the policies and numbers that the file changes."""
    section = scenario.scheduler
    given = section.model_dump(exclude={"policy"}, exclude_none=True)
    own: dict[str, Any] = {
        key: _name_or_object(value, scenario) if key in _AXES else value for key, value in given.items()
    }
    base = _base_scheduler(section.policy, scenario)
    for name, settings in (("sglang", SglangSettings), ("trtllm", TrtllmSettings)):
        if name in own:
            if base.engine_rules != name:
                raise InputError(
                    f'scheduler.{name} has settings of policy = "{name}"; the policy is {section.policy!r}. '
                    f"Change it, or leave {name} out"
                )
            own[name] = settings(**own[name])
    chosen = replace(base, **own)
    for name in ("max_recompute_share", "max_preemptions_per_request"):
        if getattr(section, name) is not None and not chosen.reserve:
            raise InputError(f"{name} needs reserve = true; set it, or leave {name} out")
    return replace(chosen, binning=_binning(chosen.binning, scenario))


def _name_or_object(value: str, scenario: Scenario) -> Any:
    return python_object(value, scenario.folder) if ":" in value else value


def _base_scheduler(name: str, scenario: Scenario) -> Scheduler:
    if ":" in name:
        given = python_object(name, scenario.folder)
        if isinstance(given, policy.Policy):
            changed: dict[str, Any] = {given.axis: given}
            return replace(policy.scheduler("vllm_v1"), **changed)
        if isinstance(given, Scheduler):
            return given
        raise PolicyError(
            f"scheduler.policy {name!r} must be a Scheduler or a function decorated with "
            f"lengthwise.policy.rank, batching, memory, router, preemption or binning; it is a {type(given).__name__}"
        )
    try:
        return policy.scheduler(name)
    except UnknownNameError:
        if axis := _axis_of(name):
            raise PolicyError(
                f"there is no scheduler named {name!r}; it is a {axis}: give scheduler.{axis} = {json.dumps(name)}"
            ) from None
        raise


def _axis_of(text: str) -> str | None:
    """Return the kind of policy ("rank") that has this name, even with wrong parameters, or None for other names."""
    if text.partition("(")[0].strip() in _RULES:
        return "binning"
    for axis in ("rank", "batching", "memory", "router", "preemption", "binning"):
        try:
            policy.resolve(axis, text)
        except UnknownNameError:
            continue
        except PolicyError:
            pass
        return axis
    return None


_Rule = Callable[[Floats, int, int], Floats]


def _uniform_optimal(lengths: Floats, k: int, batch: int) -> Floats:  # noqa: ARG001 - the signature of all rules
    low, high = float(lengths.min()), float(lengths.max())
    return np.zeros(0) if low == high else theory.uniform_optimal(theory.UniformTimes(low, high), k)


_RULES: dict[str, tuple[_Rule, str]] = {
    "equal_mass": (
        lambda lengths, k, _: theory.equal_mass(theory.SampledTimes(lengths), k),
        "Equally many requests in every bin.",
    ),
    "uniform_optimal": (_uniform_optimal, "Bins of equal width, the best where lengths are uniform (Lemma 4.1)."),
    "exponential": (
        lambda lengths, k, batch: theory.exponential_recursion(
            theory.ExponentialTimes(1.0 / float(lengths.mean())), batch, k
        ),
        "The recursion of Lemma A.1, for exponential lengths with the same mean.",
    ),
    "learned": (
        lambda lengths, k, batch: theory.learned(theory.SampledTimes(lengths), batch, k),
        "The least expected time of a batch of ``max_num_seqs``, for lengths of any distribution.",
    ),
}
"""Rules and their descriptions. A rule is a function of (predicted lengths, bins, batch size) that returns the longest
length of every bin except the last."""
BINNING_RULES = {name: f"Multi-Bin, boundaries from the workload: {text}" for name, (_, text) in _RULES.items()}
"""Description of each rule in one line."""


def _binning(binning: Any, scenario: Scenario) -> Any:
    """Return a scheduler's binning. A rule such as "learned(k=8)" becomes the boundaries of bins, "none" becomes None.

    The boundaries come from the predicted lengths of other requests, or of the replayed trace itself. Raises
    PolicyError if the workload has no predictions, or if the parameters of the rule are wrong.
    """
    if binning == "none" or not isinstance(binning, str):
        return None if binning == "none" else binning
    name = binning.partition("(")[0].strip()
    if name not in _RULES:
        try:
            policy.resolve("binning", binning)
        except UnknownNameError as error:
            known = [*error.known, *(f"{rule}(k=8)" for rule in _RULES)]
            raise UnknownNameError(error.kind, error.name, known) from None
        return binning
    name, given = policy.parse_call("binning", binning) if "(" in binning else (name, {})
    k = given.get("k")
    if set(given) != {"k"} or isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= MAX_BINS:
        raise PolicyError(
            f"binning {name} takes a number of bins from 1 to {MAX_BINS}, as in {name}(k=8); got {binning!r}"
        )
    # A replayed trace has no other requests, so its own give the boundaries.
    predicted = workload_by_seed(scenario)(scenario.run.seed + _BINNING_SEED).predicted_tokens
    if predicted is None:
        raise PolicyError(
            f"binning {binning!r} needs predicted output lengths, and this workload has none; add a [predictor] "
            '(kind = "oracle" predicts the true lengths)'
        )
    cuts = _RULES[name][0](np.maximum(predicted, 1.0), k, scenario.engine.max_num_seqs)
    # A rule returns the longest length of a bin, and a policy takes the shortest of the next bin: a token more.
    starts = np.unique(np.where(cuts == np.floor(cuts), cuts + 1, cuts))
    return f"bins(boundaries={[float(f'{edge:.9g}') for edge in starts]})"
