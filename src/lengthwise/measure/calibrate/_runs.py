"""A measured run as a calibration looks at it: requests to simulate, and what came of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.measure.calibrate.answer import METRICS
from lengthwise.metrics import request_column
from lengthwise.schema.errors import InputError
from lengthwise.schema.measured import Measured
from lengthwise.schema.records import RequestRecords, Status
from lengthwise.schema.workload import Workload

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
LEAST_TPOT_TOKENS = 8
BLOCKS = 12
"""Requests that follow each other wait for the same queue: they are independent by blocks of time at most."""


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        name: For tables.
        workload: What is simulated: every request that the engine worked on, with the lengths it had.
        seconds: [n] by metric, what was measured; NaN where it says nothing.
        fit: [n] requests whose times are fitted to.
        held: [n] requests whose times are held out.
        measured: The whole of it.
    """

    name: str
    workload: Workload
    seconds: dict[str, Floats]
    fit: Mask
    held: Mask
    measured: Measured


def run_of(measured: Measured, name: str, held: float | None) -> Run:
    """A run of which the last ``held`` of its requests are held out, or all of them (1.0), or none (0.0)."""
    r = measured.records.requests
    kept = np.flatnonzero((r.status != Status.REJECTED) & np.isfinite(r.arrival_s))
    if not len(kept):
        raise InputError(f"{name} must hold requests that an engine worked on; it holds none")
    if measured.workload.concurrency is None:
        kept = kept[np.argsort(r.arrival_s[kept], kind="stable")]
    late = np.zeros(len(kept), dtype=np.bool_)
    share = 0.0 if held is None else held
    late[len(kept) - round(share * len(kept)) :] = True
    return Run(
        name=name,
        workload=_workload(measured.workload, r, kept),
        seconds=seconds_of(r, kept),
        fit=~late,
        held=late,
        measured=measured,
    )


def seconds_of(requests: RequestRecords, rows: npt.NDArray[np.intp] | None = None) -> dict[str, Floats]:
    """[n] seconds by metric of finished requests, else NaN; times between tokens only of 8 tokens or more."""
    done = requests.status == Status.FINISHED
    told = {
        name: np.where(
            done & (requests.output_tokens >= (LEAST_TPOT_TOKENS if name == "tpot" else 1)), s, np.nan
        )
        for name, s in ((name, request_column(requests, f"{name}_s")) for name in METRICS)
    }
    return told if rows is None else {name: s[rows] for name, s in told.items()}


def _workload(asked: Workload, r: RequestRecords, kept: npt.NDArray[np.intp]) -> Workload:
    """The requests as they were: measured arrivals and lengths, in the order of arrival."""

    def rows(column: Any) -> Any:
        return None if column is None else column[kept]

    arrival_s = np.zeros(len(kept)) if asked.concurrency else r.arrival_s[kept] - r.arrival_s[kept].min()
    return replace(
        asked,
        arrival_s=arrival_s,
        prompt_tokens=np.maximum(1, r.prompt_tokens[kept]),
        output_tokens=np.maximum(1, r.output_tokens[kept]),
        predicted_tokens=rows(asked.predicted_tokens),
        predictions=None if asked.predictions is None else asked.predictions.take(kept.astype(np.int64)),
        priority=rows(asked.priority),
        tenant=rows(asked.tenant),
        extra={},
    )


def until_s(run: Run) -> float:
    """When the first held-out request was due, by the clock of the records; infinite where none is held out."""
    held = int(run.held.sum())
    r = run.measured.records.requests
    due_s = np.sort(r.arrival_s[(r.status != Status.REJECTED) & np.isfinite(r.arrival_s)])
    return float(due_s[len(due_s) - held]) if held else np.inf
