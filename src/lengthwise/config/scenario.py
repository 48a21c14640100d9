"""A scenario: one whole question, checked, as the file asks it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import Field, PrivateAttr, ValidationError, model_validator

from lengthwise.config.files import Table, assignment, dropped, merged, parse, read, resolved, toml
from lengthwise.config.search_space import axis_name, flat, limit_names, space_problems, with_first_values
from lengthwise.config.sections import (
    DeploymentSection,
    EngineSection,
    LabSection,
    PredictorSection,
    RunSection,
    SchedulerSection,
    ScheduleSection,
    SearchSection,
    SloSection,
    VariantSection,
    WorkloadSection,
)
from lengthwise.config.validation import Problem, findings, raise_if_any
from lengthwise.config.values import Section
from lengthwise.schema.errors import InputError


class Scenario(Section):
    """A workload, a deployment and how to look at them; with variants, several side by side."""

    name: str = ""
    description: str = ""
    workload: WorkloadSection
    deployment: DeploymentSection
    engine: EngineSection = EngineSection()
    scheduler: SchedulerSection = SchedulerSection()
    predictor: PredictorSection = PredictorSection()
    slo: SloSection = SloSection()
    run: RunSection = RunSection()
    search: SearchSection | None = None
    lab: LabSection | None = None
    schedule: ScheduleSection | None = None
    variants: list[VariantSection] = Field(default_factory=list)
    _source: str = PrivateAttr("scenario")
    _folder: Path = PrivateAttr(Path())
    _notes: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="after")
    def _one_prediction(self) -> Self:
        if self.predictor.kind != "none" and self.workload.predicted != "none":
            raise ValueError(
                f"workload.predicted = {self.workload.predicted!r} and predictor.kind = {self.predictor.kind!r} "
                "both predict; keep one of them"
            )
        return self

    @property
    def source(self) -> str:
        """The file it came from, for messages."""
        return self._source

    @property
    def folder(self) -> Path:
        """Where its relative paths start."""
        return self._folder

    @property
    def notes(self) -> tuple[str, ...]:
        """What was dropped for an override, a sentence each."""
        return self._notes

    @property
    def files(self) -> list[Path]:
        """The files that the scenario is read from, with its variants: its own, traces, models, specs, tables."""
        named = {Path(self.source)}
        for whole in self.effective():
            on = whole.deployment
            texts = (
                whole.workload.trace,
                whole.predictor.file,
                on.model,
                on.gpu,
                on.node,
                on.cost.partition(":")[2].partition("#")[0],
                *(one.file for one in (whole.lab.predictors if whole.lab else ())),
            )
            named.update(resolved(text, self.folder) for text in texts if text)
        return sorted(path for path in named if path.is_file())

    def from_file(self, source: str, folder: Path, notes: Sequence[str] = ()) -> Self:
        """The same scenario, told where it came from; a nameless one takes the file's name."""
        named = self.model_copy(update={} if self.name else {"name": Path(source).stem})
        named._source, named._folder, named._notes = source, folder, tuple(notes)  # noqa: SLF001 - its own
        return named

    def effective(self) -> list[Self]:
        """One scenario without variants for each variant, named as it; just this one without any."""
        if not self.variants:
            return [self]
        base = self.model_dump(exclude={"variants"}, exclude_unset=True, exclude_none=True)
        return [self._with(base, variant) for variant in self.variants]

    def only(self, variant: str) -> Self:
        """The scenario of the one variant of this name.

        Raises:
            InputError: It has none of that name.
        """
        sides = {whole.name: whole for whole in self.effective()} if self.variants else {}
        if variant not in sides:
            known = f"it has {', '.join(sides)}" if sides else "it has none"
            raise InputError(f"{self.source} has no variant {variant!r}; {known}")
        return sides[variant]

    def _with(self, base: dict[str, Any], variant: VariantSection) -> Self:
        whole = type(self).model_validate(merged(base, variant.overrides | {"name": variant.name}))
        return whole.from_file(self.source, self.folder, self.notes)

    def with_run(self, **changes: Any) -> Self:
        """The same scenario with other settings of ``[run]``, such as ``seeds=5``; they are checked."""
        return self.model_copy(update={"run": RunSection.model_validate(self.run.model_dump() | changes)})

    def to_toml(self) -> str:
        """The effective settings, defaults included, as a TOML file that loads to an equal scenario."""
        return toml(self.model_dump(exclude_none=True))


