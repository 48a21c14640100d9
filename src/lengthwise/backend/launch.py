"""What one runs for real: a command, its environment, and what it does not do as simulated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lengthwise.schema.deployment import Deployment
from lengthwise.schema.errors import InputError, UnknownNameError

DEVICES = ("cuda", "cpu")
PLACEHOLDER = "$MODEL"
"""Stands in a command for a checkpoint that the catalog does not name."""


@dataclass(frozen=True)
class Launch:
    """A command line with what must be known of it.

    Attributes:
        command: The program and its arguments, unquoted.
        environment: Variables to set for it.
        notes: Where the real program differs from what was simulated, a sentence or two each.
    """

    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def replica_gpus(deployment: Deployment) -> int:
    """GPUs of one replica."""
    return deployment.parallel.tp * deployment.parallel.pp


def fits_node(deployment: Deployment) -> bool:
    """Whether one replica fits one node."""
    return replica_gpus(deployment) <= deployment.node.gpus


def visible_gpus(deployment: Deployment, replica: int) -> str:
    """The GPU indices of a replica on its node, comma-separated; a node is filled before the next."""
    gpus = min(replica_gpus(deployment), deployment.node.gpus)
    first = replica % (deployment.node.gpus // gpus) * gpus
    return ",".join(str(gpu) for gpu in range(first, first + gpus))


def environment_of(deployment: Deployment, device: str, replica: int) -> dict[str, str]:
    """Which devices the replica sees; checks both arguments.

    Raises:
        UnknownNameError: There is no such device.
        InputError: There is no such replica.
    """
    if device not in DEVICES:
        raise UnknownNameError("device", device, DEVICES)
    if not 0 <= replica < deployment.parallel.replicas:
        raise InputError(f"replica must be in 0..{deployment.parallel.replicas - 1}; it is {replica}")
    return {"CUDA_VISIBLE_DEVICES": visible_gpus(deployment, replica)} if device == "cuda" else {}


def policy_name(policy: Any) -> str:
    """A policy's name; one that is not built in says so, since no engine can know it."""
    if isinstance(policy, str):
        return policy
    return str(policy.name) if policy.builtin else f"{policy.name} (your own)"


def flags(pairs: dict[str, Any]) -> tuple[str, ...]:
    """Arguments from flags and values: True stands alone, None and False are left out."""
    shown = ((flag, value) for flag, value in pairs.items() if value is not None and value is not False)
    return tuple(word for flag, value in shown for word in ((flag,) if value is True else (flag, str(value))))
