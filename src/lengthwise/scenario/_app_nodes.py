"""Nodes of a cluster as people write them: ``8xA100-80GB``, ``4xA40@pairs``, ``8xH100@./mine.toml``, ``dgx-h100``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lengthwise import catalog
from lengthwise.scenario._places import resolved
from lengthwise.schema.app import Cluster, Machine
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.hardware import GpuSpec, NodeSpec

PAIRS = "pairs"
_COUNTED = re.compile(r"(\d+)\s*[xX]\s*([^@]+?)\s*(?:@\s*(.+))?\Z")
_WAYS = (
    'write a number of GPUs ("8xA100-80GB", with "@pairs" where fast links join pairs, "@NODE" in a node '
    "of the catalog or of a .toml file), or a node of the catalog"
)


def parse_node(text: str, folder: Path | str = ".") -> Machine:
    """The machine that a text means.

    Args:
        text: GPUs by number and name, after "@" what joins them: "pairs", a node of the catalog or its file; without,
            the usual node of these GPUs. Or a node of the catalog that has GPUs of one kind.
        folder: Where paths of files start.

    Raises:
        InputError: A name is unknown, or the node has not so many GPUs.
    """
    if found := _COUNTED.match(text.strip()):
        _require_one_gpu(found[2], text)
        gpu = catalog.gpu(_file(found[2], Path(folder)))
        return _machine(gpu, int(found[1]), found[3], Path(folder))
    try:
        node = catalog.node(_file(text.strip(), Path(folder)))
    except UnknownNameError as error:
        raise UnknownNameError("node", text, error.known) from error
    kinds = [gpu for gpu in catalog.gpus().values() if catalog.default_node(gpu, node.gpus).name == node.name]
    if len(kinds) != 1:
        ways = " or ".join(f"{node.gpus}x{gpu.name}@{node.name}" for gpu in kinds)
        raise InputError(
            f"{text} does not say which GPUs it has; write {ways or f'{node.gpus}xGPU@{node.name}'}"
        )
    return Machine(kinds[0], node, node.gpus)


def _require_one_gpu(name: str, text: str) -> None:
    """A GPU that comes with memories of several sizes is named with its own: whether models fit hangs on that."""
    known = catalog.gpus()
    ways = [one for one in known if one.lower().startswith(f"{name.lower()}-")]
    if name.lower() not in map(str.lower, known) and len({known[one].memory_bytes for one in ways}) > 1:
        count = text.lower().split("x")[0].strip()
        shown = ", ".join(f"{count}x{one}" for one in ways)
        raise InputError(f"{text} must say which {name} it means, since they differ in memory: {shown}")


def parse_cluster(nodes: Sequence[str], folder: Path | str = ".") -> Cluster:
    """All GPUs of these nodes; raises as ``parse_node`` does."""
    return Cluster(tuple(parse_node(text, folder) for text in nodes))


def _machine(gpu: GpuSpec, gpus: int, joined: str | None, folder: Path) -> Machine:
    if gpus < 1:
        raise InputError(f"a node must have at least 1 GPU; {_WAYS}")
    node = _joined(gpu, gpus, joined, folder)
    if gpus > node.gpus:
        raise InputError(
            f"a node {node.name} has at most {node.gpus} GPUs, not {gpus}; list several nodes, or name another after @"
        )
    return Machine(gpu, node, gpus)


def _joined(gpu: GpuSpec, gpus: int, joined: str | None, folder: Path) -> NodeSpec:
    if joined is None:
        return catalog.default_node(gpu, gpus)
    if joined == PAIRS:
        return _pairs(gpu, gpus)
    return catalog.node(_file(joined, folder))


def _pairs(gpu: GpuSpec, gpus: int) -> NodeSpec:
    """Its node whose fast links join pairs, with as many GPUs as are asked for."""
    family = gpu.name.split("-")[0].lower()
    paired = [node for node in catalog.nodes().values() if node.link_group == 2]
    own = sorted((one for one in paired if one.name.split("-")[0] == family), key=lambda one: one.gpus)
    if not own:
        raise InputError(
            f"no node of the catalog joins {gpu.name} in pairs; {', '.join(one.name for one in paired)} do so with "
            "theirs. Name one of these after @, or a .toml file"
        )
    usual = next((one for one in own if one.gpus >= gpus), own[-1])
    return replace(usual, gpus=max(gpus, usual.gpus))


def _file(name: str, folder: Path) -> str:
    return str(resolved(name, folder)) if name.endswith(".toml") else name
