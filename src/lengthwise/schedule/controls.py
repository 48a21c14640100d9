"""What of a schedule is chosen, on which GPUs, and what an estimate takes for granted."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Literal

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError
from lengthwise.schema.specs import GpuSpec, NodeSpec

Ints = npt.NDArray[np.int64]


class Strategy(StrEnum):
    """How encoding and decoding share the GPUs (ExeGPT, section 4.1).

    ``RRA``: every GPU does both, in phases. ``WAA_C``, ``WAA_M``: some only encode, the others only decode,
    split so that computation (C) or memory (M) is even.
    """

    RRA = "rra"
    WAA_C = "waa-c"
    WAA_M = "waa-m"


CODES = tuple(Strategy)
"""A strategy's number in a column is its place here."""


@dataclass(frozen=True)
class Controls:
    """A schedule's control variables.

    Attributes:
        strategy: How encoding and decoding share the GPUs.
        encode_batch: New requests of one encoding, B_E.
        decode_steps: Decode iterations between two encoding phases, N_D; 1 for WAA.
        micro_batches: Parts of a batch that are in the pipeline at a time. None: RRA as many as stages, WAA 1.
            Never more than there are sequences.
        tp: Tensor-parallel degree of the groups.
        tp_groups: Groups of ``tp`` GPUs that are one stage each; every other GPU is a stage of its own.
    """

    strategy: Strategy
    encode_batch: int
    decode_steps: int = 1
    micro_batches: int | None = None
    tp: int = 1
    tp_groups: int = 0

    def __post_init__(self) -> None:
        columns([self])


@dataclass(frozen=True)
class Cluster:
    """``gpus`` GPUs of one kind in nodes of one kind, and how fast they load weights (None: as in ``redeploy``).

    Attributes:
        gpu: The kind.
        node: Likewise.
        gpus: In all.
        gpu_memory_utilization: Share of a GPU's memory that is used.
        dram_bytes_per_s: From host memory to each GPU.
        ssd_bytes_per_s: From the drives of each node.
    """

    gpu: GpuSpec
    node: NodeSpec
    gpus: int
    gpu_memory_utilization: float = 0.9
    dram_bytes_per_s: float | None = None
    ssd_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise InputError(f"a cluster must have at least 1 GPU; it has {self.gpus}")
        for name in ("dram_bytes_per_s", "ssd_bytes_per_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"{name} must be above 0 and finite; it is {value}")


@dataclass(frozen=True, eq=False)
class ControlColumns:
    """Many schedules, a row each; ``strategy`` counts in ``CODES``, ``micro_batches`` 0 is Controls' None."""

    strategy: Ints
    encode_batch: Ints
    decode_steps: Ints
    micro_batches: Ints
    tp: Ints
    tp_groups: Ints

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, np.ascontiguousarray(getattr(self, field.name), np.int64))
        self._check()

    def __len__(self) -> int:
        return len(self.strategy)

    def _check(self) -> None:
        lengths = {field.name: getattr(self, field.name).shape for field in fields(self)}
        if self.strategy.ndim != 1 or len(set(lengths.values())) > 1:
            raise InputError(f"the controls must be columns of one length; their shapes are {lengths}")
        least = {"encode_batch": 1, "decode_steps": 1, "micro_batches": 0, "tp": 1, "tp_groups": 0}
        for name, smallest in least.items():
            _require(getattr(self, name) >= smallest, getattr(self, name), f"{name} must be at least {smallest}")
        known = (self.strategy >= 0) & (self.strategy < len(CODES))
        _require(known, self.strategy, f"strategy must be from 0 to {len(CODES) - 1}")
        waa = self.strategy != CODES.index(Strategy.RRA)
        _require(~waa | (self.decode_steps == 1), self.decode_steps, "decode_steps of WAA must be 1")

    def row(self, index: int) -> Controls:
        """One of the schedules."""
        chosen = {field.name: int(getattr(self, field.name)[index]) for field in fields(self)}
        chosen["micro_batches"] = chosen["micro_batches"] or None  # type: ignore[assignment]
        return Controls(strategy=CODES[chosen.pop("strategy")], **chosen)


def columns(controls: Iterable[Controls]) -> ControlColumns:
    """Schedules as columns.

    Raises:
        InputError: A control is out of its range.
    """
    rows = [(CODES.index(c.strategy), c.encode_batch, c.decode_steps, _given(c), c.tp, c.tp_groups) for c in controls]
    return ControlColumns(*np.array(rows, dtype=np.int64).reshape(len(rows), 6).T)


@dataclass(frozen=True)
class Assumptions:
    """What an estimate takes for granted.

    Attributes:
        paper_completions: Who completes in an RRA phase as ExeGPT writes it: B_D E[1 / ceil(S / N_D)]. Else as
            renewal theory has it: B_D / E[ceil(S / N_D)], which is less (Jensen).
        from_encode: Output tokens that come from the encoding: 1 as in our engine, 0 as the paper counts.
        lockstep: WAA decodes once for each encoding, and waits for it. Else decoding is not held up by slower
            encoding; it then works on the smaller batch that is there (Little's law).
        level: Quantile of the output length whose latency is asked for, and of the range of stage times.
        threshold: Share of the mean that dynamic adjustment lets a batch's work deviate; None: none.
        output_tokens: An output of fixed length whose latency is asked for instead of the quantile's (the paper's
            SLA (b)); ranges stay those of the level.
    """

    paper_completions: bool = False
    from_encode: int = 1
    lockstep: bool = False
    level: float = 0.99
    threshold: float | None = None
    output_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.from_encode not in (0, 1):
            raise InputError(f"from_encode must be 0 or 1; it is {self.from_encode}")
        if not 0.5 <= self.level < 1:
            raise InputError(f"level must be at least 0.5 and below 1; it is {self.level}")
        if self.threshold is not None and not self.threshold >= 0:
            raise InputError(f"threshold must be at least 0; it is {self.threshold}")
        if self.output_tokens is not None and self.output_tokens < 1:
            raise InputError(f"output_tokens must be at least 1; it is {self.output_tokens}")


def _given(controls: Controls) -> int:
    if controls.micro_batches is None:
        return 0
    if controls.micro_batches < 1:
        raise InputError(f"micro_batches must be at least 1; it is {controls.micro_batches}")
    return controls.micro_batches


def _require(good: npt.NDArray[np.bool_], values: Ints, message: str) -> None:
    if not good.all():
        raise InputError(f"{message}; one is {values[np.argmin(good)]}")


Floats = npt.NDArray[np.float64]
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
        _pipeline(layers, encode_gpus, tp, encoding, "encode") + _pipeline(layers, decode_gpus, tp, decoding, "decode")
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
        raise InputError(f"{layers} layers must reach {len(degrees)} stages; use fewer GPUs, or groups of more of them")
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
