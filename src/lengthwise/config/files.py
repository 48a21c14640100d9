"""Read TOML and YAML into plain tables, merge the assignments of ``--set``, and write TOML."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import tomllib
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from lengthwise.schema.errors import PolicyError, ScenarioError

Table = dict[str, Any]


def read(path: Path, kind: str = "scenario") -> Table:
    """Return the tables of a TOML (.toml) or YAML (.yaml, .yml) file; raise ScenarioError, naming its ``kind``."""
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        other = [path.with_suffix(suffix) for suffix in (".toml", ".yaml", ".yml")]
        hint = next((f"; did you mean {file}?" for file in other if file.is_file()), "")
        raise ScenarioError(f"there is no {kind} file {path}{hint}") from None
    except IsADirectoryError:
        raise ScenarioError(f"{path} is a folder; give a {kind} file (.toml or .yaml)") from None
    except UnicodeDecodeError as error:
        raise ScenarioError(f"{path}: a {kind} file is UTF-8 text; byte {error.start} is not") from None
    except OSError as error:
        raise ScenarioError(f"cannot read {path}: {error.strerror}") from None
    return parse(text, path.suffix.lower(), str(path), kind)


def parse(text: str, suffix: str, source: str, kind: str = "scenario") -> Table:
    """Return the tables of a text in the format of ``suffix``; raise as ``read`` does."""
    if suffix == ".toml":
        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            message = str(error)
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
    """Return the path of ``path=value`` and the value (TOML, a bare word, or null: remove) in nested tables."""
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
    """Return nested tables as TOML; empty tables are left out, and distributions stay on one line."""
    import tomlkit

    def filled(out: Any, table: Table) -> Any:
        for key, value in table.items():
            if isinstance(value, dict) and key in ("prompt", "output", "arrivals"):
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


# By section: sets of groups of keys, of which only one group can be given at a time.
_EXCLUSIVE: dict[str, tuple[tuple[tuple[str, ...], ...], ...]] = {
    "workload": (
        (("preset",), ("trace", "format", "time_scale", "sort"), ("prompt", "output", "correlation")),
        (("concurrency",), ("request_rate", "arrivals")),
    ),
    "lab": ((("loads",), ("rates",)),),
}
_ARRIVALS_WITHOUT_RATE = ("all_at_once", "rate_profile")


def merged(base: Table, over: Table) -> Table:
    """Return ``base`` updated with ``over``: tables key by key, other values replaced, keys with None removed."""
    out = {key: value for key, value in base.items() if key not in over}
    for key, value in over.items():
        old = base.get(key)
        if value is None:
            continue
        if isinstance(value, dict) and isinstance(old, dict) and "kind" not in value:
            excluded = _excluded(key, old, value)  # a new source or load of a workload removes the old one
            out[key] = merged({name: inner for name, inner in old.items() if name not in excluded}, value)
        else:
            out[key] = value
    return out


def removed_keys(base: Table, over: Table) -> list[list[str]]:
    """Return by section the keys of ``base`` ("workload.trace") that ``merged`` removes although ``over`` has none."""
    found = []
    for section in _EXCLUSIVE:
        old, new = base.get(section), over.get(section)
        if isinstance(old, dict) and isinstance(new, dict):
            excluded = _excluded(section, old, new) - set(new)
            found += [[f"{section}.{key}" for key in old if key in excluded]] if excluded & set(old) else []
    return found


def _excluded(section: str, base: Table, over: Table) -> set[str]:
    """Return the keys of a section that cannot stay in ``base`` once ``over`` is merged."""
    given = {key for key, value in over.items() if value is not None}  # None only removes a key
    excluded: set[str] = set()
    for groups in _EXCLUSIVE.get(section, ()):
        for group in groups:
            if given.intersection(group):
                excluded.update(*(other for other in groups if other is not group))

    def has_no_rate(table: Table) -> bool:
        arrivals = table.get("arrivals")
        return isinstance(arrivals, dict) and arrivals.get("kind") in _ARRIVALS_WITHOUT_RATE

    if section == "workload":
        excluded |= {"request_rate"} if has_no_rate(over) else set()
        excluded |= {"arrivals"} if "request_rate" in given and has_no_rate(base) else set()
    return excluded


def resolved(text: str, folder: Path) -> Path:
    """Return the path that ``text`` names: relative to ``folder``, or to the working folder if only that one exists."""
    path = Path(text).expanduser()
    return path if path.exists() and not (folder / path).exists() else folder / path


def python_object(text: str, folder: Path) -> Any:
    """Return the object named by "file.py:name" or "package.module:name"; raise PolicyError if there is none."""
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
