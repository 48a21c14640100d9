"""Reads TOML and YAML into plain tables, merges the assignments of ``--set``, and writes TOML."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from lengthwise.schema.errors import InputError, PolicyError, ScenarioError

Table = dict[str, Any]

SHORT_FORMS = {"engine": "name", "scheduler": "policy", "predictor": "kind"}
"""Sections that may be a name, and the key that the name has in the table."""


def read(path: Path, kind: str = "scenario") -> Table:
    """Return the tables of a TOML or YAML file. Raises ScenarioError, whose message calls it a ``kind`` file."""
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        other = [path.with_suffix(suffix) for suffix in (".toml", ".yaml", ".yml")]
        hint = next((f"; did you mean {file}?" for file in other if file.is_file()), "")
        if path.parts[:1] == ("examples",) and (examples_folder().parent / path).is_file():
            hint = "; it comes with lengthwise: lengthwise examples --copy examples puts it there"
        raise ScenarioError(f"there is no {kind} file {path}{hint}") from None
    except IsADirectoryError:
        raise ScenarioError(f"{path} is a folder; give a {kind} file (.toml or .yaml)") from None
    except UnicodeDecodeError as error:
        raise ScenarioError(f"{path}: a {kind} file is UTF-8 text; byte {error.start} is not") from None
    except OSError as error:
        raise ScenarioError(f"cannot read {path}: {error.strerror}") from None
    return parse(text, path.suffix.lower(), str(path), kind)


def examples_folder() -> Path:
    """Return the folder of the examples: in an installed package beside the modules, in a checkout at its root."""
    package = Path(__file__).parents[1]
    installed = package / "examples"
    return installed if installed.is_dir() else package.parents[1] / "examples"


def parse(text: str, suffix: str, source: str, kind: str = "scenario") -> Table:
    """Return the tables of a text in the format of ``suffix``, such as ".toml". Errors name it ``source``."""
    if suffix == ".toml":
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            message = str(error)
            for key, short in SHORT_FORMS.items():
                value = re.search(rf"(?m)^{key} *= *([^\n#]*[^\s#])", text)
                if "overwrite" in message and value and re.search(rf"(?m)^\[{key}[].]", text):
                    raise ScenarioError(
                        f"{source}: {key} must be a name or a table; it is both, {key} = {value[1]} and [{key}]. "
                        f"Write the name in the table: {short} = {value[1]}"
                    ) from None
            raise ScenarioError(f"{source}: not valid TOML: {message[:1].lower()}{message[1:]}") from None
    if suffix not in (".yaml", ".yml"):
        raise ScenarioError(f"{source}: a {kind} file ends in .toml, .yaml or .yml")
    import yaml

    from lengthwise.config.yaml_loader import Loader

    try:
        table = yaml.load(text, Loader)  # noqa: S506 - a safe loader
    except yaml.YAMLError as error:
        raise ScenarioError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from None
    if table is None:
        return {}
    if not isinstance(table, dict):
        raise ScenarioError(f"{source}: a {kind} is a table of sections; this is a {type(table).__name__}")
    return table


def assignment(text: str, example: str = "deployment.tp=4") -> tuple[tuple[str, ...], Table]:
    """Parse ``path=value``. Return the keys of the path, and nested tables that hold the value there.

    The value is TOML or a bare word; "null" removes the key. Raises ScenarioError, whose message shows ``example``.
    """
    path, equals, value = text.partition("=")
    keys = tuple(key.strip() for key in path.split("."))
    if not equals or not all(keys):
        raise ScenarioError(f"--set takes path=value, such as {example}; it was given {text!r}")
    value = value.strip()
    table: Any = None
    if value != "null":
        try:
            table = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError as error:
            if value[:1] in tuple("[{\"'") or "\n" in value:
                raise ScenarioError(f"--set {path.strip()}: {value} is not TOML: {error}") from None
            table = value
    for key in reversed(keys):
        table = {key: table}
    return keys, table


def to_toml(table: Table) -> str:
    """Return nested tables as TOML, without empty tables and with each distribution on one line."""
    import tomlkit

    def filled(out: Any, table: Table) -> Any:
        for key, value in table.items():
            if isinstance(value, dict) and key in ("prompt", "output", "max_tokens", "arrivals"):
                inline = tomlkit.inline_table()
                inline.update(value)
                out.add(key, inline)
            elif isinstance(value, dict):
                if inner := filled(tomlkit.table(), value):
                    out.add(key, inner)
            elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
                array = tomlkit.aot()
                for item in value:
                    array.append(filled(tomlkit.table(), item))
                out.add(key, array)
            else:
                out.add(key, value)
        return out

    return tomlkit.dumps(filled(tomlkit.document(), table))


# By section: alternatives. Each is a tuple of groups of keys, of which a file may have only one.
_EXCLUSIVE: dict[str, tuple[tuple[tuple[str, ...], ...], ...]] = {
    "workload": (
        (("preset",), ("trace", "format", "time_scale", "sort"), ("prompt", "output", "correlation")),
        (("concurrency",), ("request_rate", "session_rate", "arrivals")),
        (("concurrency", "request_rate"), ("session_rate",)),
    ),
    "lab": ((("loads",), ("rates",)),),
}
_ARRIVALS_WITHOUT_RATE = ("all_at_once", "rate_profile")


def merged(base: Table, over: Table) -> Table:
    """Return ``base`` updated with ``over``: tables without a ``kind`` are merged, other values replaced.

    None removes a key, and a key removes those that it excludes (``_EXCLUSIVE``).
    """
    out = {key: value for key, value in base.items() if key not in over}
    for key, value in over.items():
        old = base.get(key)
        if value is None:
            continue
        if isinstance(value, dict) and isinstance(old, dict) and "kind" not in value:
            excluded = _excluded_keys(key, old, value)  # for example, a new source of lengths removes the old one
            out[key] = merged({name: inner for name, inner in old.items() if name not in excluded}, value)
        else:
            out[key] = value
    return out


def removed_keys(base: Table, over: Table) -> list[list[str]]:
    """Return the keys of ``base`` that ``merged`` removes because keys of ``over`` exclude them, a list a section."""
    found = []
    for section in _EXCLUSIVE:
        old, new = base.get(section), over.get(section)
        if isinstance(old, dict) and isinstance(new, dict):
            excluded = _excluded_keys(section, old, new) - set(new)
            found += [[f"{section}.{key}" for key in old if key in excluded]] if excluded & set(old) else []
    return found


def _excluded_keys(section: str, base: Table, over: Table) -> set[str]:
    given = {key for key, value in over.items() if value is not None}  # a key with None is only removed
    excluded: set[str] = set()
    for groups in _EXCLUSIVE.get(section, ()):
        for group in groups:
            if given.intersection(group):
                excluded.update(*(other for other in groups if other is not group))

    def has_no_rate(table: Table) -> bool:
        arrivals = table.get("arrivals")
        return isinstance(arrivals, dict) and arrivals.get("kind") in _ARRIVALS_WITHOUT_RATE

    if section == "workload":
        rates = {"request_rate", "session_rate"}
        excluded |= rates if has_no_rate(over) else set()
        excluded |= {"arrivals"} if rates & given and has_no_rate(base) else set()
    return excluded


_readable: set[Path] | None = None


def allow_only(folder: Path) -> None:
    """Let settings name only files in this folder from now on, and those of ``also_allow``, and no Python objects.

    A server calls this before it reads settings that others send. There is no way back for the process.
    """
    global _readable  # noqa: PLW0603 - of the process: threads that build scenarios later must not escape it
    _readable = {folder.resolve()}


def also_allow(folder: Path) -> None:
    """Add a folder to those of ``allow_only``. Without such a call any file may be named, and this changes nothing."""
    if _readable is not None:
        _readable.add(folder.resolve())


@contextmanager
def allowed(folder: Path) -> Iterator[None]:
    """Add a folder to those of ``allow_only`` for a block."""
    also_allow(folder)
    try:
        yield
    finally:
        if _readable is not None:
            _readable.discard(folder.resolve())


def resolved(text: str, folder: Path) -> Path:
    """Return a path relative to ``folder``, or to the working folder if the path exists only there.

    Raises InputError for an existing file that ``allow_only`` excludes.
    """
    path = Path(text).expanduser()
    found = path if path.exists() and not (folder / path).exists() else folder / path
    if _readable is not None and found.exists() and not any(map(found.resolve().is_relative_to, [*_readable])):
        raise InputError(f"this server reads only uploaded files; {text!r} is another one")
    return found


def python_object(text: str, folder: Path) -> Any:
    """Import the object "file.py:name" or "package.module:name".

    Raises PolicyError if it cannot be imported, and InputError after ``allow_only``.
    """
    if _readable is not None:
        raise InputError(f"this server runs no Python objects; {text!r} is one")
    place, _, name = text.rpartition(":")
    if place.endswith(".py"):
        module = _module_of_file(resolved(place, folder).resolve())
    else:
        path = list(sys.path)
        sys.path[:0] = [str(folder.resolve()), str(Path.cwd())]
        try:
            module = importlib.import_module(place)
        except Exception as error:
            raise PolicyError(f"policy module {place!r} cannot be imported: {error}") from error
        finally:
            sys.path[:] = path
    if not hasattr(module, name):
        known = sorted(key for key in vars(module) if not key.startswith("_"))
        raise PolicyError(f"{place} has no object named {name!r}; it has {', '.join(known) or 'none'}")
    return getattr(module, name)


@lru_cache(maxsize=64)  # one module per file, so that a policy is compiled once
def _module_of_file(path: Path) -> ModuleType:
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
