"""Intervals of a share: exact for independent trials, by resampling of clusters for dependent ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

DRAWS = 10_000
LEAST_GROUPS = 5
"""With fewer groups there is no interval: resamples of two or three of them mean next to nothing."""


def exact_interval(hits: int, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of independent trials (Clopper and Pearson, 1934): never too narrow."""
    from scipy.stats import beta

    low = float(beta.ppf(0.025, hits, n - hits + 1)) if hits else 0.0
    high = float(beta.ppf(0.975, hits + 1, n - hits)) if hits < n else 1.0
    return low, high


def share_interval(groups: Mapping[Any, Sequence[bool]], seed: int = 0) -> tuple[float, float] | None:
    """Return the 95 % interval of the share of hits by a cluster bootstrap; None where resamples do not differ.

    Members of a group, such as a sweep of loads over one deployment, share the error of their model, so complete
    groups are drawn (Davison and Hinkley 1997, 3.8). With few groups such an interval is rough, and rather too narrow.
    """
    hits, sizes = (np.array([of(groups[key]) for key in sorted(groups)]) for of in (sum, len))
    counts = np.random.default_rng(seed).multinomial(len(sizes), np.full(len(sizes), 1 / len(sizes)), DRAWS)
    low, high = np.quantile((counts @ hits) / (counts @ sizes), [0.025, 0.975])
    return (float(low), float(high)) if low < high else None
