"""Reads an application's file (TOML or YAML, with ``--set``) into the records that planning and running need."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter

from lengthwise import catalog, workload
from lengthwise.apps.app import App, Call, Fan, From, LengthFields, Loop, Model, Sampling
from lengthwise.apps.inputs import Rows, read_batch, read_rows
from lengthwise.apps.launch.local import EngineConfig, EngineTimeouts
from lengthwise.apps.plan import Served, SwitchRates, SwitchTimes
from lengthwise.apps.run.job import Settings
from lengthwise.config.app_sections import (
    AppTables,
    CallSection,
    EngineTable,
    LengthSection,
    LoopSection,
    ModelSection,
    ObservedSection,
    RunTable,
)
from lengthwise.config.cluster import parse_cluster
from lengthwise.config.files import Table, assignment, merged, parse, read, resolved
from lengthwise.config.validation import Problem, Problems, raise_if_any, validated
from lengthwise.config.values import Section
from lengthwise.cost import HOST_NAMES
from lengthwise.engine import COST_SOURCES
from lengthwise.schema.app import PLAN_FORMAT, AppPlan, Cluster
from lengthwise.schema.deployment import EngineLimits
from lengthwise.schema.errors import InputError, UnknownNameError

Of = TypeVar("Of", bound=Section)
_KIND = "application"
_EXAMPLE = 'cluster.nodes=["8xA100-80GB"]'


@dataclass(frozen=True)
class AppRun:
    """How an application runs: its launcher, its engines and their time limits."""

    launcher: str = "local"
    settings: Settings = field(default_factory=Settings)
    timeouts: EngineTimeouts = field(default_factory=EngineTimeouts)
    store: str | None = None  # file or URL of the ledger; None: in the folder of the run
    urls: Mapping[int, tuple[str, ...]] = field(default_factory=dict)  # URLs of running engines, by model number
    length_factor: Mapping[int, float] = field(default_factory=dict)  # actual over planned lengths, by model number


@dataclass(frozen=True, eq=False)
class AppFile:
    """The checked content of an application's file."""

    app: App
    rows: Rows  # the input rows
    served: tuple[Served, ...]  # by model: its shape, limits and costs, for planning
    loaded: tuple[EngineConfig, ...]  # by model: how its engines are started and called
    cluster: Cluster | None  # None if the file names no GPUs
    run: AppRun
    folder: Path  # where relative paths start
    files: tuple[Path, ...]  # the files on which the application depends
    notes: tuple[str, ...] = ()  # warnings, a sentence each
    is_batch: bool = False  # whether the rows are an OpenAI batch
    times: SwitchTimes = field(default_factory=SwitchTimes)  # times to start, sleep and wake engines


def load_app(path: Path | str, overrides: Sequence[str] = ()) -> AppFile:
    """Read and check an application's file. Overrides are texts such as "models.small.weights=./a".

    Raises ScenarioError, which lists all wrong keys and values.
    """
    path = Path(path)
    return _checked(read(path, _KIND), str(path), path.parent, overrides, (path,))


def loads_app(text: str, *, suffix: str = ".toml", folder: Path | str = ".", overrides: Sequence[str] = ()) -> AppFile:
    """Parse and check the text of an application's file. Raises ScenarioError, as ``load_app`` does."""
    return _checked(parse(text, suffix, _KIND, _KIND), _KIND, Path(folder), overrides, ())


def _checked(raw: Table, source: str, folder: Path, overrides: Sequence[str], files: tuple[Path, ...]) -> AppFile:
    settings, paths = raw, []
    for text in overrides:
        keys, over = assignment(text, _EXAMPLE)
        paths.append(keys)
        settings = _in_order(merged(settings, over), settings)
    tables, problems = validated(AppTables, settings)
    raise_if_any(problems, source, paths)
    assert tables is not None  # None only with problems
    builder = _Builder(tables, folder, files)
    made = builder.build()
    raise_if_any(builder.problems, source, paths)
    assert made is not None  # None only with problems
    return made


def _in_order(table: Table, before: Table) -> Table:
    keys = [*(key for key in before if key in table), *(key for key in table if key not in before)]
    out = {}
    for key in keys:
        value, old = table[key], before.get(key)
        out[key] = _in_order(value, old) if isinstance(value, dict) and isinstance(old, dict) else value
    return out


