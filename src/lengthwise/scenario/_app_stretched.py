"""Lengths so many times as long as others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lengthwise.schema.errors import InputError
from lengthwise.workload import Marginal


@dataclass(frozen=True)
class Stretched:
    """A distribution of lengths.

    Attributes:
        lengths: Another one.
        times: So many times as long.
    """

    lengths: Marginal
    times: float

    def quantile(self, level: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Tokens at each level."""
        return np.asarray(self.times * np.asarray(self.lengths.quantile(np.asarray(level, np.float64))))


def stretched(lengths: Marginal | None, times: float) -> Stretched:
    """So many times as long; raises InputError where no lengths are known."""
    if lengths is None:
        raise InputError(
            "true_lengths are told as times of a model's lengths; give it lengths, or take true_lengths out"
        )
    return Stretched(lengths, times)
