"""An application's file: TOML or YAML with ``--set``, to what is planned and run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from lengthwise import catalog, workload
from lengthwise.apps.app import App, Call, Fan, From, Loop, Model, Report, Sampling
from lengthwise.apps.inputs import Rows, read_batch, read_rows
from lengthwise.apps.launch.local import Loaded, Patience
from lengthwise.apps.plan import Served, SwitchRates, SwitchTimes
from lengthwise.apps.run.job import Settings
from lengthwise.config.app_sections import (
    AppTables,
    CallSection,
    ClusterSection,
    EngineTable,
    LengthSection,
    LoopSection,
    ModelSection,
    RunTable,
    SeenSection,
    parse_cluster,
)
from lengthwise.config.files import Table, assignment, merged, parse, read, resolved
from lengthwise.config.validation import Problem, findings, raise_if_any
from lengthwise.config.values import Section
from lengthwise.cost import HOST_NAMES
from lengthwise.engine import COST_SOURCES
from lengthwise.schema.app import Cluster
from lengthwise.schema.deployment import EngineLimits
from lengthwise.schema.errors import InputError, UnknownNameError

Of = TypeVar("Of", bound=Section)


class Maker:
    """Makes the parts, and notes what is wrong with them and which files they are of."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: list[Problem] = []
        self.files: list[Path] = []
        self._is_told = False

    @contextmanager
    def at(self, *path: str) -> Iterator[None]:
        """Whatever cannot be made within is a problem of that table."""
        try:
            yield
        except InputError as error:
            self.problems.append(Problem(path, str(error)))

    def file(self, text: str) -> Path:
        """A file of the user's; it is noted."""
        path = resolved(text, self.folder)
        self.files.append(path)
        return path

    def sections(self, tables: Mapping[str, Any], of: type[Of], *path: str) -> dict[str, Of]:
        """Tables of one kind by name; those that are no good are noted and left out."""
        made: dict[str, Of] = {}
        for name, table in tables.items():
            section = self.section(table, of, *path, name)
            if section is not None:
                made[name] = section
        return made

    def section(self, table: Any, of: type[Of], *path: str) -> Of | None:
        """One table; None where it is no good."""
        try:
            return of.model_validate(table)
        except ValidationError as error:
            self.problems += [Problem((*path, *one.path), one.text) for one in findings(error, of)]
            return None

    def model(self, name: str, section: ModelSection) -> Model:
        """A model with its lengths and the engine's knobs."""
        limits = section.engine.model_dump(exclude={"max_step_seqs"})
        most = section.engine.max_step_seqs
        if most == "per_stage":
            self.problems.append(
                Problem(("models", name, "engine", "max_step_seqs"), "must be a number: plans differ in their stages")
            )
            most = None
        with self.at("models", name, "host"):
            if section.host not in HOST_NAMES:
                raise UnknownNameError("host", section.host, HOST_NAMES)
        longest = section.max_model_len or section.engine.max_model_len
        return Model(
            name=name,
            model=section.model,
            weights=section.weights,
            revision=section.revision,
            lengths=self.lengths(name, section.lengths),
            max_model_len=longest,
            limits=EngineLimits(
                **limits | {"max_model_len": longest},
                max_step_seqs=most,
                weight_dtype=section.weight_dtype,
                kv_dtype=section.kv_dtype,
            ),
            cost=self._cost(name, section.cost),
            host=section.host,
        )

    def lengths(self, name: str, given: float | Mapping[str, Any] | None) -> workload.Marginal | None:
        """A distribution of output lengths: a number, one by kind, or of a column that was seen."""
        path = ("models", name, "lengths")
        if given is None:
            return None
        if isinstance(given, Mapping) and "file" in given:
            seen = self.section(given, SeenSection, *path)
            with self.at(*path):
                return _seen(self.file(seen.file), seen) if seen else None
            return None
        if isinstance(given, Mapping) and "kind" not in given:
            self.problems.append(Problem(path, "must have a kind, or file and column of lengths that were seen"))
            return None
        table = given if isinstance(given, Mapping) else {"kind": "fixed", "tokens": int(given)}
        before = len(self.problems)
        section = self.section({"output": table}, LengthSection, *path)
        self.problems[before:] = [Problem((*path, *p.path[len(path) + 1 :]), p.text) for p in self.problems[before:]]
        return section.output.build() if section else None

    def _cost(self, name: str, given: str) -> str:
        source, colon, place = given.partition(":")
        with self.at("models", name, "cost"):
            if source not in {known.partition(":")[0] for known in COST_SOURCES} or (colon and not place):
                raise UnknownNameError("source of costs", given, COST_SOURCES)
        return f"{source}:{self.file(place)}" if colon and place else given

    def served(self, model: Model) -> Served:
        """A model as the planner sees it; a catalog name wins over a path."""
        spec = model.spec
        with self.at("models", model.name, "model"):
            path = resolved(spec, self.folder)
            try:
                catalog.model(path if spec.endswith(".json") else spec)
            except UnknownNameError:
                if not path.exists():
                    raise
                catalog.model(path)
            else:
                path = path if spec.endswith(".json") else Path(spec)
            spec = str(path)
        return Served(model.name, spec, model.limits, model.cost, model.host)

    def call(self, name: str, section: CallSection) -> Call | None:
        """A call."""
        asked = From(section.model_from) if section.model_from is not None else section.model
        assert asked is not None
        prompt = section.prompt
        with self.at("calls", name):
            return Call(
                name=name,
                model=tuple(asked) if isinstance(asked, list) else asked,
                prompt=tuple((one.role, one.content) for one in section.messages or ()) if prompt is None else prompt,
                system=section.system,
                sampling=_sampling(section),
                api=section.api,
                fan=Fan(
                    each=section.each or "",
                    times=section.times,
                    over=section.over or "",
                    most=section.most,
                    expected=section.expected,
                ),
                when=section.when,
                when_share=section.when_share,
                report=Report(section.prompt_tokens, section.known_tokens, section.longest_tokens),
            )
        return None

    def loop(self, name: str, section: LoopSection) -> Loop:
        """A loop."""
        return Loop(name, tuple(section.calls), section.most, section.until, section.until_share)

    def loaded(self, model: Model, engine: EngineTable | None, run: RunTable) -> Loaded | None:
        """How a model's engines are started and asked: as its own table says, or else as [run] does."""
        own = engine or EngineTable()
        if own.command is None and self._is_told:
            return None  # the command of [run] is no good, which is told once and not for each model
        with self.at(*(("run", "engines", model.name) if engine else ("run",))):
            return Loaded(
                name=model.name,
                weights=self._weights(model.weights),
                served=own.served,
                command=run.command if own.command is None else own.command,
                environment={**run.environment, **(own.environment or {})},
                max_num_seqs=own.max_num_seqs or run.max_num_seqs,
                max_model_len=model.max_model_len,
                sleeps=run.sleeps if own.sleeps is None else own.sleeps,
                body=own.body,
            )
        self._is_told = own.command is None
        return None

    def _weights(self, weights: str | None) -> str | None:
        """A folder where there is one of that name, or where it begins as only folders do; else a name of a hub."""
        if weights is None:
            return None
        path = resolved(weights, self.folder)
        return str(path) if path.exists() or weights.startswith((".", "/", "~")) else weights


