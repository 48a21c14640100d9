"""Reads and checks scenarios: a workload, a deployment and the settings of their simulation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import Field, PrivateAttr, model_validator

from lengthwise.config import sections
from lengthwise.config.files import SHORT_FORMS, Table, assignment, merged, parse, read, removed_keys, resolved, to_toml
from lengthwise.config.search_space import (
    axis_name,
    flat,
    limit_names,
    space_problems,
    unit_notes,
    value_at,
    with_first_values,
)
from lengthwise.config.validation import Problem, raise_if_any, validated
from lengthwise.config.values import Section
from lengthwise.schema import metric_names
from lengthwise.schema.errors import InputError


class Scenario(Section):
    """A workload, a deployment and the settings of its simulation; with variants, several scenarios to compare."""

    name: str = ""
    description: str = ""
    workload: sections.WorkloadSection
    deployment: sections.DeploymentSection
    # Defaults are not validated: each would build a validator of its section when the module is imported.
    engine: sections.EngineSection = sections.EngineSection.model_construct()
    scheduler: sections.SchedulerSection = sections.SchedulerSection.model_construct()
    predictor: sections.PredictorSection = sections.PredictorSection.model_construct()
    slo: sections.SloSection = sections.SloSection.model_construct()
    run: sections.RunSection = sections.RunSection.model_construct()
    search: sections.SearchSection | None = None
    lab: sections.LabSection | None = None
    schedule: sections.ScheduleSection | None = None
    variants: list[sections.VariantSection] = Field(default_factory=list)
    _source: str = PrivateAttr("scenario")
    _folder: Path = PrivateAttr(Path())
    _notes: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="after")
    def _check_prediction(self) -> Self:
        if self.predictor.kind != "none" and self.workload.predicted != "none":
            both = f"workload.predicted = {self.workload.predicted!r} and predictor.kind = {self.predictor.kind!r}"
            raise ValueError(f"{both} both predict; keep one of them")
        return self

    @property
    def source(self) -> str:
        """Return the file of the scenario, for messages."""
        return self._source

    @property
    def folder(self) -> Path:
        """Return the folder to which paths in the scenario are relative."""
        return self._folder

    @property
    def notes(self) -> tuple[str, ...]:
        """Return warnings: settings that an override removed, and settings without an effect."""
        return self._notes

    @property
    def files(self) -> list[Path]:
        """Return all files on which the scenario and its variants depend, such as traces, models and tables."""
        found = {Path(self.source)}
        for expanded in self.variant_scenarios():
            deployed, predictors = expanded.deployment, expanded.lab.predictors if expanded.lab else []
            texts = [*deployed.files, expanded.workload.trace, *(one.file for one in (expanded.predictor, *predictors))]
            texts += [v.rpartition(":")[0] for _, v in expanded.scheduler if isinstance(v, str) and ".py:" in v]
            found.update(resolved(text, self.folder) for text in texts if text)
        return sorted(path for path in found if path.is_file())

    def with_absolute_paths(self) -> Self:
        """Return a copy with absolute paths, also of policies, which means the same in a file of another folder."""

        def absolute(text: str | None) -> str | None:
            path = resolved(text or "", self.folder)
            is_path = bool(text) and (path.is_file() or (path / "config.json").is_file())
            return str(path.absolute()) if is_path else text

        def paths(side: Any) -> Table:
            source = self.resolved_cost(side.cost) if side.cost else None
            kind, colon, place = (source or "").partition(":")
            names = (name for name in ("model", "gpu", "node") if getattr(side, name, None))
            files: Table = {name: absolute(getattr(side, name)) for name in names}
            return files | {"cost": f"{kind}:{Path(place).absolute()}" if colon else source}

        deployed = self.deployment
        files = paths(deployed)
        if deployed.decode is not None:
            files["decode"] = deployed.decode.model_copy(update=paths(deployed.decode))
        if deployed.groups:
            files["groups"] = [one.model_copy(update=paths(one)) for one in deployed.groups]
        policies = {}
        for name, text in self.scheduler:
            if isinstance(text, str) and ".py:" in text:
                file, _, function = text.rpartition(":")
                policies[name] = f"{resolved(file, self.folder).absolute()}:{function}"
        changes = {
            "workload": self.workload.model_copy(update={"trace": absolute(self.workload.trace)}),
            "predictor": self.predictor.model_copy(update={"file": absolute(self.predictor.file)}),
            "deployment": deployed.model_copy(update=files),
            "scheduler": self.scheduler.model_copy(update=policies),
        }
        return self.model_copy(update=changes)

    def file_or_name(self, text: str) -> str:
        """Return the path of a .toml file (a GPU or node), or the name of a catalog entry unchanged."""
        return str(resolved(text, self.folder)) if text.endswith(".toml") else text

    @property
    def cost_source(self) -> str:
        """Return ``deployment.cost`` with its path resolved."""
        return self.resolved_cost(self.deployment.cost)

    def resolved_cost(self, cost: str) -> str:
        """Return a source of step times with its path resolved."""
        source, colon, place = cost.partition(":")
        return f"{source}:{resolved(place, self.folder)}" if colon else source

    def of_decode_side(self) -> Self:
        """Return a copy in which the deployment has the GPU, node, costs and degrees of its decode side."""
        deployed, side = self.deployment, self.deployment.decode_side
        given = {} if side is None else {key: getattr(side, key) for key in ("gpu", "node", "cost", "tp", "pp", "dp")}
        return self.model_copy(update={"deployment": deployed.model_copy(update=given)})

    def with_origin(self, source: str, folder: Path, notes: Sequence[str] = ()) -> Self:
        """Return a copy with this file, folder and notes. A scenario without a name is named like the file.

        If the scenario names an engine, keys that are not set get the defaults of that engine (``engine_defaults``).
        """
        changed = self.model_copy(update={} if self.name else {"name": Path(source).stem})
        changed._source, changed._folder, changed._notes = source, folder, tuple(notes)  # noqa: SLF001 - its own
        for key, defaults in changed.engine_defaults().items():
            section = getattr(changed, key)
            given = section.model_fields_set
            values = dict(section) | {name: value for name, value in defaults.items() if name not in given}
            # Defaults do not count as set, so that a variant with another engine gets that engine's defaults.
            changed.__dict__[key] = type(section).model_construct(given, **values)
        return changed

    def engine_defaults(self) -> dict[str, dict[str, Any]]:
        """Return the default settings of the named engine by section; {} without a name or for an unknown GPU."""
        from lengthwise import catalog

        if self.engine.name is None:
            return {}
        try:
            gpu = catalog.gpu(self.file_or_name(self.deployment.gpu))
        except InputError:
            return {}  # The build of the deployment reports the unknown GPU.
        found = sections.ENGINES[self.engine.name].of(self.engine.name, gpu)
        # Calibrated tables have the host overhead of the engine that was measured.
        return {k: v for k, v in found.items() if k != "deployment" or not self.deployment.cost.startswith("tables:")}

    def variant_scenarios(self) -> list[Self]:
        """Return a complete scenario for each variant, with its name; without variants, this scenario alone."""
        if not self.variants:
            return [self]
        base = self.model_dump(exclude={"variants"}, exclude_unset=True, exclude_none=True)
        effective = [merged(base, variant.overrides | {"name": variant.name}) for variant in self.variants]
        return [type(self).model_validate(one).with_origin(self.source, self.folder, self.notes) for one in effective]

    def only(self, variant: str) -> Self:
        """Return the complete scenario of one variant. Raises InputError if no variant has this name."""
        effective = {expanded.name: expanded for expanded in self.variant_scenarios()} if self.variants else {}
        if variant not in effective:
            known = f"it has {', '.join(effective)}" if effective else "it has none"
            raise InputError(f"{self.source} has no variant {variant!r}; {known}")
        return effective[variant]

    def updated(self, over: Table, *, exclude: set[str] | None = None) -> Self:
        """Return the validated scenario with the settings ``over``, after resetting the sections in ``exclude``."""
        base = self.model_dump(exclude=exclude, exclude_unset=True, exclude_none=True)
        return type(self).model_validate(merged(base, over)).with_origin(self.source, self.folder)

    def with_run(self, **changes: Any) -> Self:
        """Return the scenario with other settings of [run], such as ``seeds=5``, after validation."""
        return self.model_copy(update={"run": sections.RunSection.model_validate(self.run.model_dump() | changes)})

    def to_toml(self) -> str:
        """Return all settings, including defaults, as TOML that loads to an equal scenario."""
        return to_toml(self.model_dump(exclude_none=True))


_SECTIONS = {"sla": "slo", "slos": "slo", "traffic": "workload", "variant": "variants"}


def _aliases(**names: str) -> dict[str, str]:
    return {alias: key for key, aliases in names.items() for alias in aliases.split()}


ALIASES: dict[str, dict[str, str]] = {
    "workload": _aliases(
        prompt="isl input_len prompt_tokens", output="osl output_len output_tokens", num_requests="num_prompts",
        request_rate="rate rate_rps qps rps", concurrency="max_concurrency",
    ),
    "deployment": _aliases(
        model="model_path", gpu="hardware system", tp="tensor_parallel tensor_parallel_size",
        pp="pipeline_parallel pipeline_parallel_size", replicas="num_replicas", dp="data_parallel_size",
        ep="expert_parallel_size", redundant_experts="num_redundant_experts",
        weight_dtype="dtype", kv_dtype="kv_cache_dtype",
    ),
    "engine": _aliases(
        max_num_seqs="max_batch_size", max_num_batched_tokens="max_num_tokens chunk_size", block_size="page_size",
        timeout_s="timeout",
    ),
    "scheduler": _aliases(
        policy="name", rank="scheduling_policy", router="routing", binning="bins", max_wait_s="max_wait",
        batch_wait_s="batch_wait", preemption_interval_steps="window",
    ),
    "predictor": _aliases(file="path", window_tokens="window"),
    "slo": {alias: key for alias, key in metric_names.ALIASES.items() if key == "jct"},
    "run": _aliases(seeds="num_seeds", warmup_s="warmup", time_limit_s="time_limit"),
    "search": _aliases(objective="goal", rate="request_rate", max_gpus="gpus", limits="slo", seeds="num_seeds"),
    "length": _aliases(low="min", high="max", sd="std stddev"),
}  # fmt: skip
"""For each section, the key that each alias stands for."""
_KINDS = {
    "length": {"log_normal": "lognormal", "normal": "truncated_normal", "constant": "fixed"},
    "arrivals": {"static": "all_at_once", "burst": "all_at_once"},
}
_NO_TBT = (
    "times between tokens are pooled over requests, so that no single request can be judged by them; "
    "set a limit for tpot instead. [slo] takes ttft, tpot and jct"
)
_VARIABLE_SECTIONS = ("workload", "deployment", "engine", "scheduler", "predictor", "search")
KeyPath = tuple[str, ...]


def canonical(raw: Table) -> tuple[Table, list[Problem]]:
    """Return the settings with keys instead of aliases, and a problem for each key that two names set."""
    problems: list[Problem] = []
    settings = _renamed(raw, _SECTIONS, (), problems)
    for key, value in settings.items():
        if key == "variants" and isinstance(value, list):
            settings[key] = [_variant(one, ("variants", str(at)), problems) for at, one in enumerate(value)]
        else:
            settings[key] = _section(key, value, (key,), problems)
    return settings, problems


def _variant(raw: Any, path: KeyPath, problems: list[Problem]) -> Any:
    if not isinstance(raw, dict):
        return raw
    nested: Table = {}
    for key, value in raw.items():  # keys with dots name nested tables, as in YAML: "engine.max_num_seqs": 64
        *parents, leaf = str(key).split(".")
        table = nested
        for name in parents:
            inner = table.setdefault(name, {})
            table = inner if isinstance(inner, dict) else {}
        if isinstance(value, dict) and isinstance(table.get(leaf), dict):
            table[leaf].update(value)
        else:
            table[leaf] = value
    tables = _renamed(nested, _SECTIONS, path, problems)
    return {key: _section(key, value, (*path, key), problems) for key, value in tables.items()}


def _section(name: str, value: Any, path: KeyPath, problems: list[Problem]) -> Any:  # noqa: C901, PLR0912
    if name in SHORT_FORMS and isinstance(value, str):
        return {SHORT_FORMS[name]: value}
    if not isinstance(value, dict) or name not in ALIASES:
        return value
    table = _renamed(value, ALIASES[name], path, problems)
    match name:
        case "deployment":
            names, groups = ALIASES["deployment"] | ALIASES["engine"], table.get("groups")
            table |= {} if not isinstance(groups, list) else {"groups": [
                _renamed(one, names, (*path, "groups", str(at)), problems) if isinstance(one, dict) else one
                for at, one in enumerate(groups)
            ]}  # fmt: skip
        case "slo":
            return _slo(table, path, problems)
        case "search":
            if isinstance(table.get("limits"), dict):
                table["limits"] = limit_names(table["limits"])
            if "space" in table:
                table["space"] = _axes(table["space"], (*path, "space"), problems)
            if isinstance(parts := table.get("any_of"), list):
                table["any_of"] = [_axes(one, (*path, "any_of", str(at)), problems) for at, one in enumerate(parts)]
        case "workload":
            for key in ("prompt", "output", "max_tokens", "arrivals"):
                if key in table:
                    table[key] = _distribution(key, table[key], (*path, key), problems)
            for inner_name, key in (("groups", "system_prompt"), ("tools", "tokens")):
                if isinstance(inner := table.get(inner_name), dict) and key in inner:
                    table[inner_name] = inner | {
                        key: _distribution(key, inner[key], (*path, inner_name, key), problems)
                    }
    return table


def _axes(table: Any, path: KeyPath, problems: list[Problem]) -> Any:
    if not isinstance(table, dict):
        return table
    names = {text: axis_name(text, ALIASES) for text in flat(table)}
    return _renamed(flat(table), names, path, problems)


def _distribution(key: str, value: Any, path: KeyPath, problems: list[Problem]) -> Any:
    group = "arrivals" if key == "arrivals" else "length"
    if (group == "arrivals" and isinstance(value, str)) or (key == "max_tokens" and value == "none"):
        value = {"kind": value}
    elif group == "length" and isinstance(value, int | float) and not isinstance(value, bool):
        value = {"kind": "fixed", "tokens": value}
    if not isinstance(value, dict):
        return value
    table = _renamed(value, ALIASES.get(group, {}), path, problems)
    if isinstance(table.get("kind"), str):
        kind = table["kind"].lower().replace("-", "_")
        table["kind"] = _KINDS[group].get(kind, kind)
    return table


def _slo(table: Table, path: KeyPath, problems: list[Problem]) -> Table:
    """Return the limits with units in values instead of keys: ``ttft_ms = 200`` becomes ``ttft = "200ms"``."""
    values, names = Table(), {}
    for key, value in table.items():
        if isinstance(value, dict):
            text = 'must be one time for each request, such as "2s"; limits on quantiles belong to [search.limits]'
            problems.append(Problem((*path, key), f"{text}. It is {value}"))
            continue
        stem, _, unit = key.rpartition("_")
        if key in ("tbt", "tbt_ms", "tbt_s", "itl", "itl_ms", "itl_s"):
            problems.append(Problem((*path, key), _NO_TBT))
        elif unit in ("ms", "s") and isinstance(value, int | float):
            names[key] = ALIASES["slo"].get(stem, stem)
            values[key] = f"{value}{unit}"
        else:
            values[key] = value
    return _renamed(values, names, path, problems)


def _renamed(raw: Table, names: dict[str, str], path: KeyPath, problems: list[Problem]) -> Table:
    out, origin = Table(), dict[str, str]()
    for key, value in raw.items():
        name = str(key).replace("-", "_")
        name = names.get(name, name)
        if name in out:
            problems.append(Problem((*path, str(key)), f"means the same as {origin[name]}; keep one of them"))
        out[name], origin[name] = value, str(key)
    return out


Override = str | tuple[str, str]
"""An assignment as for ``--set``, such as "deployment.tp=8"; or an option of a command and the assignment it makes."""


def load(path: Path | str, overrides: Sequence[Override] = ()) -> Scenario:
    """Read and check a scenario file. Raises ScenarioError, which lists all wrong keys and values.

    Messages about ``overrides`` name ``--set`` or the option.
    """
    path = Path(path)
    return _checked(read(path), str(path), path.parent, overrides)


def loads(
    text: str,
    *,
    suffix: str = ".toml",
    folder: Path | str = ".",
    overrides: Sequence[Override] = (),
    source: str = "scenario",
) -> Scenario:
    """Parse and check the text of a scenario file, as ``load`` does. Its paths are relative to ``folder``.

    Messages name the text by ``source``.
    """
    return _checked(parse(text, suffix, source), source, Path(folder), overrides)


def _checked(raw: Table, source: str, folder: Path, overrides: Sequence[Override]) -> Scenario:
    settings, problems = canonical(raw)
    overridden, of_option, notes = list[tuple[KeyPath, Table]](), dict[KeyPath, str](), list[str]()
    for one in overrides:
        option, text = ("", one) if isinstance(one, str) else one
        keys, value = assignment(text)
        over, found = canonical(value)
        problems += found
        path = _canonical_path(over, keys)
        overridden.append((path, over))
        of_option |= {path: option} if option else {}
        for removed in map(" and ".join, removed_keys(settings, over)):
            name = option or f"--set {text.partition('=')[0].strip()}"
            notes.append(f"{name} takes the place of {removed}, which the scenario also gives ({source})")
        settings = merged(settings, over)
    completed = with_first_values(settings)
    scenario, found = validated(Scenario, completed)
    # A wrong value that was taken from an axis is a problem of the axis, which ``space_problems`` reports.
    found = [one for one in found if value_at(settings, one.path) is not None or value_at(completed, one.path) is None]
    settings = completed
    variants = settings.get("variants", [])
    for problem in found:
        path = problem.path
        if path[:1] == ("variants",) and len(path) > 1:  # name the variant, not its position in the list
            variant = variants[int(path[1])]
            own_name = variant.get("name") if isinstance(variant, dict) else None
            path = ("variants", str(own_name or path[1]), *path[2:])
        problems.append(Problem(path, problem.text))
    if isinstance(variants, list):
        problems += _variant_problems(settings, variants, {(p.path, p.text) for p in found})
    raise_if_any(problems, source, [path for path, _ in overridden], of_option)
    assert scenario is not None  # None only with problems
    for path, over in overridden:
        if own := [repr(variant.name) for variant in scenario.variants if _sets(variant.overrides, over)]:
            option = of_option.get(path) or f"--set {'.'.join(path)}"
            notes.append(f"{option} does not change the variants that set it themselves: {', '.join(own)}")
    notes += unit_notes({key: value for key, value in settings.items() if key != "variants"})
    notes += [note for one in variants for note in unit_notes(one, f"variants.{one['name']}.")]
    notes += _cache_notes(scenario, source)
    sections = [one.workload for one in scenario.variant_scenarios() if not one.workload.columns]
    if traces := dict.fromkeys(one.trace for one in sections if one.trace):
        from lengthwise.config.workload import column_notes

        notes += [note for trace in traces for note in column_notes(resolved(trace, folder))]
    return scenario.with_origin(source, folder, notes)


ENGINE_KEYS = ("engine", "engine.name")


def _cache_notes(scenario: Scenario, source: str) -> list[str]:
    """Return warnings of cache settings without effect. Raises ScenarioError if no offloading has a size."""
    notes = list[str]()
    tables = {one.name: one.engine.kv_offloading for one in scenario.variant_scenarios()}
    unsized = [repr(name) for name, table in tables.items() if table and "size_gb" not in table.model_fields_set]
    if len(unsized) == len(tables):
        raise_if_any([Problem(("engine", "kv_offloading", "size_gb"), "is missing")], source)
    elif unsized:
        notes.append(f"engine.kv_offloading has no size_gb, and thus no effect, in {', '.join(unsized)}")
    cached = scenario.engine.enable_prefix_caching or any(
        v.engine.get("enable_prefix_caching") for v in scenario.variants
    )
    caches = [scenario.engine.model_dump(), *(v.engine for v in scenario.variants)]
    spaces = [] if scenario.search is None else [scenario.search.space, *scenario.search.any_of]
    varied = any(key.endswith("enable_prefix_caching") for space in spaces for key in flat(space))
    if not (cached or varied) and any(one.get("prefix_cache", "vllm") != "vllm" for one in caches):
        notes.append(
            "engine.prefix_cache has no effect, because the cache is off; set engine.enable_prefix_caching = true"
        )
    workload, given = scenario.workload, "enable_prefix_caching" in scenario.engine.model_fields_set
    given = given or any("enable_prefix_caching" in v.engine for v in scenario.variants)
    shares = workload.trace or workload.groups or workload.sessions or workload.tools
    engines: set[str | None] = {one.engine.name for one in scenario.variant_scenarios()}
    axes = [value for space in spaces for key, value in flat(space).items() if key in ENGINE_KEYS]
    engines.update(one for axis in axes if isinstance(axis, list) for one in axis if isinstance(one, str))
    if shares and not (given or varied) and "trtllm" in engines and engines & {"vllm", "sglang"}:
        notes.append(
            'engine = "vllm" and "sglang" cache prefixes, as their servers do. The server of TensorRT-LLM does so by '
            "default, too, which is not modelled; engine.enable_prefix_caching = false compares all without caches"
        )
    refused = "trtllm" in (scenario.engine.name, scenario.scheduler.policy)  # TensorRT-LLM's rules have no cache
    if cached and given and not shares and not refused:
        notes.append(
            "enable_prefix_caching = true only helps preempted requests here, because no two prompts share a prefix; "
            "[workload.groups], [workload.sessions], [workload.tools] or a trace can give shared prefixes"
        )
    return notes


def _sets(own: Any, over: Any) -> bool:
    """Return whether a variant's own settings include a key that ``over`` sets, too."""
    tables = isinstance(own, dict) and isinstance(over, dict)
    return any(_sets(own[key], over[key]) for key in own.keys() & over) if tables else True


