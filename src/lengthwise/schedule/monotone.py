"""How far from monotone latency and throughput are (ExeGPT, section 7.8 and Table 5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lengthwise.schedule.branch_and_bound import Tolerances
from lengthwise.schedule.exhaustive import whole_box
from lengthwise.schedule.variables import Floats, Performance, Variable


@dataclass(frozen=True)
class NonMonotone:
    """The shares of the points of a box that break monotony along one variable.

    A point breaks it if one before it on its line, all other variables being equal, has a value that is
    higher by more than the tolerance. Points that cannot run are left out.

    Attributes:
        variable: Its name.
        tolerance: Of the point's own value, or of the scale that was given.
        latency: The share by latency.
        throughput: The share by throughput.
        gaps: The share of points that can run though one before them on the line cannot.
        points: How many can run, of which the shares are.
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
    """A row for each variable that has a direction and each tolerance, over all combinations of the others.

    Args:
        perf: Evaluates points, many at a time.
        variables: All of them; every point is evaluated.
        tolerances: Shares.
        latency_scale_s: What tolerances of latency are shares of; the paper takes a latency bound. None: the
            point's own latency.
        throughput_scale_rps: Likewise; the paper takes the throughput that was achieved.
    """
    whole = whole_box(perf, variables)
    runs = np.isfinite(whole.latency_s)
    rows = []
    for axis, variable in enumerate(variables):
        if variable.rising is None:
            continue
        gaps = _share(_highest_before(np.where(runs, 0.0, 1.0), axis) > 0, runs)
        for tolerance in tolerances:
            latency = _broken(whole.latency_s, runs, axis, tolerance, latency_scale_s)
            throughput = _broken(whole.throughput_rps, runs, axis, tolerance, throughput_scale_rps)
            rows.append(NonMonotone(variable.name, tolerance, latency, throughput, gaps, int(runs.sum())))
    return tuple(rows)


def least_tolerances(perf: Performance, variables: Sequence[Variable]) -> Tolerances:
    """The least tolerances under which branch and bound is certain, over every pair of points.

    Points that cannot run are left out; every point is evaluated.
    """
    whole = whole_box(perf, variables)
    runs = np.isfinite(whole.latency_s)
    axes = [axis for axis, variable in enumerate(variables) if variable.rising is not None]
    return Tolerances(_excess(whole.throughput_rps, runs, axes), _excess(whole.latency_s, runs, axes))


def _broken(
    values: Floats, runs: npt.NDArray[np.bool_], axis: int, tolerance: float, scale: float | None
) -> float:
    before = _highest_before(np.where(runs, values, -np.inf), axis)
    slack = tolerance * (np.where(runs, values, 0.0) if scale is None else scale)
    return _share(before > np.where(runs, values, np.inf) + slack, runs)


def _share(broken: npt.NDArray[np.bool_], runs: npt.NDArray[np.bool_]) -> float:
    return float((broken & runs).sum() / max(1, runs.sum()))


def _highest_before(values: Floats, axis: int) -> Floats:
    """The highest value before each point on its line; minus infinity where there is none."""
    before = np.full_like(values, -np.inf)
    later = [slice(None)] * values.ndim
    earlier = list(later)
    later[axis], earlier[axis] = slice(1, None), slice(None, -1)
    before[tuple(later)] = np.maximum.accumulate(values, axis=axis)[tuple(earlier)]
    return before


def _excess(values: Floats, runs: npt.NDArray[np.bool_], axes: Sequence[int]) -> float:
    """By what share some lower point's value exceeds a higher one's, at most."""
    highest = np.where(runs, values, 0.0)
    for axis in axes:
        highest = np.maximum.accumulate(highest, axis=axis)
    above = runs & (highest > values)
    if not above.any():
        return 0.0
    with np.errstate(divide="ignore"):
        return float((highest[above] / values[above] - 1).max())


__all__ = ["NonMonotone", "least_tolerances", "non_monotone"]
