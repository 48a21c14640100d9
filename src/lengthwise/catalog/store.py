"""Looks up models, GPUs, nodes and links by name, and loads their data files."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar, get_type_hints

from lengthwise.catalog import huggingface
from lengthwise.schema import specs
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.specs import GpuSpec, LinkSpec, ModelFacts, ModelSpec, NodeSpec, dtype_name

_DATA = Path(__file__).parent / "data"
_PCIE_NODES = ("pcie4-4", "pcie4-8")

Record = TypeVar("Record")
Spec = TypeVar("Spec", ModelSpec, GpuSpec, NodeSpec)


def model(name_or_path: str | Path) -> ModelSpec:
    """Return a model by name or alias, or from the path of a config.json or of the folder with that file.

    Raises:
        InputError: The file cannot be read, is no config, or has shapes that are not supported.
        UnknownNameError: The catalog has no such model, and the name is no path.
    """
    path = Path(name_or_path).expanduser()
    if (known := _lookup(str(name_or_path), models())) is not None:
        return known
    if not path.is_dir() and path.suffix != ".json":
        if (variant := _variant(str(name_or_path))) is not None:
            return variant
        raise UnknownNameError("model", str(name_or_path), models(), alternative="the path of its config.json")
    file = path / "config.json" if path.is_dir() else path
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} must be JSON: {error}") from error
    if not isinstance(config, dict):
        raise InputError(f"{file} must hold a JSON object; it holds a {type(config).__name__}")
    return huggingface.parse(config, name, where=str(file))


def model_from_config(config: Mapping[str, Any], name: str) -> ModelSpec:
    """Return the model of a parsed Hugging Face config. Raises InputError if keys are missing or unknown."""
    return huggingface.parse(config, name, where=f"the config of {name}")


def served_model(name: str) -> ModelSpec | None:
    """Return the model that a server reports by name, alias or a path that ends with one, or None if unknown."""
    return _lookup(name, models()) or _variant(PurePosixPath(name).name)


def gpu(name: str | Path) -> GpuSpec:
    """Return a GPU by name or alias, or from a TOML file. Raises InputError if it is unknown, ambiguous or invalid."""
    if not str(name).endswith(".toml"):
        offered, own = gpus(), normalized(str(name))
        sizes = [one for one in offered if normalized(one).startswith(f"{own}-")]
        if own not in map(normalized, offered) and len({offered[one].memory_bytes for one in sizes}) > 1:
            shown = ", ".join(sizes)  # the size decides what fits
            raise InputError(f"the name of a GPU must say its memory; {name} can be {shown}. Give one of them")
        return _find("GPU", str(name), offered)
    entry, table, where = _file_entry(Path(name), "GPU")
    if known := _tables("gpus").get(entry):  # The file changes some of its keys.
        changes = {"price_source": str(name)} if "price_per_hour_usd" in table else {}
        table = {**known, **changes, **table}
    return _gpu(entry, table, where)


def find_gpu(name: str) -> GpuSpec | None:
    """Return the GPU with this name or alias, or None if the catalog has none."""
    return _lookup(name, gpus())


def node(name: str | Path) -> NodeSpec:
    """Return a node by name or alias, or from a TOML file. Raises InputError if it is unknown or invalid."""
    return _node(*_file_entry(Path(name), "node")) if str(name).endswith(".toml") else _find("node", str(name), nodes())


def default_node(gpu: GpuSpec, gpus: int) -> NodeSpec:
    """Return a usual node of a GPU: the smallest node with enough GPUs, or else the largest."""
    if gpus < 1:
        raise InputError(f"a node must hold at least 1 GPU; it should hold {gpus}")
    # A GPU outside of the catalog is assumed to be in a PCIe 4 server.
    names = _tables("gpus").get(gpu.name, {}).get("usual_nodes", _PCIE_NODES)
    usual = [node(name) for name in names]  # the smallest first
    return next((one for one in usual if one.gpus >= gpus), usual[-1])


def require_node_of(gpu: GpuSpec, on: NodeSpec) -> None:
    """Raise InputError if the catalog's GPU cannot be in the catalog's node: all GPUs share a link that it lacks."""
    usual = [node(name) for name in _tables("gpus").get(gpu.name, {}).get("usual_nodes", ())]
    switched = on.link_group == on.gpus and not on.link.name.startswith("pcie")
    is_of_catalog = on.name in _tables("nodes") and on == node(on.name)
    if usual and switched and is_of_catalog and on.link.name not in {one.link.name for one in usual}:
        raise InputError(
            f"node {on.name} joins its GPUs by {on.link.name}, which {gpu.name} does not have. Leave node out, for "
            f"{usual[0].name}, or give the file of a node of your own"
        )


@cache
def _tables(name: str) -> dict[str, dict[str, Any]]:
    return dict(sorted(read_toml(_DATA / f"{name}.toml").items()))


@cache
def _entries(kind: str) -> dict[str, Any]:
    make = {"model": _model, "GPU": _gpu, "link": _link, "node": _node}[kind]
    return {name: make(name, table, f"{kind} {name}") for name, table in _tables(f"{kind.lower()}s").items()}


def models() -> dict[str, ModelSpec]:
    """Return the catalog's models, sorted by name."""
    return dict(_entries("model"))


