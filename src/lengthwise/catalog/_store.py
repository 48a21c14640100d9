"""The one loader of the catalog's data files, and the lookup by name or alias."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from lengthwise.catalog._records import build, field_names, read_toml
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.hardware import GpuSpec, LinkSpec, NodeSpec
from lengthwise.schema.model import AttentionSpec, FfnSpec, ModelFacts, ModelSpec
from lengthwise.schema.units import dtype_name

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
    return spec.facts.aliases if isinstance(spec, ModelSpec) else spec.aliases


def _folded(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(" ", "-")


def _gpu_tables() -> dict[str, dict[str, Any]]:
    return dict(sorted(read_toml(_DATA / "gpus.toml").items()))


def _one_entry(path: Path, kind: str) -> tuple[str, dict[str, Any]]:
    entries = read_toml(path)
    if len(entries) != 1 or not isinstance(next(iter(entries.values())), dict):
        raise InputError(
            f"{path} must hold one {kind} as one table, [name] and its keys under it; "
            f"it holds {', '.join(entries) or 'nothing'}",
        )
    return next(iter(entries.items()))


def _model(name: str, table: Mapping[str, Any], where: str) -> ModelSpec:
    facts = {key: value for key, value in table.items() if key in field_names(ModelFacts)}
    shapes = {key: value for key, value in table.items() if key not in facts}
    nested: dict[str, Any] = {"facts": build(ModelFacts, facts, where)}
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
