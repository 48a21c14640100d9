"""What lengths are like when some of them were cut: the estimator of Kaplan and Meier."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lengthwise.predict.distribution import TAIL_SHAPE

Floats = npt.NDArray[np.float64]

_MOST_LEVEL = 0.99


def kaplan_meier(values: npt.ArrayLike, censored: npt.ArrayLike) -> tuple[Floats, Floats]:
    """[m] distinct values that were seen to their end, and [m] the probability of at most each.

    The last probability is below 1 where the greatest values are censored: what is missing lies
    beyond all that was seen. Without censoring it is the empirical distribution (Kaplan and Meier
    1958).
    """
    x, cut = np.asarray(values, float), np.asarray(censored, bool)
    distinct, at = np.unique(x, return_inverse=True)
    ends = np.bincount(at, weights=~cut, minlength=len(distinct))
    left = len(x) - np.concatenate([[0], np.cumsum(np.bincount(at, minlength=len(distinct)))[:-1]])
    alive = np.cumprod(1 - ends / left)
    seen = ends > 0
    return distinct[seen], 1 - alive[seen]


def length_quantiles(lengths: npt.ArrayLike, censored: npt.ArrayLike, levels: Floats) -> Floats:
    """[q] quantiles of lengths, some of them cut.

    Beyond the last length that was seen to its end, if longer ones were cut, lies a Pareto tail of
    shape 3 from the greatest length on: nobody saw how long those are, and they are not left out.
    """
    seen, cdf = kaplan_meier(lengths, censored)
    reached = float(cdf[-1]) if len(cdf) else 0.0
    inside = (
        np.searchsorted(cdf, np.minimum(levels, reached) - 1e-12) if len(cdf) else np.zeros(len(levels), int)
    )
    most = float(np.max(np.asarray(lengths, float)))
    known = seen[np.minimum(inside, len(seen) - 1)] if len(seen) else np.full(len(levels), most)
    if reached >= 1 - 1e-12:
        return np.asarray(known)
    beyond = np.clip((levels - reached) / (1 - reached), 0, _MOST_LEVEL)
    tail = most * (1 - beyond) ** (-1 / TAIL_SHAPE)
    return np.where(levels > reached, tail, known)


def mean_length(lengths: npt.ArrayLike, censored: npt.ArrayLike) -> float:
    """The mean of lengths, some of them cut, with the same tail: half as much again as the greatest."""
    seen, cdf = kaplan_meier(lengths, censored)
    mass = np.diff(cdf, prepend=0.0)
    beyond = 1 - (float(cdf[-1]) if len(cdf) else 0.0)
    most = float(np.max(np.asarray(lengths, float)))
    return float(seen @ mass) + beyond * most * TAIL_SHAPE / (TAIL_SHAPE - 1)
