"""Evidence that ranks are no longer even: stakes on many kinds of change, begun again and again.

While nothing changes, a request's rank u is uniform on [0, 1] and independent of those before. A bet multiplies its
stake by a density g(u), in the mean by 1. One unit is split over bets and starting times: so much of it is put down
every ``BLOCK`` requests that it lasts for ever. What it has become, staked or not yet, is then a martingale that is
never negative and begins at 1, so that it ever reaches 1 / alpha with a probability of at most alpha (Ville, 1939):
however long one looks, and wherever a change begins, a stake is there that has lost nothing before.

Bets are made before anything is seen, in terms of ranks: normal scores that are moved or spread, after the likelihood
ratio, and shares moved along a third Legendre polynomial, for skewness.
"""

from __future__ import annotations

import math
from collections import deque
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

BLOCK = 16
"""Requests from one start to the next."""
CELLS = 256
"""A bet is a constant on each so large a part of [0, 1], its mean there: it adds up to 1 exactly."""
SHIFTS = (-0.8, -0.4, -0.2, 0.2, 0.4, 0.8)
"""Standard deviations by which normal scores are moved."""
SPREADS = (0.75, 0.87, 1.15, 1.35)
"""Factors on their standard deviation."""
BENDS = (-0.5, -0.25, 0.25, 0.5)
"""Weights of the polynomial."""
SLACK = 2.0
"""Logarithm of how many times likelier another start may be than the one that is taken: late ones mix nothing in."""
BETS = len(SHIFTS) + len(SPREADS) + len(BENDS)

_MOST = 1e290


class Evidence:
    """What one unit has become, for each of some streams of ranks.

    Args:
        streams: Shape of the streams that are watched side by side.
        kept: Last ranks of which what each bet paid is kept, to tell where a change began.

    Attributes:
        seen: Ranks of each stream so far.
    """

    def __init__(self, streams: tuple[int, ...] = (), kept: int = 0) -> None:
        self.seen = 0
        self._stakes = np.zeros((*streams, BETS))
        self._paid: deque[Floats] = deque(maxlen=kept)

    def add(self, ranks: npt.ArrayLike) -> None:
        """One more rank of each stream, 0 to 1."""
        factor = _factors()[np.minimum((np.asarray(ranks) * CELLS).astype(np.int64), CELLS - 1)]
        if self.seen % BLOCK == 0:
            self._stakes += _left(self.seen // BLOCK) - _left(self.seen // BLOCK + 1)
        self._stakes = np.minimum(self._stakes * factor, _MOST)
        self._paid.append(factor)
        self.seen += 1

    @property
    def amount(self) -> Floats:
        """[streams] what became of one unit; its mean stays 1 while nothing changes."""
        return np.asarray(self._stakes.mean(axis=-1) + _left(-(-self.seen // BLOCK)))

    def length(self, stream: int) -> int:
        """How many of the last ranks of a stream are of the change: the fewest that are about as likely as any."""
        paid = np.log(np.array([factors[stream] for factors in reversed(self._paid)]))
        best = np.cumsum(paid, axis=0).max(axis=1)
        return int(np.argmax(best >= best.max() - SLACK)) + 1


def _left(blocks: int) -> float:
    """What is not staked yet after so many blocks: it falls as slowly as a logarithm grows."""
    return 1.0 / math.log(blocks + math.e)


@lru_cache(maxsize=1)
def _factors() -> Floats:
    """[cells, bets] what each bet pays there."""
    edges = np.arange(CELLS + 1) / CELLS
    columns = [
        *(_scores(edges, shift, 1.0) for shift in SHIFTS),
        *(_scores(edges, 0.0, spread) for spread in SPREADS),
        *(_bent(edges, bend) for bend in BENDS),
    ]
    made = np.column_stack([CELLS * np.diff(column) for column in columns])
    made.setflags(write=False)
    return made


def _scores(edges: Floats, shift: float, spread: float) -> Floats:
    """[edges] share of ranks below each where normal scores are ``shift + spread z``."""
    normal = NormalDist()
    inner = [normal.cdf((normal.inv_cdf(float(edge)) - shift) / spread) for edge in edges[1:-1]]
    return np.array([0.0, *inner, 1.0])


def _bent(edges: Floats, bend: float) -> Floats:
    """[edges] the same of the density ``1 + bend P3(2 u - 1)``."""
    x = 2 * edges - 1
    return np.asarray(edges + bend * (5 * x**4 - 6 * x**2 + 1) / 16)


__all__ = ["BETS", "BLOCK", "Evidence"]