def gpus() -> dict[str, GpuSpec]:
    """Return the catalog's GPUs, sorted by name."""
    return dict(_entries("GPU"))


def links() -> dict[str, LinkSpec]:
    """Return the catalog's links, sorted by name."""
    return dict(_entries("link"))


def nodes() -> dict[str, NodeSpec]:
    """Return the catalog's nodes, sorted by name."""
    return dict(_entries("node"))


def _lookup(name: str, known: Mapping[str, Spec]) -> Spec | None:
    wanted = normalized(name)
    for key, spec in known.items():
        aliases: tuple[str, ...] = spec.metadata.aliases if isinstance(spec, ModelSpec) else spec.aliases
        if wanted in map(normalized, (key, *aliases)):
            return spec
    return None


_ORGANISATION = re.compile(r"^[\w-][\w.-]*/(?=[\w.-]+$)")
_TUNED = ("instruct", "chat", "it", "pt", "base", "hf", "dynamic", "block", "bnb")
_STORED = {  # suffixes of checkpoints that store the same shapes in another dtype
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16"), "float16"),
    **dict.fromkeys(("fp8", "w8a8-fp8"), "fp8"),
    **dict.fromkeys(("int8", "w8a8", "w8a16", "8bit"), "int8"),
    **dict.fromkeys(("int4", "awq", "gptq", "w4a16", "4bit"), "int4"),
    **dict.fromkeys(("fp4", "nvfp4", "mxfp4"), "fp4"),
}


def _variant(name: str) -> ModelSpec | None:
    """Return the model of a fine-tune or quantisation ("org/Name-Instruct-FP8"), or None if it is unknown."""
    known, rest, dtype = models(), _ORGANISATION.sub("", normalized(name)), None
    while (spec := _lookup(rest, known)) is None:
        rest, _, suffix = rest.replace("quantized.", "").rpartition("-")
        if not rest or (suffix not in _TUNED and suffix not in _STORED):
            return None
        # The last suffix wins: "GPTQ-Int8" is int8.
        dtype = dtype or _STORED.get(suffix)
    # The name describes the weights; those of the catalog have another dtype or belong to another fine-tune.
    metadata = spec.metadata if dtype is None else replace(spec.metadata, dtype=dtype, aliases=())
    return replace(spec, metadata=replace(metadata, aliases=(name,)) if "/" in name else metadata)


def _find(kind: str, name: str, known: Mapping[str, Spec]) -> Spec:
    if (spec := _lookup(name, known)) is None:
        other = {"GPU": "a .toml file with its data", "node": "a .toml file of it"}.get(kind, "")
        raise UnknownNameError(kind, name, known, alternative=other)
    return spec


def normalized(name: str) -> str:
    """Return a name in the form that lookups compare: lower case, with "-" instead of "_" and spaces."""
    return name.strip().lower().replace("_", "-").replace(" ", "-")


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file. Raises InputError if the file cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} must be TOML: {error}") from error


def _file_entry(file: Path, kind: str) -> tuple[str, dict[str, Any], str]:
    path = file.expanduser()
    entries = read_toml(path)
    if len(entries) != 1 or not isinstance(next(iter(entries.values())), dict):
        found = ", ".join(entries) or "nothing"
        raise InputError(f"{path} must hold one {kind} as one table, [name] and its keys under it; it holds {found}")
    name, table = next(iter(entries.items()))
    return name, table, f"{path}: {kind} {name}"


