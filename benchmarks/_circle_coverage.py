"""How many of a circle's held-out numbers lie within the intervals of simulations with its calibrated tables.

A number is a quantile of a metric at a load, the median of the load's repeats. Its interval is of the model's own error
(draws of what the tables say of their parts) and of sampling (blocks of simulated requests drawn anew), in logs as if
the two were independent. The headline takes errors that were told without the runs they are held against.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import _circle
import _intervals
import _widths
import numpy as np
from _circle import Run, quantiles, simulated
from _clusters import exact_interval

from lengthwise import Deployment, Status
from lengthwise.cost.model_error import DRAWS as SHOWN_DRAWS
from lengthwise.cost.model_error import LEVEL as SHOWN_LEVEL
from lengthwise.cost.model_error import perturbed_deployments
from lengthwise.metrics.columns import request_column
from lengthwise.schema.cost_tables import PartError
from lengthwise.schema.records import Records

METRICS = {name: of for name, of in _circle.METRICS.items() if name != "normalized_latency_p50"}
"""Latency a token is JCT and TPOT once more: to count it would make chance look smaller than it is."""
LEVEL, DRAWS = 0.95, 64
AIM = 0.95


@dataclass(frozen=True)
class Interval:
    """A number that was measured, what was said of it, and both ends; seconds."""

    measured_s: float
    said_s: float
    low_s: float
    high_s: float

    @property
    def is_satisfied(self) -> bool:
        """Whether the measured number lies within."""
        return self.low_s <= self.measured_s <= self.high_s


Intervals = Mapping[str, Mapping[str, Interval]]
"""By run or load, then by metric."""


def row(priced: Mapping[str, Deployment], blind: Sequence[PartError], satisfied: Sequence[Run]) -> dict[str, Any]:
    """The share of held-out numbers within their 95 % intervals, with its own exact interval, and all that made it.

    Args:
        priced: Deployments with the calibrated tables, by setting.
        blind: The tables' errors as told without the held-out runs.
        held: These runs, all repeats of their loads.
    """
    unseen = {name: replace(d, cost=replace(d.cost, errors=tuple(blind))) for name, d in priced.items()}
    told = _report(unseen, satisfied, DRAWS, LEVEL, sampling=True)
    loads = by_load(told)
    every = list(_flat(loads))
    each = _each(loads)
    shown = _report(priced, satisfied, SHOWN_DRAWS, SHOWN_LEVEL, sampling=False)
    hits, n = sum(one.is_satisfied for _, _, one in every), len(every)
    return {
        "value": round(hits / n, 4),
        "unit": "share",
        "target": AIM,
        "better": "higher",
        "ci": [round(end, 4) for end in exact_interval(hits, n)],
        "details": {
            **counted(loads),
            "of_loads": len(loads),
            "level": LEVEL,
            "draws": DRAWS,
            "by_load": _by(every, lambda load, _: load),
            "by_metric": _by(every, lambda _, metric: metric),
            "single_runs": counted(told),
            "model_alone": counted(by_load(_report(unseen, satisfied, DRAWS, LEVEL, sampling=False))),
            "errors_as_stored": counted(by_load(_report(priced, satisfied, DRAWS, LEVEL, sampling=True))),
            "as_simulate_shows": counted(by_load(shown))
            | {"level": SHOWN_LEVEL, "draws": SHOWN_DRAWS}
            | {"widths": _widths.of_each(_each(by_load(shown)), SHOWN_LEVEL)},
            "ends_apart": {load: round(_disaggregated(of), 2) for load, of in loads.items()},
            "errors": {
                "blind": {error.part: round(error.log_sd, 4) for error in blind},
                "stored": {error.part: round(error.log_sd, 4) for error in next(iter(priced.values())).cost.errors},
            },
            "each": each,
            "widths": _widths.of_each(each, LEVEL),
        },
    }


def by_load(report: Intervals) -> dict[str, dict[str, Interval]]:
    """Of each load the medians over its repeats: of what was measured, of what was said, and of both ends."""
    repeats: dict[str, list[Mapping[str, Interval]]] = {}
    for name, of in report.items():
        repeats.setdefault(name.rpartition("-")[0], []).append(of)
    return {
        load: {metric: _middle([one[metric] for one in each]) for metric in METRICS} for load, each in repeats.items()
    }


def counted(report: Intervals) -> dict[str, int]:
    """How many intervals there are, how many hold, and on which side the others missed."""
    every = [one for _, _, one in _flat(report)]
    return {
        "n": len(every),
        "satisfied": sum(one.is_satisfied for one in every),
        "below": sum(one.measured_s < one.low_s for one in every),
        "above": sum(one.measured_s > one.high_s for one in every),
    }


def of_run(deployment: Deployment, run: Run, draws: int, level: float, *, sampling: bool) -> dict[str, Interval]:
    """By metric what is said of a run's requests, by tables that are off as their errors say and by other requests."""
    records = simulated(deployment, run)
    said, measured = quantiles(records), quantiles(run.measured.records)
    off = [quantiles(simulated(one, run)) for one in perturbed_deployments(deployment, draws)] or [said]
    found = {}
    for metric in METRICS:
        ends = [_ends([of[metric] for of in off], said[metric], level)]
        if sampling:
            ends.append(_ends(_resampled(records, metric), said[metric], level))
        low, high = (math.hypot(*side) for side in zip(*ends, strict=True))
        found[metric] = Interval(
            measured[metric], said[metric], said[metric] * math.exp(-low), said[metric] * math.exp(high)
        )
    return found


