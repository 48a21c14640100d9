"""What the metrics of a laboratory are called, their units, and which way is good."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lengthwise.report._numbers import UNKNOWN, rounded
from lengthwise.schema.errors import InputError
from lengthwise.schema.estimate import Estimate
from lengthwise.schema.lab import Cell, LabTable

MORE, LESS, NEITHER = 1, -1, 0


@dataclass(frozen=True)
class Metric:
    """A metric of Cell.values as it is shown: its value times ``factor``, in ``unit``."""

    name: str
    label: str
    unit: str
    factor: float
    better: int


METRICS = (
    Metric("gap_closed", "Gap closed", "%", 100.0, MORE),
    Metric("jct.mean", "Mean JCT", "s", 1.0, LESS),
    Metric("jct.mean/fcfs", "Mean JCT over FCFS'", "", 1.0, LESS),
    Metric("jct.p50/fcfs", "Median JCT over FCFS'", "", 1.0, LESS),
    Metric("jct.p99/fcfs", "P99 JCT over FCFS'", "", 1.0, LESS),
    Metric("jct.p99/oracle", "P99 JCT over the oracle's", "", 1.0, LESS),
    Metric("jct.p50", "Median JCT", "s", 1.0, LESS),
    Metric("jct.p99", "P99 JCT", "s", 1.0, LESS),
    Metric("ttft.mean", "Mean TTFT", "s", 1.0, LESS),
    Metric("slowdown.mean", "Mean slowdown", "", 1.0, LESS),
    Metric("slowdown.p99", "P99 slowdown", "", 1.0, LESS),
    Metric("wait.max", "Longest wait", "s", 1.0, LESS),
    Metric("requests_per_s", "Requests", "/s", 1.0, MORE),
    Metric("preemptions_per_request", "Preemptions/request", "", 1.0, LESS),
    Metric("recomputed_tokens_per_request", "Recomputed tokens/request", "", 1.0, LESS),
    Metric("found_full", "Found all seats taken", "%", 100.0, NEITHER),
    Metric("served", "Served", "%", 100.0, MORE),
)
BY_NAME = {metric.name: metric for metric in METRICS}


def shown(metric: Metric, estimate: Estimate) -> tuple[str, str]:
    """A value and its half-width as text, in the metric's unit; the second is empty where it is not known."""
    if math.isnan(estimate.value):
        return UNKNOWN, ""
    return rounded(estimate.value * metric.factor, estimate.half_width * metric.factor)


def side_names(table: LabTable) -> list[tuple[str, str]]:
    """(policy, predictor) of every row, FCFS and the oracle first."""
    return list(dict.fromkeys((cell.policy, cell.predictor) for cell in table.cells))


def place_text(table: LabTable, batch: int, load: float) -> str:
    """One load and batch size in words, with the rate in requests a second."""
    rate_rps = table.at(batch, load)[0].rate_rps
    rate = "" if table.unit == "rps" else f" ({rounded(rate_rps, math.nan)[0]} requests/s)"
    return f"{table.unit.text(load)}{rate}, batch {batch}"


def cell_of(table: LabTable, side: tuple[str, str], batch: int, load: float) -> Cell:
    """The cell of a row at one load and batch size."""
    return next(c for c in table.at(batch, load) if (c.policy, c.predictor) == side)


def check_table(table: LabTable) -> None:
    """Raises InputError where there is nothing to show."""
    if not table.cells:
        raise InputError("a laboratory's report needs at least one cell; there is none")
