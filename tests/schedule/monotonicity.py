"""How far estimated schedules are from being monotone in their variables; tests and the benchmark of ExeGPT use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lengthwise.schedule.optimizer import Performance, Variable, evaluate_grid
from lengthwise.schema.workload import Floats

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class NonMonotone:
    """How often latency and throughput fall along one variable although they should rise.

    ``latency`` and ``throughput`` are shares of the feasible points. A point counts if an earlier one, with all other
    variables equal, has a value that is higher by more than the tolerance. ``gaps`` is the share of feasible points
    that come after an infeasible one, ``points`` the number of feasible points.
    """

    variable: str
    tolerance: float
    latency: float
    throughput: float
    gaps: float
    points: int


def non_monotone(
    perf: Performance,
    variables: Sequence[Variable],
    tolerances: Sequence[float] = (0.02, 0.05, 0.10),
    *,
    latency_scale_s: float | None = None,
    throughput_scale_rps: float | None = None,
) -> tuple[NonMonotone, ...]:
    """Return a row for each variable of known direction and each tolerance; every point is evaluated.

    The tolerances are relative to the scales; None: to each point's own value. The paper uses a latency bound and the
    throughput achieved under it as scales.
    """
    grid = evaluate_grid(perf, variables)
    feasible = np.isfinite(grid.latency_s)

    def share(broken: Bools) -> float:
        return float((broken & feasible).sum() / max(1, feasible.sum()))

    def broken(values: Floats, axis: int, tolerance: float, scale: float | None) -> float:
        before = _max_before(np.where(feasible, values, -np.inf), axis)
        slack = tolerance * (np.where(feasible, values, 0.0) if scale is None else scale)
        return share(before > np.where(feasible, values, np.inf) + slack)

    rows = []
    for axis, variable in enumerate(variables):
        if variable.rising is None:
            continue
        gaps = share(_max_before(np.where(feasible, 0.0, 1.0), axis) > 0)
        for tolerance in tolerances:
            latency = broken(grid.latency_s, axis, tolerance, latency_scale_s)
            throughput = broken(grid.throughput_rps, axis, tolerance, throughput_scale_rps)
            rows.append(NonMonotone(variable.name, tolerance, latency, throughput, gaps, int(feasible.sum())))
    return tuple(rows)


def _max_before(values: Floats, axis: int) -> Floats:
    maxima = np.moveaxis(np.maximum.accumulate(values, axis=axis), axis, 0)
    return np.moveaxis(np.concatenate([np.full_like(maxima[:1], -np.inf), maxima[:-1]]), 0, axis)
