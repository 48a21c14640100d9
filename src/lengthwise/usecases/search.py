"""Search for deployments of a scenario. Each variant has a separate search."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lengthwise import backend, catalog, engine, metrics, policy, report, search
from lengthwise.config.files import resolved
from lengthwise.config.scenario import Scenario
from lengthwise.config.search_space import limits_of, space_of
from lengthwise.config.sections import DeploymentSection, EngineSection, GroupSection, SearchSection
from lengthwise.cost import model_error
from lengthwise.engine.prefix_nodes import prefix_nodes
from lengthwise.schema.cost_tables import Reach
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError, OutputError, PolicyError, UnknownNameError
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.metric_names import metric_of, split
from lengthwise.schema.plan import Choice, Limit, Plan, Status, Study, limit_text
from lengthwise.schema.workload import SharedPrefixes, Workload
from lengthwise.search import Bench, Options, Question, Run, Space, Store
from lengthwise.search.strategy import Strategy
from lengthwise.search.workers import Workers
from lengthwise.usecases import simulate
from lengthwise.usecases.requests import DEFAULT_REQUESTS, Sharing, own_rate, search_load, sharing_of
from lengthwise.usecases.simulate import slo_of
from lengthwise.usecases.variants import TABLES, build, deployment, location_note, unchecked_tables_note

EXPLAINED_REQUESTS, EXPLAINED_STEPS = 4000, 1_000_000  # of the run that shows which resource limits a choice
CLAIM_REQUESTS, CLAIM_S, CLAIM_SEEDS = 2000, 200.0, 5
WARMUP_SHARE, CENT = 0.2, 0.005
_DISAGGREGATE, _DECODE = "deployment.disaggregate", "deployment.decode."  # a setting, and where those of decodes begin
UNPRICED_MEMORY = (
    "No price includes the CPU memory behind the prefix cache, so that more of it costs nothing here; "
    "engine.kv_offloading.usd_per_gb_hour is its price, if that of the GPUs does not include it."
)
_TABLES_KEYS = ("model", "gpu", "node", "tp", "dp", "ep", "weight_dtype", "kv_dtype")
"""Settings that change a deployment's cost tables. pp is not one, because a file of tables records its own stages."""
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class VariantSearch:
    """The search of one variant, with the scenario and the bench that evaluates configurations."""

    name: str
    scenario: Scenario
    bench: Bench

    @property
    def section(self) -> SearchSection:
        """Return the scenario's [search] table."""
        assert self.scenario.search is not None  # ``questions`` requires it
        return self.scenario.search

    @property
    def space(self) -> Space:
        """Return the space. [deployment] gives the replicas if no axis does and the objective does not choose them."""
        space, replicas = space_of(self.section), self.scenario.deployment.replicas
        if replicas == 1 or self.section.objective in search.AT_RATE:
            return space
        return Space({search.REPLICAS: (replicas,)} | dict(space.axes), space.any_of)

    def candidates(self) -> list[dict[str, Any]]:
        """Return the configurations of the space.

        Configurations with separate prefill and decode replicas have a number of each; ``_splits`` gives those that
        "fill" and "auto" stand for. Raises InputError if decode replicas have settings but are in no configuration, or
        if all configurations have them and not even one replica of each side fits.
        """
        found, keys = list(search.checked(self.space).candidates()), self.space.values()
        mixed = self._mixtures(found) if self.section.mixtures else []
        decode_keys = [key for key in keys if key.startswith(_DECODE)]
        if self.scenario.deployment.decode_side is None and not decode_keys and _DISAGGREGATE not in keys:
            return [*found, *mixed]
        shapes: dict[str, tuple[int, int]] = {}  # GPUs of a prefill and of a decode replica
        made = [one for settings in found for one in self._with_numbers(settings, shapes)]
        if not shapes and decode_keys:
            axis = decode_keys[0].removeprefix("deployment.")
            raise InputError(
                f"the axis {axis} is of decode replicas, and no configuration has them, because disaggregate is false. "
                "Add true to disaggregate, or take the axis out"
            )
        least, most = min((sum(pair) for pair in shapes.values()), default=0), self.bench.question.max_gpus
        if least > most and all(search.DECODE_REPLICAS in settings for settings in made):
            raise InputError(
                f"search.max_gpus must be at least {least}, for one prefill replica and one decode replica; it is "
                f"{most}. Raise it, or give smaller tp, pp or dp of a side"
            )
        return [*{search.settings_key(settings): settings for settings in made}.values(), *mixed]

    def _mixtures(self, pure: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the mixtures of two kinds of the ``pure`` configurations. Raises InputError without prices."""
        kinds, reasons = {}, []
        for settings in pure:
            own = {key: v for key, v in settings.items() if key != search.REPLICAS and not key.startswith(_DECODE)}
            try:
                one = self.bench.build(own)
            except (UnknownNameError, PolicyError):
                raise
            except InputError as error:
                reasons.append(f" ({error})")
                continue
            if one.decode is not None:
                continue
            if not one.price_per_hour_usd > 0:
                raise InputError(
                    f"mixtures are compared by their prices, and {one.gpu.name} has none: its price_per_hour_usd "
                    f"is {one.gpu.price_per_hour_usd:g}. Give it in the file of the GPU, or set mixtures = false"
                )
            own.setdefault("deployment.gpu", self.scenario.deployment.gpu)
            kinds[search.settings_key(own)] = search.Kind(own, one.gpus, one.price_per_hour_usd)
        if len({kind.settings["deployment.gpu"] for kind in kinds.values()}) < 2:
            raise InputError(
                f"mixtures are of two GPU types, and the search has fewer that fit{reasons[0] if reasons else ''}; "
                'give the axis gpu several values that do, such as gpu = ["H100", "L40S"], or set mixtures = false'
            )
        every = search.mixtures(list(kinds.values()), _is_of_group, self.bench.question)
        found = list(itertools.islice(every, search.MAX_CANDIDATES + 1))
        if len(found) > search.MAX_CANDIDATES:
            raise InputError(
                f"a search must have at most {search.MAX_CANDIDATES:,} configurations; the budget has room for more "
                "mixtures. Lower max_usd_per_hour or max_gpus, or remove values of the axes"
            )
        return found

    def require_own_decode_axes(self) -> None:
        """Raise InputError if a strategy could propose settings of decode replicas that have no effect."""
        for axes in self.space.alternatives():
            if False in axes.get(_DISAGGREGATE, ()) and any(key.startswith(_DECODE) for key in axes):
                raise InputError(
                    'with strategy = "bayesian" a table of axes must have disaggregate = false or axes of decode, and '
                    "one has both. Put equal and separate replicas into two [[search.any_of]] tables"
                )

    def _with_numbers(self, settings: dict[str, Any], shapes: dict[str, tuple[int, int]]) -> Iterator[dict[str, Any]]:
        """Yield the configurations that ``settings`` stand for, and add the GPUs of both sides to ``shapes``."""
        question, counts = self.bench.question, (search.REPLICAS, search.DECODE_REPLICAS)
        on = _with_settings(self.scenario, {k: v for k, v in settings.items() if k not in counts}).deployment
        if (side := on.decode_side) is None:
            alone = {key: value for key, value in settings.items() if not key.startswith(_DECODE)}
            if alone.get(search.REPLICAS) == "fill":  # a number, by which its name compares with those of splits
                alone[search.REPLICAS] = max(1, question.max_gpus // on.gpus)
            yield alone
            return
        assert side.tp is not None  # ``decode_side`` sets all three
        assert side.pp is not None
        assert side.dp is not None
        own_side = self.scenario.deployment.decode
        if side.gpu == on.gpu and (own_side is None or own_side.gpu is None):  # the same as without this setting
            settings = {key: value for key, value in settings.items() if key != f"{_DECODE}gpu"}
        gpus = shapes[search.settings_key(settings)] = on.gpus, side.tp * side.pp * side.dp
        is_sized = self.section.objective in search.AT_RATE
        own = ("auto", "auto") if is_sized else (self.scenario.deployment.replicas, side.replicas)
        given = [settings.get(key, number) for key, number in zip(counts, own, strict=True)]
        most = question.max_gpus
        if {"fill", "auto"} & set(given) and most >= search.UNLIMITED_GPUS:
            if question.max_usd_per_hour == math.inf:
                raise InputError(
                    "the numbers of prefill and decode replicas need a limit: neither search.max_gpus nor "
                    "search.max_usd_per_hour is set. Set one, or give numbers, such as replicas = [1, 2] and "
                    "decode.replicas = [1, 2]"
                )
            prices = [
                catalog.gpu(self.scenario.file_or_name(gpu)).price_per_hour_usd for gpu in (on.gpu, side.gpu or on.gpu)
            ]
            most = int(question.max_usd_per_hour / min(prices)) if min(prices) else sum(gpus)
        for pair in _splits(given, gpus, most):
            yield settings | dict(zip(counts, pair, strict=True))

    @property
    def is_offline(self) -> bool:
        """Return whether all requests arrive at time 0."""
        return self.bench.question.objective.name == "makespan"


def _is_of_group(key: str) -> bool:
    """Return whether a setting may differ between groups of replicas."""
    table, _, leaf = key.rpartition(".")
    fields = {"deployment": DeploymentSection.model_fields, "engine": EngineSection.model_fields}.get(table, {})
    return leaf != "model" and leaf in GroupSection.model_fields and leaf in fields


def _splits(given: Sequence[Any], gpus: tuple[int, int], max_gpus: int) -> Iterator[tuple[int, int]]:
    """Yield pairs of numbers: of prefill replicas, of decode replicas. ``given`` has a number or a word for each side.

    "auto" stands for all numbers that fit in ``max_gpus``, "fill" for those that leave no room for another replica of
    their side. If none fits, they stand for 1. ``gpus`` are the GPUs of one replica of each side.
    """

    def numbers(of: int, free: int) -> Iterable[int]:
        return range(1, max(1, free // gpus[of]) + 1) if given[of] in ("fill", "auto") else (int(given[of]),)

    least = gpus[1] * (1 if given[1] in ("fill", "auto") else int(given[1]))
    for prefills in numbers(0, max_gpus - least):
        for decodes in numbers(1, max_gpus - prefills * gpus[0]):
            rest = max_gpus - prefills * gpus[0] - decodes * gpus[1]
            if not any(number == "fill" and rest >= one for number, one in zip(given, gpus, strict=True)):
                yield prefills, decodes


def questions(scenario: Scenario) -> list[VariantSearch]:
    """Return the searches of a scenario, one for each variant."""
    found = []
    for expanded in scenario.variant_scenarios():
        with location_note(scenario, expanded):
            if (section := expanded.search) is None:
                raise InputError(
                    "a search needs a table [search] with a space, such as: [search.space] gpu = "
                    '["A100-80GB", "H100"], tp = [1, 2, 4]'
                )
            expanded = _without_given_groups(expanded, section)  # noqa: PLW2901 - the same scenario
            _require_tables_of_one_deployment(expanded, space_of(section))
            alone = expanded.model_copy(update={"search": None, "variants": []})
            _require_blocks_of_one_size(alone, space_of(section))
            make = partial(_deployment_with, alone, sharing_of(expanded))
            bench = Bench(make, search_load(expanded), question_of(expanded, section))
            found.append(VariantSearch(expanded.name, expanded, bench))
    return found


def _without_given_groups(scenario: Scenario, section: SearchSection) -> Scenario:
    """Return the scenario without its groups if the search finds mixtures. Raises InputError for their number."""
    if not scenario.deployment.groups:
        return scenario
    if section.mixtures:
        return scenario.model_copy(update={"deployment": scenario.deployment.model_copy(update={"groups": []})})
    if search.REPLICAS in space_of(section).values():
        raise InputError(
            "the axis replicas is of equal replicas, and each of deployment.groups has its own number; take out the "
            "axis or the groups, or set search.mixtures = true"
        )
    return scenario


def _require_tables_of_one_deployment(scenario: Scenario, space: Space) -> None:
    """Raise InputError if one file of cost tables would be used for several models, GPUs, degrees or data types."""
    found: defaultdict[str, dict[str, dict[str, None]]] = defaultdict(lambda: {key: {} for key in _TABLES_KEYS})
    for axes in space.alternatives():
        values = {
            key: axes.get(f"deployment.{key}", (getattr(scenario.deployment, key),)) for key in ("cost", *_TABLES_KEYS)
        }
        for source in values["cost"]:
            if str(source).startswith(TABLES):
                for key, known in found[source].items():
                    known.update(dict.fromkeys(map(str, values[key])))
    for source, keys in found.items():
        if several := [f"{key} {', '.join(known)}" for key, known in keys.items() if len(known) > 1]:
            raise InputError(
                f"a search with cost {source!r} must be of what the tables were made for: one model on one GPU at one "
                f"tensor-parallel degree; its space has {'; '.join(several)}, which the tables would make all alike. "
                "Give a source that tells them apart (roofline, profile:FILE), or a file for each in [[search.any_of]]"
            )


def _require_blocks_of_one_size(scenario: Scenario, space: Space) -> None:
    """Raise InputError if configurations have one number of KV blocks but engines whose blocks differ in size."""
    found: defaultdict[int, dict[int, str]] = defaultdict(dict)  # tokens of a block, by number of blocks
    for axes in space.alternatives():
        keys = [key for key in ("engine.name", "engine.block_size", "deployment.num_blocks") if key in axes]
        for values in itertools.product(*(axes[key] for key in keys)):
            made = _with_settings(scenario, dict(zip(keys, values, strict=True)))
            if (blocks := made.deployment.num_blocks) is not None:
                size, name = made.engine.block_size, made.engine.name
                found[blocks][size] = f"{blocks * size:,} tokens with block_size {size}{f' ({name})' if name else ''}"
    for blocks, sizes in found.items():
        if len(sizes) > 1:
            raise InputError(
                f"deployment.num_blocks must be of blocks of one size in a search; {blocks:,} blocks are "
                f"{' and '.join(sizes.values())}. Leave num_blocks out, for what fits in memory, or give each block "
                "size its own num_blocks in [[search.any_of]]"
            )


def question_of(scenario: Scenario, section: SearchSection) -> Question:
    """Return what a [search] table requests, such as its limits. Raises InputError if a setting is missing."""
    limits = limits_of(section)
    objective = search.objective(section.objective)
    if objective.name not in ("makespan", "goodput"):
        limits = search.with_stability(limits)
    for key in (search.REPLICAS, search.DECODE_REPLICAS):
        replicas = space_of(section).values().get(key, ())
        if "fill" in replicas and section.max_gpus is None:
            raise InputError(f'{key} = "fill" fills search.max_gpus, which is not set')
        if "auto" in replicas and section.objective not in search.AT_RATE:
            raise InputError(
                f'{key} = "auto" is for the objectives cost_at_rate and fewest_gpus; give numbers or "fill"'
            )
    rate_rps = section.rate
    if rate_rps is None and objective.name in (*search.AT_RATE, "goodput"):
        rate_rps = own_rate(scenario)
    return Question(
        objective=objective,
        slo_limits=search.SloLimits(limits, slo_of(scenario)),
        rate_rps=rate_rps,
        max_gpus=section.max_gpus or search.UNLIMITED_GPUS,
        max_usd_per_hour=section.max_usd_per_hour or math.inf,
        requests=scenario.workload.num_requests or DEFAULT_REQUESTS,
        precision=section.precision,
        seeds=section.seeds,
        model_draws=model_error.DRAWS if scenario.run.model_draws is None else scenario.run.model_draws,
    )


def _deployment_with(scenario: Scenario, sharing: Sharing, settings: Mapping[str, Any]) -> Deployment:
    return deployment(_with_settings(scenario, settings), sharing)


def _with_settings(scenario: Scenario, settings: Mapping[str, Any]) -> Scenario:
    """Return the scenario with settings by dotted key ("engine.max_num_seqs").

    A number of replicas that is not given is 1. The search sets those that are "fill" or "auto" itself.
    """
    over: dict[str, Any] = {"deployment": {"replicas": 1}}
    for key in sorted(settings):  # a table before its own keys
        if key in (search.REPLICAS, search.DECODE_REPLICAS) and not isinstance(settings[key], int):
            continue
        *tables, leaf = key.split(".")
        table = over
        for name in tables:
            table[name] = dict(table.get(name) or {})
            table = table[name]
        table[leaf] = json.loads(settings[key]) if key == search.GROUPS else settings[key]
    return scenario.updated(over)


def plan(
    scenario: Scenario, workers: Workers, *, store: Store | None = None, progress: Progress = lambda *_: None
) -> Study:
    """Return a plan for each variant of a scenario, and how well each variant's best deployment serves the others.

    Args:
        store: Where evaluations are cached.
        progress: Called with (variant and step, such as "llama bound", evaluations done, their expected total).

    Raises:
        InputError: [search] cannot be used, or a name or a policy in its space is invalid.
    """
    requested = questions(scenario)
    engine.warm_up()  # otherwise every process would compile it, and all threads wait for the first
    runs = [Run(one.bench, workers, _identity(one) if store is not None else "", store) for one in requested]
    plans = []
    for one, run in zip(requested, runs, strict=True):
        prefix = one.name if len(requested) > 1 else ""
        run.progress = lambda step, done, of, prefix=prefix: progress(f"{prefix} {step}".strip(), done, of)  # type: ignore[misc]
        run.restart()
        section, space = one.section, one.space
        strategy: Strategy[dict[str, Any]] | None = None
        if section.strategy == "bayesian":
            strategy = search.Bayesian(space.alternatives(), section.trials, one.scenario.run.seed)
        options = Options(section.top, section.strategy == "exhaustive", section.sensitivity, strategy)
        if strategy:
            one.require_own_decode_axes()
        candidates, axes = [] if strategy else one.candidates(), space.values()
        if any(search.DECODE_REPLICAS in settings for settings in candidates):
            for key in (search.REPLICAS, search.DECODE_REPLICAS):  # the numbers in place of "fill" and "auto"
                axes[key] = tuple(dict.fromkeys(settings[key] for settings in candidates if key in settings))
        found = search.search(one.name, candidates, axes, run, options, _metadata(one, space))
        top = {choice.key for choice in [c for c in found.choices if c.status is Status.RANKED][: section.top]}
        choices = [
            replace(c, bottleneck=replace(c.bottleneck, cause=_binding_resource(c, one))) if c.key in top else c
            for c in found.choices
        ]
        deployed = [one.bench.build(choice.settings) for choice in found.choices if choice.status is Status.RANKED]
        by_choice = [model_error.deployment_notes(each) for each in deployed]
        notes = dict.fromkeys(
            note if all(note in found for found in by_choice) else f"Some configurations: {note}"
            for note in itertools.chain.from_iterable(by_choice)
        )
        notes |= dict.fromkeys(_mixture_notes(one, found))
        memories = [each.limits.kv_offloading for each in deployed if each.offload_blocks]
        if any(memory is not None and not memory.usd_per_gb_hour for memory in memories):
            notes[UNPRICED_MEMORY] = None
        plans.append(replace(found, choices=tuple(choices), notes=tuple(notes)))
    return search.study(scenario.name, plans, runs)


def _mixture_notes(requested: VariantSearch, found: Plan) -> list[str]:
    """Return why the best mixture wins or loses against the best of equal replicas, or nothing without mixtures."""
    if not requested.section.mixtures:
        return []
    known = [choice for choice in found.choices if choice.status in (Status.RANKED, Status.SCOUTED)]
    known.sort(key=lambda choice: choice.price_per_hour_usd)
    mixed = next((choice for choice in known if search.GROUPS in choice.settings), None)
    pure = next((choice for choice in known if search.GROUPS not in choice.settings), None)
    tried = [choice.settings for choice in found.choices if search.GROUPS in choice.settings]
    text = f"Mixtures: {report.counted(len(tried), 'mixture')} of two GPU types in the budget. "
    one_each = {made.get("scheduler.router"): made for made in tried}.values()
    routers = [policy.resolve("router", requested.bench.build(made).scheduler.router) for made in one_each]
    if routers and not any(router.uses("service_rate") for router in routers):
        names = " and ".join(router.name for router in routers)
        text += (
            f"The router {names} ignores the speed of replicas; scheduler.router = "
            '"shortest_expected_delay" or "least_work_left" may make mixtures cheaper. '
        )
    if mixed is None or pure is None:
        lone = "mixture" if mixed is None else "number of equal replicas"
        return [f"{text}No {lone} met the limits, or none was tried because a cheaper configuration meets them."]
    bounds = []
    for group in requested.bench.build(mixed.settings).replica_groups:
        most = search.ceiling(group, requested.bench.load.sample()).rate_rps
        bounds.append(f"{group.gpu.name} {3600 * most / group.price_per_hour_usd:,.0f}")
    less = pure.price_per_hour_usd - mixed.price_per_hour_usd
    verdict = f"costs ${abs(less):.2f} an hour {'less' if less > 0 else 'more'} than"
    reason = (
        f"The best, {mixed.name} (${mixed.price_per_hour_usd:.2f}), "
        f"{'costs the same as' if abs(less) < CENT else verdict} the best of equal replicas, {pure.name} "
        f"(${pure.price_per_hour_usd:.2f}{', scouted' if pure.status is Status.SCOUTED else ''}). At most, in requests "
        f"per dollar: {', '.join(bounds)}; those of a mixture lie between if its router ignores what requests need, "
        "so that it pays where whole replicas of the better kind leave much unused."
    )
    return [text + reason]


def _metadata(requested: VariantSearch, space: Space) -> dict[str, str]:
    scenario, question = requested.scenario, requested.bench.question
    varied, fixed = space.values(), {}
    for name in ("model", "gpu"):
        values = varied.get(f"deployment.{name}", (getattr(scenario.deployment, name),))
        if len(values) == 1 and not (name == "gpu" and scenario.deployment.groups):
            fixed[name] = values[0]
    if (decode := scenario.deployment.decode) is not None and decode.gpu is not None:
        fixed["decode side"] = f"decode side {decode.gpu}"
    metadata = {**fixed, "workload": requested.bench.load.name}
    if note := unchecked_tables_note(scenario):
        metadata["cost tables"] = note
    if question.rate_rps is not None:
        metadata["rate"] = f"{question.rate_rps:g} requests a second" + ", replayed" * scenario.workload.is_replay
    if requested.is_offline:
        metadata["requests"] = f"{question.requests:,} requests at once"
    if (own := scenario.deployment.replicas) > 1 and search.REPLICAS not in space_of(requested.section).values():
        unused = f"the fewest that the rate needs; deployment.replicas = {own} is not used"
        metadata["replicas"] = f"{own} in each configuration" if search.REPLICAS in space.values() else unused
    if question.max_usd_per_hour < math.inf:
        metadata["budget"] = f"at most ${question.max_usd_per_hour:g} an hour"
    if question.max_gpus < search.UNLIMITED_GPUS:
        metadata["GPUs"] = f"at most {question.max_gpus} GPU{'s' * (question.max_gpus > 1)}"
    return metadata


def _identity(requested: VariantSearch) -> str:
    """Return a digest of scenario, files and code. Together with the varied settings it identifies an evaluation."""
    scenario = requested.scenario
    settings = scenario.model_dump(mode="json", exclude={"name", "description", "variants", "search"})
    keys = {"objective", "rate", "max_gpus", "max_usd_per_hour", "limits", "precision", "seeds"}
    question = requested.section.model_dump(mode="json", include=keys)
    return search.content_key(settings, question, file_digests(scenario), search.code_version())


def file_digests(scenario: Scenario) -> dict[str, str]:
    """Return digests of all files outside the scenario that determine its results, by name.

    The digest of a folder (of a profile) covers the names, sizes and modification times of the files in it.
    """
    return {text: _digest(path) for text, path in _files(scenario).items()}


def _files(scenario: Scenario) -> dict[str, Path]:
    """Return the files and folders that a scenario reads, by name."""
    texts: list[Any] = [scenario.workload.trace, scenario.predictor.file, *scenario.deployment.files]
    texts += [
        str(axis).rpartition(":")[0] for axis in scenario.scheduler.model_dump(exclude={"sglang", "trtllm"}).values()
    ]
    if scenario.search is not None:
        for space in (scenario.search.space, *scenario.search.any_of):
            texts += [one for axis in space.values() for one in (axis if isinstance(axis, list) else [axis])]
    texts = [text for text in texts if isinstance(text, str)]
    parts = {part for text in texts for part in (text, text.partition(":")[2], text.rpartition(":")[0])}
    parts |= {part.partition("#")[0] for part in parts}  # an estimator after a profile's name
    paths = {text: resolved(text, scenario.folder) for text in parts if text}
    return {text: path for text, path in sorted(paths.items()) if path.exists()}


def _digest(place: Path) -> str:
    if place.is_file():
        return hashlib.sha256(place.read_bytes()).hexdigest()
    files = [(path, path.stat()) for path in sorted(place.rglob("*")) if path.is_file()]
    rows = [f"{path.relative_to(place)} {stat.st_size} {stat.st_mtime_ns}" for path, stat in files]
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def _binding_resource(choice: Choice, requested: VariantSearch) -> str:
    bench = requested.bench
    assert choice.at is not None  # it is ranked
    deployed = search.sized(bench.build(choice.settings), choice.gpus)
    if requested.is_offline:
        requests = bench.load.batch(0, bench.question.requests)
    else:
        requests = bench.load.at(0, min(EXPLAINED_REQUESTS, bench.load.max_requests), choice.at.rate_rps)
    max_log_steps = EXPLAINED_STEPS if deployed.cost.evidence.reach != Reach() else 0
    records = engine.simulate(requests, deployed, max_log_steps=max_log_steps)
    summary, side = metrics.summarize(records, deployed), deployed.decode or deployed
    is_full = choice.capacity_rps.value <= choice.at.rate_rps * (1 + bench.question.precision)
    binds = report.what_binds(
        summary,
        max_batch_seqs=max(one.limits.max_num_seqs / one.parallel.pp for one in side.replica_groups)
        if isinstance(side, Deployment)
        else side.limits.max_num_seqs / side.parallel.pp,
        reserves=deployed.scheduler.reserves_ahead,
        load="capacity" if is_full else "closed" if requested.is_offline else "open",
        queued_for_s=report.mean_queued_for_s(records),
        prefill_ranks=0 if deployed.decode is None else deployed.parallel.ranks,
    )
    beyond = [f" {one.description}." for one in metrics.beyond_reach(records, deployed)]
    return f"The hardware is {report.bound_by(binds)} {binds.resource}. {binds.description}{''.join(beyond)}"


def scenario_of_choice(requested: VariantSearch, choice: Choice) -> Scenario:
    """Return the scenario that simulates a choice at its operating point, for ``lengthwise simulate``."""
    scenario = _with_settings(requested.scenario, choice.settings)
    deployed = scenario.deployment
    over: dict[str, Any] = {}
    if deployed.decode_side is None and not deployed.groups:
        over = {"deployment": {"replicas": max(1, choice.gpus // (deployed.gpus // deployed.replicas))}}
    if requested.is_offline:
        over["workload"] = {"arrivals": {"kind": "all_at_once"}, "num_requests": requested.bench.question.requests}
    elif choice.at is not None:
        over["workload"] = _at_rate(requested, choice.at.rate_rps)
    name = f"{requested.name}: {choice.name}" if requested.name else choice.name
    return scenario.updated(over | {"name": name}, exclude={"search"})


def _at_rate(requested: VariantSearch, rate_rps: float) -> dict[str, Any]:
    """Return the settings of [workload] for a rate. A replayed trace stays a replay."""
    section, load = requested.scenario.workload, requested.bench.load
    if section.sessions is not None or section.tools is not None:
        return {"session_rate": rate_rps / load.requests_per_session}
    own_rps = own_rate(requested.scenario) if section.is_replay else None
    return {"request_rate": rate_rps} if own_rps is None else {"time_scale": section.time_scale * own_rps / rate_rps}


def write_launches(scenario: Scenario, study: Study, folder: Path, top: int = 1, *, force: bool = False) -> list[Path]:
    """Write folders for the ``top`` best configurations of every plan, and return their paths.

    A folder has server scripts, Kubernetes resources, a load test, and a scenario that simulates the claimed numbers.
    With ``force``, the folders of an earlier search are replaced when all new ones are complete; without it they raise
    OutputError.
    """
    former = backend.require_replaceable(folder, force=force)
    chosen: dict[str, tuple[VariantSearch, Plan, Choice]] = {}
    for requested, found in zip(questions(scenario), study.plans, strict=True):
        best = [c for c in found.choices if c.status is Status.RANKED][:top]
        for rank, choice in enumerate(best, 1):
            title = _slug(f"{found.name if len(study.plans) > 1 else ''} {rank} {choice.name}")
            chosen[title] = requested, found, choice
            if (place := folder / title).is_dir() and place not in former and any(place.iterdir()):
                raise OutputError(f"{place} has files that are no launch folder; move them, or name another folder")
    if not chosen:
        return []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as new:
            for title, ranked in chosen.items():
                _write_launch(Path(new) / title, *ranked)
            backend.remove_launches(folder)  # only now, as a folder may have failed
            for title in chosen:
                (Path(new) / title).rename(folder / title)
    except OSError as error:
        raise OutputError(f"cannot write into {folder}: {error.strerror}") from error
    return [folder / title for title in chosen]


def _write_launch(place: Path, requested: VariantSearch, found: Plan, choice: Choice) -> None:
    """Write the launch folder of a choice."""
    claimed = _claim_scenario(requested, choice)
    variant = build(claimed)[0]
    workload = variant.workload(claimed.run.seed)
    outcome, *_ = simulate.run(claimed, variants=[variant])
    claim = claim_text(found, choice, outcome.summary, claimed)
    if notes := model_error.deployment_notes(variant.deployment):
        claim += f"\n\nWhat limits the trust in these numbers:\n\n{backend.entries(notes)}"
    if read := sorted({f"`{path.absolute()}`" for path in _files(claimed).values()}):
        claim += f"\n\nscenario.toml reads {', '.join(read)}: this folder has no copy. On another machine, copy "
        claim += "these files there and change their paths in scenario.toml."
    if workload.after is not None:
        workload = _as_sent(workload, variant.deployment, claimed.run.seed)
    ramp_s = 0.0 if choice.at is None else choice.at.value("jct.p99")
    sent = backend.DEFAULT_REQUESTS
    if math.isfinite(ramp_s) and choice.at is not None and math.isfinite(choice.at.rate_rps):
        sent = max(sent, math.ceil(2 * ramp_s * choice.at.rate_rps))  # a steady part as long as the ramp
    workload = workload.take(np.arange(min(sent, len(workload))))
    backend.write_launch(
        place,
        variant.deployment,
        name=_slug(choice.name),
        scenario_text=claimed.with_absolute_paths().to_toml(),
        workload=workload,
        rate_rps=choice.at.rate_rps if choice.at else claimed.workload.request_rate or 1.0,
        claim=claim,
        expectation=expected_text(found.limits, workload, variant.deployment, claimed.run.seed, ramp_s),
    )


def _claim_scenario(requested: VariantSearch, choice: Choice) -> Scenario:
    """Return the scenario that repeats the claim: with enough requests and seeds, and a warm-up as in the search.

    With sessions, the run ends when the last session starts, because the rate falls from then on.
    """
    scenario, load = scenario_of_choice(requested, choice), requested.bench.load
    section, seeds = scenario.workload, max(scenario.run.seeds, CLAIM_SEEDS)
    if requested.is_offline or choice.at is None:
        return scenario.with_run(seeds=seeds)
    rate_rps, ramp_s = choice.at.rate_rps, load.ramp_s(choice.at.value("jct.mean"))
    requests = load.max_requests * (load.seeds or 1)
    if not section.is_replay:
        span_s = max(CLAIM_S, search.RAMP_SPANS * ramp_s)
        requests = max(section.num_requests or 0, CLAIM_REQUESTS, math.ceil(rate_rps * span_s))
        scenario = scenario.model_copy(update={"workload": section.model_copy(update={"num_requests": requests})})
    span_s = requests / rate_rps
    run: dict[str, Any] = {"warmup_s": round(min(max(WARMUP_SHARE * span_s, ramp_s), span_s / 2), 1)}
    if ramp_s:
        run["time_limit_s"] = round(span_s, 1)
    return scenario.with_run(seeds=seeds, **run)


def _as_sent(workload: Workload, deployment: Deployment, seed: int) -> Workload:
    """Return the requests in the order in which a simulation sends them, for a client that knows no dependencies.

    A prompt shares the full blocks of the earlier turns of its session, of their prompts and of their outputs.
    """
    sent_s = engine.simulate(workload, deployment, seed=seed, max_log_steps=0).requests.arrival_s
    size = workload.prefixes.block_tokens if workload.prefixes is not None else deployment.limits.block_size
    nodes = prefix_nodes(workload.prompt_tokens, workload.output_tokens, workload.prefixes, size)
    full = workload.prompt_tokens // size
    ids = [nodes.of(i)[:blocks] for i, blocks in enumerate(full)]
    shared = SharedPrefixes(size, np.concatenate([[0], np.cumsum(full)]), np.concatenate(ids))
    rows = np.argsort(sent_s, kind="stable")[: int(np.isfinite(sent_s).sum())]
    return replace(workload, after=None, prefixes=shared).take(rows, sent_s[rows])


def _limited(limits: Sequence[Limit], summary: metrics.Summary) -> Iterator[tuple[Limit, Estimate]]:
    """Yield the limited latencies of a run."""
    for limit in limits:
        key, statistic = split(limit.metric)
        value = getattr(getattr(summary, f"{key}_s", None), statistic, None)
        if isinstance(value, Estimate):
            yield limit, value


def _figures(limits: Sequence[Limit], summary: metrics.Summary) -> list[str]:
    """Return the limited latencies of a run with their intervals."""
    texts = []
    for limit, value in _limited(limits, summary):
        half = f" \N{PLUS-MINUS SIGN} {report.metric_text(limit.metric, value.half_width)}"
        text = report.metric_text(limit.metric, value.value) + (half if value.half_width > 0 else "")
        name, bound = metric_of(limit.metric).label, report.metric_text(limit.metric, limit.bound)
        texts.append(f"{name} {text}, limit {bound}{_model_text(value, limit.metric)}")
    return texts


def _model_text(value: Estimate, metric: str = "") -> str:
    """Return the interval of the cost model's error after a comma, or "" if it is unknown."""
    if not value.has_model_interval:
        return ""
    ends = []
    for end in (value.model_low, value.model_high):
        finite = report.metric_text(metric, end) if metric else f"{end:,.4g}"
        ends.append(finite if math.isfinite(end) else "\N{INFINITY}")
    return f", {ends[0]} to {ends[1]} by the cost model's error"


def expected_text(limits: Sequence[Limit], workload: Workload, deployment: Deployment, seed: int, ramp_s: float) -> str:
    """Return what the load test measures: its first requests find an idle server, and its client limits each output."""
    sent, scheduler = backend.as_benchmarked(workload), deployment.scheduler
    if scheduler.rank not in backend.ARRIVAL:  # the client sends no priorities
        scheduler = replace(scheduler, rank="fcfs_preempted_first", preemption="never", binning=None)
        deployment = replace(deployment, scheduler=scheduler)
    records = engine.simulate(sent, deployment, seed=seed, max_log_steps=0)
    summary = metrics.summarize(records, deployment, workload=sent)
    figures = _figures(limits, summary)
    span_s = float(workload.arrival_s[-1] - workload.arrival_s[0])
    ramp = ""
    if 0 < ramp_s < math.inf and span_s > 0:
        share = min(1.0, ramp_s / span_s)
        ramp = f" The load rises for about {ramp_s:.0f} s (JCT p99), {share:.0%} of the test, with lower latencies."
    return (
        f"Simulated from an idle server with the same {len(workload):,} requests, this test gives "
        f"{'; '.join(figures) or 'no limited latency'}. Compare measured.json with these numbers.{ramp}"
        + _broken_text(
            "This test",
            _limited(limits, summary),
            f"the claim is over several runs, and {len(workload):,} requests of one run differ from it by chance. "
            "Compare with this figure, not with the limit",
        )
    )


def _broken_text(what: str, limited: Iterable[tuple[Limit, Estimate]], reason: str) -> str:
    """Return a sentence on the limits that simulated requests (``what``) break and the reason, or "" without any."""
    broken = [(limit_text(limit), limit, value) for limit, value in limited if value.value > limit.bound]
    if not broken:
        return ""
    names = " and ".join(name for name, *_ in broken)
    within = all(value.low <= limit.bound for _, limit, value in broken)
    beyond = any(value.low > limit.bound for _, limit, value in broken)
    how = " within its interval" if within else " by more than its interval" if beyond else ""
    return f" {what} breaks {names}{how}: {reason}."


def claim_text(found: Plan, choice: Choice, summary: metrics.Summary, scenario: Scenario) -> str:
    """Return what a launch folder claims: the simulation of its scenario, what it breaks, and what the search found."""
    assert choice.at is not None  # it is ranked
    at, objective, capacity = choice.at, choice.objective, choice.capacity_rps
    seeds = f"seeds {scenario.run.seed} to {scenario.run.seed + scenario.run.seeds - 1}"
    number, half = report.rounded(objective.value, objective.half_width)
    half = f" ± {half}" if objective.half_width > 0 else ""
    label, at_capacity = found.objective.label, ""
    if capacity.has_interval:  # the objective is of the capacity, the numbers are of a rate a little below it
        value, half_width = report.rounded(capacity.value, capacity.half_width)
        at_capacity = f", at its capacity of {value} ± {half_width}; the run is at the lower end of that"
    gpus, price = report.counted(choice.gpus, "GPU"), f"at ${choice.price_per_hour_usd:.2f} an hour"
    found_value = f"{label}: {number}{half} {found.objective.unit}{_model_text(objective)}, on {gpus} {price}"
    if found.objective.unit == "GPUs":
        found_value = f"the rate needs {gpus}{half and f' ({half.strip()})'}{_model_text(objective)}, {price}"
    simulated = f"Simulated at {at.rate_rps:.4g} requests a second by `lengthwise simulate scenario.toml` ({seeds})"
    rows = "".join(f"- {figure}\n" for figure in _figures(found.limits, summary))
    reason = "in runs of its own the search found less. Where the limit must hold, plan for a lower rate"
    broken = _broken_text("This simulation", _limited(found.limits, summary), reason).strip()
    return (
        f"{simulated}{f':{chr(10) * 2}{rows}' if rows else f'.{chr(10)}'}\n"
        f"{f'**{broken}**{chr(10) * 2}' if broken else ''}"
        f"The search found, in runs of its own: {found_value}{at_capacity}.\n\n"
        "\N{PLUS-MINUS SIGN} are half-widths of 95 % intervals of sampling; those of the cost model's error, where it "
        "is known, are of 90 %."
    )


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
