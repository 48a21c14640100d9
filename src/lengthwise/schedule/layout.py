"""Which layers lie on which GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Role = Literal["both", "encode", "decode"]


@dataclass(frozen=True)
class Stage:
    """A stage of a pipeline: ``tp`` GPUs that share ``layers`` layers; ``role`` is what they do."""

    tp: int
    layers: int
    role: Role


@dataclass(frozen=True)
class Layout:
    """All stages; RRA has one pipeline for both, WAA one that encodes and one that decodes."""

    stages: tuple[Stage, ...]

    @property
    def encode(self) -> tuple[Stage, ...]:
        """Stages that a prompt passes, in order."""
        return tuple(stage for stage in self.stages if stage.role != "decode")

    @property
    def decode(self) -> tuple[Stage, ...]:
        """Stages that an output token passes, in order."""
        return tuple(stage for stage in self.stages if stage.role != "encode")


def rra_layout(layers: int, gpus: int, tp: int = 1, tp_groups: int = 0) -> Layout:
    """One pipeline over all GPUs, groups of ``tp`` first, each GPU with an even share of the layers.

    Raises:
        InputError: The groups need more GPUs than there are, or a stage would have no layer.
    """
    return Layout(_pipeline(layers, gpus, tp, tp_groups, "both"))


def waa_layout(layers: int, gpus: int, encode_gpus: int, tp: int = 1, tp_groups: int = 0) -> Layout:
    """A pipeline over ``encode_gpus`` that encodes and one over the others that decodes, each with all layers.

    Groups are taken from the decoding GPUs first, as many as they hold, then from the encoding ones. An
    encoder-decoder's layers count once: its encoder lies on the encoding GPUs, its decoder on the others.

    Raises:
        InputError: A side is empty, the groups do not fit, or a stage would have no layer.
    """
    decode_gpus = gpus - encode_gpus
    if not 1 <= encode_gpus < gpus:
        raise InputError(
            f"WAA needs at least 1 GPU to encode and 1 to decode; {encode_gpus} of {gpus} GPUs encode. "
            "Use RRA, or more GPUs."
        )
    decoding = min(tp_groups, decode_gpus // tp)
    encoding = tp_groups - decoding
    return Layout(
        _pipeline(layers, encode_gpus, tp, encoding, "encode")
        + _pipeline(layers, decode_gpus, tp, decoding, "decode")
    )


def splits(gpus: int, tp: int, tp_groups: int) -> Ints:
    """How many of the GPUs may encode under WAA so that all groups fit, ascending; empty: no split holds them."""
    encode = np.arange(1, gpus)
    return np.asarray(encode[encode // tp + (gpus - encode) // tp >= tp_groups])


def compute_split(encode_s: Floats, decode_s: Floats, gpus: int, allowed: Ints) -> Ints:
    """[n] GPUs that encode so that computation is even (WAA-C): N C_E / (C_E + C_D), to the nearest allowed."""
    ideal = gpus * encode_s / (encode_s + decode_s)
    return np.asarray(allowed[np.abs(allowed[:, None] - ideal).argmin(axis=0)])


def memory_split(encode_bytes: Floats, decode_bytes: Floats, allowed: Ints) -> Ints:
    """[n] GPUs that encode so that the fullest GPU holds least (WAA-M).

    Args:
        encode_bytes: [allowed, n] what an encoding GPU would hold.
        decode_bytes: [allowed, n] what a decoding GPU would hold.
        allowed: How many GPUs may encode.
    """
    return np.asarray(allowed[np.maximum(encode_bytes, decode_bytes).argmin(axis=0)])


def _pipeline(layers: int, gpus: int, tp: int, tp_groups: int, role: Role) -> tuple[Stage, ...]:
    if not 0 <= tp_groups * tp <= gpus:
        raise InputError(f"{tp_groups} groups of {tp} GPUs must fit the {gpus} GPUs that {_does(role)}")
    degrees = [tp] * tp_groups + [1] * (gpus - tp_groups * tp)
    shares = _shares(layers, degrees)
    if min(shares) < 1:
        raise InputError(
            f"{layers} layers must reach {len(degrees)} stages; use fewer GPUs, or groups of more of them"
        )
    return tuple(Stage(degree, share, role) for degree, share in zip(degrees, shares, strict=True))


def _shares(layers: int, degrees: list[int]) -> list[int]:
    """Layers by GPUs, the largest remainders rounded up; of equal ones the first."""
    gpus = sum(degrees)
    even = [layers * degree // gpus for degree in degrees]
    remainders = [layers * degree % gpus for degree in degrees]
    order = sorted(range(len(degrees)), key=lambda stage: -remainders[stage])
    for stage in order[: layers - sum(even)]:
        even[stage] += 1
    return even


def _does(role: Role) -> str:
    return "encode and decode" if role == "both" else role


__all__ = ["Layout", "Role", "Stage", "compute_split", "memory_split", "rra_layout", "splits", "waa_layout"]
