"""From text to plain tables: TOML, YAML, and the assignments of ``--set``."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from lengthwise.schema.errors import ScenarioError

Table = dict[str, Any]


def read(path: Path, what: str = "scenario") -> Table:
    """The tables of a TOML (.toml) or YAML (.yaml, .yml) file.

    Args:
        path: The file.
        what: The kind of file, for messages.

    Raises:
        ScenarioError: The file cannot be read, is no UTF-8, or breaks the syntax (line and column).
    """
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        raise ScenarioError(f"there is no {what} file {path}{_nearby(path)}") from None
    except IsADirectoryError:
        raise ScenarioError(f"{path} is a folder; give a {what} file (.toml or .yaml)") from None
    except UnicodeDecodeError as error:
        raise ScenarioError(f"{path}: a {what} file is UTF-8 text; byte {error.start} is not") from None
    except OSError as error:
        raise ScenarioError(f"cannot read {path}: {error.strerror}") from None
    return parse(text, path.suffix.lower(), str(path), what)


def parse(text: str, suffix: str, source: str, what: str = "scenario") -> Table:
    """The tables of a text in the format that ``suffix`` says."""
    if suffix == ".toml":
        return _toml(text, source)
    if suffix in (".yaml", ".yml"):
        return _yaml(text, source, what)
    raise ScenarioError(f"{source}: a {what} file ends in .toml, .yaml or .yml")


def assignment(text: str, example: str = "deployment.tp=4") -> tuple[tuple[str, ...], Any]:
    """Path and value of ``path=value``; the value is TOML, a bare word that is taken as text, or null: no such key."""
    path, equals, value = text.partition("=")
    keys = tuple(key.strip() for key in path.split("."))
    if not equals or not all(keys):
        raise ScenarioError(f"--set takes path=value, such as {example}; it was given {text!r}")
    value = value.strip()
    if value == "null":
        return keys, None
    try:
        return keys, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError as error:
        if value[:1] in tuple("[{\"'") or "\n" in value:
            raise ScenarioError(f"--set {path.strip()}: {value} is not TOML: {error}") from None
        return keys, value


def _toml(text: str, source: str) -> Table:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(f"{source}: not valid TOML: {_lowered(error)}") from None


def _yaml(text: str, source: str, what: str) -> Table:
    import yaml

    from lengthwise.scenario._yaml import Loader

    try:
        table = yaml.load(text, Loader)  # noqa: S506 - a safe loader
    except yaml.YAMLError as error:
        raise ScenarioError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from None
    if table is None:
        return {}
    if not isinstance(table, dict):
        raise ScenarioError(f"{source}: a {what} is a table of sections; this is a {type(table).__name__}")
    return table


def _lowered(error: Exception) -> str:
    text = str(error)
    return text[:1].lower() + text[1:]


def _nearby(path: Path) -> str:
    for suffix in (".toml", ".yaml", ".yml"):
        if path.with_suffix(suffix).is_file():
            return f"; did you mean {path.with_suffix(suffix)}?"
    return ""
