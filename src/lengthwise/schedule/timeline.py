"""When each stage does what: the pipeline's recurrence over micro-batches, in max-plus form.

A micro-batch enters a stage once it has left the one before and the stage is free; its next iteration starts
once its last one has left the last stage. Stages serve in the order of iterations, and of micro-batches in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lengthwise import _jit
from lengthwise.schedule import _kernel
from lengthwise.schedule._kernel import DegreeTables
from lengthwise.schema.errors import InputError

Floats = npt.NDArray[np.float64]
Kind = Literal["encode", "decode"]


@dataclass(frozen=True)
class Visit:
    """One micro-batch on one stage, from ``start_s`` to ``end_s``."""

    stage: int
    start_s: float
    end_s: float
    kind: Kind
    micro_batch: int


@dataclass(frozen=True)
class Round:
    """The steady state: seconds of a round, and from an encoding's start to the end of an iteration."""

    round_s: float
    latency_s: float


def steady_round(
    encode_s: npt.ArrayLike,
    decode_s: npt.ArrayLike,
    micro_batches: int,
    *,
    encoding: int | None = None,
    finish: int | None = None,
    count: npt.ArrayLike | None = None,
    scale: npt.ArrayLike | None = None,
) -> Round:
    """The steady round of one encoding and N_D decode iterations over the same stages.

    Args:
        encode_s: [stages] seconds of an encode visit.
        decode_s: [N_D, stages] seconds of a decode visit at each iteration.
        micro_batches: How many go round.
        encoding: How many of them have an encode visit; None: all.
        finish: Iteration of the latency, 0: the encoding; None: the last one.
        count: [stages] how many stages in a row each entry stands for.
        scale: [encoding] how many times ``encode_s`` each micro-batch takes; None: 1.

    Raises:
        InputError: The shapes do not go together.
    """
    visit_s = _checked(encode_s, decode_s)
    counts = np.ones(len(visit_s)) if count is None else np.array(count, dtype=np.float64)
    steps = visit_s.shape[1] - 1
    encodes = micro_batches if encoding is None else encoding
    at = steps if finish is None else finish
    if not (1 <= encodes <= micro_batches and 0 <= at <= steps and counts.shape == (len(visit_s),)):
        raise InputError(
            f"micro_batches ({micro_batches}) must be at least encoding ({encodes}), finish ({at}) from 0 to {steps}, "
            f"count of one entry a stage"
        )
    scales = np.ones(encodes) if scale is None else np.array(scale, dtype=np.float64)
    if scales.shape != (encodes,):
        raise InputError(f"scale must be one for each of the {encodes} that encode; its shape is {scales.shape}")
    scratch = workspace(micro_batches, len(visit_s))
    return Round(*_steady_round_kernel()(micro_batches, encodes, steps, at, counts, visit_s, scales, *scratch))


def workspace(micro_batches: int, groups: int) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Scratch of the recurrence: ready, first, last, started, before."""
    jobs = np.zeros(micro_batches)
    return (
        jobs,
        np.zeros(groups),
        np.zeros(groups),
        np.zeros(micro_batches),
        np.zeros((4, max(micro_batches, groups))),
    )


def decode_iteration_s(visit_s: npt.ArrayLike, micro_batches: int) -> float:
    """A decode iteration of equal micro-batches, steady: the slowest stage's visits, or one way through all."""
    seconds = np.asarray(visit_s, dtype=np.float64)
    return float(max(micro_batches * seconds.max(), seconds.sum()))


