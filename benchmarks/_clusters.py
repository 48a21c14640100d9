"""The interval of a share over groups of which members hang together: whole groups are drawn anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

DRAWS = 10_000
LEAST_GROUPS = 5
"""Of fewer groups no interval is told: draws of two or three of them say next to nothing."""


def exact_interval(hits: int, n: int) -> tuple[float, float]:
    """The 95 % interval of a share of independent trials (Clopper and Pearson, 1934): never too narrow."""
    from scipy.stats import beta

    low = float(beta.ppf(0.025, hits, n - hits + 1)) if hits else 0.0
    high = float(beta.ppf(0.975, hits + 1, n - hits)) if hits < n else 1.0
    return low, high


def share_interval(groups: Mapping[Any, Sequence[bool]], seed: int = 0) -> tuple[float, float] | None:
    """The 95 % interval of the share of hits; None where draws do not differ, as of one group alone.

    A cluster bootstrap (Davison and Hinkley 1997, 3.8): members of a group, such as a sweep of loads over one
    deployment, share what their model is off by, so that they come and go together, however many they are. Of few
    groups such an interval is rough, and rather too narrow.
    """
    hits, sizes = (np.array([of(groups[key]) for key in sorted(groups)]) for of in (sum, len))
    often = np.random.default_rng(seed).multinomial(len(sizes), np.full(len(sizes), 1 / len(sizes)), DRAWS)
    low, high = np.quantile((often @ hits) / (often @ sizes), [0.025, 0.975])
    return (float(low), float(high)) if low < high else None
