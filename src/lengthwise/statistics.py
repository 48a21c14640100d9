"""Computes statistics that several packages share: t intervals, the Kaplan-Meier estimator, block resampling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from lengthwise.schema.estimate import DrawnEstimate, Estimate

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_MAX_CORRELATION = 0.8
_LARGEST = 1e300  # stands for infinity in quantiles, which interpolate
# Two-sided 95 % quantiles of Student's t with 1 to 40 degrees of freedom, so that usual intervals do not import scipy.
_T_95 = (
    12.706204736174694, 4.302652729749462, 3.1824463052837078, 2.7764451051977934, 2.5705818356363146,
    2.4469118511449786, 2.364624251592784, 2.306004135204166, 2.262157162798205, 2.228138851986274,
    2.200985160091639, 2.1788128296672284, 2.1603686564627913, 2.144786687917804, 2.131449545559776,
    2.1199052992212546, 2.1098155778333156, 2.1009220402410382, 2.0930240544083087, 2.085963447265864,
    2.0796138447276795, 2.0738730679040254, 2.0686576104190486, 2.0638985616280245, 2.0595385527532972,
    2.0555294386428735, 2.0518305164802846, 2.0484071417952454, 2.045229642132703, 2.0422724563012378,
    2.039513446396408, 2.0369333434601016, 2.0345152974493383, 2.0322445093177186, 2.030107928250343,
    2.0280940009804502, 2.0261924630291093, 2.0243941639119694, 2.022690920036761, 2.021075390306273,
)  # fmt: skip


def t_quantile(level: float, degrees: int) -> float:
    """Return the half-width of a two-sided t interval in standard errors; ``degrees`` are the degrees of freedom."""
    if level == 0.95 and degrees <= len(_T_95):
        return _T_95[degrees - 1]
    from scipy.special import stdtrit  # takes 0.2 s

    return float(stdtrit(degrees, 0.5 + level / 2))


def t_half_width(values: npt.ArrayLike, level: float) -> Any:
    """Return the half-width (of a row's shape) of the t interval of the mean of independent rows; NaN below 2 rows."""
    rows = np.asarray(values, float)
    n = len(rows)
    if n < 2:
        return np.full(rows.shape[1:], np.nan)[()]
    return t_quantile(level, n - 1) * (rows.std(axis=0, ddof=1) / np.sqrt(n))


def mean_estimate(values: npt.ArrayLike, level: float = 0.95) -> Estimate:
    """Return the mean of independent values [n] with its t interval; UNKNOWN without values."""
    column = np.asarray(values, float)
    if not len(column):
        return Estimate(math.nan)
    return Estimate(float(column.mean()), float(t_half_width(column, level)))


def bootstrap_half_width(draws: Floats, blocks: int, level: float, axis: int = -1) -> Any:
    """Return the half-width of a statistic's t interval, from its values in bootstrap samples of ``blocks`` blocks."""
    return t_quantile(level, blocks - 1) * draws.std(axis=axis, ddof=1)


def share_half_width(share: float, n: int, level: float = 0.95) -> float:
    """Return the longer side of the score interval (Wilson, 1927) of a share that ``n`` independent values have.

    It is above 0 even at a share of 0 or 1: there it is z^2 / (n + z^2), for 95 % about 3.8 / n.
    """
    z2 = NormalDist().inv_cdf(0.5 + level / 2) ** 2
    half = math.sqrt(z2 * (share * (1 - share) / n + z2 / (4 * n * n)))
    return (half + abs(0.5 - share) * z2 / n) / (1 + z2 / n)


def joint_widening(level: float, count: int, degrees: int) -> float:
    """Return the factor that widens ``count`` t intervals so that all hold together at ``level`` (Bonferroni)."""
    return t_quantile(1 - (1 - level) / count, degrees) / t_quantile(level, degrees)


def lag_one_correlation(rows: Floats) -> Floats:
    """Return the lag-one autocorrelation [k] of each column of ``rows`` [n, k]; 0 for columns without variance."""
    deviations = rows - rows.mean(axis=0)
    scale = (deviations**2).sum(axis=0)
    lag = (deviations[1:] * deviations[:-1]).sum(axis=0)
    return np.asarray(np.divide(lag, scale, out=np.zeros_like(lag), where=scale > 0))


def drawn_estimate(estimate: Estimate, values: Sequence[float], level: float = 0.9) -> DrawnEstimate:
    """Add an interval for the cost model's error to an estimate.

    ``values[0]`` is the number computed without the error, and the others are computed under draws of the error. Each
    draw is scaled by the estimate over ``values[0]``, or shifted by their difference unless ``values[0]`` is positive.
    The interval spans Hazen's quantiles of the draws and includes the estimate; its ends may be infinite. It is unknown
    if any number is NaN, ``values[0]`` is infinite, or there are no draws.
    """
    value, (base, *drawn) = estimate.value, values
    moved = [value * (one / base) if base > 0 else value + one - base for one in drawn]
    if not moved or math.isinf(base) or any(map(math.isnan, moved)):
        return DrawnEstimate(value, estimate.half_width)
    ends = np.quantile(np.clip(moved, -_LARGEST, _LARGEST), [0.5 - level / 2, 0.5 + level / 2], method="hazen")
    low, high = (math.copysign(math.inf, end) if abs(end) > 1e-3 * _LARGEST else float(end) for end in ends)
    return DrawnEstimate(value, estimate.half_width, min(low, value), max(high, value), tuple(map(float, moved)))


def batch_half_width(batches: Floats, center: Floats | float, level: float) -> Floats:
    """Return the half-widths [k] of intervals around ``center`` [k], from statistics [b, k] of consecutive batches.

    Sectioning (Asmussen and Glynn, Stochastic Simulation, 2007, III.5): the spread is measured around ``center``, the
    statistics of the complete run, so that the bias of a quantile of a short batch widens the interval and does not
    move it. A lag-one autocorrelation r > 0 of the batches (at most 0.8 is used) widens it by sqrt((1 + r) / (1 - r)),
    the autoregressive adjustment of Skart (Tafazzoli and Wilson, IIE Transactions 43, 2011).
    """
    n = len(batches)
    variance = ((batches - center) ** 2).sum(axis=0) / (n - 1)
    r = np.clip(lag_one_correlation(batches), 0.0, _MAX_CORRELATION)
    return np.asarray(t_quantile(level, n - 1) * np.sqrt(variance / n * (1 + r) / (1 - r)))


def kaplan_meier(values: npt.ArrayLike, censored: npt.ArrayLike) -> tuple[Floats, Floats]:
    """Return the distinct uncensored values [m] and the cumulative distribution function (CDF) at each of them [m].

    This is the product-limit estimate (Kaplan and Meier, 1958). A censored value is a lower bound of the true value. If
    the largest value is censored, the last probability is below 1. Without censoring, the result is the empirical CDF.
    """
    # scipy.stats.ecdf computes the same, but importing scipy.stats would block the gateway's event loop.
    x, is_censored = np.asarray(values, float), np.asarray(censored, bool)
    distinct, at = np.unique(x, return_inverse=True)
    events = np.bincount(at, weights=~is_censored, minlength=len(distinct))
    at_risk = len(x) - np.concatenate([[0], np.cumsum(np.bincount(at, minlength=len(distinct)))[:-1]])
    survival = np.cumprod(1 - events / at_risk)
    observed = events > 0
    return distinct[observed], 1 - survival[observed]


def ranked_cdf(values: Floats, censored: npt.NDArray[np.bool_], weight: Floats) -> tuple[Floats, Floats]:
    """Sort each column of ``values`` [n, k]; return the sorted columns and their Kaplan-Meier CDFs at each value.

    Among equal values, uncensored ones come first. ``censored`` [n] and ``weight`` [n] apply to all columns.
    """
    uncensored_first = np.argsort(censored, kind="stable")
    values, censored, weight = values[uncensored_first], censored[uncensored_first], weight[uncensored_first]
    order = np.argsort(values, axis=0, kind="stable")
    w = weight[order]
    at_risk = np.cumsum(w[::-1], axis=0)[::-1]
    survival = np.cumprod(1 - np.where(censored[order], 0.0, w / at_risk), axis=0)
    return np.take_along_axis(values, order, axis=0), 1 - survival


def circular_blocks(starts: Ints, length: int, n: int) -> Ints:
    """Return the row numbers [..., n] of circular block bootstrap samples (Politis and Romano, 1992).

    Each block has ``length`` consecutive rows, and the first row follows the last one. ``starts`` [..., blocks] are the
    first rows of the blocks, drawn uniformly from ``n`` rows; ``length`` times blocks must be at least ``n``.
    """
    rows = (starts[..., None] + np.arange(length)) % n
    return rows.reshape(*starts.shape[:-1], -1)[..., :n]
