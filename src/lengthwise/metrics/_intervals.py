"""t intervals: over independent seeds, and over consecutive batches of one long run."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

BATCHES = 10
"""Few and long: long batches are nearly independent, and see the tails."""

MIN_VALUES = 400
"""Below this many values a batch would hold fewer than 40, and its mean would say little."""

_MAX_CORRELATION = 0.8


def t_quantile(level: float, degrees: int) -> float:
    """Half-width of a two-sided Student t interval in standard errors."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 0.5 + level / 2))


def over_seeds(values: Floats, level: float) -> tuple[Floats, Floats]:
    """Mean and half-width over axis 0, whose rows come from independent runs."""
    n = len(values)
    if n < 2:
        return values.mean(axis=0), np.full(values.shape[1:], np.nan)
    error = values.std(axis=0, ddof=1) / np.sqrt(n)
    return values.mean(axis=0), t_quantile(level, n - 1) * error


def over_batches(batches: Floats, centre: Floats, level: float) -> Floats:
    """Half-widths around ``centre`` from the same statistics [b, k] of consecutive batches.

    Sectioning (Asmussen and Glynn, Stochastic Simulation, 2007, III.5): the batches' spread is
    taken around the whole run's statistic, so that the bias of a quantile of a short batch
    widens the interval instead of moving it. What correlation is left between neighbours
    widens it by (1 + r) / (1 - r), r their lag-one correlation where positive: the
    autoregressive adjustment of Skart (Tafazzoli and Wilson, IIE Transactions 43, 2011).
    """
    n = len(batches)
    off = batches - centre
    variance = (off**2).sum(axis=0) / (n - 1)
    own = batches - batches.mean(axis=0)
    scale = (own**2).sum(axis=0)
    lag = (own[1:] * own[:-1]).sum(axis=0)
    r = np.clip(np.divide(lag, scale, out=np.zeros_like(lag), where=scale > 0), 0.0, _MAX_CORRELATION)
    half: Floats = t_quantile(level, n - 1) * np.sqrt(variance / n * (1 + r) / (1 - r))
    return half
