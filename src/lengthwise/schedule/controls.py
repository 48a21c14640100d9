"""Control variables of a schedule, its cluster, its layout on the GPUs, and the assumptions of an estimate.

Symbols are those of ExeGPT (Oh et al., ASPLOS 2024): B_E new requests per prefill (ExeGPT: encoding), N_D decode
iterations between two prefills, B_D sequences in a decode batch, B_m micro-batches in the pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Literal

import numpy as np

from lengthwise.schema.errors import InputError
from lengthwise.schema.specs import GpuSpec, NodeSpec
from lengthwise.schema.workload import Floats, Ints

Role = Literal["both", "prefill", "decode"]


class Strategy(StrEnum):
    """How prefill and decode are allocated to the GPUs (ExeGPT, section 4.1).

    ``RRA`` (round-robin): every GPU does both, in phases. ``WAA_C`` and ``WAA_M`` (workload-aware): some GPUs only
    prefill and the others only decode, divided so that computation (C) or memory (M) is balanced.
    """

    RRA = "rra"
    WAA_C = "waa-c"
    WAA_M = "waa-m"


CODES = tuple(Strategy)  # the index of a strategy in this tuple is its code in a column


@dataclass(frozen=True)
class Controls:
    """Control variables of one schedule.

    ``prefill_batch`` is B_E and ``decode_steps`` is N_D, which must be 1 for WAA. ``micro_batches`` is B_m, never more
    than the sequences of a batch. If it is None, B_m is the number of stages for RRA and 1 for WAA. ``tp_groups``
    groups of ``tp`` GPUs form one stage each; every other GPU is a stage of its own.
    """

    strategy: Strategy
    prefill_batch: int
    decode_steps: int = 1
    micro_batches: int | None = None
    tp: int = 1
    tp_groups: int = 0

    def __post_init__(self) -> None:
        columns([self])


@dataclass(frozen=True)
class Cluster:
    """A number of GPUs of one kind, in nodes of one kind.

    Weights are loaded at ``dram_bytes_per_s`` from host memory to each GPU, and at ``ssd_bytes_per_s`` from the drives
    of each node. If a rate is None, ``redeployment`` uses a default.
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
    """Control variables of many schedules, one row each.

    ``strategy`` is an index into ``CODES``. A ``micro_batches`` of 0 stands for None in ``Controls``.
    """

    strategy: Ints
    prefill_batch: Ints
    decode_steps: Ints
    micro_batches: Ints
    tp: Ints
    tp_groups: Ints

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, np.ascontiguousarray(getattr(self, field.name), np.int64))
        shapes = {field.name: getattr(self, field.name).shape for field in fields(self)}
        if self.strategy.ndim != 1 or len(set(shapes.values())) > 1:
            raise InputError(f"the controls must be columns of one length; their shapes are {shapes}")
        minimums = {"prefill_batch": 1, "decode_steps": 1, "micro_batches": 0, "tp": 1, "tp_groups": 0}
        checks = [(name, getattr(self, name) >= low, f"must be at least {low}") for name, low in minimums.items()]
        known = (self.strategy >= 0) & (self.strategy < len(CODES))
        checks.append(("strategy", known, f"must be from 0 to {len(CODES) - 1}"))
        rra = self.strategy == CODES.index(Strategy.RRA)
        checks.append(("decode_steps", rra | (self.decode_steps == 1), "of WAA must be 1"))
        for name, valid, requirement in checks:
            if not valid.all():
                raise InputError(f"{name} {requirement}; one is {getattr(self, name)[np.argmin(valid)]}")

    def __len__(self) -> int:
        return len(self.strategy)

    def row(self, index: int) -> Controls:
        """Return the control variables of one schedule."""
        code, batch, steps, micro_batches, tp, groups = (
            int(getattr(self, field.name)[index]) for field in fields(self)
        )
        return Controls(CODES[code], batch, steps, micro_batches or None, tp, groups)


def columns(controls: Iterable[Controls]) -> ControlColumns:
    """Return the control variables of schedules as columns. Raises InputError if a variable is out of its range."""
    rows = []
    for c in controls:
        if c.micro_batches is not None and c.micro_batches < 1:
            raise InputError(f"micro_batches must be at least 1; it is {c.micro_batches}")
        rows.append((CODES.index(c.strategy), c.prefill_batch, c.decode_steps, c.micro_batches or 0, c.tp, c.tp_groups))
    return ControlColumns(*np.array(rows, dtype=np.int64).reshape(len(rows), 6).T)


@dataclass(frozen=True)
class Assumptions:
    """Assumptions of an estimate."""

    # Whether B_D E[1 / ceil(S / N_D)] requests complete in an RRA phase, as ExeGPT writes, where S is the output
    # length. If not, B_D / E[ceil(S / N_D)] complete (renewal theory), which is at most as many (Jensen's inequality).
    paper_completions: bool = False
    prefill_output_tokens: int = 1  # tokens that the prefill produces: 1 as in engines, 0 as the paper counts
    # Whether each decode iteration of WAA waits for a prefill. If not, decoding does not wait for a slower prefill and
    # has a smaller batch (Little's law).
    lockstep: bool = False
    # quantile of a batch's work for ``latency_high_s``, ``prefill_range``, ``decode_range`` and memory needs
    level: float = 0.99
    # Relative deviation of a prefill batch's tokens from their target within which dynamic adjustment keeps it, by more
    # or fewer prompts. None means no adjustment.
    threshold: float | None = None
    # Output length of the requests whose latency the bound limits (the paper's SLA (b)). If None, the ``level``
    # quantile of the output length.
    output_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.prefill_output_tokens not in (0, 1):
            raise InputError(f"prefill_output_tokens must be 0 or 1; it is {self.prefill_output_tokens}")
        if not 0.5 <= self.level < 1:
            raise InputError(f"level must be at least 0.5 and below 1; it is {self.level}")
        if self.threshold is not None and not self.threshold >= 0:
            raise InputError(f"threshold must be at least 0; it is {self.threshold}")
        if self.output_tokens is not None and self.output_tokens < 1:
            raise InputError(f"output_tokens must be at least 1; it is {self.output_tokens}")


