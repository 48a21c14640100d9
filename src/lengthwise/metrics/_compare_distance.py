"""How far two distributions, and two columns of pairs, lie apart."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def distances(a: tuple[Floats, Ints], b: tuple[Floats, Ints]) -> tuple[float, float]:
    """Kolmogorov-Smirnov's distance, and Wasserstein's over the mean of ``b``.

    Either side is ascending values and how often each was seen.
    """
    points = np.union1d(a[0], b[0])
    gap = np.abs(_share_up_to(a, points) - _share_up_to(b, points))
    mean = float(b[0] @ b[1] / b[1].sum())
    moved = float((gap[:-1] * np.diff(points)).sum())
    return float(gap.max()), moved / mean if mean > 0 else math.nan


def _share_up_to(side: tuple[Floats, Ints], points: Floats) -> Floats:
    values, count = side
    up_to = np.concatenate([[0], np.cumsum(count)])
    share: Floats = up_to[np.searchsorted(values, points, side="right")] / up_to[-1]
    return share


def absolute_errors(a: Floats, b: Floats) -> tuple[float, float]:
    """Mean and median of |a - b| / b over the pairs that both have; NaN without any."""
    with np.errstate(invalid="ignore"):
        both = np.isfinite(a) & np.isfinite(b) & (b > 0)
    if not both.any():
        return math.nan, math.nan
    off = np.abs(a[both] - b[both]) / b[both]
    return float(off.mean()), float(np.median(off))
