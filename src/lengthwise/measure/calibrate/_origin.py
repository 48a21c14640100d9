"""Whether records tell of another model, GPU or degree than the deployment's: what they say of themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from lengthwise import catalog
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import UnknownNameError
from lengthwise.schema.hardware import GpuSpec
from lengthwise.schema.measured import Measured
from lengthwise.schema.model import ModelSpec

DEGREES = ("tp", "pp", "replicas")


def doubts_of_origin(measured: Measured, deployment: Deployment) -> list[str]:
    """A sentence for each fact that surely differs; names that the catalog does not know tell nothing."""
    facts = measured.facts
    told = facts.get("deployment")
    told = told if isinstance(told, Mapping) else {}
    found = []
    for name in _names(told.get("model"), facts.get("model"), facts.get("model_id")):
        model = _model(name)
        if model is not None and _shape(model) != _shape(deployment.model):
            found.append(f"it is of the model {name}, and the deployment's is {deployment.model.name}")
            break
    for name in _names(told.get("gpu"), facts.get("gpu")):
        gpu, own = _gpu(name), _gpu(deployment.gpu.name)
        if gpu is not None and own is not None and gpu.name != own.name:
            found.append(f"it is of the GPU {name}, and the deployment's is {deployment.gpu.name}")
            break
    for degree in DEGREES:
        own_degree = getattr(deployment.parallel, degree)
        if isinstance(told.get(degree), int) and told[degree] != own_degree:
            found.append(f"it is of {degree} {told[degree]}, and the deployment's is {own_degree}")
    return found


def _names(*values: Any) -> Iterator[str]:
    return (value for value in values if isinstance(value, str) and value)


def _shape(model: ModelSpec) -> tuple[int, int, int, int]:
    """What two names of one model share; fine-tunes and quantisations keep it, too."""
    return model.layers, model.hidden, model.attention.heads, model.attention.kv_heads


def _model(name: str) -> ModelSpec | None:
    """The catalog's model of a served name: a name, an alias, or the last part of a path."""
    known = catalog.models()
    for wanted in (name, PurePosixPath(name).name):
        for key, spec in known.items():
            if _folded(wanted) in map(_folded, (key, *spec.facts.aliases)):
                return spec
    return None


def _gpu(name: str) -> GpuSpec | None:
    try:
        return None if name.endswith(".toml") else catalog.gpu(name)
    except UnknownNameError:
        return None


def _folded(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(" ", "-")
