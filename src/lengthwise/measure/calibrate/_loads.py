"""Running and waiting requests over time: the engine's own counters against the simulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.measure.calibrate._runs import Run
from lengthwise.measure.calibrate.answer import Load
from lengthwise.schema.cost_tables import Front
from lengthwise.schema.records import Records

Floats = npt.NDArray[np.float64]
COUNTERS = {"running": "num_requests_running", "waiting": "num_requests_waiting"}
CLOCKS = ("at_s", "time_s", "t_s")
BINS = 20


@dataclass(frozen=True)
class Told:
    """A simulation, and the front of its tables: an engine counts who is past it."""

    records: Records
    front: Front


def loads_of(run: Run, before: Told, after: Told) -> list[Load]:
    """The counters that the run's facts hold under "metrics", a column a metric over time; else nothing."""
    metrics = run.measured.facts.get("metrics")
    if not isinstance(metrics, Mapping):
        return []
    clock = next((metrics[name] for name in CLOCKS if name in metrics), None)
    if clock is None or len(clock) < 2:
        return []
    at_s = np.asarray(clock, dtype=np.float64)
    found = ((name, _column(metrics, counter)) for name, counter in COUNTERS.items())
    return [_load(run, name, at_s, told, before, after) for name, told in found if told is not None]


def _column(metrics: Mapping[str, Any], counter: str) -> Floats | None:
    """The counter's values, summed over engines and models that are told apart by labels."""
    columns = [values for name, values in metrics.items() if counter in name and "by_reason" not in name]
    return None if not columns else np.sum([np.asarray(c, dtype=np.float64) for c in columns], axis=0)


def _load(run: Run, name: str, at_s: Floats, told: Floats, before: Told, after: Told) -> Load:
    start_s = float(np.nanmin(run.measured.records.requests.arrival_s))
    seen = (
        np.isfinite(told)
        & (at_s >= start_s)
        & (at_s - start_s <= max(before.records.end_s, after.records.end_s))
    )
    at_s, told = at_s[seen] - start_s, told[seen]
    ours, old = (_count(name, simulated, at_s) for simulated in (after, before))
    parts = np.array_split(np.arange(len(at_s)), min(BINS, len(at_s)))
    mean = max(1e-9, float(told.mean())) if len(told) else 1.0
    return Load(
        run=run.name,
        name=name,
        at_s=tuple(float(at_s[p].mean()) for p in parts),
        measured=tuple(float(told[p].mean()) for p in parts),
        simulated=tuple(float(ours[p].mean()) for p in parts),
        before=float(np.abs(old - told).mean() / mean) if len(told) else 0.0,
        after=float(np.abs(ours - told).mean() / mean) if len(told) else 0.0,
    )


def _count(name: str, simulated: Told, at_s: Floats) -> Floats:
    """How many wait (from their entry to the first step) or run (from there to the end) at some times."""
    r = simulated.records.requests
    entry_s = simulated.front.entries_s(r.arrival_s)
    first, last = (r.scheduled_s, r.finished_s) if name == "running" else (entry_s, r.scheduled_s)
    began = np.searchsorted(np.sort(first), at_s, side="right")
    ended = np.searchsorted(np.sort(last), at_s, side="right")
    return np.asarray(began - ended, dtype=np.float64)