def _canonical_path(table: Any, keys: Sequence[str]) -> KeyPath:
    """Return the path ``keys`` of an assignment, with aliases replaced by the keys that its ``table`` has."""
    path: list[str] = []
    while len(path) < len(keys) and isinstance(table, dict) and table:
        key = next(iter(table))
        path.append(key)
        table = table[key]
    return (*path, *keys[len(path) :])


def _variant_problems(settings: Table, variants: list[Any], known: set[tuple[KeyPath, str]]) -> list[Problem]:
    """Return the problems of each variant, except those that the base has, too (``known``)."""
    base = {key: value for key, value in settings.items() if key != "variants"}
    problems, names, effective = list[Problem](), set[str](), list[Table]()
    for index, variant in enumerate(variants):
        if not isinstance(variant, dict):
            continue  # already reported as a problem of the list
        name = str(variant.get("name", index))
        if name in names:
            problems.append(Problem(("variants", name, "name"), "two variants have this name; give each its own"))
        names.add(name)
        expanded = merged(base, {key: value for key, value in variant.items() if key in _VARIABLE_SECTIONS})
        effective.append(expanded)
        found = [p for p in validated(Scenario, expanded)[1] if (p.path, p.text) not in known]
        problems += [Problem(("variants", name, *p.path), p.text) for p in found]
    return problems + [problem for expanded in effective or [base] for problem in space_problems(expanded)]