def round_visits(
    encode_s: npt.ArrayLike, decode_s: npt.ArrayLike, micro_batches: int, rounds: int, scale: npt.ArrayLike = ()
) -> list[Visit]:
    """Every visit of so many rounds of RRA, from an empty pipeline; arguments as of ``steady_round``.

    As many micro-batches encode as ``scale`` has entries; none: all of them.
    """
    visit_s = _checked(encode_s, decode_s)
    times = np.asarray(scale, dtype=np.float64)
    times = times if len(times) else np.ones(micro_batches)
    free_s, ready_s = [0.0] * len(visit_s), [0.0] * micro_batches
    visits: list[Visit] = []
    for _ in range(rounds):
        for job in range(len(times)):
            visits += _through(visit_s[:, 0] * times[job], free_s, ready_s, job, "encode")
        for column in range(1, visit_s.shape[1]):
            for job in range(micro_batches):
                visits += _through(visit_s[:, column], free_s, ready_s, job, "decode")
    return visits


def pipelined_visits(
    visit_s: npt.ArrayLike, period_s: float, micro_batches: int, turns: int, kind: Kind
) -> list[Visit]:
    """Visits of ``turns`` turns of a pipeline that starts one each ``period_s`` at the earliest (WAA).

    An encoding waits for no other but at the stages; a micro-batch's decode waits for its last one.
    """
    seconds = np.asarray(visit_s, dtype=np.float64)
    free_s, ready_s = [0.0] * len(seconds), [0.0] * micro_batches
    visits: list[Visit] = []
    for turn in range(turns):
        for job in range(micro_batches):
            from_s = ready_s[job] if kind == "decode" else 0.0
            ready_s[job] = max(from_s, turn * period_s)
            visits += _through(seconds, free_s, ready_s, job, kind)
    return visits


def _through(seconds: Floats, free_s: list[float], ready_s: list[float], job: int, kind: Kind) -> list[Visit]:
    """One micro-batch's visits of all stages; moves when it is ready and when they are free."""
    visits = []
    for stage, taken_s in enumerate(seconds.tolist()):
        start_s = max(ready_s[job], free_s[stage])
        free_s[stage] = ready_s[job] = start_s + taken_s
        visits.append(Visit(stage, start_s, start_s + taken_s, kind, job))
    return visits


def _checked(encode_s: npt.ArrayLike, decode_s: npt.ArrayLike) -> Floats:
    encode, decode = np.asarray(encode_s, dtype=np.float64), np.asarray(decode_s, dtype=np.float64)
    if encode.ndim != 1 or decode.ndim != 2 or decode.shape[1] != len(encode) or not decode.size:
        raise InputError(
            f"encode_s must be [stages] and decode_s [iterations, stages]; they are {encode.shape} and {decode.shape}"
        )
    return np.ascontiguousarray(np.vstack([encode[None], decode]).T)


@lru_cache(maxsize=1)
def _steady_round_kernel() -> Any:

    return compiled("steady_round")


_LINE, _GRID = np.zeros(1), np.zeros((1, 1))
_EXAMPLE = DegreeTables(_GRID, _LINE, _GRID, _LINE, _GRID, _GRID, _LINE, False, 64, 1.0, 0.0)
"""What the type of tables follows from."""


@lru_cache(maxsize=8)
def compiled(name: str) -> Any:
    """A function of ``_kernel``: "rra_rows", "waa_rows", "steady_round" or "visits"."""
    return _jit.compile_now(getattr(_kernel, name), _signature(name), cached=True)


def _signature(name: str) -> Any:
    t, f, i = _jit.type_of(_EXAMPLE), _jit.f8_1d, _jit.i8_1d
    grid, number, whole, flag = _jit.type_of(_GRID), _jit.f8, _jit.i8, _jit.type_of(False)
    scratch = (grid, f, f, f, f, f, grid)
    if name == "rra_rows":
        return whole(t, t, grid, f, f, i, i, i, i, i, grid, number, f, grid, *scratch, grid)
    if name == "waa_rows":
        sides = (grid, f, grid, f)
        return whole(t, t, *sides, f, i, f, whole, number, number, number, flag, number, f, f, grid, grid)
    if name == "steady_round":
        return _jit.type_of((0.0, 0.0))(whole, whole, whole, whole, f, *scratch)
    return whole(t, f, f, f, f, f, f, flag, number, f)
