"""Counts by bucket, cheap enough for every token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """How many values were at most each edge, and their sum.

    Args:
        edges: Upper edges, ascending; above the last one everything else.
    """

    __slots__ = ("counts", "edges", "sum")

    def __init__(self, edges: Sequence[float]) -> None:
        self.edges = tuple(edges)
        self.counts = [0] * (len(self.edges) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Counts a value so many times."""
        self.counts[bisect_left(self.edges, value)] += times
        self.sum += value * times

    @property
    def total(self) -> int:
        """Values that were counted."""
        return sum(self.counts)

    def buckets(self) -> list[tuple[str, float]]:
        """(upper edge, values up to it) as Prometheus tells them."""
        told, below = [], 0
        for edge, count in zip((*self.edges, float("inf")), self.counts, strict=True):
            below += count
            told.append((_edge(edge), float(below)))
        return told


def _edge(edge: float) -> str:
    return "+Inf" if edge == float("inf") else repr(float(edge))


GAPS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1,
    2.5,
    10,
)
"""Between two tokens."""
WAITS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600, 1800)
"""Until something."""
LENGTHS = tuple(2**k for k in range(18))
"""Tokens."""
LOG_RATIOS = (-3, -2, -1.5, -1, -0.7, -0.4, -0.2, -0.1, 0, 0.1, 0.2, 0.4, 0.7, 1, 1.5, 2, 3)
"""ln(predicted / actual)."""
LAGS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
"""Of the event loop."""
