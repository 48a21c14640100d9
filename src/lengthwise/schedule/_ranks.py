"""Where a length stands among others, 0 to 1: even while it comes from where they do."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

WIDTH = 256
"""Lengths that are counted together, so that a rank need not count them all."""


class Ranks(Protocol):
    """What tells ranks."""

    def of(self, tokens: int, draw: float) -> float:
        """The rank of a length; ``draw``, uniform from 0 to 1, decides among equal ones."""
        ...


class KnownRanks:
    """Ranks in a distribution that is known: its probability integral transform."""

    def __init__(self, pmf: Floats) -> None:
        self._pmf = pmf
        self._below = np.concatenate([[0.0], np.cumsum(pmf)])

    def of(self, tokens: int, draw: float) -> float:
        """As ``Ranks``; what is longer than anything ranks 1."""
        if tokens >= len(self._pmf):
            return 1.0
        return float(min(self._below[tokens] + draw * self._pmf[tokens], 1.0))


class SeenRanks:
    """Ranks among all that were seen, each new length included and then counted.

    Of lengths that come in no particular order these ranks are exactly uniform and independent, whatever their
    distribution is (Vovk, Gammerman and Shafer, 2005): that the first of them are few costs power, and no truth.

    Args:
        counts: [longest + 1] how often each length was seen before, in whole requests.
    """

    def __init__(self, counts: Floats | None = None) -> None:
        known = np.zeros(0) if counts is None else counts
        rows = max(1, -(-len(known) // WIDTH))
        self._counts = np.zeros((rows, WIDTH))
        self._counts.reshape(-1)[: len(known)] = known
        self._rows = self._counts.sum(axis=1)
        self._seen = float(self._rows.sum())

    def of(self, tokens: int, draw: float) -> float:
        """As ``Ranks``; the length is counted from then on."""
        row, column = divmod(tokens, WIDTH)
        if row >= len(self._rows):
            self._grow(row + 1)
        below = float(self._rows[:row].sum()) + float(self._counts[row, :column].sum())
        self._counts[row, column] += 1
        self._rows[row] += 1
        self._seen += 1
        return (below + draw * float(self._counts[row, column])) / self._seen

    def _grow(self, rows: int) -> None:
        more = rows - len(self._rows)
        self._counts = np.concatenate([self._counts, np.zeros((more, WIDTH))])
        self._rows = np.concatenate([self._rows, np.zeros(more)])


__all__ = ["KnownRanks", "Ranks", "SeenRanks"]
