"""What of a schedule is chosen, on which GPUs, and what an estimate takes for granted."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError
from lengthwise.schema.hardware import GpuSpec, NodeSpec

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
            _require(
                getattr(self, name) >= smallest, getattr(self, name), f"{name} must be at least {smallest}"
            )
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
    rows = [
        (CODES.index(c.strategy), c.encode_batch, c.decode_steps, _given(c), c.tp, c.tp_groups)
        for c in controls
    ]
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


__all__ = ["CODES", "Assumptions", "Cluster", "ControlColumns", "Controls", "Strategy", "columns"]
