"""Turns failed validations into one message that names each key, its requirement and the nearest known name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from lengthwise.config.values import ARRIVALS, LENGTHS, LIMITS
from lengthwise.schema.errors import InputError, ScenarioError

MAX_SHOWN = 10


@dataclass(frozen=True)
class Problem:
    """A wrong key or value: its path, and a text with the requirement and the given value."""

    path: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{'.'.join(self.path)}: {self.text}" if self.path else self.text


class Problems(list[Problem]):
    """The problems of one file."""

    def add(self, text: str, *path: str) -> None:
        """Add a problem with the key at ``path``."""
        self.append(Problem(path, text))

    @contextmanager
    def at(self, *path: str) -> Iterator[None]:
        """Catch an InputError of the block and add it as a problem at ``path`` (and the ``key`` of a WrongKeyError)."""
        try:
            yield
        except InputError as error:
            self.add(str(error), *path, *([error.key] if isinstance(error, WrongKeyError) else []))


class WrongKeyError(InputError):
    """The value of the setting ``key`` cannot be used."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(text)
        self.key = key


_Model = TypeVar("_Model", bound=BaseModel)


def validated(kind: type[_Model], table: Any) -> tuple[_Model | None, list[Problem]]:
    """Return the section of class ``kind`` for a table, or None and the problems of the table."""
    try:
        return kind.model_validate(table), []
    except ValidationError as error:
        return None, problems_of(error, kind)


def raise_if_any(
    problems: Iterable[Problem],
    source: str,
    overridden: Iterable[tuple[str, ...]] = (),
    options: Mapping[tuple[str, ...], str] | None = None,
) -> None:
    """Raise one ScenarioError for all problems, if there are any.

    The message names ``source``, --set for problems at or under paths in ``overridden``, and the command's option for
    those at or under paths in ``options``.
    """
    from_set, from_option = tuple(overridden), options or {}

    def line(problem: Problem) -> str:
        for path, option in from_option.items():
            if problem.path[: len(path)] == path:
                return f"{' '.join([option, *filter(None, ['.'.join(problem.path[len(path) :])])])}: {problem.text}"
        return f"--set {problem}" if any(problem.path[: len(path)] == path for path in from_set) else str(problem)

    lines = list(dict.fromkeys(map(line, problems)))
    if not lines:
        return
    if len(lines) == 1:
        raise ScenarioError(f"{source}: {lines[0]}")
    shown = lines if len(lines) <= MAX_SHOWN else lines[: MAX_SHOWN - 1]
    rest = [f"... and {len(lines) - len(shown)} more"] if len(lines) > len(shown) else []
    raise ScenarioError("\n  ".join([f"{source}: {len(lines)} problems", *shown, *rest]))


