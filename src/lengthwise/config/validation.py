"""What is wrong with a scenario, in one message that names each key and the way out."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from lengthwise.config.values import ARRIVALS, LENGTHS
from lengthwise.schema.errors import ScenarioError

MOST_SHOWN = 10


@dataclass(frozen=True)
class Problem:
    """A wrong key or value: its path, and what must hold."""

    path: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{'.'.join(self.path)}: {self.text}" if self.path else self.text


def raise_if_any(
    problems: Iterable[Problem],
    source: str,
    overridden: Iterable[tuple[str, ...]] = (),
    options: Mapping[tuple[str, ...], str] | None = None,
) -> None:
    """Raises one ScenarioError that lists all problems, if there are any.

    Args:
        problems: What was found.
        source: The file, for the message.
        overridden: Paths that ``--set`` gave; problems at or below them name it.
        options: Paths that an option of its own gave, and the option, which stands for the path.
    """
    from_set = tuple(overridden)
    lines = list(dict.fromkeys(_line(problem, from_set, options or {}) for problem in problems))
    if not lines:
        return
    if len(lines) == 1:
        raise ScenarioError(f"{source}: {lines[0]}")
    shown = lines if len(lines) <= MOST_SHOWN else lines[: MOST_SHOWN - 1]
    rest = [f"... and {len(lines) - len(shown)} more"] if len(lines) > len(shown) else []
    raise ScenarioError("\n  ".join([f"{source}: {len(lines)} problems", *shown, *rest]))


def _line(problem: Problem, from_set: tuple[tuple[str, ...], ...], options: Mapping[tuple[str, ...], str]) -> str:
    if problem.path in options:
        return f"{options[problem.path]}: {problem.text}"
    given = any(problem.path[: len(path)] == path for path in from_set)
    return f"--set {problem}" if given else str(problem)


_KINDS: dict[str, Mapping[str, type[BaseModel]]] = {"prompt": LENGTHS, "output": LENGTHS, "arrivals": ARRIVALS}
_KEY = re.compile(r"[a-z][a-z0-9_]*|\d+")
_MUST: dict[str, str] = {
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "string_type": "must be a text",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be a table",
    "model_type": "must be a table",
    "model_attributes_type": "must be a table",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "union_tag_invalid": "kind must be one of {expected_tags}",
    "too_short": "must not be empty",
    "value_error": "{error}",
}


def findings(error: ValidationError, root: type[BaseModel]) -> list[Problem]:
    """The problems of a failed validation of ``root``, in the order of its fields."""
    entries: list[Mapping[str, Any]] = list(error.errors(include_url=False))
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for found in entries:
        groups.setdefault(_fork(found["loc"]), []).append(found)
    problems = {
        fork: [_problem(found, root) for found in group] if fork == () else _of_fork(fork, group, root)
        for fork, group in groups.items()
    }
    own = iter(problems.get((), []))
    told: list[Problem] = []
    for found in entries:
        fork = _fork(found["loc"])
        told += [next(own)] if fork == () else problems.pop(fork, [])
    return told


def _fork(loc: tuple[Any, ...]) -> tuple[Any, ...]:
    """The place of a value that may be of several types, such as a number or a list; () of any other."""
    return next((loc[:at] for at, key in enumerate(loc) if _is_type(key)), ())


def _is_type(key: Any) -> bool:
    """Whether pydantic put a type into a path, rather than a key of the file."""
    return isinstance(key, str) and (key in ("int", "float", "str", "bool") or not _KEY.fullmatch(key))


def _of_fork(fork: tuple[Any, ...], group: Sequence[Mapping[str, Any]], root: type[BaseModel]) -> list[Problem]:
    """A list or table is told what is wrong in it; anything else which types would have done, in one sentence."""
    inside = [one for one in group if str(one["loc"][len(fork)]).startswith("list[")]
    inside = inside or [one for one in group if str(one["loc"][len(fork)]).endswith("Table")]
    if any(one["type"] not in ("list_type", "model_type", "model_attributes_type") for one in inside):
        return [_problem({**one, "loc": (*fork, *one["loc"][len(fork) + 1 :])}, root) for one in inside]
    first, *others = (_text(one) for one in group)
    wanted = ", or ".join([first, *(text.removeprefix("must be ") for text in others)])
    return [Problem(_path(fork), wanted + _given(group[0]))]


def _problem(found: Mapping[str, Any], root: type[BaseModel]) -> Problem:
    path = _path(found["loc"])
    match found["type"]:
        case "extra_forbidden" if path[0] == "variants" and path[-1] in ("run", "slo"):
            return Problem(path, f"variants are compared under one [{path[-1]}]; set it outside of them")
        case "extra_forbidden":
            return Problem(path, f"there is no such key{_nearest(found['loc'], root)}")
        case "missing":
            return Problem(path, "is missing")
        case "string_too_short":
            return Problem(path, "must not be empty")
        case "union_tag_not_found":
            return Problem((*path, "kind"), f"is missing; it is one of {', '.join(_KINDS[path[-1]])}")
    text = _text(found)
    said = found["type"] == "value_error" and f"it is {found['input']!r}" in text
    return Problem(path, text if said else text + _given(found) + _meant(found))


def _text(found: Mapping[str, Any]) -> str:
    """What must hold."""
    template = _MUST.get(found["type"])
    if template is None:
        return str(found["msg"])
    return template.format(**{key: _plain(value) for key, value in found.get("ctx", {}).items()})


def _given(found: Mapping[str, Any]) -> str:
    value = found["input"]
    if found["type"] == "union_tag_invalid":
        value = value.get("kind")
    if isinstance(value, dict):
        return "" if found["type"] == "value_error" else "; it is a table"
    shown = repr(value) if not isinstance(value, bool) else str(value).lower()
    return f"; it is {shown if len(shown) <= 60 else shown[:57] + '...'}"


def _meant(found: Mapping[str, Any]) -> str:
    """The nearest of the words that would do, where one is near."""
    if found["type"] != "literal_error" or not isinstance(found["input"], str):
        return ""
    words = re.findall(r"'([^']*)'", str(found["ctx"]["expected"]))
    near = difflib.get_close_matches(found["input"].lower(), words, n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def _path(loc: tuple[Any, ...]) -> tuple[str, ...]:
    """The keys as the file has them: pydantic puts the kind of a union into the path."""
    path: list[str] = []
    for at, key in enumerate(loc):
        is_kind = at > 0 and loc[at - 1] in _KINDS and key in _KINDS[loc[at - 1]]
        if not is_kind:
            path.append(str(key))
    return tuple(path)


def _nearest(loc: tuple[Any, ...], root: type[BaseModel]) -> str:
    *tables, wrong = (str(key) for key in loc)
    prefix = ".".join(_path(loc[:-1]))
    here = _keys_at(loc[:-1], root)
    elsewhere = _leaves(root)
    if wrong in elsewhere and not difflib.get_close_matches(wrong, here, n=1, cutoff=0.9):
        return f"; did you mean {elsewhere[wrong]}?"
    if near := difflib.get_close_matches(wrong, here, n=1, cutoff=0.6):
        return f"; did you mean {prefix}{'.' if prefix else ''}{near[0]}?"
    if near := difflib.get_close_matches(wrong, elsewhere, n=1, cutoff=0.8):
        return f"; did you mean {elsewhere[near[0]]}?"
    return f"; known {f'in {prefix} ' if tables else ''}are {', '.join(here)}"


def _keys_at(loc: tuple[Any, ...], root: type[BaseModel]) -> list[str]:
    model = root
    for at, key in enumerate(loc):
        if at > 0 and loc[at - 1] in _KINDS:
            model = _KINDS[loc[at - 1]][key]
        elif key in model.model_fields:
            model = _section(model, key) or model
    return list(model.model_fields)


def _leaves(root: type[BaseModel]) -> dict[str, str]:
    """Every key of every section with its dotted path."""
    sections = {name: _section(root, name) for name in root.model_fields}
    return {key: f"{name}.{key}" for name, model in sections.items() if model for key in model.model_fields} | {
        name: name for name in sections
    }


def _section(root: type[BaseModel], name: str) -> type[BaseModel] | None:
    annotation: Any = root.model_fields[name].annotation
    inner = getattr(annotation, "__args__", None) or [annotation]
    return next((one for one in inner if isinstance(one, type) and issubclass(one, BaseModel)), None)
