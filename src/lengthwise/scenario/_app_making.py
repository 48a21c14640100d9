"""From the tables of an application's file to its parts, each problem under the name of its table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from lengthwise import catalog, workload
from lengthwise.apps.app import Call, Fan, From, Loop, Model, Sampling, Told
from lengthwise.apps.inputs import read_rows
from lengthwise.apps.launch.commands import Loaded
from lengthwise.apps.plan import Served
from lengthwise.cost import HOST_NAMES
from lengthwise.engine import COST_SOURCES
from lengthwise.scenario._app_sections import (
    CallSection,
    EngineTable,
    LengthSection,
    LoopSection,
    ModelSection,
    RunTable,
    SeenSection,
)
from lengthwise.scenario._findings import findings
from lengthwise.scenario._places import resolved
from lengthwise.scenario._problems import Problem
from lengthwise.scenario._values import Section
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
                Problem(
                    ("models", name, "engine", "max_step_seqs"),
                    "must be a number: plans differ in their stages",
                )
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
            self.problems.append(
                Problem(path, "must have a kind, or file and column of lengths that were seen")
            )
            return None
        table = given if isinstance(given, Mapping) else {"kind": "fixed", "tokens": int(given)}
        before = len(self.problems)
        section = self.section({"output": table}, LengthSection, *path)
        self.problems[before:] = [
            Problem((*path, *p.path[len(path) + 1 :]), p.text) for p in self.problems[before:]
        ]
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
                prompt=tuple((one.role, one.content) for one in section.messages or ())
                if prompt is None
                else prompt,
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
                told=Told(section.prompt_tokens, section.known_tokens, section.longest_tokens),
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
                seats=own.seats or run.seats,
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
    return workload.Empirical(
        tokens, [_number(path, section.weights, row, at) for at, row in enumerate(rows, 1)]
    )


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


__all__ = ["Maker", "named"]