_Error = Mapping[str, Any]  # an entry of ``ValidationError.errors()``
_UNIONS: dict[str, Mapping[str, type[BaseModel]]] = {
    "prompt": LENGTHS, "output": LENGTHS, "system_prompt": LENGTHS, "tokens": LENGTHS, "max_tokens": LIMITS,
    "arrivals": ARRIVALS,
}  # fmt: skip
_SHORT_FORMS = {"max_tokens": 'a number of tokens, "none"', "arrivals": "the name of a kind"}  # beside tables
_TYPES = ("int", "float", "str", "bool")
_NUMBER = re.compile(r"(-?\d+(?:\.\d+)?)\s*([A-Za-z/%]*)$")
_KEY = re.compile(r"[a-z][a-z0-9_]*|\d+")
_REQUIREMENTS: dict[str, str] = {
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


def problems_of(error: ValidationError, root: type[BaseModel]) -> list[Problem]:
    """Return the problems that ``error`` reports for a section of class ``root``, in the order of its fields."""
    groups: dict[Any, list[_Error]] = {}
    for number, entry in enumerate(error.errors(include_url=False)):
        loc = entry["loc"]
        # If a value may have several types (a number or a list), pydantic reports an entry for each type, whose path
        # ends in that type, after the keys of the file.
        types = (at for at, key in enumerate(loc) if key in _TYPES or not _KEY.fullmatch(str(key)))
        union = loc[: next(types, 0)]
        groups.setdefault(union or number, []).append(entry)
    problems: list[Problem] = []
    for union, group in groups.items():
        problems += [_problem(group[0], root)] if isinstance(union, int) else _union_problems(union, group, root)
    return problems


def _union_problems(union: tuple[Any, ...], group: Sequence[_Error], root: type[BaseModel]) -> list[Problem]:
    """Return the problems of a value that may have several types; if no type fits, one problem that names them all."""
    inside = [one for one in group if str(one["loc"][len(union)]).startswith("list[")]
    inside = inside or [one for one in group if str(one["loc"][len(union)]).endswith("Table")]
    if any(one["type"] not in ("list_type", "model_type", "model_attributes_type") for one in inside):
        return [_problem({**one, "loc": (*union, *one["loc"][len(union) + 1 :])}, root) for one in inside]
    first, *others = map(_requirement, group)
    types = ", or ".join([first, *(text.removeprefix("must be ") for text in others)])
    return [Problem(_path(union), types + _given(group[0]))]


def _problem(entry: _Error, root: type[BaseModel]) -> Problem:  # noqa: PLR0911
    path = _path(entry["loc"])
    match entry["type"]:
        case "extra_forbidden" if path[0] == "variants" and path[-1] in ("run", "slo"):
            return Problem(path, f"variants are compared under one [{path[-1]}]; set it outside of them")
        case "extra_forbidden":
            return Problem(path, f"there is no such key{_nearest_key(entry['loc'], root)}")
        case "missing":
            return Problem(path, "is missing")
        case "string_too_short":
            return Problem(path, "must not be empty")
        case "union_tag_not_found":
            return Problem((*path, "kind"), f"is missing; it is one of {', '.join(_UNIONS[path[-1]])}")
        case "model_attributes_type" if path and path[-1] in _UNIONS:
            short, kinds = _SHORT_FORMS.get(path[-1], "a number of tokens"), ", ".join(_UNIONS[path[-1]])
            return Problem(path, f"must be {short}, or a table with a kind ({kinds}){_given(entry)}")
    text, value = _requirement(entry), entry["input"]
    if entry["type"] == "value_error" and (f"it is {value!r}" in text or " named '" in text):
        return Problem(path, text)
    text += _given(entry)
    if entry["type"] == "literal_error" and isinstance(value, str):
        words = re.findall(r"'([^']*)'", str(entry["ctx"]["expected"]))
        if near := difflib.get_close_matches(value.lower(), words, n=1, cutoff=0.6):
            text += f"; did you mean {near[0]!r}?"
    return Problem(path, text)


def _requirement(entry: _Error) -> str:
    template = _REQUIREMENTS.get(entry["type"])
    if template is None:
        return str(entry["msg"])
    values = {key: f"{v:g}" if isinstance(v, float) else str(v) for key, v in entry.get("ctx", {}).items()}
    return template.format(**values).replace("at least 1e-06", "above 0, at least 0.000001")


def _given(entry: _Error) -> str:
    value = entry["input"].get("kind") if entry["type"] == "union_tag_invalid" else entry["input"]
    if isinstance(value, dict):
        return "" if entry["type"] == "value_error" else "; it is a table"
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    is_number = entry["type"] in ("int_type", "float_type") and isinstance(value, str)
    bare = _NUMBER.match(value) if is_number else None
    remedy = f"; write {bare[1]} without {'a unit' if bare[2] else 'quotes'}" if bare else ""
    return f"; it is {shown if len(shown) <= 60 else shown[:57] + '...'}{remedy}"


def _path(loc: tuple[Any, ...]) -> tuple[str, ...]:
    """Return the keys of an error's path that the file has; pydantic adds the kinds of unions."""
    pairs = zip(("", *loc), loc, strict=False)
    return tuple(str(key) for before, key in pairs if not (before in _UNIONS and key in _UNIONS[before]))


def _nearest_key(loc: tuple[Any, ...], root: type[BaseModel]) -> str:
    """Return a hint for an unknown key: a similar or equal key elsewhere, or else the keys of its table."""
    wrong, prefix, model = str(loc[-1]), ".".join(_path(loc[:-1])), root
    for before, key in zip(("", *loc), loc[:-1], strict=False):
        if before in _UNIONS:
            model = _UNIONS[before][key]
        elif key in model.model_fields:
            model = _section(model, key) or model
    known = list(model.model_fields)
    sections = {name: _section(root, name) for name in root.model_fields}
    paths = {key: f"{name}.{key}" for name, section in sections.items() if section for key in section.model_fields}
    paths |= {name: name for name in sections}
    if wrong in paths and not difflib.get_close_matches(wrong, known, n=1, cutoff=0.85):
        return f"; did you mean {paths[wrong]}?"
    if near := difflib.get_close_matches(wrong, known, n=1, cutoff=0.6):
        return f"; did you mean {prefix}{'.' if prefix else ''}{near[0]}?"
    if near := difflib.get_close_matches(wrong, paths, n=1, cutoff=0.8):
        return f"; did you mean {paths[near[0]]}?"
    return f"; known {f'in {prefix} ' if prefix else ''}are {', '.join(known)}"


def _section(root: type[BaseModel], name: str) -> type[BaseModel] | None:
    annotation: Any = root.model_fields[name].annotation
    inner = getattr(annotation, "__args__", None) or [annotation]
    return next((one for one in inner if isinstance(one, type) and issubclass(one, BaseModel)), None)