@dataclass(frozen=True)
class Stage:
    """A pipeline stage of ``tp`` GPUs, which share ``layers`` layers and prefill, decode or do both."""

    tp: int
    layers: int
    role: Role


@dataclass(frozen=True)
class Layout:
    """All stages: one pipeline for RRA, a prefill pipeline and a decode pipeline for WAA."""

    stages: tuple[Stage, ...]

    @property
    def prefill(self) -> tuple[Stage, ...]:
        """Return the stages that a prompt passes, in order."""
        return tuple(stage for stage in self.stages if stage.role != "decode")

    @property
    def decode(self) -> tuple[Stage, ...]:
        """Return the stages that an output token passes, in order."""
        return tuple(stage for stage in self.stages if stage.role != "prefill")


def rra_layout(layers: int, gpus: int, tp: int = 1, tp_groups: int = 0) -> Layout:
    """Return one pipeline over all GPUs with equal shares of the layers. Groups of ``tp`` GPUs are the first stages.

    Raises InputError if the groups need more than all GPUs, or a stage would have no layer.
    """
    return Layout(_pipeline(layers, gpus, tp, tp_groups, "both"))


def waa_layout(layers: int, gpus: int, prefill_gpus: int, tp: int = 1, tp_groups: int = 0) -> Layout:
    """Return a prefill pipeline over ``prefill_gpus`` GPUs and a decode pipeline over the others, each with all layers.

    As many groups as possible consist of decode GPUs, and the others of prefill GPUs. A layer of an
    encoder-decoder counts once: its encoder is on the prefill GPUs and its decoder on the others. Raises InputError as
    ``rra_layout`` does, or if a pipeline has no GPU.
    """
    if not 1 <= prefill_gpus < gpus:
        raise InputError(
            f"WAA needs at least 1 GPU to prefill and 1 to decode; {prefill_gpus} of {gpus} GPUs prefill. "
            "Use RRA, or more GPUs."
        )
    decode_groups = min(tp_groups, (gpus - prefill_gpus) // tp)
    prefill = _pipeline(layers, prefill_gpus, tp, tp_groups - decode_groups, "prefill")
    return Layout(prefill + _pipeline(layers, gpus - prefill_gpus, tp, decode_groups, "decode"))


def splits(gpus: int, tp: int, tp_groups: int) -> Ints:
    """Return, ascending, the numbers of prefill GPUs under WAA that leave room for all groups. There may be none."""
    prefill = np.arange(1, gpus)
    return np.asarray(prefill[prefill // tp + (gpus - prefill) // tp >= tp_groups])


def compute_split(prefill_s: Floats, decode_s: Floats, gpus: int, allowed: Ints) -> Ints:
    """Return [n] numbers of prefill GPUs that balance the computation of both sides (WAA-C).

    Each is the allowed number nearest to N C_E / (C_E + C_D). ``prefill_s`` is C_E and ``decode_s`` is C_D, in seconds
    on one GPU; ``gpus`` is N.
    """
    ideal = gpus * prefill_s / (prefill_s + decode_s)
    return np.asarray(allowed[np.abs(allowed[:, None] - ideal).argmin(axis=0)])


def memory_split(prefill_bytes: Floats, decode_bytes: Floats, allowed: Ints) -> Ints:
    """Return [n] numbers of prefill GPUs that minimize the memory of the fullest GPU (WAA-M).

    ``allowed`` are the possible numbers. ``prefill_bytes`` and ``decode_bytes`` [allowed, n] are the memory that a
    prefill GPU and a decode GPU need with each number.
    """
    return np.asarray(allowed[np.maximum(prefill_bytes, decode_bytes).argmin(axis=0)])


def _pipeline(layers: int, gpus: int, tp: int, tp_groups: int, role: Role) -> tuple[Stage, ...]:
    if not 0 <= tp_groups * tp <= gpus:
        verb = "prefill and decode" if role == "both" else role
        raise InputError(f"{tp_groups} groups of {tp} GPUs must fit the {gpus} GPUs that {verb}")
    degrees = [tp] * tp_groups + [1] * (gpus - tp_groups * tp)
    shares = [layers * degree // gpus for degree in degrees]
    # Largest remainders are rounded up; the sort is stable, so that of equal ones the first stages get the layer.
    order = sorted(range(len(degrees)), key=lambda stage: -(layers * degrees[stage] % gpus))
    for stage in order[: layers - sum(shares)]:
        shares[stage] += 1
    if min(shares) < 1:
        raise InputError(f"{layers} layers must reach {len(degrees)} stages; use fewer GPUs, or groups of more of them")
    return tuple(Stage(degree, share, role) for degree, share in zip(degrees, shares, strict=True))
