"""What can be measured: operators with their shapes and ranges, and points of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lengthwise.schema.model import ModelSpec

ROWS, PREFILL, DECODE, MESSAGE = "rows", "prefill", "decode", "message"
"""Kinds of operators by what their seconds depend on: rows through it (tokens or sequences), (chunk, context),
(sequences, KV tokens), bytes of a message."""


@dataclass(frozen=True)
class Reach:
    """How far the points go.

    Attributes:
        tokens: Most tokens of a step.
        seqs: Most sequences of a step.
        context: Longest request.
        kv_tokens: Most cached tokens that one decode step reads.
    """

    tokens: int
    seqs: int
    context: int
    kv_tokens: int


@dataclass(frozen=True)
class Operator:
    """One operator on one device's shard.

    Attributes:
        name: Of schema.profile.OPERATOR_PARTS.
        kind: ROWS, PREFILL, DECODE or MESSAGE.
        tps: The TP degrees whose shards have these very shapes; it is measured once for all of them.
        largest: Of each coordinate; of decode attention also of one sequence's context.
        times: How often a step runs it.
        shape: Columns of the profile that describe it: n, k, heads...
    """

    name: str
    kind: str
    tps: tuple[int, ...]
    largest: tuple[int, ...]
    times: float = 1.0
    shape: Mapping[str, int] = field(default_factory=dict, hash=False)

    @property
    def key(self) -> str:
        """Its name in a file of points: unique within a measurement."""
        gpus = self.shape.get("gpus", 0)
        return f"{self.name} over {gpus}" if gpus else f"{self.name} @ tp {self.tps[0]}"

    def work(self, at: tuple[int, ...]) -> float:
        """What its seconds at most grow with, in no unit: to tell a large point from a small one."""
        if self.kind == PREFILL:
            return at[0] * (at[1] + at[0]) + 64.0 * at[0]
        return float(at[1] + 16 * at[0]) if self.kind == DECODE else float(at[0])


@dataclass(frozen=True)
class Point:
    """One place at which an operator is measured; ``skew`` is the longest over the mean context."""

    operator: Operator
    at: tuple[int, ...]
    skew: int = 1

    @property
    def key(self) -> tuple[str, tuple[int, ...], int]:
        """Unique within a measurement."""
        return self.operator.key, self.at, self.skew

    @property
    def work(self) -> float:
        """See Operator.work."""
        return self.operator.work(self.at)


class SkippedError(Exception):
    """A point cannot be measured on this device; the rest can."""


class NoRoomError(SkippedError):
    """The device has no memory for a point."""


class LostError(Exception):
    """The device answers nothing any more until this process ends; ``outcomes`` were measured before."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.outcomes: list[Any] = []


def unmeasured(model: ModelSpec) -> tuple[str, ...]:
    """What of a model's step no operator of ours covers, a sentence each."""
    notes = []
    if model.encoder_layers:
        notes.append(
            "cross-attention and its projections were not measured, nor what an encoder is deeper than the "
            "decoder: fill them from the roofline"
        )
    if model.attention.is_mla:
        notes.append(
            "expanding the latents of a prompt's cached context was not measured: see kv up-projection"
        )
    return tuple(notes)
