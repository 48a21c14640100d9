"""Where kernels are built: whose operators, and where their tensors come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lengthwise.measure.operators._memory import Memory
from lengthwise.schema.model import ModelSpec


@dataclass(frozen=True)
class Site:
    """What all builders of kernels share.

    Attributes:
        memory: Where tensors come from.
        model: Whose operators.
        shard_bytes: By TP degree, the weights of a whole shard, which pass through the caches.
    """

    memory: Memory
    model: ModelSpec
    shard_bytes: Callable[[int], float]
