"""Models, GPUs, nodes and links by name, from data files or from files of the user."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lengthwise.catalog import huggingface as _huggingface
from lengthwise.catalog import store as _store
from lengthwise.catalog.shapes import (
    active_parameters,
    cross_kv_bytes_per_token,
    embedding_parameters,
    encoder_layer_parameters,
    head_parameters,
    kv_bytes_per_token,
    layer_parameters,
    layer_weight_bytes,
    parameters,
    stage_layers,
    weight_bytes,
)
from lengthwise.catalog.store import find_gpu, served_model
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.specs import GpuSpec, ModelSpec, NodeSpec

__all__ = [
    "active_parameters",
    "cross_kv_bytes_per_token",
    "default_node",
    "embedding_parameters",
    "encoder_layer_parameters",
    "find_gpu",
    "gpu",
    "gpus",
    "head_parameters",
    "kv_bytes_per_token",
    "layer_parameters",
    "layer_weight_bytes",
    "model",
    "model_from_config",
    "models",
    "node",
    "nodes",
    "parameters",
    "served_model",
    "stage_layers",
    "weight_bytes",
]

_PCIE_NODES = ("pcie4-4", "pcie4-8")


def model(name_or_path: str | Path) -> ModelSpec:
    """A model by name or alias, or from a Hugging Face ``config.json`` or a folder that holds one.

    A name of the catalog wins over a folder called the same; write ``./name`` for the folder.

    Raises:
        UnknownNameError: It is neither a known name nor a file.
        InputError: The file cannot be read or lacks keys; the message says which.
    """
    try:
        return _store.find("model", str(name_or_path), _store.load_models())
    except UnknownNameError:
        path = Path(name_or_path).expanduser()
        if path.is_dir() or path.suffix == ".json":
            return _model_from_path(path)
        raise


def model_from_config(config: Mapping[str, Any], name: str) -> ModelSpec:
    """The shapes that a parsed Hugging Face config describes, under ``name``.

    Raises:
        InputError: Needed keys are missing; the message names the alternatives looked for.
    """
    return _huggingface.parse(config, name, where=f"the config of {name}")


def models() -> dict[str, ModelSpec]:
    """All models of the catalog by name, sorted."""
    return dict(_store.load_models())


def gpu(name: str | Path) -> GpuSpec:
    """A GPU by name or alias, or the one entry of a TOML file (``gpu("mine.toml")``).

    Raises:
        UnknownNameError: There is no such GPU.
        InputError: The file cannot be read, or lacks keys.
    """
    if str(name).endswith(".toml"):
        return _store.gpu_from_file(Path(name).expanduser())
    return _store.find("GPU", str(name), _store.load_gpus())


def gpus() -> dict[str, GpuSpec]:
    """All GPUs of the catalog by name, sorted."""
    return dict(_store.load_gpus())


def node(name: str | Path) -> NodeSpec:
    """A node by name or alias, or the one entry of a TOML file (``node("mine.toml")``).

    Raises:
        UnknownNameError: There is no such node.
        InputError: The file cannot be read, or lacks keys.
    """
    if str(name).endswith(".toml"):
        return _store.node_from_file(Path(name).expanduser())
    return _store.find("node", str(name), _store.load_nodes())


def nodes() -> dict[str, NodeSpec]:
    """All nodes of the catalog by name, sorted."""
    return dict(_store.load_nodes())


def default_node(gpu: GpuSpec, gpus: int) -> NodeSpec:
    """The usual node of a GPU: the smallest that holds so many, else the largest there is.

    A GPU that is not of the catalog is taken to sit in a PCIe 4 server.

    Raises:
        InputError: ``gpus`` is below 1.
    """
    if gpus < 1:
        raise InputError(f"a node must hold at least 1 GPU; it should hold {gpus}")
    usual = [node(name) for name in _store.load_nodes_of_gpus().get(gpu.name, _PCIE_NODES)]
    return next((one for one in usual if one.gpus >= gpus), usual[-1])


def _model_from_path(path: Path) -> ModelSpec:
    file = path / "config.json" if path.is_dir() else path
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{file} must be JSON: {error}") from error
    if not isinstance(config, dict):
        raise InputError(f"{file} must hold a JSON object; it holds a {type(config).__name__}")
    return _huggingface.parse(config, name, where=str(file))
