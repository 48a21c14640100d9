"""Rows of a campaign: a row per metric, the calibration, and how many medians lie within their intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import _circle
import numpy as np
from _circle import METRICS, Run, quantiles, simulated, spread
from _intervals import Interval, exact_interval, of_repeats, of_run, sides

from lengthwise import Deployment, Status
from lengthwise.cost.model_error import perturbed_deployments
from lengthwise.measure.calibration import Calibration
from lengthwise.metrics.columns import request_column
from lengthwise.schema.cost_tables import PartError
from lengthwise.schema.records import Records

COUNTED = tuple(name for name in METRICS if name != "normalized_latency_p50")
"""Latency per token follows from JCT and TPOT: counted as well it would make chance look smaller than it is."""
LEVEL, DRAWS = 0.95, 64


def rows(
    prefix: str,
    of_tables: Mapping[str, Mapping[str, Mapping[str, float]]],
    runs: Sequence[Run],
    held_out: Sequence[Run],
    answers: Mapping[str, Records],
) -> dict[str, dict[str, Any]]:
    """Return a row per metric: the median over held-out loads of the absolute error, against medians of repeats.

    ``of_tables``: errors by "calibrated", "profile", "roofline", then by run, then by metric; ``answers``: records of
    the calibrated simulation by run, for the interval.
    """
    floor, found = spread(runs), {}
    for metric, (column, q, target) in METRICS.items():
        each = {kind: {run: of[metric] for run, of in by_run.items()} for kind, by_run in of_tables.items()}
        loads = {kind: by_load(of, held_out, metric) for kind, of in each.items()}
        value = statistics.median(map(abs, loads["calibrated"].values()))
        draws: dict[str, list[Any]] = {}
        for seed, run in enumerate(held_out):
            both = (finished_seconds(of, column) for of in (run.measured.records, answers[run.name]))
            draws.setdefault(f"{run.setting}-{run.load}", []).append(of_run(*both, q, seed))
        ends = of_repeats(draws, value)
        details: dict[str, Any] = {
            "median_of": {kind: round(statistics.median(map(abs, of.values())), 4) for kind, of in loads.items()},
            "of_single_runs": round(statistics.median(abs(each["calibrated"][r.name]) for r in held_out), 4),
            "signed_by_load": {
                load: {kind: round(of[load], 4) for kind, of in loads.items()} for load in loads["calibrated"]
            },
            "signed_by_run": {run.name: {kind: round(of[run.name], 4) for kind, of in each.items()} for run in runs},
        }
        for load, of in details["signed_by_load"].items():
            of["repeats_spread"] = round(floor[load][metric], 4)
        for run in runs:
            details["signed_by_run"][run.name]["measured_s"] = round(quantiles(run.measured.records)[metric], 5)
        found[f"{prefix}.{metric}_error"] = {
            "value": round(value, 4),
            "unit": "relative",
            "target": target,
            "better": "lower",
            "ci": ends and [round(end, 4) for end in ends],
            "details": details,
        }
    return found


def by_load(errors: Mapping[str, float], held_out: Sequence[Run], metric: str) -> dict[str, float]:
    """Return the error of each load: medians of its repeats, simulated against measured."""
    seconds: dict[str, list[tuple[float, float]]] = {}
    for run in held_out:
        real = quantiles(run.measured.records)[metric]
        seconds.setdefault(f"{run.setting}-{run.load}", []).append(((1 + errors[run.name]) * real, real))
    medians = {load: [statistics.median(side) for side in zip(*of, strict=True)] for load, of in seconds.items()}
    return {load: ours / real - 1 for load, (ours, real) in medians.items()}


def finished_seconds(records: Records, column: str) -> Any:
    """Return [n] seconds of a metric; NaN of requests that did not finish."""
    seconds = np.maximum(request_column(records.requests, column), 1e-6)
    return np.where(records.requests.status == Status.FINISHED, seconds, np.nan)


def calibration_row(
    found: Calibration, duration_s: float, learnt: Sequence[Run], runs: Sequence[Run], about: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the row of the calibration: its duration, parameters and scores, and the warnings of runs."""
    details = {
        "learnt_of": [run.name for run in learnt],
        "requests": sum(len(run.measured.workload) for run in learnt),
        "client_s": found.client_s,
        "parameters": [asdict(p) for p in found.parameters],
        "scores": [asdict(s) for s in found.scores],
        "notes": list(found.notes),
        "warnings": {run.name: list(run.measured.warnings) for run in runs if run.measured.warnings},
        **about,
    }
    return {"value": round(duration_s, 2), "unit": "s", "details": details}