_SECTIONS = {"sla": "slo", "slos": "slo", "traffic": "workload", "variant": "variants"}
_KEYS: dict[str, dict[str, str]] = {
    "workload": {
        "isl": "prompt",
        "input_len": "prompt",
        "prompt_tokens": "prompt",
        "osl": "output",
        "output_len": "output",
        "output_tokens": "output",
        "rate": "request_rate",
        "rate_rps": "request_rate",
        "qps": "request_rate",
        "rps": "request_rate",
        "max_concurrency": "concurrency",
        "num_prompts": "num_requests",
    },
    "deployment": {
        "model_path": "model",
        "hardware": "gpu",
        "system": "gpu",
        "tensor_parallel": "tp",
        "tensor_parallel_size": "tp",
        "pipeline_parallel": "pp",
        "pipeline_parallel_size": "pp",
        "dp": "replicas",
        "data_parallel_size": "replicas",
        "num_replicas": "replicas",
        "dtype": "weight_dtype",
        "kv_cache_dtype": "kv_dtype",
        "num_gpu_blocks": "num_blocks",
        "num_gpu_blocks_override": "num_blocks",
    },
    "engine": {
        "max_batch_size": "max_num_seqs",
        "max_num_tokens": "max_num_batched_tokens",
        "chunk_size": "max_num_batched_tokens",
        "page_size": "block_size",
        "timeout": "timeout_s",
    },
    "scheduler": {
        "name": "policy",
        "scheduling_policy": "rank",
        "routing": "router",
        "bins": "binning",
        "max_wait": "max_wait_s",
        "batch_wait": "batch_wait_s",
        "window": "window_tokens",
    },
    "predictor": {"path": "file", "window": "window_tokens"},
    "slo": {"itl": "tpot", "e2e": "jct", "e2el": "jct", "e2e_latency": "jct", "request_latency": "jct"},
    "run": {"num_seeds": "seeds", "warmup": "warmup_s", "time_limit": "time_limit_s"},
    "search": {"goal": "objective", "request_rate": "rate", "gpus": "max_gpus", "slo": "limits", "num_seeds": "seeds"},
    "length": {"min": "low", "max": "high", "std": "sd", "stddev": "sd"},
}
_KINDS = {
    "length": {"log_normal": "lognormal", "normal": "truncated_normal", "constant": "fixed"},
    "arrivals": {"static": "all_at_once", "burst": "all_at_once"},
}

_NO_TBT = (
    "gaps are pooled over requests and judge none of them; limit tpot, and read TBT in the table; "
    "known in slo are ttft, tpot, jct"
)

_SHORT = {"scheduler": "policy", "predictor": "kind"}

RawTable = dict[str, Any]


def canonical(raw: RawTable) -> tuple[RawTable, list[Problem]]:
    """The same settings under this project's own keys, and what was said twice."""
    problems: list[Problem] = []
    settings = _renamed(raw, _SECTIONS, (), problems)
    for key, value in settings.items():
        if key == "variants" and isinstance(value, list):
            settings[key] = [_variant(v, i, problems) for i, v in enumerate(value)]
        else:
            settings[key] = _section(key, value, (key,), problems)
    return settings, problems


def _variant(raw: Any, index: int, problems: list[Problem]) -> Any:
    if not isinstance(raw, dict):
        return raw
    here = ("variants", str(index))
    nested = _renamed(_undotted(raw), _SECTIONS, here, problems)
    return {key: _section(key, value, (*here, key), problems) for key, value in nested.items()}


def _undotted(raw: RawTable) -> RawTable:
    """Quoted keys with dots, as YAML needs them, as nested tables."""
    out: RawTable = {}
    for key, value in raw.items():
        *tables, leaf = str(key).split(".")
        place = out
        for table in tables:
            inner = place.setdefault(table, {})
            place = inner if isinstance(inner, dict) else {}
        if isinstance(value, dict) and isinstance(place.get(leaf), dict):
            place[leaf].update(value)
        else:
            place[leaf] = value
    return out


