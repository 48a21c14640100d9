"""From a table of a TOML file to a frozen record, with errors that name the key."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from lengthwise.schema.errors import InputError

Record = TypeVar("Record")


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        InputError: The file is absent, unreadable or not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} must be TOML: {error}") from error


def build(record: type[Record], table: Mapping[str, Any], where: str) -> Record:
    """A ``record`` from a table whose keys are its fields; ``where`` names it in errors.

    Raises:
        InputError: A key is missing, unknown, or holds a value of the wrong type.
    """
    known = {field.name: field for field in fields(record)}  # type: ignore[arg-type]
    if missing := [name for name, field in known.items() if name not in table and _is_required(field)]:
        raise InputError(f"{where} must give {', '.join(missing)}; it gives {', '.join(table) or 'nothing'}")
    if unknown := [name for name in table if name not in known]:
        raise InputError(f"{where} has no key {', '.join(unknown)}; its keys are {', '.join(known)}")
    hints = get_type_hints(record)
    return record(**{name: _value(value, hints[name], f"{where}: {name}") for name, value in table.items()})


def field_names(record: type[Any]) -> tuple[str, ...]:
    """The names of a record's fields."""
    return tuple(field.name for field in fields(record))


def _is_required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _value(value: Any, hint: Any, where: str) -> Any:
    if hint in (float, float | None):
        return _number(value, where)
    if hint in (int, int | None):
        return _whole(value, where)
    if hint in (str, bool):
        return _of_type(value, hint, where)
    if hint == tuple[str, ...]:
        return tuple(_of_type(item, str, where) for item in _of_type(value, list, where))
    if hint == dict[str, float]:
        table = _of_type(value, dict, where)
        return {name: _number(number, f"{where}.{name}") for name, number in table.items()}
    return _of_type(value, hint, where)


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise InputError(f"{where} must be a number that is not negative; it is {value!r}")
    return float(value)


def _whole(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InputError(f"{where} must be a whole number that is not negative; it is {value!r}")
    return value


def _of_type(value: Any, kind: type[Any], where: str) -> Any:
    if not isinstance(value, kind):
        raise InputError(f"{where} must be a {_WORDS.get(kind, kind.__name__)}; it is {value!r}")
    return value


_WORDS = {str: "string", bool: "true or false", list: "list of strings", dict: "table"}