Intervals = Mapping[str, Mapping[str, Interval]]
"""By run or load, then by metric."""


def coverage_row(
    priced: Mapping[str, Deployment], blind: Sequence[PartError], held_out: Sequence[Run]
) -> dict[str, Any]:
    """Return the share of held-out medians within their 95 % intervals, with its own exact interval.

    An interval combines the model's own error (draws of ``blind``, the tables' errors as stated without the held-out
    runs) and sampling (blocks of simulated requests drawn again), in logs as if the two were independent.
    ``priced``: deployments with the calibrated tables, by setting.
    """
    unseen = {name: replace(d, cost=replace(d.cost, errors=tuple(blind))) for name, d in priced.items()}
    loads = medians({run.name: intervals_of(unseen[run.setting], run, DRAWS, LEVEL) for run in held_out})
    found = counted(loads)
    details = {"of_loads": len(loads), "level": LEVEL, "draws": DRAWS}
    details["ends_apart"] = {
        load: round(statistics.median(one.high_s / one.low_s for one in of.values()), 2) for load, of in loads.items()
    }
    details["each"] = {load: {name: one.rounded() for name, one in of.items()} for load, of in loads.items()}
    return {
        "value": round(found["satisfied"] / found["n"], 4),
        "unit": "share",
        "target": LEVEL,
        "better": "higher",
        "ci": [round(end, 4) for end in exact_interval(found["satisfied"], found["n"])],
        "details": found | details,
    }


def medians(intervals: Intervals) -> dict[str, dict[str, Interval]]:
    """Return for each load the medians over its repeats: of measured and predicted numbers and of both ends."""
    repeats: dict[str, list[Mapping[str, Interval]]] = {}
    for name, of in intervals.items():
        repeats.setdefault(name.rpartition("-")[0], []).append(of)

    def middle(some: Sequence[Interval]) -> Interval:
        return Interval(*map(statistics.median, zip(*some, strict=True)))

    return {load: {m: middle([one[m] for one in each]) for m in COUNTED} for load, each in repeats.items()}


def counted(intervals: Intervals) -> dict[str, int]:
    """Return the number of intervals, of those that contain the measured number, and of misses on each side."""
    return sides([one for of in intervals.values() for one in of.values()])


def intervals_of(
    deployment: Deployment, run: Run, draws: int, level: float, *, sampling: bool = True
) -> dict[str, Interval]:
    """Return by metric the prediction of a run, with intervals by the tables' errors and by other requests."""
    records = simulated(deployment, run)
    said, measured = quantiles(records), quantiles(run.measured.records)
    off = [quantiles(simulated(one, run)) for one in perturbed_deployments(deployment, draws)] or [said]

    def reach(values: Any, center: float) -> tuple[float, float]:
        low, high = np.quantile(values, [0.5 - level / 2, 0.5 + level / 2], method="hazen")
        return max(0.0, math.log(center / low)), max(0.0, math.log(high / center))

    found = {}
    for metric in COUNTED:
        reaches = [reach([of[metric] for of in off], said[metric])]
        if sampling:
            column, q, _ = _circle.METRICS[metric]
            known = finished_seconds(records, column)
            reaches.append(reach(of_run(known, known, q, seed=0)[1], said[metric]))
        low, high = (math.hypot(*side) for side in zip(*reaches, strict=True))
        ends = said[metric] * math.exp(-low), said[metric] * math.exp(high)
        found[metric] = Interval(measured[metric], said[metric], *ends)
    return found
