"""The one loader of the catalog's data files, and the lookup by name or alias."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, replace
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar, get_type_hints

from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.specs import (
    AttentionSpec,
    FfnSpec,
    GpuSpec,
    LinkSpec,
    ModelFacts,
    ModelSpec,
    NodeSpec,
    dtype_name,
)

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
        return _complete(value, where)
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


def _complete(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InputError(f"{where} must be a whole number that is not negative; it is {value!r}")
    return value


def _of_type(value: Any, kind: type[Any], where: str) -> Any:
    if not isinstance(value, kind):
        raise InputError(f"{where} must be a {_WORDS.get(kind, kind.__name__)}; it is {value!r}")
    return value


_WORDS = {str: "string", bool: "true or false", list: "list of strings", dict: "table"}


_DATA = Path(__file__).parent / "data"


Spec = TypeVar("Spec", ModelSpec, GpuSpec, NodeSpec)


@lru_cache(maxsize=1)
def load_models() -> dict[str, ModelSpec]:
    """Every model of the catalog by name, sorted."""
    tables = read_toml(_DATA / "models.toml")
    return {name: _model(name, table, f"model {name}") for name, table in sorted(tables.items())}


@lru_cache(maxsize=1)
def load_gpus() -> dict[str, GpuSpec]:
    """Every GPU of the catalog by name, sorted."""
    return {name: _gpu(name, table, f"GPU {name}") for name, table in _gpu_tables().items()}


@lru_cache(maxsize=1)
def load_links() -> dict[str, LinkSpec]:
    """Every link of the catalog by name, sorted."""
    tables = read_toml(_DATA / "links.toml")
    return {name: _link(name, table, f"link {name}") for name, table in sorted(tables.items())}


@lru_cache(maxsize=1)
def load_nodes() -> dict[str, NodeSpec]:
    """Every node of the catalog by name, sorted."""
    tables = read_toml(_DATA / "nodes.toml")
    return {name: _node(name, table, f"node {name}") for name, table in sorted(tables.items())}


@lru_cache(maxsize=1)
def load_nodes_of_gpus() -> dict[str, tuple[str, ...]]:
    """The usual nodes of each GPU by its name, the smallest node first."""
    return {name: tuple(table["usual_nodes"]) for name, table in _gpu_tables().items()}


def find(kind: str, name: str, known: Mapping[str, Spec]) -> Spec:
    """The entry of that name or alias, whatever its case; "_" and " " stand for "-".

    Raises:
        UnknownNameError: There is none; the message lists the nearest names.
    """
    wanted = _folded(name)
    for key, spec in known.items():
        if wanted == _folded(key) or wanted in map(_folded, _aliases(spec)):
            return spec
    raise UnknownNameError(kind, name, known)


def gpu_from_file(path: Path) -> GpuSpec:
    """The one GPU of a TOML file of the shape of ``data/gpus.toml``.

    Raises:
        InputError: The file cannot be read, or its entry lacks a key or has a wrong one.
    """
    name, table = _one_entry(path, "GPU")
    return _gpu(name, table, f"{path}: GPU {name}")


def node_from_file(path: Path) -> NodeSpec:
    """The one node of a TOML file of the shape of ``data/nodes.toml``.

    Its links are names of the catalog or tables of their own.

    Raises:
        InputError: The file cannot be read, or its entry lacks a key or has a wrong one.
    """
    name, table = _one_entry(path, "node")
    return _node(name, table, f"{path}: node {name}")


def _aliases(spec: ModelSpec | GpuSpec | NodeSpec) -> tuple[str, ...]:
    return spec.metadata.aliases if isinstance(spec, ModelSpec) else spec.aliases


def _folded(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(" ", "-")


def _gpu_tables() -> dict[str, dict[str, Any]]:
    return dict(sorted(read_toml(_DATA / "gpus.toml").items()))


def _one_entry(path: Path, kind: str) -> tuple[str, dict[str, Any]]:
    entries = read_toml(path)
    if len(entries) != 1 or not isinstance(next(iter(entries.values())), dict):
        raise InputError(
            f"{path} must hold one {kind} as one table, [name] and its keys under it; "
            f"it holds {', '.join(entries) or 'nothing'}"
        )
    return next(iter(entries.items()))


def _model(name: str, table: Mapping[str, Any], where: str) -> ModelSpec:
    metadata = {key: value for key, value in table.items() if key in field_names(ModelFacts)}
    shapes = {key: value for key, value in table.items() if key not in metadata}
    nested: dict[str, Any] = {"metadata": build(ModelFacts, metadata, where)}
    if "attention" in shapes:
        nested["attention"] = build(AttentionSpec, shapes["attention"], f"{where}: attention")
    if "ffn" in shapes:
        nested["ffn"] = build(FfnSpec, shapes["ffn"], f"{where}: ffn")
    return build(ModelSpec, {"name": name, **shapes, **nested}, where)


def _gpu(name: str, table: Mapping[str, Any], where: str) -> GpuSpec:
    shapes = {key: value for key, value in table.items() if key != "usual_nodes"}
    spec = build(GpuSpec, {"name": name, **shapes}, where)
    peaks = {dtype_name(dtype): flops for dtype, flops in spec.peak_flops.items()}
    if not peaks.keys() & {"bfloat16", "float16", "float32"}:
        raise InputError(f"{where}: peak_flops must hold bfloat16, float16 or float32; it holds {[*peaks]}")
    return replace(spec, peak_flops=peaks)


def _link(name: str, table: Mapping[str, Any], where: str) -> LinkSpec:
    return build(LinkSpec, {"name": name, **table}, where)


def _node(name: str, table: Mapping[str, Any], where: str) -> NodeSpec:
    links = {
        key: _link_of(value, f"{where}: {key}")
        for key, value in table.items()
        if key in ("link", "fallback_link", "network")
    }
    spec = build(NodeSpec, {"name": name, **table, **links}, where)
    if not 1 <= spec.link_group <= spec.gpus:
        raise InputError(f"{where}: link_group must be in 1..{spec.gpus} (its gpus); it is {spec.link_group}")
    return spec


def _link_of(value: Any, where: str) -> LinkSpec:
    if isinstance(value, dict):
        return _link(str(value.get("name", where)), {k: v for k, v in value.items() if k != "name"}, where)
    if not isinstance(value, str):
        raise InputError(f"{where} must be the name of a link or a table; it is {value!r}")
    links = load_links()
    if value not in links:
        raise UnknownNameError("link", value, links)
    return links[value]


def served_model(name: str) -> ModelSpec | None:
    """The model that a server calls so: by name, alias, or the last part of a path; None where nobody knows."""
    for wanted in (name, PurePosixPath(name).name):
        try:
            return find("model", wanted, load_models())
        except UnknownNameError:
            continue
    return None


def find_gpu(name: str) -> GpuSpec | None:
    """The GPU of that name or alias; None where nobody knows it, as one of a user's own file."""
    try:
        return find("GPU", name, load_gpus())
    except UnknownNameError:
        return None