def build(record: type[Record], table: Mapping[str, Any], where: str) -> Record:
    """Return a ``record`` built from a table with a key for each field. ``where`` names the table in errors."""
    known = {field.name: field for field in fields(record)}  # type: ignore[arg-type]
    required = [name for name, f in known.items() if f.default is MISSING and f.default_factory is MISSING]
    if missing := [name for name in required if name not in table]:
        raise InputError(f"{where} must give {', '.join(missing)}; it gives {', '.join(table) or 'nothing'}")
    if unknown := [name for name in table if name not in known]:
        raise InputError(f"{where} has no key {', '.join(unknown)}; its keys are {', '.join(known)}")
    hints = _hints(record)  # type: ignore[arg-type]
    return record(**{name: _value(value, hints[name], f"{where}: {name}") for name, value in table.items()})


_hints = cache(get_type_hints)


def _value(value: Any, hint: Any, where: str) -> Any:
    if hint in (float, float | None, int, int | None):
        is_whole = hint in (int, int | None)
        allowed = int if is_whole else int | float
        if isinstance(value, bool) or not isinstance(value, allowed) or not 0 <= value < float("inf"):
            raise InputError(f"{where} must be a {'whole ' * is_whole}number that is not negative; it is {value!r}")
        return value if is_whole else float(value)
    if hint == tuple[str, ...]:
        return tuple(_of_type(item, str, where) for item in _of_type(value, list, where))
    if hint == dict[str, float]:
        return {name: _value(n, float, f"{where}.{name}") for name, n in _of_type(value, dict, where).items()}
    if hint == specs.LinearAttentionSpec | None:
        return _of_type(value, specs.LinearAttentionSpec, where)
    return _of_type(value, hint, where)


def _of_type(value: Any, kind: type[Any], where: str) -> Any:
    if not isinstance(value, kind):
        words = {str: "string", bool: "true or false", list: "list of strings", dict: "table"}
        raise InputError(f"{where} must be a {words.get(kind, kind.__name__)}; it is {value!r}")
    return value


def _model(name: str, table: Mapping[str, Any], where: str) -> ModelSpec:
    names = {field.name for field in fields(ModelFacts)}
    metadata = {key: value for key, value in table.items() if key in names}
    values = {key: value for key, value in table.items() if key not in names}
    values["metadata"] = build(ModelFacts, metadata, where)
    for key, spec in (("attention", specs.AttentionSpec), ("ffn", specs.FfnSpec)):
        if key in values:
            values[key] = build(spec, _with_linear(values[key], where), f"{where}: {key}")
    return build(ModelSpec, {"name": name, **values}, where)


def _with_linear(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    linear = table.get("linear")
    made = {} if linear is None else {"linear": build(specs.LinearAttentionSpec, linear, f"{where}: linear")}
    return {**table, **made}


def _gpu(name: str, table: Mapping[str, Any], where: str) -> GpuSpec:
    values = {key: value for key, value in table.items() if key != "usual_nodes"}
    spec = build(GpuSpec, {"name": name, **values}, where)
    peaks = {dtype_name(dtype): flops for dtype, flops in spec.peak_flops.items()}
    if not peaks.keys() & {"bfloat16", "float16", "float32"}:
        raise InputError(f"{where}: peak_flops must hold bfloat16, float16 or float32; it holds {[*peaks]}")
    return replace(spec, peak_flops=peaks)


def _link(name: str, table: Mapping[str, Any], where: str) -> LinkSpec:
    return build(LinkSpec, {"name": name, **table}, where)


def _node(name: str, table: Mapping[str, Any], where: str) -> NodeSpec:
    values = {"name": name, **table}
    for key in [key for key in ("link", "fallback_link", "network") if key in table]:
        value, label = table[key], f"{where}: {key}"
        if isinstance(value, dict):
            values[key] = build(LinkSpec, {"name": label, **value}, label)
        elif not isinstance(value, str):
            raise InputError(f"{label} must be the name of a link or a table; it is {value!r}")
        elif value not in (known := _entries("link")):
            raise UnknownNameError("link", value, known)
        else:
            values[key] = known[value]
    try:
        spec = build(NodeSpec, values, where)
    except InputError as error:
        if "network" in table:
            raise
        near = next((one.network.name for one in nodes().values() if one.link == values.get("link")), "ethernet-100")
        raise InputError(
            f"{error}. Its network joins nodes: with P/D, KV transfers between sides on different nodes need it. "
            f'Give a link of the catalog, such as network = "{near}"'
        ) from error
    if not 1 <= spec.link_group <= spec.gpus:
        raise InputError(f"{where}: link_group must be in 1..{spec.gpus} (its gpus); it is {spec.link_group}")
    if spec.host_gpus < 1 or spec.gpus % spec.host_gpus:
        raise InputError(f"{where}: gpus_per_host must divide gpus, {spec.gpus}; it is {spec.gpus_per_host}")
    return spec