def _sampling(section: CallSection) -> Sampling:
    return Sampling(
        max_tokens=section.max_tokens,
        temperature=section.temperature,
        top_p=section.top_p,
        stop=tuple(section.stop),
        seed=section.seed,
        extra=section.extra,
    )


def _seen(path: Path, section: SeenSection) -> workload.Marginal:
    """The empirical distribution of a column."""
    rows = read_rows(path).rows
    tokens = [_number(path, section.column, row, at) for at, row in enumerate(rows, 1)]
    if section.weights is None:
        return workload.Empirical(tokens)
    return workload.Empirical(tokens, [_number(path, section.weights, row, at) for at, row in enumerate(rows, 1)])


def _number(path: Path, column: str, row: Mapping[str, Any], at: int) -> float:
    if column not in row:
        raise UnknownNameError(f"column in {path}", column, row)
    try:
        return float(row[column])
    except (TypeError, ValueError):
        raise InputError(f"{path}, row {at}: {column} must be a number; it is {row[column]!r}") from None


def named(kind: str, tables: Mapping[str, Any], models: Sequence[Model]) -> list[Problem]:
    """Tables of models that there are none of."""
    known = [model.name for model in models]
    return [
        Problem((*kind.split("."), name), str(UnknownNameError("model", name, known)))
        for name in tables
        if name not in known
    ]