def _report(
    deployments: Mapping[str, Deployment], satisfied: Sequence[Run], draws: int, level: float, *, sampling: bool
) -> dict[str, dict[str, Interval]]:
    return {run.name: of_run(deployments[run.setting], run, draws, level, sampling=sampling) for run in satisfied}


def _ends(values: Sequence[float], message: float, level: float) -> tuple[float, float]:
    """How far below and above what was said the middle ``level`` of the values reaches, in logs."""
    low, high = np.quantile(values, [0.5 - level / 2, 0.5 + level / 2], method="hazen")
    return max(0.0, math.log(message / low)), max(0.0, math.log(high / message))


def _resampled(records: Records, metric: str) -> list[float]:
    """The metric of the same requests, blocks of neighbours drawn anew."""
    column, q, _ = METRICS[metric]
    seconds = np.maximum(request_column(records.requests, column), 1e-6)
    known = np.where(records.requests.status == Status.FINISHED, seconds, np.nan)
    drawn: list[float] = _intervals.of_run(known, known, q, seed=0)[1].tolist()
    return drawn


def _middle(repeats: Sequence[Interval]) -> Interval:
    columns = zip(*((one.measured_s, one.said_s, one.low_s, one.high_s) for one in repeats), strict=True)
    return Interval(*map(statistics.median, columns))


def _flat(report: Intervals) -> Iterator[tuple[str, str, Interval]]:
    return ((name, metric, one) for name, of in report.items() for metric, one in of.items())


def _disaggregated(of: Mapping[str, Interval]) -> float:
    """How many times the lower end the upper one is, the median over metrics."""
    return statistics.median(one.high_s / one.low_s for one in of.values())


def _by(every: Sequence[tuple[str, str, Interval]], key: Callable[[str, str], str]) -> dict[str, dict[str, int]]:
    names = dict.fromkeys(key(load, metric) for load, metric, _ in every)
    groups = {name: [one for load, metric, one in every if key(load, metric) == name] for name in names}
    return {name: {"n": len(of), "satisfied": sum(one.is_satisfied for one in of)} for name, of in groups.items()}


def _each(loads: Intervals) -> dict[str, dict[str, list[float]]]:
    """What was measured, what was said, and both ends, by load and metric."""
    return {load: {metric: _numbers(one) for metric, one in of.items()} for load, of in loads.items()}


def _numbers(of: Interval) -> list[float]:
    return [float(f"{seconds:.4g}") for seconds in (of.measured_s, of.said_s, of.low_s, of.high_s)]
