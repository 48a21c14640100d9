"""Calibrations of runs whose truth is known: how often an interval holds it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from _clusters import exact_interval

from lengthwise.engine import deploy, simulate
from lengthwise.measure.calibration import Calibration, calibrate
from lengthwise.measure.calibration.parameters import apply
from lengthwise.measure.calibration.result import Parameter
from lengthwise.schema.deployment import Deployment, EngineLimits
from lengthwise.schema.records import Measured
from lengthwise.schema.workload import Workload

PLANTED = {"work": 1.3, "host_step": 2e-3, "host_sequence": 40e-6}
NOISE, REQUESTS, RATE_RPS = 0.02, 240, 6.0
RUNS, QUICK_RUNS = 20, 2


def figures(_shared: Path, fast: bool) -> dict[str, Any]:
    """Share of told parameters whose interval holds what was planted, each run calibrated once, with its own seed."""
    deployment = deploy("llama-3-8b", "H100", limits=EngineLimits(64, 2048, max_model_len=8192))
    runs = range(1, 1 + (QUICK_RUNS if fast else RUNS))
    found = {run: _calibrated(deployment, run) for run in runs}
    row = counted({run: held(one) for run, one in found.items()})
    row["details"]["widths"] = widths([p for one in found.values() for p in one.parameters if p.determined])
    return {"calibrate_coverage": row}


def _calibrated(deployment: Deployment, run: int) -> Calibration:
    found = calibrate([planted(deployment, run)], deployment, seed=run)
    print(f"run {run}: {found.simulations} simulations", file=sys.stderr, flush=True)
    return found


def counted(runs: Mapping[int, Mapping[str, tuple[bool, bool]]]) -> dict[str, Any]:
    """The row of what ``held`` says of each run: told parameters, and apart those that were not."""
    every = [(name, *of) for found in runs.values() for name, of in found.items()]
    told = [holds for _, is_told, holds in every if is_told]
    names = dict.fromkeys(name for name, *_ in every)
    by_name = {name: [holds for one, is_told, holds in every if one == name and is_told] for name in names}
    untold = [holds for _, is_told, holds in every if not is_told]
    return {
        "value": float(np.mean(told)),
        "ci": exact_interval(sum(told), len(told)),
        "details": {
            "n": len(told),
            "of_runs": len(runs),
            "satisfied": sum(told),
            "by_parameter": {name: _share(of) for name, of in by_name.items() if of},
            "missing": {"n": len(untold), "satisfied": sum(untold)},
            "runs": {run: {name: of[1] for name, of in found.items() if of[0]} for run, found in runs.items()},
            "planted": PLANTED,
            "noise": NOISE,
            "requests": REQUESTS,
        },
    }


def widths(report: Sequence[Parameter]) -> dict[str, Any]:
    """By parameter how wide the intervals of those that were told are, and how far off their values, in the middle."""
    names = dict.fromkeys(p.name for p in report)
    return {name: _width([p for p in report if p.name == name]) for name in names}


def _width(report: Sequence[Parameter]) -> dict[str, Any]:
    ends = [_ends(p) for p in report]
    apart = [high / low for low, high in ends]
    off = [abs(p.value / _truth(p) - 1) for p in report if _truth(p) > 0]
    return {
        "n": len(report),
        "times": round(float(np.median(apart)), 3),
        "widest": round(max(apart), 3),
        "off": round(float(np.median(off)), 4) if off else None,
    }


def _share(hits: Sequence[bool]) -> dict[str, Any]:
    low, high = exact_interval(sum(hits), len(hits))
    return {"n": len(hits), "satisfied": sum(hits), "low": round(low, 3), "high": round(high, 3)}


def planted(deployment: Deployment, run: int) -> Measured:
    """A run of an engine with these parameters, measured with noise."""
    rng = np.random.default_rng(run)
    arrival_s = np.cumsum(rng.exponential(1 / RATE_RPS, REQUESTS))
    lengths = rng.integers(200, 3000, REQUESTS), rng.integers(50, 400, REQUESTS)
    workload = Workload(arrival_s - arrival_s[0], *lengths, name=f"run {run}")
    records = simulate(workload, replace(deployment, cost=apply(deployment.cost, PLANTED)))
    r = records.requests
    first_s = r.arrival_s + (r.first_token_s - r.arrival_s) * np.exp(NOISE * rng.standard_normal(REQUESTS))
    rest_s = (r.finished_s - r.first_token_s) * np.exp(NOISE * rng.standard_normal(REQUESTS))
    clients = replace(r, scheduled_s=np.full(REQUESTS, np.nan), first_token_s=first_s, finished_s=first_s + rest_s)
    return Measured(replace(records, requests=clients, steps=None), workload, "bench")


def held(found: Calibration) -> dict[str, tuple[bool, bool]]:
    """By parameter whether it was told, and whether its interval holds what was planted, else what the tables say.

    Intervals are those that the runs tell, not as widened to hold a value that was left where it was.
    """
    return {p.name: (p.determined, _holds(p)) for p in found.parameters}


def _holds(p: Parameter) -> bool:
    low, high = _ends(p)
    return bool(low <= _truth(p) <= high)


def _ends(p: Parameter) -> tuple[float, float]:
    return (p.low, p.high) if p.bare is None else p.bare


def _truth(p: Parameter) -> float:
    return PLANTED.get(p.name, p.prior)