class _Builder:
    def __init__(self, tables: AppTables, folder: Path, files: Sequence[Path]) -> None:
        self.tables, self.folder = tables, folder
        self.files, self.problems = list(files), Problems()
        self._is_run_command_reported = False

    def build(self) -> AppFile | None:
        tables = self.tables
        sections = self._sections(tables.models, ModelSection, "models")
        models = [self._model(name, section) for name, section in sections.items()]
        found = self._batch(models) if tables.inputs.openai_batch else self._app(models)
        cluster = None
        if tables.cluster is not None:
            with self.problems.at("cluster", "nodes"):
                cluster = parse_cluster(tables.cluster.nodes, self.folder)
        engines = self._sections(tables.run.engines, EngineTable, "run", "engines")
        if found is None:
            return None
        app, rows = found
        known = [model.name for model in app.models]
        for name in engines:
            if name not in known:
                self.problems.add(str(UnknownNameError("model", name, known)), "run", "engines", name)
        served = tuple(self._served_model(model) for model in app.models)
        loaded = [self._loaded(model, engines.get(model.name), tables.run) for model in app.models]
        run = self._run(tables.run, engines, app)
        if self.problems or run is None:
            return None
        unknown = [model.name for model in app.models if model.lengths is None]
        note = f"no lengths are given for {', '.join(unknown)}: outputs are planned as long as they may be"
        return AppFile(
            app=app,
            rows=rows,
            served=served,
            loaded=tuple(one for one in loaded if one is not None),
            cluster=cluster,
            run=run,
            folder=self.folder,
            files=tuple(self.files),
            notes=(note,) if unknown else (),
            is_batch=tables.inputs.openai_batch is not None,
            times=SwitchTimes(rates=SwitchRates(tables.cluster.engine_start)) if tables.cluster else SwitchTimes(),
        )

    def _file(self, text: str) -> Path:
        path = resolved(text, self.folder)
        self.files.append(path)
        return path

    def _section(self, table: Any, kind: type[Of], *path: str) -> Of | None:
        section, problems = validated(kind, table)
        self.problems += [Problem((*path, *one.path), one.text) for one in problems]
        return section

    def _sections(self, tables: Mapping[str, Any], kind: type[Of], *path: str) -> dict[str, Of]:
        sections = {name: self._section(table, kind, *path, name) for name, table in tables.items()}
        return {name: section for name, section in sections.items() if section is not None}

    def _app(self, models: Sequence[Model]) -> tuple[App, Rows] | None:
        tables = self.tables
        sections = self._sections(tables.calls, CallSection, "calls")
        calls = [self._call(name, section) for name, section in sections.items()]
        loops = [
            Loop(name, tuple(loop.calls), loop.max_rounds, loop.until, loop.until_share)
            for name, loop in self._sections(tables.loops, LoopSection, "loops").items()
        ]
        rows = None
        with self.problems.at("inputs"):
            rows = read_rows(self._file(tables.inputs.file or ""), tables.inputs.id)
            rows = rows.first(tables.inputs.rows or len(rows))
        if self.problems:
            return None  # otherwise a missing part would be reported twice
        with self.problems.at():
            app = App(models, [call for call in calls if call is not None], loops, tables.name)
            assert rows is not None  # without problems they are read
            return app, rows
        return None

    def _batch(self, models: Sequence[Model]) -> tuple[App, Rows] | None:
        tables = self.tables
        for kind in ("calls", "loops"):
            if getattr(tables, kind):
                self.problems.add("the requests of a batch are its calls; take these out, or openai_batch", kind)
        with self.problems.at("inputs", "openai_batch"):
            batch = read_batch(self._file(tables.inputs.openai_batch or ""), models, tables.name)
            return batch.app, batch.rows
        return None

    def _model(self, name: str, section: ModelSection) -> Model:
        limits = section.engine.model_dump(exclude={"name"})
        if section.engine.name is not None:
            text = "is for scenarios, where it sets the scheduler; leave it out"
            self.problems.add(text, "models", name, "engine", "name")
        if limits["max_step_seqs"] == "per_stage":
            text = "must be a number: plans differ in their stages"
            self.problems.add(text, "models", name, "engine", "max_step_seqs")
            limits["max_step_seqs"] = None
        with self.problems.at("models", name, "host"):
            if section.host not in HOST_NAMES:
                raise UnknownNameError("host", section.host, HOST_NAMES)
        source, colon, place = section.cost.partition(":")
        with self.problems.at("models", name, "cost"):
            if source not in {known.partition(":")[0] for known in COST_SOURCES} or (colon and not place):
                raise UnknownNameError("source of costs", section.cost, COST_SOURCES)
        limits["max_model_len"] = section.max_model_len or limits["max_model_len"]
        return Model(
            name=name,
            **section.model_dump(include={"model", "weights", "revision", "host"}),
            lengths=self._lengths(section.lengths, ("models", name, "lengths")),
            max_model_len=limits["max_model_len"],
            limits=EngineLimits(**limits, weight_dtype=section.weight_dtype, kv_dtype=section.kv_dtype),
            cost=f"{source}:{self._file(place)}" if colon and place else section.cost,
        )

    def _lengths(self, given: float | Mapping[str, Any] | None, path: tuple[str, ...]) -> workload.Marginal | None:
        if given is None:
            return None
        if isinstance(given, Mapping) and "file" in given:
            observed = self._section(given, ObservedSection, *path)
            with self.problems.at(*path):
                if observed is not None:
                    return _empirical(self._file(observed.file), observed.column, observed.weights)
            return None
        if isinstance(given, Mapping) and "kind" not in given:
            self.problems.add("must have a kind, or file and column of observed lengths", *path)
            return None
        table = given if isinstance(given, Mapping) else {"kind": "fixed", "tokens": int(given)}
        before = len(self.problems)
        section = self._section({"output": table}, LengthSection, *path)
        self.problems[before:] = [Problem((*path, *p.path[len(path) + 1 :]), p.text) for p in self.problems[before:]]
        return section.output.build() if section else None

    def _served_model(self, model: Model) -> Served:
        spec = model.spec
        with self.problems.at("models", model.name, "model"):
            path = resolved(spec, self.folder)
            try:
                catalog.model(path if spec.endswith(".json") else spec)
                spec = str(path) if spec.endswith(".json") else spec
            except UnknownNameError:
                if not path.exists():
                    raise
                catalog.model(path)
                spec = str(path)
        return Served(model.name, spec, model.limits, model.cost, model.host)

    def _call(self, name: str, section: CallSection) -> Call | None:
        model = section.model if section.model_from is None else From(section.model_from)
        assert model is not None  # the section requires one of them
        messages = tuple((one.role, one.content) for one in section.messages or ())
        with self.problems.at("calls", name):
            return Call(
                name=name,
                model=tuple(model) if isinstance(model, list) else model,
                prompt=messages if section.prompt is None else section.prompt,
                sampling=Sampling(
                    **section.model_dump(include={"max_tokens", "temperature", "top_p", "seed", "extra"}),
                    stop=tuple(section.stop),
                ),
                fan=Fan(section.each or "", section.times, section.over or "", section.max_items, section.expected),
                **section.model_dump(include={"system", "api", "when", "when_share"}),
                report=LengthFields(section.prompt_tokens, section.known_tokens, section.max_tokens_field),
            )
        return None

    def _loaded(self, model: Model, engine: EngineTable | None, run: RunTable) -> EngineConfig | None:
        """Return how a model's engines are started and called; [run] has the settings that ``engine`` lacks."""
        own = engine or EngineTable()
        if own.command is None and self._is_run_command_reported:
            return None  # a wrong command of [run] is reported once and not for each model
        weights = model.weights
        if weights is not None:  # a folder, or a name of a hub
            path = resolved(weights, self.folder)
            weights = str(path) if path.exists() or weights.startswith((".", "/", "~")) else weights
        with self.problems.at(*(("run", "engines", model.name) if engine else ("run",))):
            return EngineConfig(
                name=model.name,
                weights=weights,
                served=own.served,
                command=run.command if own.command is None else own.command,
                environment={**run.environment, **(own.environment or {})},
                max_num_seqs=own.max_num_seqs or run.max_num_seqs,
                max_model_len=model.max_model_len,
                sleeps=run.sleeps if own.sleeps is None else own.sleeps,
                body=own.body,
            )
        self._is_run_command_reported = own.command is None
        return None

    def _run(self, run: RunTable, engines: Mapping[str, EngineTable], app: App) -> AppRun | None:
        tables = {number: engines.get(model.name, EngineTable()) for number, model in enumerate(app.models)}
        urls = {number: tuple(table.urls) for number, table in tables.items()}
        length_factor = {number: t.length_factor for number, t in tables.items() if t.length_factor is not None}
        without = [app.models[number].name for number, known in urls.items() if not known]
        if run.launcher == "static" and without:
            text = f"every model needs urls where engines are static; {', '.join(without)} has none"
            self.problems.add(text, "run", "engines")
        store = run.store
        if store is not None and "://" not in store:
            store = str(self.folder / Path(store).expanduser())
        with self.problems.at("run"):
            durations = ("lease", "backoff", "max_backoff", "save", "linger")
            seconds = {f"{name}_s": getattr(run, name) for name in durations}
            counts = {"max_attempts", "engine_failures", "max_engine_failures", "seed", "replans"}
            settings = Settings(**seconds, **run.model_dump(include=counts))
            timeouts = EngineTimeouts(ready_s=run.ready, stall_s=run.stall, request_s=run.request)
            return AppRun(run.launcher, settings, timeouts, store, urls, length_factor)
        return None


def _empirical(path: Path, column: str, weights: str | None) -> workload.Marginal:
    rows = read_rows(path).rows

    def numbers(name: str) -> list[float]:
        found = []
        for number, row in enumerate(rows, 1):
            if name not in row:
                raise UnknownNameError(f"column in {path}", name, row)
            try:
                found.append(float(row[name]))
            except (TypeError, ValueError):
                raise InputError(f"{path}, row {number}: {name} must be a number; it is {row[name]!r}") from None
        return found

    return workload.Empirical(numbers(column), None if weights is None else numbers(weights))


def read_plan(path: Path | str) -> AppPlan:
    """Read a plan from a file of ``apps.plan.write_plan``. Raises InputError for any other file."""

    def with_nan(row: dict[str, Any]) -> dict[str, Any]:
        return {name: math.nan if value is None and name != "plan" else value for name, value in row.items()}

    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"), object_hook=with_nan)
        if content.pop("format", None) == PLAN_FORMAT:
            return TypeAdapter(AppPlan).validate_python(content)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f"cannot read the plan {path}: {type(error).__name__}: {error}") from error
    raise InputError(f"{path} must be an application's plan as `lengthwise app plan --json` writes it")
