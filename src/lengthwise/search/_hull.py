"""A convex function below the seconds of steps, from few of their points."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def hull(step_s: Floats, slope_s: float, most_tokens: float) -> tuple[Floats, Floats]:
    """A convex function below seconds (which do not fall) over tokens: the hull of few points below them.

    Beyond the last second they rise by ``slope_s`` a token.
    """
    ends = _ends(len(step_s))
    far = max(most_tokens, 2.0 * len(step_s))
    tokens = np.append(ends.astype(np.float64), far)
    seconds = step_s[np.concatenate([[0], ends[:-1] + 1])]  # the least of each piece, at its end
    seconds = np.append(seconds, step_s[-1] + slope_s * (far - ends[-1]))
    kept: list[int] = []
    for i in range(len(tokens)):
        while len(kept) > 1 and _above(tokens, seconds, kept[-2], kept[-1], i):
            kept.pop()
        kept.append(i)
    return tokens[kept], seconds[kept]


@lru_cache(maxsize=8)
def _ends(n: int) -> npt.NDArray[np.int64]:
    """Last indices of pieces of 0..n-1: single ones at first, then pieces of 1 %."""
    far = np.geomspace(64, max(n - 1, 65), 420).astype(np.int64)
    ends = np.unique(np.concatenate([np.arange(min(n, 65)), far]))
    return np.unique(np.minimum(ends, n - 1))


def _above(x: Floats, y: Floats, a: int, b: int, c: int) -> bool:
    """Whether point b lies on or above the line from a to c."""
    return bool((y[b] - y[a]) * (x[c] - x[a]) >= (y[c] - y[a]) * (x[b] - x[a]))
