"""Timelines of a pipeline: the max-plus recurrence over micro-batches.

A micro-batch enters a stage once it has left the stage before and the stage is free; its next iteration starts once
its last one has left the last stage. Stages serve iterations in order, and micro-batches in order within them.
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
from lengthwise.schema.workload import Floats

Kind = Literal["encode", "decode"]


@dataclass(frozen=True)
class Visit:
    """One micro-batch on one stage, from ``start_s`` to ``end_s``."""

    stage: int
    start_s: float
    end_s: float
    kind: Kind
    micro_batch: int


def workspace(micro_batches: int, groups: int) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Return scratch arrays of the recurrence: ready, first, last, started, before."""
    before = np.zeros((4, max(micro_batches, groups)))
    return np.zeros(micro_batches), np.zeros(groups), np.zeros(groups), np.zeros(micro_batches), before


def round_visits(
    encode_s: npt.ArrayLike, decode_s: npt.ArrayLike, micro_batches: int, rounds: int, scale: npt.ArrayLike = ()
) -> list[Visit]:
    """Return every visit of ``rounds`` rounds of RRA, from an empty pipeline.

    Args:
        encode_s: [stages] seconds of an encode visit.
        decode_s: [N_D, stages] seconds of a decode visit at each iteration.
        micro_batches: Micro-batches in the pipeline.
        rounds: Encodings, each with N_D decode iterations.
        scale: Factor on ``encode_s`` of each micro-batch that encodes; empty: all encode, at a factor of 1.
    """
    encode, decodes = np.asarray(encode_s, dtype=np.float64), np.asarray(decode_s, dtype=np.float64)
    scales = np.asarray(scale, dtype=np.float64)
    scales = scales if len(scales) else np.ones(micro_batches)
    free_s, ready_s = [0.0] * len(encode), [0.0] * micro_batches
    visits: list[Visit] = []
    for _ in range(rounds):
        for job in range(len(scales)):
            visits += _pass_stages(encode * scales[job], free_s, ready_s, job, "encode")
        for visit_s in decodes:
            for job in range(micro_batches):
                visits += _pass_stages(visit_s, free_s, ready_s, job, "decode")
    return visits


def pipelined_visits(
    visit_s: npt.ArrayLike, period_s: float, micro_batches: int, turns: int, kind: Kind
) -> list[Visit]:
    """Return visits of ``turns`` turns of a pipeline that starts one at most every ``period_s`` (WAA).

    Encodings wait for each other only at the stages; a micro-batch's decode waits for its previous one.
    """
    seconds = np.asarray(visit_s, dtype=np.float64)
    free_s, ready_s = [0.0] * len(seconds), [0.0] * micro_batches
    visits: list[Visit] = []
    for turn in range(turns):
        for job in range(micro_batches):
            ready_s[job] = max(ready_s[job] if kind == "decode" else 0.0, turn * period_s)
            visits += _pass_stages(seconds, free_s, ready_s, job, kind)
    return visits


def _pass_stages(seconds: Floats, free_s: list[float], ready_s: list[float], job: int, kind: Kind) -> list[Visit]:
    """Return one micro-batch's visits of all stages; updates ``ready_s`` of the job and ``free_s`` of the stages."""
    visits = []
    for stage, visit_s in enumerate(seconds.tolist()):
        start_s = max(ready_s[job], free_s[stage])
        free_s[stage] = ready_s[job] = start_s + visit_s
        visits.append(Visit(stage, start_s, start_s + visit_s, kind, job))
    return visits


@lru_cache(maxsize=8)
def compiled(name: str) -> Any:
    """Return a compiled function of ``_kernel``: "rra_rows", "waa_rows", "steady_round" or "visits"."""
    line, grid_example = np.zeros(1), np.zeros((1, 1))
    example = DegreeTables(
        grid_example, line, grid_example, line, grid_example, grid_example, line, False, 64, 1.0, 0.0
    )
    tables, grid = _jit.type_of(example), _jit.type_of(grid_example)
    floats, ints, number, integer, flag = _jit.f8_1d, _jit.i8_1d, _jit.f8, _jit.i8, _jit.type_of(False)
    scratch = (grid, floats, floats, floats, floats, floats, grid)
    side = (grid, floats)
    signatures = {
        "rra_rows": lambda: integer(
            tables, tables, *side, floats, *[ints] * 5, grid, number, floats, grid, *scratch, grid
        ),
        "waa_rows": lambda: integer(
            tables, tables, *side, *side, floats, ints, floats, integer,
            number, number, number, flag, number, floats, floats, grid, grid,
        ),
        "steady_round": lambda: _jit.type_of((0.0, 0.0))(*[integer] * 4, floats, *scratch),
        "visits": lambda: integer(tables, *[floats] * 6, flag, number, floats),
    }  # fmt: skip
    return _jit.compile_now(getattr(_kernel, name), signatures[name](), cached=True)