def _section(name: str, value: Any, local: tuple[str, ...], problems: list[Problem]) -> Any:
    if name in _SHORT and isinstance(value, str):
        return {_SHORT[name]: value}
    if not isinstance(value, dict) or name not in _KEYS:
        return value
    table = _renamed(value, _KEYS[name], local, problems)
    if name == "slo":
        return _slo(table, local, problems)
    if name == "search":
        return _search(table, local, problems)
    if name != "workload":
        return table
    for key in ("prompt", "output", "arrivals"):
        if key in table:
            table[key] = _kind(key, table[key], (*local, key), problems)
    return table


def _search(table: RawTable, local: tuple[str, ...], problems: list[Problem]) -> RawTable:
    """Limits and axes under their dotted names."""
    if isinstance(table.get("limits"), dict):
        table["limits"] = limit_names(table["limits"])
    if isinstance(table.get("space"), dict):
        table["space"] = _axes(table["space"], (*local, "space"), problems)
    if isinstance(table.get("any_of"), list):
        table["any_of"] = [
            _axes(own, (*local, "any_of", str(at)), problems) if isinstance(own, dict) else own
            for at, own in enumerate(table["any_of"])
        ]
    return table


def _axes(table: RawTable, local: tuple[str, ...], problems: list[Problem]) -> RawTable:
    """``tp``, ``deployment.tp`` and ``tensor_parallel`` as "deployment.tp"."""
    axes: RawTable = {}
    said: dict[str, str] = {}
    for text, values in flat(table).items():
        name = axis_name(text, _KEYS)
        if name in axes:
            problems.append(Problem((*local, text), f"means the same as {said[name]}; keep one of them"))
        axes[name], said[name] = values, text
    return axes


def _kind(key: str, value: Any, local: tuple[str, ...], problems: list[Problem]) -> Any:
    group = "arrivals" if key == "arrivals" else "length"
    if group == "arrivals" and isinstance(value, str):
        value = {"kind": value}
    elif group == "length" and isinstance(value, int | float) and not isinstance(value, bool):
        value = {"kind": "fixed", "tokens": value}
    if not isinstance(value, dict):
        return value
    table = _renamed(value, _KEYS.get(group, {}), local, problems)
    if isinstance(table.get("kind"), str):
        kind = table["kind"].lower().replace("-", "_")
        table["kind"] = _KINDS[group].get(kind, kind)
    return table


def _slo(table: RawTable, local: tuple[str, ...], problems: list[Problem]) -> RawTable:
    """``ttft_ms = 200`` as ``ttft = "200ms"``."""
    spelled = {}
    names = {}
    for key, value in table.items():
        if key in ("tbt", "tbt_ms", "tbt_s"):
            problems.append(Problem((*local, key), _NO_TBT))
            continue
        stem, _, unit = key.rpartition("_")
        if unit in ("ms", "s") and isinstance(value, int | float):
            names[key] = _KEYS["slo"].get(stem, stem)
            spelled[key] = f"{value}{unit}"
        else:
            spelled[key] = value
    return _renamed(spelled, names, local, problems)


def _renamed(raw: RawTable, names: dict[str, str], local: tuple[str, ...], problems: list[Problem]) -> RawTable:
    out: RawTable = {}
    said: dict[str, str] = {}
    for key, value in raw.items():
        spelled = str(key).replace("-", "_")
        name = names.get(spelled, spelled)
        if name in out:
            problems.append(Problem((*local, str(key)), f"means the same as {said[name]}; keep one of them"))
        out[name], said[name] = value, str(key)
    return out


Path_ = tuple[str, ...]


def load(path: Path | str, overrides: Sequence[str] = ()) -> Scenario:
    """The scenario of a TOML or YAML file, every key and value checked.

    Args:
        path: The file. Relative paths inside it start at its folder.
        overrides: Assignments such as ``"deployment.tp=8"``, later ones winning; they change the
            base that the variants differ from.

    Raises:
        ScenarioError: A key or a value cannot be used; the message lists all of them.
    """
    path = Path(path)
    return checked(read(path), source=str(path), folder=path.parent, overrides=overrides)


