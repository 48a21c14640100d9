"""An application's file: TOML or YAML with ``--set``, to what is planned and run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from lengthwise.apps.app import App, Model
from lengthwise.apps.batch_files import read_batch
from lengthwise.apps.inputs import Rows, read_rows
from lengthwise.apps.launch.commands import Loaded
from lengthwise.apps.launch.local import Patience
from lengthwise.apps.plan import Served, SwitchRates, SwitchTimes
from lengthwise.apps.run.contracts import Settings
from lengthwise.scenario._app_making import Maker, named
from lengthwise.scenario._app_nodes import parse_cluster, parse_node
from lengthwise.scenario._app_sections import (
    LAUNCHERS,
    AppTables,
    CallSection,
    ClusterSection,
    EngineTable,
    LoopSection,
    ModelSection,
    RunTable,
)
from lengthwise.scenario._findings import findings
from lengthwise.scenario._merge import merged
from lengthwise.scenario._problems import Problem, raise_if_any
from lengthwise.scenario._text import Table, assignment, parse, read
from lengthwise.schema.app import Cluster

_WHAT = "application"
_EXAMPLE = 'cluster.nodes=["8xA100-80GB"]'


@dataclass(frozen=True)
class AppRun:
    """How an application is run.

    Attributes:
        launcher: One of LAUNCHERS.
        settings: How patient it is.
        patience: How long engines may take.
        store: Place of the ledger; None: in the run's folder.
        urls: Addresses of engines that others started, by the models' numbers.
        true_lengths: Of simulated engines, by the models' numbers: so many times as long as planned.
    """

    launcher: str = "local"
    settings: Settings = field(default_factory=Settings)
    patience: Patience = field(default_factory=Patience)
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


def loads_app(
    text: str, *, suffix: str = ".toml", folder: Path | str = ".", sets: Sequence[str] = ()
) -> AppFile:
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
    return {
        key: _in_order(table[key], before[key]) if _both(table, before, key) else table[key] for key in keys
    }


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
            maker.call(name, section)
            for name, section in maker.sections(tables.calls, CallSection, "calls").items()
        ]
        loops = [
            maker.loop(name, section)
            for name, section in maker.sections(tables.loops, LoopSection, "loops").items()
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
            return AppRun(run.launcher, _settings(run), _patience(run), self._store(run.store), urls, times)
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
        engine_deaths=run.engine_deaths,
        seed=run.seed,
        replans=run.replans,
    )


def _patience(run: RunTable) -> Patience:
    return Patience(ready_s=run.ready, stall_s=run.stall, request_s=run.request)


def _times(cluster: ClusterSection | None) -> SwitchTimes:
    return SwitchTimes(rates=SwitchRates(cluster.engine_start)) if cluster else SwitchTimes()


def _notes(app: App) -> tuple[str, ...]:
    unknown = [model.name for model in app.models if model.lengths is None]
    if not unknown:
        return ()
    return (f"no lengths are given for {', '.join(unknown)}: outputs are planned as long as they may be",)


__all__ = ["LAUNCHERS", "AppFile", "AppRun", "load_app", "loads_app", "parse_node"]