_WHAT = "application"
_EXAMPLE = 'cluster.nodes=["8xA100-80GB"]'


@dataclass(frozen=True)
class AppRun:
    """How an application is run.

    Attributes:
        launcher: One of LAUNCHERS.
        settings: How patient it is.
        timeouts: How long engines may take.
        store: Place of the ledger; None: in the run's folder.
        urls: Addresses of engines that others started, by the models' numbers.
        true_lengths: Of simulated engines, by the models' numbers: so many times as long as planned.
    """

    launcher: str = "local"
    settings: Settings = field(default_factory=Settings)
    timeouts: Patience = field(default_factory=Patience)
    store: str | None = None
    urls: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    true_lengths: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class AppFile:
    """An application's file, read and checked.

    Attributes:
        app: What is asked of whom.
        rows: What it is asked about.
        served: Models as the planner sees them, in the application's order.
        loaded: Models as launchers start and ask them, in the same order.
        cluster: The GPUs; None: the file names none.
        run: How it is run.
        folder: Where relative paths start.
        files: All that it was read from.
        notes: What is assumed, in words.
        is_batch: Whether its rows are an OpenAI batch, to be answered as one.
        times: Of switching models; assumed, but for what a profile measured.
    """

    app: App
    rows: Rows
    served: tuple[Served, ...]
    loaded: tuple[Loaded, ...]
    cluster: Cluster | None
    run: AppRun
    folder: Path
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()
    is_batch: bool = False
    times: SwitchTimes = field(default_factory=SwitchTimes)


def load_app(path: Path | str, sets: Sequence[str] = ()) -> AppFile:
    """The application of a TOML or YAML file, every key and value checked.

    Args:
        path: The file; relative paths inside it start at its folder.
        sets: Assignments such as ``"models.small.weights=./small"``, later ones winning.

    Raises:
        ScenarioError: A key or a value cannot be used; the message lists all of them.
    """
    path = Path(path)
    return _checked(read(path, _WHAT), str(path), path.parent, sets, (path,))


def loads_app(text: str, *, suffix: str = ".toml", folder: Path | str = ".", sets: Sequence[str] = ()) -> AppFile:
    """The application of a text; raises as ``load_app`` does."""
    return _checked(parse(text, suffix, _WHAT, _WHAT), _WHAT, Path(folder), sets, ())


def _checked(raw: Table, source: str, folder: Path, sets: Sequence[str], files: tuple[Path, ...]) -> AppFile:
    settings, paths = raw, []
    for text in sets:
        keys, value = assignment(text, _EXAMPLE)
        paths.append(keys)
        for key in reversed(keys):
            value = {key: value}
        settings = _in_order(merged(settings, value), settings)
    try:
        tables = AppTables.model_validate(settings)
    except ValidationError as error:
        raise_if_any(findings(error, AppTables), source, paths)
        raise
    maker = Maker(folder)
    maker.files += files
    made = _Made(maker, tables).file()
    raise_if_any(maker.problems, source, paths)
    assert made is not None  # no problems, so it was made
    return made


def _in_order(table: Table, before: Table) -> Table:
    """The same with keys in the order in which they stood before, new ones last: it is the models' and calls' own."""
    keys = [*(key for key in before if key in table), *(key for key in table if key not in before)]
    return {key: _in_order(table[key], before[key]) if _both(table, before, key) else table[key] for key in keys}


def _both(table: Table, before: Table, key: str) -> bool:
    return isinstance(table[key], dict) and isinstance(before.get(key), dict)


