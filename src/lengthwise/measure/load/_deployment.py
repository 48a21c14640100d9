"""What is said to be behind an address, held against what the server says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from lengthwise import catalog
from lengthwise.schema.measured import Measured, shape_facts


def of_deployment(measured: Measured, deployment: Mapping[str, Any]) -> Measured:
    """The run with what is behind the server, doubted where the server itself says otherwise."""
    found = tuple(_doubts(measured.facts, deployment))
    facts = {**measured.facts, "deployment": dict(deployment)}
    return replace(measured, facts=facts, doubts=(*found, *measured.doubts))


def _doubts(facts: Mapping[str, Any], deployment: Mapping[str, Any]) -> Iterator[str]:
    served = catalog.served_model(str(facts["model"]))
    shape = deployment.get("model_shape")
    if served is not None and shape is not None and shape_facts(served) != dict(shape):
        yield (
            f"the server says that it serves {facts['model']}, which is of another shape than the deployment's "
            f"{deployment.get('model')}"
        )
    longest, own = facts["abilities"]["max_model_len"], deployment.get("max_model_len")
    if longest is not None and own is not None and longest != own:
        yield (
            f"the server takes {longest:,} tokens a request (max_model_len), and the deployment is said to take "
            f"{own:,}"
        )
