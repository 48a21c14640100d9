"""What a circle tells: a row a metric, with all that made it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import _intervals
import numpy as np
from _circle import METRICS, Run, passed, quantiles, spread

from lengthwise import Status
from lengthwise.measure.calibration import Calibration
from lengthwise.metrics.columns import request_column
from lengthwise.schema.records import Records


def rows(
    prefix: str,
    of_tables: dict[str, dict[str, dict[str, float]]],
    runs: Sequence[Run],
    satisfied: Sequence[Run],
    answers: Mapping[str, Records],
) -> dict[str, dict[str, Any]]:
    """A row a metric: the median over held-out loads of the absolute error, and all that made it.

    The truth of a load is the median of its repeats: what one run of a busy machine is off by is told beside
    it. ``of_tables``: by "calibrated", "profile", "roofline", then by run, then by metric. ``answers``: by run,
    what the calibrated simulation said of it, for the interval.
    """
    floor = spread(runs)
    out = {}
    for metric, (_, _, target) in METRICS.items():
        each = {kind: {run: told[run][metric] for run in told} for kind, told in of_tables.items()}
        loads = {kind: by_load(of, satisfied, metric) for kind, of in each.items()}
        ours = [abs(error) for error in loads["calibrated"].values()]
        out[f"{prefix}.{metric}_error"] = {
            "value": round(statistics.median(ours), 4),
            "unit": "relative",
            "target": target,
            "better": "lower",
            "ci": _ends(satisfied, answers, metric, statistics.median(ours)),
            "details": {
                "range": [round(min(ours), 4), round(max(ours), 4)],  # over loads, no interval
                "median_of": {kind: round(statistics.median(map(abs, of.values())), 4) for kind, of in loads.items()},
                "of_single_runs": round(statistics.median(abs(each["calibrated"][r.name]) for r in satisfied), 4),
                "signed_by_load": {
                    load: {kind: round(loads[kind][load], 4) for kind in loads}
                    | {"repeats_spread": round(floor[load][metric], 4)}
                    for load in loads["calibrated"]
                },
                "signed_by_run": {
                    run.name: {kind: round(of[run.name], 4) for kind, of in each.items()}
                    | {"measured_s": round(quantiles(run.measured.records)[metric], 5)}
                    for run in runs
                },
            },
        }
    return out


def of_calibration(
    found: Calibration, duration_s: float, learnt: Sequence[Run], runs: Sequence[Run], more: Mapping[str, Any]
) -> dict[str, Any]:
    """The row of the calibration itself: what it took, what it found, and which runs were doubted."""
    return {
        "value": round(duration_s, 2),
        "unit": "s",
        "details": {
            "learnt_of": [run.name for run in learnt],
            "requests": sum(len(run.measured.workload) for run in learnt),
            "client_s": found.client_s,
            "parameters": [asdict(p) for p in found.parameters],
            "scores": [asdict(s) for s in found.scores],
            "notes": list(found.notes),
            "warnings": {run.name: list(run.measured.warnings) for run in runs if run.measured.warnings},
            "passed": passed(runs),
            **more,
        },
    }


def _ends(satisfied: Sequence[Run], answers: Mapping[str, Records], metric: str, value: float) -> list[float] | None:
    """The 95 % interval of a figure: repeats and blocks of requests drawn anew; None of loads measured once."""
    column, q, _ = METRICS[metric]
    loads: dict[str, list[_intervals.Repeat]] = {}
    for seed, run in enumerate(satisfied):
        both = (_known(of, column) for of in (run.measured.records, answers[run.name]))
        loads.setdefault(f"{run.setting}-{run.load}", []).append(_intervals.of_run(*both, q, seed))
    ends = _intervals.of_repeats(loads, value)
    return None if ends is None else [round(end, 4) for end in ends]


def _known(records: Records, column: str) -> Any:
    """[n] seconds of a metric; NaN of requests that did not finish."""
    seconds = request_column(records.requests, column)
    return np.where(records.requests.status == Status.FINISHED, np.maximum(seconds, 1e-6), np.nan)


def by_load(report: dict[str, float], satisfied: Sequence[Run], metric: str) -> dict[str, float]:
    """The error of each load against the median of its repeats."""
    simulated_s: dict[str, list[float]] = {}
    measured_s: dict[str, list[float]] = {}
    for run in satisfied:
        load, real = f"{run.setting}-{run.load}", quantiles(run.measured.records)[metric]
        measured_s.setdefault(load, []).append(real)
        simulated_s.setdefault(load, []).append((1 + report[run.name]) * real)
    return {load: statistics.median(simulated_s[load]) / statistics.median(measured_s[load]) - 1 for load in measured_s}
