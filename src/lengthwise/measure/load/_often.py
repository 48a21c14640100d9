"""Whether something happened often, said so that one unlucky case does not decide it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

SHARE, CHANCE = 0.01, 0.05
LEAST_P99 = math.ceil(math.log(CHANCE) / math.log(1 - SHARE))
"""299: of fewer values, not even the largest is surely (95 %) beyond the 99th percentile of where they come from."""

LEAST = 2
"""One case of few requests is chance, however unlikely."""


def beyond(values: Sequence[float] | Floats, limit: float) -> dict[str, Any]:
    """How many values are above a limit, of how many, their share, and whether that is surely above 1 %.

    Surely: it is two or more, and were 1 % the truth, as many or more would come by chance in less than 5 %
    of such runs (binomial): 2 of 30, 3 of 60, 4 of 100, 16 of 1,000.
    """
    count, of = int((np.asarray(values, np.float64) > limit).sum()), len(values)
    return {
        "limit_s": limit if math.isfinite(limit) else None,
        "count": count,
        "of": of,
        "share": count / of if of else 0.0,
        "surely_often": count >= LEAST and at_least(count, of, SHARE) < CHANCE,
    }


def at_least(count: int, of: int, share: float) -> float:
    """The chance of so many cases or more, were each of them to come with this share (the binomial tail)."""
    if count <= share * of:
        return 1.0
    fewer = sum(
        math.exp(
            math.lgamma(of + 1)
            - math.lgamma(k + 1)
            - math.lgamma(of - k + 1)
            + k * math.log(share)
            + (of - k) * math.log1p(-share)
        )
        for k in range(count)
    )
    return max(0.0, 1.0 - fewer)
