"""From text to plain tables: TOML, YAML, and the assignments of ``--set``."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import re
import sys
import tomllib
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from lengthwise.schema.errors import PolicyError, ScenarioError

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

    from lengthwise.config.yaml_loader import Loader

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


TomlTable = dict[str, Any]
_BARE = re.compile(r"[A-Za-z0-9_-]+")


def toml(table: TomlTable) -> str:
    """TOML of nested dicts of texts, numbers, booleans and lists; empty tables are left out."""
    return "\n".join(_lines(table, "")).lstrip("\n") + "\n"


def _lines(table: TomlTable, path: str) -> list[str]:
    tables = {key: value for key, value in table.items() if isinstance(value, dict) and not _inline(key)}
    lists = {key: value for key, value in table.items() if _is_tables(value)}
    plain = {key: value for key, value in table.items() if key not in tables and key not in lists}
    lines = [f"{_key(key)} = {_value(value)}" for key, value in plain.items() if value != {}]
    for key, value in tables.items():
        inner = _lines(value, f"{path}{_key(key)}.")
        lines += ["", f"[{path}{_key(key)}]", *inner] if inner else []
    for key, values in lists.items():
        for value in values:
            lines += ["", f"[[{path}{_key(key)}]]", *_lines(value, f"{path}{_key(key)}.")]
    return lines


def _inline(key: str) -> bool:
    """Tables of one thought stay on one line."""
    return key in ("prompt", "output", "arrivals")


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else json.dumps(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


Settings = dict[str, Any]

_RIVALS = {
    "workload": (
        (("preset",), ("trace", "format", "time_scale", "sort"), ("prompt", "output", "correlation")),
        (("concurrency",), ("request_rate", "arrivals")),
    ),
    "lab": ((("loads",), ("rates",)),),
}
_RATELESS = ("all_at_once", "rate_profile")


def merged(base: Settings, over: Settings) -> Settings:
    """``base`` with what ``over`` says. Tables are merged key by key; the rest is replaced.

    A table with a ``kind`` replaces the other whole, and a workload's new source or load drops the
    old one: over ``preset = "chat-1m"``, ``trace = "x.csv"`` leaves the trace alone. A
    laboratory's ``rates`` and ``loads`` drop each other. None takes a key away.
    """
    out = {key: value for key, value in base.items() if key not in over}
    for key, value in over.items():
        old = base.get(key)
        if value is None:
            continue
        if isinstance(value, dict) and isinstance(old, dict) and "kind" not in value:
            out[key] = merged(_without_rivals(key, old, value) if key in _RIVALS else old, value)
        else:
            out[key] = value
    return out


def dropped(base: Settings, over: Settings) -> list[list[str]]:
    """By section, the keys of ``base`` ("workload.trace") that give way to rivals in ``over``."""
    found = []
    for section in _RIVALS:
        old, new = base.get(section), over.get(section)
        if isinstance(old, dict) and isinstance(new, dict):
            kept = _without_rivals(section, old, new)
            found.append([f"{section}.{key}" for key in old if key not in kept and key not in new])
    return [keys for keys in found if keys]


def _without_rivals(section: str, base: Settings, over: Settings) -> Settings:
    over = {key: value for key, value in over.items() if value is not None}  # who leaves drops nobody
    gone: set[str] = set()
    for family in _RIVALS[section]:
        for group in family:
            if any(key in over for key in group):
                gone.update(key for rival in family if rival is not group for key in rival)
    if _kind(over) in _RATELESS:
        gone.add("request_rate")
    if "request_rate" in over and _kind(base) in _RATELESS:
        gone.add("arrivals")
    return {key: value for key, value in base.items() if key not in gone}


def _kind(table: Settings) -> Any:
    arrivals = table.get("arrivals")
    return arrivals.get("kind") if isinstance(arrivals, dict) else None


def resolved(text: str, folder: Path) -> Path:
    """The path that ``text`` means: from the scenario's folder, or else from the working one."""
    path = Path(text).expanduser()
    beside = folder / path
    return path if path.exists() and not beside.exists() else beside


def python_object(text: str, folder: Path) -> Any:
    """The object that "file.py:name" or "package.module:name" names.

    Raises:
        PolicyError: The file or module is missing or raises, or has no such object.
    """
    place, _, name = text.rpartition(":")
    module = _file(resolved(place, folder).resolve()) if place.endswith(".py") else _module(place, folder)
    if not hasattr(module, name):
        known = sorted(key for key in vars(module) if not key.startswith("_"))
        raise PolicyError(f"{place} has no object named {name!r}; it has {', '.join(known) or 'none'}")
    return getattr(module, name)


@lru_cache(maxsize=64)
def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise PolicyError(f"there is no policy file {path}")
    name = f"_lengthwise_policy_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PolicyError(f"{path} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise PolicyError(f"policy file {path} raised {type(error).__name__}: {error}") from error
    return module


def _module(name: str, folder: Path) -> ModuleType:
    before = list(sys.path)
    sys.path[:0] = [str(folder.resolve()), str(Path.cwd())]
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise PolicyError(f"policy module {name!r} cannot be imported: {error}") from error
    finally:
        sys.path[:] = before