def loads(text: str, *, suffix: str = ".toml", folder: Path | str = ".", overrides: Sequence[str] = ()) -> Scenario:
    """The scenario of a text; ``folder`` is where relative paths start. Raises as ``load`` does."""
    return checked(parse(text, suffix, "scenario"), source="scenario", folder=Path(folder), overrides=overrides)


def checked(raw: Table, *, source: str, folder: Path, overrides: Sequence[str] = ()) -> Scenario:
    """The scenario of plain tables; raises as ``load`` does."""
    settings, problems = canonical(raw)
    settings, overridden, dropped = _overridden(settings, overrides, problems)
    settings = with_first_values(settings)
    variants = settings.get("variants", [])
    scenario, found = _validated(settings)
    problems += [_by_name(problem, variants) for problem in found]
    if isinstance(variants, list):
        base = {key: value for key, value in settings.items() if key != "variants"}
        known = {(p.path, p.text) for p in found}
        problems += [p for p in _variants(base, variants) if (p.path[2:], p.text) not in known]
        problems += [problem for whole in _wholes(base, variants) for problem in space_problems(whole)]
    raise_if_any(problems, source, overridden)
    assert scenario is not None  # no problems, so it was built
    return scenario.from_file(source, folder, notes=[f"{note} ({source})" for note in dropped])


def _overridden(
    settings: Table, overrides: Iterable[str], problems: list[Problem]
) -> tuple[Table, list[Path_], list[str]]:
    """The settings with all that ``overrides`` say, their paths, and what gave way without being named."""
    paths: list[Path_] = []
    notes: list[str] = []
    for text in overrides:
        keys, value = assignment(text)
        for key in reversed(keys):
            value = {key: value}
        over, found = canonical(value)
        problems += found
        paths.append(_leaf(over, keys))
        notes += [_gave_way(text, keys) for keys in dropped(settings, over)]
        settings = merged(settings, over)
    return settings, paths, notes


def _gave_way(text: str, keys: Sequence[str]) -> str:
    said = " and ".join(keys)
    return f"--set {text.partition('=')[0].strip()} takes the place of {said}, which the scenario also gives"


def _leaf(table: Any, message: Sequence[str]) -> Path_:
    """The keys that ``message`` became; those that were refused on the way stay as they were said."""
    keys: list[str] = []
    while len(keys) < len(message) and isinstance(table, dict) and table:
        key = next(iter(table))
        keys.append(key)
        table = table[key]
    return (*keys, *message[len(keys) :])


def _validated(settings: Table) -> tuple[Scenario | None, list[Problem]]:
    try:
        return Scenario.model_validate(settings), []
    except ValidationError as error:
        return None, findings(error, Scenario)


def _by_name(problem: Problem, variants: Any) -> Problem:
    """A variant's problem under its name rather than its place in the list."""
    if problem.path[:1] != ("variants",) or len(problem.path) < 2:
        return problem
    variant = variants[int(problem.path[1])]
    name = variant.get("name") if isinstance(variant, dict) else None
    return Problem(("variants", str(name or problem.path[1]), *problem.path[2:]), problem.text)


def _variants(base: Table, variants: list[Any]) -> list[Problem]:
    """Problems of the whole questions that the variants ask, each under the variant's name."""
    problems: list[Problem] = []
    names: set[str] = set()
    for index, variant in enumerate(variants):
        if not isinstance(variant, dict):
            continue  # the validation of the list itself has said so
        name = str(variant.get("name", index))
        here = ("variants", name)
        if name in names:
            problems.append(Problem((*here, "name"), "two variants have this name; give each its own"))
        names.add(name)
        over = {key: value for key, value in variant.items() if key in _VARIED}
        problems += [Problem((*here, *p.path), p.text) for p in _validated(merged(base, over))[1]]
    return problems


def _wholes(base: Table, variants: list[Any]) -> list[Table]:
    """The settings of each variant, or just the base's."""
    over = [{k: v for k, v in variant.items() if k in _VARIED} for variant in variants if isinstance(variant, dict)]
    return [merged(base, one) for one in over] or [base]


_VARIED = ("workload", "deployment", "engine", "scheduler", "predictor", "search")
