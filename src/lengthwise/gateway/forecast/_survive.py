"""Quantiles of what was seen lately, some of it cut: recent values count more."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lengthwise.gateway.request import Floats

Bools = npt.NDArray[np.bool_]


def recent_weights(n: int, half_life: float) -> Floats:
    """[n] weights of n values, the oldest first: after ``half_life`` more they count half."""
    return np.asarray(0.5 ** (np.arange(n - 1, -1, -1) / half_life))


def quantiles(values: Floats, cut: Bools, weight: Floats, levels: Floats, tail: float) -> Floats:
    """[k] of column k of ``values`` [n, k] (or of the one column [n, 1]) the quantile at ``levels`` [k].

    Cut values are at least what they are (Kaplan and Meier, weighted). Beyond the last that was seen to its
    end lies an exponential tail of mean ``tail`` from the greatest value on.
    """
    ends_first = np.argsort(cut, kind="stable")
    values, cut, weight = values[ends_first], cut[ends_first], weight[ends_first]
    order = np.argsort(values, axis=0, kind="stable")
    ranked, ends = np.take_along_axis(values, order, axis=0), (~cut)[order]
    w = weight[order]
    at_risk = np.cumsum(w[::-1], axis=0)[::-1]
    cdf = 1 - np.cumprod(1 - np.where(ends, w / at_risk, 0.0), axis=0)
    reached = cdf[-1]
    place = (cdf < np.minimum(levels, reached) - 1e-12).sum(axis=0)
    place = np.minimum(place, len(values) - 1)
    inside = ranked[place, np.arange(ranked.shape[1])] if ranked.shape[1] > 1 else ranked[place, 0]
    missing = np.maximum(1 - reached, 1e-12)
    beyond = np.clip((levels - reached) / missing, 0, 0.99)
    return np.asarray(np.where(levels > reached + 1e-9, ranked[-1] - np.log1p(-beyond) * tail, inside))


def reached(values: Floats, cut: Bools, at: Floats) -> Floats:
    """[m] the share of ``values`` [n] that is at most each of ``at``, cut ones by Kaplan and Meier."""
    order = np.lexsort((cut, values))
    ranked, ends = values[order], ~cut[order]
    alive = np.cumprod(1 - ends / np.arange(len(values), 0, -1))
    cdf = np.concatenate([[0.0], 1 - alive])
    return np.asarray(cdf[np.searchsorted(ranked, at, side="right")])
