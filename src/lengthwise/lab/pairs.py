"""Runs over seeds become estimates, alone and against the runs of others on the same requests."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lengthwise.schema.estimate import UNKNOWN, Estimate

Run = dict[str, float]
RATIOS = ("jct.mean", "jct.p50", "jct.p99")


def estimates(
    own: Sequence[Run], fcfs: Sequence[Run], oracle: Sequence[Run], level: float
) -> dict[str, Estimate]:
    """A cell's values from one run a seed; those of all three stand in the order of the seeds."""
    values = {name: _mean([run[name] for run in own], level) for name in own[0]}
    x, f, o = (_column(runs, "jct.mean") for runs in (own, fcfs, oracle))
    values["gap_closed"] = gap_closed(x, f, o, level)
    for end, runs in (("fcfs", fcfs), ("oracle", oracle)):
        for name in RATIOS:
            values[f"{name}/{end}"] = ratio(_column(own, name), _column(runs, name), level)
    return values


def gap_closed(own: npt.ArrayLike, fcfs: npt.ArrayLike, oracle: npt.ArrayLike, level: float) -> Estimate:
    """(FCFS - own) / (FCFS - oracle), a ratio of means over seeds; unknown where there is no gap.

    There is none where the interval of FCFS - oracle reaches 0 or its mean is below a millionth of FCFS'.
    """
    f, x, o = (np.asarray(v, float) for v in (fcfs, own, oracle))
    gap = _mean(f - o, level)
    least = 1e-6 * float(f.mean())
    if not gap.value > least or (gap.has_interval and not gap.low > 0):
        return UNKNOWN
    return ratio(f - x, f - o, level)


def ratio(above: npt.ArrayLike, below: npt.ArrayLike, level: float) -> Estimate:
    """mean(above) / mean(below) over paired seeds, with its linearised t interval.

    The spread is that of above - ratio x below (Cochran, Sampling Techniques, 1977, 6.4): what both share
    falls out.
    """
    a, b = np.asarray(above, float), np.asarray(below, float)
    middle = float(b.mean())
    if middle == 0:
        return UNKNOWN
    value = float(a.mean()) / middle
    return Estimate(value, _half_width(a - value * b, level) / abs(middle))


def widened(half_width: float, seeds: int, level: float, among: int) -> float:
    """The half-width at which ``among`` intervals hold together (Bonferroni); NaN with a single seed."""
    if seeds < 2:
        return math.nan
    from scipy.special import stdtrit

    alone, together = (stdtrit(seeds - 1, 1 - (1 - level) / (2 * n)) for n in (1, among))
    return half_width * float(together / alone)


def _mean(values: npt.ArrayLike, level: float) -> Estimate:
    column = np.asarray(values, float)
    return Estimate(float(column.mean()), _half_width(column, level))


def _half_width(column: npt.NDArray[np.float64], level: float) -> float:
    """NaN with a single seed."""
    if len(column) < 2:
        return math.nan
    from scipy.special import stdtrit

    error = float(column.std(ddof=1)) / math.sqrt(len(column))
    return float(stdtrit(len(column) - 1, 0.5 + level / 2)) * error


def _column(runs: Sequence[Run], name: str) -> npt.NDArray[np.float64]:
    return np.array([run[name] for run in runs])
