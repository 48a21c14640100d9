"""Parses the GPUs of an application from texts such as "8xA100-80GB@pairs"."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lengthwise import catalog
from lengthwise.config.files import resolved
from lengthwise.schema.app import Cluster, Machine
from lengthwise.schema.errors import InputError, UnknownNameError
from lengthwise.schema.specs import GpuSpec, NodeSpec

PAIRS = "pairs"
_COUNTED = re.compile(r"(\d+)\s*[xX]\s*([^@]+?)\s*(?:@\s*(.+))?\Z")


def parse_node(text: str, folder: Path | str = ".") -> Machine:
    """Parse a machine: "8xA100-80GB", "8xA100-80GB@pairs", "8xA100-80GB@NODE", or the name of a node alone.

    With "@pairs", fast links join pairs of GPUs. NODE is a node of the catalog or a .toml file. Raises UnknownNameError
    for an unknown name, and InputError if the text is ambiguous or has more GPUs than the node.
    """

    def file_or_name(name: str) -> str:
        return str(resolved(name, Path(folder))) if name.endswith(".toml") else name

    if not (found := _COUNTED.match(text.strip())):
        try:
            node = catalog.node(file_or_name(text.strip()))
        except UnknownNameError as error:
            raise UnknownNameError("node", text, error.known) from error
        kinds = [gpu for gpu in catalog.gpus().values() if catalog.default_node(gpu, node.gpus).name == node.name]
        if len(kinds) != 1:
            ways = " or ".join(f"{node.gpus}x{gpu.name}@{node.name}" for gpu in kinds)
            raise InputError(f"{text} does not say which GPUs it has; write {ways or f'{node.gpus}xGPU@{node.name}'}")
        return Machine(kinds[0], node, node.gpus)
    gpus, name, links = int(found[1]), found[2], found[3]
    gpu = catalog.gpu(file_or_name(name))
    if gpus < 1:
        raise InputError(
            'a node must have at least 1 GPU; write a number of GPUs ("8xA100-80GB", with "@pairs" where fast links '
            f'join pairs, "@NODE" in a node of the catalog or of a .toml file), or one of the catalog; it is {text!r}'
        )
    if links == PAIRS:
        node = _node_of_pairs(gpu, gpus)
    else:
        node = catalog.default_node(gpu, gpus) if links is None else catalog.node(file_or_name(links))
    if gpus > node.gpus:
        remedy = "list several nodes, or name another after @"
        raise InputError(f"a node {node.name} has at most {node.gpus} GPUs, not {gpus}; {remedy}")
    return Machine(gpu, node, gpus)


def parse_cluster(nodes: Sequence[str], folder: Path | str = ".") -> Cluster:
    """Return the cluster of the machines that ``parse_node`` parses; raises as it does."""
    return Cluster(tuple(parse_node(text, folder) for text in nodes))


def _node_of_pairs(gpu: GpuSpec, gpus: int) -> NodeSpec:
    family = gpu.name.split("-")[0].lower()
    paired = [node for node in catalog.nodes().values() if node.link_group == 2]
    own = sorted((one for one in paired if one.name.split("-")[0] == family), key=lambda one: one.gpus)
    if not own:
        others = f"{', '.join(one.name for one in paired)} do so with theirs. Name one after @, or a .toml file"
        raise InputError(f"no node of the catalog joins {gpu.name} in pairs; {others}")
    usual = next((one for one in own if one.gpus >= gpus), own[-1])
    return replace(usual, gpus=max(gpus, usual.gpus))