class _Made:
    """The parts of one file, made in turn."""

    def __init__(self, maker: Maker, tables: AppTables) -> None:
        self.maker, self.tables = maker, tables

    def file(self) -> AppFile | None:
        """The whole; None where something is wrong."""
        maker, tables = self.maker, self.tables
        sections = maker.sections(tables.models, ModelSection, "models")
        models = [maker.model(name, section) for name, section in sections.items()]
        found = self._batch(models) if tables.inputs.openai_batch else self._app(models)
        cluster = self._cluster()
        engines = maker.sections(tables.run.engines, EngineTable, "run", "engines")
        if found is None:
            return None
        app, rows = found
        maker.problems += named("run.engines", engines, app.models)
        served = tuple(maker.served(model) for model in app.models)
        loaded = tuple(maker.loaded(model, engines.get(model.name), tables.run) for model in app.models)
        run = self._run(tables.run, engines, app)
        if maker.problems or run is None:
            return None
        return AppFile(
            app=app,
            rows=rows,
            served=served,
            loaded=tuple(one for one in loaded if one is not None),
            cluster=cluster,
            run=run,
            folder=maker.folder,
            files=tuple(maker.files),
            notes=_notes(app),
            is_batch=tables.inputs.openai_batch is not None,
            times=_times(tables.cluster),
        )

    def _app(self, models: Sequence[Model]) -> tuple[App, Rows] | None:
        maker, tables = self.maker, self.tables
        calls = [
            maker.call(name, section) for name, section in maker.sections(tables.calls, CallSection, "calls").items()
        ]
        loops = [
            maker.loop(name, section) for name, section in maker.sections(tables.loops, LoopSection, "loops").items()
        ]
        rows = None
        with maker.at("inputs"):
            rows = read_rows(maker.file(tables.inputs.file or ""), tables.inputs.id)
            rows = rows.first(tables.inputs.rows or len(rows))
        if maker.problems:
            return None  # what is missing would be told twice
        with maker.at():
            app = App(models, [call for call in calls if call is not None], loops, tables.name)
            assert rows is not None
            return app, rows
        return None

    def _batch(self, models: Sequence[Model]) -> tuple[App, Rows] | None:
        maker, tables = self.maker, self.tables
        for kind in ("calls", "loops"):
            if getattr(tables, kind):
                maker.problems.append(
                    Problem((kind,), "a batch says itself what is asked; take these out, or openai_batch")
                )
        with maker.at("inputs", "openai_batch"):
            batch = read_batch(maker.file(tables.inputs.openai_batch or ""), models, tables.name)
            return batch.app, batch.rows
        return None

    def _cluster(self) -> Cluster | None:
        if self.tables.cluster is None:
            return None
        with self.maker.at("cluster", "nodes"):
            return parse_cluster(self.tables.cluster.nodes, self.maker.folder)
        return None

    def _run(self, run: RunTable, engines: Mapping[str, EngineTable], app: App) -> AppRun | None:
        urls = {
            number: tuple(engines[model.name].urls) if model.name in engines else ()
            for number, model in enumerate(app.models)
        }
        times = {
            number: times
            for number, model in enumerate(app.models)
            if model.name in engines and (times := engines[model.name].true_lengths) is not None
        }
        lacking = [app.models[number].name for number, some in urls.items() if not some]
        if run.launcher == "static" and lacking:
            self.maker.problems.append(
                Problem(
                    ("run", "engines"),
                    f"every model needs urls where engines are static; {', '.join(lacking)} has none",
                )
            )
        with self.maker.at("run"):
            return AppRun(run.launcher, _settings(run), _timeout(run), self._store(run.store), urls, times)
        return None

    def _store(self, store: str | None) -> str | None:
        """A database's address as it is; a file starts at the folder as all files do."""
        if store is None or "://" in store:
            return store
        return str(self.maker.folder / Path(store).expanduser())


def _settings(run: RunTable) -> Settings:
    return Settings(
        max_attempts=run.max_attempts,
        lease_s=run.lease,
        backoff_s=run.backoff,
        most_backoff_s=run.most_backoff,
        save_s=run.save,
        linger_s=run.linger,
        engine_failures=run.engine_failures,
        max_engine_failures=run.max_engine_failures,
        seed=run.seed,
        replans=run.replans,
    )


def _timeout(run: RunTable) -> Patience:
    return Patience(ready_s=run.ready, stall_s=run.stall, request_s=run.request)


def _times(cluster: ClusterSection | None) -> SwitchTimes:
    return SwitchTimes(rates=SwitchRates(cluster.engine_start)) if cluster else SwitchTimes()


def _notes(app: App) -> tuple[str, ...]:
    unknown = [model.name for model in app.models if model.lengths is None]
    if not unknown:
        return ()
    return (f"no lengths are given for {', '.join(unknown)}: outputs are planned as long as they may be",)
