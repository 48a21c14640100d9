"""How near a GPU is to those that the roofline was fitted on, and what that does to its errors.

Three cases. A GPU whose kernels were measured has its own errors. Another one of the catalog has those of the
measured ones times CARRIED: what physics that was learnt on one GPU loses on another. Hardware that a user
describes (a new accelerator, a CPU) may be of a kind that nobody measured: its steps may all be off together, by a
factor of 3 within 90 %. That is an assumption, not a measurement.
"""

from __future__ import annotations

import math

from lengthwise import catalog
from lengthwise.schema.cost_tables import PartError
from lengthwise.schema.hardware import GpuSpec

MEASURED = ("A100", "H100", "H200", "B200", "A40")
"""Families with kernels in the roofline's fits."""

CARRIED = 2.3
"""Errors of physics on another GPU over those where it was learnt, 75th percentile (``estimators``' FAR_FACTORS)."""

UNKNOWN_STEP_LOG_SD = round(math.log(3) / 1.645, 3)


def family(gpu: GpuSpec) -> str:
    """The name under which the fits have it."""
    return gpu.name.partition("-")[0]


def is_described(gpu: GpuSpec) -> bool:
    """Whether the user describes it: it is not of the catalog, nor of a family that was measured."""
    return family(gpu) not in MEASURED and gpu.name not in catalog.gpus()


def factor(gpu: GpuSpec) -> float:
    """By what errors of parts are wider than those of measured GPUs."""
    return 1.0 if family(gpu) in MEASURED else CARRIED


def whole_steps(gpu: GpuSpec) -> tuple[PartError, ...]:
    """The error that all parts of a step share; none for hardware of the catalog."""
    return (PartError("step", UNKNOWN_STEP_LOG_SD),) if is_described(gpu) else ()


def roofline_note(gpu: GpuSpec) -> str:
    """What a reader of the roofline's numbers must know of the hardware; empty where its kernels were measured."""
    if family(gpu) in MEASURED:
        return ""
    ways = "bench a server and calibrate, or profile its operators, to narrow the intervals"
    if is_described(gpu):
        return (
            f"Nothing was measured on {gpu.name}, which its description alone tells: the intervals in brackets allow "
            f"for steps of a third to three times their time, an assumption; {ways}."
        )
    return (
        f"No kernels were measured on {gpu.name}: the roofline is carried over from other GPUs, and its errors are "
        f"taken for {CARRIED:g} times those there; {ways}."
    )
