"""Whether records tell of another model, GPU or degree than the deployment's, or of none: what they themselves say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lengthwise import catalog
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.measured import Measured, shape_facts

DEGREES = ("tp", "pp", "replicas")


def doubts_of_origin(measured: Measured, deployment: Deployment) -> list[str]:
    """A sentence for each fact that surely differs; names that the catalog does not know tell nothing."""
    facts, told = measured.facts, _told(measured)
    found = list(_model_doubts(told, facts, deployment))
    for name in _names(told.get("gpu"), facts.get("gpu")):
        gpu, own = catalog.told_gpu(name), catalog.told_gpu(deployment.gpu.name)
        if gpu is not None and own is not None and gpu.name != own.name:
            found.append(f"it is of the GPU {name}, and the deployment's is {deployment.gpu.name}")
            break
    for degree in DEGREES:
        own_degree = getattr(deployment.parallel, degree)
        if isinstance(told.get(degree), int) and told[degree] != own_degree:
            found.append(f"it is of {degree} {told[degree]}, and the deployment's is {own_degree}")
    return found


def untold_origin(runs: Sequence[Measured], names: Sequence[str], deployment: Deployment) -> str:
    """A sentence on the runs of which nothing tells the model, neither its shape nor a known name; or nothing."""
    untold = [name for run, name in zip(runs, names, strict=True) if not _tells_model(run)]
    if not untold:
        return ""
    return (
        f"where these runs come from is not told: {', '.join(untold)}. No deployment is kept with them, nor the name "
        f"of a model that the catalog knows; that they are of {deployment.model.name} on {deployment.gpu.name} is "
        "taken on trust (`lengthwise bench` keeps the deployment of the scenario that it is given)"
    )


def _tells_model(measured: Measured) -> bool:
    facts, told = measured.facts, _told(measured)
    served = _names(told.get("model"), facts.get("model"), facts.get("model_id"))
    return isinstance(told.get("model_shape"), Mapping) or any(
        catalog.served_model(name) is not None for name in served
    )


def _told(measured: Measured) -> Mapping[str, Any]:
    """What the records keep of their deployment; nothing where they do not."""
    told = measured.facts.get("deployment")
    return told if isinstance(told, Mapping) else {}


def _model_doubts(told: Mapping[str, Any], facts: Mapping[str, Any], deployment: Deployment) -> Iterator[str]:
    """By the shape that the records keep; without one by what the catalog knows of the names they tell."""
    own, shape = shape_facts(deployment.model), told.get("model_shape")
    if isinstance(shape, Mapping):
        other = {key: shape[key] for key, value in own.items() if shape.get(key, value) != value}
        if other:
            listed = ", ".join(f"{key} {value} for {own[key]}" for key, value in other.items())
            yield f"it is of the model {told.get('model')}, and the deployment's is {deployment.model.name}: {listed}"
        return
    for name in _names(told.get("model"), facts.get("model"), facts.get("model_id")):
        model = catalog.served_model(name)
        if model is not None and shape_facts(model) != own:
            yield f"it is of the model {name}, and the deployment's is {deployment.model.name}"
            return


def _names(*values: Any) -> Iterator[str]:
    return (value for value in values if isinstance(value, str) and value)
