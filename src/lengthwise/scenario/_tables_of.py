"""Cost tables from a file, and whether they are of what a scenario runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lengthwise import cost
from lengthwise.scenario._places import resolved
from lengthwise.scenario.scenario import Scenario
from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError
from lengthwise.search import Space

TABLES = "tables:"
_KEYS = ("model", "gpu", "node", "tp", "weight_dtype", "kv_dtype")
"""Settings of a deployment on which seconds hang; of stages the files themselves tell."""


def require_own(scenario: Scenario, deployed: Deployment) -> None:
    """Nothing, if the scenario's file of tables is of what is deployed, does not tell, or there is none.

    Raises:
        ProfileError: The tables are of another model, GPU, degree or data type.
    """
    if (path := _path(scenario)) is not None:
        cost.require_made_for(path, cost.MadeFor.of_deployment(deployed))


def untold_note(scenario: Scenario) -> str:
    """That nothing tells what the scenario's file of tables is of; empty where it tells, or there is none."""
    path, on = _path(scenario), scenario.deployment
    if path is None or cost.made_for(path) is not None:
        return ""
    return (
        f"What the cost tables in {path} are of is not kept in them (older files do not tell): that they are of "
        f"{on.model} on {on.gpu} with tp {on.tp} is taken on trust. Calibrate or fit them again to have it checked."
    )


def require_one_each(scenario: Scenario, space: Space) -> None:
    """Nothing, if no file of tables stands for several models, GPUs, degrees or data types of a search's space.

    Raises:
        InputError: One does, and would make them all alike.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for axes in space.alternatives():
        for source in _values("cost", scenario, axes):
            if not str(source).startswith(TABLES):
                continue
            for key in _KEYS:
                values = found.setdefault(source, {}).setdefault(key, {})
                values.update({str(value): value for value in _values(key, scenario, axes)})
    for source, keys in found.items():
        several = [f"{key} {', '.join(values)}" for key, values in keys.items() if len(values) > 1]
        if several:
            raise InputError(
                f"a search with cost {source!r} must be of what the tables were made for: one model on one GPU at one "
                f"tensor-parallel degree; its space has {'; '.join(several)}, which the tables would make all alike. "
                "Give a source that tells them apart (roofline, profile:FILE), or a file for each in [[search.either]]"
            )


def _values(key: str, scenario: Scenario, axes: Mapping[str, Sequence[Any]]) -> Iterator[Any]:
    yield from axes.get(f"deployment.{key}", (getattr(scenario.deployment, key),))


def _path(scenario: Scenario) -> str | None:
    source = scenario.deployment.cost
    if not source.startswith(TABLES):
        return None
    return str(resolved(source.removeprefix(TABLES), scenario.folder))
