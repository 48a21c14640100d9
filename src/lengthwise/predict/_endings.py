"""What the last words of an output so far mean, as a few columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Endings = Callable[[Sequence[str]], "npt.NDArray[Any] | None"]
"""From texts so far to vectors [n, v]; None where nobody reads them."""

_AXES = 16


@dataclass(frozen=True)
class Axes:
    """Directions in which vectors differ most.

    Attributes:
        middle: [v] the mean vector.
        turn: [v, k] the directions.
    """

    middle: Floats
    turn: Floats

    @classmethod
    def of(cls, vectors: npt.NDArray[Any]) -> Axes:
        """Of vectors [n, v]."""
        known = vectors.astype(float)
        _, directions = np.linalg.eigh(np.cov(known.T))
        return cls(known.mean(axis=0), np.ascontiguousarray(directions[:, ::-1][:, :_AXES]))

    def beside(self, x: Floats, read: tuple[Ints, npt.NDArray[Any]] | None) -> Floats:
        """[n, m + k] columns ``x`` and the places of the vectors of some rows; 0 for the others."""
        places = np.zeros((len(x), self.turn.shape[1]))
        if read is not None:
            places[read[0]] = np.einsum("ij,jk->ik", read[1] - self.middle, self.turn)
        return np.hstack([x, places])


def read_endings(texts: Sequence[str], endings: Endings) -> tuple[Ints, npt.NDArray[Any]] | None:
    """Rows that have a text so far, and the vectors of these; None where there is none, or nobody reads them."""
    told = np.flatnonzero([bool(text) for text in texts])
    vectors = endings([texts[int(i)] for i in told]) if len(told) else None
    return None if vectors is None else (told, vectors)
