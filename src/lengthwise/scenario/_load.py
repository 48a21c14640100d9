"""Reads, checks and lays over: from a file and ``--set`` to a scenario, or one error that says it all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lengthwise.scenario._canonical import canonical
from lengthwise.scenario._findings import findings
from lengthwise.scenario._merge import dropped, merged
from lengthwise.scenario._problems import Problem, raise_if_any
from lengthwise.scenario._space import space_problems, with_first_values
from lengthwise.scenario._text import Table, assignment, parse, read
from lengthwise.scenario.scenario import Scenario

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


def loads(
    text: str, *, suffix: str = ".toml", folder: Path | str = ".", overrides: Sequence[str] = ()
) -> Scenario:
    """The scenario of a text; ``folder`` is where relative paths start. Raises as ``load`` does."""
    return checked(
        parse(text, suffix, "scenario"), source="scenario", folder=Path(folder), overrides=overrides
    )


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


def _leaf(table: Any, said: Sequence[str]) -> Path_:
    """The keys that ``said`` became; those that were refused on the way stay as they were said."""
    keys: list[str] = []
    while len(keys) < len(said) and isinstance(table, dict) and table:
        key = next(iter(table))
        keys.append(key)
        table = table[key]
    return (*keys, *said[len(keys) :])


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
    over = [
        {k: v for k, v in variant.items() if k in _VARIED}
        for variant in variants
        if isinstance(variant, dict)
    ]
    return [merged(base, one) for one in over] or [base]


_VARIED = ("workload", "deployment", "engine", "scheduler", "predictor", "search")
